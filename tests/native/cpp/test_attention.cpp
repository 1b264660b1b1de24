// Tests of attention on every instruction set of this machine, against sums in float64 over a layout of their own.
//
// A case is a set of texts whose queries, keys and values are made up once. A schedule cuts the texts into steps; after
// the last step every token has an output, and the outputs of all schedules must be the same bits.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention.h"

namespace starscope {
namespace {

int failures = 0;

#define EXPECT(condition, ...)                                      \
    do {                                                            \
        if (!(condition)) {                                         \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                    \
            printf("\n");                                           \
            if (++failures > 20) exit(1);                           \
        }                                                           \
    } while (0)

std::vector<const AttentionKernels*> usable_kernels() {
    std::vector<const AttentionKernels*> all{&scalar::attention_kernels};
#ifdef STARSCOPE_X86_64
    [[maybe_unused]] const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    [[maybe_unused]] const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
#ifdef HAS_avx2  // as the Makefile says
    if (has_avx2) all.push_back(&avx2::attention_kernels);
#endif
#ifdef HAS_avx512
    if (has_avx512) all.push_back(&avx512::attention_kernels);
#endif
#ifdef HAS_avx512_bf16
    if (has_avx512 && __builtin_cpu_supports("avx512bf16")) all.push_back(&avx512_bf16::attention_kernels);
#endif
#endif
    return all;
}

// ---- Rounding, spelled differently from the code under test --------------------------------------------------------

// To `bits` of significand, ties to even, with `smallest` the unit below which nothing is kept.
double rounded(double value, int bits, double smallest) {
    if (!isfinite(value) || value == 0) return value;
    int exponent;
    frexp(value, &exponent);
    const double unit = std::max(ldexp(1.0, exponent - bits), smallest);
    return nearbyint(value / unit) * unit;
}

double to_half(double value) {
    const double half = rounded(value, 11, 0x1p-24);
    return fabs(half) >= 65520 ? copysign(INFINITY, value) : half;
}

double to_bfloat(double value) { return rounded(value, 8, 0x1p-133); }

// ---- Cases ---------------------------------------------------------------------------------------------------------

struct Shape {
    bool half;
    int dim, heads, kv_heads;
    size_t window = kNoWindow;

