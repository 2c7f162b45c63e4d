// Mamba-2's recurrence and gated norm, S4's diagonal recurrence, and factors of columns. A token's arithmetic is the
// same whether its past comes from the same call or from a slot.
//
// Included inside a namespace per instruction set.

// Work item i is sequence i / heads, head i % heads. A head's state is `size` rows of `n` numbers; rows lie across
// lanes. A token reads the state where the one before has left it, and leaves it in its kept slot, or in scratch memory
// if it is not kept.
static void ssd_scan(const SsdJob& job, int64_t begin, int64_t end) {
    const RecurrentPlan& plan = job.plan;
    const int64_t heads = plan.channels, size = job.size, n = job.n, numbers = size * n;
    constexpr int64_t ROWS = 8;
    float* own = scratch(numbers);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t i = item / heads, head = item % heads, group = head / (heads / job.groups);
        const float* past = job.state + (plan.read[i] * heads + head) * numbers;
        const int64_t last = plan.q_start[i + 1];
        for (int64_t t = plan.q_start[i]; t < last; ++t) {
            const float *x = job.x + t * job.x_token + head * size, *b = job.b + t * job.b_token + group * n;
            const float* c = job.c + t * job.c_token + group * n;
            float* y = job.y + (t * heads + head) * size;
            float step = first_lane(Softplus::of(Lanes::splat(job.dt[t * job.dt_token + head] + job.bias[head]), 0.0f));
            step = step < job.low ? job.low : step > job.high ? job.high : step;
            const Lanes decay = exponential(Lanes::splat(step * job.a[head]));
            const int64_t j = plan.kept[i] - (last - t);
            float* next = j < 0 ? own : job.state + (plan.write[i * plan.write_stride + j] * heads + head) * numbers;
            for (int64_t p0 = 0; p0 < size; p0 += ROWS) {
                const int64_t rows = size - p0 < ROWS ? size - p0 : ROWS;
                Lanes dots[ROWS], enters[ROWS];
                for (int64_t p = 0; p < rows; ++p) {
                    dots[p] = Lanes::splat(0.0f);
                    enters[p] = Lanes::splat(step * x[p0 + p]);
                }
                for (int64_t k = 0; k < n; k += 16) {
                    const Lanes into = load_some(b + k, n - k), out = load_some(c + k, n - k);
                    for (int64_t p = 0; p < rows; ++p) {
                        Lanes h = enters[p] * into;
                        h.add_product(decay, load_some(past + (p0 + p) * n + k, n - k));
                        store_some(h, next + (p0 + p) * n + k, n - k);
                        dots[p].add_product(h, out);
                    }
                }
                for (int64_t p = 0; p < rows; ++p) y[p0 + p] = dots[p].sum() + job.d[head] * x[p0 + p];
            }
            past = next;
        }
    }
}

// Rows. The gated numbers are in y between the two passes.
static void gated_rms_norm(const GatedNormJob& job, int64_t begin, int64_t end) {
    const int64_t part = job.columns / job.groups;
    for (int64_t row = begin; row < end; ++row)
        for (int64_t group = 0; group < job.groups; ++group) {
            const int64_t at = group * part;
            const float *x = job.x + row * job.columns + at, *gate = job.gate + row * job.gate_token + at;
            const float* weight = job.weight + at;
            float* y = job.y + row * job.columns + at;
            Lanes squares = Lanes::splat(0.0f);
            for (int64_t i = 0; i < part; i += 16) {
                Lanes numbers = load_some(x + i, part - i);
                if (!job.before) numbers = numbers * Silu::of(load_some(gate + i, part - i), 0.0f);
                squares.add_product(numbers, numbers);
                store_some(numbers, y + i, part - i);
            }
            const Lanes scale = Lanes::splat(1.0f / __builtin_sqrtf(squares.sum() / float(part) + job.eps));
            for (int64_t i = 0; i < part; i += 16) {
                Lanes numbers = load_some(y + i, part - i) * scale * load_some(weight + i, part - i);
                if (job.before) numbers = numbers * Silu::of(load_some(gate + i, part - i), 0.0f);
                store_some(numbers, y + i, part - i);
            }
        }
}

// Work item i is sequence i / blocks, and block i % blocks of sixteen channels, which are the lanes. The state is
// (2, pairs, channels): real parts, then imaginary parts.
static void diagonal_scan(const DiagonalJob& job, int64_t begin, int64_t end) {
    const RecurrentPlan& plan = job.plan;
    const int64_t channels = plan.channels, pairs = job.pairs, blocks = (channels + 15) / 16, half = pairs * channels;
    float* own = scratch(2 * pairs * 16);
    for (int64_t item = begin; item < end; ++item) {
        const int64_t i = item / blocks, c0 = item % blocks * 16;
        const int64_t count = channels - c0 < 16 ? channels - c0 : 16;
        const float* slot = job.state + plan.read[i] * 2 * half + c0;
        for (int64_t p = 0; p < pairs; ++p) {
            load_some(slot + p * channels, count).store(own + p * 16);
            load_some(slot + half + p * channels, count).store(own + (pairs + p) * 16);
        }
        const Lanes skip = load_some(job.d + c0, count);
        const int64_t last = plan.q_start[i + 1];
        for (int64_t t = plan.q_start[i]; t < last; ++t) {
            const Lanes x = load_some(job.x + t * job.x_token + c0, count), zero = Lanes::splat(0.0f);
            const int64_t j = plan.kept[i] - (last - t);
            float* kept = j < 0 ? nullptr : job.state + plan.write[i * plan.write_stride + j] * 2 * half + c0;
            Lanes y = skip * x;
            for (int64_t p = 0; p < pairs; ++p) {
                const int64_t at = p * channels + c0;
                const Lanes re = load_some(job.decay + at, count), im = load_some(job.decay + half + at, count);
                const Lanes h_re = Lanes::load(own + p * 16), h_im = Lanes::load(own + (pairs + p) * 16);
                Lanes next_re = x, next_im = re * h_im;
                next_re.add_product(re, h_re);
                next_re.add_product(zero - im, h_im);
                next_im.add_product(im, h_re);
                next_re.store(own + p * 16);
                next_im.store(own + (pairs + p) * 16);
                y.add_product(load_some(job.out + at, count), next_re);
                y.add_product(zero - load_some(job.out + half + at, count), next_im);
                if (!kept) continue;
                store_some(next_re, kept + p * channels, count);
                store_some(next_im, kept + half + p * channels, count);
            }
            store_some(y, job.y + t * channels + c0, count);
        }
    }
}

// Rows.
static void scale_columns(const ScaleJob& job, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* x = job.x + row * job.x_token;
        float* y = job.y + row * job.columns;
        for (int64_t i = 0; i < job.columns; ++i) y[i] = x[i] * job.factors[i];
    }
}
