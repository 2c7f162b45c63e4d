static void packed(const PackedJob&, int64_t, int64_t) {}
