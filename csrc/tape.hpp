// The tape: a step of a model as a flat list of kernels. Arguments are fixed addresses, offsets in an arena that scales
// with the step's tokens, or inputs of the step; so one tape serves every batch, and a replay neither allocates nor
// calls the interpreter.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "experts.hpp"
#include "kernels.hpp"

namespace bankfull {

struct Input {
    uintptr_t address;
    int64_t width;  // columns, if two-dimensional
};

class Instruction;

struct Step {
    int64_t tokens, sequences;
    uint8_t* arena;
    const Input* inputs;
    Rounding rounding = Rounding::Int8;  // set by the tape, not by the caller
    const Choice* choice = nullptr;  // how next tokens are sampled; null: greedy
    const Instruction* next = nullptr;  // the instruction after the current one; set by the tape
};

struct Place {
    enum Kind : int { NONE, FIXED, ARENA, INPUT } kind = NONE;
    int64_t value = 0;   // an address; preceding arena bytes per token; or the index of an input
    int64_t offset = 0;  // bytes

    template <class T>
    T* in(const Step& step) const {
        switch (kind) {
            case NONE: return nullptr;
            case FIXED: return reinterpret_cast<T*>(uintptr_t(value + offset));
            case ARENA: return reinterpret_cast<T*>(step.arena + value * step.tokens + offset);
            default: return reinterpret_cast<T*>(step.inputs[value].address + uintptr_t(offset));
        }
    }
    int64_t width(const Step& step) const { return step.inputs[value].width; }
    bool operator==(const Place& other) const {
        return kind == other.kind && value == other.value && offset == other.offset;
    }
};

class Instruction {
  public:
    virtual ~Instruction() = default;
    virtual void run(const Step& step) const = 0;
    // Announces the memory it will read to waiting threads, see threads.hpp; returns whether it did.
    virtual bool announce(const Step&) const { return false; }
    // Whether it reads these encoded rows and needs them Hadamard-transformed. If so, their encoder transforms them by
    // `transform`.
    virtual bool wants_hadamard(const Step&, const Place& rows, HadamardRowsJob& transform) const {
        (void)rows, (void)transform;
        return false;
    }
    std::string name;
    mutable int64_t nanoseconds = 0, runs = 0;  // of timed replays
};

class Tape {
  public:
    Tape() = default;
    Tape(const Tape&) = delete;
    Tape& operator=(const Tape&) = delete;
    void add(std::unique_ptr<Instruction> instruction, std::string name);
    // Runs instructions [begin, end), in order.
    void replay(const Step& step, int64_t begin, int64_t end, bool timed) const;
    const std::vector<std::unique_ptr<Instruction>>& instructions() const { return instructions_; }
    Instruction* last() const { return instructions_.empty() ? nullptr : instructions_.back().get(); }
    // Rounding of activations for packed weights; all instructions of a tape must agree.
    void round(Rounding rounding);
    int64_t inputs = 0;  // number of inputs of a step

  private:
    std::vector<std::unique_ptr<Instruction>> instructions_;
    std::optional<Rounding> rounding_;
};

struct EmbeddingStep : Instruction {
    Place ids, table, y;
    Format format;
    int64_t count, columns, row_bytes;
    float scale;
    void run(const Step& step) const override;
};

struct AnglesStep : Instruction {
    Place positions, frequencies, cos, sin;
    int64_t half;
    float scale;
    void run(const Step& step) const override;
};

struct NormStep : Instruction {
    Place x, delta, joined, weight, y, encoded;
    int64_t per_token, columns;  // rows per token (1, or its heads), and their size
    float eps, offset;
    void run(const Step& step) const override;
};

struct LayerNormStep : Instruction {
    Place x, weight, bias, y;
    int64_t per_token, columns;
    float eps;
    void run(const Step& step) const override;
};

struct LinearStep : Instruction {
    Place x, weight, bias, y;
    Format format;
    int64_t x_stride, outputs, inner, row_bytes;
    void run(const Step& step) const override;
};

struct EncodeStep : Instruction {
    Place x, encoded;
    int64_t x_stride, columns;
    void run(const Step& step) const override;
};

// Sampled or best output per token: see run_packed_best and run_packed_choice.
struct PackedHeadStep : Instruction {
    Place x, weight, hadamard, bias, chosen;
    int64_t inner, outputs;
    int pack;
    void run(const Step& step) const override;
    bool announce(const Step& step) const override;
    bool wants_hadamard(const Step& step, const Place& rows, HadamardRowsJob& transform) const override;

