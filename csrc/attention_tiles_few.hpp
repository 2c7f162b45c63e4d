// Attention of up to sixteen rows in tiles: decode and draft verification. Lanes are keys.
//
// Included inside attention_tiles, after attention_tiles_shared.hpp.

constexpr int64_t NEAR_BYTES = 1 << 19;  // that stay in a core's cache while its heads are processed

// Prefetches the keys and values of the next sequence while the current one is processed, a few lines at a time, so
// that memory and arithmetic overlap: many prefetches at once would stall, because a core has only some dozens of
// outstanding loads. Lines come from several pages in turn, which memory serves faster than page after page; all pages
// of a long sequence at once would exceed the TLB.
class Ahead {
  public:
    // `item` is processed next. Its heads share the prefetch of the following sequence's lines.
    void follow(const AttentionJob& job, const AttentionItem& item) {
        if (item.kv_head != 0) return;
        page_ = pages_ = row_ = 0;
        if (item.partial >= 0 || job.items_end - &item <= job.kv_heads) return;
        const AttentionItem* next = &item + job.kv_heads;
        if (next->sequence == item.sequence) return;
        const int64_t number = job.k.scales ? 1 : 2, token = job.k.token * number;
        const bool dense = job.k.token == job.kv_heads * job.k.head && job.v.token == job.k.token;
        const Rows rows(job, *next);
        const int64_t first = rows.from(0, 0) / job.page_tokens;
        const int64_t last = (rows.to(rows.count - 1, INT64_MAX) + job.page_tokens - 1) / job.page_tokens;
        bytes_ = job.page_tokens * token;
        if (!dense || rows.count > FEW_ROWS || last - first > MOST_PAGES || 2 * (last - first) * bytes_ > NEAR_BYTES)
            return;
        const int64_t* table = job.table + next->sequence * job.table_stride;
        for (int64_t page = first; page < last; ++page) {
            at_[pages_++] = job.k.data + table[page] * job.k.frame * number;
            at_[pages_++] = job.v.data + table[page] * job.v.frame * number;
        }
        const int64_t asks = (item.chunk_end - item.chunk_begin) * BLOCKS * job.kv_heads * ASKS;
        rows_ = ((pages_ + STREAMS - 1) / STREAMS * (bytes_ / LINE) + asks - 1) / asks;
    }
    void ask() {
        for (int64_t i = 0; i < rows_ && page_ < pages_; ++i) {
            const int64_t end = page_ + STREAMS < pages_ ? page_ + STREAMS : pages_;
            for (int64_t page = page_; page < end; ++page)
                _mm_prefetch(reinterpret_cast<const char*>(at_[page] + row_), _MM_HINT_T1);
            row_ += LINE;
            if (row_ >= bytes_) row_ = 0, page_ = end;
        }
    }

  private:
    static constexpr int64_t MOST_PAGES = 64, STREAMS = 8;
    static constexpr int64_t ASKS = 4;  // minimum prefetch calls per block of keys

    const uint8_t* at_[2 * MOST_PAGES];  // keys and values of each page
    int64_t pages_ = 0, bytes_ = 0;      // bytes: per page
    int64_t page_ = 0, row_ = 0;         // resume position: lines of the streams from this page on
    int64_t rows_ = 0;                   // ... and lines per call
};

// For pages that hold whole tiles: a tile lies in one page, and so does the space after the last key.
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
static inline void score_tiles(const Keys& keys, int64_t tile, const uint8_t* queries, int64_t pieces, float* scores,
                               Ahead& ahead) {
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
            _tile_loadd(4, at[1] + offset, keys.stride);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (N > 2) {
            _tile_loadd(4, at[2] + offset, keys.stride);
            _tile_dpbf16ps(2, 4, 7);
        }
        if constexpr (N > 3) {
            _tile_loadd(4, at[3] + offset, keys.stride);
            _tile_dpbf16ps(3, 4, 7);
        }
        ahead.ask();
    }
    float* to = scores + tile * SIDE * SIDE;
    _tile_stored(0, to, LINE);
    if constexpr (N > 1) _tile_stored(1, to + SIDE * SIDE, LINE);
    if constexpr (N > 2) _tile_stored(2, to + 2 * SIDE * SIDE, LINE);
    if constexpr (N > 3) _tile_stored(3, to + 3 * SIDE * SIDE, LINE);
}

static void score(const Keys& keys, int64_t from, int64_t to, const uint8_t* queries, int64_t size, float* scores,
                  Ahead& ahead) {
    const int64_t pieces = size / WIDE, end = (to + SIDE - 1) / SIDE;
    int64_t tile = from / SIDE;
    settle_memory();
    for (; tile + 4 <= end; tile += 4) score_tiles<4>(keys, tile, queries, pieces, scores, ahead);
    if (tile + 3 == end) score_tiles<3>(keys, tile, queries, pieces, scores, ahead);
    if (tile + 2 == end) score_tiles<2>(keys, tile, queries, pieces, scores, ahead);
    if (tile + 1 == end) score_tiles<1>(keys, tile, queries, pieces, scores, ahead);
}

