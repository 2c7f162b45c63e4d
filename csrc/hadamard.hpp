// Hadamard-transformed int8 GEMM for many rows, with one scale per row and one per output, so that integers are summed
// over all of K: in tile registers, or by dot products without scales in between. Shared by every instruction set.
//
// A few columns of activations are a hundred times larger than others, and one scale per row would leave the others no
// precision. So each block of 64 columns is replaced by its Hadamard transform, for rows and weights alike: dot
// products stay the same (except for a factor of 64, which the weights' scales undo), and outliers are spread over the
// block.
//
// Rows are stored in blocks of sixteen: for each 64 columns the sixteen rows' codes, 64 bytes each; then sixteen float
// scales. Transformed weights are a copy beside the packed ones, one byte per weight. A pack of them: sixteen float
// scales, then its codes in quads of four consecutive k; lane o of a quad is the four codes of output o. Both layouts
// are tiles. Weights in int8 with one scale per output (PACK8R) are stored like that already: they are multiplied without
// a transform, and so are their rows.
#pragma once

#include <cstdint>

#include "packing.hpp"

namespace bankfull {

constexpr int64_t HADAMARD_COLUMNS = 64, HADAMARD_BLOCK = 16;

// Bytes per row, averaged over whole blocks.
constexpr int64_t hadamard_stride(int64_t columns) { return columns + int64_t(sizeof(float)); }
constexpr int64_t hadamard_pack_bytes(int64_t inner) { return PACK_OUTPUTS * hadamard_stride(inner); }

// Size of a transformed copy; 0 if this machine, or this K, has none.
int64_t hadamard_bytes(int pack, int64_t outputs, int64_t inner);
void hadamard_weights(int pack, const uint8_t* weight, uint8_t* hadamard, int64_t outputs, int64_t inner);

}  // namespace bankfull
