// Many rows times Hadamard-transformed weights with dot products, see hadamard.hpp. Rows are transformed from their
// codes and remainders. Sums are exact integers, so a row has the same bits in any batch of as many rows.
//
// Included inside a namespace per instruction set.

static constexpr int64_t HADAMARD_MIN_ROWS = 8;  // measured: row count from which the transform pays off

// Butterflies of elements whose indices differ in one bit: of four registers, and of the lanes of one.
static inline void hadamard_four(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
    const float32x4_t sum = vaddq_f32(a, b), difference = vsubq_f32(a, b);
    const float32x4_t other_sum = vaddq_f32(c, d), other_difference = vsubq_f32(c, d);
    a = vaddq_f32(sum, other_sum);
    b = vaddq_f32(difference, other_difference);
    c = vsubq_f32(sum, other_sum);
    d = vsubq_f32(difference, other_difference);
}

static inline float32x4_t hadamard_lanes(float32x4_t v) {
    const float32x4_t one = {1, -1, 1, -1}, two = {1, 1, -1, -1};
    v = vfmaq_f32(vrev64q_f32(v), v, one);
    return vfmaq_f32(vextq_f32(v, v, 2), v, two);
}

static inline uint32x4_t magnitude(float32x4_t v) { return vreinterpretq_u32_f32(vabsq_f32(v)); }

// Magnitudes are compared by their bits, where NaN is above infinity, so that non-finite values show in the scale and
// in all of a row's results.
static inline float float_of(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

// `hadamard` is a buffer for one row of floats.
static void hadamard_row(const Codes& row, int64_t columns, bool plain, float* hadamard, uint8_t* codes, float* scale) {
    uint32x4_t most = vdupq_n_u32(0);
    for (int64_t k = 0; k < columns; k += HADAMARD_COLUMNS) {
        Lanes v[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            v[i] = Lanes::from_signed(load_bytes(reinterpret_cast<const uint8_t*>(row.codes) + k + 16 * i));
            v[i].add_product(Lanes::from_signed(load_bytes(reinterpret_cast<const uint8_t*>(row.remainders) + k + 16 * i)),
                             Lanes::splat(1.0f / 254.0f));
            v[i] = v[i] * Lanes::splat(row.scales[(k + 16 * i) / GROUP]);
        }
        if (!plain) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) hadamard_four(v[0].v[i], v[1].v[i], v[2].v[i], v[3].v[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            if (!plain) hadamard_four(v[i].v[0], v[i].v[1], v[i].v[2], v[i].v[3]);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                if (!plain) v[i].v[j] = hadamard_lanes(v[i].v[j]);
                most = vmaxq_u32(most, magnitude(v[i].v[j]));
            }
            v[i].store(hadamard + k + 16 * i);
        }
    }
    const float largest = float_of(vmaxvq_u32(most));
    *scale = largest / 127.0f;
    const Lanes inverse = Lanes::splat(largest > SMALLEST ? 127.0f / largest : 0.0f);
    for (int64_t k = 0; k < columns; k += HADAMARD_COLUMNS, codes += HADAMARD_BLOCK * HADAMARD_COLUMNS)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            (Lanes::load(hadamard + k + 16 * i) * inverse).store_codes(reinterpret_cast<int8_t*>(codes) + 16 * i);
}

// Missing rows of the last block are not written: they are multiplied like the others, and their results are ignored.
static void hadamard_rows(const HadamardRowsJob& job, int64_t begin, int64_t end) {
    float* hadamard = scratch(job.columns);
    for (int64_t row = begin; row < end; ++row) {
        uint8_t* block = job.out.data + row / HADAMARD_BLOCK * HADAMARD_BLOCK * job.out.stride;
        const int64_t number = row % HADAMARD_BLOCK;
        hadamard_row(Codes(job.x.data + row * job.x.stride, job.columns), job.columns, job.plain, hadamard, block + number * HADAMARD_COLUMNS,
                reinterpret_cast<float*>(block + HADAMARD_BLOCK * job.columns) + number);
    }
}

