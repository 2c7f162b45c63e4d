static constexpr void offer_packs(Kernels&) {}
