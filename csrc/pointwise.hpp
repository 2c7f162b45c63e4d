// Activations, alone or as the gate of a product. Included inside a namespace per instruction set.

struct Silu {
    static Lanes of(Lanes x, float) {
        return x / (Lanes::splat(1.0f) + exponential(Lanes::splat(0.0f) - x));
    }
};

// x * Phi(x), Phi the normal CDF. The tail is half of erfc(|x| / sqrt 2), which keeps its precision.
struct Gelu {
    static Lanes of(Lanes x, float) {
        const Lanes zero = Lanes::splat(0.0f), one = Lanes::splat(1.0f);
        const Lanes size = Lanes::below(x, zero, zero - x, x);
        const Lanes other = Lanes::splat(0.5f) * error_complement(size * Lanes::splat(0.70710678f));
        return x * Lanes::below(x, zero, other, one - other);
    }
};

// x (1 + tanh u) / 2 = x / (1 + exp(-2 u)): avoids the cancellation of 1 + tanh.
struct GeluTanh {
    static Lanes of(Lanes x, float) {
        const Lanes cubic = x + Lanes::splat(0.044715f) * (x * x * x);
        return x / (Lanes::splat(1.0f) + exponential(Lanes::splat(-1.5957691216f) * cubic));
    }
};

struct Relu {
    static Lanes of(Lanes x, float) { return Lanes::larger(Lanes::splat(0.0f), x); }
};

struct Softplus {
    static Lanes of(Lanes x, float) {
        const Lanes zero = Lanes::splat(0.0f), negative = zero - x;
        const Lanes small = exponential(Lanes::below(x, zero, x, negative));
        return Lanes::larger(zero, x) + log_one_plus(small);
    }
};

struct Sigmoid {
    static Lanes of(Lanes x, float) {
        return Lanes::splat(1.0f) / (Lanes::splat(1.0f) + exponential(Lanes::splat(0.0f) - x));
    }
};

struct SoftCap {
    static Lanes of(Lanes x, float cap) {
        return Lanes::splat(cap) * hyperbolic_tangent(x / Lanes::splat(cap));
    }
};

template <class Function>
static void pointwise(const PointwiseJob& job, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 16) {
        const int64_t count = end - i;
        Lanes y = Function::of(load_some(job.x + i, count), job.parameter);
        if (job.factor) y = y * load_some(job.factor + i, count);
        store_some(y, job.y + i, count);
    }
}

static void plus(const PointwiseJob& job, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) job.y[i] = job.x[i] + job.factor[i];
}
