#include "packed_plan.hpp"

#include <atomic>
#include <memory>
#include <vector>

#include "isa.hpp"
#include "mixing.hpp"
#include "packing.hpp"
#include "threads.hpp"

namespace bankfull {
namespace {

constexpr int64_t PIECE_WEIGHTS = 16384, PIECE_VALUES = 8192;  // worth a hand-over between threads
constexpr int64_t MIXED_VALUES = 2048;  // the same for numbers that are mixed
constexpr int64_t PIECE_UNITS = 8;
constexpr int64_t FEW_ROWS = 64, SHARING_UNITS = 4;  // more rows than these are read for so many units
// Rows that all dense weights of a job share should fit the second-level cache: so many bytes of them. But with fewer than
// so many rows at a time, weights would be read too often.
constexpr int64_t CACHED_ROW_BYTES = 1 << 20, LEAST_ROWS = 128;
constexpr int64_t SHARED_ROWS = 128;  // for each thread: from here on, rows of its own are worth widening all panels
constexpr int64_t LEAST_PART = 32;    // rows that share a tile of weights
constexpr int64_t ANNOUNCED_ROWS = 128;  // with more, products take longer than reading the weights
constexpr int64_t MIXED_GROUP_BYTES = 256 << 10;  // of units that stay in the second-level cache for all rows

// At least `worth` rows at a time, and sixteen where every thread has several times as many: those of a block share lines.
int64_t piece_of_rows(int64_t rows, int64_t worth) {
    const int64_t each = rows / (4 * threads());
    return each >= MIXED_BLOCK ? MIXED_BLOCK : worth;
}

int64_t count_units(const PackedJob& job) {
    if (job.gate >= 0) return units_of(job.parts->outputs);
    int64_t units = 0;
    for (int64_t i = 0; i < job.count; ++i) units += units_of(job.parts[i].outputs);
    return units;
}

bool all_dense(const PackedJob& job) {
    for (int64_t i = 0; i < job.count; ++i)
        if (!LAYOUTS[job.parts[i].pack].dense()) return false;
    return true;
}

// The rows [first, first + rows) of a job; `parts` is where its parts go.
PackedJob rows_from(const PackedJob& job, int64_t first, int64_t rows, PackedPart* parts) {
    PackedJob some = job;
    some.rows = rows;
    some.parts = parts;
    some.x.data += first * job.x.stride;
    if (some.mixed.data) some.mixed.data += first * job.mixed.stride;  // `first` is a multiple of whole blocks
    if (some.out.data) some.out.data += first * job.out.stride;
    for (int64_t i = 0; i < job.count; ++i) {
        parts[i] = job.parts[i];
        if (parts[i].y) parts[i].y += first * parts[i].y_stride;
    }
    return some;
}

// Heads that attention takes in. Threads take units as they can, so each head counts those that are still to come; who
// brings the last one takes in the head.
class Arrivals {
  public:
    explicit Arrivals(const IntakeJob& intake) : intake_(intake) {}

    // Before the first unit of some rows: those from `first` on, `each` of them in every share.
    void expect(int64_t first, int64_t each, int64_t rows) {
        first_ = first, each_ = each, last_ = first + rows;
        const int64_t heads = intake_.all_heads(), all = heads * ((rows + each - 1) / each);
        thread_local std::unique_ptr<std::atomic<int32_t>[]> memory;  // kept
        thread_local int64_t size = 0;
        if (size < all) {
            memory.reset(new std::atomic<int32_t>[size_t(all)]);
            size = all;
        }
        missing_ = memory.get();
        for (int64_t i = 0; i < all; ++i) missing_[i].store(int32_t(units_in(i % heads)), std::memory_order_relaxed);
    }

