// Attention of many rows in tiles: prefill. Lanes are rows, sixteen at a time; two blocks of sixteen rows are processed
// together, so that a loaded tile of keys or values is multiplied twice.
//
// Tile and vector units overlap: while the weights of one pair of blocks are computed, the next pair is scored; while
// those weights multiply the values, the next maxima are computed and finished sums are merged into the running ones.
//
// Included inside attention_tiles, after attention_tiles_shared.hpp.

// Addresses of a chunk's keys: piece d of tile t (dimensions from 32 d of the keys from 16 t).
struct Keys {
    const uint8_t* tiles[CHUNK / SIDE];
    int64_t piece, stride;
};

struct Work {
    uint8_t *queries;  // per sixteen rows: as prepare_queries leaves them
    uint8_t *keys;     // copies: tiles of 16 keys and 32 dimensions
    uint8_t *values;   // per 32 keys: the keys of each value
    float *scores;     // of thirty-two rows, and of the next thirty-two; per sixteen rows [key][row]. Weights replace
                       // them: [pair of keys][row]
    float *rows;       // results of sixteen consecutive rows
    float *partial, *running;  // values, maximum and sum of sixteen rows in lanes
    int32_t *ends;     // per row: the position after the last one it sees
    uint8_t *widened;  // a chunk's values, if pages hold codes
    float *scales;     // of a chunk's keys or values, if pages hold codes
    const uint8_t* zero_line;  // a zero key or value

    int64_t blocks;    // of sixteen rows; even

    Work(const AttentionJob& job, const Rows& all) : blocks((all.count + 31) / 32 * 2) {
        const int64_t floats = partial_floats(job), line = job.size > job.values ? job.size : job.values;
        const int64_t bytes[] = {blocks * SIDE * job.size * 2, CHUNK * job.size * 2, CHUNK * job.values * 2,
                                 4 * CHUNK * SIDE * 4, SIDE * floats * 4, 2 * SIDE * floats * 4,
                                 blocks * SIDE * floats * 4, blocks * SIDE * 4, job.v.scales ? CHUNK * job.values * 2 : 0,
                                 job.v.scales ? CHUNK * (line / WIDE + 1) * 4 : 0, line * 2};
        uint8_t* parts[sizeof bytes / sizeof *bytes];
        divide_scratch(bytes, parts);
        queries = parts[0], keys = parts[1], values = parts[2], widened = parts[8], zero_line = parts[10];
        scores = reinterpret_cast<float*>(parts[3]), rows = reinterpret_cast<float*>(parts[4]);
        partial = reinterpret_cast<float*>(parts[5]), running = reinterpret_cast<float*>(parts[6]);
        ends = reinterpret_cast<int32_t*>(parts[7]), scales = reinterpret_cast<float*>(parts[9]);
        __builtin_memset(parts[10], 0, size_t(line) * 2);
        for (int64_t row = 0; row < blocks * SIDE; ++row)
            ends[row] = int32_t(all.to(row < all.count ? row : all.count - 1, INT64_MAX));
    }
    uint8_t* queries_of(const AttentionJob& job, int64_t block) const { return queries + block * SIDE * job.size * 2; }
    float* partial_of(const AttentionJob& job, int64_t block) const {
        return partial + block * SIDE * partial_floats(job);
    }
    float* running_of(const AttentionJob& job, int64_t block) const {
        return running + block * SIDE * partial_floats(job);
    }
};

// Addresses of the chunk's keys or values and, if pages hold codes, their scales; both are 0 at positions that no row
// sees. Returns the number of floats per head.
template <class E>
static int64_t find_heads(const Rows& rows, const Pages& pages, const AttentionItem& item, int64_t size, int64_t start,
                          int64_t from, int64_t to, const Work& work, const uint8_t** at) {
    locate_chunk<E>(rows.job, pages, item, start, from, to, work.zero_line, at);
    const int64_t each = scale_floats<E>(size);
    if constexpr (has_codes<E>) {
        for (int64_t i = 0; i < (from - start) * each; ++i) work.scales[i] = 0.0f;
        widen_scales<E>(rows.job, pages, item, 1, size, from, to, work.scales + (from - start) * each);
        for (int64_t i = (to - start) * each; i < CHUNK * each; ++i) work.scales[i] = 0.0f;
    }
    return each;
}

