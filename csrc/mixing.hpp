// Mixed columns: how many rows are multiplied in int8 with one scale for each row and one for each output, so that integers
// are summed over all of K: in tile registers, or by dot products without scales in between. Plain facts, shared by every
// instruction set.
//
// A few columns of activations are a hundred times as large as others, and one scale for a row would leave the others no
// digits. So each 64 columns are replaced by their 64 sums with signs of a Hadamard matrix, of rows and weights alike:
// products stay what they were (but for a factor of 64, which weights' scales take back), and every sum has its share
// of what was large.
//
// Rows lie in blocks of sixteen: for each 64 columns the sixteen rows' codes, 64 bytes each; then sixteen float scales.
// Mixed weights are a copy beside the packed ones, a byte for each. A pack of them: sixteen float scales, then its codes
// in quads of four consecutive k; lane o of a quad is the four codes of output o. Both are tiles as they lie.
#pragma once

#include <cstdint>

#include "packing.hpp"

namespace bankfull {

constexpr int64_t MIXED_COLUMNS = 64, MIXED_BLOCK = 16;

// Bytes from one row to the next, counted over whole blocks.
constexpr int64_t mixed_stride(int64_t columns) { return columns + int64_t(sizeof(float)); }
constexpr int64_t mixed_pack_bytes(int64_t inner) { return PACK_OUTPUTS * mixed_stride(inner); }

// How large a mixed copy is; 0: this machine, or this K, has none.
int64_t mixed_bytes(int pack, int64_t outputs, int64_t inner);
void mix_weights(int pack, const uint8_t* weight, uint8_t* mixed, int64_t outputs, int64_t inner);

}  // namespace bankfull
