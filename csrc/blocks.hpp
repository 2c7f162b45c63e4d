// Weight formats: decoding one block of bytes to floats. Products and sums are rounded one by one (the build disables
// contraction), in the order of the reference, so results are bitwise equal to it.
//
// Included inside a namespace per instruction set.

struct AsF32 {
    static constexpr int block = 16, bytes = 64;
    static void decode(const uint8_t* p, float* w) { __builtin_memcpy(w, p, bytes); }
};

struct AsF16 {
    static constexpr int block = 16, bytes = 32;
    static void decode(const uint8_t* p, float* w) { Lanes::load_half(p).store(w); }
};

struct AsBF16 {
    static constexpr int block = 16, bytes = 32;
    static void decode(const uint8_t* p, float* w) { Lanes::load_bfloat(p).store(w); }
};

// Blocks of 32: scale, optional minimum, optional 32 fifth bits, then 16 bytes whose low nibbles are the first half.

static inline void scaled(float d, Bytes signed_bytes, float* w) {
    (Lanes::splat(d) * Lanes::from_signed(signed_bytes)).store(w);
}

static inline void raised(float d, Bytes bytes, float m, float* w) {
    (Lanes::splat(d) * Lanes::from_unsigned(bytes) + Lanes::splat(m)).store(w);
}

static inline void lowered(float d, Bytes bytes, float m, float* w) {
    (Lanes::splat(d) * Lanes::from_unsigned(bytes) - Lanes::splat(m)).store(w);
}

// Bit i of two bytes, as 16 in byte i.
static inline Bytes fifth_bits(const uint8_t* p) {
    const uint8_t a = p[0], b = p[1];
    const Bytes spread = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
    const Bytes own = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return Bytes((spread & own) == own) & 16;
}

struct AsQ4_0 {
    static constexpr int block = 32, bytes = 18;
    static void decode(const uint8_t* p, float* w) {
        const float d = half(p);
        const Bytes q = load_bytes(p + 2);
        scaled(d, (q & 15) - 8, w);
        scaled(d, (q >> 4) - 8, w + 16);
    }
};

struct AsQ4_1 {
    static constexpr int block = 32, bytes = 20;
    static void decode(const uint8_t* p, float* w) {
        const float d = half(p), m = half(p + 2);
        const Bytes q = load_bytes(p + 4);
        raised(d, q & 15, m, w);
        raised(d, q >> 4, m, w + 16);
    }
};

struct AsQ5_0 {
    static constexpr int block = 32, bytes = 22;
    static void decode(const uint8_t* p, float* w) {
        const float d = half(p);
        const Bytes q = load_bytes(p + 6);
        scaled(d, ((q & 15) | fifth_bits(p + 2)) - 16, w);
        scaled(d, ((q >> 4) | fifth_bits(p + 4)) - 16, w + 16);
    }
};

struct AsQ5_1 {
    static constexpr int block = 32, bytes = 24;
    static void decode(const uint8_t* p, float* w) {
        const float d = half(p), m = half(p + 2);
        const Bytes q = load_bytes(p + 8);
        raised(d, (q & 15) | fifth_bits(p + 4), m, w);
        raised(d, (q >> 4) | fifth_bits(p + 6), m, w + 16);
    }
};

struct AsQ8_0 {
    static constexpr int block = 32, bytes = 34;
    static void decode(const uint8_t* p, float* w) {
        const float d = half(p);
        scaled(d, load_bytes(p + 2), w);
        scaled(d, load_bytes(p + 18), w + 16);
    }
};

// Blocks of 256: sixteen pieces of 16 weights. Two adjacent pieces are a run of 32; runs share bytes bit-wise.
// Unrolled, so that shift counts are constant: there is no byte-wise shift instruction.

