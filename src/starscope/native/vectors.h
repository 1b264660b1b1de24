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

#include "elementwise.h"

#if defined(__AVX2__)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL  // nothing stays in registers anyway
#endif

namespace starscope {
namespace STARSCOPE_ISA {
namespace {

inline int32_t load32(const void* bytes) {
    int32_t word;
    __builtin_memcpy(&word, bytes, sizeof word);
    return word;
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

inline Sums begin_sums(int32_t from) { return _mm512_set1_epi32(from); }
inline Lanes to_floats(Sums x) { return _mm512_cvtepi32_ps(x); }

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
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(x))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(x + 8)))};
}
inline Lanes from_int8(const void* at) {
    const uint8_t* x = static_cast<const uint8_t*>(at);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(x))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(x + 8)))};
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

inline Sums begin_sums(int32_t from) { return {_mm256_set1_epi32(from), _mm256_set1_epi32(from)}; }
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
// The instruction adds pairs of products in 16 bits, which hold 2 · 127 · 128 and no more: quants above 6 bits are given
// their sign back and multiplied as magnitudes.
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

inline float half_to_float(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu, sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    if (magnitude < 0x0400u) return float_of(bits_of(static_cast<float>(magnitude) * 0x1p-24f) | sign);
    return float_of(((magnitude << 13) + ((magnitude >= 0x7c00u ? 224u : 112u) << 23)) | sign);
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
    return each([=](int i) { return half_to_float(load16(at, i)); });
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

}  // namespace
}  // namespace STARSCOPE_ISA
}  // namespace starscope
