// State spaces for Python. Tensors and arrays are passed as addresses, as in module.cpp.
#include <nanobind/nanobind.h>

#include <stdexcept>

#include "bindings.hpp"
#include "operations.hpp"

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

// Addresses of q_start, kept, read and write; their counts.
struct Slots {
    uintptr_t q_start, kept, read, write;
    int64_t sequences, most, slots;
    RecurrentPlan plan(int64_t tokens, int64_t channels) const {
        require(q_start && kept && read && write && sequences > 0, "recurrent: a null address or no sequences");
        return checked_plan({pointer<int64_t>(q_start), pointer<int64_t>(kept), pointer<int64_t>(read), pointer<int64_t>(write),
                             sequences, most, channels}, most, slots, tokens);
    }
};

}  // namespace

void bind_state_spaces(nb::module_& m) {
    using Free = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Slots>(m, "Slots")
        .def("__init__", [](Slots* self, uintptr_t q_start, uintptr_t kept, uintptr_t read, uintptr_t write,
                            int64_t sequences, int64_t most, int64_t slots) {
            new (self) Slots{q_start, kept, read, write, sequences, most, slots};
        });
    m.def("ssd_scan",
          [](const Slots& at, uintptr_t x, uintptr_t dt, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t bias,
             uintptr_t state, uintptr_t y, int64_t tokens, int64_t heads, int64_t size, int64_t n, int64_t groups,
             int64_t x_token, int64_t dt_token, int64_t b_token, int64_t c_token, float low, float high) {
              require(heads > 0 && size > 0 && n > 0 && groups > 0 && heads % groups == 0, "ssd_scan: sizes do not match");
              if (tokens == 0) return;
              require(x && dt && a && b && c && d && bias && state && y, "ssd_scan: a null address");
              run_ssd_scan({at.plan(tokens, heads), pointer<float>(x), pointer<float>(dt), pointer<float>(a), pointer<float>(b),
                            pointer<float>(c), pointer<float>(d), pointer<float>(bias), pointer<float>(state),
                            pointer<float>(y), size, n, groups, x_token, dt_token, b_token, c_token, low, high}, tokens);
          },
          Free(), "slots, x, dt, a, b, c, d, bias, state, y, tokens, heads, size, n, groups, token strides of x, dt, b and c, "
                  "limits of the time step");
    m.def("gated_rms_norm",
          [](uintptr_t x, uintptr_t gate, uintptr_t weight, uintptr_t y, int64_t rows, int64_t columns, int64_t groups,
             int64_t gate_token, float eps, bool before) {
              require(columns > 0 && groups > 0 && columns % groups == 0, "gated_rms_norm: sizes do not match");
              if (rows == 0) return;
              require(x && gate && weight && y, "gated_rms_norm: a null address");
              run_gated_rms_norm({pointer<float>(x), pointer<float>(gate), pointer<float>(weight), pointer<float>(y), columns,
                                  groups, gate_token, eps, before}, rows);
          },
          Free(), "x, gate, weight, y, rows, columns, groups, token stride of the gate, eps, whether the norm comes first");
    m.def("diagonal_scan",
          [](const Slots& at, uintptr_t x, uintptr_t decay, uintptr_t out, uintptr_t d, uintptr_t state, uintptr_t y,
             int64_t tokens, int64_t channels, int64_t pairs, int64_t x_token) {
              require(channels > 0 && pairs > 0, "diagonal_scan: sizes must be positive");
              if (tokens == 0) return;
              require(x && decay && out && d && state && y, "diagonal_scan: a null address");
              run_diagonal_scan({at.plan(tokens, channels), pointer<float>(x), pointer<float>(decay), pointer<float>(out),
                                 pointer<float>(d), pointer<float>(state), pointer<float>(y), pairs, x_token}, tokens);
          },
          Free(), "slots, x, decay, out, d, state, y, tokens, channels, pairs, token stride of x");
    m.def("scale_columns",
          [](uintptr_t x, uintptr_t factors, uintptr_t y, int64_t rows, int64_t columns, int64_t x_token) {
              require(columns > 0, "scale_columns: sizes must be positive");
              if (rows == 0) return;
              require(x && factors && y, "scale_columns: a null address");
              run_scale_columns({pointer<float>(x), pointer<float>(factors), pointer<float>(y), columns, x_token}, rows);
          },
          Free(), "x, factors, y, rows, columns, token stride of x");
}
