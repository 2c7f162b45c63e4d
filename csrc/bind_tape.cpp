// The tape for Python. A place is a tuple (kind, value, offset): see Place.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>

#include "bind_experts.hpp"
#include "bindings.hpp"
#include "choosing_step.hpp"
#include "operations.hpp"
#include "packing.hpp"
#include "tape.hpp"

namespace nb = nanobind;
using namespace bankfull;

namespace {

using At = std::tuple<int, int64_t, int64_t>;
using PagesTuple = std::tuple<At, PageStrides, At, PageStrides>;

Place place(const At& at) {
    const int kind = std::get<0>(at);
    if (kind < Place::NONE || kind > Place::INPUT) throw std::invalid_argument("tape: unknown kind of place");
    return {Place::Kind(kind), std::get<1>(at), std::get<2>(at)};
}

PagesAt pages(const PagesTuple& p) {
    return {place(std::get<0>(p)), std::get<1>(p), place(std::get<2>(p)), std::get<3>(p)};
}

// Codes need their scales.
PageType type_of(int type, const PagesAt& pages) {
    if (type < 0 || type >= PAGE_TYPES || has_scales(PageType(type)) != (pages.scales.kind != Place::NONE))
        throw std::invalid_argument("tape: unknown page type, or scales that do not match it");
    return PageType(type);
}

Format format_of(int format) {
    if (format < 0 || format >= FORMATS) throw std::invalid_argument("tape: unknown weight format");
    return Format(format);
}

void require_pack(int pack, bool int8) {
    if (!is_pack(pack) || (int8 && layout_of(pack).dense()))
        throw std::invalid_argument("tape: unknown pack, or one without int8 products");
}

template <class T>
T& append(Tape& tape, const std::string& name) {
    auto made = std::make_unique<T>();
    T& instruction = *made;
    tape.add(std::move(made), name);
    return instruction;
}

// The tape's last packed step, if it computes the inputs of this intake, in whole units.
PackedStep& product_for(const Tape& tape, const IntakeStep& intake) {
    auto* packed = dynamic_cast<PackedStep*>(tape.last());
    const int64_t queries = intake.heads * intake.size, keys = intake.kv_heads * intake.size;
    const int64_t values = intake.kv_heads * intake.values;
    const bool fits = packed && packed->gate < 0 && packed->parts.size() == 3 && packed->parts[0].outputs == queries &&
                      packed->parts[1].outputs == keys && packed->parts[2].outputs == values;
    if (!fits || intake.size % UNIT_OUTPUTS || intake.values % UNIT_OUTPUTS)
        throw std::invalid_argument("tape: the previous packed step does not compute the inputs of the intake");
    return *packed;
}

// Instruction number -> (name, nanoseconds, runs).
nb::list times(const Tape& tape) {
    nb::list found;
    for (const auto& instruction : tape.instructions())
        found.append(nb::make_tuple(instruction->name, instruction->nanoseconds, instruction->runs));
    return found;
}

}  // namespace

