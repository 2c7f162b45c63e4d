// Linear layers over packed weights. Included inside a namespace per instruction set.

static void packed(const PackedJob& job, int64_t begin, int64_t end) {
    if (job.x.kind == Activations::Codes) return packed_codes(job, begin, end);
    packed_tiles(job, begin, end);
}
