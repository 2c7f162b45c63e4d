// The Python module. Tensors are passed as addresses: the wrappers in bankfull/ops/native check type, layout and size,
// and an address costs a tenth of a DLPack exchange, which a decode step would pay hundreds of times.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cerrno>
#include <stdexcept>
#include <tuple>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention_plan.hpp"
#include "bindings.hpp"
#include "isa.hpp"
#include "operations.hpp"
#include "pages.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace bankfull;


namespace {

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

// A one-dimensional int64 numpy array, held while its address is used. Construction and destruction need the GIL.
class Integers {
  public:
    explicit Integers(nb::handle array) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_ND | PyBUF_FORMAT) != 0) throw nb::python_error();
        const char* format = view_.format ? view_.format : "";
        const bool whole = (format[0] == 'l' || format[0] == 'q') && format[1] == 0 && view_.itemsize == 8;
        if (view_.ndim == 1 && whole) return;
        PyBuffer_Release(&view_);
        throw std::invalid_argument("expected a contiguous one-dimensional array of int64");
    }
    ~Integers() { PyBuffer_Release(&view_); }
    Integers(const Integers&) = delete;
    Integers& operator=(const Integers&) = delete;
    const int64_t* data() const { return static_cast<const int64_t*>(view_.buf); }
    int64_t size() const { return int64_t(view_.len) / 8; }

  private:
    Py_buffer view_;
};

void linear(int format, uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t y, int64_t rows, int64_t outputs,
            int64_t inner) {
    const FormatFacts& f = facts(format);
    require(rows >= 0 && outputs >= 0 && inner > 0 && inner % f.block == 0, "linear: sizes do not match the format");
    if (rows == 0 || outputs == 0) return;
    require(x && weight && y, "linear: a null address");
    const LinearJob job{pointer<float>(x), inner, pointer<uint8_t>(weight), pointer<float>(bias), pointer<float>(y), rows, outputs,
                        inner, inner / f.block * f.bytes};
    run_linear(job, Format(format));
}

// The best output of each row, as int64; see run_packed_best.
void linear_best(int format, uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t best, int64_t rows, int64_t outputs,
                 int64_t inner) {
    const FormatFacts& f = facts(format);
    require(rows >= 0 && outputs > 0 && inner > 0 && inner % f.block == 0, "linear_best: sizes do not match the format");
    if (rows == 0) return;
    require(x && weight && best, "linear_best: a null address");
    run_linear_best({pointer<float>(x), inner, pointer<uint8_t>(weight), pointer<float>(bias), nullptr, rows, outputs, inner,
                     inner / f.block * f.bytes}, Format(format), pointer<int64_t>(best));
}

// delta and joined may both be 0: no residual add.
void rms_norm(uintptr_t x, uintptr_t delta, uintptr_t joined, uintptr_t weight, uintptr_t y, int64_t rows,
              int64_t columns, float eps, float offset) {
    require(rows >= 0 && columns > 0, "rms_norm: sizes must be positive");
    if (rows == 0) return;
    require(x && weight && y && !delta == !joined, "rms_norm: a null address");
    const NormJob job{pointer<float>(x),      pointer<float>(delta), pointer<float>(joined),
                      pointer<float>(weight), pointer<float>(y),     columns,
                      eps,                    offset,                {}};
    run_rms_norm(job, rows);
}

void layer_norm(uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t y, int64_t rows, int64_t columns, float eps) {
    require(rows >= 0 && columns > 0, "layer_norm: sizes must be positive");
    if (rows == 0) return;
    require(x && weight && bias && y, "layer_norm: a null address");
    const LayerNormJob job{pointer<float>(x), pointer<float>(weight), pointer<float>(bias), pointer<float>(y), columns, eps};
    run_layer_norm(job, rows);
}

void pointwise(int kind, uintptr_t x, uintptr_t factor, uintptr_t y, int64_t count, float parameter) {
    require(kind >= 0 && kind < POINTWISE && count >= 0, "pointwise: an unknown function or a negative count");
    if (count == 0) return;
    require(x && y && (factor || kind != PLUS), "pointwise: a null address");
    const PointwiseJob job{pointer<float>(x), pointer<float>(factor), pointer<float>(y), parameter};
    run_pointwise(job, Pointwise(kind), count);
}

