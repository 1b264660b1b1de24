#include "attention.h"

#include <string.h>

#include <algorithm>

namespace starscope {
namespace {

// Query rows that read a key head together, unless one position has more. More would spread the conversion of keys and
// values over more rows, and leave fewer units to share out.
constexpr size_t kUnitRows = 96;

// How many units of each thread are cut into tiles, to keep all threads busy until the end.
constexpr size_t kSplitPerThread = 2;

// Rows that one thread merges at a time, as many as a vector holds at most.
constexpr size_t kMergeRows = 16;

constexpr float kLog2E = 1.44269504f;

constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

size_t tiles_of(size_t positions) { return (positions + kTileKeys - 1) / kTileKeys; }

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

AttentionState take_state(Arena& arena, size_t rows, size_t columns) {
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
};

Workplace take_workplace(Arena& arena, const CacheShape& cache, size_t rows) {
    Workplace place;
    place.queries = arena.take<uint32_t>(cache.even_dim() * query_stride(rows));
    place.tile.panel = arena.take<uint32_t>(panel_words(cache.dim));
    place.tile.scores = arena.take<float>(rows * kScoreStride);
    for (float** row : {&place.tile.largest, &place.tile.sum, &place.tile.keep, &place.tile.add}) {
        *row = arena.take<float>(row_room(rows));
    }
    place.state = take_state(arena, rows, cache.padded_dim());
    return place;
}

// Positions of a unit: one at least.
size_t unit_positions(size_t heads_per_key_head) { return std::max<size_t>(1, kUnitRows / heads_per_key_head); }

// The sizes that scratch is made of, the same in attention_scratch_bytes and in attend.
struct Sizes {
    size_t unit_rows;    // at most
    size_t splits;       // units cut into tiles, at most
    size_t split_tiles;  // of one unit, at most

    Sizes(const CacheShape& cache, int heads, size_t rows, size_t sequences, size_t longest, int threads) {
        const size_t group = heads / cache.kv_heads;
        unit_rows = std::min(unit_positions(group), std::max<size_t>(rows, 1)) * group;
        splits = threads == 1 ? 0 : std::min(kSplitPerThread * threads, sequences * cache.kv_heads);
        split_tiles = tiles_of(longest);
    }
};

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

size_t end_of(const AttentionSequence& sequence) { return sequence.past + sequence.new_rows; }

const AttentionArithmetic& arithmetic_of(const AttentionKernels& kernels, const AttentionStep& step) {
    return step.cache.half ? kernels.half : kernels.single;
}

// Positions begin .. end-1 of a sequence's new keys and values into one key head of its cache, whichever there are.
void append(const AttentionStep& step, const AttentionArithmetic& arithmetic, const AttentionSequence& sequence,
            int head, size_t begin, size_t end) {
    if (begin >= end) return;
    const CacheShape& cache = step.cache;
    const size_t offset = (sequence.first_row + begin - sequence.past) * step.stride + head * cache.dim;
    if (step.new_keys != nullptr) {
        arithmetic.append_keys(cache.dim, sequence.keys + head * cache.key_bytes(sequence.capacity), begin, end - begin,
                               step.new_keys + offset, step.stride);
    }
    if (step.new_values != nullptr) {
        arithmetic.append_values(cache.dim, sequence.values + head * cache.value_bytes(sequence.capacity), begin,
                                 end - begin, step.new_values + offset, step.stride);
    }
}

void append_in_tile(const AttentionStep& step, const AttentionArithmetic& arithmetic, const AttentionSequence& sequence,
                    int head, size_t tile) {
    append(step, arithmetic, sequence, head, std::max(sequence.past, tile * kTileKeys),
           std::min(end_of(sequence), (tile + 1) * kTileKeys));
}

void append_sequence(const AttentionStep& step, const AttentionArithmetic& arithmetic,
                     const AttentionSequence& sequence, Queue& queue) {
    for (int head = 0; head < step.cache.kv_heads; ++head) {
        for (size_t tile = sequence.past / kTileKeys; tile < tiles_of(end_of(sequence)); ++tile) {
            if (!queue.reached()) continue;
            append_in_tile(step, arithmetic, sequence, head, tile);
            queue.take();
        }
    }
}

// One thread's part of a step.
class Worker {
  public:
    Worker(const AttentionKernels& kernels, const AttentionStep& step, Team& team, int thread, uint8_t* scratch)
        : step_(step),
          arithmetic_(arithmetic_of(kernels, step)),
          team_(team),
          group_(step.heads / step.cache.kv_heads),
          unit_positions_(unit_positions(group_)) {
        size_t rows = 0, longest = 0;
        for (size_t i = 0; i < step.count; ++i) {
            const AttentionSequence& sequence = step.sequences[i];
            rows += sequence.new_rows;
            longest = std::max(longest, sequence.past + sequence.new_rows);
            if (is_short(sequence)) short_units_ += step.cache.kv_heads;
            any_long_ = any_long_ || is_long(sequence);
        }
        const Sizes sizes(step.cache, step.heads, rows, step.count, longest, team.size());
        splits_ = std::min(sizes.splits, short_units_);
        split_tiles_ = sizes.split_tiles;
        split_rows_ = sizes.unit_rows;

        Arena arena(scratch);
        for (int i = 0; i < team.size(); ++i) {
            const Workplace place = take_workplace(arena, step.cache, sizes.unit_rows);
            if (i == thread) place_ = place;
        }
        partial_ = scratch + arena.used();
        Arena state(nullptr);
        take_state(state, split_rows_, step.cache.padded_dim());
        partial_bytes_ = state.used();
    }

