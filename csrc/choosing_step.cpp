#include "choosing_step.hpp"

#include <algorithm>
#include <stdexcept>

namespace bankfull {
namespace {

constexpr int64_t RECURRENT = 3;  // inputs of recurrent state: kept, read, write
constexpr int64_t SINGLE = 4;  // inputs that do not belong to a table: tokens, positions, q_start, kv_len (and ancestors)

void require(bool fine, const char* message) {
    if (!fine) throw std::invalid_argument(message);
}

}  // namespace

ChoosingStep::ChoosingStep(const Tape& tape, Place chosen, RowsAt rows, ParamsAt params)
    : tape_(tape), chosen_(chosen), rows_(std::move(rows)), at_(params) {
    require(tape.inputs == SINGLE + 1 + 2 * int64_t(rows_.tables.size()) + (rows_.slot ? RECURRENT : 0),
            "choosing step: the tape has unexpected inputs");
    require(chosen.kind == Place::ARENA, "choosing step: the tape outputs no tokens");
    require(rows_.count > 0 && rows_.longest > 0 && rows_.tokens && rows_.known && rows_.computed,
            "choosing step: the rows have a null address");
    for (const RowsAt::Table& table : rows_.tables)
        require(table.pages && table.width > 0 && table.page_tokens > 0, "choosing step: a page table has no memory or size");
    require(at_.reals && at_.wholes, "choosing step: the sampling parameters have a null address");
    for (const int64_t column : {at_.temperature, at_.top_p, at_.min_p})
        require(column >= 0 && column < at_.real_columns, "choosing step: a sampling parameter's column is out of range");
    for (const int64_t column : {at_.top_k, at_.seed, at_.child, at_.greedy})
        require(column >= 0 && column < at_.whole_columns, "choosing step: a sampling parameter's column is out of range");
}

void ChoosingStep::gather(const std::vector<int64_t>& rows, const std::vector<int64_t>& slots) {
    const int64_t count = int64_t(rows.size()), groups = int64_t(rows_.tables.size());
    int64_t furthest = 0;
    require(slots.size() == (rows_.slot ? rows.size() : 0), "choosing step: each row needs one slot for its next state");
    for (const int64_t row : rows) {
        require(row >= 0 && row < rows_.count, "choosing step: a row is out of range");
        const int64_t position = rows_.computed[row];
        require(position >= 0 && position < rows_.known[row] && rows_.known[row] < rows_.longest,
                "choosing step: a row has no token to compute, or no room for another");
        furthest = std::max(furthest, position);
    }
    int64_t size = (SINGLE + groups + (rows_.slot ? RECURRENT : 0)) * count + 1;
    for (const RowsAt::Table& table : rows_.tables) {
        require(furthest / table.page_tokens < table.width, "choosing step: a row is longer than its page table");
        size += count * (furthest / table.page_tokens + 1);
    }
    if (int64_t(numbers_.size()) < size) numbers_.resize(size_t(size));

    inputs_.clear();
    int64_t* next = numbers_.data();
    const auto take = [&](int64_t lines, int64_t width) {
        int64_t* taken = next;
        inputs_.push_back({reinterpret_cast<uintptr_t>(taken), width});
        next += lines * width;
        return taken;
    };
    int64_t *tokens = take(count, 1), *positions = take(count, 1), *q_start = take(count + 1, 1), *kv_len = take(count, 1);
    for (int64_t i = 0; i < count; ++i) {
        positions[i] = rows_.computed[rows[size_t(i)]];
        tokens[i] = rows_.tokens[rows[size_t(i)] * rows_.longest + positions[i]];
        q_start[i] = i;
        kv_len[i] = positions[i] + 1;
    }
    q_start[count] = count;
    inputs_.push_back({0, 1});  // no ancestors: one token per row is no tree
    for (const RowsAt::Table& table : rows_.tables) {
        const int64_t width = furthest / table.page_tokens + 1;
        int64_t* pages = take(count, width);
        for (int64_t i = 0; i < count; ++i)
            std::copy_n(table.pages + rows[size_t(i)] * table.width, width, pages + i * width);
    }
    for (const RowsAt::Table& table : rows_.tables) {
        int64_t* places = take(count, 1);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t page = positions[i] / table.page_tokens;
            places[i] = table.pages[rows[size_t(i)] * table.width + page] * table.page_tokens +
                        positions[i] % table.page_tokens;
        }
    }
    if (!rows_.slot) return;
    int64_t *kept = take(count, 1), *read = take(count, 1), *write = take(count, 1);
    for (int64_t i = 0; i < count; ++i) {
        kept[i] = 1;
        read[i] = rows_.slot[rows[size_t(i)]];
        write[i] = slots[size_t(i)];
    }
}

// Whether any row is sampled instead of greedy. Rows were checked by `gather`.
bool ChoosingStep::gather_params(const std::vector<int64_t>& rows) {
    bool any = false;
    params_.clear();
    for (const int64_t row : rows) {
        const double* reals = at_.reals + row * at_.real_columns;
        const int64_t* wholes = at_.wholes + row * at_.whole_columns;
        // The position of the chosen token: after the one being computed.
        const SamplingParams params{reals[at_.temperature], wholes[at_.top_k], reals[at_.top_p], reals[at_.min_p],
                              wholes[at_.seed], wholes[at_.child], rows_.computed[row] + 1, wholes[at_.greedy] != 0};
        require(params.greedy || (params.temperature > 0.0 && params.top_k > 0),
                "choosing step: temperature and top_k must be positive");
        any |= !params.greedy;
        params_.push_back(params);
    }
    return any;
}

std::vector<int64_t> ChoosingStep::run(uint8_t* arena, const std::vector<int64_t>& rows,
                                       const std::vector<int64_t>& slots, bool timed) {
    if (rows.empty()) return {};
    gather(rows, slots);
    const bool sampled = gather_params(rows);
    const int64_t count = int64_t(rows.size());
    const Choice choice{params_.data(), at_.purpose};
    Step step{count, count, arena, inputs_.data()};
    if (sampled) step.choice = &choice;
    tape_.replay(step, 0, int64_t(tape_.instructions().size()), timed);
    const int64_t* found = chosen_.in<int64_t>(step);
    std::vector<int64_t> chosen(found, found + count);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = rows[size_t(i)];
        // A row without a choosable token is about to end; until then its input must be a valid token.
        rows_.tokens[row * rows_.longest + rows_.known[row]++] = std::max<int64_t>(chosen[size_t(i)], 0);
        ++rows_.computed[row];
        if (rows_.slot) rows_.slot[row] = slots[size_t(i)];
    }
    return chosen;
}

}  // namespace bankfull
