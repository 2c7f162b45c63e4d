// Normalization. Included inside a namespace per instruction set.

static void rms_norm(const NormJob& job, int64_t begin, int64_t end) {
    const int64_t columns = job.columns, whole = columns / 16 * 16;
    for (int64_t row = begin; row < end; ++row) {
        const float* x = job.x + row * columns;
        float* y = job.y ? job.y + row * columns : scratch(columns);
        if (job.delta) {
            const float* delta = job.delta + row * columns;
            float* joined = job.joined + row * columns;
            for (int64_t i = 0; i < columns; ++i) joined[i] = x[i] + delta[i];
            x = joined;
        }
        Lanes squares = Lanes::splat(0.0f);
        for (int64_t i = 0; i < whole; i += 16) {
            const Lanes lanes = Lanes::load(x + i);
            squares.add_product(lanes, lanes);
        }
        float sum = squares.sum();
        for (int64_t i = whole; i < columns; ++i) sum += x[i] * x[i];
        const float scale = 1.0f / __builtin_sqrtf(sum / float(columns) + job.eps);
        for (int64_t i = 0; i < columns; ++i) y[i] = x[i] * scale * (job.weight[i] + job.offset);
        if (job.out.data) encode_row(y, columns, job.out.data + row * job.out.stride, job.out.kind);
    }
}

static void layer_norm(const LayerNormJob& job, int64_t begin, int64_t end) {
    const int64_t columns = job.columns;
    for (int64_t row = begin; row < end; ++row) {
        const float* x = job.x + row * columns;
        float* y = job.y + row * columns;
        Lanes sums = Lanes::splat(0.0f);
        for (int64_t i = 0; i < columns; i += 16) sums = sums + load_some(x + i, columns - i);
        const float mean = sums.sum() / float(columns);
        // Second pass around the mean: the difference of two large sums would cancel.
        Lanes squares = Lanes::splat(0.0f);
        for (int64_t i = 0; i < columns; i += 16) {
            float padded[16];
            for (int j = 0; j < 16; ++j) padded[j] = i + j < columns ? x[i + j] - mean : 0.0f;
            const Lanes away = Lanes::load(padded);
            squares.add_product(away, away);
        }
        const float scale = 1.0f / __builtin_sqrtf(squares.sum() / float(columns) + job.eps);
        for (int64_t i = 0; i < columns; ++i) y[i] = (x[i] - mean) * scale * job.weight[i] + job.bias[i];
    }
}
