// Dot products of codes with NEON, see dots.hpp. Quads are one register here: four consecutive k of four outputs, a
// quarter of a line. A dot product selects a quad of activations from a register by its index, so a group of
// activations is loaded once for all outputs.
//
// Weight codes are multiplied as signed integers. 8-bit codes do not fit, so 128 is subtracted: `signed_codes`.
//
// Included inside a namespace per instruction set.

struct Quads {
    uint8x16_t v;
    static Quads load(const uint8_t* p) { return {vld1q_u8(p)}; }
    template <int Right>
    uint8x16_t shifted() const {
        if constexpr (Right > 0) return vshrq_n_u8(v, Right);
        if constexpr (Right < 0) return vshlq_n_u8(v, -Right);
        return v;
    }
    template <int Right>
    Quads masked(uint8_t mask) const {
        if constexpr (Right > 0)
            if ((255 >> Right) == mask) return {shifted<Right>()};
        return {vandq_u8(shifted<Right>(), vdupq_n_u8(mask))};
    }
    template <int Right>
    Quads with(Quads bits, uint8_t mask) const {
        return {vorrq_u8(v, bits.masked<Right>(mask).v)};
    }
    Quads of_table(const uint8_t (&table)[16]) const { return {vqtbl1q_u8(vld1q_u8(table), v)}; }
    Quads flipped() const { return {veorq_u8(v, vdupq_n_u8(128))}; }
    template <int Bits>
    int8x16_t signed_codes() const {
        return vreinterpretq_s8_u8(Bits == 8 ? veorq_u8(v, vdupq_n_u8(128)) : v);
    }
};

// Four sums plus the dot products of four codes each with quad Lane of sixteen activations.
template <int Lane>
static inline int32x4_t plus_dot(int32x4_t sums, int8x16_t codes, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_laneq_s32(sums, codes, x, Lane);
#else
    // Two products of a code from -128 to 127 and one from -127 to 127 fit 16 bits.
    const int8x16_t quad = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), Lane));
    const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(quad)), high = vmull_high_s8(codes, quad);
    return vpadalq_s16(sums, vpaddq_s16(low, high));
#endif
}

// The same for a lane known only after loop unrolling.
static inline int32x4_t plus_dot(int32x4_t sums, int8x16_t codes, int8x16_t x, int lane) {
    switch (lane) {
        case 0: return plus_dot<0>(sums, codes, x);
        case 1: return plus_dot<1>(sums, codes, x);
        case 2: return plus_dot<2>(sums, codes, x);
        default: return plus_dot<3>(sums, codes, x);
    }
}
