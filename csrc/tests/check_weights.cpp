// Weights in every format, activations, and the linear layers over them.
#include <stdexcept>

#include "kernel_checks.hpp"

namespace checks {
namespace {

constexpr Activations KINDS[] = {Activations::Codes, Activations::Tiles};

// Rows of every magnitude: zeros, values too small for a scale's inverse, and ordinary ones.
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

// One to three weights that share their activations, or two with a gate between them.
void check_packed(Random& random, Activations kind) {
    static constexpr int blocks[] = {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K};
    static constexpr int gates[] = {SILU, GELU, GELU_TANH, RELU};
    const bool long_rows = random.one_in(8);  // more than tiles process at once
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
        const int format = kind == Activations::Tiles && random.one_in(2) ? int(BF16) : random.any_of(blocks);
        const bool grouped = random.one_in(2);
        const int pack = grouped ? random.any_of(GROUP_PACKS) : pack_of(format);
        weights.emplace_back(random, format, gate >= 0 ? gated : random.between(1, 70), inner);
        const int64_t outputs = weights.back().outputs;
        if (grouped) {
            const GroupedParts group(random, pack, outputs, inner, weights.back().floats);
            packs.emplace_back(packed_bytes(pack, outputs, inner), 64);
            pack_groups(pack, group.place(), packs.back().data(), outputs, inner);
        } else {
            packs.push_back(packed(weights.back()));
        }
        biases.push_back(maybe_bias(random, outputs));
        results.emplace_back(rows * outputs);
        PackedPart part{};
        part.weight = packs.back().data(), part.bias = address_of(biases.back()), part.y = results.back().data();
        part.y_stride = part.outputs = outputs, part.pack = pack;
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
                    double spread = 0;  // scales and minima are summed separately: they may cancel
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
                expect_close(results[size_t(i)][place], want, error, kernels().packs[kind_of(parts[size_t(i)].pack)].name, place);
            }

    if (gate >= 0 && gated % 32 == 0)
        for (const Activations form : KINDS) {
            EncodedRows wanted(rows, gated, form), found(rows, gated, form);
            EncodeJob again{};
            again.x = results[0].data(), again.x_stride = gated, again.columns = gated, again.out = wanted.place();
            run_encode(again, rows);
            job.out = found.place();
            run_packed(job);
            expect_same_rows(found, wanted, "a gate's encoded results");
        }
}

int64_t plain_best(const float* scores, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i) {
        if (std::isnan(scores[i]) || scores[i] == INFINITE) return -1;
        if (scores[i] > (best < 0 ? -INFINITE : scores[best])) best = i;
    }
    return best;
}

}  // namespace

// Two independent decoders of the same blocks.
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

