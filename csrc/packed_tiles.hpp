// Packed weights times rows of bfloat16, in tile registers: a unit's weights are widened into a panel once, which all
// rows then share. Sums are float32 in the order of k, whatever the shape of a tile: a row has the same bits alone and
// in any batch.
//
// Included inside a namespace per instruction set.

#if defined(__AMX_BF16__)

static constexpr int64_t TILE_ROWS = 14;  // measured: from here on, tiles beat codes

static constexpr int64_t PANEL_K = 2048;     // so many columns of a unit fit the second-level cache beside the rows
static constexpr int64_t CHUNK_ROWS = 1024;  // so many rows' sums do
static constexpr int64_t SLICE_K = 32;       // so many columns are widened while tiles multiply those before them
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

// Bytes become floats by moving: a code in the upper bits of a mantissa, under a fixed exponent, is a power of two plus
// the code times another. What weights are scaled and raised by takes both into account.
template <int Bits>
struct Moved {
    static constexpr int place = 2, left = 7 - Bits;  // the byte of the float; the shift that leaves its top bit free
    static constexpr int32_t exponent = 0x42000000;   // 32 + code * 2^(5 - Bits)
    static constexpr float zero = 32.0f, unit = 32.0f / float(1 << Bits);
};

template <>
struct Moved<8> {
    static constexpr int place = 1, left = 0;
    static constexpr int32_t exponent = 0x47000000;  // 32768 + code
    static constexpr float zero = 32768.0f, unit = 1.0f;
};

// In each of sixteen lanes, one byte is byte `From` of the codes; the others are those of the fixed exponent.
template <int Bits, int From>
static inline __m512 moved(__m512i codes) {
    constexpr int to = Moved<Bits>::place;
    constexpr __mmask64 places = 0x1111111111111111ull << to;
    const __m512i order = _mm512_set4_epi32((12 + From) << 8 * to, (8 + From) << 8 * to, (4 + From) << 8 * to,
                                            From << 8 * to);
    const __m512i exponent = _mm512_set1_epi32(Moved<Bits>::exponent);
    return _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(exponent, places, codes, order));
}

// Weights of sixteen outputs for two k, rounded to the nearest bfloat16 and laid side by side.
static inline void store_pair(__m512 even, __m512 odd, uint16_t* panel) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i order = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);
    const __m512i first = _mm512_add_epi32(_mm512_castps_si512(even), half);
    const __m512i second = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    _mm512_store_si512(panel, _mm512_mask_shuffle_epi8(second, 0x3333333333333333ull, first, order));
}

// Columns [begin, end) of a pack, in pairs of k: [k / 2][output][2].
template <Pack P>
static void widen(const uint8_t* pack, int64_t inner, int64_t begin, int64_t end, uint16_t* panel) {
    constexpr PackLayout layout = LAYOUTS[P];
    using Code = Coded<layout.bits>;
    using Move = Moved<layout.bits>;
    constexpr int step = Code::step < layout.group ? Code::step : layout.group;
    const int64_t ahead = 2 * layout.bytes(inner);  // the same place in the next unit, which is read next
    const uint8_t* scales = pack + begin / layout.block * layout.scale_bytes();
    const uint8_t* codes = pack + layout.codes_at(inner) + begin / layout.block * layout.code_bytes();
    for (int64_t k = begin; k < end; scales += layout.scale_bytes())
        for (int group = 0; group < layout.groups(); ++group, k += layout.group) {
            const Lanes scale = PackScales<P>::scale(scales, group), unit = scale * Lanes::splat(1.0f / Move::unit);
            Lanes base = scale * Lanes::splat(-Move::zero / Move::unit - float(layout.offset));
            if constexpr (layout.minimum != 0) {
                const Lanes minimum = PackScales<P>::minimum(scales, group);
                base = layout.minimum > 0 ? base + minimum : base - minimum;
            }
            __builtin_prefetch(scales + ahead, 0, 2);
#pragma GCC unroll 8
            for (int i = 0; i < layout.group; i += step, codes += Code::bytes) {
                Quads quads[step / 4];
                Code::unpack(codes, quads);
                for (int line = 0; line < Code::bytes; line += 64) __builtin_prefetch(codes + ahead + line, 0, 2);
                for (int q = 0; q < step / 4; ++q, panel += 64) {
                    const __m512i v = _mm512_slli_epi16(quads[q].v, Move::left);
                    store_pair(_mm512_fmadd_ps(moved<layout.bits, 0>(v), unit.v, base.v),
                               _mm512_fmadd_ps(moved<layout.bits, 1>(v), unit.v, base.v), panel);
                    store_pair(_mm512_fmadd_ps(moved<layout.bits, 2>(v), unit.v, base.v),
                               _mm512_fmadd_ps(moved<layout.bits, 3>(v), unit.v, base.v), panel + 32);
                }
            }
        }
}

static constexpr void (*WIDEN[PACKS])(const uint8_t*, int64_t, int64_t, int64_t, uint16_t*) = {
    widen<PACK4>, widen<PACK4M>, widen<PACK4K>, widen<PACK4S>, widen<PACK4SM>,
    widen<PACK5>, widen<PACK5M>, widen<PACK5K>, widen<PACK6S>, widen<PACK8>,
};

