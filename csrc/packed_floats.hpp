// Packed weights times rows of bfloat16 in float32: few rows, or any number of rows on machines without tiles.
//
// Dense weights are accumulated like tile registers do: products of even and of odd k separately over 32 columns, then
// both added, then added to the sum of the columns before. Products of two bfloat16 values are exact, so a row has the
// same bits here and in tiles, with or without FMA, on every instruction set; except for values below 2^-126, which
// tiles flush to 0. Block-quantized weights: a group's codes times the row, then times the group's scale, in the order
// of k. Either way a row has the same bits alone and in any batch.
//
// Included inside a namespace per instruction set.

// Rows that share widened weights: their sums should fit into registers. Block-quantized weights need more of them.
#if defined(__AVX512F__)
static constexpr int64_t FLOAT_ROWS = 8, BLOCK_ROWS = 8;
#elif defined(__AVX2__)
static constexpr int64_t FLOAT_ROWS = 3, BLOCK_ROWS = 3;
#elif defined(BANKFULL_NEON)
static constexpr int64_t FLOAT_ROWS = 6, BLOCK_ROWS = 2;
#else
static constexpr int64_t FLOAT_ROWS = 2, BLOCK_ROWS = 2;
#endif
static constexpr int64_t WIDENED_FLOATS = 131072;  // of rows widened at once; they should fit into cache

#if !defined(BANKFULL_NEON)

// Weights of sixteen outputs for two consecutive k.
struct Pair {
    Lanes even, odd;

    static Pair load(const uint8_t* line) {
#if defined(__AVX512F__)
        const __m512i v = _mm512_loadu_si512(line);
        return {{_mm512_castsi512_ps(_mm512_slli_epi32(v, 16))},
                {_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int32_t(0xffff0000))))}};
#elif defined(__AVX2__)
        const __m256i a = raw(line), b = raw(line + 32), upper = _mm256_set1_epi32(int32_t(0xffff0000));
        return {{_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))},
                {_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))}};
#else
        Pair pair;
        for (int i = 0; i < 4; ++i) {
            FourBits four;
            __builtin_memcpy(&four, line + 16 * i, 16);
            pair.even.v[i] = reinterpret_cast<FourFloats>(four << 16);
            pair.odd.v[i] = reinterpret_cast<FourFloats>(four & 0xffff0000u);
        }
        return pair;
#endif
    }
};

#endif

// Number of Quads per line of sixteen outputs.
#if defined(BANKFULL_NEON)
static constexpr int COLUMNS = 4;
#else
static constexpr int COLUMNS = 1;
#endif

// Byte Place of each lane's four codes, as a float.
template <int Place>
static inline Lanes code_lanes(const Quads (&line)[COLUMNS]) {
#if defined(BANKFULL_NEON)
    Lanes lanes;
    for (int i = 0; i < 4; ++i) {
        const uint32x4_t words = vreinterpretq_u32_u8(line[i].v);
        if constexpr (Place == 0)
            lanes.v[i] = vcvtq_f32_u32(vandq_u32(words, vdupq_n_u32(255)));
        else if constexpr (Place == 3)
            lanes.v[i] = vcvtq_f32_u32(vshrq_n_u32(words, 24));
        else
            lanes.v[i] = vcvtq_f32_u32(vandq_u32(vshrq_n_u32(words, 8 * Place), vdupq_n_u32(255)));
    }
    return lanes;
#else
    const Quads& quads = line[0];
#if defined(__AVX512F__)
    const __m512i moved = Place ? _mm512_srli_epi32(quads.v, 8 * Place) : quads.v;
    return {_mm512_cvtepi32_ps(Place == 3 ? moved : _mm512_and_si512(moved, _mm512_set1_epi32(255)))};
#elif defined(__AVX2__)
    const auto wide = [](__m256i v) {
        const __m256i moved = Place ? _mm256_srli_epi32(v, 8 * Place) : v;
        return _mm256_cvtepi32_ps(Place == 3 ? moved : _mm256_and_si256(moved, _mm256_set1_epi32(255)));
    };
    return {wide(quads.a), wide(quads.b)};
#else
    Lanes lanes;
    for (int i = 0; i < 4; ++i) {
        const FourWhole codes = reinterpret_cast<FourWhole>(reinterpret_cast<FourBits>(quads.v[i]) >> 8 * Place & 255);
        lanes.v[i] = __builtin_convertvector(codes, FourFloats);
    }
    return lanes;
#endif
#endif
}

