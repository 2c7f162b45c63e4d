// Sixteen float lanes, independent of the register width. Every kernel accumulates in sixteen lanes and reduces them in
// one order, so a result depends neither on the width (avx2 and avx512 are bitwise identical) nor on threads or batch.
//
// Included inside a namespace per instruction set. Nothing here may be shared between two of them, because the linker
// would keep one copy of a shared inline function, compiled for either.
//
// larger and smaller return their second operand if either is NaN. power_of_two takes integers from -126 to 127;
// exponents takes bytes e from 1 to 254 and returns 2^(e - 127).

typedef uint8_t Bytes __attribute__((vector_size(16)));

static inline Bytes load_bytes(const uint8_t* p) {
    Bytes bytes;
    __builtin_memcpy(&bytes, p, 16);
    return bytes;
}

#if defined(__AVX2__)

static inline __m128i raw(Bytes b) { return reinterpret_cast<__m128i>(b); }
static inline __m256i raw(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

static inline float fold(__m256 v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

static inline float half(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}

#endif

// Encoding of activations for instruction sets without a direct instruction.
template <class L>
static inline int32_t store_codes_one_by_one(const L& lanes, int8_t* p) {
    float each[16];
    lanes.store(each);
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) {
        const float shifted = each[i] + 0x1.8p23f;  // rounds to an integer, ties to even
        int32_t bits;
        __builtin_memcpy(&bits, &shifted, 4);
        const int32_t whole = each[i] == each[i] ? bits - 0x4b400000 : 0;
        p[i] = int8_t(whole);
        sum += whole;
    }
    return sum;
}

template <class L>
static inline void store_bfloat_one_by_one(const L& lanes, uint8_t* p) {
    uint32_t bits[16];
    lanes.store(reinterpret_cast<float*>(bits));
    for (int i = 0; i < 16; ++i) {
        const bool nan = (bits[i] & 0x7fffffffu) > 0x7f800000u;
        const uint32_t narrow = nan ? bits[i] >> 16 | 0x40u : (bits[i] + 0x7fffu + (bits[i] >> 16 & 1u)) >> 16;
        p[2 * i] = uint8_t(narrow);
        p[2 * i + 1] = uint8_t(narrow >> 8);
    }
}

template <class L>
static inline float most_one_by_one(const L& lanes) {
    float each[16], most;
    lanes.store(each);
    most = each[0];
    for (int i = 1; i < 16; ++i) most = each[i] > most ? each[i] : most;
    return most;
}

#if defined(__AVX512F__)

struct Lanes {
    __m512 v;
    static Lanes splat(float f) { return {_mm512_set1_ps(f)}; }
    static Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Lanes load_half(const uint8_t* p) { return {_mm512_cvtph_ps(raw(p))}; }
    static Lanes load_bfloat(const uint8_t* p) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw(p)), 16))};
    }
    static Lanes from_unsigned(Bytes b) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(raw(b)))}; }
    static Lanes from_signed(Bytes b) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw(b)))}; }
    static Lanes exponents(Bytes b) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(raw(b)), 23))}; }
    Lanes operator*(Lanes o) const { return {_mm512_mul_ps(v, o.v)}; }
    Lanes operator+(Lanes o) const { return {_mm512_add_ps(v, o.v)}; }
    Lanes operator-(Lanes o) const { return {_mm512_sub_ps(v, o.v)}; }
    Lanes operator/(Lanes o) const { return {_mm512_div_ps(v, o.v)}; }
    static Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
    static Lanes smaller(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
    static Lanes below(Lanes a, Lanes b, Lanes yes, Lanes no) {
        return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
    }
    Lanes power_of_two() const {
        return {_mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(127)), 23))};
    }
    void add_product(Lanes a, Lanes b) { v = _mm512_fmadd_ps(a.v, b.v, v); }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    // Rounded to nearest even; NaN becomes 0. Returns the sum of the codes.
    int32_t store_codes(int8_t* p) const {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(whole));
        return _mm512_reduce_add_epi32(whole);
    }
    void store_bfloat(uint8_t* p) const {
#if defined(__AVX512BF16__)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
#else
        const __m512i bits = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        const __m512i nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
        const __m512i narrow = _mm512_mask_mov_epi32(nan, _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), up);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(narrow));
