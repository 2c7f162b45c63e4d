#include "attention_plan.hpp"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "attention_held.hpp"
#include "isa.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

constexpr int64_t PIECES = 4;        // work items per thread, if there is enough work
constexpr int64_t LEAST_ROWS = 16;   // minimum rows per item, if available: keys are read once for all of them
constexpr int64_t ALONE = 1 << 11;   // multiplications per row of an item below which one thread finishes before another
                                     // wakes up: kernels with more rows per item are proportionally faster
constexpr int64_t MERGED_ALONE = 1 << 21;  // the same for merging partial results
// Bytes of keys and values from which on a layer's cache does not stay in a core's own caches between two steps: kernels
// then prefetch what they process next.
constexpr int64_t FAR_BYTES = 1 << 20;
constexpr int64_t LEAST_CHUNKS = 2;  // of a part of a sequence, if sequences are cut for all of their heads

void require(bool fine, const char* message) {
    if (!fine) throw std::invalid_argument(message);
}

// Each token's mask is its parent's and its own bit; parents come first.
void check_tree(const uint64_t* ancestors, int64_t tokens) {
    require(tokens <= 64, "paged_attention: a tree has more than 64 tokens");
    for (int64_t token = 0; token < tokens; ++token) {
        const uint64_t own = uint64_t(1) << token, path = ancestors[token] & ~own;
        require((ancestors[token] & own) && path < own && (!path || ancestors[63 - __builtin_clzll(path)] == path),
                "paged_attention: a mask is not a path of its tree");
    }
}

// Whether the pages of all keys that a query sees under the mask exist.
bool listed_pages_exist(const AttentionJob& job, const VisibleKeys& seen, const int64_t* pages, int64_t frames) {
    int64_t run = 0;
    for (int64_t index = 0; index < seen.count(); index += run) {
        const int64_t key = seen.key(index, run);
        for (int64_t page = key / job.page_tokens; page * job.page_tokens < key + run; ++page)
            if (pages[page] < 0 || pages[page] >= frames) return false;
    }
    return true;
}

void check(const AttentionJob& job, PageType type, int64_t sequences, int64_t tokens, int64_t width) {
    require(type != PAGES_INT4 || (job.size % 8 == 0 && job.values % 8 == 0),
            "paged_attention: int4 heads must be multiples of 8");
    require(job.page_tokens > 0 && job.kv_heads > 0 && job.heads > 0 && job.heads % job.kv_heads == 0 && job.size > 0 &&
                job.values > 0 && job.window >= 0 && job.block >= 0,
            "paged_attention: sizes do not match");
    const SparseMask& mask = job.mask;
    require(!job.block || !(job.window || mask.given()), "paged_attention: blocks that see each other have no window");
    require(!mask.given() || (!job.window && mask.dilation > 0 && mask.stride >= 0 && mask.globals >= 0 && mask.columns >= 0 &&
                              mask.columns <= mask.stride && mask.window >> 31 == 0 && mask.dilation >> 31 == 0),
            "paged_attention: a mask's sizes do not match");
    require(!job.out.data || job.values % 32 == 0,
            "paged_attention: encoded results need a head size that is a multiple of 32");
    require(job.q_start[0] == 0 && job.q_start[sequences] == tokens,
            "paged_attention: q_start does not cover the queries");
    for (int64_t i = 0; i < sequences; ++i) {
        const int64_t queries = job.q_start[i + 1] - job.q_start[i], length = job.kv_len[i];
        require(queries >= 0 && length >= queries && length <= width * job.page_tokens,
                "paged_attention: a sequence is longer than its pages or shorter than its queries");
        if (queries && job.ancestors && job.ancestors[job.q_start[i]]) {
            require(!job.block, "paged_attention: blocks that see each other have no trees");
            check_tree(job.ancestors + job.q_start[i], queries);
        }
    }
}

