#include "program_checks.h"

#include <nanobind/nanobind.h>

namespace starscope {

void refuse(const std::string& problem) { throw nanobind::value_error(problem.c_str()); }

void expect(bool condition, const char* problem) {
    if (!condition) refuse(problem);
}

void check_view(const View& view, size_t cols, const std::vector<size_t>& widths, bool optional) {
    if (optional && view.slot == -1) return;
    expect(view.slot >= 0 && static_cast<size_t>(view.slot) < widths.size(), "an instruction names no slot");
    const size_t width = widths[view.slot];
    expect(view.column >= 0 && cols <= width && static_cast<size_t>(view.column) <= width - cols,
           "an instruction reaches past its slot");
}

namespace {

void check_vector(const Program& program, int index, size_t count) {
    expect(index >= -1 && index < static_cast<int>(program.vectors()), "an instruction names no vector");
    expect(index == -1 || program.vector_size(index) >= count, "a vector is too short for its instruction");
}

constexpr int kMostEdits = 1 << 20;

void check_heads(const Instruction& i, const std::vector<size_t>& widths) {
    expect(i.heads > 0 && i.kv_heads > 0 && i.heads % i.kv_heads == 0 && i.dim > 0, "heads do not fit together");
    expect(i.layer >= 0 && i.window >= 0 && !i.wanted, "an attention's layer, window or rows do not fit");
    check_view(i.b, static_cast<size_t>(i.kv_heads) * i.dim, widths, true);
    check_view(i.c, static_cast<size_t>(i.kv_heads) * i.dim, widths, true);
}

void check_linear(const Program& program, const Instruction& i, const std::vector<size_t>& widths) {
    const size_t count = i.matrices.size();
    expect(count >= 1 && count <= kMostMatrices, "a linear has no matrices, or too many");
    expect(i.biases.empty() || i.biases.size() == count, "a linear has another number of biases than matrices");
    for (const int index : i.matrices) {
        expect(index >= 0 && static_cast<size_t>(index) < program.matrices(), "a linear names no matrix");
    }
    const Matrix& first = program.matrix(i.matrices[0]);
    size_t rows = 0;
    for (size_t k = 0; k < count; ++k) {
        const Matrix& matrix = program.matrix(i.matrices[k]);
        expect(matrix.cols == first.cols, "a linear's matrices take different rows");
        if (!i.biases.empty()) check_vector(program, i.biases[k], matrix.rows);
        rows += matrix.rows;
    }
    if (i.gated) {
        expect(count == 2 && rows == 2 * first.rows, "a gate must be of the size of what it multiplies");
        rows = first.rows;
    }
    expect(static_cast<size_t>(i.cols) == rows, "a linear has another number of columns than its matrices have rows");
    check_view(i.a, first.cols, widths);
    check_view(i.b, rows, widths, true);
    check_vector(program, i.norm_weight, first.cols);
    check_vector(program, i.norm_bias, first.cols);
    check_view(i.out, rows, widths);
}

}  // namespace

void check_instruction(const Program& program, const Instruction& i, const std::vector<size_t>& widths) {
    expect(i.cols > 0, "an instruction has no columns");
    expect(i.activation >= kNoActivation && i.activation <= kSilu, "an instruction names no activation");
    const size_t cols = static_cast<size_t>(i.cols);
    switch (i.kind) {
        case kAdd:
        case kMultiply:
            check_view(i.b, cols, widths);
            [[fallthrough]];
        case kActivate:
        case kGather:
            break;
        case kNorm:
            expect(i.weight >= 0, "a norm has no weight");
            check_vector(program, i.weight, cols);
            check_vector(program, i.bias, cols);
            break;
        case kLinear:
            return check_linear(program, i, widths);
        case kRope:
            expect(i.heads > 0 && i.dim > 0 && i.dim % 2 == 0 && !i.wanted, "heads to turn do not fit");
            expect(cols == static_cast<size_t>(i.heads) * i.dim, "a rope's columns do not fit");
            expect(i.frequencies >= 0 && static_cast<size_t>(i.frequencies) < program.vectors(),
                   "a rope names no frequencies");
            expect(program.vector_size(i.frequencies) == static_cast<size_t>(i.dim) / 2,
                   "a rope has another number of frequencies than pairs");
            break;
        case kScores:
        case kSoftmax:
            check_heads(i, widths);
            check_view(i.a, static_cast<size_t>(i.heads) * i.dim, widths);
            return;
        case kAttention:
        case kMix:
            check_heads(i, widths);
            expect(cols == static_cast<size_t>(i.heads) * i.dim, "an attention's columns do not fit");
            break;
        case kEdit:
            expect(i.edit >= 0 && i.edit < kMostEdits, "an edit has no number, or a very large one");
            if (i.changes_patterns()) {
                check_heads(i, widths);
                expect(!i.as_cached, "patterns are not cached");
            } else {
                check_view(i.a, cols, widths);
            }
            return;
        case kAppend:
            check_heads(i, widths);
            expect(i.b.exists() || i.c.exists(), "there is nothing to append");
            return;
        default:
            refuse("an instruction is of no kind");
    }
    check_view(i.a, cols, widths);
    check_view(i.out, cols, widths);
}

void check_caches(const Instruction& i, const std::vector<Sequence>& sequences) {
    if (!i.has_sequences()) return;
    expect(!sequences.empty(), "an attention has no sequences");
    for (const Sequence& s : sequences) {
        const CacheShape& shape = s.cache->shape;
        expect(shape.half == sequences[0].cache->shape.half, "a cache has another shape than its attention");
        if (i.kind == kEdit || i.kind == kRope) continue;
        expect(shape.kv_heads == i.kv_heads && shape.dim == i.dim && static_cast<size_t>(i.layer) < s.cache->layers,
               "a cache has another shape than its attention");
    }
}

void check_edits(const Instruction& i, const Step& step) {
    if (i.kind != kEdit) return;
    for (const Edit& edit : step.edits[i.edit]) {
        for (size_t n = 0; n < edit.count; ++n) {
            expect(edit.rows[n] >= 0 && static_cast<size_t>(edit.rows[n]) < rows_of(i, step),
                   "an edit's row is out of range");
        }
        const size_t limit = i.changes_patterns() ? i.heads : i.cols;
        const size_t first = i.changes_patterns() ? edit.first_head : edit.first_col;
        const size_t count = i.changes_patterns() ? edit.heads : edit.cols;
        expect(first <= limit && count <= limit - first, "an edit reaches past its value");
    }
}

}  // namespace starscope
