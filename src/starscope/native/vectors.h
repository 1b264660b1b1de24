// Sixteen numbers at a time on each instruction set, under names that the kernels share:
//
//     Lanes     16 float32
//     Sums      16 int32
//     Quants    16 x 4 bytes: four consecutive columns of each of a panel's 16 rows
//
// Included within the namespaces of the files compiled per instruction set.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "numbers.h"

#if defined(__AVX2__)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL  // nothing stays in registers anyway
#endif

namespace starscope {
namespace STARSCOPE_ISA {
namespace {

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

inline int32_t load32(const void* bytes) {
    int32_t word;
    __builtin_memcpy(&word, bytes, sizeof word);
    return word;
}

// Sums of the quants of a block's first and second sixteen columns.
struct HalfSums {
    int32_t first, second;
};

// Four columns of four rows, the columns `stride` apart.
inline void transpose(const float* const* x, size_t col, float* out, size_t stride) {
#if defined(__AVX2__)
    __m128 a = _mm_loadu_ps(x[0] + col), b = _mm_loadu_ps(x[1] + col), c = _mm_loadu_ps(x[2] + col),
           d = _mm_loadu_ps(x[3] + col);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(out, a);
    _mm_storeu_ps(out + stride, b);
    _mm_storeu_ps(out + 2 * stride, c);
    _mm_storeu_ps(out + 3 * stride, d);
#else
    for (size_t i = 0; i < 4; ++i) {
        for (size_t r = 0; r < 4; ++r) out[i * stride + r] = x[r][col + i];
    }
#endif
}

#if defined(__AVX512VNNI__)

constexpr size_t kMostRows = 12;      // of a product at once: their sums fill the registers
constexpr bool kSignedBytes = false;  // the instruction takes unsigned quants and signed activations

using Lanes = __m512;
using Sums = __m512i;
using Quants = __m512i;

inline Lanes zeros() { return _mm512_setzero_ps(); }
inline Lanes repeated(float x) { return _mm512_set1_ps(x); }
inline Lanes from_floats(const void* at) { return _mm512_loadu_ps(at); }
inline Lanes from_halves(const void* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
}
inline Lanes from_bfloats(const void* at) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(at)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Lanes from_uint8(const void* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))));
}
inline Lanes from_int8(const void* at) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))));
}
inline Lanes times(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes plus_product(Lanes sum, Lanes a, Lanes b) { return _mm512_fmadd_ps(a, b, sum); }
inline Lanes minus_product(Lanes sum, Lanes a, Lanes b) { return _mm512_fnmadd_ps(a, b, sum); }
inline void store(float* at, Lanes x) { _mm512_storeu_ps(at, x); }

inline Lanes plus(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes minus(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes divided(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes smaller(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }  // b where one is not a number
inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }   // b where one is not a number
inline Lanes rounded(Lanes a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes magnitude(Lanes a) { return _mm512_abs_ps(a); }
inline Lanes with_sign_of(Lanes a, Lanes b) { return _mm512_or_ps(a, _mm512_and_ps(b, _mm512_set1_ps(-0.0f))); }
inline Lanes times_power_of_two(Lanes a, Lanes n) { return _mm512_scalef_ps(a, n); }

inline Sums begin_sums(int32_t from) { return _mm512_set1_epi32(from); }
inline Lanes to_floats(Sums x) { return _mm512_cvtepi32_ps(x); }

// The largest magnitude of 32 numbers, as bits: a NaN is above all.
inline uint32_t largest_magnitude(const float* x) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), mask),
                  b = _mm512_and_si512(_mm512_loadu_si512(x + 16), mask);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
}
inline __m128i quantized(const float* x, __m512 by) {
    const __m512 limit = _mm512_set1_ps(127.0f), scaled = _mm512_mul_ps(_mm512_loadu_ps(x), by);
    return _mm512_cvtepi32_epi8(
        _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(scaled, limit), _mm512_set1_ps(-127.0f))));
}
// 32 numbers times `inverse`, to the nearest integers within +-127; gives the sums of both halves.
inline HalfSums quantize(const float* x, float inverse, int8_t* out) {
    const __m512 by = _mm512_set1_ps(inverse);
    const __m256i q = _mm256_set_m128i(quantized(x + 16, by), quantized(x, by));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), q);
    const __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
    const __m256i eights = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
    const __m256i all = _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0xb1));
    return {_mm256_cvtsi256_si32(all), _mm_cvtsi128_si32(_mm256_extracti128_si256(all, 1))};
}

