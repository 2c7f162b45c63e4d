// What attention takes in: new queries are turned, new keys are turned and stored, new values are stored, each token in
// one pass. Included inside a namespace per instruction set.

// `turned` may be x itself: both halves of a pair are read before either is written.
static inline void turn_head(const float* x, const float* cos, const float* sin, int64_t half, int64_t size, float* turned) {
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t count = half - i;
        const Lanes c = load_some(cos + i, count), s = load_some(sin + i, count);
        const Lanes left = load_some(x + i, count), right = load_some(x + half + i, count);
        store_some(left * c - right * s, turned + i, count);
        store_some(right * c + left * s, turned + half + i, count);
    }
    if (turned != x && size > 2 * half)
        __builtin_memcpy(turned + 2 * half, x + 2 * half, size_t(size - 2 * half) * sizeof(float));
}

static inline void store_head(const float* x, int64_t size, bool narrow, uint8_t* place) {
    if (!narrow) {
        __builtin_memcpy(place, x, size_t(size) * sizeof(float));
        return;
    }
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) Lanes::load(x + i).store_bfloat(place + 2 * i);
    if (i < size) {
        uint8_t last[32];
        load_some(x + i, size - i).store_bfloat(last);
        __builtin_memcpy(place + 2 * i, last, size_t(size - i) * 2);
    }
}

static void intake(const IntakeJob& job, int64_t begin, int64_t end) {
    const int64_t item = job.narrow ? 2 : 4;
    float* turned = scratch(job.size);
    for (int64_t token = begin; token < end; ++token) {
        const float *cos = job.cos + token * job.half, *sin = job.sin + token * job.half;
        const int64_t frame = job.slots[token] / job.page_tokens, offset = job.slots[token] % job.page_tokens;
        uint8_t* k_place = job.k_pages + frame * job.k_frame + offset * job.k_token_bytes;
        uint8_t* v_place = job.v_pages + frame * job.v_frame + offset * job.v_token_bytes;
        for (int64_t head = 0; head < job.kv_heads; ++head) {
            const float* k = job.k + token * job.k_token + head * job.size;
            if (job.half) {
                turn_head(k, cos, sin, job.half, job.size, turned);
                k = turned;
            }
            store_head(k, job.size, job.narrow, k_place + head * job.size * item);
            if (job.v) store_head(job.v + token * job.v_token + head * job.values, job.values, job.narrow,
                                  v_place + head * job.values * item);
        }
        if (!job.half) continue;
        for (int64_t head = 0; head < job.heads; ++head)
            turn_head(job.q + token * job.q_token + head * job.size, cos, sin, job.half, job.size,
                      job.turned + token * job.turned_token + head * job.size);
    }
}
