// Packed weights times rows of int8 codes with NEON, see packed_codes.hpp.
//
// Few rows: weight codes are unpacked on their way into the products. Many rows: a pack is unpacked once into panels of
// signed bytes and float scales, which stay in cache while rows are processed, four at a time. Both do the same
// arithmetic in the same order, so a row has the same bits in either.
//
// Integer sums start with the bits of a float whose last digit stands for one: such a sum, read as a float, is that
// float plus the sum. Subtracting the float is exact, and cheaper than a conversion, which a Neoverse-N1 does at a
// quarter of the rate.
//
// Included inside a namespace per instruction set.

static constexpr float SHIFT = 0x1.8p23f;
static constexpr int32_t SHIFT_BITS = 0x4b400000;  // bits of SHIFT; a group's sums are far below 2^22

static constexpr int64_t CODE_ROWS = 4;
// Prefetch distances into L2 and then into L1, in bytes.
static constexpr int64_t AHEAD = 16384, SOON = 1024;

static inline void fetch(const uint8_t* line) {
    __builtin_prefetch(line + AHEAD, 0, 2);
    __builtin_prefetch(line + SOON);
}

// Per-group data of four rows, interleaved by row. Entries of missing rows are not read.
struct GroupNumbers {
    float scales[4];
    // Factor of a minimum (float), or initial value of a sum (int32).
    float corrections[4];
};

struct CodeRows {
    const uint8_t* data;
    int64_t stride, inner;
    const GroupNumbers* numbers;  // per group
    PackLayout layout;            // of the weights
    int first = 0;                // of these rows, in the numbers of four

    const int8_t* row(int r) const { return reinterpret_cast<const int8_t*>(data + r * stride); }
    CodeRows from(int r) const { return {data + r * stride, stride, inner, numbers, layout, first + r}; }
};

// Row r of four. Four groups at a time: one by one they took a tenth of the products' time. Lower: weights have minima
// or zero points.
template <Pack P, bool Lower>
static void number_row(const Codes& row, int64_t groups, int64_t r, GroupNumbers* numbers) {
    constexpr PackLayout layout = LAYOUTS[P];
    constexpr float sign = layout.zeros ? -1.0f : float(layout.minimum);
    // 8-bit codes are signed already.
    constexpr int32_t offset = layout.bits == 8 ? 0 : layout.offset;
    constexpr bool wide = layout.group == GROUP;  // otherwise two groups share a scale
    int64_t i = 0;
    for (; i + 4 <= groups; i += 4) {
        float32x4_t scale;
        int32x4_t sum;
        if constexpr (wide) {
            scale = vld1q_f32(row.scales + i);
            sum = vpaddq_s32(vld1q_s32(row.sums + 2 * i), vld1q_s32(row.sums + 2 * i + 4));
        } else {
            const float32x2_t two = vld1_f32(row.scales + i / 2);
            scale = vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
            sum = vld1q_s32(row.sums + i);
        }
        float32x4_t correction;
        if constexpr (Lower)
            correction = vmulq_f32(vmulq_n_f32(scale, sign), vcvtq_f32_s32(sum));
        else
            correction = vreinterpretq_f32_s32(vmlsq_n_s32(vdupq_n_s32(SHIFT_BITS), sum, offset));
        vst1q_lane_f32(numbers[i].scales + r, scale, 0);
        vst1q_lane_f32(numbers[i + 1].scales + r, scale, 1);
        vst1q_lane_f32(numbers[i + 2].scales + r, scale, 2);
        vst1q_lane_f32(numbers[i + 3].scales + r, scale, 3);
        vst1q_lane_f32(numbers[i].corrections + r, correction, 0);
        vst1q_lane_f32(numbers[i + 1].corrections + r, correction, 1);
        vst1q_lane_f32(numbers[i + 2].corrections + r, correction, 2);
        vst1q_lane_f32(numbers[i + 3].corrections + r, correction, 3);
    }
    for (; i < groups; ++i) {
        const int32_t sum = wide ? row.sums[2 * i] + row.sums[2 * i + 1] : row.sums[i];
        const float scale = row.scales[i * layout.group / GROUP];
        const float minimum = sign * scale * float(sum);
        const int32_t start = SHIFT_BITS - offset * sum;
        numbers[i].scales[r] = scale;
        __builtin_memcpy(numbers[i].corrections + r, Lower ? static_cast<const void*>(&minimum) : &start, 4);
    }
}

