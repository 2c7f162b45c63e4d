// Latent attention around its attention kernel: products with one matrix per head, RoPE of the rest of a query, and the
// writing of latents. A token's sums have the same order alone and in any batch.
//
// Included inside a namespace per instruction set.

static constexpr int64_t HEAD_OUTPUTS = 64;  // outputs of a work item
// Tokens, and outputs or blocks of lanes of them, that are multiplied together.
#if defined(__AVX512F__)
static constexpr int HEAD_TOKENS = 4, HEAD_BLOCKS = 4;
#else
static constexpr int HEAD_TOKENS = 2, HEAD_BLOCKS = 2;
#endif

// Numbers of a matrix, the last of them fewer than the lanes.
template <class E>
static inline Lanes load_numbers(const uint8_t* p, int64_t count) {
    if (count >= 16) return E::load(p);
    float padded[16] = {};
    for (int64_t i = 0; i < count; ++i) padded[i] = E::one(p + i * E::bytes);
    return Lanes::load(padded);
}

// Outputs are adjacent in memory: lanes are outputs, `count` of them in N blocks of lanes.
template <class E, int T, int N>
static void multiply_columns(const HeadProductsJob& job, int64_t token, int64_t head, int64_t output, int64_t count) {
    const float* x = job.x + token * job.x_token + head * job.x_head;
    const uint8_t* weight = job.weight + (head * job.w_head + output) * E::bytes;
    Lanes sums[T][N];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[t][n] = Lanes::splat(0.0f);
    for (int64_t c = 0; c < job.columns; ++c) {
        Lanes numbers[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
            numbers[n] = load_numbers<E>(weight + (c * job.w_column + n * 16) * E::bytes, count - n * 16);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            const Lanes each = Lanes::splat(x[t * job.x_token + c]);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[t][n].add_product(each, numbers[n]);
        }
    }
    float* y = job.y + token * job.y_token + head * job.y_head + output;
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) store_some(sums[t][n], y + t * job.y_token + n * 16, count - n * 16);
}

// Columns are adjacent in memory: lanes are columns, of N outputs.
template <class E, int T, int N>
static void multiply_rows(const HeadProductsJob& job, int64_t token, int64_t head, int64_t output) {
    const float* x = job.x + token * job.x_token + head * job.x_head;
    const uint8_t* weight = job.weight + (head * job.w_head + output * job.w_output) * E::bytes;
    Lanes sums[T][N];
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[t][n] = Lanes::splat(0.0f);
    for (int64_t c = 0; c < job.columns; c += 16) {
        const int64_t left = job.columns - c;
        Lanes numbers[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) numbers[n] = load_numbers<E>(weight + (n * job.w_output + c) * E::bytes, left);
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            const Lanes each = load_some(x + t * job.x_token + c, left);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) sums[t][n].add_product(each, numbers[n]);
        }
    }
    float* y = job.y + token * job.y_token + head * job.y_head + output;
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) y[t * job.y_token + n] = sums[t][n].sum();
}

template <class E, int T>
static void multiply_head(const HeadProductsJob& job, int64_t token, int64_t head, int64_t begin, int64_t end) {
    int64_t o = begin;
    if (job.w_output != 1) {
        for (; o + HEAD_BLOCKS <= end; o += HEAD_BLOCKS) multiply_rows<E, T, HEAD_BLOCKS>(job, token, head, o);
        for (; o < end; ++o) multiply_rows<E, T, 1>(job, token, head, o);
        return;
    }
    for (; o + HEAD_BLOCKS * 16 <= end; o += HEAD_BLOCKS * 16)
        multiply_columns<E, T, HEAD_BLOCKS>(job, token, head, o, HEAD_BLOCKS * 16);
    for (; o < end; o += 16) multiply_columns<E, T, 1>(job, token, head, o, end - o < 16 ? end - o : 16);
}

// Work items are (head, part of its outputs); the first part of a head also rotates the rest of its queries.
template <class E>
static void head_products(const HeadProductsJob& job, int64_t begin, int64_t end) {
    const int64_t parts = (job.outputs + HEAD_OUTPUTS - 1) / HEAD_OUTPUTS;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t head = item / parts, first = item % parts * HEAD_OUTPUTS;
        const int64_t last = first + HEAD_OUTPUTS < job.outputs ? first + HEAD_OUTPUTS : job.outputs;
        int64_t token = 0;
        for (; token + HEAD_TOKENS <= job.tokens; token += HEAD_TOKENS)
            multiply_head<E, HEAD_TOKENS>(job, token, head, first, last);
        for (; token < job.tokens; ++token) multiply_head<E, 1>(job, token, head, first, last);
        if (first || !job.half) continue;
        for (token = 0; token < job.tokens; ++token)
            rotate_head(job.x + token * job.x_token + head * job.x_head + job.columns, job.cos + token * job.half,
                        job.sin + token * job.half, job.half, 2 * job.half,
                        job.y + token * job.y_token + head * job.y_head + job.outputs);
    }
}

// Items are tokens: the norm of the latent, the rotated key behind it, and both into their page.
static void write_latents(const LatentsJob& job, int64_t begin, int64_t end) {
    const int64_t rank = job.rank, width = rank + 2 * job.half;
    float* row = scratch(width);
    for (int64_t token = begin; token < end; ++token) {
        const float* x = job.x + token * job.x_token;
        Lanes squares = Lanes::splat(0.0f);
        for (int64_t i = 0; i < rank; i += 16) {
            const Lanes lanes = load_some(x + i, rank - i);
            squares.add_product(lanes, lanes);
        }
        const float scale = 1.0f / __builtin_sqrtf(squares.sum() / float(rank) + job.eps);
        for (int64_t i = 0; i < rank; ++i) row[i] = x[i] * scale * job.weight[i];
        rotate_head(x + rank, job.cos + token * job.half, job.sin + token * job.half, job.half, 2 * job.half, row + rank);
        store_head(job.pages, job.type, job.slots[token] / job.page_tokens, job.slots[token] % job.page_tokens, 0, row, width);
    }
}