// Pages visible to any query must exist; other entries may be invalid.
void check_pages(const AttentionJob& job, int64_t sequences, int64_t frames) {
    const SparseMask& mask = job.mask;
    for (int64_t i = 0; i < sequences; ++i) {
        const int64_t queries = job.q_start[i + 1] - job.q_start[i], length = job.kv_len[i];
        if (queries == 0) continue;
        const int64_t seen = job.window ? std::max<int64_t>(0, length - queries + 1 - job.window) : 0;
        const int64_t* pages = job.table + i * job.table_stride;
        if (mask.given()) {
            // A draft's position is at most that of its slot, so the pages of its path are those of other queries' keys,
            // or of the new tokens themselves.
            for (int64_t query = length - queries; query < length; ++query)
                require(listed_pages_exist(job, VisibleKeys(mask, query), pages, frames),
                        "paged_attention: a page table entry is out of range");
            for (int64_t page = (length - queries) / job.page_tokens; page * job.page_tokens < length; ++page)
                require(pages[page] >= 0 && pages[page] < frames, "paged_attention: a page table entry is out of range");
            continue;
        }
        for (int64_t page = seen / job.page_tokens; page * job.page_tokens < length; ++page)
            require(pages[page] >= 0 && pages[page] < frames,
                    "paged_attention: a page table entry is out of range");
    }
}

struct Plan {
    std::vector<AttentionItem> tiles, shared, items, split;  // shared: queries of trees, over all of their chunks
    std::vector<float> partials;
    int64_t products = 0;
    bool alone = false;
    bool by_heads = true;  // the heads of a sequence may be processed by different threads

    static int64_t end_of(const AttentionJob& job, int64_t sequence, int64_t past, int64_t query) {
        const int64_t token = job.q_start[sequence] + query;
        return job.ends ? job.ends[token] : past + __builtin_popcountll(job.ancestors[token]);
    }

    // Queries of a tree see the same keys before it. A window begins at another position for each depth, so with one
    // they share nothing. Returns the number of chunks.
    int64_t add_tree(const AttentionJob& job, int64_t sequence, int64_t past, int64_t queries, int64_t most) {
        int64_t chunks = 0;
        const bool shares = !job.window && !job.begins && !job.mask.given() && past >= CHUNK && queries > 1;
        const int64_t each = shares ? most : 1;
        for (int64_t first = 0; first < queries; first += each) {
            AttentionItem tile{sequence, 0, first, std::min(each, queries - first), 0, 0, -1};
            int64_t from = INT64_MAX, end = 0;
            for (int64_t query = first; query < first + tile.queries; ++query) {
                const int64_t position = end_of(job, sequence, past, query) - 1;
                const int64_t last = job.mask.given() ? VisibleKeys(job.mask, position).count() : position + 1;
                const int64_t start = job.begins ? job.begins[job.q_start[sequence] + query] : last - job.window;
                from = std::min(from, job.window || job.begins ? std::max<int64_t>(0, start) : 0);
                end = std::max(end, last);
                products += (last - from) * job.heads * (job.size + job.values);
            }
            tile.chunk_begin = from / CHUNK;
            tile.chunk_end = (end + CHUNK - 1) / CHUNK;
            for (; tile.kv_head < job.kv_heads; ++tile.kv_head) (shares ? shared : tiles).push_back(tile);
            chunks += (tile.chunk_end - tile.chunk_begin) * job.kv_heads;
        }
        return chunks;
    }

    // Items for the chunks before the tree, with all queries of the tile, and items of one query and chunk from there on.
    int64_t split_tree(const AttentionJob& job, AttentionItem tile, int64_t share, int64_t groups, int64_t floats,
                       int64_t used) {
        const int64_t each = tile.queries * groups * floats;
        const int64_t past = job.kv_len[tile.sequence] - (job.q_start[tile.sequence + 1] - job.q_start[tile.sequence]);
        const int64_t tree = past / CHUNK;
        tile.partial = used;
        split.push_back(tile);
        for (int64_t chunk = 0; chunk < tree; chunk += share) {
            AttentionItem piece = tile;
            piece.chunk_begin = chunk;
            piece.chunk_end = std::min(chunk + share, tree);
            piece.partial = used + chunk * each;
            items.push_back(piece);
        }
        for (int64_t query = tile.first; query < tile.first + tile.queries; ++query)
            for (int64_t chunk = tree; chunk * CHUNK < end_of(job, tile.sequence, past, query); ++chunk) {
                AttentionItem piece = tile;
                piece.first = query;
                piece.queries = 1;
                piece.chunk_begin = chunk;
                piece.chunk_end = chunk + 1;
                piece.partial = used + chunk * each + (query - tile.first) * groups * floats;
                items.push_back(piece);
            }
        return used + tile.chunk_end * each;
    }

