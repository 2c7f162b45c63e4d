// Parts of the Python module with their own file.
#pragma once

#include <nanobind/nanobind.h>

void bind_ceilings(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);
void bind_packed(nanobind::module_& m);
void bind_tape(nanobind::module_& m);
