// Packed weights times rows of bfloat16 in tile registers: a unit's weights are widened into a panel once, which all
// rows share. Sums are float32 in the order of k, for any tile shape: a row has the same bits alone and in any batch.
//
// Included inside a namespace per instruction set.

#if defined(__AMX_BF16__)

static constexpr int64_t TILE_ROWS = 14;  // measured: from this row count on, tiles beat codes

static constexpr int64_t PANEL_K = 2048;     // columns of a unit that fit into L2 beside the rows
static constexpr int64_t CHUNK_ROWS = 1024;  // rows whose sums fit into L2
static constexpr int64_t TALL_ROWS = 64;     // rows multiplied while a panel is widened
static constexpr int64_t SLICE_K = 32;       // columns of a tile, widened at a time
static constexpr int64_t PANEL_PACK = PANEL_K * PACK_OUTPUTS;  // bfloat16 numbers
static constexpr int64_t GROUP_PANELS = 4;   // panels of units sharing rows that fit into L2, with a few rows and sums

struct alignas(64) TileShape {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

struct TileShapes {
    TileShape of[TALL_ROWS + 1];  // by row count
};

static constexpr TileShape tile_shape(const int (&heights)[8]) {
    TileShape shape{};
    shape.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
        shape.row_bytes[tile] = 64;
        shape.rows[tile] = uint8_t(heights[tile]);
    }
    return shape;
}

// Up to 32 rows: tiles 0 to 3 are sums (two of rows by two of outputs), 4 rows, 5 a lower block of another height, 6
// and 7 weights. Up to 64: tiles 0 to 3 are sums of one pack, 4 sixteen rows, 5 last rows of another height, 7 weights.
//
// Rows use a single tile if possible, because a core seems to have few more physical than architectural tiles, and half
// of them while its other hardware thread runs: tiles in use are then not renamed, and a load waits for the previous
// product. With all eight tiles in use, four loads and four products took 210 cycles instead of 50; with seven 145,
// with six 125.
static constexpr TileShapes tile_shapes() {
    TileShapes shapes{};
    for (int rows = 1; rows <= 32; ++rows) {
        const int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 1;
        shapes.of[rows] = tile_shape({upper, upper, lower, lower, upper, lower, 16, 16});
    }
    for (int rows = 33; rows <= TALL_ROWS; ++rows) {
        const int last = (rows - 1) % 16 + 1;
        shapes.of[rows] = tile_shape({16, 16, rows > 48 ? 16 : last, last, 16, last, 1, 16});
    }
    return shapes;
}

// In static memory: the compiler does not know that loading a configuration reads it.
static constexpr TileShapes TILE_SHAPES = tile_shapes();

// Nor does it know that tile instructions load from and store to memory.
static inline void settle_memory() { asm volatile("" ::: "memory"); }

// Bytes become floats by permutation: a code in the upper mantissa bits, under a fixed exponent, is a power of two plus
// the code times another. The weights' scales and offsets account for both.
template <int Bits>
struct Moved {
    static constexpr int place = 2, left = 7 - Bits;  // byte of the float; shift that keeps its top bit free
    static constexpr int32_t exponent = 0x42000000;   // 32 + code * 2^(5 - Bits)
    static constexpr float zero = 32.0f, unit = 32.0f / float(1 << Bits);
};

template <>
struct Moved<8> {
    static constexpr int place = 1, left = 0;
    static constexpr int32_t exponent = 0x47000000;  // 32768 + code
    static constexpr float zero = 32768.0f, unit = 1.0f;
};

// In each of sixteen lanes, one byte is byte `From` of the codes; the others belong to the fixed exponent.
template <int Bits, int From>
static inline __m512 moved(__m512i codes) {
    constexpr int to = Moved<Bits>::place;
    constexpr __mmask64 places = 0x1111111111111111ull << to;
    const __m512i order = _mm512_set4_epi32((12 + From) << 8 * to, (8 + From) << 8 * to, (4 + From) << 8 * to,
                                            From << 8 * to);
    const __m512i exponent = _mm512_set1_epi32(Moved<Bits>::exponent);
    return _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(exponent, places, codes, order));
}

// Weights of sixteen outputs for two k, rounded to nearest bfloat16 and interleaved.
static inline void store_pair(__m512 even, __m512 odd, uint16_t* panel) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i order = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);
    const __m512i first = _mm512_add_epi32(_mm512_castps_si512(even), half);
    const __m512i second = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    _mm512_store_si512(panel, _mm512_mask_shuffle_epi8(second, 0x3333333333333333ull, first, order));
}

