// Packed weights times sixteen rows of int8 codes at a time, in tiles (AMX): a group's products are one tile product.
// Groups are scaled and added as packed_codes.hpp does it, number by number, so a row has the same bits there and here.
//
// Included inside a namespace per instruction set.

#if defined(__AMX_INT8__)

namespace packed_groups {

constexpr int64_t ROWS = 16, LINE = 64;

// As LDTILECFG reads it. In static memory: a compiler does not see that the instruction reads.
struct Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// Tiles 0 and 1: sums of `rows` rows. 2 and 3: their codes, a group of them. 4 and 5: the weights' codes, in quads.
struct ShapeTable {
    Shapes of[2][ROWS];
    constexpr ShapeTable() : of() {
        for (int wide = 0; wide < 2; ++wide)
            for (int rows = 1; rows <= ROWS; ++rows) {
                Shapes& shapes = of[wide][rows - 1];
                const int group = wide ? 32 : 16;
                shapes.palette = 1;
                for (int tile = 0; tile < 6; ++tile) {
                    shapes.row_bytes[tile] = uint16_t(tile == 2 || tile == 3 ? group : LINE);
                    shapes.rows[tile] = uint8_t(tile < 4 ? rows : group / 4);
                }
            }
    }
};
alignas(64) static const ShapeTable SHAPES;

template <Pack P>
struct Group {
    static constexpr PackLayout layout = LAYOUTS[P];
    static constexpr int64_t code_bytes = layout.group * 16 * layout.bits / 8;

