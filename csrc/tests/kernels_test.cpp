// Every kernel of every instruction set of this machine against plain loops in double precision, on random shapes.
//
//     kernels_test [ROUNDS [SEED]]
//
// A failure names the instruction set, the operation and the round; the same seed makes the same numbers again.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <vector>

#include "attention_plan.hpp"
#include "operations.hpp"
#include "operands.hpp"
#include "pages.hpp"
#include "threads.hpp"

namespace {

using namespace checks;

constexpr float INFINITE = std::numeric_limits<float>::infinity(), NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();
constexpr double FINE = 4e-6;  // of the sizes summed: a thousand terms in sixteen lanes
constexpr double BFLOAT = 0x1p-8;

std::vector<Activations> kinds_of_activations() {
    if (kernels().tile_rows > 0) return {Activations::Codes, Activations::Tiles};
    return {Activations::Codes};
}

// A bias, or none.
Array<float> maybe_bias(Random& random, int64_t count) { return normals(random, random.one_in(2) ? count : 0); }
const float* address_of(const Array<float>& maybe) { return maybe.size() ? maybe.data() : nullptr; }

// Two readers of the same blocks, written apart from each other.
void check_formats(Random& random) {
    for (int format = 0; format < FORMATS; ++format) {
        const FormatFacts& facts = kernels().facts[format];
        const Weight weight(random, format, random.between(1, 70), facts.block * random.between(1, 3));
        if (pack_of(format) >= 0) {
            const Array<uint8_t> packs = packed(weight);
            Array<float> back(weight.floats.size());
            unpack_weights(pack_of(format), packs.data(), back.data(), weight.outputs, weight.inner);
            expect_same_bits(back.data(), weight.floats.data(), back.size(), facts.name);
            continue;
        }
        for (int64_t i = 0; i < weight.floats.size(); ++i) {
            const uint8_t* at = weight.blocks.data() + i * facts.bytes / facts.block;
            float wide;
            uint16_t narrow;
            std::memcpy(&wide, at, facts.bytes == 64 ? 4 : 0);
            std::memcpy(&narrow, at, 2);
            const double want = format == F32 ? double(wide) : format == F16 ? half_value(narrow) : bfloat_value(narrow);
            expect_close(weight.floats[i], want, 0, facts.name, i);
        }
    }
}

void check_linear(Random& random) {
    for (int format = 0; format < FORMATS; ++format) {
        const FormatFacts& facts = kernels().facts[format];
        const int64_t inner = facts.block * random.between(1, 768 / facts.block), rows = random.between(1, 9);
        const Weight weight(random, format, random.between(1, 37), inner);
        const int64_t stride = inner + random.between(0, 3);
        const Array<float> x = normals(random, (rows - 1) * stride + inner), bias = maybe_bias(random, weight.outputs);
        Array<float> y(rows * weight.outputs);
        LinearJob job{};
        job.x = x.data(), job.x_stride = stride, job.weight = weight.blocks.data(), job.bias = address_of(bias);
        job.y = y.data(), job.rows = rows, job.outputs = weight.outputs, job.inner = inner;
        job.row_bytes = weight.row_bytes();
        run_linear(job, Format(format));
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t o = 0; o < weight.outputs; ++o) {
                Sum sum;
                for (int64_t k = 0; k < inner; ++k) sum.add(double(x[row * stride + k]) * weight.row(o)[k]);
                if (job.bias) sum.add(bias[o]);
                expect_close(y[row * weight.outputs + o], sum.value, FINE * sum.size, facts.name, row * weight.outputs + o);
            }
    }
}