// SLICE_K columns of a pack starting at k: `sink(i, ...)` gets the weights of the columns k + i to k + i + 3.
template <Pack P, class Sink>
static inline void read_slice(const PackLayout& own, const uint8_t* pack, int64_t inner, int64_t k, const Sink& sink) {
    constexpr PackLayout layout = LAYOUTS[P];
    constexpr int width = layout.width();
    using Code = CodedOf<P>;
    using Move = Moved<width>;
    constexpr int step = Code::step < layout.group ? Code::step : layout.group;
    const bool lower = lowered<P>(own);
    const float offset = layout.zeros && lower ? 0.0f : float(layout.offset);
    const int64_t ahead = 2 * own.bytes(inner);  // same position in the next unit, which is read next
    const uint8_t* scales = pack + scales_of_block<P>(own, k / layout.block);
    const uint8_t* codes = pack + own.codes_at(inner) + k * PACK_OUTPUTS * layout.bits / 8;
    const int first = int(k % layout.block / layout.group);
    __builtin_prefetch(scales + ahead, 0, 2);
#pragma GCC unroll 2
    for (int group = 0; group < SLICE_K / layout.group; ++group) {
        const Lanes scale = PackScales<P>::scale(scales, first + group), unit = scale * Lanes::splat(1.0f / Move::unit);
        Lanes base = scale * Lanes::splat(-Move::zero / Move::unit - offset);
        if constexpr (layout.minimum != 0 || layout.zeros)
            if (lower) {
                const Lanes minimum = PackScales<P>::minimum(scales, first + group);
                base = layout.minimum > 0 ? base + minimum : base - minimum;
            }
#pragma GCC unroll 8
        for (int i = 0; i < layout.group; i += step, codes += Code::bytes) {
            Quads quads[step / 4];
            Code::unpack(codes, quads);
            for (int line = 0; line < Code::bytes; line += 64) __builtin_prefetch(codes + ahead + line, 0, 2);
#pragma GCC unroll 8
            for (int q = 0; q < step / 4; ++q) {
                const __m512i v = _mm512_slli_epi16(quads[q].v, Move::left);
                sink(group * layout.group + i + 4 * q, _mm512_fmadd_ps(moved<width, 0>(v), unit.v, base.v),
                     _mm512_fmadd_ps(moved<width, 1>(v), unit.v, base.v),
                     _mm512_fmadd_ps(moved<width, 2>(v), unit.v, base.v),
                     _mm512_fmadd_ps(moved<width, 3>(v), unit.v, base.v));
            }
        }
    }
}

// The same, rounded and in pairs: [k / 2][output][2]. `meanwhile(i)` is called after each quarter.
template <Pack P, class Meanwhile>
static inline void widen(const PackLayout& own, const uint8_t* pack, int64_t inner, int64_t k, uint16_t* panel,
                         const Meanwhile& meanwhile) {
    read_slice<P>(own, pack, inner, k, [&](int i, __m512 a, __m512 b, __m512 c, __m512 d) {
        store_pair(a, b, panel + 16 * i);
        store_pair(c, d, panel + 16 * i + 32);
        const int behind = i + 4;  // columns done
        if (behind % (SLICE_K / 4) == 0) meanwhile(behind / (SLICE_K / 4) - 1);
    });
}

