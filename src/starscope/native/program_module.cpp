// The engine's program for Python: what is built once, and one call a step. Everything that Python gives is checked
// here.
#include "program_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <system_error>
#include <vector>

#include "dispatch.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace starscope {
namespace {

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& problem) { throw nb::value_error(problem.c_str()); }

void expect(bool condition, const char* problem) {
    if (!condition) refuse(problem);
}

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

// A view of `cols` columns lies in its slot; `optional` ones may be absent.
void check_view(const View& view, size_t cols, const std::vector<size_t>& widths, bool optional = false) {
    if (optional && view.slot == -1) return;
    expect(view.slot >= 0 && static_cast<size_t>(view.slot) < widths.size(), "an instruction names no slot");
    expect(view.column >= 0 && view.column + cols <= widths[view.slot], "an instruction reaches past its slot");
}

void check_vector(const Program& program, int index, size_t count) {
    expect(index >= -1 && index < static_cast<int>(program.vectors()), "an instruction names no vector");
    expect(index == -1 || program.vector_size(index) >= count, "a vector is too short for its instruction");
}

void check_instruction(const Program& program, const Instruction& i, const std::vector<size_t>& widths) {
    expect(i.cols > 0, "an instruction has no columns");
    const size_t cols = static_cast<size_t>(i.cols);
    switch (i.kind) {
        case kAdd:
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
        case kLinear: {
            expect(i.matrix >= 0 && static_cast<size_t>(i.matrix) < program.matrices(), "a linear names no matrix");
            const Matrix& matrix = program.matrix(i.matrix);
            expect(cols == matrix.rows, "a linear has another number of columns than its matrix has rows");
            check_view(i.a, matrix.cols, widths);
            check_view(i.b, cols, widths, true);
            check_vector(program, i.bias, cols);
            check_vector(program, i.norm_weight, matrix.cols);
            check_vector(program, i.norm_bias, matrix.cols);
            check_view(i.norm_out, matrix.cols, widths, true);
            check_view(i.out, cols, widths);
            return;
        }
        case kAttention:
            expect(i.heads > 0 && i.kv_heads > 0 && i.heads % i.kv_heads == 0 && i.dim > 0,
                   "heads do not fit together");
            check_view(i.b, static_cast<size_t>(i.kv_heads) * i.dim, widths);
            check_view(i.c, static_cast<size_t>(i.kv_heads) * i.dim, widths);
            expect(i.a.slot == i.b.slot && i.a.slot == i.c.slot, "queries, keys and values must share a slot");
            expect(i.layer >= 0 && cols == static_cast<size_t>(i.heads) * i.dim, "an attention's columns do not fit");
            break;
        default:
            refuse("an instruction is of no kind");
    }
    check_view(i.a, cols, widths);
    check_view(i.out, cols, widths);
}

void compile(Program& program, std::vector<Instruction> instructions, std::vector<size_t> widths, size_t arrays) {
    expect(arrays <= widths.size(), "there are more arrays than slots");
    for (const Instruction& i : instructions) check_instruction(program, i, widths);
    program.compile(std::move(instructions), std::move(widths), arrays);
}

// An attention's caches have its layer and its heads, all of one kind.
void check_caches(const Instruction& i, const std::vector<Sequence>& sequences) {
    if (i.kind != kAttention) return;
    for (const Sequence& s : sequences) {
        const CacheShape& shape = s.cache->shape;
        expect(shape.kv_heads == i.kv_heads && shape.dim == i.dim && shape.half == sequences[0].cache->shape.half &&
                   static_cast<size_t>(i.layer) < s.cache->layers,
               "a cache has another shape than its attention");
    }
}

