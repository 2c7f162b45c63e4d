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
// nibbles, then one whose four pairs of bits are the fifth and sixth bits of the four quads.
//
// A weight is (d * scale) * (code - offset), then plus m, or minus m * minimum: rounded in this order, it is bitwise
// equal to the value of the GGUF block.
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

struct PackLayout {
    const char* name;
    int block, group;  // weights of one output per d, and per integer sum
    int bits, offset;
    int minimum;  // 0: none, 1: added, -1: subtracted
    Fine fine;

    constexpr bool dense() const { return bits == 16; }
    constexpr bool holds(int64_t inner) const { return inner > 0 && (dense() || inner % block == 0); }
    constexpr int64_t blocks(int64_t inner) const { return (inner + block - 1) / block; }
    constexpr int groups() const { return block / group; }
    constexpr int fine_at() const { return minimum ? 64 : 32; }
    constexpr int scale_bytes() const {
        return dense() ? 0 : fine_at() + (fine == Fine::None ? 0 : fine == Fine::Unsigned ? 32 : 16) * groups();
    }
    constexpr int code_bytes() const { return block * 16 * bits / 8; }
    constexpr int64_t codes_at(int64_t inner) const { return (blocks(inner) * scale_bytes() + 63) / 64 * 64; }
    constexpr int64_t bytes(int64_t inner) const { return codes_at(inner) + blocks(inner) * code_bytes(); }
};

constexpr PackLayout LAYOUTS[PACKS] = {
    {"pack4", 32, 32, 4, 8, 0, Fine::None},         {"pack4m", 32, 32, 4, 0, 1, Fine::None},
    {"pack4k", 256, 32, 4, 0, -1, Fine::Unsigned},  {"pack4s", 256, 16, 4, 4, 0, Fine::Signed},
    {"pack4sm", 256, 16, 4, 0, -1, Fine::Nibbles},  {"pack5", 32, 32, 5, 16, 0, Fine::None},
    {"pack5m", 32, 32, 5, 0, 1, Fine::None},        {"pack5k", 256, 32, 5, 0, -1, Fine::Unsigned},
    {"pack6s", 256, 16, 6, 32, 0, Fine::Signed},    {"pack8", 32, 32, 8, 128, 0, Fine::None},
    {"pack16", 32, 32, 16, 0, 0, Fine::None},
};

constexpr int64_t units_of(int64_t outputs) { return (outputs + UNIT_OUTPUTS - 1) / UNIT_OUTPUTS; }
constexpr int64_t packed_bytes(int pack, int64_t outputs, int64_t inner) {
    return units_of(outputs) * 2 * LAYOUTS[pack].bytes(inner);
}

// The pack that holds a format's weights exactly; -1 if there is none.
int pack_of(int format);

// Rows of a format, one per output, become packs of pack_of(format). Both directions need a K that the pack supports.
void pack_weights(int format, const uint8_t* blocks, uint8_t* out, int64_t outputs, int64_t inner);
void unpack_weights(int pack, const uint8_t* packed, float* out, int64_t outputs, int64_t inner);

}  // namespace bankfull
