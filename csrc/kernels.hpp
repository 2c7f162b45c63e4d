// The kernel table of one instruction set. kernels.cpp is compiled once per instruction set, into its own table.
#pragma once

#include "jobs.hpp"

namespace bankfull {

// Positions are divided into chunks, counted from 0: softmax runs within a chunk, and chunks are merged in order.
constexpr int64_t CHUNK = 128;

// Scores per block of the vocabulary.
constexpr int64_t SCORE_BLOCK = 128;

enum Pointwise : int { SILU, GELU, GELU_TANH, RELU, SOFTPLUS, SIGMOID, SOFT_CAP, PLUS, POINTWISE };
enum Format : int { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, FORMATS };

struct FormatFacts {
    const char* name;
    int block;  // weights in a block
    int bytes;  // bytes in a block
};

// Weights repacked for GEMM in panels of sixteen outputs, see packing.hpp. The number is the bits of a code; the
// letters name the metadata: M a minimum, S an integer scale per group, K both, Z integer zero points, R one scale per
// output. PACK4F has 4-bit floats. PACK16 is dense. PACK3 and PACK2 exist with zero points and without.
enum Pack : int {
    PACK4, PACK4M, PACK4K, PACK4S, PACK4SM, PACK5, PACK5M, PACK5K, PACK6S, PACK8, PACK4Z, PACK3, PACK2, PACK4F, PACK8R, PACK16, PACKS
};

// Bytes between encoded rows, in any format: an odd number of cache lines, so that the same columns of many rows do not
// compete for the same cache sets.
constexpr int64_t encoded_stride(int64_t columns) {
#if defined(__aarch64__)
    const int64_t remainders = columns;  // see activations.hpp
#else
    const int64_t remainders = 0;
#endif
    const int64_t codes = columns + columns / 32 * 4 + columns / 16 * 4 + remainders, tiles = (columns + 31) / 32 * 64;
    return (((codes > tiles ? codes : tiles) + 63) / 64 | 1) * 64;
}

struct PackFacts {
    const char* name;
    int block;  // weights of one output in a block
    int bytes;  // bytes of a block: sixteen outputs, scales and codes
};

// Data types of multiplication, for the machine's ceilings.
enum Arithmetic : int { FLOAT32, BFLOAT16, INT8, ARITHMETICS };

struct Multiplication {
    float (*run)(int64_t rounds);  // null if the instruction set does not support it
    double operations;             // per round
};

struct Kernels {
    FormatFacts facts[FORMATS];
    PackFacts packs[PACKS];
    int64_t tile_rows;  // row count from which activations are Tiles and GEMM uses matrix tiles; 0: never
    void (*packed)(const PackedJob&, int64_t begin, int64_t end);  // units of 32 outputs, counted over all parts
    void (*encode)(const EncodeJob&, int64_t begin, int64_t end);  // rows
    Activations hadamard_form;  // format of Hadamard-transformed rows
    int64_t hadamard_min_rows;    // row count from which they are used
    void (*hadamard_rows)(const HadamardRowsJob&, int64_t begin, int64_t end);        // null if int8 gains nothing
    void (*hadamard_weights)(const HadamardWeightsJob&, int64_t begin, int64_t end);  // likewise
    void (*linear[FORMATS])(const LinearJob&, int64_t begin, int64_t end);
    void (*dequantize[FORMATS])(const uint8_t* blocks, float* out, int64_t count);
    void (*embedding[FORMATS])(const EmbeddingJob&, int64_t begin, int64_t end);
    Best (*best_of)(const float* scores, int64_t count);
    void (*block_maxima)(const float* scores, int64_t count, float* maxima);
    int64_t (*collect)(const float* scores, const float* maxima, int64_t count, float least, float* found, int64_t* places);
    void (*weigh)(const float* scores, int64_t count, float highest, float temperature, float* shaped, int64_t* weights);
    int64_t (*contenders)(const RaceKey& key, const float* scores, int64_t first, int64_t count, const Race& race, uint32_t most,
                          int32_t* places, uint32_t* drawn);
    void (*words_of)(const RaceKey& key, const int64_t* ids, int64_t count, uint32_t* words);
    void (*block_weights)(const float* scores, int64_t count, float highest, float temperature, int64_t* sums);
    void (*intake)(const IntakeJob&, int64_t begin, int64_t end);
    void (*intake_head)(const IntakeJob&, int64_t head, int64_t begin, int64_t end);
    void (*rms_norm)(const NormJob&, int64_t begin, int64_t end);
    void (*layer_norm)(const LayerNormJob&, int64_t begin, int64_t end);
    void (*pointwise[POINTWISE])(const PointwiseJob&, int64_t begin, int64_t end);
    void (*rotate)(const RotateJob&, int64_t begin, int64_t end);
    void (*attention[PAGE_TYPES])(const AttentionJob&, int64_t begin, int64_t end);  // work items
    int64_t (*attention_rows[PAGE_TYPES])(const AttentionJob&);  // maximum queries x heads of a work item
    void (*merge)(const AttentionJob&, int64_t begin, int64_t end);                  // of split queries
    void (*head_products[2])(const HeadProductsJob&, int64_t begin, int64_t end);  // float32, bfloat16
    void (*write_latents)(const LatentsJob&, int64_t begin, int64_t end);
    void (*causal_conv)(const ConvJob&, int64_t begin, int64_t end);
    void (*selective_scan)(const ScanJob&, int64_t begin, int64_t end);
    void (*linear_attention)(const LinearAttentionJob&, int64_t begin, int64_t end);
    void (*delta_rule)(const DeltaJob&, int64_t begin, int64_t end);
    void (*taylor_features)(const TaylorJob&, int64_t begin, int64_t end);
    void (*ssd_scan)(const SsdJob&, int64_t begin, int64_t end);
    void (*gated_rms_norm)(const GatedNormJob&, int64_t begin, int64_t end);
    void (*diagonal_scan)(const DiagonalJob&, int64_t begin, int64_t end);
    void (*scale_columns)(const ScaleJob&, int64_t begin, int64_t end);
    float (*read_lines[2])(const float* data, int64_t begin, int64_t end);  // cache lines; [1] prefetches
    Multiplication multiply[ARITHMETICS];
};

const Kernels& kernels_generic();
const Kernels& kernels_avx2();
const Kernels& kernels_avxvnni();
const Kernels& kernels_avx512();
const Kernels& kernels_vnni();
const Kernels& kernels_amx();
const Kernels& kernels_neon();
const Kernels& kernels_dotprod();
const Kernels& kernels_i8mm();

}  // namespace bankfull
