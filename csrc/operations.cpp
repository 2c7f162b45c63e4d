#include "operations.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <stdexcept>
#include <vector>

#include "isa.hpp"
#include "hadamard.hpp"
#include "running_top.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

constexpr int64_t PIECE_WORK = 16384;  // multiplications worth handing to another thread
constexpr int64_t PIECE_ROW_WORK = 4096;  // the same for several passes over each element
constexpr int64_t PIECE_EXPONENTIALS = 4096;

template <class Job>
void spread(void (*kernel)(const Job&, int64_t, int64_t), const Job& job, int64_t count, int64_t piece) {
    struct Pair {
        void (*kernel)(const Job&, int64_t, int64_t);
        const Job& job;
    };
    const Pair pair{kernel, job};
    parallel(count, piece, [](const void* p, int64_t begin, int64_t end) {
        const Pair& both = *static_cast<const Pair*>(p);
        both.kernel(both.job, begin, end);
    }, &pair);
}

// Rows per piece that are worth handing over; half of them if some threads would otherwise have none.
int64_t piece_for(int64_t rows, int64_t worth) {
    const int64_t all = threads();
    return rows > worth && rows < worth * all ? std::max((rows + all - 1) / all, (worth + 1) / 2) : worth;
}

void require(bool fine, const char* message) {
    if (!fine) throw std::invalid_argument(message);
}

void angles(const AnglesJob& job, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
        for (int64_t i = 0; i < job.half; ++i) {
            const float angle = float(job.positions[token]) * job.frequencies[i];
            job.cos[token * job.half + i] = float(std::cos(double(angle))) * job.scale;
            job.sin[token * job.half + i] = float(std::sin(double(angle))) * job.scale;
        }
}

void gather(const GatherJob& job, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* const x = job.x + row * job.x_token;
        float* const y = job.y + row * job.count;
        for (int64_t i = 0; i < job.count; ++i) y[i] = x[job.columns[i]];
    }
}

}  // namespace

void run_linear(const LinearJob& job, Format format) {
    // A multiple of four outputs, so that prefill tiles stay whole.
    spread(kernels().linear[format], job, job.outputs, (PIECE_WORK / (job.inner * job.rows) + 4) / 4 * 4);
}

namespace {

struct NormedAndMixed {
    const NormJob& norm;
    const HadamardRowsJob& transform;
};

void norm_and_mix(const NormedAndMixed& both, int64_t begin, int64_t end) {
    kernels().rms_norm(both.norm, begin, end);
    kernels().hadamard_rows(both.transform, begin, end);
}

}  // namespace

void run_rms_norm(const NormJob& job, int64_t rows, const HadamardRowsJob* transform) {
    const int64_t piece = piece_for(rows, PIECE_ROW_WORK / job.columns + 1);
    if (!transform) return spread(kernels().rms_norm, job, rows, piece);
    // Rows of a block share the cache line of their scales.
    const bool blocks = rows >= 4 * HADAMARD_BLOCK * threads();
    spread(norm_and_mix, NormedAndMixed{job, *transform}, rows, blocks ? HADAMARD_BLOCK : piece);
}

void run_layer_norm(const LayerNormJob& job, int64_t rows) {
    spread(kernels().layer_norm, job, rows, PIECE_WORK / job.columns + 1);
}

void run_pointwise(const PointwiseJob& job, Pointwise kind, int64_t count) {
    spread(kernels().pointwise[kind], job, count, PIECE_EXPONENTIALS);
}

void run_rotate(const RotateJob& job, int64_t tokens) {
    spread(kernels().rotate, job, tokens, PIECE_WORK / (job.heads * job.size) + 1);
}

void run_angles(const AnglesJob& job, int64_t tokens) { spread(angles, job, tokens, 1 + 256 / (job.half + 1)); }

void run_embedding(const EmbeddingJob& job, Format format, int64_t tokens) {
    for (int64_t i = 0; i < tokens; ++i)
        if (job.ids[i] < 0 || job.ids[i] >= job.count)
            throw std::invalid_argument("embedding: an id is outside of the table");
    spread(kernels().embedding[format], job, tokens, PIECE_WORK / job.columns + 1);
}

const IntakeJob& checked_intake(const IntakeJob& job, int64_t tokens) {
    for (int64_t i = 0; i < tokens; ++i)
        require(job.slots[i] >= 0 && job.slots[i] < job.places, "write_pages: a slot is out of range");
    return job;
}