    // Units [begin, end) of a share's rows are there.
    void came(int64_t share, int64_t begin, int64_t end) const {
        const int64_t queries = intake_.heads * units_in(0), keys = intake_.kv_heads * units_in(0);
        std::atomic<int32_t>* missing = missing_ + share * intake_.all_heads();
        while (begin < end) {
            const bool value = begin >= queries + keys;  // units of keys follow those of queries, and have as many
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
    std::atomic<int32_t>* missing_ = nullptr;  // units, for each head of each share
    int64_t first_ = 0, each_ = 0, last_ = 0;
};

struct UnitsJob {
    const PackedJob& job;
    const Arrivals* arrivals;  // may be null
};

// Units that share what is read of many rows. Mixed ones should stay in the second-level cache beside them.
int64_t sharing_units(const PackedJob& job) {
    const int64_t fitting = MIXED_GROUP_BYTES / (2 * mixed_pack_bytes(job.inner) * (job.gate >= 0 ? 2 : 1));
    return !job.mixed.data || fitting > SHARING_UNITS ? SHARING_UNITS : fitting > 1 ? fitting : 1;
}

// Units that a thread takes at a time. A handful of pieces for each thread evens out what the machine does meanwhile; with
// many rows the units of a piece share what is read of these, or made of them once for a piece.
int64_t piece_of(const PackedJob& job, int64_t units) {
    const int64_t weights = UNIT_OUTPUTS * job.inner * (job.gate >= 0 ? 2 : 1), count = threads();
    const int64_t least = (PIECE_WEIGHTS + weights - 1) / weights;
    const bool many = job.rows > FEW_ROWS;
    const int64_t even = units / ((many ? 2 : 8) * count), most = many ? sharing_units(job) : PIECE_UNITS;
    const int64_t capped = even < most ? even : most;
    return capped > least ? capped : least;
}

// Rows of the job are those from `first` on of all, where there are arrivals.
void run_units(const PackedJob& job, Arrivals* arrivals, int64_t first = 0) {
    if (arrivals) arrivals->expect(first, job.rows, job.rows);
    const int64_t units = count_units(job);
    const UnitsJob both{job, arrivals};
    parallel(units, piece_of(job, units), [](const void* p, int64_t begin, int64_t end) {
        const UnitsJob& all = *static_cast<const UnitsJob*>(p);
        kernels().packed(all.job, begin, end);
        if (all.arrivals) all.arrivals->came(0, begin, end);
    }, &both);
}

// So many rows after the other, each time all units.
void run_in_turn(const PackedJob& job, int64_t most, Arrivals* arrivals) {
    thread_local std::vector<PackedPart> parts;  // kept for its memory
    parts.resize(size_t(job.count));
    for (int64_t first = 0; first < job.rows; first += most)
        run_units(rows_from(job, first, job.rows - first < most ? job.rows - first : most, parts.data()), arrivals, first);
}

// A job's rows in as many parts as there are threads, each of them with all units, `group` of them at a time.
struct RowShares {
    std::vector<PackedJob> jobs;
    std::vector<PackedPart> parts;
    int64_t units, group, groups;
    const Arrivals* arrivals;  // may be null
};

// Each thread has rows of its own: it wrote them, and will read what becomes of them. Every panel is widened by every
// thread, which many rows make worth it.
void run_shares(const PackedJob& job, int64_t count, int64_t group, Arrivals* arrivals) {
    thread_local RowShares shares;  // kept for its memory
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
            if (all.arrivals) all.arrivals->came(share, unit, stop);
        }
    }, &shares);
}

// In how many parts a job's rows are cut, each with all units; 1: every piece has all rows. With rows enough for every thread
// each gets its own. Else what the busiest thread has to do decides, by a rough count in nanoseconds: products; widening,
// which is as much as products of so many rows; weights, which stream from memory meanwhile; and rows, which other threads
// have just written, and which come before the first product.
int64_t parts_of_rows(const PackedJob& job) {
    if (job.x.kind != Activations::Tiles || job.rows < 2 * LEAST_PART) return 1;
    const int64_t count = threads();
    if (job.rows >= SHARED_ROWS * count) return count;
    constexpr double MIXED_PRODUCTS = 700, PRODUCTS = 350, BYTES = 10;  // in a nanosecond: multiplications, bytes
    constexpr double WIDENING = 64, WORTH = 0.92;                       // rows; the share of the time that a cut must reach
    const int64_t units = count_units(job);
    const double unit = double(UNIT_OUTPUTS * job.inner * (job.gate >= 0 ? 2 : 1)), inner = double(job.inner);
    const bool mixed = job.mixed.data != nullptr;
    int64_t best = 1;
    double least = 0;
    for (int64_t parts = 1; parts <= count && job.rows >= parts * LEAST_PART; parts *= 2) {
        const double rows = double(job.rows) / double(parts), own = double((units * parts + count - 1) / count);
        const double products = own * unit * (mixed ? rows / MIXED_PRODUCTS : (rows + WIDENING) / PRODUCTS);
        const double weights = own * unit * (mixed ? 1.0 : 0.5) / BYTES, read = rows * inner * (mixed ? 1.0 : 2.0) / BYTES;
        const double time = (products > weights ? products : weights) + read;
        if (parts == 1 || time < WORTH * least) best = parts, least = time;
    }
    return best;
}

bool wants_mixed_rows(const PackedJob& job) {
    if (!kernels().mix_rows || job.x.kind != kernels().mixed_of || job.rows < kernels().mixed_rows) return false;
    int64_t mixed = 0;
    for (int64_t i = 0; i < job.count; ++i) mixed += job.parts[i].mixed != nullptr;
    return job.gate >= 0 ? mixed == job.count : mixed > 0;
}

// Where a job's mixed rows go.
Encoded room_for_mixed(const PackedJob& job) {
    const int64_t stride = mixed_stride(job.inner), blocks = (job.rows + MIXED_BLOCK - 1) / MIXED_BLOCK;
    thread_local std::vector<uint8_t> memory;  // kept; blocks begin on multiples of 64 bytes
    const size_t room = size_t(blocks * MIXED_BLOCK * stride + 64);
    if (memory.size() < room) memory.resize(room);
    return {memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64, stride, Activations::Mixed};
}

// All rows, before the first product: a row's scale is known only when the row is.
Encoded mixed_rows(const PackedJob& job) {
    const MixRowsJob rows{job.x, room_for_mixed(job), job.inner};
    parallel(job.rows, piece_of_rows(job.rows, MIXED_VALUES / job.inner + 1), [](const void* p, int64_t begin, int64_t end) {
        kernels().mix_rows(*static_cast<const MixRowsJob*>(p), begin, end);
    }, &rows);
    return rows.out;
}

// Units that a thread takes at a time, for all rows of one of so many parts.
int64_t group_of(const PackedJob& job, int64_t parts) {
    const int64_t count = threads(), even = count_units(job) * parts / ((job.mixed.data ? 2 : 4) * count);
    const int64_t bytes = 2 * mixed_pack_bytes(job.inner) * (job.gate >= 0 ? 2 : 1);
    int64_t group = job.mixed.data ? MIXED_GROUP_BYTES / bytes : SHARING_UNITS;
    if (parts < count && group > even) group = even;
    return group > 1 ? group : 1;
}

void run_packed(const PackedJob& given, Arrivals* arrivals) {
    if (all_dense(given)) {
        const int64_t fitting = CACHED_ROW_BYTES / (2 * given.inner) / 32 * 32;
        return run_in_turn(given, fitting < LEAST_ROWS ? LEAST_ROWS : fitting, arrivals);
    }
    const PackedJob job = with_mixed_rows(given);
    const int64_t parts = parts_of_rows(job);
    if (parts > 1) return run_shares(job, parts, group_of(job, parts), arrivals);
    run_units(job, arrivals);
}

// Rows that were mixed when they were encoded, for the job that comes next.
struct MixedBefore {
    MixRowsJob mixing;
    int64_t rows = 0;  // 0: there are none

    bool are_of(const PackedJob& job) const {
        return rows == job.rows && mixing.x.data == job.x.data && mixing.columns == job.inner;
    }
};
thread_local MixedBefore mixed_before;

}  // namespace

bool mix_before(const PackedJob& next, MixRowsJob& mixing) {
    if (!wants_mixed_rows(next)) return false;
    mixing = {next.x, room_for_mixed(next), next.inner};
    mixed_before = {mixing, next.rows};
    return true;
}

void forget_mixed_rows() { mixed_before.rows = 0; }

PackedJob with_mixed_rows(const PackedJob& given) {
    PackedJob job = given;
    if (wants_mixed_rows(job)) job.mixed = mixed_before.are_of(job) ? mixed_before.mixing.out : mixed_rows(job);
    forget_mixed_rows();
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
        const bool mixed = wants_mixed_rows(job);
        for (int64_t i = 0; i < job.count; ++i) {
            const PackedPart& part = job.parts[i];
            if (mixed && part.mixed)
                coming.runs[i] = {part.mixed, units_of(part.outputs), 2 * mixed_pack_bytes(job.inner)};
            else
                coming.runs[i] = {part.weight, units_of(part.outputs), 2 * LAYOUTS[part.pack].bytes(job.inner)};
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
