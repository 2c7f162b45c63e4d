// Paged attention. A row is one query of one head. Each chunk of positions computes all scores, their maximum, the
// exponentials, their sum in sixteen lanes, and the values weighted in the order of positions; then chunks are merged
// in order. Masked keys are never added to a row, so its bits are the same alone, in a tile, and for any split of the
// work: chunks, lanes and the order of values depend only on absolute positions.
//
// Included inside a namespace per instruction set.

#include "attention_elements.hpp"

static constexpr int64_t KEYS = 32;  // scored together: two blocks of lanes
// Query rows scored together; rows and lanes of values accumulated together.
#if defined(__AVX512F__)
static constexpr int SCORE_ROWS = 4, MIX_ROWS = 4, MIX_LANES = 4;
#elif defined(BANKFULL_NEON)
static constexpr int SCORE_ROWS = 4, MIX_ROWS = 4, MIX_LANES = 1;
#else
static constexpr int SCORE_ROWS = 2, MIX_ROWS = 2, MIX_LANES = 2;
#endif

// The position after the last one that a query at `position` sees in a sequence of `length` tokens.
static inline int64_t end_of_sight(const AttentionJob& job, int64_t position, int64_t length) {
    if (!job.block) return position + 1;
    const int64_t end = (position / job.block + 1) * job.block;
    return end < length ? end : length;
}

static inline const uint64_t* paths_of(const AttentionJob& job) { return job.paths ? job.paths : job.ancestors; }

// The rows of an item, and the positions each of them sees.
struct Rows {
    const AttentionJob& job;
    int64_t token, kv_head, queries, groups, count, position;  // position: of the first query in its sequence
    int64_t length;                   // of the sequence
    const uint64_t* paths = nullptr;  // of the queries, if they belong to a tree
    int64_t tree = INT64_MAX;         // the tree's first position
    int64_t listed = 0;               // under a sparse mask: keys that the item's query sees, in place of positions

    Rows(const AttentionJob& j, const AttentionItem& item)
        : job(j), token(j.q_start[item.sequence] + item.first), kv_head(item.kv_head), queries(item.queries),
          groups(j.heads / j.kv_heads), count(queries * groups), length(j.kv_len[item.sequence]) {
        const int64_t all = j.q_start[item.sequence + 1] - j.q_start[item.sequence];
        position = length - all + item.first;
        if (j.ancestors && j.ancestors[token]) {
            paths = paths_of(j) + token;
            tree = position - item.first;
        }
        if (j.mask.given()) listed = VisibleKeys(j.mask, position_of(0)).count();
    }
    int64_t position_of(int64_t row) const {
        const int64_t query = query_of(row);
        return paths ? tree + __builtin_popcountll(paths[query]) - 1 : position + query;
    }
    // Decode has one query, and divisions would be too slow.
    int64_t query_of(int64_t row) const { return queries == 1 ? 0 : row / groups; }
    int64_t token_of(int64_t row) const { return token + query_of(row); }
    int64_t head_of(int64_t row) const { return kv_head * groups + row - query_of(row) * groups; }
    const float* query(int64_t row) const { return job.q + token_of(row) * job.q_token + head_of(row) * job.size; }
    // Positions that the row sees in [begin, end) of a chunk; none if from >= to.
    int64_t to(int64_t row, int64_t end) const {
        const int64_t last = job.ends           ? job.ends[token_of(row)]
                             : job.mask.given() ? listed
                                                : end_of_sight(job, position_of(row), length);
        return last < end ? last : end;
    }
    int64_t from(int64_t row, int64_t begin) const {
        const int64_t start = job.begins ? job.begins[token_of(row)] : job.window ? position_of(row) + 1 - job.window : 0;
        return start > begin ? start : begin;
    }
    bool sees_nothing(int64_t row) const { return from(row, 0) >= to(row, INT64_MAX); }
};

// A row's partial result: the weighted values, padded to whole lanes, then maximum and sum.
static inline int64_t padded_values(const AttentionJob& job) { return (job.values + 15) / 16 * 16; }
static inline int64_t partial_floats(const AttentionJob& job) { return padded_values(job) + 2; }

// If widening takes a good part of a product's time, it is done once for all rows of an item with many rows.
#if defined(BANKFULL_NEON)
static inline bool widens(int64_t rows) { return rows >= 8; }
#else
static inline bool widens(int64_t) { return false; }
#endif

struct Work {
    float *keys, *scores, *tails, *partial, *running, *values;
    uint8_t* zero_line;  // a zero key, for unused lanes