// Up to 32 rows times 32 columns of two packs, in two halves.
static inline void multiply_upper(const uint8_t* x, int64_t stride, const void* left, const void* right) {
    _tile_loadd(6, left, 64);
    _tile_loadd(7, right, 64);
    _tile_loadd(4, x, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
}

static inline void multiply_lower(const uint8_t* x, int64_t stride, int64_t rows) {
    if (rows == 32) {
        _tile_loadd(4, x + 16 * stride, stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 7);
    } else if (rows > 16) {
        _tile_loadd(5, x + 16 * stride, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// Up to 32 rows times both packs of a panel.
struct TileBlock {
    const uint8_t* x;
    int64_t stride, rows;
    float* sums;  // rows of 32 floats

    static constexpr int64_t line = UNIT_OUTPUTS * sizeof(float);
    bool tall() const { return rows > 16; }

    // `more`: sums already contain the previous columns.
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

    // Columns [k, k + 32); their weights in the second pack are PANEL_PACK after those in the first.
    void multiply(const uint16_t* weights, int64_t k) const {
        multiply_upper(x + 2 * k, stride, weights, weights + PANEL_PACK);
        multiply_lower(x + 2 * k, stride, rows);
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

// 33 to 64 rows times one pack of a panel.
struct TallBlock {
    const uint8_t* x;
    int64_t stride, rows;
    float* sums;  // rows of 32 floats, of which sixteen are written

    static constexpr int64_t line = UNIT_OUTPUTS * sizeof(float);
    bool four() const { return rows > 48; }

    void begin(bool more) const {
        if (more) {
            _tile_loadd(0, sums, line);
            _tile_loadd(1, sums + 16 * UNIT_OUTPUTS, line);
            if (four()) _tile_loadd(2, sums + 32 * UNIT_OUTPUTS, line);
            _tile_loadd(3, last_sums(), line);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
    }

    // Columns [k, k + 32): sixteen rows at a time.
    void multiply(const uint16_t* weights, int64_t k) const {
        for (int quarter = 0; quarter < 4; ++quarter) multiply(weights, k, quarter);
    }
    void multiply(const uint16_t* weights, int64_t k, int quarter) const {
        const uint8_t* row = x + 2 * k;
        if (quarter == 0) {
            _tile_loadd(7, weights, 64);
            _tile_loadd(4, row, stride);
            _tile_dpbf16ps(0, 4, 7);
        } else if (quarter == 1) {
            _tile_loadd(4, row + 16 * stride, stride);
            _tile_dpbf16ps(1, 4, 7);
        } else if (quarter == 2) {
            if (!four()) return;
            _tile_loadd(4, row + 32 * stride, stride);
            _tile_dpbf16ps(2, 4, 7);
        } else if (rows % 16 == 0) {
            _tile_loadd(4, row + last() * stride, stride);
            _tile_dpbf16ps(3, 4, 7);
        } else {
            _tile_loadd(5, row + last() * stride, stride);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    void end() const {
        _tile_stored(0, sums, line);
        _tile_stored(1, sums + 16 * UNIT_OUTPUTS, line);
        if (four()) _tile_stored(2, sums + 32 * UNIT_OUTPUTS, line);
        _tile_stored(3, last_sums(), line);
    }

private:
    int64_t last() const { return four() ? 48 : 32; }
    float* last_sums() const { return sums + last() * UNIT_OUTPUTS; }
};

// One part of a unit, over the columns [begin, end): widens its two packs into a panel. Meanwhile the first rows are
// multiplied, one slice behind: tile and vector units overlap. Both alternate within a slice, because a core's window
// is only a few hundred instructions.
struct Widening {
    const uint8_t* packs[2];
    int kind;
    PackLayout layout;
    int64_t inner, begin, end;
    uint16_t* panel;
    bool once;  // no other rows follow: two slices of a panel suffice, and stay in L1

    int64_t columns() const { return end - begin; }
    uint16_t* slice(int64_t half, int64_t k) const {
        return panel + half * PANEL_PACK + 16 * (once ? k & (2 * SLICE_K - 1) : k);
    }
    template <Pack P, class Meanwhile>
    void widen_slice(int64_t half, int64_t k, const Meanwhile& meanwhile) const {
        widen<P>(layout, packs[half], inner, begin + k, slice(half, k), meanwhile);
        settle_memory();
    }

    template <Pack P>
    void multiply(const TileBlock& block) const {
        const auto nothing = [](int) {};
        block.begin(begin > 0);
        widen_slice<P>(0, 0, nothing);
        widen_slice<P>(1, 0, nothing);
        for (int64_t k = SLICE_K; k < columns(); k += SLICE_K) {
            const int64_t before = k - SLICE_K;
            const uint8_t* x = block.x + 2 * before;
            widen_slice<P>(0, k, [&](int quarter) {
                if (quarter == 1) multiply_upper(x, block.stride, slice(0, before), slice(1, before));
            });
            widen_slice<P>(1, k, [&](int quarter) {
                if (quarter == 1) multiply_lower(x, block.stride, block.rows);
            });
        }
        block.multiply(slice(0, columns() - SLICE_K), columns() - SLICE_K);
        block.end();
    }

    template <Pack P>
    void multiply(TallBlock block) const {
        for (int64_t half = 0; half < 2; ++half, block.sums += PACK_OUTPUTS) {
            block.begin(begin > 0);
            widen_slice<P>(half, 0, [](int) {});
            for (int64_t k = SLICE_K; k < columns(); k += SLICE_K)
                widen_slice<P>(half, k, [&](int quarter) {
                    block.multiply(slice(half, k - SLICE_K), k - SLICE_K, quarter);
                });
            block.multiply(slice(half, columns() - SLICE_K), columns() - SLICE_K);
            block.end();
        }
    }

    // Following rows: the panel is complete. `meanwhile` is called after each slice.
    template <class Meanwhile>
    void multiply_again(const TileBlock& block, const Meanwhile& meanwhile) const {
        block.begin(begin > 0);
        for (int64_t k = 0; k < columns(); k += SLICE_K) {
            block.multiply(slice(0, k), k);
            meanwhile();
        }
        block.end();
    }
};

template <Pack P>
static void multiply_first(const Widening& widening, const uint8_t* x, int64_t stride, int64_t rows, float* sums) {
    if (rows > 32)
        widening.multiply<P>(TallBlock{x, stride, rows, sums});
    else
        widening.multiply<P>(TileBlock{x, stride, rows, sums});
}

static constexpr void (*MULTIPLY_FIRST[PACKS])(const Widening&, const uint8_t*, int64_t, int64_t, float*) = {
    multiply_first<PACK4>, multiply_first<PACK4M>, multiply_first<PACK4K>, multiply_first<PACK4S>,
    multiply_first<PACK4SM>, multiply_first<PACK5>, multiply_first<PACK5M>, multiply_first<PACK5K>,
    multiply_first<PACK6S>, multiply_first<PACK8>, multiply_first<PACK4Z>, multiply_first<PACK3>,
    multiply_first<PACK2>, multiply_first<PACK4F>, multiply_first<PACK8R>,
};

// Rows are read once for all units of a group: with many threads, a row comes from a distant cache, and reading it
// again for each unit took longer than multiplying it.
static void packed_tiles(const PackedJob& job, int64_t begin, int64_t end) {
    const int64_t parts = job.gate >= 0 ? 2 : 1;
    const int64_t most = job.rows > TALL_ROWS ? GROUP_PANELS / parts : 1, group = end - begin < most ? end - begin : most;
    // Sums are kept for the rest of K, or for the gate's other part; otherwise only until the next block's sums are
    // computed.
    const bool wait = job.inner > PANEL_K || parts > 1;
    const int64_t chunk = wait ? (job.rows < CHUNK_ROWS ? (job.rows + 31) / 32 * 32 : CHUNK_ROWS) : 2 * TALL_ROWS;
    const int64_t apart = chunk * UNIT_OUTPUTS, each = wait ? parts * apart : 0;  // floats
    const int64_t room = group * (parts * PANEL_PACK + each) + apart + 16;        // a panel is two packs
    uint16_t* panels = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(scratch(room)) + 63) / 64 * 64);
    float* sums = reinterpret_cast<float*>(panels + 2 * group * parts * PANEL_PACK);
    Unit units[GROUP_PANELS];
    Widening widenings[GROUP_PANELS];
    int64_t shape = 0;
    for (int64_t number = begin; number < end; number += group) {
        const int64_t count = end - number < group ? end - number : group;
        for (int64_t u = 0; u < count; ++u) units[u] = unit_at(job, number + u);
        for (int64_t first = 0; first < job.rows; first += CHUNK_ROWS) {
            const int64_t last = job.rows - first < CHUNK_ROWS ? job.rows : first + CHUNK_ROWS;
            for (int64_t k = 0; k < job.inner; k += PANEL_K) {
                const int64_t stop = job.inner - k < PANEL_K ? job.inner : k + PANEL_K;
                for (int64_t i = 0; i < count * parts; ++i) {
                    const Unit& unit = units[i / parts];
                    const int64_t part = i % parts;
                    const int pack = unit.parts[part].pack;
                    widenings[i] = {{unit.pack(job, part, 0), unit.pack(job, part, 1)}, kind_of(pack), layout_of(pack),
                                    job.inner, k, stop, panels + 2 * i * PANEL_PACK, last - first <= TALL_ROWS};
                }
                DeferredStores<FloatSums> deferred;
                int64_t turn = 0;
                for (int64_t row = first, rows; row < last; row += rows) {
                    const int64_t most_rows = row == first ? TALL_ROWS : 32;
                    rows = last - row < most_rows ? last - row : most_rows;
                    if (shape != rows) _tile_loadconfig(&TILE_SHAPES.of[rows]);
                    shape = rows;
                    const uint8_t* x = job.x.data + row * job.x.stride + 2 * k;
                    for (int64_t i = 0; i < count * parts; ++i) {
                        float* own = sums + i / parts * each + (wait ? row - first : turn) * UNIT_OUTPUTS;
                        float* target = own + i % parts * apart;
                        if (row == first)
                            MULTIPLY_FIRST[widenings[i].kind](widenings[i], x, job.x.stride, rows, target);
                        else
                            widenings[i].multiply_again(TileBlock{x, job.x.stride, rows, target}, [&] { deferred.advance(); });
                        settle_memory();
                        deferred.flush();
                        if (stop == job.inner && i % parts == parts - 1)
                            deferred.begin({job, units[i / parts], FloatSums{own, apart}}, row, rows, (stop - k) / SLICE_K);
                        turn ^= TALL_ROWS;
                    }
                }
                deferred.flush();
            }
        }
    }
    _tile_release();
}

#else

static constexpr int64_t TILE_ROWS = 0;

static void packed_tiles(const PackedJob&, int64_t, int64_t) {}

#endif
