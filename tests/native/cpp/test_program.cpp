// Tests of panels, of products with them and of whole programs, for the sanitizers above all: buffers are as large as
// promised and not a byte larger, and what is computed must be the same bits whatever the threads, rows and parts are.
// That the values are right is tested against NumPy.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "attention_kernels.h"
#include "program.h"

namespace starscope {
namespace {

int failures = 0;

#define EXPECT(condition, ...)                                     \
    do {                                                           \
        if (!(condition)) {                                        \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            printf(__VA_ARGS__);                                   \
            printf("\n");                                          \
            if (++failures > 20) exit(1);                          \
        }                                                          \
    } while (0)

struct Set {
    const char* name;
    const ComputeKernels* compute;
    const AttentionKernels* attention;
};

// Those that were compiled in and run here, scalar first.
std::vector<Set> usable_sets() {
    std::vector<Set> sets{{"scalar", &scalar::compute, &scalar::attention_kernels}};
#ifdef HAS_avx2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        sets.push_back({"avx2", &avx2::compute, &avx2::attention_kernels});
    }
#endif
#if defined(HAS_avx512) || defined(HAS_avx512_bf16)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
#ifdef HAS_avx512
        sets.push_back({"avx512", &avx512::compute, &avx512::attention_kernels});
#endif
#ifdef HAS_avx512_bf16
        if (__builtin_cpu_supports("avx512bf16")) {
            sets.push_back({"avx512_bf16", &avx512::compute, &avx512_bf16::attention_kernels});
        }
#endif
    }
#endif
    return sets;
}

// ---- Memory and numbers --------------------------------------------------------------------------------------------

// Bytes at a multiple of 64, with nothing behind them that is ours: a sanitizer sees what reads or writes there.
class Exact {
  public:
    explicit Exact(size_t bytes)
        : bytes_(bytes), data_(static_cast<uint8_t*>(aligned_alloc(64, (bytes + 63) / 64 * 64))) {
        memset(data_.get(), 0xff, bytes);  // NaN, so that nothing counts on zeros
    }
    uint8_t* data() { return data_.get(); }
    float* floats() { return reinterpret_cast<float*>(data_.get()); }
    size_t size() const { return bytes_; }

  private:
    struct Free {
        void operator()(uint8_t* at) const { free(at); }
    };
    size_t bytes_;
    std::unique_ptr<uint8_t, Free> data_;
};

using Random = std::mt19937;

std::vector<float> normal(Random& random, size_t count) {
    std::normal_distribution<float> distribution;
    std::vector<float> values(count);
    for (float& value : values) value = distribution(random);
    return values;
}

// Where float16 numbers are in a block of a file: `count` of them from byte `at` on.
struct Halves {
    size_t at, count;
};
Halves halves_of(const PanelType& type) {
    switch (type.type_id) {
        case kQ4_K:
        case kQ5_K:
            return {0, 2};
        case kQ6_K:
            return {208, 1};
        default:
            return {0, 1};
    }
}