void rotate(uintptr_t x, uintptr_t cos, uintptr_t sin, uintptr_t y, int64_t tokens, int64_t heads,
            int64_t size, int64_t half) {
    require(tokens >= 0 && heads > 0 && half >= 0 && 2 * half <= size, "rotate: sizes do not match");
    if (tokens == 0) return;
    require(x && cos && sin && y, "rotate: a null address");
    const RotateJob job{pointer<float>(x), pointer<float>(cos), pointer<float>(sin), pointer<float>(y),
                        heads, size, half};
    run_rotate(job, tokens);
}

void rope_angles(uintptr_t positions, uintptr_t frequencies, uintptr_t cos, uintptr_t sin, int64_t tokens, int64_t half,
                 float scale) {
    require(tokens >= 0 && half >= 0, "rope_angles: sizes must not be negative");
    if (tokens == 0 || half == 0) return;
    require(positions && frequencies && cos && sin, "rope_angles: a null address");
    run_angles({pointer<int64_t>(positions), pointer<float>(frequencies), pointer<float>(cos), pointer<float>(sin), half,
                scale}, tokens);
}

void embedding(int format, uintptr_t ids, uintptr_t table, uintptr_t y, int64_t tokens, int64_t count, int64_t columns,
               float scale) {
    const FormatFacts& f = facts(format);
    require(tokens >= 0 && count >= 0 && columns > 0 && columns % f.block == 0, "embedding: sizes do not match the format");
    if (tokens == 0) return;
    require(ids && table && y, "embedding: a null address");
    run_embedding({pointer<int64_t>(ids), pointer<uint8_t>(table), pointer<float>(y), count, columns,
                   columns / f.block * f.bytes, scale}, Format(format), tokens);
}

void write_tokens(uintptr_t rows, uintptr_t pages, uintptr_t slots, int64_t tokens, int64_t bytes, int64_t frames,
                  int64_t page_tokens, int64_t frame, int64_t token) {
    if (tokens == 0) return;
    require(rows && pages && slots, "write_pages: a null address");
    write_pages({pointer<uint8_t>(rows), pointer<uint8_t>(pages), pointer<int64_t>(slots), bytes, page_tokens, frame, token},
                tokens, frames);
}

void move(uintptr_t frames, uintptr_t source, uintptr_t target, uintptr_t first, uintptr_t size, int64_t rows,
          int64_t moves, int64_t segments, int64_t count, int64_t page_tokens, int64_t frame) {
    if (rows * moves == 0) return;
    require(frames && source && target && first && size, "move_tokens: a null address");
    move_tokens({pointer<uint8_t>(frames), pointer<int64_t>(source), pointer<int64_t>(target), pointer<int64_t>(first),
                 pointer<int64_t>(size), rows, moves, segments, page_tokens, frame}, count);
}

// Addresses and strides of pages (frames, tokens, heads, elements) and of their scales (frames, tokens, heads; groups of
// a head are contiguous), which may be 0: none.
using Strides = std::tuple<int64_t, int64_t, int64_t, int64_t>;
using ScaleStrides = std::tuple<int64_t, int64_t, int64_t>;
using PagesTuple = std::tuple<uintptr_t, Strides, uintptr_t, ScaleStrides>;

Pages pages_at(const PagesTuple& pages, int type) {
    const auto& [address, strides, scales, scale_strides] = pages;
    require(type >= 0 && type < PAGE_TYPES && address, "pages: an unknown type, or a null address");
    require(has_scales(PageType(type)) == (scales != 0), "pages: rounded pages need scales, others must not have them");
    return {pointer<uint8_t>(address), std::get<0>(strides), std::get<1>(strides), std::get<2>(strides),
            pointer<float>(scales), std::get<0>(scale_strides), std::get<1>(scale_strides), std::get<2>(scale_strides)};
}

void round_tokens(int type, uintptr_t rows, const PagesTuple& pages, uintptr_t slots, int64_t tokens, int64_t heads, int64_t size,
                  int64_t frames, int64_t page_tokens) {
    require(heads > 0 && size > 0 && frames >= 0 && page_tokens > 0, "write_rounded: sizes must be positive");
    require(type != PAGES_INT4 || size % 8 == 0, "write_rounded: int4 heads must be multiples of 8");
    if (tokens == 0) return;
    require(rows && slots, "write_rounded: a null address");
    IntakeJob job{};
    job.k = pointer<float>(rows);
    job.k_token = heads * size;
    job.k_pages = pages_at(pages, type);
    job.slots = pointer<int64_t>(slots);
    job.places = frames * page_tokens;
    job.page_tokens = page_tokens;
    job.kv_heads = heads;
    job.size = size;
    job.type = PageType(type);
    run_intake(job, tokens);
}

