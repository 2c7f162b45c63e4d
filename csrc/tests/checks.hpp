// Shared by the test programs: random operands in guarded memory, and counted verdicts.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

namespace checks {

// The same sequence on every machine.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        state_ += 0x9e3779b97f4a7c15u;
        uint64_t bits = state_;
        bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
        bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
        return bits ^ bits >> 31;
    }
    int64_t between(int64_t least, int64_t most) { return least + int64_t(next() % uint64_t(most - least + 1)); }
    bool one_in(int64_t count) { return between(1, count) == 1; }
    double unit() { return double(next() >> 11) * 0x1p-53; }
    float normal() {
        constexpr double TWO_PI = 6.283185307179586;
        const double length = std::sqrt(-2 * std::log(1 - unit()));
        return float(length * std::cos(TWO_PI * unit()));
    }
    template <class T, size_t Count>
    T any_of(const T (&choices)[Count]) {
        return choices[between(0, int64_t(Count) - 1)];
    }

  private:
    uint64_t state_;
};

// An array that ends at the end of mapped memory: an overrun stops the program, whatever instruction causes it. The
// address sanitizer guards both ends of heap memory, so with it the heap is used.
template <class T>
class Array {
  public:
    explicit Array(int64_t size, int64_t alignment = alignof(T)) : size_(size) {
        const size_t bytes = size_t(size) * sizeof(T);
#if defined(__SANITIZE_ADDRESS__)
        memory_ = ::operator new(bytes, std::align_val_t(alignment));
        alignment_ = alignment;
        data_ = static_cast<T*>(memory_);
#else
        const size_t page = size_t(sysconf(_SC_PAGESIZE));
        const size_t held = (bytes + page - 1) / page * page;
        reserved_ = held + page;
        memory_ = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory_ == MAP_FAILED || mprotect(static_cast<uint8_t*>(memory_) + held, page, PROT_NONE) != 0) {
            std::perror("checks: no memory");
            std::exit(2);
        }
        const uintptr_t end = reinterpret_cast<uintptr_t>(memory_) + held;
        data_ = reinterpret_cast<T*>((end - bytes) / uintptr_t(alignment) * uintptr_t(alignment));
#endif
        std::memset(static_cast<void*>(data_), 0, bytes);
    }
    Array(Array&& other) noexcept
        : data_(other.data_), memory_(other.memory_), size_(other.size_), reserved_(other.reserved_),
          alignment_(other.alignment_) {
        other.memory_ = nullptr;
    }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    ~Array() {
        if (!memory_) return;
#if defined(__SANITIZE_ADDRESS__)
        ::operator delete(memory_, std::align_val_t(alignment_));
#else
        munmap(memory_, reserved_);
#endif
    }

    T* data() { return data_; }
    const T* data() const { return data_; }
    int64_t size() const { return size_; }
    T& operator[](int64_t i) { return data_[i]; }
    const T& operator[](int64_t i) const { return data_[i]; }
    T* begin() { return data_; }
    T* end() { return data_ + size_; }
    const T* begin() const { return data_; }
    const T* end() const { return data_ + size_; }

  private:
    T* data_ = nullptr;
    void* memory_ = nullptr;
    int64_t size_;
    size_t reserved_ = 0;
    int64_t alignment_ = 0;
};

inline Array<float> normals(Random& random, int64_t count, float spread = 1.0f) {
    Array<float> numbers(count);
    for (float& number : numbers) number = random.normal() * spread;
    return numbers;
}

// Counts checks and failures; the first few failures of each subject are printed.
class Verdicts {
  public:
    static Verdicts& all() {
        static Verdicts verdicts;
        return verdicts;
    }
    void begin(std::string about) {
        about_ = std::move(about);
        told_ = 0;
#if !defined(__SANITIZE_ADDRESS__)  // which reports more
        std::signal(SIGSEGV, [](int) {
            std::fprintf(stderr, "%s: access out of bounds\n", all().about_.c_str());
            _exit(1);
        });
#endif
    }
    void pass() { ++made_; }
    void fail(const std::string& message) {
        ++made_;
        ++failed_;
        if (++told_ <= 3) std::fprintf(stderr, "%s: %s\n", about_.c_str(), message.c_str());
    }
    // Prints the last line and returns the exit status.
    int report(const char* program) const {
        std::printf("%s: %lld checks, %lld failed\n", program, static_cast<long long>(made_),
                    static_cast<long long>(failed_));
        return failed_ == 0 && made_ > 0 ? 0 : 1;
    }

  private:
    std::string about_;
    int64_t made_ = 0, failed_ = 0, told_ = 0;
};

inline std::string number(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", value);
    return text;
}

// Within `tolerance` of the expected value; NaN is close to NaN only.
inline void expect_close(double got, double want, double tolerance, const char* what, int64_t place) {
    if (std::fabs(got - want) <= tolerance || (std::isnan(got) && std::isnan(want)) || got == want)
        return Verdicts::all().pass();
    Verdicts::all().fail(std::string(what) + "[" + std::to_string(place) + "] is " + number(got) + ", not " +
                         number(want) + " (within " + number(tolerance) + ")");
}

inline void expect(bool fine, const char* promise) {
    if (fine) return Verdicts::all().pass();
    Verdicts::all().fail(std::string("violated: ") + promise);
}

template <class T>
void expect_same_bits(const T* got, const T* want, int64_t count, const char* what) {
    if (std::memcmp(got, want, size_t(count) * sizeof(T)) == 0) return Verdicts::all().pass();
    int64_t place = 0;
    while (std::memcmp(got + place, want + place, sizeof(T)) == 0) ++place;
    Verdicts::all().fail(std::string(what) + "[" + std::to_string(place) + "] is " + number(double(got[place])) +
                         ", not the bits of " + number(double(want[place])));
}

}  // namespace checks
