// The arithmetic of attention, compiled once per instruction set. A set gives sixteen floats at a time
// (attention_vector.h); everything else is written once: micro-kernels that keep rows x columns of sums in registers,
// the softmax of a tile, and the merging of tiles.
//
// A row's bits never depend on its neighbours: every sum is one chain over its steps, whatever the number of rows
// beside it, and everything skipped as invisible would have added zeros. A value that is not finite is the exception:
// rows that share a step with a later token may multiply it by a weight of 0. `finish` sees what comes of it.
//
// As in kernels.cpp, no library code and no inline function from outside the set's own namespace is called here.
#include "attention_kernels.h"

#include "numbers.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 finds these in its own immintrin.h
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace starscope {
namespace STARSCOPE_ISA {
namespace {

#include "attention_vector.h"
// After it.
#include "attention_products.h"

// ---- Softmax -------------------------------------------------------------------------------------------------------

// Turns a row's scores of the tile's first `keys` keys into weights, zeros behind them. The sum is that of the weights
// as they are used, after rounding, so that they add up to one. kWhole: keys = kTileKeys.
template <class Operands, bool kWhole>
inline void weigh(float* scores, size_t keys, float& largest, float& sum) {
    constexpr size_t kVectors = kTileKeys / kLanes;
    Vec vectors[kVectors];
    Vec top = all(kNothing);
#pragma GCC unroll 8
    for (size_t i = 0; i < kVectors; ++i) {
        if (kWhole || (i + 1) * kLanes <= keys) {
            vectors[i] = load(scores + i * kLanes);
        } else {
            vectors[i] = i * kLanes < keys ? load_first(scores + i * kLanes, keys % kLanes, kNothing) : all(kNothing);
        }
        top = larger(vectors[i], top);
    }
    largest = largest_of(top);
    const Vec most = all(largest);
    Vec total = zero();
    uint32_t* row = reinterpret_cast<uint32_t*>(scores);
#pragma GCC unroll 4
    for (size_t i = 0; i < kVectors; i += 2) {
        const Vec first = exp2(subtract(vectors[i], most)), second = exp2(subtract(vectors[i + 1], most));
        total = Operands::store_weights(row, i, first, second, total);
    }
    sum = sum_of(total);
}

// What sixteen rows' mixes are to be multiplied by, and their common state.
inline void merge_rows(float* largest, float* sum, const float* later_largest, const float* later_sum, float* keep_to,
                       float* add_to) {
    const Vec older = load(largest), later = load(later_largest), most = larger(later, older);
    const Vec keep = exp2(subtract(older, most)), add = exp2(subtract(later, most));
    store(largest, most);
    store(sum, merged(load(sum), keep, load(later_sum), add));
    store(keep_to, keep);
    store(add_to, add);
}

// Positions of the tile up to the last one that a token at `position` sees.
inline size_t keys_seen(const AttentionTile& tile, size_t position) {
    return position < tile.first_key ? 0 : smaller(position - tile.first_key + 1, kTileKeys);
}

// Positions of the tile that lie before a token's window.
inline size_t keys_passed(const AttentionTile& tile, size_t position) {
    const size_t end = position + 1, begin = tile.first_key + tile.window;
    return end > begin ? smaller(end - begin, kTileKeys) : 0;
}

// The first of the rows whose position is not below this one.
inline size_t row_at(const AttentionTile& tile, size_t position) {
    const size_t token = position > tile.rows.position ? position - tile.rows.position : 0;
    return smaller(token, tile.rows.count / tile.rows.heads) * tile.rows.heads;
}

// The rows that see some key of a part of the tile, `keys` of them from `key` on.
struct Seeing {
    size_t begin, end;
};
inline Seeing rows_that_see(const AttentionTile& tile, size_t key, size_t keys) {
    const size_t first = tile.first_key + key;
    return {row_at(tile, first), row_at(tile, first + keys - 1 + tile.window)};
}

// The scores of the keys that each row sees.
template <class Operands>
inline void score_tile(const AttentionTile& tile) {
    const size_t end = rows_that_see(tile, 0, kTileKeys).end;
    if (end == 0) return;
    const size_t seen = keys_seen(tile, tile.rows.position + (end - 1) / tile.rows.heads);
    for (size_t key = 0; key < seen; key += kGroups * kLanes) {
        const Seeing rows = rows_that_see(tile, key, kGroups * kLanes);
        if (rows.begin >= rows.end) continue;
        const Panel panel = Operands::keys(tile, key);
        for_pieces(rows.begin, rows.end, [&](size_t count, size_t row, bool first) {
            if (first && Operands::kConverting) {
                score<Operands, Operands::kConverting>(count, tile, panel, row, key);
            } else {
                score<Operands, false>(count, tile, panel, row, key);
            }
        });
    }
}

// Rows begin .. end-1, whose scores are there: `set` their state, or merge the tile into it.
template <class Operands>
void attend_rows(const AttentionTile& tile, size_t begin, size_t end, bool set) {
    const AttentionRows& rows = tile.rows;
    const AttentionScratch& scratch = tile.scratch;
    float* largest = set ? tile.state.largest : scratch.largest;
    float* sum = set ? tile.state.sum : scratch.sum;
    for (size_t row = begin, position = rows.position + begin / rows.heads; row < end; ++position) {
        const size_t passed = keys_passed(tile, position), keys = keys_seen(tile, position);
        for (const size_t next = row + rows.heads; row < next; ++row) {
            float* scores = scratch.scores + row * kScoreStride;
            for (size_t key = 0; key < passed; ++key) scores[key] = kNothing;
            if (keys == kTileKeys) {
                weigh<Operands, true>(scores, keys, largest[row], sum[row]);
            } else {
                weigh<Operands, false>(scores, keys, largest[row], sum[row]);
            }
        }
    }
    if (!set) {  // whole vectors: what is behind `end` is set by a later tile, or by the rows that come next
        for (size_t row = begin; row < end; row += kLanes) {
            merge_rows(tile.state.largest + row, tile.state.sum + row, largest + row, sum + row, scratch.keep + row,
                       scratch.add + row);
        }
    }

    const size_t seen = keys_seen(tile, rows.position + (end - 1) / rows.heads);
    for (size_t column = 0; column < tile.dim; column += kGroups * kLanes) {
        const size_t groups = column + kLanes < tile.dim ? kGroups : 1;
        const Panel panel = Operands::values(tile, column, groups, seen);
        for_pieces(begin, end, [&](size_t count, size_t row, bool first) {
            const size_t keys = keys_seen(tile, rows.position + (row + count - 1) / rows.heads);
            if (first && Operands::kConverting) {
                mix_columns<Operands, Operands::kConverting>(groups, count, tile, panel, row, column, keys, set);
            } else {
                mix_columns<Operands, false>(groups, count, tile, panel, row, column, keys, set);
            }
        });
    }
}

template <class Operands>
void attend(const AttentionTile& tile, bool alone) {
    score_tile<Operands>(tile);
    const Seeing rows = rows_that_see(tile, 0, kTileKeys);
    // Rows from here on see no tile before this one.
    const size_t first = alone || tile.first_key == 0 ? 0 : row_at(tile, tile.first_key + tile.window - 1);
    const size_t set = first > rows.begin ? smaller(first, rows.end) : rows.begin;
    if (rows.begin < set) attend_rows<Operands>(tile, rows.begin, set, false);
    if (set < rows.end) attend_rows<Operands>(tile, set, rows.end, true);
}

// ---- The same in three steps ---------------------------------------------------------------------------------------

inline Vec load_until(const float* x, size_t i, size_t end, float fill) {
    return i + kLanes <= end ? load(x + i) : load_first(x + i, end - i, fill);
}
inline void store_until(float* x, size_t i, size_t end, Vec v) {
    if (i + kLanes <= end) {
        store(x + i, v);
    } else {
        store_first(x + i, end - i, v);
    }
}
inline Vec largest_until(const float* x, size_t begin, size_t end) {
    Vec top = all(kLowest);
    for (size_t i = begin; i < end; i += kLanes) top = larger(load_until(x, i, end, kLowest), top);
    return all(largest_of(top));
}

// kRounded: weights are rounded to bfloat16 relative to the largest of their tile, where the scores are in powers of
// two. The lowest finite number, a masked score, stays that then.
template <bool kRounded>
void softmax(float* x, size_t count) {
    const Vec log2e = all(kLog2E), lowest = all(kLowest);
    if (kRounded) {
        for (size_t i = 0; i < count; i += kLanes) {
            const Vec score = multiply(load_until(x, i, count, 0.0f), log2e);
            store_until(x, i, count, larger(lowest, score));
        }
    }
    const Vec most = largest_until(x, 0, count);
    Vec total = zero();
    for (size_t begin = 0; begin < count; begin += kTileKeys) {
        const size_t end = smaller(begin + kTileKeys, count);
        const Vec top = kRounded ? largest_until(x, begin, end) : most;
        const Vec scale = exp2(subtract(top, most));
        for (size_t i = begin; i < end; i += kLanes) {
            const Vec score = subtract(load_until(x, i, end, kLowest), top);
            const Vec weight = kRounded ? multiply(round_to_bfloat(exp2(score)), scale) : exp2(multiply(score, log2e));
            store_until(x, i, end, weight);
            total = add(total, load_until(x, i, end, 0.0f));
        }
    }
    const Vec sum = all(sum_of(total));
    for (size_t i = 0; i < count; i += kLanes) store_until(x, i, count, divide(load_until(x, i, count, 0.0f), sum));
}

template <class Operands>
void mix_tile(const AttentionTile& tile, size_t column, size_t columns, size_t keys, bool set) {
    const AttentionRows& rows = tile.rows;
    for (size_t row = 0; row < rows.count; ++row) tile.scratch.keep[row] = tile.scratch.add[row] = 1.0f;
    for (const size_t end = column + columns; column < end; column += kGroups * kLanes) {
        const size_t groups = column + kLanes < end ? kGroups : 1;
        const Panel panel = Operands::values(tile, column, groups, keys);
        for_pieces(0, rows.count, [&](size_t count, size_t row, bool) {
            mix_columns<Operands, false>(groups, count, tile, panel, row, column, keys, set);
        });
    }
}

// ---- Rows in and out -----------------------------------------------------------------------------------------------

// Up to 16 of `count` values, zeros behind.
inline Vec load_up_to(const float* from, size_t count) {
    return count >= kLanes ? load(from) : load_first(from, count, 0.0f);
}

template <class Operands>
void pack(size_t dim, const float* query, float scale, uint32_t* column, size_t stride) {
    const size_t steps = Operands::steps(dim);
    for (size_t step = 0, i = 0; step < steps;) {
        uint32_t words[kLanes];
        const Vec first = multiply(load_up_to(query + i, dim - i), all(scale));
        Vec second = zero();
        if (i + kLanes < dim) second = multiply(load_up_to(query + i + kLanes, dim - i - kLanes), all(scale));
        i += Operands::pack(first, second, words);
        for (size_t j = 0; j < kLanes && step < steps; ++j, ++step) column[step * stride] = words[j];
    }
}

inline void convert(float* to, Vec v) { store(to, v); }
inline void convert(uint16_t* to, Vec v) { store_halves(to, v); }

// kPair: how many dims of a key, and positions of a value, lie side by side. The second value of a pair is read with
// the first one, with a weight of 0: until it is there it must be finite.
template <class Element, size_t kPair>
void append_keys(size_t dim, uint8_t* key_bytes, size_t position, size_t count, const float* from, size_t stride) {
    const size_t key_dims = rounded_up(dim, kPair);
    for (; count > 0; --count, ++position, from += stride) {
        Element* keys = reinterpret_cast<Element*>(key_bytes) + position / kLanes * kLanes * key_dims;
        Element elements[kLanes];
        for (size_t i = 0; i < key_dims; i += kLanes) {
            convert(elements, load_up_to(from + i, dim - i));
            const size_t end = smaller(i + kLanes, key_dims);
            for (size_t d = i; d < end; ++d) {
                keys[d / kPair * kPair * kLanes + position % kLanes * kPair + d % kPair] = elements[d - i];
            }
        }
    }
}

template <class Element, size_t kPair>
void append_values(size_t dim, uint8_t* value_bytes, size_t position, size_t count, const float* from, size_t stride) {
    const size_t columns = rounded_up(dim, kLanes);
    for (; count > 0; --count, ++position, from += stride) {
        Element* values = reinterpret_cast<Element*>(value_bytes) + position / kPair * kPair * columns;
        Element elements[kLanes];
        for (size_t i = 0; i < columns; i += kLanes) {
            convert(elements, load_up_to(from + i, dim - i));
            for (size_t d = i; d < i + kLanes; ++d) {
                values[d * kPair + position % kPair] = elements[d - i];
                if (position % kPair + 1 < kPair) values[d * kPair + 1] = 0;
            }
        }
    }
}

void merge(size_t dim, size_t count, const AttentionState& state, const AttentionState& later) {
    float keep[kLanes], add[kLanes];
    merge_rows(state.largest, state.sum, later.largest, later.sum, keep, add);
    const size_t columns = rounded_up(dim, kLanes);
    for (size_t row = 0; row < count; ++row) {
        float* mix = state.mix + row * columns;
        const float* later_mix = later.mix + row * columns;
        for (size_t i = 0; i < columns; i += kLanes) {
            store(mix + i, merged(load(mix + i), all(keep[row]), load(later_mix + i), all(add[row])));
        }
    }
}

// Adding a zero makes -0, which depends on the zeros that were skipped, +0.
bool finish(size_t dim, float sum, const float* mix, float* output) {
    Vec zeros = zero();  // unless a result is not finite
    for (size_t i = 0; i < dim; i += kLanes) {
        const Vec result = add(divide(load(mix + i), all(sum)), zero());
        zeros = add(zeros, subtract(result, result));
        if (i + kLanes <= dim) {
            store(output + i, result);
        } else {
            store_first(output + i, dim - i, result);
        }
    }
    return sum_of(zeros) == 0.0f;
}

}  // namespace

#define STARSCOPE_TEXT_(x) #x
#define STARSCOPE_TEXT(x) STARSCOPE_TEXT_(x)

extern const AttentionKernels attention_kernels = {
    STARSCOPE_TEXT(STARSCOPE_ISA),
    {append_keys<uint16_t, 2>, append_values<uint16_t, 2>, pack<Halves>, attend<Halves>, score_tile<Halves>,
     softmax<true>, mix_tile<Widened>, merge, finish},
    {append_keys<float, 1>, append_values<float, 1>, pack<Singles>, attend<Singles>, score_tile<Singles>,
     softmax<false>, mix_tile<Singles>, merge, finish},
};

}  // namespace STARSCOPE_ISA
}  // namespace starscope
