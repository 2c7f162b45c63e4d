// Packed weights times rows of int8 codes with NEON, see packed_codes.hpp.
//
// Few rows: codes of weights are unpacked on their way into the products. Many rows: a pack is unpacked once into a panel
// of signed bytes and float scales, which stays near while rows pass by, four at a time. Both do the same arithmetic in
// the same order, so a row has the same bits in either.
//
// Sums of integers begin with the bits of a float whose last digit stands for one: such a sum, read as a float, is that
// float plus the sum. Taking the float away again is exact, and cheaper than a conversion, which a Neoverse-N1 does at a
// quarter of the rate.
//
// Included inside a namespace per instruction set.

static constexpr float SHIFT = 0x1.8p23f;
static constexpr int32_t SHIFT_BITS = 0x4b400000;  // the bits of SHIFT; sums of a group are far below 2^22

static constexpr int64_t CODE_ROWS = 4;
// Bytes: how far ahead of its use a line is asked for, into the second-level cache, and then into the first.
static constexpr int64_t AHEAD = 16384, SOON = 1024;

static inline void fetch(const uint8_t* line) {
    __builtin_prefetch(line + AHEAD, 0, 2);
    __builtin_prefetch(line + SOON);
}

// What four rows bring along for each group of columns, the rows' numbers side by side. A row that is not there has zeros.
struct GroupNumbers {
    float scales[4];
    // What a minimum is multiplied with (a float), or what a sum begins with (an int32).
    float corrections[4];
};

struct CodeRows {
    const uint8_t* data;
    int64_t stride, inner;
    const GroupNumbers* numbers;  // of each group

    const int8_t* row(int r) const { return reinterpret_cast<const int8_t*>(data + r * stride); }
};

// For all rows of a job: so many groups of the first four rows, then of the next four.
template <Pack P>
static void number_groups(const PackedJob& job, GroupNumbers* numbers) {
    constexpr PackLayout layout = LAYOUTS[P];
    // Codes of 8 bits are signed already.
    constexpr int32_t offset = layout.bits == 8 ? 0 : layout.offset;
    const int64_t groups = job.inner / layout.group;
    for (int64_t first = 0; first < job.rows; first += CODE_ROWS, numbers += groups)
        for (int64_t r = 0; r < CODE_ROWS; ++r) {
            if (first + r >= job.rows) {
                for (int64_t i = 0; i < groups; ++i) numbers[i].scales[r] = numbers[i].corrections[r] = 0.0f;
                continue;
            }
            const Codes row(job.x.data + (first + r) * job.x.stride, job.inner);
            for (int64_t i = 0; i < groups; ++i) {
                const int32_t sum = layout.group == GROUP ? row.sums[2 * i] + row.sums[2 * i + 1] : row.sums[i];
                const float scale = row.scales[i * layout.group / GROUP];
                const float minimum = float(layout.minimum) * scale * float(sum);
                const int32_t start = SHIFT_BITS - offset * sum;
                numbers[i].scales[r] = scale;
                __builtin_memcpy(numbers[i].corrections + r, layout.minimum ? static_cast<const void*>(&minimum) : &start, 4);
            }
        }
}

// The sums of a group join a row's total: scales and minimums are those of one register's outputs.
template <bool Minimum>
static inline float32x4_t plus_group(float32x4_t total, int32x4_t sums, float32x4_t scale, float32x4_t minimum,
                                     float row_scale, float correction) {
    if constexpr (Minimum) total = vfmaq_n_f32(total, minimum, correction);
    const float32x4_t whole = vsubq_f32(vreinterpretq_f32_s32(sums), vdupq_n_f32(SHIFT));
    return vfmaq_n_f32(total, vmulq_f32(whole, scale), row_scale);
}

template <bool Minimum>
static inline int32x4_t start_of(float correction) {
    if constexpr (Minimum) return vdupq_n_s32(SHIFT_BITS);
    return vreinterpretq_s32_f32(vdupq_n_f32(correction));
}

