// Dense weights times rows of bfloat16 in tile registers: panels are read in place. Sums are float32 in the order of k,
// for any tile shape: a row has the same bits alone and in any batch, and as in packed_floats.hpp.
//
// Included inside a namespace per instruction set.

#if defined(__AMX_BF16__)

// Up to 32 rows times both packs of a unit, in the tiles of packed_tiles.hpp.
struct DenseBlock {
    const uint8_t* x;
    int64_t stride, rows;
    float* sums;  // rows of 32 floats

    static constexpr int64_t line = UNIT_OUTPUTS * sizeof(float);
    bool tall() const { return rows > 16; }

    // Fetch: weights come from memory, so later ones are prefetched.
    template <bool Fetch>
    void multiply(const uint8_t* left, const uint8_t* right, int64_t columns) const {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < columns; k += 32) {
            const uint8_t *first = left + 32 * k, *second = right + 32 * k;
            if constexpr (Fetch)
                for (int64_t i = 0; i < 1024; i += 64) {
                    __builtin_prefetch(first + AHEAD + i);
                    __builtin_prefetch(second + AHEAD + i);
                }
            multiply_upper(x + 2 * k, stride, first, second);
            multiply_lower(x + 2 * k, stride, rows);
        }
        _tile_stored(0, sums, line);
        _tile_stored(1, sums + 16, line);
        if (!tall()) return;
        _tile_stored(2, sums + 16 * UNIT_OUTPUTS, line);
        _tile_stored(3, sums + 16 * UNIT_OUTPUTS + 16, line);
    }
};

static void dense_tiles(const PackedJob& job, int64_t begin, int64_t end) {
    const int64_t columns = (job.inner + 31) / 32 * 32;
    alignas(64) float sums[2][32 * UNIT_OUTPUTS];
    int64_t shape = 0;
    for (int64_t number = begin; number < end; ++number) {
        const Unit unit = unit_at(job, number);
        for (int64_t row = 0; row < job.rows; row += 32) {
            const int64_t rows = job.rows - row < 32 ? job.rows - row : 32;
            if (shape != rows) _tile_loadconfig(&TILE_SHAPES.of[rows]);
            shape = rows;
            for (int64_t part = 0; part < unit.count; ++part) {
                const uint8_t *left = unit.pack(job, part, 0), *right = unit.pack(job, part, 1);
                const DenseBlock block{job.x.data + row * job.x.stride, job.x.stride, rows, sums[part]};
                if (row == 0)
                    block.multiply<true>(left, right, columns);
                else
                    block.multiply<false>(left, right, columns);
            }
            settle_memory();
            finish(job, unit, row, rows, FloatSums{sums[0], 32 * UNIT_OUTPUTS});
        }
    }
    _tile_release();
}

#else

static void dense_tiles(const PackedJob&, int64_t, int64_t) {}

#endif
