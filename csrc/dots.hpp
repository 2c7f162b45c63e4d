// Dot products of weight codes and activation codes, sixteen outputs at a time. Integer sums are exact, so every
// instruction set gives the same result. Activation codes are -127 to 127; add_dot<true> accepts all weight codes,
// add_dot<false> those up to 127.
//
// Quads are sixteen lanes of four unsigned codes (with NEON four lanes, a quarter of a line); Sums are sixteen int32.
// masked and with shift right, or left if Right is negative; bits shifted in from an adjacent byte must be masked.
//
// Included inside a namespace per instruction set.

static inline int32_t four_codes(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return four;
}

#if defined(__AVX512F__)

struct Quads {
    __m512i v;
    static Quads load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
    template <int Right>
    __m512i shifted() const {
        if constexpr (Right > 0) return _mm512_srli_epi16(v, Right);
        if constexpr (Right < 0) return _mm512_slli_epi16(v, -Right);
        return v;
    }
    template <int Right>
    Quads masked(char mask) const {
        return {_mm512_and_si512(shifted<Right>(), _mm512_set1_epi8(mask))};
    }
    template <int Right>
    Quads with(Quads bits, char mask) const {
        constexpr int A_OR_B_AND_C = 0xf8;
        return {_mm512_ternarylogic_epi32(v, bits.shifted<Right>(), _mm512_set1_epi8(mask), A_OR_B_AND_C)};
    }
    Quads of_table(const uint8_t (&table)[16]) const {
        return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(raw(load_bytes(table))), v)};
    }
    Quads flipped() const { return {_mm512_xor_si512(v, _mm512_set1_epi8(char(128)))}; }
};

struct Sums {
    __m512i v;
    static Sums splat(int32_t i) { return {_mm512_set1_epi32(i)}; }
    Sums operator+(Sums o) const { return {_mm512_add_epi32(v, o.v)}; }
    Lanes lanes() const { return {_mm512_cvtepi32_ps(v)}; }
    template <bool Full>
    void add_dot(Quads q, const int8_t* p) {
        const __m512i x = _mm512_set1_epi32(four_codes(p));
#if defined(__AVX512VNNI__)
        v = _mm512_dpbusd_epi32(v, q.v, x);
#else
        if constexpr (Full) {  // sums of two products overflow 16 bits
            const __m512i even = _mm512_madd_epi16(_mm512_and_si512(q.v, _mm512_set1_epi16(255)),
                                                   _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
            const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(q.v, 8), _mm512_srai_epi16(x, 8));
            v = _mm512_add_epi32(v, _mm512_add_epi32(even, odd));
        } else {
            v = _mm512_add_epi32(v, _mm512_madd_epi16(_mm512_maddubs_epi16(q.v, x), _mm512_set1_epi16(1)));
        }
#endif
    }
};

#elif defined(__AVX2__)

struct Quads {
    __m256i a, b;
    static Quads load(const uint8_t* p) { return {raw(p), raw(p + 32)}; }
    template <int Right>
    static __m256i shifted(__m256i v) {
        if constexpr (Right > 0) return _mm256_srli_epi16(v, Right);
        if constexpr (Right < 0) return _mm256_slli_epi16(v, -Right);
        return v;
    }
    template <int Right>
    Quads masked(char mask) const {
        const __m256i m = _mm256_set1_epi8(mask);
        return {_mm256_and_si256(shifted<Right>(a), m), _mm256_and_si256(shifted<Right>(b), m)};
    }
    template <int Right>
    Quads with(Quads bits, char mask) const {
        const Quads more = bits.masked<Right>(mask);
        return {_mm256_or_si256(a, more.a), _mm256_or_si256(b, more.b)};
    }
    Quads of_table(const uint8_t (&table)[16]) const {
        const __m256i all = _mm256_broadcastsi128_si256(raw(load_bytes(table)));
        return {_mm256_shuffle_epi8(all, a), _mm256_shuffle_epi8(all, b)};
    }
    Quads flipped() const {
        const __m256i top = _mm256_set1_epi8(char(128));
        return {_mm256_xor_si256(a, top), _mm256_xor_si256(b, top)};
    }
};

