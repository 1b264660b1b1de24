// Which instruction sets this build has, which of them this processor and operating system can run, and rows spread
// over threads.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace starscope {

// Usable here, slowest (scalar) first.
std::vector<const Kernels*> usable_kernels();

// Null when the codec is not known.
const Codec* find_codec(const Kernels& kernels, int type_id);

void encode_blocks(const Codec& codec, const float* values, uint8_t* packed, size_t blocks, int threads);
void decode_blocks(const Codec& codec, const uint8_t* packed, float* values, size_t blocks, int threads);

}  // namespace starscope