// sequences: (first_row, new_rows, past, cache). arrays: float32 [rows width], for each of the first slots; the wanted
// ones may have fewer rows.
void run(Program& program, size_t first, size_t last, size_t rows, Vector<const int64_t> wanted, nb::list sequences,
         nb::list arrays) {
    expect(first <= last && last <= program.size(), "there are no such instructions");
    Step step{rows, wanted.data(), wanted.size(), {}, {}};
    for (size_t i = 0; i < wanted.size(); ++i) {
        expect(wanted.data()[i] >= 0 && static_cast<size_t>(wanted.data()[i]) < rows, "a wanted row is out of range");
    }
    size_t covered = 0;
    for (nb::handle item : sequences) {
        const nb::tuple tuple = nb::cast<nb::tuple>(item);
        Sequence s{nb::cast<size_t>(tuple[0]), nb::cast<size_t>(tuple[1]), nb::cast<size_t>(tuple[2]),
                   nb::cast<KeyValues*>(tuple[3])};
        expect(s.first_row == covered && s.new_rows > 0, "sequences must follow one another");
        expect(s.cache != nullptr, "a sequence has no cache");
        expect(s.new_rows <= rows && s.past <= s.cache->capacity && s.new_rows <= s.cache->capacity - s.past,
               "a cache is too small for its sequence");
        covered += s.new_rows;
        step.sequences.push_back(s);
    }
    expect(covered == rows && rows > 0, "the sequences must have all rows");
    for (size_t n = first; n < last; ++n) check_caches(program.instruction(n), step.sequences);
    expect(nb::len(arrays) == program.arrays(), "another number of arrays was compiled");
    for (size_t a = 0; a < program.arrays(); ++a) {
        const auto array = nb::cast<Matrix2<float>>(arrays[a]);
        expect(array.shape(1) == program.widths()[a], "an array has another width than its slot");
        expect(array.shape(0) == rows || array.shape(0) == wanted.size(), "an array has another number of rows");
        step.arrays.push_back(array.data());
    }
    try {
        nb::gil_scoped_release release;
        program.run(first, last, step);
    } catch (const std::system_error& error) {  // threads that cannot be started
        PyErr_SetString(PyExc_OSError, error.what());
        throw nb::python_error();
    }
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
        .def_rw("matrix", &Instruction::matrix)
        .def_rw("bias", &Instruction::bias)
        .def_rw("weight", &Instruction::weight)
        .def_rw("norm_weight", &Instruction::norm_weight)
        .def_rw("norm_bias", &Instruction::norm_bias)
        .def_rw("norm_out", &Instruction::norm_out)
        .def_rw("epsilon", &Instruction::epsilon)
        .def_rw("gather", &Instruction::gather)
        .def_rw("layer", &Instruction::layer)
        .def_rw("heads", &Instruction::heads)
        .def_rw("kv_heads", &Instruction::kv_heads)
        .def_rw("dim", &Instruction::dim)
        .def_rw("scale", &Instruction::scale);
    nb::class_<KeyValues>(m, "KeyValues")
        .def(nb::new_(&make_key_values), "half"_a, "layers"_a, "kv_heads"_a, "dim"_a, "context_length"_a);
    nb::class_<Program>(m, "Program")
        .def(nb::new_(&make_program), "threads"_a, "isa"_a)
        .def("add_matrix", &add_matrix, "type_id"_a, "rows"_a, "cols"_a, "Room for a matrix; its number.")
        .def("fill", &fill, "matrix"_a, "first"_a, "rows"_a.noconvert(),
             "Rows as a file has them, uint8 [n row_bytes], into their place.")
        .def("add_vector", &add_vector, "values"_a.noconvert())
        .def("compile", &compile, "instructions"_a, "widths"_a, "arrays"_a)
        .def("run", &run, "first"_a, "last"_a, "rows"_a, "wanted"_a.noconvert(), "sequences"_a, "arrays"_a,
             "Runs instructions first to last (exclusive) on one step.")
        .def("__len__", &Program::size)
        .def_prop_ro("isa", &Program::isa)
        .def_prop_ro("threads", &Program::threads);
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
