#include "packed_plan.hpp"

#include <atomic>
#include <memory>
#include <vector>

#include "isa.hpp"
#include "hadamard.hpp"
#include "packing.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

constexpr int64_t PIECE_WEIGHTS = 16384, PIECE_VALUES = 8192;  // minimum worth handing to another thread
constexpr int64_t HADAMARD_VALUES = 2048;  // the same for the Hadamard transform
constexpr int64_t PIECE_UNITS = 8;
constexpr int64_t FEW_ROWS = 64, SHARING_UNITS = 4;  // with more rows than these, this many units share the reads
// Rows shared by all dense weights of a job should fit into L2: this many bytes. But with fewer rows at a time, weights
// would be read too often.
constexpr int64_t CACHED_ROW_BYTES = 1 << 20, LEAST_ROWS = 128;
constexpr int64_t SHARED_ROWS = 128;  // per thread: from here on, own rows are worth widening all panels
constexpr int64_t LEAST_PART = 32;    // minimum rows that share a tile of weights
constexpr int64_t ANNOUNCED_ROWS = 128;  // with more rows, GEMM takes longer than reading the weights
constexpr int64_t HADAMARD_GROUP_BYTES = 256 << 10;  // of units that stay in L2 for all rows

// At least `worth` rows at a time, and sixteen if every thread has several times as many: rows of a block share lines.
int64_t piece_of_rows(int64_t rows, int64_t worth) {
    const int64_t each = rows / (4 * threads());
    return each >= HADAMARD_BLOCK ? HADAMARD_BLOCK : worth;
}

int64_t count_units(const PackedJob& job) {
    if (job.gate >= 0) return units_of(job.parts->outputs);
    int64_t units = 0;
    for (int64_t i = 0; i < job.count; ++i) units += units_of(job.parts[i].outputs);
    return units;
}

bool all_dense(const PackedJob& job) {
    for (int64_t i = 0; i < job.count; ++i)
        if (!layout_of(job.parts[i].pack).dense()) return false;
    return true;
}

// The rows [first, first + rows) of a job; its parts are stored in `parts`.
PackedJob rows_from(const PackedJob& job, int64_t first, int64_t rows, PackedPart* parts) {
    PackedJob some = job;
    some.rows = rows;
    some.parts = parts;
    some.x.data += first * job.x.stride;
    if (some.hadamard.data) some.hadamard.data += first * job.hadamard.stride;  // `first` is a multiple of whole blocks
    if (some.out.data) some.out.data += first * job.out.stride;
    for (int64_t i = 0; i < job.count; ++i) {
        parts[i] = job.parts[i];
        if (parts[i].y) parts[i].y += first * parts[i].y_stride;
    }
    return some;
}

// Heads of an attention intake. Threads take units in any order, so each head counts its missing units; the thread that
// completes the last one takes in the head.
class Arrivals {
  public:
    explicit Arrivals(const IntakeJob& intake) : intake_(intake) {}

    // Call before the first unit of some rows: those from `first` on, `each` of them per share.
    void expect(int64_t first, int64_t each, int64_t rows) {
        first_ = first, each_ = each, last_ = first + rows;
        const int64_t heads = intake_.all_heads(), all = heads * ((rows + each - 1) / each);
        thread_local std::unique_ptr<std::atomic<int32_t>[]> memory;  // reused
        thread_local int64_t size = 0;
        if (size < all) {
            memory.reset(new std::atomic<int32_t>[size_t(all)]);
            size = all;
        }
        missing_ = memory.get();
        for (int64_t i = 0; i < all; ++i) missing_[i].store(int32_t(units_in(i % heads)), std::memory_order_relaxed);
    }

    // Units [begin, end) of a share's rows are complete.
    void arrived(int64_t share, int64_t begin, int64_t end) const {
        const int64_t queries = intake_.heads * units_in(0), keys = intake_.kv_heads * units_in(0);
        std::atomic<int32_t>* missing = missing_ + share * intake_.all_heads();
        while (begin < end) {
            const bool value = begin >= queries + keys;  // units of keys follow those of queries
            const int64_t base = value ? queries + keys : 0, each = units_in(value ? intake_.heads + intake_.kv_heads : 0);
            const int64_t number = (begin - base) / each, behind = base + (number + 1) * each;
            const int64_t head = number + (value ? intake_.heads + intake_.kv_heads : 0);
            const int32_t units = int32_t((behind < end ? behind : end) - begin);
            if (missing[head].fetch_sub(units, std::memory_order_acq_rel) == units) take(share, head);
            begin += units;
        }
    }

