// Attention of new rows over cached keys and values, fused: scores, softmax and mix without the scores ever in memory.
//
// Keys are cut into tiles of kTileKeys, anchored at position 0. Every tile gives each query row a partial result of its
// own (its largest score, the sum of its weights, its mix), and partial results are merged in the order of the tiles.
// Tiles before a row's window are as if they were not there. So a row's bits depend on its query and on the keys that
// it sees, not on how many rows or threads there are, nor on how the tokens were split into steps. All query heads of a
// key head are rows that read it together.
//
// How the cache of one sequence, one block and one key head lies in memory (`capacity` positions, a multiple of
// kTileKeys; zeros where nothing was written yet):
//
//     half (quantized files): float16, attended to in bfloat16 products with float32 sums
//         keys    [capacity/16][even(dim)/2][16 positions][2 dims]    even(n): rounded up to a multiple of 2
//         values  [capacity/2][padded(dim)][2 positions]              padded(n): rounded up to a multiple of 16
//     float (F32 files): float32 throughout
//         keys    [capacity/16][dim][16 positions]
//         values  [capacity][padded(dim)]
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "attention_kernels.h"
#include "team.h"

namespace starscope {

struct CacheShape {
    bool half;  // float16, or float32
    int kv_heads;
    int dim;

    size_t element() const { return half ? 2 : 4; }
    size_t padded_dim() const { return (static_cast<size_t>(dim) + 15) / 16 * 16; }
    size_t even_dim() const { return (static_cast<size_t>(dim) + 1) / 2 * 2; }
    // Bytes of one key head's keys, and of its values.
    size_t key_bytes(size_t capacity) const { return capacity * (half ? even_dim() : dim) * element(); }
    size_t value_bytes(size_t capacity) const { return capacity * padded_dim() * element(); }
};

// One sequence of a step: rows first_row .. first_row+new_rows-1 are its tokens past .. past+new_rows-1. `keys` and
// `values` are this block's, kv_heads regions of key_bytes(capacity) and value_bytes(capacity) one after another.
struct AttentionSequence {
    size_t first_row;
    size_t new_rows;
    size_t past;
    size_t capacity;
    uint8_t* keys;
    uint8_t* values;
};

// Row r is at first + r * stride.
struct FloatRows {
    const float* first = nullptr;
    size_t stride = 0;
};

struct AttentionStep {
    CacheShape cache;
    int heads;      // query heads; head h reads key head h / (heads / kv_heads)
    float scale;    // of the scores
    size_t window;  // a token sees so many positions at the most, its own the last of them; at most kNoWindow
    // Head h of a row is at column h * dim. Keys and values are new, not yet cached; null: they have been appended
    // already. The output's heads lie side by side too.
    FloatRows queries, new_keys, new_values;
    float* output;
    size_t output_stride;
    const AttentionSequence* sequences;
    size_t count;
};

// Bytes of scratch for any step of at most that many new rows and sequences, the longest of `longest` tokens (past and
// new ones) at its end.
size_t attention_scratch_bytes(const CacheShape& cache, int heads, size_t rows, size_t sequences, size_t longest,
                               int threads);

// Called by every thread of the team, within a job, when all inputs are there; when they return all of the output is
// there. `attend` appends the step's keys and values to the caches and writes the output of all its rows; `append_new`
// only appends, or only one of the two when the other is null.
void append_new(const AttentionKernels& kernels, const AttentionStep& step, Team& team);
void attend(const AttentionKernels& kernels, const AttentionStep& step, Team& team, int thread, uint8_t* scratch);

}  // namespace starscope
