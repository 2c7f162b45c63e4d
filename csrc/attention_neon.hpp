// Scores with NEON: lanes are dimensions of a head, so keys need no transpose. A score is four sums, of every fourth
// dimension each, added in a fixed order: the same bits for a row alone and among others.
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
    for (; d < size; ++d)  // remaining dimensions are added to the first sums
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
static void score_rows(const Rows& rows, int64_t row, const uint8_t* const* at, int64_t count, const float* key_scales,
                       float* scores) {
    const AttentionJob& job = rows.job;
    const float* q[R];
    for (int r = 0; r < R; ++r) q[r] = rows.query(row + r);
    for (int64_t key = 0; key < count; key += 4) {
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
        for (int64_t key = 0; key < count; key += 16) {
            float* some = scores + (row + r) * CHUNK + key;
            SoftCap::of(Lanes::load(some), job.cap).store(some);
        }
}

template <class E>
static void score_all(const Rows& rows, const uint8_t* const* at, int64_t count, const float* key_scales, float* scores) {
    int64_t row = 0;
    for (; row + SCORE_ROWS <= rows.count; row += SCORE_ROWS)
        score_rows<E, SCORE_ROWS>(rows, row, at, count, key_scales, scores);
    if (row + 3 == rows.count) score_rows<E, 3>(rows, row, at, count, key_scales, scores);
    if (row + 2 == rows.count) score_rows<E, 2>(rows, row, at, count, key_scales, scores);
    if (row + 1 == rows.count) score_rows<E, 1>(rows, row, at, count, key_scales, scores);
}

// Scores of the first `count` of the KEYS keys at `at`, for all rows.
template <class E>
static void score_block(const Rows& rows, const Work& work, const uint8_t* const* at, int64_t count, const float* key_scales,
                        float* scores) {
    if (E::bytes == 4 || !widens(rows.count)) return score_all<E>(rows, at, count, key_scales, scores);
    const int64_t size = rows.job.size;
    const uint8_t* wide[KEYS];
    for (int64_t i = 0; i < (count + 3) / 4 * 4; ++i) {
        float* key = work.keys + i * size;
        int64_t d = 0;
        for (; d + 16 <= size; d += 16) E::load(at[i] + d * E::bytes).store(key + d);
        for (; d < size; ++d) key[d] = E::one(at[i] + d * E::bytes);
        wide[i] = reinterpret_cast<const uint8_t*>(key);
    }
    score_all<Float32>(rows, wide, count, key_scales, scores);
}

// exp(x) for x up to 0, in half the instructions of `exponential`: results below 2^-124 are clamped there, which a
// softmax cannot distinguish from 0. NaN stays NaN. N registers are interleaved: each step depends on the one before,
// and the core's window is too small to find the next register's steps. Polynomial terms are reloaded each time,
// because FMA overwrites its addend: loads have their own units, while a register copy would occupy an FMA slot.
static inline float32x4_t fresh(const float* four) {
    float32x4_t value;
    asm volatile("ldr %q0, %1" : "=w"(value) : "m"(*reinterpret_cast<const float32x4_t*>(four)));
    return value;
}

#define FOUR_TIMES(x) {x, x, x, x}
alignas(16) static constexpr float SOFTMAX_TERMS[5][4] = {  // as in `exponential`
    FOUR_TIMES(0x1.8p23f),      FOUR_TIMES(0x1.1239e4p-7f), FOUR_TIMES(0x1.5558f2p-5f),
    FOUR_TIMES(0x1.555492p-3f), FOUR_TIMES(0x1.fffffcp-2f),
};
#undef FOUR_TIMES

template <int N>
static inline void softmax_powers(float32x4_t* x) {
    const float32x4_t shift = vdupq_n_f32(0x1.8p23f), least = vdupq_n_f32(-86.0f), top = vdupq_n_f32(0x1.6a2430p-10f);
    const float32x4_t factors = {0x1.715476p0f, -0.693359375f, 0x1.bd0106p-13f, 1.0f}, one = vdupq_n_f32(1.0f);
    float32x4_t shifted[N], tail[N], n[N];
#define EACH _Pragma("GCC unroll 8") for (int i = 0; i < N; ++i)
    EACH x[i] = vmaxq_f32(x[i], least);
    EACH shifted[i] = vfmaq_laneq_f32(fresh(SOFTMAX_TERMS[0]), x[i], factors, 0);
    EACH n[i] = vsubq_f32(shifted[i], shift);
    EACH x[i] = vfmaq_laneq_f32(x[i], n[i], factors, 1);
    EACH x[i] = vfmaq_laneq_f32(x[i], n[i], factors, 2);
    EACH tail[i] = vfmaq_f32(fresh(SOFTMAX_TERMS[1]), x[i], top);
    EACH tail[i] = vfmaq_f32(fresh(SOFTMAX_TERMS[2]), tail[i], x[i]);
    EACH n[i] = vmulq_f32(x[i], x[i]);
    EACH tail[i] = vfmaq_f32(fresh(SOFTMAX_TERMS[3]), tail[i], x[i]);
    EACH tail[i] = vfmaq_f32(fresh(SOFTMAX_TERMS[4]), tail[i], x[i]);
    EACH x[i] = vfmaq_f32(x[i], n[i], tail[i]);
    // Only the lowest bits of the integer remain in `shifted`.
    EACH shifted[i] = vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(shifted[i]), 23));
    EACH x[i] = vaddq_f32(x[i], one);
    EACH x[i] = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x[i]), vreinterpretq_s32_f32(shifted[i])));
#undef EACH
}

// The next `Blocks` blocks of scores become exponentials relative to `top`, and are added to the sums in order.
template <int Blocks>
static inline void exponentiate_blocks(float* scores, float32x4_t top, Lanes& sums) {
    float32x4_t weights[4 * Blocks];
#pragma GCC unroll 8
    for (int i = 0; i < 4 * Blocks; ++i) weights[i] = vsubq_f32(vld1q_f32(scores + 4 * i), top);
    softmax_powers<4 * Blocks>(weights);
#pragma GCC unroll 8
    for (int i = 0; i < 4 * Blocks; ++i) {
        vst1q_f32(scores + 4 * i, weights[i]);
        sums.v[i % 4] = vaddq_f32(sums.v[i % 4], weights[i]);
    }
}

static void exponentiate(float* scores, int64_t from, int64_t to, float& maximum, float& total) {
    const int64_t begin = from / 16 * 16, end = (to + 15) / 16 * 16;
    for (int64_t i = begin; i < from; ++i) scores[i] = -__builtin_inff();
    for (int64_t i = to; i < end; ++i) scores[i] = -__builtin_inff();
    Lanes most = Lanes::load(scores + begin);
    for (int64_t i = begin + 16; i < end; i += 16)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) most.v[j] = vmaxnmq_f32(most.v[j], vld1q_f32(scores + i + 4 * j));
    maximum = most.most();
    const float32x4_t top = vdupq_n_f32(maximum);
    Lanes sums = Lanes::splat(0.0f);
    int64_t i = begin;
    for (; i + 32 <= end; i += 32) exponentiate_blocks<2>(scores + i, top, sums);
    if (i < end) exponentiate_blocks<1>(scores + i, top, sums);
    total = sums.sum();
}

// exp(a) and exp(b), both up to 0.
static inline void softmax_powers(float& a, float& b) {
    float32x4_t both = {a, b, a, b};
    softmax_powers<1>(&both);
    a = both[0];
    b = both[1];
}
