// Kernels that measure the machine's ceilings: only reads, or only multiplications. Results are returned so that
// nothing is optimized away; sums start with different values, so that a compiler cannot merge them.
//
// Included inside a namespace per instruction set.

#if defined(__AVX512F__)
static constexpr int READ_SUMS = 8, PRODUCT_SUMS = 16;
#elif defined(__AVX2__)
static constexpr int READ_SUMS = 4, PRODUCT_SUMS = 6;
#elif defined(BANKFULL_NEON)
static constexpr int READ_SUMS = 4, PRODUCT_SUMS = 6;
#else
static constexpr int READ_SUMS = 2, PRODUCT_SUMS = 3;
#endif

// The sum of cache lines of 64 bytes. Ahead: prefetch distance in bytes into L2, and then again at a short distance, as
// for packed weights; 0: left to the hardware prefetcher.
template <int Ahead>
static float read_lines(const float* data, int64_t begin, int64_t end) {
    Lanes sums[READ_SUMS];
#pragma GCC unroll 8
    for (int i = 0; i < READ_SUMS; ++i) sums[i] = Lanes::splat(0.0f);
    const float *line = data + begin * 16, *last = data + end * 16;
    for (; line + 16 * READ_SUMS <= last; line += 16 * READ_SUMS)
#pragma GCC unroll 8
        for (int i = 0; i < READ_SUMS; ++i) {
            if constexpr (Ahead > 0) {
                const char* here = reinterpret_cast<const char*>(line + 16 * i);
                __builtin_prefetch(here + Ahead, 0, 2);
                __builtin_prefetch(here + Ahead / 16);
            }
            sums[i] = sums[i] + Lanes::load(line + 16 * i);
        }
    for (; line < last; line += 16) sums[0] = sums[0] + Lanes::load(line);
#pragma GCC unroll 8
    for (int i = 1; i < READ_SUMS; ++i) sums[0] = sums[0] + sums[i];
    return sums[0].sum();
}