// For all rows of a job: the groups of the first four rows, then of the next four.
template <Pack P, bool Lower>
static void number_groups(const PackedJob& job, GroupNumbers* numbers) {
    const int64_t groups = job.inner / LAYOUTS[P].group;
    for (int64_t row = 0; row < job.rows; ++row)
        number_row<P, Lower>(Codes(job.x.data + row * job.x.stride, job.inner), groups, row % CODE_ROWS,
                      numbers + row / CODE_ROWS * groups);
}

// Adds the sums of a group to a row's total: scales and minima are those of one register's outputs.
static inline float32x4_t plus_group(bool lower, float32x4_t total, int32x4_t sums, float32x4_t scale, float32x4_t minimum,
                                     float row_scale, float correction) {
    if (lower) total = vfmaq_n_f32(total, minimum, correction);
    const float32x4_t whole = vsubq_f32(vreinterpretq_f32_s32(sums), vdupq_n_f32(SHIFT));
    return vfmaq_n_f32(total, vmulq_f32(whole, scale), row_scale);
}

static inline int32x4_t start_of(bool minimum, float correction) {
    return minimum ? vdupq_n_s32(SHIFT_BITS) : vreinterpretq_s32_f32(vdupq_n_f32(correction));
}

// The outputs of `Columns` registers, from register First on. sums: rows of 32 floats.
template <Pack P, int R, int First, int Columns>
static void multiply_columns(const uint8_t* pack, const CodeRows& x, float* sums) {
    constexpr PackLayout layout = LAYOUTS[P];
    using Code = CodedOf<P>;
    constexpr int step = Code::step < layout.group ? Code::step : layout.group, registers = layout.group / 16;
    constexpr bool lowers = layout.minimum != 0 || layout.zeros;
    const bool lower = lowered<P>(x.layout);
    const uint8_t* codes = pack + x.layout.codes_at(x.inner);
    const GroupNumbers* numbers = x.numbers;
    float32x4_t totals[R][Columns];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < Columns; ++i) totals[r][i] = vdupq_n_f32(0.0f);
    for (int64_t k = 0, block = 0; k < x.inner; ++block) {
        const uint8_t* scales = pack + scales_of_block<P>(x.layout, block);
        for (int group = 0; group < layout.groups(); ++group, k += layout.group, ++numbers) {
            int8x16_t activations[R][registers];
            int32x4_t found[R][Columns];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
                for (int i = 0; i < registers; ++i) activations[r][i] = vld1q_s8(x.row(r) + k + 16 * i);
#pragma GCC unroll 4
                for (int i = 0; i < Columns; ++i) found[r][i] = start_of(lower, numbers->corrections[x.first + r]);
            }
            if (First == 0 && 64 * group < layout.scale_bytes()) fetch(scales + 64 * group);
#pragma GCC unroll 8
            for (int i = 0; i < layout.group; i += step, codes += Code::bytes) {
#pragma GCC unroll 5
                for (int line = 0; First == 0 && line < Code::bytes; line += 64) fetch(codes + line);
#pragma GCC unroll 4
                for (int column = 0; column < Columns; ++column) {
                    Quads quads[step / 4];
                    Code::unpack(codes + 16 * (First + column), quads);
#pragma GCC unroll 8
                    for (int q = 0; q < step / 4; ++q)
#pragma GCC unroll 4
                        for (int r = 0; r < R; ++r)
                            found[r][column] = plus_dot(found[r][column], quads[q].template signed_codes<layout.bits>(),
                                                        activations[r][(i / 4 + q) / 4], (i / 4 + q) % 4);
                }
            }
            const Lanes scale = PackScales<P>::scale(scales, group);
            Lanes minimum = scale;
            if constexpr (lowers)
                if (lower) minimum = PackScales<P>::minimum(scales, group);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int i = 0; i < Columns; ++i)
                    totals[r][i] = plus_group(lowers && lower, totals[r][i], found[r][i], scale.v[First + i], minimum.v[First + i],
                                              numbers->scales[x.first + r], numbers->corrections[x.first + r]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < Columns; ++i) vst1q_f32(sums + r * UNIT_OUTPUTS + 4 * (First + i), totals[r][i]);
}

