// Attention over bfloat16 or int8 pages in tiles of sixteen rows and thirty-two bfloat16 (AMX), for heads whose sizes are
// multiples of 32. Codes times their scales are rounded to bfloat16, a chunk at a time. Queries and the weights of a softmax are rounded to bfloat16, to nearest even; sums are float32. A
// row's total is the sum of its rounded weights: then what a row mixes adds up to one, and a value that all keys share
// passes unchanged.
//
// Chunks, masks and merging are those of attention.hpp, and so is the promise: a row's bits are the same alone and in
// any company. There are two ways, and they agree bit for bit: every score, weight and sum is made of the same numbers
// in the same order, only their places differ.
//   few rows (decoding, verifying):  lanes are keys. Keys are read in their pages, unless those hold codes; values are
//                                    interleaved in pairs.
//   many rows (prefill):             lanes are rows, so that no maximum or sum crosses lanes. Keys and transposed
//                                    values are copied once and used by every sixteen rows.
// Both compute scores as K Q^T. Then few rows mix P V; many rows V^T P^T, whose P^T is the scores' own shape.
//
// A key that a row does not see may be anything, NaN too: its score is overwritten before it is looked at. Its value
// meets a weight of 0, so a value that nobody sees is replaced by zeros, and where a value that only some queries of an
// item see is not finite, the queries go one by one.
//
// Included inside a namespace per instruction set.

#if defined(__AMX_BF16__)

