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

constexpr size_t kLanes = 16;
constexpr float kNothing = -__builtin_inff();
constexpr float kLowest = -__FLT_MAX__;

inline size_t rounded_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// ---- Three ways to hold operands as 32-bit words -------------------------------------------------------------------
//
// Each says how many steps (words of a query) a score takes, and how many the mix of `keys` keys; what one step adds;
// the panel of kGroups groups of 16 keys from `key` on, and of `groups` groups of 16 columns of the values of `keys`
// keys; and how two vectors of weights are stored, which also adds them to their sum. kConverting: the panel's words
// are yet to be made of its halves, step by step, which the first micro-kernel does in the shadow of its products.

struct Panel {
    uint32_t* words;
    size_t group_stride;
    size_t step_stride;
    const uint16_t* halves;
    size_t halves_group_stride;
    size_t halves_step_stride;
    const uint8_t* next;  // read after this panel: brought closer by two cache lines a step
};

// Asks for a cache line to be brought to the second level.
inline void fetch(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

// The caches' float32 values, read where they lie.
struct Singles {
    static constexpr bool kConverting = false;
    static size_t steps(size_t dim) { return dim; }
    static size_t mix_steps(size_t keys) { return keys; }
    static Vec step(Vec value, Vec panel, Vec sum) { return multiply_add(value, panel, sum); }

    static Panel keys(const AttentionTile& tile, size_t key) {
        uint32_t* words = reinterpret_cast<uint32_t*>(tile.keys) + key * tile.dim;
        return {words, tile.dim * kLanes, kLanes, nullptr, 0, 0, nullptr};
    }
    static Panel values(const AttentionTile& tile, size_t column, size_t, size_t) {
        uint32_t* words = reinterpret_cast<uint32_t*>(tile.values) + column;
        return {words, kLanes, rounded_up(tile.dim, kLanes), nullptr, 0, 0, nullptr};
    }
    static Vec store_weights(uint32_t* row, size_t vector, Vec first, Vec second, Vec sum) {
        store(row + vector * kLanes, first);
        store(row + (vector + 1) * kLanes, second);
        return add(add(sum, first), second);
    }
    // 16 values of a query.
    static size_t pack(Vec first, Vec, uint32_t* words) {
        store(words, first);
        return kLanes;
    }
};

#if defined(__AVX512BF16__)

// Pairs of bfloat16, as the layouts of the float16 caches have them: dims 2i and 2i+1, positions 2i and 2i+1.
struct Halves {
    static constexpr bool kConverting = true;
    static size_t steps(size_t dim) { return (dim + 1) / 2; }
    static size_t mix_steps(size_t keys) { return (keys + 1) / 2; }
    static Vec step(Vec value, Vec panel, Vec sum) { return multiply_add_pairs(value, panel, sum); }
    static Vec convert(const uint16_t* halves) { return to_bfloats(load_halves(halves), load_halves(halves + kLanes)); }

    static Panel keys(const AttentionTile& tile, size_t key) {
        const size_t group = steps(tile.dim) * kLanes;
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile.keys) + 2 * key * steps(tile.dim);
        const uint8_t* next = tile.values + 4 * key * steps(tile.dim);
        return {tile.scratch.panel, group, kLanes, halves, 2 * group, 2 * kLanes, next};
    }
    static Panel values(const AttentionTile& tile, size_t column, size_t groups, size_t) {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile.values) + 2 * column;
        const size_t row = 2 * rounded_up(tile.dim, kLanes);
        const uint8_t* next = tile.next_keys + 2 * kTileKeys * column;
        return {tile.scratch.panel, kLanes, groups * kLanes, halves, 2 * kLanes, row, next};
    }
    static Vec store_weights(uint32_t* row, size_t vector, Vec first, Vec second, Vec sum) {
        const Vec weights = to_bfloats(first, second);
        const uint32_t ones = 0x3f803f80u;
        store(row + vector / 2 * kLanes, weights);
        return multiply_add_pairs(weights, all_bits(&ones), sum);
    }
    // 32 values of a query.
    static size_t pack(Vec first, Vec second, uint32_t* words) {
        store(words, to_bfloats(first, second));
        return 2 * kLanes;
    }
};

#endif

// Values of bfloat16 precision in float32, taken out of the pairs.
struct Widened {
    static constexpr bool kConverting = false;
    static size_t steps(size_t dim) { return rounded_up(dim, 2); }
    static size_t mix_steps(size_t keys) { return keys; }
    static Vec step(Vec value, Vec panel, Vec sum) { return multiply_add(value, panel, sum); }

    static void convert(const uint16_t* halves, uint32_t* even_words, uint32_t* odd_words) {
        Vec even, odd;
        load_half_pairs(halves, even, odd);
        store(even_words, round_to_bfloat(even));
        store(odd_words, round_to_bfloat(odd));
    }