    // Items of at most `rows` rows, and at least `pieces` of them if there is enough work.
    void build(const AttentionJob& job, int64_t sequences, int64_t rows, int64_t pieces) {
        tiles.clear();
        shared.clear();
        items.clear();
        split.clear();
        products = 0;
        const int64_t groups = job.heads / job.kv_heads, share_of_rows = job.q_start[sequences] * job.heads / pieces;
        const int64_t wanted = std::min(rows, std::max(share_of_rows, LEAST_ROWS));
        // Under a sparse mask each query has its own list of keys.
        const int64_t most = job.mask.given() || job.listed ? 1 : std::max<int64_t>(1, wanted / groups);
        int64_t chunks = 0;
        for (int64_t i = 0; i < sequences; ++i) {
            const int64_t queries = job.q_start[i + 1] - job.q_start[i], past = job.kv_len[i] - queries;
            if (job.ancestors && queries && job.ancestors[job.q_start[i]]) {
                chunks += add_tree(job, i, past, queries, most);
                continue;
            }
            // The last queries see the most keys, so they come first.
            for (int64_t first = (queries - 1) / most * most; first >= 0 && queries > 0; first -= most) {
                const int64_t count = std::min(most, queries - first), last = past + first + count - 1;
                const int64_t token = job.q_start[i] + first;
                const int64_t end = job.ends           ? job.ends[token + count - 1]
                                    : job.mask.given() ? VisibleKeys(job.mask, last).count()
                                                       : end_of_sight(job, last, job.kv_len[i]);
                const int64_t from = job.begins   ? job.begins[token]
                                     : job.window ? std::max<int64_t>(0, past + first + 1 - job.window)
                                                  : 0;
                const AttentionItem tile{i, 0, first, count, from / CHUNK, (end + CHUNK - 1) / CHUNK, -1};
                for (int64_t head = 0; head < job.kv_heads; ++head) {
                    tiles.push_back(tile);
                    tiles.back().kv_head = head;
                }
                chunks += (tile.chunk_end - tile.chunk_begin) * job.kv_heads;
                products += (end - from) * count * job.heads * (job.size + job.values);
            }
        }
        alone = products <= ALONE * rows;
        const int64_t bundles = int64_t(tiles.size()) / job.kv_heads, each_head = chunks / job.kv_heads;
        const bool decodes = job.q_start[sequences] == sequences;
        by_heads = !decodes || (bundles < pieces && each_head < LEAST_CHUNKS * pieces);
        // A tile with more than its share of the chunks is split, so that one long sequence keeps every thread busy.
        // With enough tiles for that, they stay whole: splits have to be merged. The heads of a sequence are adjacent
        // in its pages, so a decode of many chunks is cut between chunks, for all heads alike.
        const int64_t whole = by_heads ? int64_t(tiles.size() + shared.size()) : bundles, all = by_heads ? chunks : each_head;
        const int64_t share = whole >= pieces || alone ? all : std::max<int64_t>(1, all / pieces);
        const int64_t floats = (job.values + 15) / 16 * 16 + 2, run = by_heads ? 1 : job.kv_heads;
        int64_t used = 0;
        for (const AttentionItem& tile : shared) used = split_tree(job, tile, share, groups, floats, used);
        for (size_t first = 0; first < tiles.size(); first += size_t(run)) {
            const AttentionItem& tile = tiles[first];
            const int64_t each = tile.queries * groups * floats, chunks_of_tile = tile.chunk_end - tile.chunk_begin;
            const bool cut = chunks_of_tile > share;
            for (int64_t i = 0; i < run && cut; ++i) {
                split.push_back(tiles[first + size_t(i)]);
                split.back().partial = used + i * chunks_of_tile * each;
            }
            for (int64_t chunk = tile.chunk_begin; chunk < tile.chunk_end; chunk += share)
                for (int64_t i = 0; i < run; ++i) {
                    items.push_back(tiles[first + size_t(i)]);
                    AttentionItem& piece = items.back();
                    piece.chunk_begin = chunk;
                    piece.chunk_end = std::min(chunk + share, tile.chunk_end);
                    if (cut) piece.partial = used + (i * chunks_of_tile + chunk - tile.chunk_begin) * each;
                }
            if (cut) used += run * chunks_of_tile * each;
        }
        if (int64_t(partials.size()) < used) partials.resize(size_t(used));
    }
};

