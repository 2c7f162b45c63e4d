// The gated delta rule, over the same work items as linear attention.
//
// Included inside a namespace per instruction set, after linear_attention.hpp and pointwise.hpp.

// out = x / |x| * scale
static inline void unit(const float* x, float* out, int64_t size, float scale) {
    Lanes squares = Lanes::splat(0.0f);
    for (int64_t n = 0; n < size; n += 16) {
        const Lanes part = load_some(x + n, size - n);
        squares.add_product(part, part);
    }
    const Lanes factor = Lanes::splat(scale / __builtin_sqrtf(squares.sum() + 1e-6f));
    for (int64_t n = 0; n < size; n += 16) store_some(load_some(x + n, size - n) * factor, out + n, size - n);
}

// h = keep h;  h = h + k (beta (v - k h))^T;  returns q h.
template <int L>
static inline void correct_token(const StateRows& from, const StateRows& to, const float* q, const float* k, const float* v,
                                 float keep, float beta, int64_t key, int64_t count, Lanes* sums) {
    const Lanes factor = Lanes::splat(keep);
    Lanes known[L], error[L];
    for (int l = 0; l < L; ++l) known[l] = Lanes::splat(0.0f), sums[l] = Lanes::splat(0.0f);
    for (int64_t n = 0; n < key; ++n) {
        const Lanes out = Lanes::splat(k[n]);
        for (int l = 0; l < L; ++l)
            known[l].add_product(out, load_some(from.data + n * from.stride + 16 * l, count - 16 * l));
    }
    for (int l = 0; l < L; ++l)
        error[l] = (load_some(v + 16 * l, count - 16 * l) - known[l] * factor) * Lanes::splat(beta);
    for (int64_t n = 0; n < key; ++n) {
        const Lanes into = Lanes::splat(k[n]), out = Lanes::splat(q[n]);
        for (int l = 0; l < L; ++l) {
            Lanes next = into * error[l];
            next.add_product(factor, load_some(from.data + n * from.stride + 16 * l, count - 16 * l));
            store_some(next, to.data + n * to.stride + 16 * l, count - 16 * l);
            sums[l].add_product(out, next);
        }
    }
}

static void delta_rule(const DeltaJob& job, int64_t begin, int64_t end) {
    const RecurrentPlan& plan = job.plan;
    const int64_t heads = plan.channels, key = job.key, value = job.value, shared = heads / job.key_heads;
    const int64_t blocks = (value + STATE_COLUMNS - 1) / STATE_COLUMNS;
    const float scale = 1.0f / __builtin_sqrtf(float(key));
    float* buffer = scratch(key * (STATE_COLUMNS + 2));
    float *q = buffer + key * STATE_COLUMNS, *k = q + key;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t i = item / (heads * blocks), head = item / blocks % heads, c0 = item % blocks * STATE_COLUMNS;
        const int64_t count = value - c0 < STATE_COLUMNS ? value - c0 : STATE_COLUMNS;
        StateRows from{job.state + (plan.read[i] * heads + head) * key * value + c0, value};
        const int64_t last = plan.q_start[i + 1];
        for (int64_t t = plan.q_start[i]; t < last; ++t) {
            unit(job.q + t * job.q_token + head / shared * key, q, key, scale);
            unit(job.k + t * job.k_token + head / shared * key, k, key, 1.0f);
            const Lanes step = Softplus::of(Lanes::splat(job.a[t * job.a_token + head] + job.shift[head]), 0.0f);
            const float keep = first_lane(exponential(Lanes::splat(job.rate[head]) * step));
            const float beta = first_lane(Sigmoid::of(Lanes::splat(job.b[t * job.b_token + head]), 0.0f));
            const float* v = job.v + t * job.v_token + head * value + c0;
            float* y = job.y + (t * heads + head) * value + c0;
            const int64_t j = plan.kept[i] - (last - t);
            StateRows to{buffer, STATE_COLUMNS};
            if (j >= 0)
                to = {job.state + (plan.write[i * plan.write_stride + j] * heads + head) * key * value + c0, value};
            Lanes sums[2];
            if (count > 16)
                correct_token<2>(from, to, q, k, v, keep, beta, key, count, sums);
            else
                correct_token<1>(from, to, q, k, v, keep, beta, key, count, sums);
            from = to;
            for (int l = 0; 16 * l < count; ++l) store_some(sums[l], y + 16 * l, count - 16 * l);
        }
    }
}