    static Panel keys(const AttentionTile& tile, size_t key) {
        const size_t words = steps(tile.dim) * kGroups * kLanes;
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile.keys) + key * steps(tile.dim);
        uint32_t* panel = tile.scratch.panel;
        for (size_t i = 0; i < words; i += 2 * kLanes) convert(halves + i, panel + i, panel + i + kLanes);
        return {panel, steps(tile.dim) * kLanes, kLanes, nullptr, 0, 0, nullptr};
    }
    static Panel values(const AttentionTile& tile, size_t column, size_t groups, size_t keys) {
        const size_t stride = 2 * rounded_up(tile.dim, kLanes);
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile.values) + 2 * column;
        for (size_t i = 0; i < keys; i += 2, halves += stride) {
            uint32_t* even = tile.scratch.panel + i * groups * kLanes;
            uint32_t* odd = even + groups * kLanes;
            for (size_t j = 0; j < groups * kLanes; j += kLanes) convert(halves + 2 * j, even + j, odd + j);
        }
        return {tile.scratch.panel, kLanes, groups * kLanes, nullptr, 0, 0, nullptr};
    }
    static Vec store_weights(uint32_t* row, size_t vector, Vec first, Vec second, Vec sum) {
        return Singles::store_weights(row, vector, round_to_bfloat(first), round_to_bfloat(second), sum);
    }
    static size_t pack(Vec first, Vec, uint32_t* words) {
        store(words, round_to_bfloat(first));
        return kLanes;
    }
};

#if !defined(__AVX512BF16__)
using Halves = Widened;
#endif

// ---- Micro-kernels -------------------------------------------------------------------------------------------------

// Two softmaxes' mixes (or sums) on a common scale.
inline Vec merged(Vec older, Vec keep, Vec later, Vec add) { return multiply_add(older, keep, multiply(later, add)); }

// sums[m][n] = the panel's group n times row m, whose step s is rows[m * kRowStride + s * row_step].
template <class Operands, bool kConvert, size_t kRowStride, size_t M, size_t N>
inline void multiply_rows(const uint32_t* rows, size_t row_step, Panel panel, size_t steps, Vec (&sums)[M][N]) {
#pragma GCC unroll 16
    for (size_t m = 0; m < M; ++m) {
#pragma GCC unroll 2
        for (size_t n = 0; n < N; ++n) sums[m][n] = zero();
    }
    for (; steps > 0; --steps, rows += row_step, panel.words += panel.step_stride) {
        Vec columns[N];
#pragma GCC unroll 2
        for (size_t n = 0; n < N; ++n) {
            uint32_t* words = panel.words + n * panel.group_stride;
            if constexpr (kConvert) {
                columns[n] = Operands::convert(panel.halves + n * panel.halves_group_stride);
                store(words, columns[n]);
                fetch(panel.next + n * 64);
            } else {
                columns[n] = load(words);
            }
        }
        if constexpr (kConvert) {
            panel.halves += panel.halves_step_stride;
            panel.next += N * 64;
        }
#pragma GCC unroll 16
        for (size_t m = 0; m < M; ++m) {
            const Vec value = all_bits(rows + m * kRowStride);
#pragma GCC unroll 2
            for (size_t n = 0; n < N; ++n) sums[m][n] = Operands::step(value, columns[n], sums[m][n]);
        }
    }
}

// Scores of rows `row` .. row + M-1 for kGroups * 16 keys.
template <class Operands, bool kConvert, size_t M>
void score_rows(const AttentionTile& tile, const Panel& panel, size_t row, size_t key) {
    Vec sums[M][kGroups];
    multiply_rows<Operands, kConvert, 1>(tile.queries + row, tile.query_stride, panel, Operands::steps(tile.dim), sums);
    float* scores = tile.scratch.scores + row * kScoreStride + key;
#pragma GCC unroll 16
    for (size_t m = 0; m < M; ++m) {
#pragma GCC unroll 2
        for (size_t n = 0; n < kGroups; ++n) store(scores + m * kScoreStride + n * kLanes, sums[m][n]);
    }
}

// Mixes N * 16 columns of the values by the weights of M rows, and merges them into the rows' state.
template <class Operands, bool kConvert, size_t M, size_t N>
void mix_rows(const AttentionTile& tile, const Panel& panel, size_t row, size_t column, size_t keys, bool alone) {
    Vec sums[M][N];
    const uint32_t* weights = reinterpret_cast<const uint32_t*>(tile.scratch.scores) + row * kScoreStride;
    multiply_rows<Operands, kConvert, kScoreStride>(weights, 1, panel, Operands::mix_steps(keys), sums);
    const size_t stride = rounded_up(tile.dim, kLanes);
    float* mix = tile.state.mix + row * stride + column;
#pragma GCC unroll 16
    for (size_t m = 0; m < M; ++m, mix += stride) {
        const Vec keep = all(tile.scratch.keep[row + m]), add = all(tile.scratch.add[row + m]);
#pragma GCC unroll 2
        for (size_t n = 0; n < N; ++n) {
            float* to = mix + n * kLanes;
            store(to, alone ? sums[m][n] : merged(load(to), keep, sums[m][n], add));
        }
    }
}