namespace attention_tiles {

constexpr int64_t SIDE = 16;     // rows of a tile, and its columns of 32 bits
constexpr int64_t WIDE = 32;     // bfloat16 in a row of a tile
constexpr int64_t LINE = 64;     // bytes in a row of a tile
constexpr int64_t TILE = 1024;   // bytes of a tile
constexpr int64_t BLOCKS = CHUNK / WIDE;
constexpr int64_t FEW_ROWS = 16;  // up to which turning the scores is cheaper than turning the values
constexpr int64_t MANY_ROWS = 384;
constexpr int64_t NEAR_BYTES = 1 << 19;  // that surely stay in a core's cache while its heads are attended to
constexpr float LARGEST_SCALE = 0x1p120f;  // whose products with codes are surely finite in bfloat16
constexpr float LOG2_OF_E = 0x1.715476p0f, LOG_OF_2 = 0x1.62e430p-1f;

// As LDTILECFG reads it. In static memory: a compiler does not see that the instruction reads.
struct Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
alignas(64) static const Shapes SHAPES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Nor does it see that loading a tile reads memory: what was stored before must be there.
static inline void settle_memory() { asm volatile("" ::: "memory"); }

static inline __m512i load_line(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline void store_line(uint8_t* p, __m512i line) { _mm512_storeu_si512(p, line); }

// Two vectors of sixteen as thirty-two bfloat16.
static inline __m512i narrow(__m512 low, __m512 high) { return __m512i(_mm512_cvtne2ps_pbh(high, low)); }

// 2^x to 3e-6 of itself, for x <= 0; exactly 1 at 0, and 0 at -infinity. The coefficients are a minimax fit of
// 2^f = 1 + f tail(f) for f in [0, 1].
static inline __m512 power_of_two(__m512 x) {
    static constexpr float tail[] = {0x1.62d6c6p-1f, 0x1.ee2452p-3f, 0x1.abf868p-5f, 0x1.b7f734p-7f};
    const __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __m512 power = _mm512_fmadd_ps(fraction, polynomial(Lanes{fraction}, tail).v, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(power, x);
}

// Adds the pairs of weights to sixteen sums.
static inline __m512 add_pairs(__m512 sums, __m512i weights) {
    return _mm512_dpbf16_ps(sums, __m512bh(weights), __m512bh(_mm512_set1_epi16(0x3f80)));
}

// Sixteen lines of sixteen 32-bit numbers: rows become columns.
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

// Where a chunk's keys lie: piece d of tile t (dimensions 32 d and on of the keys 16 t and on).
struct Keys {
    const uint8_t* tiles[CHUNK / SIDE];
    int64_t piece, stride;
};

struct Work {
    uint8_t *queries;  // of sixteen rows and 32 dimensions: pairs of dimensions, then rows
    uint8_t *keys;     // copies, where pages cannot be read as they are: 16 keys and 32 dimensions after each other
    uint8_t *values;   // of 32 keys: 16 values in pairs of keys (few rows), or the keys of each value (many)
    uint8_t *weights;  // of 32 keys: rows of keys (few), or pairs of keys, then rows (many)
    float *scores;     // of sixteen rows: keys, then rows. Many rows: twice, for the next sixteen too
    float *rows;       // sixteen rows one after the other: scores, mixed values or results
    float *partial, *running;  // few rows: as in attention.hpp. Many: values, maximum and sum of sixteen rows in lanes
    int32_t *ends;     // of each row: the position after its own
    uint8_t *widened;  // a chunk's values, where pages hold codes
    const uint8_t* nothing;  // a key or value of zeros

    Work(const AttentionJob& job, const Rows& all) {
        const int64_t blocks = (all.count + SIDE - 1) / SIDE, floats = partial_floats(job);
        const int64_t line = job.size > job.values ? job.size : job.values;
        const int64_t wide = floats > CHUNK ? floats : CHUNK;
        const int64_t bytes[] = {blocks * SIDE * job.size * 2, CHUNK * job.size * 2, CHUNK * job.values * 2,
                                 BLOCKS * TILE, 2 * CHUNK * SIDE * 4, SIDE * wide * 4, SIDE * floats * 4,
                                 blocks * SIDE * floats * 4, blocks * SIDE * 4, line * 2,
                                 job.v.scales ? CHUNK * job.values * 2 : 0};
        int64_t sum = LINE;
        for (int64_t part : bytes) sum += (part + LINE - 1) / LINE * LINE;
        const uintptr_t start = reinterpret_cast<uintptr_t>(scratch(sum / 4));
        uint8_t* next = reinterpret_cast<uint8_t*>((start + LINE - 1) / LINE * LINE);
        uint8_t* parts[sizeof bytes / sizeof *bytes];
        for (size_t i = 0; i < sizeof bytes / sizeof *bytes; ++i) {
            parts[i] = next;
            next += (bytes[i] + LINE - 1) / LINE * LINE;
        }
        queries = parts[0], keys = parts[1], values = parts[2], weights = parts[3], nothing = parts[9];
        widened = parts[10];
        scores = reinterpret_cast<float*>(parts[4]), rows = reinterpret_cast<float*>(parts[5]);
        partial = reinterpret_cast<float*>(parts[6]), running = reinterpret_cast<float*>(parts[7]);
        ends = reinterpret_cast<int32_t*>(parts[8]);
        __builtin_memset(parts[9], 0, size_t(line) * 2);
        for (int64_t row = 0; row < blocks * SIDE; ++row)
            ends[row] = int32_t(all.position + 1 + all.query_of(row < all.count ? row : all.count - 1));
    }
    uint8_t* queries_of(const AttentionJob& job, int64_t block) const { return queries + block * SIDE * job.size * 2; }
    float* scores_of(int64_t block) const { return scores + block % 2 * CHUNK * SIDE; }
    float* running_of(const AttentionJob& job, int64_t block) const {
        return running + block * SIDE * partial_floats(job);
    }
};

// Scaled here unless a cap stands between scale and softmax. The softmax counts in powers of two.
static void prepare_queries(const Rows& rows, const Work& work) {
    const AttentionJob& job = rows.job;
    const __m512 scale = _mm512_set1_ps(job.cap ? 1.0f : job.scale * LOG2_OF_E);
    for (int64_t first = 0; first < rows.count; first += SIDE) {
        uint8_t* to = work.queries_of(job, first / SIDE);
        for (int64_t d = 0; d < job.size; d += WIDE, to += TILE) {
            __m512i lines[16];
            for (int64_t i = 0; i < SIDE; ++i) {
                lines[i] = _mm512_setzero_si512();
                if (first + i >= rows.count) continue;
                const float* q = rows.query(first + i) + d;
                lines[i] = narrow(_mm512_mul_ps(_mm512_loadu_ps(q), scale),
                                  _mm512_mul_ps(_mm512_loadu_ps(q + SIDE), scale));
            }
            transpose(lines);
            for (int64_t i = 0; i < SIDE; ++i) store_line(to + i * LINE, lines[i]);
        }
    }
}

// Addresses of a whole chunk's keys or values; what nobody sees is a line of zeros.
template <class E>
static void locate_chunk(const Rows& rows, const Pages& pages, const AttentionItem& item, int64_t start, int64_t from,
                         int64_t to, const uint8_t* nothing, const uint8_t** at) {
    for (int64_t i = 0; i < from - start; ++i) at[i] = nothing;
    locate<E>(rows.job, pages, item, from, to, at + (from - start));
    for (int64_t i = to - start; i < CHUNK; ++i) at[i] = nothing;
}

// Thirty-two codes times their scale.
static inline __m512i widen(const uint8_t* codes, __m512 scale) {
    return narrow(_mm512_mul_ps(Int8::load(codes).v, scale), _mm512_mul_ps(Int8::load(codes + SIDE).v, scale));
}

// The same for values, in bfloat16 whatever the pages hold.
static void find_values(const Rows& rows, const AttentionItem& item, int64_t start, int64_t from, int64_t to,
                        const Work& work, const uint8_t** at) {
    const AttentionJob& job = rows.job;
    if (!job.v.scales) return locate_chunk<BFloat16>(rows, job.v, item, start, from, to, work.nothing, at);
    locate_chunk<Int8>(rows, job.v, item, start, from, to, work.nothing, at);
    float scales[CHUNK];
    gather_scales(job, job.v, item, from, to, scales);
    for (int64_t i = from - start; i < to - start; ++i) {
        uint8_t* line = work.widened + i * job.values * 2;
        const __m512 scale = _mm512_set1_ps(scales[i - (from - start)]);
        for (int64_t c = 0; c < job.values; c += WIDE) store_line(line + c * 2, widen(at[i] + c, scale));
        at[i] = line;
    }
}

static void copy_keys(const Rows& rows, const AttentionItem& item, int64_t start, int64_t from, int64_t to,
                      const Work& work, Keys& keys) {
    const AttentionJob& job = rows.job;
    const uint8_t* at[CHUNK];
    float scales[CHUNK] = {};
    if (job.k.scales) {
        locate_chunk<Int8>(rows, job.k, item, start, from, to, work.nothing, at);
        gather_scales(job, job.k, item, from, to, scales + (from - start));
    } else {
        locate_chunk<BFloat16>(rows, job.k, item, start, from, to, work.nothing, at);
    }
    keys.piece = TILE;
    keys.stride = LINE;
    // Whole blocks: many rows score two tiles at once.
    for (int64_t tile = (from - start) / WIDE * 2; tile < (to - start + WIDE - 1) / WIDE * 2; ++tile) {
        uint8_t* copy = work.keys + tile * SIDE * job.size * 2;
        keys.tiles[tile] = copy;
        for (int64_t i = 0; i < SIDE; ++i) {
            const uint8_t* key = at[tile * SIDE + i];
            const __m512 scale = _mm512_set1_ps(scales[tile * SIDE + i]);
            for (int64_t d = 0; d < job.size / WIDE; ++d)
                store_line(copy + d * TILE + i * LINE,
                           job.k.scales ? widen(key + d * WIDE, scale) : load_line(key + d * LINE));
        }
    }
}

// Where pages hold whole tiles: a tile lies in one page, and so does what follows the last key.
static void find_keys(const AttentionJob& job, const AttentionItem& item, int64_t start, int64_t from, int64_t to,
                      Keys& keys) {
    const int64_t* table = job.table + item.sequence * job.table_stride;
    const uint8_t* head = job.k.data + item.kv_head * job.k.head * 2;
    const int64_t first = (from - start) / SIDE;
    keys.piece = LINE;
    keys.stride = job.k.token * 2;
    int64_t page = (start + first * SIDE) / job.page_tokens, token = start + first * SIDE - page * job.page_tokens;
    for (int64_t tile = first; tile * SIDE < to - start; ++tile) {
        keys.tiles[tile] = head + (table[page] * job.k.frame + token * job.k.token) * 2;
        token += SIDE;
        if (token == job.page_tokens) token = 0, ++page;
    }
}

// scores[key][row] of N tiles of keys.
template <int N>
static inline void score_tiles(const Keys& keys, int64_t tile, const uint8_t* queries, int64_t pieces, float* scores) {
    const uint8_t* const* at = keys.tiles + tile;
    _tile_zero(0);
    if constexpr (N > 1) _tile_zero(1);
    if constexpr (N > 2) _tile_zero(2);
    if constexpr (N > 3) _tile_zero(3);
    for (int64_t d = 0; d < pieces; ++d) {
        const int64_t offset = d * keys.piece;
        _tile_loadd(7, queries + d * TILE, LINE);
        _tile_loadd(4, at[0] + offset, keys.stride);
        _tile_dpbf16ps(0, 4, 7);
        if constexpr (N > 1) {
            _tile_loadd(5, at[1] + offset, keys.stride);
            _tile_dpbf16ps(1, 5, 7);
        }
        if constexpr (N > 2) {
            _tile_loadd(6, at[2] + offset, keys.stride);
            _tile_dpbf16ps(2, 6, 7);
        }
        if constexpr (N > 3) {
            _tile_loadd(4, at[3] + offset, keys.stride);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    float* to = scores + tile * SIDE * SIDE;
    _tile_stored(0, to, LINE);
    if constexpr (N > 1) _tile_stored(1, to + SIDE * SIDE, LINE);
    if constexpr (N > 2) _tile_stored(2, to + 2 * SIDE * SIDE, LINE);
    if constexpr (N > 3) _tile_stored(3, to + 3 * SIDE * SIDE, LINE);
}

static void score(const Keys& keys, int64_t from, int64_t to, const uint8_t* queries, int64_t size, float* scores) {
    const int64_t pieces = size / WIDE, end = (to + SIDE - 1) / SIDE;
    int64_t tile = from / SIDE;
    settle_memory();
    for (; tile + 4 <= end; tile += 4) score_tiles<4>(keys, tile, queries, pieces, scores);
    if (tile + 3 == end) score_tiles<3>(keys, tile, queries, pieces, scores);
    if (tile + 2 == end) score_tiles<2>(keys, tile, queries, pieces, scores);
    if (tile + 1 == end) score_tiles<1>(keys, tile, queries, pieces, scores);
}

static inline __m512 capped(const AttentionJob& job, __m512 score) {
    return (SoftCap::of(Lanes{score} * Lanes::splat(job.scale), job.cap) * Lanes::splat(LOG2_OF_E)).v;
}

// Sixteen pairs of keys and 32 values: the low or the high four of every eight values, in pairs of keys.
static inline __m512i pair_up(const uint8_t* const* at, int64_t pair, int64_t byte, bool high) {
    const __m512i even = load_line(at[2 * pair] + byte), odd = load_line(at[2 * pair + 1] + byte);
    return high ? _mm512_unpackhi_epi16(even, odd) : _mm512_unpacklo_epi16(even, odd);
}

// ---- few rows -------------------------------------------------------------------------------------------------------

// Four columns of the scores become rows: rows[r * CHUNK + key].
static void turn_scores(const float* scores, int64_t from, int64_t to, float* rows) {
    for (int64_t key = from / SIDE * SIDE; key < to; key += SIDE) {
        __m512 v[4];
        for (int64_t i = 0; i < 4; ++i) {
            const float* at = scores + (key + i) * SIDE;
            v[i] = _mm512_castps128_ps512(_mm_loadu_ps(at));
            v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x00f0, _mm_loadu_ps(at + 4 * SIDE));
            v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x0f00, _mm_loadu_ps(at + 8 * SIDE));
            v[i] = _mm512_mask_broadcast_f32x4(v[i], 0xf000, _mm_loadu_ps(at + 12 * SIDE));
        }
        const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[0], v[1]));
        const __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(v[2], v[3]));
        const __m512d c = _mm512_castps_pd(_mm512_unpackhi_ps(v[0], v[1]));
        const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(v[2], v[3]));
        _mm512_storeu_pd(rows + key, _mm512_unpacklo_pd(a, b));
        _mm512_storeu_pd(rows + CHUNK + key, _mm512_unpackhi_pd(a, b));
        _mm512_storeu_pd(rows + 2 * CHUNK + key, _mm512_unpacklo_pd(c, d));
        _mm512_storeu_pd(rows + 3 * CHUNK + key, _mm512_unpackhi_pd(c, d));
    }
}

