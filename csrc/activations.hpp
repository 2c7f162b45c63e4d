// Encoded activation rows for GEMM with packed weights. Included inside a namespace per instruction set.
//
// Codes: a row of K columns (K a multiple of 32) is K int8 codes, then K / 32 float scales, then K / 16 int32 sums of
// sixteen codes each (which multiply the weights' zero points and minima). A group's scale is its absolute maximum over
// 127; a group of zeros has scale 0. If the Hadamard transform starts from these codes (hadamard_neon.hpp), K int8
// remainders follow: the rounding errors in units of 1/254 of a code.
// Tiles: K bfloat16, rounded to nearest even, then zeros up to a multiple of 32 columns.
// Both start at multiples of 64 bytes; encoded_stride (kernels.hpp) has room for either.

static constexpr int64_t GROUP = 32;
static constexpr float SMALLEST = 0x1p-120f;  // smallest maximum with a finite inverse; smaller ones count as 0

struct Codes {
    int8_t* codes;
    float* scales;
    int32_t* sums;
    int8_t* remainders;

    Codes(uint8_t* row, int64_t columns)
        : codes(reinterpret_cast<int8_t*>(row)), scales(reinterpret_cast<float*>(row + columns)),
          sums(reinterpret_cast<int32_t*>(row + columns + columns / GROUP * 4)),
          remainders(reinterpret_cast<int8_t*>(row + columns + columns / GROUP * 4 + columns / 16 * 4)) {}
};

// Sixteen values, already divided by their scale. Returns the sum of the codes.
static inline int32_t encode_sixteen(Lanes x, const Codes& row, int64_t column) {
    const int32_t sum = x.store_codes(row.codes + column);
#if defined(__ARM_FEATURE_DOTPROD)
    const Lanes codes = Lanes::from_signed(load_bytes(reinterpret_cast<const uint8_t*>(row.codes + column)));
    ((x - codes) * Lanes::splat(254.0f)).store_codes(row.remainders + column);
#endif
    return sum;
}

// The absolute maximum.
static inline float largest_of(Lanes left, Lanes right) {
#if defined(BANKFULL_NEON)
    // NaN counts as the maximum, so that the scale reveals it.
    float32x4_t most = vabsq_f32(left.v[0]);
    for (int i = 1; i < 4; ++i) most = vmaxq_f32(most, vabsq_f32(left.v[i]));
    for (int i = 0; i < 4; ++i) most = vmaxq_f32(most, vabsq_f32(right.v[i]));
    return vmaxvq_f32(most);
#else
    const Lanes zero = Lanes::splat(0.0f);
    return Lanes::larger(Lanes::larger(left, zero - left), Lanes::larger(right, zero - right)).most();
#endif
}

// Encodes thirty-two values at columns [column, column + 32) of a row.
static inline void encode_group(Lanes left, Lanes right, const Codes& row, int64_t column) {
    const float most = largest_of(left, right);
    const float inverse = most > SMALLEST ? 127.0f / most : 0.0f;
    row.scales[column / GROUP] = most / 127.0f;
    row.sums[column / 16] = encode_sixteen(left * Lanes::splat(inverse), row, column);
    row.sums[column / 16 + 1] = encode_sixteen(right * Lanes::splat(inverse), row, column + 16);
}

static inline void encode_group(const float* x, const Codes& row, int64_t column) {
    encode_group(Lanes::load(x), Lanes::load(x + 16), row, column);
}

// Encodes sixteen values at columns [column, column + 16) of a row of tiles.
static inline void encode_tile(Lanes x, uint8_t* row, int64_t column) { x.store_bfloat(row + column * 2); }

static inline void encode_row(const float* x, int64_t columns, uint8_t* row, Activations kind) {
    if (kind == Activations::Codes) {
        const Codes codes(row, columns);
        for (int64_t i = 0; i < columns; i += GROUP) encode_group(x + i, codes, i);
        return;
    }
    const int64_t padded = (columns + 31) / 32 * 32;
    for (int64_t i = 0; i < padded; i += 16)
        encode_tile(i < columns ? load_some(x + i, columns - i) : Lanes::splat(0.0f), row, i);
}

static void encode(const EncodeJob& job, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
        encode_row(job.x + row * job.x_stride, job.columns, job.out.data + row * job.out.stride, job.out.kind);
}
