// Operations over the whole pool: each splits its job into pieces worth handing to another thread, and returns when all
// are done. A job of one piece stays on the caller's thread.
#pragma once

#include "kernels.hpp"
#include "packed_plan.hpp"

namespace bankfull {

void run_linear(const LinearJob& job, Format format);
// `transform`: Hadamard transform applied to the encoded rows by the thread that encoded them; may be null.
void run_rms_norm(const NormJob& job, int64_t rows, const HadamardRowsJob* transform = nullptr);
void run_layer_norm(const LayerNormJob& job, int64_t rows);
void run_pointwise(const PointwiseJob& job, Pointwise kind, int64_t count);
void run_sample(const SampleJob& job, int64_t rows);
void run_rotate(const RotateJob& job, int64_t tokens);
void run_angles(const AnglesJob& job, int64_t tokens);
void run_embedding(const EmbeddingJob& job, Format format, int64_t tokens);
// Returns `job` if its slots are valid; throws std::invalid_argument otherwise.
const IntakeJob& checked_intake(const IntakeJob& job, int64_t tokens);
void run_intake(const IntakeJob& job, int64_t tokens);
// Argmax over all outputs of each row, without storing them: of one part, whose y is not used. -1 if a row has a NaN or
// no finite maximum.
void run_packed_best(const PackedJob& job, int64_t* best);
void announce_packed_head(const PackedJob& job);  // as announce_packed, for heads
void run_linear_best(const LinearJob& job, Format format, int64_t* best);
// The token sampled for each row from all outputs; -1 as above.
void run_packed_choice(const PackedJob& job, const Choice& choice, int64_t* tokens);
void run_linear_choice(const LinearJob& job, Format format, const Choice& choice, int64_t* tokens);

// Returns `plan` if its slots and counts are valid, with at most `most` kept states per sequence; throws
// std::invalid_argument otherwise.
RecurrentPlan checked_plan(const RecurrentPlan& plan, int64_t most, int64_t slots, int64_t tokens);
// `narrow`: the weight is in bfloat16.
void run_head_products(const HeadProductsJob& job, bool narrow);
// `places`: KV slots that exist; throws std::invalid_argument if a token's slot is not among them.
void run_write_latents(const LatentsJob& job, int64_t tokens, int64_t places);
void run_causal_conv(const ConvJob& job, int64_t tokens);
void run_selective_scan(const ScanJob& job, int64_t tokens);
void run_linear_attention(const LinearAttentionJob& job, int64_t tokens);
void run_delta_rule(const DeltaJob& job, int64_t tokens);
void run_taylor_features(const TaylorJob& job, int64_t tokens);
void run_ssd_scan(const SsdJob& job, int64_t tokens);
void run_gated_rms_norm(const GatedNormJob& job, int64_t rows);
void run_diagonal_scan(const DiagonalJob& job, int64_t tokens);
void run_scale_columns(const ScaleJob& job, int64_t rows);
void run_gather_columns(const GatherJob& job, int64_t rows);
// Throws std::invalid_argument if one of the columns is not below `inner`.
void check_columns(const int32_t* columns, int64_t count, int64_t inner);

}  // namespace bankfull
