// The codecs of kernels_k.cpp, for the table in kernels.cpp. Included with STARSCOPE_ISA defined.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace starscope {
namespace STARSCOPE_ISA {

void encode_q4_k(const float* __restrict values, uint8_t* __restrict packed, size_t blocks);
void encode_q5_k(const float* __restrict values, uint8_t* __restrict packed, size_t blocks);
void encode_q6_k(const float* __restrict values, uint8_t* __restrict packed, size_t blocks);
void decode_q4_k(const uint8_t* __restrict packed, float* __restrict values, size_t blocks);
void decode_q5_k(const uint8_t* __restrict packed, float* __restrict values, size_t blocks);
void decode_q6_k(const uint8_t* __restrict packed, float* __restrict values, size_t blocks);

}  // namespace STARSCOPE_ISA
}  // namespace starscope
