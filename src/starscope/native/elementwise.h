// The bits of a float, for the files compiled per instruction set. Included within their namespaces.
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

}  // namespace
}  // namespace STARSCOPE_ISA
}  // namespace starscope
