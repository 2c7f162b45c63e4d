// A small persistent thread pool. The caller is worker 0 and never waits for a thread that has not started on its job:
// on a busy machine, a sleeping worker only fails to help; it does not stall the job.
#pragma once

#include <cstdint>

namespace bankfull {

using Task = void (*)(const void* job, int64_t begin, int64_t end);

// Calls task on pieces [begin, end) that cover [0, count) once, in any order and on any thread; returns when all are
// done.
// Concurrent callers are serialized.
void parallel(int64_t count, int64_t piece, Task task, const void* job);

int threads();
void set_threads(int count);

// Memory that a coming job reads: each waiting thread prefetches the start of its own share, so that memory is busy
// while the last pieces of a job finish, between jobs, and in single-threaded jobs. Units of a job are contiguous; the
// units of several `runs` are numbered consecutively, or read `together`.
struct Coming {
    static constexpr int MOST = 4;
    struct Run {
        const uint8_t* data;
        int64_t units, unit_bytes;
    };
    int count = 0;  // runs
    bool together = false;  // unit n of all runs is read at the same time
    int64_t piece = 1;      // units, as the job will be split
    Run runs[MOST];
};

// Threads that wait for the caller's next jobs prefetch this; it is copied. Only prefetch instructions are used, so an
// invalid address is harmless.
void announce(const Coming& coming);

// This thread's buffer; the next call may reallocate it.
float* scratch(int64_t floats);

}  // namespace bankfull
