// A recorded forward pass as a list of instructions over slots, run by a team of threads without stopping between them.
//
// A slot holds one value for every row of a step, `width` numbers a row. Slots are places in one buffer, given out
// beforehand so that values whose lives do not overlap share them, or the caller's own arrays (what comes in, and the
// logits). Several operations of the graph may be one instruction; the bits are those of the operations one by one.
//
// A Program has what all runs share: weights, threads, and scratch that is in use only while a run is under way. A Code
// is one list; several may exist, which do more or less at once. Buffers are the slots of one step: they keep its
// values between two runs of parts of the list, while other steps run.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "compute.h"
#include "key_values.h"
#include "memory.h"
#include "team.h"

namespace starscope {

struct AttentionKernels;

// Some columns of a slot, from `column` on. slot -1: nothing.
struct View {
    int slot = -1;
    int column = 0;
    bool exists() const { return slot >= 0; }
};

enum Kind : int {
    kAdd,
    kMultiply,
    kNorm,
    kLinear,
    kActivate,
    kRope,
    kAttention,
    kGather,
    kAppend,
    kScores,
    kSoftmax,
    kMix,
    kEdit,
};

// Their names for whoever makes instructions.
constexpr std::pair<const char*, Kind> kKinds[] = {
    {"add", kAdd},           {"multiply", kMultiply}, {"norm", kNorm},           {"linear", kLinear},
    {"activate", kActivate}, {"rope", kRope},         {"attention", kAttention}, {"gather", kGather},
    {"append", kAppend},     {"scores", kScores},     {"softmax", kSoftmax},     {"mix", kMix},
    {"edit", kEdit},
};

// Matrices that one linear may have.
constexpr size_t kMostMatrices = 3;

struct Instruction {
    int kind = kAdd;
    View a, b, out;      // b: the second term of an add or a multiply, the residual of a linear
    int cols = 0;        // of `a`; of `out` for a linear
    int activation = 0;  // of kActivate, and after a linear's bias
    // kLinear: the rows times each of its matrices, side by side, with a bias each (-1: none; or no list at all).
    // gated: there are two matrices, and the output is the activation of the first one's product times the second
    // one's.
    std::vector<int> matrices, biases;
    bool gated = false;
    int weight = -1, bias = -1;  // kNorm: vectors; no bias is allowed
    // kLinear: its rows are normalized first when norm_weight is given. gather: only the wanted rows are taken.
    int norm_weight = -1, norm_bias = -1;
    float epsilon = 0;  // kNorm too
    bool rms = false;   // kNorm too: the mean is not taken off
    bool gather = false;
    bool wanted = false;   // the wanted rows are all that its values have
    int frequencies = -1;  // kRope: a vector of dim / 2, radians a position
    // kAttention: queries, keys and values are in a, b and c; the cached ones of `layer` are read and added to. Without
    // b and c they have been added. kAppend: adds keys b and values c to them, or one of the two. kScores, kSoftmax and
    // kMix are an attention in three steps, over the buffers' patterns; the fields are the attention's.
    // kEdit: the step's changes of number `edit` are made in a, or in the patterns where there is no a. as_cached: all
    // rows are rounded first as the caches keep them.
    int edit = -1;
    bool as_cached = false;
    View c;
    int layer = 0, heads = 0, kv_heads = 0, dim = 0;
    float scale = 0;
    int window = 0;  // keys that a query sees at the most; 0: all before it

    bool changes_patterns() const { return kind == kEdit && !a.exists(); }
    bool has_patterns() const { return kind == kScores || kind == kSoftmax || kind == kMix || changes_patterns(); }
    // Whether the sequences of a step, and their caches, matter.
    bool has_sequences() const {
        return kind == kAttention || kind == kAppend || kind == kRope || has_patterns() || as_cached;
    }
    bool attends() const { return kind == kAttention || kind == kAppend || (has_patterns() && kind != kEdit); }
};

// The weight of a linear layer, [rows cols] of a file, as panels `stride` bytes apart.
struct Matrix {
    const PanelType* type;
    size_t rows, cols, stride;
    uint8_t* panels;

