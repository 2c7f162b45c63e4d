// Latent attention around its attention kernel.
#include "kernel_checks.hpp"

namespace checks {

// One matrix per head in either layout, and the rest of each query rotated behind the products.
void check_head_products(Random& random) {
    const int64_t tokens = random.between(1, 9), heads = random.between(1, 4), columns = random.between(1, 70);
    const int64_t outputs = random.between(1, 150), half = random.one_in(2) ? random.between(1, 20) : 0;
    const bool across = random.one_in(2), narrow = random.one_in(2);
    const int64_t rows = across ? columns : outputs, inner = across ? outputs : columns, spare = random.between(0, 3);
    const int64_t w_head = (rows + spare) * inner, size = columns + 2 * half, wide = outputs + 2 * half;
    const Array<float> x = normals(random, tokens * heads * size), angles = normals(random, 2 * tokens * (half + 1));
    const Array<float> numbers = normals(random, heads * w_head);
    Array<uint16_t> rounded(heads * w_head);
    for (int64_t i = 0; i < numbers.size(); ++i) {
        uint32_t bits;
        std::memcpy(&bits, &numbers[i], 4);
        rounded[i] = uint16_t(bits >> 16);
    }
    const auto weight = [&](int64_t i) { return double(narrow ? bfloat_value(rounded[i]) : numbers[i]); };
    Array<float> y(tokens * heads * wide);
    HeadProductsJob job{};
    job.x = x.data(), job.y = y.data(), job.cos = angles.data(), job.sin = angles.data() + tokens * half;
    job.weight = narrow ? reinterpret_cast<const uint8_t*>(rounded.data()) : reinterpret_cast<const uint8_t*>(numbers.data());
    job.tokens = tokens, job.heads = heads, job.columns = columns, job.outputs = outputs, job.half = half;
    job.x_token = heads * size, job.x_head = size, job.y_token = heads * wide, job.y_head = wide, job.w_head = w_head;
    job.w_column = across ? inner : 1, job.w_output = across ? 1 : inner;
    run_head_products(job, narrow);
    for (int64_t row = 0; row < tokens * heads; ++row) {
        const int64_t head = row % heads, token = row / heads;
        for (int64_t o = 0; o < outputs; ++o) {
            double sum = 0, magnitude = 0;
            for (int64_t c = 0; c < columns; ++c) {
                const double part = x[row * size + c] * weight(head * w_head + c * job.w_column + o * job.w_output);
                sum += part, magnitude += std::fabs(part);
            }
            expect_close(y[row * wide + o], sum, FINE * (1 + magnitude), "head_products", row * wide + o);
        }
        for (int64_t i = 0; i < half; ++i) {
            const double c = job.cos[token * half + i], s = job.sin[token * half + i];
            const double left = x[row * size + columns + i], right = x[row * size + columns + half + i];
            expect_close(y[row * wide + outputs + i], left * c - right * s, 1e-5, "absorbed query", i);
            expect_close(y[row * wide + outputs + half + i], right * c + left * s, 1e-5, "absorbed query", half + i);
        }
    }
}

void check_latents(Random& random) {
    const int64_t tokens = random.between(1, 9), rank = random.between(1, 70), half = random.between(1, 20);
    const int64_t width = rank + 2 * half, x_token = width + random.between(0, 3), page_tokens = random.between(1, 6);
    const int64_t frames = tokens / page_tokens + 2;
    const std::vector<int64_t> slots = distinct(random, tokens, frames * page_tokens);
    const Array<float> x = normals(random, tokens * x_token), weight = normals(random, rank);
    const Array<float> angles = normals(random, 2 * tokens * half);
    Array<float> pages(frames * page_tokens * width);
    LatentsJob job{};
    job.x = x.data(), job.weight = weight.data(), job.cos = angles.data(), job.sin = angles.data() + tokens * half;
    job.pages = {reinterpret_cast<uint8_t*>(pages.data()), page_tokens * width, width, 0, nullptr, 0, 0, 0};
    job.type = PAGES_F32, job.slots = slots.data(), job.x_token = x_token, job.rank = rank, job.half = half;
    job.page_tokens = page_tokens, job.eps = 1e-6f;
    run_write_latents(job, tokens, frames * page_tokens);
    for (int64_t token = 0; token < tokens; ++token) {
        const float *own = x.data() + token * x_token, *row = pages.data() + slots[size_t(token)] * width;
        double squares = 0;
        for (int64_t i = 0; i < rank; ++i) squares += double(own[i]) * own[i];
        for (int64_t i = 0; i < rank; ++i) {
            const double want = own[i] / std::sqrt(squares / double(rank) + 1e-6) * weight[i];
            expect_close(row[i], want, 1e-5 * (1 + std::fabs(want)), "latent", i);
        }
        for (int64_t i = 0; i < half; ++i) {
            const double c = job.cos[token * half + i], s = job.sin[token * half + i];
            expect_close(row[rank + i], own[rank + i] * c - own[rank + half + i] * s, 1e-5, "latent key", i);
        }
    }
}

}  // namespace checks
