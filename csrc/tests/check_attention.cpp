// RoPE, KV pages, and paged attention.
#include "attention_plan.hpp"
#include "kernel_checks.hpp"
#include "pages.hpp"

namespace checks {
namespace {

struct Angles {
    Angles(Random& random, int64_t tokens, int64_t half) : cos(tokens * half), sin(tokens * half) {
        Array<int64_t> positions(tokens);
        Array<float> frequencies(half);
        for (int64_t& position : positions) position = random.between(0, 100000);
        for (int64_t i = 0; i < half; ++i) frequencies[i] = float(std::pow(10000.0, -double(i) / double(half)));
        AnglesJob job{};
        job.positions = positions.data(), job.frequencies = frequencies.data(), job.cos = cos.data();
        job.sin = sin.data(), job.half = half, job.scale = random.one_in(2) ? 1.0f : 1.3f;
        run_angles(job, tokens);
        for (int64_t token = 0; token < tokens; ++token)
            for (int64_t i = 0; i < half; ++i) {
                const double angle = double(float(positions[token]) * frequencies[i]);
                expect_close(cos[token * half + i], std::cos(angle) * double(job.scale), 2e-7, "cos", i);
                expect_close(sin[token * half + i], std::sin(angle) * double(job.scale), 2e-7, "sin", i);
            }
    }
    Array<float> cos, sin;
};

// Dimension `i` of a head after RoPE.
double turned(const float* head, const float* cos, const float* sin, int64_t half, int64_t i) {
    if (i >= 2 * half) return head[i];
    if (i < half) return double(head[i]) * cos[i] - double(head[i + half]) * sin[i];
    return double(head[i]) * cos[i - half] + double(head[i - half]) * sin[i - half];
}

// Keys or values of one layer in pages, in either type; unwritten elements are NaN.
struct Store {
    Store(int64_t pages, int64_t tokens, int64_t kv_heads, int64_t numbers, bool in_bfloat)
        : frames(pages), page_tokens(tokens), heads(kv_heads), size(numbers), narrow(in_bfloat),
          bytes(pages * tokens * kv_heads * numbers * item(), 4) {
        for (int64_t i = 0; i < bytes.size() / item(); ++i) write(i, NOT_A_NUMBER);
    }
    int64_t item() const { return narrow ? 2 : 4; }
    int64_t token() const { return heads * size; }
    int64_t frame() const { return page_tokens * token(); }
    // `slot`: page * page_tokens + offset.
    int64_t at(int64_t slot, int64_t head, int64_t i) const { return slot * token() + head * size + i; }
    void write(int64_t place, float value) {
        if (narrow) {
            const uint16_t bits = std::isnan(value) ? 0x7fc0 : to_bfloat(value);
            std::memcpy(bytes.data() + place * 2, &bits, 2);
        } else {
            std::memcpy(bytes.data() + place * 4, &value, 4);
        }
    }
    double read(int64_t place) const {
        uint16_t bits;
        float value;
        std::memcpy(&bits, bytes.data() + place * item(), 2);
        if (narrow) return bfloat_value(bits);
        std::memcpy(&value, bytes.data() + place * 4, 4);
        return value;
    }
    Pages pages() { return {bytes.data(), frame(), token(), size, nullptr, 0, 0, 0}; }

