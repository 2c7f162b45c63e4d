// Latent attention for Python, around its attention kernel. Tensors are passed as addresses, as in module.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <tuple>

#include "bindings.hpp"
#include "operations.hpp"

namespace nb = nanobind;
using namespace bankfull;

namespace {

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void require(bool fine, const char* message) {
    if (!fine) throw std::invalid_argument(message);
}

}  // namespace

void bind_latent(nb::module_& m) {
    using Free = nb::call_guard<nb::gil_scoped_release>;
    m.def("head_products",
          [](uintptr_t x, uintptr_t weight, uintptr_t y, uintptr_t cos, uintptr_t sin, int64_t tokens, int64_t heads,
             int64_t columns, int64_t outputs, int64_t half, int64_t x_token, int64_t x_head, int64_t y_token, int64_t y_head,
             int64_t w_head, int64_t w_column, int64_t w_output, bool narrow) {
              if (tokens == 0) return;
              require(x && weight && y && (!half || (cos && sin)), "head_products: a null address");
              run_head_products({pointer<float>(x), pointer<uint8_t>(weight), pointer<float>(y), pointer<float>(cos),
                                 pointer<float>(sin), tokens, heads, columns, outputs, half, x_token, x_head, y_token, y_head,
                                 w_head, w_column, w_output}, narrow);
          },
          Free(), "x, weight, y, cos and sin (0: nothing rotates), tokens, heads, columns, outputs, half, token and head strides "
                  "of x and y, strides of the weight by head, column and output, whether it is bfloat16");
    m.def("write_latents",
          [](int type, uintptr_t x, uintptr_t weight, uintptr_t cos, uintptr_t sin, uintptr_t pages, int64_t frame, int64_t token,
             uintptr_t slots, int64_t tokens, int64_t x_token, int64_t rank, int64_t half, int64_t frames, int64_t page_tokens,
             float eps) {
              require(type >= 0 && type < PAGE_TYPES, "write_latents: unknown type of pages");
              if (tokens == 0) return;
              require(x && weight && cos && sin && pages && slots, "write_latents: a null address");
              run_write_latents({pointer<float>(x), pointer<float>(weight), pointer<float>(cos), pointer<float>(sin),
                                 {pointer<uint8_t>(pages), frame, token, 0, nullptr, 0, 0, 0}, PageType(type),
                                 pointer<int64_t>(slots), x_token, rank, half, page_tokens, eps},
                                tokens, frames * page_tokens);
          },
          Free(), "type of the pages, x, weight, cos, sin, pages and their strides by frame and token, slots, tokens, token stride "
                  "of x, rank, half, frames, page_tokens, eps");
}
