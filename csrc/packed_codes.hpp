// Packed weights times rows of int8 codes. A group's products are summed exactly as integers; groups are added as
// floats in the order of k, for any tile shape: a row has the same bits alone and in any batch.
//
// Included inside a namespace per instruction set.

#if defined(BANKFULL_NEON)

#include "packed_codes_neon.hpp"

#else

// Rows that share unpacked codes: their sums should fit into registers. Up to BOTH_ROWS of them are multiplied with
// both packs of a unit at once: they share the loads of a row, and the two packs' sums are independent. Totals are
// updated once per group, so it does not matter if they spill (5% faster for 1 row, 20% for 8).
#if defined(__AVX512F__)
static constexpr int64_t CODE_ROWS = 8, BOTH_ROWS = 8;
#elif defined(__AVX2__)
static constexpr int64_t CODE_ROWS = 4, BOTH_ROWS = 3;
#else
static constexpr int64_t CODE_ROWS = 2, BOTH_ROWS = 1;
#endif

// Prefetch distance into L2, in bytes. Prefetching into L1 would evict other lines, and a core has fewer outstanding
// loads to it: 5 to 7% slower from memory.
static constexpr int64_t AHEAD = 32768;
// ... and from there into L1: another 4 to 8%. Half or twice this distance gained less.
static constexpr int64_t SOON = 2048;

struct CodeRows {
    const uint8_t* data;
    int64_t rows, stride, inner;
    // Initial value of a group's sum (int32), or the factor of the group's minimum (float). Blocks that share a zero point
    // have the sum of their factors in the last one.
    const float* corrections;
    PackLayout layout;  // of the weights

    int64_t corrections_stride() const { return inner / 16; }
    CodeRows from(int64_t row) const {
        return {data + row * stride, rows - row, stride, inner, corrections + row * corrections_stride(), layout};
    }
};

