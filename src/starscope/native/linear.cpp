// Linear layers: rows are normalized and prepared once for all matrices of an instruction, then threads take panels.
//
// A thread's share is some panels of one matrix, or the same ones of a gate and of what it multiplies. Their products
// stay in the thread's own memory until `finish` writes what comes of them. There are three ways through a share, by
// how many rows there are; their bits are the same.
#include <algorithm>

#include "program.h"

namespace starscope {
namespace {

// Rows for which unpacking a panel first costs less than unpacking it for every tile.
constexpr size_t kManyRows = 2 * kTileRows;
// What a thread works on at a time should stay in its own cache: so many columns, of so many bytes of prepared rows.
constexpr size_t kRowBytes = 384 << 10;
constexpr size_t kMostPanels = kProducts / (kPanelRows * kFewRows);
constexpr size_t kSharesPerThread = 6;

size_t clamp(size_t value, size_t low, size_t high) { return std::max(low, std::min(value, high)); }

size_t tile_count(size_t rows) { return (rows + kTileRows - 1) / kTileRows; }

}  // namespace

// The layouts that a linear's matrices want its rows in, each once, and where those begin: `tiles` tiles of at most
// `rows` rows each.
struct Program::Forms {
    size_t count = 0, bytes = 0;
    const PanelType* types[kMostMatrices];
    size_t at[kMostMatrices];
    size_t of[kMostMatrices];  // by the number of a matrix within its instruction