struct AsQ2_K {
    static constexpr int block = 256, bytes = 84;
    static void decode(const uint8_t* p, float* w) {
        const float d = half(p + 80), dmin = half(p + 82);
#pragma GCC unroll 16
        for (int piece = 0; piece < 16; ++piece) {
            const int run = piece / 2, column = piece % 2 * 16;
            const Bytes q = load_bytes(p + 16 + run / 4 * 32 + column) >> run % 4 * 2 & 3;
            lowered(d * float(p[piece] & 15), q, dmin * float(p[piece] >> 4), w + piece * 16);
        }
    }
};

struct AsQ3_K {
    static constexpr int block = 256, bytes = 110;
    static void decode(const uint8_t* p, float* w) {
        const uint8_t* packed = p + 96;
        const float d = half(p + 108);
#pragma GCC unroll 16
        for (int piece = 0; piece < 16; ++piece) {
            const int run = piece / 2, column = piece % 2 * 16;
            const int low = piece < 8 ? packed[piece] & 15 : packed[piece - 8] >> 4;
            const int high = packed[8 + piece % 4] >> piece / 4 * 2 & 3;
            const Bytes third = (load_bytes(p + column) >> run & 1) << 2;
            const Bytes q = (load_bytes(p + 32 + run / 4 * 32 + column) >> run % 4 * 2 & 3) | third;
            scaled(d * float((low | high << 4) - 32), q - 4, w + piece * 16);
        }
    }
};

// Q4_K and Q5_K pack eight 6-bit scales and eight 6-bit minima into 12 bytes.
static inline void six_bits(const uint8_t* p, int i, int& scale, int& minimum) {
    if (i < 4) {
        scale = p[i] & 63;
        minimum = p[i + 4] & 63;
    } else {
        scale = (p[i + 4] & 15) | (p[i - 4] >> 6 << 4);
        minimum = (p[i + 4] >> 4) | (p[i] >> 6 << 4);
    }
}

struct AsQ4_K {
    static constexpr int block = 256, bytes = 144;
    static void decode(const uint8_t* p, float* w) {
        const float d = half(p), dmin = half(p + 2);
#pragma GCC unroll 16
        for (int run = 0; run < 8; ++run) {
            int s, m;
            six_bits(p + 4, run, s, m);
            const float scale = d * float(s), minimum = dmin * float(m);
            for (int column = 0; column < 32; column += 16) {
                const Bytes q = load_bytes(p + 16 + run / 2 * 32 + column) >> run % 2 * 4 & 15;
                lowered(scale, q, minimum, w + run * 32 + column);
            }
        }
    }
};

struct AsQ5_K {
    static constexpr int block = 256, bytes = 176;
    static void decode(const uint8_t* p, float* w) {
        const float d = half(p), dmin = half(p + 2);
#pragma GCC unroll 16
        for (int run = 0; run < 8; ++run) {
            int s, m;
            six_bits(p + 4, run, s, m);
            const float scale = d * float(s), minimum = dmin * float(m);
            for (int column = 0; column < 32; column += 16) {
                const Bytes fifth = (load_bytes(p + 16 + column) >> run & 1) << 4;
                const Bytes q = (load_bytes(p + 48 + run / 2 * 32 + column) >> run % 2 * 4 & 15) | fifth;
                lowered(scale, q, minimum, w + run * 32 + column);
            }
        }
    }
};

struct AsQ6_K {
    static constexpr int block = 256, bytes = 210;
    static void decode(const uint8_t* p, float* w) {
        const uint8_t* scales = p + 192;
        const float d = half(p + 208);
#pragma GCC unroll 16
        for (int piece = 0; piece < 16; ++piece) {
            const int run = piece / 2, column = piece % 2 * 16;
            const Bytes low = load_bytes(p + run / 4 * 64 + run % 2 * 32 + column) >> run % 4 / 2 * 4 & 15;
            const Bytes high = (load_bytes(p + 128 + run / 4 * 32 + column) >> run % 4 * 2 & 3) << 4;
            scaled(d * float(int8_t(scales[piece])), (low | high) - 32, w + piece * 16);
        }
    }
};
