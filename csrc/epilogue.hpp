// Fused epilogue of a unit's sums: bias, gate, and output encoding.
// Included inside a namespace per instruction set.

// One unit of a job: the same outputs of one part, or of both parts of a gate.
struct Unit {
    const PackedPart* parts;
    int64_t count, number;  // of parts; index of the unit in its part

    const uint8_t* pack(const PackedJob& job, int64_t part, int64_t half) const {
        return parts[part].weight + (number * 2 + half) * layout_of(parts[part].pack).bytes(job.inner);
    }
};

static inline Unit unit_at(const PackedJob& job, int64_t number) {
    if (job.gate >= 0) return {job.parts, 2, number};
    const PackedPart* part = job.parts;
    for (; number >= units_of(part->outputs); ++part) number -= units_of(part->outputs);
    return {part, 1, number};
}

static inline Lanes gate_of(int function, Lanes x) {
    switch (function) {
        case SILU: return Silu::of(x, 0.0f);
        case GELU: return Gelu::of(x, 0.0f);
        case GELU_TANH: return GeluTanh::of(x, 0.0f);
        default: return Relu::of(x, 0.0f);
    }
}

// Sums as most GEMM kernels store them: for each part, rows of 32 floats; the second part starts `apart` floats later.
struct FloatSums {
    const float* data;
    int64_t apart;

    Lanes at(int64_t part, int64_t row, int64_t half) const {
        return Lanes::load(data + part * apart + row * UNIT_OUTPUTS + half * PACK_OUTPUTS);
    }
};

// The epilogue of a unit, created once; its rows are stored in batches.
template <class Sums>
class Epilogue {
    const PackedJob* job = nullptr;
    Unit unit{};
    Sums sums{};
    Lanes biases[2][2];

  public:
    Epilogue() = default;
    Epilogue(const PackedJob& of, const Unit& own, const Sums& found) : job(&of), unit(own), sums(found) {
        for (int64_t part = 0; part < unit.count; ++part)
            for (int64_t half = 0; half < 2; ++half) {
                const float* bias = unit.parts[part].bias;
                const int64_t at = unit.number * UNIT_OUTPUTS + half * 16, outputs = unit.parts->outputs;
                biases[part][half] = bias && at < outputs ? load_some(bias + at, outputs - at) : Lanes::splat(0.0f);
            }
    }

    // Rows [row, row + rows) of the job, whose sums start at `from`.
    void store(int64_t row, int64_t rows, int64_t from = 0) const {
        if (unit.count == 2)
            store_as<true>(row, rows, from);
        else
            store_as<false>(row, rows, from);
    }

  private:
    template <bool Gated>
    Lanes result(int64_t row, int64_t half) const {
        const Lanes first = sums.at(0, row, half) + biases[0][half];
        if constexpr (!Gated) return first;
        return gate_of(job->gate, first) * (sums.at(1, row, half) + biases[1][half]);
    }

    template <bool Gated>
    void store_as(int64_t row, int64_t rows, int64_t from) const {
        const int64_t first = unit.number * UNIT_OUTPUTS, outputs = unit.parts->outputs;
        const bool encoded = Gated && job->out.data;
        for (int64_t r = 0; r < rows; ++r) {
            const Lanes left = result<Gated>(from + r, 0), right = result<Gated>(from + r, 1);
            if (encoded) {
                uint8_t* out = job->out.data + (row + r) * job->out.stride;
                if (job->out.kind == Activations::Codes) {
                    encode_group(left, right, Codes(out, outputs), first);
                } else {
                    encode_tile(left, out, first);
                    encode_tile(right, out, first + 16);
                }
                continue;
            }
            float* y = unit.parts->y + (row + r) * unit.parts->y_stride + first;
            store_some(left, y, outputs - first);
            if (first + 16 < outputs) store_some(right, y + 16, outputs - first - 16);
        }
    }
};

template <class Sums>
static void finish(const PackedJob& job, const Unit& unit, int64_t row, int64_t rows, const Sums& sums) {
    Epilogue<Sums>(job, unit, sums).store(row, rows);
}

// Deferred stores: some rows at a time, while the matrix tiles compute the sums of the next block.
template <class Sums>
class DeferredStores {
    Epilogue<Sums> epilogue;
    int64_t row = 0, from = 0, rows = 0, pace = 0;

  public:
    // `times`: expected number of calls of advance().
    void begin(const Epilogue<Sums>& found, int64_t first, int64_t count, int64_t times) {
        epilogue = found, row = first, from = 0, rows = count;
        pace = (count + times - 1) / times;
    }
    void advance() {
        if (rows > 0) store(rows < pace ? rows : pace);
    }
    void flush() {
        if (rows > 0) store(rows);
    }

  private:
    void store(int64_t count) {
        epilogue.store(row, count, from);
        row += count, from += count, rows -= count;
    }
};
