// Reading packed weights, see packing.hpp. Included inside a namespace per instruction set.

// The codes of `step` consecutive k, which occupy `bytes`.
template <int Bits>
struct Coded;

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

// Scales and minima of sixteen outputs, for a group of the block whose scales are at p.
template <Pack P>
struct PackScales {
    static constexpr PackLayout layout = LAYOUTS[P];

    static Lanes scale(const uint8_t* p, int group) {
        const Lanes d = Lanes::load_half(p);
        const uint8_t* fine = p + layout.fine_at() + 16 * group;
        if constexpr (layout.fine == Fine::Signed) return d * Lanes::from_signed(load_bytes(fine));
        if constexpr (layout.fine == Fine::Unsigned) return d * Lanes::from_unsigned(load_bytes(fine));
        if constexpr (layout.fine == Fine::Nibbles) return d * Lanes::from_unsigned(load_bytes(fine) & 15);
        return d;
    }

    // Added or subtracted, depending on the layout.
    static Lanes minimum(const uint8_t* p, int group) {
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
        table.packs[i] = {LAYOUTS[i].name, LAYOUTS[i].block, LAYOUTS[i].scale_bytes() + LAYOUTS[i].code_bytes()};
}