#endif
    }
    float most() const { return _mm512_reduce_max_ps(v); }
    float sum() const {
        const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
        return fold(_mm256_add_ps(_mm512_castps512_ps256(v), high));
    }
};

#elif defined(__AVX2__)

struct Lanes {
    __m256 a, b;
    static Lanes splat(float f) { return {_mm256_set1_ps(f), _mm256_set1_ps(f)}; }
    static Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static Lanes load_half(const uint8_t* p) {
        return {_mm256_cvtph_ps(raw(load_bytes(p))), _mm256_cvtph_ps(raw(load_bytes(p + 16)))};
    }
    static __m256 bfloat(Bytes b) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw(b)), 16));
    }
    static Lanes load_bfloat(const uint8_t* p) { return {bfloat(load_bytes(p)), bfloat(load_bytes(p + 16))}; }
    static Lanes from_unsigned(Bytes b) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(raw(b))),
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(raw(b), 8)))};
    }
    static Lanes from_signed(Bytes b) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw(b))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(raw(b), 8)))};
    }
    static Lanes exponents(Bytes b) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(raw(b)), 23)),
                _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(raw(b), 8)), 23))};
    }
    Lanes operator*(Lanes o) const { return {_mm256_mul_ps(a, o.a), _mm256_mul_ps(b, o.b)}; }
    Lanes operator+(Lanes o) const { return {_mm256_add_ps(a, o.a), _mm256_add_ps(b, o.b)}; }
    Lanes operator-(Lanes o) const { return {_mm256_sub_ps(a, o.a), _mm256_sub_ps(b, o.b)}; }
    Lanes operator/(Lanes o) const { return {_mm256_div_ps(a, o.a), _mm256_div_ps(b, o.b)}; }
    static Lanes larger(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
    static Lanes smaller(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
    static Lanes below(Lanes x, Lanes y, Lanes yes, Lanes no) {
        return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
                _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
    }
    static __m256 power(__m256 n) {
        const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
    }
    Lanes power_of_two() const { return {power(a), power(b)}; }
    void add_product(Lanes x, Lanes y) {
        a = _mm256_fmadd_ps(x.a, y.a, a);
        b = _mm256_fmadd_ps(x.b, y.b, b);
    }
    void store(float* p) const {
        _mm256_storeu_ps(p, a);
        _mm256_storeu_ps(p + 8, b);
    }
    int32_t store_codes(int8_t* p) const { return store_codes_one_by_one(*this, p); }
    void store_bfloat(uint8_t* p) const { store_bfloat_one_by_one(*this, p); }
    float most() const { return most_one_by_one(*this); }
    float sum() const { return fold(_mm256_add_ps(a, b)); }
};

#elif defined(BANKFULL_NEON)

#include "lanes_neon.hpp"

#else

typedef float FourFloats __attribute__((vector_size(16)));
typedef uint32_t FourBits __attribute__((vector_size(16)));
typedef int32_t FourWhole __attribute__((vector_size(16)));

// float16 values. Read with float's exponent bias and scaled by 2^112 they are exact, including subnormals; the
// exponent of an infinity or a NaN becomes all ones.
static inline FourFloats halves(FourBits bits) {
    const FourBits size = (bits & 0x7fff) << 13;
    const FourBits scaled = reinterpret_cast<FourBits>(reinterpret_cast<FourFloats>(size) * 0x1p112f);
    const FourBits wide = size >= 0x0f800000 ? size | 0x7f800000 : scaled;
    return reinterpret_cast<FourFloats>(wide | (bits & 0x8000) << 16);
}

static inline float half(const uint8_t* p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, 2);
    return halves(FourBits{bits})[0];
}

