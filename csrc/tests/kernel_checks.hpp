// The checks of kernels_test: each draws operands of a random shape, runs an operation and compares with plain loops.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "operands.hpp"
#include "hadamard.hpp"
#include "operations.hpp"

namespace checks {

void check_formats(Random& random);
void check_groups(Random& random);
void check_linear(Random& random);
void check_embedding(Random& random);
void check_encode(Random& random);
void check_packed_linear(Random& random);
void check_hadamard_linear(Random& random);
void check_best(Random& random);
void check_norms(Random& random);
void check_pointwise(Random& random);
void check_rotate(Random& random);
void check_intake(Random& random);
void check_joined_intake(Random& random);
void check_write(Random& random);
void check_attention_over_pages(Random& random);
void check_head_products(Random& random);
void check_latents(Random& random);
void check_conv(Random& random);
void check_scan(Random& random);
void check_ssd(Random& random);
void check_diagonal(Random& random);
void check_gated_norm(Random& random);
void check_scale(Random& random);
void check_gather(Random& random);

constexpr float INFINITE = std::numeric_limits<float>::infinity(), NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
constexpr double FINE = 4e-6;  // relative to the summed magnitudes: a thousand terms in sixteen lanes
constexpr double BFLOAT = 0x1p-8;

// A bias, or none.
inline Array<float> maybe_bias(Random& random, int64_t count) { return normals(random, random.one_in(2) ? count : 0); }
inline const float* address_of(const Array<float>& maybe) { return maybe.size() ? maybe.data() : nullptr; }

// `count` distinct integers below `most`.
inline std::vector<int64_t> distinct(Random& random, int64_t count, int64_t most) {
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < most; ++i) numbers.push_back(i);
    for (int64_t i = 0; i < count; ++i) std::swap(numbers[size_t(i)], numbers[size_t(random.between(i, most - 1))]);
    numbers.resize(size_t(count));
    return numbers;
}

// A Pointwise function in double precision.
inline double function_of(int kind, double x, double parameter) {
    switch (kind) {
        case SILU: return x / (1 + std::exp(-x));
        case GELU: return 0.5 * x * std::erfc(-0.70710678118654752 * x);
        case GELU_TANH: return x / (1 + std::exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
        case RELU: return x > 0 ? x : 0;
        case SIGMOID: return 1 / (1 + std::exp(-x));
        case SOFTPLUS: return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
        case SOFT_CAP: return parameter * std::tanh(x / parameter);
        default: return x;
    }
}

}  // namespace checks
