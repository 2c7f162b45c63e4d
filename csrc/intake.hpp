// Attention intake: RoPE for new queries and keys, and KV page writes. Either per token in one pass, or per head as
// soon as its values are ready. Included inside a namespace per instruction set.

// `turned` may be x itself: both halves of a pair are read before either is written.
static inline void rotate_head(const float* x, const float* cos, const float* sin, int64_t half, int64_t size, float* turned) {
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

static inline void store_bfloats(const float* x, int64_t size, uint8_t* place) {
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) Lanes::load(x + i).store_bfloat(place + 2 * i);
    if (i < size) {
        uint8_t last[32];
        load_some(x + i, size - i).store_bfloat(last);
        __builtin_memcpy(place + 2 * i, last, size_t(size - i) * 2);
    }
}

// Returns the scale: absolute maximum over 127. Magnitudes are compared by their bits, where NaN is above infinity, so
// that non-finite values show in the scale. Codes of a non-finite head and of an all-zero head are 0.
static inline float store_codes(const float* x, int64_t size, uint8_t* place) {
    int32_t most = 0;
    for (int64_t i = 0; i < size; ++i) {
        int32_t bits;
        __builtin_memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float scale;
    __builtin_memcpy(&scale, &most, 4);
    scale /= 127.0f;
    // A scale that underflowed gives quotients beyond 127. NaN passes the bounds and is stored as 0.
    const Lanes divisor = Lanes::splat(scale), highest = Lanes::splat(127.0f), lowest = Lanes::splat(-127.0f);
    for (int64_t i = 0; i < size; i += 16) {
        const Lanes quotient = load_some(x + i, size - i) / divisor;
        const Lanes code = Lanes::larger(lowest, Lanes::smaller(highest, quotient));
        if (i + 16 <= size) {
            code.store_codes(reinterpret_cast<int8_t*>(place + i));
            continue;
        }
        int8_t last[16];
        code.store_codes(last);
        __builtin_memcpy(place + i, last, size_t(size - i));
    }
    return scale;
}

// The nearest e4m3 code of a number up to 448, ties to even. 0 for NaN.
static inline uint8_t float8_code(float x) {
    if (x != x) return 0;
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    const uint32_t size = bits & 0x7fffffffu;
    uint32_t code;
    if (size < 0x3c800000u) {  // below 2^-6 codes are multiples of 2^-9
        float magnitude;
        __builtin_memcpy(&magnitude, &size, 4);
        const float shifted = magnitude * 512.0f + 0x1.8p23f;
        __builtin_memcpy(&code, &shifted, 4);
        code &= 0xff;
    } else {
        code = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
    }
    return uint8_t((code < 0x7e ? code : 0x7e) | (bits >> 24 & 0x80));
}

// Returns the scale: absolute maximum over 448. As `store_codes` otherwise.
static inline float store_float8(const float* x, int64_t size, uint8_t* place) {
    int32_t most = 0;
    for (int64_t i = 0; i < size; ++i) {
        int32_t bits;
        __builtin_memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float scale;
    __builtin_memcpy(&scale, &most, 4);
    scale /= 448.0f;
    for (int64_t i = 0; i < size; ++i) {
        const float quotient = x[i] / scale;
        place[i] = float8_code(quotient > 448.0f ? 448.0f : quotient < -448.0f ? -448.0f : quotient);
    }
    return scale;
}

static inline uint16_t to_bfloat(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    if (x != x) return uint16_t(bits >> 16 | 0x40u);
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float from_bfloat(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

// Codes from -8 to 7, plus 8, in pairs. A group's scale maps its number of largest magnitude to -8.
static inline void store_int4(const float* x, int64_t size, uint8_t* place, uint16_t* scales) {
    const int64_t group = int4_group(size);
    for (int64_t g = 0; g < size; g += group) {
        float high = x[g], low = x[g], unknown = 0.0f;
        for (int64_t i = g; i < g + group; ++i) {
            high = x[i] > high ? x[i] : high;
            low = x[i] < low ? x[i] : low;
            unknown += x[i] != x[i] ? x[i] : 0.0f;
        }
        scales[g / group] = to_bfloat(unknown != unknown ? unknown : (high < -low ? low : high) / -8.0f);
        const Lanes divisor = Lanes::splat(from_bfloat(scales[g / group]));
        const Lanes highest = Lanes::splat(7.0f), lowest = Lanes::splat(-8.0f);
        for (int64_t i = g; i < g + group; i += 16) {
            const int64_t count = g + group - i < 16 ? g + group - i : 16;
            int8_t codes[16];
            Lanes::larger(lowest, Lanes::smaller(highest, load_some(x + i, count) / divisor)).store_codes(codes);
            for (int64_t pair = 0; pair < count / 2; ++pair)
                place[i / 2 + pair] = uint8_t((codes[2 * pair] + 8) | (codes[2 * pair + 1] + 8) << 4);
        }
    }
}

static inline void store_head(const Pages& pages, PageType type, int64_t frame, int64_t offset, int64_t head,
                              const float* x, int64_t size) {
    const int64_t number = frame * pages.frame + offset * pages.token + head * pages.head;
    uint8_t* place = pages.data + number * number_bytes(type);
    const int64_t scale = frame * pages.scale_frame + offset * pages.scale_token + head * pages.scale_head;
    if (type == PAGES_INT8)
        pages.scales[scale] = store_codes(x, size, place);
    else if (type == PAGES_FP8)
        pages.scales[scale] = store_float8(x, size, place);
    else if (type == PAGES_INT4)
        store_int4(x, size, place, reinterpret_cast<uint16_t*>(pages.scales) + scale);
    else if (type == PAGES_BF16)
        store_bfloats(x, size, place);
    else
        __builtin_memcpy(place, x, size_t(size) * sizeof(float));
}

// Heads [first, last) of a token: queries, then keys, then values. `room`: a buffer for one head.
static inline void process_heads(const IntakeJob& job, int64_t token, int64_t first, int64_t last, float* room) {
    const float *cos = job.cos + token * job.half, *sin = job.sin + token * job.half;
    const int64_t frame = job.slots[token] / job.page_tokens, offset = job.slots[token] % job.page_tokens;
    for (int64_t number = first; number < last; ++number) {
        int64_t head = number;
        if (head < job.heads) {
            if (job.half)
                rotate_head(job.q + token * job.q_token + head * job.size, cos, sin, job.half, job.size,
                          job.turned + token * job.turned_token + head * job.size);
        } else if ((head -= job.heads) < job.kv_heads) {
            const float* k = job.k + token * job.k_token + head * job.size;
            if (job.half) rotate_head(k, cos, sin, job.half, job.size, room);
            store_head(job.k_pages, job.type, frame, offset, head, job.half ? room : k, job.size);
        } else {
            head -= job.kv_heads;
            store_head(job.v_pages, job.type, frame, offset, head, job.v + token * job.v_token + head * job.values,
                       job.values);
        }
    }
}

static void intake(const IntakeJob& job, int64_t begin, int64_t end) {
    float* room = scratch(job.size);
    for (int64_t token = begin; token < end; ++token) process_heads(job, token, 0, job.all_heads(), room);
}

static void intake_head(const IntakeJob& job, int64_t head, int64_t begin, int64_t end) {
    float* room = scratch(job.size);
    for (int64_t token = begin; token < end; ++token) process_heads(job, token, head, head + 1, room);
}
