#include "isa.hpp"

#include <atomic>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace bankfull {
namespace {

struct Isa {
    const char* name;
    const Kernels& (*table)();
};

#if defined(__x86_64__)

// CPUID leaf 7, for features that the compiler's own test does not know yet.
struct Leaf7 {
    unsigned ecx0 = 0, edx0 = 0, eax1 = 0;
    Leaf7() {
        unsigned a, b, c, d;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) ecx0 = c, edx0 = d;
        if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) eax1 = a;
    }
    bool avx512_vbmi() const { return ecx0 >> 1 & 1; }
    bool avx512_vnni() const { return ecx0 >> 11 & 1; }
    bool avx_vnni() const { return eax1 >> 4 & 1; }
    bool avx512_bf16() const { return eax1 >> 5 & 1; }
    bool tiles() const { return (edx0 >> 24 & 1) && (edx0 >> 22 & 1) && (edx0 >> 25 & 1); }  // tile, bf16, int8
};

// Tiles are eight KiB of registers: the kernel saves them only for a process that has requested them.
bool tiles_are_permitted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

#elif defined(__aarch64__)

// Extensions beyond the baseline. The numbers are from the kernel's interface; old headers lack the later ones.
struct Extensions {
    bool dotprod = false, i8mm = false, bf16 = false;
    Extensions() {
#if defined(__linux__)
        constexpr unsigned long DOTPROD = 1ul << 20, I8MM = 1ul << 13, BF16 = 1ul << 14;
        dotprod = getauxval(AT_HWCAP) & DOTPROD;
        i8mm = getauxval(26) & I8MM;  // AT_HWCAP2
        bf16 = getauxval(26) & BF16;
#elif defined(__APPLE__)
        dotprod = has("hw.optional.arm.FEAT_DotProd");
        i8mm = has("hw.optional.arm.FEAT_I8MM");
        bf16 = has("hw.optional.arm.FEAT_BF16");
#endif
    }
#if defined(__APPLE__)
    static bool has(const char* name) {
        int value = 0;
        size_t size = sizeof value;
        return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
    }
#endif
};

#endif

// The build lists its instruction sets: SET(generic) SET(avx2) and so on.
#define SET(name) {#name, kernels_##name},
constexpr Isa COMPILED[] = {BANKFULL_COMPILED};
#undef SET

void offer(std::vector<Isa>& found, bool here, const char* name) {
    for (const Isa& isa : COMPILED)
        if (here && std::strcmp(isa.name, name) == 0) found.push_back(isa);
}

std::vector<Isa> detect() {
    std::vector<Isa> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const Leaf7 leaf;
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    const bool vnni = avx512 && leaf.avx512_vnni();
    offer(found, vnni && leaf.avx512_vbmi() && leaf.avx512_bf16() && leaf.tiles() && tiles_are_permitted(), "amx");
    offer(found, vnni, "vnni");
    offer(found, avx512, "avx512");
    offer(found, avx2 && leaf.avx_vnni(), "avxvnni");
    offer(found, avx2, "avx2");
#elif defined(__aarch64__)
    const Extensions has;
    offer(found, has.dotprod && has.i8mm && has.bf16, "i8mm");
    offer(found, has.dotprod, "dotprod");
    offer(found, true, "neon");
#endif
    offer(found, true, "generic");
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
    throw std::invalid_argument("this CPU has no kernels named '" + name + "'");
}

const Kernels& kernels() { return chosen().load(std::memory_order_relaxed)->table(); }

}  // namespace bankfull