template <class E>
static void copy_keys(const Rows& rows, const AttentionItem& item, int64_t start, int64_t from, int64_t to,
                      const Work& work, Keys& keys) {
    const AttentionJob& job = rows.job;
    const uint8_t* at[CHUNK];
    const int64_t floats = find_heads<E>(rows, job.k, item, job.size, start, from, to, work, at);
    keys.piece = TILE;
    keys.stride = LINE;
    // Whole blocks: two tiles are scored at once.
    for (int64_t tile = (from - start) / WIDE * 2; tile < (to - start + WIDE - 1) / WIDE * 2; ++tile) {
        uint8_t* copy = work.keys + tile * SIDE * job.size * 2;
        keys.tiles[tile] = copy;
        for (int64_t d = 0; d < job.size / WIDE; d += 2)
            copy_tile<E>(at + tile * SIDE, 0, d, d + 1 < job.size / WIDE, work.scales + tile * SIDE * floats, floats,
                         copy + d * TILE);
    }
}

// The keys of each value, in tiles of 32 keys and 16 values.
template <class E>
static void turn_values(const Rows& rows, const AttentionItem& item, int64_t start, int64_t from, int64_t to,
                        const Work& work) {
    const AttentionJob& job = rows.job;
    const uint8_t* at[CHUNK];
    const int64_t floats = find_heads<E>(rows, job.v, item, job.values, start, from, to, work, at);
    const int64_t first = (from - start) / WIDE, last = (to - start + WIDE - 1) / WIDE;
    if constexpr (has_codes<E>)
        for (int64_t i = first * WIDE; i < last * WIDE; ++i) {
            uint8_t* wide = work.widened + i * job.values * 2;
            const Lines<E> lines(at[i], work.scales + i * floats);
            for (int64_t c = 0; c < job.values / WIDE; ++c) store_line(wide + c * LINE, lines.of(c));
            at[i] = wide;
        }
    for (int64_t block = first; block < last; ++block)
        for (int64_t c = 0; c < job.values; c += WIDE)
            for (int high = 0; high < 2; ++high) {
                __m512i lines[16];
                for (int64_t pair = 0; pair < SIDE; ++pair) {
                    const uint8_t* const* both = at + block * WIDE + 2 * pair;
                    const __m512i even = load_line(both[0] + c * 2), odd = load_line(both[1] + c * 2);
                    lines[pair] = high ? _mm512_unpackhi_epi16(even, odd) : _mm512_unpacklo_epi16(even, odd);
                }
                transpose(lines);
                uint8_t* to_values = work.values + (block * job.values + c) * LINE;
                for (int64_t i = 0; i < SIDE; ++i) store_line(to_values + Lines<E>::place(i, high) * LINE, lines[i]);
            }
}

// Visibility of a chunk for sixteen rows: each row sees the keys [from, to); at least one row sees [seen_from,
// seen_to), all of them [all_from, all_to).
struct Visibility {
    __m512i from, to;
    int64_t seen_from, seen_to, all_from, all_to;
    __mmask16 sees, begins;  // rows that see any key of the chunk; rows that start in it

    Visibility(const AttentionJob& job, const int32_t* ends, int64_t start) {
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
    bool empty() const { return seen_from >= seen_to; }
    int64_t first_block() const { return seen_from / WIDE; }
    int64_t last_block() const { return (seen_to + WIDE - 1) / WIDE; }
};

// Two blocks of sixteen rows, in progress within a chunk.
struct Pair {
    Visibility sights[2];
    int64_t first, last;  // blocks of keys that some row sees
    float* scores;        // [block of rows][key][row]; later weights, in each block's first half
    const uint8_t* queries;
    __m512 most[2][2];  // running maxima: of even keys, and of odd ones

    Pair(const AttentionJob& job, const Work& work, int64_t block, int64_t start)
        : sights{Visibility(job, work.ends + block * SIDE, start), Visibility(job, work.ends + (block + 1) * SIDE, start)},
          first(sights[0].first_block()), last(sights[1].last_block()),
          scores(work.scores + block % 4 * CHUNK * SIDE), queries(work.queries_of(job, block)) {
        for (auto& each : most) each[0] = each[1] = _mm512_set1_ps(-__builtin_inff());
    }
    bool empty() const { return first >= last; }
    float* scores_of(int64_t i, int64_t block) const { return scores + (i * CHUNK + block * WIDE) * SIDE; }

