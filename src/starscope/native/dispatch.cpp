#include "dispatch.h"

#include <algorithm>
#include <system_error>
#include <thread>

#ifdef STARSCOPE_X86_64
#include <cpuid.h>
#endif

namespace starscope {
namespace {

#ifdef STARSCOPE_X86_64
// The register sets that the operating system saves on a switch (XCR0); 0 when it does not say.
uint64_t saved_registers() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<uint64_t>(high) << 32) | low;
}

bool all_set(uint64_t value, uint64_t wanted) { return (value & wanted) == wanted; }

bool has_avx2() {
    unsigned a, b, c, d;
    if (!all_set(saved_registers(), 0x6) || !__get_cpuid(1, &a, &b, &c, &d)) return false;
    if (!all_set(c, bit_AVX | bit_FMA | bit_F16C) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return all_set(b, bit_AVX2);
}

// With VNNI: without it the 8-bit products of AVX2 are no slower.
bool has_avx512() {
    unsigned a, b, c, d;
    if (!has_avx2() || !all_set(saved_registers(), 0xe6) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return all_set(b, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL) && all_set(c, bit_AVX512VNNI);
}

bool has_avx512_bf16() {
    unsigned a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && all_set(a, bit_AVX512BF16);
}
#endif

// Below this many values a thread costs more than it saves.
constexpr size_t kValuesPerThread = 1 << 16;

// Calls run(first, count) on equal parts of [0, blocks), one part on the calling thread.
template <typename Run>
void over_threads(size_t blocks, size_t block_values, int threads, const Run& run) {
    const size_t most = std::max<size_t>(1, blocks * block_values / kValuesPerThread);
    const size_t parts = std::min<size_t>(static_cast<size_t>(std::max(threads, 1)), most);
    const auto begin = [&](size_t part) { return blocks / parts * part + std::min(part, blocks % parts); };
    std::vector<std::thread> helpers;
    helpers.reserve(parts);
    size_t part = 1;
    try {
        for (; part < parts; ++part) helpers.emplace_back(run, begin(part), begin(part + 1) - begin(part));
    } catch (const std::system_error&) {
        run(begin(part), blocks - begin(part));  // no more threads to be had
    }
    run(begin(0), begin(1) - begin(0));
    for (std::thread& helper : helpers) helper.join();
}

}  // namespace

const std::vector<InstructionSet>& usable_instruction_sets() {
    static const std::vector<InstructionSet> sets = [] {
        std::vector<InstructionSet> usable = {
            {"scalar", &scalar::kernels, &scalar::compute, &scalar::attention_kernels},
        };
#ifdef STARSCOPE_X86_64
        if (has_avx2()) usable.push_back({"avx2", &avx2::kernels, &avx2::compute, &avx2::attention_kernels});
        if (has_avx512()) {
            usable.push_back({"avx512", &avx512::kernels, &avx512::compute, &avx512::attention_kernels});
        }
        if (has_avx512_bf16()) {
            usable.push_back({"avx512_bf16", &avx512::kernels, &avx512::compute, &avx512_bf16::attention_kernels});
        }
#endif
        return usable;
    }();
    return sets;
}

const InstructionSet* find_instruction_set(const std::string& name) {
    for (const InstructionSet& set : usable_instruction_sets()) {
        if (name == set.name) return &set;
    }
    return nullptr;
}

const Codec* find_codec(const Kernels& kernels, int type_id) {
    for (const Codec& codec : kernels.codecs) {
        if (codec.type_id == type_id) return &codec;
    }
    return nullptr;
}

void encode_blocks(const Codec& codec, const float* values, uint8_t* packed, size_t blocks, int threads) {
    over_threads(blocks, codec.block_values, threads, [=, &codec](size_t first, size_t count) {
        codec.encode(values + first * codec.block_values, packed + first * codec.block_bytes, count);
    });
}

void decode_blocks(const Codec& codec, const uint8_t* packed, float* values, size_t blocks, int threads) {
    over_threads(blocks, codec.block_values, threads, [=, &codec](size_t first, size_t count) {
        codec.decode(packed + first * codec.block_bytes, values + first * codec.block_values, count);
    });
}

}  // namespace starscope
