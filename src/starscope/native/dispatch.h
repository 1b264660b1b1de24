// Which instruction sets this build has, which of them this processor and operating system can run, and rows spread
// over threads.
#pragma once

#include <string>
#include <vector>

#include "attention_kernels.h"
#include "compute.h"
#include "kernels.h"

namespace starscope {

// What is compiled for an instruction set, or for the nearest one below it that differs.
struct InstructionSet {
    const char* name;
    const Kernels* kernels;
    const ComputeKernels* compute;
    const AttentionKernels* attention;
};

// Usable here, slowest (scalar) first.
const std::vector<InstructionSet>& usable_instruction_sets();

// The usable one of that name; null when there is none.
const InstructionSet* find_instruction_set(const std::string& name);

// Null when the codec is not known.
const Codec* find_codec(const Kernels& kernels, int type_id);

void encode_blocks(const Codec& codec, const float* values, uint8_t* packed, size_t blocks, int threads);
void decode_blocks(const Codec& codec, const uint8_t* packed, float* values, size_t blocks, int threads);

}  // namespace starscope