// Hadamard transform of eight columns, `Apart` apart; lanes are outputs here.
template <int64_t Apart>
static inline void hadamard_eight(float* first) {
    for (int64_t output = 0; output < PACK_OUTPUTS; output += 4) {
        float32x4_t v[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) v[i] = vld1q_f32(first + i * Apart * PACK_OUTPUTS + output);
        hadamard_four(v[0], v[1], v[2], v[3]);
        hadamard_four(v[4], v[5], v[6], v[7]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            vst1q_f32(first + i * Apart * PACK_OUTPUTS + output, vaddq_f32(v[i], v[i + 4]));
            vst1q_f32(first + (i + 4) * Apart * PACK_OUTPUTS + output, vsubq_f32(v[i], v[i + 4]));
        }
    }
}

// Weights as floats: columns of sixteen outputs.
template <Pack P>
static void widen_pack(const PackLayout& own, const uint8_t* pack, int64_t inner, float* columns) {
    constexpr PackLayout layout = LAYOUTS[P];
    using Code = CodedOf<P>;
    constexpr int step = Code::step < layout.group ? Code::step : layout.group;
    const uint8_t* codes = pack + own.codes_at(inner);
    const bool lower = lowered<P>(own);
    const Lanes offset = Lanes::splat(layout.zeros && lower ? 0.0f : float(layout.offset));
    for (int64_t k = 0, block = 0; k < inner; ++block) {
        const uint8_t* scales = pack + scales_of_block<P>(own, block);
        for (int group = 0; group < layout.groups(); ++group, k += layout.group) {
            const Lanes scale = PackScales<P>::scale(scales, group);
            Lanes minimum = Lanes::splat(0.0f);
            if constexpr (layout.minimum != 0 || layout.zeros)
                if (lower) minimum = PackScales<P>::minimum(scales, group) * Lanes::splat(layout.zeros ? -1.0f : float(layout.minimum));
            for (int i = 0; i < layout.group; i += step, codes += Code::bytes) {
                Quads quads[step / 4][COLUMNS];
                for (int column = 0; column < COLUMNS; ++column) {
                    Quads some[step / 4];
                    Code::unpack(codes + 16 * column, some);
                    for (int q = 0; q < step / 4; ++q) quads[q][column] = some[q];
                }
                for (int q = 0; q < step / 4; ++q, columns += 4 * PACK_OUTPUTS) {
                    const Lanes four[4] = {code_lanes<0>(quads[q]), code_lanes<1>(quads[q]), code_lanes<2>(quads[q]),
                                           code_lanes<3>(quads[q])};
                    for (int j = 0; j < 4; ++j) ((four[j] - offset) * scale + minimum).store(columns + j * PACK_OUTPUTS);
                }
            }
        }
    }
}

template <Pack P>
static void hadamard_pack(const PackLayout& own, const uint8_t* pack, int64_t inner, uint8_t* hadamard) {
    float* columns = scratch(inner * PACK_OUTPUTS);
    widen_pack<P>(own, pack, inner, columns);
    uint32x4_t most[4] = {vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0)};
    for (int64_t k = 0; k < inner; k += HADAMARD_COLUMNS) {
        float* block = columns + k * PACK_OUTPUTS;
        for (int64_t i = 0; i < 8; ++i) hadamard_eight<8>(block + i * PACK_OUTPUTS);
        for (int64_t i = 0; i < HADAMARD_COLUMNS; i += 8) hadamard_eight<1>(block + i * PACK_OUTPUTS);
        for (int64_t i = 0; i < HADAMARD_COLUMNS; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) most[j] = vmaxq_u32(most[j], magnitude(vld1q_f32(block + i * PACK_OUTPUTS + 4 * j)));
    }
    float largest[16], inverse[16];
    for (int j = 0; j < 4; ++j) vst1q_f32(largest + 4 * j, vreinterpretq_f32_u32(most[j]));
    for (int i = 0; i < 16; ++i) {
        const float scale = largest[i] * (1.0f / 127.0f / float(HADAMARD_COLUMNS));
        __builtin_memcpy(hadamard + 4 * i, &scale, 4);
        inverse[i] = largest[i] > SMALLEST ? 127.0f / largest[i] : 0.0f;
    }
    int8_t* quads = reinterpret_cast<int8_t*>(hadamard + PACK_OUTPUTS * sizeof(float));
    const Lanes factor = Lanes::load(inverse);
    for (int64_t k = 0; k < inner; k += 4, quads += 64) {
        int8_t codes[4][16];
        for (int i = 0; i < 4; ++i) (Lanes::load(columns + (k + i) * PACK_OUTPUTS) * factor).store_codes(codes[i]);
        const int8x16x4_t four = {{vld1q_s8(codes[0]), vld1q_s8(codes[1]), vld1q_s8(codes[2]), vld1q_s8(codes[3])}};
        vst4q_s8(quads, four);  // the four codes of an output are adjacent
    }
}