// One row's weights for the blocks [first, last) of the chunk, of which it sees the keys [from, to).
static void soften_row(const AttentionJob& job, float* scores, int64_t from, int64_t to, int64_t first, int64_t last,
                       uint8_t* weights, float& maximum, float& total) {
    const int64_t begin = from / WIDE, end = (to + WIDE - 1) / WIDE;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 least = _mm512_set1_ps(-__builtin_inff());
    __m512 most = least;
    for (int64_t key = begin * WIDE; key < end * WIDE; key += SIDE) {
        __m512 score = _mm512_loadu_ps(scores + key);
        if (job.cap) score = capped(job, score);
        if (key < from || key + SIDE > to) {
            const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(int32_t(key)));
            const __mmask16 seen = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(int32_t(from))) &
                                   _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(int32_t(to)));
            score = _mm512_mask_blend_ps(seen, least, score);
        }
        _mm512_storeu_ps(scores + key, score);
        most = _mm512_max_ps(most, score);
    }
    const float top = _mm512_reduce_max_ps(most);
    const __m512 tops = _mm512_set1_ps(top);
    __m512 sums = _mm512_setzero_ps();
    for (int64_t block = first; block < begin; ++block) store_line(weights + block * TILE, _mm512_setzero_si512());
    for (int64_t block = begin; block < end; ++block) {
        const float* at = scores + block * WIDE;
        const __m512i both = narrow(power_of_two(_mm512_sub_ps(_mm512_loadu_ps(at), tops)),
                                    power_of_two(_mm512_sub_ps(_mm512_loadu_ps(at + SIDE), tops)));
        store_line(weights + block * TILE, both);
        sums = add_pairs(sums, both);
    }
    for (int64_t block = end; block < last; ++block) store_line(weights + block * TILE, _mm512_setzero_si512());
    maximum = top * LOG_OF_2;
    total = Lanes{sums}.sum();
}

