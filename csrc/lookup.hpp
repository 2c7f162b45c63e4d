// Draft tokens by lookup: the longest suffix of a sequence that occurred before predicts what follows it again.
//
// `Lookup` holds one index per sequence, extends it with the tokens that arrive, and predicts the next ones. It also
// compares each prediction with the tokens that follow, whether they were verified as drafts or not: so the chance of a
// draft is known before the first one is verified.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace bankfull {

// Tokens that an index holds at most; a longer sequence is no longer predicted.
constexpr int64_t MOST_INDEXED = 1 << 17;

// Tokens of one sequence, and where the longest repeated suffix ended before.
class SuffixSource {
  public:
    virtual ~SuffixSource() = default;
    virtual void extend(int32_t token) = 0;
    // The next tokens if the text goes on as after the earlier occurrence; a text that overlaps it repeats with its
    // period. A negative token separates texts: no prediction goes beyond it.
    int64_t predict(int64_t most, int64_t* out) const;
    // Tokens of the matching suffix; 0 if there is none.
    int32_t matched() const { return matched_; }
    virtual int64_t nbytes() const = 0;

  protected:
    std::vector<int32_t> text_;
    int32_t matched_ = 0;
    int32_t earlier_ = -1;  // where the matching suffix ended before
};

// A suffix automaton: any length of match, amortised constant time per token.
class SuffixAutomaton final : public SuffixSource {
  public:
    SuffixAutomaton();
    void extend(int32_t token) override;
    int64_t nbytes() const override;

  private:
    struct State {
        int32_t length, link, end, edges;
    };
    struct Edge {
        int32_t source, token, target, next;
    };
    int32_t state(int32_t length, int32_t link, int32_t end);
    int32_t find(int32_t source, int32_t token) const;  // an edge, or -1
    void connect(int32_t source, int32_t token, int32_t target);
    void grow();

    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> table_;  // open addressing: edges by (source, token)
    int32_t last_ = 0;
};

// Prompt lookup: the last occurrence of the newest n tokens, for the largest n between `least` and `most`.
class NgramIndex final : public SuffixSource {
  public:
    NgramIndex(int32_t least, int32_t most);
    void extend(int32_t token) override;
    int64_t nbytes() const override;

  private:
    struct Entry {
        uint64_t hash;
        int32_t end;
    };
    Entry& entry(uint64_t hash);
    void grow();

    std::vector<Entry> table_;
    int64_t used_ = 0;
    int32_t least_, most_;
};

class Lookup {
  public:
    // `least`: tokens that must match. `most`: 0 for a suffix automaton, else the largest n of n-grams.
    Lookup(int32_t least, int32_t most);
    Lookup(const Lookup&) = delete;
    Lookup& operator=(const Lookup&) = delete;
    // A new sequence with these tokens; its number.
    int64_t open(const int64_t* tokens, int64_t count);
    void close(int64_t sequence);
    // counts[i] new tokens of sequences[i], one sequence after the other.
    void extend(const std::vector<int64_t>& sequences, const std::vector<int64_t>& counts,
                const std::vector<int64_t>& tokens);
    // For each sequence and each of up to `width` predicted tokens: the probability that it and all before it are right.
    std::vector<std::vector<double>> predict(const std::vector<int64_t>& sequences, int64_t width);
    // The predicted tokens of a sequence, at most `width`.
    std::vector<int64_t> tokens(int64_t sequence, int64_t width);
    int64_t nbytes() const;

  private:
    static constexpr int BUCKETS = 7;     // of matched lengths: 1, 2, 3-4, 5-8, 9-16, 17-32, more
    static constexpr int POSITIONS = 32;  // later ones count as the last
    struct Counts {
        double tried = 0, right = 0;
    };
    struct Sequence {
        std::unique_ptr<SuffixSource> source;
        std::vector<int32_t> trial;  // the prediction under test
        size_t passed = 0;           // its tokens that came true
        int bucket = 0;
        Counts first;  // first tokens of predictions: expected and actual hits, with decay
        bool used = false;
    };
    static int bucket_of(int32_t matched);
    double chance(int bucket, int position) const;  // that a token is right if those before it are
    void test(Sequence& sequence, int32_t token);
    Sequence& at(int64_t sequence);

    int32_t least_, most_;
    std::vector<Sequence> sequences_;
    std::vector<int64_t> free_;
    Counts counts_[BUCKETS][POSITIONS];
};

}  // namespace bankfull