// sums: rows of 32 floats, of which sixteen are written.
template <Pack P, int R>
static void multiply_few(const uint8_t* pack, const CodeRows& x, float* sums) {
    constexpr PackLayout layout = LAYOUTS[P];
    using Code = Coded<layout.bits>;
    constexpr int step = Code::step < layout.group ? Code::step : layout.group, registers = layout.group / 16;
    constexpr bool minimums = layout.minimum != 0;
    const uint8_t *scales = pack, *codes = pack + layout.codes_at(x.inner);
    const GroupNumbers* numbers = x.numbers;
    Lanes totals[R];
    for (int r = 0; r < R; ++r) totals[r] = Lanes::splat(0.0f);
    for (int64_t k = 0; k < x.inner; scales += layout.scale_bytes())
        for (int group = 0; group < layout.groups(); ++group, k += layout.group, ++numbers) {
            int8x16_t activations[R][registers];
            int32x4_t found[R][4];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
                for (int i = 0; i < registers; ++i) activations[r][i] = vld1q_s8(x.row(r) + k + 16 * i);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) found[r][i] = start_of<minimums>(numbers->corrections[r]);
            }
            if (64 * group < layout.scale_bytes()) fetch(scales + 64 * group);
#pragma GCC unroll 8
            for (int i = 0; i < layout.group; i += step, codes += Code::bytes) {
#pragma GCC unroll 5
                for (int line = 0; line < Code::bytes; line += 64) fetch(codes + line);
#pragma GCC unroll 4
                for (int column = 0; column < 4; ++column) {
                    Quads quads[step / 4];
                    Code::unpack(codes + 16 * column, quads);
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
            if constexpr (minimums) minimum = PackScales<P>::minimum(scales, group);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i)
                    totals[r].v[i] = plus_group<minimums>(totals[r].v[i], found[r][i], scale.v[i], minimum.v[i],
                                                          numbers->scales[r], numbers->corrections[r]);
        }
    for (int r = 0; r < R; ++r) totals[r].store(sums + r * UNIT_OUTPUTS);
}

// A pack, unpacked, as products read it from front to back: for each group, and in it for each half of the sixteen outputs,
// eight float minimums where there are some; the codes of its quads, 32 bytes each; eight float scales.
template <int Group, bool Minimum>
static constexpr int64_t GROUP_BYTES = 2 * (Group * 8 + (Minimum ? 64 : 32));

