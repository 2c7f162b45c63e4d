// From scores to one token: temperature, top-k, top-p, min-p, and a draw by inverse CDF over integer weights in the order
// of ids. Sums are of integers, so no order of summation shows in a result.
#include "operations.hpp"

#include <algorithm>
#include <vector>

#include "isa.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

constexpr int BUCKETS = 2048;
constexpr float LOWEST = -28.0f;  // exp of it, in fixed point, is zero

// Buckets run from the best scores (0) to the worst; equal scores share one, and a lower bucket has higher scores only.
int bucket_of(float score) {
    if (!(score > LOWEST)) return BUCKETS - 1;
    return std::min(BUCKETS - 1, std::max(0, int(score * (float(BUCKETS) / LOWEST))));
}

struct Candidate {
    float score;
    int64_t id;
};

// Philox-4x32-10: the first two words of the block that seed, position, child and purpose name.
double uniform_of(const SampleWish& wish, uint32_t purpose) {
    uint32_t counter[4] = {uint32_t(wish.position), uint32_t(uint64_t(wish.position) >> 32), uint32_t(wish.child), purpose};
    uint32_t key[2] = {uint32_t(wish.seed), uint32_t(uint64_t(wish.seed) >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t left = uint64_t(0xD2511F53u) * counter[0], right = uint64_t(0xCD9E8D57u) * counter[2];
        const uint32_t next[4] = {uint32_t(right >> 32) ^ counter[1] ^ key[0], uint32_t(right),
                                  uint32_t(left >> 32) ^ counter[3] ^ key[1], uint32_t(left)};
        std::copy(next, next + 4, counter);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return double(uint64_t(counter[0] >> 5) << 26 | counter[1] >> 6) * 0x1p-53;
}

// Zeroes the weights of all but the `top_k` best tokens and, of these, the fewest whose share reaches `top_p`; the lowest
// ids first among equals. Only the bucket in which the border lies is sorted.
void keep_head(const float* scores, int64_t* weights, int64_t vocab, int64_t top_k, double top_p,
                      std::vector<Candidate>& border) {
    int64_t counts[BUCKETS] = {}, sums[BUCKETS] = {};
    for (int64_t i = 0; i < vocab; ++i) {
        const int bucket = bucket_of(scores[i]);
        ++counts[bucket];
        sums[bucket] += weights[i];
    }
    const auto sorted = [&](int bucket) {
        border.clear();
        for (int64_t i = 0; i < vocab; ++i)
            if (bucket_of(scores[i]) == bucket) border.push_back({scores[i], i});
        std::stable_sort(border.begin(), border.end(),
                         [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
    };
    // How many tokens, and of which weight, top-k leaves.
    int64_t kept = 0, inside = 0, last = 0;
    while (last < BUCKETS && kept + counts[last] <= top_k) {
        kept += counts[last];
        inside += sums[last++];
    }
    if (last < BUCKETS && kept < top_k) {
        sorted(int(last));
        for (int64_t i = 0; kept < top_k; ++i, ++kept) inside += weights[border[size_t(i)].id];
    }
    int64_t keep = top_k < vocab ? top_k : vocab;
    if (top_p < 1.0) {
        // A token is kept when what lies before it has not reached the goal; the first always is.
        const double goal = top_p * double(inside);
        int64_t before = 0, rank = 0;
        int bucket = 0;
        while (bucket < BUCKETS && (counts[bucket] == 0 || double(before + sums[bucket]) < goal)) {
            before += sums[bucket];
            rank += counts[bucket++];
        }
        if (bucket < BUCKETS) {
            sorted(bucket);
            for (size_t i = 0; i < border.size() && (double(before) < goal || rank == 0); ++i, ++rank)
                before += weights[border[i].id];
        }
        keep = rank < keep ? rank : keep;
        keep = keep < 1 ? 1 : keep;
    }
    if (keep >= vocab) return;
    int64_t before = 0;
    int bucket = 0;
    while (before + counts[bucket] <= keep) before += counts[bucket++];
    for (int64_t i = 0; i < vocab; ++i)
        if (bucket_of(scores[i]) > bucket) weights[i] = 0;
    sorted(bucket);
    for (size_t i = size_t(keep - before); i < border.size(); ++i) weights[border[i].id] = 0;
}

void sample(const SampleJob& job, int64_t begin, int64_t end) {
    thread_local std::vector<float> scores;
    thread_local std::vector<int64_t> weights;
    thread_local std::vector<Candidate> border;
    const int64_t vocab = job.vocab;
    if (int64_t(scores.size()) < vocab) {
        scores.resize(size_t(vocab));
        weights.resize(size_t(vocab));
    }
    for (int64_t row = begin; row < end; ++row) {
        const float* logits = job.logits + row * vocab;
        const SampleWish& wish = job.wishes[row];
        const Best best = kernels().best_of(logits, vocab);
        job.tokens[row] = best.index;
        if (best.index < 0 || wish.greedy) continue;
        kernels().weigh(logits, vocab, best.value, float(wish.temperature), scores.data(), weights.data());
        if (wish.top_k < vocab || wish.top_p < 1.0)
            keep_head(scores.data(), weights.data(), vocab, wish.top_k, wish.top_p, border);
        const int64_t floor = int64_t(wish.min_p * 0x1p40);
        int64_t total = 0;
        for (int64_t i = 0; i < vocab; ++i) {
            if (weights[size_t(i)] < floor) weights[size_t(i)] = 0;
            total += weights[size_t(i)];
        }
        const int64_t goal = std::min(int64_t(uniform_of(wish, job.purpose) * double(total)), total - 1);
        int64_t id = 0;
        for (int64_t sum = weights[0]; sum <= goal; sum += weights[size_t(id)]) ++id;
        job.tokens[row] = id;
    }
}

}  // namespace

void run_sample(const SampleJob& job, int64_t rows) {
    parallel(rows, 1, [](const void* p, int64_t begin, int64_t end) {
        sample(*static_cast<const SampleJob*>(p), begin, end);
    }, &job);
}

}  // namespace bankfull
