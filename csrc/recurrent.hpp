// Mamba's convolution and scan, over sequences x blocks of sixteen channels: work item i is sequence i / blocks, block
// i % blocks. A token's arithmetic is the same whether its past comes from the same call or from a slot.
//
// Included inside a namespace per instruction set.

static void causal_conv(const ConvJob& job, int64_t begin, int64_t end) {
    const RecurrentPlan& plan = job.plan;
    const int64_t channels = plan.channels, width = job.width, past = width - 1;
    const int64_t blocks = (channels + 15) / 16;
    // Both transposed: taps[k] and line[k] hold sixteen channels.
    float* taps = scratch((2 * width) * 16);
    float* line = taps + width * 16;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t i = item / blocks, c0 = item % blocks * 16;
        const int64_t count = channels - c0 < 16 ? channels - c0 : 16;
        const float* slot = job.state + (plan.read[i] * channels + c0) * past;
        for (int64_t c = 0; c < count; ++c) {
            for (int64_t k = 0; k < width; ++k) taps[k * 16 + c] = job.weight[(c0 + c) * width + k];
            for (int64_t k = 0; k < past; ++k) line[k * 16 + c] = slot[c * past + k];
        }
        for (int64_t c = count; c < 16; ++c)
            for (int64_t k = 0; k < width; ++k) taps[k * 16 + c] = line[k * 16 + c] = 0.0f;
        const Lanes bias = job.bias ? load_some(job.bias + c0, count) : Lanes::splat(0.0f);
        const int64_t last = plan.q_start[i + 1];
        for (int64_t t = plan.q_start[i]; t < last; ++t) {
            load_some(job.x + t * job.x_token + c0, count).store(line + past * 16);
            Lanes sum = bias;
            for (int64_t k = 0; k < width; ++k) sum.add_product(Lanes::load(taps + k * 16), Lanes::load(line + k * 16));
            store_some(job.silu ? Silu::of(sum, 0.0f) : sum, job.y + t * channels + c0, count);
            __builtin_memmove(line, line + 16, size_t(past) * 16 * sizeof(float));
            const int64_t j = plan.kept[i] - (last - t);
            if (j < 0) continue;
            float* kept = job.state + (plan.write[i * plan.write_stride + j] * channels + c0) * past;
            for (int64_t c = 0; c < count; ++c)
                for (int64_t k = 0; k < past; ++k) kept[c * past + k] = line[k * 16 + c];
        }
    }
}

// A channel's state lies across lanes, padded with zeros, which stay zeros.
static void selective_scan(const ScanJob& job, int64_t begin, int64_t end) {
    const RecurrentPlan& plan = job.plan;
    const int64_t channels = plan.channels, size = job.size, padded = (size + 15) / 16 * 16;
    const int64_t blocks = (channels + 15) / 16;
    float* h = scratch(16 * padded);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t i = item / blocks, c0 = item % blocks * 16;
        const int64_t count = channels - c0 < 16 ? channels - c0 : 16;
        const float* slot = job.state + (plan.read[i] * channels + c0) * size;
        for (int64_t c = 0; c < count; ++c)
            for (int64_t n = 0; n < size; n += 16) load_some(slot + c * size + n, size - n).store(h + c * padded + n);
        const int64_t last = plan.q_start[i + 1];
        for (int64_t t = plan.q_start[i]; t < last; ++t) {
            const float *x = job.x + t * channels + c0, *delta = job.delta + t * channels + c0;
            const float *b = job.b + t * job.b_token, *c_row = job.c + t * job.c_token;
            float* y = job.y + t * channels + c0;
            Lanes dots[16];
            for (int64_t c = 0; c < count; ++c) dots[c] = Lanes::splat(0.0f);
            for (int64_t n = 0; n < size; n += 16) {
                const Lanes into = load_some(b + n, size - n), out = load_some(c_row + n, size - n);
                for (int64_t c = 0; c < count; ++c) {
                    const Lanes decay =
                        exponential(Lanes::splat(delta[c]) * load_some(job.a + (c0 + c) * size + n, size - n));
                    Lanes next = Lanes::splat(delta[c] * x[c]) * into;
                    next.add_product(decay, Lanes::load(h + c * padded + n));
                    next.store(h + c * padded + n);
                    dots[c].add_product(next, out);
                }
            }
            for (int64_t c = 0; c < count; ++c) y[c] = dots[c].sum() + job.d[c0 + c] * x[c];
            const int64_t j = plan.kept[i] - (last - t);
            if (j < 0) continue;
            float* kept = job.state + (plan.write[i * plan.write_stride + j] * channels + c0) * size;
            for (int64_t c = 0; c < count; ++c)
                __builtin_memcpy(kept + c * size, h + c * padded, size_t(size) * sizeof(float));
        }
    }
}
