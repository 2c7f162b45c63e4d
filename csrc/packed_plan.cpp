#include "packed_plan.hpp"

#include <vector>

#include "isa.hpp"
#include "packing.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

constexpr int64_t PIECE_WEIGHTS = 16384, PIECE_VALUES = 8192;  // worth a hand-over between threads
constexpr int64_t PIECE_UNITS = 8;
// Rows that all dense weights of a job share should fit the second-level cache: so many bytes of them. But with fewer than
// so many rows at a time, weights would be read too often.
constexpr int64_t CACHED_ROW_BYTES = 1 << 20, LEAST_ROWS = 128;

int64_t count_units(const PackedJob& job) {
    if (job.gate >= 0) return units_of(job.parts->outputs);
    int64_t units = 0;
    for (int64_t i = 0; i < job.count; ++i) units += units_of(job.parts[i].outputs);
    return units;
}

int64_t rows_at_once(const PackedJob& job) {
    for (int64_t i = 0; i < job.count; ++i)
        if (!LAYOUTS[job.parts[i].pack].dense()) return job.rows;  // widening blocks is worth all rows
    const int64_t fitting = CACHED_ROW_BYTES / (2 * job.inner) / 32 * 32;
    return fitting < LEAST_ROWS ? LEAST_ROWS : fitting;
}

void run_units(const PackedJob& job) {
    const int64_t units = count_units(job), weights = UNIT_OUTPUTS * job.inner * (job.gate >= 0 ? 2 : 1);
    // Threads take pieces as they can: a handful each evens out what the machine does meanwhile.
    const int64_t even = units / (8 * threads()), least = (PIECE_WEIGHTS + weights - 1) / weights;
    const int64_t capped = even < PIECE_UNITS ? even : PIECE_UNITS;
    parallel(units, capped > least ? capped : least, [](const void* p, int64_t begin, int64_t end) {
        kernels().packed(*static_cast<const PackedJob*>(p), begin, end);
    }, &job);
}

}  // namespace

void run_packed(const PackedJob& job) {
    const int64_t most = rows_at_once(job);
    if (job.rows <= most) return run_units(job);
    thread_local std::vector<PackedPart> parts;  // kept for its memory
    parts.assign(job.parts, job.parts + job.count);
    PackedJob some = job;
    some.parts = parts.data();
    for (int64_t first = 0; first < job.rows; first += most) {
        some.rows = job.rows - first < most ? job.rows - first : most;
        run_units(some);
        some.x.data += most * job.x.stride;
        if (some.out.data) some.out.data += most * job.out.stride;
        for (PackedPart& part : parts)
            if (part.y) part.y += most * part.y_stride;
    }
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
