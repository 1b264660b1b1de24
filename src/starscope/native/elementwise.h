// Functions of single numbers that the files compiled per instruction set share, as plain arithmetic that a compiler can
// vectorize: no branch, no library call, the same bits on every instruction set. Included within their namespaces.
#pragma once

#include <stdint.h>

namespace starscope {
namespace STARSCOPE_ISA {
namespace {

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

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even

inline float minimum(float a, float b) { return a < b ? a : b; }
inline float maximum(float a, float b) { return a > b ? a : b; }

// e^x within 2 units in the last place for x in [-87, 88]; the ends of that range beyond it. NaN stays NaN.
inline float exponential(float x) {
    const float clamped = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    const float shifted = clamped * 1.44269504f + kRounder;
    const float n = shifted - kRounder;
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    float p = 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = (p * r * r + r) + 1.0f;
    return p * float_of((bits_of(shifted) - bits_of(kRounder) + 127u) << 23);
}

// 1 - e^(-p(|x|)) with x's sign: p is the least-squares polynomial of -ln(1 - erf) on [0, 4]. Absolute error < 1e-7.
inline float error_function(float x) {
    const float a = minimum(float_of(bits_of(x) & 0x7fffffffu), 4.0f);
    float p = -8.056373e-06f;
    p = p * a + 1.0614739e-04f;
    p = p * a - 5.8842776e-04f;
    p = p * a + 1.5777560e-03f;
    p = p * a - 5.9957233e-05f;
    p = p * a - 1.9216364e-02f;
    p = p * a + 1.0279894e-01f;
    p = p * a + 6.3661617e-01f;
    p = p * a + 1.1283793f;
    const float magnitude = 1.0f - exponential(-p * a);
    return float_of(bits_of(magnitude) | (bits_of(x) & 0x80000000u));
}

inline float gelu(float x) { return x * 0.5f * (1.0f + error_function(x * 0.707106781f)); }

// x/2 (1 + tanh u) = x / (1 + e^(-2u))
inline float gelu_tanh(float x) {
    const float u = 0.797884561f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exponential(-2.0f * u));
}

}  // namespace
}  // namespace STARSCOPE_ISA
}  // namespace starscope
