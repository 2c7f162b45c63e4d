// Attention of many rows in tiles: prefill. Lanes are rows, sixteen at a time.
//
// Included inside attention_tiles, after attention_tiles_shared.hpp.

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
    _tile_loadd(4, values + TILE, LINE);
    _tile_dpbf16ps(1, 4, 7);
}

static inline void mix_next_two(const uint8_t* values) {
    _tile_loadd(4, values + 2 * TILE, LINE);
    _tile_dpbf16ps(2, 4, 7);
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