struct Task {
    void (*run)(const AttentionJob&, int64_t, int64_t);
    const AttentionJob& job;
};

void spread(const Task& task, int64_t count, int64_t piece) {
    parallel(count, piece, [](const void* p, int64_t begin, int64_t end) {
        const Task& t = *static_cast<const Task*>(p);
        t.run(t.job, begin, end);
    }, &task);
}

bool reads_much(const AttentionJob& job, PageType type, int64_t sequences) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < sequences; ++i) tokens += job.window ? std::min(job.window, job.kv_len[i]) : job.kv_len[i];
    const int64_t numbers = job.size + job.values;
    return tokens * job.kv_heads * (type == PAGES_INT4 ? numbers / 2 : numbers * number_bytes(type)) >= FAR_BYTES;
}

void run(AttentionJob job, PageType type, int64_t sequences, int64_t tokens) {
    const Kernels& kernel = kernels();
    const int64_t pieces = PIECES * threads();
    thread_local Plan plan;  // reuses its memory
    plan.build(job, sequences, kernel.attention_rows[type](job), pieces);
    job.items = plan.items.data();
    job.items_end = job.items + plan.items.size();
    job.split = plan.split.data();
    job.partials = plan.partials.data();
    const int64_t items = int64_t(plan.items.size()), split = int64_t(plan.split.size());
    int64_t piece = items / (4 * pieces) + 1;
    if (!plan.by_heads) piece = std::max(piece, job.kv_heads);
    if (piece > job.kv_heads) piece -= piece % job.kv_heads;
    job.ahead = tokens == sequences && reads_much(job, type, sequences);
    spread({kernel.attention[type], job}, items, plan.alone ? items : piece);
    spread({kernel.merge, job}, split, plan.products <= MERGED_ALONE ? split : 1);
}

}  // namespace

void paged_attention(AttentionJob job, PageType type, int64_t sequences, int64_t tokens, int64_t width,
                     int64_t frames) {
    check(job, type, sequences, tokens, width);
    check_pages(job, sequences, frames);
    run(job, type, sequences, tokens);
}

void partial_attention(AttentionJob job, PageType type, int64_t sequences, int64_t tokens, int64_t width,
                       int64_t frames) {
    require(!job.out.data && !job.sinks, "partial_attention: results are neither encoded nor joined with sinks");
    check(job, type, sequences, tokens, width);
    thread_local HeldKeys held;  // reuses its memory
    job = held.of(job, sequences, width, frames);
    for (int64_t token = 0; token < tokens; ++token) {
        if (job.ends[token] > (job.begins ? job.begins[token] : 0)) continue;
        float* y = job.y + token * job.heads * (job.values + 1);
        for (int64_t head = 0; head < job.heads; ++head, y += job.values + 1) {
            std::fill_n(y, job.values, 0.0f);
            y[job.values] = -__builtin_inff();
        }
    }
    run(job, type, sequences, tokens);
}

}  // namespace bankfull
