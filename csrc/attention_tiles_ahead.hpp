// Prefetching for few rows in tiles.
//
// Included inside attention_tiles, after attention_tiles_shared.hpp.

// KV heads of one sequence with the same queries and the same chunks: their items are adjacent.
struct Bundle {
    const AttentionItem* items;
    int64_t heads;

    static bool joins(const AttentionItem& a, const AttentionItem& b, int64_t distance) {
        return b.sequence == a.sequence && b.kv_head == a.kv_head + distance && b.first == a.first &&
               b.queries == a.queries && b.chunk_begin == a.chunk_begin && b.chunk_end == a.chunk_end &&
               (b.partial < 0) == (a.partial < 0);
    }
};

// Requests the keys and values of the next chunk while the current one is processed, a few lines at a time, so that
// memory and arithmetic overlap: many requests at once would stall, because a core has only some dozens of outstanding
// loads. The chunk after a sequence's last one is the first of the next sequence. Lines come from several pages in turn,
// which memory serves faster than page after page.
class Ahead {
  public:
    // `chunk` of the bundle is processed next, with at least `asks` calls of ask().
    template <class E>
    void aim(const AttentionJob& job, const Bundle& bundle, int64_t chunk, int64_t asks) {
        count_ = lines_ = 0;
        first_ = streams_ = longest_ = turn_ = offset_ = each_ = 0;
        if (!job.ahead) return;
        const AttentionItem* next = bundle.items;
        if (++chunk == next->chunk_end) {
            next += bundle.heads;
            if (next >= job.items_end) return;
            chunk = next->chunk_begin;
        }
        const Rows rows(job, *next);
        if (rows.count > FEW_ROWS) return;
        const int64_t start = chunk * CHUNK, to = rows.to(rows.count - 1, start + CHUNK);
        const Section section{job, *next, bundle.heads, rows.from(0, start), to};
        if constexpr (has_codes<E>)  // before the codes: they are needed first
            add<E::paired ? 2 : 4>(section, scales_of(job.k), scales_of(job.v));
        add<E::bytes>(section, job.k, job.v);
        each_ = (lines_ + asks - 1) / asks;
    }
    void ask() {
        for (int64_t left = each_; left > 0;) {
            if (offset_ >= longest_ && !advance()) return;
            const Run& run = runs_[first_ + turn_];
            if (offset_ < run.bytes) {
                _mm_prefetch(reinterpret_cast<const char*>(run.at + offset_), _MM_HINT_T1);
                --left;
            }
            if (++turn_ == streams_) turn_ = 0, offset_ += LINE;
        }
    }

  private:
    static constexpr int64_t STREAMS = 8, MOST = 4 * CHUNK;

    struct Run {
        const uint8_t* at;
        int64_t bytes;
    };
    struct Section {
        const AttentionJob& job;
        const AttentionItem& item;
        int64_t heads, from, to;  // positions
    };
    Run runs_[MOST];
    int64_t count_ = 0, lines_ = 0;
    int64_t first_ = 0, streams_ = 0, longest_ = 0;  // the runs that take turns, and the bytes of their longest
    int64_t turn_ = 0, offset_ = 0;                  // where ask() resumes
    int64_t each_ = 0;                               // lines per call

    // To the next runs; false if there are none.
    bool advance() {
        first_ += streams_;
        streams_ = count_ - first_ < STREAMS ? count_ - first_ : STREAMS;
        offset_ = longest_ = 0;
        for (int64_t i = first_; i < first_ + streams_; ++i) longest_ = runs_[i].bytes > longest_ ? runs_[i].bytes : longest_;
        return streams_ > 0;
    }

    static Pages scales_of(const Pages& pages) {
        return {reinterpret_cast<uint8_t*>(pages.scales), pages.scale_frame, pages.scale_token, pages.scale_head, nullptr, 0,
                0, 0};
    }

    // Keys and values of a page in turn: they lie side by side.
    template <int64_t BYTES>
    void add(const Section& section, const Pages& keys, const Pages& values) {
        const int64_t* table = section.job.table + section.item.sequence * section.job.table_stride;
        for (int64_t position = section.from; position < section.to;) {
            const int64_t page = position / section.job.page_tokens, first = position - page * section.job.page_tokens;
            const int64_t left = section.to - position, here = section.job.page_tokens - first;
            const int64_t tokens = here < left ? here : left;
            add(section, keys, BYTES, table[page], first, tokens);
            add(section, values, BYTES, table[page], first, tokens);
            position += tokens;
        }
    }

    // A token's heads are one run, and so are those of all tokens in a page if nothing lies between them.
    void add(const Section& section, const Pages& pages, int64_t bytes, int64_t frame, int64_t first, int64_t tokens) {
        const bool whole = pages.token == section.heads * pages.head;
        const uint8_t* at =
            pages.data + (frame * pages.frame + first * pages.token + section.item.kv_head * pages.head) * bytes;
        const int64_t size = (whole ? tokens : 1) * section.heads * pages.head * bytes;
        for (int64_t i = 0; i < (whole ? 1 : tokens) && count_ < MOST; ++i, at += pages.token * bytes) {
            const int64_t before = int64_t(reinterpret_cast<uintptr_t>(at) % LINE);
            runs_[count_++] = {at - before, before + size};
            lines_ += (before + size + LINE - 1) / LINE;
        }
    }
};