    void run() {
        if (any_long_ && step_.new_keys != nullptr) {
            append_long();
            team_.barrier();
        }
        Queue queue(team_);
        attend_long(queue);
        attend_short(queue);
        if (splits_ > 0) {
            team_.barrier();
            merge();
        }
        team_.barrier();
    }

  private:
    // Sequences of one unit for each key head: the thread that needs its new keys and values appends them.
    bool is_short(const AttentionSequence& sequence) const {
        return sequence.new_rows > 0 && sequence.new_rows <= unit_positions_;
    }
    bool is_long(const AttentionSequence& sequence) const { return sequence.new_rows > unit_positions_; }

    // Calls f(sequence, key head, index of the split or splits_ if it is none) for the units of short sequences.
    template <typename F>
    void for_short_units(F f) const {
        size_t whole = short_units_ - splits_, split = 0;
        for (size_t i = 0; i < step_.count; ++i) {
            const AttentionSequence& sequence = step_.sequences[i];
            if (!is_short(sequence)) continue;
            for (int head = 0; head < step_.cache.kv_heads; ++head) {
                if (whole > 0) {
                    --whole;
                    f(sequence, head, splits_);
                } else {
                    f(sequence, head, split++);
                }
            }
        }
    }

    void append_long() {
        Queue queue(team_);
        for (size_t i = 0; i < step_.count; ++i) {
            if (is_long(step_.sequences[i])) append_sequence(step_, arithmetic_, step_.sequences[i], queue);
        }
    }

    // Packs the queries of a unit: `positions` tokens from the sequence's new token `token` on.
    AttentionRows pack(const AttentionSequence& sequence, int head, size_t token, size_t positions) const {
        const size_t dim = step_.cache.dim;
        const AttentionRows rows{positions * group_, group_, sequence.past + token};
        const size_t stride = query_stride(rows.count);
        for (size_t row = 0; row < rows.count; ++row) {
            const float* query = step_.queries + (sequence.first_row + token + row / group_) * step_.stride +
                                 (head * group_ + row % group_) * dim;
            arithmetic_.pack(dim, query, step_.scale * kLog2E, place_.queries + row, stride);
        }
        return rows;
    }

    void attend_tile(const AttentionSequence& sequence, int head, const AttentionRows& rows, size_t number,
                     const AttentionState& state, bool alone, size_t ahead) const {
        const CacheShape& cache = step_.cache;
        AttentionTile tile;
        tile.dim = cache.dim;
        tile.first_key = number * kTileKeys;
        tile.keys = sequence.keys + head * cache.key_bytes(sequence.capacity) + cache.key_bytes(tile.first_key);
        tile.values = sequence.values + head * cache.value_bytes(sequence.capacity) + cache.value_bytes(tile.first_key);
        tile.next_keys = tile.keys + cache.key_bytes(ahead * kTileKeys);
        tile.rows = rows;
        tile.queries = place_.queries;
        tile.query_stride = query_stride(rows.count);
        tile.scratch = place_.tile;
        tile.state = state;
        arithmetic_.attend(tile, alone);
    }

    void finish(const AttentionSequence& sequence, int head, size_t token, size_t row, float sum,
                const float* mix) const {
        const size_t dim = step_.cache.dim;
        float* output = step_.output + (sequence.first_row + token + row / group_) * step_.output_stride +
                        (head * group_ + row % group_) * dim;
        arithmetic_.finish(dim, sum, mix, output);
    }

    // All tiles of a unit, one after another.
    void attend_unit(const AttentionSequence& sequence, int head, size_t token, size_t positions) const {
        const AttentionRows rows = pack(sequence, head, token, positions);
        const size_t tiles = tiles_of(sequence.past + token + positions);
        for (size_t tile = 0; tile < tiles; ++tile) attend_tile(sequence, head, rows, tile, place_.state, false, 1);
        for (size_t row = 0; row < rows.count; ++row) {
            finish(sequence, head, token, row, place_.state.sum[row],
                   place_.state.mix + row * step_.cache.padded_dim());
        }
    }

