// Sixteen float lanes in four NEON registers, see lanes.hpp. Included inside a namespace per instruction set.

static inline float half(const uint8_t* p) {
    __fp16 number;
    __builtin_memcpy(&number, p, 2);
    return float(number);
}

struct Lanes {
    float32x4_t v[4];
    // Copied register by register: GCC treats the whole as one large value and keeps it in memory.
    Lanes() = default;
    Lanes(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
        v[0] = a;
        v[1] = b;
        v[2] = c;
        v[3] = d;
    }
    Lanes(const Lanes& o) : Lanes(o.v[0], o.v[1], o.v[2], o.v[3]) {}
    Lanes& operator=(const Lanes& o) {
        v[0] = o.v[0];
        v[1] = o.v[1];
        v[2] = o.v[2];
        v[3] = o.v[3];
        return *this;
    }
    static Lanes splat(float f) {
        const float32x4_t four = vdupq_n_f32(f);
        return {four, four, four, four};
    }
    static Lanes load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
    static Lanes load_half(const uint8_t* p) {
        const uint16x8_t a = vreinterpretq_u16_u8(vld1q_u8(p)), b = vreinterpretq_u16_u8(vld1q_u8(p + 16));
        const float16x8_t low = vreinterpretq_f16_u16(a), high = vreinterpretq_f16_u16(b);
        return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
                 vcvt_high_f32_f16(high)};
    }
    static Lanes load_bfloat(const uint8_t* p) {
        const uint16x8_t a = vreinterpretq_u16_u8(vld1q_u8(p)), b = vreinterpretq_u16_u8(vld1q_u8(p + 16));
        return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(a), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(a, 16)),
                 vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(b), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(b, 16))};
    }
    static Lanes from_unsigned(Bytes bytes) {
        const uint8x16_t b = reinterpret_cast<uint8x16_t>(bytes);
        const uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_high_u8(b);
        return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
                 vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))};
    }
    static Lanes from_signed(Bytes bytes) {
        const int8x16_t b = reinterpret_cast<int8x16_t>(bytes);
        const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_high_s8(b);
        return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
    }
    static Lanes exponents(Bytes bytes) {
        const uint8x16_t b = reinterpret_cast<uint8x16_t>(bytes);
        const uint16x8_t low = vshll_n_u8(vget_low_u8(b), 7), high = vshll_high_n_u8(b, 7);  // the upper halves
        return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(low), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(low, 16)),
                 vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(high), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(high, 16))};
    }
    Lanes operator*(const Lanes& o) const {
        return {vmulq_f32(v[0], o.v[0]), vmulq_f32(v[1], o.v[1]), vmulq_f32(v[2], o.v[2]), vmulq_f32(v[3], o.v[3])};
    }
    Lanes operator+(const Lanes& o) const {
        return {vaddq_f32(v[0], o.v[0]), vaddq_f32(v[1], o.v[1]), vaddq_f32(v[2], o.v[2]), vaddq_f32(v[3], o.v[3])};
    }
    Lanes operator-(const Lanes& o) const {
        return {vsubq_f32(v[0], o.v[0]), vsubq_f32(v[1], o.v[1]), vsubq_f32(v[2], o.v[2]), vsubq_f32(v[3], o.v[3])};
    }
    Lanes operator/(const Lanes& o) const {
        return {vdivq_f32(v[0], o.v[0]), vdivq_f32(v[1], o.v[1]), vdivq_f32(v[2], o.v[2]), vdivq_f32(v[3], o.v[3])};
    }
    static float32x4_t four_below(float32x4_t a, float32x4_t b, float32x4_t yes, float32x4_t no) {
        return vbslq_f32(vcltq_f32(a, b), yes, no);
    }
    static Lanes below(const Lanes& a, const Lanes& b, const Lanes& yes, const Lanes& no) {
        return {four_below(a.v[0], b.v[0], yes.v[0], no.v[0]), four_below(a.v[1], b.v[1], yes.v[1], no.v[1]),
                 four_below(a.v[2], b.v[2], yes.v[2], no.v[2]), four_below(a.v[3], b.v[3], yes.v[3], no.v[3])};
    }
    // Comparisons instead of fmax and fmin, which return NaN if either operand is NaN.
    static Lanes larger(const Lanes& a, const Lanes& b) { return below(b, a, a, b); }
    static Lanes smaller(const Lanes& a, const Lanes& b) { return below(a, b, a, b); }
    static float32x4_t power(float32x4_t n) {
        return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
    }
    Lanes power_of_two() const { return {power(v[0]), power(v[1]), power(v[2]), power(v[3])}; }
    void add_product(const Lanes& a, const Lanes& b) {
        v[0] = vfmaq_f32(v[0], a.v[0], b.v[0]);
        v[1] = vfmaq_f32(v[1], a.v[1], b.v[1]);
        v[2] = vfmaq_f32(v[2], a.v[2], b.v[2]);
        v[3] = vfmaq_f32(v[3], a.v[3], b.v[3]);
    }
    void store(float* p) const {
        vst1q_f32(p, v[0]);
        vst1q_f32(p + 4, v[1]);
        vst1q_f32(p + 8, v[2]);
        vst1q_f32(p + 12, v[3]);
    }
    // Rounded to nearest even; NaN becomes 0. Returns the sum of the codes.
    int32_t store_codes(int8_t* p) const {
        const int32x4_t a = vcvtnq_s32_f32(v[0]), b = vcvtnq_s32_f32(v[1]), c = vcvtnq_s32_f32(v[2]),
                        d = vcvtnq_s32_f32(v[3]);
        const int16x8_t low = vqmovn_high_s32(vqmovn_s32(a), b), high = vqmovn_high_s32(vqmovn_s32(c), d);
        vst1q_s8(p, vqmovn_high_s16(vqmovn_s16(low), high));
        return vaddvq_s32(vaddq_s32(vaddq_s32(a, b), vaddq_s32(c, d)));
    }
    static uint16x4_t narrow(float32x4_t f) {
        const uint32x4_t bits = vreinterpretq_u32_f32(f), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        const uint32x4_t nan = vorrq_u32(bits, vdupq_n_u32(0x400000));
        return vshrn_n_u32(vbslq_u32(vceqq_f32(f, f), up, nan), 16);
    }
    void store_bfloat(uint8_t* p) const {
        vst1q_u8(p, vreinterpretq_u8_u16(vcombine_u16(narrow(v[0]), narrow(v[1]))));
        vst1q_u8(p + 16, vreinterpretq_u8_u16(vcombine_u16(narrow(v[2]), narrow(v[3]))));
    }
    float most() const { return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(v[0], v[1]), vmaxnmq_f32(v[2], v[3]))); }
    float sum() const {
        const float32x4_t four = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
        const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
    }
};
