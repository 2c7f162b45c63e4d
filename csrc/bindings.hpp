// The parts of the Python module that have a file of their own.
#pragma once

#include <nanobind/nanobind.h>

void bind_ceilings(nanobind::module_& m);
void bind_packed(nanobind::module_& m);
void bind_tape(nanobind::module_& m);
