// Parts of the Python module with their own file.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <tuple>

#include "sparse_mask.hpp"

// window (0: no mask), dilation, stride, global tokens, columns, aligned
using MaskTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, bool>;

inline bankfull::SparseMask mask_of(const MaskTuple& mask) {
    return {std::get<0>(mask), std::get<1>(mask), std::get<2>(mask), std::get<3>(mask), std::get<4>(mask), std::get<5>(mask)};
}

void bind_ceilings(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_latent(nanobind::module_& m);
void bind_lookup(nanobind::module_& m);
void bind_packed(nanobind::module_& m);
void bind_state_spaces(nanobind::module_& m);
void bind_tape(nanobind::module_& m);
