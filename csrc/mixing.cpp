#include "mixing.hpp"

#include "isa.hpp"
#include "threads.hpp"

namespace bankfull {

int64_t mixed_bytes(int pack, int64_t outputs, int64_t inner) {
    const bool possible = kernels().mix_weights && !LAYOUTS[pack].dense() && inner % MIXED_COLUMNS == 0;
    return possible ? units_of(outputs) * 2 * mixed_pack_bytes(inner) : 0;
}

void mix_weights(int pack, const uint8_t* weight, uint8_t* mixed, int64_t outputs, int64_t inner) {
    const MixWeightsJob job{weight, pack, inner, mixed};
    parallel(units_of(outputs) * 2, 1, [](const void* p, int64_t begin, int64_t end) {
        kernels().mix_weights(*static_cast<const MixWeightsJob*>(p), begin, end);
    }, &job);
}

}  // namespace bankfull
