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

// Sums of rows [row, row + rows): for each part, rows of 32 floats; the second part's begin `apart` floats behind.
static void finish(const PackedJob& job, const Unit& unit, int64_t row, int64_t rows, const float* sums,
                   int64_t apart) {
    const int64_t first = unit.number * UNIT_OUTPUTS, outputs = unit.parts->outputs;
    Lanes biases[2][2];
    for (int64_t part = 0; part < unit.count; ++part)
        for (int64_t half = 0; half < 2; ++half) {
            const float* bias = unit.parts[part].bias;
            const int64_t at = first + half * 16;
            biases[part][half] = bias && at < outputs ? load_some(bias + at, outputs - at) : Lanes::splat(0.0f);
        }
    for (int64_t r = 0; r < rows; ++r, sums += UNIT_OUTPUTS) {
        Lanes results[2];
        for (int64_t half = 0; half < 2; ++half) {
            results[half] = Lanes::load(sums + half * 16) + biases[0][half];
            if (unit.count == 2) {
                const Lanes factor = Lanes::load(sums + apart + half * 16) + biases[1][half];
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