    Forms(const Instruction& i, const std::vector<Matrix>& matrices, size_t tiles, size_t rows) {
        for (size_t k = 0; k < i.matrices.size(); ++k) {
            const Matrix& m = matrices[i.matrices[k]];
            size_t f = 0;
            while (f < count && prepared_form(*types[f]) != prepared_form(*m.type)) ++f;
            of[k] = f;
            if (f < count) continue;
            types[count] = m.type;
            at[count++] = bytes;
            bytes += tiles * tile_bytes(*m.type, m.cols, rows);
        }
    }
};

struct Program::Share {
    size_t number;      // of the matrix within its instruction
    size_t first, end;  // panels
    size_t column;      // of the output, where the matrix begins
    const Matrix* matrix;
    const Matrix* gate;  // or null
    const uint8_t *tiles, *gate_tiles;
};

size_t Program::few_bytes(const Instruction& i) const {
    const size_t normed = i.norm_weight < 0 ? 0 : kTileRows * matrices_[i.matrices[0]].cols;
    return normed * sizeof(float) + Forms(i, matrices_, 1, kFewRows).bytes;
}

size_t Program::tiles_bytes(const Instruction& i, size_t rows) const {
    return Forms(i, matrices_, tile_count(rows), kTileRows).bytes;
}

// Rows of one tile.
void Program::prepare_rows(const Instruction& i, const Step& step, size_t first, size_t count, const Forms& forms,
                           uint8_t* tiles, int thread) {
    const size_t cols = matrices_[i.matrices[0]].cols;
    const Norm norm = i.rms ? compute_.rms_norm : compute_.layer_norm;
    const float* x[kTileRows];
    float* normed = reinterpret_cast<float*>(private_[thread].data()) + kProducts;
    for (size_t r = 0; r < count; ++r, normed += cols) {
        x[r] = at(i.a, i.gather ? step.wanted[first + r] : first + r);
        if (i.norm_weight < 0) continue;
        norm(x[r], cols, i.epsilon, vector(i.norm_weight), vector(i.norm_bias), normed);
        x[r] = normed;
    }
    const size_t tile = first / kTileRows, rows = std::min(kTileRows, rows_of(i, step) - tile * kTileRows);
    for (size_t f = 0; f < forms.count; ++f) {
        const PanelType& type = *forms.types[f];
        compute_.prepare(type, x, count, cols, first - tile * kTileRows, rows,
                         tiles + forms.at[f] + tile * tile_bytes(type, cols, kTileRows));
    }
}

void Program::linear(const Instruction& i, const Step& step, int thread) {
    const size_t rows = rows_of(i, step);
    const bool few = rows <= kFewRows, many = rows >= kManyRows;
    const Forms forms(i, matrices_, few ? 1 : tile_count(rows), few ? rows : kTileRows);
    uint8_t* tiles = tiles_.data();
    if (few) {
        const size_t normed = i.norm_weight < 0 ? 0 : kTileRows * matrices_[i.matrices[0]].cols;
        tiles = private_[thread].data() + (kProducts + normed) * sizeof(float);
        prepare_rows(i, step, 0, rows, forms, tiles, thread);
    } else {
        // Of many rows whole tiles: threads that write to the same lines of memory would wait for one another.
        const size_t at_once = many ? kTileRows : 1;
        for (size_t r; (r = team_.take(at_once)) < rows;) {
            prepare_rows(i, step, r, std::min(at_once, rows - r), forms, tiles, thread);
        }
        team_.barrier();
    }

    size_t panels = 0;
    for (const int matrix : i.matrices) panels += panel_count(matrices_[matrix].rows);
    const size_t most = (many ? kPartPanels : kMostPanels) / (i.gated ? 2 : 1);
    if (i.gated) panels /= 2;
    const size_t at_once = clamp(panels / (threads() * kSharesPerThread), 1, most);
    float* products = reinterpret_cast<float*>(private_[thread].data());

    // The shares of all matrices are counted through.
    size_t passed = 0, taken = team_.take(1), column = 0;
    for (size_t k = i.gated ? 1 : 0; k < i.matrices.size(); ++k) {
        const Matrix& m = matrices_[i.matrices[k]];
        const size_t of_matrix = panel_count(m.rows), shares = (of_matrix + at_once - 1) / at_once;
        Share share{k, 0, 0, column, &m, nullptr, tiles + forms.at[forms.of[k]], nullptr};
        if (i.gated) share.gate = &matrices_[i.matrices[0]], share.gate_tiles = tiles + forms.at[forms.of[0]];
        for (; taken < passed + shares; taken = team_.take(1)) {
            share.first = (taken - passed) * at_once;
            share.end = std::min(share.first + at_once, of_matrix);
            if (few) {
                multiply_few(i, share, rows, products);
            } else if (many) {
                multiply_many(i, share, rows, thread);
            } else {
                multiply_some(i, share, rows, products);
            }
        }
        passed += shares;
        column += m.rows;
    }
}

// Writes the output of panels first .. end-1 for some rows, from their products and a gate's, panel_stride floats from
// one panel to the next.
void Program::finish(const Instruction& i, const Share& share, size_t first, size_t end, size_t first_row, size_t rows,
                     const float* products, const float* gate, size_t panel_stride) {
    const size_t col = first * kPanelRows;
    const auto bias = [&](size_t number) -> const float* {
        const int index = i.biases.empty() ? -1 : i.biases[number];
        return index < 0 ? nullptr : vector(index) + col;
    };
    Epilogue epilogue;
    epilogue.bias = bias(share.number);
    epilogue.activation = static_cast<Activation>(i.activation);
    epilogue.gate = gate;
    epilogue.gate_bias = gate == nullptr ? nullptr : bias(0);
    epilogue.residual = i.b.exists() ? at(i.b, first_row) + share.column + col : nullptr;
    epilogue.residual_stride = i.b.exists() ? widths_[i.b.slot] : 0;
    compute_.finish(products, panel_stride, rows, std::min(end * kPanelRows, share.matrix->rows) - col, epilogue,
                    at(i.out, first_row) + share.column + col, widths_[i.out.slot]);
}

// Each panel is read once, as it lies, by all rows.
void Program::multiply_few(const Instruction& i, const Share& share, size_t rows, float* products) {
    const auto multiply = [&](const Matrix& m, const uint8_t* tiles, float* to) {
        compute_.multiply(*m.type, m.panels + share.first * m.stride, m.stride, share.end - share.first, m.cols, tiles,
                          rows, to);
    };
    float* gate = share.gate == nullptr ? nullptr : products + kProducts / 2;
    if (gate != nullptr) multiply(*share.gate, share.gate_tiles, gate);
    multiply(*share.matrix, share.tiles, products);
    finish(i, share, share.first, share.end, 0, rows, products, gate, rows * kPanelRows);
}

// The same for one tile after another.
void Program::multiply_some(const Instruction& i, const Share& share, size_t rows, float* products) {
    float* gate = share.gate == nullptr ? nullptr : products + kProducts / 2;
    for (size_t t = 0; t < tile_count(rows); ++t) {
        const size_t n = std::min(kTileRows, rows - t * kTileRows);
        const auto multiply = [&](const Matrix& m, size_t panel, const uint8_t* tiles, float* to) {
            compute_.multiply(*m.type, m.panels + panel * m.stride, m.stride, 1, m.cols,
                              tiles + t * tile_bytes(*m.type, m.cols, kTileRows), n, to);
        };
        for (size_t p = share.first; p < share.end; ++p) {
            if (gate != nullptr) multiply(*share.gate, p, share.gate_tiles, gate);
            multiply(*share.matrix, p, share.tiles, products);
            finish(i, share, p, p + 1, t * kTileRows, n, products, gate, 0);
        }
    }
}

// A part of each panel is unpacked once, for as many tiles as fit into the cache.
void Program::multiply_many(const Instruction& i, const Share& share, size_t rows, int thread) {
    const Matrix& m = *share.matrix;
    const size_t part_cols = std::min(kPartCols, m.cols), count = tile_count(rows);
    const size_t bytes = tile_bytes(*m.type, part_cols, kTileRows);
    const bool two_forms = share.gate != nullptr && share.gate_tiles != share.tiles;
    const size_t tiles_at_once = clamp(kRowBytes / (two_forms ? 2 * bytes : bytes), 1, kMostTiles);
    uint8_t* scratch = private_[thread].data() + part_at_;
    float* products = reinterpret_cast<float*>(scratch + part_bytes_);
    float* gate = share.gate == nullptr ? nullptr : products + kPartSums / 2;
    constexpr size_t kPanelSums = kMostTiles * kTileRows * kPanelRows;
    for (size_t t0 = 0; t0 < count; t0 += tiles_at_once) {
        const size_t t1 = std::min(t0 + tiles_at_once, count);
        for (size_t c = 0; c < m.cols; c += part_cols) {
            const auto multiply = [&](const Matrix& one, const uint8_t* tiles, float* sums) {
                const size_t n = std::min(part_cols, one.cols - c), tile = tile_bytes(*one.type, one.cols, kTileRows);
                for (size_t p = share.first; p < share.end; ++p, sums += kPanelSums) {
                    const uint8_t* panel = one.panels + p * one.stride;
                    const uint8_t* part = compute_.unpack(*one.type, panel, c, n, one.cols, scratch);
                    for (size_t t = t0; t < t1; ++t) {
                        compute_.multiply_part(*one.type, part, c, n, one.cols, tiles + t * tile,
                                               std::min(kTileRows, rows - t * kTileRows),
                                               sums + (t - t0) * kTileRows * kPanelRows);
                    }
                }
            };
            if (gate != nullptr) multiply(*share.gate, share.gate_tiles, gate);
            multiply(m, share.tiles, products);
        }
        for (size_t t = t0; t < t1; ++t) {
            const size_t at = (t - t0) * kTileRows * kPanelRows;
            finish(i, share, share.first, share.end, t * kTileRows, std::min(kTileRows, rows - t * kTileRows),
                   products + at, gate == nullptr ? nullptr : gate + at, kPanelSums);
        }
    }
}

}  // namespace starscope
