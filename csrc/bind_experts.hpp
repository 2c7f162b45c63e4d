// Arguments of the experts' kernels from Python, checked.
#pragma once

#include <stdexcept>
#include <tuple>

#include "experts.hpp"

namespace bankfull {

// experts, per_token, sigmoid, renormalize, scale, groups, groups_kept, group_best
using RoutingTuple = std::tuple<int64_t, int64_t, bool, bool, float, int64_t, int64_t, int64_t>;

inline RouteJob routing_of(const RoutingTuple& rule) {
    const auto [experts, per_token, sigmoid, renormalize, scale, groups, groups_kept, group_best] = rule;
    const bool fits = experts > 0 && groups > 0 && experts % groups == 0 && groups_kept > 0 && groups_kept <= groups &&
                      per_token > 0 && per_token <= groups_kept * (experts / groups) && group_best >= 1 && group_best <= 2;
    if (!fits) throw std::invalid_argument("route: impossible numbers of experts or groups");
    return {nullptr, nullptr, nullptr, nullptr, 0, experts, per_token, groups, groups_kept, group_best, sigmoid, renormalize,
            scale};
}

inline int function_of_experts(int function) {
    if (function != SILU && function != GELU && function != GELU_TANH && function != RELU && function != CLAMPED_SWIGLU)
        throw std::invalid_argument("experts: unknown activation");
    return function;
}

}  // namespace bankfull
