#include "experts.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "isa.hpp"
#include "operations.hpp"
#include "packing.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

constexpr int64_t PIECE_WEIGHTS = 16384, PIECE_VALUES = 8192;  // minimum worth handing to another thread
constexpr int64_t FEW_ROWS = 64, MOST_UNITS = 8;

template <class Job>
void spread(int64_t count, int64_t piece, const Job& job) {
    if (count) parallel(count, piece, [](const void* p, int64_t begin, int64_t end) {
        (*static_cast<const Job*>(p))(begin, end);
    }, &job);
}

template <class T>
T* room(std::vector<T>& memory, int64_t count) {
    if (int64_t(memory.size()) < count) memory.resize(size_t(count));
    return memory.data();
}

// Encoded rows start at multiples of 64 bytes.
uint8_t* aligned_room(std::vector<uint8_t>& memory, int64_t bytes) {
    uint8_t* data = room(memory, bytes + 64);
    return data + (64 - reinterpret_cast<uintptr_t>(data) % 64) % 64;
}

// A NaN ranks above all numbers, so that every token gets valid experts.
float rank_of(float score) { return score != score ? INFINITY : score; }

void route_token(const RouteJob& job, int64_t token, float* scores, float* ranks, uint8_t* open) {
    const float* logits = job.logits + token * job.experts;
    float highest = -INFINITY, sum = 0.0f;
    for (int64_t i = 0; i < job.experts; ++i) highest = std::max(highest, logits[i]);
    for (int64_t i = 0; i < job.experts; ++i) {
        scores[i] = job.sigmoid ? 1.0f / (1.0f + std::exp(-logits[i])) : std::exp(logits[i] - highest);
        sum += scores[i];
    }
    for (int64_t i = 0; i < job.experts; ++i) {
        if (!job.sigmoid) scores[i] /= sum;
        ranks[i] = rank_of(job.bias ? scores[i] + job.bias[i] : scores[i]);
        open[i] = job.groups == 1;
    }
    const int64_t size = job.experts / job.groups;
    if (job.groups > 1) {
        thread_local std::vector<float> best;
        float* of_group = room(best, job.groups);
        for (int64_t group = 0; group < job.groups; ++group) {
            float first = -INFINITY, second = -INFINITY;
            for (int64_t i = group * size; i < (group + 1) * size; ++i) {
                if (ranks[i] > first)
                    second = first, first = ranks[i];
                else
                    second = std::max(second, ranks[i]);
            }
            of_group[group] = job.group_best == 1 ? first : first + second;
        }
        for (int64_t kept = 0; kept < job.groups_kept; ++kept) {
            int64_t found = -1;
            for (int64_t group = 0; group < job.groups; ++group)
                if (!open[group * size] && (found < 0 || of_group[group] > of_group[found])) found = group;
            std::fill_n(open + found * size, size, uint8_t(1));
        }
    }
    float* weights = job.weights + token * job.per_token;
    int32_t* chosen = job.chosen + token * job.per_token;
    float total = 0.0f;
    for (int64_t slot = 0; slot < job.per_token; ++slot) {
        int64_t found = -1;
        for (int64_t i = 0; i < job.experts; ++i)
            if (open[i] && (found < 0 || ranks[i] > ranks[found])) found = i;
        open[found] = 0;
        chosen[slot] = int32_t(found);
        weights[slot] = scores[found];
        total += scores[found];
    }
    const float factor = job.renormalize ? job.scale / (total + 1e-20f) : job.scale;
    for (int64_t slot = 0; slot < job.per_token; ++slot) weights[slot] *= factor;
}

// The tokens of one expert: rows [first, first + rows) in the order of experts.
struct Share {
    int64_t expert, first, rows;
};

// Pairs of token and expert in the order of experts.
struct Sorted {
    std::vector<Share> shares;   // experts with tokens
    std::vector<int64_t> place;  // pair -> row
    std::vector<int64_t> token;  // row -> token
};

const Sorted& sorted_pairs(const ExpertsJob& job) {
    thread_local Sorted sorted;  // reuses its memory
    thread_local std::vector<int64_t> next;
    const int64_t pairs = job.tokens * job.per_token;
    next.assign(size_t(job.experts), 0);
    for (int64_t i = 0; i < pairs; ++i) {
        if (job.chosen[i] < 0 || job.chosen[i] >= job.experts) throw std::invalid_argument("experts: an id is out of range");
        ++next[size_t(job.chosen[i])];
    }
    sorted.shares.clear();
    int64_t first = 0;
    for (int64_t expert = 0; expert < job.experts; ++expert) {
        const int64_t rows = next[size_t(expert)];
        if (rows) sorted.shares.push_back({expert, first, rows});
        next[size_t(expert)] = first;
        first += rows;
    }
    sorted.place.resize(size_t(pairs));
    sorted.token.resize(size_t(pairs));
    for (int64_t i = 0; i < pairs; ++i) {
        const int64_t row = next[size_t(job.chosen[i])]++;
        sorted.place[size_t(i)] = row;
        sorted.token[size_t(row)] = i / job.per_token;
    }
    return sorted;
}

