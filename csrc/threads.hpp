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

// This thread's buffer; the next call may move it.
float* scratch(int64_t floats);

}  // namespace bankfull
