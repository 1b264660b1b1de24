// How the engine keeps weights: panels of 16 output rows, so that one load feeds one product with 16 of them.
//
// A panel has all columns of its 16 rows, 32 columns (a block) at a time; a vector is 64 bytes, 4 consecutive columns
// of each row. Blocks come in groups of up to 8 (256 columns), scales before quants:
//
//     Q4_0    [n][16] float16 scales, [n][256] nibbles
//     Q8_0    [n][16] float16 scales, [n][512] quants + 128
//     Q4_K    [16] float16 d, [16] float16 dmin, [8][16] scales, [8][16] minima, [8][256] nibbles
//     Q5_K    the same, but [8] of 256 nibbles and 64 bytes of fifth bits
//     Q6_K    [16] float16 d, [16][16] int8 scales of 16 columns each, 32 bytes of padding, [8] of 256 nibbles and 128
//             bytes of upper two bits
//     F16, BF16, F32    [column][16]
//
// Nibbles: vector i of 4 has columns 4i.. in the lower halves of its bytes and columns 16 + 4i.. in the upper ones.
// Fifth bits: bit j of a byte belongs to vector j. Upper bits: two to a vector, vectors 0-3 in the first 64 bytes. Rows
// past the matrix's end have scale 0. A panel begins at a multiple of 64 bytes.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace starscope {

constexpr size_t kPanelRows = 16;
constexpr size_t kGroupBlocks = 8;

enum Type : int {  // as ggml numbers them
    kF32 = 0,
    kF16 = 1,
    kQ4_0 = 2,
    kQ8_0 = 8,
    kQ4_K = 12,
    kQ5_K = 13,
    kQ6_K = 14,
    kBF16 = 30,
};

// One row of the table of types that the engine computes on.
struct PanelType {
    int type_id;
    size_t block_values, block_bytes;  // in a file
    size_t group_bytes;                // of a whole group of 8 blocks; for float types of one column
    bool is_float;
};

constexpr PanelType kPanelTypes[] = {
    {kF32, 1, 4, 64, true},
    {kF16, 1, 2, 32, true},
    {kBF16, 1, 2, 32, true},
    {kQ4_0, 32, 18, 8 * (32 + 256), false},
    {kQ8_0, 32, 34, 8 * (32 + 512), false},
    {kQ4_K, 256, 144, 64 + 256 + 2048, false},
    {kQ5_K, 256, 176, 64 + 256 + 2048 + 512, false},
    {kQ6_K, 256, 210, 320 + 2048 + 1024, false},
};

// Null when the engine does not compute on the type.
inline const PanelType* find_panel_type(int type_id) {
    for (const PanelType& type : kPanelTypes) {
        if (type.type_id == type_id) return &type;
    }
    return nullptr;
}

inline size_t panel_bytes(const PanelType& type, size_t cols) {
    const size_t bytes = type.is_float ? cols * type.group_bytes : (cols / 32) * type.group_bytes / kGroupBlocks;
    return (bytes + 63) / 64 * 64;
}

inline size_t panel_count(size_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// Lays `rows` (1..16) rows of a file, `row_bytes` apart, out as one panel.
void pack_panel(const PanelType& type, const uint8_t* file_rows, size_t row_bytes, size_t rows, size_t cols,
                uint8_t* panel);

}  // namespace starscope
