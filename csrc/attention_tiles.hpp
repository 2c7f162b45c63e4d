// Attention over pages of bfloat16, int8, fp8 or int4 in AMX tiles of sixteen rows and thirty-two bfloat16, for head sizes
// that are multiples of 32. Codes times their scales become bfloat16, one chunk at a time. Queries are rounded to
// bfloat16, to nearest even; softmax weights are computed in bfloat16; sums are float32. A row's total is the sum of
// the rounded weights, so that they add up to one, and a value shared by all keys passes unchanged.
//
// Chunks, masks and merging are those of attention.hpp, with the same guarantee: a row's bits are the same alone and in
// any batch. There are two variants, which agree bit for bit: every score, weight and sum is computed from the same
// numbers in the same order, only their positions differ.
//   few rows (attention_tiles_few.hpp):    lanes are keys. Keys are read from their pages, unless those hold codes;
//                                          values are interleaved in pairs.
//   many rows (attention_tiles_many.hpp):  lanes are rows, so that no maximum or sum crosses lanes. Keys and transposed
//                                          values are copied once and used by every sixteen rows.
// Both compute scores as K Q^T. Then few rows compute P V; many rows V^T P^T, where P^T has the layout of the scores.
//
// A masked key may contain anything, even NaN: its score is overwritten before use. Its value is multiplied by 0, so a
// value that no row sees is replaced by zeros, and if a value that only some queries of an item see is not finite, the
// queries are processed one by one. (Queries of a tree share only chunks that all of them see.)
//
// Included inside a namespace per instruction set.

#if defined(__AMX_BF16__)

namespace attention_tiles {

#include "attention_tiles_shared.hpp"
#include "attention_tiles_ahead.hpp"
#include "attention_tiles_few.hpp"
#include "attention_tiles_many.hpp"

// Whether the values that only some queries see are finite: then weights of 0 mask them for the others.
template <class E>
static bool hidden_values_are_finite(const Rows& rows, const AttentionItem& item) {
    const AttentionJob& job = rows.job;
    const int64_t last = rows.count - 1, far = INT64_MAX;
    const int64_t ends[2][2] = {{rows.to(0, far), rows.to(last, far)}, {rows.from(0, 0), rows.from(last, 0)}};
    __m512i largest = _mm512_setzero_si512();
    for (const auto& range : ends)
        for (int64_t from = range[0]; from < range[1]; from += CHUNK) {
            const int64_t to = from + CHUNK < range[1] ? from + CHUNK : range[1];
            if constexpr (has_codes<E>) {
                const int64_t floats = (to - from) * scale_floats<E>(job.values);
                float* scales = scratch(floats);
                widen_scales<E>(job, job.v, item, 1, job.values, from, to, scales);
                for (int64_t i = 0; i < floats; ++i)
                    if (!(scales[i] <= LARGEST_SCALE && scales[i] >= -LARGEST_SCALE)) return false;
            } else {
                const uint8_t* at[CHUNK];
                locate<E>(job, job.v, item, from, to, at);
                for (int64_t i = 0; i < to - from; ++i)
                    for (int64_t byte = 0; byte < job.values * 2; byte += LINE)
                        largest = _mm512_max_epu16(
                            largest, _mm512_and_si512(load_line(at[i] + byte), _mm512_set1_epi16(0x7fff)));
            }
        }
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0;
}

template <class E>
static void attend_bundle(const AttentionJob& job, const Bundle& bundle, Ahead& ahead) {
    const Rows rows(job, *bundle.items);
    bool finite = true;
    for (int64_t head = 0; head < bundle.heads && rows.queries > 1 && !rows.paths; ++head)
        finite = finite && hidden_values_are_finite<E>(rows, bundle.items[head]);
    if (finite) return rows.count <= FEW_ROWS ? attend_few<E>(job, bundle, ahead) : attend_many<E>(job, *bundle.items);
    for (int64_t head = 0; head < bundle.heads; ++head) {
        const AttentionItem& item = bundle.items[head];
        for (int64_t i = 0; i < item.queries; ++i) {
            AttentionItem one = item;
            one.first += i;
            one.queries = 1;
            attend_bundle<E>(job, {&one, 1}, ahead);
        }
    }
}

// Not for lists of keys, and not for windows of partial attention, whose rows may see nothing between rows that see keys.
static bool fits(const AttentionJob& job) {
    return job.size % WIDE == 0 && job.values % WIDE == 0 && !job.mask.given() && !job.listed && !job.begins;
}

static int64_t rows(const AttentionJob& job) { return fits(job) ? MANY_ROWS : attention_rows(job); }

// E: element type of the pages.
template <class E>
static void attend(const AttentionJob& job, int64_t begin, int64_t end) {
    if (!fits(job)) return BANKFULL_ISA_NAME::attend<E>(job, begin, end);
    _tile_loadconfig(&SHAPES);
    Ahead ahead;
    const int64_t groups = job.heads / job.kv_heads;
    for (int64_t i = begin; i < end;) {
        Bundle bundle{job.items + i, 1};
        if (bundle.items->queries * groups <= FEW_ROWS)
            while (i + bundle.heads < end && Bundle::joins(*bundle.items, bundle.items[bundle.heads], bundle.heads))
                ++bundle.heads;
        attend_bundle<E>(job, bundle, ahead);
        i += bundle.heads;
    }
    _tile_release();
}

}  // namespace attention_tiles

#endif
