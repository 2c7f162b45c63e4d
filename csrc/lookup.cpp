#include "lookup.hpp"

#include <algorithm>
#include <stdexcept>

namespace bankfull {

namespace {

constexpr size_t FIRST_TABLE = 64;

uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

uint64_t key_of(int32_t source, int32_t token) {
    return mixed(uint64_t(uint32_t(source)) << 32 | uint32_t(token));
}

}  // namespace

int64_t SuffixSource::predict(int64_t most, int64_t* out) const {
    if (matched_ == 0) return 0;
    const int64_t size = int64_t(text_.size()), period = size - 1 - earlier_;
    for (int64_t i = 0; i < most; ++i) {
        const int64_t at = earlier_ + 1 + i;
        const int64_t token = at < size ? text_[size_t(at)] : out[i - period];
        if (token < 0) return i;
        out[i] = token;
    }
    return most;
}

SuffixAutomaton::SuffixAutomaton() : table_(FIRST_TABLE, -1) { state(0, -1, -1); }

int32_t SuffixAutomaton::state(int32_t length, int32_t link, int32_t end) {
    states_.push_back({length, link, end, -1});
    return int32_t(states_.size() - 1);
}

int32_t SuffixAutomaton::find(int32_t source, int32_t token) const {
    const size_t last = table_.size() - 1;
    for (size_t i = key_of(source, token) & last;; i = (i + 1) & last) {
        const int32_t edge = table_[i];
        if (edge < 0 || (edges_[size_t(edge)].source == source && edges_[size_t(edge)].token == token)) return edge;
    }
}

void SuffixAutomaton::connect(int32_t source, int32_t token, int32_t target) {
    if (2 * (edges_.size() + 1) > table_.size()) grow();
    edges_.push_back({source, token, target, states_[size_t(source)].edges});
    states_[size_t(source)].edges = int32_t(edges_.size() - 1);
    const size_t last = table_.size() - 1;
    size_t i = key_of(source, token) & last;
    while (table_[i] >= 0) i = (i + 1) & last;
    table_[i] = int32_t(edges_.size() - 1);
}

void SuffixAutomaton::grow() {
    table_.assign(2 * table_.size(), -1);
    const size_t last = table_.size() - 1;
    for (size_t edge = 0; edge < edges_.size(); ++edge) {
        size_t i = key_of(edges_[edge].source, edges_[edge].token) & last;
        while (table_[i] >= 0) i = (i + 1) & last;
        table_[i] = int32_t(edge);
    }
}

void SuffixAutomaton::extend(int32_t token) {
    matched_ = 0;
    if (int64_t(text_.size()) >= MOST_INDEXED) return;
    text_.push_back(token);
    const int32_t end = int32_t(text_.size() - 1);
    const int32_t current = state(states_[size_t(last_)].length + 1, 0, end);
    int32_t p = last_, edge = -1;
    while (p >= 0 && (edge = find(p, token)) < 0) {
        connect(p, token, current);
        p = states_[size_t(p)].link;
    }
    if (p >= 0) {
        const int32_t q = edges_[size_t(edge)].target;
        int32_t link = q;
        if (states_[size_t(p)].length + 1 != states_[size_t(q)].length) {
            link = state(states_[size_t(p)].length + 1, states_[size_t(q)].link, states_[size_t(q)].end);
            for (int32_t e = states_[size_t(q)].edges; e >= 0; e = edges_[size_t(e)].next) {
                const Edge copied = edges_[size_t(e)];
                connect(link, copied.token, copied.target);
            }
            for (; p >= 0; p = states_[size_t(p)].link) {
                const int32_t found = find(p, token);
                if (found < 0 || edges_[size_t(found)].target != q) break;
                edges_[size_t(found)].target = link;
            }
            states_[size_t(q)].link = link;
        }
        State& match = states_[size_t(link)];
        states_[size_t(current)].link = link;
        if (token >= 0) {
            matched_ = match.length;
            earlier_ = match.end;
        }
        match.end = end;  // the most recent occurrence predicts better than the first
    }
    last_ = current;
}

int64_t SuffixAutomaton::nbytes() const {
    return int64_t(text_.capacity() * sizeof(int32_t) + states_.capacity() * sizeof(State) +
                   edges_.capacity() * sizeof(Edge) + table_.capacity() * sizeof(int32_t));
}

NgramIndex::NgramIndex(int32_t least, int32_t most) : table_(FIRST_TABLE, Entry{0, -1}), least_(least), most_(most) {}

NgramIndex::Entry& NgramIndex::entry(uint64_t hash) {
    const size_t last = table_.size() - 1;
    size_t i = hash & last;
    while (table_[i].end >= 0 && table_[i].hash != hash) i = (i + 1) & last;
    return table_[i];
}

void NgramIndex::grow() {
    std::vector<Entry> old(2 * table_.size(), Entry{0, -1});
    old.swap(table_);
    for (const Entry& one : old)
        if (one.end >= 0) entry(one.hash) = one;
}

void NgramIndex::extend(int32_t token) {
    matched_ = 0;
    if (int64_t(text_.size()) >= MOST_INDEXED) return;
    text_.push_back(token);
    const int32_t end = int32_t(text_.size() - 1);
    uint64_t hash = 0;
    for (int32_t n = 1; n <= most_ && n <= end + 1; ++n) {
        const int32_t added = text_[size_t(end + 1 - n)];
        if (added < 0) break;
        hash = mixed(hash * 0x9e3779b97f4a7c15ULL + uint64_t(added) + 1);
        if (n < least_) continue;
        if (2 * (used_ + 1) > int64_t(table_.size())) grow();
        Entry& found = entry(hash);
        if (found.end >= 0) {
            matched_ = n;  // hashes of different n-grams may agree: the prediction is then wrong, and only that
            earlier_ = found.end;
        } else {
            ++used_;
        }
        found = {hash, end};
    }
}

int64_t NgramIndex::nbytes() const {
    return int64_t(text_.capacity() * sizeof(int32_t) + table_.capacity() * sizeof(Entry));
}

Lookup::Lookup(int32_t least, int32_t most) : least_(least), most_(most) {
    if (least < 1 || most < 0 || (most > 0 && most < least))
        throw std::invalid_argument("lookup: at least one token must match, and most must not be below least");
}

Lookup::Sequence& Lookup::at(int64_t sequence) {
    if (sequence < 0 || sequence >= int64_t(sequences_.size()) || !sequences_[size_t(sequence)].used)
        throw std::invalid_argument("lookup: unknown sequence");
    return sequences_[size_t(sequence)];
}

int64_t Lookup::open(const int64_t* tokens, int64_t count) {
    if (free_.empty()) {
        free_.push_back(int64_t(sequences_.size()));
        sequences_.emplace_back();
    }
    const int64_t number = free_.back();
    free_.pop_back();
    Sequence& opened = sequences_[size_t(number)];
    opened = Sequence{};
    opened.used = true;
    if (most_ == 0)
        opened.source = std::make_unique<SuffixAutomaton>();
    else
        opened.source = std::make_unique<NgramIndex>(least_, most_);
    for (int64_t i = 0; i < count; ++i) opened.source->extend(int32_t(tokens[i]));
    return number;
}

void Lookup::close(int64_t sequence) {
    at(sequence) = Sequence{};
    free_.push_back(sequence);
}

void Lookup::extend(const std::vector<int64_t>& sequences, const std::vector<int64_t>& counts,
                    const std::vector<int64_t>& tokens) {
    int64_t sum = 0;
    for (int64_t count : counts) sum += count < 0 ? int64_t(tokens.size()) + 1 : count;
    if (sequences.size() != counts.size() || sum != int64_t(tokens.size()))
        throw std::invalid_argument("lookup: the counts do not fit the sequences and tokens");
    auto token = tokens.begin();
    for (size_t i = 0; i < sequences.size(); ++i) {
        Sequence& one = at(sequences[i]);
        for (int64_t j = 0; j < counts[i]; ++j, ++token) {
            test(one, int32_t(*token));
            one.source->extend(int32_t(*token));
        }
    }
}

std::vector<int64_t> Lookup::tokens(int64_t sequence, int64_t width) {
    const Sequence& one = at(sequence);
    std::vector<int64_t> found(size_t(std::max<int64_t>(width, 0)));
    found.resize(one.source->matched() < least_ ? 0 : size_t(one.source->predict(int64_t(found.size()), found.data())));
    return found;
}

std::vector<std::vector<double>> Lookup::predict(const std::vector<int64_t>& sequences, int64_t width) {
    std::vector<std::vector<double>> chances(sequences.size());
    for (size_t i = 0; i < sequences.size(); ++i) {
        Sequence& one = at(sequences[i]);
        const std::vector<int64_t> found = tokens(sequences[i], width);
        if (found.empty()) continue;
        const int bucket = bucket_of(one.source->matched());
        // A sequence whose predictions fail more often than those of others is trusted less.
        double all = std::min(1.0, (one.first.right + 2) / (one.first.tried + 2));
        for (size_t j = 0; j < found.size(); ++j) chances[i].push_back(all *= chance(bucket, int(j)));
        if (one.trial.empty()) {
            one.trial.assign(found.begin(), found.end());
            one.passed = 0;
            one.bucket = bucket;
        }
    }
    return chances;
}

int64_t Lookup::nbytes() const {
    int64_t sum = 0;
    for (const Sequence& one : sequences_)
        if (one.used) sum += one.source->nbytes();
    return sum;
}

int Lookup::bucket_of(int32_t matched) {
    int bucket = 0;
    for (int32_t bound = 1; bucket < BUCKETS - 1 && matched > bound; bound *= 2) ++bucket;
    return bucket;
}

double Lookup::chance(int bucket, int position) const {
    // The assumption before anything was tested weighs as much as this many tests.
    constexpr double PRIOR = 4;
    constexpr double ASSUMED[BUCKETS] = {0.15, 0.25, 0.4, 0.6, 0.75, 0.85, 0.9};
    const Counts& seen = counts_[bucket][std::min(position, POSITIONS - 1)];
    const double assumed = position == 0 ? ASSUMED[bucket] : std::max(ASSUMED[bucket], 0.7);
    return (seen.right + PRIOR * assumed) / (seen.tried + PRIOR);
}

void Lookup::test(Sequence& one, int32_t token) {
    constexpr double REMEMBERED = 256;  // tests; older ones count half, again and again
    if (one.trial.empty()) return;
    const bool right = one.trial[one.passed] == token;
    if (one.passed == 0) {
        one.first.tried = 0.9 * one.first.tried + chance(one.bucket, 0);
        one.first.right = 0.9 * one.first.right + right;
    }
    Counts& seen = counts_[one.bucket][std::min(int(one.passed), POSITIONS - 1)];
    if (seen.tried >= REMEMBERED) seen.tried /= 2, seen.right /= 2;
    seen.tried += 1;
    seen.right += right;
    ++one.passed;
    if (!right || one.passed == one.trial.size()) one.trial.clear();
}

}  // namespace bankfull
