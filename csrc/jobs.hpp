// Kernel arguments: plain structs of addresses and sizes, shared by every instruction set.
#pragma once

#include <cstdint>

#include "sparse_mask.hpp"

namespace bankfull {

// y[row][o] = sum_k x[row][k] * weight[o][k] + bias[o], for the outputs [begin, end).
struct LinearJob {
    const float* x;
    int64_t x_stride;  // in floats
    const uint8_t* weight;
    const float* bias;  // may be null
    float* y;
    int64_t rows, outputs, inner, row_bytes;
};

// Encodings of activation rows for packed weights; activations.hpp defines the layouts.
enum class Activations : int {
    Codes,  // int8 codes and a scale per group of 32
    Tiles,  // bfloat16
    Hadamard,  // Hadamard-transformed int8 codes, one scale per row; made from one of the others, see hadamard.hpp
};

// How far activations may be rounded before GEMM.
enum class Rounding : int {
    Int8,      // to int8 codes in steps of few rows, else to bfloat16
    BFloat16,  // to bfloat16 in every step
};

struct Encoded {
    uint8_t* data;  // null: results stay float32
    int64_t stride;  // in bytes
    Activations kind;
};

struct EncodeJob {
    const float* x;
    int64_t x_stride, columns;  // stride in floats
    Encoded out;
};

// One of the weights that share a PackedJob's activations.
struct PackedPart {
    const uint8_t* weight;
    const float* bias;  // may be null
    float* y;
    int64_t y_stride;  // in floats
    int64_t outputs;
    int pack;  // Pack
    // Hadamard-transformed copy for many rows, see hadamard.hpp; may be null. If it is the weight itself, which PACK8R
    // allows, rows are not transformed either.
    const uint8_t* hadamard;