void check_embedding(Random& random) {
    for (int format = 0; format < FORMATS; ++format) {
        const FormatFacts& facts = kernels().facts[format];
        const int64_t columns = facts.block * random.between(1, 3), tokens = random.between(1, 20);
        const Weight table(random, format, random.between(1, 30), columns);
        const float scale = random.one_in(2) ? 1.0f : random.normal();
        Array<int64_t> ids(tokens);
        for (int64_t& id : ids) id = random.between(0, table.outputs - 1);
        Array<float> y(tokens * columns);
        EmbeddingJob job{};
        job.ids = ids.data(), job.table = table.blocks.data(), job.y = y.data(), job.count = table.outputs;
        job.columns = columns, job.row_bytes = table.row_bytes(), job.scale = scale;
        run_embedding(job, Format(format), tokens);
        for (int64_t i = 0; i < y.size(); ++i)
            expect_close(y[i], float(table.row(ids[i / columns])[i % columns] * scale), 0, facts.name, i);
        ids[0] = random.one_in(2) ? -1 : table.outputs;
        try {
            run_embedding(job, Format(format), tokens);
            expect(false, "an id outside of the table is refused");
        } catch (const std::invalid_argument&) {
        }
    }
}

// Rows of every size: zeros, numbers too small for a scale's inverse, and everyday ones.
Array<float> rows_of_all_sizes(Random& random, int64_t count) {
    static constexpr float spreads[] = {0.0f, 1e-44f, 1e-37f, 1e-30f, 0.01f, 1.0f, 1.0f, 1.0f, 3e4f, 1e37f};
    Array<float> x(count);
    float spread = 1.0f;
    for (int64_t i = 0; i < count; ++i) {
        if (i % 32 == 0) spread = random.any_of(spreads);
        x[i] = random.normal() * spread;
    }
    return x;
}

void check_encode(Random& random) {
    for (const Activations kind : {Activations::Codes, Activations::Tiles}) {
        const int64_t rows = random.between(1, 12);
        const int64_t columns = kind == Activations::Codes ? 32 * random.between(1, 20) : random.between(1, 200);
        const int64_t stride = columns + random.between(0, 5);
        const Array<float> x = rows_of_all_sizes(random, (rows - 1) * stride + columns);
        EncodedRows encoded(rows, columns, kind);
        EncodeJob job{};
        job.x = x.data(), job.x_stride = stride, job.columns = columns, job.out = encoded.place();
        run_encode(job, rows);
        for (int64_t row = 0; row < rows; ++row) {
            const float* of = x.data() + row * stride;
            // The instruction that rounds to bfloat16 takes subnormal numbers for 0.
            for (int64_t i = 0; i < columns && kind == Activations::Tiles; ++i)
                expect_close(encoded.value(row, i), bfloat_value(to_bfloat(of[i])),
                             std::fabs(of[i]) < 0x1p-126f ? 0x1p-126 : 0, "bfloat16", i);
            for (int64_t i = columns; i < (columns + 31) / 32 * 32 && kind == Activations::Tiles; ++i)
                expect_close(encoded.value(row, i), 0, 0, "what follows a row of bfloat16", i);
            for (int64_t group = 0; group < columns && kind == Activations::Codes; group += 32) {
                float most = 0;
                int32_t sums[2] = {};
                for (int64_t i = group; i < group + 32; ++i) {
                    most = std::max(most, std::fabs(of[i]));
                    sums[(i - group) / 16] += encoded.code(row, i);
                }
                expect_close(encoded.scale(row, group), most / 127.0f, 0, "scale", group);
                expect_close(encoded.sum(row, group), sums[0], 0, "sum of codes", group);
                expect_close(encoded.sum(row, group + 16), sums[1], 0, "sum of codes", group + 16);
                // Groups that are too small for the inverse of a scale become zeros.
                const double error = std::max<double>(most / 127.0 * 0.5001, 0x1p-120);
                for (int64_t i = group; i < group + 32; ++i) {
                    expect(std::abs(encoded.code(row, i)) <= 127, "a code is -127 to 127");
                    expect_close(encoded.value(row, i), of[i], error, "code", i);
                }
            }
        }
    }
}

