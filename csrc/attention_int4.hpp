// Scores of int4 keys. Their scales belong to groups of a head, so a head is unpacked before it is multiplied.
//
// Included inside a namespace per instruction set.

// Addresses of the groups' scales of int4 pages.
static void locate_groups(const AttentionJob& job, const Pages& pages, const AttentionItem& item, int64_t from,
                          int64_t to, const uint8_t** at) {
    const Pages groups{reinterpret_cast<uint8_t*>(pages.scales), pages.scale_frame, pages.scale_token, pages.scale_head,
                       nullptr, 0, 0, 0};
    locate<Int4Scale>(job, groups, item, from, to, at);
}

// Products of K unpacked keys and R rows, in lanes of dimensions. Keys need no transpose.
template <int R, int K>
__attribute__((always_inline)) static inline void multiply_unpacked(const float* const* q, const float* keys, int64_t padded, int64_t size, Lanes* sums) {
#pragma GCC unroll 16
    for (int i = 0; i < K * R; ++i) sums[i] = Lanes::splat(0.0f);
    const int64_t whole = size / 16 * 16;
    for (int64_t d = 0; d < whole; d += 16)
#pragma GCC unroll 4
        for (int k = 0; k < K; ++k) {
            const Lanes numbers = Lanes::load(keys + k * padded + d);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[k * R + r].add_product(Lanes::load(q[r] + d), numbers);
        }
    if (whole == size) return;
    for (int k = 0; k < K; ++k)
        for (int r = 0; r < R; ++r)
            sums[k * R + r].add_product(load_some(q[r] + whole, size - whole), Lanes::load(keys + k * padded + whole));
}

#if defined(__AVX512F__)

// The sums of sixteen registers, each in the order of Lanes::sum. Four registers of four: block j has the sums of j, 4 + j,
// 8 + j and 12 + j.
__attribute__((always_inline)) static inline __m512 sixteen_sums(const Lanes* v) {
    __m512 p[8], r[4], t[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        p[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i].v, v[2 * i + 1].v, 0x44),
                             _mm512_shuffle_f32x4(v[2 * i].v, v[2 * i + 1].v, 0xee));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        r[i] = _mm512_add_ps(_mm512_shuffle_f32x4(p[2 * i], p[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(p[2 * i], p[2 * i + 1], 0xdd));
    for (int i = 0; i < 2; ++i)
        t[i] = _mm512_add_ps(_mm512_shuffle_ps(r[2 * i], r[2 * i + 1], 0x44),
                             _mm512_shuffle_ps(r[2 * i], r[2 * i + 1], 0xee));
    return _mm512_add_ps(_mm512_shuffle_ps(t[0], t[1], 0x88), _mm512_shuffle_ps(t[0], t[1], 0xdd));
}

#endif

// Scores of the keys [a, b) of a block for R rows.
template <int R>
static void score_unpacked(const Rows& rows, int64_t row, const float* keys, int64_t padded, int64_t a, int64_t b,
                           float* scores) {
    const AttentionJob& job = rows.job;
    const float* q[R];
    for (int r = 0; r < R; ++r) q[r] = rows.query(row + r);
    int64_t key = a;
#if defined(__AVX512F__)
    if constexpr (R == 4)
        for (; key + 4 <= b; key += 4) {
            Lanes sums[16];
            multiply_unpacked<4, 4>(q, keys + key * padded, padded, job.size, sums);
            float each[16];
            _mm512_storeu_ps(each, _mm512_mul_ps(sixteen_sums(sums), _mm512_set1_ps(job.scale)));
            for (int r = 0; r < 4; ++r) __builtin_memcpy(scores + (row + r) * CHUNK + key, each + 4 * r, 16);
        }
#endif
    for (; key < b; ++key) {
        Lanes sums[R];
        multiply_unpacked<R, 1>(q, keys + key * padded, padded, job.size, sums);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) scores[(row + r) * CHUNK + key] = sums[r].sum() * job.scale;
    }
    if (!job.cap) return;
    for (int r = 0; r < R; ++r)
        for (key = a / 16 * 16; key < b; key += 16) {
            float* some = scores + (row + r) * CHUNK + key;
            SoftCap::of(Lanes::load(some), job.cap).store(some);
        }
}

// Scores of int4 keys [a, b) of the block of positions from `block` on. They are unpacked into the room for values.
static void score_int4(const Rows& rows, const AttentionItem& item, const Work& work, int64_t block, int64_t a, int64_t b,
                       float* scores) {
    const AttentionJob& job = rows.job;
    const uint8_t *at[KEYS], *groups[KEYS];
    locate<Int4>(job, job.k, item, a, b, at);
    locate_groups(job, job.k, item, a, b, groups);
    const int64_t padded = (job.size + 15) / 16 * 16;
    for (int64_t i = 0; i < b - a; ++i)
        unpack_head(at[i], groups[i], job.size, work.values + (a - block + i) * padded);
    int64_t row = 0;
    for (; row + SCORE_ROWS <= rows.count; row += SCORE_ROWS)
        score_unpacked<SCORE_ROWS>(rows, row, work.values, padded, a - block, b - block, scores);
    if (row + 3 == rows.count) score_unpacked<3>(rows, row, work.values, padded, a - block, b - block, scores);
    if (row + 2 == rows.count) score_unpacked<2>(rows, row, work.values, padded, a - block, b - block, scores);
    if (row + 1 == rows.count) score_unpacked<1>(rows, row, work.values, padded, a - block, b - block, scores);
}
