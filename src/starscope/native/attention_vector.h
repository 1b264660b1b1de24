// Sixteen float32 at a time, for attention_kernels.cpp: one zmm register, two ymm, or four of the compiler's own
// vectors. Included within the namespace of an instruction set, after immintrin.h; no include guard, no library code.

#if defined(__AVX512F__)

// Query rows and groups of 16 keys or columns that the micro-kernels keep in registers: 24 sums of the 32 registers.
constexpr size_t kRows = 12;
constexpr size_t kGroups = 2;

using Vec = __m512;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec all(float value) { return _mm512_set1_ps(value); }
inline Vec all_bits(const uint32_t* word) {
    int bits;
    __builtin_memcpy(&bits, word, sizeof bits);
    return _mm512_castsi512_ps(_mm512_set1_epi32(bits));
}
inline Vec load(const void* from) { return _mm512_loadu_ps(from); }
inline void store(void* to, Vec a) { _mm512_storeu_ps(to, a); }
// The first `count` < 16 of them, `fill` behind.
inline Vec load_first(const float* from, size_t count, float fill) {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(fill), static_cast<__mmask16>((1u << count) - 1), from);
}
inline void store_first(float* to, size_t count, Vec a) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), a);
}
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec subtract(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec multiply(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float largest_of(Vec a) { return _mm512_reduce_max_ps(a); }
inline float sum_of(Vec a) { return _mm512_reduce_add_ps(a); }
inline Vec nearest(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n, and 0 where n < -126.
inline Vec scale_by_power(Vec a, Vec n) {
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), a, n);
}
inline void store_halves(uint16_t* to, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec load_halves(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

#if defined(__AVX512BF16__)

inline __m512bh pairs(Vec a) {
    return (__m512bh)a;  // the same bits
}
// Two vectors as one of bfloat16, those of `a` first.
inline Vec to_bfloats(Vec a, Vec b) { return (__m512)_mm512_cvtne2ps_pbh(b, a); }
// c[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1]
inline Vec multiply_add_pairs(Vec a, Vec b, Vec c) { return _mm512_dpbf16_ps(c, pairs(a), pairs(b)); }

#endif

inline Vec round_to_bfloat(Vec a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __m512i chosen = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
    return _mm512_castsi512_ps(_mm512_and_si512(chosen, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
// 32 halves, those of even and of odd place.
inline void load_half_pairs(const uint16_t* from, Vec& even, Vec& odd) {
    const Vec low = load_halves(from), high = load_halves(from + 16);
    const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even = _mm512_permutex2var_ps(low, places, high);
    odd = _mm512_permutex2var_ps(low, _mm512_add_epi32(places, _mm512_set1_epi32(1)), high);
}

#elif defined(__AVX2__)

// 6 x 2 sums of the 16 registers.
constexpr size_t kRows = 6;
constexpr size_t kGroups = 1;

struct Vec {
    __m256 a, b;
};

inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Vec all_bits(const uint32_t* word) {
    int bits;
    __builtin_memcpy(&bits, word, sizeof bits);
    const __m256 value = _mm256_castsi256_ps(_mm256_set1_epi32(bits));
    return {value, value};
}
inline Vec load(const void* from) {
    const float* at = static_cast<const float*>(from);
    return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}
inline void store(void* to, Vec v) {
    float* at = static_cast<float*>(to);
    _mm256_storeu_ps(at, v.a);
    _mm256_storeu_ps(at + 8, v.b);
}
inline void masks_first(size_t count, __m256i& a, __m256i& b) {
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), end = _mm256_set1_epi32(static_cast<int>(count));
    a = _mm256_cmpgt_epi32(end, places);
    b = _mm256_cmpgt_epi32(end, _mm256_add_epi32(places, _mm256_set1_epi32(8)));
}
inline Vec load_first(const float* from, size_t count, float fill) {
    __m256i a, b;
    masks_first(count, a, b);
    const __m256 rest = _mm256_set1_ps(fill);
    return {_mm256_blendv_ps(rest, _mm256_maskload_ps(from, a), _mm256_castsi256_ps(a)),
            _mm256_blendv_ps(rest, _mm256_maskload_ps(from + 8, b), _mm256_castsi256_ps(b))};
}
inline void store_first(float* to, size_t count, Vec v) {
    __m256i a, b;
    masks_first(count, a, b);
    _mm256_maskstore_ps(to, a, v.a);
    _mm256_maskstore_ps(to + 8, b, v.b);
}
inline Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec subtract(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec multiply(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec divide(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vec multiply_add(Vec x, Vec y, Vec z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Vec larger(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline float largest_of(Vec v) {
    const __m256 eight = _mm256_max_ps(v.a, v.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
inline float sum_of(Vec v) {
    const __m256 eight = _mm256_add_ps(v.a, v.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline Vec nearest(Vec v) {
    return {_mm256_round_ps(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 scale_by_power(__m256 a, __m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    const __m256 scaled = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
    return _mm256_andnot_ps(_mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), scaled);
}
inline Vec scale_by_power(Vec v, Vec n) { return {scale_by_power(v.a, n.a), scale_by_power(v.b, n.b)}; }
inline void store_halves(uint16_t* to, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256 round_to_bfloat(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256 chosen =
        _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_and_ps(chosen, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline Vec round_to_bfloat(Vec v) { return {round_to_bfloat(v.a), round_to_bfloat(v.b)}; }
inline void load_half_pairs(const uint16_t* from, __m256& even, __m256& odd) {
    const __m128i* at = reinterpret_cast<const __m128i*>(from);
    const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128(at)), high = _mm256_cvtph_ps(_mm_loadu_si128(at + 1));
    // Within lanes [l0 l2 h0 h2 | l4 l6 h4 h6], then the quarters in the order 0 2 1 3.
    const __m256d evens = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0x88));
    const __m256d odds = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0xdd));
    even = _mm256_castpd_ps(_mm256_permute4x64_pd(evens, 0xd8));
    odd = _mm256_castpd_ps(_mm256_permute4x64_pd(odds, 0xd8));
}
inline void load_half_pairs(const uint16_t* from, Vec& even, Vec& odd) {
    load_half_pairs(from, even.a, odd.a);
    load_half_pairs(from + 16, even.b, odd.b);
}

#else

// 2 x 4 sums of four: what 16 registers hold.
constexpr size_t kRows = 2;
constexpr size_t kGroups = 1;

typedef float Four __attribute__((vector_size(16)));
typedef uint32_t FourBits __attribute__((vector_size(16)));

struct Vec {
    Four q[4];
};

// f on each quarter of its arguments.
template <typename F>
inline Vec each(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}

inline Vec all(float value) {
    return each([=](int) { return Four{value, value, value, value}; });
}
inline Vec zero() { return all(0.0f); }
inline Vec all_bits(const uint32_t* word) {
    float value;
    __builtin_memcpy(&value, word, sizeof value);
    return all(value);
}
inline Vec load(const void* from) {
    Vec v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}
inline void store(void* to, Vec v) { __builtin_memcpy(to, &v, sizeof v); }
inline Vec load_first(const float* from, size_t count, float fill) {
    float values[16];
    for (size_t i = 0; i < 16; ++i) values[i] = i < count ? from[i] : fill;
    return load(values);
}
inline void store_first(float* to, size_t count, Vec v) {
    float values[16];
    store(values, v);
    for (size_t i = 0; i < count; ++i) to[i] = values[i];
}
inline Vec add(Vec x, Vec y) {
    return each([&](int i) { return x.q[i] + y.q[i]; });
}
inline Vec subtract(Vec x, Vec y) {
    return each([&](int i) { return x.q[i] - y.q[i]; });
}
inline Vec multiply(Vec x, Vec y) {
    return each([&](int i) { return x.q[i] * y.q[i]; });
}
inline Vec divide(Vec x, Vec y) {
    return each([&](int i) { return x.q[i] / y.q[i]; });
}
inline Vec multiply_add(Vec x, Vec y, Vec z) {
    return each([&](int i) { return x.q[i] * y.q[i] + z.q[i]; });
}
inline Four larger(Four x, Four y) { return x > y ? x : y; }
inline Vec larger(Vec x, Vec y) {
    return each([&](int i) { return larger(x.q[i], y.q[i]); });
}
inline float largest_of(Vec v) {
    const Four four = larger(larger(v.q[0], v.q[2]), larger(v.q[1], v.q[3]));
    const float a = four[0] > four[2] ? four[0] : four[2], b = four[1] > four[3] ? four[1] : four[3];
    return a > b ? a : b;
}
inline float sum_of(Vec v) {
    const Four four = (v.q[0] + v.q[2]) + (v.q[1] + v.q[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
// Adding this leaves no room for a fraction, and the integer in the lowest bits.
constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23
inline Vec nearest(Vec v) {
    return each([&](int i) { return (v.q[i] + kInteger) - kInteger; });
}
inline Vec scale_by_power(Vec v, Vec n) {
    return each([&](int i) {
        const FourBits power = ((FourBits)(n.q[i] + kInteger) << 23) + 0x3f800000u;
        const FourBits large = (FourBits)(n.q[i] < -126.0f);
        return (Four)((FourBits)(v.q[i] * (Four)power) & ~large);
    });
}

inline void store_halves(uint16_t* to, Vec v) {
    float values[16];
    store(values, v);
    for (int i = 0; i < 16; ++i) to[i] = half_from(values[i]);
}
inline Vec round_to_bfloat(Vec v) {
    float values[16];
    store(values, v);
    for (float& value : values) value = float_of(static_cast<uint32_t>(bfloat_from(value)) << 16);
    return load(values);
}
inline void load_half_pairs(const uint16_t* from, Vec& even, Vec& odd) {
    float evens[16], odds[16];
    for (int i = 0; i < 16; ++i) evens[i] = float_from_half(from[2 * i]);
    for (int i = 0; i < 16; ++i) odds[i] = float_from_half(from[2 * i + 1]);
    even = load(evens);
    odd = load(odds);
}

#endif

// 2^x for x <= 0, within 1.4 * 2^-24; 0 below about 2^-126, exactly 1 at 0, a NaN for a NaN. Between two integers a
// polynomial, the best of degree 6 that is 1 at 0.
inline Vec exp2(Vec x) {
    const Vec n = nearest(x);
    const Vec f = subtract(x, n);
    Vec p = all(0x1.41fbbcp-13f);
    p = multiply_add(p, f, all(0x1.5f3e54p-10f));
    p = multiply_add(p, f, all(0x1.3b2d4cp-7f));
    p = multiply_add(p, f, all(0x1.c6aee8p-5f));
    p = multiply_add(p, f, all(0x1.ebfbdcp-3f));
    p = multiply_add(p, f, all(0x1.62e430p-1f));
    p = multiply_add(p, f, all(1.0f));
    return scale_by_power(p, n);
}
