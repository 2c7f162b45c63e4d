#include "tape.hpp"

#include <chrono>
#include <stdexcept>

#include "attention_plan.hpp"
#include "isa.hpp"
#include "operations.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

Encoded encoded_at(const Place& place, const Step& step, int64_t columns) {
    return {place.in<uint8_t>(step), encoded_stride(columns), encoding_of(step.tokens, step.rounding)};
}

Pages pages_at(const PagesAt& at, const Step& step) {
    const auto [frame, token, head] = at.strides;
    const auto [scale_frame, scale_token, scale_head] = at.scale_strides;
    return {at.address.in<uint8_t>(step), frame,       token,       head,
            at.scales.in<float>(step),    scale_frame, scale_token, scale_head};
}

}  // namespace

void Tape::add(std::unique_ptr<Instruction> instruction, std::string name) {
    instruction->name = std::move(name);
    instructions_.push_back(std::move(instruction));
}

void Tape::round(Rounding rounding) {
    if (rounding_ && *rounding_ != rounding)
        throw std::invalid_argument("tape: all instructions must round activations in the same way");
    rounding_ = rounding;
}

void Tape::replay(const Step& given, int64_t begin, int64_t end, bool timed) const {
    if (begin < 0 || begin > end || end > int64_t(instructions_.size()))
        throw std::invalid_argument("tape: an instruction index is out of range");
    const struct Forgetting {
        ~Forgetting() { drop_hadamard_rows(); }
    } forgetting;  // drops transformed rows of an instruction that did not run
    Step step = given;
    step.rounding = rounding_.value_or(Rounding::Int8);
    // While an instruction runs, idle threads prefetch for the next one that reads weights; after the last one, for the
    // next step's first.
    const int64_t count = int64_t(instructions_.size());
    int64_t announced = begin;
    for (int64_t i = begin; i < end; ++i) {
        if (announced <= i) {
            announced = i + 1;
            while (announced < i + count && !instructions_[size_t(announced % count)]->announce(step)) ++announced;
        }
        const Instruction& instruction = *instructions_[size_t(i)];
        step.next = i + 1 < end ? instructions_[size_t(i + 1)].get() : nullptr;
        if (!timed) {
            instruction.run(step);
            continue;
        }
        const auto begun = std::chrono::steady_clock::now();
        instruction.run(step);
        instruction.nanoseconds += (std::chrono::steady_clock::now() - begun).count();
        ++instruction.runs;
    }
    announce({});
}

void EmbeddingStep::run(const Step& step) const {
    run_embedding({ids.in<int64_t>(step), table.in<uint8_t>(step), y.in<float>(step), count, columns, row_bytes, scale},
                  format, step.tokens);
}

void AnglesStep::run(const Step& step) const {
    run_angles({positions.in<int64_t>(step), frequencies.in<float>(step), cos.in<float>(step), sin.in<float>(step), half,
                scale}, step.tokens);
}

void NormStep::run(const Step& step) const {
    HadamardRowsJob transform;
    const bool transforms = per_token == 1 && encoded.kind != Place::NONE && step.next &&
                       step.next->wants_hadamard(step, encoded, transform);
    run_rms_norm({x.in<float>(step), delta.in<float>(step), joined.in<float>(step), weight.in<float>(step),
                  y.in<float>(step), columns, eps, offset, encoded_at(encoded, step, columns)},
                 step.tokens * per_token, transforms ? &transform : nullptr);
}

void LayerNormStep::run(const Step& step) const {
    run_layer_norm({x.in<float>(step), weight.in<float>(step), bias.in<float>(step), y.in<float>(step), columns, eps},
                   step.tokens * per_token);
}

void LinearStep::run(const Step& step) const {
    run_linear({x.in<float>(step), x_stride, weight.in<uint8_t>(step), bias.in<float>(step), y.in<float>(step),
                step.tokens, outputs, inner, row_bytes}, format);
}

void EncodeStep::run(const Step& step) const {
    run_encode({x.in<float>(step), x_stride, columns, encoded_at(encoded, step, columns)}, step.tokens);
}

PackedJob PackedStep::job(const Step& step, PackedPart (&found)[MOST]) const {
    if (parts.size() > MOST) throw std::invalid_argument("tape: too many weights share one input");
    for (size_t i = 0; i < parts.size(); ++i)
        found[i] = {parts[i].weight.in<uint8_t>(step), parts[i].bias.in<float>(step), parts[i].y.in<float>(step),
                    parts[i].y_stride, parts[i].outputs, parts[i].pack, parts[i].hadamard.in<uint8_t>(step)};
    return {encoded_at(x, step, inner), step.tokens, inner, found, int64_t(parts.size()), gate,
            encoded_at(encoded, step, parts[0].outputs), {}};
}

