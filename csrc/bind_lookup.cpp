// Lookup of draft tokens for Python. A step passes few numbers, so lists are copied; a prompt is passed as an address.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

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
        .def("extend", &Lookup::extend)
        .def("predict", &Lookup::predict)
        .def("tokens", &Lookup::tokens)
        .def("nbytes", &Lookup::nbytes);
}