void attention(int type, uintptr_t q, const PagesTuple& k, const PagesTuple& v, uintptr_t y, nb::handle q_start, nb::handle kv_len,
               uintptr_t ancestors, uintptr_t table, int64_t table_stride, int64_t width, int64_t frames, int64_t page_tokens,
               int64_t tokens, int64_t heads, int64_t kv_heads, int64_t size, int64_t values, float scale,
               int64_t window, const MaskTuple& mask, int64_t block, float cap, uintptr_t sinks, bool partial) {
    const Integers starts(q_start), lengths(kv_len);
    require(starts.size() == lengths.size() + 1, "paged_attention: q_start must have one entry more than kv_len");
    if (tokens == 0) return;
    require(q && y && table, "paged_attention: a null address");
    const AttentionJob job{pointer<float>(q), pointer<float>(y), pages_at(k, type), pages_at(v, type),
                           starts.data(), lengths.data(), pointer<int64_t>(table),
                           pointer<uint64_t>(ancestors), table_stride, page_tokens, heads,
                           kv_heads, size, values, heads * size, {}, window, mask_of(mask), block, scale, cap, pointer<float>(sinks), nullptr, nullptr, nullptr};
    const nb::gil_scoped_release free;
    (partial ? partial_attention : paged_attention)(job, PageType(type), lengths.size(), tokens, width, frames);
}

RecurrentPlan plan_of(const Integers& starts, const Integers& kept, uintptr_t read, uintptr_t write, int64_t write_stride,
                      int64_t most, int64_t slots, int64_t tokens, int64_t channels) {
    require(starts.size() == kept.size() + 1, "recurrent: q_start must have one entry more than kept");
    return checked_plan({starts.data(), kept.data(), pointer<int64_t>(read), pointer<int64_t>(write), kept.size(),
                         write_stride, channels}, most, slots, tokens);
}

void causal_conv(uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t state, uintptr_t y, nb::handle q_start,
                 nb::handle kept, uintptr_t read, uintptr_t write, int64_t write_stride, int64_t most, int64_t slots,
                 int64_t tokens, int64_t channels, int64_t width, int64_t x_token, bool silu) {
    const Integers starts(q_start), counts(kept);
    require(channels > 0 && width > 0, "causal_conv: sizes must be positive");
    if (tokens == 0) return;
    require(x && weight && (state || width == 1) && y && read, "causal_conv: a null address");
    const ConvJob job{plan_of(starts, counts, read, write, write_stride, most, slots, tokens, channels),
                      pointer<float>(x), pointer<float>(weight), pointer<float>(bias), pointer<float>(state),
                      pointer<float>(y), width, x_token, silu};
    const nb::gil_scoped_release free;
    run_causal_conv(job, tokens);
}

void selective_scan(uintptr_t x, uintptr_t delta, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t state,
                    uintptr_t y, int64_t b_token, int64_t c_token, nb::handle q_start, nb::handle kept, uintptr_t read,
                    uintptr_t write, int64_t write_stride, int64_t most, int64_t slots, int64_t tokens, int64_t channels,
                    int64_t size) {
    const Integers starts(q_start), counts(kept);
    require(channels > 0 && size > 0, "selective_scan: sizes must be positive");
    if (tokens == 0) return;
    require(x && delta && a && b && c && d && state && y && read, "selective_scan: a null address");
    const ScanJob job{plan_of(starts, counts, read, write, write_stride, most, slots, tokens, channels),
                      pointer<float>(x), pointer<float>(delta), pointer<float>(a), pointer<float>(b), pointer<float>(c),
                      pointer<float>(d), pointer<float>(state), pointer<float>(y), size, b_token, c_token};
    const nb::gil_scoped_release free;
    run_selective_scan(job, tokens);
}

