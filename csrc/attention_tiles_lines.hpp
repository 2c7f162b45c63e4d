// Lines: thirty-two numbers of a page as bfloat16, for any type of pages. Codes times their scale are rounded.
//
// Included inside attention_tiles_shared.hpp.

template <class E>
static constexpr bool has_codes = E::scaled || E::paired;

// Floats that widen_scales leaves for a head.
template <class E>
static constexpr int64_t scale_floats(int64_t size) { return E::paired ? size / WIDE : 2; }

// Tile products leave one port for float arithmetic, so codes become bfloat16 with little of it: products of codes and
// scales are rounded half away from zero, by an integer addition before their upper words are taken.
constexpr int32_t HALF = 0x8000;
constexpr float EXCESS = 32896.0f;

// The head at `head`. of: its line `number`. `scales`: those of the head, from widen_scales.
// ordered: a line of bfloat16 in the order in which `of` returns one.
// place: where unpacking the low and the high words of two lines leaves value i of sixteen.
template <class E>
struct Lines {
    const uint8_t* head;
    __m512 scale;

    Lines(const uint8_t* at, const float* scales) : head(at) {
        if constexpr (has_codes<E>) scale = _mm512_set1_ps(scales[0]);
    }
    __m512i of(int64_t number) const {
        if constexpr (!has_codes<E>) return load_line(head + number * LINE);
        const uint8_t* codes = head + number * WIDE;
        return narrow(_mm512_mul_ps(E::load(codes).v, scale), _mm512_mul_ps(E::load(codes + SIDE).v, scale));
    }
    static __m512i ordered(__m512i line) { return line; }
    static constexpr int64_t place(int64_t i, bool high) { return i / 4 * 8 + i % 4 + (high ? 4 : 0); }
};

// A code plus 128 is the second byte of a float from 2^15 on. Scales have no more bits than are needed for an exact product
// with the excess over the code.
template <>
struct Lines<Int8> {
    const uint8_t* head;
    __m512 scale, excess;

    Lines(const uint8_t* at, const float* scales)
        : head(at), scale(_mm512_set1_ps(scales[0])), excess(_mm512_set1_ps(scales[1])) {}
    __m512i of(int64_t number) const {
        alignas(64) static constexpr uint8_t EVEN[64] = {
            0,  0,  0, 0, 0, 2,  0, 0, 0, 4,  0, 0, 0, 6,  0, 0, 0, 8,  0, 0, 0, 10, 0, 0, 0, 12, 0, 0, 0, 14, 0, 0,
            0,  16, 0, 0, 0, 18, 0, 0, 0, 20, 0, 0, 0, 22, 0, 0, 0, 24, 0, 0, 0, 26, 0, 0, 0, 28, 0, 0, 0, 30, 0, 0};
        constexpr __mmask64 second_bytes = 0x2222222222222222;
        const __m256i bytes = _mm256_xor_si256(raw(head + number * WIDE), _mm256_set1_epi8(int8_t(0x80)));
        const __m512i codes = _mm512_castsi256_si512(bytes), base = _mm512_set1_epi32(0x47000000);
        const __m512i evens = _mm512_load_si512(EVEN), odds = _mm512_add_epi8(evens, _mm512_set1_epi8(1));
        const __m512i even = _mm512_mask_permutexvar_epi8(base, second_bytes, evens, codes);
        const __m512i odd = _mm512_mask_permutexvar_epi8(base, second_bytes, odds, codes);
        const __m512i half = _mm512_set1_epi32(HALF);
        const __m512i low = product(even, half), high = product(odd, half);
        return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
    }
    __m512i product(__m512i codes, __m512i half) const {
        return _mm512_add_epi32(_mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(codes), scale, excess)), half);
    }
    static __m512i ordered(__m512i line) { return line; }
    static constexpr int64_t place(int64_t i, bool high) { return i / 4 * 8 + i % 4 + (high ? 4 : 0); }
};

// A line is a group: its codes are looked up in a table of their sixteen numbers. Sixteen bytes are in every quarter of a
// register, so that eight bits from any bit of eight bytes can be selected: even runs of four words are from the first
// eight bytes, odd ones from the last.
template <>
struct Lines<Int4> {
    const uint8_t* head;
    const float* scales;

