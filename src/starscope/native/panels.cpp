#include "panels.h"

#include <string.h>

#include <algorithm>

#include "blocks.h"

namespace starscope {
namespace {

inline uint32_t load32(const uint8_t* bytes) {
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

inline void store32(uint8_t* bytes, uint32_t word) { memcpy(bytes, &word, sizeof word); }

constexpr uint32_t kLow = 0x0f0f0f0fu;

void pack_q4_0(const uint8_t* source, size_t row, size_t blocks, uint8_t* panel) {
    for (size_t b = 0; b < blocks; ++b, source += sizeof(BlockQ4_0)) {
        const size_t in_group = std::min(blocks - b / kGroupBlocks * kGroupBlocks, kGroupBlocks), i = b % kGroupBlocks;
        uint8_t* group = panel + b / kGroupBlocks * kGroupBlocks * (32 + 256);
        memcpy(group + 32 * i + 2 * row, source, 2);
        uint8_t* quants = group + 32 * in_group + 256 * i;
        for (int j = 0; j < 4; ++j) memcpy(quants + 64 * j + 4 * row, source + 2 + 4 * j, 4);
    }
}

void pack_q8_0(const uint8_t* source, size_t row, size_t blocks, uint8_t* panel) {
    for (size_t b = 0; b < blocks; ++b, source += sizeof(BlockQ8_0)) {
        const size_t in_group = std::min(blocks - b / kGroupBlocks * kGroupBlocks, kGroupBlocks), i = b % kGroupBlocks;
        uint8_t* group = panel + b / kGroupBlocks * kGroupBlocks * (32 + 512);
        memcpy(group + 32 * i + 2 * row, source, 2);
        uint8_t* quants = group + 32 * in_group + 512 * i;
        for (int j = 0; j < 8; ++j) store32(quants + 64 * j + 4 * row, load32(source + 2 + 4 * j) ^ 0x80808080u);
    }
}

// The six-bit scale and minimum of sub-block j, from the 12 bytes that hold eight of each.
inline void scale_and_minimum(const uint8_t* packed, int j, uint8_t* scale, uint8_t* minimum) {
    if (j < 4) {
        *scale = packed[j] & 63;
        *minimum = packed[j + 4] & 63;
    } else {
        *scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
        *minimum = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
    }
}

// Two blocks from 32 bytes: their lower halves are the quants of one, their upper halves those of the next.
inline void pack_pair(const uint8_t* bytes, size_t row, uint8_t* one, uint8_t* next) {
    for (int i = 0; i < 4; ++i) {
        const uint32_t a = load32(bytes + 4 * i), b = load32(bytes + 16 + 4 * i);
        store32(one + 64 * i + 4 * row, (a & kLow) | ((b & kLow) << 4));
        store32(next + 64 * i + 4 * row, ((a >> 4) & kLow) | (b & ~kLow));
    }
}

// Q4_K, and Q5_K, which has the fifth bits before the nibbles: bit b of byte i is of value i of block b.
void pack_q45_k(const uint8_t* source, size_t row, size_t blocks, uint8_t* panel, bool five) {
    const size_t source_bytes = five ? 176 : 144, block_bytes = five ? 320 : 256;
    for (size_t s = 0; s < blocks / kGroupBlocks; ++s, source += source_bytes, panel += 320 + 8 * block_bytes) {
        memcpy(panel + 2 * row, source, 2);
        memcpy(panel + 32 + 2 * row, source + 2, 2);
        for (int b = 0; b < 8; ++b) {
            scale_and_minimum(source + 4, b, panel + 64 + 16 * b + row, panel + 192 + 16 * b + row);
        }
        for (int b = 0; b < 8; b += 2) {
            uint8_t* block = panel + 320 + b * block_bytes;
            pack_pair(source + (five ? 48 : 16) + 16 * b, row, block, block + block_bytes);
        }
        for (int b = 0; five && b < 8; ++b) {
            uint32_t bits = 0;
            for (int j = 0; j < 8; ++j) bits |= ((load32(source + 16 + 4 * j) >> b) & 0x01010101u) << j;
            store32(panel + 320 + b * block_bytes + 256 + 4 * row, bits);
        }
    }
}

// Of each 128 values: 64 bytes of lower halves (blocks 0 and 1, then 2 and 3 in the upper halves of the same bytes),
// and 32 bytes of upper bits, two for each of the four blocks.
void pack_q6_k(const uint8_t* source, size_t row, size_t blocks, uint8_t* panel) {
    constexpr size_t kBlock = 384;
    for (size_t s = 0; s < blocks / kGroupBlocks; ++s, source += 210, panel += 3392) {
        memcpy(panel + 2 * row, source + 208, 2);
        for (int g = 0; g < 16; ++g) panel[32 + 16 * g + row] = source[192 + g];
        for (int half = 0; half < 2; ++half) {
            uint8_t* block = panel + 320 + 4 * half * kBlock;
            const uint8_t *low = source + 64 * half, *high = source + 128 + 32 * half;
            pack_pair(low, row, block, block + 2 * kBlock);
            pack_pair(low + 32, row, block + kBlock, block + 3 * kBlock);
            for (int b = 0; b < 4; ++b) {
                for (int v = 0; v < 2; ++v) {
                    uint32_t bits = 0;
                    for (int j = 0; j < 4; ++j) {
                        bits |= ((load32(high + 16 * v + 4 * j) >> (2 * b)) & 0x03030303u) << (2 * j);
                    }
                    store32(block + b * kBlock + 256 + 64 * v + 4 * row, bits);
                }
            }
        }
    }
}

template <typename T>
void pack_floats(const uint8_t* source, size_t row_bytes, size_t rows, size_t cols, uint8_t* panel) {
    const size_t whole = rows == kPanelRows ? cols / 8 * 8 : 0;
    for (size_t c = 0; c < whole; c += 8, panel += 8 * kPanelRows * sizeof(T)) {
        T block[8][kPanelRows];  // a small transposition, all of it in registers or the nearest cache
        for (size_t r = 0; r < kPanelRows; ++r) {
            T run[8];
            memcpy(run, source + r * row_bytes + c * sizeof(T), sizeof run);
            for (size_t i = 0; i < 8; ++i) block[i][r] = run[i];
        }
        memcpy(panel, block, sizeof block);
    }
    T* out = reinterpret_cast<T*>(panel);
    for (size_t c = whole; c < cols; ++c, out += kPanelRows) {
        for (size_t r = 0; r < rows; ++r) memcpy(out + r, source + r * row_bytes + c * sizeof(T), sizeof(T));
    }
}

}  // namespace

void pack_panel(const PanelType& type, const uint8_t* file_rows, size_t row_bytes, size_t rows, size_t cols,
                uint8_t* panel) {
    if (rows < kPanelRows) memset(panel, 0, panel_bytes(type, cols));
    if (type.is_float) {
        return type.block_bytes == 4 ? pack_floats<uint32_t>(file_rows, row_bytes, rows, cols, panel)
                                     : pack_floats<uint16_t>(file_rows, row_bytes, rows, cols, panel);
    }
    for (size_t r = 0; r < rows; ++r, file_rows += row_bytes) {
        switch (type.type_id) {
            case kQ4_0:
                pack_q4_0(file_rows, r, cols / 32, panel);
                break;
            case kQ8_0:
                pack_q8_0(file_rows, r, cols / 32, panel);
                break;
            case kQ4_K:
                pack_q45_k(file_rows, r, cols / 32, panel, false);
                break;
            case kQ5_K:
                pack_q45_k(file_rows, r, cols / 32, panel, true);
                break;
            case kQ6_K:
                pack_q6_k(file_rows, r, cols / 32, panel);
                break;
        }
    }
}

}  // namespace starscope