// Widened rows: columns up to a multiple of 32, then the sum of each sixteen of them.
struct FloatRows {
    const float* data;
    int64_t stride, columns;  // in floats
    PackLayout layout;        // of the weights

    static int64_t padded(int64_t inner) { return (inner + 31) / 32 * 32; }
    static int64_t room(int64_t inner) { return padded(inner) / 16 * 17; }
    const float* row(int64_t number) const { return data + number * stride; }
    FloatRows from(int64_t number) const { return {row(number), stride, columns, layout}; }
    // Sum of `group` columns starting at k.
    float sum(int64_t number, int64_t k, int group) const {
        const float* sums = row(number) + columns + k / 16;
        return group == 16 ? sums[0] : sums[0] + sums[1];
    }
};

static void widen_row(const uint8_t* encoded, int64_t columns, float* out) {
    for (int64_t i = 0; i < columns; i += 16) {
        const Lanes lanes = Lanes::load_bfloat(encoded + 2 * i);
        lanes.store(out + i);
        out[columns + i / 16] = lanes.sum();
    }
}

// sums: rows of 32 floats, of which sixteen are written.
#if defined(BANKFULL_NEON)

// Sixteen outputs at once, or eight if more rows need the registers.
template <int R>
static void multiply_dense(const uint8_t* pack, const FloatRows& x, float* sums) {
    constexpr int C = R > 3 ? 2 : 4;
    for (int column = 0; column < 4; column += C) {
        float32x4_t totals[R][C];
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) totals[r][c] = vdupq_n_f32(0.0f);
        const uint8_t* line = pack + 16 * column;
        for (int64_t k = 0; k < x.columns; k += 32) {
            float32x4_t even[R][C], odd[R][C];
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) even[r][c] = odd[r][c] = vdupq_n_f32(0.0f);
            for (int i = 0; i < 32; i += 2, line += 64) {
                __builtin_prefetch(line + AHEAD);
                float32x4_t lower[C], upper[C];
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) {
                    const uint32x4_t four = vreinterpretq_u32_u8(vld1q_u8(line + 16 * c));
                    lower[c] = vreinterpretq_f32_u32(vshlq_n_u32(four, 16));
                    upper[c] = vreinterpretq_f32_u32(vandq_u32(four, vdupq_n_u32(0xffff0000u)));
                }
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r) {
                    const float* at = x.row(r) + k + i;
#pragma GCC unroll 4
                    for (int c = 0; c < C; ++c) {
                        even[r][c] = vfmaq_n_f32(even[r][c], lower[c], at[0]);
                        odd[r][c] = vfmaq_n_f32(odd[r][c], upper[c], at[1]);
                    }
                }
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) totals[r][c] = vaddq_f32(totals[r][c], vaddq_f32(even[r][c], odd[r][c]));
        }
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) vst1q_f32(sums + r * UNIT_OUTPUTS + 4 * (column + c), totals[r][c]);
    }
}

#else

