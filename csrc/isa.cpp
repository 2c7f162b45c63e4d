#include "isa.hpp"

#include <atomic>
#include <stdexcept>

namespace bankfull {
namespace {

struct Isa {
    const char* name;
    const Kernels& (*table)();
};

std::vector<Isa> detect() {
    std::vector<Isa> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    if (avx512) found.push_back({"avx512", kernels_avx512});
    if (avx2) found.push_back({"avx2", kernels_avx2});
#endif
    found.push_back({"generic", kernels_generic});
    return found;
}

const std::vector<Isa>& isas() {
    static const std::vector<Isa> found = detect();
    return found;
}

std::atomic<const Isa*>& chosen() {
    static std::atomic<const Isa*> isa{&isas().front()};
    return isa;
}

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas()) names.emplace_back(isa.name);
    return names;
}

std::string current_isa() { return chosen().load()->name; }

void set_isa(const std::string& name) {
    for (const Isa& isa : isas())
        if (name == isa.name) return chosen().store(&isa);
    throw std::invalid_argument("this processor has no kernels named '" + name + "'");
}

const Kernels& kernels() { return chosen().load(std::memory_order_relaxed)->table(); }

}  // namespace bankfull