// N times 32 columns of 32 values, in pairs of keys.
template <int N>
static inline void pair_values(const uint8_t* const* at, int64_t byte, uint8_t* pairs) {
    for (int64_t pair = 0; pair < SIDE; ++pair, pairs += LINE)
        for (int64_t i = 0; i < N; ++i) {
            store_line(pairs + 2 * i * TILE, pair_up(at, pair, byte + i * LINE, false));
            store_line(pairs + (2 * i + 1) * TILE, pair_up(at, pair, byte + i * LINE, true));
        }
}

// N times 32 columns of P V. The next block of values is prepared while tiles are still waiting for this one.
template <int N>
static void mix_columns(const Work& work, const uint8_t* const* at, int64_t count, int64_t column, int64_t first,
                        int64_t last, float* partial, int64_t stride) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (N > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    pair_values<N>(at + first * WIDE, column * 2, work.values + first % 2 * 4 * TILE);
    for (int64_t block = first; block < last; ++block) {
        if (block + 1 < last)
            pair_values<N>(at + (block + 1) * WIDE, column * 2, work.values + (block + 1) % 2 * 4 * TILE);
        settle_memory();
        const uint8_t* pairs = work.values + block % 2 * 4 * TILE;
        _tile_loadd(7, work.weights + block * TILE, LINE);
        _tile_loadd(4, pairs, LINE);
        _tile_dpbf16ps(0, 7, 4);
        _tile_loadd(5, pairs + TILE, LINE);
        _tile_dpbf16ps(1, 7, 5);
        if constexpr (N > 1) {
            _tile_loadd(6, pairs + 2 * TILE, LINE);
            _tile_dpbf16ps(2, 7, 6);
            _tile_loadd(4, pairs + 3 * TILE, LINE);
            _tile_dpbf16ps(3, 7, 4);
        }
    }
    float* mixed = work.scores;  // no longer needed
    _tile_stored(0, mixed, LINE);
    _tile_stored(1, mixed + SIDE * SIDE, LINE);
    if constexpr (N > 1) {
        _tile_stored(2, mixed + 2 * SIDE * SIDE, LINE);
        _tile_stored(3, mixed + 3 * SIDE * SIDE, LINE);
    }
    const __m512i left = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i right = _mm512_add_epi32(left, _mm512_set1_epi32(8));
    for (int64_t row = 0; row < count; ++row)
        for (int64_t i = 0; i < N; ++i) {
            const float* tile = mixed + (2 * i * SIDE + row) * SIDE;
            const __m512 low = _mm512_loadu_ps(tile), high = _mm512_loadu_ps(tile + SIDE * SIDE);
            float* to = partial + row * stride + column + i * WIDE;
            _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, left, high));
            _mm512_storeu_ps(to + SIDE, _mm512_permutex2var_ps(low, right, high));
        }
}

