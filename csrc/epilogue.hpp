// What happens to the sums of a unit: bias, gate, and the form in which they leave.
// Included inside a namespace per instruction set.

// One unit of a job: the same outputs of one part, or of both parts of a gate.
struct Unit {
    const PackedPart* parts;
    int64_t count, number;  // of parts; the unit's place in its part

    const uint8_t* pack(const PackedJob& job, int64_t part, int64_t half) const {
        return parts[part].weight + (number * 2 + half) * LAYOUTS[parts[part].pack].bytes(job.inner);
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
        case GELU_TANH: return GeluTanh::of(x, 0.0f);
        default: return Relu::of(x, 0.0f);
    }
}

// Sums as most products leave them: for each part, rows of 32 floats; the second part's begin `apart` floats behind.
struct FloatSums {
    const float* data;
    int64_t apart;

    Lanes at(int64_t part, int64_t row, int64_t half) const {
        return Lanes::load(data + part * apart + row * UNIT_OUTPUTS + half * PACK_OUTPUTS);
    }
};

// Rows [row, row + rows) of a job, whose sums are those from `from` on.
template <class Sums>
static void finish(const PackedJob& job, const Unit& unit, int64_t row, int64_t rows, const Sums& sums, int64_t from = 0) {
    const int64_t first = unit.number * UNIT_OUTPUTS, outputs = unit.parts->outputs;
    Lanes biases[2][2];
    for (int64_t part = 0; part < unit.count; ++part)
        for (int64_t half = 0; half < 2; ++half) {
            const float* bias = unit.parts[part].bias;
            const int64_t at = first + half * 16;
            biases[part][half] = bias && at < outputs ? load_some(bias + at, outputs - at) : Lanes::splat(0.0f);
        }
    for (int64_t r = 0; r < rows; ++r) {
        Lanes results[2];
        for (int64_t half = 0; half < 2; ++half) {
            results[half] = sums.at(0, from + r, half) + biases[0][half];
            if (unit.count == 2) {
                const Lanes factor = sums.at(1, from + r, half) + biases[1][half];
                results[half] = gate_of(job.gate, results[half]) * factor;
            }
        }
        if (job.gate >= 0 && job.out.data) {
            uint8_t* out = job.out.data + (row + r) * job.out.stride;
            if (job.out.kind == Activations::Codes) {
                encode_group(results[0], results[1], Codes(out, outputs), first);
            } else {
                encode_tile(results[0], out, first);
                encode_tile(results[1], out, first + 16);
            }
            continue;
        }
        float* y = unit.parts->y + (row + r) * unit.parts->y_stride + first;
        store_some(results[0], y, outputs - first);
        if (first + 16 < outputs) store_some(results[1], y + 16, outputs - first - 16);
    }
}

// Sums that are complete, on their way out: some rows at a time, while tiles make those of the next block.
template <class Sums>
class Leaving {
    const PackedJob& job;
    Unit unit{};
    int64_t row = 0, from = 0, rows = 0, pace = 0;
    Sums sums{};

  public:
    explicit Leaving(const PackedJob& of) : job(of) {}

    // `times`: how often there will be an opportunity.
    void begin(const Unit& of, int64_t first, int64_t count, const Sums& found, int64_t times) {
        unit = of, row = first, from = 0, rows = count, sums = found;
        pace = (count + times - 1) / times;
    }
    void some() {
        if (rows > 0) leave(rows < pace ? rows : pace);
    }
    void rest() {
        if (rows > 0) leave(rows);
    }

  private:
    void leave(int64_t count) {
        finish(job, unit, row, count, sums, from);
        row += count, from += count, rows -= count;
    }
};