template <int R>
static void multiply_dense(const uint8_t* pack, const FloatRows& x, float* sums) {
    Lanes totals[R];
    for (int r = 0; r < R; ++r) totals[r] = Lanes::splat(0.0f);
    for (int64_t k = 0; k < x.columns; k += 32) {
        Lanes even[R], odd[R];
        for (int r = 0; r < R; ++r) even[r] = odd[r] = Lanes::splat(0.0f);
        for (int i = 0; i < 32; i += 2, pack += 64) {
            __builtin_prefetch(pack + AHEAD);
            const Pair pair = Pair::load(pack);
            for (int r = 0; r < R; ++r) {
                const float* at = x.row(r) + k + i;
                even[r].add_product(pair.even, Lanes::splat(at[0]));
                odd[r].add_product(pair.odd, Lanes::splat(at[1]));
            }
        }
        for (int r = 0; r < R; ++r) totals[r] = totals[r] + (even[r] + odd[r]);
    }
    for (int r = 0; r < R; ++r) totals[r].store(sums + r * UNIT_OUTPUTS);
}

#endif

template <int R>
static inline void add_quad(const Quads (&quads)[COLUMNS], const FloatRows& x, int64_t k, Lanes* even, Lanes* odd) {
    const Lanes codes[4] = {code_lanes<0>(quads), code_lanes<1>(quads), code_lanes<2>(quads), code_lanes<3>(quads)};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        const float* at = x.row(r) + k;
        even[r].add_product(codes[0], Lanes::splat(at[0]));
        odd[r].add_product(codes[1], Lanes::splat(at[1]));
        even[r].add_product(codes[2], Lanes::splat(at[2]));
        odd[r].add_product(codes[3], Lanes::splat(at[3]));
    }
}

template <Pack P, int R>
static void multiply_blocks(const uint8_t* pack, const FloatRows& x, float* sums) {
    constexpr PackLayout layout = LAYOUTS[P];
    using Code = CodedOf<P>;
    constexpr int step = Code::step < layout.group ? Code::step : layout.group;
    const bool lower = lowered<P>(x.layout);
    const float offset = layout.zeros && lower ? 0.0f : float(-layout.offset);
    const uint8_t* codes = pack + x.layout.codes_at(x.columns);
    Lanes totals[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) totals[r] = Lanes::splat(0.0f);
    for (int64_t k = 0, block = 0; k < x.columns; ++block) {
        const uint8_t* scales = pack + scales_of_block<P>(x.layout, block);
        for (int group = 0; group < layout.groups(); ++group, k += layout.group) {
            Lanes even[R], odd[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                even[r] = Lanes::splat(offset * x.sum(r, k, layout.group));
                odd[r] = Lanes::splat(0.0f);
            }
            __builtin_prefetch(scales + AHEAD);
#pragma GCC unroll 8
            for (int i = 0; i < layout.group; i += step, codes += Code::bytes) {
                Quads quads[step / 4][COLUMNS];
                for (int column = 0; column < COLUMNS; ++column) {
                    Quads own[step / 4];
                    Code::unpack(codes + 16 * column, own);
                    for (int q = 0; q < step / 4; ++q) quads[q][column] = own[q];
                }
                for (int line = 0; line < Code::bytes; line += 64) __builtin_prefetch(codes + AHEAD + line);
                for (int q = 0; q < step / 4; ++q) add_quad<R>(quads[q], x, k + i + 4 * q, even, odd);
            }
            const Lanes scale = PackScales<P>::scale(scales, group);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) totals[r].add_product(even[r] + odd[r], scale);
            if constexpr (layout.minimum != 0 || layout.zeros)
                if (lower) {
                    const Lanes minimum = PackScales<P>::minimum(scales, group);
                    constexpr float sign = layout.zeros ? -1.0f : float(layout.minimum);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r)
                        totals[r].add_product(minimum, Lanes::splat(sign * x.sum(r, k, layout.group)));
                }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) totals[r].store(sums + r * UNIT_OUTPUTS);
}

