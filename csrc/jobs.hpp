// What kernels are told: plain records of addresses and sizes, shared by every instruction set.
#pragma once

#include <cstdint>

namespace bankfull {

// y[row][o] = sum_k x[row][k] * weight[o][k] + bias[o], for the outputs [begin, end).
struct LinearJob {
    const float* x;
    int64_t x_stride;  // floats from one row to the next
    const uint8_t* weight;
    const float* bias;  // may be null
    float* y;
    int64_t rows, outputs, inner, row_bytes;
};

// Rows of activations in the form that packed weights are multiplied with; activations.hpp says how they lie.
enum class Activations : int {
    Codes,  // int8 codes and a scale for each group of 32
    Tiles,  // bfloat16
    Mixed,  // int8 codes of mixed columns and a scale for each row; made of one of the others, see mixing.hpp
};

// How far a model's activations may be rounded on their way into a product.
enum class Rounding : int {
    Int8,      // to codes in steps of few rows, to bfloat16 in others
    BFloat16,  // to bfloat16 in every step
};

struct Encoded {
    uint8_t* data;  // null: results stay float32
    int64_t stride;  // bytes from one row to the next
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
    int64_t y_stride;  // floats from one row to the next
    int64_t outputs;
    int pack;  // Pack
    const uint8_t* mixed;  // a second copy for many rows, see mixing.hpp; null: there is none
};

// y[row][o] = sum_k x[row][k] * weight[o][k] + bias[o] for each part. A unit is 32 outputs of one part; the units of all
// parts are counted in a row, each part beginning a new one. Gated: there are two parts of equal size, whose y are not
// used; out[row][o] = f(first) * second, encoded, or as floats where out.data is null and first.y is not.
struct PackedJob {
    Encoded x;
    int64_t rows, inner;
    const PackedPart* parts;
    int64_t count;
    int gate;  // a Pointwise, or -1: no gate
    Encoded out;
    Encoded mixed;  // x once more, for the parts that have mixed weights; run_packed makes it
};

// Rows [begin, end) become Mixed.
struct MixRowsJob {
    Encoded x, out;
    int64_t columns;
};

// Packed weights become mixed ones, for the packs [begin, end).
struct MixWeightsJob {
    const uint8_t* weight;
    int pack;  // Pack
    int64_t inner;
    uint8_t* mixed;
};

// What a row asks of its sampler: neutral values change nothing (1, the vocabulary, 1, 0).
struct SampleWish {
    double temperature;
    int64_t top_k;
    double top_p, min_p;
    int64_t seed, child, position;  // which random number
    bool greedy;
};

// Rows that choose their tokens each in its own way. `purpose` is a part of which random number.
struct Choice {
    const SampleWish* wishes;  // one for each row
    uint32_t purpose;
};

// One token per row of scores, for the rows [begin, end); -1 where no score is usable.
struct SampleJob {
    const float* scores;
    const float* maxima;  // of the blocks of each row, see SCORE_BLOCK; null where they are not known yet
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
    const float* delta;  // joins x first, if there is one; the sum goes to `joined`
    float* joined;
    const float* weight;
    float* y;  // null where the result is only wanted encoded
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

// The first 2 * half dimensions of every head are turned, for the tokens [begin, end).
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

// Rows of a table in blocks, as floats, for the tokens [begin, end).
struct EmbeddingJob {
    const int64_t* ids;
    const uint8_t* table;
    float* y;
    int64_t count, columns, row_bytes;
    float scale;
};

enum PageType : int { PAGES_F32, PAGES_BF16, PAGES_INT8, PAGE_TYPES };

constexpr int64_t number_bytes(PageType type) { return type == PAGES_F32 ? 4 : type == PAGES_BF16 ? 2 : 1; }

// Keys or values in their pages; a head's numbers lie side by side. Where they are int8 codes, each head of a token has
// a scale. Strides are counted in numbers, those of scales in floats.
struct Pages {
    uint8_t* data;
    int64_t frame, token, head;
    float* scales;  // null: the numbers are what they say
    int64_t scale_frame, scale_token, scale_head;
};

// Queries, keys and values of new tokens on their way into attention. Keys and values go to their pages. Token strides
// are in floats.
struct IntakeJob {
    const float *q, *k, *v;  // v may be null
    int64_t q_token, k_token, v_token;
    const float *cos, *sin;
    float* turned;  // queries; may be q itself
    int64_t turned_token;
    Pages k_pages, v_pages;
    const int64_t* slots;  // page * page_tokens + offset, below `places`
    int64_t places, page_tokens, heads, kv_heads, size, values, half;  // half 0: nothing is turned
    PageType type;

    int64_t all_heads() const { return heads + (v ? 2 : 1) * kv_heads; }
};

// Queries [first, first + queries) of a sequence and all the heads that share one key head, over chunks of its keys.
struct AttentionItem {
    int64_t sequence, kv_head, first, queries, chunk_begin, chunk_end;
    int64_t partial;  // where its chunks' partial results go, in floats; -1: it owns all chunks and finishes the rows
};

struct AttentionJob {
    const float* q;
    float* y;
    Pages k, v;
    const int64_t *q_start, *kv_len, *table;
    int64_t table_stride, page_tokens, heads, kv_heads, size, values;
    int64_t q_token;  // floats from one token's queries to the next
    Encoded out;  // with data: results go there, encoded, and y is not written
    int64_t window;  // 0: none
    float scale, cap;  // cap 0: none
    const AttentionItem *items, *items_end;
    const AttentionItem* split;  // the whole of what was cut into several items
    float* partials;
    bool ahead;  // kernels may ask for the next sequence's keys and values while they work on one
};

// Where sequences' recurrent states lie; as RecurrentMeta.
struct RecurrentPlan {
    const int64_t *q_start, *kept, *read, *write;
    int64_t sequences, write_stride, channels;
};

struct ConvJob {
    RecurrentPlan plan;
    const float *x, *weight;
    const float* bias;  // may be null
    float *state, *y;
    int64_t width;
};

struct ScanJob {
    RecurrentPlan plan;
    const float *x, *delta, *a, *b, *c, *d;
    float *state, *y;
    int64_t size, b_token, c_token;  // floats from one token of b and c to the next
};

}  // namespace bankfull
