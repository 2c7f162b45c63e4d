// Reading packed weights, see packing.hpp. Included inside a namespace per instruction set.

// The codes of `step` consecutive k, which occupy `bytes`.
template <int Bits, Scale = Scale::Half>
struct Coded;

template <>
struct Coded<2> {
    static constexpr int step = 16, bytes = 64;
    static void unpack(const uint8_t* p, Quads* quads) {
        const Quads line = Quads::load(p);
        quads[0] = line.masked<0>(3);
        quads[1] = line.masked<2>(3);
        quads[2] = line.masked<4>(3);
        quads[3] = line.masked<6>(3);
    }
};

template <>
struct Coded<3> {
    static constexpr int step = 32, bytes = 192;
    static void unpack(const uint8_t* p, Quads* quads) {
        const Quads a = Quads::load(p), b = Quads::load(p + 64), c = Quads::load(p + 128);
        quads[0] = a.masked<0>(7);
        quads[1] = a.masked<3>(7);
        quads[2] = b.masked<0>(7);
        quads[3] = b.masked<3>(7);
        quads[4] = c.masked<0>(7);
        quads[5] = c.masked<3>(7);
        quads[6] = a.masked<6>(3).with<4>(c, 4);
        quads[7] = b.masked<6>(3).with<5>(c, 4);
    }
};

template <>
struct Coded<4> {
    static constexpr int step = 8, bytes = 64;
    static void unpack(const uint8_t* p, Quads* quads) {
        const Quads line = Quads::load(p);
        quads[0] = line.masked<0>(15);
        quads[1] = line.masked<4>(15);
    }
};

template <>
struct Coded<5> {
    static constexpr int step = 32, bytes = 320;
    static void unpack(const uint8_t* p, Quads* quads) {
        const Quads fifth = Quads::load(p + 256);
        for (int i = 0; i < 4; ++i) Coded<4>::unpack(p + 64 * i, quads + 2 * i);
        quads[0] = quads[0].with<-4>(fifth, 16);
        quads[1] = quads[1].with<-3>(fifth, 16);
        quads[2] = quads[2].with<-2>(fifth, 16);
        quads[3] = quads[3].with<-1>(fifth, 16);
        quads[4] = quads[4].with<0>(fifth, 16);
        quads[5] = quads[5].with<1>(fifth, 16);
        quads[6] = quads[6].with<2>(fifth, 16);
        quads[7] = quads[7].with<3>(fifth, 16);
    }
};

template <>
struct Coded<6> {
    static constexpr int step = 16, bytes = 192;
    static void unpack(const uint8_t* p, Quads* quads) {
        const Quads high = Quads::load(p + 128);
        Coded<4>::unpack(p, quads);
        Coded<4>::unpack(p + 64, quads + 2);
        quads[0] = quads[0].with<-4>(high, 48);
        quads[1] = quads[1].with<-2>(high, 48);
        quads[2] = quads[2].with<0>(high, 48);
        quads[3] = quads[3].with<2>(high, 48);
    }
};

template <>
struct Coded<8> {
    static constexpr int step = 4, bytes = 64;
    static void unpack(const uint8_t* p, Quads* quads) { quads[0] = Quads::load(p); }
};

template <>
struct Coded<4, Scale::Exponent> {
    static constexpr int step = 8, bytes = 64;
    static void unpack(const uint8_t* p, Quads* quads) {
        Coded<4>::unpack(p, quads);
        quads[0] = quads[0].of_table(FLOAT4_CODES);
        quads[1] = quads[1].of_table(FLOAT4_CODES);
    }
};

// Stored signed, unpacked with 128 added like other 8-bit codes.
template <>
struct Coded<8, Scale::Row> {
    static constexpr int step = 4, bytes = 64;
    static void unpack(const uint8_t* p, Quads* quads) { quads[0] = Quads::load(p).flipped(); }
};

template <Pack P>
using CodedOf = Coded<LAYOUTS[P].bits, LAYOUTS[P].scale>;

// Where the scales of a block are, relative to those of the first one. `own`: the layout at run time.
template <Pack P>
static inline int64_t scales_of_block(const PackLayout& own, int64_t block) {
    constexpr PackLayout kind = LAYOUTS[P];
    if constexpr (kind.scale == Scale::Row) return 0;
    if constexpr (kind.block != 32 || kind.scale != Scale::Half) return block * kind.scale_bytes();
    return (block >> own.shift) * (kind.zeros ? own.scale_bytes() : kind.scale_bytes());
}

// Whether a minimum or a zero point is part of each weight: known at run time if only some packs of a kind have zeros.
template <Pack P>
static inline bool lowered(const PackLayout& own) {
    return LAYOUTS[P].minimum != 0 || P == PACK4Z || (LAYOUTS[P].zeros && own.zeros);
}

// Every kernel takes time to compile: kinds after PACK8 have kernels for one row and for `most` rows only. Other row
// counts are split.
static constexpr bool has_all_row_counts(Pack pack) { return pack <= PACK8 || pack == PACK16; }
static constexpr int rows_at_once(Pack pack, int rows, int most) {
    return has_all_row_counts(pack) ? (rows < most ? rows : most) : rows >= most ? most : 1;
}

// Scales and minima of sixteen outputs, for a group of the block whose scales are at p.
template <Pack P>
struct PackScales {
    static constexpr PackLayout layout = LAYOUTS[P];

    static Lanes scale(const uint8_t* p, int group) {
        if constexpr (layout.scale == Scale::Exponent) return Lanes::exponents(load_bytes(p));
        if constexpr (layout.scale == Scale::Row) return Lanes::load(reinterpret_cast<const float*>(p));
        const Lanes d = Lanes::load_half(p);
        const uint8_t* fine = p + layout.fine_at() + 16 * group;
        if constexpr (layout.fine == Fine::Signed) return d * Lanes::from_signed(load_bytes(fine));
        if constexpr (layout.fine == Fine::Unsigned) return d * Lanes::from_unsigned(load_bytes(fine));
        if constexpr (layout.fine == Fine::Nibbles) return d * Lanes::from_unsigned(load_bytes(fine) & 15);
        return d;
    }

    // Added or subtracted, depending on the layout; zero points are subtracted.
    static Lanes minimum(const uint8_t* p, int group) {
        if constexpr (layout.zeros) return scale(p, group) * Lanes::from_unsigned(load_bytes(p + 32));
        const Lanes m = Lanes::load_half(p + 32);
        const uint8_t* fine = p + layout.fine_at() + 16 * group;
        if constexpr (layout.fine == Fine::Unsigned)
            return m * Lanes::from_unsigned(load_bytes(fine + 16 * layout.groups()));
        if constexpr (layout.fine == Fine::Nibbles) return m * Lanes::from_unsigned(load_bytes(fine) >> 4);
        return m;
    }
};

static constexpr void offer_packs(Kernels& table) {
    for (int i = 0; i < PACKS; ++i)
        table.packs[i] = {LAYOUTS[i].name, LAYOUTS[i].block, layout_of(i).scale_bytes() + LAYOUTS[i].code_bytes()};
}
