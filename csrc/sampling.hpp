// Passes over the whole vocabulary for sampling.cpp. A block is SCORE_BLOCK scores. Included inside a namespace per
// instruction set.

// Mask of lanes that are at least `least`: lane i is bit i.
static inline uint32_t lanes_reaching(Lanes each, Lanes least) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(each.v, least.v, _CMP_GE_OQ);
#elif defined(__AVX2__)
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(each.a, least.a, _CMP_GE_OQ));
    return uint32_t(low | _mm256_movemask_ps(_mm256_cmp_ps(each.b, least.b, _CMP_GE_OQ)) << 8);
#elif defined(BANKFULL_NEON)
    const uint32x4_t place = {1, 2, 4, 8};
    uint32_t found = 0;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) found |= vaddvq_u32(vandq_u32(vcgeq_f32(each.v[i], least.v[i]), place)) << 4 * i;
    return found;
#else
    float one[16], other[16];
    each.store(one);
    least.store(other);
    uint32_t found = 0;
    for (int i = 0; i < 16; ++i) found |= uint32_t(one[i] >= other[i]) << i;
    return found;
#endif
}

// The maximum score of each block; infinity if one is NaN.
static void block_maxima(const float* scores, int64_t count, float* maxima) {
    for (int64_t first = 0; first < count; first += SCORE_BLOCK) {
        const int64_t last = first + SCORE_BLOCK < count ? first + SCORE_BLOCK : count;
        Lanes most = Lanes::splat(-__builtin_inff()), odd = Lanes::splat(0.0f);  // odd: not 0 if any is not finite
        int64_t i = first;
        for (; i + 16 <= last; i += 16) {
            const Lanes each = Lanes::load(scores + i);
            most = Lanes::larger(each, most);
            odd = odd + (each - each);
        }
        float highest = most.most(), rest = odd.sum();
        for (; i < last; ++i) {
            highest = scores[i] > highest ? scores[i] : highest;
            rest += scores[i] - scores[i];
        }
        if (rest != 0.0f)
            for (i = first; i < last; ++i) highest = scores[i] <= highest ? highest : __builtin_inff();
        *maxima++ = highest;
    }
}

// Scores of at least `least` and their indices, in order. Blocks with a lower maximum are skipped.
static int64_t collect(const float* scores, const float* maxima, int64_t count, float least, float* found, int64_t* places) {
    const Lanes border = Lanes::splat(least);
    int64_t taken = 0;
    for (int64_t first = 0; first < count; first += SCORE_BLOCK) {
        if (maxima[first / SCORE_BLOCK] < least) continue;
        const int64_t last = first + SCORE_BLOCK < count ? first + SCORE_BLOCK : count;
        int64_t i = first;
        for (; i + 16 <= last; i += 16)
            for (uint32_t lanes = lanes_reaching(Lanes::load(scores + i), border); lanes; lanes &= lanes - 1) {
                const int64_t place = i + __builtin_ctz(lanes);
                found[taken] = scores[place];
                places[taken++] = place;
            }
        for (; i < last; ++i)
            if (scores[i] >= least) {
                found[taken] = scores[i];
                places[taken++] = i;
            }
    }
    return taken;
}

// Weights: exponentials up to 1 in fixed point with 40 bits.
#if defined(__AVX512DQ__)

struct WeightSum {
    __m512i low = _mm512_setzero_si512(), high = _mm512_setzero_si512();
    static __m512i whole(__m256 power) { return _mm512_cvttps_epi64(_mm256_mul_ps(power, _mm256_set1_ps(0x1p40f))); }
    static __m512i of_low(Lanes power) { return whole(_mm512_castps512_ps256(power.v)); }
    static __m512i of_high(Lanes power) { return whole(_mm512_extractf32x8_ps(power.v, 1)); }
    void add(Lanes power) {
        low = _mm512_add_epi64(low, of_low(power));
        high = _mm512_add_epi64(high, of_high(power));
    }
    int64_t total() const { return _mm512_reduce_add_epi64(_mm512_add_epi64(low, high)); }
};

static inline void store_weights(Lanes power, int64_t* weights) {
    _mm512_storeu_si512(weights, WeightSum::of_low(power));
    _mm512_storeu_si512(weights + 8, WeightSum::of_high(power));
}

