// KV page writes and moves.
#pragma once

#include <cstdint>

namespace bankfull {

struct WriteJob {
    const uint8_t* rows;  // contiguous, `bytes` each
    uint8_t* pages;
    const int64_t* slots;  // page * page_tokens + offset
    int64_t bytes, page_tokens, frame, token;  // frame, token: strides in bytes
};

// Moves of tokens inside of frames, `moves` for each of `rows`: from slot source[i] to target[i], in order within a row.
// A token lies in `segments` parts of a frame: part s begins at byte first[s] and has size[s] bytes per token.
struct MoveJob {
    uint8_t* frames;
    const int64_t *source, *target;  // page * page_tokens + offset
    const int64_t *first, *size;
    int64_t rows, moves, segments, page_tokens, frame;  // frame: stride in bytes
};

// Both throw std::invalid_argument for a slot outside of `frames` pages, before anything is written.
void write_pages(const WriteJob& job, int64_t tokens, int64_t frames);
void move_tokens(const MoveJob& job, int64_t frames);

}  // namespace bankfull