#include "hadamard_weights.hpp"

// Integer sums of four rows and both packs of a unit.
struct HadamardSums {
    const int32_t* data;  // for each part, four rows of 32
    const float* row_scales;
    Lanes scales[2][2];  // per part and pack

    Lanes at(int64_t part, int64_t row, int64_t half) const {
        const int32_t* place = data + (part * 4 + row) * UNIT_OUTPUTS + half * PACK_OUTPUTS;
        const Lanes sums(vcvtq_f32_s32(vld1q_s32(place)), vcvtq_f32_s32(vld1q_s32(place + 4)),
                         vcvtq_f32_s32(vld1q_s32(place + 8)), vcvtq_f32_s32(vld1q_s32(place + 12)));
        return sums * scales[part][half] * Lanes::splat(row_scales[row]);
    }
};

// Four rows, 64 bytes apart, times one pack. sums: rows of 32, of which sixteen are written. Registers 0 to 3 are rows,
// 4 to 7 weights, 16 to 31 sums. `Fetch`: weights come from memory, so later ones are prefetched; otherwise they are in
// cache.
#define DOT(sum, weights, row, lane) "sdot v" #sum ".4s, v" #weights ".16b, v" #row ".4b[" #lane "]\n"
#define DOTS(a, b, c, d, weights, lane) DOT(a, weights, 0, lane) DOT(b, weights, 1, lane) DOT(c, weights, 2, lane) DOT(d, weights, 3, lane)
#define FETCHED "prfm pldl2keep, [%[w], %[ahead]]\nprfm pldl1keep, [%[w], %[soon]]\n"
#define NEAR ""
#define QUAD(FROM, lane)                                                                               \
    FROM "ldp q4, q5, [%[w]], #32\nldp q6, q7, [%[w]], #32\n" DOTS(16, 17, 18, 19, 4, lane)             \
        DOTS(20, 21, 22, 23, 5, lane) DOTS(24, 25, 26, 27, 6, lane) DOTS(28, 29, 30, 31, 7, lane)
#define SIXTEEN(FROM, a, b, c, d)                                                                      \
    "ldr q0, [%[x], #" #a "]\nldr q1, [%[x], #" #b "]\nldr q2, [%[x], #" #c "]\nldr q3, [%[x], #" #d "]\n" \
        QUAD(FROM, 0) QUAD(FROM, 1) QUAD(FROM, 2) QUAD(FROM, 3)
