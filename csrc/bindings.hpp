// Parts of the Python module with their own file.
#pragma once

#include <nanobind/nanobind.h>

void bind_ceilings(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);
void bind_packed(nanobind::module_& m);
void bind_state_spaces(nanobind::module_& m);
void bind_tape(nanobind::module_& m);