// sums: rows of 32 floats, of which sixteen are written. With several rows, sums and totals of all outputs would not fit
// into the registers: half of the outputs at a time reads the same lines twice, but from L1.
template <Pack P, int R>
static void multiply_few(const uint8_t* pack, const CodeRows& x, float* sums) {
    if constexpr (constexpr int first = rows_at_once(P, R, has_all_row_counts(P) ? CODE_ROWS : 2); first < R) {
        multiply_few<P, first>(pack, x, sums);
        multiply_few<P, R - first>(pack, x.from(first), sums + first * UNIT_OUTPUTS);
    } else if constexpr (R <= 2) {
        multiply_columns<P, R, 0, 4>(pack, x, sums);
    } else {
        multiply_columns<P, R, 0, 2>(pack, x, sums);
        multiply_columns<P, R, 2, 2>(pack, x, sums);
    }
}

// Eight outputs of a pack, unpacked in the order in which products read them: for each group the codes of its quads, 32
// bytes each, with the offset subtracted; eight float scales; each scale times -SHIFT; eight float minima if there are
// any. The product with -SHIFT is exact (a scale has at most 19 bits), so adding it to a scale times a sum that started
// with SHIFT gives, rounded once, the scale times the sum: one instruction instead of two.
static constexpr int64_t PANEL_OUTPUTS = 8, UNIT_PANELS = UNIT_OUTPUTS / PANEL_OUTPUTS;
template <int Group, bool Minimum>
static constexpr int64_t GROUP_BYTES = Group * PANEL_OUTPUTS + (Minimum ? 96 : 64);
static constexpr int64_t READ_AHEAD = 32;  // unused bytes that may be read past a panel

