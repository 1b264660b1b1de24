// starscope.native._kernels: NumPy arrays in and out. Every size is checked here, with the GIL held; the arithmetic
// runs without it and sees pointers and counts only.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <string>
#include <vector>

#include "dispatch.h"
#include "program_module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace starscope {
namespace {

template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::atomic<const InstructionSet*> chosen{nullptr};

std::string isa() { return chosen.load()->name; }

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const InstructionSet& set : usable_instruction_sets()) names.emplace_back(set.name);
    return names;
}

void set_isa(const std::string& name) {
    const InstructionSet* set = find_instruction_set(name);
    if (set != nullptr) return chosen.store(set);
    std::string known;
    for (const std::string& usable : isas()) known += (known.empty() ? "" : ", ") + usable;
    throw nb::value_error(("instruction set '" + name + "' is not usable here; expected one of " + known).c_str());
}

std::vector<int> type_ids() {
    std::vector<int> ids;
    for (const Codec& codec : scalar::kernels.codecs) ids.push_back(codec.type_id);
    return ids;
}

std::string shape_of(size_t rows, size_t cols) {
    return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

// The codec for `type_id`, once `values` [rows cols] and `packed` [rows row_bytes] are known to fit it and each other.
template <typename Values, typename Packed>
const Codec& checked_codec(int type_id, const Values& values, const Packed& packed, int threads) {
    const Codec* codec = find_codec(*chosen.load()->kernels, type_id);
    if (codec == nullptr) throw nb::value_error(("no native codec for type " + std::to_string(type_id)).c_str());
    if (threads < 1) throw nb::value_error(("threads is " + std::to_string(threads) + "; expected 1 or more").c_str());
    const size_t rows = values.shape(0), cols = values.shape(1);
    if (cols % codec->block_values != 0) {
        throw nb::value_error((std::to_string(cols) + " columns; expected a multiple of the block size " +
                               std::to_string(codec->block_values))
                                  .c_str());
    }
    const size_t row_bytes = cols / codec->block_values * codec->block_bytes;
    if (packed.shape(0) != rows || packed.shape(1) != row_bytes) {
        throw nb::value_error(("packed bytes are " + shape_of(packed.shape(0), packed.shape(1)) + "; expected " +
                               shape_of(rows, row_bytes) + " for values " + shape_of(rows, cols))
                                  .c_str());
    }
    const uintptr_t v = reinterpret_cast<uintptr_t>(values.data()), p = reinterpret_cast<uintptr_t>(packed.data());
    if (v % alignof(float) != 0 || p % alignof(uint16_t) != 0) throw nb::value_error("an array is not aligned");
    if (v < p + rows * row_bytes && p < v + rows * cols * sizeof(float)) {
        throw nb::value_error("source and destination overlap");
    }
    return *codec;
}

void encode(int type_id, Matrix<const float> source, Matrix<uint8_t> destination, int threads) {
    const Codec& codec = checked_codec(type_id, source, destination, threads);
    const float* values = source.data();
    uint8_t* packed = destination.data();
    const size_t blocks = source.size() / codec.block_values;
    nb::gil_scoped_release release;
    encode_blocks(codec, values, packed, blocks, threads);
}

void decode(int type_id, Matrix<const uint8_t> source, Matrix<float> destination, int threads) {
    const Codec& codec = checked_codec(type_id, destination, source, threads);
    const uint8_t* packed = source.data();
    float* values = destination.data();
    const size_t blocks = destination.size() / codec.block_values;
    nb::gil_scoped_release release;
    decode_blocks(codec, packed, values, blocks, threads);
}

}  // namespace
}  // namespace starscope

NB_MODULE(_kernels, m) {
    // What a program still holds when it ends is no leak, and no business of whoever runs it.
    nb::set_leak_warnings(false);
    using namespace starscope;
    chosen = &usable_instruction_sets().back();
    m.doc() = "Kernels compiled per instruction set; the fastest usable one is chosen at import.";
    m.def("isa", &isa, "The instruction set in use.");
    m.def("isas", &isas, "The instruction sets usable on this machine, slowest first.");
    m.def("set_isa", &set_isa, "name"_a, "Uses another instruction set from now on (for tests and benches).");
    m.def("encodes", &type_ids, "The ggml types that encode() knows.");
    m.def("decodes", &type_ids, "The ggml types that decode() knows.");
    m.def("encode", &encode, "type_id"_a, "src"_a.noconvert(), "dst"_a.noconvert(), "threads"_a = 1,
          "float32 [rows cols] -> uint8 [rows row_bytes], written to dst.");
    m.def("decode", &decode, "type_id"_a, "src"_a.noconvert(), "dst"_a.noconvert(), "threads"_a = 1,
          "uint8 [rows row_bytes] -> float32 [rows cols], written to dst.");
    bind_program(m);
}
