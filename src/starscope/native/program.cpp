#include "program.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "attention_kernels.h"
#include "patterns.h"

namespace starscope {

int Program::add_matrix(const PanelType& type, size_t rows, size_t cols) {
    const size_t stride = panel_bytes(type, cols);
    matrices_.push_back({&type, rows, cols, stride, pool_.take(stride * panel_count(rows))});
    return static_cast<int>(matrices_.size()) - 1;
}

void Matrix::fill(size_t first, size_t count, const uint8_t* file_rows) const {
    const size_t row_bytes = cols / type->block_values * type->block_bytes;
    for (size_t r = 0; r < count; r += kPanelRows) {
        pack_panel(*type, file_rows + r * row_bytes, row_bytes, std::min(kPanelRows, count - r), cols,
                   panels + (first + r) / kPanelRows * stride);
    }
}

int Program::add_vector(const float* values, size_t count) {
    vectors_.push_back({{values, values + count}, count});
    vectors_.back().values.resize((count + kPanelRows - 1) / kPanelRows * kPanelRows);  // read 16 at a time
    return static_cast<int>(vectors_.size()) - 1;
}

Code Program::compile(std::vector<Instruction> instructions, std::vector<size_t> widths, size_t arrays) {
    Code code{std::move(instructions), std::move(widths), arrays, 0, {}};
    code.whole.assign(code.widths.size(), false);
    size_t prepared = 0;
    for (const Instruction& i : code.instructions) {
        if (i.kind == kEdit) code.edits = std::max(code.edits, static_cast<size_t>(i.edit) + 1);
        const bool chooses = i.gather || i.kind == kGather;
        if (i.a.exists() && !i.wanted) code.whole[i.a.slot] = true;
        for (const View& view : {i.b, i.c, i.out}) {
            if (view.exists() && !i.wanted && !chooses) code.whole[view.slot] = true;
        }
        if (i.kind != kLinear) continue;
        prepared = std::max(prepared, few_bytes(i));
        for (const int matrix : i.matrices) {
            const Matrix& m = matrices_[matrix];
            code.part_bytes = std::max(code.part_bytes, compute_.part_bytes(*m.type, std::min(kPartCols, m.cols)));
        }
    }
    code.part_at = (kProducts * sizeof(float) + prepared + 63) / 64 * 64;
    code.part_bytes = (code.part_bytes + 63) / 64 * 64;
    code.program = this;
    if (private_[0].size() == 0) reserve_private(code);  // nothing has run yet; others need hardly more
    return code;
}

void Buffers::fit(const Code& code, size_t rows) {
    if (rows == rows_ && arrays_ == code.arrays && widths_ == code.widths) return;
    size_t floats = 0;
    for (size_t s = code.arrays; s < code.widths.size(); ++s) floats += code.widths[s];
    rows_ = 0;  // until there is room
    if (memory_.size() < floats * rows * sizeof(float)) {
        memory_.grow(floats * rows * sizeof(float));
        memory_.prefer_large_pages();
    }
    widths_ = code.widths;
    arrays_ = code.arrays;
    rows_ = rows;
    bases_.assign(widths_.size(), nullptr);
    float* base = reinterpret_cast<float*>(memory_.data());
    for (size_t s = arrays_; s < widths_.size(); ++s) {
        bases_[s] = base;
        base += widths_[s] * rows;
    }
}

void Program::reserve_private(const Code& code) {
    for (Memory& memory : private_) memory.grow(code.part_at + code.part_bytes + kPartSums * sizeof(float));
}

void Program::reserve(const Code& code, Buffers& buffers, size_t first, size_t last, const Step& step) {
    buffers.fit(code, step.rows);
    for (size_t s = 0; s < code.arrays; ++s) buffers.bases_[s] = step.arrays[s];
    bases_ = buffers.bases_.data();
    widths_ = code.widths.data();
    part_at_ = code.part_at;
    part_bytes_ = code.part_bytes;
    reserve_private(code);
    size_t longest = 0;
    for (const Sequence& sequence : step.sequences) longest = std::max(longest, sequence.past + sequence.new_rows);
    for (auto& [number, values] : turns_) values.clear();
    size_t tiles = 0, scratch = 0, pattern = 0;
    for (size_t n = first; n < last; ++n) {
        const Instruction& i = code.instructions[n];
        if (i.kind == kLinear) {
            tiles = std::max(tiles, tiles_bytes(i, rows_of(i, step)));
        } else if (i.kind == kRope) {
            fill_turns(i.frequencies, step);
        } else if (i.attends()) {
            scratch = std::max(scratch, attention_scratch_bytes(step.sequences[0].cache->shape, i.heads, step.rows,
                                                                step.sequences.size(), longest, threads()));
        }
        if (i.has_patterns()) {
            size_t floats = 0;
            for (const Sequence& s : step.sequences) floats += i.heads * s.new_rows * (s.past + s.new_rows);
            pattern = std::max(pattern, floats);
        }
    }
    if (tiles_.size() < tiles) {
        tiles_.grow(tiles);
        tiles_.prefer_large_pages();
    }
    attention_scratch_.grow(scratch);
    buffers.fit_patterns(pattern);
    patterns_ = buffers.patterns();
}

void Program::run(const Code& code, Buffers& buffers, size_t first, size_t last, const Step& step) {
    reserve(code, buffers, first, last, step);
    team_.run([&](int thread) {
        for (size_t i = first; i < last; ++i) execute(code.instructions[i], step, thread);
    });
}

// Every instruction ends with a barrier, when its output is complete, if it has done anything.
void Program::execute(const Instruction& i, const Step& step, int thread) {
    switch (i.kind) {
        case kAdd:
        case kMultiply:
            each(i, step);
            break;
        case kNorm:
            norm(i, step);
            break;
        case kActivate:
            activate(i, step);
            break;
        case kRope:
            rotate(i, step);
            break;
        case kGather:
            gather(i, step);
            break;
        case kLinear:
            linear(i, step, thread);
            break;
        case kAttention:
        case kAppend:
        case kScores:
        case kSoftmax:
        case kMix:
            attend(i, step, thread);
            return;
        case kEdit:
            if (step.edits[i.edit].empty()) return;
            edit(i, step);
            break;
    }
    team_.barrier();
}

void Program::each(const Instruction& i, const Step& step) {
    const size_t rows = rows_of(i, step);
    const auto kernel = i.kind == kAdd ? compute_.add : compute_.times;
    for (size_t r; (r = team_.take(1)) < rows;) kernel(at(i.a, r), at(i.b, r), at(i.out, r), i.cols);
}

void Program::norm(const Instruction& i, const Step& step) {
    const size_t rows = rows_of(i, step);
    const Norm kernel = i.rms ? compute_.rms_norm : compute_.layer_norm;
    for (size_t r; (r = team_.take(1)) < rows;) {
        kernel(at(i.a, r), i.cols, i.epsilon, vector(i.weight), vector(i.bias), at(i.out, r));
    }
}

void Program::activate(const Instruction& i, const Step& step) {
    const size_t rows = rows_of(i, step);
    for (size_t r; (r = team_.take(1)) < rows;) {
        compute_.activate(static_cast<Activation>(i.activation), at(i.a, r), at(i.out, r), i.cols);
    }
}

std::vector<float>& Program::turns(int frequencies) {
    for (auto& [number, values] : turns_) {
        if (number == frequencies) return values;
    }
    return turns_.emplace_back(frequencies, std::vector<float>()).second;
}

// Cosines and sines for the positions of a step's rows: angles are rounded to float32, as those of models are, and
// their functions are those of double, so that they hold for far positions.
void Program::fill_turns(int frequencies, const Step& step) {
    std::vector<float>& all = turns(frequencies);
    if (!all.empty()) return;  // another instruction's, too
    const float* radians = vector(frequencies);
    const size_t half = vectors_[frequencies].count;
    all.resize(step.rows * 2 * half);
    for (const Sequence& s : step.sequences) {
        for (size_t row = 0; row < s.new_rows; ++row) {
            float* turn = all.data() + (s.first_row + row) * 2 * half;
            const float position = static_cast<float>(s.past + row);
            for (size_t i = 0; i < half; ++i) {
                const double angle = position * radians[i];
                turn[i] = static_cast<float>(cos(angle));
                turn[half + i] = static_cast<float>(sin(angle));
            }
        }
    }
}

void Program::rotate(const Instruction& i, const Step& step) {
    const float* turn = turns(i.frequencies).data();
    for (size_t r; (r = team_.take(1)) < step.rows;) {
        compute_.rotate(at(i.a, r), i.heads, i.dim, turn + r * i.dim, at(i.out, r));
    }
}

void Program::gather(const Instruction& i, const Step& step) {
    for (size_t r; (r = team_.take(1)) < step.wanted_rows;) {
        memcpy(at(i.out, r), at(i.a, step.wanted[r]), i.cols * sizeof(float));
    }
}

void Program::attend(const Instruction& i, const Step& step, int thread) {
    // Every thread builds the same small list; a shared one would need a barrier.
    thread_local std::vector<AttentionSequence> sequences;
    sequences.clear();
    for (const Sequence& s : step.sequences) {
        sequences.push_back(
            {s.first_row, s.new_rows, s.past, s.cache->capacity, s.cache->keys(i.layer), s.cache->values(i.layer)});
    }
    AttentionStep attention = {};
    attention.cache = step.sequences[0].cache->shape;
    attention.heads = i.heads;
    attention.scale = i.scale;
    attention.window = i.window > 0 ? i.window : kNoWindow;
    attention.queries = rows_at(i.a);
    attention.new_keys = rows_at(i.b);
    attention.new_values = rows_at(i.c);
    attention.sequences = sequences.data();
    attention.count = sequences.size();
    if (i.kind == kAppend) return append_new(attention_, attention, team_);
    if (i.out.exists()) {
        attention.output = at(i.out, 0);
        attention.output_stride = widths_[i.out.slot];
    }
    uint8_t* scratch = attention_scratch_.data();
    if (i.kind == kScores) return make_scores(attention_, attention, patterns_, team_, thread, scratch);
    if (i.kind == kSoftmax) return make_probabilities(attention_, attention, patterns_, team_);
    if (i.kind == kMix) return mix_values(attention_, attention, patterns_, team_, thread, scratch);
    starscope::attend(attention_, attention, team_, thread, scratch);
}

void Program::edit(const Instruction& i, const Step& step) {
    if (i.as_cached && step.sequences[0].cache->shape.half) {
        for (size_t r; (r = team_.take(1)) < rows_of(i, step);) round_to_half(at(i.a, r), i.cols);
        team_.barrier();
    }
    const std::vector<Edit>& edits = step.edits[i.edit];
    for (const Edit& edit : edits) {
        if (&edit != edits.data()) team_.barrier();  // they may change the same rows, in this order
        for (size_t n; (n = team_.take(1)) < edit.count;) {
            if (i.changes_patterns()) {
                edit_patterns(i, step, edit, n);
            } else {
                edit.apply(n, at(i.a, edit.rows[n]) + edit.first_col, edit.cols);
            }
        }
    }
}

void Program::edit_patterns(const Instruction& i, const Step& step, const Edit& edit, size_t number) {
    const size_t row = edit.rows[number];
    float* pattern = patterns_;
    for (const Sequence& s : step.sequences) {
        const size_t keys = s.past + s.new_rows;
        if (row >= s.first_row && row < s.first_row + s.new_rows) {
            const size_t query = row - s.first_row, seen = s.past + query + 1;  // keys, but for those outside a window
            const size_t window = i.window > 0 ? i.window : kNoWindow;
            const size_t first = std::max(edit.first_col, seen > window ? seen - window : 0);
            const size_t stop = std::min(edit.first_col + edit.cols, seen);
            if (first >= stop) return;
            for (size_t head = edit.first_head; head < edit.first_head + edit.heads; ++head) {
                edit.apply(number, pattern + (head * s.new_rows + query) * keys + first, stop - first,
                           first - edit.first_col);
            }
        }
        pattern += i.heads * s.new_rows * keys;
    }
}

}  // namespace starscope
