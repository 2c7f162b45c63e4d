// Dense weights times rows of bfloat16 by BFMMLA: two rows times two outputs, four columns at once. Used for any row
// count, so a row has the same bits alone and in any batch; but they differ from other instruction sets, because the
// instruction rounds its sums differently.
//
// Included inside a namespace per instruction set.

#if defined(BANKFULL_NEON) && defined(__ARM_FEATURE_BF16)

static constexpr int64_t BFMMLA_ROWS = 4;

// Missing rows are read as the first one, and their sums are ignored. sums: rows of 32 floats, of which sixteen are
// written.
template <int Pairs>
static void multiply_bfmmla(const uint8_t* pack, const uint8_t* const* rows, int64_t columns, float* sums) {
    float32x4_t found[Pairs][8];
    for (int pair = 0; pair < Pairs; ++pair)
        for (int i = 0; i < 8; ++i) found[pair][i] = vdupq_n_f32(0.0f);
    for (int64_t k = 0; k < columns; k += 4, pack += 128) {  // two lines of two columns each
        __builtin_prefetch(pack + AHEAD);
        __builtin_prefetch(pack + AHEAD + 64);
        bfloat16x8_t two[Pairs];
#pragma GCC unroll 2
        for (int pair = 0; pair < Pairs; ++pair)
            two[pair] = vreinterpretq_bf16_u8(vcombine_u8(vld1_u8(rows[2 * pair] + 2 * k), vld1_u8(rows[2 * pair + 1] + 2 * k)));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const uint32x4_t left = vreinterpretq_u32_u8(vld1q_u8(pack + 16 * i));
            const uint32x4_t right = vreinterpretq_u32_u8(vld1q_u8(pack + 64 + 16 * i));
            const bfloat16x8_t lower = vreinterpretq_bf16_u32(vzip1q_u32(left, right));
            const bfloat16x8_t upper = vreinterpretq_bf16_u32(vzip2q_u32(left, right));
#pragma GCC unroll 2
            for (int pair = 0; pair < Pairs; ++pair) {
                found[pair][2 * i] = vbfmmlaq_f32(found[pair][2 * i], two[pair], lower);
                found[pair][2 * i + 1] = vbfmmlaq_f32(found[pair][2 * i + 1], two[pair], upper);
            }
        }
    }
    for (int pair = 0; pair < Pairs; ++pair)
        for (int i = 0; i < 8; ++i) {
            vst1_f32(sums + (2 * pair) * UNIT_OUTPUTS + 2 * i, vget_low_f32(found[pair][i]));
            vst1_f32(sums + (2 * pair + 1) * UNIT_OUTPUTS + 2 * i, vget_high_f32(found[pair][i]));
        }
}

static void dense_bfmmla(const PackedJob& job, int64_t begin, int64_t end) {
    const int64_t columns = (job.inner + 31) / 32 * 32;
    alignas(64) float sums[2][BFMMLA_ROWS * UNIT_OUTPUTS];
    for (int64_t number = begin; number < end; ++number) {
        const Unit unit = unit_at(job, number);
        for (int64_t row = 0; row < job.rows; row += BFMMLA_ROWS) {
            const int64_t count = job.rows - row < BFMMLA_ROWS ? job.rows - row : BFMMLA_ROWS;
            const uint8_t* rows[BFMMLA_ROWS];
            for (int64_t r = 0; r < BFMMLA_ROWS; ++r) rows[r] = job.x.data + (row + (r < count ? r : 0)) * job.x.stride;
            for (int64_t i = 0; i < 2 * unit.count; ++i)
                (count > 2 ? multiply_bfmmla<2> : multiply_bfmmla<1>)(unit.pack(job, i / 2, i % 2), rows, columns,
                                                                     sums[i / 2] + i % 2 * PACK_OUTPUTS);
            finish(job, unit, row, count, FloatSums{sums[0], BFMMLA_ROWS * UNIT_OUTPUTS});
        }
    }
}

#endif