    // Masks scores with -infinity, and applies the soft cap if there is one.
    void hide(const AttentionJob& job) const {
        for (int64_t i = 0; i < 2; ++i) {
            const Visibility& visibility = sights[i];
            for (int64_t key = first * WIDE; key < last * WIDE; key += SIDE) {
                const bool edge = key < visibility.all_from || key + SIDE > visibility.all_to;
                if (!edge && !job.cap) continue;
                float* at = scores_of(i, key / WIDE) + key % WIDE * SIDE;
                for (int64_t k = 0; k < SIDE; ++k, at += SIDE) {
                    __m512 score = _mm512_load_ps(at);
                    if (job.cap) score = capped(job, score);
                    const __m512i here = _mm512_set1_epi32(int32_t(key + k));
                    const __mmask16 seen =
                        _mm512_cmple_epi32_mask(visibility.from, here) & _mm512_cmpgt_epi32_mask(visibility.to, here);
                    _mm512_store_ps(at, _mm512_mask_blend_ps(seen, _mm512_set1_ps(-__builtin_inff()), score));
                }
            }
        }
    }

    void find_most(int64_t block) {
        for (int64_t i = 0; i < 2; ++i) {
            const float* at = scores_of(i, block);
            for (int64_t key = 0; key < WIDE; key += 2)
                for (int64_t k = 0; k < 2; ++k)
                    most[i][k] = _mm512_max_ps(most[i][k], _mm512_load_ps(at + (key + k) * SIDE));
        }
    }

    __m512 top(int64_t i) const {
        const __m512 all = _mm512_max_ps(most[i][0], most[i][1]);
        // A row that sees nothing has no maximum: its weights must be 0, not NaN.
        const __mmask16 none = _mm512_cmp_ps_mask(all, _mm512_set1_ps(-__builtin_inff()), _CMP_EQ_OQ);
        return _mm512_mask_blend_ps(none, all, _mm512_setzero_ps());
    }
};

// Scores of a pair, computed in between other work, half a tile of keys at a time.
class Scoring {
  public:
    Scoring(const AttentionJob& job, const Keys& keys, const Pair* pair)
        : keys_(keys), pair_(pair), pieces_(job.size / WIDE), resident_(pieces_ <= 2), others_(SIDE * job.size * 2),
          tile_(pair ? pair->first * 2 : 0), end_(pair ? pair->last * 2 : 0) {
        if (tile_ >= end_ || !resident_) return;
        _tile_loadd(4, pair->queries, LINE);
        _tile_loadd(5, pair->queries + others_, LINE);
        if (pieces_ < 2) return;
        _tile_loadd(6, pair->queries + TILE, LINE);
        _tile_loadd(7, pair->queries + others_ + TILE, LINE);
    }
    void begin() {
        if (tile_ >= end_) return;
        _tile_zero(0);
        _tile_zero(1);
        if (!resident_) return multiply(0, pieces_ / 2);
        _tile_loadd(2, keys_.tiles[tile_], keys_.stride);
        _tile_dpbf16ps(0, 2, 4);
        _tile_dpbf16ps(1, 2, 5);
    }
    void finish() {
        if (tile_ >= end_) return;
        if (!resident_) {
            multiply(pieces_ / 2, pieces_);
        } else if (pieces_ > 1) {
            _tile_loadd(3, keys_.tiles[tile_] + keys_.piece, keys_.stride);
            _tile_dpbf16ps(0, 3, 6);
            _tile_dpbf16ps(1, 3, 7);
        }
        float* to = pair_->scores + tile_++ * SIDE * SIDE;
        _tile_stored(0, to, LINE);
        _tile_stored(1, to + CHUNK * SIDE, LINE);
    }
    void finish_all() {
        while (tile_ < end_) begin(), finish();
        settle_memory();
    }

  private:
    const Keys& keys_;
    const Pair* pair_;
    int64_t pieces_;
    bool resident_;   // queries stay in tile registers
    int64_t others_;  // bytes between the queries of both blocks
    int64_t tile_, end_;

    void multiply(int64_t from, int64_t to) const {
        for (int64_t d = from; d < to; ++d) {
            _tile_loadd(2, keys_.tiles[tile_] + d * keys_.piece, keys_.stride);
            _tile_loadd(4, pair_->queries + d * TILE, LINE);
            _tile_dpbf16ps(0, 2, 4);
            _tile_loadd(5, pair_->queries + others_ + d * TILE, LINE);
            _tile_dpbf16ps(1, 2, 5);
        }
    }
};

// Four of a block's sixteen pairs of keys: scores become weights. A pair's weights are added to the sum of its position
// in the block, as in exponentiate_row.
static inline void weigh_pairs(const float* scores, int64_t first, __m512 distance, uint8_t* weights,
                               __m512 (&sums)[SIDE]) {
#pragma GCC unroll 4
    for (int64_t pair = first; pair < first + 4; ++pair) {
        const float* at = scores + 2 * pair * SIDE;
        const __m512i even = straight(_mm512_load_ps(at), distance), odd = straight(_mm512_load_ps(at + SIDE), distance);
        const __m512i both = bend(_mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_bslli_epi128(odd, 2)));
        store_line(weights + pair * LINE, both);
        sums[pair] = add_pairs(sums[pair], both);
    }
}