// f in double precision.
double function_of(int kind, double x, double parameter) {
    switch (kind) {
        case SILU: return x / (1 + std::exp(-x));
        case GELU_TANH: return x / (1 + std::exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
        case RELU: return x > 0 ? x : 0;
        case SOFTPLUS: return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
        case SOFT_CAP: return parameter * std::tanh(x / parameter);
        default: return x;
    }
}

// One to three weights that share their activations, or two with a gate between them.
void check_packed(Random& random, Activations kind) {
    static constexpr int formats[] = {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K};
    static constexpr int gates[] = {SILU, GELU_TANH, RELU};
    const bool long_rows = random.one_in(8);  // more than the tiles take at once
    const int64_t inner = 256 * (long_rows ? 9 : random.between(1, 3)), rows = random.between(1, random.one_in(3) ? 70 : 9);
    const int gate = random.one_in(3) ? random.any_of(gates) : -1;
    const int64_t count = gate >= 0 ? 2 : random.between(1, 3);
    const int64_t gated = random.one_in(2) ? 32 * random.between(1, 3) : random.between(1, 70);

    const Array<float> x = normals(random, rows * inner);
    EncodedRows encoded(rows, inner, kind);
    EncodeJob encode{};
    encode.x = x.data(), encode.x_stride = inner, encode.columns = inner, encode.out = encoded.place();
    run_encode(encode, rows);

    std::vector<Weight> weights;
    std::vector<Array<uint8_t>> packs;
    std::vector<Array<float>> biases, results;
    std::vector<PackedPart> parts;
    for (int64_t i = 0; i < count; ++i) {
        weights.emplace_back(random, random.any_of(formats), gate >= 0 ? gated : random.between(1, 70), inner);
        const int64_t outputs = weights.back().outputs;
        packs.push_back(packed(weights.back()));
        biases.push_back(maybe_bias(random, outputs));
        results.emplace_back(rows * outputs);
        PackedPart part{};
        part.weight = packs.back().data(), part.bias = address_of(biases.back()), part.y = results.back().data();
        part.y_stride = part.outputs = outputs, part.pack = pack_of(weights.back().format);
        parts.push_back(part);
    }
    PackedJob job{};
    job.x = encoded.place(), job.rows = rows, job.inner = inner, job.parts = parts.data(), job.count = count;
    job.gate = gate;
    run_packed(job);

    // The sums of both parts of a gate are needed at once.
    const double rounding = kind == Activations::Codes ? FINE : BFLOAT;
    for (int64_t i = 0; i < (gate >= 0 ? 1 : count); ++i)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t o = 0; o < weights[size_t(i)].outputs; ++o) {
                double values[2], errors[2];
                for (int64_t side = 0; side < (gate >= 0 ? 2 : 1); ++side) {
                    const Weight& weight = weights[size_t(i + side)];
                    double largest = 0;
                    Sum sum;
                    for (int64_t k = 0; k < inner; ++k) {
                        largest = std::max<double>(largest, std::fabs(weight.row(o)[k]));
                        sum.add(encoded.value(row, k) * weight.row(o)[k]);
                    }
                    double spread = 0;  // scales and minimums are summed apart: they may cancel
                    for (int64_t k = 0; k < inner; ++k) spread += std::fabs(encoded.value(row, k)) * largest;
                    if (parts[size_t(i + side)].bias) sum.add(parts[size_t(i + side)].bias[o]);
                    values[side] = sum.value;
                    errors[side] = rounding * (kind == Activations::Codes ? spread : sum.size) + FINE * std::fabs(sum.value);
                }
                double want = values[0], error = errors[0];
                if (gate >= 0) {
                    want = function_of(gate, values[0], 0) * values[1];
                    error = 1.2 * errors[0] * std::fabs(values[1]) + std::fabs(function_of(gate, values[0], 0)) * errors[1] +
                            2 * errors[0] * errors[1] + FINE * std::fabs(want);
                }
                const int64_t place = row * weights[size_t(i)].outputs + o;
                expect_close(results[size_t(i)][place], want, error, kernels().packs[parts[size_t(i)].pack].name, place);
            }

    if (gate >= 0 && gated % 32 == 0)
        for (const Activations form : kinds_of_activations()) {
            EncodedRows wanted(rows, gated, form), found(rows, gated, form);
            EncodeJob again{};
            again.x = results[0].data(), again.x_stride = gated, again.columns = gated, again.out = wanted.place();
            run_encode(again, rows);
            job.out = found.place();
            run_packed(job);
            expect_same_rows(found, wanted, "a gate's encoded results");
        }
}

