// What one instruction set offers: a table of kernels. Each instruction set compiles kernels.cpp once into its own table.
#pragma once

#include <cstdint>

namespace bankfull {

enum Format : int { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, FORMATS };

struct FormatFacts {
    const char* name;
    int block;  // weights in a block
    int bytes;  // bytes in a block
};

// y[row][o] = sum_k x[row][k] * weight[o][k] + bias[o], for the outputs [begin, end).
struct LinearJob {
    const float* x;
    const uint8_t* weight;
    const float* bias;  // may be null
    float* y;
    int64_t rows, outputs, inner, row_bytes;
};

// y = x / rms(x) * (weight + offset), for the rows [begin, end).
struct NormJob {
    const float* x;
    const float* weight;
    float* y;
    int64_t columns;
    float eps, offset;
};

struct Kernels {
    FormatFacts facts[FORMATS];
    void (*linear[FORMATS])(const LinearJob&, int64_t begin, int64_t end);
    void (*dequantize[FORMATS])(const uint8_t* blocks, float* out, int64_t count);
    void (*rms_norm)(const NormJob&, int64_t begin, int64_t end);
};

const Kernels& kernels_generic();
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();

}  // namespace bankfull
