// Measurements of the machine's ceilings, on all threads of the pool. Python does the timing.
#include <nanobind/nanobind.h>

#include <mutex>
#include <stdexcept>

#include "bindings.hpp"
#include "isa.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace bankfull;

namespace {

constexpr int64_t LINE = 64, PIECE_LINES = 4096;
constexpr int64_t PIECES = 8;  // per thread: a late one costs little

void require(bool fine, const char* message) {
    if (!fine) throw std::invalid_argument(message);
}

double read_memory(uintptr_t address, int64_t bytes, bool ahead) {
    require(address && address % LINE == 0 && bytes >= 0 && bytes % LINE == 0, "read_memory: not whole lines of 64 bytes");
    struct Job {
        float (*read)(const float*, int64_t, int64_t);
        const float* data;
        std::mutex& turn;
        double& sum;
    };
    std::mutex turn;
    double sum = 0;
    const Job job{kernels().read_lines[ahead ? 1 : 0], reinterpret_cast<const float*>(address), turn, sum};
    parallel(bytes / LINE, PIECE_LINES, [](const void* p, int64_t begin, int64_t end) {
        const Job& reading = *static_cast<const Job*>(p);
        const float piece = reading.read(reading.data, begin, end);
        const std::lock_guard<std::mutex> lock(reading.turn);
        reading.sum += double(piece);
    }, &job);
    return sum;
}

// Every thread reads its own share repeatedly: the bandwidth of its caches, without wake-ups in between.
double read_again(uintptr_t address, int64_t bytes, int64_t rounds, bool ahead) {
    require(address && address % LINE == 0 && bytes >= 0 && bytes % LINE == 0, "read_again: not whole lines of 64 bytes");
    require(rounds > 0, "read_again: no rounds");
    struct Job {
        float (*read)(const float*, int64_t, int64_t);
        const float* data;
        int64_t lines, shares, rounds;
        std::mutex& turn;
        double& sum;
    };
    std::mutex turn;
    double sum = 0;
    const Job job{kernels().read_lines[ahead ? 1 : 0], reinterpret_cast<const float*>(address),
                  bytes / LINE, threads(), rounds, turn, sum};
    parallel(job.shares, 1, [](const void* p, int64_t begin, int64_t end) {
        const Job& reading = *static_cast<const Job*>(p);
        double piece = 0;
        for (int64_t share = begin; share < end; ++share) {
            const int64_t first = reading.lines * share / reading.shares;
            const int64_t last = reading.lines * (share + 1) / reading.shares;
            for (int64_t round = 0; round < reading.rounds; ++round)
                piece += double(reading.read(reading.data, first, last));
        }
        const std::lock_guard<std::mutex> lock(reading.turn);
        reading.sum += piece;
    }, &job);
    return sum;
}

double multiply(int arithmetic, int64_t rounds) {
    require(arithmetic >= 0 && arithmetic < ARITHMETICS && rounds > 0, "multiply: unknown arithmetic, or no rounds");
    const Multiplication& chosen = kernels().multiply[arithmetic];
    if (!chosen.run) return 0;
    struct Job {
        float (*run)(int64_t);
        int64_t rounds;
    };
    const Job job{chosen.run, rounds};
    const int64_t pieces = PIECES * threads();
    parallel(pieces, 1, [](const void* p, int64_t begin, int64_t end) {
        const Job& work = *static_cast<const Job*>(p);
        for (int64_t piece = begin; piece < end; ++piece) work.run(work.rounds);
    }, &job);
    return chosen.operations * double(rounds) * double(pieces);
}

nb::dict arithmetics() {
    nb::dict found;
    const char* const names[ARITHMETICS] = {"float32", "bfloat16", "int8"};
    for (int i = 0; i < ARITHMETICS; ++i)
        if (kernels().multiply[i].run) found[names[i]] = i;
    return found;
}

}  // namespace

void bind_ceilings(nb::module_& m) {
    using Free = nb::call_guard<nb::gil_scoped_release>;
    m.def("read_memory", &read_memory, Free(), "address, bytes (whole cache lines), prefetch; returns the sum of the floats");
    m.def("read_again", &read_again, Free(), "address, bytes, rounds, prefetch: as read_memory, but each thread reads its own share `rounds` times");
    m.def("multiply", &multiply, Free(), "arithmetic, rounds; returns the number of multiplications and additions");
    m.def("arithmetics", &arithmetics, "name -> code for multiply, for those that the instruction set supports");
}
