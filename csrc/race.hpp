// Random words of a block of tokens, and which of the tokens may win its race, for sampling.cpp. Included inside a
// namespace per instruction set.
//
// Tokens take their words from Philox-4x32-10 in runs of sixteen: four calls of four words, token 4 w + i of the run
// takes word w of call i. Vectors over calls therefore hold words in the order of ids.

#if defined(__AVX512F__)

// One 32-bit number in each 64-bit lane; the upper half of a lane is undefined.
struct Words {
    static constexpr int CALLS = 8;
    __m512i v;
    static Words splat(uint32_t each) { return {_mm512_set1_epi64(each)}; }
    static Words load(const uint32_t* p) { return {_mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
    Words operator^(Words o) const { return {_mm512_xor_si512(v, o.v)}; }
    static void multiply(Words x, Words factor, Words& high, Words& low) {
        low.v = _mm512_mul_epu32(x.v, factor.v);
        high.v = _mm512_srli_epi64(low.v, 32);
    }
    void store(uint32_t* p) const {
        const __m256i all = _mm512_cvtepi64_epi32(v);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(all));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 16), _mm256_extracti128_si256(all, 1));
    }
};

#elif defined(__AVX2__)

struct Words {
    static constexpr int CALLS = 4;
    __m256i v;
    static Words splat(uint32_t each) { return {_mm256_set1_epi64x(each)}; }
    static Words load(const uint32_t* p) { return {_mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
    Words operator^(Words o) const { return {_mm256_xor_si256(v, o.v)}; }
    static void multiply(Words x, Words factor, Words& high, Words& low) {
        low.v = _mm256_mul_epu32(x.v, factor.v);
        high.v = _mm256_srli_epi64(low.v, 32);
    }
    void store(uint32_t* p) const {
        const __m256i all = _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(all));
    }
};

#elif defined(BANKFULL_NEON)

struct Words {
    static constexpr int CALLS = 4;
    uint32x4_t v;
    static Words splat(uint32_t each) { return {vdupq_n_u32(each)}; }
    static Words load(const uint32_t* p) { return {vld1q_u32(p)}; }
    Words operator^(Words o) const { return {veorq_u32(v, o.v)}; }
    static void multiply(Words x, Words factor, Words& high, Words& low) {
        const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x.v), vget_low_u32(factor.v)));
        const uint32x4_t last = vreinterpretq_u32_u64(vmull_high_u32(x.v, factor.v));
        high.v = vuzp2q_u32(first, last);
        low.v = vuzp1q_u32(first, last);
    }
    void store(uint32_t* p) const { vst1q_u32(p, v); }
};

#else

struct Words {
    static constexpr int CALLS = 4;
    uint32_t v[4];
    static Words splat(uint32_t each) { return {{each, each, each, each}}; }
    static Words load(const uint32_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
    Words operator^(const Words& o) const { return {{v[0] ^ o.v[0], v[1] ^ o.v[1], v[2] ^ o.v[2], v[3] ^ o.v[3]}}; }
    static void multiply(const Words& x, const Words& factor, Words& high, Words& low) {
        for (int i = 0; i < 4; ++i) {
            const uint64_t product = uint64_t(x.v[i]) * factor.v[i];
            high.v[i] = uint32_t(product >> 32);
            low.v[i] = uint32_t(product);
        }
    }
    void store(uint32_t* p) const { __builtin_memcpy(p, v, sizeof v); }
};

#endif

static constexpr int64_t CALL_TOKENS = 4 * Words::CALLS;  // tokens of one vector of calls
static_assert(SCORE_BLOCK % CALL_TOKENS == 0, "a block is a whole number of vectors");

// Philox for one row. Only the last counter word differs between tokens, so most of the first three rounds is shared.
class RaceWords {
  public:
    explicit RaceWords(const RaceKey& key) : seed_{key.seed[0], key.seed[1]} {
        const uint64_t left = uint64_t(M0) * key.position[0], right = uint64_t(M1) * key.child;
        const uint32_t a0 = high(right) ^ key.position[1] ^ key.seed[0];
        last_ = high(left) ^ key.seed[1] ^ key.purpose;
        const uint64_t second_left = uint64_t(M0) * a0;
        const uint32_t b2 = high(second_left) ^ uint32_t(left) ^ (key.seed[1] + STEP1);
        const uint64_t third_right = uint64_t(M1) * b2;
        second_ = uint32_t(right) ^ (key.seed[0] + STEP0);
        third_[0] = high(third_right) ^ (key.seed[0] + 2 * STEP0);
        third_[1] = uint32_t(third_right);
        third_[2] = uint32_t(second_left) ^ (key.seed[1] + 2 * STEP1);
    }