void check_packed_linear(Random& random) {
    for (const Activations kind : kinds_of_activations()) check_packed(random, kind);
}

int64_t plain_best(const float* scores, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i) {
        if (std::isnan(scores[i]) || scores[i] == INFINITE) return -1;
        if (scores[i] > (best < 0 ? -INFINITE : scores[best])) best = i;
    }
    return best;
}

void check_best(Random& random) {
    const int64_t count = random.between(1, 100);
    Array<float> scores(count);
    for (float& score : scores) score = float(random.between(-5, 5));  // ties
    static constexpr float odd[] = {-INFINITE, -INFINITE, INFINITE, NOT_A_NUMBER};
    for (int64_t i = random.between(0, 3); i > 0; --i) scores[random.between(0, count - 1)] = random.any_of(odd);
    expect_close(double(kernels().best_of(scores.data(), count).index), double(plain_best(scores.data(), count)), 0, "best", 0);

    for (const Activations kind : kinds_of_activations()) {
        const Weight weight(random, Q8_0, random.between(1, 1300), 32 * random.between(1, 3));
        const int64_t rows = random.between(1, 6), inner = weight.inner;
        const Array<uint8_t> packs = packed(weight);
        Array<float> x = normals(random, rows * inner), y(rows * weight.outputs);
        if (random.one_in(4)) x[random.between(0, x.size() - 1)] = NOT_A_NUMBER;
        EncodedRows encoded(rows, inner, kind);
        EncodeJob encode{};
        encode.x = x.data(), encode.x_stride = inner, encode.columns = inner, encode.out = encoded.place();
        run_encode(encode, rows);
        PackedPart part{};
        part.weight = packs.data(), part.y = y.data(), part.y_stride = part.outputs = weight.outputs, part.pack = PACK8;
        PackedJob job{};
        job.x = encoded.place(), job.rows = rows, job.inner = inner, job.parts = &part, job.count = 1, job.gate = -1;
        run_packed(job);
        Array<int64_t> best(rows);
        run_packed_best(job, best.data());
        for (int64_t row = 0; row < rows; ++row)
            expect_close(double(best[row]), double(plain_best(y.data() + row * weight.outputs, weight.outputs)), 0,
                         "best output", row);
    }
}

void check_norms(Random& random) {
    const bool encoded = random.one_in(2), joins = random.one_in(2);
    const int64_t rows = random.between(1, 9), columns = encoded ? 32 * random.between(1, 12) : random.between(1, 400);
    const Array<float> x = normals(random, rows * columns), delta = normals(random, rows * columns);
    const Array<float> weight = normals(random, columns), bias = normals(random, columns);
    Array<float> joined(rows * columns), y(rows * columns);
    NormJob job{};
    job.x = x.data(), job.weight = weight.data(), job.y = y.data(), job.columns = columns, job.eps = 1e-5f;
    job.offset = random.one_in(2) ? 1.0f : 0.0f;
    if (joins) job.delta = delta.data(), job.joined = joined.data();
    run_rms_norm(job, rows);
    for (int64_t row = 0; row < rows; ++row) {
        double squares = 0;
        const auto input = [&](int64_t i) {
            const int64_t at = row * columns + i;
            return joins ? float(x[at] + delta[at]) : x[at];
        };
        for (int64_t i = 0; i < columns; ++i) squares += double(input(i)) * input(i);
        const double scale = 1 / std::sqrt(squares / double(columns) + double(job.eps));
        for (int64_t i = 0; i < columns; ++i) {
            const double want = input(i) * scale * (double(weight[i]) + job.offset);
            expect_close(y[row * columns + i], want, 1e-6 * (std::fabs(input(i)) * scale * 3), "rms_norm", i);
            if (joins) expect_close(joined[row * columns + i], input(i), 0, "joined", i);
        }
    }
    for (const Activations kind : {Activations::Codes, Activations::Tiles}) {
        if (!encoded) break;
        EncodedRows wanted(rows, columns, kind), found(rows, columns, kind);
        EncodeJob encode{};
        encode.x = y.data(), encode.x_stride = columns, encode.columns = columns, encode.out = wanted.place();
        run_encode(encode, rows);
        job.y = nullptr, job.out = found.place();
        run_rms_norm(job, rows);
        expect_same_rows(found, wanted, "encoded rms_norm");
    }

    LayerNormJob layer{};
    layer.x = x.data(), layer.weight = weight.data(), layer.bias = bias.data(), layer.y = y.data();
    layer.columns = columns, layer.eps = 1e-5f;
    run_layer_norm(layer, rows);
    for (int64_t row = 0; row < rows; ++row) {
        const float* of = x.data() + row * columns;
        double mean = 0, squares = 0;
        for (int64_t i = 0; i < columns; ++i) mean += of[i] / double(columns);
        for (int64_t i = 0; i < columns; ++i) squares += (of[i] - mean) * (of[i] - mean);
        const double scale = 1 / std::sqrt(squares / double(columns) + double(layer.eps));
        for (int64_t i = 0; i < columns; ++i) {
            const double want = (of[i] - mean) * scale * weight[i];
            expect_close(y[row * columns + i], want + bias[i],
                         2e-6 * (scale * std::fabs(weight[i]) + std::fabs(want) + std::fabs(bias[i])), "layer_norm", i);
        }
    }
}

