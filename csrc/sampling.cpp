// From scores to one token: temperature, top-k, top-p and min-p over integer weights, and an exponential race. Sums are
// integers, so the order of summation does not affect results.
//
// Truncation usually gives a minimum score of all kept tokens. Only tokens that reach it are collected and processed.
// In the race, bounds drop nearly all tokens: only those near the winner get an exact key.
#include "operations.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "isa.hpp"
#include "running_top.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

constexpr int BUCKETS = 1024;
constexpr float INFINITE = std::numeric_limits<float>::infinity();
constexpr float LOWEST = -27.5f;   // no token of a lower normalized score is drawn; its weight is still 1
constexpr double ROUNDING = 1e-4;  // above the error of an exponential and its argument
constexpr double ONE = 0x1p40;     // weight of the maximum score

struct Candidate {
    float score;  // normalized: the maximum is 0
    int64_t id, weight;
};

// The order in which tokens are kept: the lowest ids first among equals.
bool goes_before(const Candidate& a, const Candidate& b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// The natural logarithm of a positive number: additions, multiplications and one division in a fixed order, each rounded
// as IEEE 754 prescribes, so that every device gets the same bits. Constants are exact in float32.
double fixed_log(double number) {
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    int64_t exponent = int64_t(bits >> 52) - 1023;
    bits = (bits & ((uint64_t(1) << 52) - 1)) | uint64_t(1023) << 52;
    double mantissa;
    std::memcpy(&mantissa, &bits, sizeof bits);
    if (mantissa > 0x1.6a09e6p0) {
        mantissa *= 0.5;
        ++exponent;
    }
    const double ratio = (mantissa - 1.0) / (mantissa + 1.0), square = ratio * ratio, twos = double(exponent);
    double series = 0x1.3b13b2p-3;
    for (const double next : {0x1.745d18p-3, 0x1.c71c72p-3, 0x1.24924ap-2, 0x1.99999ap-2, 0x1.555556p-1, 2.0})
        series = series * square + next;
    return twos * 0x1.62e4p-1 + (twos * 0x1.7f7d1cp-20 + ratio * series);
}

// The random numbers of a row at one position: one per token.
class Numbers {
  public:
    Numbers(const SamplingParams& params, uint32_t purpose)
        : key{{uint32_t(params.seed), uint32_t(uint64_t(params.seed) >> 32)},
              {uint32_t(params.position), uint32_t(uint64_t(params.position) >> 32)},
              uint32_t(params.child),
              purpose} {}

    // -log of the token's exponential variate. The low word is drawn only here.
    double gumbel(int64_t id, uint32_t high) const {
        const uint64_t bits = uint64_t(high) << 20 | low(id) >> 12;
        return -fixed_log(-fixed_log(1.0 - (double(bits) + 0.5) * 0x1p-52));
    }

    const RaceKey key;

  private:
    static constexpr uint32_t LOW = 128;  // the flag of low words, beside the purpose

    // Philox-4x32-10; see race.hpp for the call and the word of a token.
    uint32_t low(int64_t id) const {
        const uint32_t call = uint32_t(id >> 4 << 2 | (id & 3));
        uint32_t counter[4] = {key.position[0], key.position[1], key.child, key.purpose | LOW | call << 8};
        uint32_t keys[2] = {key.seed[0], key.seed[1]};
        for (int round = 0; round < 10; ++round) {
            const uint64_t left = uint64_t(0xD2511F53u) * counter[0], right = uint64_t(0xCD9E8D57u) * counter[2];
            const uint32_t next[4] = {uint32_t(right >> 32) ^ counter[1] ^ keys[0], uint32_t(right),
                                      uint32_t(left >> 32) ^ counter[3] ^ keys[1], uint32_t(left)};
            std::copy(next, next + 4, counter);
            keys[0] += 0x9E3779B9u;
            keys[1] += 0xBB67AE85u;
        }
        return counter[id >> 2 & 3];
    }
};

// The highest of score + gumbel, the lowest id among equals.
class Winner {
  public:
    explicit Winner(const Numbers& numbers) : numbers_(numbers) {}

    void add(int64_t id, float score, uint32_t high) {
        if (score < LOWEST) return;
        const double key = double(score) + numbers_.gumbel(id, high);
        if (key < lead || (key == lead && id > token)) return;
        lead = key;
        token = id;
        // A token wins only if word / 2^32 <= exp(score - lead), with a margin for rounding.
        scale_ = std::exp(-lead) * (1.0 + 0x1p-13);
        most = word_bound(1.0);
    }

    // The bound of the words of a token that may win, given exp(score) or more.
    double bound(double weight) const { return weight * scale_ * 0x1p32; }
    uint32_t word_bound(double weight) const { return uint32_t(std::min(bound(weight), 0x1p32 - 1.0)); }

    double lead = -std::numeric_limits<double>::infinity();
    int64_t token = -1;
    uint32_t most = ~0u;  // no higher word wins

  private:
    const Numbers& numbers_;
    double scale_ = std::numeric_limits<double>::infinity();
};

// One row, with reusable per-thread buffers.
class Row {
  public:
    int64_t choose(const float* scores, const float* maxima, int64_t count, const SamplingParams& params, uint32_t purpose) {
        scores_ = scores, maxima_ = maxima, count_ = count, blocks_ = (count + SCORE_BLOCK - 1) / SCORE_BLOCK;
        highest_ = *std::max_element(maxima, maxima + blocks_);
        if (!(std::fabs(highest_) <= std::numeric_limits<float>::max())) return -1;
        if (params.greedy) return first_of_highest();
        temperature_ = float(params.temperature);
        const Numbers numbers(params, purpose);
        const int64_t floor = int64_t(params.min_p * ONE);
        if (params.top_k < count) {
            gather(rank_reaches(std::min(params.top_k, blocks_)));
            if (taken_ < params.top_k) take_all();
            keep_best(params);
        } else if (params.top_p < 1.0) {
            const double total = double(sum_blocks()), goal = params.top_p * total;
            gather(rank_reaches((blocks_ + 1) / 2));  // usually the few highest are enough
            if (double(std::accumulate(weights_.begin(), weights_.begin() + taken_, int64_t(0))) < goal) take_all();
            keep(count, goal);
        } else if (floor > 0) {
            gather(std::max(LOWEST, float(std::log(double(floor) / ONE) - ROUNDING)));
        } else {
            return draw_from_all(numbers);
        }
        return draw(floor, numbers);
    }

    // `choose` for top-k among tokens in the order of ids, which include all with a score of at least `complete`.
    // Returns -1 if other tokens might be among the best.
    template <class Each>
    int64_t choose_among(const std::vector<Each>& some, float complete, float highest, const SamplingParams& params,
                         uint32_t purpose) {
        make_room(int64_t(some.size()));
        for (size_t i = 0; i < some.size(); ++i) {
            found_[i] = some[i].score;
            places_[i] = some[i].id;
        }
        highest_ = highest, temperature_ = float(params.temperature);
        take(int64_t(some.size()), -INFINITE);
        const float lowest = keep_best(params);
        if (threshold_of(lowest) < complete) return -1;
        const Numbers numbers(params, purpose);
        return draw(int64_t(params.min_p * ONE), numbers);
    }

  private:
    // Returns the score of the last of the `top_k` best.
    float keep_best(const SamplingParams& params) {
        const int64_t inside = keep(params.top_k, INFINITE);
        const float lowest = lowest_found();
        if (params.top_p < 1.0) keep(taken_, params.top_p * double(inside));
        return lowest;
    }

    int64_t first_of_highest() const {
        const int64_t block = std::find(maxima_, maxima_ + blocks_, highest_) - maxima_;
        return std::find(scores_ + block * SCORE_BLOCK, scores_ + count_, highest_) - scores_;
    }

    // A score that at least `rank` tokens reach; rank is at most the number of blocks.
    float rank_reaches(int64_t rank) {
        ranked_maxima_.assign(maxima_, maxima_ + blocks_);
        std::nth_element(ranked_maxima_.begin(), ranked_maxima_.begin() + (rank - 1), ranked_maxima_.end(),
                         [](float a, float b) { return a > b; });
        return (ranked_maxima_[size_t(rank - 1)] - highest_) / temperature_;
    }

    // Lower bound of raw scores whose normalized score is at least `least`, with a margin because different scores may
    // round to the same value.
    float threshold_of(float least) const {
        const double width = -double(least) * temperature_;
        return std::nextafter(float(highest_ - width * (1.0 + 0x1p-20) - temperature_ * 0x1p-140), -INFINITE);
    }

    void make_room(int64_t count) {
        if (int64_t(found_.size()) >= count) return;
        found_.resize(size_t(count));
        places_.resize(size_t(count));
        weights_.resize(size_t(count));
    }

    // Collects all tokens of at least this score, in the order of ids.
    void gather(float least) {
        make_room(count_);
        take(kernels().collect(scores_, maxima_, count_, threshold_of(least), found_.data(), places_.data()), least);
    }

    // The first `found` entries become candidates if their score is at least `least`.
    void take(int64_t found, float least) {
        kernels().weigh(found_.data(), found, highest_, temperature_, found_.data(), weights_.data());
        taken_ = 0;
        for (int64_t i = 0; i < found; ++i) copy_candidate(i, found_[size_t(i)] >= least);
    }

    void take_all() {
        make_room(count_);
        kernels().weigh(scores_, count_, highest_, temperature_, found_.data(), weights_.data());
        std::iota(places_.begin(), places_.begin() + count_, int64_t(0));
        taken_ = count_;
    }

    // Branch-free, because half of a long list may be dropped.
    void copy_candidate(int64_t from, bool stays) {
        found_[size_t(taken_)] = found_[size_t(from)];
        places_[size_t(taken_)] = places_[size_t(from)];
        weights_[size_t(taken_)] = weights_[size_t(from)];
        taken_ += stays;
    }

    float lowest_found() const {
        constexpr int64_t LANES = 8;
        float lowest[LANES] = {};
        int64_t i = 0;
        for (; i + LANES <= taken_; i += LANES)
            for (int64_t j = 0; j < LANES; ++j)
                lowest[j] = found_[size_t(i + j)] < lowest[j] ? found_[size_t(i + j)] : lowest[j];
        for (; i < taken_; ++i) lowest[0] = std::min(lowest[0], found_[size_t(i)]);
        return *std::min_element(lowest, lowest + LANES);
    }

    // Drops all candidates but the `most` best and, of these, the fewest whose weight reaches `goal`; at least one is
    // kept.
    // Returns the remaining weight. Only the bucket that contains the cutoff is sorted.
    int64_t keep(int64_t most, double goal) {
        // Lower buckets have strictly higher scores. Tokens with zero weight share the last bucket.
        const float lowest = std::min(std::max(lowest_found(), LOWEST), -1e-30f), scale = float(BUCKETS) / lowest;
        const auto bucket_of = [scale](float score) { return std::min(int(std::max(score, LOWEST) * scale), BUCKETS - 1); };
        int64_t counts[BUCKETS] = {}, weights[BUCKETS] = {};
        for (size_t i = 0; i < size_t(taken_); ++i) {
            const int bucket = bucket_of(found_[i]);
            ++counts[bucket];
            weights[bucket] += weights_[i];
        }
        int64_t kept = 0, sum = 0;
        int border = 0;
        while (border < BUCKETS && kept + counts[border] <= most && double(sum + weights[border]) < goal) {
            kept += counts[border];
            sum += weights[border++];
        }
        if (border == BUCKETS) return sum;
        ranked_.clear();
        for (size_t i = 0; i < size_t(taken_); ++i)
            if (bucket_of(found_[i]) == border) ranked_.push_back({found_[i], places_[i], weights_[i]});
        std::sort(ranked_.begin(), ranked_.end(), goes_before);
        // A token is kept if the weight before it has not reached the goal.
        Candidate last{INFINITE, 0, 0};
        for (const Candidate& each : ranked_) {
            if (kept == most || (double(sum) >= goal && kept > 0)) break;
            last = each;
            sum += each.weight;
            ++kept;
        }
        const int64_t before = taken_;
        taken_ = 0;
        for (int64_t i = 0; i < before; ++i) {
            const float score = found_[size_t(i)];
            const int bucket = bucket_of(score);
            const bool in_time = bool((score > last.score) | ((score == last.score) & (places_[size_t(i)] <= last.id)));
            copy_candidate(i, bool((bucket < border) | ((bucket == border) & in_time)));
        }
        return sum;
    }

    int64_t draw(int64_t floor, const Numbers& numbers) const {
        Winner winner(numbers);
        constexpr int64_t SOME = 256;
        uint32_t words[SOME];
        for (int64_t first = 0; first < taken_; first += SOME) {
            const int64_t count = std::min(SOME, taken_ - first);
            kernels().words_of(numbers.key, places_.data() + first, count, words);
            for (int64_t j = 0; j < count; ++j) {
                if (words[j] > winner.most) continue;
                const size_t i = size_t(first + j);
                if (weights_[i] >= floor && double(words[j]) <= winner.bound(double(weights_[i] + 1) * (1.0 / ONE)))
                    winner.add(places_[i], found_[i], words[j]);
            }
        }
        return winner.token;
    }

    int64_t sum_blocks() {
        sums_.resize(size_t(blocks_));
        kernels().block_weights(scores_, count_, highest_, temperature_, sums_.data());
        int64_t total = 0;
        for (const int64_t sum : sums_) total += sum;
        return total;
    }

    // Begins with the best token, so that few others can still win.
    int64_t draw_from_all(const Numbers& numbers) const {
        const auto shaped = [this](float score) { return (score - highest_) / temperature_; };
        Winner winner(numbers);
        const int64_t best = first_of_highest();
        uint32_t word;
        kernels().words_of(numbers.key, &best, 1, &word);
        winner.add(best, 0.0f, word);
        int32_t places[SCORE_BLOCK];
        uint32_t words[SCORE_BLOCK];
        for (int64_t block = 0; block < blocks_; ++block) {
            const float most = shaped(maxima_[block]);
            if (most < LOWEST) continue;
            const int64_t first = block * SCORE_BLOCK, width = std::min(SCORE_BLOCK, count_ - first);
            const uint32_t bound = winner.word_bound(std::exp(double(most)));
            const Race race{highest_, temperature_, float(winner.lead)};
            const int64_t found = kernels().contenders(numbers.key, scores_ + first, first, width, race, bound, places, words);
            for (int64_t i = 0; i < found; ++i)
                winner.add(first + places[i], shaped(scores_[first + places[i]]), words[i]);
        }
        return winner.token;
    }

    const float *scores_ = nullptr, *maxima_ = nullptr;
    int64_t count_ = 0, blocks_ = 0;
    float highest_ = 0.0f, temperature_ = 1.0f;
    // The candidates in the order of ids: normalized scores, ids and weights.
    int64_t taken_ = 0;
    std::vector<float> found_;
    std::vector<int64_t> places_, weights_;
    // Reused buffers.
    std::vector<float> ranked_maxima_;
    std::vector<int64_t> sums_;
    std::vector<Candidate> ranked_;
};

Row& row_of_this_thread() {
    thread_local Row row;
    return row;
}

void sample(const SampleJob& job, int64_t begin, int64_t end) {
    Row& row = row_of_this_thread();
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
        job.tokens[i] = row.choose(scores, maxima, job.vocab, job.choice.params[i], job.choice.purpose);
    }
}

}  // namespace

