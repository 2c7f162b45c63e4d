// The best scores of one row while its scores are made, piece by piece, in any order and on any thread. What cannot be among
// the best any more is forgotten.
#pragma once

#include <mutex>
#include <vector>

#include "jobs.hpp"

namespace bankfull {

class RunningTop {
  public:
    // A new row, of which `most` scores are wanted.
    void begin(int64_t most);
    // Scores [first, first + width), and the maxima of their blocks. Several threads may call this at once.
    void add(const float* scores, const float* maxima, int64_t first, int64_t width);
    // The token that the wish chooses, among no more than `most`; -1 where no score is usable. False where a score was
    // forgotten that might round to the same as the last one wanted: then all scores are needed.
    bool choose(const SampleWish& wish, uint32_t purpose, int64_t& token);

  private:
    void raise_border(const float* scores, const float* maxima, int64_t width);
    void forget();

    struct Kept {
        int64_t id;
        float score;
    };
    std::mutex busy_;
    int64_t most_ = 0;
    size_t enough_ = 0;          // when so many are kept, it is time to forget some
    float border_ = 0.0f;        // nothing of at least this score was forgotten
    float highest_ = 0.0f;       // infinity where a score was NaN
    std::vector<float> known_;   // `most` scores at the most, the lowest in front: so many are at least as high
    std::vector<float> found_;   // kept for their memory
    std::vector<int64_t> places_;
    std::vector<Kept> kept_;
};

}  // namespace bankfull