template <Pack P, int R>
static void multiply_floats(const uint8_t* pack, const FloatRows& x, float* sums) {
    if constexpr (LAYOUTS[P].dense()) {
        multiply_dense<R>(pack, x, sums);
    } else if constexpr (constexpr int first = rows_at_once(P, R, has_all_row_counts(P) || BLOCK_ROWS < 4 ? BLOCK_ROWS : 4); first < R) {
        multiply_floats<P, first>(pack, x, sums);
        multiply_floats<P, R - first>(pack, x.from(first), sums + first * UNIT_OUTPUTS);
    } else {
        multiply_blocks<P, R>(pack, x, sums);
    }
}

// One template instance per row count.
struct FloatMultiply {
    void (*rows[FLOAT_ROWS])(const uint8_t* pack, const FloatRows& x, float* sums);
};

template <Pack P>
static constexpr FloatMultiply float_multiply() {
#if defined(__AVX512F__)
    return {multiply_floats<P, 1>, multiply_floats<P, 2>, multiply_floats<P, 3>, multiply_floats<P, 4>,
            multiply_floats<P, 5>, multiply_floats<P, 6>, multiply_floats<P, 7>, multiply_floats<P, 8>};
#elif defined(BANKFULL_NEON)
    return {multiply_floats<P, 1>, multiply_floats<P, 2>, multiply_floats<P, 3>, multiply_floats<P, 4>,
            multiply_floats<P, 5>, multiply_floats<P, 6>};
#elif defined(__AVX2__)
    return {multiply_floats<P, 1>, multiply_floats<P, 2>, multiply_floats<P, 3>};
#else
    return {multiply_floats<P, 1>, multiply_floats<P, 2>};
#endif
}

static constexpr FloatMultiply FLOAT_MULTIPLY[PACKS] = {
    float_multiply<PACK4>(),  float_multiply<PACK4M>(), float_multiply<PACK4K>(), float_multiply<PACK4S>(),
    float_multiply<PACK4SM>(), float_multiply<PACK5>(), float_multiply<PACK5M>(), float_multiply<PACK5K>(),
    float_multiply<PACK6S>(), float_multiply<PACK8>(),  float_multiply<PACK4Z>(), float_multiply<PACK3>(),
    float_multiply<PACK2>(),  float_multiply<PACK4F>(), float_multiply<PACK8R>(), float_multiply<PACK16>(),
};

static void packed_floats(const PackedJob& job, int64_t begin, int64_t end) {
    const int64_t columns = FloatRows::padded(job.inner), room = FloatRows::room(job.inner);
    const int64_t fitting = WIDENED_FLOATS / room / FLOAT_ROWS * FLOAT_ROWS;
    const int64_t chunk = fitting < FLOAT_ROWS ? FLOAT_ROWS : fitting;
    float* widened = scratch((chunk < job.rows ? chunk : job.rows) * room);
    alignas(64) float sums[2][FLOAT_ROWS * UNIT_OUTPUTS];
    for (int64_t first = 0; first < job.rows; first += chunk) {
        const int64_t last = job.rows - first < chunk ? job.rows : first + chunk;
        for (int64_t row = first; row < last; ++row)
            widen_row(job.x.data + row * job.x.stride, columns, widened + (row - first) * room);
        for (int64_t number = begin; number < end; ++number) {
            const Unit unit = unit_at(job, number);
            for (int64_t row = first; row < last; row += FLOAT_ROWS) {
                const int64_t rows = last - row < FLOAT_ROWS ? last - row : FLOAT_ROWS;
                for (int64_t part = 0; part < unit.count; ++part) {
                    const int pack = unit.parts[part].pack;
                    const FloatRows x{widened + (row - first) * room, room, columns, layout_of(pack)};
                    for (int64_t half = 0; half < 2; ++half)
                        FLOAT_MULTIPLY[kind_of(pack)].rows[rows - 1](unit.pack(job, part, half), x,
                                                                     sums[part] + half * PACK_OUTPUTS);
                }
                finish(job, unit, row, rows, FloatSums{sums[0], FLOAT_ROWS * UNIT_OUTPUTS});
            }
        }
    }
}