void run_intake(const IntakeJob& job, int64_t tokens) {
    checked_intake(job, tokens);
    spread(kernels().intake, job, tokens, PIECE_ROW_WORK / ((job.heads + 2 * job.kv_heads) * job.size) + 1);
}

namespace {

struct FloatHead {
    const LinearJob& linear;
    Format format;
};

// Outputs that exist at once per thread: fewer for few rows, so that many threads get equal pieces.
constexpr int64_t UNIT = 32, WIDTH = 16 * UNIT, NARROW = 4 * UNIT, NARROW_ROWS = 4;

int64_t width_for(int64_t rows) { return rows <= NARROW_ROWS ? NARROW : WIDTH; }

// Outputs [first, last) of each row, stored contiguously.
void some_outputs(const PackedJob& job, int64_t first, int64_t last, float* y) {
    PackedPart part = *job.parts;
    part.y = y - first;
    part.y_stride = last - first;
    PackedJob some = job;
    some.parts = &part;
    kernels().packed(some, first / UNIT, (last + UNIT - 1) / UNIT);
}

void some_outputs(const FloatHead& job, int64_t first, int64_t last, float* y) {
    LinearJob some = job.linear;
    some.weight += first * some.row_bytes;
    if (some.bias) some.bias += first;
    some.outputs = last - first;
    some.y = y;
    kernels().linear[job.format](some, 0, some.outputs);
}

template <class Job>
struct BestJob {
    const Job& job;
    int64_t rows, outputs;
    Best* found;  // per piece of the outputs and row
};

// Separate from `scratch`, which the kernels below use.
float* outputs_of_this_thread(int64_t floats) {
    thread_local std::vector<float> outputs;
    if (int64_t(outputs.size()) < floats) outputs.resize(size_t(floats));
    return outputs.data();
}

template <class Job>
void best_of_pieces(const BestJob<Job>& all, int64_t begin, int64_t end) {
    const int64_t most = width_for(all.rows);
    float* y = outputs_of_this_thread(all.rows * most);
    for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t first = piece * most, last = std::min(first + most, all.outputs);
        some_outputs(all.job, first, last, y);
        for (int64_t row = 0; row < all.rows; ++row) {
            Best best = kernels().best_of(y + row * (last - first), last - first);
            if (best.index >= 0) best.index += first;
            all.found[piece * all.rows + row] = best;
        }
    }
}

template <class Job>
void run_best(const Job& job, int64_t rows, int64_t outputs, int64_t* best) {
    const int64_t pieces = (outputs + width_for(rows) - 1) / width_for(rows);
    thread_local std::vector<Best> found;  // reuses its memory
    if (int64_t(found.size()) < pieces * rows) found.resize(size_t(pieces * rows));
    spread(best_of_pieces<Job>, BestJob<Job>{job, rows, outputs, found.data()}, pieces, 1);
    for (int64_t row = 0; row < rows; ++row) {
        Best most{-std::numeric_limits<float>::infinity(), -1};
        for (int64_t piece = 0; piece < pieces; ++piece) {
            const Best& next = found[size_t(piece * rows + row)];
            const bool spoilt = next.index < 0 && !(next.value < 0.0f);  // NaN or +inf, but not a piece of only -inf
            if (spoilt || next.value > most.value) most = next;
            if (spoilt) break;
        }
        best[row] = most.index;
    }
}

template <class Job>
struct ScoresJob {
    const Job& job;
    int64_t rows, outputs;
    float *scores, *maxima;  // per row
};

template <class Job>
void scores_of_pieces(const ScoresJob<Job>& all, int64_t begin, int64_t end) {
    static_assert(WIDTH % SCORE_BLOCK == 0 && NARROW % SCORE_BLOCK == 0, "a block of scores must lie in one piece");
    const int64_t most = width_for(all.rows);
    float* y = outputs_of_this_thread(all.rows * most);
    const int64_t blocks = (all.outputs + SCORE_BLOCK - 1) / SCORE_BLOCK;
    for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t first = piece * most, last = std::min(first + most, all.outputs), width = last - first;
        some_outputs(all.job, first, last, y);
        for (int64_t row = 0; row < all.rows; ++row) {
            kernels().block_maxima(y + row * width, width, all.maxima + row * blocks + first / SCORE_BLOCK);
            std::copy_n(y + row * width, width, all.scores + row * all.outputs + first);
        }
    }
}

