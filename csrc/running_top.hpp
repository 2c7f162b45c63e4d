// The best scores of one row while its scores are computed, in pieces, in any order and on any thread. Scores that can
// no longer be among the best are dropped.
#pragma once

#include <mutex>
#include <vector>

#include "jobs.hpp"

namespace bankfull {

class RunningTop {
  public:
    // Starts a new row; `most` scores are wanted.
    void begin(int64_t most);
    // Adds scores [first, first + width) and the maxima of their blocks. Thread-safe.
    void add(const float* scores, const float* maxima, int64_t first, int64_t width);
    // The token sampled among no more than `most` scores; -1 if no score is usable. Returns false if a dropped score
    // might round to the same value as the last wanted one: then all scores are needed.
    bool choose(const SamplingParams& params, uint32_t purpose, int64_t& token);

  private:
    void raise_threshold(const float* scores, const float* maxima, int64_t width);
    void prune();

    struct Kept {
        int64_t id;
        float score;
    };
    std::mutex busy_;
    int64_t most_ = 0;
    size_t enough_ = 0;          // number of kept scores that triggers pruning
    float threshold_ = 0.0f;        // no score of at least this value was dropped
    float highest_ = 0.0f;       // infinity if a score was NaN
    std::vector<float> known_;   // min-heap of up to `most` scores, a lower bound of the best
    std::vector<float> found_;   // reused buffers
    std::vector<int64_t> places_;
    std::vector<Kept> kept_;
};

}  // namespace bankfull