    // The units of a sequence from its end on: those that see most keys first.
    void attend_long(Queue& queue) const {
        for (size_t i = 0; i < step_.count; ++i) {
            const AttentionSequence& sequence = step_.sequences[i];
            if (!is_long(sequence)) continue;
            const size_t units = (sequence.new_rows + unit_positions_ - 1) / unit_positions_;
            for (size_t unit = units; unit-- > 0;) {
                const size_t token = unit * unit_positions_;
                for (int head = 0; head < step_.cache.kv_heads; ++head) {
                    if (!queue.reached()) continue;
                    attend_unit(sequence, head, token, std::min(unit_positions_, sequence.new_rows - token));
                    queue.take();
                }
            }
        }
    }

    void attend_short(Queue& queue) const {
        for_short_units([&](const AttentionSequence& sequence, int head, size_t split) {
            if (split < splits_) return attend_split(queue, sequence, head, split);
            if (!queue.reached()) return;
            append(step_, arithmetic_, sequence, head, sequence.past, end_of(sequence));
            attend_unit(sequence, head, 0, sequence.new_rows);
            queue.take();
        });
    }

    void attend_split(Queue& queue, const AttentionSequence& sequence, int head, size_t split) const {
        AttentionRows rows{0, 0, 0};
        for (size_t tile = 0; tile < tiles_of(end_of(sequence)); ++tile) {
            if (!queue.reached()) continue;
            if (rows.count == 0) rows = pack(sequence, head, 0, sequence.new_rows);
            append_in_tile(step_, arithmetic_, sequence, head, tile);
            attend_tile(sequence, head, rows, tile, partial(split, tile), true, team_.size());
            queue.take();
        }
    }

    // The state of a unit's rows after one tile alone.
    AttentionState partial(size_t split, size_t tile) const {
        Arena arena(partial_ + (split * split_tiles_ + tile) * partial_bytes_);
        return take_state(arena, split_rows_, step_.cache.padded_dim());
    }

    void merge() {
        Queue queue(team_);
        for_short_units([&](const AttentionSequence& sequence, int head, size_t split) {
            if (split == splits_) return;
            const size_t rows = sequence.new_rows * group_, pieces = 2 * team_.size();
            const size_t piece = std::min((rows + pieces - 1) / pieces, kMergeRows);
            for (size_t row = 0; row < rows; row += piece) {
                if (!queue.reached()) continue;
                merge_rows(sequence, head, split, row, std::min(row + piece, rows));
                queue.take();
            }
        });
    }

    // Merges tiles in their order into the first one's state, all for the rows begin .. end-1.
    void merge_rows(const AttentionSequence& sequence, int head, size_t split, size_t begin, size_t end) const {
        const size_t columns = step_.cache.padded_dim();
        const AttentionState first = partial(split, 0);
        // Of our own, as merging writes full vectors.
        float largest[row_room(kMergeRows)], sum[row_room(kMergeRows)];
        memcpy(largest, first.largest + begin, kMergeRows * sizeof(float));
        memcpy(sum, first.sum + begin, kMergeRows * sizeof(float));
        for (size_t tile = 1; tile < tiles_of(sequence.past + (end - 1) / group_ + 1); ++tile) {
            const size_t key = tile * kTileKeys;
            const size_t row = std::max(begin, key > sequence.past ? (key - sequence.past) * group_ : 0);
            const AttentionState later = partial(split, tile);
            arithmetic_.merge(step_.cache.dim, end - row,
                              {largest + (row - begin), sum + (row - begin), first.mix + row * columns},
                              {later.largest + row, later.sum + row, later.mix + row * columns});
        }
        for (size_t row = begin; row < end; ++row) {
            finish(sequence, head, 0, row, sum[row - begin], first.mix + row * columns);
        }
    }

    const AttentionStep& step_;
    const AttentionArithmetic& arithmetic_;
    Team& team_;
    const size_t group_;  // query heads of a key head
    const size_t unit_positions_;
    bool any_long_ = false;
    size_t short_units_ = 0;
    size_t splits_;
    size_t split_tiles_;
    size_t split_rows_;
    Workplace place_;
    uint8_t* partial_;
    size_t partial_bytes_;
};

}  // namespace

size_t attention_scratch_bytes(const CacheShape& cache, int heads, size_t rows, size_t sequences, size_t longest,
                               int threads) {
    const Sizes sizes(cache, heads, rows, sequences, longest, threads);
    Arena arena(nullptr);
    for (int i = 0; i < threads; ++i) take_workplace(arena, cache, sizes.unit_rows);
    for (size_t i = 0; i < sizes.splits * sizes.split_tiles; ++i) {
        take_state(arena, sizes.unit_rows, cache.padded_dim());
    }
    return arena.used();
}

void append_new(const AttentionKernels& kernels, const AttentionStep& step, Team& team) {
    Queue queue(team);
    for (size_t i = 0; i < step.count; ++i) {
        append_sequence(step, arithmetic_of(kernels, step), step.sequences[i], queue);
    }
    team.barrier();
}

void attend(const AttentionKernels& kernels, const AttentionStep& step, Team& team, int thread, uint8_t* scratch) {
    Worker(kernels, step, team, thread, scratch).run();
}

}  // namespace starscope
