#include "patterns.h"

#include <float.h>
#include <string.h>

#include <algorithm>

#include "attention_parts.h"

namespace starscope {
namespace {

constexpr float kLn2 = 0.693147181f;
constexpr size_t kMixColumns = 32;  // that are mixed by one thread at a time

// One thread's part of a step.
class Worker {
  public:
    Worker(const AttentionKernels& kernels, const AttentionStep& step, Team& team, int thread, uint8_t* scratch)
        : step_(step),
          arithmetic_(arithmetic_of(kernels, step)),
          team_(team),
          group_(step.heads / step.cache.kv_heads),
          unit_positions_(unit_positions(group_)) {
        size_t rows = 1;
        for (size_t i = 0; i < step.count; ++i) rows = std::max(rows, step.sequences[i].new_rows);
        Arena arena(scratch);
        for (int i = 0; i <= thread; ++i) {
            place_ = take_workplace(arena, step.cache, std::min(unit_positions_, rows) * group_);
        }
    }

    void scores(float* patterns) {
        Queue queue(team_);
        for_units(patterns,
                  [&](const AttentionSequence& sequence, int head, size_t token, size_t positions, float* pattern) {
                      AttentionRows rows{0, 0, 0};
                      for (size_t tile = 0; tile < tiles_of(end_of(sequence)); ++tile) {
                          if (!queue.reached()) continue;
                          if (rows.count == 0) {
                              rows = pack_unit(step_, arithmetic_, sequence, head, token, positions, place_.queries);
                          }
                          score_tile(sequence, head, token, rows, tile, pattern);
                          queue.take();
                      }
                  });
        team_.barrier();
    }

    void mix(const float* patterns) {
        Queue queue(team_);
        for_units(const_cast<float*>(patterns), [&](const AttentionSequence& sequence, int head, size_t token,
                                                    size_t positions, const float* pattern) {
            for (size_t column = 0; column < static_cast<size_t>(step_.cache.dim); column += kMixColumns) {
                if (!queue.reached()) continue;
                mix_columns(sequence, head, token, positions, column, pattern);
                queue.take();
            }
        });
        team_.barrier();
    }

  private:
    // Calls f(sequence, key head, first new token, tokens, the sequence's pattern) for rows that read a key head
    // together.
    template <typename F>
    void for_units(float* patterns, F f) const {
        for (size_t i = 0; i < step_.count; ++i) {
            const AttentionSequence& sequence = step_.sequences[i];
            for (size_t token = 0; token < sequence.new_rows; token += unit_positions_) {
                const size_t positions = std::min(unit_positions_, sequence.new_rows - token);
                for (int head = 0; head < step_.cache.kv_heads; ++head) f(sequence, head, token, positions, patterns);
            }
            patterns += step_.heads * sequence.new_rows * end_of(sequence);
        }
    }

    // Where the keys of a unit's row begin in a sequence's pattern.
    size_t at(const AttentionSequence& sequence, int head, size_t token, size_t row) const {
        return ((head * group_ + row % group_) * sequence.new_rows + token + row / group_) * end_of(sequence);
    }

    void score_tile(const AttentionSequence& sequence, int head, size_t token, const AttentionRows& rows, size_t number,
                    float* pattern) const {
        const size_t first = number * kTileKeys, keys = std::min(kTileKeys, end_of(sequence) - first);
        const AttentionTile tile = tile_of(step_, sequence, head, rows, number, place_);
        arithmetic_.score(tile);
        for (size_t row = 0; row < rows.count; ++row) {
            // Of the tile's keys the row sees those from `begin` to `end`.
            const auto within = [&](size_t key) { return key > first ? std::min(key - first, keys) : 0; };
            const size_t position = rows.position + row / group_;
            const size_t begin = within(first_seen(step_, position)), end = within(position + 1);
            const float* scores = place_.tile.scores + row * kScoreStride;
            float* to = pattern + at(sequence, head, token, row) + first;
            for (size_t key = 0; key < keys; ++key) {
                to[key] = key >= begin && key < end ? scores[key] * kLn2 : -FLT_MAX;
            }
        }
    }

