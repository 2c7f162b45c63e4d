// KV page writes.
#pragma once

#include <cstdint>

namespace bankfull {

struct WriteJob {
    const uint8_t* rows;  // contiguous, `bytes` each
    uint8_t* pages;
    const int64_t* slots;  // page * page_tokens + offset
    int64_t bytes, page_tokens, frame, token;  // frame, token: strides in bytes
};

// Throws std::invalid_argument for a slot outside of `frames` pages, before anything is written.
void write_pages(const WriteJob& job, int64_t tokens, int64_t frames);

}  // namespace bankfull