template <Pack P>
static void unpack_panel(const uint8_t* pack, int64_t inner, uint8_t* panel) {
    constexpr PackLayout layout = LAYOUTS[P];
    using Code = Coded<layout.bits>;
    constexpr int step = Code::step < layout.group ? Code::step : layout.group;
    constexpr int64_t half = GROUP_BYTES<layout.group, layout.minimum != 0> / 2, codes_at = layout.minimum ? 32 : 0;
    const uint8_t *scales = pack, *codes = pack + layout.codes_at(inner);
    for (int64_t k = 0; k < inner; scales += layout.scale_bytes())
        for (int group = 0; group < layout.groups(); ++group, k += layout.group, panel += 2 * half) {
            for (int i = 0; i < layout.group; i += step, codes += Code::bytes) {
                for (int line = 0; line < Code::bytes; line += 64) fetch(codes + line);
                for (int column = 0; column < 4; ++column) {
                    Quads quads[step / 4];
                    Code::unpack(codes + 16 * column, quads);
                    uint8_t* out = panel + column / 2 * half + codes_at + column % 2 * 16 + i * 8;
                    for (int q = 0; q < step / 4; ++q)
                        vst1q_s8(reinterpret_cast<int8_t*>(out + 32 * q), quads[q].template signed_codes<layout.bits>());
                }
            }
            const Lanes scale = PackScales<P>::scale(scales, group);
            for (int column = 0; column < 4; ++column) {
                float* out = reinterpret_cast<float*>(panel + column / 2 * half) + column % 2 * 4;
                if constexpr (layout.minimum != 0) vst1q_f32(out, PackScales<P>::minimum(scales, group).v[column]);
                vst1q_f32(out + (codes_at + layout.group * 8) / 4, scale.v[column]);
            }
        }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Two outputs' eight columns times those of two rows, four sums at once: row 0 with both outputs, row 1 with both. Quads of
// four outputs become such pairs by taking words of two neighbouring quads in turn.
// Four rows. sums: rows of 32 floats, of which sixteen are written.
template <int Group, bool Minimum>
static void multiply_panel(const uint8_t* panel, const CodeRows& x, float* sums) {
    float32x4_t totals[2][8];  // of two rows and two outputs each
    for (int pair = 0; pair < 2; ++pair)
        for (int i = 0; i < 8; ++i) totals[pair][i] = vdupq_n_f32(0.0f);
    const GroupNumbers* numbers = x.numbers;
    const auto both = [](float32x4_t four, int first) {  // numbers of two rows, each twice
        const float32x2_t two = first ? vget_high_f32(four) : vget_low_f32(four);
        return vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
    };
    for (int64_t k = 0; k < x.inner; k += Group, ++numbers) {
        const float32x4_t scales = vld1q_f32(numbers->scales), corrections = vld1q_f32(numbers->corrections);
        const float32x4_t row_scales[2] = {both(scales, 0), both(scales, 1)};
        const float32x4_t row_corrections[2] = {both(corrections, 0), both(corrections, 1)};
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half, panel += GROUP_BYTES<Group, Minimum> / 2) {
            const int8_t* codes = reinterpret_cast<const int8_t*>(panel) + (Minimum ? 32 : 0);
            int32x4_t found[2][4];
#pragma GCC unroll 2
            for (int pair = 0; pair < 2; ++pair)
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i)
                    found[pair][i] = Minimum ? vdupq_n_s32(SHIFT_BITS) : vreinterpretq_s32_f32(row_corrections[pair]);
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
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const float32x2_t two = vld1_f32(reinterpret_cast<const float*>(codes + Group * 8) + 2 * i);
                const float32x2_t least = vld1_f32(reinterpret_cast<const float*>(panel) + 2 * i);
                const float32x4_t scale = vcombine_f32(two, two), minimum = vcombine_f32(least, least);
#pragma GCC unroll 2
                for (int pair = 0; pair < 2; ++pair) {
                    float32x4_t& total = totals[pair][4 * half + i];
                    if constexpr (Minimum) total = vfmaq_f32(total, minimum, row_corrections[pair]);
                    const float32x4_t whole = vsubq_f32(vreinterpretq_f32_s32(found[pair][i]), vdupq_n_f32(SHIFT));
                    total = vfmaq_f32(total, vmulq_f32(whole, scale), row_scales[pair]);
                }
            }
        }
    }
    for (int pair = 0; pair < 2; ++pair)
        for (int i = 0; i < 8; ++i) {
            vst1_f32(sums + (2 * pair) * UNIT_OUTPUTS + 2 * i, vget_low_f32(totals[pair][i]));
            vst1_f32(sums + (2 * pair + 1) * UNIT_OUTPUTS + 2 * i, vget_high_f32(totals[pair][i]));
        }
}

#elif defined(__ARM_FEATURE_DOTPROD)

// Written out, because compilers move loads ahead until sums have no registers left, which costs half of the speed.
// Registers 0 to 7 are the sums of a group for eight outputs (four rows of the first four, then of the others), 8 to 11
// the rows, 12 and 13 weights, 14 SHIFT, 15 the rows' scales, 16 to 31 the totals.
#define DOT(sum, weights, row, lane) "sdot v" #sum ".4s, v" #weights ".16b, v" #row ".4b[" #lane "]\n"
#define QUAD(lane)                                                                                               \
    "ldp q12, q13, [%[panel]], #32\n" DOT(0, 12, 8, lane) DOT(1, 12, 9, lane) DOT(2, 12, 10, lane)               \
        DOT(3, 12, 11, lane) DOT(4, 13, 8, lane) DOT(5, 13, 9, lane) DOT(6, 13, 10, lane) DOT(7, 13, 11, lane)
#define SIXTEEN(at)                                                                                              \
    "ldr q8, [%[a], #" #at "]\nldr q9, [%[b], #" #at "]\nldr q10, [%[c], #" #at "]\nldr q11, [%[d], #" #at "]\n" \
        QUAD(0) QUAD(1) QUAD(2) QUAD(3)
#define BEGIN_SHIFTED                                                                                            \
    "mov v0.16b, v14.16b\nmov v1.16b, v14.16b\nmov v2.16b, v14.16b\nmov v3.16b, v14.16b\n"                       \
    "mov v4.16b, v14.16b\nmov v5.16b, v14.16b\nmov v6.16b, v14.16b\nmov v7.16b, v14.16b\n"
