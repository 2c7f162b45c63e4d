// From scores to one token: temperature, top-k, top-p, min-p, and a draw by inverse CDF over integer weights in the order
// of ids. Sums are of integers, so no order of summation shows in a result.
//
// Whatever cuts the distribution says at once how high a score must be to be kept, if only roughly. What reaches that is
// collected; all else happens among these few.
#include "operations.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "isa.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

constexpr float LOWEST = -28.0f;    // exp of it, in fixed point, is zero
constexpr double ROUNDING = 1e-4;   // more than an exponential and the score before it can be off, as a share
constexpr double ONE = 0x1p40;      // the weight of the highest score

struct Candidate {
    float score;  // shaped: the highest is 0
    int64_t id, weight;
};

// The order in which tokens are kept: the lowest ids first among equals.
bool goes_before(const Candidate& a, const Candidate& b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
}

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

// Where in weights that sum up to `total` the random number points.
int64_t place_in(int64_t total, double uniform) { return std::min(int64_t(uniform * double(total)), total - 1); }

// One row, and this thread's memory for it.
class Row {
  public:
    int64_t choose(const float* scores, const float* maxima, int64_t count, const SampleWish& wish, uint32_t purpose) {
        scores_ = scores, maxima_ = maxima, count_ = count, blocks_ = (count + SCORE_BLOCK - 1) / SCORE_BLOCK;
        highest_ = *std::max_element(maxima, maxima + blocks_);
        if (!(std::fabs(highest_) <= std::numeric_limits<float>::max())) return -1;
        if (wish.greedy) return first_of_highest();
        temperature_ = float(wish.temperature);
        const double uniform = uniform_of(wish, purpose);
        const int64_t floor = int64_t(wish.min_p * ONE);
        if (wish.top_k < count) {
            gather(rank_reaches(wish.top_k));
            keep(wish.top_k, wish.top_p, sum_of_first(wish.top_k));
        } else if (wish.top_p < 1.0) {
            const int64_t total = sum_blocks();
            // All that is lighter than an even share of what may be left out cannot be missed.
            gather(score_of((1.0 - wish.top_p) * double(total) / double(count)));
            keep(count, wish.top_p, total);
        } else if (floor > 0) {
            gather(score_of(double(floor)));
        } else {
            return draw_from_all(uniform);
        }
        return draw(floor, uniform);
    }

  private:
    int64_t first_of_highest() const {
        const int64_t block = std::find(maxima_, maxima_ + blocks_, highest_) - maxima_;
        return std::find(scores_ + block * SCORE_BLOCK, scores_ + count_, highest_) - scores_;
    }

    // A score that at least `rank` tokens reach; lower than all of them where the maxima do not tell.
    float rank_reaches(int64_t rank) {
        if (rank > blocks_) return -std::numeric_limits<float>::infinity();
        ranked_maxima_.assign(maxima_, maxima_ + blocks_);
        std::nth_element(ranked_maxima_.begin(), ranked_maxima_.begin() + (rank - 1), ranked_maxima_.end(),
                         [](float a, float b) { return a > b; });
        return (ranked_maxima_[size_t(rank - 1)] - highest_) / temperature_;
    }

    // A score that no token of this weight lies below. Nothing is needed of what weighs zero.
    static float score_of(double weight) { return std::max(LOWEST, float(std::log(std::max(weight, 0.5) / ONE) - ROUNDING)); }

    // All tokens of at least this score, in the order of ids.
    void gather(float least) {
        // Other scores may round to the same shaped one: a little more is collected, then looked at again.
        const double width = -double(least) * temperature_;
        const float border = std::nextafter(float(highest_ - width * (1.0 + 0x1p-20) - temperature_ * 0x1p-140),
                                            -std::numeric_limits<float>::infinity());
        if (int64_t(found_.size()) < count_) {
            found_.resize(size_t(count_));
            places_.resize(size_t(count_));
            weights_.resize(size_t(count_));
        }
        const int64_t taken = kernels().collect(scores_, maxima_, count_, border, found_.data(), places_.data());
        kernels().weigh(found_.data(), taken, highest_, temperature_, found_.data(), weights_.data());
        candidates_.clear();
        for (size_t i = 0; i < size_t(taken); ++i)
            if (found_[i] >= least) candidates_.push_back({found_[i], places_[i], weights_[i]});
    }

