// Numbers as KV pages hold them, read as floats.
//
// Included inside a namespace per instruction set.

typedef float Four __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
typedef int32_t FourIndices __attribute__((vector_size(16)));
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, FourIndices{i, j, k, l})
#endif

struct Float32 {
    static constexpr int bytes = 4;
    static constexpr bool scaled = false, paired = false;
    static Lanes load(const uint8_t* p) { return Lanes::load(reinterpret_cast<const float*>(p)); }
    static float one(const uint8_t* p) {
        float value;
        __builtin_memcpy(&value, p, 4);
        return value;
    }
    static Four four(const uint8_t* p) {
        Four value;
        __builtin_memcpy(&value, p, 16);
        return value;
    }
};

struct BFloat16 {
    static constexpr int bytes = 2;
    static constexpr bool scaled = false, paired = false;
    static Lanes load(const uint8_t* p) { return Lanes::load_bfloat(p); }
    static float one(const uint8_t* p) {
        uint16_t half;
        __builtin_memcpy(&half, p, 2);
        const uint32_t bits = uint32_t(half) << 16;
        float value;
        __builtin_memcpy(&value, &bits, 4);
        return value;
    }
    static Four four(const uint8_t* p) {
#if defined(BANKFULL_NEON)
        return Four(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
#else
        return Four{one(p), one(p + 2), one(p + 4), one(p + 6)};
#endif
    }
};

// Codes as integers. Scales are applied later: a key's to its scores, a value's to its weights.
struct Int8 {
    static constexpr int bytes = 1;
    static constexpr bool scaled = true, paired = false;
    static constexpr float unit = 1.0f;
    static Lanes load(const uint8_t* p) { return Lanes::from_signed(load_bytes(p)); }
    static float one(const uint8_t* p) { return float(int8_t(*p)); }
    static Four four(const uint8_t* p) {
#if defined(__SSE4_1__)
        int32_t word;
        __builtin_memcpy(&word, p, 4);
        return Four(_mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(word))));
#else
        return Four{one(p), one(p + 1), one(p + 2), one(p + 3)};
#endif
    }
};

// e4m3 codes times 2^-8: their bits are those of a float16 with another bias. Scales make up for the factor.
struct Float8 {
    static constexpr int bytes = 1;
    static constexpr bool scaled = true, paired = false;
    static constexpr float unit = 256.0f;
    static Lanes load(const uint8_t* p) {
        typedef uint16_t Halves __attribute__((vector_size(32)));
        const Halves wide = __builtin_convertvector(load_bytes(p), Halves);
        const Halves halves = (wide << 8 & 0x8000) | (wide << 7 & 0x3f80);
        uint8_t bits[32];
        __builtin_memcpy(bits, &halves, 32);
        return Lanes::load_half(bits);
    }
    static float one(const uint8_t* p) {
        const uint16_t bits = uint16_t((*p << 8 & 0x8000) | (*p << 7 & 0x3f80));
        return half(reinterpret_cast<const uint8_t*>(&bits));
    }
    static Four four(const uint8_t* p) {
#if defined(__AVX2__)
        int32_t word;
        __builtin_memcpy(&word, p, 4);
        const __m128i wide = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(word));
        const __m128i sign = _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16(int16_t(0x8000)));
        const __m128i size = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
        return Four(_mm_cvtph_ps(_mm_or_si128(sign, size)));
#else
        return Four{one(p), one(p + 1), one(p + 2), one(p + 3)};
#endif
    }
};

// Pairs of codes, which `unpack_head` turns into floats, a head at a time: their scales belong to groups of a head.
struct Int4 {
    static constexpr int bytes = 1;
    static constexpr bool scaled = false, paired = true;
};

// A bfloat16 as an address: its distance in pages of scales.
struct Int4Scale {
    static constexpr int bytes = 2;
};

// Sixteen numbers from eight bytes. `table`: the numbers of the sixteen codes.
static inline Lanes unpack_lanes(const uint8_t* p, Lanes table, Lanes scale, Lanes offset) {
#if defined(__AVX512F__)
    (void)scale, (void)offset;
    const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m512i codes = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));  // only four bits of each are used
    return {_mm512_permutexvar_ps(codes, table.v)};
#else
    (void)table;
    Bytes bytes = {};
    __builtin_memcpy(&bytes, p, 8);
    const Bytes low = bytes & 15, high = bytes >> 4;
#if defined(__clang__)
    const Bytes codes = __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
    const Bytes codes = __builtin_shuffle(low, high, Bytes{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
#endif
    Lanes numbers = offset;
    numbers.add_product(Lanes::from_unsigned(codes), scale);
    return numbers;
#endif
}

// A head's int4 codes as floats: exact, because a scale has eight bits. The lanes after the last number become 0.
static inline void unpack_head(const uint8_t* codes, const uint8_t* scales, int64_t size, float* numbers) {
    alignas(64) static constexpr float LEVELS[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    const int64_t group = int4_group(size);
    for (int64_t i = 0; i < size; i += group) {
        const float scale = BFloat16::one(scales + i / group * 2);
        if (group < 16) {
            for (int64_t j = i; j < i + group; ++j)
                numbers[j] = float(int(codes[j / 2] >> j % 2 * 4 & 15) - 8) * scale;
            continue;
        }
        const Lanes each = Lanes::splat(scale), table = Lanes::load(LEVELS) * each, offset = Lanes::splat(-8.0f * scale);
        for (int64_t j = i; j < i + group; j += 16) unpack_lanes(codes + j / 2, table, each, offset).store(numbers + j);
    }
    for (int64_t i = size; i % 16; ++i) numbers[i] = 0.0f;
}