#define BEGIN_CORRECTED                                                                                          \
    "ldr q15, [%[numbers], #16]\n"                                                                               \
    "dup v0.4s, v15.s[0]\ndup v1.4s, v15.s[1]\ndup v2.4s, v15.s[2]\ndup v3.4s, v15.s[3]\n"                       \
    "dup v4.4s, v15.s[0]\ndup v5.4s, v15.s[1]\ndup v6.4s, v15.s[2]\ndup v7.4s, v15.s[3]\n"
#define WHOLE(sum) "fsub v" #sum ".4s, v" #sum ".4s, v14.4s\n"
#define SCALE(sum, scales) "fmul v" #sum ".4s, v" #sum ".4s, v" #scales ".4s\n"
#define TOTAL(total, sum, lane) "fmla v" #total ".4s, v" #sum ".4s, v15.s[" #lane "]\n"
#define TOTALS(a, b, c, d, e, f, g, h)                                                                           \
    "ldp q12, q13, [%[panel]], #32\nldr q15, [%[numbers]]\n"                                                     \
    WHOLE(0) WHOLE(1) WHOLE(2) WHOLE(3) WHOLE(4) WHOLE(5) WHOLE(6) WHOLE(7)                                      \
    SCALE(0, 12) SCALE(1, 12) SCALE(2, 12) SCALE(3, 12) SCALE(4, 13) SCALE(5, 13) SCALE(6, 13) SCALE(7, 13)      \
    TOTAL(a, 0, 0) TOTAL(b, 1, 1) TOTAL(c, 2, 2) TOTAL(d, 3, 3) TOTAL(e, 4, 0) TOTAL(f, 5, 1) TOTAL(g, 6, 2) TOTAL(h, 7, 3)
// Minimums come first: they keep the units busy until the sums of the half before are there.
#define MINIMUMS(a, b, c, d, e, f, g, h)                                                                         \
    "ldp q12, q13, [%[panel]], #32\nldr q15, [%[numbers], #16]\n"                                                \
    TOTAL(a, 12, 0) TOTAL(b, 12, 1) TOTAL(c, 12, 2) TOTAL(d, 12, 3) TOTAL(e, 13, 0) TOTAL(f, 13, 1)              \
    TOTAL(g, 13, 2) TOTAL(h, 13, 3)
#define NO_MINIMUMS(a, b, c, d, e, f, g, h)
#define HALF(BEGIN, COLUMNS, FIRST, a, b, c, d, e, f, g, h) \
    FIRST(a, b, c, d, e, f, g, h) BEGIN COLUMNS TOTALS(a, b, c, d, e, f, g, h)
#define ZERO(total) "movi v" #total ".4s, #0\n"
#define STORE(row, a, b, c, d)                                                                 \
    "stp q" #a ", q" #b ", [%[sums], #(" #row " * 128)]\nstp q" #c ", q" #d ", [%[sums], #(" #row " * 128 + 32)]\n"