// Both panels of a pack; the second one starts `apart` bytes after the first.
template <Pack P, bool Lower>
static void unpack_panels(const PackLayout& own, const uint8_t* pack, int64_t inner, uint8_t* panel, int64_t apart) {
    constexpr PackLayout layout = LAYOUTS[P];
    using Code = CodedOf<P>;
    constexpr int step = Code::step < layout.group ? Code::step : layout.group;
    constexpr int64_t scales_at = layout.group * PANEL_OUTPUTS;
    // 8-bit codes are signed already; zero points take the offset's place.
    const int8x16_t offset = vdupq_n_s8(layout.bits == 8 || (layout.zeros && Lower) ? 0 : layout.offset);
    const uint8_t* codes = pack + own.codes_at(inner);
    for (int64_t k = 0, block = 0; k < inner; ++block) {
        const uint8_t* scales = pack + scales_of_block<P>(own, block);
        for (int group = 0; group < layout.groups(); ++group, k += layout.group) {
            for (int i = 0; i < layout.group; i += step, codes += Code::bytes) {
                for (int line = 0; line < Code::bytes; line += 64) fetch(codes + line);
                for (int column = 0; column < 4; ++column) {
                    Quads quads[step / 4];
                    Code::unpack(codes + 16 * column, quads);
                    uint8_t* out = panel + column / 2 * apart + column % 2 * 16 + i * PANEL_OUTPUTS;
                    for (int q = 0; q < step / 4; ++q)
                        vst1q_s8(reinterpret_cast<int8_t*>(out + 32 * q),
                                 vsubq_s8(quads[q].template signed_codes<layout.bits>(), offset));
                }
            }
            const Lanes scale = PackScales<P>::scale(scales, group);
            for (int column = 0; column < 4; ++column) {
                float* out = reinterpret_cast<float*>(panel + column / 2 * apart + scales_at) + column % 2 * 4;
                vst1q_f32(out, scale.v[column]);
                vst1q_f32(out + 8, vmulq_n_f32(scale.v[column], -SHIFT));
                if constexpr (Lower) vst1q_f32(out + 16, PackScales<P>::minimum(scales, group).v[column]);
            }
            panel += GROUP_BYTES<layout.group, Lower>;
        }
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Eight columns of two outputs times those of two rows, four sums per instruction (SMMLA): row 0 with both outputs, row
// 1 with both. Quads of four outputs become such pairs by zipping words of two adjacent quads. Four rows. sums: rows of
// 32 floats, of which eight are written.
template <int Group, bool Minimum>
static void multiply_panel(const uint8_t* panel, const CodeRows& x, float* sums) {
    float32x4_t totals[2][4];  // two rows and two outputs each
    for (int pair = 0; pair < 2; ++pair)
        for (int i = 0; i < 4; ++i) totals[pair][i] = vdupq_n_f32(0.0f);
    const GroupNumbers* numbers = x.numbers;
    const auto both = [](float32x4_t four, int first) {  // values of two rows, each twice
        const float32x2_t two = first ? vget_high_f32(four) : vget_low_f32(four);
        return vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
    };
    for (int64_t k = 0; k < x.inner; k += Group, ++numbers, panel += GROUP_BYTES<Group, Minimum>) {
        const float32x4_t scales = vld1q_f32(numbers->scales), corrections = vld1q_f32(numbers->corrections);
        const float32x4_t row_scales[2] = {both(scales, 0), both(scales, 1)};
        const float32x4_t row_corrections[2] = {both(corrections, 0), both(corrections, 1)};
        const int8_t* codes = reinterpret_cast<const int8_t*>(panel);
        const float* own = reinterpret_cast<const float*>(codes + Group * PANEL_OUTPUTS);
        int32x4_t found[2][4];
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; ++pair)
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) found[pair][i] = vdupq_n_s32(SHIFT_BITS);
#pragma GCC unroll 4
        for (int octet = 0; octet < Group / 8; ++octet) {
            const int8_t* at = codes + 64 * octet;
            const int32x4_t a = vreinterpretq_s32_s8(vld1q_s8(at)), b = vreinterpretq_s32_s8(vld1q_s8(at + 16));
            const int32x4_t c = vreinterpretq_s32_s8(vld1q_s8(at + 32)), d = vreinterpretq_s32_s8(vld1q_s8(at + 48));
            const int32x4_t outputs[4] = {vzip1q_s32(a, c), vzip2q_s32(a, c), vzip1q_s32(b, d), vzip2q_s32(b, d)};
#pragma GCC unroll 2
            for (int pair = 0; pair < 2; ++pair) {
                const int8x16_t two = vcombine_s8(vld1_s8(x.row(2 * pair) + k + 8 * octet),
                                                  vld1_s8(x.row(2 * pair + 1) + k + 8 * octet));
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i)
                    found[pair][i] = vmmlaq_s32(found[pair][i], two, vreinterpretq_s8_s32(outputs[i]));
            }
        }
        const auto twice = [own](int i) { return vcombine_f32(vld1_f32(own + i), vld1_f32(own + i)); };
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const float32x4_t scale = twice(2 * i), shift = twice(2 * i + 8);
#pragma GCC unroll 2
            for (int pair = 0; pair < 2; ++pair) {
                float32x4_t& total = totals[pair][i];
                if constexpr (Minimum) total = vfmaq_f32(total, twice(2 * i + 16), row_corrections[pair]);
                const float32x4_t scaled = vfmaq_f32(shift, vreinterpretq_f32_s32(found[pair][i]), scale);
                total = vfmaq_f32(total, scaled, row_scales[pair]);
            }
        }
    }
    for (int pair = 0; pair < 2; ++pair)
        for (int i = 0; i < 4; ++i) {
            vst1_f32(sums + (2 * pair) * UNIT_OUTPUTS + 2 * i, vget_low_f32(totals[pair][i]));
            vst1_f32(sums + (2 * pair + 1) * UNIT_OUTPUTS + 2 * i, vget_high_f32(totals[pair][i]));
        }
}

#elif defined(__ARM_FEATURE_DOTPROD)

// In assembly, because compilers hoist loads until sums spill, which costs half of the speed. Loads still stand well
// before their use: while products wait in a full queue, nothing after them is issued. Initial sums are always loaded:
// loads have their own units, while a register copy would occupy a product's slot.
//
// Registers 0 to 7 are the sums of a group (four rows of the first four outputs, then of the others), 8 to 11 sixteen
// columns of the rows, 12 to 15 weights, 16 to 23 the totals, 24 to 27 the next sixteen columns, 28 and 29 scales, 30
// the rows' scales. Sums times scales replace columns that are no longer needed.
#define DOT(sum, weights, row, lane) "sdot v" #sum ".4s, v" #weights ".16b, v" #row ".4b[" #lane "]\n"
#define QUAD(w, v, a, b, c, d, lane, FIRST, SECOND, THIRD, FOURTH)                                               \
    DOT(0, w, a, lane) DOT(1, w, b, lane) FIRST DOT(2, w, c, lane) DOT(3, w, d, lane) SECOND                     \
    DOT(4, v, a, lane) DOT(5, v, b, lane) THIRD DOT(6, v, c, lane) DOT(7, v, d, lane) FOURTH
