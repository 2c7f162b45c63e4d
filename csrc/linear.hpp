// Linear layers: each weight block is decoded once and multiplied with every activation row of the tile.
//
// Each result is accumulated in sixteen lanes in the order of k and reduced once, so the tile shape never affects it.
// Loops over a tile are explicitly unrolled; otherwise GCC keeps accumulators of several registers in memory.
// Included inside a namespace per instruction set.

// The prefill tile: its accumulators should fit into registers.
#if defined(__AVX512F__)
static constexpr int TILE = 4;
#else
static constexpr int TILE = 2;
#endif

template <int R>
static inline void store_tile(const LinearJob& job, const Lanes* sums, int64_t row, int64_t output) {
    const float bias = job.bias ? job.bias[output] : 0.0f;
    for (int r = 0; r < R; ++r) job.y[(row + r) * job.outputs + output] = sums[r].sum() + bias;
}

// Few rows (decode): memory-bound, so decoded weights stay in L1.
template <class F, int R>
static void few_rows(const LinearJob& job, int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; ++output) {
        const uint8_t* p = job.weight + output * job.row_bytes;
        Lanes sums[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[r] = Lanes::splat(0.0f);
        for (int64_t k = 0; k < job.inner; k += F::block, p += F::bytes) {
            alignas(64) float w[F::block];
            F::decode(p, w);
            for (int i = 0; i < F::block; i += 16) {
                const Lanes lanes = Lanes::load(w + i);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) sums[r].add_product(lanes, Lanes::load(job.x + r * job.x_stride + k + i));
            }
        }
        store_tile<R>(job, sums, 0, output);
    }
}

template <int O, int R>
static void multiply_tile(const LinearJob& job, const float* w, int64_t row, int64_t output) {
    const float* x = job.x + row * job.x_stride;
    Lanes sums[O][R];
#pragma GCC unroll 4
    for (int o = 0; o < O; ++o)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[o][r] = Lanes::splat(0.0f);
    for (int64_t k = 0; k < job.inner; k += 16) {
        Lanes inputs[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) inputs[r] = Lanes::load(x + r * job.x_stride + k);
#pragma GCC unroll 4
        for (int o = 0; o < O; ++o) {
            const Lanes lanes = Lanes::load(w + o * job.inner + k);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) sums[o][r].add_product(lanes, inputs[r]);
        }
    }
#pragma GCC unroll 4
    for (int o = 0; o < O; ++o) store_tile<R>(job, sums[o], row, output + o);
}

template <int O>
static void multiply_rows(const LinearJob& job, const float* w, int64_t output) {
    int64_t row = 0;
    for (; row + TILE <= job.rows; row += TILE) multiply_tile<O, TILE>(job, w, row, output);
    for (; row < job.rows; ++row) multiply_tile<O, 1>(job, w, row, output);
}

// Many rows (prefill): a panel of weight rows is decoded once, then multiplied tile by tile.
template <class F>
static void many_rows(const LinearJob& job, int64_t begin, int64_t end) {
    float* panel = scratch(TILE * job.inner);
    for (int64_t output = begin; output < end; output += TILE) {
        const int64_t count = end - output < TILE ? end - output : TILE;
        for (int64_t o = 0; o < count; ++o) {
            const uint8_t* p = job.weight + (output + o) * job.row_bytes;
            for (int64_t k = 0; k < job.inner; k += F::block, p += F::bytes) F::decode(p, panel + o * job.inner + k);
        }
        if (count == TILE)
            multiply_rows<TILE>(job, panel, output);
        else
            for (int64_t o = 0; o < count; ++o) multiply_rows<1>(job, panel + o * job.inner, output + o);
    }
}

template <class F>
static void linear(const LinearJob& job, int64_t begin, int64_t end) {
    switch (job.rows) {
        case 1: return few_rows<F, 1>(job, begin, end);
        case 2: return few_rows<F, 2>(job, begin, end);
        case 3: return few_rows<F, 3>(job, begin, end);
        case 4: return few_rows<F, 4>(job, begin, end);
        default: return many_rows<F>(job, begin, end);
    }
}