  private:
    int64_t units_in(int64_t head) const {
        return (head < intake_.heads + intake_.kv_heads ? intake_.size : intake_.values) / UNIT_OUTPUTS;
    }
    void take(int64_t share, int64_t head) const {
        const int64_t row = first_ + share * each_, stop = row + each_;
        kernels().intake_head(intake_, head, row, stop < last_ ? stop : last_);
    }

    const IntakeJob& intake_;
    std::atomic<int32_t>* missing_ = nullptr;  // units per head and share
    int64_t first_ = 0, each_ = 0, last_ = 0;
};

struct UnitsJob {
    const PackedJob& job;
    const Arrivals* arrivals;  // may be null
};

// Units that share the reads of many rows. Hadamard-transformed ones should stay in L2 beside them.
int64_t sharing_units(const PackedJob& job) {
    const int64_t fitting = HADAMARD_GROUP_BYTES / (2 * hadamard_pack_bytes(job.inner) * (job.gate >= 0 ? 2 : 1));
    return !job.hadamard.data || fitting > SHARING_UNITS ? SHARING_UNITS : fitting > 1 ? fitting : 1;
}

// Units that a thread takes at a time. A handful of pieces per thread balances the load; with many rows the units of a
// piece share the reads of rows, and what is computed from them once per piece.
int64_t piece_of(const PackedJob& job, int64_t units) {
    const int64_t weights = UNIT_OUTPUTS * job.inner * (job.gate >= 0 ? 2 : 1), count = threads();
    const int64_t least = (PIECE_WEIGHTS + weights - 1) / weights;
    const bool many = job.rows > FEW_ROWS;
    const int64_t even = units / ((many ? 2 : 8) * count), most = many ? sharing_units(job) : PIECE_UNITS;
    const int64_t capped = even < most ? even : most;
    return capped > least ? capped : least;
}

// With arrivals, the rows of the job start at `first` of all rows.
void run_units(const PackedJob& job, Arrivals* arrivals, int64_t first = 0) {
    if (arrivals) arrivals->expect(first, job.rows, job.rows);
    const int64_t units = count_units(job);
    const UnitsJob both{job, arrivals};
    parallel(units, piece_of(job, units), [](const void* p, int64_t begin, int64_t end) {
        const UnitsJob& all = *static_cast<const UnitsJob*>(p);
        kernels().packed(all.job, begin, end);
        if (all.arrivals) all.arrivals->arrived(0, begin, end);
    }, &both);
}

// At most `most` rows after the other, each time all units.
void run_in_turn(const PackedJob& job, int64_t most, Arrivals* arrivals) {
    thread_local std::vector<PackedPart> parts;  // kept for its memory
    parts.resize(size_t(job.count));
    for (int64_t first = 0; first < job.rows; first += most)
        run_units(rows_from(job, first, job.rows - first < most ? job.rows - first : most, parts.data()), arrivals, first);
}

// A job's rows in as many parts as there are threads, each with all units, `group` of them at a time.
struct RowShares {
    std::vector<PackedJob> jobs;
    std::vector<PackedPart> parts;
    int64_t units, group, groups;
    const Arrivals* arrivals;  // may be null
};

// Each thread has its own rows: it wrote them, and will read their results. Every panel is widened by every thread,
// which many rows make worthwhile.
void run_shares(const PackedJob& job, int64_t count, int64_t group, Arrivals* arrivals) {
    thread_local RowShares shares;  // reuses its memory
    shares.units = count_units(job);
    shares.group = group;
    shares.groups = (shares.units + group - 1) / group;
    shares.parts.resize(size_t(count * job.count));
    shares.jobs.clear();
    const int64_t each = (job.rows + 32 * count - 1) / (32 * count) * 32;
    if (arrivals) arrivals->expect(0, each, job.rows);
    shares.arrivals = arrivals;
    for (int64_t first = 0; first < job.rows; first += each)
        shares.jobs.push_back(rows_from(job, first, job.rows - first < each ? job.rows - first : each,
                                        shares.parts.data() + int64_t(shares.jobs.size()) * job.count));
    parallel(shares.groups * int64_t(shares.jobs.size()), 1, [](const void* p, int64_t begin, int64_t end) {
        const RowShares& all = *static_cast<const RowShares*>(p);
        for (; begin < end; ++begin) {
            const int64_t share = begin / all.groups, unit = begin % all.groups * all.group;
            const int64_t stop = unit + all.group < all.units ? unit + all.group : all.units;
            kernels().packed(all.jobs[size_t(share)], unit, stop);
            if (all.arrivals) all.arrivals->arrived(share, unit, stop);
        }
    }, &shares);
}