struct Lanes {
    typedef FourFloats Four;
    Four v[4];
    static Lanes load(const float* p) {
        Lanes lanes;
        __builtin_memcpy(lanes.v, p, 64);
        return lanes;
    }
    template <class Element>
    static Lanes each(Element element) {
        float wide[16];
        for (int i = 0; i < 16; ++i) wide[i] = element(i);
        return load(wide);
    }
    template <class Elements>
    static Lanes each_four(Elements elements) {
        return {elements(0), elements(4), elements(8), elements(12)};
    }
    static Lanes splat(float f) {
        return each_four([f](int) { return Four{f, f, f, f}; });
    }
    static FourBits four_narrow(const uint8_t* p) {
        typedef uint16_t Narrow __attribute__((vector_size(8)));
        Narrow narrow;
        __builtin_memcpy(&narrow, p, 8);
        return __builtin_convertvector(narrow, FourBits);
    }
    static Lanes load_half(const uint8_t* p) {
        return each_four([p](int i) { return halves(four_narrow(p + 2 * i)); });
    }
    static Lanes load_bfloat(const uint8_t* p) {
        return each_four([p](int i) { return reinterpret_cast<Four>(four_narrow(p + 2 * i) << 16); });
    }
    static Lanes from_unsigned(Bytes b) {
        return each([&b](int i) { return float(int(b[i])); });
    }
    static Lanes from_signed(Bytes b) {
        return each([&b](int i) { return float(int8_t(b[i])); });
    }
    static Lanes exponents(Bytes b) {
        return each_four([&b](int i) { return reinterpret_cast<Four>(FourBits{b[i], b[i + 1], b[i + 2], b[i + 3]} << 23); });
    }
    Lanes operator*(const Lanes& o) const { return {v[0] * o.v[0], v[1] * o.v[1], v[2] * o.v[2], v[3] * o.v[3]}; }
    Lanes operator+(const Lanes& o) const { return {v[0] + o.v[0], v[1] + o.v[1], v[2] + o.v[2], v[3] + o.v[3]}; }
    Lanes operator-(const Lanes& o) const { return {v[0] - o.v[0], v[1] - o.v[1], v[2] - o.v[2], v[3] - o.v[3]}; }
    Lanes operator/(const Lanes& o) const { return {v[0] / o.v[0], v[1] / o.v[1], v[2] / o.v[2], v[3] / o.v[3]}; }
    static Lanes below(const Lanes& a, const Lanes& b, const Lanes& yes, const Lanes& no) {
        Lanes lanes;
        for (int i = 0; i < 4; ++i) lanes.v[i] = a.v[i] < b.v[i] ? yes.v[i] : no.v[i];
        return lanes;
    }
    static Lanes larger(const Lanes& a, const Lanes& b) { return below(b, a, a, b); }
    static Lanes smaller(const Lanes& a, const Lanes& b) { return below(a, b, a, b); }
    Lanes power_of_two() const {
        return each_four([this](int i) {
            const Four n = v[i / 4] == v[i / 4] ? v[i / 4] : Four{};  // NaN has no integer value
            return reinterpret_cast<Four>((__builtin_convertvector(n, FourWhole) + 127) << 23);
        });
    }
    void add_product(const Lanes& a, const Lanes& b) { *this = *this + a * b; }
    void store(float* p) const { __builtin_memcpy(p, v, 64); }
    int32_t store_codes(int8_t* p) const { return store_codes_one_by_one(*this, p); }
    void store_bfloat(uint8_t* p) const { store_bfloat_one_by_one(*this, p); }
    float most() const { return most_one_by_one(*this); }
    float sum() const {
        const Four four = (v[0] + v[2]) + (v[1] + v[3]);
        return (four[0] + four[2]) + (four[1] + four[3]);
    }
};

#endif

// The first `count` of sixteen floats; the other lanes are 0.
static inline Lanes load_some(const float* p, int64_t count) {
    if (count >= 16) return Lanes::load(p);
    float padded[16] = {};
    __builtin_memcpy(padded, p, size_t(count) * sizeof(float));
    return Lanes::load(padded);
}

static inline void store_some(Lanes lanes, float* p, int64_t count) {
    if (count >= 16) return lanes.store(p);
    float padded[16];
    lanes.store(padded);
    __builtin_memcpy(p, padded, size_t(count) * sizeof(float));
}

static inline float first_lane(Lanes lanes) {
    float all[16];
    lanes.store(all);
    return all[0];
}
