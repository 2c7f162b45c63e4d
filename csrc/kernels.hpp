// What one instruction set offers: a table of kernels. Each instruction set compiles kernels.cpp once into its own table.
#pragma once

#include "jobs.hpp"

namespace bankfull {

// Positions are cut into chunks, counted from 0: softmax runs inside a chunk, and chunks are merged in order.
constexpr int64_t CHUNK = 128;

enum PageType : int { PAGES_F32, PAGES_BF16, PAGE_TYPES };
enum Pointwise : int { SILU, GELU_TANH, RELU, SOFTPLUS, SOFT_CAP, POINTWISE };
enum Format : int { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, FORMATS };

struct FormatFacts {
    const char* name;
    int block;  // weights in a block
    int bytes;  // bytes in a block
};

struct Kernels {
    FormatFacts facts[FORMATS];
    void (*linear[FORMATS])(const LinearJob&, int64_t begin, int64_t end);
    void (*dequantize[FORMATS])(const uint8_t* blocks, float* out, int64_t count);
    void (*rms_norm)(const NormJob&, int64_t begin, int64_t end);
    void (*layer_norm)(const LayerNormJob&, int64_t begin, int64_t end);
    void (*pointwise[POINTWISE])(const PointwiseJob&, int64_t begin, int64_t end);
    void (*rotate)(const RotateJob&, int64_t begin, int64_t end);
    void (*attention[PAGE_TYPES])(const AttentionJob&, int64_t begin, int64_t end);  // items
    void (*merge)(const AttentionJob&, int64_t begin, int64_t end);                  // of `split`
    void (*causal_conv)(const ConvJob&, int64_t begin, int64_t end);
    void (*selective_scan)(const ScanJob&, int64_t begin, int64_t end);
};

const Kernels& kernels_generic();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

}  // namespace bankfull