#define ZERO(a, b, c, d) "movi v" #a ".4s, #0\nmovi v" #b ".4s, #0\nmovi v" #c ".4s, #0\nmovi v" #d ".4s, #0\n"
#define STORE(at, a, b, c, d) "stp q" #a ", q" #b ", [%[sums], #" #at "]\nstp q" #c ", q" #d ", [%[sums], #" #at " + 32]\n"
#define MULTIPLY(FROM)                                                                                 \
    asm volatile(                                                                                      \
        ZERO(16, 17, 18, 19) ZERO(20, 21, 22, 23) ZERO(24, 25, 26, 27) ZERO(28, 29, 30, 31)            \
        ".p2align 5\n1:\n"                                                                              \
        SIXTEEN(FROM, 0, 64, 128, 192) SIXTEEN(FROM, 16, 80, 144, 208) SIXTEEN(FROM, 32, 96, 160, 224) \
        SIXTEEN(FROM, 48, 112, 176, 240)                                                               \
        "add %[x], %[x], #1024\nsubs %[blocks], %[blocks], #1\nb.ne 1b\n"                              \
        STORE(0, 16, 20, 24, 28) STORE(128, 17, 21, 25, 29) STORE(256, 18, 22, 26, 30)                 \
        STORE(384, 19, 23, 27, 31)                                                                     \
        : [x] "+r"(x), [w] "+r"(w), [blocks] "+r"(blocks)                                              \
        : [sums] "r"(sums), [ahead] "r"(AHEAD), [soon] "r"(SOON)                                       \
        : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18", "v19",  \
          "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")
template <bool Fetch>
static void multiply_mixed(const uint8_t* x, const uint8_t* w, int64_t inner, int32_t* sums) {
    static_assert(HADAMARD_COLUMNS == 64 && HADAMARD_BLOCK == 16 && UNIT_OUTPUTS == 32, "as hard-coded in the instructions");
    int64_t blocks = inner / HADAMARD_COLUMNS;
    if constexpr (Fetch) MULTIPLY(FETCHED);
    if constexpr (!Fetch) MULTIPLY(NEAR);
}
#undef DOT
#undef DOTS
#undef FETCHED
#undef NEAR
#undef QUAD
#undef SIXTEEN
#undef ZERO
#undef STORE
#undef MULTIPLY

// All rows for a unit, then for the next: a unit's weights stay in L1.
static void packed_hadamard(const PackedJob& job, int64_t begin, int64_t end) {
    alignas(64) int32_t sums[2][4 * UNIT_OUTPUTS];
    const int64_t block = HADAMARD_BLOCK * job.hadamard.stride;
    for (int64_t number = begin; number < end; ++number) {
        const Unit unit = unit_at(job, number);
        HadamardSums own{sums[0], nullptr, {}};
        const uint8_t* packs[2][2];
        for (int64_t part = 0; part < unit.count; ++part)
            for (int64_t half = 0; half < 2; ++half) {
                const uint8_t* pack = unit.parts[part].hadamard + (unit.number * 2 + half) * hadamard_pack_bytes(job.inner);
                own.scales[part][half] = Lanes::load(reinterpret_cast<const float*>(pack));
                packs[part][half] = pack + PACK_OUTPUTS * sizeof(float);
            }
        for (int64_t row = 0; row < job.rows; row += 4) {
            const int64_t rows = job.rows - row < 4 ? job.rows - row : 4;
            const uint8_t* rows_at = job.hadamard.data + row / HADAMARD_BLOCK * block;
            for (int64_t part = 0; part < unit.count; ++part)
                for (int64_t half = 0; half < 2; ++half)
                    if (const uint8_t* x = rows_at + row % HADAMARD_BLOCK * HADAMARD_COLUMNS; row == 0)
                        multiply_mixed<true>(x, packs[part][half], job.inner, sums[part] + half * PACK_OUTPUTS);
                    else
                        multiply_mixed<false>(x, packs[part][half], job.inner, sums[part] + half * PACK_OUTPUTS);
            own.row_scales = reinterpret_cast<const float*>(rows_at + HADAMARD_BLOCK * job.inner) + row % HADAMARD_BLOCK;
            finish(job, unit, row, rows, own);
        }
    }
}

static constexpr void offer_hadamard(Kernels& table) {
    table.hadamard_rows = hadamard_rows;
    table.hadamard_weights = hadamard_weights;
    table.hadamard_form = Activations::Codes;
    table.hadamard_min_rows = HADAMARD_MIN_ROWS;
}
