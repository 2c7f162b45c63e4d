// Shared by few and many rows in tiles: tile shapes and layouts, rounding, queries, addresses of keys and values.
//
// Included inside attention_tiles.

constexpr int64_t SIDE = 16;     // rows of a tile, and its columns of 32 bits
constexpr int64_t WIDE = 32;     // bfloat16 in a row of a tile
constexpr int64_t LINE = 64;     // bytes in a row of a tile
constexpr int64_t TILE = 1024;   // bytes of a tile
constexpr int64_t ALIAS = 4096;  // addresses that differ by multiples of it look alike to the load unit
constexpr int64_t BLOCKS = CHUNK / WIDE;
constexpr int64_t FEW_ROWS = 16;  // up to which transposing scores is cheaper than transposing values
constexpr int64_t MANY_ROWS = 384;
constexpr float LARGEST_SCALE = 0x1p120f;  // whose products with codes are always finite in bfloat16
constexpr float LOG2_OF_E = 0x1.715476p0f, LOG_OF_2 = 0x1.62e430p-1f;

// Configuration for LDTILECFG. In static memory: the compiler does not know that the instruction reads it.
struct Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
alignas(64) static const Shapes SHAPES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Nor does it know that a tile load reads memory: earlier stores must be complete.
static inline void settle_memory() { asm volatile("" ::: "memory"); }

static inline __m512i load_line(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline void store_line(uint8_t* p, __m512i line) { _mm512_storeu_si512(p, line); }

// Two vectors of sixteen floats as thirty-two bfloat16.
static inline __m512i narrow(__m512 low, __m512 high) { return __m512i(_mm512_cvtne2ps_pbh(high, low)); }

// Weights 2^(score - top) in bfloat16, by integer arithmetic: between tile instructions, a core has one port for float
// products and two for integers.
//
// A float32 from 2^16 on counts in units of 2^-7. Adding HIGHEST - top to a score leaves in its last sixteen bits the
// bfloat16 with the exponent of 2^(score - top) and the fraction as mantissa: a linear interpolation between powers of
// two. Results below 2^-127, or masked ones, are clamped to LOWEST, which ends in zeros.
constexpr float LOWEST = 0x1.8p16f, HIGHEST = LOWEST + 127.0f;

static inline __m512 distance_from(__m512 top) { return _mm512_sub_ps(_mm512_set1_ps(HIGHEST), top); }

// The maximum that corresponds to this distance, rounded to a unit of 2^-7.
static inline __m512 top_of(__m512 distance) { return _mm512_sub_ps(_mm512_set1_ps(HIGHEST), distance); }

static inline __m512i straight(__m512 score, __m512 distance) {
    return _mm512_castps_si512(_mm512_max_ps(_mm512_add_ps(score, distance), _mm512_set1_ps(LOWEST)));
}

// Difference of interpolation and curve, for every two of its 128 steps. The corrected weight is off by at most 0.72%,
// and 0.23% in the mean square; rounding the exact power to bfloat16 would be off by 0.39% and 0.17%.
alignas(64) static constexpr uint8_t ABOVE[64] = {
    0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 5, 6, 6, 7, 7, 8,
    8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 10, 11, 11, 11, 11, 11,
    11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 9, 9,
    9, 8, 8, 8, 7, 7, 6, 6, 5, 5, 4, 3, 3, 2, 1, 1};
alignas(64) static constexpr uint8_t STEP_OF_WORD[64] = {
    1, 0, 17, 0, 33, 0, 49, 0, 1, 0, 17, 0, 33, 0, 49, 0,
    1, 0, 17, 0, 33, 0, 49, 0, 1, 0, 17, 0, 33, 0, 49, 0,
    1, 0, 17, 0, 33, 0, 49, 0, 1, 0, 17, 0, 33, 0, 49, 0,
    1, 0, 17, 0, 33, 0, 49, 0, 1, 0, 17, 0, 33, 0, 49, 0};

static inline __m512i bend(__m512i lines) {
    constexpr __mmask64 low_bytes = 0x5555555555555555;
    const __m512i steps = _mm512_multishift_epi64_epi8(_mm512_load_si512(STEP_OF_WORD), lines);
    return _mm512_sub_epi16(lines, _mm512_maskz_permutexvar_epi8(low_bytes, steps, _mm512_load_si512(ABOVE)));
}

// Adds the pairs of weights to sixteen sums. The dot product instruction for pairs would stall for hundreds of cycles
// after tile instructions.
static inline __m512 add_pairs(__m512 sums, __m512i weights) {
    const __m512i even = _mm512_slli_epi32(weights, 16);
    const __m512i odd = _mm512_and_si512(weights, _mm512_set1_epi32(int32_t(0xffff0000)));
    return _mm512_add_ps(sums, _mm512_add_ps(_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)));
}

