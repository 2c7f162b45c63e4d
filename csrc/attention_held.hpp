// The keys of a partial attention: those of a sequence's pages that are here.
//
// The pages that are here form a shorter sequence, in the same order. Kernels attend over it as over any other; only what
// a token sees of it does not follow from its position. So that is counted here, once per step.
#pragma once

#include <algorithm>
#include <vector>

#include "jobs.hpp"

namespace bankfull {

// The position after the last one that a query at `position` sees in a sequence of `length` tokens.
inline int64_t end_of_sight(const AttentionJob& job, int64_t position, int64_t length) {
    return job.block ? std::min((position / job.block + 1) * job.block, length) : position + 1;
}

class HeldKeys {
  public:
    // The job over the keys that are here; valid until the next call. The table has `width` pages per row: entries below 0
    // are elsewhere, others must be below `frames`.
    AttentionJob of(AttentionJob job, int64_t sequences, int64_t width, int64_t frames);

  private:
    std::vector<int64_t> lengths_, table_, begins_, ends_, starts_, before_;
    std::vector<uint64_t> paths_;
    std::vector<HeldKey> listed_;

    void add_sequence(const AttentionJob& job, int64_t sequence, int64_t width, int64_t frames);
    void add_token(const AttentionJob& job, const int64_t* pages, int64_t past, int64_t length, int64_t token, int64_t query);
    void list_keys(const AttentionJob& job, const int64_t* pages, int64_t frames, int64_t past, int64_t position,
                   uint64_t path);
    int64_t held_before(const AttentionJob& job, int64_t position) const;
};

}  // namespace bankfull