// Asks for the keys and values [from, to) of all heads. Sixteen tokens in turn from every page, because memory answers
// several streams at once faster than one after the other, and a page's heads lie side by side.
static void fetch_heads(const AttentionJob& job, const AttentionItem& item, int64_t from, int64_t to) {
    const struct {
        const Pages& pages;
        int64_t size, number;
    } both[] = {{job.k, job.size, job.k.scales ? 1 : 2}, {job.v, job.values, job.v.scales ? 1 : 2}};
    const uint8_t* at[2][CHUNK];
    for (int64_t i = 0; i < 2; ++i)
        if (both[i].number == 1)
            locate<Int8>(job, both[i].pages, item, from, to, at[i]);
        else
            locate<BFloat16>(job, both[i].pages, item, from, to, at[i]);
    const int64_t widest = (job.size > job.values ? job.size : job.values) * 2;
    for (int64_t first = 0; first < SIDE; ++first)
        for (int64_t head = 0; head < job.kv_heads; ++head)
            for (int64_t byte = 0; byte < widest; byte += LINE)
                for (int64_t token = first; token < to - from; token += SIDE)
                    for (int64_t i = 0; i < 2; ++i)
                        if (byte < both[i].size * both[i].number)
                            _mm_prefetch(reinterpret_cast<const char*>(
                                             at[i][token] + head * both[i].pages.head * both[i].number + byte),
                                         _MM_HINT_T0);
}

static void attend_few(const Rows& rows, const AttentionItem& item, int64_t chunk, const Work& work, float* partial) {
    const AttentionJob& job = rows.job;
    const int64_t start = chunk * CHUNK, stride = partial_floats(job);
    const int64_t from = rows.from(0, start), to = rows.to(rows.count - 1, start + CHUNK);
    if (from >= to) return;
    const int64_t first = (from - start) / WIDE, last = (to - start + WIDE - 1) / WIDE;
    const int64_t chunks = item.chunk_end - item.chunk_begin;
    if (item.kv_head == 0 && chunks * CHUNK * job.kv_heads * (job.size + job.values) * 2 <= NEAR_BYTES)
        fetch_heads(job, item, from, to);
    Keys keys;
    if (job.page_tokens % SIDE == 0 && !job.k.scales)
        find_keys(job, item, start, from, to, keys);
    else
        copy_keys(rows, item, start, from, to, work, keys);
    score(keys, from - start, to - start, work.queries, job.size, work.scores);
    const uint8_t* at[CHUNK];
    find_values(rows, item, start, from, to, work, at);
    for (int64_t row = 0; row < rows.count; ++row) {
        float* scores = work.rows + row % 4 * CHUNK;
        if (row % 4 == 0) turn_scores(work.scores + row, from - start, to - start, scores);
        const int64_t a = rows.from(row, start) - start, b = rows.to(row, start + CHUNK) - start;
        float* facts = partial + row * stride + job.values;
        if (a < b) soften_row(job, scores, a, b, first, last, work.weights + row * LINE, facts[0], facts[1]);
    }
    int64_t column = 0;
    for (; column + 2 * WIDE <= job.values; column += 2 * WIDE)
        mix_columns<2>(work, at, rows.count, column, first, last, partial, stride);
    if (column < job.values) mix_columns<1>(work, at, rows.count, column, first, last, partial, stride);
}

// ---- many rows ------------------------------------------------------------------------------------------------------

// What sixteen rows see of a chunk: each row the keys [from, to); some row [seen_from, seen_to), all of them
// [all_from, all_to).
struct Sight {
    __m512i from, to;
    int64_t seen_from, seen_to, all_from, all_to;
    __mmask16 sees, begins;  // rows that see anything of the chunk; rows whose first chunk it is

    Sight(const AttentionJob& job, const int32_t* ends, int64_t start) {
        constexpr int64_t FAR = 1 << 30;
        const int64_t window = job.window && job.window < FAR ? job.window : FAR;
        to = _mm512_sub_epi32(_mm512_loadu_si512(ends), _mm512_set1_epi32(int32_t(start)));
        from = _mm512_sub_epi32(to, _mm512_set1_epi32(int32_t(window)));
        const int64_t low = ends[0] - start, high = ends[SIDE - 1] - start;
        seen_from = low > window ? low - window : 0;
        all_from = high > window ? high - window : 0;
        seen_to = high < CHUNK ? high : CHUNK;
        all_to = low < CHUNK ? low : CHUNK;
        const __m512i zero = _mm512_setzero_si512();
        sees = _mm512_cmpgt_epi32_mask(to, zero) & _mm512_cmplt_epi32_mask(from, _mm512_set1_epi32(int32_t(CHUNK)));
        begins = start == 0 ? __mmask16(-1) : _mm512_cmpge_epi32_mask(from, zero);
    }
    bool nothing() const { return seen_from >= seen_to; }
    int64_t first_block() const { return seen_from / WIDE; }
    int64_t last_block() const { return (seen_to + WIDE - 1) / WIDE; }
};

// Scores that a row does not see become -infinity; capped, where there is a cap.
static void hide(const AttentionJob& job, const Sight& sight, float* scores) {
    for (int64_t key = sight.first_block() * WIDE; key < sight.last_block() * WIDE; key += SIDE) {
        const bool edge = key < sight.all_from || key + SIDE > sight.all_to;
        if (!edge && !job.cap) continue;
        for (int64_t i = key; i < key + SIDE; ++i) {
            __m512 score = _mm512_load_ps(scores + i * SIDE);
            if (job.cap) score = capped(job, score);
            const __m512i at = _mm512_set1_epi32(int32_t(i));
            const __mmask16 seen = _mm512_cmple_epi32_mask(sight.from, at) & _mm512_cmpgt_epi32_mask(sight.to, at);
            _mm512_store_ps(scores + i * SIDE, _mm512_mask_blend_ps(seen, _mm512_set1_ps(-__builtin_inff()), score));
        }
    }
}

