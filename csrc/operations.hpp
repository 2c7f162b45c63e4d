// Operations over the whole pool: each cuts its job into pieces that are worth a hand-over between threads, and returns
// when all of it is done. What fits one piece never leaves the caller's thread.
#pragma once

#include "kernels.hpp"
#include "packed_plan.hpp"

namespace bankfull {

void run_linear(const LinearJob& job, Format format);
// `mixing`: what is to be done with the encoded rows as well, by whoever has just made them; may be null.
void run_rms_norm(const NormJob& job, int64_t rows, const MixRowsJob* mixing = nullptr);
void run_layer_norm(const LayerNormJob& job, int64_t rows);
void run_pointwise(const PointwiseJob& job, Pointwise kind, int64_t count);
void run_sample(const SampleJob& job, int64_t rows);
void run_rotate(const RotateJob& job, int64_t tokens);
void run_angles(const AnglesJob& job, int64_t tokens);
void run_embedding(const EmbeddingJob& job, Format format, int64_t tokens);
// `job`, if its slots exist; else std::invalid_argument.
const IntakeJob& checked_intake(const IntakeJob& job, int64_t tokens);
void run_intake(const IntakeJob& job, int64_t tokens);
// For each row the highest of all outputs, without storing them: of one part, whose y is not used. -1 where a row has a
// NaN or no finite highest.
void run_packed_best(const PackedJob& job, int64_t* best);
void announce_packed_head(const PackedJob& job);  // as announce_packed, for these
void run_linear_best(const LinearJob& job, Format format, int64_t* best);
// For each row the token that its wish chooses among all outputs; -1 as above.
void run_packed_choice(const PackedJob& job, const Choice& choice, int64_t* tokens);
void run_linear_choice(const LinearJob& job, Format format, const Choice& choice, int64_t* tokens);

// `plan`, if its slots exist and its counts fit; at most `most` states of a sequence are kept. Else
// std::invalid_argument.
RecurrentPlan checked_plan(const RecurrentPlan& plan, int64_t most, int64_t slots, int64_t tokens);
void run_causal_conv(const ConvJob& job, int64_t tokens);
void run_selective_scan(const ScanJob& job, int64_t tokens);

}  // namespace bankfull
