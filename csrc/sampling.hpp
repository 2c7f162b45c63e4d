// The arithmetic of sampling; what is done with it is in sampling.cpp. Included inside a namespace per instruction set.

// Scores over the highest, divided by the temperature, and their weights: exp in fixed point with 40 bits.
static void weigh(const float* logits, int64_t vocab, float highest, float temperature, float* scores, int64_t* weights) {
    const Lanes top = Lanes::splat(highest), heat = Lanes::splat(temperature);
    for (int64_t i = 0; i < vocab; i += 16) {
        const Lanes score = (load_some(logits + i, vocab - i) - top) / heat;
        float each[16], power[16];
        score.store(each);
        exponential(score).store(power);
        const int64_t count = vocab - i < 16 ? vocab - i : 16;
        for (int64_t j = 0; j < count; ++j) {
            scores[i + j] = each[j];
            weights[i + j] = int64_t(power[j] * 0x1p40f);
        }
    }
}
