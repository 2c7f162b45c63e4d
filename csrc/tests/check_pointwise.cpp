// Norms and activations.
#include "kernel_checks.hpp"

namespace checks {

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
            // An exponential of u inherits the rounding error of u; one out of range is 0 or infinity.
            // Its error is relative to the argument: a square, or a cube.
            const double taken = kind == GELU ? x[i] * x[i] : kind == GELU_TANH ? 0.1 * std::fabs(x[i] * x[i] * x[i]) : 0;
            const double error = 5e-7 * (1 + taken);  // a quotient of an exponential, and a product: four units
            expect_close(y[i], want, error * std::fabs(want) + 1e-36, "pointwise", i);
        }
    }
}

void check_gather(Random& random) {
    const int64_t rows = random.between(1, 9), inner = random.between(1, 90), x_token = inner + random.between(0, 3);
    const std::vector<int64_t> order = distinct(random, random.between(1, inner), inner);
    const Array<float> x = normals(random, rows * x_token);
    const int64_t count = int64_t(order.size());
    Array<int32_t> columns(count);
    for (int64_t i = 0; i < count; ++i) columns[i] = int32_t(order[size_t(i)]);
    Array<float> y(rows * count);
    run_gather_columns({x.data(), columns.data(), y.data(), count, x_token}, rows);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i)
            expect_close(y[row * count + i], x[row * x_token + columns[i]], 0, "gather_columns", row * count + i);
}

}  // namespace checks
