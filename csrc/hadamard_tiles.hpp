// Many rows times Hadamard-transformed weights, see hadamard.hpp: int8 in tile registers. Sums are exact integers, so a
// row has the same bits alone and in any batch.
//
// Included inside a namespace per instruction set.

#if defined(__AMX_INT8__)

// Hadamard transform across sixteen lanes: each stage adds and subtracts lanes whose indices differ in one bit.
static inline __m512 hadamard_lanes(__m512 v) {
    const __m512 one = _mm512_setr_ps(1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1);
    const __m512 two = _mm512_setr_ps(1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1);
    const __m512 four = _mm512_setr_ps(1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1);
    const __m512 eight = _mm512_setr_ps(1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1);
    v = _mm512_fmadd_ps(v, one, _mm512_permute_ps(v, 0xb1));
    v = _mm512_fmadd_ps(v, two, _mm512_permute_ps(v, 0x4e));
    v = _mm512_fmadd_ps(v, four, _mm512_shuffle_f32x4(v, v, 0xb1));
    return _mm512_fmadd_ps(v, eight, _mm512_shuffle_f32x4(v, v, 0x4e));
}

static inline __m512i magnitude(__m512 v) {
    return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
}

// Magnitudes are compared by their bits, where NaN is above infinity, so that non-finite values show in the scale and
// in all of a row's results.
static inline float float_of(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

// `hadamard` is a buffer for one row of floats. One row at a time stays in L1; sixteen at a time, transformed by tiles,
// did not, and took 1.3 times as long.
static void hadamard_row(const uint8_t* tiles, int64_t columns, bool plain, float* hadamard, uint8_t* codes, float* scale) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = 0; k < columns; k += HADAMARD_COLUMNS) {
        __m512 v[4];
        for (int i = 0; i < 4; ++i) v[i] = Lanes::load_bfloat(tiles + 2 * k + 32 * i).v;
        if (!plain) {
            const __m512 a = _mm512_add_ps(v[0], v[1]), b = _mm512_sub_ps(v[0], v[1]);
            const __m512 c = _mm512_add_ps(v[2], v[3]), d = _mm512_sub_ps(v[2], v[3]);
            v[0] = _mm512_add_ps(a, c), v[1] = _mm512_add_ps(b, d), v[2] = _mm512_sub_ps(a, c), v[3] = _mm512_sub_ps(b, d);
        }
        for (int i = 0; i < 4; ++i) {
            if (!plain) v[i] = hadamard_lanes(v[i]);
            most = _mm512_max_epu32(most, magnitude(v[i]));
            _mm512_storeu_ps(hadamard + k + 16 * i, v[i]);
        }
    }
    const float largest = float_of(_mm512_reduce_max_epu32(most));
    *scale = largest / 127.0f;
    const __m512 inverse = _mm512_set1_ps(largest > SMALLEST ? 127.0f / largest : 0.0f);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t k = 0; k < columns; k += HADAMARD_COLUMNS, codes += HADAMARD_BLOCK * HADAMARD_COLUMNS) {
        __m512i whole[4];
        for (int i = 0; i < 4; ++i)
            whole[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(hadamard + k + 16 * i), inverse));
        const __m512i left = _mm512_packs_epi32(whole[0], whole[1]), right = _mm512_packs_epi32(whole[2], whole[3]);
        _mm512_storeu_si512(codes, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(left, right)));
    }
}

// Missing rows of the last block are not written: they are multiplied like the others, and their results are ignored.
static void hadamard_rows(const HadamardRowsJob& job, int64_t begin, int64_t end) {
    float* hadamard = scratch(job.columns);
    for (int64_t row = begin; row < end; ++row) {
        uint8_t* block = job.out.data + row / HADAMARD_BLOCK * HADAMARD_BLOCK * job.out.stride;
        const int64_t number = row % HADAMARD_BLOCK;
        hadamard_row(job.x.data + row * job.x.stride, job.columns, job.plain, hadamard, block + number * HADAMARD_COLUMNS,
                reinterpret_cast<float*>(block + HADAMARD_BLOCK * job.columns) + number);
    }
}