    static int64_t floats(const AttentionJob& job, int64_t rows, bool wide) {
        return job.size * (KEYS + 1) + rows * (CHUNK + 2 * partial_floats(job)) + CHUNK * 16 +
               (wide ? CHUNK * padded_values(job) + KEYS * (job.size + 16) : 0);
    }
    // `unpacks`: every item needs room for values as floats, or for a block of keys.
    Work(const AttentionJob& job, int64_t rows, bool unpacks) {
        keys = scratch(floats(job, rows, unpacks || widens(rows)));
        scores = keys + job.size * KEYS;
        tails = scores + rows * CHUNK;
        partial = tails + CHUNK * 16;
        running = partial + rows * partial_floats(job);
        float* zeros = running + rows * partial_floats(job);
        for (int64_t d = 0; d < job.size; ++d) zeros[d] = 0.0f;
        zero_line = reinterpret_cast<uint8_t*>(zeros);
        values = zeros + job.size;
    }
};

#if defined(BANKFULL_NEON)

#include "attention_neon.hpp"

#else

// Sixteen keys transposed: keys[d * KEYS + i] is dimension d of key i.
template <class E>
static void transpose_keys(const uint8_t* const* at, int64_t size, float* keys) {
    int64_t d = 0;
    for (; d + 4 <= size; d += 4)
        for (int64_t i = 0; i < 16; i += 4) {
            const Four a = E::four(at[i] + d * E::bytes), b = E::four(at[i + 1] + d * E::bytes);
            const Four c = E::four(at[i + 2] + d * E::bytes), e = E::four(at[i + 3] + d * E::bytes);
            const Four ab = SHUFFLE(a, b, 0, 4, 1, 5), AB = SHUFFLE(a, b, 2, 6, 3, 7);
            const Four ce = SHUFFLE(c, e, 0, 4, 1, 5), CE = SHUFFLE(c, e, 2, 6, 3, 7);
            const Four turned[4] = {SHUFFLE(ab, ce, 0, 1, 4, 5), SHUFFLE(ab, ce, 2, 3, 6, 7),
                                    SHUFFLE(AB, CE, 0, 1, 4, 5), SHUFFLE(AB, CE, 2, 3, 6, 7)};
            for (int64_t j = 0; j < 4; ++j) __builtin_memcpy(keys + (d + j) * KEYS + i, &turned[j], 16);
        }
    for (; d < size; ++d)
        for (int64_t i = 0; i < 16; ++i) keys[d * KEYS + i] = E::one(at[i] + d * E::bytes);
}

// `key_scales`: of the KEYS keys; may be null.
template <int R>
static void score_rows(const Rows& rows, int64_t row, const float* keys, const float* key_scales, float* scores) {
    const AttentionJob& job = rows.job;
    const float* q[R];
    Lanes left[R], right[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        q[r] = rows.query(row + r);
        left[r] = right[r] = Lanes::splat(0.0f);
    }
    for (int64_t d = 0; d < job.size; ++d) {
        const Lanes a = Lanes::load(keys + d * KEYS), b = Lanes::load(keys + d * KEYS + 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Lanes each = Lanes::splat(q[r][d]);
            left[r].add_product(each, a);
            right[r].add_product(each, b);
        }
    }
    const Lanes scale = Lanes::splat(job.scale);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int half = 0; half < 2; ++half) {
            Lanes score = half ? right[r] : left[r];
            if (key_scales) score = score * Lanes::load(key_scales + half * 16);
            score = score * scale;
            if (job.cap) score = SoftCap::of(score, job.cap);
            score.store(scores + (row + r) * CHUNK + half * 16);
        }
}

// Scores of the KEYS keys at `at`, for all rows. Their number does not matter here: lanes are keys.
template <class E>
static void score_block(const Rows& rows, const Work& work, const uint8_t* const* at, int64_t, const float* key_scales,
                        float* scores) {
    transpose_keys<E>(at, rows.job.size, work.keys);
    transpose_keys<E>(at + 16, rows.job.size, work.keys + 16);
    int64_t row = 0;
    for (; row + SCORE_ROWS <= rows.count; row += SCORE_ROWS)
        score_rows<SCORE_ROWS>(rows, row, work.keys, key_scales, scores);
    if (row + 3 == rows.count) score_rows<3>(rows, row, work.keys, key_scales, scores);
    if (row + 2 == rows.count) score_rows<2>(rows, row, work.keys, key_scales, scores);
    if (row + 1 == rows.count) score_rows<1>(rows, row, work.keys, key_scales, scores);
}

