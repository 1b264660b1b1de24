// Numbers as every kernel sees them: bits, float16, bfloat16, what is finite. Compiled again with each file that
// includes it, in that file's own unnamed namespace: a copy compiled for AVX-512 must never be the one that the linker
// keeps for everybody.
#pragma once

#include <stdint.h>

namespace starscope {
namespace STARSCOPE_ISA {
namespace {

constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;

inline uint32_t bits_of(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// `condition ? a : b` without a branch, so that the loop around it is vectorized.
inline uint32_t select(bool condition, uint32_t a, uint32_t b) {
    const uint32_t mask = 0u - static_cast<uint32_t>(condition);
    return (a & mask) | (b & ~mask);
}

// float32 -> float16, to nearest, ties to even. A NaN keeps its sign and the upper bits of its payload.
inline uint16_t half_from(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & kMagnitude;
    // Below 2^-14 a float16 counts in steps of 2^-24, which is the step of a float32 in [0.5, 1): the adder rounds.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    // Above it the exponent is rebiased from 127 to 15; a carry out of the mantissa is the next exponent, or infinity.
    const uint32_t normal = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    const uint32_t payload = (magnitude & 0x007fffffu) >> 13;
    uint32_t half = select(magnitude < (113u << 23), subnormal, normal);
    half = select(magnitude >= (143u << 23), 0x7c00u, half);
    half = select(magnitude > kInfinity, 0x7c00u + payload + static_cast<uint32_t>(payload == 0), half);
    return static_cast<uint16_t>(half | ((bits & kSign) >> 16));
}

inline float float_from_half(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu;
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t bits = select(magnitude < 0x0400u, subnormal, normal);
    bits = select(magnitude >= 0x7c00u, normal + (112u << 23), bits);
    return float_of(bits | (static_cast<uint32_t>(half & 0x8000u) << 16));
}

// float32 -> bfloat16, to nearest, ties to even; a NaN comes out quiet.
inline uint16_t bfloat_from(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const uint32_t quiet = bits | 0x00400000u;
    return static_cast<uint16_t>(select((bits & kMagnitude) > kInfinity, quiet, rounded) >> 16);
}

// 1 / scale, and 0 for a block of zeros.
inline float reciprocal(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

// What cannot be scaled (a NaN, an infinity, a scale so small that its reciprocal overflows) becomes quant 0.
inline float finite_or_zero(float value) { return (bits_of(value) & kMagnitude) < kInfinity ? value : 0.0f; }

// Toward zero; for magnitudes below 2^31.
inline float truncated(float value) { return static_cast<float>(static_cast<int32_t>(value)); }

inline float lesser(float a, float b) { return a < b ? a : b; }
inline float greater(float a, float b) { return a > b ? a : b; }

// The largest magnitude among `count` values as bits: their order as integers is that of the magnitudes, NaN above all.
inline uint32_t largest_magnitude(const float* values, int count) {
    uint32_t largest = 0;
    for (int i = 0; i < count; ++i) {
        const uint32_t magnitude = bits_of(values[i]) & kMagnitude;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

}  // namespace
}  // namespace STARSCOPE_ISA
}  // namespace starscope