    // A group's codes in quads, as a tile: where they lie, or unpacked into `room`.
    static const uint8_t* quads(const uint8_t* codes, int64_t group, uint8_t* room) {
        using Code = Coded<layout.bits>;
        const uint8_t* at = codes + group * code_bytes;
        __builtin_prefetch(at + AHEAD);
        __builtin_prefetch(at + AHEAD + 64);
        __builtin_prefetch(at + AHEAD + 128);
        __builtin_prefetch(at + AHEAD + 192);
        if constexpr (layout.bits == 8) return at;
        for (int i = 0; i < layout.group; i += Code::step, at += Code::bytes) {
            Quads unpacked[Code::step / 4];
            Code::unpack(at, unpacked);
            for (int q = 0; q < Code::step / 4; ++q) _mm512_store_si512(room + (i / 4 + q) * LINE, unpacked[q].v);
        }
        return room;
    }
};

// A tile's number must be known to the compiler.
template <int Set>
static inline void products(const int8_t* activations, int64_t stride, const uint8_t* quads, int32_t* sums) {
    asm volatile("" ::: "memory");  // what was stored before must be there
    if constexpr (Set == 0) {
        _tile_zero(0);
        _tile_loadd(2, activations, stride);
        _tile_loadd(4, quads, LINE);
        _tile_dpbsud(0, 2, 4);
        _tile_stored(0, sums, LINE);
    } else {
        _tile_zero(1);
        _tile_loadd(3, activations, stride);
        _tile_loadd(5, quads, LINE);
        _tile_dpbsud(1, 3, 5);
        _tile_stored(1, sums, LINE);
    }
    asm volatile("" ::: "memory");
}

// sums: rows of 32 floats, of which sixteen are written. Rows beyond `rows` repeat the last: nobody reads them.
template <Pack P>
static void multiply(const uint8_t* pack, const CodeRows& x, int64_t rows, float* sums) {
    constexpr PackLayout layout = LAYOUTS[P];
    const uint8_t* codes = pack + layout.codes_at(x.inner);
    const int64_t groups = x.inner / layout.group;
    alignas(64) uint8_t room[2][8 * LINE];
    alignas(64) int32_t dots[2][ROWS * 16] = {};
    const float *activation_scales[ROWS], *corrections[ROWS];
    Lanes totals[ROWS];
    for (int64_t r = 0; r < ROWS; ++r) {
        const int64_t row = r < rows ? r : rows - 1;
        activation_scales[r] = reinterpret_cast<const float*>(x.data + row * x.stride + x.inner);
        corrections[r] = x.corrections + row * x.corrections_stride();
        totals[r] = Lanes::splat(0.0f);
    }
    const auto begin = [&](int64_t group) {
        const int set = int(group % 2);
        const int8_t* activations = reinterpret_cast<const int8_t*>(x.data + group * layout.group);
        const uint8_t* quads = Group<P>::quads(codes, group, room[set]);
        if (set == 0)
            products<0>(activations, x.stride, quads, dots[0]);
        else
            products<1>(activations, x.stride, quads, dots[1]);
    };
    begin(0);
    for (int64_t group = 0; group < groups; ++group) {
        if (group + 1 < groups) begin(group + 1);  // its products run while this group's are scaled
        const uint8_t* scales = pack + group / layout.groups() * layout.scale_bytes();
        const int within = int(group % layout.groups());
        const Lanes scale = PackScales<P>::scale(scales, within);
        const int32_t* dot = dots[group % 2];
        const int64_t own = group * layout.group / GROUP;
#pragma GCC unroll 16
        for (int64_t r = 0; r < ROWS; ++r) {
            Sums sum{_mm512_load_si512(dot + r * 16)};
            if constexpr (layout.offset != 0) {
                int32_t start;
                __builtin_memcpy(&start, corrections[r] + group, 4);
                sum = sum + Sums::splat(start);
            }
            totals[r].add_product(sum.lanes(), scale * Lanes::splat(activation_scales[r][own]));
        }
        if constexpr (layout.minimum != 0) {
            const Lanes minimum = PackScales<P>::minimum(scales, within);
#pragma GCC unroll 16
            for (int64_t r = 0; r < ROWS; ++r) totals[r].add_product(minimum, Lanes::splat(corrections[r][group]));
        }
    }
    for (int64_t r = 0; r < rows; ++r) totals[r].store(sums + r * UNIT_OUTPUTS);
}

using Multiply = void (*)(const uint8_t* pack, const CodeRows& x, int64_t rows, float* sums);
static constexpr Multiply MULTIPLY[PACKS] = {
    multiply<PACK4>, multiply<PACK4M>, multiply<PACK4K>, multiply<PACK4S>, multiply<PACK4SM>,
    multiply<PACK5>, multiply<PACK5M>, multiply<PACK5K>, multiply<PACK6S>, multiply<PACK8>,
};

static void run(const PackedJob& job, int64_t begin, int64_t end) {
    const int64_t each = ROWS * (job.inner / 16), tiles = (job.rows + ROWS - 1) / ROWS;
    float* corrections = scratch(tiles * each);
    alignas(64) float sums[2][ROWS * UNIT_OUTPUTS];
    int corrected = -1;
    int64_t shape = -1;
    for (int64_t number = begin; number < end; ++number) {
        const Unit unit = unit_at(job, number);
        for (int64_t row = 0; row < job.rows; row += ROWS) {
            const int64_t rows = job.rows - row < ROWS ? job.rows - row : ROWS;
            const CodeRows x{job.x.data + row * job.x.stride, job.x.stride, job.inner, corrections + row / ROWS * each};
            for (int64_t part = 0; part < unit.count; ++part) {
                const int pack = unit.parts[part].pack;
                if (corrected != pack) {
                    const CodeRows all{job.x.data, job.x.stride, job.inner, corrections};
                    correct(LAYOUTS[pack], all, job.rows, corrections);
                    corrected = pack;
                }
                const int wide = LAYOUTS[pack].group == 32;
                if (shape != wide * ROWS + rows) _tile_loadconfig(&SHAPES.of[wide][rows - 1]);
                shape = wide * ROWS + rows;
                for (int64_t half = 0; half < 2; ++half)
                    MULTIPLY[pack](unit.pack(job, part, half), x, rows, sums[part] + half * PACK_OUTPUTS);
            }
            finish(job, unit, row, rows, sums[0], ROWS * UNIT_OUTPUTS);
        }
    }
    _tile_release();
}

}  // namespace packed_groups

#endif
