// The passes over a whole vocabulary that sampling needs; what is done with them is in sampling.cpp. A block is SCORE_BLOCK
// scores. Included inside a namespace per instruction set.

// Which lanes are at least as high: lane i is bit i.
static inline uint32_t lanes_reaching(Lanes each, Lanes least) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(each.v, least.v, _CMP_GE_OQ);
#elif defined(__AVX2__)
    const int low = _mm256_movemask_ps(_mm256_cmp_ps(each.a, least.a, _CMP_GE_OQ));
    return uint32_t(low | _mm256_movemask_ps(_mm256_cmp_ps(each.b, least.b, _CMP_GE_OQ)) << 8);
#else
    float one[16], other[16];
    each.store(one);
    least.store(other);
    uint32_t found = 0;
    for (int i = 0; i < 16; ++i) found |= uint32_t(one[i] >= other[i]) << i;
    return found;
#endif
}

// The highest score of each block; infinity where one is NaN.
static void block_maxima(const float* scores, int64_t count, float* maxima) {
    for (int64_t first = 0; first < count; first += SCORE_BLOCK) {
        const int64_t last = first + SCORE_BLOCK < count ? first + SCORE_BLOCK : count;
        Lanes most = Lanes::splat(-__builtin_inff()), odd = Lanes::splat(0.0f);  // odd leaves 0 when anything is not finite
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

// Scores of at least `least` and their places, in order. Only blocks whose maximum reaches it are looked at.
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

// Scores over the highest, divided by the temperature, and their weights: exp in fixed point with 40 bits.
static void weigh(const float* scores, int64_t count, float highest, float temperature, float* shaped, int64_t* weights) {
    const Lanes top = Lanes::splat(highest), heat = Lanes::splat(temperature);
    for (int64_t i = 0; i < count; i += 16) {
        const Lanes score = (load_some(scores + i, count - i) - top) / heat;
        float power[16];
        exponential(score).store(power);
        store_some(score, shaped + i, count - i);
        const int64_t some = count - i < 16 ? count - i : 16;
        for (int64_t j = 0; j < some; ++j) weights[i + j] = int64_t(power[j] * 0x1p40f);
    }
}

// The sum of each block's weights, as `weigh` makes them. A weight is cut into two numbers of 20 bits, and a block's sums
// of either fit 32: every instruction set can do that on lanes.
static void block_weights(const float* scores, int64_t count, float highest, float temperature, int64_t* sums) {
    static_assert(SCORE_BLOCK / 16 < 1 << 10, "the sums of a lane would not fit");
    const Lanes top = Lanes::splat(highest), heat = Lanes::splat(temperature);
    for (int64_t first = 0; first < count; first += SCORE_BLOCK) {
        const int64_t last = first + SCORE_BLOCK < count ? first + SCORE_BLOCK : count;
        int32_t high[16] = {}, low[16] = {};
        for (int64_t i = first; i < last; i += 16) {
            float power[16];
            exponential((load_some(scores + i, last - i) - top) / heat).store(power);
            for (int64_t j = last - i; j < 16; ++j) power[j] = 0.0f;
            for (int j = 0; j < 16; ++j) {
                const int32_t whole = int32_t(power[j] * 0x1p20f);
                high[j] += whole;
                low[j] += int32_t(power[j] * 0x1p40f - float(whole) * 0x1p20f);
            }
        }
        int64_t sum = 0;
        for (int j = 0; j < 16; ++j) sum += (int64_t(high[j]) << 20) + low[j];
        *sums++ = sum;
    }
}