// Hadamard transform of eight columns, `Apart` apart; lanes are outputs here. Returns the maximum of each.
template <int64_t Apart>
static inline __m512i hadamard_eight(float* first) {
    __m512 v[8];
    for (int i = 0; i < 8; ++i) v[i] = _mm512_loadu_ps(first + i * Apart * PACK_OUTPUTS);
#pragma GCC unroll 3
    for (int apart = 1; apart < 8; apart *= 2)
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            if (i & apart) continue;
            const __m512 sum = _mm512_add_ps(v[i], v[i + apart]);
            v[i + apart] = _mm512_sub_ps(v[i], v[i + apart]);
            v[i] = sum;
        }
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < 8; ++i) {
        most = _mm512_max_epu32(most, magnitude(v[i]));
        _mm512_storeu_ps(first + i * Apart * PACK_OUTPUTS, v[i]);
    }
    return most;
}

template <Pack P>
static void hadamard_pack(const PackLayout& own, const uint8_t* pack, int64_t inner, uint8_t* hadamard) {
    float* columns = scratch(inner * PACK_OUTPUTS);
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = 0; k < inner; k += HADAMARD_COLUMNS) {
        float* block = columns + k * PACK_OUTPUTS;
        for (int64_t slice = 0; slice < HADAMARD_COLUMNS; slice += SLICE_K)
            read_slice<P>(own, pack, inner, k + slice, [&](int column, __m512 a, __m512 b, __m512 c, __m512 d) {
                float* at = block + (slice + column) * PACK_OUTPUTS;
                _mm512_storeu_ps(at, a);
                _mm512_storeu_ps(at + 16, b);
                _mm512_storeu_ps(at + 32, c);
                _mm512_storeu_ps(at + 48, d);
            });
        for (int64_t i = 0; i < 8; ++i) hadamard_eight<8>(block + i * PACK_OUTPUTS);
        for (int64_t i = 0; i < HADAMARD_COLUMNS; i += 8)
            most = _mm512_max_epu32(most, hadamard_eight<1>(block + i * PACK_OUTPUTS));
    }
    const __m512 largest = _mm512_castsi512_ps(most);
    _mm512_storeu_ps(hadamard, _mm512_mul_ps(largest, _mm512_set1_ps(1.0f / 127.0f / float(HADAMARD_COLUMNS))));
    const __mmask16 some = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(SMALLEST), _CMP_GT_OQ);
    const __m512 inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(127.0f), largest);
    const __m512i byte = _mm512_set1_epi32(255);
    uint8_t* quads = hadamard + PACK_OUTPUTS * sizeof(float);
    for (int64_t k = 0; k < inner; k += 4, quads += 64) {
        __m512i quad = _mm512_setzero_si512();
        for (int i = 3; i >= 0; --i) {
            const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(columns + (k + i) * PACK_OUTPUTS), inverse);
            quad = _mm512_or_si512(_mm512_slli_epi32(quad, 8), _mm512_and_si512(_mm512_cvtps_epi32(scaled), byte));
        }
        _mm512_storeu_si512(quads, quad);
    }
}

#include "hadamard_weights.hpp"

// Integer sums of up to 32 rows and both packs of a unit.
struct HadamardSums {
    const int32_t* data;  // for each part, 32 rows of 32
    const float* row_scales;
    Lanes scales[2][2];  // per part and pack

    Lanes at(int64_t part, int64_t row, int64_t half) const {
        const int32_t* place = data + (part * 32 + row) * UNIT_OUTPUTS + half * PACK_OUTPUTS;
        return Lanes{_mm512_cvtepi32_ps(_mm512_load_si512(place))} * scales[part][half] * Lanes::splat(row_scales[row]);
    }
};