// Transposes four columns of the scores: rows[r * CHUNK + key].
static void transpose_scores(const float* scores, int64_t from, int64_t to, float* rows) {
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

alignas(64) static constexpr uint16_t LOW_WORDS[] = {
    0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
    32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};

// One row's weights for the blocks [first, last) of the chunk, of which it sees the keys [from, to).
static void exponentiate_row(const AttentionJob& job, float* scores, int64_t from, int64_t to, int64_t first, int64_t last,
                       uint8_t* weights, float& maximum, float& total) {
    const int64_t begin = from / WIDE, end = (to + WIDE - 1) / WIDE;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low_words = _mm512_load_si512(LOW_WORDS);
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
    const __m512 distance = distance_from(_mm512_set1_ps(_mm512_reduce_max_ps(most)));
    __m512 sums = _mm512_setzero_ps();
    for (int64_t block = first; block < begin; ++block) store_line(weights + block * TILE, _mm512_setzero_si512());
    for (int64_t block = begin; block < end; ++block) {
        const float* at = scores + block * WIDE;
        const __m512i low = straight(_mm512_loadu_ps(at), distance), high = straight(_mm512_loadu_ps(at + SIDE), distance);
        const __m512i both = bend(_mm512_permutex2var_epi16(low, low_words, high));
        store_line(weights + block * TILE, both);
        sums = add_pairs(sums, both);
    }
    for (int64_t block = end; block < last; ++block) store_line(weights + block * TILE, _mm512_setzero_si512());
    maximum = _mm512_cvtss_f32(top_of(distance)) * LOG_OF_2;
    total = Lanes{sums}.sum();
}

// N times 32 columns of 32 values, in pairs of keys.
template <int N>
static inline void pair_values(const uint8_t* const* at, int64_t byte, uint8_t* pairs, Ahead& ahead) {
    for (int64_t pair = 0; pair < SIDE; ++pair, pairs += LINE) {
        if (pair % 4 == 3) ahead.ask();
        for (int64_t i = 0; i < N; ++i) {
            store_line(pairs + 2 * i * TILE, pair_up(at, pair, byte + i * LINE, false));
            store_line(pairs + (2 * i + 1) * TILE, pair_up(at, pair, byte + i * LINE, true));
        }
    }
}

// N times 32 columns of P V. The next block of values is prepared during the tile products of this one.
template <int N>
static void mix_columns(const Work& work, const uint8_t* const* at, int64_t count, int64_t column, int64_t first,
                        int64_t last, float* partial, int64_t stride, Ahead& ahead) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (N > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    pair_values<N>(at + first * WIDE, column * 2, work.values + first % 2 * 4 * TILE, ahead);
    for (int64_t block = first; block < last; ++block) {
        if (block + 1 < last)
            pair_values<N>(at + (block + 1) * WIDE, column * 2, work.values + (block + 1) % 2 * 4 * TILE, ahead);
        settle_memory();
        const uint8_t* pairs = work.values + block % 2 * 4 * TILE;
        _tile_loadd(7, work.weights + block * TILE, LINE);
        _tile_loadd(4, pairs, LINE);
        _tile_dpbf16ps(0, 7, 4);
        _tile_loadd(4, pairs + TILE, LINE);
        _tile_dpbf16ps(1, 7, 4);
        if constexpr (N > 1) {
            _tile_loadd(4, pairs + 2 * TILE, LINE);
            _tile_dpbf16ps(2, 7, 4);
            _tile_loadd(4, pairs + 3 * TILE, LINE);
            _tile_dpbf16ps(3, 7, 4);
        }
    }
    float* mixed = work.scores;  // scores are no longer needed
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

static void attend_few(const Rows& rows, const AttentionItem& item, int64_t chunk, const Work& work, float* partial,
                       Ahead& ahead) {
    const AttentionJob& job = rows.job;
    const int64_t start = chunk * CHUNK, stride = partial_floats(job);
    const int64_t from = rows.from(0, start), to = rows.to(rows.count - 1, start + CHUNK);
    if (from >= to) return;
    const int64_t first = (from - start) / WIDE, last = (to - start + WIDE - 1) / WIDE;
    Keys keys;
    if (job.page_tokens % SIDE == 0 && !job.k.scales && to <= rows.tree)
        find_keys(job, item, start, from, to, keys);
    else
        copy_keys(rows, item, start, from, to, work, keys);
    score(keys, from - start, to - start, work.queries, job.size, work.scores, ahead);
    const uint8_t* at[CHUNK];
    find_values(rows, item, start, from, to, work, at);
    for (int64_t row = 0; row < rows.count; ++row) {
        float* scores = work.rows + row % 4 * CHUNK;
        if (row % 4 == 0) transpose_scores(work.scores + row, from - start, to - start, scores);
        const int64_t a = rows.from(row, start) - start, b = rows.to(row, start + CHUNK) - start;
        float* facts = partial + row * stride + job.values;
        if (a < b) exponentiate_row(job, scores, a, b, first, last, work.weights + row * LINE, facts[0], facts[1]);
        ahead.ask();
    }
    int64_t column = 0;
    for (; column + 2 * WIDE <= job.values; column += 2 * WIDE)
        mix_columns<2>(work, at, rows.count, column, first, last, partial, stride, ahead);
    if (column < job.values) mix_columns<1>(work, at, rows.count, column, first, last, partial, stride, ahead);
}
