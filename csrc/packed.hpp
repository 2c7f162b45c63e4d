// Linear layers over packed weights. Included inside a namespace per instruction set.

// How many units from this one on are of the same part.
static inline int64_t units_alike(const PackedJob& job, int64_t number) {
    const Unit unit = unit_at(job, number);
    return units_of(unit.parts->outputs) - unit.number;
}

// Tiles take weights in blocks from so many rows on, measured; the fewer, the more widening a panel costs. Dense weights
// they read at the speed of memory already for one row.
static constexpr int64_t BLOCK_TILE_ROWS = 3;

static void packed_bfloats(const PackedJob& job, int64_t begin, int64_t end) {
    const Unit unit = unit_at(job, begin);
    int64_t dense = 0;
    for (int64_t part = 0; part < unit.count; ++part) dense += LAYOUTS[unit.parts[part].pack].dense();
    const bool tiles = TILE_ROWS > 0;
#if defined(BANKFULL_NEON) && defined(__ARM_FEATURE_BF16)
    if (dense == unit.count) return dense_bfmmla(job, begin, end);
#endif
    if (tiles && dense == unit.count) return dense_tiles(job, begin, end);
    if (tiles && dense == 0 && job.rows >= BLOCK_TILE_ROWS) return packed_tiles(job, begin, end);
    packed_floats(job, begin, end);
}

// Both parts of a gate are made in one way.
static bool is_mixed(const PackedJob& job, const Unit& unit) {
    int64_t mixed = 0;
    for (int64_t part = 0; part < unit.count; ++part) mixed += unit.parts[part].mixed != nullptr;
    return job.mixed.data && mixed == unit.count;
}

static void packed(const PackedJob& job, int64_t begin, int64_t end) {
    const bool codes = job.x.kind == Activations::Codes;
    if (codes && !job.mixed.data) return packed_codes(job, begin, end);
    while (begin < end) {
        const int64_t alike = units_alike(job, begin), stop = end - begin < alike ? end : begin + alike;
        if (is_mixed(job, unit_at(job, begin)))
            packed_mixed(job, begin, stop);
        else if (codes)
            packed_codes(job, begin, stop);
        else
            packed_bfloats(job, begin, stop);
        begin = stop;
    }
}