// Number of parts into which a job's rows are split, each with all units; 1: every piece has all rows. With enough rows
// every thread gets its own. Otherwise a rough cost model of the busiest thread in nanoseconds decides: GEMM; widening,
// which costs as much as the GEMM of some rows; weights, which stream from memory meanwhile; and rows just written by
// other threads, which are read before the first product.
int64_t parts_of_rows(const PackedJob& job) {
    if (job.x.kind != Activations::Tiles || job.rows < 2 * LEAST_PART) return 1;
    const int64_t count = threads();
    if (job.rows >= SHARED_ROWS * count) return count;
    constexpr double HADAMARD_PRODUCTS = 700, PRODUCTS = 350, BYTES = 10;  // in a nanosecond: multiplications, bytes
    constexpr double WIDENING = 64, WORTH = 0.92;                       // rows; fraction of the time that a split must reach
    const int64_t units = count_units(job);
    const double unit = double(UNIT_OUTPUTS * job.inner * (job.gate >= 0 ? 2 : 1)), inner = double(job.inner);
    const bool hadamard = job.hadamard.data != nullptr;
    int64_t best = 1;
    double least = 0;
    for (int64_t parts = 1; parts <= count && job.rows >= parts * LEAST_PART; parts *= 2) {
        const double rows = double(job.rows) / double(parts), own = double((units * parts + count - 1) / count);
        const double products = own * unit * (hadamard ? rows / HADAMARD_PRODUCTS : (rows + WIDENING) / PRODUCTS);
        const double weights = own * unit * (hadamard ? 1.0 : 0.5) / BYTES, read = rows * inner * (hadamard ? 1.0 : 2.0) / BYTES;
        const double time = (products > weights ? products : weights) + read;
        if (parts == 1 || time < WORTH * least) best = parts, least = time;
    }
    return best;
}

// Parts with transformed weights, and with plain ones.
struct HadamardParts {
    int64_t transformed = 0, plain = 0;

    explicit HadamardParts(const PackedJob& job) {
        for (int64_t i = 0; i < job.count; ++i)
            if (job.parts[i].hadamard) ++(job.parts[i].plain() ? plain : transformed);
    }
    bool all_plain() const { return transformed == 0; }  // if both exist, the plain ones take no part
    int64_t used() const { return all_plain() ? plain : transformed; }
};

bool wants_hadamard_rows(const PackedJob& job) {
    if (!kernels().hadamard_rows || job.x.kind != kernels().hadamard_form || job.rows < kernels().hadamard_min_rows) return false;
    const int64_t hadamard = HadamardParts(job).used();
    return job.gate >= 0 ? hadamard == job.count : hadamard > 0;
}

// Buffer for a job's Hadamard-transformed rows.
Encoded room_for_hadamard(const PackedJob& job) {
    const int64_t stride = hadamard_stride(job.inner), blocks = (job.rows + HADAMARD_BLOCK - 1) / HADAMARD_BLOCK;
    thread_local std::vector<uint8_t> memory;  // reused; blocks start at multiples of 64 bytes
    const size_t room = size_t(blocks * HADAMARD_BLOCK * stride + 64);
    if (memory.size() < room) memory.resize(room);
    return {memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64, stride, Activations::Hadamard};
}

// All rows, before the first product: a row's scale depends on the whole row.
Encoded transformed_rows(const PackedJob& job) {
    const HadamardRowsJob rows{job.x, room_for_hadamard(job), job.inner, HadamardParts(job).all_plain()};
    parallel(job.rows, piece_of_rows(job.rows, HADAMARD_VALUES / job.inner + 1), [](const void* p, int64_t begin, int64_t end) {
        kernels().hadamard_rows(*static_cast<const HadamardRowsJob*>(p), begin, end);
    }, &rows);
    return rows.out;
}

