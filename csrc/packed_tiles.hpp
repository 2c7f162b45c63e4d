// Packed weights times rows of bfloat16, in tile registers: a unit's weights are widened into a panel once, which all rows
// then share. Sums are float32 in the order of k, whatever the shape of a tile: a row's bits do not show its batch-mates.
//
// Included inside a namespace per instruction set.

#if defined(__AMX_BF16__)

static constexpr int64_t TILE_ROWS = 12;  // measured: from here on, tiles beat codes

static constexpr int64_t TILE_K = 32;          // columns of a tile of bfloat16
static constexpr int64_t PANEL_K = 2048;       // so many columns of a unit fit the second-level cache beside the rows
static constexpr int64_t CHUNK_ROWS = 1024;    // so many rows' sums do
static constexpr int64_t PANEL_PACK = PANEL_K * PACK_OUTPUTS;  // bfloat16 numbers

// Tiles 0 to 3 are sums (two of rows by two of outputs), 4 and 5 rows, 6 and 7 weights.
struct alignas(64) TileShape {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

struct TileShapes {
    TileShape of[33];  // by the number of rows
};

static constexpr TileShapes tile_shapes() {
    TileShapes shapes{};
    for (int rows = 1; rows <= 32; ++rows) {
        TileShape& shape = shapes.of[rows];
        const int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 1;
        const int heights[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
        shape.palette = 1;
        for (int tile = 0; tile < 8; ++tile) {
            shape.row_bytes[tile] = 64;
            shape.rows[tile] = uint8_t(heights[tile]);
        }
    }
    return shapes;
}

// In memory for good: the compiler does not know that loading a shape reads it.
static constexpr TileShapes TILE_SHAPES = tile_shapes();

// Nor does it know that tiles are loaded from memory and stored to it.
static inline void settle_memory() { asm volatile("" ::: "memory"); }

// Sixteen outputs' weights for pairs of k, side by side, rounded to nearest even.
static inline void store_pair(__m512 even, __m512 odd, uint16_t* panel) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i apart = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    _mm512_store_si512(panel, _mm512_permutexvar_epi16(order, apart));
}

// A byte in bits 15 to 22 of a float's mantissa is the byte plus 256.
static inline __m512 byte_plus_256(__m512i shifted) {
    constexpr int A_AND_B_OR_C = 0xea;
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(shifted, _mm512_set1_epi32(0x007f8000),
                                                         _mm512_set1_epi32(0x43800000), A_AND_B_OR_C));
}

// Columns [begin, end) of a pack, to pairs of k: [k / 2][output][2].
template <Pack P>
static void widen(const uint8_t* pack, int64_t inner, int64_t begin, int64_t end, uint16_t* panel) {
    constexpr PackLayout layout = LAYOUTS[P];
    using Code = Coded<layout.bits>;
    constexpr int step = Code::step < layout.group ? Code::step : layout.group;
    const uint8_t* scales = pack + begin / layout.block * layout.scale_bytes();
    const uint8_t* codes = pack + layout.codes_at(inner) + begin / layout.block * layout.code_bytes();
    for (int64_t k = begin; k < end; scales += layout.scale_bytes())
        for (int group = 0; group < layout.groups(); ++group, k += layout.group) {
            const Lanes scale = PackScales<P>::scale(scales, group);
            Lanes base = scale * Lanes::splat(float(-256 - layout.offset));
            if constexpr (layout.minimum != 0) {
                const Lanes minimum = PackScales<P>::minimum(scales, group);
                base = layout.minimum > 0 ? base + minimum : base - minimum;
            }
#pragma GCC unroll 8
            for (int i = 0; i < layout.group; i += step, codes += Code::bytes) {
                Quads quads[step / 4];
                Code::unpack(codes, quads);
                for (int q = 0; q < step / 4; ++q, panel += 64) {
                    const __m512i v = quads[q].v;
                    const __m512 first = byte_plus_256(_mm512_slli_epi32(v, 15)),
                                 second = byte_plus_256(_mm512_slli_epi32(v, 7)),
                                 third = byte_plus_256(_mm512_srli_epi32(v, 1)),
                                 fourth = byte_plus_256(_mm512_srli_epi32(v, 9));
                    store_pair(_mm512_fmadd_ps(first, scale.v, base.v), _mm512_fmadd_ps(second, scale.v, base.v), panel);
                    store_pair(_mm512_fmadd_ps(third, scale.v, base.v), _mm512_fmadd_ps(fourth, scale.v, base.v),
                               panel + 32);
                }
            }
        }
}