void check_pointwise(Random& random) {
    for (int kind = 0; kind < POINTWISE; ++kind) {
        static constexpr float spreads[] = {1e-3f, 1.0f, 1.0f, 8.0f, 60.0f};
        const int64_t count = random.between(1, random.one_in(5) ? 9000 : 70);
        const Array<float> x = normals(random, count, random.any_of(spreads)), factor = normals(random, count);
        const bool multiplies = random.one_in(2);
        Array<float> y(count);
        PointwiseJob job{};
        job.x = x.data(), job.y = y.data(), job.parameter = 30.0f;
        if (multiplies || kind == PLUS) job.factor = factor.data();
        run_pointwise(job, Pointwise(kind), count);
        for (int64_t i = 0; i < count; ++i) {
            const double alone = function_of(kind, x[i], job.parameter);
            const double want = kind == PLUS ? double(x[i]) + factor[i] : multiplies ? alone * factor[i] : alone;
            // An exponential of u is off by the roundings of u; one that leaves the range of floats is 0 or infinity.
            const double error = 4e-7 * (1 + (kind == GELU_TANH ? 0.1 * std::fabs(x[i] * x[i] * x[i]) : 0));
            expect_close(y[i], want, error * std::fabs(want) + 1e-36, "pointwise", i);
        }
    }
}

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

// A head's dimension `i`, turned.
double turned(const float* head, const float* cos, const float* sin, int64_t half, int64_t i) {
    if (i >= 2 * half) return head[i];
    if (i < half) return double(head[i]) * cos[i] - double(head[i + half]) * sin[i];
    return double(head[i]) * cos[i - half] + double(head[i - half]) * sin[i - half];
}

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

// Keys or values of one layer in pages, in either type; what is not written is NaN.
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
    Pages pages() const { return {bytes.data(), frame(), token(), size}; }

    int64_t frames, page_tokens, heads, size;
    bool narrow;
    Array<uint8_t> bytes;
};

// `count` different numbers below `most`.
std::vector<int64_t> distinct(Random& random, int64_t count, int64_t most) {
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < most; ++i) numbers.push_back(i);
    for (int64_t i = 0; i < count; ++i) std::swap(numbers[size_t(i)], numbers[size_t(random.between(i, most - 1))]);
    numbers.resize(size_t(count));
    return numbers;
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
    job.k_pages = keys.bytes.data(), job.k_frame = keys.frame() * keys.item(), job.k_token_bytes = keys.token() * keys.item();
    job.v_pages = stored.bytes.data(), job.v_frame = stored.frame() * stored.item();
    job.v_token_bytes = stored.token() * stored.item();
    job.slots = slots.data(), job.places = frames * page_tokens, job.page_tokens = page_tokens;
    job.heads = heads, job.kv_heads = kv_heads, job.size = size, job.values = values, job.half = half, job.narrow = narrow;
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
                expect_close(job.turned[at + i], turned(before.data() + at, cos, sin, half, i), 1e-6, "turned query", i);
            }
    }
}