#else

#if defined(__AVX2__)

// A weight is split into two 20-bit integers, because there is no conversion to 64-bit integers. A block's sums fit 32
// bits.
struct WeightSum {
    __m256i high = _mm256_setzero_si256(), low = _mm256_setzero_si256();
    void add(__m256 power) {
        const __m256 scale = _mm256_set1_ps(0x1p20f);
        const __m256 upper = _mm256_round_ps(_mm256_mul_ps(power, scale), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
        const __m256 rest = _mm256_sub_ps(_mm256_mul_ps(power, _mm256_set1_ps(0x1p40f)), _mm256_mul_ps(upper, scale));
        high = _mm256_add_epi32(high, _mm256_cvttps_epi32(upper));
        low = _mm256_add_epi32(low, _mm256_cvttps_epi32(rest));
    }
    void add(Lanes power) {
        add(power.a);
        add(power.b);
    }
    int64_t total() const {
        int32_t upper[8], lower[8];
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(upper), high);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(lower), low);
        int64_t sum = 0;
        for (int i = 0; i < 8; ++i) sum += (int64_t(upper[i]) << 20) + lower[i];
        return sum;
    }
};
static_assert(SCORE_BLOCK / 8 < 1 << 10, "the sums of a lane would not fit");

#elif defined(BANKFULL_NEON)

struct WeightSum {
    int64x2_t low = vdupq_n_s64(0), high = vdupq_n_s64(0);
    void add(const Lanes& power) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const float32x4_t scaled = vmulq_n_f32(power.v[i], 0x1p40f);
            low = vaddq_s64(low, vcvtq_s64_f64(vcvt_f64_f32(vget_low_f32(scaled))));
            high = vaddq_s64(high, vcvtq_s64_f64(vcvt_high_f64_f32(scaled)));
        }
    }
    int64_t total() const { return vaddvq_s64(vaddq_s64(low, high)); }
};

#else

struct WeightSum {
    int64_t sum = 0;
    void add(const Lanes& power) {
        float each[16];
        power.store(each);
        for (int i = 0; i < 16; ++i) sum += int64_t(each[i] * 0x1p40f);
    }
    int64_t total() const { return sum; }
};

#endif

static inline void store_weights(const Lanes& power, int64_t* weights) {
    float each[16];
    power.store(each);
    for (int i = 0; i < 16; ++i) weights[i] = int64_t(each[i] * 0x1p40f);
}

#endif

// exp((score - maximum) / temperature) of sixteen scores, 0 beyond the first `count`.
static inline Lanes powers_of(const float* scores, int64_t count, Lanes top, Lanes heat) {
    if (count >= 16) return exponential((Lanes::load(scores) - top) / heat);
    float power[16] = {};
    store_some(exponential((load_some(scores, count) - top) / heat), power, count);
    return Lanes::load(power);
}

// (score - maximum) / temperature, and the weights.
static void weigh(const float* scores, int64_t count, float highest, float temperature, float* shaped, int64_t* weights) {
    const Lanes top = Lanes::splat(highest), heat = Lanes::splat(temperature);
    for (int64_t i = 0; i < count; i += 16) {
        const Lanes power = powers_of(scores + i, count - i, top, heat);
        store_some((load_some(scores + i, count - i) - top) / heat, shaped + i, count - i);
        if (count - i >= 16) {
            store_weights(power, weights + i);
        } else {
            int64_t some[16];
            store_weights(power, some);
            __builtin_memcpy(weights + i, some, size_t(count - i) * sizeof(int64_t));
        }
    }
}

// The sum of each block's weights, as computed by `weigh`.
static void block_weights(const float* scores, int64_t count, float highest, float temperature, int64_t* sums) {
    const Lanes top = Lanes::splat(highest), heat = Lanes::splat(temperature);
    for (int64_t first = 0; first < count; first += SCORE_BLOCK) {
        const int64_t last = first + SCORE_BLOCK < count ? first + SCORE_BLOCK : count;
        WeightSum sum;
        for (int64_t i = first; i < last; i += 16) sum.add(powers_of(scores + i, last - i, top, heat));
        *sums++ = sum.total();
    }
}