void PackedStep::run(const Step& step) const {
    PackedPart found[MOST];
    if (intake)
        run_packed(job(step, found), checked_intake(intake->job(step), step.tokens));
    else
        run_packed(job(step, found));
}

bool PackedStep::announce(const Step& step) const {
    PackedPart found[MOST];
    announce_packed(job(step, found));
    return true;
}

bool PackedStep::wants_hadamard(const Step& step, const Place& rows, HadamardRowsJob& transform) const {
    PackedPart found[MOST];
    return x == rows && hadamard_before(job(step, found), transform);
}

PackedPart PackedHeadStep::part(const Step& step) const {
    return {weight.in<uint8_t>(step), bias.in<float>(step), nullptr, 0, outputs, pack, hadamard.in<uint8_t>(step)};
}

PackedJob PackedHeadStep::job(const Step& step, const PackedPart& part) const {
    return {encoded_at(x, step, inner), step.tokens, inner, &part, 1, -1, {}, {}};
}

void PackedHeadStep::run(const Step& step) const {
    const PackedPart own = part(step);
    if (step.choice)
        run_packed_choice(job(step, own), *step.choice, chosen.in<int64_t>(step));
    else
        run_packed_best(job(step, own), chosen.in<int64_t>(step));
}

bool PackedHeadStep::announce(const Step& step) const {
    const PackedPart own = part(step);
    announce_packed_head(job(step, own));
    return true;
}

bool PackedHeadStep::wants_hadamard(const Step& step, const Place& rows, HadamardRowsJob& transform) const {
    const PackedPart own = part(step);
    return x == rows && hadamard_before(job(step, own), transform);
}

void HeadStep::run(const Step& step) const {
    const LinearJob job{x.in<float>(step), x_stride, weight.in<uint8_t>(step), bias.in<float>(step), nullptr,
                        step.tokens, outputs, inner, row_bytes};
    if (step.choice)
        run_linear_choice(job, format, *step.choice, chosen.in<int64_t>(step));
    else
        run_linear_best(job, format, chosen.in<int64_t>(step));
}

void PointwiseStep::run(const Step& step) const {
    run_pointwise({x.in<float>(step), factor.in<float>(step), y.in<float>(step), parameter}, kind, step.tokens * per_token);
}

void RotateStep::run(const Step& step) const {
    run_rotate({x.in<float>(step), cos.in<float>(step), sin.in<float>(step), y.in<float>(step), heads, size, half},
               step.tokens);
}

void WriteStep::run(const Step& step) const {
    IntakeJob job{};
    job.k = rows.in<float>(step);
    job.k_token = row_stride;
    job.k_pages = pages_at(pages, step);
    job.slots = slots.in<int64_t>(step);
    job.places = frames * page_tokens;
    job.page_tokens = page_tokens;
    job.kv_heads = heads;
    job.size = size;
    job.type = type;
    run_intake(job, step.tokens);
}

IntakeJob IntakeStep::job(const Step& step) const {
    return {q.in<float>(step), k.in<float>(step), v.in<float>(step), q_token, k_token, v_token, cos.in<float>(step),
            sin.in<float>(step), turned.in<float>(step), turned_token, pages_at(k_pages, step), pages_at(v_pages, step),
            slots.in<int64_t>(step), frames * page_tokens, page_tokens, heads, kv_heads, size, values, half, type};
}

void IntakeStep::run(const Step& step) const { run_intake(job(step), step.tokens); }

void AttentionStep::run(const Step& step) const {
    AttentionJob job{};
    job.q = q.in<float>(step);
    job.y = y.in<float>(step);
    job.k = pages_at(k_pages, step);
    job.v = pages_at(v_pages, step);
    job.q_start = q_start.in<int64_t>(step);
    job.kv_len = kv_len.in<int64_t>(step);
    job.table = table.in<int64_t>(step);
    job.table_stride = table.width(step);
    job.ancestors = ancestors.in<uint64_t>(step);
    job.page_tokens = page_tokens;
    job.heads = heads;
    job.kv_heads = kv_heads;
    job.size = size;
    job.values = values;
    job.q_token = q_token;
    job.out = encoded_at(encoded, step, heads * values);
    job.window = window;
    job.mask = mask;
    job.block = block;
    job.scale = scale;
    job.cap = cap;
    job.sinks = sinks.in<float>(step);
    paged_attention(job, type, step.sequences, step.tokens, job.table_stride, frames);
}

