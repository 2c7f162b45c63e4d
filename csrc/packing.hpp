// Packed weights: their layout, and how GGUF blocks and dense rows are packed. Shared by every instruction set.
//
// A pack is a panel of sixteen outputs over all of K: first the scales of all its blocks, up to a multiple of 64 bytes,
// then the codes of all its blocks. Outputs are padded to whole units of two packs with zero weights.
//
// A block's scales: sixteen float16 d; sixteen float16 m if there is a minimum; then, for groups with integer scales,
// sixteen bytes of scales per group, and then sixteen bytes of minima per group. A block's codes: unsigned, in quads of
// four consecutive k; lane o of a quad is the four codes of output o, one byte each. Quads are stored in the order of
// k. 8 bits: a line of 64 bytes is a quad. 4 bits: the low nibbles of a line are a quad, the high ones the next. 5
// bits: four lines of nibbles, then one whose bits 0 to 7 are the fifth bits of the eight quads. 6 bits: two lines of
// nibbles, then one whose four pairs of bits are the fifth and sixth bits of the four quads. 2 bits: the four pairs of
// bits of a line are four quads. 3 bits: three lines, of which each holds two quads in bits 0 to 5; the top bits of the first
// two are the lower bits of the last two quads, whose third bits are the top bits of the third line: fewer instructions
// than planes of bits. PACK4F: nibbles that stand for 2-bit exponents and 1-bit mantissas with a sign, see FLOAT4_CODES. PACK8R: signed
// bytes.
//
// A weight is (d * scale) * (code - offset), then plus m, or minus m * minimum: rounded in this order, it is bitwise
// equal to the value of the GGUF block.
//
// Blocks of 32 may share their scales: a group of 64 or 128 columns has them once, and its zero points, sixteen bytes
// after d, too: a weight is d * (code - zero). Exponents instead of d are bytes e for 2^(e - 127). PACK8R has sixteen
// float32 d for all of K; its layout is that of a Hadamard copy (hadamard.hpp), so that many rows are multiplied in the
// same tiles.
//
// `int pack`, wherever it is passed, is a Pack and how its scales are stored: see pack_with.
//
// A dense pack has no scales. Its lines of 64 bytes are the bfloat16 weights of two consecutive k, both of an output
// adjacent: the layout that tile registers read in place. The last k is followed by zeros up to whole blocks of K.
#pragma once

#include "kernels.hpp"