    bool plain() const { return hadamard && hadamard == weight; }
};

// y[row][o] = sum_k x[row][k] * weight[o][k] + bias[o] for each part. A unit is 32 outputs of one part; units are
// numbered across all parts, each part starting a new one. Gated: there are two parts of equal size, whose y are not
// used; out[row][o] = f(first) * second, encoded, or as floats if out.data is null and first.y is not.
struct PackedJob {
    Encoded x;
    int64_t rows, inner;
    const PackedPart* parts;
    int64_t count;
    int gate;  // a Pointwise, or -1: no gate
    Encoded out;
    Encoded hadamard;  // transformed x for parts with Hadamard weights; set by run_packed
    bool plain = false;  // whether `hadamard` is not transformed, for parts whose weights are not
};

// Hadamard-transforms rows [begin, end).
struct HadamardRowsJob {
    Encoded x, out;
    int64_t columns;
    bool plain;  // codes of the rows themselves
};

// Hadamard-transforms packed weights, for the packs [begin, end).
struct HadamardWeightsJob {
    const uint8_t* weight;
    int pack;  // Pack
    int64_t inner;
    uint8_t* hadamard;
};

// Sampling parameters of a row; neutral values (1, the vocabulary size, 1, 0) change nothing.
struct SamplingParams {
    double temperature;
    int64_t top_k;
    double top_p, min_p;
    int64_t seed, child, position;  // select the random number
    bool greedy;
};

// The key of a row's random numbers: Philox's counter and key but for the token.
struct RaceKey {
    uint32_t seed[2], position[2];  // low and high half
    uint32_t child, purpose;
};

// The race of a row so far: how scores are normalized, and the highest key.
struct Race {
    float highest, temperature, lead;
};

// Rows with individual sampling parameters. `purpose` is part of the random number's key.
struct Choice {
    const SamplingParams* params;  // one per row
    uint32_t purpose;
};

// One token per row of scores, for the rows [begin, end); -1 if no score is usable.
struct SampleJob {
    const float* scores;
    const float* maxima;  // per block of each row, see SCORE_BLOCK; null if not computed yet
    Choice choice;
    int64_t* tokens;
    int64_t vocab;
};

struct Best {
    float value;
    int64_t index;
};

// y = x / rms(x) * (weight + offset), for the rows [begin, end).
struct NormJob {
    const float* x;
    const float* delta;  // added to x first if not null; the sum goes to `joined`
    float* joined;
    const float* weight;
    float* y;  // null if only the encoded result is wanted
    int64_t columns;
    float eps, offset;
    Encoded out;
};

// y = (x - mean(x)) / deviation(x) * weight + bias, for the rows [begin, end).
struct LayerNormJob {
    const float *x, *weight, *bias;
    float* y;
    int64_t columns;
    float eps;
};

// y = f(x), or f(x) * factor, for the elements [begin, end).
struct PointwiseJob {
    const float* x;
    const float* factor;  // may be null
    float* y;
    float parameter;
};

// RoPE on the first 2 * half dimensions of every head, for the tokens [begin, end).
struct RotateJob {
    const float *x, *cos, *sin;
    float* y;
    int64_t heads, size, half;
};

// cos and sin of position * frequency, times a scale, for the tokens [begin, end).
struct AnglesJob {
    const int64_t* positions;
    const float* frequencies;
    float *cos, *sin;
    int64_t half;
    float scale;
};

// Rows of a quantized table as floats, for the tokens [begin, end).
struct EmbeddingJob {
    const int64_t* ids;
    const uint8_t* table;
    float* y;
    int64_t count, columns, row_bytes;
    float scale;
};

enum PageType : int { PAGES_F32, PAGES_BF16, PAGES_INT8, PAGES_FP8, PAGES_INT4, PAGE_TYPES };

// Bytes of what strides count: a number, or a pair of int4 codes.
constexpr int64_t number_bytes(PageType type) { return type == PAGES_F32 ? 4 : type == PAGES_BF16 ? 2 : 1; }
constexpr bool has_scales(PageType type) { return type >= PAGES_INT8; }

// Numbers of a head that share an int4 scale; heads are multiples of 8.
constexpr int64_t int4_group(int64_t size) { return size % 32 == 0 ? 32 : size % 16 == 0 ? 16 : 8; }

// Keys or values in their pages; a head's elements are contiguous. int8 and fp8 codes have one float scale per token and
// head; int4 codes lie in pairs, the lower half first, with one bfloat16 scale per group. Strides are in elements, those
// of scales in scales.
struct Pages {
    uint8_t* data;
    int64_t frame, token, head;
    float* scales;  // null: pages hold floats. Of int4 codes: bfloat16
    int64_t scale_frame, scale_token, scale_head;
};

// Queries, keys and values of new tokens before attention. Keys and values go to their pages. Token strides are in
// floats.
struct IntakeJob {
    const float *q, *k, *v;  // v may be null
    int64_t q_token, k_token, v_token;
    const float *cos, *sin;
    float* turned;  // queries; may be q itself
    int64_t turned_token;
    Pages k_pages, v_pages;
    const int64_t* slots;  // page * page_tokens + offset, below `places`
    int64_t places, page_tokens, heads, kv_heads, size, values, half;  // half 0: no RoPE
    PageType type;

    int64_t all_heads() const { return heads + (v ? 2 : 1) * kv_heads; }
};

// Queries [first, first + queries) of a sequence and all query heads of one KV head, over chunks of its keys. In a tree of
// drafts, queries share an item only for chunks before the tree: from there on, each has its own path of keys.
struct AttentionItem {
    int64_t sequence, kv_head, first, queries, chunk_begin, chunk_end;
    int64_t partial;  // offset of its chunks' partial results, in floats; -1: it owns all chunks and finishes its rows
};

// A key that is here: its page's frame, and its token in the page.
struct HeldKey {
    int32_t frame, token;
};

struct AttentionJob {
    const float* q;
    float* y;
    Pages k, v;
    const int64_t *q_start, *kv_len, *table;
    const uint64_t* ancestors;  // per token: which new tokens of its sequence it sees; 0: no tree. Null: no trees at all
    int64_t table_stride, page_tokens, heads, kv_heads, size, values;
    int64_t q_token;  // in floats
    Encoded out;  // if data is set, results are encoded there and y is not written
    int64_t window;  // 0: none
    SparseMask mask;  // instead of a window
    int64_t block;   // tokens of a block, aligned to position 0, that see each other in both directions; 0: causal
    float scale, cap;  // cap 0: none
    const float* sinks;  // per head, one more logit in the denominator of its softmax; may be null
    const AttentionItem *items, *items_end;
    const AttentionItem* split;  // the unsplit form of what was split into several items
    float* partials;
    bool ahead;  // kernels may prefetch the next sequence's keys and values

