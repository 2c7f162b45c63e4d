#include "pages.hpp"

#include <cstring>
#include <stdexcept>

#include "threads.hpp"

namespace bankfull {

void write_pages(const WriteJob& job, int64_t tokens, int64_t frames) {
    constexpr int64_t PIECE_BYTES = 1 << 16;
    if (job.page_tokens <= 0 || job.bytes < 0) throw std::invalid_argument("write_pages: sizes must be positive");
    const int64_t places = frames * job.page_tokens;
    for (int64_t i = 0; i < tokens; ++i)
        if (job.slots[i] < 0 || job.slots[i] >= places)
            throw std::invalid_argument("write_pages: a slot is out of range");
    parallel(tokens, PIECE_BYTES / (job.bytes + 1) + 1, [](const void* p, int64_t begin, int64_t end) {
        const WriteJob& j = *static_cast<const WriteJob*>(p);
        for (int64_t i = begin; i < end; ++i) {
            const int64_t frame = j.slots[i] / j.page_tokens, token = j.slots[i] % j.page_tokens;
            std::memcpy(j.pages + frame * j.frame + token * j.token, j.rows + i * j.bytes, size_t(j.bytes));
        }
    }, &job);
}

void move_tokens(const MoveJob& job, int64_t frames) {
    if (job.page_tokens <= 0) throw std::invalid_argument("move_tokens: sizes must be positive");
    const int64_t places = frames * job.page_tokens, count = job.rows * job.moves;
    for (int64_t i = 0; i < count; ++i)
        for (const int64_t slot : {job.source[i], job.target[i]})
            if (slot < 0 || slot >= places) throw std::invalid_argument("move_tokens: a slot is out of range");
    for (int64_t s = 0; s < job.segments; ++s)
        if (job.first[s] < 0 || job.size[s] < 0 || job.first[s] + job.page_tokens * job.size[s] > job.frame)
            throw std::invalid_argument("move_tokens: a segment exceeds the frame");
    for (int64_t i = 0; i < count; ++i) {
        if (job.source[i] == job.target[i]) continue;
        const uint8_t* from = job.frames + job.source[i] / job.page_tokens * job.frame;
        uint8_t* to = job.frames + job.target[i] / job.page_tokens * job.frame;
        const int64_t there = job.source[i] % job.page_tokens, here = job.target[i] % job.page_tokens;
        for (int64_t s = 0; s < job.segments; ++s)
            std::memcpy(to + job.first[s] + here * job.size[s], from + job.first[s] + there * job.size[s],
                        size_t(job.size[s]));
    }
}

}  // namespace bankfull
