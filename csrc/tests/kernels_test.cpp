// Every kernel of every instruction set of this machine against plain loops in double precision, on random shapes.
//
//     kernels_test [ROUNDS [SEED]]
//
// A failure names the instruction set, the operation and the round; the same seed reproduces it.
#include "kernel_checks.hpp"
#include "threads.hpp"

namespace {

using namespace checks;

struct Operation {
    const char* name;
    void (*check)(Random&);
};

constexpr Operation OPERATIONS[] = {
    {"formats", check_formats},
    {"linear", check_linear},
    {"embedding", check_embedding},
    {"encode", check_encode},
    {"packed linear", check_packed_linear},
    {"Hadamard linear", check_hadamard_linear},
    {"best", check_best},
    {"norms", check_norms},
    {"pointwise", check_pointwise},
    {"rotate", check_rotate},
    {"intake", check_intake},
    {"fused intake", check_joined_intake},
    {"write", check_write},
    {"attention", check_attention_over_pages},
    {"head_products", check_head_products},
    {"write_latents", check_latents},
    {"causal_conv", check_conv},
    {"selective_scan", check_scan},
    {"ssd_scan", check_ssd},
    {"diagonal_scan", check_diagonal},
    {"gated_rms_norm", check_gated_norm},
    {"scale_columns", check_scale},
    {"gather_columns", check_gather},
    {"groups", check_groups},
};

}  // namespace

int main(int count, char** arguments) {
    const int64_t rounds = count > 1 ? std::atoll(arguments[1]) : 40;
    const uint64_t seed = count > 2 ? uint64_t(std::atoll(arguments[2])) : 1;
    for (const std::string& isa : available_isas()) {
        set_isa(isa);
        for (const Operation& operation : OPERATIONS)
            for (int64_t round = 0; round < rounds; ++round) {
                if (round % (rounds / 2 + 1) == 0) set_threads(round ? 3 : 1);
                Verdicts::all().begin(isa + ", " + operation.name + ", round " + std::to_string(round));
                Random random(seed * 1000003 + uint64_t(round) * 257 + uint64_t(&operation - OPERATIONS));
                operation.check(random);
            }
        std::printf("%s: %lld rounds\n", isa.c_str(), static_cast<long long>(rounds));
    }
    return Verdicts::all().report("kernels_test");
}