    // Partial attention (attention_held.hpp): `kv_len`, `table` and all positions count only the keys that are here. Each
    // head's values in y are followed by their log-sum-exp; rows that see no key are not written.
    const int64_t *begins, *ends;  // per token: what it sees, [begin, end). Null ends: all keys are here; null begins: from 0
    const uint64_t* paths;         // per token: its ancestors that are here, in place of `ancestors`; may be null
    const HeldKey* listed;         // the keys that each token sees one by one, instead of runs of pages; may be null
    const int64_t* list_start;     // per token: the place in `listed` of its first key
};

// y[token][head] = weight[head] x[token][head], then the 2 * half numbers behind the columns of x, rotated. Strides of
// rows are in floats, of the weight in its numbers; one of w_column and w_output is 1.
struct HeadProductsJob {
    const float* x;
    const uint8_t* weight;
    float* y;
    const float *cos, *sin;  // (tokens, half); unused if half is 0
    int64_t tokens, heads, columns, outputs, half;
    int64_t x_token, x_head, y_token, y_head, w_head, w_column, w_output;
};

// The RMS norm of each row's first `rank` numbers and the rotated 2 * half numbers behind them, into the rows' pages.
struct LatentsJob {
    const float *x, *weight, *cos, *sin;
    Pages pages;
    PageType type;
    const int64_t* slots;
    int64_t x_token, rank, half, page_tokens;
    float eps;
};

// Slots of the sequences' recurrent states; as RecurrentMeta.
struct RecurrentPlan {
    const int64_t *q_start, *kept, *read, *write;
    int64_t sequences, write_stride, channels;
};

struct ConvJob {
    RecurrentPlan plan;
    const float *x, *weight;
    const float* bias;  // may be null
    float *state, *y;
    int64_t width, x_token;  // token stride of x in floats
    bool silu;               // of the result
};

// plan.channels is the number of heads. Token strides are in floats.
struct SsdJob {
    RecurrentPlan plan;
    const float *x, *dt, *a, *b, *c, *d, *bias;
    float *state, *y;
    int64_t size, n, groups, x_token, dt_token, b_token, c_token;
    float low, high;
};

struct GatedNormJob {
    const float *x, *gate, *weight;
    float* y;
    int64_t columns, groups, gate_token;
    float eps;
    bool before;
};

struct DiagonalJob {
    RecurrentPlan plan;
    const float *x, *decay, *out, *d;
    float *state, *y;
    int64_t pairs, x_token;
};

struct ScaleJob {
    const float *x, *factors;
    float* y;
    int64_t columns, x_token;
};

struct GatherJob {
    const float* x;
    const int32_t* columns;  // the column of x that each column of y is
    float* y;
    int64_t count, x_token;  // columns of y; floats between rows of x
};

struct ScanJob {
    RecurrentPlan plan;
    const float *x, *delta, *a, *b, *c, *d;
    float *state, *y;
    int64_t size, b_token, c_token;  // token strides of b and c in floats
};

// Matrices (key, value) per head; plan.channels is the number of heads. Token strides are in floats.
struct LinearAttentionJob {
    RecurrentPlan plan;
    const float *q, *k, *v, *slopes;
    float *state, *y;
    float* normalizer;  // may be null
    int64_t key, value, q_token, k_token, v_token;
};

struct DeltaJob {
    RecurrentPlan plan;
    const float *q, *k, *v, *a, *b, *rate, *shift;
    float *state, *y;
    int64_t key_heads, key, value, q_token, k_token, v_token, a_token, b_token;
};

// Features of the heads of tokens; single = d^(-1/4), pair = (2 d)^(-1/2).
struct TaylorJob {
    const float* x;
    float* y;
    int64_t heads, size, x_token;  // token stride in floats
    float single, pair;
};

}  // namespace bankfull
