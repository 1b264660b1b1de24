// A recorded forward pass as a list of instructions over slots, run by a team of threads without stopping between them.
//
// A slot holds one value for every row of a step, `width` numbers a row. Slots are places in one buffer, given out
// beforehand so that values whose lives do not overlap share them, or the caller's own arrays (what comes in, and the
// logits). Several operations of the graph may be one instruction; the bits are those of the operations one by one.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <vector>

#include "attention.h"
#include "compute.h"
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

enum Kind : int { kAdd, kNorm, kLinear, kActivate, kAttention, kGather };

struct Instruction {
    int kind = kAdd;
    View a, b, out;      // b: the second term of an add, the residual of a linear
    int cols = 0;        // of `a`; of `out` for a linear
    int activation = 0;  // of kActivate, and after a linear's bias
    int matrix = -1;     // kLinear
    int bias = -1;       // kLinear, kNorm: a vector, or none
    int weight = -1;     // kNorm
    // kLinear: its rows are normalized first when norm_weight is given, and the normalized rows kept in norm_out when
    // that exists. gather: only the wanted rows are taken.
    int norm_weight = -1, norm_bias = -1;
    float epsilon = 0;  // kNorm too
    View norm_out;
    bool gather = false;
    // kAttention: queries, keys and values are in a, b and c; the cached ones of `layer` are read and added to.
    View c;
    int layer = 0, heads = 0, kv_heads = 0, dim = 0;
    float scale = 0;
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

// Keys and values of one sequence in every block. Memory is taken as positions are written to.
struct KeyValues {
    CacheShape shape;
    size_t layers, capacity;
    Memory memory;

    KeyValues(CacheShape shape, size_t layers, size_t context_length)
        : shape(shape),
          layers(layers),
          capacity((context_length + kTileKeys - 1) / kTileKeys * kTileKeys),
          memory(layers * layer_bytes()) {}

    size_t layer_bytes() const { return shape.kv_heads * (shape.key_bytes(capacity) + shape.value_bytes(capacity)); }
    uint8_t* keys(size_t layer) { return memory.data() + layer * layer_bytes(); }
    uint8_t* values(size_t layer) { return keys(layer) + shape.kv_heads * shape.key_bytes(capacity); }
};

struct Sequence {
    size_t first_row, new_rows, past;
    KeyValues* cache;
};

struct Step {
    size_t rows;
    const int64_t* wanted;
    size_t wanted_rows;
    std::vector<Sequence> sequences;
    std::vector<float*> arrays;  // the caller's, one for each slot that is not in the buffer, in order
};

class Program {
  public:
    Program(int threads, const ComputeKernels& compute, const AttentionKernels& attention)
        : compute_(compute), attention_(attention), team_(threads) {}

    int threads() const { return team_.size(); }
    const char* isa() const { return compute_.isa; }

    int add_matrix(const PanelType& type, size_t rows, size_t cols);
    int add_vector(const float* values, size_t count);

    const Matrix& matrix(int index) const { return matrices_.at(index); }
    size_t matrices() const { return matrices_.size(); }
    size_t vector_size(int index) const { return vectors_.at(index).size(); }
    size_t vectors() const { return vectors_.size(); }
    const std::vector<size_t>& widths() const { return widths_; }
    size_t arrays() const { return arrays_; }
    size_t size() const { return instructions_.size(); }
    const Instruction& instruction(size_t index) const { return instructions_.at(index); }

    // `widths` of all slots; the first `arrays` of them are the caller's.
    void compile(std::vector<Instruction> instructions, std::vector<size_t> widths, size_t arrays);
    void run(size_t first, size_t last, const Step& step);

  private:
    void execute(const Instruction& instruction, const Step& step, int thread);
    void add(const Instruction& i, const Step& step);
    void norm(const Instruction& i, const Step& step);
    void activate(const Instruction& i, const Step& step);
    void gather(const Instruction& i, const Step& step);
    void linear(const Instruction& i, const Step& step, int thread);
    void attend(const Instruction& i, const Step& step, int thread);
    void prepare_row(const Instruction& i, const Step& step, const Matrix& matrix, size_t row, uint8_t* tiles,
                     int thread, bool keep);
    float* at(const View& view, size_t row) const { return bases_[view.slot] + row * widths_[view.slot] + view.column; }
    const float* vector(int index) const { return index < 0 ? nullptr : vectors_[index].data(); }
    void reserve(const Step& step);

    const ComputeKernels& compute_;
    const AttentionKernels& attention_;
    Team team_;
    Pool pool_;  // of all panels
    std::vector<Matrix> matrices_;
    std::vector<std::vector<float>> vectors_;
    std::vector<Instruction> instructions_;
    std::vector<size_t> widths_;
    size_t arrays_ = 0;
    std::vector<float*> bases_;  // of the slots, in the step being run
    Memory buffer_, tiles_, attention_scratch_;
    std::vector<Memory> private_;  // of each thread: products, a normalized row, few prepared rows; then for many rows
    size_t part_at_ = 0, part_bytes_ = 0;  // the unpacked part of a panel, and sums of several panels and tiles
};

}  // namespace starscope
