// Attention of up to sixteen rows per KV head in tiles: decode and draft verification. Lanes are keys.
//
// All KV heads of a sequence are processed chunk by chunk: a token's heads are adjacent in its page, so that memory is
// read in order, and addresses and scales are computed once for all of them. While the weights of one head are computed,
// the tile products of the next one run.
//
// Included inside attention_tiles, after attention_tiles_ahead.hpp.

struct FewWork {
    uint8_t *queries;  // per head: as prepare_queries leaves them
    uint8_t *keys;     // copies of 16 keys and 64 dimensions, if pages cannot be read in place: the last one and this one
    uint8_t *values;   // 32 keys and 64 values, in pairs of keys
    uint8_t *weights;  // per 32 keys, [row][key]: see weights_of
    float *scores;     // of two heads: [key][row]
    float *rows;       // scores of four rows
    float *partial;    // as in attention.hpp
    float *running;    // the same, per head
    float *key_scales, *value_scales;  // per position: of all heads
    const uint8_t* zero_line;          // zero keys or values of all heads

    // A load waits for every earlier store with the same twelve low address bits. Those of weights are the bits of the
    // first half of `values`, which is not being written when a tile of weights is loaded.
    uint8_t* weights_of(int64_t block) const { return weights + block / 2 * ALIAS + block % 2 * TILE; }

    template <class E>
    static FewWork of(const AttentionJob& job, int64_t heads, int64_t rows) {
        const int64_t floats = partial_floats(job), wide = job.size > job.values ? job.size : job.values;
        const int64_t scales = has_codes<E> ? CHUNK * heads * 4 : 0;
        const int64_t zeros = heads * (job.k.head > job.v.head ? job.k.head : job.v.head) * E::bytes + wide * 2;
        const int64_t bytes[] = {BLOCKS / 2 * ALIAS, ALIAS, ALIAS, heads * SIDE * job.size * 2,
                                 2 * CHUNK * SIDE * 4, 4 * CHUNK * 4, rows * floats * 4, heads * rows * floats * 4,
                                 scales * scale_floats<E>(job.size), scales * scale_floats<E>(job.values), zeros};
        uint8_t* parts[sizeof bytes / sizeof *bytes];
        divide_scratch(bytes, parts);
        __builtin_memset(parts[10], 0, size_t(zeros));
        const auto as_floats = [&](int i) { return reinterpret_cast<float*>(parts[i]); };
        return {parts[3], parts[1], parts[2], parts[0], as_floats(4), as_floats(5), as_floats(6), as_floats(7),
                as_floats(8), as_floats(9), parts[10]};
    }
};

// What a bundle sees of a chunk. Addresses are those of its first head.
template <class E>
struct FewChunk {
    int64_t start, from, to;           // positions
    bool in_place;                     // whether tiles of keys are loaded from the pages
    const uint8_t *keys[CHUNK], *values[CHUNK];

    int64_t first_block() const { return (from - start) / WIDE; }
    int64_t last_block() const { return (to - start + WIDE - 1) / WIDE; }

    FewChunk(const Rows& rows, const Bundle& bundle, int64_t chunk, const FewWork& work)
        : start(chunk * CHUNK), from(rows.from(0, start)), to(rows.to(rows.count - 1, start + CHUNK)) {
        if (from >= to) return;
        const AttentionJob& job = rows.job;
        const AttentionItem& item = *bundle.items;
        in_place = !has_codes<E> && job.page_tokens % SIDE == 0 && to <= rows.tree;
        if (in_place)
            find_tiles(job, item);
        else
            locate_chunk<E>(job, job.k, item, start, from, to, work.zero_line, keys);
        locate_chunk<E>(job, job.v, item, start, from, to, work.zero_line, values);
        if constexpr (has_codes<E>) {
            widen(job, job.k, item, bundle.heads, job.size, work.key_scales);
            widen(job, job.v, item, bundle.heads, job.values, work.value_scales);
        }
    }