// In the order of Lanes::sum.
static inline __m512 sum_up(__m512 (&sums)[SIDE]) {
    for (int64_t half = SIDE / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; ++i) sums[i] = _mm512_add_ps(sums[i], sums[i + half]);
    return sums[0];
}

// Scores of a pair become weights; maxima and sums go to `results`, after the values. Meanwhile `next` is scored.
static void exponentiate(const AttentionJob& job, const Keys& keys, const Pair& pair, float* const* results,
                   const Pair* next) {
    Scoring ahead(job, keys, next);
    for (int64_t i = 0; i < 2; ++i) {
        const __m512 distance = distance_from(pair.top(i));
        __m512 sums[SIDE];
        for (__m512& sum : sums) sum = _mm512_setzero_ps();
        for (int64_t block = pair.first; block < pair.last; ++block) {
            float* at = pair.scores_of(i, block);
            uint8_t* weights = reinterpret_cast<uint8_t*>(at);
            ahead.begin();
            weigh_pairs(at, 0, distance, weights, sums);
            weigh_pairs(at, 4, distance, weights, sums);
            ahead.finish();
            weigh_pairs(at, 8, distance, weights, sums);
            weigh_pairs(at, 12, distance, weights, sums);
        }
        float* facts = results[i] + job.values * SIDE;
        _mm512_storeu_ps(facts, _mm512_mul_ps(top_of(distance), _mm512_set1_ps(LOG_OF_2)));
        _mm512_storeu_ps(facts + SIDE, sum_up(sums));
    }
    ahead.finish_all();
}

// join_chunk of attention.hpp for sixteen rows in lanes: the same operations on the same numbers.
class Merging {
  public:
    // `next` may be the running result itself: a chunk that is first for all of its rows needs no merge.
    Merging(const AttentionJob& job, const Visibility& visibility, const float* next, float* running)
        : next_(next), running_(running), values_(job.values * SIDE), sees_(visibility.sees),
          merges_(visibility.sees & __mmask16(~visibility.begins)) {
        if (next == running) return;
        const Lanes a = Lanes::load(running + values_), b = Lanes::load(next + values_);
        const Lanes top{_mm512_mask_blend_ps(_mm512_cmp_ps_mask(b.v, a.v, _CMP_GT_OQ), a.v, b.v)};
        old_ = exponential(a - top), fresh_ = exponential(b - top);
        float *most = running + values_, *total = most + SIDE;
        const Lanes before = Lanes::load(total), after = Lanes::load(next + values_ + SIDE);
        _mm512_storeu_ps(total, keep(before, before * old_ + after * fresh_, after));
        _mm512_storeu_ps(most, keep(a, top, b));
    }
    void values(int64_t from, int64_t to) const {
        if (next_ == running_) return;
        const bool all_merge = merges_ == __mmask16(-1);  // the usual case, without masks
        for (int64_t c = from * SIDE; c < to * SIDE; c += SIDE) {
            const Lanes before = Lanes::load(running_ + c), after = Lanes::load(next_ + c);
            Lanes both = before * old_;
            both.add_product(after, fresh_);
            _mm512_storeu_ps(running_ + c, all_merge ? both.v : keep(before, both, after));
        }
    }

  private:
    const float* next_;
    float* running_;
    int64_t values_;
    __mmask16 sees_, merges_;
    Lanes old_, fresh_;

    __m512 keep(Lanes before, Lanes merged, Lanes after) const {
        return _mm512_mask_blend_ps(merges_, _mm512_mask_blend_ps(sees_, before.v, after.v), merged.v);
    }
};