static __m512 largest_scores(const float* scores, int64_t first, int64_t last) {
    __m512 most[4];
    for (__m512& each : most) each = _mm512_set1_ps(-__builtin_inff());
    for (int64_t key = first * WIDE; key < last * WIDE; key += 4)
        for (int64_t i = 0; i < 4; ++i) most[i] = _mm512_max_ps(most[i], _mm512_load_ps(scores + (key + i) * SIDE));
    const __m512 all = _mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3]));
    // A row that sees nothing has no maximum: its weights are to be 0, not NaN.
    const __mmask16 none = _mm512_cmp_ps_mask(all, _mm512_set1_ps(-__builtin_inff()), _CMP_EQ_OQ);
    return _mm512_mask_blend_ps(none, all, _mm512_setzero_ps());
}

// Four of a block's sixteen pairs of keys: scores become weights. A pair's weights join the sum of its place in the
// block, as they do in soften_row.
static inline void weigh_pairs(const float* scores, int64_t first, __m512 top, uint8_t* weights, __m512 (&sums)[SIDE]) {
    alignas(64) static constexpr int16_t order[] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i interleave = _mm512_load_si512(order);
#pragma GCC unroll 4
    for (int64_t pair = first; pair < first + 4; ++pair) {
        const float* at = scores + 2 * pair * SIDE;
        const __m512 even = power_of_two(_mm512_sub_ps(_mm512_load_ps(at), top));
        const __m512 odd = power_of_two(_mm512_sub_ps(_mm512_load_ps(at + SIDE), top));
        const __m512i both = _mm512_permutexvar_epi16(interleave, narrow(even, odd));
        store_line(weights + pair * LINE, both);
        sums[pair] = add_pairs(sums[pair], both);
    }
}

// Scores of sixteen rows that are made a block of keys at a time, between other things: tiles then multiply while lanes
// do something else. The same products in the same order as in `score`. It has the tiles 4 to 7.
struct Scoring {
    const Keys& keys;
    const uint8_t* queries;
    float* scores;
    int64_t pieces, block, end;

    Scoring(const Keys& k, const uint8_t* q, const Sight& sight, int64_t size, float* to)
        : keys(k), queries(q), scores(to), pieces(size / WIDE), block(sight.first_block()),
          end(sight.nothing() ? block : sight.last_block()) {}

    void begin() const {
        if (block == end) return;
        _tile_zero(5);
        _tile_zero(6);
        multiply(0, pieces / 2);
    }
    void finish() {
        if (block == end) return;
        multiply(pieces / 2, pieces);
        float* to = scores + block++ * WIDE * SIDE;
        _tile_stored(5, to, LINE);
        _tile_stored(6, to + SIDE * SIDE, LINE);
    }
    void finish_all() {
        while (block < end) begin(), finish();
    }

  private:
    void multiply(int64_t from, int64_t to) const {
        const uint8_t* const* at = keys.tiles + block * 2;
        for (int64_t d = from; d < to; ++d) {
            _tile_loadd(7, queries + d * TILE, LINE);
            _tile_loadd(4, at[0] + d * keys.piece, keys.stride);
            _tile_dpbf16ps(5, 4, 7);
            _tile_loadd(4, at[1] + d * keys.piece, keys.stride);
            _tile_dpbf16ps(6, 4, 7);
        }
    }
};

// In the order of Lanes::sum.
static inline __m512 sum_up(__m512 (&sums)[SIDE]) {
    for (int64_t half = SIDE / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; ++i) sums[i] = _mm512_add_ps(sums[i], sums[i + half]);
    return sums[0];
}

static void turn_values(const AttentionJob& job, const uint8_t* const* at, int64_t first, int64_t last,
                        uint8_t* values) {
    for (int64_t block = first; block < last; ++block)
        for (int64_t c = 0; c < job.values; c += WIDE)
            for (int high = 0; high < 2; ++high) {
                __m512i lines[16];
                for (int64_t pair = 0; pair < SIDE; ++pair) lines[pair] = pair_up(at + block * WIDE, pair, c * 2, high);
                transpose(lines);
                uint8_t* to = values + (block * job.values + c + high * 4) * LINE;
                for (int64_t i = 0; i < SIDE; ++i) store_line(to + (i / 4 * 8 + i % 4) * LINE, lines[i]);
            }
}

// V^T P^T in two or four tiles of values: begun, joined by one block of keys after the other, and stored.
template <int N>
static inline void begin_mix() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (N > 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

// Two tiles of values, with the weights in tile 7. Tiles are named by literals: they are part of an instruction.
static inline void mix_first_two(const uint8_t* values) {
    _tile_loadd(4, values, LINE);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, values + TILE, LINE);
    _tile_dpbf16ps(1, 5, 7);
}

static inline void mix_next_two(const uint8_t* values) {
    _tile_loadd(6, values + 2 * TILE, LINE);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(4, values + 3 * TILE, LINE);
    _tile_dpbf16ps(3, 4, 7);
}

template <int N>
static inline void mix_block(const uint8_t* values, const uint8_t* weights) {
    settle_memory();
    _tile_loadd(7, weights, LINE);
    mix_first_two(values);
    if constexpr (N > 2) mix_next_two(values);
}