  private:
    // For pages that hold whole tiles: a tile lies in one page, and so does the space after the last key. keys[i] is the
    // address of tile i.
    void find_tiles(const AttentionJob& job, const AttentionItem& item) {
        const int64_t* table = job.table + item.sequence * job.table_stride;
        const uint8_t* head = job.k.data + item.kv_head * job.k.head * E::bytes;
        int64_t position = start + (from - start) / SIDE * SIDE;
        int64_t page = position / job.page_tokens, token = position - page * job.page_tokens;
        for (; position < to; position += SIDE) {
            keys[(position - start) / SIDE] = head + (table[page] * job.k.frame + token * job.k.token) * E::bytes;
            token += SIDE;
            if (token == job.page_tokens) token = 0, ++page;
        }
    }

    // Scales of unseen positions in the blocks that some row sees are 0, as their codes.
    void widen(const AttentionJob& job, const Pages& pages, const AttentionItem& item, int64_t heads, int64_t size,
               float* scales) const {
        const int64_t each = heads * scale_floats<E>(size);
        for (int64_t i = first_block() * WIDE * each; i < (from - start) * each; ++i) scales[i] = 0.0f;
        widen_scales<E>(job, pages, item, heads, size, from, to, scales + (from - start) * each);
        for (int64_t i = (to - start) * each; i < last_block() * WIDE * each; ++i) scales[i] = 0.0f;
    }
};

// Products of a tile of keys with the queries in registers 6 and 7, added to the sums in register `tile`. The number of a
// register is part of an instruction.
static inline void add_products(int64_t tile, const uint8_t* keys, int64_t piece, int64_t stride, bool two) {
    _tile_loadd(4, keys, stride);
    if (two) _tile_loadd(5, keys + piece, stride);
#define ADD_TO(register)                        \
    {                                           \
        _tile_dpbf16ps(register, 4, 6);         \
        if (two) _tile_dpbf16ps(register, 5, 7); \
        return;                                 \
    }
    if (tile == 0) ADD_TO(0)
    if (tile == 1) ADD_TO(1)
    if (tile == 2) ADD_TO(2)
    ADD_TO(3)
#undef ADD_TO
}

static inline void load_queries(const uint8_t* queries, bool two) {
    _tile_loadd(6, queries, LINE);
    if (two) _tile_loadd(7, queries + TILE, LINE);
}

// Scores of one head of the bundle, of four tiles of keys at a time: scores[key][row]. Tiles are taken 64 dimensions at a
// time. A copied one is multiplied after the next one is copied: tile loads wait until stores have reached the cache.
template <class E>
static void score_head(const AttentionJob& job, const FewChunk<E>& chunk, const FewWork& work, int64_t head,
                       int64_t heads, float* scores, Ahead& ahead) {
    const int64_t pieces = job.size / WIDE, end = (chunk.to - chunk.start + SIDE - 1) / SIDE;
    const int64_t byte = head * job.k.head * E::bytes, floats = scale_floats<E>(job.size), step = heads * floats;
    const uint8_t* queries = work.queries + head * SIDE * job.size * 2;
    const float* scales = work.key_scales + head * floats;
    for (int64_t tile = (chunk.from - chunk.start) / SIDE; tile < end; tile += 4) {
        const int64_t count = end - tile < 4 ? end - tile : 4;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        settle_memory();
        int64_t slot = 0;
        for (int64_t d = 0; d < pieces; d += 2) {
            const bool two = d + 1 < pieces;
            for (int64_t i = 0; i < count; ++i) {
                ahead.ask();
                if (chunk.in_place) {
                    if (i == 0) load_queries(queries + d * TILE, two);
                    add_products(i, chunk.keys[tile + i] + byte + d * LINE, LINE, job.k.token * 2, two);
                    continue;
                }
                uint8_t* copy = work.keys + slot * 2 * TILE;
                copy_tile<E>(chunk.keys + (tile + i) * SIDE, byte, d, two, scales + (tile + i) * SIDE * step, step, copy);
                settle_memory();
                slot ^= 1;
                const uint8_t* last = work.keys + slot * 2 * TILE;
                if (i > 0)
                    add_products(i - 1, last, TILE, LINE, two);
                else if (d > 0)
                    add_products(count - 1, last, TILE, LINE, true);
                if (i == 0) load_queries(queries + d * TILE, two);
            }
            if (!chunk.in_place && d + 2 >= pieces)
                add_products(count - 1, work.keys + (slot ^ 1) * 2 * TILE, TILE, LINE, two);
        }
        float* to = scores + tile * SIDE * SIDE;
        _tile_stored(0, to, LINE);
        if (count > 1) _tile_stored(1, to + SIDE * SIDE, LINE);
        if (count > 2) _tile_stored(2, to + 2 * SIDE * SIDE, LINE);
        if (count > 3) _tile_stored(3, to + 3 * SIDE * SIDE, LINE);
        settle_memory();
    }
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
                       const FewWork& work, int64_t row, float& maximum, float& total) {
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
    for (int64_t block = first; block < begin; ++block) store_line(work.weights_of(block) + row * LINE, _mm512_setzero_si512());
    for (int64_t block = begin; block < end; ++block) {
        const float* at = scores + block * WIDE;
        const __m512i low = straight(_mm512_loadu_ps(at), distance), high = straight(_mm512_loadu_ps(at + SIDE), distance);
        const __m512i both = bend(_mm512_permutex2var_epi16(low, low_words, high));
        store_line(work.weights_of(block) + row * LINE, both);
        sums = add_pairs(sums, both);
    }
    for (int64_t block = end; block < last; ++block) store_line(work.weights_of(block) + row * LINE, _mm512_setzero_si512());
    maximum = _mm512_cvtss_f32(top_of(distance)) * LOG_OF_2;
    total = Lanes{sums}.sum();
}

