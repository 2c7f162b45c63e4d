#include "packing.hpp"

#include <cstring>

#include "isa.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

// One output's block of a pack: the contents of a GGUF block in the pack's terms.
struct Block {
    uint8_t codes[256];
    uint16_t d, m;  // float16
    uint8_t scales[16], minimums[16];
};

uint16_t half_at(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return bits;
}

// The readers, one per GGUF format. If a byte holds several weights, they are half a run apart.

void read_nibbles(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = p[i] & 15;
        codes[i + 16] = p[i] >> 4;
    }
}

void add_fifth_bits(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < 32; ++i) codes[i] |= (p[i / 8] >> i % 8 & 1) << 4;
}

void read_q4_0(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    read_nibbles(p + 2, b.codes);
}

void read_q4_1(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    b.m = half_at(p + 2);
    read_nibbles(p + 4, b.codes);
}

void read_q5_0(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    read_nibbles(p + 6, b.codes);
    add_fifth_bits(p + 2, b.codes);
}

void read_q5_1(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    b.m = half_at(p + 2);
    read_nibbles(p + 8, b.codes);
    add_fifth_bits(p + 4, b.codes);
}

void read_q8_0(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    for (int i = 0; i < 32; ++i) b.codes[i] = p[2 + i] ^ 0x80;  // an int8, plus 128
}