// Up to 32 rows times both packs of a panel.
struct TileBlock {
    const uint8_t* x;
    int64_t stride, rows;
    float* sums;  // rows of 32 floats

    static constexpr int64_t line = UNIT_OUTPUTS * sizeof(float);
    bool tall() const { return rows > 16; }

    // `more`: sums already hold the columns before.
    void begin(bool more) const {
        if (more) {
            _tile_loadd(0, sums, line);
            _tile_loadd(1, sums + 16, line);
            if (tall()) {
                _tile_loadd(2, sums + 16 * UNIT_OUTPUTS, line);
                _tile_loadd(3, sums + 16 * UNIT_OUTPUTS + 16, line);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
    }

    // Columns [begin, end) of the panel.
    void multiply(const uint16_t* panel, int64_t begin, int64_t end) const {
        const uint8_t *upper = x + 2 * begin, *lower = upper + 16 * stride, *stop = x + 2 * end;
        const uint16_t *left = panel + 16 * begin, *right = left + PANEL_PACK;
        if (!tall()) {
            for (; upper < stop; upper += 64, left += 512, right += 512) {
                _tile_loadd(4, upper, stride);
                _tile_loadd(6, left, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, right, 64);
                _tile_dpbf16ps(1, 4, 7);
            }
            return;
        }
        for (; upper < stop; upper += 64, lower += 64, left += 512, right += 512) {
            _tile_loadd(4, upper, stride);
            _tile_loadd(6, left, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, right, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, lower, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    void end() const {
        _tile_stored(0, sums, line);
        _tile_stored(1, sums + 16, line);
        if (tall()) {
            _tile_stored(2, sums + 16 * UNIT_OUTPUTS, line);
            _tile_stored(3, sums + 16 * UNIT_OUTPUTS + 16, line);
        }
    }
};

// The first rows are multiplied while the panel is widened, one slice behind: one needs the tiles, the other does not.
static void widen_and_multiply(const uint8_t* left, const uint8_t* right, int pack, int64_t inner, int64_t first,
                               int64_t last, uint16_t* panel, const TileBlock& block) {
    const int64_t columns = last - first, slice = LAYOUTS[pack].block < SLICE_K ? SLICE_K : LAYOUTS[pack].block;
    for (int64_t k = 0; k < columns; k += slice) {
        const int64_t stop = columns - k < slice ? columns : k + slice;
        WIDEN[pack](left, inner, first + k, first + stop, panel + 16 * k);
        WIDEN[pack](right, inner, first + k, first + stop, panel + 16 * k + PANEL_PACK);
        settle_memory();
        if (k > 0) block.multiply(panel, k - slice, k);
        if (stop == columns) block.multiply(panel, k, stop);
    }
}

static void packed_tiles(const PackedJob& job, int64_t begin, int64_t end) {
    // Sums wait for the rest of K, or for the gate's other part; else those of 32 rows are finished at once.
    const bool wait = job.inner > PANEL_K || job.gate >= 0;
    const int64_t chunk = wait ? (job.rows < CHUNK_ROWS ? (job.rows + 31) / 32 * 32 : CHUNK_ROWS) : 32;
    const int64_t apart = chunk * UNIT_OUTPUTS, room = PANEL_PACK + 2 * apart + 16;  // floats: a panel is two packs
    uint16_t* panel = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(scratch(room)) + 63) / 64 * 64);
    float* sums = reinterpret_cast<float*>(panel + 2 * PANEL_PACK);
    int64_t shape = 0;
    for (int64_t number = begin; number < end; ++number) {
        const Unit unit = unit_at(job, number);
        for (int64_t first = 0; first < job.rows; first += CHUNK_ROWS) {
            const int64_t last = job.rows - first < CHUNK_ROWS ? job.rows : first + CHUNK_ROWS;
            for (int64_t k = 0; k < job.inner; k += PANEL_K)
                for (int64_t part = 0; part < unit.count; ++part) {
                    const int64_t stop = job.inner - k < PANEL_K ? job.inner : k + PANEL_K;
                    const bool done = stop == job.inner && part == unit.count - 1;
                    for (int64_t row = first; row < last; row += 32) {
                        const int64_t rows = last - row < 32 ? last - row : 32;
                        float* own = sums + (wait ? row - first : 0) * UNIT_OUTPUTS;
                        if (shape != rows) _tile_loadconfig(&TILE_SHAPES.of[rows]);
                        shape = rows;
                        const TileBlock block{job.x.data + row * job.x.stride + 2 * k, job.x.stride, rows,
                                              own + part * apart};
                        block.begin(k > 0);
                        if (row == first)
                            widen_and_multiply(unit.pack(job, part, 0), unit.pack(job, part, 1), unit.parts[part].pack,
                                               job.inner, k, stop, panel, block);
                        else
                            block.multiply(panel, 0, stop - k);
                        block.end();
                        settle_memory();
                        if (done) finish(job, unit, row, rows, own, apart);
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