// 32 columns of 32 values, in pairs of keys. `scales`: of the first key; those of the next one are `step` later.
template <class E>
static inline void pair_values(const uint8_t* const* at, int64_t byte, int64_t line, const float* scales, int64_t step,
                               uint8_t* pairs, Ahead& ahead) {
    for (int64_t pair = 0; pair < SIDE; ++pair, pairs += LINE, scales += 2 * step) {
        if (pair % 8 == 7) ahead.ask();
        const __m512i even = Lines<E>(at[2 * pair] + byte, scales).of(line);
        const __m512i odd = Lines<E>(at[2 * pair + 1] + byte, scales + step).of(line);
        store_line(pairs, _mm512_unpacklo_epi16(even, odd));
        store_line(pairs + TILE, _mm512_unpackhi_epi16(even, odd));
    }
}

// N times 32 columns of P V for one head. Values of 32 keys and columns are multiplied after the next ones are prepared,
// for the same reason as keys.
template <class E, int N>
static void mix_columns(const AttentionJob& job, const FewChunk<E>& chunk, const FewWork& work, int64_t head,
                        int64_t heads, int64_t count, int64_t column, float* mixed, float* partial, Ahead& ahead) {
    const int64_t first = chunk.first_block(), last = chunk.last_block(), stride = partial_floats(job);
    const int64_t byte = head * job.v.head * E::bytes, floats = scale_floats<E>(job.values), step = heads * floats;
    const auto prepare = [&](int64_t block, int64_t half) {
        const float* scales = work.value_scales + block * WIDE * step + head * floats;
        pair_values<E>(chunk.values + block * WIDE, byte, column / WIDE + half, scales, step, work.values + half * 2 * TILE,
                       ahead);
        settle_memory();
    };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    prepare(first, 0);
    for (int64_t block = first; block < last; ++block) {
        if constexpr (N > 1) prepare(block, 1);
        _tile_loadd(7, work.weights_of(block), LINE);
        _tile_loadd(4, work.values, LINE);
        _tile_dpbf16ps(0, 7, 4);
        _tile_loadd(5, work.values + TILE, LINE);
        _tile_dpbf16ps(1, 7, 5);
        if (block + 1 < last) prepare(block + 1, 0);
        if constexpr (N > 1) {
            _tile_loadd(4, work.values + 2 * TILE, LINE);
            _tile_dpbf16ps(2, 7, 4);
            _tile_loadd(5, work.values + 3 * TILE, LINE);
            _tile_dpbf16ps(3, 7, 5);
        }
    }
    _tile_stored(0, mixed, LINE);
    _tile_stored(1, mixed + SIDE * SIDE, LINE);
    if constexpr (N > 1) {
        _tile_stored(2, mixed + 2 * SIDE * SIDE, LINE);
        _tile_stored(3, mixed + 3 * SIDE * SIDE, LINE);
    }
    settle_memory();
    alignas(64) int32_t left[SIDE], right[SIDE];  // sources of the first and of the next sixteen columns
    for (int64_t i = 0; i < SIDE; ++i)
        for (int high = 0; high < 2; ++high) {
            const int64_t place = Lines<E>::place(i, high);
            (place < SIDE ? left : right)[place % SIDE] = int32_t(i + high * SIDE);
        }
    const __m512i low_half = _mm512_load_si512(left), high_half = _mm512_load_si512(right);
    for (int64_t row = 0; row < count; ++row)
        for (int64_t i = 0; i < N; ++i) {
            const float* tile = mixed + (2 * i * SIDE + row) * SIDE;
            const __m512 low = _mm512_loadu_ps(tile), high = _mm512_loadu_ps(tile + SIDE * SIDE);
            float* to = partial + row * stride + column + i * WIDE;
            _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, low_half, high));
            _mm512_storeu_ps(to + SIDE, _mm512_permutex2var_ps(low, high_half, high));
        }
}