// Scores of [from, to) become exponentials relative to their maximum; lanes of the outer blocks outside become 0.
static void exponentiate(float* scores, int64_t from, int64_t to, float& maximum, float& total) {
    const int64_t begin = from / 16 * 16, end = (to + 15) / 16 * 16;
    for (int64_t i = begin; i < from; ++i) scores[i] = -__builtin_inff();
    for (int64_t i = to; i < end; ++i) scores[i] = -__builtin_inff();
    Lanes most = Lanes::load(scores + begin);
    for (int64_t i = begin + 16; i < end; i += 16) most = Lanes::larger(most, Lanes::load(scores + i));
    float each[16];
    most.store(each);
    maximum = each[0];
    for (int i = 1; i < 16; ++i) maximum = each[i] > maximum ? each[i] : maximum;
    const Lanes top = Lanes::splat(maximum);
    Lanes sums = Lanes::splat(0.0f);
    for (int64_t i = begin; i < end; i += 16) {
        const Lanes weights = exponential(Lanes::load(scores + i) - top);
        weights.store(scores + i);
        sums = sums + weights;
    }
    total = sums.sum();
}

// exp(a) and exp(b).
static inline void softmax_powers(float& a, float& b) {
    a = first_lane(exponential(Lanes::splat(a)));
    b = first_lane(exponential(Lanes::splat(b)));
}

#endif