// Calls score_rows or mix_rows for `m` rows, 1 <= m <= M.
template <class Operands, bool kConvert, size_t M = kRows>
inline void score(size_t m, const AttentionTile& tile, const Panel& panel, size_t row, size_t key) {
    if constexpr (M > 1) {
        if (m < M) return score<Operands, kConvert, M - 1>(m, tile, panel, row, key);
    }
    score_rows<Operands, kConvert, M>(tile, panel, row, key);
}

template <class Operands, bool kConvert, size_t N, size_t M = kRows>
inline void mix(size_t m, const AttentionTile& tile, const Panel& panel, size_t row, size_t column, size_t keys,
                bool alone) {
    if constexpr (M > 1) {
        if (m < M) return mix<Operands, kConvert, N, M - 1>(m, tile, panel, row, column, keys, alone);
    }
    mix_rows<Operands, kConvert, M, N>(tile, panel, row, column, keys, alone);
}

template <class Operands, bool kConvert>
inline void mix_columns(size_t groups, size_t m, const AttentionTile& tile, const Panel& panel, size_t row,
                        size_t column, size_t keys, bool alone) {
    if (groups == kGroups) {
        mix<Operands, kConvert, kGroups>(m, tile, panel, row, column, keys, alone);
    } else {
        mix<Operands, kConvert, 1>(m, tile, panel, row, column, keys, alone);
    }
}

// Shares rows begin .. end-1 out into equal pieces of at most kRows, the last rows first, which see most keys:
// f(rows in the piece, its first row, whether it is the first piece).
template <class F>
inline void for_pieces(size_t begin, size_t end, F f) {
    bool first = true;
    for (size_t pieces = (end - begin + kRows - 1) / kRows; pieces > 0; --pieces) {
        const size_t rows = (end - begin + pieces - 1) / pieces;
        end -= rows;
        f(rows, end, first);
        first = false;
    }
}

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

// Positions of the tile that a token at `position` sees.
inline size_t keys_seen(const AttentionTile& tile, size_t position) {
    return position < tile.first_key ? 0 : smaller(position - tile.first_key + 1, kTileKeys);
}

// The first row that sees key `key` of the tile.
inline size_t first_row(const AttentionTile& tile, size_t key) {
    const size_t position = tile.first_key + key;
    return position > tile.rows.position ? (position - tile.rows.position) * tile.rows.heads : 0;
}

// The scores of the keys that each row sees.
template <class Operands>
inline void score_tile(const AttentionTile& tile) {
    const AttentionRows& rows = tile.rows;
    const size_t seen = keys_seen(tile, rows.position + (rows.count - 1) / rows.heads);
    for (size_t key = 0; key < seen; key += kGroups * kLanes) {
        const Panel panel = Operands::keys(tile, key);
        for_pieces(first_row(tile, key), rows.count, [&](size_t count, size_t row, bool first) {
            if (first && Operands::kConverting) {
                score<Operands, Operands::kConverting>(count, tile, panel, row, key);
            } else {
                score<Operands, false>(count, tile, panel, row, key);
            }
        });
    }
}

template <class Operands>
void attend(const AttentionTile& tile, bool alone) {
    const AttentionRows& rows = tile.rows;
    const AttentionScratch& scratch = tile.scratch;
    const size_t seen = keys_seen(tile, rows.position + (rows.count - 1) / rows.heads);
    const size_t begin = first_row(tile, 0);

    score_tile<Operands>(tile);

    if (tile.first_key == 0) alone = true;
    float* largest = alone ? tile.state.largest : scratch.largest;
    float* sum = alone ? tile.state.sum : scratch.sum;
    for (size_t row = begin, position = rows.position + begin / rows.heads; row < rows.count; ++position) {
        const size_t keys = keys_seen(tile, position);
        for (const size_t end = row + rows.heads; row < end; ++row) {
            float* scores = scratch.scores + row * kScoreStride;
            if (keys == kTileKeys) {
                weigh<Operands, true>(scores, keys, largest[row], sum[row]);
            } else {
                weigh<Operands, false>(scores, keys, largest[row], sum[row]);
            }
        }
    }
    if (!alone) {
        for (size_t row = begin; row < rows.count; row += kLanes) {
            merge_rows(tile.state.largest + row, tile.state.sum + row, largest + row, sum + row, scratch.keep + row,
                       scratch.add + row);
        }
    }

    for (size_t column = 0; column < tile.dim; column += kGroups * kLanes) {
        const size_t groups = column + kLanes < tile.dim ? kGroups : 1;
        const Panel panel = Operands::values(tile, column, groups, seen);
        for_pieces(begin, rows.count, [&](size_t count, size_t row, bool first) {
            const size_t keys = keys_seen(tile, rows.position + (row + count - 1) / rows.heads);
            if (first && Operands::kConverting) {
                mix_columns<Operands, Operands::kConverting>(groups, count, tile, panel, row, column, keys, alone);
            } else {
                mix_columns<Operands, false>(groups, count, tile, panel, row, column, keys, alone);
            }
        });
    }
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
