// Transcendental functions on lanes, accurate to about one ulp. Remainders run on padded lanes, so an element's
// position never affects its bits. Coefficients are minimax fits of the function named beside them.
//
// Included inside a namespace per instruction set.

// c[0] + c[1] x + c[2] x^2 + ...
template <int N>
static inline Lanes polynomial(Lanes x, const float (&c)[N]) {
    Lanes sum = Lanes::splat(c[N - 1]);
    for (int i = N - 2; i >= 0; --i) {
        Lanes next = Lanes::splat(c[i]);
        next.add_product(sum, x);
        sum = next;
    }
    return sum;
}

// Always inlined: sixteen lanes may be four registers, which a call would pass through memory.
__attribute__((always_inline)) static inline Lanes exponential(Lanes x) {
    // Beyond these bounds the result is 0 or infinity anyway; within them the exponent fits two factors.
    x = Lanes::smaller(Lanes::splat(89.0f), Lanes::larger(Lanes::splat(-105.0f), x));
    const Lanes shift = Lanes::splat(0x1.8p23f);  // adding it rounds to an integer
    const Lanes n = (x * Lanes::splat(0x1.715476p0f) + shift) - shift;
    Lanes r = x;
    r.add_product(n, Lanes::splat(-0.693359375f));  // few bits: exact even without FMA
    r.add_product(n, Lanes::splat(0x1.bd0106p-13f));
    static constexpr float tail[] = {0x1.fffffcp-2f, 0x1.555492p-3f, 0x1.5558f2p-5f, 0x1.1239e4p-7f, 0x1.6a2430p-10f};
    Lanes p = r;  // exp(r) = 1 + r + r^2 tail(r)
    p.add_product(r * r, polynomial(r, tail));
    p = p + Lanes::splat(1.0f);
    const Lanes half = (n * Lanes::splat(0.5f) + shift) - shift;
    return p * half.power_of_two() * (n - half).power_of_two();
}

static inline Lanes hyperbolic_tangent(Lanes x) {
    const Lanes zero = Lanes::splat(0.0f), one = Lanes::splat(1.0f), two = Lanes::splat(2.0f);
    const Lanes size = Lanes::below(x, zero, zero - x, x);
    static constexpr float tail[] = {-0x1.555532p-2f, 0x1.110726p-3f, -0x1.b83c58p-5f, 0x1.522692p-6f, -0x1.75e1a8p-8f};
    const Lanes square = x * x;
    Lanes small = x;  // tanh(x) = x + x^3 tail(x^2)
    small.add_product(x * square, polynomial(square, tail));
    const Lanes large = one - two / (exponential(two * size) + one);
    return Lanes::below(size, Lanes::splat(0.625f), small, Lanes::below(x, zero, zero - large, large));
}

// log(1 + u) for u in [0, 1]: 2 atanh(s) = 2 (s + s^3 tail(s^2)) with s = u / (2 + u).
static inline Lanes log_one_plus(Lanes u) {
    static constexpr float tail[] = {0x1.555558p-2f, 0x1.9996a8p-3f, 0x1.250972p-3f, 0x1.b6d6a2p-4f, 0x1.f1aee8p-4f};
    const Lanes s = u / (u + Lanes::splat(2.0f)), square = s * s;
    Lanes sum = s;
    sum.add_product(s * square, polynomial(square, tail));
    return sum + sum;
}

// erfc(x) for x >= 0: t exp(-x^2) tail(t) with t = 1 / (1 + 0.35 x).
static inline Lanes error_complement(Lanes x) {
    static constexpr float tail[] = {0x1.946f22p-3f, 0x1.93f92p-3f,  0x1.7ef876p-3f,  0x1.3de956p-3f, 0x1.1412e6p-3f,
                                     0x1.b720b8p-4f, -0x1.a34ebap-5f, 0x1.969c24p-3f, -0x1.53f3ecp-3f, 0x1.44f892p-5f};
    const Lanes zero = Lanes::splat(0.0f), one = Lanes::splat(1.0f);
    x = Lanes::smaller(Lanes::splat(11.0f), x);  // where erfc is 0; NaN passes
    Lanes below = one;
    below.add_product(x, Lanes::splat(0.35f));
    const Lanes t = one / below;
    return t * polynomial(t, tail) * exponential(zero - x * x);
}
