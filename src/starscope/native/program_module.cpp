// The engine's program for Python: what is built once, and one call a step. Everything that Python gives is checked
// here.
#include "program_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <string.h>

#include <string>
#include <system_error>
#include <vector>

#include "dispatch.h"
#include "program.h"
#include "program_checks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace starscope {
namespace {

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Array3 = nb::ndarray<T, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const PanelType& type_of(int type_id) {
    const PanelType* type = find_panel_type(type_id);
    if (type == nullptr) refuse("the engine does not compute on type " + std::to_string(type_id));
    return *type;
}

std::unique_ptr<Program> make_program(int threads, const std::string& isa) {
    expect(threads >= 1, "threads must be 1 or more");
    const InstructionSet* set = find_instruction_set(isa);
    if (set == nullptr) refuse("instruction set '" + isa + "' is not usable here");
    return std::make_unique<Program>(threads, *set->compute, *set->attention);
}

int add_matrix(Program& program, int type_id, size_t rows, size_t cols) {
    const PanelType& type = type_of(type_id);
    expect(rows > 0 && cols > 0 && cols % type.block_values == 0, "a matrix's columns must be whole quant blocks");
    return program.add_matrix(type, rows, cols);
}

void fill(Program& program, int index, size_t first, Matrix2<const uint8_t> file_rows) {
    expect(index >= 0 && static_cast<size_t>(index) < program.matrices(), "there is no such matrix");
    const Matrix matrix = program.matrix(index);  // a copy: while the lock is released, other matrices may be added
    const size_t count = file_rows.shape(0);
    expect(file_rows.shape(1) == matrix.cols / matrix.type->block_values * matrix.type->block_bytes,
           "rows have another number of bytes than the matrix");
    expect(first % kPanelRows == 0 && first <= matrix.rows && count <= matrix.rows - first &&
               (count % kPanelRows == 0 || count == matrix.rows - first),
           "rows must be filled in multiples of 16, within the matrix");
    const uint8_t* bytes = file_rows.data();
    nb::gil_scoped_release release;
    matrix.fill(first, count, bytes);
}

int add_vector(Program& program, Vector<const float> values) {
    return program.add_vector(values.data(), values.size());
}

Code compile(Program& program, std::vector<Instruction> instructions, std::vector<size_t> widths, size_t arrays) {
    expect(arrays <= widths.size(), "there are more arrays than slots");
    for (const Instruction& i : instructions) check_instruction(program, i, widths);
    return program.compile(std::move(instructions), std::move(widths), arrays);
}

// What a step's edits refer to, kept while it runs.
struct Edits {
    std::vector<Vector<const int64_t>> rows;
    std::vector<Matrix2<const float>> values;
    std::vector<std::vector<Edit>> list;
};

// One list for each number, of (rows, first_col, cols, scale, values, first_head, heads): int64 [n] and float32
// [n or 1, cols or 1].
Edits edits_of(nb::list items) {
    Edits edits;
    for (nb::handle item : items) {
        edits.list.emplace_back();
        for (nb::handle one : nb::cast<nb::list>(item)) {
            const nb::tuple tuple = nb::cast<nb::tuple>(one);
            expect(tuple.size() == 7, "an edit has seven fields");
            const auto rows = nb::cast<Vector<const int64_t>>(tuple[0], false);
            const auto values = nb::cast<Matrix2<const float>>(tuple[4], false);
            const Edit edit{rows.data(),
                            rows.size(),
                            nb::cast<size_t>(tuple[1]),
                            nb::cast<size_t>(tuple[2]),
                            nb::cast<float>(tuple[3]),
                            values.data(),
                            values.shape(0),
                            values.shape(1),
                            nb::cast<size_t>(tuple[5]),
                            nb::cast<size_t>(tuple[6])};
            expect(edit.value_rows == 1 || edit.value_rows == edit.count, "an edit has values of other rows");
            expect(edit.value_cols == 1 || edit.value_cols == edit.cols, "an edit has values of other columns");
            edits.rows.push_back(rows);
            edits.values.push_back(values);
            edits.list.back().push_back(edit);
        }
    }
    return edits;
}

// The numbers of a code name the matrices and vectors of the program that compiled it.
void check_program(const Program& program, const Code& code) {
    expect(code.program == &program, "the code was compiled by another program");
}

// (first_row, new_rows, past, cache) each; they have all rows, or there are none. `some`: they may be any rows.
std::vector<Sequence> sequences_of(nb::list items, size_t rows, bool some) {
    std::vector<Sequence> sequences;
    size_t covered = 0;
    for (nb::handle item : items) {
        const nb::tuple tuple = nb::cast<nb::tuple>(item);
        Sequence s{nb::cast<size_t>(tuple[0]), nb::cast<size_t>(tuple[1]), nb::cast<size_t>(tuple[2]),
                   nb::cast<KeyValues*>(tuple[3])};
        expect(
            s.new_rows > 0 && (some ? s.first_row < rows && s.new_rows <= rows - s.first_row : s.first_row == covered),
            "sequences must follow one another");
        expect(s.cache != nullptr, "a sequence has no cache");
        expect(s.new_rows <= rows && s.past <= s.cache->capacity && s.new_rows <= s.cache->capacity - s.past,
               "a cache is too small for its sequence");
        covered += s.new_rows;
        sequences.push_back(s);
    }
    expect(some || sequences.empty() || covered == rows, "the sequences must have all rows");
    return sequences;
}

// sequences: none when no attention is among the instructions. arrays: float32 [rows width], for each of the first
// slots; [wanted width] for those of which only the wanted rows are used.
void run(Program& program, const Code& code, Buffers& buffers, size_t first, size_t last, size_t rows,
         Vector<const int64_t> wanted, nb::list sequences, nb::list arrays, nb::list edits) {
    check_program(program, code);
    expect(first <= last && last <= code.instructions.size(), "there are no such instructions");
    expect(rows > 0 && wanted.size() <= rows, "a step has no rows, or more wanted ones than rows");
    bool only_reads = true;  // of queries and keys, so that the rows that nothing asks for may be left out
    for (size_t n = first; n < last; ++n) {
        const int kind = code.instructions[n].kind;
        only_reads = only_reads && (kind == kScores || kind == kSoftmax);
    }
    Step step{rows, wanted.data(), wanted.size(), sequences_of(sequences, rows, only_reads), {}, {}};
    const Edits all_edits = edits_of(edits);  // keeps the arrays
    expect(code.edits == all_edits.list.size(), "another number of edits was compiled");
    step.edits = all_edits.list;
    for (size_t i = 0; i < wanted.size(); ++i) {
        expect(wanted.data()[i] >= 0 && static_cast<size_t>(wanted.data()[i]) < rows, "a wanted row is out of range");
    }
    for (size_t n = first; n < last; ++n) {
        check_caches(code.instructions[n], step.sequences);
        check_edits(code.instructions[n], step);
    }
    expect(nb::len(arrays) == code.arrays, "another number of arrays was compiled");
    for (size_t a = 0; a < code.arrays; ++a) {
        const auto array = nb::cast<Matrix2<float>>(arrays[a]);
        expect(array.shape(1) == code.widths[a], "an array has another width than its slot");
        expect(array.shape(0) == rows || (!code.whole[a] && array.shape(0) == wanted.size()),
               "an array has another number of rows");
        step.arrays.push_back(array.data());
    }
    try {
        nb::gil_scoped_release release;
        program.run(code, buffers, first, last, step);
    } catch (const std::system_error& error) {  // threads that cannot be started
        PyErr_SetString(PyExc_OSError, error.what());
        throw nb::python_error();
    }
}

void check_buffers(const Buffers& buffers, const View& view, size_t rows, size_t cols) {
    check_view(view, cols, buffers.widths());
    expect(static_cast<size_t>(view.slot) >= buffers.arrays(), "the slot is an array of the caller's");
    expect(rows <= buffers.rows(), "the buffers have fewer rows");
}

// Columns of the first rows, copied.
nb::ndarray<nb::numpy, float, nb::ndim<2>> read_buffers(const Buffers& buffers, const View& view, size_t rows,
                                                        size_t cols) {
    check_buffers(buffers, view, rows, cols);
    const size_t width = buffers.widths()[view.slot];
    float* copy = new float[rows * cols];
    nb::capsule owner(copy, [](void* at) noexcept { delete[] static_cast<float*>(at); });
    for (size_t r = 0; r < rows; ++r) {
        memcpy(copy + r * cols, buffers.slot(view.slot) + r * width + view.column, cols * sizeof(float));
    }
    return {copy, {rows, cols}, owner};
}

void write_buffers(Buffers& buffers, const View& view, Matrix2<const float> values) {
    const size_t rows = values.shape(0), cols = values.shape(1);
    check_buffers(buffers, view, rows, cols);
    const size_t width = buffers.widths()[view.slot];
    for (size_t r = 0; r < rows; ++r) {
        memcpy(buffers.slot(view.slot) + r * width + view.column, values.data() + r * cols, cols * sizeof(float));
    }
}

// The heads of one sequence's pattern, `offset` floats from the beginning, copied.
nb::ndarray<nb::numpy, float, nb::ndim<3>> read_pattern(const Buffers& buffers, size_t offset, size_t heads,
                                                        size_t rows, size_t keys) {
    const size_t room = buffers.pattern_floats();
    expect(offset <= room && heads <= room && rows <= room && keys <= room, "the buffers have no such pattern");
    expect(rows == 0 || keys == 0 || heads <= (room - offset) / rows / keys, "the buffers have no such pattern");
    const size_t floats = heads * rows * keys;
    float* copy = new float[floats];
    nb::capsule owner(copy, [](void* at) noexcept { delete[] static_cast<float*>(at); });
    {
        nb::gil_scoped_release release;  // not beyond here: an array is made of Python's memory
        memcpy(copy, buffers.patterns() + offset, floats * sizeof(float));
    }
    return {copy, {heads, rows, keys}, owner};
}

void write_pattern(Buffers& buffers, size_t offset, Array3<const float> values) {
    const size_t room = buffers.pattern_floats();
    expect(offset <= room && values.size() <= room - offset, "the buffers have no such pattern");
    if (values.size() > 0) memcpy(buffers.patterns() + offset, values.data(), values.size() * sizeof(float));
}

void fit_patterns(Buffers& buffers, size_t floats) {
    expect(floats <= SIZE_MAX / 64, "a pattern is larger than any memory");
    buffers.fit_patterns(floats);
}

// ---- Caches --------------------------------------------------------------------------------------------------------

void check_cache(const KeyValues& cache, size_t layer, const std::string& part, size_t start, size_t stop) {
    expect(layer < cache.layers, "the cache has no such layer");
    expect(part == "k" || part == "v", "a cache's part is k or v");
    expect(start <= stop && stop <= cache.capacity, "the cache has no such positions");
}

nb::ndarray<nb::numpy, float, nb::ndim<3>> read_cache(KeyValues& cache, size_t layer, const std::string& part,
                                                      size_t start, size_t stop) {
    check_cache(cache, layer, part, start, stop);
    const size_t heads = cache.shape.kv_heads, dim = cache.shape.dim;
    float* copy = new float[heads * (stop - start) * dim];
    nb::capsule owner(copy, [](void* at) noexcept { delete[] static_cast<float*>(at); });
    {
        nb::gil_scoped_release release;  // as above
        cache.read(layer, part == "k", start, stop, copy);
    }
    return {copy, {heads, stop - start, dim}, owner};
}

void write_cache(KeyValues& cache, size_t layer, const std::string& part, size_t start, Array3<const float> values) {
    check_cache(cache, layer, part, start, start);
    expect(values.shape(1) <= cache.capacity - start, "the cache has no such positions");
    expect(values.shape(0) == static_cast<size_t>(cache.shape.kv_heads) &&
               values.shape(2) == static_cast<size_t>(cache.shape.dim),
           "the values have another shape than the cache: expected [kv_heads positions dim]");
    const float* from = values.data();
    const size_t stop = start + values.shape(1);
    nb::gil_scoped_release release;
    cache.write(layer, part == "k", start, stop, from);
}

std::unique_ptr<KeyValues> make_key_values(bool half, size_t layers, int kv_heads, int dim, size_t context_length) {
    expect(layers > 0 && kv_heads > 0 && dim > 0 && context_length > 0, "a cache's sizes must be positive");
    return std::make_unique<KeyValues>(CacheShape{half, kv_heads, dim}, layers, context_length);
}

}  // namespace