namespace bankfull {

constexpr int64_t PACK_OUTPUTS = 16, UNIT_OUTPUTS = 32;

// Integer scales per group of a block.
enum class Fine : int {
    None,
    Signed,    // int8 scales
    Unsigned,  // uint8 scales and minima
    Nibbles,   // scales in the low, minima in the high nibbles of the same bytes
};

// How d is stored.
enum class Scale : int { Half, Exponent, Row };

// Twice the value of each 4-bit float, plus 12.
constexpr uint8_t FLOAT4_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct PackLayout {
    const char* name;
    int block, group;  // weights of one output per d, and per integer sum
    int bits, offset;
    int minimum;  // 0: none, 1: added, -1: subtracted
    Fine fine;
    Scale scale = Scale::Half;
    bool zeros = false;  // in LAYOUTS: whether such packs may have zero points; in layout_of: whether this one has
    int shift = 0;       // 2^shift blocks share their scales

    constexpr bool dense() const { return bits == 16; }
    constexpr int width() const { return scale == Scale::Exponent ? 5 : bits; }  // of a code in a quad
    constexpr bool holds(int64_t inner) const { return inner > 0 && (dense() || inner % (int64_t(block) << shift) == 0); }
    constexpr int64_t blocks(int64_t inner) const { return (inner + block - 1) / block; }
    constexpr int groups() const { return block / group; }
    constexpr int fine_at() const { return minimum ? 64 : 32; }
    constexpr int scale_bytes() const {
        if (dense()) return 0;
        if (scale != Scale::Half) return scale == Scale::Row ? 64 : 16;
        return fine_at() + (fine == Fine::None ? 0 : fine == Fine::Unsigned ? 32 : 16) * groups() + (zeros ? 16 : 0);
    }
    constexpr int64_t scales(int64_t inner) const { return scale == Scale::Row ? 1 : blocks(inner) >> shift; }
    // Scales of a block, counted from those of the first.
    constexpr int64_t scales_at(int64_t number) const { return scale == Scale::Row ? 0 : (number >> shift) * scale_bytes(); }
    // Whether a block is the last of those that share their scales.
    constexpr bool ends_group(int64_t number) const { return ((number + 1) & ((int64_t(1) << shift) - 1)) == 0; }
    constexpr int code_bytes() const { return block * 16 * bits / 8; }
    constexpr int64_t codes_at(int64_t inner) const { return (scales(inner) * scale_bytes() + 63) / 64 * 64; }
    constexpr int64_t bytes(int64_t inner) const { return codes_at(inner) + blocks(inner) * code_bytes(); }
};

constexpr PackLayout LAYOUTS[PACKS] = {
    {"pack4", 32, 32, 4, 8, 0, Fine::None},         {"pack4m", 32, 32, 4, 0, 1, Fine::None},
    {"pack4k", 256, 32, 4, 0, -1, Fine::Unsigned},  {"pack4s", 256, 16, 4, 4, 0, Fine::Signed},
    {"pack4sm", 256, 16, 4, 0, -1, Fine::Nibbles},  {"pack5", 32, 32, 5, 16, 0, Fine::None},
    {"pack5m", 32, 32, 5, 0, 1, Fine::None},        {"pack5k", 256, 32, 5, 0, -1, Fine::Unsigned},
    {"pack6s", 256, 16, 6, 32, 0, Fine::Signed},    {"pack8", 32, 32, 8, 128, 0, Fine::None},
    {"pack4z", 32, 32, 4, 8, 0, Fine::None, Scale::Half, true},
    {"pack3", 32, 32, 3, 4, 0, Fine::None, Scale::Half, true},
    {"pack2", 32, 32, 2, 2, 0, Fine::None, Scale::Half, true},
    {"pack4f", 32, 32, 4, 12, 0, Fine::None, Scale::Exponent},
    {"pack8r", 32, 32, 8, 128, 0, Fine::None, Scale::Row},
    {"pack16", 32, 32, 16, 0, 0, Fine::None},
};

constexpr int KIND_BITS = 5, SHIFT_BITS_OF_PACK = 3, MOST_SHIFT = 2;

// A kind whose scales belong to 2^shift blocks each, with or without zero points.
constexpr int pack_with(int kind, int shift, bool zeros) {
    return kind | shift << KIND_BITS | int(zeros) << (KIND_BITS + SHIFT_BITS_OF_PACK);
}
constexpr int kind_of(int pack) { return pack & ((1 << KIND_BITS) - 1); }
constexpr PackLayout layout_of(int pack) {
    PackLayout layout = LAYOUTS[kind_of(pack)];
    layout.shift = pack >> KIND_BITS & ((1 << SHIFT_BITS_OF_PACK) - 1);
    layout.zeros = pack >> (KIND_BITS + SHIFT_BITS_OF_PACK) & 1;
    return layout;
}
// Only plain blocks of 32 share scales; some kinds may have zero points, and PACK4Z always has.
constexpr bool is_pack(int pack) {
    if (pack < 0 || pack >> (KIND_BITS + SHIFT_BITS_OF_PACK + 1) || kind_of(pack) >= PACKS) return false;
    const PackLayout kind = LAYOUTS[kind_of(pack)], own = layout_of(pack);
    const bool plain = kind.block == 32 && !kind.dense() && kind.minimum == 0 && kind.scale == Scale::Half;
    return (own.shift == 0 || (plain && own.shift <= MOST_SHIFT)) && (own.zeros ? kind.zeros : kind_of(pack) != PACK4Z);
}

constexpr int64_t units_of(int64_t outputs) { return (outputs + UNIT_OUTPUTS - 1) / UNIT_OUTPUTS; }
constexpr int64_t packed_bytes(int pack, int64_t outputs, int64_t inner) {
    return units_of(outputs) * 2 * layout_of(pack).bytes(inner);
}

// The pack that holds a format's weights exactly; -1 if there is none.
int pack_of(int format);

// Rows of a format, one per output, become packs of pack_of(format). Both directions need a K that the pack supports.
void pack_weights(int format, const uint8_t* blocks, uint8_t* out, int64_t outputs, int64_t inner);

// Codes, scales and zero points in arrays of their own, one row per output, as the group formats store them. Codes:
// int8, or pairs of 4 bits with the first in the low half, or for each 32 columns planes of 4 bytes, one per bit. Scales:
// float16 per group, or float32 per row. PACK4F: `codes` are MXFP4 blocks, whose exponents are at least 2; there are no
// other arrays.
struct GroupedWeights {
    const uint8_t *codes, *scales, *zeros;
};
void pack_groups(int pack, const GroupedWeights& weights, uint8_t* out, int64_t outputs, int64_t inner);
void unpack_weights(int pack, const uint8_t* packed, float* out, int64_t outputs, int64_t inner);

}  // namespace bankfull
