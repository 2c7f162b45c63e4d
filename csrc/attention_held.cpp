#include "attention_held.hpp"

#include <stdexcept>

namespace bankfull {
namespace {

void check_entry(int64_t frame, int64_t frames) {
    if (frame >= frames) throw std::invalid_argument("partial_attention: a page table entry is out of range");
}

}  // namespace

AttentionJob HeldKeys::of(AttentionJob job, int64_t sequences, int64_t width, int64_t frames) {
    const size_t tokens = size_t(job.q_start[sequences]);
    lengths_.assign(size_t(sequences), 0);
    table_.assign(size_t(sequences * width), 0);
    begins_.assign(tokens, 0);
    ends_.assign(tokens, 0);
    starts_.assign(tokens, 0);
    paths_.assign(job.ancestors ? tokens : 0, 0);
    listed_.clear();
    for (int64_t i = 0; i < sequences; ++i) add_sequence(job, i, width, frames);
    job.begins = job.window ? begins_.data() : nullptr;
    job.ends = ends_.data();
    job.kv_len = lengths_.data();
    job.table = table_.data();
    job.table_stride = width;
    if (job.mask.given()) {
        job.listed = listed_.data();
        job.list_start = starts_.data();
        job.ancestors = nullptr;  // the lists follow paths
    } else if (job.ancestors) {
        job.paths = paths_.data();
    }
    job.window = job.block = 0;
    job.mask = {};
    return job;
}

void HeldKeys::add_sequence(const AttentionJob& job, int64_t sequence, int64_t width, int64_t frames) {
    const int64_t first = job.q_start[sequence], queries = job.q_start[sequence + 1] - first, length = job.kv_len[sequence];
    if (queries == 0) return;
    const int64_t past = length - queries, used = (length + job.page_tokens - 1) / job.page_tokens;
    // Entries of pages that have left every window may be anything.
    const int64_t dead = job.window ? std::max<int64_t>(0, past + 1 - job.window) / job.page_tokens : 0;
    const int64_t* pages = job.table + sequence * job.table_stride;
    int64_t* held = table_.data() + sequence * width;
    before_.assign(size_t(used) + 1, 0);
    int64_t count = 0;
    for (int64_t page = dead; page < used; ++page) {
        if (!job.mask.given()) check_entry(pages[page], frames);
        if (pages[page] >= 0) held[count++] = pages[page];
        before_[size_t(page) + 1] = count;
    }
    // A length that begins the new tokens, or a tree of them, right after the keys of earlier tokens.
    lengths_[size_t(sequence)] = (job.mask.given() ? 0 : held_before(job, past)) + queries;
    for (int64_t query = 0; query < queries; ++query) {
        if (!job.mask.given()) {
            add_token(job, pages, past, length, first + query, query);
            continue;
        }
        const uint64_t path = job.ancestors ? job.ancestors[first + query] : 0;
        const size_t start = listed_.size();
        starts_[size_t(first + query)] = int64_t(start);
        list_keys(job, pages, frames, past, past + (path ? __builtin_popcountll(path) - 1 : query), path);
        ends_[size_t(first + query)] = int64_t(listed_.size() - start);
    }
}

// Keys before `position` that are here.
int64_t HeldKeys::held_before(const AttentionJob& job, int64_t position) const {
    const int64_t page = position / job.page_tokens, count = before_[size_t(page)];
    const int64_t rest = position - page * job.page_tokens;
    return count * job.page_tokens + (rest && before_[size_t(page) + 1] > count ? rest : 0);
}

void HeldKeys::add_token(const AttentionJob& job, const int64_t* pages, int64_t past, int64_t length, int64_t token,
                         int64_t query) {
    const uint64_t path = job.ancestors ? job.ancestors[token] : 0;
    int64_t& end = ends_[size_t(token)];
    int64_t& begin = begins_[size_t(token)];
    if (!path) {
        const int64_t position = past + query;
        end = held_before(job, end_of_sight(job, position, length));
        begin = job.window ? held_before(job, std::max<int64_t>(0, position + 1 - job.window)) : 0;
        return;
    }
    // The tokens of a tree that are here keep their order, so a bit moves to the number of such tokens before it.
    const int64_t start = past + __builtin_popcountll(path) - job.window;  // of the window
    const int64_t old = held_before(job, past);
    begin = job.window ? held_before(job, std::max<int64_t>(0, std::min(start, past))) : 0;
    int64_t depth = past;
    uint64_t own = 0;
    for (uint64_t left = path; left; left &= left - 1, ++depth) {
        const int64_t position = past + __builtin_ctzll(left);
        if (pages[position / job.page_tokens] < 0) continue;
        own |= uint64_t(1) << (held_before(job, position) - old);
        begin += job.window && depth < start;
    }
    paths_[size_t(token)] = own;
    end = old + __builtin_popcountll(own);
}

void HeldKeys::list_keys(const AttentionJob& job, const int64_t* pages, int64_t frames, int64_t past, int64_t position,
                         uint64_t path) {
    const VisibleKeys seen(job.mask, position);
    for (int64_t index = 0, run = 0; index < seen.count(); index += run) {
        const int64_t first = seen.key(index, run);
        for (int64_t key = first; key < first + run; ++key) {
            int64_t slot = key;
            if (path && key >= past) {  // on the path, not at the position
                uint64_t later = path;
                for (int64_t i = past; i < key; ++i) later &= later - 1;
                slot = past + __builtin_ctzll(later);
            }
            const int64_t page = slot / job.page_tokens;
            check_entry(pages[page], frames);
            if (pages[page] >= 0) listed_.push_back({int32_t(pages[page]), int32_t(slot - page * job.page_tokens)});
        }
    }
}

}  // namespace bankfull