    // Rows first .. first+count-1 as they lie in a file; first is a multiple of 16, and count too unless they are the
    // last. Several threads may fill different rows.
    void fill(size_t first, size_t count, const uint8_t* file_rows) const;
};

struct Sequence {
    size_t first_row, new_rows, past;
    KeyValues* cache;
};

// x = scale * x + value for some columns of some rows; exactly the value when scale is 0, whatever x was. In patterns
// columns are keys, of the heads from first_head on, and those behind the query stay as they are.
struct Edit {
    const int64_t* rows;  // no row twice
    size_t count, first_col, cols;
    float scale;
    const float* values;  // [value_rows][value_cols], each of them 1 or as many as are changed
    size_t value_rows, value_cols;
    size_t first_head, heads;  // of patterns

    // Changes `columns` of a row, of which x is the first and which begin `skipped` behind those of the edit.
    void apply(size_t number, float* x, size_t columns, size_t skipped = 0) const {
        const size_t step = value_cols == 1 ? 0 : 1;
        const float* value = values + (value_rows == 1 ? 0 : number * value_cols) + skipped * step;
        for (size_t c = 0; c < columns; ++c) x[c] = scale == 0 ? value[c * step] : scale * x[c] + value[c * step];
    }
};

struct Step {
    size_t rows;
    const int64_t* wanted;
    size_t wanted_rows;
    std::vector<Sequence> sequences;
    std::vector<float*> arrays;            // the caller's, one for each slot that is not in the buffer, in order
    std::vector<std::vector<Edit>> edits;  // by their numbers
};

// A list of instructions, checked, and what it asks for.
struct Code {
    std::vector<Instruction> instructions;
    std::vector<size_t> widths;          // of all slots
    size_t arrays;                       // the first so many of them are the caller's
    size_t edits;                        // numbers of edits
    std::vector<bool> whole;             // by slot: some instruction takes all rows of it, not only the wanted ones
    size_t part_at = 0, part_bytes = 0;  // of each thread's scratch: see Program::private_
    const void* program = nullptr;       // whose matrices and vectors are named
};

// The slots of one step.
class Buffers {
  public:
    // Room for a step of `rows` rows of a code. What is in it stays if it was made for the same.
    void fit(const Code& code, size_t rows);

    size_t rows() const { return rows_; }
    const std::vector<size_t>& widths() const { return widths_; }
    size_t arrays() const { return arrays_; }
    // Of a slot that is not the caller's, or one that the caller has lent for the run under way.
    float* slot(size_t index) const { return bases_[index]; }

    // Patterns of one attention (patterns.h) at a time; what is in them stays while the room is enough.
    void fit_patterns(size_t floats) { patterns_.grow(floats * sizeof(float)); }
    size_t pattern_floats() const { return patterns_.size() / sizeof(float); }
    float* patterns() const { return reinterpret_cast<float*>(patterns_.data()); }

  private:
    friend class Program;
    std::vector<size_t> widths_;
    size_t arrays_ = 0, rows_ = 0;
    std::vector<float*> bases_;
    Memory memory_, patterns_;
};

// Rows that every thread prepares for itself: cheaper than a barrier.
constexpr size_t kFewRows = 2;
// Products of few rows, or of one panel with a tile, in each thread's memory: floats.
constexpr size_t kProducts = 64 * kPanelRows * kFewRows;
static_assert(kProducts >= 2 * kTileRows * kPanelRows);
// Of many rows so many columns of a panel are unpacked at a time, and the sums of so many panels and tiles kept.
constexpr size_t kPartCols = 2048, kPartPanels = 8, kMostTiles = 32;
constexpr size_t kPartSums = kPartPanels * kMostTiles * kTileRows * kPanelRows;  // floats

class Program {
  public:
    Program(int threads, const ComputeKernels& compute, const AttentionKernels& attention)
        : compute_(compute), attention_(attention), team_(threads), private_(threads) {}

