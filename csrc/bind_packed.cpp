// Packed weights for Python. Tensors are passed as addresses, as in module.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "isa.hpp"
#include "bindings.hpp"
#include "operations.hpp"
#include "hadamard.hpp"
#include "packing.hpp"

namespace nb = nanobind;
using namespace bankfull;

namespace {

void require(bool fine, const char* message) {
    if (!fine) throw std::invalid_argument(message);
}

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

PackLayout checked(int pack) {
    require(is_pack(pack), "unknown pack");
    return layout_of(pack);
}

void require_whole_blocks(int pack, int64_t outputs, int64_t inner) {
    require(outputs >= 0 && checked(pack).holds(inner), "packed weights: K is not a multiple of whole blocks");
}

// int8 codes are not multiplied with dense weights.
void require_products(int pack, bool tiles) {
    require(tiles || !checked(pack).dense(), "packed weights: dense weights are multiplied with tiles only");
}

int64_t bytes_of(int pack, int64_t outputs, int64_t inner) {
    require_whole_blocks(pack, outputs, inner);
    return packed_bytes(pack, outputs, inner);
}

void pack(int format, uintptr_t blocks, uintptr_t out, int64_t outputs, int64_t inner) {
    require(format >= 0 && format < FORMATS && pack_of(format) >= 0, "pack: no pack holds this format");
    require_whole_blocks(pack_of(format), outputs, inner);
    if (outputs == 0) return;
    require(blocks && out, "pack: a null address");
    pack_weights(format, pointer<uint8_t>(blocks), pointer<uint8_t>(out), outputs, inner);
}

// `group`: columns per scale, a multiple of 32; 0: those of the kind.
int group_pack(int kind, int64_t group, bool zeros) {
    require(group == 0 || group == 32 || group == 64 || group == 128, "group_pack: a group has 32, 64 or 128 columns");
    const int pack = pack_with(kind, group == 128 ? 2 : group == 64, zeros);
    require(kind >= 0 && is_pack(pack), "group_pack: no such pack");
    return pack;
}

void pack_grouped(int pack, uintptr_t codes, uintptr_t scales, uintptr_t zeros, uintptr_t out, int64_t outputs, int64_t inner) {
    require_whole_blocks(pack, outputs, inner);
    const PackLayout layout = checked(pack);
    require(layout.block == 32 && !layout.dense() && layout.minimum == 0 && layout.bits % 5 != 0, "pack_groups: not a pack of groups");
    if (outputs == 0) return;
    require(codes && out && (scales || layout.scale == Scale::Exponent) && (zeros || !layout.zeros), "pack_groups: a null address");
    pack_groups(pack, {pointer<uint8_t>(codes), pointer<uint8_t>(scales), pointer<uint8_t>(zeros)}, pointer<uint8_t>(out), outputs, inner);
}

void unpack(int pack, uintptr_t weight, uintptr_t out, int64_t outputs, int64_t inner) {
    require_whole_blocks(pack, outputs, inner);
    if (outputs == 0) return;
    require(weight && out, "unpack: a null address");
    unpack_weights(pack, pointer<uint8_t>(weight), pointer<float>(out), outputs, inner);
}

int64_t hadamard_bytes_of(int pack, int64_t outputs, int64_t inner) {
    require_whole_blocks(pack, outputs, inner);
    return hadamard_bytes(pack, outputs, inner);
}

void hadamard(int pack, uintptr_t weight, uintptr_t copy, int64_t outputs, int64_t inner) {
    require(hadamard_bytes_of(pack, outputs, inner) > 0 || outputs == 0, "hadamard: these weights have no Hadamard copy");
    if (outputs == 0) return;
    require(weight && copy, "hadamard: a null address");
    hadamard_weights(pack, pointer<uint8_t>(weight), pointer<uint8_t>(copy), outputs, inner);
}

Encoded encoded_at(uintptr_t address, int64_t stride, int64_t columns, bool tiles) {
    require(address % 4 == 0 && stride % 4 == 0 && stride >= encoded_stride(columns),
            "encoded rows: the stride is too short, or not a multiple of four bytes");
    return {pointer<uint8_t>(address), stride, tiles ? Activations::Tiles : Activations::Codes};
}

void encode(uintptr_t x, int64_t x_stride, int64_t rows, int64_t columns, uintptr_t out, int64_t out_stride,
            bool tiles) {
    require(rows >= 0 && columns > 0 && (tiles || columns % 32 == 0), "encode: codes need a multiple of 32 columns");
    if (rows == 0) return;
    require(x && out, "encode: a null address");
    run_encode({pointer<float>(x), x_stride, columns, encoded_at(out, out_stride, columns, tiles)}, rows);
}

using Part = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int>;

void packed_linear(bool tiles, uintptr_t x, int64_t x_stride, int64_t rows, int64_t inner,
                   const std::vector<Part>& given, int gate, uintptr_t out, int64_t out_stride, bool out_tiles) {
    require(rows >= 0 && inner > 0, "packed_linear: sizes must be positive");
    std::vector<PackedPart> parts;
    for (const auto& [weight, hadamard, bias, y, y_stride, outputs, pack] : given) {
        require_whole_blocks(pack, outputs, inner);
        require_products(pack, tiles);
        require(weight || outputs == 0, "packed_linear: a null address");
        require(!hadamard || hadamard_bytes(pack, outputs, inner) > 0, "packed_linear: these weights have no Hadamard copy");
        require((y && y_stride >= outputs) || gate >= 0 || rows == 0 || outputs == 0,
                "packed_linear: no room for the results");
        parts.push_back({pointer<uint8_t>(weight), pointer<float>(bias), pointer<float>(y), y_stride, outputs, pack,
                         pointer<uint8_t>(hadamard)});
    }
    Encoded target{};
    if (gate >= 0) {
        require(gate == SILU || gate == GELU || gate == GELU_TANH || gate == RELU, "packed_linear: unknown gate");
        require(parts.size() == 2 && parts[0].outputs == parts[1].outputs, "packed_linear: a gate needs two equal parts");
        require(out || (parts[0].y && parts[0].y_stride >= parts[0].outputs), "packed_linear: no room for the results");
        if (out) {
            require(parts[0].outputs % 32 == 0, "packed_linear: encoded results need groups of 32");
            target = encoded_at(out, out_stride, parts[0].outputs, out_tiles);
        }
    }
    if (rows == 0 || parts.empty()) return;
    require(x, "packed_linear: a null address");
    run_packed({encoded_at(x, x_stride, inner, tiles), rows, inner, parts.data(), int64_t(parts.size()), gate, target, {}});
}

// Argmax over the outputs of each float row, as int64; see run_packed_best.
void packed_best(uintptr_t x, int64_t rows, int64_t inner, uintptr_t weight, uintptr_t hadamard, uintptr_t bias,
                 int64_t outputs, int pack, bool int8, uintptr_t best) {
    require(rows >= 0 && inner > 0 && outputs > 0, "packed_best: sizes must be positive");
    require_whole_blocks(pack, outputs, inner);
    const Activations kind = encoding_of(rows, int8 ? Rounding::Int8 : Rounding::BFloat16);
    require_products(pack, kind == Activations::Tiles);
    if (rows == 0) return;
    require(x && weight && best, "packed_best: a null address");
    const int64_t stride = encoded_stride(inner);
    thread_local std::vector<uint8_t> memory;  // reused; rows start at multiples of 64 bytes
    if (int64_t(memory.size()) < rows * stride + 64) memory.resize(size_t(rows * stride + 64));
    uint8_t* rows_at = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    const Encoded encoded{rows_at, stride, kind};
    run_encode({pointer<float>(x), inner, inner, encoded}, rows);
    const PackedPart part{pointer<uint8_t>(weight), pointer<float>(bias), nullptr, 0, outputs, pack,
                          pointer<uint8_t>(hadamard)};
    run_packed_best({encoded, rows, inner, &part, 1, -1, {}, {}}, pointer<int64_t>(best));
}

void gather_columns(uintptr_t x, uintptr_t columns, uintptr_t y, int64_t rows, int64_t count, int64_t inner, int64_t x_token) {
    require(rows >= 0 && count >= 0 && inner > 0, "gather_columns: sizes must be positive");
    if (rows == 0 || count == 0) return;
    require(x && columns && y, "gather_columns: a null address");
    check_columns(pointer<int32_t>(columns), count, inner);
    run_gather_columns({pointer<float>(x), pointer<int32_t>(columns), pointer<float>(y), count, x_token}, rows);
}

nb::dict packs() {
    nb::dict found;
    for (int i = 0; i < PACKS; ++i)
        found[kernels().packs[i].name] = nb::make_tuple(i, kernels().packs[i].block, kernels().packs[i].bytes);
    return found;
}

}  // namespace