// Transposes sixteen lines of sixteen 32-bit elements.
static inline void transpose(__m512i (&r)[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x44), b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xee);
        const __m512i c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x44);
        const __m512i d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xee);
        t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(a, c, 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(b, d, 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

#include "attention_tiles_lines.hpp"

// Consecutive parts of a thread's scratch memory, each aligned to a line, the first one to ALIAS.
template <size_t N>
static void divide_scratch(const int64_t (&bytes)[N], uint8_t* (&parts)[N]) {
    int64_t sum = ALIAS;
    for (int64_t part : bytes) sum += (part + LINE - 1) / LINE * LINE;
    const uintptr_t start = reinterpret_cast<uintptr_t>(scratch(sum / 4));
    uint8_t* next = reinterpret_cast<uint8_t*>((start + ALIAS - 1) / ALIAS * ALIAS);
    for (size_t i = 0; i < N; ++i) {
        parts[i] = next;
        next += (bytes[i] + LINE - 1) / LINE * LINE;
    }
}

// Queries of `blocks` times sixteen rows: per block and 32 dimensions, [pair of dimensions][row]. Scaled here, unless a
// soft cap comes between scale and softmax. The softmax uses powers of two.
template <class E>
static void prepare_queries(const Rows& rows, int64_t blocks, uint8_t* to) {
    const AttentionJob& job = rows.job;
    const __m512 scale = _mm512_set1_ps(job.cap ? 1.0f : job.scale * LOG2_OF_E);
    for (int64_t first = 0; first < blocks * SIDE; first += SIDE)
        for (int64_t d = 0; d < job.size; d += WIDE, to += TILE) {
            __m512i lines[16];
            for (int64_t i = 0; i < SIDE; ++i) {
                lines[i] = _mm512_setzero_si512();
                if (first + i >= rows.count) continue;
                const float* q = rows.query(first + i) + d;
                lines[i] = Lines<E>::ordered(narrow(_mm512_mul_ps(_mm512_loadu_ps(q), scale),
                                                    _mm512_mul_ps(_mm512_loadu_ps(q + SIDE), scale)));
            }
            transpose(lines);
            for (int64_t i = 0; i < SIDE; ++i) store_line(to + i * LINE, lines[i]);
        }
}

// Addresses of a whole chunk's keys or values; positions that no row sees point to zeros.
template <class E>
static void locate_chunk(const AttentionJob& job, const Pages& pages, const AttentionItem& item, int64_t start,
                         int64_t from, int64_t to, const uint8_t* zero_line, const uint8_t** at) {
    for (int64_t i = 0; i < from - start; ++i) at[i] = zero_line;
    locate<E>(job, pages, item, from, to, at + (from - start));
    for (int64_t i = to - start; i < CHUNK; ++i) at[i] = zero_line;
}

static inline __m512 capped(const AttentionJob& job, __m512 score) {
    return (SoftCap::of(Lanes{score} * Lanes::splat(job.scale), job.cap) * Lanes::splat(LOG2_OF_E)).v;
}
