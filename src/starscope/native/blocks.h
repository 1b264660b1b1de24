// How GGUF stores a row of weights: quant blocks of 32 values under one float16 scale.
#pragma once

#include <stdint.h>

namespace starscope {

constexpr int kBlockValues = 32;

// value = scale * quant
struct BlockQ8_0 {
    uint16_t scale;  // float16
    int8_t quants[kBlockValues];
};
static_assert(sizeof(BlockQ8_0) == 34, "Q8_0 is 34 bytes for 32 values");

// value = scale * (quant - 8); byte i holds value i in its low half and value i + 16 in its high half
struct BlockQ4_0 {
    uint16_t scale;  // float16
    uint8_t quants[kBlockValues / 2];
};
static_assert(sizeof(BlockQ4_0) == 18, "Q4_0 is 18 bytes for 32 values");

}  // namespace starscope
