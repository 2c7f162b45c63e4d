// Mamba's convolution and scan.
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

}  // namespace checks