template <int N>
static inline void store_mix(float* mixed) {
    _tile_stored(0, mixed, LINE);
    _tile_stored(1, mixed + SIDE * SIDE, LINE);
    if constexpr (N > 2) {
        _tile_stored(2, mixed + 2 * SIDE * SIDE, LINE);
        _tile_stored(3, mixed + 3 * SIDE * SIDE, LINE);
    }
}

// The scores of sixteen rows become weights, which mix the values: values, maximum and sum go to `result`. While lanes
// make a block's weights, tiles mix the block before, and score a block of the next sixteen rows.
template <int N>
static void soften_and_mix(const AttentionJob& job, const Work& work, const float* scores, int64_t first, int64_t last,
                           float* result, Scoring& ahead) {
    const int64_t each = job.values * LINE;
    const __m512 top = largest_scores(scores, first, last);
    __m512 sums[SIDE];
    for (__m512& sum : sums) sum = _mm512_setzero_ps();
    begin_mix<N>();
    for (int64_t block = first; block < last; ++block) {
        const float* at = scores + block * WIDE * SIDE;
        uint8_t* weights = work.weights + block * TILE;
        const uint8_t* values = work.values + (block - 1) * each;
        weigh_pairs(at, 0, top, weights, sums);
        settle_memory();
        if (block > first) {
            _tile_loadd(7, weights - TILE, LINE);
            mix_first_two(values);
        }
        weigh_pairs(at, 4, top, weights, sums);
        if constexpr (N > 2)
            if (block > first) mix_next_two(values);
        weigh_pairs(at, 8, top, weights, sums);
        ahead.begin();
        weigh_pairs(at, 12, top, weights, sums);
        ahead.finish();
    }
    mix_block<N>(work.values + (last - 1) * each, work.weights + (last - 1) * TILE);
    store_mix<N>(result);
    for (int64_t value = N * SIDE; value < job.values; value += 2 * SIDE) {
        begin_mix<2>();
        for (int64_t block = first; block < last; ++block)
            mix_block<2>(work.values + block * each + value * LINE, work.weights + block * TILE);
        store_mix<2>(result + value * SIDE);
    }
    _mm512_storeu_ps(result + job.values * SIDE, _mm512_mul_ps(top, _mm512_set1_ps(LOG_OF_2)));
    _mm512_storeu_ps(result + (job.values + 1) * SIDE, sum_up(sums));
}

// join_chunk of attention.hpp, for sixteen rows in lanes: the same operations on the same numbers.
static void join_lanes(const AttentionJob& job, const Sight& sight, const float* next, float* running) {
    const float *next_most = next + job.values * SIDE, *next_total = next_most + SIDE;
    float *most = running + job.values * SIDE, *total = most + SIDE;
    const __mmask16 merges = sight.sees & __mmask16(~sight.begins);
    const Lanes a = Lanes::load(most), b = Lanes::load(next_most);
    const Lanes top{_mm512_mask_blend_ps(_mm512_cmp_ps_mask(b.v, a.v, _CMP_GT_OQ), a.v, b.v)};
    const Lanes old = exponential(a - top), fresh = exponential(b - top);
    const auto keep = [&](Lanes before, Lanes merged, Lanes after) {
        return _mm512_mask_blend_ps(merges, _mm512_mask_blend_ps(sight.sees, before.v, after.v), merged.v);
    };
    const bool all_merge = merges == __mmask16(-1);  // the usual case, where nothing has to be chosen
    for (int64_t c = 0; c < job.values * SIDE; c += SIDE) {
        const Lanes before = Lanes::load(running + c), after = Lanes::load(next + c);
        Lanes both = before * old;
        both.add_product(after, fresh);
        _mm512_storeu_ps(running + c, all_merge ? both.v : keep(before, both, after));
    }
    const Lanes before = Lanes::load(total), after = Lanes::load(next_total);
    _mm512_storeu_ps(total, keep(before, before * old + after * fresh, after));
    _mm512_storeu_ps(most, keep(a, top, b));
}

// Sixteen rows in lanes become rows as in attention.hpp.
static void turn_result(const AttentionJob& job, const float* lanes, int64_t count, float* rows) {
    const int64_t stride = partial_floats(job);
    for (int64_t c = 0; c < job.values; c += SIDE) {
        __m512i lines[16];
        for (int64_t i = 0; i < SIDE; ++i) lines[i] = _mm512_loadu_si512(lanes + (c + i) * SIDE);
        transpose(lines);
        for (int64_t row = 0; row < count; ++row) _mm512_storeu_si512(rows + row * stride + c, lines[row]);
    }
    for (int64_t row = 0; row < count; ++row) {
        rows[row * stride + job.values] = lanes[job.values * SIDE + row];
        rows[row * stride + job.values + 1] = lanes[(job.values + 1) * SIDE + row];
    }
}