// Each expert's rows: those of its tokens side by side, or the token's own row where it has one token.
class Rows {
  public:
    Rows(const Sorted& sorted, const uint8_t* from, int64_t stride, std::vector<uint8_t>& memory)
        : sorted_(sorted), from_(from), stride_(stride) {
        const int64_t pairs = int64_t(sorted.token.size());
        if (int64_t(sorted.shares.size()) == pairs) return;
        gathered_ = aligned_room(memory, pairs * stride);
        const auto gather = [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row)
                std::memcpy(gathered_ + row * stride, from + sorted.token[size_t(row)] * stride, size_t(stride));
        };
        spread(pairs, PIECE_VALUES / stride + 1, gather);
    }
    uint8_t* of(const Share& share) const {
        if (gathered_) return gathered_ + share.first * stride_;
        return const_cast<uint8_t*>(from_ + sorted_.token[size_t(share.first)] * stride_);
    }

  private:
    const Sorted& sorted_;
    const uint8_t* from_;
    int64_t stride_;
    uint8_t* gathered_ = nullptr;
};

// Units that a thread takes at a time: of one expert after the other, so that its rows stay in the cache.
int64_t piece_of(int64_t units, int64_t weights, int64_t rows, int64_t experts) {
    const int64_t least = (PIECE_WEIGHTS + weights - 1) / weights, even = units / (8 * threads());
    const int64_t most = rows > FEW_ROWS * experts ? MOST_UNITS / 2 : MOST_UNITS;
    return std::max(std::min(even, most), std::max<int64_t>(least, 1));
}

// All jobs have the same number of units.
void run_jobs(const std::vector<PackedJob>& jobs, int64_t units, int64_t weights, int64_t rows) {
    const int64_t count = int64_t(jobs.size());
    const auto some = [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t own = begin / units, unit = begin % units, stop = std::min(units, unit + end - begin);
            kernels().packed(jobs[size_t(own)], unit, stop);
            begin += stop - unit;
        }
    };
    spread(count * units, piece_of(count * units, weights, rows, count), some);
}

PackedPart part_of(const ExpertMatrix& matrix, int64_t expert, int64_t outputs, float* y) {
    return {matrix.data + expert * matrix.bytes, matrix.bias ? matrix.bias + expert * outputs : nullptr, y, outputs, outputs,
            matrix.kind, nullptr};
}

void activate(const ExpertsJob& job, float* gate, const float* up, int64_t count) {
    const auto clamped = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const float low = std::min(gate[i], 7.0f), both = std::min(std::max(up[i], -7.0f), 7.0f);
            gate[i] = (both + 1.0f) * low / (1.0f + std::exp(-1.702f * low));
        }
    };
    if (job.function == CLAMPED_SWIGLU)
        spread(count, PIECE_VALUES / 2, clamped);
    else
        run_pointwise({gate, up, gate, 0.0f}, Pointwise(job.function), count);
}

// Results of all pairs in the order of experts, (pairs, hidden).
const float* packed_pairs(const ExpertsJob& job, const Sorted& sorted) {
    thread_local std::vector<uint8_t> rows_memory, inner_memory;
    thread_local std::vector<float> gate_memory, up_memory, out_memory;
    thread_local std::vector<PackedJob> jobs;
    thread_local std::vector<PackedPart> parts;
    const int64_t pairs = job.tokens * job.per_token, stride = encoded_stride(job.inner);
    const Rows rows(sorted, job.encoded.data, job.encoded.stride, rows_memory);
    uint8_t* inner = aligned_room(inner_memory, pairs * stride);
    const Activations kind = job.encoded.kind;
    const bool gated = job.function != CLAMPED_SWIGLU, encodes = gated && job.inner % UNIT_OUTPUTS == 0;
    float* gate = encodes ? nullptr : room(gate_memory, pairs * job.inner);
    float* up = gated ? nullptr : room(up_memory, pairs * job.inner);
    parts.resize(2 * sorted.shares.size());
    jobs.clear();
    for (const Share& share : sorted.shares) {
        PackedPart* own = parts.data() + 2 * jobs.size();
        own[0] = part_of(job.gate, share.expert, job.inner, gate ? gate + share.first * job.inner : nullptr);
        own[1] = part_of(job.up, share.expert, job.inner, up ? up + share.first * job.inner : nullptr);
        const Encoded out = encodes ? Encoded{inner + share.first * stride, stride, kind} : Encoded{};
        jobs.push_back({{rows.of(share), job.encoded.stride, kind}, share.rows, job.hidden, own, 2,
                        gated ? job.function : -1, out, {}});
    }
    const int64_t units = units_of(job.inner);
    run_jobs(jobs, gated ? units : 2 * units, UNIT_OUTPUTS * job.hidden * (gated ? 2 : 1), pairs);
    if (!gated) activate(job, gate, up, pairs * job.inner);
    if (!encodes) run_encode({gate, job.inner, job.inner, {inner, stride, kind}}, pairs);
    float* out = room(out_memory, pairs * job.hidden);
    for (size_t i = 0; i < sorted.shares.size(); ++i) {
        const Share& share = sorted.shares[i];
        parts[i] = part_of(job.down, share.expert, job.hidden, out + share.first * job.hidden);
        jobs[i] = {{inner + share.first * stride, stride, kind}, share.rows, job.inner, &parts[i], 1, -1, {}, {}};
    }
    run_jobs(jobs, units_of(job.hidden), UNIT_OUTPUTS * job.inner, pairs);
    return out;
}