void linear_attention(uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t slopes, uintptr_t state, uintptr_t normalizer,
                      uintptr_t y, int64_t q_token, int64_t k_token, int64_t v_token, nb::handle q_start, nb::handle kept,
                      uintptr_t read, uintptr_t write, int64_t write_stride, int64_t most, int64_t slots, int64_t tokens,
                      int64_t heads, int64_t key, int64_t value) {
    const Integers starts(q_start), counts(kept);
    require(heads > 0 && key > 0 && value > 0, "linear_attention: sizes must be positive");
    if (tokens == 0) return;
    require(q && k && v && slopes && state && y && read, "linear_attention: a null address");
    const LinearAttentionJob job{plan_of(starts, counts, read, write, write_stride, most, slots, tokens, heads),
                                 pointer<float>(q), pointer<float>(k), pointer<float>(v), pointer<float>(slopes),
                                 pointer<float>(state), pointer<float>(y), pointer<float>(normalizer),
                                 key, value, q_token, k_token, v_token};
    const nb::gil_scoped_release free;
    run_linear_attention(job, tokens);
}

void delta_rule(uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t a, uintptr_t b, uintptr_t rate, uintptr_t shift,
                uintptr_t state, uintptr_t y, const std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>& strides,
                nb::handle q_start, nb::handle kept, uintptr_t read, uintptr_t write, int64_t write_stride, int64_t most,
                int64_t slots, int64_t tokens, int64_t key_heads, int64_t heads, int64_t key, int64_t value) {
    const Integers starts(q_start), counts(kept);
    require(key_heads > 0 && heads > 0 && heads % key_heads == 0 && key > 0 && value > 0,
            "delta_rule: sizes must be positive, and heads a multiple of key heads");
    if (tokens == 0) return;
    require(q && k && v && a && b && rate && shift && state && y && read, "delta_rule: a null address");
    const auto [q_token, k_token, v_token, a_token, b_token] = strides;
    const DeltaJob job{plan_of(starts, counts, read, write, write_stride, most, slots, tokens, heads),
                       pointer<float>(q), pointer<float>(k), pointer<float>(v), pointer<float>(a), pointer<float>(b),
                       pointer<float>(rate), pointer<float>(shift), pointer<float>(state), pointer<float>(y), key_heads,
                       key, value, q_token, k_token, v_token, a_token, b_token};
    const nb::gil_scoped_release free;
    run_delta_rule(job, tokens);
}

void taylor_features(uintptr_t x, uintptr_t y, int64_t x_token, int64_t tokens, int64_t heads, int64_t size, float single,
                     float pair) {
    require(heads > 0 && size > 0, "taylor_features: sizes must be positive");
    if (tokens == 0) return;
    require(x && y, "taylor_features: a null address");
    run_taylor_features({pointer<float>(x), pointer<float>(y), heads, size, x_token, single, pair}, tokens);
}

void dequantize(int format, uintptr_t blocks, uintptr_t out, int64_t count) {
    facts(format);
    require(count >= 0 && (count == 0 || (blocks && out)), "dequantize: a null address or a negative count");
    kernels().dequantize[format](pointer<uint8_t>(blocks), pointer<float>(out), count);
}

// `reals`: temperature, top_p, min_p; `wholes`: top_k, seed, child, position, greedy: one row of each per row of logits.
void sample(uintptr_t logits, uintptr_t reals, uintptr_t wholes, uintptr_t tokens, int64_t rows, int64_t vocab,
            uint32_t purpose) {
    require(rows >= 0 && vocab > 0, "sample: sizes must be positive");
    if (rows == 0) return;
    require(logits && reals && wholes && tokens, "sample: a null address");
    std::vector<SamplingParams> params;
    params.reserve(size_t(rows));
    for (int64_t i = 0; i < rows; ++i) {
        const double* real = pointer<double>(reals) + i * 3;
        const int64_t* whole = pointer<int64_t>(wholes) + i * 5;
        require(real[0] > 0 && whole[0] > 0, "sample: temperature and top_k must be positive");
        params.push_back({real[0], whole[0], real[1], real[2], whole[1], whole[2], whole[3], whole[4] != 0});
    }
    run_sample({pointer<float>(logits), nullptr, {params.data(), purpose}, pointer<int64_t>(tokens), vocab}, rows);
}