inline Quants load_quants(const void* at) { return _mm512_loadu_si512(at); }
inline void store_quants(void* at, Quants q) { _mm512_storeu_si512(at, q); }
inline Quants nibble(const uint8_t* block, int j) {
    const __m512i bytes = _mm512_loadu_si512(block + 64 * (j % 4)), low = _mm512_set1_epi8(15);
    return _mm512_and_si512(j < 4 ? bytes : _mm512_srli_epi16(bytes, 4), low);
}
inline Quants with_fifth_bit(Quants q, const uint8_t* bits, int j) {
    const __mmask64 set = _mm512_test_epi8_mask(_mm512_loadu_si512(bits), _mm512_set1_epi8(static_cast<char>(1 << j)));
    return _mm512_mask_add_epi8(q, set, q, _mm512_set1_epi8(16));
}
inline Quants with_upper_bits(Quants q, const uint8_t* bits, int j) {
    const __m512i bytes = _mm512_loadu_si512(bits), upper = _mm512_set1_epi8(0x30);
    const __m512i moved = j == 0   ? _mm512_slli_epi16(bytes, 4)
                          : j == 1 ? _mm512_slli_epi16(bytes, 2)
                          : j == 2 ? bytes
                                   : _mm512_srli_epi16(bytes, 2);
    return _mm512_or_si512(q, _mm512_and_si512(moved, upper));
}
template <bool kWide>
inline Sums add_products(Sums sums, Quants q, int32_t word) {
    return _mm512_dpbusd_epi32(sums, q, _mm512_set1_epi32(word));
}

#elif defined(__AVX2__)

constexpr size_t kMostRows = 4;
constexpr bool kSignedBytes = true;

struct Lanes {
    __m256 a, b;
};
struct Sums {
    __m256i a, b;
};
using Quants = Sums;

