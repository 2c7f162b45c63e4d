// Argmax of scores. Included inside a namespace per instruction set.

// The lowest index among equals; -1 if a score is NaN or the maximum is not finite.
static Best best_of(const float* x, int64_t count) {
    const Lanes zero = Lanes::splat(0.0f);
    Lanes most = Lanes::splat(-__builtin_inff()), odd = zero;  // odd becomes nonzero or NaN if any score is not finite
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const Lanes each = Lanes::load(x + i);
        most = Lanes::larger(each, most);
        odd = odd + (each - each);
    }
    float highest = most.most(), rest = odd.sum();
    for (; i < count; ++i) {
        highest = x[i] > highest ? x[i] : highest;
        rest += x[i] - x[i];
    }
    if (rest != 0.0f) {  // NaN or infinity; -inf is allowed among finite scores
        for (int64_t j = 0; j < count; ++j)
            if (!(x[j] <= __FLT_MAX__)) return {x[j], -1};
        highest = x[0];
        for (int64_t j = 1; j < count; ++j) highest = x[j] > highest ? x[j] : highest;
        if (highest < -__FLT_MAX__) return {highest, -1};
    }
    for (int64_t j = 0; j < count; ++j)
        if (x[j] == highest) return {highest, j};
    return {highest, -1};
}
