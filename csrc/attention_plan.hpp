// Attention for a whole step: checked, cut into pieces, run, merged. The cut may follow the machine: no bit hangs on it.
#pragma once

#include "kernels.hpp"

namespace bankfull {

// `width` pages in each row of the table, all of them under `frames`; std::invalid_argument where the sizes do not fit.
void paged_attention(AttentionJob job, PageType type, int64_t sequences, int64_t tokens, int64_t width, int64_t frames);

}  // namespace bankfull
