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

// 32 quants of one row, a byte each -> its nibbles in a block of the panel.
void pack_nibbles(const uint8_t* quants, size_t row, uint8_t* block) {
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = load32(quants + 4 * i) & kLow, high = load32(quants + 16 + 4 * i) & kLow;
        store32(block + 64 * i + 4 * row, low | (high << 4));
    }
}

void pack_fifth_bits(const uint8_t* quants, size_t row, uint8_t* block) {
    uint32_t bits = 0;
    for (int j = 0; j < 8; ++j) bits |= ((load32(quants + 4 * j) >> 4) & 0x01010101u) << j;
    store32(block + 4 * row, bits);
}

void pack_upper_bits(const uint8_t* quants, size_t row, uint8_t* block) {
    for (int half = 0; half < 2; ++half) {
        uint32_t bits = 0;
        for (int j = 0; j < 4; ++j) bits |= ((load32(quants + 16 * half + 4 * j) >> 4) & 0x03030303u) << (2 * j);
        store32(block + 64 * half + 4 * row, bits);
    }
}

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

// Q4_K, and Q5_K, which has the fifth bits before the nibbles.
void pack_q45_k(const uint8_t* source, size_t row, size_t blocks, uint8_t* panel, bool five) {
    const size_t source_bytes = five ? 176 : 144, group_bytes = five ? 2880 : 2368;
    for (size_t s = 0; s < blocks / kGroupBlocks; ++s, source += source_bytes, panel += group_bytes) {
        memcpy(panel + 2 * row, source, 2);
        memcpy(panel + 32 + 2 * row, source + 2, 2);
        const uint8_t* bits = source + 16;
        const uint8_t* nibbles = source + (five ? 48 : 16);
        for (int b = 0; b < 8; ++b) {
            scale_and_minimum(source + 4, b, panel + 64 + 16 * b + row, panel + 192 + 16 * b + row);
            uint8_t quants[32];
            for (int i = 0; i < 32; ++i) {
                quants[i] = (nibbles[32 * (b / 2) + i] >> (4 * (b % 2))) & 15;
                if (five) quants[i] |= ((bits[i] >> b) & 1) << 4;
            }
            uint8_t* block = panel + 320 + (five ? 320 : 256) * b;
            pack_nibbles(quants, row, block);
            if (five) pack_fifth_bits(quants, row, block + 256);
        }
    }
}

void pack_q6_k(const uint8_t* source, size_t row, size_t blocks, uint8_t* panel) {
    for (size_t s = 0; s < blocks / kGroupBlocks; ++s, source += 210, panel += 3392) {
        const uint8_t *low = source, *high = source + 128, *scales = source + 192;
        memcpy(panel + 2 * row, source + 208, 2);
        for (int g = 0; g < 16; ++g) panel[32 + 16 * g + row] = scales[g];
        for (int b = 0; b < 8; ++b) {
            // Of each 128 values: 32 at a time, lower halves of the bytes first; two upper bits a value.
            const uint8_t* l = low + 64 * (b / 4) + 32 * (b % 2);
            const uint8_t* h = high + 32 * (b / 4);
            const int nibble = 4 * (b % 4 / 2), shift = 2 * (b % 4);
            uint8_t quants[32];
            for (int i = 0; i < 32; ++i) quants[i] = ((l[i] >> nibble) & 15) | (((h[i] >> shift) & 3) << 4);
            pack_nibbles(quants, row, panel + 320 + 384 * b);
            pack_upper_bits(quants, row, panel + 320 + 384 * b + 256);
        }
    }
}

template <typename T>
void pack_floats(const uint8_t* source, size_t row_bytes, size_t rows, size_t cols, uint8_t* panel) {
    T* out = reinterpret_cast<T*>(panel);
    constexpr size_t kStrip = 64;  // columns at a time, so that what is read stays in the cache until it is used up
    for (size_t first = 0; first < cols; first += kStrip) {
        const size_t end = std::min(first + kStrip, cols);
        for (size_t r = 0; r < rows; ++r) {
            const uint8_t* in = source + r * row_bytes;
            for (size_t c = first; c < end; ++c) memcpy(out + c * kPanelRows + r, in + c * sizeof(T), sizeof(T));
        }
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
            case kQ4_0: pack_q4_0(file_rows, r, cols / 32, panel); break;
            case kQ8_0: pack_q8_0(file_rows, r, cols / 32, panel); break;
            case kQ4_K: pack_q45_k(file_rows, r, cols / 32, panel, false); break;
            case kQ5_K: pack_q45_k(file_rows, r, cols / 32, panel, true); break;
            case kQ6_K: pack_q6_k(file_rows, r, cols / 32, panel); break;
        }
    }
}

}  // namespace starscope