void check_write(Random& random) {
    const int64_t tokens = random.between(1, 20), page_tokens = random.between(1, 6), bytes = random.between(1, 90);
    const int64_t frames = tokens / page_tokens + 2;
    Array<uint8_t> rows(tokens * bytes), pages(frames * page_tokens * bytes);
    for (uint8_t& byte : rows) byte = uint8_t(random.next());
    const std::vector<int64_t> slots = distinct(random, tokens, frames * page_tokens);
    WriteJob job{};
    job.rows = rows.data(), job.pages = pages.data(), job.slots = slots.data(), job.bytes = bytes;
    job.page_tokens = page_tokens, job.frame = page_tokens * bytes, job.token = bytes;
    write_pages(job, tokens, frames);
    for (int64_t i = 0; i < tokens; ++i)
        expect_same_bits(pages.data() + slots[size_t(i)] * bytes, rows.data() + i * bytes, bytes, "written row");
}

// Sequences of any length over shuffled pages; pages that nobody may look at do not exist.
void check_attention(Random& random, PageType type) {
    static constexpr int64_t sizes[] = {8, 20, 32, 64, 64, 96};
    static constexpr int64_t lengths_of_pages[] = {1, 4, 5, 16, 32, 48};
    const int64_t sequences = random.between(1, 3), kv_heads = random.between(1, 2), groups = random.between(1, 5);
    const int64_t heads = kv_heads * groups, size = random.any_of(sizes), values = random.one_in(2) ? size : random.any_of(sizes);
    const int64_t page_tokens = random.any_of(lengths_of_pages), window = random.one_in(3) ? random.between(1, 150) : 0;
    const float cap = random.one_in(4) ? 5.0f : 0.0f, scale = float(1 / std::sqrt(double(size)));
    std::vector<int64_t> q_start{0}, kv_len;
    for (int64_t i = 0; i < sequences; ++i) {
        const int64_t queries = random.one_in(2) ? 1 : random.between(1, random.one_in(4) ? 90 : 20);
        q_start.push_back(q_start.back() + queries);
        kv_len.push_back(queries + random.between(0, random.one_in(3) ? 500 : 60));
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
    job.q_token = q_token, job.window = window, job.scale = scale, job.cap = cap;
    paged_attention(job, type, sequences, tokens, width, frames);

    // Tiles round queries and weights: the largest of values that are drawn so is about 4.
    const double error = narrow && kernels().tile_rows > 0 && size % 32 == 0 && values % 32 == 0 ? 0.05 : 2e-5;
    for (int64_t i = 0; i < sequences; ++i)
        for (int64_t token = q_start[size_t(i)]; token < q_start[size_t(i) + 1]; ++token)
            for (int64_t head = 0; head < heads; ++head) {
                const int64_t position = kv_len[size_t(i)] - (q_start[size_t(i) + 1] - token);
                const int64_t from = window ? std::max<int64_t>(0, position + 1 - window) : 0;
                std::vector<double> weights;
                double most = -INFINITE, total = 0;
                for (int64_t p = from; p <= position; ++p) {
                    double score = 0;
                    for (int64_t d = 0; d < size; ++d)
                        score += double(q[token * q_token + head * size + d]) * k.read(k.at(slot(i, p), head / groups, d));
                    score *= double(scale);
                    weights.push_back(cap ? cap * std::tanh(score / cap) : score);
                    most = std::max(most, weights.back());
                }
                for (double& weight : weights) total += weight = std::exp(weight - most);
                for (int64_t d = 0; d < values; ++d) {
                    double want = 0;
                    for (int64_t p = from; p <= position; ++p)
                        want += weights[size_t(p - from)] / total * v.read(v.at(slot(i, p), head / groups, d));
                    const int64_t place = (token * heads + head) * values + d;
                    expect_close(y[place], want, error, narrow ? "attention over bfloat16" : "attention over float32", place);
                }
            }

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
}

void check_attention_over_pages(Random& random) {
    check_attention(random, PAGES_F32);
    check_attention(random, PAGES_BF16);
}

// Sequences that read one slot and keep the states after some of their last tokens in slots of their own.
struct Recurrence {
    explicit Recurrence(Random& random) : sequences(random.between(1, 4)), q_start{0} {
        most = random.between(1, 3);
        slots = 1 + sequences * (most + 1);
        const std::vector<int64_t> places = distinct(random, slots, slots);
        size_t next = 0;
        for (int64_t i = 0; i < sequences; ++i) {
            const int64_t count = random.between(1, 9);
            q_start.push_back(q_start.back() + count);
            kept.push_back(random.between(0, std::min(count, most)));
            read.push_back(places[next++]);
            for (int64_t j = 0; j < most; ++j) write.push_back(j < kept.back() ? places[next++] : -5);
        }
        if (random.one_in(2)) read.back() = read.front();
    }
    RecurrentPlan plan(int64_t channels) const {
        RecurrentPlan made{};
        made.q_start = q_start.data(), made.kept = kept.data(), made.read = read.data(), made.write = write.data();
        made.sequences = sequences, made.write_stride = most, made.channels = channels;
        return checked_plan(made, most, slots, tokens());
    }
    int64_t tokens() const { return q_start.back(); }
    // Where the state after a token goes; -1: nowhere.
    int64_t slot_after(int64_t sequence, int64_t token) const {
        const int64_t j = kept[size_t(sequence)] - (q_start[size_t(sequence) + 1] - token);
        return j < 0 ? -1 : write[size_t(sequence * most + j)];
    }

    int64_t sequences, most, slots;
    std::vector<int64_t> q_start, kept, read, write;
};

void check_conv(Random& random) {
    const Recurrence recurrence(random);
    const int64_t channels = random.between(1, 50), width = random.between(1, 5), past = width - 1;
    const int64_t tokens = recurrence.tokens();
    const Array<float> x = normals(random, tokens * channels), weight = normals(random, channels * width);
    const Array<float> bias = maybe_bias(random, channels), before = normals(random, recurrence.slots * channels * past);
    Array<float> state(before.size()), y(tokens * channels);
    std::copy(before.begin(), before.end(), state.begin());
    ConvJob job{};
    job.plan = recurrence.plan(channels), job.x = x.data(), job.weight = weight.data(), job.bias = address_of(bias);
    job.state = state.data(), job.y = y.data(), job.width = width;
    run_causal_conv(job, tokens);
    for (int64_t i = 0; i < recurrence.sequences; ++i)
        for (int64_t c = 0; c < channels; ++c) {
            std::vector<float> line;
            for (int64_t k = 0; k < past; ++k) line.push_back(before[(recurrence.read[size_t(i)] * channels + c) * past + k]);
            for (int64_t t = recurrence.q_start[size_t(i)]; t < recurrence.q_start[size_t(i) + 1]; ++t) {
                line.push_back(x[t * channels + c]);
                Sum sum;
                sum.add(job.bias ? bias[c] : 0);
                const int64_t first = int64_t(line.size()) - width;
                for (int64_t k = 0; k < width; ++k) sum.add(double(weight[c * width + k]) * line[size_t(first + k)]);
                expect_close(y[t * channels + c], sum.value, FINE * sum.size, "causal_conv", t * channels + c);
                const int64_t slot = recurrence.slot_after(i, t);
                for (int64_t k = 0; k < past && slot >= 0; ++k)
                    expect_close(state[(slot * channels + c) * past + k], line[size_t(first + 1 + k)], 0, "kept inputs", k);
            }
        }
}

void check_scan(Random& random) {
    const Recurrence recurrence(random);
    const int64_t channels = random.between(1, 40), size = random.between(1, 36), tokens = recurrence.tokens();
    const int64_t b_token = size + random.between(0, 3), c_token = size + random.between(0, 3);
    const Array<float> x = normals(random, tokens * channels), b = normals(random, tokens * b_token);
    const Array<float> c = normals(random, tokens * c_token), d = normals(random, channels);
    const Array<float> before = normals(random, recurrence.slots * channels * size);
    Array<float> delta = normals(random, tokens * channels), a = normals(random, channels * size);
    for (float& step : delta) step = std::fabs(step) * 0.2f;
    for (float& rate : a) rate = -std::fabs(rate) - 0.1f;
    Array<float> state(before.size()), y(tokens * channels);
    std::copy(before.begin(), before.end(), state.begin());
    ScanJob job{};
    job.plan = recurrence.plan(channels), job.x = x.data(), job.delta = delta.data(), job.a = a.data(), job.b = b.data();
    job.c = c.data(), job.d = d.data(), job.state = state.data(), job.y = y.data(), job.size = size;
    job.b_token = b_token, job.c_token = c_token;
    run_selective_scan(job, tokens);
    for (int64_t i = 0; i < recurrence.sequences; ++i)
        for (int64_t channel = 0; channel < channels; ++channel) {
            std::vector<double> h;
            for (int64_t n = 0; n < size; ++n) h.push_back(before[(recurrence.read[size_t(i)] * channels + channel) * size + n]);
            for (int64_t t = recurrence.q_start[size_t(i)]; t < recurrence.q_start[size_t(i) + 1]; ++t) {
                const double step = delta[t * channels + channel], input = x[t * channels + channel];
                const int64_t slot = recurrence.slot_after(i, t);
                Sum sum;
                sum.add(d[channel] * input);
                for (int64_t n = 0; n < size; ++n) {
                    h[size_t(n)] = std::exp(step * a[channel * size + n]) * h[size_t(n)] + step * input * b[t * b_token + n];
                    sum.add(h[size_t(n)] * c[t * c_token + n]);
                    if (slot >= 0)
                        expect_close(state[(slot * channels + channel) * size + n], h[size_t(n)],
                                     1e-5 * (1 + std::fabs(h[size_t(n)])), "kept state", n);
                }
                expect_close(y[t * channels + channel], sum.value, 1e-5 * (1 + sum.size), "selective_scan", t * channels + channel);
            }
        }
}

struct Operation {
    const char* name;
    void (*check)(Random&);
};

constexpr Operation OPERATIONS[] = {
    {"formats", check_formats},
    {"linear", check_linear},
    {"embedding", check_embedding},
    {"encode", check_encode},
    {"packed linear", check_packed_linear},
    {"best", check_best},
    {"norms", check_norms},
    {"pointwise", check_pointwise},
    {"rotate", check_rotate},
    {"intake", check_intake},
    {"write", check_write},
    {"attention", check_attention_over_pages},
    {"causal_conv", check_conv},
    {"selective_scan", check_scan},
};

}  // namespace

int main(int count, char** arguments) {
    const int64_t rounds = count > 1 ? std::atoll(arguments[1]) : 40;
    const uint64_t seed = count > 2 ? uint64_t(std::atoll(arguments[2])) : 1;
    for (const std::string& isa : available_isas()) {
        set_isa(isa);
        for (const Operation& operation : OPERATIONS)
            for (int64_t round = 0; round < rounds; ++round) {
                if (round % (rounds / 2 + 1) == 0) set_threads(round ? 3 : 1);
                Verdicts::all().begin(isa + ", " + operation.name + ", round " + std::to_string(round));
                Random random(seed * 1000003 + uint64_t(round) * 257 + uint64_t(&operation - OPERATIONS));
                operation.check(random);
            }
        std::printf("%s: %lld rounds\n", isa.c_str(), static_cast<long long>(rounds));
    }
    return Verdicts::all().report("kernels_test");
}