static constexpr void (*WIDEN[PACKS])(const uint8_t*, int64_t, int64_t, int64_t, uint16_t*) = {
    widen<PACK4>, widen<PACK4M>, widen<PACK4K>, widen<PACK4S>, widen<PACK4SM>,
    widen<PACK5>, widen<PACK5M>, widen<PACK5K>, widen<PACK6S>, widen<PACK8>,
};

// Up to 32 rows times both packs of a panel. sums: rows of 32 floats, where `more` already hold the columns before.
static inline void multiply_tiles(const uint8_t* x, int64_t stride, int64_t rows, const uint16_t* panel, int64_t columns,
                                  float* sums, bool more) {
    constexpr int64_t line = UNIT_OUTPUTS * sizeof(float);
    const uint16_t *left = panel, *right = panel + PANEL_PACK;
    const uint8_t* lower = x + 16 * stride;
    float* lower_sums = sums + 16 * UNIT_OUTPUTS;
    if (more) {
        _tile_loadd(0, sums, line);
        _tile_loadd(1, sums + 16, line);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    if (rows <= 16) {
        for (int64_t k = 0; k < columns; k += TILE_K, x += 64, left += 512, right += 512) {
            _tile_loadd(4, x, stride);
            _tile_loadd(6, left, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, right, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        if (more) {
            _tile_loadd(2, lower_sums, line);
            _tile_loadd(3, lower_sums + 16, line);
        } else {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < columns; k += TILE_K, x += 64, lower += 64, left += 512, right += 512) {
            _tile_loadd(4, x, stride);
            _tile_loadd(6, left, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, right, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, lower, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(2, lower_sums, line);
        _tile_stored(3, lower_sums + 16, line);
    }
    _tile_stored(0, sums, line);
    _tile_stored(1, sums + 16, line);
}

static void packed_tiles(const PackedJob& job, int64_t begin, int64_t end) {
    // Sums wait for the rest of K, or for the gate's other part; else those of 32 rows are finished at once.
    const bool wait = job.inner > PANEL_K || job.gate >= 0;
    const int64_t chunk = wait ? (job.rows < CHUNK_ROWS ? (job.rows + 31) / 32 * 32 : CHUNK_ROWS) : 32;
    const int64_t apart = chunk * UNIT_OUTPUTS, room = PANEL_PACK + 2 * apart + 16;  // floats: a panel is two packs
    uint16_t* panel = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(scratch(room)) + 63) / 64 * 64);
    float* sums = reinterpret_cast<float*>(panel + 2 * PANEL_PACK);
    for (int64_t number = begin; number < end; ++number) {
        const Unit unit = unit_at(job, number);
        for (int64_t first = 0; first < job.rows; first += CHUNK_ROWS) {
            const int64_t last = job.rows - first < CHUNK_ROWS ? job.rows : first + CHUNK_ROWS;
            for (int64_t k = 0; k < job.inner; k += PANEL_K)
                for (int64_t part = 0; part < unit.count; ++part) {
                    const int64_t stop = job.inner - k < PANEL_K ? job.inner : k + PANEL_K;
                    for (int64_t half = 0; half < 2; ++half)
                        WIDEN[unit.parts[part].pack](unit.pack(job, part, half), job.inner, k, stop,
                                                     panel + half * PANEL_PACK);
                    _tile_loadconfig(&TILE_SHAPES.of[32]);
                    for (int64_t row = first; row < last; row += 32) {
                        const int64_t rows = last - row < 32 ? last - row : 32, place = wait ? row - first : 0;
                        float* own = sums + place * UNIT_OUTPUTS;
                        if (rows < 32) _tile_loadconfig(&TILE_SHAPES.of[rows]);
                        settle_memory();
                        multiply_tiles(job.x.data + row * job.x.stride + 2 * k, job.x.stride, rows, panel, stop - k,
                                       own + part * apart, k > 0);
                        settle_memory();
                        if (stop == job.inner && part == unit.count - 1) finish(job, unit, row, rows, own, apart);
                    }
                }
        }
    }
    _tile_release();
}

#else

static constexpr int64_t TILE_ROWS = 0;

static void packed_tiles(const PackedJob&, int64_t, int64_t) {}

#endif