void bind_tape(nb::module_& m) {
    nb::class_<Tape>(m, "Tape")
        .def(nb::init<>())
        .def_rw("inputs", &Tape::inputs)
        .def("__len__", [](const Tape& tape) { return tape.instructions().size(); })
        .def("times", &times, "(name, nanoseconds, runs) of every instruction, from replays with timed=True")
        .def("clear_times", [](Tape& tape) {
            for (const auto& i : tape.instructions()) i->nanoseconds = i->runs = 0;
        })
        .def("replay",
             [](const Tape& tape, uintptr_t arena, int64_t tokens, int64_t sequences,
                const std::vector<std::tuple<uintptr_t, int64_t>>& inputs, int64_t begin, int64_t end, bool timed) {
                 if (tokens < 0 || sequences < 0 || int64_t(inputs.size()) != tape.inputs)
                     throw std::invalid_argument("tape: the step's inputs do not match the tape");
                 std::vector<Input> found;
                 found.reserve(inputs.size());
                 for (const auto& input : inputs) found.push_back({std::get<0>(input), std::get<1>(input)});
                 const nb::gil_scoped_release free;
                 if (tokens) tape.replay({tokens, sequences, reinterpret_cast<uint8_t*>(arena), found.data()}, begin, end, timed);
             },
             nb::arg("arena"), nb::arg("tokens"), nb::arg("sequences"), nb::arg("inputs"), nb::arg("begin"), nb::arg("end"),
             nb::arg("timed") = false)
        .def("embedding",
             [](Tape& tape, const std::string& name, At ids, At table, At y, int format, int64_t count, int64_t columns,
                int64_t row_bytes, float scale) {
                 auto& made = append<EmbeddingStep>(tape, name);
                 made.ids = place(ids), made.table = place(table), made.y = place(y);
                 made.format = format_of(format), made.count = count, made.columns = columns;
                 made.row_bytes = row_bytes, made.scale = scale;
             },
             nb::arg("name"), nb::arg("ids"), nb::arg("table"), nb::arg("y"), nb::arg("format"), nb::arg("count"),
             nb::arg("columns"), nb::arg("row_bytes"), nb::arg("scale"))
        .def("angles",
             [](Tape& tape, const std::string& name, At positions, At frequencies, At cos, At sin, int64_t half, float scale) {
                 auto& made = append<AnglesStep>(tape, name);
                 made.positions = place(positions), made.frequencies = place(frequencies);
                 made.cos = place(cos), made.sin = place(sin), made.half = half, made.scale = scale;
             },
             nb::arg("name"), nb::arg("positions"), nb::arg("frequencies"), nb::arg("cos"), nb::arg("sin"), nb::arg("half"),
             nb::arg("scale"))
        .def("norm",
             [](Tape& tape, const std::string& name, At x, At delta, At joined, At weight, At y, At encoded,
                int64_t per_token, int64_t columns, float eps, float offset) {
                 auto& made = append<NormStep>(tape, name);
                 made.x = place(x), made.delta = place(delta), made.joined = place(joined), made.weight = place(weight);
                 made.y = place(y), made.encoded = place(encoded), made.per_token = per_token;
                 made.columns = columns, made.eps = eps, made.offset = offset;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("delta"), nb::arg("joined"), nb::arg("weight"), nb::arg("y"),
             nb::arg("encoded"), nb::arg("per_token"), nb::arg("columns"), nb::arg("eps"), nb::arg("offset"))
        .def("layer_norm",
             [](Tape& tape, const std::string& name, At x, At weight, At bias, At y, int64_t per_token, int64_t columns,
                float eps) {
                 auto& made = append<LayerNormStep>(tape, name);
                 made.x = place(x), made.weight = place(weight), made.bias = place(bias), made.y = place(y);
                 made.per_token = per_token, made.columns = columns, made.eps = eps;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("y"), nb::arg("per_token"),
             nb::arg("columns"), nb::arg("eps"))
        .def("linear",
             [](Tape& tape, const std::string& name, At x, At weight, At bias, At y, int format, int64_t x_stride,
                int64_t outputs, int64_t inner, int64_t row_bytes) {
                 auto& made = append<LinearStep>(tape, name);
                 made.x = place(x), made.weight = place(weight), made.bias = place(bias), made.y = place(y);
                 made.format = format_of(format), made.x_stride = x_stride, made.outputs = outputs;
                 made.inner = inner, made.row_bytes = row_bytes;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("y"), nb::arg("format"),
             nb::arg("x_stride"), nb::arg("outputs"), nb::arg("inner"), nb::arg("row_bytes"))
        .def("encode",
             [](Tape& tape, const std::string& name, At x, At encoded, int64_t x_stride, int64_t columns) {
                 auto& made = append<EncodeStep>(tape, name);
                 made.x = place(x), made.encoded = place(encoded), made.x_stride = x_stride, made.columns = columns;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("encoded"), nb::arg("x_stride"), nb::arg("columns"))
        .def("packed",
             [](Tape& tape, const std::string& name, At x, At encoded, int64_t inner,
                const std::vector<std::tuple<At, At, At, At, int64_t, int64_t, int>>& parts, int gate, bool int8) {
                 if (parts.empty()) throw std::invalid_argument("tape: packed weights without a part");
                 tape.round(int8 ? Rounding::Int8 : Rounding::BFloat16);
                 auto& made = append<PackedStep>(tape, name);
                 made.x = place(x), made.encoded = place(encoded), made.inner = inner, made.gate = gate;
                 for (const auto& [weight, hadamard, bias, y, y_stride, outputs, pack] : parts) {
                     require_pack(pack, int8);
                     made.parts.push_back({place(weight), place(hadamard), place(bias), place(y), y_stride, outputs, pack});
                 }
             },
             nb::arg("name"), nb::arg("x"), nb::arg("encoded"), nb::arg("inner"), nb::arg("parts"), nb::arg("gate"),
             nb::arg("int8"))
        .def("packed_head",
             [](Tape& tape, const std::string& name, At x, At weight, At hadamard, At bias, At chosen, int64_t inner,
                int64_t outputs, int pack, bool int8) {
                 require_pack(pack, int8);
                 tape.round(int8 ? Rounding::Int8 : Rounding::BFloat16);
                 auto& made = append<PackedHeadStep>(tape, name);
                 made.x = place(x), made.weight = place(weight), made.hadamard = place(hadamard), made.bias = place(bias);
                 made.chosen = place(chosen), made.inner = inner, made.outputs = outputs, made.pack = pack;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("weight"), nb::arg("hadamard"), nb::arg("bias"), nb::arg("chosen"),
             nb::arg("inner"), nb::arg("outputs"), nb::arg("pack"), nb::arg("int8"))
        .def("head",
             [](Tape& tape, const std::string& name, At x, At weight, At bias, At chosen, int format, int64_t x_stride,
                int64_t outputs, int64_t inner, int64_t row_bytes) {
                 auto& made = append<HeadStep>(tape, name);
                 made.x = place(x), made.weight = place(weight), made.bias = place(bias), made.chosen = place(chosen);
                 made.format = format_of(format), made.x_stride = x_stride, made.outputs = outputs;
                 made.inner = inner, made.row_bytes = row_bytes;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("chosen"), nb::arg("format"),
             nb::arg("x_stride"), nb::arg("outputs"), nb::arg("inner"), nb::arg("row_bytes"))
        .def("pointwise",
             [](Tape& tape, const std::string& name, At x, At factor, At y, int kind, int64_t per_token, float parameter) {
                 if (kind < 0 || kind >= POINTWISE) throw std::invalid_argument("tape: unknown function");
                 auto& made = append<PointwiseStep>(tape, name);
                 made.x = place(x), made.factor = place(factor), made.y = place(y);
                 made.kind = Pointwise(kind), made.per_token = per_token, made.parameter = parameter;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("factor"), nb::arg("y"), nb::arg("kind"), nb::arg("per_token"),
             nb::arg("parameter"))
        .def("rotate",
             [](Tape& tape, const std::string& name, At x, At cos, At sin, At y, int64_t heads, int64_t size, int64_t half) {
                 auto& made = append<RotateStep>(tape, name);
                 made.x = place(x), made.cos = place(cos), made.sin = place(sin), made.y = place(y);
                 made.heads = heads, made.size = size, made.half = half;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("cos"), nb::arg("sin"), nb::arg("y"), nb::arg("heads"), nb::arg("size"),
             nb::arg("half"))
        .def("write",
             [](Tape& tape, const std::string& name, At rows, At slots, PagesTuple at, int64_t row_stride, int64_t heads,
                int64_t size, int64_t frames, int64_t page_tokens, int type) {
                 auto& made = append<WriteStep>(tape, name);
                 made.rows = place(rows), made.slots = place(slots), made.pages = pages(at);
                 made.row_stride = row_stride, made.heads = heads, made.size = size, made.frames = frames;
                 made.page_tokens = page_tokens, made.type = type_of(type, made.pages);
             },
             nb::arg("name"), nb::arg("rows"), nb::arg("slots"), nb::arg("pages"), nb::arg("row_stride"), nb::arg("heads"),
             nb::arg("size"), nb::arg("frames"), nb::arg("page_tokens"), nb::arg("type"))
        .def("intake",
             [](Tape& tape, const std::string& name, At q, At k, At v, At cos, At sin, At turned, At slots, PagesTuple k_pages,
                PagesTuple v_pages, int64_t q_token, int64_t k_token, int64_t v_token, int64_t turned_token, int64_t frames,
                int64_t page_tokens, int64_t heads, int64_t kv_heads, int64_t size, int64_t values, int64_t half, int type,
                bool joined) {
                 auto step = std::make_unique<IntakeStep>();
                 IntakeStep& made = *step;
                 made.q = place(q), made.k = place(k), made.v = place(v), made.cos = place(cos), made.sin = place(sin);
                 made.turned = place(turned), made.slots = place(slots);
                 made.k_pages = pages(k_pages), made.v_pages = pages(v_pages);
                 made.q_token = q_token, made.k_token = k_token, made.v_token = v_token, made.turned_token = turned_token;
                 made.frames = frames, made.page_tokens = page_tokens, made.heads = heads, made.kv_heads = kv_heads;
                 made.size = size, made.values = values, made.half = half;
                 made.type = type_of(type, made.k_pages);
                 type_of(type, made.v_pages);
                 if (joined)
                     product_for(tape, made).intake = std::move(step);
                 else
                     tape.add(std::move(step), name);
             },
             nb::arg("name"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("cos"), nb::arg("sin"), nb::arg("turned"),
             nb::arg("slots"), nb::arg("k_pages"), nb::arg("v_pages"), nb::arg("q_token"), nb::arg("k_token"),
             nb::arg("v_token"), nb::arg("turned_token"), nb::arg("frames"), nb::arg("page_tokens"), nb::arg("heads"),
             nb::arg("kv_heads"), nb::arg("size"), nb::arg("values"), nb::arg("half"), nb::arg("type"), nb::arg("joined"),
             "joined: fused into the previous packed instruction, which computes q, k and v")
        .def("attention",
             [](Tape& tape, const std::string& name, At q, At y, At encoded, At q_start, At kv_len, At ancestors, At table,
                At sinks, PagesTuple k_pages, PagesTuple v_pages, int64_t q_token, int64_t frames, int64_t page_tokens, int64_t heads,
                int64_t kv_heads, int64_t size, int64_t values, int64_t window, MaskTuple mask, int64_t block, float scale,
                float cap, int type) {
                 auto& made = append<AttentionStep>(tape, name);
                 made.q = place(q), made.y = place(y), made.encoded = place(encoded), made.q_start = place(q_start);
                 made.kv_len = place(kv_len), made.ancestors = place(ancestors), made.table = place(table);
                 made.sinks = place(sinks), made.k_pages = pages(k_pages), made.v_pages = pages(v_pages);
                 made.q_token = q_token, made.frames = frames, made.page_tokens = page_tokens, made.heads = heads;
                 made.kv_heads = kv_heads, made.size = size, made.values = values, made.window = window;
                 made.mask = mask_of(mask), made.block = block;
                 made.scale = scale, made.cap = cap, made.type = type_of(type, made.k_pages);
                 type_of(type, made.v_pages);
             },
             nb::arg("name"), nb::arg("q"), nb::arg("y"), nb::arg("encoded"), nb::arg("q_start"), nb::arg("kv_len"),
             nb::arg("ancestors"), nb::arg("table"), nb::arg("sinks"), nb::arg("k_pages"), nb::arg("v_pages"),
             nb::arg("q_token"),
             nb::arg("frames"), nb::arg("page_tokens"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("size"), nb::arg("values"),
             nb::arg("window"), nb::arg("mask"), nb::arg("block"), nb::arg("scale"), nb::arg("cap"), nb::arg("type"))
        .def("head_products",
             [](Tape& tape, const std::string& name, At x, At weight, At y, At cos, At sin, int64_t heads, int64_t columns,
                int64_t outputs, int64_t half, int64_t x_token, int64_t x_head, int64_t y_token, int64_t y_head, int64_t w_head,
                int64_t w_column, int64_t w_output, bool narrow) {
                 auto& made = append<HeadProductsStep>(tape, name);
                 made.x = place(x), made.weight = place(weight), made.y = place(y), made.cos = place(cos), made.sin = place(sin);
                 made.heads = heads, made.columns = columns, made.outputs = outputs, made.half = half;
                 made.x_token = x_token, made.x_head = x_head, made.y_token = y_token, made.y_head = y_head;
                 made.w_head = w_head, made.w_column = w_column, made.w_output = w_output, made.narrow = narrow;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("weight"), nb::arg("y"), nb::arg("cos"), nb::arg("sin"), nb::arg("heads"),
             nb::arg("columns"), nb::arg("outputs"), nb::arg("half"), nb::arg("x_token"), nb::arg("x_head"), nb::arg("y_token"),
             nb::arg("y_head"), nb::arg("w_head"), nb::arg("w_column"), nb::arg("w_output"), nb::arg("narrow"))
        .def("latents",
             [](Tape& tape, const std::string& name, At x, At weight, At cos, At sin, At slots, PagesTuple held, int64_t x_token,
                int64_t rank, int64_t half, int64_t frames, int64_t page_tokens, float eps, int type) {
                 auto& made = append<LatentsStep>(tape, name);
                 made.x = place(x), made.weight = place(weight), made.cos = place(cos), made.sin = place(sin);
                 made.slots = place(slots), made.pages = pages(held), made.x_token = x_token, made.rank = rank;
                 made.half = half, made.frames = frames, made.page_tokens = page_tokens, made.eps = eps;
                 made.type = type_of(type, made.pages);
             },
             nb::arg("name"), nb::arg("x"), nb::arg("weight"), nb::arg("cos"), nb::arg("sin"), nb::arg("slots"),
             nb::arg("pages"), nb::arg("x_token"), nb::arg("rank"), nb::arg("half"), nb::arg("frames"),
             nb::arg("page_tokens"), nb::arg("eps"), nb::arg("type"))
        .def("conv",
             [](Tape& tape, const std::string& name, At x, At weight, At bias, At state, At y, At q_start, At kept, At read,
                At write, int64_t slots, int64_t channels, int64_t width, int64_t x_token, bool silu) {
                 auto& made = append<ConvStep>(tape, name);
                 made.x = place(x), made.weight = place(weight), made.bias = place(bias), made.state = place(state);
                 made.y = place(y), made.at = {place(q_start), place(kept), place(read), place(write), slots};
                 made.channels = channels, made.width = width, made.x_token = x_token, made.silu = silu;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("weight"), nb::arg("bias"), nb::arg("state"), nb::arg("y"),
             nb::arg("q_start"), nb::arg("kept"), nb::arg("read"), nb::arg("write"), nb::arg("slots"), nb::arg("channels"),
             nb::arg("width"), nb::arg("x_token"), nb::arg("silu"))
        .def("ssd",
             [](Tape& tape, const std::string& name, At x, At dt, At a, At b, At c, At d, At bias, At state, At y, At q_start,
                At kept, At read, At write, int64_t slots, int64_t heads, int64_t size, int64_t n, int64_t groups,
                int64_t x_token, int64_t dt_token, int64_t b_token, int64_t c_token, float low, float high) {
                 auto& made = append<SsdStep>(tape, name);
                 made.x = place(x), made.dt = place(dt), made.a = place(a), made.b = place(b), made.c = place(c);
                 made.d = place(d), made.bias = place(bias), made.state = place(state), made.y = place(y);
                 made.at = {place(q_start), place(kept), place(read), place(write), slots};
                 made.heads = heads, made.size = size, made.n = n, made.groups = groups, made.x_token = x_token;
                 made.dt_token = dt_token, made.b_token = b_token, made.c_token = c_token, made.low = low, made.high = high;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("dt"), nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("d"),
             nb::arg("bias"), nb::arg("state"), nb::arg("y"), nb::arg("q_start"), nb::arg("kept"), nb::arg("read"),
             nb::arg("write"), nb::arg("slots"), nb::arg("heads"), nb::arg("size"), nb::arg("n"), nb::arg("groups"),
             nb::arg("x_token"), nb::arg("dt_token"), nb::arg("b_token"), nb::arg("c_token"), nb::arg("low"), nb::arg("high"))
        .def("gated_norm",
             [](Tape& tape, const std::string& name, At x, At gate, At weight, At y, int64_t columns, int64_t groups,
                int64_t gate_token, float eps, bool before) {
                 auto& made = append<GatedNormStep>(tape, name);
                 made.x = place(x), made.gate = place(gate), made.weight = place(weight), made.y = place(y);
                 made.columns = columns, made.groups = groups, made.gate_token = gate_token;
                 made.eps = eps, made.before = before;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("gate"), nb::arg("weight"), nb::arg("y"), nb::arg("columns"),
             nb::arg("groups"), nb::arg("gate_token"), nb::arg("eps"), nb::arg("before"))
        .def("diagonal",
             [](Tape& tape, const std::string& name, At x, At decay, At out, At d, At state, At y, At q_start, At kept,
                At read, At write, int64_t slots, int64_t channels, int64_t pairs, int64_t x_token) {
                 auto& made = append<DiagonalStep>(tape, name);
                 made.x = place(x), made.decay = place(decay), made.out = place(out), made.d = place(d);
                 made.state = place(state), made.y = place(y);
                 made.at = {place(q_start), place(kept), place(read), place(write), slots};
                 made.channels = channels, made.pairs = pairs, made.x_token = x_token;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("decay"), nb::arg("out"), nb::arg("d"), nb::arg("state"), nb::arg("y"),
             nb::arg("q_start"), nb::arg("kept"), nb::arg("read"), nb::arg("write"), nb::arg("slots"), nb::arg("channels"),
             nb::arg("pairs"), nb::arg("x_token"))
        .def("scale",
             [](Tape& tape, const std::string& name, At x, At factors, At y, int64_t columns, int64_t x_token) {
                 auto& made = append<ScaleStep>(tape, name);
                 made.x = place(x), made.factors = place(factors), made.y = place(y);
                 made.columns = columns, made.x_token = x_token;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("factors"), nb::arg("y"), nb::arg("columns"), nb::arg("x_token"))
        .def("gather",
             [](Tape& tape, const std::string& name, At x, At columns, At y, int64_t count, int64_t inner, int64_t x_token) {
                 const Place fixed = place(columns);
                 if (fixed.kind != Place::FIXED || count < 1) throw std::invalid_argument("tape: columns to gather are fixed");
                 check_columns(fixed.in<int32_t>({}), count, inner);
                 auto& made = append<GatherStep>(tape, name);
                 made.x = place(x), made.columns = fixed, made.y = place(y);
                 made.count = count, made.x_token = x_token;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("columns"), nb::arg("y"), nb::arg("count"), nb::arg("inner"),
             nb::arg("x_token"))
        .def("route",
             [](Tape& tape, const std::string& name, At logits, At bias, At weights, At chosen, const RoutingTuple& rule) {
                 auto& made = append<RouteStep>(tape, name);
                 made.logits = place(logits), made.bias = place(bias), made.weights = place(weights);
                 made.chosen = place(chosen), made.rule = routing_of(rule);
             },
             nb::arg("name"), nb::arg("logits"), nb::arg("bias"), nb::arg("weights"), nb::arg("chosen"), nb::arg("rule"))
        .def("experts",
             [](Tape& tape, const std::string& name, At x, At encoded, At chosen, At weights, At y,
                const std::vector<std::tuple<At, At, int64_t, int>>& matrices, int64_t per_token, int64_t experts,
                int64_t hidden, int64_t inner, int function, bool int8) {
                 if (matrices.size() != 3) throw std::invalid_argument("tape: experts have three matrices");
                 auto& made = append<ExpertsStep>(tape, name);
                 made.x = place(x), made.encoded = place(encoded), made.chosen = place(chosen);
                 made.weights = place(weights), made.y = place(y);
                 const bool packed = made.encoded.kind != Place::NONE;
                 if (packed) tape.round(int8 ? Rounding::Int8 : Rounding::BFloat16);
                 ExpertsStep::Matrix* const own[] = {&made.gate, &made.up, &made.down};
                 for (size_t i = 0; i < 3; ++i) {
                     const auto& [data, bias, bytes, kind] = matrices[i];
                     if (packed)
                         require_pack(kind, int8);
                     else
                         format_of(kind);
                     *own[i] = {place(data), place(bias), bytes, kind};
                 }
                 made.per_token = per_token, made.experts = experts, made.hidden = hidden, made.inner = inner;
                 made.function = function_of_experts(function);
             },
             nb::arg("name"), nb::arg("x"), nb::arg("encoded"), nb::arg("chosen"), nb::arg("weights"), nb::arg("y"),
             nb::arg("matrices"), nb::arg("per_token"), nb::arg("experts"), nb::arg("hidden"), nb::arg("inner"),
             nb::arg("function"), nb::arg("int8"))
        .def("add_gated",
             [](Tape& tape, const std::string& name, At x, At delta, At gate, At y, int64_t columns) {
                 auto& made = append<AddGatedStep>(tape, name);
                 made.x = place(x), made.delta = place(delta), made.gate = place(gate), made.y = place(y);
                 made.columns = columns;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("delta"), nb::arg("gate"), nb::arg("y"), nb::arg("columns"))
        .def("scan",
             [](Tape& tape, const std::string& name, At x, At delta, At a, At b, At c, At d, At state, At y, At q_start,
                At kept, At read, At write, int64_t slots, int64_t channels, int64_t size, int64_t b_token, int64_t c_token) {
                 auto& made = append<ScanStep>(tape, name);
                 made.x = place(x), made.delta = place(delta), made.a = place(a), made.b = place(b), made.c = place(c);
                 made.d = place(d), made.state = place(state), made.y = place(y);
                 made.at = {place(q_start), place(kept), place(read), place(write), slots};
                 made.channels = channels, made.size = size, made.b_token = b_token, made.c_token = c_token;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("delta"), nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("d"),
             nb::arg("state"), nb::arg("y"), nb::arg("q_start"), nb::arg("kept"), nb::arg("read"), nb::arg("write"),
             nb::arg("slots"), nb::arg("channels"), nb::arg("size"), nb::arg("b_token"), nb::arg("c_token"))
        .def("linear_attention",
             [](Tape& tape, const std::string& name, At q, At k, At v, At slopes, At state, At normalizer, At y, At q_start,
                At kept, At read, At write, int64_t slots, int64_t heads, int64_t key, int64_t value, int64_t q_token,
                int64_t k_token, int64_t v_token) {
                 auto& made = append<LinearAttentionStep>(tape, name);
                 made.q = place(q), made.k = place(k), made.v = place(v), made.slopes = place(slopes);
                 made.state = place(state), made.normalizer = place(normalizer), made.y = place(y);
                 made.at = {place(q_start), place(kept), place(read), place(write), slots};
                 made.heads = heads, made.key = key, made.value = value;
                 made.q_token = q_token, made.k_token = k_token, made.v_token = v_token;
             },
             nb::arg("name"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("slopes"), nb::arg("state"),
             nb::arg("normalizer"), nb::arg("y"), nb::arg("q_start"), nb::arg("kept"), nb::arg("read"), nb::arg("write"),
             nb::arg("slots"), nb::arg("heads"), nb::arg("key"), nb::arg("value"), nb::arg("q_token"), nb::arg("k_token"),
             nb::arg("v_token"))
        .def("delta_rule",
             [](Tape& tape, const std::string& name, At q, At k, At v, At a, At b, At rate, At shift, At state, At y,
                At q_start, At kept, At read, At write, int64_t slots, int64_t key_heads, int64_t heads, int64_t key,
                int64_t value, int64_t q_token, int64_t k_token, int64_t v_token, int64_t a_token, int64_t b_token) {
                 auto& made = append<DeltaStep>(tape, name);
                 made.q = place(q), made.k = place(k), made.v = place(v), made.a = place(a), made.b = place(b);
                 made.rate = place(rate), made.shift = place(shift), made.state = place(state), made.y = place(y);
                 made.at = {place(q_start), place(kept), place(read), place(write), slots};
                 made.key_heads = key_heads, made.heads = heads, made.key = key, made.value = value;
                 made.q_token = q_token, made.k_token = k_token, made.v_token = v_token;
                 made.a_token = a_token, made.b_token = b_token;
             },
             nb::arg("name"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("a"), nb::arg("b"), nb::arg("rate"),
             nb::arg("shift"), nb::arg("state"), nb::arg("y"), nb::arg("q_start"), nb::arg("kept"), nb::arg("read"),
             nb::arg("write"), nb::arg("slots"), nb::arg("key_heads"), nb::arg("heads"), nb::arg("key"), nb::arg("value"),
             nb::arg("q_token"), nb::arg("k_token"), nb::arg("v_token"), nb::arg("a_token"), nb::arg("b_token"))
        .def("taylor_features",
             [](Tape& tape, const std::string& name, At x, At y, int64_t heads, int64_t size, int64_t x_token, float single,
                float pair) {
                 auto& made = append<TaylorStep>(tape, name);
                 made.x = place(x), made.y = place(y), made.heads = heads, made.size = size, made.x_token = x_token;
                 made.single = single, made.pair = pair;
             },
             nb::arg("name"), nb::arg("x"), nb::arg("y"), nb::arg("heads"), nb::arg("size"), nb::arg("x_token"),
             nb::arg("single"), nb::arg("pair"));

    using TableTuple = std::tuple<uintptr_t, int64_t, int64_t>;
    using ParamsTuple = std::tuple<std::tuple<uintptr_t, int64_t, std::tuple<int64_t, int64_t, int64_t>>,
                                   std::tuple<uintptr_t, int64_t, std::tuple<int64_t, int64_t, int64_t, int64_t>>, uint32_t>;
    nb::class_<ChoosingStep>(m, "ChoosingStep")
        .def("__init__",
             [](ChoosingStep* self, const Tape& tape, At chosen, int64_t rows, int64_t longest, uintptr_t tokens,
                uintptr_t known, uintptr_t computed, uintptr_t slot, const std::vector<TableTuple>& tables,
                const ParamsTuple& params) {
                 RowsAt at{rows, longest, reinterpret_cast<int64_t*>(tokens), reinterpret_cast<int64_t*>(known),
                           reinterpret_cast<int64_t*>(computed), reinterpret_cast<int64_t*>(slot), {}};
                 for (const auto& [pages, width, page_tokens] : tables)
                     at.tables.push_back({reinterpret_cast<const int64_t*>(pages), width, page_tokens});
                 const auto& [of_reals, of_wholes, purpose] = params;
                 const auto& [reals, real_columns, real] = of_reals;
                 const auto& [wholes, whole_columns, whole] = of_wholes;
                 const auto [temperature, top_p, min_p] = real;
                 const auto [top_k, seed, child, greedy] = whole;
                 new (self) ChoosingStep(tape, place(chosen), std::move(at),
                                         {reinterpret_cast<const double*>(reals), reinterpret_cast<const int64_t*>(wholes),
                                          real_columns, whole_columns, temperature, top_p, min_p, top_k, seed, child, greedy,
                                          purpose});
             },
             nb::arg("tape"), nb::arg("chosen"), nb::arg("rows"), nb::arg("longest"), nb::arg("tokens"), nb::arg("known"),
             nb::arg("computed"), nb::arg("slot"), nb::arg("tables"), nb::arg("params"), nb::keep_alive<1, 2>(),
             "slot: 0 without recurrent state; params: (address, columns, columns of temperature, top_p, min_p), (address, columns, those of top_k, seed, child, "
             "greedy), purpose")
        .def("run",
             [](ChoosingStep& step, uintptr_t arena, const std::vector<int64_t>& rows, const std::vector<int64_t>& slots,
                bool timed) {
                 const nb::gil_scoped_release free;
                 return step.run(reinterpret_cast<uint8_t*>(arena), rows, slots, timed);
             },
             nb::arg("arena"), nb::arg("rows"), nb::arg("slots"), nb::arg("timed") = false);
}
