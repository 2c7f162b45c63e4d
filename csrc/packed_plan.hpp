// Packed linear layers, cut over the threads.
#pragma once

#include "jobs.hpp"

namespace bankfull {

// The sizes must fit: a K that the packs hold, encoded rows of the job's kind, codes only for weights in blocks.
void run_packed(const PackedJob& job);
// The same, and attention takes in what the three parts make: each head as soon as it is there, by the thread that finished
// it. Heads must be whole units; the intake was checked.
void run_packed(const PackedJob& job, const IntakeJob& intake);
// The job with its rows mixed, if there are many and weights that were mixed for them. Good until the next call.
PackedJob with_mixed_rows(const PackedJob& job);
// For whoever encodes the rows of a job that comes next: does it want them mixed? Then `mixing` must be done before it runs,
// which with_mixed_rows relies on, once.
bool mix_before(const PackedJob& next, MixRowsJob& mixing);
void forget_mixed_rows();
// Threads that wait for this job fetch their first weights meanwhile, see threads.hpp.
// `piece`: units, where the job is not cut by run_packed.
void announce_packed(const PackedJob& job, int64_t piece = 0);
// How activations of a step with so many rows are encoded.
Activations encoding_of(int64_t rows, Rounding rounding);
void run_encode(const EncodeJob& job, int64_t rows);

}  // namespace bankfull
