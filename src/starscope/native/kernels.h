// What one instruction set offers: a table of codecs, one for each GGUF type. The same tables exist for every set,
// filled by compiling kernels.cpp again; results are the same bits on all of them.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace starscope {

// Turns `blocks` consecutive blocks of float32 values into packed bytes, and back. Buffers never overlap.
struct Codec {
    int type_id;          // ggml's number for the type
    size_t block_values;  // values in a block
    size_t block_bytes;   // bytes in a packed block
    void (*encode)(const float* values, uint8_t* packed, size_t blocks);
    void (*decode)(const uint8_t* packed, float* values, size_t blocks);
};

constexpr size_t kNumCodecs = 10;

struct Kernels {
    const char* isa;
    Codec codecs[kNumCodecs];
};

namespace scalar {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace starscope