// Units that a thread takes at a time, for all rows of one part.
int64_t group_of(const PackedJob& job, int64_t parts) {
    const int64_t count = threads(), even = count_units(job) * parts / ((job.hadamard.data ? 2 : 4) * count);
    const int64_t bytes = 2 * hadamard_pack_bytes(job.inner) * (job.gate >= 0 ? 2 : 1);
    int64_t group = job.hadamard.data ? HADAMARD_GROUP_BYTES / bytes : SHARING_UNITS;
    if (parts < count && group > even) group = even;
    return group > 1 ? group : 1;
}

void run_packed(const PackedJob& given, Arrivals* arrivals) {
    if (all_dense(given)) {
        const int64_t fitting = CACHED_ROW_BYTES / (2 * given.inner) / 32 * 32;
        return run_in_turn(given, fitting < LEAST_ROWS ? LEAST_ROWS : fitting, arrivals);
    }
    const PackedJob job = with_hadamard_rows(given);
    const int64_t parts = parts_of_rows(job);
    if (parts > 1) return run_shares(job, parts, group_of(job, parts), arrivals);
    run_units(job, arrivals);
}

// Rows that were Hadamard-transformed when they were encoded, for the next job.
struct HadamardBefore {
    HadamardRowsJob transform;
    int64_t rows = 0;  // 0: none

    bool are_of(const PackedJob& job) const {
        return rows == job.rows && transform.x.data == job.x.data && transform.columns == job.inner &&
               transform.plain == HadamardParts(job).all_plain();
    }
};
thread_local HadamardBefore hadamard_done;

}  // namespace

bool hadamard_before(const PackedJob& next, HadamardRowsJob& transform) {
    if (!wants_hadamard_rows(next)) return false;
    transform = {next.x, room_for_hadamard(next), next.inner, HadamardParts(next).all_plain()};
    hadamard_done = {transform, next.rows};
    return true;
}

void drop_hadamard_rows() { hadamard_done.rows = 0; }

PackedJob with_hadamard_rows(const PackedJob& given) {
    PackedJob job = given;
    job.plain = HadamardParts(job).all_plain();
    if (wants_hadamard_rows(job)) job.hadamard = hadamard_done.are_of(job) ? hadamard_done.transform.out : transformed_rows(job);
    drop_hadamard_rows();
    return job;
}

void run_packed(const PackedJob& job) { run_packed(job, nullptr); }

void run_packed(const PackedJob& job, const IntakeJob& intake) {
    Arrivals arrivals(intake);
    run_packed(job, &arrivals);
}

void announce_packed(const PackedJob& job, int64_t piece) {
    Coming coming;
    if (job.rows <= ANNOUNCED_ROWS && !all_dense(job) && job.count <= Coming::MOST) {
        const bool hadamard = wants_hadamard_rows(job);
        for (int64_t i = 0; i < job.count; ++i) {
            const PackedPart& part = job.parts[i];
            if (hadamard && part.hadamard && !part.plain())
                coming.runs[i] = {part.hadamard, units_of(part.outputs), 2 * hadamard_pack_bytes(job.inner)};
            else
                coming.runs[i] = {part.weight, units_of(part.outputs), 2 * layout_of(part.pack).bytes(job.inner)};
        }
        coming.count = int(job.count);
        coming.together = job.gate >= 0;
        coming.piece = piece ? piece : piece_of(job, count_units(job));
    }
    announce(coming);
}

Activations encoding_of(int64_t rows, Rounding rounding) {
    const int64_t from = kernels().tile_rows;
    const bool many = from && rows >= from;
    return many || rounding == Rounding::BFloat16 ? Activations::Tiles : Activations::Codes;
}

void run_encode(const EncodeJob& job, int64_t rows) {
    parallel(rows, PIECE_VALUES / job.columns + 1, [](const void* p, int64_t begin, int64_t end) {
        kernels().encode(*static_cast<const EncodeJob*>(p), begin, end);
    }, &job);
}

}  // namespace bankfull