// One pack, or two adjacent ones. sums: rows of 32 floats, of which sixteen are written per pack. If there are fewer than
// R rows, the last one takes the place of the others.
template <Pack P, int R, int Packs>
static void multiply_packs(const uint8_t* pack, const CodeRows& x, float* sums) {
    constexpr PackLayout layout = LAYOUTS[P];
    using Code = CodedOf<P>;
    constexpr int step = Code::step < layout.group ? Code::step : layout.group;
    const int64_t apart = x.layout.bytes(x.inner);
    const bool lower = lowered<P>(x.layout);
    const uint8_t* codes = pack + x.layout.codes_at(x.inner);
    const int8_t* activations[R];
    const float *activation_scales[R], *corrections[R];
    Lanes totals[R][Packs];
    for (int r = 0; r < R; ++r) {
        const int64_t row = r < x.rows ? r : x.rows - 1;
        activations[r] = reinterpret_cast<const int8_t*>(x.data + row * x.stride);
        activation_scales[r] = reinterpret_cast<const float*>(x.data + row * x.stride + x.inner);
        corrections[r] = x.corrections + row * x.corrections_stride();
        for (int p = 0; p < Packs; ++p) totals[r][p] = Lanes::splat(0.0f);
    }
    for (int64_t k = 0, block = 0; k < x.inner; ++block) {
        const uint8_t* scales = pack + scales_of_block<P>(x.layout, block);
        for (int group = 0; group < layout.groups(); ++group, k += layout.group) {
            const int64_t at = k / layout.group;
            Sums partial[R][Packs];
            for (int r = 0; r < R; ++r) {
                int32_t start = 0;
                if (layout.offset != 0 && !lower) __builtin_memcpy(&start, corrections[r] + at, 4);
                for (int p = 0; p < Packs; ++p) partial[r][p] = Sums::splat(start);
            }
            if (64 * group < layout.scale_bytes())
                for (int p = 0; p < Packs; ++p) __builtin_prefetch(scales + p * apart + AHEAD + 64 * group, 0, 2);
#pragma GCC unroll 8
            for (int i = 0; i < layout.group; i += step, codes += Code::bytes) {
                Quads quads[Packs][step / 4];
                for (int p = 0; p < Packs; ++p) {
                    Code::unpack(codes + p * apart, quads[p]);
                    for (int line = 0; line < Code::bytes; line += 64) {
                        __builtin_prefetch(codes + p * apart + AHEAD + line, 0, 2);
                        __builtin_prefetch(codes + p * apart + SOON + line);
                    }
                }
                for (int q = 0; q < step / 4; ++q)
                    for (int r = 0; r < R; ++r)
                        for (int p = 0; p < Packs; ++p)
                            partial[r][p].template add_dot<layout.bits == 8>(quads[p][q], activations[r] + k + i + 4 * q);
            }
            for (int p = 0; p < Packs; ++p) {
                const Lanes scale = PackScales<P>::scale(scales + p * apart, group);
                for (int r = 0; r < R; ++r)
                    totals[r][p].add_product(partial[r][p].lanes(),
                                             scale * Lanes::splat(activation_scales[r][k / GROUP]));
                if constexpr (layout.minimum != 0 || layout.zeros)
                    if (lower && (!layout.zeros || x.layout.ends_group(block))) {
                        const Lanes minimum = PackScales<P>::minimum(scales + p * apart, group);
                        for (int r = 0; r < R; ++r) totals[r][p].add_product(minimum, Lanes::splat(corrections[r][at]));
                    }
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < Packs; ++p) totals[r][p].store(sums + r * UNIT_OUTPUTS + p * PACK_OUTPUTS);
}

template <Pack P, int R>
static void multiply_unit(const uint8_t* packs, const CodeRows& x, float* sums) {
    if constexpr (!has_all_row_counts(P) && R == 2) {
        multiply_unit<P, 1>(packs, x, sums);
        multiply_unit<P, 1>(packs, x.from(1), sums + UNIT_OUTPUTS);
    } else if constexpr (!has_all_row_counts(P) && R > 2 && R < CODE_ROWS) {
        multiply_unit<P, CODE_ROWS>(packs, x, sums);  // eight rows take twice the time of one
    } else if constexpr (R <= BOTH_ROWS) {
        multiply_packs<P, R, 2>(packs, x, sums);
    } else {
        multiply_packs<P, R, 1>(packs, x, sums);
        multiply_packs<P, R, 1>(packs + x.layout.bytes(x.inner), x, sums + PACK_OUTPUTS);
    }
}

// One template instance per row count.
struct Multiply {
    void (*rows[CODE_ROWS])(const uint8_t* packs, const CodeRows& x, float* sums);
};

template <Pack P>
static constexpr Multiply multiply() {
#if defined(__AVX512F__)
    return {multiply_unit<P, 1>, multiply_unit<P, 2>, multiply_unit<P, 3>, multiply_unit<P, 4>,
            multiply_unit<P, 5>, multiply_unit<P, 6>, multiply_unit<P, 7>, multiply_unit<P, 8>};
#elif defined(__AVX2__)
    return {multiply_unit<P, 1>, multiply_unit<P, 2>, multiply_unit<P, 3>, multiply_unit<P, 4>};
#else
    return {multiply_unit<P, 1>, multiply_unit<P, 2>};
#endif
}

static constexpr Multiply MULTIPLY[PACKS] = {
    multiply<PACK4>(), multiply<PACK4M>(), multiply<PACK4K>(), multiply<PACK4S>(), multiply<PACK4SM>(),
    multiply<PACK5>(), multiply<PACK5M>(), multiply<PACK5K>(), multiply<PACK6S>(), multiply<PACK8>(),
    multiply<PACK4Z>(), multiply<PACK3>(), multiply<PACK2>(), multiply<PACK4F>(), multiply<PACK8R>(),
};

static void correct(const PackLayout& layout, const CodeRows& x, int64_t rows, float* corrections) {
    const int64_t groups = x.inner / layout.group;
    const int sign = layout.zeros ? -1 : layout.minimum;
    for (int64_t r = 0; r < rows; ++r, corrections += x.corrections_stride()) {
        float before = 0.0f;
        const Codes row(const_cast<uint8_t*>(x.data + r * x.stride), x.inner);
        const auto correction = [&](int64_t group, int32_t sum, float scale) {
            const int32_t start = -layout.offset * sum;
            const float minimum = before + float(sign) * scale * float(sum);
            before = layout.ends_group(group) ? 0.0f : minimum;
            __builtin_memcpy(corrections + group, sign ? static_cast<const void*>(&minimum) : &start, 4);
        };
        if (layout.group == GROUP)
            for (int64_t i = 0; i < groups; ++i) correction(i, row.sums[2 * i] + row.sums[2 * i + 1], row.scales[i]);
        else
            for (int64_t i = 0; i < groups; ++i) correction(i, row.sums[i], row.scales[i / 2]);
    }
}

static void packed_codes(const PackedJob& job, int64_t begin, int64_t end) {
    const int64_t tiles = (job.rows + CODE_ROWS - 1) / CODE_ROWS, most = (job.rows + tiles - 1) / tiles;
    float* corrections = scratch(most * (job.inner / 16));
    alignas(64) float sums[2][CODE_ROWS * UNIT_OUTPUTS];
    int corrected_pack = -1;
    int64_t corrected_row = -1;
    for (int64_t number = begin; number < end; ++number) {
        const Unit unit = unit_at(job, number);
        for (int64_t row = 0; row < job.rows; row += most) {
            const int64_t rows = job.rows - row < most ? job.rows - row : most;
            for (int64_t part = 0; part < unit.count; ++part) {
                const int pack = unit.parts[part].pack;
                const CodeRows x{job.x.data + row * job.x.stride, rows, job.x.stride, job.inner, corrections, layout_of(pack)};
                if (corrected_pack != pack || corrected_row != row) correct(x.layout, x, rows, corrections);
                corrected_pack = pack;
                corrected_row = row;
                MULTIPLY[kind_of(pack)].rows[rows - 1](unit.pack(job, part, 0), x, sums[part]);
            }
            finish(job, unit, row, rows, FloatSums{sums[0], CODE_ROWS * UNIT_OUTPUTS});
        }
    }
}

#endif