    int threads() const { return team_.size(); }
    const char* isa() const { return compute_.isa; }

    int add_matrix(const PanelType& type, size_t rows, size_t cols);
    int add_vector(const float* values, size_t count);

    const Matrix& matrix(int index) const { return matrices_.at(index); }
    size_t matrices() const { return matrices_.size(); }
    size_t vector_size(int index) const { return vectors_.at(index).count; }
    size_t vectors() const { return vectors_.size(); }

    // `widths` of all slots; the first `arrays` of them are the caller's.
    Code compile(std::vector<Instruction> instructions, std::vector<size_t> widths, size_t arrays);
    // Instructions first .. last-1. One run at a time.
    void run(const Code& code, Buffers& buffers, size_t first, size_t last, const Step& step);

  private:
    struct Forms;
    struct Share;

    void execute(const Instruction& instruction, const Step& step, int thread);
    void each(const Instruction& i, const Step& step);
    void norm(const Instruction& i, const Step& step);
    void activate(const Instruction& i, const Step& step);
    void rotate(const Instruction& i, const Step& step);
    void gather(const Instruction& i, const Step& step);
    void attend(const Instruction& i, const Step& step, int thread);
    void edit(const Instruction& i, const Step& step);
    void edit_patterns(const Instruction& i, const Step& step, const Edit& edit, size_t number);
    // linear.cpp
    size_t few_bytes(const Instruction& i) const;
    size_t tiles_bytes(const Instruction& i, size_t rows) const;
    void linear(const Instruction& i, const Step& step, int thread);
    void prepare_rows(const Instruction& i, const Step& step, size_t first, size_t count, const Forms& forms,
                      uint8_t* tiles, int thread);
    void multiply_few(const Instruction& i, const Share& share, size_t rows, float* products);
    void multiply_some(const Instruction& i, const Share& share, size_t rows, float* products);
    void multiply_many(const Instruction& i, const Share& share, size_t rows, int thread);
    void finish(const Instruction& i, const Share& share, size_t first, size_t end, size_t first_row, size_t rows,
                const float* products, const float* gate, size_t panel_stride);
    float* at(const View& view, size_t row) const { return bases_[view.slot] + row * widths_[view.slot] + view.column; }
    FloatRows rows_at(const View& view) const {
        return view.exists() ? FloatRows{at(view, 0), widths_[view.slot]} : FloatRows{};
    }
    const float* vector(int index) const { return index < 0 ? nullptr : vectors_[index].values.data(); }
    void reserve_private(const Code& code);
    std::vector<float>& turns(int frequencies);
    void fill_turns(int frequencies, const Step& step);
    void reserve(const Code& code, Buffers& buffers, size_t first, size_t last, const Step& step);

    const ComputeKernels& compute_;
    const AttentionKernels& attention_;
    Team team_;
    Pool pool_;  // of all panels
    std::vector<Matrix> matrices_;
    struct Vector {
        std::vector<float> values;  // with zeros up to a multiple of 16
        size_t count;
    };
    std::vector<Vector> vectors_;
    // Of the run under way.
    float* const* bases_ = nullptr;
    const size_t* widths_ = nullptr;
    float* patterns_ = nullptr;
    size_t part_at_ = 0, part_bytes_ = 0;  // the unpacked part of a panel, and sums of several panels and tiles
    Memory tiles_, attention_scratch_;
    std::vector<Memory> private_;  // of each thread: products, normalized rows, few prepared rows; then for many rows
    // Cosines and sines of every row's position (see `rotate` in compute.h), by the vector of their frequencies.
    std::vector<std::pair<int, std::vector<float>>> turns_;
};

// Rows that an instruction writes.
inline size_t rows_of(const Instruction& i, const Step& step) {
    return i.gather || i.wanted || i.kind == kGather ? step.wanted_rows : step.rows;
}

}  // namespace starscope