    int64_t frames, page_tokens, heads, size;
    bool narrow;
    Array<uint8_t> bytes;
};

// Mostly no mask.
SparseMask any_mask(Random& random) {
    SparseMask mask;
    if (!random.one_in(3)) return mask;
    mask.window = random.between(1, 40);
    mask.globals = random.one_in(2) ? random.between(1, 50) : 0;
    if (random.one_in(3)) {
        mask.dilation = random.between(2, 9);
        return mask;
    }
    mask.stride = random.one_in(3) ? 0 : random.between(1, 60);
    mask.columns = random.one_in(2) ? random.between(0, mask.stride) : 0;
    mask.aligned = random.one_in(2);
    return mask;
}

bool sees(const SparseMask& mask, int64_t query, int64_t key) {
    if (key > query) return false;
    if (!mask.given() || key < mask.globals) return true;
    const int64_t past = query - key;
    if (mask.columns ? key % mask.stride >= mask.stride - mask.columns : mask.stride && past % mask.stride == 0) return true;
    return mask.aligned ? query / mask.window == key / mask.window
                        : past % mask.dilation == 0 && past / mask.dilation < mask.window;
}

// Sequences of any length over shuffled pages; page table entries outside of all windows are invalid.
void check_attention(Random& random, PageType type) {
    static constexpr int64_t sizes[] = {8, 20, 32, 64, 64, 96};
    static constexpr int64_t lengths_of_pages[] = {1, 4, 5, 16, 32, 48};
    const bool many = random.one_in(8);  // many decoding sequences: pages are prefetched
    const int64_t sequences = many ? random.between(40, 48) : random.between(1, 3), kv_heads = random.between(1, 2);
    const int64_t groups = random.between(1, many ? 2 : 5);
    const int64_t heads = kv_heads * groups, size = random.any_of(sizes), values = random.one_in(2) ? size : random.any_of(sizes);
    const int64_t page_tokens = random.any_of(lengths_of_pages), window = random.one_in(3) ? random.between(1, 150) : 0;
    const SparseMask mask = window ? SparseMask{} : any_mask(random);
    const float cap = random.one_in(4) ? 5.0f : 0.0f, scale = float(1 / std::sqrt(double(size)));
    std::vector<int64_t> q_start{0}, kv_len;
    for (int64_t i = 0; i < sequences; ++i) {
        const int64_t queries = many || random.one_in(2) ? 1 : random.between(1, random.one_in(4) ? 90 : 20);
        q_start.push_back(q_start.back() + queries);
        kv_len.push_back(queries + random.between(0, !many && random.one_in(3) ? 500 : 60));
    }
    const int64_t longest = *std::max_element(kv_len.begin(), kv_len.end());
    const int64_t width = (longest + page_tokens - 1) / page_tokens + random.between(0, 1), frames = sequences * width;
    const std::vector<int64_t> places = distinct(random, frames, frames);
    std::vector<int64_t> table(size_t(sequences * width), -1000000);
    const bool narrow = type == PAGES_BF16;
    Store k(frames, page_tokens, kv_heads, size, narrow), v(frames, page_tokens, kv_heads, values, narrow);
    const auto slot = [&](int64_t i, int64_t position) {
        return places[size_t(i * width + position / page_tokens)] * page_tokens + position % page_tokens;
    };
    for (int64_t i = 0; i < sequences; ++i) {
        const int64_t past = kv_len[size_t(i)] - (q_start[size_t(i) + 1] - q_start[size_t(i)]);
        for (int64_t p = window ? std::max<int64_t>(0, past + 1 - window) : 0; p < kv_len[size_t(i)]; ++p) {
            bool seen = p >= past;
            for (int64_t query = past; query < kv_len[size_t(i)] && !seen; ++query) seen = sees(mask, query, p);
            if (!seen) continue;
            table[size_t(i * width + p / page_tokens)] = places[size_t(i * width + p / page_tokens)];
            for (int64_t head = 0; head < kv_heads; ++head) {
                for (int64_t d = 0; d < size; ++d) k.write(k.at(slot(i, p), head, d), random.normal());
                for (int64_t d = 0; d < values; ++d) v.write(v.at(slot(i, p), head, d), random.normal());
            }
        }
    }
    const int64_t tokens = q_start.back(), q_token = heads * size + random.between(0, 4);
    const Array<float> q = normals(random, tokens * q_token);
    Array<float> y(tokens * heads * values);

    AttentionJob job{};
    job.q = q.data(), job.y = y.data(), job.k = k.pages(), job.v = v.pages();
    job.q_start = q_start.data(), job.kv_len = kv_len.data(), job.table = table.data(), job.table_stride = width;
    job.page_tokens = page_tokens, job.heads = heads, job.kv_heads = kv_heads, job.size = size, job.values = values;
    job.q_token = q_token, job.window = window, job.mask = mask, job.scale = scale, job.cap = cap;
    paged_attention(job, type, sequences, tokens, width, frames);

    // Tiles round queries and weights: the maximum of values drawn this way is about 4.
    const double error = narrow && !mask.given() && kernels().tile_rows > 0 && size % 32 == 0 && values % 32 == 0 ? 0.05 : 2e-5;
    // Partial: over the pages of the table's entries that are not negative, with a log-sum-exp after each head's values.
    const auto compare = [&](const Array<float>& got, bool partial, const char* what) {
        for (int64_t i = 0; i < sequences; ++i)
            for (int64_t token = q_start[size_t(i)]; token < q_start[size_t(i) + 1]; ++token)
                for (int64_t head = 0; head < heads; ++head) {
                    const int64_t position = kv_len[size_t(i)] - (q_start[size_t(i) + 1] - token);
                    const int64_t from = window ? std::max<int64_t>(0, position + 1 - window) : 0;
                    std::vector<double> weights;
                    double most = -INFINITE, total = 0;
                    for (int64_t p = from; p <= position; ++p) {
                        if (!sees(mask, position, p) || table[size_t(i * width + p / page_tokens)] < 0) {
                            weights.push_back(-INFINITE);
                            continue;
                        }
                        double score = 0;
                        for (int64_t d = 0; d < size; ++d)
                            score += double(q[token * q_token + head * size + d]) * k.read(k.at(slot(i, p), head / groups, d));
                        score *= double(scale);
                        weights.push_back(cap ? cap * std::tanh(score / cap) : score);
                        most = std::max(most, weights.back());
                    }
                    for (double& weight : weights) total += weight = weight > -INFINITE ? std::exp(weight - most) : 0;
                    const int64_t row = (token * heads + head) * (values + partial);
                    if (partial) expect_close(got[row + values], most + std::log(total), error, what, row + values);
                    for (int64_t d = 0; d < values; ++d) {
                        double want = 0;
                        for (int64_t p = from; p <= position; ++p)
                            if (weights[size_t(p - from)] > 0)
                                want += weights[size_t(p - from)] / total * v.read(v.at(slot(i, p), head / groups, d));
                        expect_close(got[row + d], want, error, what, row + d);
                    }
                }
    };
    compare(y, false, narrow ? "attention over bfloat16" : "attention over float32");

    for (const Activations kind : {Activations::Codes, Activations::Tiles}) {
        if (values % 32 != 0) break;
        EncodedRows wanted(tokens, heads * values, kind), found(tokens, heads * values, kind);
        EncodeJob encode{};
        encode.x = y.data(), encode.x_stride = heads * values, encode.columns = heads * values;
        encode.out = wanted.place();
        run_encode(encode, tokens);
        job.out = found.place();
        paged_attention(job, type, sequences, tokens, width, frames);
        expect_same_rows(found, wanted, "encoded attention");
    }

    job.out = {};
    for (int64_t& entry : table)
        if (random.one_in(2)) entry = -1;
    Array<float> parts(tokens * heads * (values + 1));
    job.y = parts.data();
    partial_attention(job, type, sequences, tokens, width, frames);
    compare(parts, true, narrow ? "partial attention over bfloat16" : "partial attention over float32");
}

}  // namespace

void check_rotate(Random& random) {
    const int64_t tokens = random.between(1, 7), heads = random.between(1, 5), half = random.between(0, 40);
    const int64_t size = 2 * half + random.between(half ? 0 : 1, 9);
    const Angles angles(random, tokens, half);
    const Array<float> x = normals(random, tokens * heads * size);
    Array<float> y(x.size());
    RotateJob job{};
    job.x = x.data(), job.cos = angles.cos.data(), job.sin = angles.sin.data(), job.y = y.data();
    job.heads = heads, job.size = size, job.half = half;
    run_rotate(job, tokens);
    for (int64_t i = 0; i < y.size(); ++i) {
        const int64_t token = i / (heads * size);
        const double want = turned(x.data() + i / size * size, angles.cos.data() + token * half,
                                   angles.sin.data() + token * half, half, i % size);
        expect_close(y[i], want, 1e-6, "rotate", i);
    }
}

void check_intake(Random& random) {
    const int64_t tokens = random.between(1, 12), kv_heads = random.between(1, 3), heads = kv_heads * random.between(1, 4);
    const int64_t half = random.one_in(4) ? 0 : random.between(1, 36), size = 2 * half + random.between(half ? 0 : 1, 9);
    const int64_t values = random.between(1, 70), page_tokens = random.between(1, 8);
    const int64_t q_token = heads * size + random.between(0, 3), k_token = kv_heads * size + random.between(0, 3);
    const int64_t v_token = kv_heads * values + random.between(0, 3);
    const bool narrow = random.one_in(2), in_place = random.one_in(2), has_values = !random.one_in(4);
    const Angles angles(random, tokens, half);
    const Array<float> before = normals(random, tokens * q_token), k = normals(random, tokens * k_token);
    const Array<float> v = normals(random, tokens * v_token);
    Array<float> q(before.size()), elsewhere(before.size());
    std::copy(before.begin(), before.end(), q.begin());
    const int64_t frames = tokens / page_tokens + 2;
    Store keys(frames, page_tokens, kv_heads, size, narrow), stored(frames, page_tokens, kv_heads, values, narrow);
    const std::vector<int64_t> slots = distinct(random, tokens, frames * page_tokens);

    IntakeJob job{};
    job.q = q.data(), job.k = k.data(), job.v = has_values ? v.data() : nullptr;
    job.q_token = q_token, job.k_token = k_token, job.v_token = v_token;
    job.cos = angles.cos.data(), job.sin = angles.sin.data();
    job.turned = in_place ? q.data() : elsewhere.data(), job.turned_token = q_token;
    job.k_pages = keys.pages(), job.v_pages = stored.pages();
    job.slots = slots.data(), job.places = frames * page_tokens, job.page_tokens = page_tokens;
    job.heads = heads, job.kv_heads = kv_heads, job.size = size, job.values = values, job.half = half;
    job.type = narrow ? PAGES_BF16 : PAGES_F32;
    run_intake(job, tokens);

    for (int64_t token = 0; token < tokens; ++token) {
        const float *cos = angles.cos.data() + token * half, *sin = angles.sin.data() + token * half;
        for (int64_t head = 0; head < kv_heads; ++head) {
            for (int64_t i = 0; i < size; ++i) {
                const double want = turned(k.data() + token * k_token + head * size, cos, sin, half, i);
                expect_close(keys.read(keys.at(slots[size_t(token)], head, i)), want,
                             narrow ? BFLOAT * (std::fabs(want) + 1e-4) : 1e-6, "stored key", i);
            }
            for (int64_t i = 0; i < values && has_values; ++i) {
                const float value = v[token * v_token + head * values + i];
                expect_close(stored.read(stored.at(slots[size_t(token)], head, i)),
                             narrow ? bfloat_value(to_bfloat(value)) : value, 0, "stored value", i);
            }
        }
        for (int64_t head = 0; head < heads && half; ++head)
            for (int64_t i = 0; i < size; ++i) {
                const int64_t at = token * q_token + head * size;
                expect_close(job.turned[at + i], turned(before.data() + at, cos, sin, half, i), 1e-6, "rotated query", i);
            }
    }
}

// Intake fused into the packed step: bitwise equal to both run separately. Any number of rows, so that they are split
// in every way.
void check_joined_intake(Random& random) {
    static constexpr int formats[] = {Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, BF16};
    static constexpr int64_t sizes[] = {32, 64, 96}, most[] = {3, 40, 140, 900};
    const int64_t tokens = random.between(1, random.any_of(most)), kv_heads = random.between(1, 3);
    const int64_t heads = kv_heads * random.between(1, 4), size = random.any_of(sizes), values = random.any_of(sizes);
    const int64_t half = random.one_in(4) ? 0 : random.between(1, size / 2), inner = 256, page_tokens = random.between(1, 8);
    const bool dense = random.one_in(4), narrow = random.one_in(2);
    const Activations kind = dense || random.one_in(2) ? Activations::Tiles : Activations::Codes;
    const int64_t frames = tokens / page_tokens + 2, counts[] = {heads * size, kv_heads * size, kv_heads * values};

    const Array<float> x = normals(random, tokens * inner);
    EncodedRows encoded(tokens, inner, kind);
    EncodeJob encode{};
    encode.x = x.data(), encode.x_stride = inner, encode.columns = inner, encode.out = encoded.place();
    run_encode(encode, tokens);
    const Angles angles(random, tokens, half);
    const std::vector<int64_t> slots = distinct(random, tokens, frames * page_tokens);
    std::vector<Array<uint8_t>> packs;
    std::vector<Array<float>> biases;
    PackedPart parts[3]{};
    for (int i = 0; i < 3; ++i) {
        const Weight weight(random, dense ? int(BF16) : random.any_of(formats), counts[i], inner);
        packs.push_back(packed(weight));
        biases.push_back(maybe_bias(random, counts[i]));
        parts[i].y_stride = parts[i].outputs = counts[i], parts[i].pack = pack_of(weight.format);
    }
    if (kind == Activations::Codes)
        for (const PackedPart& part : parts)
            if (LAYOUTS[part.pack].dense()) return;  // never multiplied with codes

    struct Side {
        std::vector<Array<float>> made;
        Store keys, stored;
    };
    const auto side = [&](bool joined) {
        Side of{{}, {frames, page_tokens, kv_heads, size, narrow}, {frames, page_tokens, kv_heads, values, narrow}};
        for (int i = 0; i < 3; ++i) {
            of.made.emplace_back(tokens * counts[i]);
            parts[i].weight = packs[size_t(i)].data(), parts[i].bias = address_of(biases[size_t(i)]);
            parts[i].y = of.made.back().data();
        }
        PackedJob job{};
        job.x = encoded.place(), job.rows = tokens, job.inner = inner, job.parts = parts, job.count = 3, job.gate = -1;
        IntakeJob intake{};
        intake.q = intake.turned = of.made[0].data(), intake.k = of.made[1].data(), intake.v = of.made[2].data();
        intake.q_token = intake.turned_token = counts[0], intake.k_token = counts[1], intake.v_token = counts[2];
        intake.cos = angles.cos.data(), intake.sin = angles.sin.data();
        intake.k_pages = of.keys.pages(), intake.v_pages = of.stored.pages();
        intake.slots = slots.data(), intake.places = frames * page_tokens, intake.page_tokens = page_tokens;
        intake.heads = heads, intake.kv_heads = kv_heads, intake.size = size, intake.values = values;
        intake.half = half, intake.type = narrow ? PAGES_BF16 : PAGES_F32;
        if (joined) {
            run_packed(job, checked_intake(intake, tokens));
        } else {
            run_packed(job);
            run_intake(intake, tokens);
        }
        return of;
    };
    const Side apart = side(false), together = side(true);
    for (size_t i = 0; i < 3; ++i)
        expect_same_bits(together.made[i].data(), apart.made[i].data(), apart.made[i].size(), "fused: projections");
    expect_same_bits(together.keys.bytes.data(), apart.keys.bytes.data(), apart.keys.bytes.size(), "fused: stored keys");
    expect_same_bits(together.stored.bytes.data(), apart.stored.bytes.data(), apart.stored.bytes.size(),
                     "fused: stored values");
}

// Page writes without RoPE, as in WriteStep.
void check_write(Random& random) {
    const int64_t tokens = random.between(1, 20), page_tokens = random.between(1, 6), heads = random.between(1, 4);
    const int64_t size = random.between(1, 90), row = heads * size + random.between(0, 3), frames = tokens / page_tokens + 2;
    const bool narrow = random.one_in(2);
    const Array<float> rows = normals(random, tokens * row);
    Store store(frames, page_tokens, heads, size, narrow);
    const std::vector<int64_t> slots = distinct(random, tokens, frames * page_tokens);
    IntakeJob job{};
    job.k = rows.data(), job.k_token = row, job.k_pages = store.pages();
    job.slots = slots.data(), job.places = frames * page_tokens, job.page_tokens = page_tokens;
    job.kv_heads = heads, job.size = size, job.type = narrow ? PAGES_BF16 : PAGES_F32;
    run_intake(job, tokens);
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t i = 0; i < heads * size; ++i) {
            const float value = rows[token * row + i];
            expect_close(store.read(store.at(slots[size_t(token)], i / size, i % size)),
                         narrow ? bfloat_value(to_bfloat(value)) : value, 0, "written element", i);
        }
}

void check_attention_over_pages(Random& random) {
    check_attention(random, PAGES_F32);
    check_attention(random, PAGES_BF16);
}

}  // namespace checks
