// Linear attention and its feature map. A work item is a sequence, a head and 32 columns of the values. The state moves
// from its slot through this thread's buffer to the kept slots; a token's arithmetic does not depend on where its past
// lies, so chunks of any length give the same bits. A decode step reads the slot once and writes the other slot once.
//
// Included inside a namespace per instruction set.

constexpr int64_t STATE_COLUMNS = 32;

// Rows of a matrix, 32 columns of them: a slot or a buffer.
struct StateRows {
    float* data;
    int64_t stride;
};

// h = keep h + k v^T;  returns q h. L: registers of sixteen columns, of which `count` exist.
template <int L>
static inline void attend_token(const StateRows& from, const StateRows& to, const float* q, const float* k, const float* v,
                                float keep, int64_t key, int64_t count, Lanes* sums) {
    const Lanes factor = Lanes::splat(keep);
    Lanes values[L];
    for (int l = 0; l < L; ++l) values[l] = load_some(v + 16 * l, count - 16 * l), sums[l] = Lanes::splat(0.0f);
    for (int64_t n = 0; n < key; ++n) {
        const Lanes into = Lanes::splat(k[n]), out = Lanes::splat(q[n]);
        for (int l = 0; l < L; ++l) {
            Lanes next = into * values[l];
            next.add_product(factor, load_some(from.data + n * from.stride + 16 * l, count - 16 * l));
            store_some(next, to.data + n * to.stride + 16 * l, count - 16 * l);
            sums[l].add_product(out, next);
        }
    }
}

// z = keep z + k;  returns q z.
static inline float normalize_token(const float* from, float* to, const float* q, const float* k, float keep, int64_t key) {
    const Lanes factor = Lanes::splat(keep);
    Lanes sum = Lanes::splat(0.0f);
    for (int64_t n = 0; n < key; n += 16) {
        Lanes next = load_some(k + n, key - n);
        next.add_product(factor, load_some(from + n, key - n));
        store_some(next, to + n, key - n);
        sum.add_product(load_some(q + n, key - n), next);
    }
    return sum.sum();
}

static void linear_attention(const LinearAttentionJob& job, int64_t begin, int64_t end) {
    const RecurrentPlan& plan = job.plan;
    const int64_t heads = plan.channels, key = job.key, value = job.value;
    const int64_t blocks = (value + STATE_COLUMNS - 1) / STATE_COLUMNS;
    float* buffer = scratch(key * (STATE_COLUMNS + 1));
    float* line = buffer + key * STATE_COLUMNS;
    for (int64_t item = begin; item < end; ++item) {
        const int64_t i = item / (heads * blocks), head = item / blocks % heads, c0 = item % blocks * STATE_COLUMNS;
        const int64_t count = value - c0 < STATE_COLUMNS ? value - c0 : STATE_COLUMNS;
        const float keep = first_lane(exponential(Lanes::splat(-job.slopes[head])));
        StateRows from{job.state + (plan.read[i] * heads + head) * key * value + c0, value};
        const float* sums_from = job.normalizer ? job.normalizer + (plan.read[i] * heads + head) * key : nullptr;
        const int64_t last = plan.q_start[i + 1];
        for (int64_t t = plan.q_start[i]; t < last; ++t) {
            const float *q = job.q + t * job.q_token + head * key, *k = job.k + t * job.k_token + head * key;
            const float* v = job.v + t * job.v_token + head * value + c0;
            float* y = job.y + (t * heads + head) * value + c0;
            const int64_t j = plan.kept[i] - (last - t);
            const int64_t slot = j < 0 ? 0 : plan.write[i * plan.write_stride + j];
            const StateRows to = j < 0 ? StateRows{buffer, STATE_COLUMNS}
                                       : StateRows{job.state + (slot * heads + head) * key * value + c0, value};
            Lanes sums[2];
            if (count > 16)
                attend_token<2>(from, to, q, k, v, keep, key, count, sums);
            else
                attend_token<1>(from, to, q, k, v, keep, key, count, sums);
            from = to;
            if (job.normalizer) {
                // Every block of columns needs the sum; the first one stores it.
                float* sums_to = j < 0 || c0 ? line : job.normalizer + (slot * heads + head) * key;
                const Lanes sum = Lanes::splat(normalize_token(sums_from, sums_to, q, k, keep, key));
                sums_from = sums_to;
                for (int l = 0; 16 * l < count; ++l) sums[l] = sums[l] / sum;
            }
            for (int l = 0; 16 * l < count; ++l) store_some(sums[l], y + 16 * l, count - 16 * l);
        }
    }
}

// [1, x / d^(1/4), vec(x x^T) / sqrt(2 d)], for the rows [begin, end): a head of a token.
static void taylor_features(const TaylorJob& job, int64_t begin, int64_t end) {
    const int64_t size = job.size, features = 1 + size + size * size;
    for (int64_t row = begin; row < end; ++row) {
        const float* x = job.x + row / job.heads * job.x_token + row % job.heads * size;
        float* y = job.y + row * features;
        y[0] = 1.0f;
        for (int64_t i = 0; i < size; ++i) y[1 + i] = x[i] * job.single;
        float* pairs = y + 1 + size;
        for (int64_t i = 0; i < size; ++i)
            for (int64_t j = 0; j < size; ++j) pairs[i * size + j] = x[i] * x[j] * job.pair;
    }
}
