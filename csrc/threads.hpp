// A small persistent pool. The caller is worker 0 and never waits for a thread that has not started on its job: on a
// busy machine, a sleeping worker costs its help, not a stall.
#pragma once

#include <cstdint>

namespace bankfull {

using Task = void (*)(const void* job, int64_t begin, int64_t end);

// Calls task on pieces [begin, end) that cover [0, count) once, in any order and on any thread; returns when all are
// done. Two callers take turns.
void parallel(int64_t count, int64_t piece, Task task, const void* job);

int threads();
void set_threads(int count);

// What a coming job reads, for threads that wait for it: each fetches the beginning of its own share into its cache, so
// that memory is not idle while the last pieces of a job are finished, between jobs, and in jobs of a single thread.
// Units of a job lie side by side; `runs` of them count on from each other, or are read `together`.
struct Coming {
    static constexpr int MOST = 4;
    struct Run {
        const uint8_t* data;
        int64_t units, unit_bytes;
    };
    int count = 0;  // runs
    bool together = false;  // unit n of every run is read with unit n of the others
    int64_t piece = 1;      // units, as the job will be cut
    Run runs[MOST];
};

// The caller's jobs from here on are waited behind with this; it is copied. Nothing is read that does not exist: an address
// that is not there costs nothing.
void announce(const Coming& coming);

// This thread's buffer; the next call may move it.
float* scratch(int64_t floats);

}  // namespace bankfull
