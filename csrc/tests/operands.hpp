// Random weights and activation rows, and their values: written as plain loops, independent of the kernels.
#pragma once

#include "checks.hpp"
#include "isa.hpp"
#include "packing.hpp"

namespace checks {

using namespace bankfull;

inline double half_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double size = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    return bits >> 15 ? -size : size;
}

inline double bfloat_value(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// Rounded to the nearest bfloat16, ties to even, by comparing both neighbours.
inline uint16_t to_bfloat(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t below = uint16_t(bits >> 16), above = uint16_t(below + 1);
    const double under = std::fabs(value - bfloat_value(below)), over = std::fabs(bfloat_value(above) - value);
    return under < over || (under == over && below % 2 == 0) ? below : above;
}

// From 2^-12 to 2, either sign, occasionally subnormal.
inline uint16_t random_half(Random& random) {
    const int64_t exponent = random.one_in(20) ? 0 : random.between(4, 15);
    return uint16_t(random.between(0, 1) << 15 | exponent << 10 | random.between(0, 1023));
}

// Byte offsets of a block's float16 values; -1: it has none, or no second one.
struct HalvesAt {
    int first, second;
};

inline HalvesAt halves_of(int format) {
    switch (format) {
        case Q4_0: case Q5_0: case Q8_0: return {0, -1};
        case Q4_1: case Q5_1: case Q4_K: case Q5_K: return {0, 2};
        case Q2_K: return {80, 82};
        case Q3_K: return {108, -1};
        case Q6_K: return {208, -1};
        default: return {-1, -1};
    }
}

// Any bytes are a valid block, but its scales should be finite.
inline Array<uint8_t> random_blocks(Random& random, int format, int64_t count) {
    const FormatFacts& facts = kernels().facts[format];
    Array<uint8_t> blocks(count * facts.bytes);
    for (uint8_t& byte : blocks) byte = uint8_t(random.next());
    const auto put = [&](int64_t at, const void* number, size_t bytes) { std::memcpy(blocks.data() + at, number, bytes); };
    for (int64_t i = 0; i < count; ++i) {
        const HalvesAt at = halves_of(format);
        for (const int place : {at.first, at.second}) {
            const uint16_t half = random_half(random);
            if (place >= 0) put(i * facts.bytes + place, &half, 2);
        }
        for (int64_t j = 0; j < facts.block && at.first < 0; ++j) {
            const float number = random.normal();
            const uint16_t narrow = format == BF16 ? to_bfloat(number) : random_half(random);
            if (format == F32)
                put(i * facts.bytes + j * 4, &number, 4);
            else
                put(i * facts.bytes + j * 2, &narrow, 2);
        }
    }
    return blocks;
}

// Packs of group formats, with and without shared scales and zero points.
constexpr int GROUP_PACKS[] = {
    pack_with(PACK4, 2, false), pack_with(PACK8, 1, false), pack_with(PACK4Z, 0, true),  pack_with(PACK4Z, 2, true), PACK3,
    pack_with(PACK3, 1, true),  PACK2,                      pack_with(PACK2, 2, true),   PACK4F,                     PACK8R,
};

// Codes, scales and zero points of a group format, and the values of the weights.
struct GroupedParts {
    GroupedParts(Random& random, int pack, int64_t rows, int64_t columns, Array<float>& floats)
        : codes(rows * columns * layout_of(pack).bits / 8 + (kind_of(pack) == PACK4F ? rows * columns / 32 : 0)),
          scales(rows * layout_of(pack).scales(columns) * 4), zeros(rows * layout_of(pack).scales(columns)) {
        const PackLayout layout = layout_of(pack);
        const int64_t count = layout.scales(columns);
        for (uint8_t& byte : codes) byte = uint8_t(random.next());
        for (uint8_t& zero : zeros) zero = uint8_t(random.between(0, 1 << layout.bits % 8));
        std::vector<double> wide;
        for (int64_t i = 0; i < rows * count; ++i) {
            const uint16_t half = random_half(random);
            const float number = random.normal();
            std::memcpy(scales.data() + (layout.scale == Scale::Row ? 4 : 2) * i, layout.scale == Scale::Row ? static_cast<const void*>(&number) : &half,
                        layout.scale == Scale::Row ? 4 : 2);
            wide.push_back(layout.scale == Scale::Row ? double(number) : half_value(half));
        }
        static constexpr double halves[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t k = 0; k < columns; ++k) {
                const int64_t place = row * columns + k, group = row * count + (count == 1 ? 0 : k / 32 >> layout.shift);
                double code = 0;
                if (layout.scale == Scale::Exponent) {
                    uint8_t* block = codes.data() + place / 32 * 17;
                    if (k % 32 == 0) block[0] = uint8_t(random.between(118, 130));
                    const int nibble = block[1 + k % 16] >> k % 32 / 16 * 4 & 15;
                    floats[place] = float(std::ldexp(nibble & 8 ? -halves[nibble & 7] : halves[nibble], block[0] - 127));
                    continue;
                }
                if (layout.bits == 8) code = int8_t(codes[place]);
                if (layout.bits == 4) code = codes[place / 2] >> k % 2 * 4 & 15;
                for (int bit = 0; layout.bits < 4 && bit < layout.bits; ++bit)
                    code += (codes[place / 32 * 4 * layout.bits + 4 * bit + k % 32 / 8] >> k % 8 & 1) << bit;
                if (layout.bits < 8) code -= layout.zeros ? zeros[group] : 1 << (layout.bits - 1);
                floats[place] = float(wide[size_t(group)]) * float(code);
            }
    }
    GroupedWeights place() const { return {codes.data(), scales.data(), zeros.data()}; }

    Array<uint8_t> codes, scales, zeros;
};

// A weight in a format's blocks, and its values.
struct Weight {
    Weight(Random& random, int of, int64_t rows, int64_t columns)
        : format(of), outputs(rows), inner(columns), blocks(random_blocks(random, of, count())), floats(rows * columns) {
        kernels().dequantize[format](blocks.data(), floats.data(), count());
    }
    int64_t count() const { return outputs * inner / kernels().facts[format].block; }
    int64_t row_bytes() const { return inner / kernels().facts[format].block * kernels().facts[format].bytes; }
    const float* row(int64_t output) const { return floats.data() + output * inner; }

    int format;
    int64_t outputs, inner;
    Array<uint8_t> blocks;
    Array<float> floats;
};

inline Array<uint8_t> packed(const Weight& weight) {
    Array<uint8_t> packs(packed_bytes(pack_of(weight.format), weight.outputs, weight.inner));
    pack_weights(weight.format, weight.blocks.data(), packs.data(), weight.outputs, weight.inner);
    return packs;
}

// Encoded rows, and the values of their elements.
struct EncodedRows {
    EncodedRows(int64_t count, int64_t size, Activations form)
        : rows(count), columns(size), kind(form), bytes(count * encoded_stride(size), 64) {}
    Encoded place() { return {bytes.data(), encoded_stride(columns), kind}; }
    const uint8_t* row(int64_t number) const { return bytes.data() + number * encoded_stride(columns); }
    int code(int64_t number, int64_t column) const { return reinterpret_cast<const int8_t*>(row(number))[column]; }
    float scale(int64_t number, int64_t column) const {
        return reinterpret_cast<const float*>(row(number) + columns)[column / 32];
    }
    int32_t sum(int64_t number, int64_t column) const {
        return reinterpret_cast<const int32_t*>(row(number) + columns + columns / 8)[column / 16];
    }
    double value(int64_t number, int64_t column) const {
        if (kind == Activations::Codes) return double(code(number, column)) * scale(number, column);
        return bfloat_value(reinterpret_cast<const uint16_t*>(row(number))[column]);
    }
    // Bytes of a row that carry data; the rest is padding.
    int64_t used() const {
        return kind == Activations::Codes ? columns + columns / 8 + columns / 4 : (columns + 31) / 32 * 64;
    }

    int64_t rows, columns;
    Activations kind;
    Array<uint8_t> bytes;
};

inline void expect_same_rows(const EncodedRows& got, const EncodedRows& want, const char* what) {
    for (int64_t row = 0; row < got.rows; ++row) expect_same_bits(got.row(row), want.row(row), want.used(), what);
}

// A sum of products in double precision, and the sum of their magnitudes: a float sum's error grows with it.
struct Sum {
    double value = 0, size = 0;
    void add(double term) {
        value += term;
        size += std::fabs(term);
    }
};

}  // namespace checks