// From the scores of one head to its partial result.
template <class E>
static void mix_head(const Rows& rows, const FewChunk<E>& chunk, const FewWork& work, int64_t head, int64_t heads,
                     float* scores, float* partial, Ahead& ahead) {
    const AttentionJob& job = rows.job;
    const int64_t start = chunk.start, stride = partial_floats(job), first = chunk.first_block(), last = chunk.last_block();
    for (int64_t row = 0; row < rows.count; ++row) {
        float* own = work.rows + row % 4 * CHUNK;
        if (row % 4 == 0) transpose_scores(scores + row, chunk.from - start, chunk.to - start, work.rows);
        const int64_t a = rows.from(row, start) - start, b = rows.to(row, start + CHUNK) - start;
        float* facts = partial + row * stride + job.values;
        if (a < b) exponentiate_row(job, own, a, b, first, last, work, row, facts[0], facts[1]);
    }
    int64_t column = 0;  // the scores are no longer needed: their place takes sums
    for (; column + 2 * WIDE <= job.values; column += 2 * WIDE)
        mix_columns<E, 2>(job, chunk, work, head, heads, rows.count, column, scores, partial, ahead);
    if (column < job.values) mix_columns<E, 1>(job, chunk, work, head, heads, rows.count, column, scores, partial, ahead);
}

// `partials`: whether partial results of the chunks are wanted, each `step` floats after the one before.
template <class E>
static void attend_few(const AttentionJob& job, const Bundle& bundle, Ahead& ahead) {
    const AttentionItem& item = *bundle.items;
    const Rows rows(job, item);
    const int64_t heads = bundle.heads, floats = rows.count * partial_floats(job);
    const FewWork work = FewWork::of<E>(job, heads, rows.count);
    for (int64_t head = 0; head < heads; ++head)
        prepare_queries<E>(Rows(job, bundle.items[head]), 1, work.queries + head * SIDE * job.size * 2);
    // The chunk that is first for every row, if there is one: it needs no merge.
    const int64_t open = rows.from(0, 0) / CHUNK, opening = open == rows.from(rows.count - 1, 0) / CHUNK ? open : -1;
    for (int64_t number = item.chunk_begin; number < item.chunk_end; ++number) {
        const FewChunk<E> chunk(rows, bundle, number, work);
        if (chunk.from >= chunk.to) continue;
        const int64_t tiles = (chunk.last_block() - chunk.first_block()) * 2 * ((job.size + 63) / 64);
        const int64_t blocks = (chunk.last_block() - chunk.first_block()) * ((job.values + 63) / 64);
        ahead.aim<E>(job, bundle, number, heads * (tiles + 4 * blocks));
        for (int64_t head = 0; head <= heads; ++head) {
            if (head < heads)
                score_head(job, chunk, work, head, heads, work.scores + head % 2 * CHUNK * SIDE, ahead);
            if (head == 0) continue;
            const int64_t own = head - 1, partial = bundle.items[own].partial;
            float* running = work.running + own * floats;
            float* place = partial < 0 ? number == opening ? running : work.partial
                                       : job.partials + partial + (number - item.chunk_begin) * floats;
            mix_head(rows, chunk, work, own, heads, work.scores + own % 2 * CHUNK * SIDE, place, ahead);
            if (place == work.partial) join_chunk(rows, number, place, running);
        }
    }
    for (int64_t head = 0; head < heads && item.partial < 0; ++head)
        finish(Rows(job, bundle.items[head]), 0, rows.count, work.running + head * floats);
}
