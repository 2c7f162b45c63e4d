// A whole decode step in one call: gathers the inputs of the rows' next tokens, replays the tape, and appends each
// row's sampled token.
#pragma once

#include <cstdint>
#include <vector>

#include "tape.hpp"

namespace bankfull {

// The permanent rows of a runner. All memory belongs to the caller.
struct RowsAt {
    struct Table {
        const int64_t* pages;
        int64_t width, page_tokens;
    };
    int64_t count, longest;
    int64_t* tokens;    // (count, longest)
    int64_t* known;     // number of known tokens per row
    int64_t* computed;  // number of computed tokens per row
    int64_t* slot;      // slot of the recurrent state per row; null without recurrent state
    std::vector<Table> tables;
};

// Sampling parameters of the rows: two tables with one line per row, and the column of each parameter.
struct ParamsAt {
    const double* reals;
    const int64_t* wholes;
    int64_t real_columns, whole_columns;
    int64_t temperature, top_p, min_p;    // columns of reals
    int64_t top_k, seed, child, greedy;  // columns of wholes
    uint32_t purpose;
};

class ChoosingStep {
  public:
    // `chosen`: the tape's output tokens. The tape must read tokens, positions, q_start, kv_len, ancestors, then the pages
    // of each table, then the KV slots of each table, then kept, read and write where rows have a recurrent state: in this
    // order, and nothing else.
    ChoosingStep(const Tape& tape, Place chosen, RowsAt rows, ParamsAt params);
    // One token for each of `rows`, which must be distinct; -1 if none can be chosen. `slots`: where rows have a recurrent
    // state, the slot that each row's next state goes to, in which it then is. Throws std::invalid_argument before
    // anything has changed.
    std::vector<int64_t> run(uint8_t* arena, const std::vector<int64_t>& rows, const std::vector<int64_t>& slots, bool timed);

  private:
    void gather(const std::vector<int64_t>& rows, const std::vector<int64_t>& slots);
    bool gather_params(const std::vector<int64_t>& rows);

    const Tape& tape_;
    Place chosen_;
    RowsAt rows_;
    ParamsAt at_;
    std::vector<SamplingParams> params_;
    std::vector<int64_t> numbers_;  // all inputs, concatenated; reuses its memory
    std::vector<Input> inputs_;
};

}  // namespace bankfull