// Advice that the system may decline; does nothing where it is unsupported.
void advise_large_pages(uintptr_t address, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 4096;
    const uintptr_t begin = (address + PAGE - 1) / PAGE * PAGE, end = (address + uintptr_t(bytes)) / PAGE * PAGE;
    if (bytes > 0 && end > begin) madvise(pointer<void>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

// Commits untouched memory, zeroed, with all threads; touched memory keeps its content. Returns false if the system
// cannot:
// then it commits each page on first write.
bool commit_memory(uintptr_t address, int64_t bytes) {
#if defined(__linux__)
    constexpr int POPULATE_WRITE = 23;  // MADV_POPULATE_WRITE, which older headers lack
    constexpr int64_t PIECE = 128 << 10;
    struct Job {
        uintptr_t begin, end;
        std::atomic<bool> failed;
    };
    const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
    Job job{(address + page - 1) / page * page, (address + uintptr_t(bytes)) / page * page, {false}};
    if (bytes <= 0 || job.end <= job.begin) return true;
    parallel((int64_t(job.end - job.begin) + PIECE - 1) / PIECE, 1, [](const void* p, int64_t begin, int64_t end) {
        Job& all = *static_cast<Job*>(const_cast<void*>(p));
        const uintptr_t from = all.begin + uintptr_t(begin * PIECE), to = all.begin + uintptr_t(end * PIECE);
        const size_t size = (to < all.end ? to : all.end) - from;
        if (madvise(pointer<void>(from), size, POPULATE_WRITE) != 0) all.failed.store(true, std::memory_order_relaxed);
    }, &job);
    return !job.failed.load();
#else
    (void)address, (void)bytes;
    return false;
#endif
}

// Interleaves untouched memory over these NUMA nodes, page by page. Returns 0, or the system's errno; ENOSYS if it does
// not support NUMA.
int interleave(uintptr_t address, int64_t bytes, const std::vector<int>& nodes) {
    constexpr int MOST_NODES = 1024, BITS = 8 * sizeof(unsigned long);
    unsigned long mask[MOST_NODES / BITS] = {};
    for (const int node : nodes) {
        require(node >= 0 && node < MOST_NODES, "interleave: a NUMA node is out of range");
        mask[node / BITS] |= 1ul << node % BITS;
    }
#if defined(SYS_mbind)
    constexpr int MPOL_INTERLEAVE = 3;
    const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (address + page - 1) / page * page, end = (address + uintptr_t(bytes)) / page * page;
    if (bytes <= 0 || end <= begin) return 0;
    return syscall(SYS_mbind, begin, end - begin, MPOL_INTERLEAVE, mask, MOST_NODES + 1, 0) == 0 ? 0 : errno;
#else
    (void)address, (void)bytes;
    return ENOSYS;
#endif
}

// The memory policy at an address: the system's number of the policy, or -errno.
int placement(uintptr_t address) {
#if defined(SYS_get_mempolicy)
    constexpr unsigned long MPOL_F_ADDR = 2;
    int policy = -1;
    return syscall(SYS_get_mempolicy, &policy, nullptr, 0, address, MPOL_F_ADDR) == 0 ? policy : -errno;
#else
    (void)address;
    return -ENOSYS;
#endif
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

nb::dict functions() {
    nb::dict found;
    found["silu"] = int(SILU);
    found["gelu"] = int(GELU);
    found["gelu_tanh"] = int(GELU_TANH);
    found["relu"] = int(RELU);
    found["softplus"] = int(SOFTPLUS);
    found["sigmoid"] = int(SIGMOID);
    found["soft_cap"] = int(SOFT_CAP);
    found["plus"] = int(PLUS);
    return found;
}

nb::dict page_types() {
    nb::dict found;
    found["float32"] = int(PAGES_F32);
    found["bfloat16"] = int(PAGES_BF16);
    found["int8"] = int(PAGES_INT8);
    found["float8_e4m3fn"] = int(PAGES_FP8);
    found["uint8"] = int(PAGES_INT4);
    return found;
}

}  // namespace

NB_MODULE(_native, m) {
    using Free = nb::call_guard<nb::gil_scoped_release>;
    m.doc() = "CPU kernels. Call them through bankfull.ops: addresses are not checked here.";
    m.def("linear", &linear, Free(), "format, x, weight, bias (0: none), y: addresses; rows, outputs, inner");
    m.def("linear_best", &linear_best, Free(),
          "format, x, weight, bias (0: none), best (int64): addresses; rows, outputs, inner");
    m.def("rms_norm", &rms_norm, Free(), "x, delta (0: none), joined, weight, y: addresses; rows, columns, eps, offset");
    m.def("layer_norm", &layer_norm, Free(), "x, weight, bias, y: addresses; rows, columns, eps");
    m.def("pointwise", &pointwise, Free(), "function, x, factor (0: none), y: addresses; count, parameter");
    m.def("rotate", &rotate, Free(), "x, cos, sin, y: addresses; tokens, heads, size, half");
    m.def("rope_angles", &rope_angles, Free(), "positions, frequencies, cos, sin: addresses; tokens, half, scale");
    m.def("embedding", &embedding, Free(), "format, ids, table, y: addresses; tokens, rows of the table, columns, scale");
    m.def("write_pages", &write_tokens, Free(),
          "rows, pages, slots: addresses; tokens, bytes of a row, frames, page_tokens, bytes of a frame and of a token");
    m.def("move_tokens", &move, Free(),
          "frames, source, target, segments' first bytes and sizes: addresses; rows, moves of a row, segments, number of "
          "frames, page_tokens, bytes of a frame");
    m.def("write_rounded", &round_tokens, Free(),
          "type, rows, pages (address, strides, scales' address and strides), slots, tokens, heads, size, frames, page_tokens");
    m.def("page_types", &page_types, "name -> code for paged_attention");
    m.def("paged_attention", &attention,
          "type of the pages, q, k and v (address, strides, scales' address and strides), y, q_start, kv_len, ancestors (0: no "
          "trees), table, its stride and width, "
          "frames, page_tokens, tokens, heads, kv_heads, size, values, scale, window (0: none), "
          "mask (window or 0: none, dilation, stride, global tokens, columns, aligned), block (0: causal), "
          "cap (0: none), sinks (0: none), partial (over the pages that are here; y has a log-sum-exp after each head)");
    m.def("causal_conv", &causal_conv,
          "x, weight, bias (0: none), state, y, q_start, kept, read, write, its stride and width, slots, tokens, channels, "
          "width, token stride of x, silu");
    m.def("selective_scan", &selective_scan,
          "x, delta, a, b, c, d, state, y, token strides of b and c, q_start, kept, read, write, its stride and width, "
          "slots, tokens, channels, size");
    m.def("linear_attention", &linear_attention,
          "q, k, v, slopes, state, normalizer (0: none), y, token strides of q, k and v, q_start, kept, read, write, its "
          "stride and width, slots, tokens, heads, key, value");
    m.def("delta_rule", &delta_rule,
          "q, k, v, a, b, rate, shift, state, y, token strides of the first five, q_start, kept, read, write, its stride and "
          "width, slots, tokens, key_heads, heads, key, value");
    m.def("taylor_features", &taylor_features, Free(),
          "x, y, token stride of x, tokens, heads, size, factors of single elements and of pairs");
    m.def("functions", &functions, "name -> code for pointwise");
    m.def("dequantize", &dequantize, Free(), "format, blocks, out: addresses; number of blocks");
    m.def("sample", &sample, Free(),
          "logits, reals (temperature, top_p, min_p), wholes (top_k, seed, child, position, greedy), tokens: addresses; "
          "rows, vocab, purpose");
    m.def("formats", &formats, "name -> (format, weights per block, bytes per block)");
    m.def("isas", &available_isas, "the instruction sets of this CPU, best first");
    m.def("isa", &current_isa);
    m.def("set_isa", &set_isa);
    bind_tape(m);
    m.def("advise_large_pages", &advise_large_pages, "address, bytes: requests huge pages for untouched memory");
    m.def("commit_memory", &commit_memory, Free(), "address, bytes: commits memory before it is written; false if unsupported");
    m.def("interleave", &interleave, "address, bytes, nodes: interleaves untouched memory over NUMA nodes; 0 or errno");
    m.def("placement", &placement, "address: the number of its memory policy (3: interleave), or -errno");
    m.def("threads", &threads, Free());
    m.def("set_threads", &set_thread_count, Free());
    bind_lookup(m);
    bind_packed(m);
    bind_experts(m);
    bind_latent(m);
    bind_state_spaces(m);
    bind_ceilings(m);
}
