// Mixtures of experts: routing, and the gated feed-forward layers of the chosen experts.
#pragma once

#include "kernels.hpp"

namespace bankfull {

// As RoutingRule. `bias` is added to the scores for the choice only; may be null.
struct RouteJob {
    const float* logits;
    const float* bias;
    float* weights;   // (tokens, per_token)
    int32_t* chosen;  // (tokens, per_token)
    int64_t tokens, experts, per_token, groups, groups_kept, group_best;
    bool sigmoid, renormalize;
    float scale;
};

// Stacked matrices of all experts. `kind`: a Pack, or a Format where activations stay float32.
struct ExpertMatrix {
    const uint8_t* data;
    const float* bias;  // (experts, outputs); may be null
    int64_t bytes;      // of one expert
    int kind;
};

constexpr int CLAMPED_SWIGLU = POINTWISE;  // gpt-oss's gate

// y[token] = sum over the token's experts of weight * down(f(gate(x)) * up(x)), in the order of `chosen`.
struct ExpertsJob {
    const float* x;  // (tokens, hidden); only read if `encoded` is null
    Encoded encoded;  // the same rows encoded; null where activations stay float32
    const int32_t* chosen;
    const float* weights;
    float* y;
    int64_t tokens, per_token, experts, hidden, inner;
    ExpertMatrix gate, up, down;
    int function;  // SILU, GELU, GELU_TANH, RELU or CLAMPED_SWIGLU
};

void run_route(const RouteJob& job);
void run_experts(const ExpertsJob& job);
// y = x + sigmoid(gate) * delta, with one gate per token.
void run_add_gated(const float* x, const float* delta, const float* gate, float* y, int64_t tokens, int64_t columns);

}  // namespace bankfull