// One matrix of all experts over their rows, (pairs, outputs); `rows` are those of each share, in order.
void float_products(const Sorted& sorted, const std::vector<const float*>& rows, const ExpertMatrix& matrix,
                    int64_t outputs, int64_t inner, float* y) {
    constexpr int64_t UNIT = 32;
    const int64_t units = (outputs + UNIT - 1) / UNIT, count = int64_t(sorted.shares.size());
    const auto some = [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const size_t own = size_t(begin / units);
            const Share& share = sorted.shares[own];
            const int64_t unit = begin % units, stop = std::min(units, unit + end - begin);
            const LinearJob job{rows[own], inner, matrix.data + share.expert * matrix.bytes,
                                matrix.bias ? matrix.bias + share.expert * outputs : nullptr, y + share.first * outputs,
                                share.rows, outputs, inner, matrix.bytes / outputs};
            kernels().linear[matrix.kind](job, unit * UNIT, std::min(stop * UNIT, outputs));
            begin += stop - unit;
        }
    };
    spread(count * units, piece_of(count * units, UNIT * inner, int64_t(sorted.token.size()), count), some);
}

const float* float_pairs(const ExpertsJob& job, const Sorted& sorted) {
    thread_local std::vector<uint8_t> memory;
    thread_local std::vector<float> gate_memory, up_memory, out_memory;
    thread_local std::vector<const float*> at;
    const int64_t pairs = job.tokens * job.per_token;
    const Rows rows(sorted, reinterpret_cast<const uint8_t*>(job.x), job.hidden * 4, memory);
    float *gate = room(gate_memory, pairs * job.inner), *up = room(up_memory, pairs * job.inner);
    float* out = room(out_memory, pairs * job.hidden);
    at.clear();
    for (const Share& share : sorted.shares) at.push_back(reinterpret_cast<const float*>(rows.of(share)));
    float_products(sorted, at, job.gate, job.inner, job.hidden, gate);
    float_products(sorted, at, job.up, job.inner, job.hidden, up);
    activate(job, gate, up, pairs * job.inner);
    at.clear();
    for (const Share& share : sorted.shares) at.push_back(gate + share.first * job.inner);
    float_products(sorted, at, job.down, job.hidden, job.inner, out);
    return out;
}

}  // namespace

void run_route(const RouteJob& job) {
    const auto some = [&](int64_t begin, int64_t end) {
        thread_local std::vector<float> scores, ranks;
        thread_local std::vector<uint8_t> open;
        for (int64_t token = begin; token < end; ++token)
            route_token(job, token, room(scores, job.experts), room(ranks, job.experts), room(open, job.experts));
    };
    spread(job.tokens, PIECE_VALUES / (job.experts * (job.per_token + 4)) + 1, some);
}

void run_experts(const ExpertsJob& job) {
    const Sorted& sorted = sorted_pairs(job);
    const float* out = job.encoded.data ? packed_pairs(job, sorted) : float_pairs(job, sorted);
    const auto sum = [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            float* y = job.y + token * job.hidden;
            for (int64_t slot = 0; slot < job.per_token; ++slot) {
                const int64_t pair = token * job.per_token + slot;
                const float* row = out + sorted.place[size_t(pair)] * job.hidden;
                const float weight = job.weights[pair];
                for (int64_t i = 0; i < job.hidden; ++i) y[i] = slot ? y[i] + weight * row[i] : weight * row[i];
            }
        }
    };
    spread(job.tokens, PIECE_VALUES / (job.hidden * job.per_token) + 1, sum);
}

void run_add_gated(const float* x, const float* delta, const float* gate, float* y, int64_t tokens, int64_t columns) {
    const auto some = [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
            const float factor = 1.0f / (1.0f + std::exp(-gate[token]));
            for (int64_t i = token * columns; i < (token + 1) * columns; ++i) y[i] = x[i] + factor * delta[i];
        }
    };
    spread(tokens, PIECE_VALUES / columns + 1, some);
}

}  // namespace bankfull
