// A whole step of decoding in one call: what the rows' next tokens need is gathered, the tape replayed, and the token that
// each row chooses appended to it.
#pragma once

#include <cstdint>
#include <vector>

#include "tape.hpp"

namespace bankfull {

// The permanent rows of a runner, one line each. All memory belongs to the caller.
struct RowsAt {
    struct Table {
        const int64_t* pages;
        int64_t width, page_tokens;
    };
    int64_t count, longest;
    int64_t* tokens;    // (count, longest)
    int64_t* known;     // how many of a row's tokens are there
    int64_t* computed;  // how many of them have run
    std::vector<Table> tables;
};

// What the rows ask of their sampler: two tables with a line for each, and which of their columns say what.
struct WishesAt {
    const double* reals;
    const int64_t* wholes;
    int64_t real_columns, whole_columns;
    int64_t temperature, top_p, min_p;    // columns of reals
    int64_t top_k, seed, child, greedy;  // columns of wholes
    uint32_t purpose;
};

class ChoosingStep {
  public:
    // `chosen`: where the tape leaves the tokens. It must read tokens, positions, q_start, kv_len, and then of each table
    // the pages, and of each table the places of the new tokens: in this order, and nothing else.
    ChoosingStep(const Tape& tape, Place chosen, RowsAt rows, WishesAt wishes);
    // One token of each of `rows`, which must differ; -1 where there is none to choose. Throws std::invalid_argument
    // before anything has changed.
    std::vector<int64_t> run(uint8_t* arena, const std::vector<int64_t>& rows, bool timed);

  private:
    void gather(const std::vector<int64_t>& rows);
    bool gather_wishes(const std::vector<int64_t>& rows);

    const Tape& tape_;
    Place chosen_;
    RowsAt rows_;
    WishesAt at_;
    std::vector<SampleWish> wishes_;
    std::vector<int64_t> numbers_;  // all inputs after each other; kept for its memory
    std::vector<Input> inputs_;
};

}  // namespace bankfull