// Rows of a file: any bytes, but for small scales, and float numbers around 1.
std::vector<uint8_t> file_rows(Random& random, const PanelType& type, size_t rows, size_t cols) {
    const size_t blocks = rows * cols / type.block_values;
    std::vector<uint8_t> bytes(blocks * type.block_bytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    for (size_t b = 0; b < blocks; ++b) {
        uint8_t* block = bytes.data() + b * type.block_bytes;
        if (type.is_float) {  // the exponent of 1, in float32, bfloat16 or float16
            block[type.block_bytes - 1] = (block[type.block_bytes - 1] & 0x80) | (type.type_id == kF16 ? 0x3c : 0x3f);
            if (type.type_id != kF16) block[type.block_bytes - 2] |= 0x80;
        } else {
            const Halves halves = halves_of(type);
            for (size_t i = 0; i < halves.count; ++i)
                block[halves.at + 2 * i + 1] = 0x20 | (random() & 0x83);  // ~ 0.01
        }
    }
    return bytes;
}

size_t row_bytes(const PanelType& type, size_t cols) { return cols / type.block_values * type.block_bytes; }

bool same(const float* a, const float* b, size_t count) { return memcmp(a, b, count * sizeof(float)) == 0; }

// ---- Panels and products -------------------------------------------------------------------------------------------

// Panels of 1..16 rows, products with 1..12 rows by two ways, and what follows them; against the scalar set.
void products_are_the_same_by_every_way(const Set& set) {
    Random random(1);
    const ComputeKernels& k = *set.compute;
    for (const PanelType& type : kPanelTypes) {
        const size_t unit = std::max<size_t>(type.block_values, type.is_float ? 1 : 32);
        for (const size_t units : {1, 3, 9, 19, 530}) {
            const size_t cols = units * unit;
            if (cols > 800) continue;
            for (const size_t panel_rows : {1, 16}) {
                const std::vector<uint8_t> source = file_rows(random, type, panel_rows, cols);
                const size_t stride = panel_bytes(type, cols);
                Exact panels(2 * stride);
                for (int p = 0; p < 2; ++p) {
                    pack_panel(type, source.data(), row_bytes(type, cols), panel_rows, cols,
                               panels.data() + p * stride);
                }
                EXPECT(memcmp(panels.data(), panels.data() + stride,
                              type.is_float ? cols * type.group_bytes : stride) == 0,
                       "type %d", type.type_id);
                for (const size_t rows : {1, 3, 7, 12}) {
                    const std::vector<float> x = normal(random, rows * cols);
                    Exact tile(tile_bytes(type, cols, rows)), reference_tile(tile_bytes(type, cols, rows));
                    std::vector<const float*> at;
                    for (size_t r = 0; r < rows; ++r) at.push_back(x.data() + r * cols);
                    const size_t some = rows / 2;  // rows may come in any pieces
                    k.prepare(type, at.data(), some, cols, 0, rows, tile.data());
                    k.prepare(type, at.data() + some, rows - some, cols, some, rows, tile.data());
                    for (size_t r = 0; r < rows; ++r) {
                        scalar::compute.prepare(type, &at[r], 1, cols, r, rows, reference_tile.data());
                    }
                    Exact products(2 * rows * 64), again(rows * 64), reference(rows * 64);
                    k.multiply(type, panels.data(), stride, 2, cols, tile.data(), rows, products.floats());
                    EXPECT(same(products.floats(), products.floats() + 16 * rows, 16 * rows), "%s type %d", set.name,
                           type.type_id);
                    scalar::compute.multiply(type, panels.data(), stride, 1, cols, reference_tile.data(), rows,
                                             reference.floats());
                    float largest = 0, difference = 0;
                    for (size_t i = 0; i < rows * 16; ++i) {
                        largest = std::max(largest, fabsf(reference.floats()[i]));
                        difference = std::max(difference, fabsf(reference.floats()[i] - products.floats()[i]));
                    }
                    EXPECT(largest > 0 && difference <= 1e-4f * largest, "%s type %d cols %zu rows %zu: %g of %g",
                           set.name, type.type_id, cols, rows, difference, largest);
                    for (size_t r = 0; r < rows; ++r) {
                        for (size_t i = panel_rows; i < 16; ++i) {
                            EXPECT(products.floats()[16 * r + i] == 0, "%s type %d: a row past the end", set.name,
                                   type.type_id);
                        }
                    }
                    const size_t part = 256;
                    Exact scratch(k.part_bytes(type, std::min(part, cols)));
                    for (size_t first = 0; first < cols; first += part) {
                        const size_t count = std::min(part, cols - first);
                        const uint8_t* unpacked = k.unpack(type, panels.data(), first, count, cols, scratch.data());
                        k.multiply_part(type, unpacked, first, count, cols, tile.data(), rows, again.floats());
                    }
                    EXPECT(same(products.floats(), again.floats(), 16 * rows), "%s type %d cols %zu rows %zu", set.name,
                           type.type_id, cols, rows);
                }
            }
        }
    }
}

// A gate in the epilogue is the activation, the product and the sum one by one, bit for bit; a and b: one row each.
void gates_are_what_their_steps_give(const Set& set, const std::vector<float>& a, const std::vector<float>& b) {
    const ComputeKernels& k = *set.compute;
    const size_t cols = a.size(), panels = panel_count(cols);
    Exact gates(panels * 64), products(panels * 64), bias(panels * 64), out(cols * 4), expected(cols * 4),
        act(cols * 4);
    for (Exact* all : {&gates, &products, &bias}) memset(all->data(), 0, all->size());
    memcpy(gates.floats(), a.data(), cols * 4);
    memcpy(products.floats(), b.data(), cols * 4);
    for (size_t i = 0; i < cols; ++i) bias.floats()[i] = 0.25f * static_cast<float>(i % 5);
    k.finish(products.floats(), kPanelRows, 1, cols,
             {bias.floats(), kSilu, gates.floats(), bias.floats(), a.data(), cols}, out.floats(), cols);
    k.add(a.data(), bias.floats(), act.floats(), cols);
    k.activate(kSilu, act.floats(), act.floats(), cols);
    k.add(b.data(), bias.floats(), expected.floats(), cols);
    k.times(act.floats(), expected.floats(), expected.floats(), cols);
    k.add(a.data(), expected.floats(), expected.floats(), cols);
    EXPECT(same(out.floats(), expected.floats(), cols), "%s gate of %zu", set.name, cols);
}

void small_steps_stay_within_their_arrays(const Set& set) {
    Random random(2);
    const ComputeKernels& k = *set.compute;
    for (const size_t cols : {1, 5, 16, 17, 31, 53, 100}) {
        const std::vector<float> a = normal(random, cols), b = normal(random, cols);
        Exact out(cols * 4), reference(cols * 4);
        const auto expect_close = [&](const char* what) {
            for (size_t i = 0; i < cols; ++i) {
                EXPECT(fabsf(out.floats()[i] - reference.floats()[i]) <= 1e-5f, "%s %s %zu", set.name, what, i);
            }
        };
        for (const float* bias : {b.data(), static_cast<const float*>(nullptr)}) {
            k.layer_norm(a.data(), cols, 1e-5f, b.data(), bias, out.floats());
            scalar::compute.layer_norm(a.data(), cols, 1e-5f, b.data(), bias, reference.floats());
            expect_close("norm");
            k.rms_norm(a.data(), cols, 1e-5f, b.data(), bias, out.floats());
            scalar::compute.rms_norm(a.data(), cols, 1e-5f, b.data(), bias, reference.floats());
            expect_close("rms norm");
        }
        k.times(a.data(), b.data(), out.floats(), cols);
        for (size_t i = 0; i < cols; ++i) EXPECT(out.floats()[i] == a[i] * b[i], "%s times", set.name);
        if (cols % 2 == 0) {  // one head: in pairs, into another place and into its own
            memcpy(out.floats(), a.data(), cols * 4);
            k.rotate(out.floats(), 1, cols, b.data(), out.floats());
            for (size_t i = 0; i < cols / 2; ++i) {
                const float x = a[i], y = a[i + cols / 2], cosine = b[i], sine = b[i + cols / 2];
                const float first = x * cosine, second = y * sine, third = y * cosine, fourth = x * sine;
                EXPECT(out.floats()[i] == first - second, "%s rotate %zu", set.name, i);
                EXPECT(out.floats()[i + cols / 2] == third + fourth, "%s rotate %zu", set.name, i);
            }
            k.rotate(a.data(), 1, cols, b.data(), reference.floats());
            EXPECT(same(out.floats(), reference.floats(), cols), "%s rotate in place", set.name);
        }
        gates_are_what_their_steps_give(set, a, b);
        k.add(a.data(), b.data(), out.floats(), cols);
        for (size_t i = 0; i < cols; ++i) EXPECT(out.floats()[i] == a[i] + b[i], "%s add", set.name);
        for (const Activation activation : {kNoActivation, kGelu, kGeluTanh, kSilu}) {
            k.activate(activation, a.data(), out.floats(), cols);
            scalar::compute.activate(activation, a.data(), reference.floats(), cols);
            expect_close("activation");
        }
    }
}

// ---- Programs ------------------------------------------------------------------------------------------------------

// A block of a model whose sizes are multiples of nothing: normalization, attention, an MLP, and logits of some rows.
struct Model {
    static constexpr int kDim = 12, kHeads = 8, kVocabulary = 61, kHidden = kDim * kHeads;
    const PanelType& type;
    int kv_heads;
    const bool open;  // attention instruction by instruction, stopped at in between, and with edits that change nothing
    Program program;
    Code code;
    Buffers buffers;

    Model(const Set& set, const PanelType& type, int kv_heads, int inner, int threads, bool open)
        : type(type), kv_heads(kv_heads), open(open), program(threads, *set.compute, *set.attention) {
        Random random(3);
        const int qkv = kHidden + 2 * kv_heads * kDim;
        const auto matrix = [&](size_t rows, size_t cols) {
            const int index = program.add_matrix(type, rows, cols);
            const std::vector<uint8_t> bytes = file_rows(random, type, rows, cols);
            const Matrix m = program.matrix(index);
            std::vector<std::thread> readers;  // several threads fill it
            for (size_t t = 0; t < 3; ++t) {
                readers.emplace_back([&, t] {
                    for (size_t first = 16 * t; first < rows; first += 48) {
                        m.fill(first, std::min<size_t>(16, rows - first), bytes.data() + first * row_bytes(type, cols));
                    }
                });
            }
            for (std::thread& reader : readers) reader.join();
            return index;
        };
        const auto vector = [&](size_t count) { return program.add_vector(normal(random, count).data(), count); };
        // Slots: the input, the logits; then the residual stream, two of the hidden size, projections, neurons.
        const std::vector<size_t> widths{
            kHidden, kVocabulary, kHidden, kHidden, static_cast<size_t>(qkv), static_cast<size_t>(inner)};
        std::vector<Instruction> list;
        const auto emit = [&](Kind kind, View a, View out, int cols) -> Instruction& {
            list.push_back({});
            list.back().kind = kind;
            list.back().a = a;
            list.back().out = out;
            list.back().cols = cols;
            return list.back();
        };
        const auto linear = [&](View a, View out, int rows, int cols, bool norm) -> Instruction& {
            Instruction& i = emit(kLinear, a, out, rows);
            i.matrices = {matrix(rows, cols)};
            i.biases = {vector(rows)};
            if (norm) i.norm_weight = vector(cols), i.norm_bias = vector(cols), i.epsilon = 1e-5f;
            return i;
        };
        emit(kAdd, {0, 0}, {2, 0}, kHidden).b = {0, 0};
        if (kv_heads == 2) {
            Instruction& apart = linear({2, 0}, {4, 0}, kHidden, kHidden, true);
            for (int part = 0; part < 2; ++part) {
                apart.matrices.push_back(matrix(kv_heads * kDim, kHidden));
                apart.biases.push_back(part == 0 ? -1 : vector(kv_heads * kDim));
            }
            apart.cols = qkv;
            Instruction& rope = emit(kRope, {4, 0}, {4, 0}, kHidden + kv_heads * kDim);
            rope.heads = kHeads + kv_heads, rope.dim = kDim, rope.frequencies = vector(kDim / 2);
        } else {
            linear({2, 0}, {4, 0}, qkv, kHidden, true);
        }
        Instruction& attention = emit(kAttention, {4, 0}, {3, 0}, kHidden);
        attention.b = {4, kHidden};
        attention.c = {4, kHidden + kv_heads * kDim};
        attention.heads = kHeads, attention.kv_heads = kv_heads, attention.dim = kDim, attention.layer = 0;
        attention.scale = 0.3f;
        if (open) open_attention(list);
        linear({3, 0}, {2, 0}, kHidden, kHidden, false).b = {2, 0};
        Instruction& up = linear({2, 0}, {5, 0}, inner, kHidden, true);
        up.activation = kGelu;
        if (kv_heads == 2) {  // a gate, rotations, a norm without its mean
            up.matrices.push_back(matrix(inner, kHidden));
            up.biases.push_back(-1);
            up.gated = up.rms = true;
            up.norm_bias = -1, up.activation = kSilu;
        }
        linear({5, 0}, {3, 0}, kHidden, inner, false).b = {2, 0};
        Instruction& norm = emit(kNorm, {3, 0}, {2, 0}, kHidden);
        norm.weight = vector(kHidden), norm.epsilon = 1e-5f;
        emit(kActivate, {2, 0}, {3, 0}, kHidden).activation = kGeluTanh;
        linear({3, 0}, {1, 0}, kVocabulary, kHidden, true).gather = true;
        code = program.compile(list, widths, 2);
    }

    // What a cache is read to have, and only that, can be written back.
    void check_caches(const Step& step) const {
        for (const Sequence& s : step.sequences) {
            const size_t end = s.past + s.new_rows, start = end / 3, count = kv_heads * (end - start) * kDim;
            Exact values(count * sizeof(float)), again(count * sizeof(float));
            for (const bool is_key : {true, false}) {
                s.cache->read(0, is_key, start, end, values.floats());
                s.cache->write(0, is_key, start, end, values.floats());
                s.cache->read(0, is_key, start, end, again.floats());
                EXPECT(same(values.floats(), again.floats(), count), "%d key heads", kv_heads);
            }
        }
    }

    // The last instruction, an attention, as the several that it stands for.
    static void open_attention(std::vector<Instruction>& list) {
        const Instruction whole = list.back();
        list.pop_back();
        for (const Kind kind : {kEdit, kAppend, kAppend, kScores, kEdit, kSoftmax, kMix}) {
            Instruction i = whole;
            const bool is_values = !list.empty() && list.back().kind == kAppend;
            i.kind = kind;
            if (kind != kAppend || is_values) i.b = {};
            if (kind != kAppend || !is_values) i.c = {};
            if (kind == kEdit && list.back().kind == kScores) {  // of scores
                i.a = {};
                i.edit = 1;
            } else if (kind == kEdit) {  // of keys
                i.a = whole.b;
                i.cols = whole.kv_heads * whole.dim;
                i.edit = 0;
                i.as_cached = true;
            }
            list.push_back(i);
        }
    }

    // Runs `counts` new tokens of each sequence, whose inputs are rows of `texts` from `pasts` on; returns the logits.
    std::vector<float> step(const std::vector<std::vector<float>>& texts, const std::vector<size_t>& counts,
                            std::vector<size_t>& pasts, const std::vector<std::unique_ptr<KeyValues>>& caches) {
        Step step{};
        std::vector<float> input;
        std::vector<int64_t> wanted;
        for (size_t s = 0; s < texts.size(); ++s) {
            if (counts[s] == 0) continue;
            step.sequences.push_back({step.rows, counts[s], pasts[s], caches[s].get()});
            input.insert(input.end(), texts[s].begin() + pasts[s] * kHidden,
                         texts[s].begin() + (pasts[s] + counts[s]) * kHidden);
            step.rows += counts[s];
            pasts[s] += counts[s];
            wanted.push_back(static_cast<int64_t>(step.rows) - 1);
        }
        std::vector<float> logits(wanted.size() * kVocabulary, NAN);
        step.wanted = wanted.data();
        step.wanted_rows = wanted.size();
        step.arrays = {input.data(), logits.data()};
        if (!open) {
            program.run(code, buffers, 0, code.instructions.size(), step);
            return logits;
        }
        std::vector<int64_t> rows(step.rows);
        for (size_t r = 0; r < step.rows; ++r) rows[r] = static_cast<int64_t>(step.rows - 1 - r);
        const std::vector<float> zeros(step.rows * kDim), zero(1);
        const Edit keys{rows.data(), rows.size(), 0, kDim, 1.0f, zeros.data(), rows.size(), kDim, 0, 0};
        const Edit scores{rows.data(), rows.size(), 1, 200, 1.0f, zero.data(), 1, 1, 2, kHeads - 2};
        step.edits = {{keys, keys}, {scores}};
        for (size_t i = 0; i < code.instructions.size(); ++i) {
            program.run(code, buffers, i, i + 1, step);
            if (code.instructions[i].kind == kAppend) check_caches(step);
        }
        return logits;
    }
};

void programs_give_the_same_bits_on_all_threads(const Set& set) {
    for (const PanelType& type : kPanelTypes) {
        if (type.block_values > 32) continue;  // rows of 96
        for (const int kv_heads : {1, 2, Model::kHeads}) {
            // Once with more columns than are multiplied at a time; once with many key heads, in float32; and with two,
            // in a block that has gates and rotations.
            const int inner = type.type_id == kQ8_0 ? 2080 : 160;
            if ((kv_heads == Model::kHeads) != (type.type_id == kF32)) continue;
            if (kv_heads == 2 && type.type_id != kQ4_0 && type.type_id != kF16) continue;
            Random random(4);
            std::vector<std::vector<float>> texts;
            for (const size_t length : {41, 140, 3}) texts.push_back(normal(random, length * Model::kHidden));
            // The last logits of each text must be the same, by any way to the end.
            const std::vector<std::vector<std::vector<size_t>>> plans{
                {{41, 140, 3}},
                {{1, 128, 1}, {30, 11, 1}, {10, 1, 1}},
                {{41, 0, 0}, {0, 140, 0}, {0, 0, 2}, {0, 0, 1}},
            };
            std::vector<float> expected, fused;
            for (const auto& [threads, open] : {std::pair{1, false}, {3, false}, {1, true}, {3, true}}) {
                if (open && fused.empty()) fused = std::exchange(expected, {});
                Model model(set, type, kv_heads, inner, threads, open);
                for (const auto& plan : plans) {
                    std::vector<std::unique_ptr<KeyValues>> caches;
                    for (size_t s = 0; s < texts.size(); ++s) {
                        const CacheShape shape{type.type_id != kF32, kv_heads, Model::kDim};
                        caches.push_back(std::make_unique<KeyValues>(shape, 1, 150));
                    }
                    std::vector<size_t> pasts(texts.size(), 0);
                    std::vector<float> last(texts.size() * Model::kVocabulary);
                    for (const std::vector<size_t>& counts : plan) {
                        const std::vector<float> logits = model.step(texts, counts, pasts, caches);
                        auto from = logits.begin();
                        for (size_t s = 0; s < texts.size(); ++s) {
                            if (counts[s] == 0) continue;
                            std::copy_n(from, Model::kVocabulary, last.begin() + s * Model::kVocabulary);
                            from += Model::kVocabulary;
                        }
                    }
                    for (const float value : last)
                        EXPECT(isfinite(value), "%s type %d: not finite", set.name, type.type_id);
                    if (expected.empty()) expected = last;
                    EXPECT(same(last.data(), expected.data(), last.size()), "%s type %d, %d key heads, %d threads, %d",
                           set.name, type.type_id, kv_heads, threads, open);
                    for (size_t i = 0; open && i < last.size(); ++i) {
                        EXPECT(fabsf(last[i] - fused[i]) <= (type.type_id == kF32 ? 1e-4f : 0.05f),
                               "%s type %d: %g, %g", set.name, type.type_id, last[i], fused[i]);
                    }
                }
            }
        }
    }
}

// ---- Teams ---------------------------------------------------------------------------------------------------------

// Every number is taken once, nobody passes a barrier before all are there, and results are seen behind it.
void teams_share_work_and_meet(const Set&) {
    for (const int threads : {1, 2, 3}) {
        Team team(threads);
        std::vector<int> taken(100), seen(100);
        for (int job = 0; job < 200; ++job) {
            std::fill(taken.begin(), taken.end(), 0);
            team.run([&](int) {
                for (int phase = 0; phase < 3; ++phase) {
                    for (size_t i; (i = team.take(3)) < taken.size();) {
                        for (size_t j = i; j < std::min(i + 3, taken.size()); ++j) ++taken[j];
                    }
                    team.barrier();
                    for (size_t i; (i = team.take(7)) < seen.size();) {
                        for (size_t j = i; j < std::min(i + 7, seen.size()); ++j) seen[j] = taken[taken.size() - 1 - j];
                    }
                    team.barrier();
                }
            });
            for (const int count : seen) EXPECT(count == 3, "%d threads, job %d: %d", threads, job, count);
        }
    }
    Team never_used(3);
}

int test_all() {
    const std::vector<std::pair<const char*, std::function<void(const Set&)>>> tests{
        {"products are the same by every way", products_are_the_same_by_every_way},
        {"small steps stay within their arrays", small_steps_stay_within_their_arrays},
        {"programs give the same bits on all threads", programs_give_the_same_bits_on_all_threads},
        {"teams share work and meet", teams_share_work_and_meet},
    };
    for (const Set& set : usable_sets()) {
        for (const auto& [claim, test] : tests) {
            const int before = failures;
            test(set);
            printf("%-12s %s: %s\n", set.name, claim, failures == before ? "passed" : "FAILED");
        }
    }
    return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace starscope

int main() {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    return starscope::test_all();
}
