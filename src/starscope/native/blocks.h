// How GGUF stores a row of weights: quant blocks of 32 values under a float16 scale, and blocks of 256 whose groups
// have small scales of their own.
#pragma once

#include <stdint.h>

namespace starscope {

constexpr int kBlockValues = 32;
constexpr int kSuperValues = 256;  // of the K formats

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

// value = scale * quant + minimum; quants as in Q4_0
struct BlockQ4_1 {
    uint16_t scale, minimum;  // float16
    uint8_t quants[kBlockValues / 2];
};
static_assert(sizeof(BlockQ4_1) == 20, "Q4_1 is 20 bytes for 32 values");

// value = scale * (quant - 16); bit i of `fifth` is the highest bit of quant i, the rest is as in Q4_0
struct BlockQ5_0 {
    uint16_t scale;  // float16
    uint8_t fifth[kBlockValues / 8];
    uint8_t quants[kBlockValues / 2];
};
static_assert(sizeof(BlockQ5_0) == 22, "Q5_0 is 22 bytes for 32 values");

// value = scale * quant + minimum; quants as in Q5_0
struct BlockQ5_1 {
    uint16_t scale, minimum;  // float16
    uint8_t fifth[kBlockValues / 8];
    uint8_t quants[kBlockValues / 2];
};
static_assert(sizeof(BlockQ5_1) == 24, "Q5_1 is 24 bytes for 32 values");

// 8 groups of 32: value = scale * scales[group] * quant - minimum * minima[group], with 6 bits for each of scales and
// minima. Bytes 0-3 of `groups` hold scales 0-3 and bytes 4-7 minima 0-3, in the low 6 bits; bytes 8-11 the low 4 bits
// of scales (low half) and minima (high half) 4-7, whose high 2 bits are those of bytes 0-3 and 4-7.
// Of each 32 bytes of quants, the low halves are one group and the high halves the next.
struct BlockQ4_K {
    uint16_t scale, minimum;  // float16
    uint8_t groups[12];
    uint8_t quants[kSuperValues / 2];
};
static_assert(sizeof(BlockQ4_K) == 144, "Q4_K is 144 bytes for 256 values");

// As Q4_K; bit g of byte i of `fifth` is the highest bit of quant i of group g.
struct BlockQ5_K {
    uint16_t scale, minimum;  // float16
    uint8_t groups[12];
    uint8_t fifth[kSuperValues / 8];
    uint8_t quants[kSuperValues / 2];
};
static_assert(sizeof(BlockQ5_K) == 176, "Q5_K is 176 bytes for 256 values");

// 16 groups of 16: value = scale * scales[group] * (quant - 32). Of each half of the block, 128 values: byte i of 64 of
// `low` holds the low 4 bits of values i (low half) and i + 64 (high half); byte i of 32 of `high` the high 2 bits of
// values i, i + 32, i + 64 and i + 96, the first in the lowest bits.
struct BlockQ6_K {
    uint8_t low[kSuperValues / 2];
    uint8_t high[kSuperValues / 4];
    int8_t scales[16];
    uint16_t scale;  // float16
};
static_assert(sizeof(BlockQ6_K) == 210, "Q6_K is 210 bytes for 256 values");

}  // namespace starscope