// V^T P^T, 32 values at a time. Between tiles, the maxima of `next` are computed and previous values are merged.
static void mix(const AttentionJob& job, const Work& work, const Pair& pair, float* const* results, Pair* next,
                const Merging* joins) {
    int64_t sought = next ? next->first : 0;
    const int64_t sought_end = next ? next->last : 0;
    const auto load = [&](int64_t block, int64_t value) {
        const uint8_t* at = work.values + (block * job.values + value) * LINE;
        _tile_loadd(4, at, LINE);
        _tile_loadd(5, at + TILE, LINE);
        _tile_loadd(6, pair.scores_of(0, block), LINE);
        _tile_loadd(7, pair.scores_of(1, block), LINE);
    };
    load(pair.first, 0);
    for (int64_t value = 0; value < job.values; value += WIDE) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        int64_t joined = value - WIDE;
        for (int64_t block = pair.first; block < pair.last; ++block) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
            // Before any store: a load waits for every store with the same low address bits.
            if (block + 1 < pair.last)
                load(block + 1, value);
            else if (value + WIDE < job.values)
                load(pair.first, value + WIDE);
            if (sought < sought_end) next->find_most(sought++);
            if (joins && value) {
                for (int64_t i = 0; i < 2; ++i) joins[i].values(joined, joined + WIDE / BLOCKS);
                joined += WIDE / BLOCKS;
            }
        }
        for (int64_t i = 0; joins && value && i < 2; ++i) joins[i].values(joined, value);
        _tile_stored(0, results[0] + value * SIDE, LINE);
        _tile_stored(1, results[0] + (value + SIDE) * SIDE, LINE);
        _tile_stored(2, results[1] + value * SIDE, LINE);
        _tile_stored(3, results[1] + (value + SIDE) * SIDE, LINE);
        settle_memory();
    }
    while (sought < sought_end) next->find_most(sought++);
    for (int64_t i = 0; joins && i < 2; ++i) joins[i].values(job.values - WIDE, job.values);
}

// Transposes sixteen rows in lanes to rows as in attention.hpp.
static void transpose_result(const AttentionJob& job, const float* lanes, int64_t count, float* rows) {
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

// Merges the chunk into the running result, or stores its partial results at `partials`.
template <class E>
static void attend_chunk(const Rows& rows, const AttentionItem& item, int64_t chunk, const Work& work, float* partials) {
    const AttentionJob& job = rows.job;
    const int64_t start = chunk * CHUNK;
    const int64_t from = rows.from(0, start), to = rows.to(rows.count - 1, start + CHUNK);
    if (from >= to) return;
    Keys keys;
    copy_keys<E>(rows, item, start, from, to, work, keys);
    turn_values<E>(rows, item, start, from, to, work);
    settle_memory();
    // Later rows see later keys: the pairs that see any key of the chunk are consecutive.
    int64_t block = 0;
    while (Pair(job, work, block, start).empty()) block += 2;
    Pair pair(job, work, block, start);
    Scoring(job, keys, &pair).finish_all();
    pair.hide(job);
    for (int64_t b = pair.first; b < pair.last; ++b) pair.find_most(b);
    for (;; block += 2) {
        Pair next = block + 2 < work.blocks ? Pair(job, work, block + 2, start) : pair;
        const bool goes_on = block + 2 < work.blocks && !next.empty();
        float *running[2], *results[2];
        for (int64_t i = 0; i < 2; ++i) {
            const Visibility& visibility = pair.sights[i];
            running[i] = work.running_of(job, block + i);
            const bool opens = !partials && (visibility.sees & visibility.begins) == __mmask16(-1);
            results[i] = opens ? running[i] : work.partial_of(job, i);
        }
        exponentiate(job, keys, pair, results, goes_on ? &next : nullptr);
        if (goes_on) next.hide(job);
        settle_memory();
        if (partials) {
            mix(job, work, pair, results, goes_on ? &next : nullptr, nullptr);
            for (int64_t i = 0; i < 2; ++i) {
                const int64_t row = (block + i) * SIDE, left = rows.count - row;
                transpose_result(job, results[i], left < SIDE ? left : SIDE, partials + row * partial_floats(job));
            }
        } else {
            const Merging joins[2] = {{job, pair.sights[0], results[0], running[0]},
                                      {job, pair.sights[1], results[1], running[1]}};
            mix(job, work, pair, results, goes_on ? &next : nullptr, joins);
        }
        if (!goes_on) return;
        pair = next;
    }
}

template <class E>
static void attend_many(const AttentionJob& job, const AttentionItem& item) {
    const Rows rows(job, item);
    const Work work(job, rows);
    prepare_queries<E>(rows, work.blocks, work.queries);
    const int64_t step = rows.count * partial_floats(job);
    for (int64_t chunk = item.chunk_begin; chunk < item.chunk_end; ++chunk)
        attend_chunk<E>(rows, item, chunk, work,
                        item.partial < 0 ? nullptr : job.partials + item.partial + (chunk - item.chunk_begin) * step);
    if (item.partial >= 0) return;
    for (int64_t row = 0; row < rows.count; row += SIDE) {
        const int64_t count = rows.count - row < SIDE ? rows.count - row : SIDE;
        transpose_result(job, work.running_of(job, row / SIDE), count, work.rows);
        finish(rows, row, count, work.rows);
    }
}