void bind_packed(nb::module_& m) {
    using Free = nb::call_guard<nb::gil_scoped_release>;
    m.def("packs", &packs, "name -> (pack, weights of one output per block, bytes per block of sixteen outputs)");
    m.def("pack_of", &pack_of, "the pack that represents a format exactly, or -1");
    m.def("packed_bytes", &bytes_of, "pack, outputs, inner");
    m.def("pack", &pack, Free(), "format, blocks, out: addresses; outputs, inner");
    m.def("group_pack", &group_pack, "kind, columns per scale (0: those of the kind), zero points: the pack");
    m.def("pack_groups", &pack_grouped, Free(), "pack, codes, scales (0: in the codes), zeros (0: none), out: addresses; outputs, inner");
    m.def("unpack", &unpack, Free(), "pack, weight, out (floats): addresses; outputs, inner");
    m.def("hadamard_bytes", &hadamard_bytes_of, "pack, outputs, inner: bytes of the Hadamard copy; 0: none on this machine");
    m.def("hadamard", &hadamard, Free(), "pack, weight, the copy: addresses; outputs, inner");
    m.def("encoded_stride", &encoded_stride, "columns: bytes between encoded rows");
    m.def("encode", &encode, Free(),
          "x, its stride in floats, rows, columns, out, its stride in bytes, tiles (or codes)");
    m.def("packed_linear", &packed_linear, Free(),
          "tiles (or codes), x, its stride in bytes, rows, inner, parts: (weight, its Hadamard copy (0: none), bias (0: none), y, y's stride in "
          "floats, outputs, pack), gate (-1: none), out (0: float results), its stride in bytes, tiles (or codes)");
    m.def("packed_best", &packed_best, Free(),
          "x (floats), rows, inner, weight, its Hadamard copy (0: none), bias (0: none), outputs, pack, int8 (or bfloat16 for "
          "any rows), best (int64)");
    m.def("gather_columns", &gather_columns, Free(),
          "x, columns (int32), y, rows, number of columns gathered, those of x, floats between rows of x");
    m.def("tile_rows", [] { return kernels().tile_rows; },
          "row count from which tiles are faster than codes; 0: never");
}