void read_q2_k(const uint8_t* p, Block& b) {
    b.d = half_at(p + 80);
    b.m = half_at(p + 82);
    for (int g = 0; g < 16; ++g) {
        b.scales[g] = p[g] & 15;
        b.minimums[g] = p[g] >> 4;
    }
    for (int i = 0; i < 256; ++i) b.codes[i] = p[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
}

void read_q3_k(const uint8_t* p, Block& b) {
    b.d = half_at(p + 108);
    const uint8_t* scales = p + 96;
    for (int g = 0; g < 16; ++g) {
        const int low = g < 8 ? scales[g] & 15 : scales[g - 8] >> 4, high = scales[8 + g % 4] >> g / 4 * 2 & 3;
        b.scales[g] = uint8_t((low | high << 4) - 32);
    }
    for (int i = 0; i < 256; ++i)
        b.codes[i] = (p[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) | (p[i % 32] >> i / 32 & 1) << 2;
}

void read_six_bit_scales(const uint8_t* p, Block& b) {
    for (int g = 0; g < 4; ++g) {
        b.scales[g] = p[g] & 63;
        b.minimums[g] = p[g + 4] & 63;
        b.scales[g + 4] = (p[g + 8] & 15) | p[g] >> 6 << 4;
        b.minimums[g + 4] = p[g + 8] >> 4 | p[g + 4] >> 6 << 4;
    }
}

void read_q4_k(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    b.m = half_at(p + 2);
    read_six_bit_scales(p + 4, b);
    for (int i = 0; i < 256; ++i) b.codes[i] = p[16 + i / 64 * 32 + i % 32] >> i % 64 / 32 * 4 & 15;
}

void read_q5_k(const uint8_t* p, Block& b) {
    b.d = half_at(p);
    b.m = half_at(p + 2);
    read_six_bit_scales(p + 4, b);
    for (int i = 0; i < 256; ++i)
        b.codes[i] = (p[48 + i / 64 * 32 + i % 32] >> i % 64 / 32 * 4 & 15) | (p[16 + i % 32] >> i / 32 & 1) << 4;
}

void read_q6_k(const uint8_t* p, Block& b) {
    b.d = half_at(p + 208);
    std::memcpy(b.scales, p + 192, 16);
    for (int i = 0; i < 256; ++i)
        b.codes[i] = (p[i / 128 * 64 + i % 64] >> i % 128 / 64 * 4 & 15) |
                     (p[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3) << 4;
}

struct Source {
    int pack;
    void (*read)(const uint8_t*, Block&);
};

Source source_of(int format) {
    switch (format) {
        case Q4_0: return {PACK4, read_q4_0};
        case Q4_1: return {PACK4M, read_q4_1};
        case Q5_0: return {PACK5, read_q5_0};
        case Q5_1: return {PACK5M, read_q5_1};
        case Q8_0: return {PACK8, read_q8_0};
        case Q2_K: return {PACK4SM, read_q2_k};
        case Q3_K: return {PACK4S, read_q3_k};
        case Q4_K: return {PACK4K, read_q4_k};
        case Q5_K: return {PACK5K, read_q5_k};
        case Q6_K: return {PACK6S, read_q6_k};
        case BF16: return {PACK16, nullptr};
        default: return {-1, nullptr};
    }
}

// Block `at` of row `output` of a group format; d and zeros are read elsewhere.
void read_grouped(const PackLayout& layout, const uint8_t* codes, Block& b) {
    if (layout.scale == Scale::Exponent) return read_nibbles(codes + 1, b.codes);
    if (layout.scale == Scale::Row) return void(std::memcpy(b.codes, codes, 32));
    for (int i = 0; i < 32; ++i) {
        if (layout.bits == 8)
            b.codes[i] = codes[i] ^ 0x80;
        else if (layout.bits == 4)
            b.codes[i] = codes[i / 2] >> i % 2 * 4 & 15;
        else
            b.codes[i] = 0;
        for (int bit = 0; layout.bits < 4 && bit < layout.bits; ++bit)
            b.codes[i] |= (codes[4 * bit + i / 8] >> i % 8 & 1) << bit;
    }
}

// Lane `output` of a block, in both directions.

// Visits the pieces of a code: calls piece(byte of the block, its bit, the code's bit, number of bits).
template <class Piece>
void each_piece(const PackLayout& layout, int k, int output, Piece piece) {
    const int quad = k / 4, lane = output * 4 + k % 4;
    switch (layout.bits) {
        case 2: return piece(quad / 4 * 64 + lane, quad % 4 * 2, 0, 2);
        case 3:
            if (quad < 6) return piece(quad / 2 * 64 + lane, quad % 2 * 3, 0, 3);
            piece(quad % 2 * 64 + lane, 6, 0, 2);
            return piece(128 + lane, quad, 2, 1);
        case 4: return piece(quad / 2 * 64 + lane, quad % 2 * 4, 0, 4);
        case 5:
            piece(quad / 8 * 320 + quad % 8 / 2 * 64 + lane, quad % 2 * 4, 0, 4);
            return piece(quad / 8 * 320 + 256 + lane, quad % 8, 4, 1);
        case 6:
            piece(quad / 4 * 192 + quad % 4 / 2 * 64 + lane, quad % 2 * 4, 0, 4);
            return piece(quad / 4 * 192 + 128 + lane, quad % 4 * 2, 4, 2);
        default: return piece(quad * 64 + lane, 0, 0, 8);
    }
}

uint32_t four_codes(const uint8_t* p) {
    uint32_t word;
    std::memcpy(&word, p, 4);
    return word;
}

void put(uint8_t* p, uint32_t word) { std::memcpy(p, &word, 4); }

// The low four bits of two quads per word, and so on for 8 k each.
void write_nibbles(const uint8_t* codes, int count, uint8_t* out) {
    for (int k = 0; k < count; k += 8, out += 64)
        put(out, (four_codes(codes + k) & 0x0f0f0f0f) | (four_codes(codes + k + 4) & 0x0f0f0f0f) << 4);
}

// Bits [from, from + count) of `quads` quads, one after the other in a word.
uint32_t gathered(const uint8_t* codes, int quads, int from, int count) {
    uint32_t word = 0;
    const uint32_t mask = 0x01010101u * ((1u << count) - 1);
    for (int quad = 0; quad < quads; ++quad) word |= (four_codes(codes + 4 * quad) >> from & mask) << count * quad;
    return word;
}

// A block's codes at the positions of each_piece, four at a time: they are adjacent.
void write_codes(const PackLayout& layout, const uint8_t* codes, uint8_t* out) {
    switch (layout.bits) {
        case 2:
            put(out, gathered(codes, 4, 0, 2));
            return put(out + 64, gathered(codes + 16, 4, 0, 2));
        case 3:
            put(out, gathered(codes, 2, 0, 3) | gathered(codes + 24, 1, 0, 2) << 6);
            put(out + 64, gathered(codes + 8, 2, 0, 3) | gathered(codes + 28, 1, 0, 2) << 6);
            return put(out + 128, gathered(codes + 16, 2, 0, 3) | gathered(codes + 24, 2, 2, 1) << 6);
        case 4: return write_nibbles(codes, layout.block, out);
        case 5:
            for (int k = 0; k < layout.block; k += 32, codes += 32, out += 320) {
                write_nibbles(codes, 32, out);
                put(out + 256, gathered(codes, 8, 4, 1));
            }
            return;
        case 6:
            for (int k = 0; k < layout.block; k += 16, codes += 16, out += 192) {
                write_nibbles(codes, 16, out);
                put(out + 128, gathered(codes, 4, 4, 2));
            }
            return;
        default:
            for (int k = 0; k < layout.block; k += 4) put(out + 16 * k, four_codes(codes + k));
    }
}

void write_block(const PackLayout& layout, const Block& b, int output, uint8_t* scales, uint8_t* codes) {
    std::memcpy(scales + 2 * output, &b.d, 2);
    if (layout.minimum) std::memcpy(scales + 32 + 2 * output, &b.m, 2);
    uint8_t* fine = scales + layout.fine_at() + output;
    for (int g = 0; layout.fine != Fine::None && g < layout.groups(); ++g) {
        fine[16 * g] = layout.fine == Fine::Nibbles ? uint8_t(b.scales[g] | b.minimums[g] << 4) : b.scales[g];
        if (layout.fine == Fine::Unsigned) fine[16 * (layout.groups() + g)] = b.minimums[g];
    }
    write_codes(layout, b.codes, codes + 4 * output);
}

void read_block(const PackLayout& layout, Block& b, int output, const uint8_t* scales, const uint8_t* codes) {
    b = {};
    b.d = half_at(scales + 2 * output);
    if (layout.minimum) b.m = half_at(scales + 32 + 2 * output);
    const uint8_t* fine = scales + layout.fine_at() + output;
    for (int g = 0; layout.fine != Fine::None && g < layout.groups(); ++g) {
        b.scales[g] = layout.fine == Fine::Nibbles ? fine[16 * g] & 15 : fine[16 * g];
        if (layout.fine == Fine::Nibbles) b.minimums[g] = fine[16 * g] >> 4;
        if (layout.fine == Fine::Unsigned) b.minimums[g] = fine[16 * (layout.groups() + g)];
    }
    for (int k = 0; k < layout.block; ++k)
        each_piece(layout, k, output, [&](int byte, int bit, int from, int count) {
            b.codes[k] |= uint8_t((codes[byte] >> bit & ((1 << count) - 1)) << from);
        });
}

struct PackingJob {
    PackLayout layout;
    void (*read)(const uint8_t*, Block&);  // null: the weights are dense
    const uint8_t* blocks;
    int64_t block_bytes;
    uint8_t* packed;
    int64_t outputs, inner;
};

int64_t dense_place(int64_t k, int64_t output) { return k / 2 * 64 + output % PACK_OUTPUTS * 4 + k % 2 * 2; }

// Pairs of k are adjacent on both sides; an odd last one is alone.
void write_dense(const PackingJob& job, int64_t begin, int64_t end) {
    const int64_t size = job.layout.bytes(job.inner), step = job.layout.block;
    std::memset(job.packed + begin * size, 0, size_t((end - begin) * size));
    for (int64_t pack = begin; pack < end; ++pack)
        for (int64_t from = 0; from < job.inner; from += step) {
            const int64_t to = job.inner - from < step ? job.inner : from + step;
            for (int64_t i = pack * PACK_OUTPUTS; i < (pack + 1) * PACK_OUTPUTS && i < job.outputs; ++i) {
                const uint8_t* row = job.blocks + i * job.inner * 2;
                for (int64_t k = from; k < to; k += 2)
                    std::memcpy(job.packed + pack * size + dense_place(k, i), row + k * 2, k + 1 < to ? 4 : 2);
            }
        }
}

void read_dense(const PackLayout& layout, const uint8_t* packed, float* out, int64_t outputs, int64_t inner) {
    for (int64_t i = 0; i < outputs; ++i)
        for (int64_t k = 0; k < inner; ++k) {
            const uint8_t* pack = packed + i / PACK_OUTPUTS * layout.bytes(inner);
            const uint32_t wide = uint32_t(half_at(pack + dense_place(k, i))) << 16;
            std::memcpy(out + i * inner + k, &wide, 4);
        }
}

void write_packs(const PackingJob& job, int64_t begin, int64_t end) {
    const int64_t blocks = job.inner / job.layout.block, size = job.layout.bytes(job.inner);
    // The last pack may have fewer than sixteen outputs.
    if (end * PACK_OUTPUTS > job.outputs) std::memset(job.packed + begin * size, 0, size_t((end - begin) * size));
    Block block = {};
    for (int64_t i = begin * PACK_OUTPUTS; i < end * PACK_OUTPUTS && i < job.outputs; ++i) {
        uint8_t* scales = job.packed + i / PACK_OUTPUTS * size;
        uint8_t* codes = scales + job.layout.codes_at(job.inner);
        for (int64_t at = 0; at < blocks; ++at) {
            job.read(job.blocks + (i * blocks + at) * job.block_bytes, block);
            write_block(job.layout, block, int(i % PACK_OUTPUTS), scales + at * job.layout.scale_bytes(),
                        codes + at * job.layout.code_bytes());
        }
    }
}

struct GroupingJob {
    PackLayout layout;
    GroupedWeights from;
    uint8_t* packed;
    int64_t outputs, inner;
};

// The scales and zero points of one output.
void write_scales(const GroupingJob& job, int64_t output, uint8_t* scales) {
    const PackLayout& layout = job.layout;
    const int64_t count = layout.scales(job.inner), lane = output % PACK_OUTPUTS;
    for (int64_t at = 0; at < count; ++at, scales += layout.scale_bytes()) {
        const int64_t place = output * count + at;
        if (layout.scale == Scale::Row) std::memcpy(scales + 4 * lane, job.from.scales + 4 * place, 4);
        if (layout.scale == Scale::Half) std::memcpy(scales + 2 * lane, job.from.scales + 2 * place, 2);
        if (layout.scale == Scale::Exponent) scales[lane] = job.from.codes[17 * place] - 1;  // FLOAT4_CODES are doubled
        if (layout.zeros) scales[32 + lane] = job.from.zeros[place];
    }
}

void write_grouped(const GroupingJob& job, int64_t begin, int64_t end) {
    const PackLayout& layout = job.layout;
    const int64_t blocks = job.inner / 32, size = layout.bytes(job.inner);
    const int64_t block_bytes = layout.scale == Scale::Exponent ? 17 : 4 * layout.bits;
    if (end * PACK_OUTPUTS > job.outputs) std::memset(job.packed + begin * size, 0, size_t((end - begin) * size));
    Block block = {};
    for (int64_t i = begin * PACK_OUTPUTS; i < end * PACK_OUTPUTS && i < job.outputs; ++i) {
        uint8_t* pack = job.packed + i / PACK_OUTPUTS * size;
        uint8_t* codes = pack + layout.codes_at(job.inner) + 4 * (i % PACK_OUTPUTS);
        write_scales(job, i, pack);
        for (int64_t at = 0; at < blocks; ++at) {
            read_grouped(layout, job.from.codes + (i * blocks + at) * block_bytes, block);
            write_codes(layout, block.codes, codes + at * layout.code_bytes());
        }
    }
}

void read_grouped_back(const PackLayout& layout, const uint8_t* packed, float* out, int64_t outputs, int64_t inner) {
    for (int64_t i = 0; i < outputs; ++i) {
        const int lane = int(i % PACK_OUTPUTS);
        const uint8_t* pack = packed + i / PACK_OUTPUTS * layout.bytes(inner);
        for (int64_t k = 0; k < inner; ++k) {
            const uint8_t* scales = pack + layout.scales_at(k / 32);
            uint8_t code = 0;
            each_piece(layout, int(k % 32), lane, [&](int byte, int bit, int from, int count) {
                const uint8_t* codes = pack + layout.codes_at(inner) + k / 32 * layout.code_bytes();
                code |= uint8_t((codes[byte] >> bit & ((1 << count) - 1)) << from);
            });
            float d[16];
            if (layout.scale == Scale::Row) std::memcpy(d, scales, 64);
            if (layout.scale == Scale::Half) kernels().dequantize[F16](scales, d, 1);
            const uint32_t exponent = uint32_t(scales[lane]) << 23;
            if (layout.scale == Scale::Exponent) std::memcpy(d + lane, &exponent, 4);
            const int value = layout.scale == Scale::Row        ? int8_t(code)
                              : layout.scale == Scale::Exponent ? FLOAT4_CODES[code] - layout.offset
                                                                : code - (layout.zeros ? scales[32 + lane] : layout.offset);
            out[i * inner + k] = d[lane] * float(value);
        }
    }
}

// Whether a pack is written by pack_groups only.
bool grouped(int pack) { return pack != kind_of(pack) || (kind_of(pack) >= PACK4Z && kind_of(pack) <= PACK8R); }

}  // namespace

void pack_groups(int pack, const GroupedWeights& weights, uint8_t* out, int64_t outputs, int64_t inner) {
    const GroupingJob job{layout_of(pack), weights, out, outputs, inner};
    parallel(units_of(outputs) * 2, 2, [](const void* p, int64_t begin, int64_t end) {
        write_grouped(*static_cast<const GroupingJob*>(p), begin, end);
    }, &job);
}

int pack_of(int format) { return source_of(format).pack; }

void pack_weights(int format, const uint8_t* blocks, uint8_t* out, int64_t outputs, int64_t inner) {
    const Source source = source_of(format);
    const PackingJob job{LAYOUTS[source.pack], source.read, blocks, kernels().facts[format].bytes, out, outputs, inner};
    parallel(units_of(outputs) * 2, 2, [](const void* p, int64_t begin, int64_t end) {
        const PackingJob& each = *static_cast<const PackingJob*>(p);
        each.read ? write_packs(each, begin, end) : write_dense(each, begin, end);
    }, &job);
}

void unpack_weights(int pack, const uint8_t* packed, float* out, int64_t outputs, int64_t inner) {
    const PackLayout layout = layout_of(pack);
    if (grouped(pack)) return read_grouped_back(layout, packed, out, outputs, inner);
    if (layout.dense()) return read_dense(layout, packed, out, outputs, inner);
    for (int64_t i = 0; i < outputs; ++i) {
        const int lane = int(i % PACK_OUTPUTS);
        const uint8_t* scales = packed + i / PACK_OUTPUTS * layout.bytes(inner);
        const uint8_t* codes = scales + layout.codes_at(inner);
        for (int64_t at = 0; at < inner; at += layout.block) {
            float d[16], m[16];
            kernels().dequantize[F16](scales, d, 1);
            kernels().dequantize[F16](scales + 32, m, 1);
            Block b;
            read_block(layout, b, lane, scales, codes);
            for (int k = 0; k < layout.block; ++k) {
                const int g = k / layout.group;
                float scale = d[lane], minimum = m[lane];
                if (layout.fine == Fine::Signed) scale *= float(int8_t(b.scales[g]));
                if (layout.fine == Fine::Unsigned || layout.fine == Fine::Nibbles) {
                    scale *= float(b.scales[g]);
                    minimum *= float(b.minimums[g]);
                }
                float weight = scale * float(b.codes[k] - layout.offset);
                if (layout.minimum) weight += float(layout.minimum) * minimum;
                out[i * inner + at + k] = weight;
            }
            scales += layout.scale_bytes();
            codes += layout.code_bytes();
        }
    }
}

}  // namespace bankfull
