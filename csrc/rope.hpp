// RoPE. Products and differences are rounded one by one, as in the reference: bitwise equal.
// Included inside a namespace per instruction set.

static void rotate(const RotateJob& job, int64_t begin, int64_t end) {
    const int64_t half = job.half, rest = job.size - 2 * half;
    for (int64_t token = begin; token < end; ++token) {
        const float *cos = job.cos + token * half, *sin = job.sin + token * half;
        for (int64_t head = 0; head < job.heads; ++head) {
            const float* x = job.x + (token * job.heads + head) * job.size;
            float* y = job.y + (token * job.heads + head) * job.size;
            for (int64_t i = 0; i < half; i += 16) {
                const int64_t count = half - i;
                const Lanes c = load_some(cos + i, count), s = load_some(sin + i, count);
                const Lanes left = load_some(x + i, count), right = load_some(x + half + i, count);
                store_some(left * c - right * s, y + i, count);
                store_some(right * c + left * s, y + half + i, count);
            }
            __builtin_memcpy(y + 2 * half, x + 2 * half, size_t(rest) * sizeof(float));
        }
    }
}