  private:
    PackedPart part(const Step& step) const;
    PackedJob job(const Step& step, const PackedPart& part) const;
};

struct HeadStep : Instruction {
    Place x, weight, bias, chosen;
    Format format;
    int64_t x_stride, outputs, inner, row_bytes;
    void run(const Step& step) const override;
};

struct PointwiseStep : Instruction {
    Place x, factor, y;
    Pointwise kind;
    int64_t per_token;
    float parameter;
    void run(const Step& step) const override;
};

struct RotateStep : Instruction {
    Place x, cos, sin, y;
    int64_t heads, size, half;
    void run(const Step& step) const override;
};

using PageStrides = std::tuple<int64_t, int64_t, int64_t>;  // frame, token, head

// Pages of one layer, as Pages: `address` of the first element, `scales` of the first scale if there are any.
struct PagesAt {
    Place address;
    PageStrides strides;
    Place scales;
    PageStrides scale_strides;
};

struct WriteStep : Instruction {
    Place rows, slots;
    PagesAt pages;
    int64_t row_stride, heads, size, frames, page_tokens;
    PageType type;
    void run(const Step& step) const override;
};

struct IntakeStep : Instruction {
    Place q, k, v, cos, sin, turned, slots;
    PagesAt k_pages, v_pages;
    int64_t q_token, k_token, v_token, turned_token;
    int64_t frames, page_tokens, heads, kv_heads, size, values, half;
    PageType type;
    IntakeJob job(const Step& step) const;
    void run(const Step& step) const override;
};

struct PackedStep : Instruction {
    struct Part {
        Place weight, hadamard, bias, y;
        int64_t y_stride, outputs;
        int pack;
    };
    Place x, encoded;
    int64_t inner;
    std::vector<Part> parts;
    int gate = -1;
    std::unique_ptr<IntakeStep> intake;  // fused attention intake of the three parts; may be null
    void run(const Step& step) const override;
    bool announce(const Step& step) const override;
    bool wants_hadamard(const Step& step, const Place& rows, HadamardRowsJob& transform) const override;

  private:
    static constexpr size_t MOST = 8;
    PackedJob job(const Step& step, PackedPart (&found)[MOST]) const;
};

struct AttentionStep : Instruction {
    Place q, y, encoded, q_start, kv_len, ancestors, table, sinks;
    PagesAt k_pages, v_pages;
    int64_t q_token, frames, page_tokens, heads, kv_heads, size, values, window, block;
    SparseMask mask;
    float scale, cap;
    PageType type;
    void run(const Step& step) const override;
};

struct HeadProductsStep : Instruction {
    Place x, weight, y, cos, sin;
    int64_t heads, columns, outputs, half, x_token, x_head, y_token, y_head, w_head, w_column, w_output;
    bool narrow;
    void run(const Step& step) const override;
};

struct LatentsStep : Instruction {
    Place x, weight, cos, sin, slots;
    PagesAt pages;
    int64_t x_token, rank, half, frames, page_tokens;
    float eps;
    PageType type;
    void run(const Step& step) const override;
};

struct RecurrentAt {
    Place q_start, kept, read, write;
    int64_t slots;
    RecurrentPlan plan(const Step& step, int64_t channels) const;
};

struct ConvStep : Instruction {
    Place x, weight, bias, state, y;
    RecurrentAt at;
    int64_t channels, width, x_token;
    bool silu;
    void run(const Step& step) const override;
};

struct SsdStep : Instruction {
    Place x, dt, a, b, c, d, bias, state, y;
    RecurrentAt at;
    int64_t heads, size, n, groups, x_token, dt_token, b_token, c_token;
    float low, high;
    void run(const Step& step) const override;
};

struct GatedNormStep : Instruction {
    Place x, gate, weight, y;
    int64_t columns, groups, gate_token;
    float eps;
    bool before;
    void run(const Step& step) const override;
};

struct DiagonalStep : Instruction {
    Place x, decay, out, d, state, y;
    RecurrentAt at;
    int64_t channels, pairs, x_token;
    void run(const Step& step) const override;
};

struct ScaleStep : Instruction {
    Place x, factors, y;
    int64_t columns, x_token;
    void run(const Step& step) const override;
};

struct GatherStep : Instruction {
    Place x, columns, y;
    int64_t count, x_token;
    void run(const Step& step) const override;
};

struct ScanStep : Instruction {
    Place x, delta, a, b, c, d, state, y;
    RecurrentAt at;
    int64_t channels, size, b_token, c_token;
    void run(const Step& step) const override;
};

struct LinearAttentionStep : Instruction {
    Place q, k, v, slopes, state, normalizer, y;
    RecurrentAt at;
    int64_t heads, key, value, q_token, k_token, v_token;
    void run(const Step& step) const override;
};

struct DeltaStep : Instruction {
    Place q, k, v, a, b, rate, shift, state, y;
    RecurrentAt at;
    int64_t key_heads, heads, key, value, q_token, k_token, v_token, a_token, b_token;
    void run(const Step& step) const override;
};

struct TaylorStep : Instruction {
    Place x, y;
    int64_t heads, size, x_token;
    float single, pair;
    void run(const Step& step) const override;
};

struct RouteStep : Instruction {
    Place logits, bias, weights, chosen;
    RouteJob rule;  // its addresses are set in each step
    void run(const Step& step) const override;
};

struct ExpertsStep : Instruction {
    struct Matrix {
        Place data, bias;
        int64_t bytes;
        int kind;
        ExpertMatrix in(const Step& step) const { return {data.in<uint8_t>(step), bias.in<float>(step), bytes, kind}; }
    };
    Place x, encoded, chosen, weights, y;
    Matrix gate, up, down;
    int64_t per_token, experts, hidden, inner;
    int function;
    void run(const Step& step) const override;
};

struct AddGatedStep : Instruction {
    Place x, delta, gate, y;
    int64_t columns;
    void run(const Step& step) const override;
};

}  // namespace bankfull