// The values of a pack of groups, and its Hadamard rows if it is one: see check_hadamard for transformed ones.
void check_groups(Random& random) {
    for (const int pack : GROUP_PACKS) {
        const int64_t outputs = random.between(1, 70), inner = 128 * random.between(1, 3);
        Array<float> want(outputs * inner), found(outputs * inner);
        const GroupedParts group(random, pack, outputs, inner, want);
        Array<uint8_t> packs(packed_bytes(pack, outputs, inner), 64);
        pack_groups(pack, group.place(), packs.data(), outputs, inner);
        unpack_weights(pack, packs.data(), found.data(), outputs, inner);
        for (int64_t i = 0; i < found.size(); ++i) expect_close(found[i], want[i], 0, layout_of(pack).name, i);
        if (pack != PACK8R || !hadamard_bytes(pack, outputs, inner)) continue;
        const int64_t rows = random.between(14, 70);
        const Array<float> x = normals(random, rows * inner);
        Array<float> y(rows * outputs);
        EncodedRows encoded(rows, inner, kernels().hadamard_form);
        EncodeJob encode{};
        encode.x = x.data(), encode.x_stride = inner, encode.columns = inner, encode.out = encoded.place();
        run_encode(encode, rows);
        PackedPart part{};
        part.weight = part.hadamard = packs.data(), part.y = y.data(), part.y_stride = part.outputs = outputs, part.pack = pack;
        PackedJob job{};
        job.x = encoded.place(), job.rows = rows, job.inner = inner, job.parts = &part, job.count = 1, job.gate = -1;
        run_packed(job);
        for (int64_t row = 0; row < rows; ++row) {
            double largest = 0;
            for (int64_t k = 0; k < inner; ++k) largest = std::max<double>(largest, std::fabs(x[row * inner + k]));
            for (int64_t o = 0; o < outputs; ++o) {
                double sum = 0, size = 0;
                for (int64_t k = 0; k < inner; ++k) {
                    sum += double(x[row * inner + k]) * want[o * inner + k];
                    size += std::fabs(want[o * inner + k]);
                }
                // Each activation is off by half a step, and by its rounding to bfloat16 or to codes and remainders.
                expect_close(y[row * outputs + o], sum, size * largest * (0.5 / 127 + 1.0 / 256), "int8 by rows", row * outputs + o);
            }
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
            expect(false, "an id outside of the table is rejected");
        } catch (const std::invalid_argument&) {
        }
    }
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
            // The instruction that rounds to bfloat16 flushes subnormals to 0.
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

void check_packed_linear(Random& random) {
    for (const Activations kind : KINDS) check_packed(random, kind);
}

// Sampling parameters, each of them set or neutral.
static SamplingParams any_params(Random& random, int64_t vocab, bool with_top_k) {
    SamplingParams params{};
    static constexpr double temperatures[] = {0.01, 0.7, 1.0, 30.0}, shares[] = {1.0, 1.0, 0.9, 0.3}, floors[] = {0.0, 0.0, 0.1};
    params.greedy = random.one_in(4);
    params.temperature = random.any_of(temperatures);
    params.top_p = random.any_of(shares);
    params.min_p = random.any_of(floors);
    params.top_k = with_top_k ? std::min(vocab, random.between(1, 60)) : vocab;
    params.seed = random.between(0, 1 << 30);
    return params;
}

// Sampling while outputs are computed equals sampling from all of them, even if one is so far above that the others
// round to the same value.
static void check_choice(Random& random) {
    const Weight weight(random, Q8_0, random.between(1, 1300), 32);
    const int64_t rows = random.between(1, 6), outputs = weight.outputs;
    const Array<uint8_t> packs = packed(weight);
    const Array<float> x = normals(random, rows * weight.inner);
    Array<float> y(rows * outputs), bias(outputs);
    for (float& each : bias) each = 0.0f;
    if (random.one_in(2)) bias[random.between(0, outputs - 1)] = 1e6f;
    EncodedRows encoded(rows, weight.inner, Activations::Codes);
    EncodeJob encode{};
    encode.x = x.data(), encode.x_stride = weight.inner, encode.columns = weight.inner, encode.out = encoded.place();
    run_encode(encode, rows);
    PackedPart part{};
    part.weight = packs.data(), part.bias = bias.data(), part.y = y.data(), part.y_stride = part.outputs = outputs;
    part.pack = PACK8;
    PackedJob job{};
    job.x = encoded.place(), job.rows = rows, job.inner = weight.inner, job.parts = &part, job.count = 1, job.gate = -1;
    run_packed(job);
    if (random.one_in(8)) y[0] = NOT_A_NUMBER;
    for (const bool with_top_k : {true, false}) {
        std::vector<SamplingParams> params;
        for (int64_t row = 0; row < rows; ++row) params.push_back(any_params(random, outputs, with_top_k));
        const Choice choice{params.data(), 7};
        Array<int64_t> tokens(rows), expected(rows);
        run_sample({y.data(), nullptr, choice, expected.data(), outputs}, rows);
        expect(y[0] == y[0] || expected[0] == -1, "no token is chosen if a score is NaN");
        run_packed_choice(job, choice, tokens.data());
        for (int64_t row = y[0] == y[0] ? 0 : 1; row < rows; ++row)
            expect_close(double(tokens[row]), double(expected[row]), 0, "choice", row);
    }
}

// Rows and weights are quantized to int8 after a Hadamard transform: a product may be off by half a step of either per
// column. Parts without a transformed copy, and too few rows, use the other kernels in the same job.
void check_hadamard_linear(Random& random) {
    static constexpr int formats[] = {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K};
    static constexpr int gates[] = {SILU, GELU, GELU_TANH, RELU};
    const int64_t inner = 256 * random.between(1, 3), rows = random.between(14, random.one_in(4) ? 700 : 70);
    const int gate = random.one_in(3) ? random.any_of(gates) : -1;
    const int64_t count = gate >= 0 ? 2 : random.between(1, 3), gated = random.between(1, 100);
    const Array<float> x = normals(random, rows * inner);
    EncodedRows encoded(rows, inner, kernels().hadamard_rows ? kernels().hadamard_form : Activations::Tiles);
    EncodeJob encode{};
    encode.x = x.data(), encode.x_stride = inner, encode.columns = inner, encode.out = encoded.place();
    run_encode(encode, rows);

    std::vector<Weight> weights;
    std::vector<Array<uint8_t>> packs, copies;
    std::vector<Array<float>> biases, results;
    std::vector<PackedPart> parts;
    for (int64_t i = 0; i < count; ++i) {
        weights.emplace_back(random, random.any_of(formats), gate >= 0 ? gated : random.between(1, 100), inner);
        const Weight& weight = weights.back();
        packs.push_back(packed(weight));
        const int pack = pack_of(weight.format);
        const int64_t size = gate >= 0 || !random.one_in(4) ? hadamard_bytes(pack, weight.outputs, inner) : 0;
        copies.emplace_back(size, 64);
        if (size) hadamard_weights(pack, packs.back().data(), copies.back().data(), weight.outputs, inner);
        biases.push_back(maybe_bias(random, weight.outputs));
        results.emplace_back(rows * weight.outputs);
        parts.push_back({packs.back().data(), address_of(biases.back()), results.back().data(), weight.outputs,
                         weight.outputs, pack, size ? copies.back().data() : nullptr});
    }
    PackedJob job{};
    job.x = encoded.place(), job.rows = rows, job.inner = inner, job.parts = parts.data(), job.count = count;
    job.gate = gate;
    run_packed(job);

    const auto hadamard = [inner](auto&& value) {
        std::vector<double> all;
        for (int64_t k = 0; k < inner; ++k) {
            double sum = 0;
            for (int64_t i = 0; i < 64; ++i)
                sum += (__builtin_popcountll(uint64_t(i & k % 64)) % 2 ? -1 : 1) * value(k / 64 * 64 + i);
            all.push_back(sum / 8);
        }
        return all;
    };
    const auto half_step = [&encoded](const std::vector<double>& all) {
        double largest = 0;
        for (const double each : all) largest = std::max(largest, std::fabs(each));
        return largest / 254 * (encoded.kind == Activations::Codes ? 1.05 : 1.001);  // remainders are rounded, too
    };
    for (int64_t row = 0; row < rows; row += rows > 70 ? 37 : 3) {
        const auto a = hadamard([&](int64_t k) {
            return encoded.kind == Activations::Codes ? double(x[row * inner + k]) : encoded.value(row, k);
        });
        const double a_step = half_step(a);
        for (int64_t i = 0; i < (gate >= 0 ? 1 : count); ++i)
            for (int64_t o = 0; o < weights[size_t(i)].outputs; o += 7) {
                double values[2] = {}, errors[2] = {};
                for (int64_t side = 0; side < (gate >= 0 ? 2 : 1); ++side) {
                    const Weight& weight = weights[size_t(i + side)];
                    const auto b = hadamard([&](int64_t k) { return double(weight.row(o)[k]); });
                    const double b_step = half_step(b);
                    for (int64_t k = 0; k < inner; ++k) {
                        values[side] += a[size_t(k)] * b[size_t(k)];
                        errors[side] += std::fabs(a[size_t(k)]) * b_step + std::fabs(b[size_t(k)]) * a_step + a_step * b_step;
                    }
                    if (parts[size_t(i + side)].bias) values[side] += parts[size_t(i + side)].bias[o];
                }
                double want = values[0], error = errors[0];
                if (gate >= 0) {
                    const double passed = function_of(gate, values[0], 0);
                    want = passed * values[1];
                    error = 1.2 * errors[0] * std::fabs(values[1]) + std::fabs(passed) * errors[1] +
                            2 * errors[0] * errors[1] + FINE * std::fabs(want);
                }
                const int64_t place = row * weights[size_t(i)].outputs + o;
                expect_close(results[size_t(i)][place], want, error, "Hadamard weights", place);
            }
    }

    // A row has the same bits in a smaller batch.
    const int64_t fewer = random.between(14, rows);
    std::vector<Array<float>> again;
    for (int64_t i = 0; i < count; ++i) {
        again.emplace_back(fewer * weights[size_t(i)].outputs);
        parts[size_t(i)].y = again.back().data();
    }
    job.rows = fewer;
    run_packed(job);
    for (int64_t i = 0; i < (gate >= 0 ? 1 : count); ++i)
        expect_same_bits(again[size_t(i)].data(), results[size_t(i)].data(), again[size_t(i)].size(), "fewer rows");
}

void check_best(Random& random) {
    check_choice(random);

    const int64_t count = random.between(1, 100);
    Array<float> scores(count);
    for (float& score : scores) score = float(random.between(-5, 5));  // ties
    static constexpr float odd[] = {-INFINITE, -INFINITE, INFINITE, NOT_A_NUMBER};
    for (int64_t i = random.between(0, 3); i > 0; --i) scores[random.between(0, count - 1)] = random.any_of(odd);
    expect_close(double(kernels().best_of(scores.data(), count).index), double(plain_best(scores.data(), count)), 0, "best", 0);

    for (const Activations kind : KINDS) {
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

}  // namespace checks
