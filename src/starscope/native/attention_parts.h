// What attention.cpp and patterns.cpp share: pieces of scratch, and how threads share out work.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <algorithm>

#include "attention.h"

namespace starscope {

// Query rows that read a key head together, unless one position has more. More would spread the conversion of keys and
// values over more rows, and leave fewer units to share out.
constexpr size_t kUnitRows = 96;

constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

inline size_t tiles_of(size_t positions) { return (positions + kTileKeys - 1) / kTileKeys; }

// Cuts arrays out of a piece of memory, or just counts when there is none.
class Arena {
  public:
    explicit Arena(uint8_t* base) : base_(base) {}

    template <typename T>
    T* take(size_t count) {
        T* at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
        used_ += aligned(count * sizeof(T));
        return at;
    }
    size_t used() const { return used_; }

  private:
    uint8_t* base_;
    size_t used_ = 0;
};

inline AttentionState take_state(Arena& arena, size_t rows, size_t columns) {
    AttentionState state;
    state.largest = arena.take<float>(row_room(rows));
    state.sum = arena.take<float>(row_room(rows));
    state.mix = arena.take<float>(rows * columns);
    return state;
}

// What one thread has to itself.
struct Workplace {
    uint32_t* queries;
    AttentionScratch tile;
    AttentionState state;
    uint8_t* values;  // of a tile, without those that a row does not see
};

inline Workplace take_workplace(Arena& arena, const CacheShape& cache, size_t rows) {
    Workplace place;
    place.queries = arena.take<uint32_t>(cache.even_dim() * query_stride(rows));
    place.tile.panel = arena.take<uint32_t>(panel_words(cache.dim));
    place.tile.scores = arena.take<float>(rows * kScoreStride);
    for (float** row : {&place.tile.largest, &place.tile.sum, &place.tile.keep, &place.tile.add}) {
        *row = arena.take<float>(row_room(rows));
    }
    place.state = take_state(arena, rows, cache.padded_dim());
    place.values = arena.take<uint8_t>(cache.value_bytes(kTileKeys));
    return place;
}

// The first position that a token at `position` sees, and the first tile.
inline size_t first_seen(const AttentionStep& step, size_t position) {
    return position < step.window ? 0 : position - step.window + 1;
}
inline size_t first_tile(const AttentionStep& step, size_t position) { return first_seen(step, position) / kTileKeys; }

// Positions of a unit: one at least.
inline size_t unit_positions(size_t heads_per_key_head) { return std::max<size_t>(1, kUnitRows / heads_per_key_head); }

// Counts through the items of work in the order in which every thread meets them, and takes some of them.
class Queue {
  public:
    explicit Queue(Team& team) : team_(team) { take(); }

    // Whether the next item is this thread's. After doing it, take().
    bool reached() { return item_++ == mine_; }
    void take() { mine_ = team_.take(1); }

  private:
    Team& team_;
    size_t item_ = 0;
    size_t mine_;
};

inline size_t end_of(const AttentionSequence& sequence) { return sequence.past + sequence.new_rows; }

inline const AttentionArithmetic& arithmetic_of(const AttentionKernels& kernels, const AttentionStep& step) {
    return step.cache.half ? kernels.half : kernels.single;
}

// Packs the queries of a unit: `positions` tokens from the sequence's new token `token` on.
inline AttentionRows pack_unit(const AttentionStep& step, const AttentionArithmetic& arithmetic,
                               const AttentionSequence& sequence, int head, size_t token, size_t positions,
                               uint32_t* queries) {
    const size_t dim = step.cache.dim, group = step.heads / step.cache.kv_heads;
    const AttentionRows rows{positions * group, group, sequence.past + token};
    const size_t stride = query_stride(rows.count);
    for (size_t row = 0; row < rows.count; ++row) {
        const float* query = step.queries.first + (sequence.first_row + token + row / group) * step.queries.stride +
                             (head * group + row % group) * dim;
        arithmetic.pack(dim, query, step.scale * kLog2E, queries + row, stride);
    }
    return rows;
}

// One tile of one key head of a sequence's cache, for packed queries.
inline AttentionTile tile_of(const AttentionStep& step, const AttentionSequence& sequence, int head,
                             const AttentionRows& rows, size_t number, const Workplace& place) {
    const CacheShape& cache = step.cache;
    AttentionTile tile;
    tile.dim = cache.dim;
    tile.first_key = number * kTileKeys;
    tile.keys = sequence.keys + head * cache.key_bytes(sequence.capacity) + cache.key_bytes(tile.first_key);
    tile.values = sequence.values + head * cache.value_bytes(sequence.capacity) + cache.value_bytes(tile.first_key);
    tile.next_keys = tile.keys;
    tile.rows = rows;
    tile.window = step.window;
    tile.queries = place.queries;
    tile.query_stride = query_stride(rows.count);
    tile.scratch = place.tile;
    tile.state = place.state;
    return tile;
}

}  // namespace starscope
