// Compiled once per instruction set, which BANKFULL_ISA_NAME names: the set's kernel table.
#include <cstddef>

#include "kernels.hpp"
#include "hadamard.hpp"
#include "packing.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(BANKFULL_NEON)
#include <arm_neon.h>
#endif

#include "threads.hpp"

namespace bankfull::BANKFULL_ISA_NAME {

#include "lanes.hpp"
#include "best.hpp"
#include "blocks.hpp"
#include "linear.hpp"
#include "activations.hpp"
#include "norm.hpp"
#include "math.hpp"
#include "pointwise.hpp"
#include "dots.hpp"
#include "packs.hpp"
#include "epilogue.hpp"
#include "packed_codes.hpp"
#include "packed_floats.hpp"
#include "packed_tiles.hpp"
#include "dense_tiles.hpp"
#include "dense_bfmmla.hpp"
#include "hadamard_tiles.hpp"
#include "packed.hpp"
#include "sampling.hpp"
#include "race.hpp"
#include "rope.hpp"
#include "intake.hpp"
#include "attention.hpp"
#include "attention_tiles.hpp"
#include "latent.hpp"
#include "recurrent.hpp"
#include "linear_attention.hpp"
#include "delta.hpp"
#include "ssd.hpp"
#include "ceilings.hpp"

template <class F>
static void dequantize(const uint8_t* blocks, float* out, int64_t count) {
    for (int64_t i = 0; i < count; ++i) F::decode(blocks + i * F::bytes, out + i * F::block);
}

template <class F>
static void embedding(const EmbeddingJob& job, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
        float* y = job.y + token * job.columns;
        dequantize<F>(job.table + job.ids[token] * job.row_bytes, y, job.columns / F::block);
        if (job.scale != 1.0f)
            for (int64_t i = 0; i < job.columns; ++i) y[i] *= job.scale;
    }
}

template <class F>
static constexpr void offer(Kernels& table, Format format, const char* name) {
    table.facts[format] = {name, F::block, F::bytes};
    table.linear[format] = linear<F>;
    table.dequantize[format] = dequantize<F>;
    table.embedding[format] = embedding<F>;
}

// Pages of sixteen bits or fewer run in tiles where there are tiles.
static constexpr void offer_pages(Kernels& table) {
#if defined(__AMX_BF16__)
    using attention_tiles::attend;
    constexpr auto rows = attention_tiles::rows;
#else
    constexpr auto rows = attention_rows;
#endif
    table.attention[PAGES_BF16] = attend<BFloat16>;
    table.attention[PAGES_INT8] = attend<Int8>;
    table.attention[PAGES_FP8] = attend<Float8>;
    table.attention[PAGES_INT4] = attend<Int4>;
    for (int type = PAGES_BF16; type < PAGE_TYPES; ++type) table.attention_rows[type] = rows;
}

static constexpr Kernels build() {
    Kernels table{};
    offer<AsF32>(table, F32, "f32");
    offer<AsF16>(table, F16, "f16");
    offer<AsBF16>(table, BF16, "bf16");
    offer<AsQ4_0>(table, Q4_0, "q4_0");
    offer<AsQ4_1>(table, Q4_1, "q4_1");
    offer<AsQ5_0>(table, Q5_0, "q5_0");
    offer<AsQ5_1>(table, Q5_1, "q5_1");
    offer<AsQ8_0>(table, Q8_0, "q8_0");
    offer<AsQ2_K>(table, Q2_K, "q2_k");
    offer<AsQ3_K>(table, Q3_K, "q3_k");
    offer<AsQ4_K>(table, Q4_K, "q4_k");
    offer<AsQ5_K>(table, Q5_K, "q5_k");
    offer<AsQ6_K>(table, Q6_K, "q6_k");
    offer_packs(table);
    table.tile_rows = TILE_ROWS;
    table.packed = packed;
    table.encode = encode;
    offer_hadamard(table);
    table.best_of = best_of;
    table.block_maxima = block_maxima;
    table.collect = collect;
    table.weigh = weigh;
    table.block_weights = block_weights;
    table.contenders = contenders;
    table.words_of = words_of;
    table.rms_norm = rms_norm;
    table.layer_norm = layer_norm;
    table.pointwise[SILU] = pointwise<Silu>;
    table.pointwise[GELU] = pointwise<Gelu>;
    table.pointwise[GELU_TANH] = pointwise<GeluTanh>;
    table.pointwise[RELU] = pointwise<Relu>;
    table.pointwise[SOFTPLUS] = pointwise<Softplus>;
    table.pointwise[SIGMOID] = pointwise<Sigmoid>;
    table.pointwise[SOFT_CAP] = pointwise<SoftCap>;
    table.pointwise[PLUS] = plus;
    table.rotate = rotate;
    table.intake = intake;
    table.intake_head = intake_head;
    table.attention[PAGES_F32] = attend<Float32>;
    table.attention_rows[PAGES_F32] = attention_rows;
    offer_pages(table);
    table.merge = merge_split;
    table.head_products[0] = head_products<Float32>;
    table.head_products[1] = head_products<BFloat16>;
    table.write_latents = write_latents;
    table.causal_conv = causal_conv;
    table.selective_scan = selective_scan;
    table.linear_attention = linear_attention;
    table.delta_rule = delta_rule;
    table.taylor_features = taylor_features;
    table.ssd_scan = ssd_scan;
    table.gated_rms_norm = gated_rms_norm;
    table.diagonal_scan = diagonal_scan;
    table.scale_columns = scale_columns;
    offer_ceilings(table);
    return table;
}

static constexpr Kernels TABLE = build();

}  // namespace bankfull::BANKFULL_ISA_NAME

#define CONCAT(a, b) a##b
#define FUNCTION(isa) CONCAT(kernels_, isa)

const bankfull::Kernels& bankfull::FUNCTION(BANKFULL_ISA_NAME)() { return BANKFULL_ISA_NAME::TABLE; }
