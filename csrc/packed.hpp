// Linear layers over packed weights. Included inside a namespace per instruction set.

// Number of consecutive units of the same part, starting at this one.
static inline int64_t units_alike(const PackedJob& job, int64_t number) {
    const Unit unit = unit_at(job, number);
    return units_of(unit.parts->outputs) - unit.number;
}

// Row count from which tiles multiply block-quantized weights, measured; with fewer rows, widening a panel costs more.
// Dense weights are read at memory speed even for one row.
static constexpr int64_t BLOCK_TILE_ROWS = 3;

static void packed_bfloats(const PackedJob& job, int64_t begin, int64_t end) {
    const Unit unit = unit_at(job, begin);
    int64_t dense = 0;
    for (int64_t part = 0; part < unit.count; ++part) dense += layout_of(unit.parts[part].pack).dense();
    const bool tiles = TILE_ROWS > 0;
#if defined(BANKFULL_NEON) && defined(__ARM_FEATURE_BF16)
    if (dense == unit.count) return dense_bfmmla(job, begin, end);
#endif
    if (tiles && dense == unit.count) return dense_tiles(job, begin, end);
    if (tiles && dense == 0 && job.rows >= BLOCK_TILE_ROWS) return packed_tiles(job, begin, end);
    packed_floats(job, begin, end);
}

// Both parts of a gate use the same method.
static bool uses_hadamard(const PackedJob& job, const Unit& unit) {
    int64_t hadamard = 0;
    for (int64_t part = 0; part < unit.count; ++part) hadamard += unit.parts[part].hadamard && unit.parts[part].plain() == job.plain;
    return job.hadamard.data && hadamard == unit.count;
}

static void packed(const PackedJob& job, int64_t begin, int64_t end) {
    const bool codes = job.x.kind == Activations::Codes;
    if (codes && !job.hadamard.data) return packed_codes(job, begin, end);
    while (begin < end) {
        const int64_t alike = units_alike(job, begin), stop = end - begin < alike ? end : begin + alike;
        if (uses_hadamard(job, unit_at(job, begin)))
            packed_hadamard(job, begin, stop);
        else if (codes)
            packed_codes(job, begin, stop);
        else
            packed_bfloats(job, begin, stop);
        begin = stop;
    }
}