void bind_program(nb::module_& m) {
    nb::class_<View>(m, "View")
        .def(
            "__init__", [](View* view, int slot, int column) { new (view) View{slot, column}; }, "slot"_a,
            "column"_a = 0)
        .def_ro("slot", &View::slot)
        .def_ro("column", &View::column);
    nb::class_<Instruction>(m, "Instruction")
        .def(nb::init<>())
        .def_rw("kind", &Instruction::kind)
        .def_rw("a", &Instruction::a)
        .def_rw("b", &Instruction::b)
        .def_rw("c", &Instruction::c)
        .def_rw("out", &Instruction::out)
        .def_rw("cols", &Instruction::cols)
        .def_rw("activation", &Instruction::activation)
        .def_rw("matrices", &Instruction::matrices)
        .def_rw("biases", &Instruction::biases)
        .def_rw("gated", &Instruction::gated)
        .def_rw("bias", &Instruction::bias)
        .def_rw("weight", &Instruction::weight)
        .def_rw("norm_weight", &Instruction::norm_weight)
        .def_rw("norm_bias", &Instruction::norm_bias)
        .def_rw("epsilon", &Instruction::epsilon)
        .def_rw("rms", &Instruction::rms)
        .def_rw("frequencies", &Instruction::frequencies)
        .def_rw("gather", &Instruction::gather)
        .def_rw("wanted", &Instruction::wanted)
        .def_rw("edit", &Instruction::edit)
        .def_rw("as_cached", &Instruction::as_cached)
        .def_rw("layer", &Instruction::layer)
        .def_rw("heads", &Instruction::heads)
        .def_rw("kv_heads", &Instruction::kv_heads)
        .def_rw("dim", &Instruction::dim)
        .def_rw("scale", &Instruction::scale)
        .def_rw("window", &Instruction::window);
    nb::class_<KeyValues>(m, "KeyValues")
        .def(nb::new_(&make_key_values), "half"_a, "layers"_a, "kv_heads"_a, "dim"_a, "context_length"_a)
        .def("read", &read_cache, "layer"_a, "part"_a, "start"_a, "stop"_a,
             "Keys (\"k\") or values (\"v\") of positions start to stop: float32 [kv_heads positions dim].")
        .def("write", &write_cache, "layer"_a, "part"_a, "start"_a, "values"_a.noconvert(),
             "Float32 [kv_heads positions dim], rounded to the cache's type, from position start on.");
    nb::class_<Code>(m, "Code").def("__len__", [](const Code& code) { return code.instructions.size(); });
    nb::class_<Buffers>(m, "Buffers", "The slots of one step.")
        .def(nb::init<>())
        .def("fit", &Buffers::fit, "code"_a, "rows"_a, "Room for a step of so many rows of a code.")
        .def("fit_patterns", &fit_patterns, "floats"_a,
             "Room for the patterns of one attention: [heads new keys] each.")
        .def("read_pattern", &read_pattern, "offset"_a, "heads"_a, "rows"_a, "keys"_a,
             "A copy of one sequence's, `offset` floats behind the beginning: float32 [heads rows keys].")
        .def("write_pattern", &write_pattern, "offset"_a, "values"_a.noconvert(), "Float32 [heads rows keys].")
        .def("read", &read_buffers, "view"_a, "rows"_a, "cols"_a, "A copy: float32 [rows cols].")
        .def("write", &write_buffers, "view"_a, "values"_a.noconvert(), "Float32 [rows cols] into their place.");
    nb::class_<Program>(m, "Program")
        .def(nb::new_(&make_program), "threads"_a, "isa"_a)
        .def("add_matrix", &add_matrix, "type_id"_a, "rows"_a, "cols"_a, "Room for a matrix; its number.")
        .def("fill", &fill, "matrix"_a, "first"_a, "rows"_a.noconvert(),
             "Rows as a file has them, uint8 [n row_bytes], into their place.")
        .def("add_vector", &add_vector, "values"_a.noconvert())
        .def("compile", &compile, "instructions"_a, "widths"_a, "arrays"_a)
        .def("run", &run, "code"_a, "buffers"_a, "first"_a, "last"_a, "rows"_a, "wanted"_a.noconvert(), "sequences"_a,
             "arrays"_a, "edits"_a = nb::list(), "Runs a code's instructions first to last (exclusive) on one step.")
        .def_prop_ro("isa", &Program::isa)
        .def_prop_ro("threads", &Program::threads);
    nb::dict kinds, activations;
    for (const auto& [name, kind] : kKinds) kinds[name] = static_cast<int>(kind);
    for (const auto& [name, activation] : kActivations) activations[name] = static_cast<int>(activation);
    m.attr("kinds") = kinds;
    m.attr("activations") = activations;
    m.def(
        "computes",
        [] {
            std::vector<int> ids;
            for (const PanelType& type : kPanelTypes) ids.push_back(type.type_id);
            return ids;
        },
        "The ggml types that the engine computes on.");
}

}  // namespace starscope
