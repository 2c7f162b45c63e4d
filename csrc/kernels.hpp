// What one instruction set offers: a table of kernels. Each instruction set compiles kernels.cpp once into its own table.
#pragma once

#include "jobs.hpp"

namespace bankfull {

// Positions are cut into chunks, counted from 0: softmax runs inside a chunk, and chunks are merged in order.
constexpr int64_t CHUNK = 128;

// Scores of a vocabulary are looked at in blocks of so many.
constexpr int64_t SCORE_BLOCK = 128;

enum Pointwise : int { SILU, GELU, GELU_TANH, RELU, SOFTPLUS, SOFT_CAP, PLUS, POINTWISE };
enum Format : int { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, FORMATS };

struct FormatFacts {
    const char* name;
    int block;  // weights in a block
    int bytes;  // bytes in a block
};

// Weights repacked for products: sixteen outputs side by side, see packing.hpp. The number is the bits of a code; the
// letters say what goes with the codes: M a minimum, S an integer scale for each group, K is both. PACK16 is dense.
enum Pack : int { PACK4, PACK4M, PACK4K, PACK4S, PACK4SM, PACK5, PACK5M, PACK5K, PACK6S, PACK8, PACK16, PACKS };

// Bytes from one encoded row to the next, whichever form it has: an odd number of lines, so that the same columns of
// many rows do not compete for the same places of a cache.
constexpr int64_t encoded_stride(int64_t columns) {
#if defined(__aarch64__)
    const int64_t rests = columns;  // see activations.hpp
#else
    const int64_t rests = 0;
#endif
    const int64_t codes = columns + columns / 32 * 4 + columns / 16 * 4 + rests, tiles = (columns + 31) / 32 * 64;
    return (((codes > tiles ? codes : tiles) + 63) / 64 | 1) * 64;
}

struct PackFacts {
    const char* name;
    int block;  // weights of one output in a block
    int bytes;  // bytes of a block: sixteen outputs, scales and codes
};

// How numbers are multiplied, for the machine's ceilings.
enum Arithmetic : int { FLOAT32, BFLOAT16, INT8, ARITHMETICS };

struct Multiplication {
    float (*run)(int64_t rounds);  // null where the instruction set has no such products
    double operations;             // of a round
};

struct Kernels {
    FormatFacts facts[FORMATS];
    PackFacts packs[PACKS];
    int64_t tile_rows;  // from so many rows on, activations are Tiles and the products run in tiles; 0: never
    void (*packed)(const PackedJob&, int64_t begin, int64_t end);  // units of 32 outputs, counted over all parts
    void (*encode)(const EncodeJob&, int64_t begin, int64_t end);  // rows
    Activations mixed_of;  // the form of rows that are mixed
    int64_t mixed_rows;    // from so many rows on
    void (*mix_rows)(const MixRowsJob&, int64_t begin, int64_t end);        // null where int8 has no gain
    void (*mix_weights)(const MixWeightsJob&, int64_t begin, int64_t end);  // the same
    void (*linear[FORMATS])(const LinearJob&, int64_t begin, int64_t end);
    void (*dequantize[FORMATS])(const uint8_t* blocks, float* out, int64_t count);
    void (*embedding[FORMATS])(const EmbeddingJob&, int64_t begin, int64_t end);
    Best (*best_of)(const float* scores, int64_t count);
    void (*block_maxima)(const float* scores, int64_t count, float* maxima);
    int64_t (*collect)(const float* scores, const float* maxima, int64_t count, float least, float* found, int64_t* places);
    void (*weigh)(const float* scores, int64_t count, float highest, float temperature, float* shaped, int64_t* weights);
    void (*block_weights)(const float* scores, int64_t count, float highest, float temperature, int64_t* sums);
    void (*intake)(const IntakeJob&, int64_t begin, int64_t end);
    void (*intake_head)(const IntakeJob&, int64_t head, int64_t begin, int64_t end);
    void (*rms_norm)(const NormJob&, int64_t begin, int64_t end);
    void (*layer_norm)(const LayerNormJob&, int64_t begin, int64_t end);
    void (*pointwise[POINTWISE])(const PointwiseJob&, int64_t begin, int64_t end);
    void (*rotate)(const RotateJob&, int64_t begin, int64_t end);
    void (*attention[PAGE_TYPES])(const AttentionJob&, int64_t begin, int64_t end);  // items
    int64_t (*attention_rows[PAGE_TYPES])(const AttentionJob&);  // queries x heads of an item, at most
    void (*merge)(const AttentionJob&, int64_t begin, int64_t end);                  // of `split`
    void (*causal_conv)(const ConvJob&, int64_t begin, int64_t end);
    void (*selective_scan)(const ScanJob&, int64_t begin, int64_t end);
    float (*read_lines[2])(const float* data, int64_t begin, int64_t end);  // of 64 bytes; [1] asks for them ahead
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