    Lines(const uint8_t* at, const float* scales_of_groups) : head(at), scales(scales_of_groups) {}
    __m512i of(int64_t number) const {
        alignas(64) static constexpr float LEVELS[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
        // One bit before each code: twice the code is the number of a float's lower word.
        alignas(64) static constexpr uint8_t CODES[64] = {
            63, 0, 3,  0, 7,  0, 11, 0, 63, 0, 3,  0, 7,  0, 11, 0, 15, 0, 19, 0, 23, 0, 27, 0, 15, 0, 19, 0, 23, 0, 27, 0,
            31, 0, 35, 0, 39, 0, 43, 0, 31, 0, 35, 0, 39, 0, 43, 0, 47, 0, 51, 0, 55, 0, 59, 0, 47, 0, 51, 0, 55, 0, 59, 0};
        const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(head + number * SIDE)));
        const __m512i codes = _mm512_multishift_epi64_epi8(_mm512_load_si512(CODES), bytes);
        const __m512 numbers = _mm512_mul_ps(_mm512_load_ps(LEVELS), _mm512_set1_ps(scales[number]));
        const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(numbers), _mm512_set1_epi32(HALF));
        return _mm512_permutexvar_epi16(_mm512_or_si512(codes, _mm512_set1_epi16(1)), rounded);
    }
    static __m512i ordered(__m512i line) {
        return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), line);
    }
    static constexpr int64_t place(int64_t i, bool high) { return i + (high ? SIDE : 0); }
};

// Sixteen floats and their masked neighbours as a float of each in turn.
static inline void store_pairs(float* to, __m512 first, __m512 second, int64_t count) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const uint32_t some = count < SIDE ? (uint32_t(1) << 2 * count) - 1 : ~uint32_t(0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    _mm512_mask_storeu_ps(to, __mmask16(some), _mm512_permutex2var_ps(first, low, second));
    if (count > SIDE / 2)
        _mm512_mask_storeu_ps(to + SIDE, __mmask16(some >> 16), _mm512_permutex2var_ps(first, high, second));
}

// `count` adjacent scales as Lines take them, up to sixteen. One of int8 and fp8 is followed by a second float.
template <class E>
static inline void widen_some(const uint8_t* scales, int64_t count, float* to) {
    const __mmask16 some = __mmask16((1 << count) - 1);
    if constexpr (E::paired) {
        const __m512i words = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, scales));
        _mm512_mask_storeu_ps(to, some, _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)));
    } else if constexpr (E::unit != 1.0f) {
        const __m512 wide = _mm512_mul_ps(_mm512_maskz_loadu_ps(some, scales), _mm512_set1_ps(E::unit));
        store_pairs(to, wide, wide, count);
    } else {
        const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(some, scales));
        const __m512 wide = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int32_t(0xfffffe00))));
        store_pairs(to, wide, _mm512_mul_ps(wide, _mm512_set1_ps(-EXCESS)), count);
    }
}

// Scales of `heads` heads of `size` numbers at the positions [from, to): those of a position are adjacent, head by head.
template <class E>
static void widen_scales(const AttentionJob& job, const Pages& pages, const AttentionItem& item, int64_t heads,
                         int64_t size, int64_t from, int64_t to, float* scales) {
    const Pages numbers{reinterpret_cast<uint8_t*>(pages.scales), pages.scale_frame, pages.scale_token, pages.scale_head,
                        nullptr, 0, 0, 0};
    const int64_t groups = E::paired ? size / WIDE : 1, bytes = E::paired ? 2 : 4, each = heads * groups;
    const bool adjacent = pages.scale_head == groups;
    const uint8_t* at[CHUNK];
    if constexpr (E::paired)
        locate<Int4Scale>(job, numbers, item, from, to, at);
    else
        locate<Float32>(job, numbers, item, from, to, at);
    for (int64_t i = 0, next; i < to - from; i = next) {
        next = i + 1;
        if (adjacent)  // those of the positions behind it may be adjacent, too
            while (next < to - from && at[next] == at[next - 1] + each * bytes) ++next;
        const int64_t run = adjacent ? (next - i) * each : groups;
        for (int64_t head = 0; head < (adjacent ? 1 : heads); ++head)
            for (int64_t c = 0; c < run; c += SIDE)
                widen_some<E>(at[i] + (head * pages.scale_head + c) * bytes, run - c < SIDE ? run - c : SIDE,
                              scales + (i * each + head * groups + c) * (E::paired ? 1 : 2));
    }
}

// Line `number` of sixteen keys as a tile, and the next line as another if there are two. `scales`: of the first key;
// those of the next one are `step` later.
template <class E>
static inline void copy_tile(const uint8_t* const* at, int64_t byte, int64_t number, bool two, const float* scales,
                             int64_t step, uint8_t* to) {
    for (int64_t i = 0; i < SIDE; ++i, scales += step, to += LINE) {
        const Lines<E> lines(at[i] + byte, scales);
        store_line(to, lines.of(number));
        if (two) store_line(to + TILE, lines.of(number + 1));
    }
}
