// Packed linear layers, cut over the threads.
#pragma once

#include "jobs.hpp"

namespace bankfull {

// The sizes must fit: whole blocks of K, encoded rows of the job's kind, tiles only where tile_rows is not 0.
void run_packed(const PackedJob& job);
// How activations of a step with so many rows are encoded.
Activations encoding_of(int64_t rows);
void run_encode(const EncodeJob& job, int64_t rows);

}  // namespace bankfull