template <class Job>
struct TopJob {
    const Job& job;
    int64_t rows, outputs;
    std::deque<RunningTop>& tops;  // one per row
};

template <class Job>
void tops_of_pieces(const TopJob<Job>& all, int64_t begin, int64_t end) {
    const int64_t most = width_for(all.rows);
    float* y = outputs_of_this_thread(all.rows * most);
    float maxima[WIDTH / SCORE_BLOCK];
    for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t first = piece * most, last = std::min(first + most, all.outputs), width = last - first;
        some_outputs(all.job, first, last, y);
        for (int64_t row = 0; row < all.rows; ++row) {
            kernels().block_maxima(y + row * width, width, maxima);
            all.tops[size_t(row)].add(y + row * width, maxima, first, width);
        }
    }
}

// Without storing all scores, if every row needs only a few of them; returns false if that was not enough.
template <class Job>
bool choose_from_top(const Job& job, int64_t rows, int64_t outputs, const Choice& choice, int64_t* tokens) {
    constexpr int64_t FEW = 128;
    for (int64_t row = 0; row < rows; ++row)
        if (!choice.params[row].greedy && choice.params[row].top_k > FEW) return false;
    thread_local std::deque<RunningTop> tops;  // reuses its memory
    while (int64_t(tops.size()) < rows) tops.emplace_back();
    for (int64_t row = 0; row < rows; ++row)
        tops[size_t(row)].begin(choice.params[row].greedy ? 1 : choice.params[row].top_k);
    spread(tops_of_pieces<Job>, TopJob<Job>{job, rows, outputs, tops}, (outputs + width_for(rows) - 1) / width_for(rows), 1);
    bool known = true;
    for (int64_t row = 0; row < rows && known; ++row)
        known = tops[size_t(row)].choose(choice.params[row], choice.purpose, tokens[row]);
    return known;
}

template <class Job>
void run_choice(const Job& job, int64_t rows, int64_t outputs, const Choice& choice, int64_t* tokens) {
    if (choose_from_top(job, rows, outputs, choice, tokens)) return;
    const int64_t pieces = (outputs + width_for(rows) - 1) / width_for(rows), blocks = (outputs + SCORE_BLOCK - 1) / SCORE_BLOCK;
    thread_local std::vector<float> scores, maxima;  // reuse their memory
    if (int64_t(scores.size()) < rows * outputs) scores.resize(size_t(rows * outputs));
    if (int64_t(maxima.size()) < rows * blocks) maxima.resize(size_t(rows * blocks));
    spread(scores_of_pieces<Job>, ScoresJob<Job>{job, rows, outputs, scores.data(), maxima.data()}, pieces, 1);
    run_sample({scores.data(), maxima.data(), choice, tokens, outputs}, rows);
}

}  // namespace

void run_packed_choice(const PackedJob& job, const Choice& choice, int64_t* tokens) {
    run_choice(with_hadamard_rows(job), job.rows, job.parts->outputs, choice, tokens);
}

void run_linear_choice(const LinearJob& job, Format format, const Choice& choice, int64_t* tokens) {
    run_choice(FloatHead{job, format}, job.rows, job.outputs, choice, tokens);
}

void run_packed_best(const PackedJob& job, int64_t* best) {
    run_best(with_hadamard_rows(job), job.rows, job.parts->outputs, best);
}

void announce_packed_head(const PackedJob& job) { announce_packed(job, width_for(job.rows) / UNIT); }

void run_linear_best(const LinearJob& job, Format format, int64_t* best) {
    run_best(FloatHead{job, format}, job.rows, job.outputs, best);
}

RecurrentPlan checked_plan(const RecurrentPlan& plan, int64_t most, int64_t slots, int64_t tokens) {
    require(plan.q_start[0] == 0 && plan.q_start[plan.sequences] == tokens, "recurrent: q_start does not cover the tokens");
    for (int64_t i = 0; i < plan.sequences; ++i) {
        const int64_t count = plan.q_start[i + 1] - plan.q_start[i];
        require(count >= 0 && plan.kept[i] >= 0 && plan.kept[i] <= count && plan.kept[i] <= most,
                "recurrent: more states are kept than there are tokens or slots");
        require(plan.read[i] >= 0 && plan.read[i] < slots, "recurrent: a slot to read is out of range");
        for (int64_t j = 0; j < plan.kept[i]; ++j) {
            const int64_t slot = plan.write[i * plan.write_stride + j];
            require(slot >= 0 && slot < slots, "recurrent: a slot to write is out of range");
        }
    }
    return plan;
}

