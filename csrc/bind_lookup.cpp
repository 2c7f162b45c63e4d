// Lookup of draft tokens for Python. Arrays are passed as addresses, as in module.cpp.
#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "lookup.hpp"

namespace nb = nanobind;
using namespace bankfull;

namespace {

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_lookup(nb::module_& m) {
    m.attr("MOST_INDEXED") = MOST_INDEXED;
    nb::class_<Lookup>(m, "Lookup")
        .def(nb::init<int32_t, int32_t>())
        .def("open", [](Lookup& self, uintptr_t tokens, int64_t count) { return self.open(pointer<int64_t>(tokens), count); })
        .def("close", &Lookup::close)
        .def("extend",
             [](Lookup& self, uintptr_t sequences, uintptr_t counts, int64_t n, uintptr_t tokens) {
                 self.extend(pointer<int64_t>(sequences), pointer<int64_t>(counts), n, pointer<int64_t>(tokens));
             })
        .def("predict",
             [](Lookup& self, uintptr_t sequences, int64_t n, int64_t width, uintptr_t tokens, uintptr_t lengths,
                uintptr_t chances) {
                 self.predict(pointer<int64_t>(sequences), n, width, pointer<int64_t>(tokens), pointer<int64_t>(lengths),
                              pointer<double>(chances));
             })
        .def("nbytes", &Lookup::nbytes);
}