#define MULTIPLY(BEGIN, COLUMNS, FIRST, STEP)                                                                    \
    asm volatile(                                                                                                \
        "dup v14.4s, %w[shift]\n"                                                                                \
        ZERO(16) ZERO(17) ZERO(18) ZERO(19) ZERO(20) ZERO(21) ZERO(22) ZERO(23)                                  \
        ZERO(24) ZERO(25) ZERO(26) ZERO(27) ZERO(28) ZERO(29) ZERO(30) ZERO(31)                                  \
        "1:\n"                                                                                                   \
        HALF(BEGIN, COLUMNS, FIRST, 16, 17, 18, 19, 20, 21, 22, 23)                                              \
        HALF(BEGIN, COLUMNS, FIRST, 24, 25, 26, 27, 28, 29, 30, 31)                                              \
        "add %[a], %[a], #" #STEP "\nadd %[b], %[b], #" #STEP "\nadd %[c], %[c], #" #STEP "\n"                    \
        "add %[d], %[d], #" #STEP "\nadd %[numbers], %[numbers], #32\nsubs %[groups], %[groups], #1\nb.ne 1b\n"  \
        STORE(0, 16, 20, 24, 28) STORE(1, 17, 21, 25, 29) STORE(2, 18, 22, 26, 30) STORE(3, 19, 23, 27, 31)      \
        : [panel] "+r"(panel), [numbers] "+r"(numbers), [a] "+r"(a), [b] "+r"(b), [c] "+r"(c), [d] "+r"(d),      \
          [groups] "+r"(groups)                                                                                  \
        : [sums] "r"(sums), [shift] "r"(SHIFT_BITS)                                                              \
        : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12",       \
          "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26",      \
          "v27", "v28", "v29", "v30", "v31")

// Four rows. sums: rows of 32 floats, of which sixteen are written.
template <int Group, bool Minimum>
static void multiply_panel(const uint8_t* panel, const CodeRows& x, float* sums) {
    const int8_t *a = x.row(0), *b = x.row(1), *c = x.row(2), *d = x.row(3);
    const GroupNumbers* numbers = x.numbers;
    int64_t groups = x.inner / Group;
    static_assert(UNIT_OUTPUTS * sizeof(float) == 128 && sizeof(GroupNumbers) == 32, "as the instructions below know it");
    if constexpr (Group == 32 && Minimum) MULTIPLY(BEGIN_SHIFTED, SIXTEEN(0) SIXTEEN(16), MINIMUMS, 32);
    if constexpr (Group == 32 && !Minimum) MULTIPLY(BEGIN_CORRECTED, SIXTEEN(0) SIXTEEN(16), NO_MINIMUMS, 32);
    if constexpr (Group == 16 && Minimum) MULTIPLY(BEGIN_SHIFTED, SIXTEEN(0), MINIMUMS, 16);
    if constexpr (Group == 16 && !Minimum) MULTIPLY(BEGIN_CORRECTED, SIXTEEN(0), NO_MINIMUMS, 16);
}

#undef DOT
#undef QUAD
#undef SIXTEEN
#undef BEGIN_SHIFTED
#undef BEGIN_CORRECTED
#undef WHOLE
#undef SCALE
#undef TOTAL
#undef TOTALS
#undef MINIMUMS
#undef NO_MINIMUMS
#undef HALF
#undef ZERO
#undef STORE
#undef MULTIPLY

#else

// Four rows. sums: rows of 32 floats, of which sixteen are written.
template <int Group, bool Minimum>
static void multiply_panel(const uint8_t* panel, const CodeRows& x, float* sums) {
    float32x4_t totals[CODE_ROWS][4];
    for (int r = 0; r < CODE_ROWS; ++r)
        for (int i = 0; i < 4; ++i) totals[r][i] = vdupq_n_f32(0.0f);
    const GroupNumbers* numbers = x.numbers;
    for (int64_t k = 0; k < x.inner; k += Group, ++numbers)
        for (int half = 0; half < 4; half += 2, panel += GROUP_BYTES<Group, Minimum> / 2)
            for (int column = 0; column < 2; ++column) {
                const uint8_t* codes = panel + (Minimum ? 32 : 0);
                const float32x4_t scale = vld1q_f32(reinterpret_cast<const float*>(codes + Group * 8) + 4 * column);
                const float32x4_t minimum = vld1q_f32(reinterpret_cast<const float*>(panel) + 4 * column);
#pragma GCC unroll 4
                for (int r = 0; r < CODE_ROWS; ++r) {
                    int32x4_t found = start_of<Minimum>(numbers->corrections[r]);
#pragma GCC unroll 8
                    for (int q = 0; q < Group / 4; ++q)
                        found = plus_dot(found, vreinterpretq_s8_u8(vld1q_u8(codes + 32 * q + 16 * column)),
                                         vld1q_s8(x.row(r) + k + q / 4 * 16), q % 4);
                    totals[r][half + column] = plus_group<Minimum>(totals[r][half + column], found, scale, minimum,
                                                                   numbers->scales[r], numbers->corrections[r]);
                }
            }
    for (int r = 0; r < CODE_ROWS; ++r)
        for (int i = 0; i < 4; ++i) vst1q_f32(sums + r * UNIT_OUTPUTS + 4 * i, totals[r][i]);
}

#endif

// What one form of packed weights offers.
struct CodeKernels {
    int group;
    int64_t group_bytes;  // of a panel
    void (*number_groups)(const PackedJob& job, GroupNumbers* numbers);
    void (*few[CODE_ROWS])(const uint8_t* pack, const CodeRows& x, float* sums);  // a template for each number of rows
    void (*unpack)(const uint8_t* pack, int64_t inner, uint8_t* panel);
    void (*multiply)(const uint8_t* panel, const CodeRows& x, float* sums);
};

template <Pack P>
static constexpr CodeKernels code_kernels() {
    constexpr int group = LAYOUTS[P].group;
    constexpr bool minimum = LAYOUTS[P].minimum != 0;
    return {group,
            GROUP_BYTES<group, minimum>,
            number_groups<P>,
            {multiply_few<P, 1>, multiply_few<P, 2>, multiply_few<P, 3>, multiply_few<P, 4>},
            unpack_panel<P>,
            multiply_panel<group, minimum>};
}

static constexpr CodeKernels CODE_KERNELS[PACKS] = {
    code_kernels<PACK4>(), code_kernels<PACK4M>(), code_kernels<PACK4K>(), code_kernels<PACK4S>(),
    code_kernels<PACK4SM>(), code_kernels<PACK5>(), code_kernels<PACK5M>(), code_kernels<PACK5K>(),
    code_kernels<PACK6S>(), code_kernels<PACK8>(),
};

// The numbers of all rows, in memory of the caller; made again only where another form of weights follows.
class NumberedRows {
  public:
    NumberedRows(const PackedJob& job, GroupNumbers* memory) : job_(job), memory_(memory) {}
    static int64_t count(const PackedJob& job) { return (job.rows + CODE_ROWS - 1) / CODE_ROWS * (job.inner / 16); }
    // Four rows from `row` on, which is a multiple of four.
    CodeRows from(int64_t row, int pack) {
        if (pack_ != pack) CODE_KERNELS[pack].number_groups(job_, memory_);
        pack_ = pack;
        const int64_t groups = job_.inner / CODE_KERNELS[pack].group;
        return {job_.x.data + row * job_.x.stride, job_.x.stride, job_.inner, memory_ + row / CODE_ROWS * groups};
    }

  private:
    const PackedJob& job_;
    GroupNumbers* memory_;
    int pack_ = -1;
};

static void packed_codes(const PackedJob& job, int64_t begin, int64_t end) {
    const bool panels = job.rows >= 2 * CODE_ROWS;  // else unpacking a pack takes longer than it saves
    const int64_t count = NumberedRows::count(job), room = panels ? job.inner / 16 * GROUP_BYTES<16, true> : 0;
    // For each part of a gate: the numbers of its rows, and panels of both packs of a unit.
    uint8_t* memory = reinterpret_cast<uint8_t*>(scratch((count * int64_t(sizeof(GroupNumbers)) + 2 * room) / 2));
    GroupNumbers* numbers = reinterpret_cast<GroupNumbers*>(memory);
    NumberedRows numbered[2] = {{job, numbers}, {job, numbers + count}};
    uint8_t* panel = memory + 2 * count * int64_t(sizeof(GroupNumbers));
    alignas(64) float sums[2][CODE_ROWS * UNIT_OUTPUTS];
    for (int64_t number = begin; number < end; ++number) {
        const Unit unit = unit_at(job, number);
        if (panels)
            for (int64_t i = 0; i < 2 * unit.count; ++i)
                CODE_KERNELS[unit.parts[i / 2].pack].unpack(unit.pack(job, i / 2, i % 2), job.inner, panel + i * room);
        for (int64_t row = 0; row < job.rows; row += CODE_ROWS) {
            const int64_t rows = job.rows - row < CODE_ROWS ? job.rows - row : CODE_ROWS;
            for (int64_t i = 0; i < 2 * unit.count; ++i) {
                const int64_t part = i / 2, half = i % 2;
                const CodeKernels& kernels = CODE_KERNELS[unit.parts[part].pack];
                const CodeRows x = numbered[part].from(row, unit.parts[part].pack);
                float* found = sums[part] + half * PACK_OUTPUTS;
                if (panels && rows == CODE_ROWS)
                    kernels.multiply(panel + i * room, x, found);
                else
                    kernels.few[rows - 1](unit.pack(job, part, half), x, found);
            }
            finish(job, unit, row, rows, FloatSums{sums[0], CODE_ROWS * UNIT_OUTPUTS});
        }
    }
}