void HeadProductsStep::run(const Step& step) const {
    run_head_products({x.in<float>(step), weight.in<uint8_t>(step), y.in<float>(step), cos.in<float>(step), sin.in<float>(step),
                       step.tokens, heads, columns, outputs, half, x_token, x_head, y_token, y_head, w_head, w_column,
                       w_output}, narrow);
}

void LatentsStep::run(const Step& step) const {
    run_write_latents({x.in<float>(step), weight.in<float>(step), cos.in<float>(step), sin.in<float>(step),
                       pages_at(pages, step), type, slots.in<int64_t>(step), x_token, rank, half, page_tokens, eps},
                      step.tokens, frames * page_tokens);
}

RecurrentPlan RecurrentAt::plan(const Step& step, int64_t channels) const {
    return checked_plan({q_start.in<int64_t>(step), kept.in<int64_t>(step), read.in<int64_t>(step),
                         write.in<int64_t>(step), step.sequences, write.width(step), channels},
                        write.width(step), slots, step.tokens);
}

void ConvStep::run(const Step& step) const {
    run_causal_conv({at.plan(step, channels), x.in<float>(step), weight.in<float>(step), bias.in<float>(step),
                     state.in<float>(step), y.in<float>(step), width, x_token, silu}, step.tokens);
}

void SsdStep::run(const Step& step) const {
    run_ssd_scan({at.plan(step, heads), x.in<float>(step), dt.in<float>(step), a.in<float>(step), b.in<float>(step),
                  c.in<float>(step), d.in<float>(step), bias.in<float>(step), state.in<float>(step), y.in<float>(step),
                  size, n, groups, x_token, dt_token, b_token, c_token, low, high}, step.tokens);
}

void GatedNormStep::run(const Step& step) const {
    run_gated_rms_norm({x.in<float>(step), gate.in<float>(step), weight.in<float>(step), y.in<float>(step), columns, groups,
                        gate_token, eps, before}, step.tokens);
}

void DiagonalStep::run(const Step& step) const {
    run_diagonal_scan({at.plan(step, channels), x.in<float>(step), decay.in<float>(step), out.in<float>(step),
                       d.in<float>(step), state.in<float>(step), y.in<float>(step), pairs, x_token}, step.tokens);
}

void ScaleStep::run(const Step& step) const {
    run_scale_columns({x.in<float>(step), factors.in<float>(step), y.in<float>(step), columns, x_token}, step.tokens);
}

void GatherStep::run(const Step& step) const {
    run_gather_columns({x.in<float>(step), columns.in<int32_t>(step), y.in<float>(step), count, x_token}, step.tokens);
}

void ScanStep::run(const Step& step) const {
    run_selective_scan({at.plan(step, channels), x.in<float>(step), delta.in<float>(step), a.in<float>(step),
                        b.in<float>(step), c.in<float>(step), d.in<float>(step), state.in<float>(step), y.in<float>(step),
                        size, b_token, c_token}, step.tokens);
}

void LinearAttentionStep::run(const Step& step) const {
    run_linear_attention({at.plan(step, heads), q.in<float>(step), k.in<float>(step), v.in<float>(step),
                          slopes.in<float>(step), state.in<float>(step), y.in<float>(step), normalizer.in<float>(step),
                          key, value, q_token, k_token, v_token}, step.tokens);
}

void DeltaStep::run(const Step& step) const {
    run_delta_rule({at.plan(step, heads), q.in<float>(step), k.in<float>(step), v.in<float>(step), a.in<float>(step),
                    b.in<float>(step), rate.in<float>(step), shift.in<float>(step), state.in<float>(step),
                    y.in<float>(step), key_heads, key, value, q_token, k_token, v_token, a_token, b_token}, step.tokens);
}

void TaylorStep::run(const Step& step) const {
    run_taylor_features({x.in<float>(step), y.in<float>(step), heads, size, x_token, single, pair}, step.tokens);
}

void RouteStep::run(const Step& step) const {
    RouteJob job = rule;
    job.logits = logits.in<float>(step), job.bias = bias.in<float>(step);
    job.weights = weights.in<float>(step), job.chosen = chosen.in<int32_t>(step);
    job.tokens = step.tokens;
    run_route(job);
}

void ExpertsStep::run(const Step& step) const {
    run_experts({x.in<float>(step), encoded_at(encoded, step, hidden), chosen.in<int32_t>(step), weights.in<float>(step),
                 y.in<float>(step), step.tokens, per_token, experts, hidden, inner, gate.in(step), up.in(step),
                 down.in(step), function});
}

void AddGatedStep::run(const Step& step) const {
    run_add_gated(x.in<float>(step), delta.in<float>(step), gate.in<float>(step), y.in<float>(step), step.tokens, columns);
}

}  // namespace bankfull
