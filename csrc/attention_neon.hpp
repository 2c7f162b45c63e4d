// Scores with NEON: lanes are dimensions of a head, so keys need not be turned. A score is four sums, of every fourth
// dimension each, added in one order: the same bits for a row alone and among others.
//
// Included inside a namespace per instruction set.

// Four keys for R rows: acc[r] are four scores.
template <class E, int R>
static inline void score_four(const float* const* q, const uint8_t* const* at, int64_t size, float32x4_t* scores) {
    float32x4_t sums[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[r][i] = vdupq_n_f32(0.0f);
    int64_t d = 0;
    for (; d + 4 <= size; d += 4) {
        float32x4_t keys[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) keys[i] = float32x4_t(E::four(at[i] + d * E::bytes));
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const float32x4_t each = vld1q_f32(q[r] + d);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) sums[r][i] = vfmaq_f32(sums[r][i], each, keys[i]);
        }
    }
    for (; d < size; ++d)  // a head of another size: what is left joins the first sums
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const float32x4_t key = vsetq_lane_f32(E::one(at[i] + d * E::bytes), vdupq_n_f32(0.0f), 0);
                sums[r][i] = vfmaq_n_f32(sums[r][i], key, q[r][d]);
            }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
        scores[r] = vpaddq_f32(vpaddq_f32(sums[r][0], sums[r][1]), vpaddq_f32(sums[r][2], sums[r][3]));
}

template <class E, int R>
static void score_rows(const Rows& rows, int64_t row, const uint8_t* const* at, const float* key_scales, float* scores) {
    const AttentionJob& job = rows.job;
    const float* q[R];
    for (int r = 0; r < R; ++r) q[r] = rows.query(row + r);
    for (int64_t key = 0; key < KEYS; key += 4) {
        float32x4_t found[R];
        score_four<E, R>(q, at + key, job.size, found);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            if (key_scales) found[r] = vmulq_f32(found[r], vld1q_f32(key_scales + key));
            vst1q_f32(scores + (row + r) * CHUNK + key, vmulq_n_f32(found[r], job.scale));
        }
    }
    if (!job.cap) return;
    for (int r = 0; r < R; ++r)
        for (int64_t key = 0; key < KEYS; key += 16) {
            float* some = scores + (row + r) * CHUNK + key;
            SoftCap::of(Lanes::load(some), job.cap).store(some);
        }
}

template <class E>
static void score_all(const Rows& rows, const uint8_t* const* at, const float* key_scales, float* scores) {
    int64_t row = 0;
    for (; row + SCORE_ROWS <= rows.count; row += SCORE_ROWS)
        score_rows<E, SCORE_ROWS>(rows, row, at, key_scales, scores);
    if (row + 3 == rows.count) score_rows<E, 3>(rows, row, at, key_scales, scores);
    if (row + 2 == rows.count) score_rows<E, 2>(rows, row, at, key_scales, scores);
    if (row + 1 == rows.count) score_rows<E, 1>(rows, row, at, key_scales, scores);
}

// Scores of KEYS keys, which lie at `at`, for all rows.
template <class E>
static void score_block(const Rows& rows, const Work& work, const uint8_t* const* at, const float* key_scales, float* scores) {
    if (E::bytes == 4 || !widens(rows.count)) return score_all<E>(rows, at, key_scales, scores);
    const int64_t size = rows.job.size;
    const uint8_t* wide[KEYS];
    for (int64_t i = 0; i < KEYS; ++i) {
        float* key = work.keys + i * size;
        int64_t d = 0;
        for (; d + 16 <= size; d += 16) E::load(at[i] + d * E::bytes).store(key + d);
        for (; d < size; ++d) key[d] = E::one(at[i] + d * E::bytes);
        wide[i] = reinterpret_cast<const uint8_t*>(key);
    }
    score_all<Float32>(rows, wide, key_scales, scores);
}

// exp(x) for x up to 0, in half the instructions of `exponential`: what would be below 2^-124 stays there, which a softmax
// cannot tell from 0. NaN stays NaN.
static inline float32x4_t softmax_power(float32x4_t x) {
    x = vmaxq_f32(x, vdupq_n_f32(-86.0f));
    const float32x4_t shift = vdupq_n_f32(0x1.8p23f);
    const float32x4_t shifted = vfmaq_f32(shift, x, vdupq_n_f32(0x1.715476p0f)), n = vsubq_f32(shifted, shift);
    float32x4_t r = vfmaq_f32(x, n, vdupq_n_f32(-0.693359375f));
    r = vfmaq_f32(r, n, vdupq_n_f32(0x1.bd0106p-13f));
    float32x4_t tail = vfmaq_f32(vdupq_n_f32(0x1.1239e4p-7f), r, vdupq_n_f32(0x1.6a2430p-10f));
    tail = vfmaq_f32(vdupq_n_f32(0x1.5558f2p-5f), tail, r);
    tail = vfmaq_f32(vdupq_n_f32(0x1.555492p-3f), tail, r);
    tail = vfmaq_f32(vdupq_n_f32(0x1.fffffcp-2f), tail, r);
    const float32x4_t p = vaddq_f32(vfmaq_f32(r, vmulq_f32(r, r), tail), vdupq_n_f32(1.0f));  // as in `exponential`
    const int32x4_t exponent = vshlq_n_s32(vreinterpretq_s32_f32(shifted), 23);  // only n's lowest bits are left
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), exponent));
}

static inline Lanes softmax_power(const Lanes& x) {
    return {softmax_power(x.v[0]), softmax_power(x.v[1]), softmax_power(x.v[2]), softmax_power(x.v[3])};
}