    // Words of the tokens [first, first + CALL_TOKENS); `first` is a multiple of CALL_TOKENS.
    __attribute__((always_inline)) void store(uint32_t first, uint32_t* words) const {
        static constexpr uint32_t calls[] = {0, 1 << 8, 2 << 8, 3 << 8, 4 << 8, 5 << 8, 6 << 8, 7 << 8};
        const Words m0 = Words::splat(M0), m1 = Words::splat(M1);
        Words c0, c1, c2, c3;
        Words::multiply(Words::load(calls) ^ Words::splat(first << 6 ^ last_), m1, c0, c1);
        Words::multiply(c0 ^ Words::splat(second_), m0, c2, c3);
        c0 = c1 ^ Words::splat(third_[0]);
        c1 = Words::splat(third_[1]);
        c2 = c2 ^ Words::splat(third_[2]);
#pragma GCC unroll 7
        for (uint32_t round = 3; round < 10; ++round) {
            Words left_high, left_low, right_high, right_low;
            Words::multiply(c0, m0, left_high, left_low);
            Words::multiply(c2, m1, right_high, right_low);
            c0 = right_high ^ c1 ^ Words::splat(seed_[0] + round * STEP0);
            c2 = left_high ^ c3 ^ Words::splat(seed_[1] + round * STEP1);
            c1 = right_low;
            c3 = left_low;
        }
        c0.store(words);
        c1.store(words + 4);
        c2.store(words + 8);
        c3.store(words + 12);
    }

  private:
    static constexpr uint32_t M0 = 0xD2511F53u, M1 = 0xCD9E8D57u, STEP0 = 0x9E3779B9u, STEP1 = 0xBB67AE85u;
    static uint32_t high(uint64_t product) { return uint32_t(product >> 32); }
    uint32_t seed_[2], last_, second_, third_[3];
};

// The word of each token; ids ascend.
static void words_of(const RaceKey& key, const int64_t* ids, int64_t count, uint32_t* words) {
    const RaceWords numbers(key);
    uint32_t run[CALL_TOKENS];
    uint32_t known = ~0u;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t id = uint32_t(ids[i]), first = id & ~uint32_t(CALL_TOKENS - 1);
        if (first != known) numbers.store(known = first, run);
        words[i] = run[id - first];
    }
}

// Tokens of the block [first, first + count) whose key may reach `lead`: their places in the block and their words. A
// winner has word / 2^32 <= exp(score - lead), up to rounding; `most` is that bound for the block's best score.
static int64_t contenders(const RaceKey& key, const float* scores, int64_t first, int64_t count, const Race& race,
                          uint32_t most, int32_t* places, uint32_t* drawn) {
    uint32_t words[SCORE_BLOCK];
    const RaceWords numbers(key);
    for (int64_t i = 0; i < count; i += CALL_TOKENS) numbers.store(uint32_t(first + i), words + i);
    const Lanes top = Lanes::splat(race.highest), heat = Lanes::splat(race.temperature), lead = Lanes::splat(race.lead);
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += 16) {
        uint32_t least = words[i];
        for (int j = 1; j < 16; ++j) least = words[i + j] < least ? words[i + j] : least;
        if (least > most) continue;
        const int64_t width = count - i < 16 ? count - i : 16;
        float bounds[16];
        const Lanes shaped = (load_some(scores + i, width) - top) / heat;
        (exponential(shaped - lead) * Lanes::splat(0x1.0008p32f)).store(bounds);
        for (int j = 0; j < width; ++j)
            if (float(words[i + j]) <= bounds[j]) {
                places[found] = int32_t(i + j);
                drawn[found++] = words[i + j];
            }
    }
    return found;
}
