// The Python module. Tensors come as addresses: the wrappers in bankfull/ops/native check type, layout and size of what
// they pass, and an address costs a tenth of a DLPack exchange, which a decoding step would pay hundreds of times.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "isa.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace bankfull;

namespace {

constexpr int64_t PIECE_WORK = 16384;  // multiplications that are worth a hand-over between threads
constexpr int MAX_THREADS = 1024;

void require(bool fine, const char* message) {
    if (!fine) throw std::invalid_argument(message);
}

const FormatFacts& facts(int format) {
    require(format >= 0 && format < FORMATS, "unknown weight format");
    return kernels().facts[format];
}

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

struct LinearTask {
    void (*run)(const LinearJob&, int64_t, int64_t);
    LinearJob job;
};

void linear(int format, uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t y, int64_t rows, int64_t outputs,
            int64_t inner) {
    const FormatFacts& f = facts(format);
    require(rows >= 0 && outputs >= 0 && inner > 0 && inner % f.block == 0, "linear: the sizes do not fit the format");
    if (rows == 0 || outputs == 0) return;
    require(x && weight && y, "linear: a null address");
    const LinearTask task{kernels().linear[format],
                          {pointer<float>(x), pointer<uint8_t>(weight), pointer<float>(bias), pointer<float>(y), rows,
                           outputs, inner, inner / f.block * f.bytes}};
    // A multiple of four outputs, so that prefill's tiles stay whole.
    const int64_t piece = (PIECE_WORK / (inner * rows) + 4) / 4 * 4;
    parallel(outputs, piece, [](const void* p, int64_t begin, int64_t end) {
        const LinearTask& t = *static_cast<const LinearTask*>(p);
        t.run(t.job, begin, end);
    }, &task);
}

struct NormTask {
    void (*run)(const NormJob&, int64_t, int64_t);
    NormJob job;
};

void rms_norm(uintptr_t x, uintptr_t weight, uintptr_t y, int64_t rows, int64_t columns, float eps, float offset) {
    require(rows >= 0 && columns > 0, "rms_norm: the sizes must be positive");
    if (rows == 0) return;
    require(x && weight && y, "rms_norm: a null address");
    const NormTask task{kernels().rms_norm,
                        {pointer<float>(x), pointer<float>(weight), pointer<float>(y), columns, eps, offset}};
    parallel(rows, PIECE_WORK / columns + 1, [](const void* p, int64_t begin, int64_t end) {
        const NormTask& t = *static_cast<const NormTask*>(p);
        t.run(t.job, begin, end);
    }, &task);
}

void dequantize(int format, uintptr_t blocks, uintptr_t out, int64_t count) {
    facts(format);
    require(count >= 0 && (count == 0 || (blocks && out)), "dequantize: a null address or a negative count");
    kernels().dequantize[format](pointer<uint8_t>(blocks), pointer<float>(out), count);
}

void set_thread_count(int count) {
    require(count >= 1 && count <= MAX_THREADS, "the number of threads must be 1 to 1024");
    set_threads(count);
}

nb::dict formats() {
    nb::dict found;
    for (int i = 0; i < FORMATS; ++i)
        found[facts(i).name] = nb::make_tuple(i, facts(i).block, facts(i).bytes);
    return found;
}

}  // namespace

NB_MODULE(_native, m) {
    using Free = nb::call_guard<nb::gil_scoped_release>;
    m.doc() = "Kernels for CPUs. Call them through bankfull.ops: addresses are not checked here.";
    m.def("linear", &linear, Free(), "format, x, weight, bias (0: none), y: addresses; rows, outputs, inner");
    m.def("rms_norm", &rms_norm, Free(), "x, weight, y: addresses; rows, columns, eps, offset");
    m.def("dequantize", &dequantize, Free(), "format, blocks, out: addresses; how many blocks");
    m.def("formats", &formats, "name -> (format, weights per block, bytes per block)");
    m.def("isas", &available_isas, "the instruction sets of this processor, best first");
    m.def("isa", &current_isa);
    m.def("set_isa", &set_isa);
    m.def("threads", &threads, Free());
    m.def("set_threads", &set_thread_count, Free());
}