static float multiply_float32(int64_t rounds) {
    const Lanes half_of = Lanes::splat(0.5f), one = Lanes::splat(1.0f);  // every sum converges to 2
    Lanes sums[PRODUCT_SUMS];
#pragma GCC unroll 16
    for (int i = 0; i < PRODUCT_SUMS; ++i) sums[i] = Lanes::splat(float(i));
    for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 16
        for (int i = 0; i < PRODUCT_SUMS; ++i) {
#if defined(BANKFULL_NEON)
            sums[i].add_product(half_of, one);  // in place: the only form of the instruction
#else
            Lanes next = one;
            next.add_product(sums[i], half_of);
            sums[i] = next;
#endif
        }
#pragma GCC unroll 16
    for (int i = 1; i < PRODUCT_SUMS; ++i) sums[0] = sums[0] + sums[i];
    return sums[0].sum();
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

static constexpr double TILE_PRODUCTS = 4 * 16 * 16;  // four tiles of sums

// Eight full tiles: 0 to 3 are sums, 4 to 7 operands, all of whose byte pairs are equal.
static inline void load_operands(uint16_t pair) {
    struct alignas(64) Shapes {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes{};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.row_bytes[tile] = 64;
        shapes.rows[tile] = 16;
    }
    uint16_t line[16 * 32];
    for (uint16_t& each : line) each = pair;
    asm volatile("" : : "r"(&shapes), "r"(line) : "memory");  // the compiler does not know that tile loads read memory
    _tile_loadconfig(&shapes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, line, 64);
    _tile_loadd(5, line, 64);
    _tile_loadd(6, line, 64);
    _tile_loadd(7, line, 64);
    asm volatile("" : : "r"(line) : "memory");
}

static inline float release_tiles() {
    float sums[16 * 16];
    _tile_stored(0, sums, 64);
    asm volatile("" : : "r"(sums) : "memory");
    _tile_release();
    return sums[0];
}

static float multiply_bfloat16(int64_t rounds) {
    load_operands(0x3f80);  // 1
    for (int64_t round = 0; round < rounds; ++round) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    return release_tiles();
}

static float multiply_int8(int64_t rounds) {
    load_operands(0x0101);
    for (int64_t round = 0; round < rounds; ++round) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
    return release_tiles();
}

static constexpr Multiplication BFLOAT16_PRODUCTS = {multiply_bfloat16, 2 * 32 * TILE_PRODUCTS};
static constexpr Multiplication INT8_PRODUCTS = {multiply_int8, 2 * 64 * TILE_PRODUCTS};

#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)

static float multiply_int8(int64_t rounds) {
    const uint8_t codes[64] = {1, 2, 3};
    const Quads quads = Quads::load(codes);
    Sums sums[PRODUCT_SUMS];
    for (int i = 0; i < PRODUCT_SUMS; ++i) sums[i] = Sums::splat(i);
    for (int64_t round = 0; round < rounds; ++round)
        for (int i = 0; i < PRODUCT_SUMS; ++i) {
#if defined(__AVX512VNNI__)
            sums[i].v = _mm512_dpbusd_epi32(sums[i].v, quads.v, quads.v);
#else
            sums[i].a = _mm256_dpbusd_avx_epi32(sums[i].a, quads.a, quads.a);
            sums[i].b = _mm256_dpbusd_avx_epi32(sums[i].b, quads.b, quads.b);
#endif
        }
    Lanes total = sums[0].lanes();
    for (int i = 1; i < PRODUCT_SUMS; ++i) total = total + sums[i].lanes();
    return total.sum();
}

static constexpr Multiplication BFLOAT16_PRODUCTS = {nullptr, 0};
static constexpr Multiplication INT8_PRODUCTS = {multiply_int8, 2 * 4 * 16.0 * PRODUCT_SUMS};

#elif defined(__ARM_FEATURE_DOTPROD)

static constexpr int REGISTER_SUMS = 24;

template <class Vector, class Add>
static inline Vector add_products(int64_t rounds, Vector (&sums)[REGISTER_SUMS], const Add& add) {
    for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 24
        for (int i = 0; i < REGISTER_SUMS; ++i) sums[i] = add(sums[i]);
#pragma GCC unroll 24
    for (int i = 1; i < REGISTER_SUMS; ++i) sums[0] = sums[0] + sums[i];
    return sums[0];
}

static float multiply_int8(int64_t rounds) {
    const int8x16_t codes = vdupq_n_s8(3);
    int32x4_t sums[REGISTER_SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < REGISTER_SUMS; ++i) sums[i] = vdupq_n_s32(i);
    const int32x4_t sum = add_products(rounds, sums, [codes](int32x4_t v) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
        return vmmlaq_s32(v, codes, codes);
#else
        return vdotq_s32(v, codes, codes);
#endif
    });
    return float(vaddvq_s32(sum));
}

#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16)

static float multiply_bfloat16(int64_t rounds) {
    const bfloat16x8_t numbers = vreinterpretq_bf16_u16(vdupq_n_u16(0x3f80));  // 1
    float32x4_t sums[REGISTER_SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < REGISTER_SUMS; ++i) sums[i] = vdupq_n_f32(float(i));
    const float32x4_t sum =
        add_products(rounds, sums, [numbers](float32x4_t v) { return vbfmmlaq_f32(v, numbers, numbers); });
    return vaddvq_f32(sum);
}

static constexpr Multiplication BFLOAT16_PRODUCTS = {multiply_bfloat16, 2 * 16.0 * REGISTER_SUMS};
static constexpr Multiplication INT8_PRODUCTS = {multiply_int8, 2 * 32.0 * REGISTER_SUMS};

#else

static constexpr Multiplication BFLOAT16_PRODUCTS = {nullptr, 0};
static constexpr Multiplication INT8_PRODUCTS = {multiply_int8, 2 * 16.0 * REGISTER_SUMS};

#endif

#else

static constexpr Multiplication BFLOAT16_PRODUCTS = {nullptr, 0}, INT8_PRODUCTS = {nullptr, 0};

#endif

static constexpr void offer_ceilings(Kernels& table) {
    table.read_lines[0] = read_lines<0>;
    table.read_lines[1] = read_lines<32768>;
    table.multiply[FLOAT32] = {multiply_float32, 2 * 16.0 * PRODUCT_SUMS};
    table.multiply[BFLOAT16] = BFLOAT16_PRODUCTS;
    table.multiply[INT8] = INT8_PRODUCTS;
}
