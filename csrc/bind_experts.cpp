// Routing and experts for Python. Tensors are passed as addresses, as in module.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bind_experts.hpp"
#include "bindings.hpp"
#include "operations.hpp"
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

void route(uintptr_t logits, uintptr_t bias, uintptr_t weights, uintptr_t chosen, int64_t tokens, const RoutingTuple& rule) {
    RouteJob job = routing_of(rule);
    require(tokens >= 0 && (tokens == 0 || (logits && weights && chosen)), "route: a null address");
    job.logits = pointer<float>(logits), job.bias = pointer<float>(bias), job.weights = pointer<float>(weights);
    job.chosen = pointer<int32_t>(chosen), job.tokens = tokens;
    run_route(job);
}

using Matrix = std::tuple<uintptr_t, uintptr_t, int64_t, int>;

// rounding: 0 float32, 1 int8, 2 bfloat16
void expert_mlp(uintptr_t x, uintptr_t chosen, uintptr_t weights, uintptr_t y, int64_t tokens, int64_t per_token,
                int64_t experts, int64_t hidden, int64_t inner, const std::vector<Matrix>& given, int function, int rounding) {
    require(tokens >= 0 && per_token > 0 && experts > 0 && hidden > 0 && inner > 0, "experts: sizes must be positive");
    require(given.size() == 3 && rounding >= 0 && rounding <= 2, "experts: three matrices and a rounding from 0 to 2");
    if (tokens == 0) return;
    require(x && chosen && weights && y, "experts: a null address");
    ExpertMatrix matrices[3];
    for (size_t i = 0; i < 3; ++i) {
        const auto& [data, bias, bytes, kind] = given[i];
        require(data, "experts: a null address");
        const int64_t outputs = i == 2 ? hidden : inner, columns = i == 2 ? inner : hidden;
        if (rounding == 0)
            require(kind >= 0 && kind < FORMATS, "experts: unknown format");
        else
            require(is_pack(kind) && layout_of(kind).holds(columns) && (rounding == 2 || !layout_of(kind).dense()) &&
                        bytes == packed_bytes(kind, outputs, columns),
                    "experts: the packed weights do not fit");
        matrices[i] = {pointer<uint8_t>(data), pointer<float>(bias), bytes, kind};
    }
    Encoded encoded{};
    if (rounding) {
        const int64_t stride = encoded_stride(hidden);
        const Activations kind = encoding_of(tokens, rounding == 1 ? Rounding::Int8 : Rounding::BFloat16);
        require(kind == Activations::Tiles || (hidden % 32 == 0 && inner % 32 == 0), "experts: codes need a multiple of 32 columns");
        thread_local std::vector<uint8_t> memory;  // reused; rows start at multiples of 64 bytes
        if (int64_t(memory.size()) < tokens * stride + 64) memory.resize(size_t(tokens * stride + 64));
        encoded = {memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64, stride, kind};
        run_encode({pointer<float>(x), hidden, hidden, encoded}, tokens);
    }
    run_experts({pointer<float>(x), encoded, pointer<int32_t>(chosen), pointer<float>(weights), pointer<float>(y), tokens,
                 per_token, experts, hidden, inner, matrices[0], matrices[1], matrices[2], function_of_experts(function)});
}

void add_gated(uintptr_t x, uintptr_t delta, uintptr_t gate, uintptr_t y, int64_t tokens, int64_t columns) {
    require(tokens >= 0 && columns > 0, "add_gated: sizes must be positive");
    if (tokens == 0) return;
    require(x && delta && gate && y, "add_gated: a null address");
    run_add_gated(pointer<float>(x), pointer<float>(delta), pointer<float>(gate), pointer<float>(y), tokens, columns);
}

}  // namespace

void bind_experts(nb::module_& m) {
    using Free = nb::call_guard<nb::gil_scoped_release>;
    m.attr("CLAMPED_SWIGLU") = int(CLAMPED_SWIGLU);
    m.def("route", &route, Free(), "logits, bias (0: none), weights, chosen (int32): addresses; tokens; rule: see RoutingTuple");
    m.def("expert_mlp", &expert_mlp, Free(),
          "x, chosen (int32), weights, y: addresses; tokens, per_token, experts, hidden, inner; gate, up, down: (address, bias "
          "(0: none), bytes of one expert, pack or format); activation; rounding: 0 float32, 1 int8, 2 bfloat16");
    m.def("add_gated", &add_gated, Free(), "x, delta, gate, y: addresses; tokens, columns");
}