    // The weight of the `rank` best, which are brought to the front of `ranked_`.
    int64_t sum_of_first(int64_t rank) {
        ranked_ = candidates_;
        if (rank < int64_t(ranked_.size())) {
            std::nth_element(ranked_.begin(), ranked_.begin() + rank, ranked_.end(), goes_before);
            ranked_.resize(size_t(rank));
        }
        int64_t sum = 0;
        for (const Candidate& each : ranked_) sum += each.weight;
        return sum;
    }

    // Drops all candidates but the `top_k` best and, of these, the fewest whose share of `inside` reaches `top_p`.
    void keep(int64_t top_k, double top_p, int64_t inside) {
        if (top_k >= count_) ranked_ = candidates_;
        auto begin = ranked_.begin(), end = ranked_.end();
        if (top_p < 1.0) {
            constexpr int64_t FEW = 32;
            const double goal = top_p * double(inside);
            int64_t before = 0;
            while (end - begin > FEW) {  // the half in which the goal is reached
                const auto middle = begin + (end - begin) / 2;
                std::nth_element(begin, middle, end, goes_before);
                int64_t sum = before;
                for (auto each = begin; each < middle; ++each) sum += each->weight;
                if (double(sum) >= goal) {
                    end = middle;
                } else {
                    before = sum;
                    begin = middle;
                }
            }
            std::sort(begin, end, goes_before);
            // A token is kept when what lies before it has not reached the goal; the first always is.
            auto each = begin;
            for (; each < end && (double(before) < goal || each == ranked_.begin()); ++each) before += each->weight;
            end = each;
        }
        // Everything before the last one that is kept, and itself.
        const Candidate last = *std::max_element(ranked_.begin(), end, goes_before);
        const auto gone = [&](const Candidate& each) { return goes_before(last, each); };
        candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), gone), candidates_.end());
    }

    int64_t draw(int64_t floor, double uniform) const {
        int64_t total = 0;
        for (const Candidate& each : candidates_) total += each.weight < floor ? 0 : each.weight;
        const int64_t goal = place_in(total, uniform);
        auto each = candidates_.begin();
        for (int64_t sum = 0;; ++each) {
            sum += each->weight < floor ? 0 : each->weight;
            if (sum > goal) return each->id;
        }
    }

    int64_t sum_blocks() {
        sums_.resize(size_t(blocks_));
        kernels().block_weights(scores_, count_, highest_, temperature_, sums_.data());
        int64_t total = 0;
        for (const int64_t sum : sums_) total += sum;
        return total;
    }

    int64_t draw_from_all(double uniform) {
        int64_t goal = place_in(sum_blocks(), uniform), block = 0;
        while (sums_[size_t(block)] <= goal) goal -= sums_[size_t(block++)];
        const int64_t first = block * SCORE_BLOCK, width = std::min(SCORE_BLOCK, count_ - first);
        float shaped[SCORE_BLOCK];
        int64_t weights[SCORE_BLOCK], place = 0;
        kernels().weigh(scores_ + first, width, highest_, temperature_, shaped, weights);
        while (weights[place] <= goal) goal -= weights[place++];
        return first + place;
    }

    const float *scores_ = nullptr, *maxima_ = nullptr;
    int64_t count_ = 0, blocks_ = 0;
    float highest_ = 0.0f, temperature_ = 1.0f;
    std::vector<float> ranked_maxima_, found_;
    std::vector<int64_t> places_, weights_, sums_;
    std::vector<Candidate> candidates_, ranked_;
};

void sample(const SampleJob& job, int64_t begin, int64_t end) {
    thread_local Row row;
    thread_local std::vector<float> own;
    const int64_t blocks = (job.vocab + SCORE_BLOCK - 1) / SCORE_BLOCK;
    for (int64_t i = begin; i < end; ++i) {
        const float* scores = job.scores + i * job.vocab;
        const float* maxima = job.maxima + i * blocks;
        if (!job.maxima) {
            own.resize(size_t(blocks));
            kernels().block_maxima(scores, job.vocab, own.data());
            maxima = own.data();
        }
        job.tokens[i] = row.choose(scores, maxima, job.vocab, job.choice.wishes[i], job.choice.purpose);
    }
}

}  // namespace

void run_sample(const SampleJob& job, int64_t rows) {
    parallel(rows, 1, [](const void* p, int64_t begin, int64_t end) {
        sample(*static_cast<const SampleJob*>(p), begin, end);
    }, &job);
}

}  // namespace bankfull
