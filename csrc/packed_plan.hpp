// Packed linear layers, split over the threads.
#pragma once

#include "jobs.hpp"

namespace bankfull {

// Sizes must match: a K that the packs support, encoded rows of the job's kind, codes only for block-quantized weights.
void run_packed(const PackedJob& job);
// The same for fused q, k and v projections with attention intake: each head is taken in as soon as it is complete, by
// the thread that finished it. Heads must be whole units; the intake was checked.
void run_packed(const PackedJob& job, const IntakeJob& intake);
// The job with Hadamard-transformed rows, if there are many and weights for them. Valid until the next call.
PackedJob with_hadamard_rows(const PackedJob& job);
// For the encoder of the next job's rows: whether that job needs them Hadamard-transformed. If so, `transform` must be
// done before it runs; with_hadamard_rows relies on it once.
bool hadamard_before(const PackedJob& next, HadamardRowsJob& transform);
void drop_hadamard_rows();
// Threads waiting for this job prefetch their first weights, see threads.hpp.
// `piece`: units, if the job is not split by run_packed.
void announce_packed(const PackedJob& job, int64_t piece = 0);
// Encoding of activations in a step with this many rows.
Activations encoding_of(int64_t rows, Rounding rounding);
void run_encode(const EncodeJob& job, int64_t rows);

}  // namespace bankfull