#define NOTHING ""
#define LOAD(to, from, at) "ldr q" #to ", [%[" #from "], #" #at "]\n"
#define LOAD_TWO(to, next, from, at) "ldp q" #to ", q" #next ", [%[" #from "], #" #at "]\n"
#define EVEN(at, a, b, c, d, lane, ...) QUAD(12, 13, a, b, c, d, lane, LOAD_TWO(14, 15, panel, at), __VA_ARGS__)
#define ODD(at, a, b, c, d, lane, ...) QUAD(14, 15, a, b, c, d, lane, LOAD_TWO(12, 13, panel, at), __VA_ARGS__)
#define SCALED(found, sum, scales) "fmla v" #found ".4s, v" #sum ".4s, v" #scales ".4s\n"
#define TOTAL(total, sum, numbers, lane) "fmla v" #total ".4s, v" #sum ".4s, v" #numbers ".s[" #lane "]\n"
#define FOUR_SCALED(a, b, c, d, e, f, g, h, scales) \
    SCALED(a, e, scales) SCALED(b, f, scales) SCALED(c, g, scales) SCALED(d, h, scales)
#define FOUR_TOTALS(a, b, c, d, e, f, g, h, numbers) \
    TOTAL(a, e, numbers, 0) TOTAL(b, f, numbers, 1) TOTAL(c, g, numbers, 2) TOTAL(d, h, numbers, 3)
// Minima come first: they keep the units busy until the sums of the previous group are ready.
#define MINIMUMS(at)                                                                                             \
    LOAD_TWO(24, 25, panel, at) LOAD(26, numbers, 16)                                                            \
    FOUR_TOTALS(16, 17, 18, 19, 24, 24, 24, 24, 26) FOUR_TOTALS(20, 21, 22, 23, 25, 25, 25, 25, 26)
#define NO_MINIMUMS(at) ""
// Groups of 32 columns: shifts are at byte 288 of a panel's group, minima at 320; BYTES to the next.
#define GROUP_OF_32(FIRST, BYTES)                                                                                \
    FIRST(320)                                                                                                   \
    EVEN(32, 8, 9, 10, 11, 0, NOTHING, NOTHING, NOTHING)                                                         \
    ODD(64, 8, 9, 10, 11, 1, LOAD(24, a, 16), LOAD(25, b, 16), NOTHING)                                          \
    EVEN(96, 8, 9, 10, 11, 2, LOAD(26, c, 16), LOAD(27, d, 16), NOTHING)                                         \
    ODD(128, 8, 9, 10, 11, 3, NOTHING, NOTHING, NOTHING)                                                         \
    EVEN(160, 24, 25, 26, 27, 0, NOTHING, NOTHING, NOTHING)                                                      \
    ODD(192, 24, 25, 26, 27, 1, LOAD_TWO(28, 29, panel, 256), NOTHING, NOTHING)                                  \
    EVEN(224, 24, 25, 26, 27, 2, LOAD(8, panel, 288), LOAD(9, panel, 288), LOAD(30, numbers, 0))                 \
    ODD(BYTES, 24, 25, 26, 27, 3, LOAD(10, panel, 288), LOAD(11, panel, 288), NOTHING)                           \
    GROUP_END(304, 32)
#define GROUP_OF_16(FIRST, BYTES)                                                                                \
    FIRST(192)                                                                                                   \
    EVEN(32, 8, 9, 10, 11, 0, NOTHING, NOTHING, NOTHING)                                                         \
    ODD(64, 8, 9, 10, 11, 1, LOAD_TWO(28, 29, panel, 128), NOTHING, NOTHING)                                     \
    EVEN(96, 8, 9, 10, 11, 2, LOAD(30, numbers, 0), NOTHING, NOTHING)                                            \
    ODD(BYTES, 8, 9, 10, 11, 3, NOTHING, NOTHING, NOTHING)                                                       \
    LOAD(8, panel, 160) LOAD(9, panel, 160) LOAD(10, panel, 160) LOAD(11, panel, 160)                            \
    GROUP_END(176, 16)
