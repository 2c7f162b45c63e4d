// Where the keys and values of positions lie in the pages.
//
// Included inside a namespace per instruction set, in attention.hpp.

// Addresses of the positions [from, to) of consecutive KV slots. One division, then counting: more divisions would cost
// as much as the products.
template <class E>
static void locate_run(const AttentionJob& job, const Pages& pages, const AttentionItem& item, int64_t from, int64_t to,
                       const uint8_t** at) {
    const int64_t* table = job.table + item.sequence * job.table_stride;
    int64_t page = from / job.page_tokens, token = from - page * job.page_tokens;
    const int64_t stride = pages.token * E::bytes;
    for (int64_t position = from; position < to; ++page, token = 0) {
        const uint8_t* head = pages.data + (table[page] * pages.frame + item.kv_head * pages.head) * E::bytes;
        const int64_t left = to - position, count = left < job.page_tokens - token ? left : job.page_tokens - token;
        for (int64_t i = 0; i < count; ++i) at[i] = head + (token + i) * stride;
        at += count;
        position += count;
    }
}

// The same for the keys [from, to) of a sparse mask's list. Positions from `tree` on are those of a path.
template <class E>
static void locate_listed(const AttentionJob& job, const Pages& pages, const AttentionItem& item, const VisibleKeys& seen,
                          int64_t tree, uint64_t path, int64_t from, int64_t to, const uint8_t** at) {
    while (from < to) {
        int64_t run, key = seen.key(from, run);
        if (run > to - from) run = to - from;
        if (key >= tree) {
            uint64_t later = path;
            for (int64_t i = tree; i < key; ++i) later &= later - 1;
            key = tree + __builtin_ctzll(later);
            run = 1;
        } else if (key + run > tree) {
            run = tree - key;
        }
        locate_run<E>(job, pages, item, key, key + run, at);
        at += run;
        from += run;
    }
}

// The same for any positions that the item's first query sees. In a tree, the slots of its path are not consecutive:
// lanes and chunks follow positions, so a draft's bits are those of plain decoding.
template <class E>
static void locate(const AttentionJob& job, const Pages& pages, const AttentionItem& item, int64_t from, int64_t to,
                   const uint8_t** at) {
    const int64_t first = job.q_start[item.sequence];
    if (job.listed) {
        const HeldKey* keys = job.listed + job.list_start[first + item.first];
        const uint8_t* head = pages.data + item.kv_head * pages.head * E::bytes;
        for (int64_t i = from; i < to; ++i)
            *at++ = head + (keys[i].frame * pages.frame + keys[i].token * pages.token) * E::bytes;
        return;
    }
    uint64_t path = job.ancestors ? paths_of(job)[first + item.first] : 0;
    const int64_t tree = job.kv_len[item.sequence] - (job.q_start[item.sequence + 1] - first);
    if (job.mask.given()) {
        const int64_t query = tree + (path ? __builtin_popcountll(path) - 1 : item.first);
        return locate_listed<E>(job, pages, item, VisibleKeys(job.mask, query), path ? tree : INT64_MAX, path, from, to, at);
    }
    if (!path || to <= tree) return locate_run<E>(job, pages, item, from, to, at);
    if (from < tree) {
        locate_run<E>(job, pages, item, from, tree, at);
        at += tree - from;
    }
    for (int64_t position = tree; position < to; ++position, path &= path - 1) {
        const int64_t slot = tree + __builtin_ctzll(path);
        if (position >= from) locate_run<E>(job, pages, item, slot, slot + 1, at++);
    }
}

// Scales of the positions [from, to), at most a chunk.
static void gather_scales(const AttentionJob& job, const Pages& pages, const AttentionItem& item, int64_t from,
                          int64_t to, float* scales) {
    const Pages floats{reinterpret_cast<uint8_t*>(pages.scales), pages.scale_frame, pages.scale_token,
                       pages.scale_head, nullptr, 0, 0, 0};
    const uint8_t* at[CHUNK];
    locate<Float32>(job, floats, item, from, to, at);
    for (int64_t i = 0; i < to - from; ++i) scales[i] = Float32::one(at[i]);
}

// The same with the factor of the codes' format.
template <class E>
static void code_scales(const AttentionJob& job, const Pages& pages, const AttentionItem& item, int64_t from, int64_t to,
                        float* scales) {
    gather_scales(job, pages, item, from, to, scales);
    if (E::unit != 1.0f)
        for (int64_t i = 0; i < to - from; ++i) scales[i] *= E::unit;
}
