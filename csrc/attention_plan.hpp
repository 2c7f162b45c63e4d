// Attention for a whole step: checked, split, run, merged. The split may depend on the machine: no bit depends on it.
#pragma once

#include "kernels.hpp"

namespace bankfull {

// The table has `width` pages per row, all below `frames`; throws std::invalid_argument if sizes do not match.
void paged_attention(AttentionJob job, PageType type, int64_t sequences, int64_t tokens, int64_t width, int64_t frames);

// The same over the pages that are here, as the ranks that share a sequence's pages compute it: a negative entry of the
// table stands for a page that is elsewhere. y has the log-sum-exp of the scores after each head's values: minus infinity
// where no key is here, and then the values are 0.
void partial_attention(AttentionJob job, PageType type, int64_t sequences, int64_t tokens, int64_t width, int64_t frames);

}  // namespace bankfull