// Up to 32 rows times one pack. Four tiles are in use: see packed_tiles.hpp for why few are better. `Fetch`: weights
// come from memory, so later ones are prefetched; otherwise they are in L2. `meanwhile` is called for each tile.
template <bool Fetch, class Meanwhile>
static inline void multiply_mixed(const uint8_t* upper, const uint8_t* lower, const uint8_t* weights, int64_t inner,
                                  int32_t* sums, const Meanwhile& meanwhile) {
    constexpr int64_t tile = HADAMARD_BLOCK * HADAMARD_COLUMNS, line = UNIT_OUTPUTS * sizeof(int32_t);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t at = 0; at < inner * HADAMARD_BLOCK; at += tile) {
        _tile_loadd(2, weights + at, 64);
        for (int64_t i = 0; i < tile; i += 64) {
            if constexpr (Fetch) __builtin_prefetch(weights + at + AHEAD + i, 0, 2);
            __builtin_prefetch(weights + at + SOON + i);
        }
        _tile_loadd(3, upper + at, 64);
        _tile_dpbssd(0, 3, 2);
        meanwhile();
        if (!lower) continue;
        _tile_loadd(3, lower + at, 64);
        _tile_dpbssd(1, 3, 2);
    }
    _tile_stored(0, sums, line);
    if (lower) _tile_stored(1, sums + HADAMARD_BLOCK * UNIT_OUTPUTS, line);
}

// All units for 32 rows, then for the next: rows stay in L1, units should fit into L2.
static void packed_hadamard(const PackedJob& job, int64_t begin, int64_t end) {
    alignas(64) int32_t sums[2][2 * 32 * UNIT_OUTPUTS];  // of the unit being computed, and of the one being stored
    float row_scales[32];
    const int64_t block = HADAMARD_BLOCK * job.hadamard.stride;
    _tile_loadconfig(&TILE_SHAPES.of[32]);
    for (int64_t row = 0; row < job.rows; row += 32) {
        const int64_t rows = job.rows - row < 32 ? job.rows - row : 32;
        const uint8_t* upper = job.hadamard.data + row / HADAMARD_BLOCK * block;
        const uint8_t* lower = rows > HADAMARD_BLOCK ? upper + block : nullptr;
        __builtin_memcpy(row_scales, upper + HADAMARD_BLOCK * job.inner, HADAMARD_BLOCK * sizeof(float));
        if (lower)
            __builtin_memcpy(row_scales + HADAMARD_BLOCK, lower + HADAMARD_BLOCK * job.inner, HADAMARD_BLOCK * sizeof(float));
        DeferredStores<HadamardSums> deferred;
        for (int64_t number = begin; number < end; ++number) {
            const Unit unit = unit_at(job, number);
            HadamardSums own{sums[number % 2], row_scales, {}};
            for (int64_t part = 0; part < unit.count; ++part)
                for (int64_t half = 0; half < 2; ++half) {
                    const uint8_t* pack = unit.parts[part].hadamard + (unit.number * 2 + half) * hadamard_pack_bytes(job.inner);
                    const uint8_t* weights = pack + PACK_OUTPUTS * sizeof(float);
                    int32_t* target = sums[number % 2] + part * 32 * UNIT_OUTPUTS + half * PACK_OUTPUTS;
                    own.scales[part][half] = Lanes::load(reinterpret_cast<const float*>(pack));
                    const auto meanwhile = [&] { deferred.advance(); };
                    if (row == 0)
                        multiply_mixed<true>(upper, lower, weights, job.inner, target, meanwhile);
                    else
                        multiply_mixed<false>(upper, lower, weights, job.inner, target, meanwhile);
                }
            settle_memory();
            deferred.flush();
            deferred.begin({job, unit, own}, row, rows, unit.count * 2 * (job.inner / HADAMARD_COLUMNS));
        }
        deferred.flush();
    }
    _tile_release();
}

static constexpr void offer_hadamard(Kernels& table) {
    table.hadamard_rows = hadamard_rows;
    table.hadamard_weights = hadamard_weights;
    table.hadamard_form = Activations::Tiles;
}

#elif defined(__ARM_FEATURE_DOTPROD)

#include "hadamard_neon.hpp"

#else

static void packed_hadamard(const PackedJob&, int64_t, int64_t) {}
static constexpr void offer_hadamard(Kernels&) {}

#endif
