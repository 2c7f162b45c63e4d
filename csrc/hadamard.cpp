#include "hadamard.hpp"

#include "isa.hpp"
#include "threads.hpp"

namespace bankfull {

int64_t hadamard_bytes(int pack, int64_t outputs, int64_t inner) {
    const bool possible = kernels().hadamard_weights && !layout_of(pack).dense() && inner % HADAMARD_COLUMNS == 0;
    return possible ? units_of(outputs) * 2 * hadamard_pack_bytes(inner) : 0;
}

void hadamard_weights(int pack, const uint8_t* weight, uint8_t* hadamard, int64_t outputs, int64_t inner) {
    const HadamardWeightsJob job{weight, pack, inner, hadamard};
    parallel(units_of(outputs) * 2, 1, [](const void* p, int64_t begin, int64_t end) {
        kernels().hadamard_weights(*static_cast<const HadamardWeightsJob*>(p), begin, end);
    }, &job);
}

}  // namespace bankfull
