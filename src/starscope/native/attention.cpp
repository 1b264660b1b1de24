#include "attention.h"

#include <string.h>

#include <algorithm>

#include "attention_parts.h"

namespace starscope {
namespace {

// How many units of each thread are cut into tiles, to keep all threads busy until the end.
constexpr size_t kSplitPerThread = 2;

// Rows that one thread merges at a time, as many as a vector holds at most.
constexpr size_t kMergeRows = 16;

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

// Positions begin .. end-1 of a sequence's new keys and values into one key head of its cache, whichever there are.
void append(const AttentionStep& step, const AttentionArithmetic& arithmetic, const AttentionSequence& sequence,
            int head, size_t begin, size_t end) {
    if (begin >= end) return;
    const CacheShape& cache = step.cache;
    const size_t row = sequence.first_row + begin - sequence.past, column = head * cache.dim;
    if (const FloatRows& rows = step.new_keys; rows.first != nullptr) {
        arithmetic.append_keys(cache.dim, sequence.keys + head * cache.key_bytes(sequence.capacity), begin, end - begin,
                               rows.first + row * rows.stride + column, rows.stride);
    }
    if (const FloatRows& rows = step.new_values; rows.first != nullptr) {
        arithmetic.append_values(cache.dim, sequence.values + head * cache.value_bytes(sequence.capacity), begin,
                                 end - begin, rows.first + row * rows.stride + column, rows.stride);
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
        if (any_long_ && step_.new_keys.first != nullptr) {
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
        return pack_unit(step_, arithmetic_, sequence, head, token, positions, place_.queries);
    }

    uint8_t* tile_values(const AttentionSequence& sequence, int head, size_t number) const {
        const CacheShape& cache = step_.cache;
        return sequence.values + head * cache.value_bytes(sequence.capacity) + cache.value_bytes(number * kTileKeys);
    }

    void attend_tile(const AttentionSequence& sequence, int head, const AttentionRows& rows, size_t number,
                     const AttentionState& state, bool alone, size_t ahead, uint8_t* values = nullptr) const {
        AttentionTile tile = tile_of(step_, sequence, head, rows, number, place_);
        if (values != nullptr) tile.values = values;
        tile.next_keys = tile.keys + step_.cache.key_bytes(ahead * kTileKeys);
        tile.state = state;
        arithmetic_.attend(tile, alone);
    }

    bool finish(const AttentionSequence& sequence, int head, size_t token, size_t row, float sum,
                const float* mix) const {
        const size_t dim = step_.cache.dim;
        float* output = step_.output + (sequence.first_row + token + row / group_) * step_.output_stride +
                        (head * group_ + row % group_) * dim;
        return arithmetic_.finish(dim, sum, mix, output);
    }

    // The heads `begin` .. `end`-1 of one token once more, by itself. Rows that are done together read what the last of
    // them sees, and 0 times a value that is not finite is not 0: so what a later token holds may have got in.
    void attend_again(const AttentionSequence& sequence, int head, size_t token, size_t begin, size_t end) const {
        if (token + 1 == sequence.new_rows) return;  // there is nothing later
        const CacheShape& cache = step_.cache;
        const AttentionRows rows = pack(sequence, head, token, 1);
        const size_t keys = sequence.past + token + 1, last = tiles_of(keys) - 1;
        size_t tile = first_tile(step_, keys - 1);
        for (; tile < last; ++tile) attend_tile(sequence, head, rows, tile, place_.state, false, 1);
        uint8_t* values = nullptr;
        if (cache.half && keys % 2 == 1) {  // a pair of values is read whole: the second one is later
            const size_t pair = keys % kTileKeys / 2 * 2 * cache.padded_dim();
            values = place_.values;
            memcpy(values, tile_values(sequence, head, last), cache.value_bytes(keys % kTileKeys + 1));
            for (size_t d = 0; d < cache.padded_dim(); ++d) reinterpret_cast<uint16_t*>(values)[pair + 2 * d + 1] = 0;
        }
        attend_tile(sequence, head, rows, tile, place_.state, false, 1, values);
        for (size_t row = begin; row < end; ++row) {
            finish(sequence, head, token, row, place_.state.sum[row], place_.state.mix + row * cache.padded_dim());
        }
    }

    // All tiles of a unit, one after another.
    void attend_unit(const AttentionSequence& sequence, int head, size_t token, size_t positions) const {
        const AttentionRows rows = pack(sequence, head, token, positions);
        const size_t tiles = tiles_of(sequence.past + token + positions);
        for (size_t tile = first_tile(step_, rows.position); tile < tiles; ++tile) {
            attend_tile(sequence, head, rows, tile, place_.state, false, 1);
        }
        bool again[kUnitRows] = {};  // by position
        for (size_t row = 0; row < rows.count; ++row) {
            const bool finite = finish(sequence, head, token, row, place_.state.sum[row],
                                       place_.state.mix + row * step_.cache.padded_dim());
            again[row / group_] |= !finite;
        }
        for (size_t i = 0; i < positions; ++i) {
            if (again[i]) attend_again(sequence, head, token + i, 0, group_);
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
        for (size_t tile = first_tile(step_, sequence.past); tile < tiles_of(end_of(sequence)); ++tile) {
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
        const size_t columns = step_.cache.padded_dim(), begins = first_tile(step_, sequence.past);
        const AttentionState first = partial(split, begins);
        // The first of the rows begin .. end-1 whose position is not below this one.
        const auto row_at = [&](size_t position) {
            const size_t token = position > sequence.past ? position - sequence.past : 0;
            return std::clamp(std::min(token, sequence.new_rows) * group_, begin, end);
        };
        // Of our own, as merging writes full vectors.
        float largest[row_room(kMergeRows)], sum[row_room(kMergeRows)];
        memcpy(largest, first.largest + begin, kMergeRows * sizeof(float));
        memcpy(sum, first.sum + begin, kMergeRows * sizeof(float));
        for (size_t tile = begins + 1; tile < tiles_of(sequence.past + (end - 1) / group_ + 1); ++tile) {
            const size_t key = tile * kTileKeys, row = row_at(key);
            // Rows from here on see no tile before this one, and rows from there on not this one either.
            const size_t set = std::max(row, row_at(key + step_.window - 1));
            const size_t stop = std::max(row, row_at(key + kTileKeys + step_.window - 1));
            const AttentionState later = partial(split, tile);
            if (row < set) {
                arithmetic_.merge(step_.cache.dim, set - row,
                                  {largest + (row - begin), sum + (row - begin), first.mix + row * columns},
                                  {later.largest + row, later.sum + row, later.mix + row * columns});
            }
            for (size_t r = set; r < stop; ++r) {
                largest[r - begin] = later.largest[r], sum[r - begin] = later.sum[r];
                memcpy(first.mix + r * columns, later.mix + r * columns, columns * sizeof(float));
            }
        }
        for (size_t row = begin, next; row < end; row = next) {
            const size_t token = row / group_;
            bool finite = true;
            for (next = row; next < std::min(end, (token + 1) * group_); ++next) {
                finite &= finish(sequence, head, 0, next, sum[next - begin], first.mix + next * columns);
            }
            if (!finite) attend_again(sequence, head, token, row % group_, row % group_ + next - row);
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