inline __m256i load256(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
inline __m128i load128(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
inline __m128i load64(const void* at) { return _mm_loadl_epi64(static_cast<const __m128i*>(at)); }

inline Lanes zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes repeated(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes from_floats(const void* at) {
    const float* x = static_cast<const float*>(at);
    return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
}
inline Lanes from_halves(const void* at) {
    const uint8_t* x = static_cast<const uint8_t*>(at);
    return {_mm256_cvtph_ps(load128(x)), _mm256_cvtph_ps(load128(x + 16))};
}
inline __m256 widened(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline Lanes from_bfloats(const void* at) {
    const uint8_t* x = static_cast<const uint8_t*>(at);
    return {widened(load128(x)), widened(load128(x + 16))};
}
inline Lanes from_uint8(const void* at) {
    const uint8_t* x = static_cast<const uint8_t*>(at);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(x))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(x + 8)))};
}
inline Lanes from_int8(const void* at) {
    const uint8_t* x = static_cast<const uint8_t*>(at);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(x))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(x + 8)))};
}
inline Lanes times(Lanes x, Lanes y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Lanes plus_product(Lanes sum, Lanes x, Lanes y) {
    return {_mm256_fmadd_ps(x.a, y.a, sum.a), _mm256_fmadd_ps(x.b, y.b, sum.b)};
}
inline Lanes minus_product(Lanes sum, Lanes x, Lanes y) {
    return {_mm256_fnmadd_ps(x.a, y.a, sum.a), _mm256_fnmadd_ps(x.b, y.b, sum.b)};
}
inline void store(float* at, Lanes x) {
    _mm256_storeu_ps(at, x.a);
    _mm256_storeu_ps(at + 8, x.b);
}

inline Lanes plus(Lanes x, Lanes y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Lanes minus(Lanes x, Lanes y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Lanes divided(Lanes x, Lanes y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Lanes smaller(Lanes x, Lanes y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Lanes larger(Lanes x, Lanes y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline __m256 rounded(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes rounded(Lanes x) { return {rounded(x.a), rounded(x.b)}; }
inline Lanes magnitude(Lanes x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline Lanes with_sign_of(Lanes x, Lanes y) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(x.a, _mm256_and_ps(y.a, sign)), _mm256_or_ps(x.b, _mm256_and_ps(y.b, sign))};
}
inline __m256 times_power_of_two(__m256 x, __m256 n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}
inline Lanes times_power_of_two(Lanes x, Lanes n) {
    return {times_power_of_two(x.a, n.a), times_power_of_two(x.b, n.b)};
}

inline Sums begin_sums(int32_t from) { return {_mm256_set1_epi32(from), _mm256_set1_epi32(from)}; }
inline uint32_t largest_magnitude(const float* x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i all = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8) all = _mm256_max_epu32(all, _mm256_and_si256(load256(x + i), mask));
    uint32_t lanes[8], largest = 0;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), all);
    for (uint32_t lane : lanes) largest = lane > largest ? lane : largest;
    return largest;
}
inline __m256i quantized(__m256 x, __m256 inverse) {
    const __m256 limited = _mm256_min_ps(_mm256_mul_ps(x, inverse), _mm256_set1_ps(127.0f));
    return _mm256_cvtps_epi32(_mm256_max_ps(limited, _mm256_set1_ps(-127.0f)));
}
inline int32_t quantize_half(const float* x, float inverse, int8_t* out) {
    const __m256 by = _mm256_set1_ps(inverse);
    const __m256i a = quantized(_mm256_loadu_ps(x), by), b = quantized(_mm256_loadu_ps(x + 8), by);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += out[i];
    return sum;
}
inline Lanes to_floats(Sums x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

inline Quants load_quants(const void* at) {
    const uint8_t* x = static_cast<const uint8_t*>(at);
    return {load256(x), load256(x + 32)};
}
inline void store_quants(void* at, Quants q) {
    __m256i* x = static_cast<__m256i*>(at);
    _mm256_storeu_si256(x, q.a);
    _mm256_storeu_si256(x + 1, q.b);
}
inline __m256i nibbles(__m256i bytes, int j) {
    return _mm256_and_si256(j < 4 ? bytes : _mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
}
inline Quants nibble(const uint8_t* block, int j) {
    const Quants bytes = load_quants(block + 64 * (j % 4));
    return {nibbles(bytes.a, j), nibbles(bytes.b, j)};
}
inline __m256i fifth_bits(__m256i bits, int j) {
    const __m256i one = _mm256_set1_epi8(static_cast<char>(1 << j));
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bits, one), one), _mm256_set1_epi8(16));
}
inline Quants with_fifth_bit(Quants q, const uint8_t* bits, int j) {
    const Quants all = load_quants(bits);
    return {_mm256_or_si256(q.a, fifth_bits(all.a, j)), _mm256_or_si256(q.b, fifth_bits(all.b, j))};
}
inline __m256i upper_bits(__m256i bits, int j) {
    const __m256i moved = j == 0   ? _mm256_slli_epi16(bits, 4)
                          : j == 1 ? _mm256_slli_epi16(bits, 2)
                          : j == 2 ? bits
                                   : _mm256_srli_epi16(bits, 2);
    return _mm256_and_si256(moved, _mm256_set1_epi8(0x30));
}
inline Quants with_upper_bits(Quants q, const uint8_t* bits, int j) {
    const Quants all = load_quants(bits);
    return {_mm256_or_si256(q.a, upper_bits(all.a, j)), _mm256_or_si256(q.b, upper_bits(all.b, j))};
}
// The instruction adds pairs of products in 16 bits, which hold 2 · 127 · 128 and no more: quants above 6 bits are
// given their sign back and multiplied as magnitudes.
template <bool kWide>
inline __m256i products(__m256i q, __m256i x) {
    if constexpr (kWide) {
        const __m256i value = _mm256_xor_si256(q, _mm256_set1_epi8(static_cast<char>(0x80)));
        return _mm256_maddubs_epi16(_mm256_abs_epi8(value), _mm256_sign_epi8(x, value));
    } else {
        return _mm256_maddubs_epi16(q, x);
    }
}
template <bool kWide>
inline Sums add_products(Sums sums, Quants q, int32_t word) {
    const __m256i x = _mm256_set1_epi32(word), ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(sums.a, _mm256_madd_epi16(products<kWide>(q.a, x), ones)),
            _mm256_add_epi32(sums.b, _mm256_madd_epi16(products<kWide>(q.b, x), ones))};
}

#else

constexpr size_t kMostRows = 1;
constexpr bool kSignedBytes = false;

struct Lanes {
    float x[16];
};
struct Sums {
    int32_t x[16];
};
struct Quants {
    uint8_t x[64];
};

template <typename F>
inline Lanes each(const F& f) {
    Lanes y;
    for (int i = 0; i < 16; ++i) y.x[i] = f(i);
    return y;
}

inline uint16_t load16(const void* at, int i) {
    uint16_t word;
    __builtin_memcpy(&word, static_cast<const uint8_t*>(at) + 2 * i, sizeof word);
    return word;
}

inline Lanes zeros() {
    return each([](int) { return 0.0f; });
}
inline Lanes repeated(float v) {
    return each([=](int) { return v; });
}
inline Lanes from_floats(const void* at) {
    Lanes y;
    __builtin_memcpy(&y, at, sizeof y);
    return y;
}
inline Lanes from_halves(const void* at) {
    return each([=](int i) { return float_from_half(load16(at, i)); });
}
inline Lanes from_bfloats(const void* at) {
    return each([=](int i) { return float_of(static_cast<uint32_t>(load16(at, i)) << 16); });
}
inline Lanes from_uint8(const void* at) {
    return each([=](int i) { return static_cast<float>(static_cast<const uint8_t*>(at)[i]); });
}
inline Lanes from_int8(const void* at) {
    return each([=](int i) { return static_cast<float>(static_cast<const int8_t*>(at)[i]); });
}
inline Lanes times(const Lanes& a, const Lanes& b) {
    return each([&](int i) { return a.x[i] * b.x[i]; });
}
inline Lanes plus_product(const Lanes& sum, const Lanes& a, const Lanes& b) {
    return each([&](int i) { return sum.x[i] + a.x[i] * b.x[i]; });
}
inline Lanes minus_product(const Lanes& sum, const Lanes& a, const Lanes& b) {
    return each([&](int i) { return sum.x[i] - a.x[i] * b.x[i]; });
}
inline void store(float* at, const Lanes& y) { __builtin_memcpy(at, &y, sizeof y); }

inline Lanes plus(const Lanes& a, const Lanes& b) {
    return each([&](int i) { return a.x[i] + b.x[i]; });
}
inline Lanes minus(const Lanes& a, const Lanes& b) {
    return each([&](int i) { return a.x[i] - b.x[i]; });
}
inline Lanes divided(const Lanes& a, const Lanes& b) {
    return each([&](int i) { return a.x[i] / b.x[i]; });
}
inline Lanes smaller(const Lanes& a, const Lanes& b) {
    return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
}
inline Lanes larger(const Lanes& a, const Lanes& b) {
    return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
inline Lanes rounded(const Lanes& a) {
    return each([&](int i) { return (a.x[i] + kRounder) - kRounder; });
}
inline Lanes magnitude(const Lanes& a) {
    return each([&](int i) { return float_of(bits_of(a.x[i]) & 0x7fffffffu); });
}
inline Lanes with_sign_of(const Lanes& a, const Lanes& b) {
    return each([&](int i) { return float_of(bits_of(a.x[i]) | (bits_of(b.x[i]) & 0x80000000u)); });
}
inline Lanes times_power_of_two(const Lanes& a, const Lanes& n) {
    return each(
        [&](int i) { return a.x[i] * float_of((bits_of(n.x[i] + kRounder) - bits_of(kRounder) + 127u) << 23); });
}

inline uint32_t largest_magnitude(const float* x) {
    uint32_t largest = 0;
    for (int i = 0; i < 32; ++i) {
        const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}
inline int32_t quantize_half(const float* x, float inverse, int8_t* out) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) {
        const float scaled = x[i] * inverse, low = scaled > -127.0f ? scaled : -127.0f,
                    limited = low < 127.0f ? low : 127.0f;
        out[i] = static_cast<int8_t>(bits_of(limited + kRounder) - bits_of(kRounder));
        sum += out[i];
    }
    return sum;
}

inline Sums begin_sums(int32_t from) {
    Sums y;
    for (int i = 0; i < 16; ++i) y.x[i] = from;
    return y;
}
inline Lanes to_floats(const Sums& s) {
    return each([&](int i) { return static_cast<float>(s.x[i]); });
}

inline Quants load_quants(const void* at) {
    Quants y;
    __builtin_memcpy(&y, at, sizeof y);
    return y;
}
inline void store_quants(void* at, const Quants& q) { __builtin_memcpy(at, &q, sizeof q); }
inline Quants nibble(const uint8_t* block, int j) {
    Quants y;
    for (int i = 0; i < 64; ++i) y.x[i] = (block[64 * (j % 4) + i] >> (j < 4 ? 0 : 4)) & 15;
    return y;
}
inline Quants with_fifth_bit(Quants q, const uint8_t* bits, int j) {
    for (int i = 0; i < 64; ++i) q.x[i] |= ((bits[i] >> j) & 1) << 4;
    return q;
}
inline Quants with_upper_bits(Quants q, const uint8_t* bits, int j) {
    for (int i = 0; i < 64; ++i) q.x[i] |= ((bits[i] >> (2 * j)) & 3) << 4;
    return q;
}
template <bool kWide>
inline Sums add_products(Sums sums, const Quants& q, int32_t word) {
    int8_t x[4];
    __builtin_memcpy(x, &word, sizeof x);
    for (int i = 0; i < 16; ++i) {
        for (int c = 0; c < 4; ++c) sums.x[i] += q.x[4 * i + c] * x[c];
    }
    return sums;
}

#endif

// What is built of these, the same for all.

#if !defined(__AVX512VNNI__)
inline HalfSums quantize(const float* x, float inverse, int8_t* out) {
    return {quantize_half(x, inverse, out), quantize_half(x + 16, inverse, out + 16)};
}
#endif

}  // namespace
}  // namespace STARSCOPE_ISA
}  // namespace starscope