void run_head_products(const HeadProductsJob& job, bool narrow) {
    require(job.heads > 0 && job.columns > 0 && job.outputs > 0 && job.half >= 0 && (job.w_column == 1 || job.w_output == 1),
            "head_products: sizes do not match");
    constexpr int64_t PART = 64;  // as in latent.hpp
    const int64_t items = job.heads * ((job.outputs + PART - 1) / PART);
    const int64_t each = job.tokens * job.columns * (job.outputs < PART ? job.outputs : PART) + 1;
    spread(kernels().head_products[narrow], job, items, PIECE_WORK / each + 1);
}

void run_write_latents(const LatentsJob& job, int64_t tokens, int64_t places) {
    require(job.rank > 0 && job.half >= 0 && job.page_tokens > 0 && job.type != PAGES_INT8, "write_latents: sizes do not match");
    for (int64_t i = 0; i < tokens; ++i)
        require(job.slots[i] >= 0 && job.slots[i] < places, "write_latents: a slot is out of range");
    spread(kernels().write_latents, job, tokens, PIECE_ROW_WORK / (job.rank + 2 * job.half) + 1);
}

void run_causal_conv(const ConvJob& job, int64_t tokens) {
    const int64_t items = job.plan.sequences * ((job.plan.channels + 15) / 16);
    const int64_t each = tokens * job.plan.channels * job.width / items + 1;
    spread(kernels().causal_conv, job, items, PIECE_WORK / each + 1);
}

void run_selective_scan(const ScanJob& job, int64_t tokens) {
    const int64_t items = job.plan.sequences * ((job.plan.channels + 15) / 16);
    const int64_t each = tokens * job.plan.channels * job.size / items + 1;
    spread(kernels().selective_scan, job, items, PIECE_EXPONENTIALS / each + 1);
}

void run_linear_attention(const LinearAttentionJob& job, int64_t tokens) {
    const int64_t items = job.plan.sequences * job.plan.channels * ((job.value + 31) / 32);
    const int64_t each = tokens * job.plan.channels * job.key * job.value * 3 / items + 1;
    spread(kernels().linear_attention, job, items, PIECE_WORK / each + 1);
}

void run_delta_rule(const DeltaJob& job, int64_t tokens) {
    const int64_t items = job.plan.sequences * job.plan.channels * ((job.value + 31) / 32);
    const int64_t each = tokens * job.plan.channels * job.key * job.value * 4 / items + 1;
    spread(kernels().delta_rule, job, items, PIECE_WORK / each + 1);
}

void run_taylor_features(const TaylorJob& job, int64_t tokens) {
    spread(kernels().taylor_features, job, tokens * job.heads, PIECE_WORK / (2 * job.size * job.size) + 1);
}

void run_ssd_scan(const SsdJob& job, int64_t tokens) {
    const int64_t items = job.plan.sequences * job.plan.channels;
    const int64_t each = tokens * job.plan.channels * job.size * job.n / items + 1;
    spread(kernels().ssd_scan, job, items, PIECE_WORK / each + 1);
}

void run_gated_rms_norm(const GatedNormJob& job, int64_t rows) {
    spread(kernels().gated_rms_norm, job, rows, piece_for(rows, PIECE_ROW_WORK / job.columns + 1));
}

void run_diagonal_scan(const DiagonalJob& job, int64_t tokens) {
    const int64_t items = job.plan.sequences * ((job.plan.channels + 15) / 16);
    const int64_t each = tokens * job.plan.channels * job.pairs * 4 / items + 1;
    spread(kernels().diagonal_scan, job, items, PIECE_WORK / each + 1);
}

void run_scale_columns(const ScaleJob& job, int64_t rows) {
    spread(kernels().scale_columns, job, rows, PIECE_WORK / job.columns + 1);
}

void run_gather_columns(const GatherJob& job, int64_t rows) { spread(gather, job, rows, PIECE_WORK / job.count + 1); }

void check_columns(const int32_t* columns, int64_t count, int64_t inner) {
    for (int64_t i = 0; i < count; ++i)
        require(columns[i] >= 0 && columns[i] < inner, "gather_columns: a column is out of range");
}

}  // namespace bankfull