// mixed[r] += weights[r][j] * values[j] for j in [from, to), C lanes of columns.
template <class E, int R, int C>
static void mix_tile(float* const* mixed, const float* const* weights, const uint8_t* const* values, int64_t byte,
                     int64_t column, int64_t from, int64_t to) {
    Lanes sums[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r][c] = Lanes::load(mixed[r] + column + c * 16);
    for (int64_t j = from; j < to; ++j) {
        Lanes lanes[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) lanes[c] = E::load(values[j] + byte + c * 16 * E::bytes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Lanes weight = Lanes::splat(weights[r][j]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) sums[r][c].add_product(weight, lanes[c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sums[r][c].store(mixed[r] + column + c * 16);
}

// Addresses of a chunk's values: in their pages, and the columns beyond whole lanes in a padded copy.
struct Values {
    const uint8_t* at[CHUNK];
    const uint8_t* tail[CHUNK];
    int64_t columns;
};

template <class E, int R>
static void mix_rows(float* const* mixed, const float* const* weights, const Values& values, int64_t from, int64_t to) {
    if (from >= to) return;
    const int64_t whole = values.columns / 16 * 16;
    int64_t column = 0;
    for (; column + MIX_LANES * 16 <= whole; column += MIX_LANES * 16)
        mix_tile<E, R, MIX_LANES>(mixed, weights, values.at, column * E::bytes, column, from, to);
    for (; column < whole; column += 16)
        mix_tile<E, R, 1>(mixed, weights, values.at, column * E::bytes, column, from, to);
    if (column < values.columns) mix_tile<Float32, R, 1>(mixed, weights, values.tail, 0, column, from, to);
}

// Rows of a tile see different keys only at the ends: there each row is processed alone, in between all together.
template <class E, int R>
static void mix(const Rows& rows, int64_t row, float* partial, const float* scores, const Values& values, int64_t start,
                int64_t from, int64_t to) {
    float* mixed[R];
    const float* weights[R];
    int64_t a[R], b[R], begin = 0, end = CHUNK;
    for (int r = 0; r < R; ++r) {
        mixed[r] = partial + (row + r) * partial_floats(rows.job);
        weights[r] = scores + (row + r) * CHUNK;
        a[r] = rows.from(row + r, from) - start;
        b[r] = rows.to(row + r, to) - start;
        begin = a[r] > begin ? a[r] : begin;
        end = b[r] < end ? b[r] : end;
    }
    if (begin >= end) {
        for (int r = 0; r < R; ++r) mix_rows<E, 1>(mixed + r, weights + r, values, a[r], b[r]);
        return;
    }
    for (int r = 0; r < R; ++r) mix_rows<E, 1>(mixed + r, weights + r, values, a[r], begin);
    mix_rows<E, R>(mixed, weights, values, begin, end);
    for (int r = 0; r < R; ++r) mix_rows<E, 1>(mixed + r, weights + r, values, end, b[r]);
}

#include "attention_places.hpp"
#include "attention_int4.hpp"

template <class E>
static void mix_all(const Rows& rows, float* partial, const float* scores, const Values& values, int64_t start, int64_t from,
                    int64_t to) {
    int64_t row = 0;
    for (; row + MIX_ROWS <= rows.count; row += MIX_ROWS)
        mix<E, MIX_ROWS>(rows, row, partial, scores, values, start, from, to);
    if (row + 3 == rows.count) return mix<E, 3>(rows, row, partial, scores, values, start, from, to);
    if (row + 2 == rows.count) return mix<E, 2>(rows, row, partial, scores, values, start, from, to);
    if (row + 1 == rows.count) return mix<E, 1>(rows, row, partial, scores, values, start, from, to);
}

template <class E>
static void attend_chunk(const Rows& rows, const AttentionItem& item, int64_t chunk, const Work& work, float* partial) {
    const AttentionJob& job = rows.job;
    const int64_t start = chunk * CHUNK;
    // The union of what the rows see: the first row starts first, the last row ends last.
    const int64_t from = rows.from(0, start), to = rows.to(rows.count - 1, start + CHUNK);

    for (int64_t block = from / KEYS * KEYS; block < to; block += KEYS) {
        const int64_t a = block < from ? from : block, b = block + KEYS < to ? block + KEYS : to;
        if constexpr (E::paired) {
            score_int4(rows, item, work, block, a, b, work.scores + block - start);
        } else {
            const uint8_t* at[KEYS];
            for (int64_t i = 0; i < a - block; ++i) at[i] = work.zero_line;
            locate<E>(job, job.k, item, a, b, at + (a - block));
            for (int64_t i = b - block; i < KEYS; ++i) at[i] = work.zero_line;
            float key_scales[KEYS] = {};
            if constexpr (E::scaled) code_scales<E>(job, job.k, item, a, b, key_scales + (a - block));
            score_block<E>(rows, work, at, b - block, E::scaled ? key_scales : nullptr, work.scores + block - start);
        }
    }

    Values values;
    values.columns = job.values;
    const int64_t whole = job.values / 16 * 16;
    locate<E>(job, job.v, item, from, to, values.at + (from - start));
    for (int64_t i = from - start; i < to - start; ++i) {
        float* tail = work.tails + i * 16;
        values.tail[i] = reinterpret_cast<const uint8_t*>(tail);
        if constexpr (!E::paired) {
            if (whole == job.values) continue;
            for (int64_t c = 0; c < 16; ++c)
                tail[c] = whole + c < job.values ? E::one(values.at[i] + (whole + c) * E::bytes) : 0.0f;
        }
    }
    float value_scales[CHUNK];
    if constexpr (E::scaled) code_scales<E>(job, job.v, item, from, to, value_scales + (from - start));
    const int64_t mixed = padded_values(job);
    for (int64_t row = 0; row < rows.count; ++row) {
        float *result = partial + row * partial_floats(job), *weights = work.scores + row * CHUNK;
        for (int64_t c = 0; c < mixed; ++c) result[c] = 0.0f;
        const int64_t a = rows.from(row, from) - start, b = rows.to(row, to) - start;
        if (a >= b) continue;
        exponentiate(weights, a, b, result[mixed], result[mixed + 1]);
        if constexpr (E::scaled)
            for (int64_t i = a; i < b; ++i) weights[i] *= value_scales[i];
    }
    if constexpr (E::paired) {
        const uint8_t* groups[CHUNK];
        locate_groups(job, job.v, item, from, to, groups);
        for (int64_t i = from - start; i < to - start; ++i)
            unpack_head(values.at[i], groups[i - (from - start)], job.values, work.values + i * mixed);
    } else {
        if (sizeof(float) == E::bytes || !widens(rows.count))
            return mix_all<E>(rows, partial, work.scores, values, start, from, to);
        for (int64_t i = from - start; i < to - start; ++i) {
            float* wide = work.values + i * mixed;
            for (int64_t c = 0; c < whole; c += 16) E::load(values.at[i] + c * E::bytes).store(wide + c);
            if (whole < mixed) __builtin_memcpy(wide + whole, work.tails + i * 16, 64);
        }
    }
    for (int64_t i = from - start; i < to - start; ++i)
        values.at[i] = reinterpret_cast<const uint8_t*>(work.values + i * mixed);
    values.columns = mixed;
    mix_all<Float32>(rows, partial, work.scores, values, start, from, to);
}

// Merges the next chunk's partial results into the running ones; rows that see zero_line of the chunk are skipped.
static void join_chunk(const Rows& rows, int64_t chunk, const float* partial, float* running) {
    const AttentionJob& job = rows.job;
    const int64_t mixed = padded_values(job), stride = mixed + 2, start = chunk * CHUNK;
    for (int64_t row = 0; row < rows.count; ++row) {
        if (rows.from(row, start) >= rows.to(row, start + CHUNK)) continue;
        const float* next = partial + row * stride;
        float* sum = running + row * stride;
        if (rows.from(row, 0) >= start) {  // the row's first chunk
            __builtin_memcpy(sum, next, size_t(stride) * sizeof(float));
            continue;
        }
        const float top = next[mixed] > sum[mixed] ? next[mixed] : sum[mixed];
        float old = sum[mixed] - top, fresh = next[mixed] - top;
        softmax_powers(old, fresh);
        for (int64_t c = 0; c < mixed; c += 16) {
            Lanes both = Lanes::load(sum + c) * Lanes::splat(old);
            both.add_product(Lanes::load(next + c), Lanes::splat(fresh));
            both.store(sum + c);
        }
        sum[mixed] = top;
        sum[mixed + 1] = sum[mixed + 1] * old + next[mixed + 1] * fresh;
    }
}

// Normalizes one row's sums by their total and stores them. An encoded head is whole groups of columns.
static void finish_row(const Rows& rows, int64_t row, float* sum, float total) {
    const AttentionJob& job = rows.job;
    const int64_t token = rows.token_of(row), column = rows.head_of(row) * job.values;
    if (job.ends) {
        if (rows.sees_nothing(row)) return;
        float* y = job.y + (token * job.heads + rows.head_of(row)) * (job.values + 1);
        for (int64_t c = 0; c < job.values; ++c) y[c] = sum[c] / total;
        y[job.values] = sum[padded_values(job)] + __builtin_logf(total);
        return;
    }
    if (!job.out.data) {
        float* y = job.y + token * job.heads * job.values + column;
        for (int64_t c = 0; c < job.values; ++c) y[c] = sum[c] / total;
        return;
    }
    uint8_t* encoded = job.out.data + token * job.out.stride;
    const Lanes divisor = Lanes::splat(total);
    if (job.out.kind == Activations::Tiles) {
        for (int64_t c = 0; c < job.values; c += 16) encode_tile(Lanes::load(sum + c) / divisor, encoded, column + c);
        return;
    }
    const Codes codes(encoded, job.heads * job.values);
    for (int64_t c = 0; c < job.values; c += 16) (Lanes::load(sum + c) / divisor).store(sum + c);
    for (int64_t c = 0; c < job.values; c += GROUP) encode_group(sum + c, codes, column + c);
}

// The rows [first, first + count), whose running results start at `running`.
static void finish(const Rows& rows, int64_t first, int64_t count, float* running) {
    const int64_t mixed = padded_values(rows.job);
    for (int64_t i = 0; i < count; ++i) {
        float* sum = running + i * partial_floats(rows.job);
        float total = sum[mixed + 1];
        // exp may overflow to infinity: then the sink takes all the weight, and the row is 0.
        if (rows.job.sinks)
            total += first_lane(exponential(Lanes::splat(rows.job.sinks[rows.head_of(first + i)] - sum[mixed])));
        finish_row(rows, first + i, sum, total);
    }
}

template <class E>
static void attend(const AttentionJob& job, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const AttentionItem& item = job.items[i];
        const Rows rows(job, item);
        const Work work(job, rows.count, E::paired);
        if (item.partial >= 0) {
            const int64_t each = rows.count * partial_floats(job);
            for (int64_t chunk = item.chunk_begin; chunk < item.chunk_end; ++chunk)
                attend_chunk<E>(rows, item, chunk, work,
                                job.partials + item.partial + (chunk - item.chunk_begin) * each);
            continue;
        }
        for (int64_t chunk = item.chunk_begin; chunk < item.chunk_end; ++chunk) {
            attend_chunk<E>(rows, item, chunk, work, work.partial);
            join_chunk(rows, chunk, work.partial, work.running);
        }
        finish(rows, 0, rows.count, work.running);
    }
}

static void merge_split(const AttentionJob& job, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        const AttentionItem& item = job.split[i];
        const Rows rows(job, item);
        const int64_t each = rows.count * partial_floats(job);
        float* running = scratch(each);
        for (int64_t chunk = item.chunk_begin; chunk < item.chunk_end; ++chunk)
            join_chunk(rows, chunk, job.partials + item.partial + (chunk - item.chunk_begin) * each, running);
        finish(rows, 0, rows.count, running);
    }
}

// Maximum rows per work item, so that their scores and sums stay in L1. If keys and values are widened per item, more
// rows share the widening; 36 is a whole number of tiles for one to four query heads per KV head.
#if defined(BANKFULL_NEON)
static int64_t attention_rows(const AttentionJob&) { return 36; }
#else
static int64_t attention_rows(const AttentionJob&) { return 32; }
#endif

#undef SHUFFLE
