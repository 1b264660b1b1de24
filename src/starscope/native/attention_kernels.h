// What one instruction set offers for attention: a table for float16 caches and one for float32 caches. The same tables
// exist for every set, filled by compiling attention_kernels.cpp again. Results differ between sets by roundings only.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace starscope {

constexpr size_t kTileKeys = 128;
constexpr size_t kNoWindow = SIZE_MAX / 2;  // more than any position
constexpr float kLog2E = 1.44269504f;

// The query rows that read a key head together: row r is head r % heads of the token at position + r / heads.
struct AttentionRows {
    size_t count;
    size_t heads;
    size_t position;
};

// A softmax that has seen some of the keys. With s the scores in powers of two (see `pack`), the weights are
// 2^(s - largest); mix holds the sums of weight times value, a row of padded(dim) for each query row, not yet divided
// by the sum of the weights. Arrays of one float a row have room for row_room(rows).
struct AttentionState {
    float* largest;
    float* sum;
    float* mix;
};

// Full vectors are read and written from any row on.
constexpr size_t row_room(size_t rows) { return (rows + 15) / 16 * 16 + 16; }

// Packed queries lie [steps][query_stride(rows)], so that the rows of a step are neighbours. An odd number of cache
// lines apart, steps spread over all sets of the cache.
constexpr size_t query_stride(size_t rows) { return ((rows + 15) / 16 | 1) * 16; }

// Words from one row of scores to the next: a tile, and a cache line that keeps rows out of each other's sets.
constexpr size_t kScoreStride = kTileKeys + 16;

// What a thread needs to work on a tile.
struct AttentionScratch {
    uint32_t* panel;  // panel_words(dim): keys or values, converted
    float* scores;    // rows * kScoreStride, and the weights made from them
    float* largest;   // row_room(rows) each: the tile's own state,
    float* sum;
    float* keep;  // and what the older and the tile's mix are multiplied by
    float* add;
};

constexpr size_t panel_words(size_t dim) { return 32 * (dim + 1 > kTileKeys ? dim + 1 : kTileKeys); }

struct AttentionTile {
    size_t dim;
    size_t first_key;  // position of the tile's first key
    uint8_t* keys;     // the tile's part of the cache
    uint8_t* values;
    const uint8_t* next_keys;  // those of the tile that this thread will probably attend to next
    AttentionRows rows;        // in the order of positions; some of them see this tile
    size_t window;             // positions that a row sees, its own the last of them
    const uint32_t* queries;
    size_t query_stride;  // words from a step to the next
    AttentionScratch scratch;
    AttentionState state;
};

struct AttentionArithmetic {
    // Write `count` positions, the first being `position`, into the cache of one key head. Position i is read at
    // from + i * stride.
    void (*append_keys)(size_t dim, uint8_t* keys, size_t position, size_t count, const float* from, size_t stride);
    void (*append_values)(size_t dim, uint8_t* values, size_t position, size_t count, const float* from, size_t stride);
    // Writes one query, multiplied by `scale`, as a column of the packed queries. The scale has the scores in powers of
    // two: log2(e) times what the model asks for.
    void (*pack)(size_t dim, const float* query, float scale, uint32_t* column, size_t stride);
    // Attends to a tile. The first one that a row sees, or any `alone`, sets the row's state, others are merged into
    // it.
    void (*attend)(const AttentionTile& tile, bool alone);
    // The first part of `attend`: the scores of the keys that each row sees, in powers of two, in the scratch's rows.
    void (*score)(const AttentionTile& tile);
    // Turns `count` scores in natural units into probabilities: weights as `attend` makes them, divided by their sum.
    void (*softmax)(float* scores, size_t count);
    // Mixes `columns` columns of the tile's first `keys` values by weights in the scratch's rows, float32 as they are.
    // Adds to the state's mix, or sets it.
    void (*mix)(const AttentionTile& tile, size_t column, size_t columns, size_t keys, bool set);
    // Merges `count` <= 16 rows of `later` into those of `state`.
    void (*merge)(size_t dim, size_t count, const AttentionState& state, const AttentionState& later);
    // Writes a row's result, dim values: its mix divided by the sum of its weights. Whether all of them are finite.
    bool (*finish)(size_t dim, float sum, const float* mix, float* output);
};

struct AttentionKernels {
    const char* isa;
    AttentionArithmetic half;
    AttentionArithmetic single;
};

namespace scalar {
extern const AttentionKernels attention_kernels;
}
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}
namespace avx512_bf16 {
extern const AttentionKernels attention_kernels;
}

}  // namespace starscope