struct Sums {
    __m256i a, b;
    static Sums splat(int32_t i) { return {_mm256_set1_epi32(i), _mm256_set1_epi32(i)}; }
    Sums operator+(Sums o) const { return {_mm256_add_epi32(a, o.a), _mm256_add_epi32(b, o.b)}; }
    Lanes lanes() const { return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)}; }
    template <bool Full>
    static __m256i plus_dot(__m256i v, __m256i q, __m256i x) {
#if defined(__AVXVNNI__)
        return _mm256_dpbusd_avx_epi32(v, q, x);
#else
        if constexpr (Full) {  // sums of two products overflow 16 bits
            const __m256i even = _mm256_madd_epi16(_mm256_and_si256(q, _mm256_set1_epi16(255)),
                                                   _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
            const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(q, 8), _mm256_srai_epi16(x, 8));
            return _mm256_add_epi32(v, _mm256_add_epi32(even, odd));
        } else {
            return _mm256_add_epi32(v, _mm256_madd_epi16(_mm256_maddubs_epi16(q, x), _mm256_set1_epi16(1)));
        }
#endif
    }
    template <bool Full>
    void add_dot(Quads q, const int8_t* p) {
        const __m256i x = _mm256_set1_epi32(four_codes(p));
        a = plus_dot<Full>(a, q.a, x);
        b = plus_dot<Full>(b, q.b, x);
    }
};

#elif defined(BANKFULL_NEON)

#include "dots_neon.hpp"

#else

struct Quads {
    typedef uint16_t Eight __attribute__((vector_size(16)));
    Eight v[4];
    static Quads load(const uint8_t* p) {
        Quads quads;
        __builtin_memcpy(quads.v, p, 64);
        return quads;
    }
    template <int Right>
    Quads masked(char mask) const {
        Quads quads;
        const uint16_t both = uint16_t(uint8_t(mask) * 257);
        for (int i = 0; i < 4; ++i) {
            if constexpr (Right >= 0) quads.v[i] = v[i] >> Right & both;
            if constexpr (Right < 0) quads.v[i] = v[i] << -Right & both;
        }
        return quads;
    }
    template <int Right>
    Quads with(const Quads& bits, char mask) const {
        Quads quads = bits.masked<Right>(mask);
        for (int i = 0; i < 4; ++i) quads.v[i] |= v[i];
        return quads;
    }
    Quads of_table(const uint8_t (&table)[16]) const {
        uint8_t codes[64];
        __builtin_memcpy(codes, v, 64);
        for (uint8_t& code : codes) code = table[code];
        return load(codes);
    }
    Quads flipped() const {
        Quads quads;
        for (int i = 0; i < 4; ++i) quads.v[i] = v[i] ^ 0x8080;
        return quads;
    }
};

struct Sums {
    typedef int32_t Four __attribute__((vector_size(16)));
    typedef int16_t Eight __attribute__((vector_size(16)));
    Four v[4];
    static Sums splat(int32_t i) {
        const Four four = {i, i, i, i};
        return {four, four, four, four};
    }
    Sums operator+(const Sums& o) const { return {v[0] + o.v[0], v[1] + o.v[1], v[2] + o.v[2], v[3] + o.v[3]}; }
    Lanes lanes() const {
        Lanes lanes;
        for (int i = 0; i < 4; ++i) lanes.v[i] = __builtin_convertvector(v[i], Lanes::Four);
        return lanes;
    }
    // Plus the sums of adjacent products, each of which fits 16 bits.
    static Four plus_pairs(Four sums, Eight codes, Eight x) {
#if defined(__SSE2__)
        return sums + reinterpret_cast<Four>(_mm_madd_epi16(reinterpret_cast<__m128i>(codes), reinterpret_cast<__m128i>(x)));
#else
        const Four products = reinterpret_cast<Four>(codes * x);
        return sums + (products << 16 >> 16) + (products >> 16);
#endif
    }
    template <bool Full>
    void add_dot(const Quads& q, const int8_t* p) {
        const Eight even = {p[0], p[2], p[0], p[2], p[0], p[2], p[0], p[2]};
        const Eight odd = {p[1], p[3], p[1], p[3], p[1], p[3], p[1], p[3]};
        for (int i = 0; i < 4; ++i) {
            v[i] = plus_pairs(v[i], reinterpret_cast<Eight>(q.v[i] & 255), even);
            v[i] = plus_pairs(v[i], reinterpret_cast<Eight>(q.v[i] >> 8), odd);
        }
    }
};

#endif
