// Packed weights of any form become mixed ones, see mixing.hpp. Whoever includes this has a mix_pack, a template over the
// forms. Included inside a namespace per instruction set.

static constexpr void (*MIX_PACK[PACKS])(const uint8_t*, int64_t, uint8_t*) = {
    mix_pack<PACK4>,   mix_pack<PACK4M>, mix_pack<PACK4K>, mix_pack<PACK4S>, mix_pack<PACK4SM>,
    mix_pack<PACK5>,   mix_pack<PACK5M>, mix_pack<PACK5K>, mix_pack<PACK6S>, mix_pack<PACK8>,
};

static void mix_weights(const MixWeightsJob& job, int64_t begin, int64_t end) {
    for (int64_t pack = begin; pack < end; ++pack)
        MIX_PACK[job.pack](job.weight + pack * LAYOUTS[job.pack].bytes(job.inner), job.inner,
                           job.mixed + pack * mixed_pack_bytes(job.inner));
}
