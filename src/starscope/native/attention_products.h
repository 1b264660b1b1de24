// Products of query rows with keys and with values, for attention_kernels.cpp: how operands are held, and micro-kernels
// that keep rows x columns of sums in registers. Included within the namespace of an instruction set, after
// attention_vector.h; no include guard, no library code.

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
