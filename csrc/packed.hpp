// Linear layers over packed weights. Included inside a namespace per instruction set.

static void packed(const PackedJob& job, int64_t begin, int64_t end) {
#if defined(__AMX_INT8__)
    if (job.x.kind == Activations::Codes && job.rows > CODE_ROWS) return packed_groups::run(job, begin, end);
#endif
    if (job.x.kind == Activations::Codes) return packed_codes(job, begin, end);
    packed_tiles(job, begin, end);
}