    void mix_columns(const AttentionSequence& sequence, int head, size_t token, size_t positions, size_t column,
                     const float* pattern) const {
        const size_t count = positions * group_;
        mix_rows(sequence, head, token, 0, count, column, end_of(sequence), pattern);
        for (size_t row = 0; row < count; ++row) write_output(sequence, head, token, row, column, row);
        // 0 times a value that is not finite is not 0: a row by itself meets only what it gives a weight.
        for (size_t row = 0; row < count; ++row) {
            if (is_finite(sequence, head, token, row, column)) continue;
            const float* weights = pattern + at(sequence, head, token, row);
            size_t keys = end_of(sequence);
            while (keys > 1 && weights[keys - 1] == 0) --keys;
            mix_rows(sequence, head, token, row, 1, column, keys, pattern);
            write_output(sequence, head, token, row, column, 0);
        }
    }

    // Mixes the first `keys` values by the weights of a unit's rows first_row .. first_row+count-1.
    void mix_rows(const AttentionSequence& sequence, int head, size_t token, size_t first_row, size_t count,
                  size_t column, size_t keys, const float* pattern) const {
        const AttentionRows rows{count, group_, sequence.past + token};
        const size_t columns = std::min(kMixColumns, step_.cache.dim - column);
        bool is_first = true;
        for (size_t number = 0; number < tiles_of(keys); ++number) {
            const size_t first = number * kTileKeys, in_tile = std::min(kTileKeys, keys - first);
            bool any = is_first && number + 1 == tiles_of(keys);  // one at least: it sets the mix
            for (size_t row = 0; row < count; ++row) {
                const float* from = pattern + at(sequence, head, token, first_row + row) + first;
                memcpy(place_.tile.scores + row * kScoreStride, from, in_tile * sizeof(float));
                for (size_t key = 0; key < in_tile && !any; ++key) any = from[key] != 0;
            }
            if (!any) continue;  // behind all of the rows
            arithmetic_.mix(tile_of(step_, sequence, head, rows, number, place_), column, columns, in_tile, is_first);
            is_first = false;
        }
    }

    // A unit's row of the output, from a row of the mix.
    void write_output(const AttentionSequence& sequence, int head, size_t token, size_t row, size_t column,
                      size_t from) const {
        float* output = output_of(sequence, head, token, row) + column;
        const float* mixed = place_.state.mix + from * step_.cache.padded_dim() + column;
        for (size_t c = 0; c < std::min(kMixColumns, step_.cache.dim - column); ++c) output[c] = mixed[c] + 0.0f;
    }

    bool is_finite(const AttentionSequence& sequence, int head, size_t token, size_t row, size_t column) const {
        const float* output = output_of(sequence, head, token, row) + column;
        float zeros = 0;
        for (size_t c = 0; c < std::min(kMixColumns, step_.cache.dim - column); ++c) zeros += output[c] * 0.0f;
        return zeros == 0;
    }

    float* output_of(const AttentionSequence& sequence, int head, size_t token, size_t row) const {
        return step_.output + (sequence.first_row + token + row / group_) * step_.output_stride +
               (head * group_ + row % group_) * step_.cache.dim;
    }

    const AttentionStep& step_;
    const AttentionArithmetic& arithmetic_;
    Team& team_;
    const size_t group_;  // query heads of a key head
    const size_t unit_positions_;
    Workplace place_;
};

}  // namespace

// Whether no score is above the lowest float.
static bool is_masked(const float* scores, size_t count) {
    return std::all_of(scores, scores + count, [](float score) { return score <= -FLT_MAX; });
}

void make_scores(const AttentionKernels& kernels, const AttentionStep& step, float* patterns, Team& team, int thread,
                 uint8_t* scratch) {
    Worker(kernels, step, team, thread, scratch).scores(patterns);
}

void make_probabilities(const AttentionKernels& kernels, const AttentionStep& step, float* patterns, Team& team) {
    Queue queue(team);
    for (size_t i = 0; i < step.count; ++i) {
        const size_t keys = end_of(step.sequences[i]);
        for (size_t row = 0; row < step.heads * step.sequences[i].new_rows; ++row, patterns += keys) {
            if (!queue.reached()) continue;
            // Where all is masked, what is behind the query makes no difference: it is not there for a shorter text.
            const size_t seen = step.sequences[i].past + row % step.sequences[i].new_rows + 1;
            const size_t count = is_masked(patterns, keys) ? seen : keys;
            arithmetic_of(kernels, step).softmax(patterns, count);
            std::fill(patterns + count, patterns + keys, 0.0f);
            queue.take();
        }
    }
    team.barrier();
}

void mix_values(const AttentionKernels& kernels, const AttentionStep& step, const float* patterns, Team& team,
                int thread, uint8_t* scratch) {
    Worker(kernels, step, team, thread, scratch).mix(patterns);
}

}  // namespace starscope