    CacheShape cache() const { return {half, kv_heads, dim}; }
    size_t width() const { return static_cast<size_t>(heads + 2 * kv_heads) * dim; }  // queries, keys, values
    size_t output_width() const { return static_cast<size_t>(heads) * dim; }
    float scale() const { return 1 / sqrtf(static_cast<float>(dim)); }
    std::string name() const {
        return std::string(half ? "half" : "single") + " dim " + std::to_string(dim) + " heads " +
               std::to_string(heads) + "/" + std::to_string(kv_heads) +
               (window == kNoWindow ? "" : " window " + std::to_string(window));
    }
};

// One text: its rows, and what attention made of them.
struct Text {
    std::vector<float> rows, output;
    std::vector<uint8_t> keys, values;
    size_t length = 0, capacity = 0, past = 0;
};

using Fill = std::function<float(size_t row, size_t column)>;

Text make_text(const Shape& shape, size_t length, const Fill& fill) {
    Text text;
    text.length = length;
    text.capacity = (length / kTileKeys + 1) * kTileKeys;  // one position more than needed, at least
    text.rows.resize(length * shape.width());
    for (size_t i = 0; i < text.rows.size(); ++i) text.rows[i] = fill(i / shape.width(), i % shape.width());
    return text;
}

Fill normal(unsigned seed, float queries = 1) {
    auto engine = std::make_shared<std::mt19937>(seed);
    return [=](size_t, size_t) { return queries * std::normal_distribution<float>()(*engine); };
}

// Forgets everything; what was never written is a NaN in either type.
void reset(const Shape& shape, Text& text) {
    text.past = 0;
    text.output.assign(text.length * shape.output_width(), NAN);
    text.keys.assign(shape.kv_heads * shape.cache().key_bytes(text.capacity), 0xff);
    text.values.assign(shape.kv_heads * shape.cache().value_bytes(text.capacity), 0xff);
}

// One step: counts[i] new tokens of texts[i]. Rows are given to the step behind each other, outputs come back.
void run_step(const AttentionKernels& kernels, const Shape& shape, Team& team, std::vector<Text*> texts,
              const std::vector<size_t>& counts) {
    std::vector<float> input, output;
    std::vector<AttentionSequence> sequences;
    size_t rows = 0, longest = 0;
    for (size_t i = 0; i < texts.size(); ++i) {
        Text& text = *texts[i];
        sequences.push_back({rows, counts[i], text.past, text.capacity, text.keys.data(), text.values.data()});
        input.insert(input.end(), text.rows.begin() + text.past * shape.width(),
                     text.rows.begin() + (text.past + counts[i]) * shape.width());
        rows += counts[i];
        longest = std::max(longest, text.past + counts[i]);
    }
    output.assign(rows * shape.output_width(), NAN);
    const size_t queries = static_cast<size_t>(shape.heads) * shape.dim, keys = shape.kv_heads * shape.dim;
    const AttentionStep step{shape.cache(),
                             shape.heads,
                             shape.scale(),
                             shape.window,
                             {input.data(), shape.width()},
                             {input.data() + queries, shape.width()},
                             {input.data() + queries + keys, shape.width()},
                             output.data(),
                             shape.output_width(),
                             sequences.data(),
                             sequences.size()};
    // Exactly as much as promised, so that a sanitizer sees what goes beyond; NaN, so that nothing counts on zeros.
    std::vector<uint8_t> scratch(
        attention_scratch_bytes(shape.cache(), shape.heads, rows, texts.size(), longest, team.size()), 0xff);
    team.run([&](int thread) { attend(kernels, step, team, thread, scratch.data()); });

    for (size_t i = 0; i < texts.size(); ++i) {
        std::copy_n(output.begin() + sequences[i].first_row * shape.output_width(), counts[i] * shape.output_width(),
                    texts[i]->output.begin() + texts[i]->past * shape.output_width());
        texts[i]->past += counts[i];
    }
}

// Runs all texts to their ends, next(text) tokens of each in every step.
void run_all(const AttentionKernels& kernels, const Shape& shape, Team& team, const std::vector<Text*>& texts,
             const std::function<size_t(const Text&)>& next) {
    for (Text* text : texts) reset(shape, *text);
    for (;;) {
        std::vector<Text*> active;
        std::vector<size_t> counts;
        for (Text* text : texts) {
            if (text->past == text->length) continue;
            active.push_back(text);
            counts.push_back(std::min(next(*text), text->length - text->past));
        }
        if (active.empty()) return;
        run_step(kernels, shape, team, active, counts);
    }
}

size_t everything(const Text& text) { return text.length; }

// ---- The reference -------------------------------------------------------------------------------------------------

// What a cached value is worth in a product.
double operand(const Shape& shape, float value) { return shape.half ? to_bfloat(to_half(value)) : value; }

// Compares a text's output with float64 sums over the same operands. What may differ, with u = 2^-24 a rounding of
// float32: a score by dim + 4 roundings of its absolute sum; so a weight by that (the derivative of exp) and 8u for exp
// itself, and by 2^-8 where weights are bfloat16 (2^-9 where so many of them cannot all be the worst); the output by that times the spread of the values around it, as the
// weights are divided by their own sum; and the mix by a rounding for each key.
void expect_close(const char* isa, const Shape& shape, const Text& text, size_t every) {
    const double u = 0x1p-24, log2e = 1.44269504f;
    const size_t dim = shape.dim, group = shape.heads / shape.kv_heads;
    std::vector<double> weights(text.length), query(dim), keys(text.rows.size());
    for (size_t i = 0; i < text.rows.size(); ++i) keys[i] = operand(shape, text.rows[i]);
    for (size_t row = (text.length - 1) % every; row < text.length; row += every) {  // the last one among them
        for (int head = 0; head < shape.heads; ++head) {
            const float scale = shape.scale() * static_cast<float>(log2e);
            for (size_t d = 0; d < dim; ++d) {
                const float scaled = text.rows[row * shape.width() + head * dim + d] * scale;
                query[d] = shape.half ? to_bfloat(scaled) : scaled;
            }
            const size_t key_column = (shape.heads + head / group) * dim;
            const size_t value_column = key_column + shape.kv_heads * dim;
            double most = -INFINITY, error = 0, sum = 0;
            const size_t first = row < shape.window ? 0 : row - shape.window + 1;
            for (size_t key = first; key <= row; ++key) {
                double score = 0, magnitude = 0;
                for (size_t d = 0; d < dim; ++d) {
                    const double product = query[d] * keys[key * shape.width() + key_column + d];
                    score += product;
                    magnitude += fabs(product);
                }
                weights[key] = score;
                most = std::max(most, score);
                error = std::max(error, (dim + 4) * u * magnitude * M_LN2);
            }
            for (size_t key = first; key <= row; ++key) sum += weights[key] = exp2(weights[key] - most);
            const double rounding = row - first < 64 ? 0x1p-8 : 0x1p-9;
            const double weight_error = 2 * error + 8 * u + (shape.half ? rounding : 0);
            for (size_t d = 0; d < dim; ++d) {
                const double* value = keys.data() + value_column + d;
                double result = 0, spread = 0, largest = 0;
                for (size_t key = first; key <= row; ++key) result += weights[key] / sum * value[key * shape.width()];
                for (size_t key = first; key <= row; ++key) {
                    spread += weights[key] / sum * fabs(value[key * shape.width()] - result);
                    largest = std::max(largest, fabs(value[key * shape.width()]));
                }
                const double allowed = 1.01 * weight_error * spread + (row + 16) * u * largest;
                const double found = text.output[row * shape.output_width() + head * dim + d];
                EXPECT(fabs(found - result) <= allowed, "%s, %s, row %zu head %d dim %zu: %.9g, expected %.9g +- %.2g",
                       isa, shape.name().c_str(), row, head, d, found, result, allowed);
            }
        }
    }
}

// ---- Tests ---------------------------------------------------------------------------------------------------------

const std::vector<std::pair<int, int>> kHeads{{1, 1}, {4, 4}, {6, 2}, {12, 1}, {16, 1}, {48, 1}, {100, 1}};

void outputs_are_those_of_float64(const AttentionKernels& kernels, Team& team) {
    for (const bool half : {true, false}) {
        for (const int dim : {1, 3, 20, 64, 80, 128, 200}) {
            for (const auto& [heads, kv_heads] : kHeads) {
                const Shape shape{half, dim, heads, kv_heads};
                for (const size_t length : {1, 127, 129, 290}) {
                    if (heads * dim > 1600 && length > 129) continue;
                    Text text = make_text(shape, length, normal(static_cast<unsigned>(dim * heads + length)));
                    run_all(kernels, shape, team, {&text}, everything);
                    expect_close(kernels.isa, shape, text, length > 100 ? 43 : 1);
                }
            }
        }
    }
}

// A window of one tile, of more, and of less; that begins where a tile does, and elsewhere.
void windows_hide_what_lies_before_them(const AttentionKernels& kernels, Team& team) {
    for (const bool half : {true, false}) {
        for (const size_t window : {1, 7, 100, 128, 129, 250}) {
            for (const auto& [dim, heads, kv_heads] : {std::tuple{16, 6, 2}, {20, 8, 8}, {33, 100, 1}}) {
                const Shape shape{half, dim, heads, kv_heads, window};
                Text text = make_text(shape, 330, normal(static_cast<unsigned>(window)));
                for (const size_t count : {330, 9}) {
                    run_all(kernels, shape, team, {&text}, [&](const Text&) { return count; });
                    expect_close(kernels.isa, shape, text, heads == 100 ? 37 : 11);
                }
            }
        }
    }
}

using Sizes = std::vector<std::tuple<int, int, int, size_t>>;  // dim, heads, key heads, window

const Sizes kSizes{{20, 12, 1, kNoWindow}, {64, 16, 1, kNoWindow}, {33, 4, 4, kNoWindow}, {16, 6, 2, kNoWindow},
                   {5, 100, 1, kNoWindow}, {16, 1, 1, kNoWindow},  {16, 6, 2, 40},        {20, 12, 1, 130},
                   {5, 100, 1, 128}};
// In which every way to share work out among threads is taken: many rows for a unit, a unit for a position, key heads.
const Sizes kSharedSizes{{16, 6, 2, kNoWindow}, {5, 100, 1, kNoWindow}, {16, 6, 2, 40}};

void bits_do_not_depend_on_steps_threads_or_batches(const AttentionKernels& kernels, std::vector<Team*> teams,
                                                    const Sizes& sizes) {
    for (const bool half : {true, false}) {
        for (const auto& [dim, heads, kv_heads, window] : sizes) {
            const Shape shape{half, dim, heads, kv_heads, window};
            std::vector<Text> texts;
            for (const size_t length : {1, 17, 127, 128, 129, 280}) {
                texts.push_back(make_text(shape, length, normal(static_cast<unsigned>(length), 2)));
            }
            std::vector<std::vector<float>> outputs;
            for (Text& text : texts) {
                run_all(kernels, shape, *teams[0], {&text}, everything);
                outputs.push_back(text.output);
            }
            std::vector<Text*> all;
            for (Text& text : texts) all.push_back(&text);
            std::mt19937 random(1);
            auto expect_same = [&](const char* what, Team& team, const std::vector<Text*>& some,
                                   const std::function<size_t(const Text&)>& next) {
                run_all(kernels, shape, team, some, next);
                for (const Text* text : some) {
                    const std::vector<float>& output = outputs[text - texts.data()];
                    EXPECT(memcmp(text->output.data(), output.data(), output.size() * sizeof(float)) == 0,
                           "%s, %s, %zu tokens, %d threads: %s changes bits", kernels.isa, shape.name().c_str(),
                           text->length, team.size(), what);
                }
            };
            for (Team* team : teams) {
                expect_same("the number of threads", *team, {all.back()}, everything);
                expect_same("a batch", *team, all, everything);
                for (const size_t most : {20, 200}) {
                    expect_same("an uneven batch", *team, all, [&](const Text&) { return 1 + random() % most; });
                }
            }
            expect_same("a token at a time", *teams[0], {all.back()}, [](const Text&) { return 1; });
            expect_same("a token at a time", *teams[1], all, [](const Text&) { return 1; });
            expect_same("a tile at a time", *teams[2], all, [](const Text&) { return 128; });
        }
    }
}

// Scores that are equal give weights of 1: the mean, with no rounding but those of float32 sums.
void equal_scores_give_the_mean(const AttentionKernels& kernels, Team& team) {
    for (const bool half : {true, false}) {
        const Shape shape{half, 20, 3, 1};
        const size_t queries = shape.heads * shape.dim;
        const Fill random = normal(7);
        Text text = make_text(shape, 700, [&](size_t row, size_t column) {
            return column < queries ? 0.0f : random(row, column);
        });
        for (const size_t count : {700, 1}) {
            run_all(kernels, shape, team, {&text}, [&](const Text&) { return count; });
            std::vector<double> sum(shape.dim);
            for (size_t row = 0; row < text.length; ++row) {
                for (int d = 0; d < shape.dim; ++d) {
                    sum[d] += operand(shape, text.rows[row * shape.width() + queries + shape.dim + d]);
                    for (int head = 0; head < shape.heads; ++head) {
                        const double found = text.output[row * shape.output_width() + head * shape.dim + d];
                        EXPECT(fabs(found - sum[d] / (row + 1)) <= 40 * 0x1p-24, "%s, %s, row %zu: %.9g, not %.9g",
                               kernels.isa, shape.name().c_str(), row, found, sum[d] / (row + 1));
                    }
                }
            }
        }
    }
}

// A score far above all others gives its value, exactly; far beyond the range of exp in either direction.
void one_large_score_gives_its_value(const AttentionKernels& kernels, Team& team) {
    for (const bool half : {true, false}) {
        const Shape shape{half, 64, 2, 1};
        const size_t queries = shape.heads * shape.dim;
        const Fill random = normal(8);
        Text text = make_text(shape, 300, [&](size_t row, size_t column) {
            // Queries and keys are ever longer vectors along one axis: the last key wins, by 8 at the least.
            if (column < queries) return column % shape.dim == 5 ? 1000.0f : 0.0f;
            if (column < queries + shape.dim) return column == queries + 5 ? -100.0f + static_cast<float>(row) : 0.0f;
            return random(row, column);
        });
        for (const size_t count : {300, 7}) {
            run_all(kernels, shape, team, {&text}, [&](const Text&) { return count; });
            for (size_t row = 0; row < text.length; ++row) {
                for (int i = 0; i < shape.heads * shape.dim; ++i) {
                    const float found = text.output[row * shape.output_width() + i];
                    const double value = operand(
                        shape, text.rows[row * shape.width() + queries + shape.dim + i % shape.dim]);
                    EXPECT(fabs(found - value) <= 1e-30 + fabs(value) * 0x1p-24, "%s, %s, row %zu: %.9g, not %.9g",
                           kernels.isa, shape.name().c_str(), row, found, value);
                }
            }
        }
    }
}

// Scores of any size agree with float64 as long as a rounding of the score is small: in float32 up to thousands.
void large_scores_are_weighed_right(const AttentionKernels& kernels, Team& team) {
    for (const bool half : {true, false}) {
        for (const float size : {4.0f, 30.0f}) {
            const Shape shape{half, 64, 6, 2};
            Text text = make_text(shape, 200, normal(9, size));
            run_all(kernels, shape, team, {&text}, everything);
            expect_close(kernels.isa, shape, text, 7);
        }
    }
}

// The caches hold what attention.h says, where it says.
void caches_have_the_documented_layout(const AttentionKernels& kernels, Team& team) {
    for (const bool half : {true, false}) {
        for (const int dim : {1, 3, 16, 20, 33}) {
            const Shape shape{half, dim, 4, 2};
            Text text = make_text(shape, 150, normal(10, 3));
            text.rows[shape.heads * dim] = 1e6f;     // infinity in float16
            text.rows[shape.heads * dim + shape.width()] = 3e-6f;  // subnormal
            run_all(kernels, shape, team, {&text}, [](const Text&) { return 31; });
            const size_t even = (dim + 1) / 2 * 2, padded = (dim + 15) / 16 * 16;
            for (int head = 0; head < shape.kv_heads; ++head) {
                for (size_t p = 0; p < text.length; ++p) {
                    for (size_t d = 0; d < padded; ++d) {
                        size_t key, value;  // places
                        if (half) {
                            key = ((p / 16 * (even / 2) + d / 2) * 16 + p % 16) * 2 + d % 2;
                            value = (p / 2 * padded + d) * 2 + p % 2;
                        } else {
                            key = (p / 16 * dim + d) * 16 + p % 16;
                            value = p * padded + d;
                        }
                        const float* row = text.rows.data() + p * shape.width() + (shape.heads + head) * dim;
                        const bool real = d < static_cast<size_t>(dim);
                        auto expect_at = [&](const uint8_t* region, size_t place, double expected, const char* what) {
                            double found;
                            if (half) {
                                uint16_t bits;
                                memcpy(&bits, region + 2 * place, 2);
                                const int exponent = bits >> 10 & 31, fraction = bits & 1023;
                                found = exponent == 31  ? (fraction ? NAN : INFINITY)
                                        : exponent == 0 ? ldexp(fraction, -24)
                                                        : ldexp(1024 + fraction, exponent - 25);
                                if (bits >> 15) found = -found;
                                expected = to_half(expected);
                            } else {
                                float value;
                                memcpy(&value, region + 4 * place, 4);
                                found = value;
                            }
                            EXPECT(found == expected, "%s, %s, %s %zu %zu: %g, not %g", kernels.isa,
                                   shape.name().c_str(), what, p, d, found, expected);
                        };
                        if (d < (half ? even : dim)) {
                            expect_at(text.keys.data() + head * shape.cache().key_bytes(text.capacity), key,
                                      real ? row[d] : 0, "key");
                        }
                        expect_at(text.values.data() + head * shape.cache().value_bytes(text.capacity), value,
                                  real ? row[shape.kv_heads * dim + d] : 0, "value");
                    }
                }
            }
        }
    }
}

// What an earlier, longer text left behind the visible positions, infinities and NaN among it, is not seen.
void what_lies_behind_the_end_is_not_seen(const AttentionKernels& kernels, Team& team) {
    for (const bool half : {true, false}) {
        const Shape shape{half, 20, 3, 1};
        Text text = make_text(shape, 257, normal(11));
        run_all(kernels, shape, team, {&text}, everything);
        const std::vector<float> clean = text.output;
        for (const unsigned char fill : {0x7c, 0xfc, 0x7f, 0x00}) {  // 0x7c7c: a NaN in float16
            for (const size_t behind : {0, 1, 64, 127, 129, 250}) {
                // Cut back to `behind` tokens, overwrite the rest with rubbish, and go on.
                Text cut = text;
                cut.past = behind;
                const Text poison = make_text(shape, 257, [&](size_t row, size_t) {
                    return row % 3 == 0 ? NAN : row % 3 == 1 ? INFINITY : -INFINITY;
                });
                cut.rows = poison.rows;
                run_step(kernels, shape, team, {&cut}, {text.length - behind});
                memset(cut.keys.data() + shape.cache().key_bytes(256), fill, shape.cache().key_bytes(128));
                cut.rows = text.rows;
                cut.past = behind;
                while (cut.past < text.length) {
                    const size_t count = std::min(1 + cut.past % 5, text.length - cut.past);
                    run_step(kernels, shape, team, {&cut}, {count});
                }
                EXPECT(memcmp(cut.output.data(), clean.data(), clean.size() * sizeof(float)) == 0,
                       "%s, %s: rubbish behind position %zu is seen", kernels.isa, shape.name().c_str(), behind);
            }
        }
    }
}

// A later token of the same step changes no bit of the earlier ones', whatever numbers it brings.
void what_follows_in_a_step_is_not_seen(const AttentionKernels& kernels, std::vector<Team*> teams) {
    for (const bool half : {true, false}) {
        for (const auto& [dim, heads, kv_heads, window] :
             Sizes{{20, 3, 1, kNoWindow}, {16, 6, 2, kNoWindow}, {33, 16, 1, 100}, {5, 100, 1, kNoWindow}}) {
            const Shape shape{half, dim, heads, kv_heads, window};
            Text clean = make_text(shape, 290, normal(12));
            run_all(kernels, shape, *teams[0], {&clean}, everything);
            for (Team* team : teams) {
                for (const size_t from : {1, 6, 129, 278, 289}) {
                    Text text = clean;
                    for (size_t i = from * shape.width(); i < text.rows.size(); ++i) {
                        text.rows[i] = i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -INFINITY;
                    }
                    for (const size_t count : {290, 100, 7}) {
                        run_all(kernels, shape, *team, {&text}, [&](const Text&) { return count; });
                        const size_t size = from * shape.output_width() * sizeof(float);
                        EXPECT(memcmp(text.output.data(), clean.output.data(), size) == 0,
                               "%s, %s, %d threads, %zu at once: token %zu is seen by an earlier one", kernels.isa,
                               shape.name().c_str(), team->size(), count, from);
                    }
                }
            }
        }
    }
}

// ---- Timing --------------------------------------------------------------------------------------------------------

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double processor_seconds() { return static_cast<double>(clock()) / CLOCKS_PER_SEC; }

// One layer's step of `rows` new tokens after `past`, on `layers` caches in turn: the best of some.
void time_step(const AttentionKernels& kernels, const Shape& shape, Team& team, size_t past, size_t rows, size_t batch,
               int layers) {
    std::vector<std::vector<Text>> caches(layers);
    std::vector<float> input(batch * rows * shape.width()), output(batch * rows * shape.output_width());
    const Fill random = normal(3);
    for (float& value : input) value = random(0, 0);
    const size_t capacity = (past + rows + kTileKeys - 1) / kTileKeys * kTileKeys;
    const size_t keys = shape.kv_heads * shape.cache().key_bytes(capacity);
    const size_t values = shape.kv_heads * shape.cache().value_bytes(capacity);
    std::vector<std::vector<uint8_t>> memory;
    for (size_t i = 0; i < layers * batch; ++i) {
        memory.emplace_back(keys + values);
        std::mt19937 engine(4);
        for (uint8_t& byte : memory.back()) byte = static_cast<uint8_t>(engine() & 0x3b);  // small positive numbers
    }
    std::vector<uint8_t> scratch(
        attention_scratch_bytes(shape.cache(), shape.heads, rows * batch, batch, past + rows, team.size()));
    double flops = 0, best = 1e9, best_busy = 1e9;
    for (size_t row = 0; row < rows; ++row) flops += 4.0 * shape.dim * shape.heads * (past + row + 1) * batch;
    const double end = seconds() + 1.5;
    for (int round = 0; round < 3 || seconds() < end; ++round) {
        double total = 0, busy = processor_seconds();
        for (int layer = 0; layer < layers; ++layer) {
            std::vector<AttentionSequence> sequences;
            for (size_t i = 0; i < batch; ++i) {
                uint8_t* at = memory[layer * batch + i].data();
                sequences.push_back({i * rows, rows, past, capacity, at, at + keys});
            }
            const size_t queries = static_cast<size_t>(shape.heads) * shape.dim;
            const AttentionStep step{shape.cache(),
                                     shape.heads,
                                     shape.scale(),
                                     shape.window,
                                     {input.data(), shape.width()},
                                     {input.data() + queries, shape.width()},
                                     {input.data() + queries + shape.kv_heads * shape.dim, shape.width()},
                                     output.data(),
                                     shape.output_width(),
                                     sequences.data(),
                                     batch};
            const double start = seconds();
            team.run([&](int thread) { attend(kernels, step, team, thread, scratch.data()); });
            total += seconds() - start;
        }
        best = std::min(best, total / layers);
        best_busy = std::min(best_busy, (processor_seconds() - busy) / layers / team.size());
    }
    printf("%-12s %-24s past %5zu rows %4zu batch %zu layers %2d: %9.1f us (busy %9.1f us) %7.1f GFLOP/s %6.1f GB/s\n",
           kernels.isa, shape.name().c_str(), past, rows, batch, layers, best * 1e6, best_busy * 1e6,
           flops / best * 1e-9,
           batch * shape.kv_heads * (shape.cache().key_bytes(past) + shape.cache().value_bytes(past)) / best * 1e-9);
}

void time_all(const std::vector<const AttentionKernels*>& all, int threads) {
    Team team(threads);
    for (const AttentionKernels* kernels : all) {
        for (const bool half : {true, false}) {
            for (const auto& [dim, heads] : {std::pair{128, 16}, {64, 12}}) {
                time_step(*kernels, {half, dim, heads, 1}, team, 7168, 512, 1, 1);
                time_step(*kernels, {half, dim, heads, 1}, team, 0, 512, 1, 1);
                time_step(*kernels, {half, dim, heads, 1}, team, 7168, 1, 1, 1);
                time_step(*kernels, {half, dim, heads, 1}, team, 7168, 1, 1, 20);
                time_step(*kernels, {half, dim, heads, 1}, team, 300, 1, 1, 20);
                time_step(*kernels, {half, dim, heads, 1}, team, 1024, 1, 8, 4);
            }
            time_step(*kernels, {half, 64, 12, 12}, team, 1024, 512, 1, 1);
            time_step(*kernels, {half, 64, 12, 12}, team, 1024, 1, 1, 20);
        }
    }
}

using Tests = std::vector<std::pair<const char*, std::function<void()>>>;

void run_tests(const AttentionKernels& kernels, const Tests& tests) {
    for (const auto& [claim, test] : tests) {
        const double start = seconds();
        const int before = failures;
        test();
        printf("%-12s %s: %s (%.1f s)\n", kernels.isa, claim, failures == before ? "passed" : "FAILED",
               seconds() - start);
    }
}

// `shared`: only what shows how threads share work out, as a sanitizer of threads is slow.
int test_all(const std::vector<const AttentionKernels*>& all, bool shared) {
    Team one(1), two(2), three(3);
    for (const AttentionKernels* kernels : all) {
        const char* bits = "bits do not depend on steps, threads or batches";
        const Tests some{{bits, [&] {
            bits_do_not_depend_on_steps_threads_or_batches(*kernels, {&one, &two, &three}, kSharedSizes);
        }}};
        const Tests tests{
            {"outputs are those of float64", [&] { outputs_are_those_of_float64(*kernels, two); }},
            {"windows hide what lies before them", [&] { windows_hide_what_lies_before_them(*kernels, three); }},
            {bits, [&] { bits_do_not_depend_on_steps_threads_or_batches(*kernels, {&one, &two, &three}, kSizes); }},
            {"equal scores give the mean", [&] { equal_scores_give_the_mean(*kernels, two); }},
            {"one large score gives its value", [&] { one_large_score_gives_its_value(*kernels, three); }},
            {"large scores are weighed right", [&] { large_scores_are_weighed_right(*kernels, two); }},
            {"caches have the documented layout", [&] { caches_have_the_documented_layout(*kernels, three); }},
            {"what follows in a step is not seen", [&] { what_follows_in_a_step_is_not_seen(*kernels, {&one, &three}); }},
            {"what lies behind the end is not seen", [&] { what_lies_behind_the_end_is_not_seen(*kernels, two); }},
        };
        run_tests(*kernels, shared ? some : tests);
    }
    return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace starscope

// test_attention [ISA...]                     runs the tests
// test_attention --shared [ISA...]            runs those that show how threads share work out
// test_attention --time [THREADS [ISA...]]    prints times; "busy" is processor time, for a machine that does more
int main(int count, char** arguments) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    const bool time = count > 1 && strcmp(arguments[1], "--time") == 0;
    const bool shared = count > 1 && strcmp(arguments[1], "--shared") == 0;
    const int threads = time && count > 2 ? atoi(arguments[2]) : 2;
    const int options = time ? 3 : shared ? 2 : 1;
    const std::vector<std::string> names(arguments + std::min(count, options), arguments + count);
    std::vector<const starscope::AttentionKernels*> kernels;
    for (const auto* each : starscope::usable_kernels()) {
        if (names.empty() || std::find(names.begin(), names.end(), each->isa) != names.end()) kernels.push_back(each);
    }
    if (time) starscope::time_all(kernels, threads);
    return time ? 0 : starscope::test_all(kernels, shared);
}
