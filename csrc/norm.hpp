// Root-mean-square normalisation. Included inside a namespace per instruction set.

static void rms_norm(const NormJob& job, int64_t begin, int64_t end) {
    const int64_t columns = job.columns, whole = columns / 16 * 16;
    for (int64_t row = begin; row < end; ++row) {
        const float* x = job.x + row * columns;
        float* y = job.y + row * columns;
        Lanes squares = Lanes::splat(0.0f);
        for (int64_t i = 0; i < whole; i += 16) {
            const Lanes lanes = Lanes::load(x + i);
            squares.add_product(lanes, lanes);
        }
        float sum = squares.sum();
        for (int64_t i = whole; i < columns; ++i) sum += x[i] * x[i];
        const float scale = 1.0f / __builtin_sqrtf(sum / float(columns) + job.eps);
        for (int64_t i = 0; i < columns; ++i) y[i] = x[i] * scale * (job.weight[i] + job.offset);
    }
}
