#include "packed_plan.hpp"

#include "isa.hpp"
#include "packing.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

constexpr int64_t PIECE_WEIGHTS = 16384, PIECE_VALUES = 8192;  // worth a hand-over between threads
constexpr int64_t PIECE_UNITS = 8;

int64_t count_units(const PackedJob& job) {
    if (job.gate >= 0) return units_of(job.parts->outputs);
    int64_t units = 0;
    for (int64_t i = 0; i < job.count; ++i) units += units_of(job.parts[i].outputs);
    return units;
}

}  // namespace

void run_packed(const PackedJob& job) {
    const int64_t units = count_units(job), weights = UNIT_OUTPUTS * job.inner * (job.gate >= 0 ? 2 : 1);
    // Threads take pieces as they can: a handful each evens out what the machine does meanwhile.
    const int64_t even = units / (8 * threads()), least = (PIECE_WEIGHTS + weights - 1) / weights;
    const int64_t capped = even < PIECE_UNITS ? even : PIECE_UNITS;
    parallel(units, capped > least ? capped : least, [](const void* p, int64_t begin, int64_t end) {
        kernels().packed(*static_cast<const PackedJob*>(p), begin, end);
    }, &job);
}

Activations encoding_of(int64_t rows, Rounding rounding) {
    const int64_t from = kernels().tile_rows;
    const bool many = from && rows >= from;
    return many || rounding == Rounding::BFloat16 ? Activations::Tiles : Activations::Codes;
}

void run_encode(const EncodeJob& job, int64_t rows) {
    parallel(rows, PIECE_VALUES / job.columns + 1, [](const void* p, int64_t begin, int64_t end) {
        kernels().encode(*static_cast<const EncodeJob*>(p), begin, end);
    }, &job);
}

}  // namespace bankfull
