#include "program.h"

#include <string.h>

#include <algorithm>

#include "attention_kernels.h"
#include "patterns.h"

namespace starscope {
namespace {

// Rows that every thread prepares for itself: cheaper than a barrier.
constexpr size_t kFewRows = 2;
// Rows for which unpacking a panel first costs less than unpacking it for every tile.
constexpr size_t kManyRows = 2 * kTileRows;
// What a thread works on at a time should stay in its own cache: so many columns, of so many bytes of prepared rows,
// with so many panels.
constexpr size_t kPartCols = 2048, kRowBytes = 384 << 10, kPartPanels = 8;
constexpr size_t kMostTiles = 32;
constexpr size_t kMostPanels = 64;
constexpr size_t kProducts = kMostPanels * kPanelRows * kFewRows;  // floats; >= kTileRows * kPanelRows

size_t clamp(size_t value, size_t low, size_t high) { return std::max(low, std::min(value, high)); }

size_t normed_floats(const Instruction& i, const Matrix& m) { return i.norm_weight < 0 ? 0 : kTileRows * m.cols; }

size_t tile_count(size_t rows) { return (rows + kTileRows - 1) / kTileRows; }

}  // namespace

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
    vectors_.emplace_back(values, values + count);
    vectors_.back().resize((count + kPanelRows - 1) / kPanelRows * kPanelRows);  // read 16 at a time
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
        for (const View& view : {i.b, i.c, i.out, i.norm_out}) {
            if (view.exists() && !i.wanted && !chooses) code.whole[view.slot] = true;
        }
        if (i.kind != kLinear) continue;
        const Matrix& m = matrices_[i.matrix];
        prepared = std::max(prepared, tile_bytes(*m.type, m.cols, kFewRows) + normed_floats(i, m) * sizeof(float));
        code.part_bytes = std::max(code.part_bytes, compute_.part_bytes(*m.type, std::min(kPartCols, m.cols)));
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
    const size_t sums = kPartPanels * kMostTiles * kTileRows * kPanelRows * sizeof(float);
    for (Memory& memory : private_) memory.grow(code.part_at + code.part_bytes + sums);
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
    size_t tiles = 0, scratch = 0, pattern = 0;
    for (size_t n = first; n < last; ++n) {
        const Instruction& i = code.instructions[n];
        if (i.kind == kLinear) {
            const Matrix& m = matrices_[i.matrix];
            tiles = std::max(tiles, tile_bytes(*m.type, m.cols, kTileRows) * tile_count(rows_of(i, step)));
        } else if (i.kind != kEdit && i.has_sequences()) {
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
            add(i, step);
            break;
        case kNorm:
            norm(i, step);
            break;
        case kActivate:
            activate(i, step);
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

void Program::add(const Instruction& i, const Step& step) {
    const size_t rows = rows_of(i, step);
    for (size_t r; (r = team_.take(1)) < rows;) compute_.add(at(i.a, r), at(i.b, r), at(i.out, r), i.cols);
}

void Program::norm(const Instruction& i, const Step& step) {
    const size_t rows = rows_of(i, step);
    for (size_t r; (r = team_.take(1)) < rows;) {
        compute_.layer_norm(at(i.a, r), i.cols, i.epsilon, vector(i.weight), vector(i.bias), at(i.out, r));
    }
}

void Program::activate(const Instruction& i, const Step& step) {
    const size_t rows = rows_of(i, step);
    for (size_t r; (r = team_.take(1)) < rows;) {
        compute_.activate(static_cast<Activation>(i.activation), at(i.a, r), at(i.out, r), i.cols);
    }
}

void Program::gather(const Instruction& i, const Step& step) {
    for (size_t r; (r = team_.take(1)) < step.wanted_rows;) {
        memcpy(at(i.out, r), at(i.a, step.wanted[r]), i.cols * sizeof(float));
    }
}

// Rows of one tile.
void Program::prepare_rows(const Instruction& i, const Step& step, size_t first, size_t count, uint8_t* tiles,
                           int thread, bool keep) {
    const Matrix& m = matrices_[i.matrix];
    const float* x[kTileRows];
    float* normed = reinterpret_cast<float*>(private_[thread].data()) + kProducts;
    for (size_t r = 0; r < count; ++r, normed += m.cols) {
        const size_t row = first + r;
        x[r] = at(i.a, i.gather ? step.wanted[row] : row);
        if (i.norm_weight < 0) continue;
        compute_.layer_norm(x[r], m.cols, i.epsilon, vector(i.norm_weight), vector(i.norm_bias), normed);
        if (keep && i.norm_out.exists()) memcpy(at(i.norm_out, row), normed, m.cols * sizeof(float));
        x[r] = normed;
    }
    const size_t tile = first / kTileRows, rows = std::min(kTileRows, rows_of(i, step) - tile * kTileRows);
    compute_.prepare(*m.type, x, count, m.cols, first - tile * kTileRows, rows,
                     tiles + tile * tile_bytes(*m.type, m.cols, kTileRows));
}

void Program::linear(const Instruction& i, const Step& step, int thread) {
    const Matrix& m = matrices_[i.matrix];
    const size_t rows = rows_of(i, step);
    uint8_t* tiles = tiles_.data();
    if (rows <= kFewRows) {
        tiles = private_[thread].data() + (kProducts + normed_floats(i, m)) * sizeof(float);
        prepare_rows(i, step, 0, rows, tiles, thread, thread == 0);
    } else {
        // Of many rows whole tiles: threads that write to the same lines of memory would wait for one another.
        const size_t at_once = rows >= kManyRows ? kTileRows : 1;
        for (size_t r; (r = team_.take(at_once)) < rows;) {
            prepare_rows(i, step, r, std::min(at_once, rows - r), tiles, thread, true);
        }
        team_.barrier();
    }

    const size_t tile = tile_bytes(*m.type, m.cols, kTileRows), panels = panel_count(m.rows), count = tile_count(rows);
    const bool many = rows >= kManyRows;
    const size_t shares = static_cast<size_t>(threads()) * 6;
    const size_t panels_at_once = clamp(panels / shares, 1, many ? kPartPanels : kMostPanels);
    float* products = reinterpret_cast<float*>(private_[thread].data());

    // Products of panels first .. end-1 with n rows from first_row on, panel_stride floats from one panel to the next.
    const auto finish = [&](size_t first, size_t end, size_t first_row, size_t n, const float* from,
                            size_t panel_stride) {
        const size_t col = first * kPanelRows;
        Epilogue epilogue;
        epilogue.bias = i.bias < 0 ? nullptr : vector(i.bias) + col;
        epilogue.activation = static_cast<Activation>(i.activation);
        epilogue.residual = i.b.exists() ? at(i.b, first_row) + col : nullptr;
        epilogue.residual_stride = i.b.exists() ? widths_[i.b.slot] : 0;
        compute_.finish(from, panel_stride, n, std::min(end * kPanelRows, m.rows) - col, epilogue,
                        at(i.out, first_row) + col, widths_[i.out.slot]);
    };
    for (size_t first; (first = team_.take(panels_at_once)) < panels;) {
        const size_t end = std::min(first + panels_at_once, panels);
        const uint8_t* panel = m.panels + first * m.stride;
        if (rows <= kFewRows) {
            compute_.multiply(*m.type, panel, m.stride, end - first, m.cols, tiles, rows, products);
            finish(first, end, 0, rows, products, rows * kPanelRows);
            continue;
        }
        if (!many) {
            for (size_t t = 0; t < count; ++t) {
                const size_t n = std::min(kTileRows, rows - t * kTileRows);
                for (size_t p = first; p < end; ++p) {
                    compute_.multiply(*m.type, m.panels + p * m.stride, m.stride, 1, m.cols, tiles + t * tile, n,
                                      products);
                    finish(p, p + 1, t * kTileRows, n, products, 0);
                }
            }
            continue;
        }
        const size_t part_cols = std::min(kPartCols, m.cols);
        const size_t tiles_at_once = clamp(kRowBytes / tile_bytes(*m.type, part_cols, kTileRows), 1, kMostTiles);
        uint8_t* scratch = private_[thread].data() + part_at_;
        float* sums = reinterpret_cast<float*>(scratch + part_bytes_);
        for (size_t t0 = 0; t0 < count; t0 += tiles_at_once) {
            const size_t t1 = std::min(t0 + tiles_at_once, count);
            const auto sums_of = [&](size_t p, size_t t) {
                return sums + ((p - first) * kMostTiles + (t - t0)) * kTileRows * kPanelRows;
            };
            for (size_t c = 0; c < m.cols; c += part_cols) {
                const size_t n = std::min(part_cols, m.cols - c);
                for (size_t p = first; p < end; ++p) {
                    const uint8_t* part = compute_.unpack(*m.type, m.panels + p * m.stride, c, n, m.cols, scratch);
                    for (size_t t = t0; t < t1; ++t) {
                        compute_.multiply_part(*m.type, part, c, n, m.cols, tiles + t * tile,
                                               std::min(kTileRows, rows - t * kTileRows), sums_of(p, t));
                    }
                }
            }
            for (size_t t = t0; t < t1; ++t) {
                finish(first, end, t * kTileRows, std::min(kTileRows, rows - t * kTileRows), sums_of(first, t),
                       kMostTiles * kTileRows * kPanelRows);
            }
        }
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
    attention.queries = i.a.exists() ? at(i.a, 0) : nullptr;
    attention.new_keys = i.b.exists() ? at(i.b, 0) : nullptr;
    attention.new_values = i.c.exists() ? at(i.c, 0) : nullptr;
    attention.stride = widths_[(i.a.exists() ? i.a : i.b.exists() ? i.b : i.c).slot];
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
            const size_t query = row - s.first_row, seen = s.past + query + 1;
            if (edit.first_col >= seen) return;
            for (size_t head = edit.first_head; head < edit.first_head + edit.heads; ++head) {
                edit.apply(number, pattern + (head * s.new_rows + query) * keys + edit.first_col,
                           std::min(edit.cols, seen - edit.first_col));
            }
        }
        pattern += i.heads * s.new_rows * keys;
    }
}

}  // namespace starscope
