// What one instruction set offers the engine besides attention: products with panels, and the small steps between them.
//
// A linear layer takes its rows in tiles of kTileRows, the last with what is left. `prepare` lays float32 rows out
// in their places in a tile: int8 blocks of 32 with a scale each for quantized weights, the numbers themselves for
// float ones. `multiply` gives the products of the rows of a tile with one panel; `finish` adds the bias and what else
// follows. The sum over the columns has one order for each row, whatever the other rows are: block by block for
// quantized weights (within a block sums are of integers, exact), column by column for float ones.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "panels.h"

namespace starscope {

constexpr size_t kTileRows = 12;

// A tile of `rows` prepared rows in memory. For quantized weights (`blocks` = columns / 32):
//     int8   quants[blocks][rows][32]
//     float  scale[blocks][rows]
//     int32  start[blocks][rows][2]    what the integer sum of each half block starts from: it takes back what was
//     added
//                                      to the quants of the weights to make them unsigned; or, for types with a
//                                      minimum,
//     float  start[blocks][rows][2]    scale times the sum of the block's quants
// For float weights: float values[cols][rows].
inline size_t tile_bytes(const PanelType& type, size_t cols, size_t rows) {
    const size_t bytes = type.is_float ? cols * rows * 4 : (cols / 32) * rows * (32 + 4 + 8);
    return (bytes + 63) / 64 * 64;
}

// How rows are laid out for a type: types with the same number share prepared rows.
inline int prepared_form(const PanelType& type) {
    return type.is_float ? kF32 : type.type_id == kQ5_K ? kQ4_K : type.type_id;
}

enum Activation : int { kNoActivation = 0, kGelu = 1, kGeluTanh = 2, kSilu = 3 };

// By the names of their ops.
constexpr struct {
    const char* name;
    Activation activation;
} kActivations[] = {{"gelu", kGelu}, {"gelu_tanh", kGeluTanh}, {"silu", kSilu}};

// One row: y = (x - mean) / sqrt(variance + epsilon) * weight + bias, or y = x / sqrt(mean of squares + epsilon) *
// weight + bias. `bias` may be null.
using Norm = void (*)(const float* x, size_t cols, float epsilon, const float* weight, const float* bias, float* y);

struct Epilogue {
    const float* bias;      // of these columns and, at the end, up to a multiple of 16; or null
    Activation activation;  // after the bias; of the gate where there is one
    const float* gate;      // products of a second matrix, laid out like the first's, which they multiply; or null
    const float* gate_bias;
    const float* residual;  // of the first row, added last; or null
    size_t residual_stride;
};

struct ComputeKernels {
    const char* isa;
    Norm layer_norm, rms_norm;
    void (*add)(const float* a, const float* b, float* y, size_t count);
    void (*times)(const float* a, const float* b, float* y, size_t count);
    // Turns `heads` heads of `dim` numbers, in pairs (i, i + dim / 2), by angles whose cosines are in turn[0..dim/2)
    // and sines behind them. y may be x.
    void (*rotate)(const float* x, size_t heads, size_t dim, const float* turn, float* y);
    void (*activate)(Activation activation, const float* x, float* y, size_t count);
    // `count` rows into places row .. row+count-1 of a tile of `rows`.
    void (*prepare)(const PanelType& type, const float* const* x, size_t count, size_t cols, size_t row, size_t rows,
                    uint8_t* tile);
    // products[panel][row][16] of a tile with `panels` panels, panel_bytes apart.
    void (*multiply)(const PanelType& type, const uint8_t* panel, size_t panel_bytes, size_t panels, size_t cols,
                     const uint8_t* tile, size_t rows, float* products);
    // For many rows: columns first .. first+count-1 of a panel (`first` a multiple of 256), its quants unpacked to
    // bytes once for many tiles, in `part` (part_bytes(type, count); float types are given back as they lie).
    // multiply_part adds those columns to the products [row][16] of one tile, which it sets for first = 0. Going
    // through all columns in order gives the bits of `multiply`.
    size_t (*part_bytes)(const PanelType& type, size_t cols);
    const uint8_t* (*unpack)(const PanelType& type, const uint8_t* panel, size_t first, size_t count, size_t cols,
                             uint8_t* part);
    void (*multiply_part)(const PanelType& type, const uint8_t* part, size_t first, size_t count, size_t cols,
                          const uint8_t* tile, size_t rows, float* products);
    // out[row][0..cols) for products[panel][row][16] of neighbouring panels, panel_stride floats apart.
    void (*finish)(const float* products, size_t panel_stride, size_t rows, size_t cols, const Epilogue& epilogue,
                   float* out, size_t out_stride);
};

namespace scalar {
extern const ComputeKernels compute;
}
namespace avx2 {
extern const ComputeKernels compute;
}
namespace avx512 {
extern const ComputeKernels compute;
}

}  // namespace starscope