// Joins the chunk to what runs, or leaves its partial results at `partials`.
static void attend_many(const Rows& rows, const AttentionItem& item, int64_t chunk, const Work& work, float* partials) {
    const AttentionJob& job = rows.job;
    const int64_t start = chunk * CHUNK;
    const int64_t from = rows.from(0, start), to = rows.to(rows.count - 1, start + CHUNK);
    if (from >= to) return;
    Keys keys;
    copy_keys(rows, item, start, from, to, work, keys);
    const uint8_t* at[CHUNK];
    find_values(rows, item, start, from, to, work, at);
    turn_values(job, at, (from - start) / WIDE, (to - start + WIDE - 1) / WIDE, work.values);
    settle_memory();
    Sight next(job, work.ends, start);
    Scoring(keys, work.queries, next, job.size, work.scores).finish_all();
    for (int64_t row = 0; row < rows.count; row += SIDE) {
        const Sight sight = next;
        const int64_t block = row / SIDE, left = rows.count - row;
        if (left > SIDE) next = Sight(job, work.ends + row + SIDE, start);
        Scoring ahead(keys, work.queries_of(job, block + 1), next, job.size, work.scores_of(block + 1));
        if (left <= SIDE) ahead.end = ahead.block;
        if (sight.nothing()) {
            ahead.finish_all();
            continue;
        }
        float *scores = work.scores_of(block), *running = work.running_of(job, block);
        const bool opens = !partials && (sight.sees & sight.begins) == __mmask16(-1);
        float* result = opens ? running : work.partial;
        hide(job, sight, scores);
        if (job.values >= 4 * SIDE)
            soften_and_mix<4>(job, work, scores, sight.first_block(), sight.last_block(), result, ahead);
        else
            soften_and_mix<2>(job, work, scores, sight.first_block(), sight.last_block(), result, ahead);
        ahead.finish_all();
        if (partials)
            turn_result(job, result, left < SIDE ? left : SIDE, partials + row * partial_floats(job));
        else if (!opens)
            join_lanes(job, sight, result, running);
    }
}

// ---- items ----------------------------------------------------------------------------------------------------------

// Whether the values that only some queries see are finite: weights of 0 then hide them from the others.
static bool hidden_values_are_finite(const Rows& rows, const AttentionItem& item) {
    const AttentionJob& job = rows.job;
    const int64_t last = rows.count - 1, far = INT64_MAX;
    const int64_t ends[2][2] = {{rows.to(0, far), rows.to(last, far)}, {rows.from(0, 0), rows.from(last, 0)}};
    __m512i largest = _mm512_setzero_si512();
    for (const auto& range : ends)
        for (int64_t from = range[0]; from < range[1]; from += CHUNK) {
            const int64_t to = from + CHUNK < range[1] ? from + CHUNK : range[1];
            if (job.v.scales) {
                float scales[CHUNK];
                gather_scales(job, job.v, item, from, to, scales);
                for (int64_t i = 0; i < to - from; ++i)
                    if (!(scales[i] <= LARGEST_SCALE)) return false;
                continue;
            }
            const uint8_t* at[CHUNK];
            locate<BFloat16>(job, job.v, item, from, to, at);
            for (int64_t i = 0; i < to - from; ++i)
                for (int64_t byte = 0; byte < job.values * 2; byte += LINE)
                    largest = _mm512_max_epu16(
                        largest, _mm512_and_si512(load_line(at[i] + byte), _mm512_set1_epi16(0x7fff)));
        }
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0;
}

// `partials`: where the rows' partial results of the first chunk go, and those of the next `step` floats on; null where
// the item finishes its rows.
static void attend_item(const AttentionJob& job, const AttentionItem& item, float* partials, int64_t step) {
    const Rows rows(job, item);
    if (rows.queries > 1 && !hidden_values_are_finite(rows, item)) {
        for (int64_t i = 0; i < item.queries; ++i) {
            AttentionItem one = item;
            one.first += i;
            one.queries = 1;
            attend_item(job, one, partials ? partials + i * rows.groups * partial_floats(job) : nullptr, step);
        }
        return;
    }
    const Work work(job, rows);
    prepare_queries(rows, work);
    const bool few = rows.count <= FEW_ROWS;
    // The chunk that opens every row, if one does: there is nothing yet that it could join.
    const int64_t open = rows.from(0, 0) / CHUNK, first = open == rows.from(rows.count - 1, 0) / CHUNK ? open : -1;
    for (int64_t chunk = item.chunk_begin; chunk < item.chunk_end; ++chunk) {
        float* place = partials ? partials + (chunk - item.chunk_begin) * step : nullptr;
        if (!few) {
            attend_many(rows, item, chunk, work, place);
            continue;
        }
        const bool opens = chunk == first;
        attend_few(rows, item, chunk, work, place ? place : opens ? work.running : work.partial);
        if (!place && !opens) join_chunk(rows, chunk, work.partial, work.running);
    }
    if (partials) return;
    if (few) return finish(rows, 0, rows.count, work.running);
    for (int64_t row = 0; row < rows.count; row += SIDE) {
        const int64_t count = rows.count - row < SIDE ? rows.count - row : SIDE;
        turn_result(job, work.running_of(job, row / SIDE), count, work.rows);
        finish(rows, row, count, work.rows);
    }
}

static bool fits(const AttentionJob& job) { return job.size % WIDE == 0 && job.values % WIDE == 0; }

static int64_t rows(const AttentionJob& job) { return fits(job) ? MANY_ROWS : attention_rows(job); }

// E: the numbers in the pages.
template <class E>
static void attend(const AttentionJob& job, int64_t begin, int64_t end) {
    if (!fits(job)) return BANKFULL_ISA_NAME::attend<E>(job, begin, end);
    _tile_loadconfig(&SHAPES);
    for (int64_t i = begin; i < end; ++i) {
        const AttentionItem& item = job.items[i];
        const int64_t step = item.queries * (job.heads / job.kv_heads) * partial_floats(job);
        attend_item(job, item, item.partial < 0 ? nullptr : job.partials + item.partial, step);
    }
    _tile_release();
}

}  // namespace attention_tiles

#endif
