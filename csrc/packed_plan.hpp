// Packed linear layers, cut over the threads.
#pragma once

#include "jobs.hpp"

namespace bankfull {

// The sizes must fit: a K that the packs hold, encoded rows of the job's kind, codes only for weights in blocks.
void run_packed(const PackedJob& job);
// The job with its rows mixed, if there are many and weights that were mixed for them. Good until the next call.
PackedJob with_mixed_rows(const PackedJob& job);
// How activations of a step with so many rows are encoded.
Activations encoding_of(int64_t rows, Rounding rounding);
void run_encode(const EncodeJob& job, int64_t rows);

}  // namespace bankfull