void RunningTop::begin(int64_t most) {
    most_ = most;
    enough_ = size_t(4 * most + 2 * SCORE_BLOCK);
    threshold_ = highest_ = -INFINITE;
    known_.clear();
    kept_.clear();
}

void RunningTop::add(const float* scores, const float* maxima, int64_t first, int64_t width) {
    const std::lock_guard<std::mutex> alone(busy_);
    raise_threshold(scores, maxima, width);
    if (int64_t(found_.size()) < width) {
        found_.resize(size_t(width));
        places_.resize(size_t(width));
    }
    const int64_t taken = kernels().collect(scores, maxima, width, threshold_, found_.data(), places_.data());
    for (size_t i = 0; i < size_t(taken); ++i) kept_.push_back({first + places_[i], found_[i]});
    if (kept_.size() > enough_) prune();
}

// Each of `known_` belongs to a different token, so `most` of them bound the last wanted score.
void RunningTop::raise_threshold(const float* scores, const float* maxima, int64_t width) {
    const int64_t blocks = (width + SCORE_BLOCK - 1) / SCORE_BLOCK;
    for (int64_t i = 0; i < blocks; ++i) highest_ = std::max(highest_, maxima[i]);
    if (highest_ == INFINITE) return;
    const auto higher = [](float a, float b) { return a > b; };
    if (known_.empty() && width >= most_) {
        known_.assign(scores, scores + width);
        std::nth_element(known_.begin(), known_.begin() + (most_ - 1), known_.end(), higher);
        known_.resize(size_t(most_));
        std::make_heap(known_.begin(), known_.end(), higher);
    } else {
        for (int64_t i = 0; i < blocks; ++i) {
            if (int64_t(known_.size()) == most_) {
                if (maxima[i] <= known_.front()) continue;
                std::pop_heap(known_.begin(), known_.end(), higher);
                known_.pop_back();
            }
            known_.push_back(maxima[i]);
            std::push_heap(known_.begin(), known_.end(), higher);
        }
    }
    // Slightly below the bound: different scores may round to the same normalized value.
    if (int64_t(known_.size()) == most_)
        threshold_ = std::max(threshold_, known_.front() - std::max(1.0f, std::fabs(known_.front())) * 0x1p-12f);
}

void RunningTop::prune() {
    const auto low = [this](const Kept& each) { return each.score < threshold_; };
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), low), kept_.end());
    enough_ = std::max(enough_, 2 * kept_.size());
}

bool RunningTop::choose(const SamplingParams& params, uint32_t purpose, int64_t& token) {
    token = -1;
    if (!(std::fabs(highest_) <= std::numeric_limits<float>::max())) return true;
    prune();
    std::sort(kept_.begin(), kept_.end(), [](const Kept& a, const Kept& b) { return a.id < b.id; });
    if (params.greedy) {
        token = std::find_if(kept_.begin(), kept_.end(), [this](const Kept& each) { return each.score == highest_; })->id;
        return true;
    }
    token = row_of_this_thread().choose_among(kept_, threshold_, highest_, params, purpose);
    return token >= 0;
}

void run_sample(const SampleJob& job, int64_t rows) {
    parallel(rows, 1, [](const void* p, int64_t begin, int64_t end) {
        sample(*static_cast<const SampleJob*>(p), begin, end);
    }, &job);
}

}  // namespace bankfull
