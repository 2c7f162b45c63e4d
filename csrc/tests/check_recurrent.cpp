// Mamba's convolution and scan, Mamba-2, S4.
#include <limits>

#include "kernel_checks.hpp"

namespace checks {
namespace {

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
    // The slot of the state after a token; -1 if it is not kept.
    int64_t slot_after(int64_t sequence, int64_t token) const {
        const int64_t j = kept[size_t(sequence)] - (q_start[size_t(sequence) + 1] - token);
        return j < 0 ? -1 : write[size_t(sequence * most + j)];
    }

    int64_t sequences, most, slots;
    std::vector<int64_t> q_start, kept, read, write;
};

}  // namespace

void check_conv(Random& random) {
    const Recurrence recurrence(random);
    const int64_t channels = random.between(1, 50), width = random.between(1, 5), past = width - 1;
    const int64_t tokens = recurrence.tokens();
    const int64_t x_token = channels + random.between(0, 3);
    const bool silu = random.one_in(2);
    const Array<float> x = normals(random, tokens * x_token), weight = normals(random, channels * width);
    const Array<float> bias = maybe_bias(random, channels), before = normals(random, recurrence.slots * channels * past);
    Array<float> state(before.size()), y(tokens * channels);
    std::copy(before.begin(), before.end(), state.begin());
    ConvJob job{};
    job.plan = recurrence.plan(channels), job.x = x.data(), job.weight = weight.data(), job.bias = address_of(bias);
    job.state = state.data(), job.y = y.data(), job.width = width, job.x_token = x_token, job.silu = silu;
    run_causal_conv(job, tokens);
    for (int64_t i = 0; i < recurrence.sequences; ++i)
        for (int64_t c = 0; c < channels; ++c) {
            std::vector<float> line;
            for (int64_t k = 0; k < past; ++k) line.push_back(before[(recurrence.read[size_t(i)] * channels + c) * past + k]);
            for (int64_t t = recurrence.q_start[size_t(i)]; t < recurrence.q_start[size_t(i) + 1]; ++t) {
                line.push_back(x[t * x_token + c]);
                Sum sum;
                sum.add(job.bias ? bias[c] : 0);
                const int64_t first = int64_t(line.size()) - width;
                for (int64_t k = 0; k < width; ++k) sum.add(double(weight[c * width + k]) * line[size_t(first + k)]);
                const double expected = silu ? sum.value / (1 + std::exp(-sum.value)) : sum.value;
                expect_close(y[t * channels + c], expected, FINE * (sum.size + 1), "causal_conv", t * channels + c);
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

void check_ssd(Random& random) {
    const Recurrence recurrence(random);
    const int64_t groups = random.between(1, 3), heads = groups * random.between(1, 3), size = random.between(1, 19);
    const int64_t n = random.between(1, 36), tokens = recurrence.tokens(), numbers = size * n;
    const int64_t x_token = heads * size + random.between(0, 3), dt_token = heads + random.between(0, 3);
    const int64_t b_token = groups * n + random.between(0, 3), c_token = groups * n + random.between(0, 3);
    const Array<float> x = normals(random, tokens * x_token), dt = normals(random, tokens * dt_token);
    const Array<float> b = normals(random, tokens * b_token), c = normals(random, tokens * c_token);
    const Array<float> d = normals(random, heads), bias = normals(random, heads);
    const Array<float> before = normals(random, recurrence.slots * heads * numbers);
    Array<float> a = normals(random, heads), state(before.size()), y(tokens * heads * size);
    for (float& rate : a) rate = -std::fabs(rate) - 0.1f;
    std::copy(before.begin(), before.end(), state.begin());
    SsdJob job{};
    job.plan = recurrence.plan(heads), job.x = x.data(), job.dt = dt.data(), job.a = a.data(), job.b = b.data();
    job.c = c.data(), job.d = d.data(), job.bias = bias.data(), job.state = state.data(), job.y = y.data();
    job.size = size, job.n = n, job.groups = groups, job.x_token = x_token, job.dt_token = dt_token;
    job.b_token = b_token, job.c_token = c_token, job.low = random.one_in(2) ? 0.3f : 0.0f;
    job.high = random.one_in(2) ? 1.0f : std::numeric_limits<float>::infinity();
    run_ssd_scan(job, tokens);
    for (int64_t i = 0; i < recurrence.sequences; ++i)
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t group = head / (heads / groups);
            std::vector<double> h;
            for (int64_t k = 0; k < numbers; ++k) h.push_back(before[(recurrence.read[size_t(i)] * heads + head) * numbers + k]);
            for (int64_t t = recurrence.q_start[size_t(i)]; t < recurrence.q_start[size_t(i) + 1]; ++t) {
                const double raw = std::log1p(std::exp(double(dt[t * dt_token + head]) + bias[head]));
                const double step = std::min(std::max(raw, double(job.low)), double(job.high));
                const int64_t slot = recurrence.slot_after(i, t);
                for (int64_t p = 0; p < size; ++p) {
                    const double input = x[t * x_token + head * size + p];
                    Sum sum;
                    sum.add(d[head] * input);
                    for (int64_t k = 0; k < n; ++k) {
                        double& number = h[size_t(p * n + k)];
                        number = std::exp(step * a[head]) * number + step * input * b[t * b_token + group * n + k];
                        sum.add(number * c[t * c_token + group * n + k]);
                        if (slot >= 0)
                            expect_close(state[(slot * heads + head) * numbers + p * n + k], number,
                                         1e-5 * (1 + std::fabs(number)), "kept state", k);
                    }
                    const int64_t at = (t * heads + head) * size + p;
                    expect_close(y[at], sum.value, 1e-5 * (1 + sum.size), "ssd_scan", at);
                }
            }
        }
}

void check_diagonal(Random& random) {
    const Recurrence recurrence(random);
    const int64_t channels = random.between(1, 40), pairs = random.between(1, 20), tokens = recurrence.tokens();
    const int64_t half = pairs * channels, x_token = channels + random.between(0, 3);
    const Array<float> x = normals(random, tokens * x_token), out = normals(random, 2 * half), d = normals(random, channels);
    const Array<float> before = normals(random, recurrence.slots * 2 * half);
    Array<float> decay = normals(random, 2 * half), state(before.size()), y(tokens * channels);
    for (float& part : decay) part = 0.6f * std::tanh(part);
    std::copy(before.begin(), before.end(), state.begin());
    DiagonalJob job{};
    job.plan = recurrence.plan(channels), job.x = x.data(), job.decay = decay.data(), job.out = out.data(), job.d = d.data();
    job.state = state.data(), job.y = y.data(), job.pairs = pairs, job.x_token = x_token;
    run_diagonal_scan(job, tokens);
    for (int64_t i = 0; i < recurrence.sequences; ++i)
        for (int64_t c = 0; c < channels; ++c) {
            std::vector<double> re, im;
            for (int64_t p = 0; p < pairs; ++p) {
                const int64_t at = recurrence.read[size_t(i)] * 2 * half + p * channels + c;
                re.push_back(before[at]), im.push_back(before[at + half]);
            }
            for (int64_t t = recurrence.q_start[size_t(i)]; t < recurrence.q_start[size_t(i) + 1]; ++t) {
                const double input = x[t * x_token + c];
                const int64_t slot = recurrence.slot_after(i, t);
                Sum sum;
                sum.add(d[c] * input);
                for (int64_t p = 0; p < pairs; ++p) {
                    const int64_t at = p * channels + c;
                    const double next = decay[at] * re[size_t(p)] - decay[half + at] * im[size_t(p)] + input;
                    im[size_t(p)] = decay[at] * im[size_t(p)] + decay[half + at] * re[size_t(p)];
                    re[size_t(p)] = next;
                    sum.add(out[at] * re[size_t(p)]);
                    sum.add(-out[half + at] * im[size_t(p)]);
                    if (slot < 0) continue;
                    expect_close(state[slot * 2 * half + at], re[size_t(p)], 1e-4, "kept real part", p);
                    expect_close(state[slot * 2 * half + half + at], im[size_t(p)], 1e-4, "kept imaginary part", p);
                }
                expect_close(y[t * channels + c], sum.value, 1e-5 * (1 + sum.size), "diagonal_scan", t * channels + c);
            }
        }
}

void check_gated_norm(Random& random) {
    const int64_t rows = random.between(1, 9), groups = random.between(1, 3), part = random.between(1, 50);
    const int64_t columns = groups * part, gate_token = columns + random.between(0, 3);
    const Array<float> x = normals(random, rows * columns), gate = normals(random, rows * gate_token);
    const Array<float> weight = normals(random, columns);
    Array<float> y(rows * columns);
    GatedNormJob job{};
    job.x = x.data(), job.gate = gate.data(), job.weight = weight.data(), job.y = y.data(), job.columns = columns;
    job.groups = groups, job.gate_token = gate_token, job.eps = 1e-5f, job.before = random.one_in(2);
    run_gated_rms_norm(job, rows);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t group = 0; group < groups; ++group) {
            std::vector<double> numbers, opened;
            double squares = 0;
            for (int64_t i = group * part; i < (group + 1) * part; ++i) {
                const double z = gate[row * gate_token + i];
                opened.push_back(z / (1 + std::exp(-z)));
                numbers.push_back(x[row * columns + i] * (job.before ? 1.0 : opened.back()));
                squares += numbers.back() * numbers.back();
            }
            const double scale = 1 / std::sqrt(squares / double(part) + 1e-5);
            for (int64_t i = 0; i < part; ++i) {
                const int64_t at = row * columns + group * part + i;
                const double expected = numbers[size_t(i)] * scale * weight[group * part + i] * (job.before ? opened[size_t(i)] : 1.0);
                expect_close(y[at], expected, 1e-5 * (1 + std::fabs(expected)), "gated_rms_norm", at);
            }
        }
}

void check_scale(Random& random) {
    const int64_t rows = random.between(1, 9), columns = random.between(1, 90), x_token = columns + random.between(0, 3);
    const Array<float> x = normals(random, rows * x_token), factors = normals(random, columns);
    Array<float> y(rows * columns);
    run_scale_columns({x.data(), factors.data(), y.data(), columns, x_token}, rows);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < columns; ++i)
            expect_close(y[row * columns + i], x[row * x_token + i] * factors[i], 0, "scale_columns", row * columns + i);
}

}  // namespace checks