#define BEGIN(a, b, c, d) LOAD_TWO(a, b, shift, 0) LOAD_TWO(c, d, shift, 0)
#define ROWS(at) LOAD(8, a, at) LOAD(9, b, at) LOAD(10, c, at) LOAD(11, d, at)
#define GROUP_END(SECOND_SHIFT, COLUMNS)                                                                         \
    LOAD(24, panel, SECOND_SHIFT) LOAD(25, panel, SECOND_SHIFT)                                                  \
    LOAD(26, panel, SECOND_SHIFT) LOAD(27, panel, SECOND_SHIFT)                                                  \
    FOUR_SCALED(8, 9, 10, 11, 0, 1, 2, 3, 28) BEGIN(0, 1, 2, 3)                                                  \
    FOUR_SCALED(24, 25, 26, 27, 4, 5, 6, 7, 29) BEGIN(4, 5, 6, 7)                                                \
    FOUR_TOTALS(16, 17, 18, 19, 8, 9, 10, 11, 30) ROWS(COLUMNS)                                                  \
    FOUR_TOTALS(20, 21, 22, 23, 24, 25, 26, 27, 30)
#define ZERO(total) "movi v" #total ".4s, #0\n"
#define STORE(row, a, b) "stp q" #a ", q" #b ", [%[sums], #(" #row " * 128)]\n"
#define MULTIPLY(GROUP, FIRST, COLUMNS, BYTES)                                                                   \
    asm volatile(                                                                                                \
        ZERO(16) ZERO(17) ZERO(18) ZERO(19) ZERO(20) ZERO(21) ZERO(22) ZERO(23)                                  \
        BEGIN(0, 1, 2, 3) BEGIN(4, 5, 6, 7) ROWS(0) LOAD_TWO(12, 13, panel, 0)                                   \
        "1:\n"                                                                                                   \
        GROUP(FIRST, BYTES)                                                                                      \
        "add %[a], %[a], #" #COLUMNS "\nadd %[b], %[b], #" #COLUMNS "\nadd %[c], %[c], #" #COLUMNS "\n"          \
        "add %[d], %[d], #" #COLUMNS "\nadd %[numbers], %[numbers], #32\nadd %[panel], %[panel], #" #BYTES "\n"  \
        "subs %[groups], %[groups], #1\nb.ne 1b\n"                                                               \
        STORE(0, 16, 20) STORE(1, 17, 21) STORE(2, 18, 22) STORE(3, 19, 23)                                      \
        : [panel] "+r"(panel), [numbers] "+r"(numbers), [a] "+r"(a), [b] "+r"(b), [c] "+r"(c), [d] "+r"(d),      \
          [groups] "+r"(groups)                                                                                  \
        : [sums] "r"(sums), [shift] "r"(shift)                                                                   \
        : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12",       \
          "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26",      \
          "v27", "v28", "v29", "v30")

// Four rows. sums: rows of 32 floats, of which eight are written. After the last group, the reads ahead touch the rows'
// scales, which follow their columns, and the next weights: see READ_AHEAD.
template <int Group, bool Minimum>
static void multiply_panel(const uint8_t* panel, const CodeRows& x, float* sums) {
    const int8_t *a = x.row(0), *b = x.row(1), *c = x.row(2), *d = x.row(3);
    const GroupNumbers* numbers = x.numbers;
    int64_t groups = x.inner / Group;
    static_assert(UNIT_OUTPUTS * sizeof(float) == 128 && sizeof(GroupNumbers) == 32 && GROUP_BYTES<32, true> == 352 &&
                      GROUP_BYTES<32, false> == 320 && GROUP_BYTES<16, true> == 224 && GROUP_BYTES<16, false> == 192,
                  "as hard-coded in the instructions below");
    alignas(32) static constexpr float shift[8] = {SHIFT, SHIFT, SHIFT, SHIFT, SHIFT, SHIFT, SHIFT, SHIFT};
    if constexpr (Group == 32 && Minimum) MULTIPLY(GROUP_OF_32, MINIMUMS, 32, 352);
    if constexpr (Group == 32 && !Minimum) MULTIPLY(GROUP_OF_32, NO_MINIMUMS, 32, 320);
    if constexpr (Group == 16 && Minimum) MULTIPLY(GROUP_OF_16, MINIMUMS, 16, 224);
    if constexpr (Group == 16 && !Minimum) MULTIPLY(GROUP_OF_16, NO_MINIMUMS, 16, 192);
}

#undef DOT
#undef QUAD
#undef NOTHING
#undef LOAD
#undef LOAD_TWO
#undef EVEN
#undef ODD
#undef SCALED
#undef TOTAL
#undef FOUR_SCALED
#undef FOUR_TOTALS
#undef MINIMUMS
#undef NO_MINIMUMS
#undef GROUP_OF_32
#undef GROUP_OF_16
#undef BEGIN
#undef ROWS
#undef GROUP_END
#undef ZERO
#undef STORE
#undef MULTIPLY

#else

// Four rows. sums: rows of 32 floats, of which eight are written.
template <int Group, bool Minimum>
static void multiply_panel(const uint8_t* panel, const CodeRows& x, float* sums) {
    float32x4_t totals[CODE_ROWS][2];
    for (int r = 0; r < CODE_ROWS; ++r) totals[r][0] = totals[r][1] = vdupq_n_f32(0.0f);
    const GroupNumbers* numbers = x.numbers;
    for (int64_t k = 0; k < x.inner; k += Group, ++numbers, panel += GROUP_BYTES<Group, Minimum>)
        for (int column = 0; column < 2; ++column) {
            const float* own = reinterpret_cast<const float*>(panel + Group * PANEL_OUTPUTS) + 4 * column;
            const float32x4_t scale = vld1q_f32(own), minimum = Minimum ? vld1q_f32(own + 16) : scale;
#pragma GCC unroll 4
            for (int r = 0; r < CODE_ROWS; ++r) {
                int32x4_t found = vdupq_n_s32(SHIFT_BITS);
#pragma GCC unroll 8
                for (int q = 0; q < Group / 4; ++q)
                    found = plus_dot(found, vreinterpretq_s8_u8(vld1q_u8(panel + 32 * q + 16 * column)),
                                     vld1q_s8(x.row(r) + k + q / 4 * 16), q % 4);
                totals[r][column] = plus_group(Minimum, totals[r][column], found, scale, minimum, numbers->scales[r],
                                                        numbers->corrections[r]);
            }
        }
    for (int r = 0; r < CODE_ROWS; ++r)
        for (int i = 0; i < 2; ++i) vst1q_f32(sums + r * UNIT_OUTPUTS + 4 * i, totals[r][i]);
}

#endif

// The kernels of one packed format.
struct CodeKernels {
    int group;
    void (*number_groups)(const PackedJob& job, GroupNumbers* numbers);
    void (*few[CODE_ROWS])(const uint8_t* pack, const CodeRows& x, float* sums);  // by row count
    void (*unpack)(const PackLayout& own, const uint8_t* pack, int64_t inner, uint8_t* panel, int64_t apart);
    void (*multiply)(const uint8_t* panel, const CodeRows& x, float* sums);
};

template <Pack P, bool Lower = LAYOUTS[P].minimum != 0>
static constexpr CodeKernels code_kernels() {
    constexpr int group = LAYOUTS[P].group;
    return {group,
            number_groups<P, Lower>,
            {multiply_few<P, 1>, multiply_few<P, 2>, multiply_few<P, 3>, multiply_few<P, 4>},
            unpack_panels<P, Lower>,
            multiply_panel<group, Lower>};
}

static constexpr CodeKernels CODE_KERNELS[PACKS] = {
    code_kernels<PACK4>(), code_kernels<PACK4M>(), code_kernels<PACK4K>(), code_kernels<PACK4S>(),
    code_kernels<PACK4SM>(), code_kernels<PACK5>(), code_kernels<PACK5M>(), code_kernels<PACK5K>(),
    code_kernels<PACK6S>(), code_kernels<PACK8>(), code_kernels<PACK4Z, true>(), code_kernels<PACK3>(),
    code_kernels<PACK2>(), code_kernels<PACK4F>(), code_kernels<PACK8R>(),
};
static constexpr CodeKernels CODES_WITH_ZEROS[2] = {code_kernels<PACK3, true>(), code_kernels<PACK2, true>()};

static inline const CodeKernels& kernels_of(int pack) {
    const int kind = kind_of(pack);
    return (kind == PACK3 || kind == PACK2) && layout_of(pack).zeros ? CODES_WITH_ZEROS[kind - PACK3] : CODE_KERNELS[kind];
}

// Per-group data of all rows, in the caller's memory; recomputed only if another packed format follows.
class NumberedRows {
  public:
    NumberedRows(const PackedJob& job, GroupNumbers* memory) : job_(job), memory_(memory) {}
    static int64_t count(const PackedJob& job) { return (job.rows + CODE_ROWS - 1) / CODE_ROWS * (job.inner / 16); }
    // Four rows starting at `row`, a multiple of four.
    CodeRows from(int64_t row, int pack) {
        if (pack_ != pack) kernels_of(pack).number_groups(job_, memory_);
        pack_ = pack;
        const int64_t groups = job_.inner / kernels_of(pack).group;
        return {job_.x.data + row * job_.x.stride, job_.x.stride, job_.inner, memory_ + row / CODE_ROWS * groups, layout_of(pack)};
    }

  private:
    const PackedJob& job_;
    GroupNumbers* memory_;
    int pack_ = -1;
};

// Rows per pass over a panel: these rows and a panel should fit into L1.
static constexpr int64_t PANEL_ROWS = 16;

static void packed_codes(const PackedJob& job, int64_t begin, int64_t end) {
    const bool panels = job.rows >= 2 * CODE_ROWS;  // otherwise unpacking a pack costs more than it saves
    const int64_t count = NumberedRows::count(job);
    const int64_t room = panels ? job.inner / 16 * GROUP_BYTES<16, true> + READ_AHEAD : 0;
    // For each part of a gate: the per-group data of its rows, and panels of both packs of a unit.
    uint8_t* memory =
        reinterpret_cast<uint8_t*>(scratch((count * int64_t(sizeof(GroupNumbers)) + UNIT_PANELS * room) / 2));
    GroupNumbers* numbers = reinterpret_cast<GroupNumbers*>(memory);
    NumberedRows numbered[2] = {{job, numbers}, {job, numbers + count}};
    uint8_t* panel = memory + 2 * count * int64_t(sizeof(GroupNumbers));
    alignas(64) float sums[2][PANEL_ROWS * UNIT_OUTPUTS];
    for (int64_t number = begin; number < end; ++number) {
        const Unit unit = unit_at(job, number);
        if (panels)
            for (int64_t i = 0; i < 2 * unit.count; ++i)
                kernels_of(unit.parts[i / 2].pack)
                    .unpack(layout_of(unit.parts[i / 2].pack), unit.pack(job, i / 2, i % 2), job.inner, panel + 2 * i * room, room);
        for (int64_t first = 0; first < job.rows; first += PANEL_ROWS) {
            const int64_t rows = job.rows - first < PANEL_ROWS ? job.rows - first : PANEL_ROWS;
            const int64_t whole = panels ? rows / CODE_ROWS * CODE_ROWS : 0;
            for (int64_t part = 0; part < unit.count; ++part) {
                const int pack = unit.parts[part].pack;
                const CodeKernels& kernels = kernels_of(pack);
                for (int64_t i = 0; i < UNIT_PANELS; ++i)
                    for (int64_t row = 0; row < whole; row += CODE_ROWS)
                        kernels.multiply(panel + (part * UNIT_PANELS + i) * room, numbered[part].from(first + row, pack),
                                         sums[part] + row * UNIT_OUTPUTS + i * PANEL_OUTPUTS);
                for (int64_t row = whole; row < rows; row += CODE_ROWS) {
                    const int64_t few = rows - row < CODE_ROWS ? rows - row : CODE_ROWS;
                    for (int64_t half = 0; half < 2; ++half)
                        kernels.few[few - 1](unit.pack(job, part, half), numbered[part].from(first + row, pack),
                                             sums[part] + row * UNIT_OUTPUTS + half * PACK_OUTPUTS);
                }
            }
            finish(job, unit, first, rows, FloatSums{sums[0], PANEL_ROWS * UNIT_OUTPUTS});
        }
    }
}
