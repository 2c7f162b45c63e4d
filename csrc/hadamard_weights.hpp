// Hadamard transform of packed weights of any format, see hadamard.hpp. The including file defines the template hadamard_pack.
// Included inside a namespace per instruction set.

static constexpr void (*HADAMARD_PACK[PACKS])(const PackLayout&, const uint8_t*, int64_t, uint8_t*) = {
    hadamard_pack<PACK4>,   hadamard_pack<PACK4M>, hadamard_pack<PACK4K>, hadamard_pack<PACK4S>, hadamard_pack<PACK4SM>,
    hadamard_pack<PACK5>,   hadamard_pack<PACK5M>, hadamard_pack<PACK5K>, hadamard_pack<PACK6S>, hadamard_pack<PACK8>,
    hadamard_pack<PACK4Z>,  hadamard_pack<PACK3>,  hadamard_pack<PACK2>,  hadamard_pack<PACK4F>, hadamard_pack<PACK8R>,
};

static void hadamard_weights(const HadamardWeightsJob& job, int64_t begin, int64_t end) {
    const PackLayout layout = layout_of(job.pack);
    for (int64_t pack = begin; pack < end; ++pack)
        HADAMARD_PACK[kind_of(job.pack)](layout, job.weight + pack * layout.bytes(job.inner), job.inner,
                           job.hadamard + pack * hadamard_pack_bytes(job.inner));
}
