// The arithmetic, written once as plain loops that a compiler can vectorize and compiled once per instruction set.
//
// Rules that keep the bits equal on all of them: float32 throughout, no sum whose order could change, no fused
// multiply-add (-ffp-contract=off), rounding written out in integers. No library code is called here: an inline
// function compiled for AVX-512 could be the copy that the linker keeps for everybody.
#include "kernels.h"

#include "blocks.h"
#include "kernels_k.h"
#include "numbers.h"

#define STARSCOPE_TEXT_(x) #x
#define STARSCOPE_TEXT(x) STARSCOPE_TEXT_(x)

namespace starscope {
namespace STARSCOPE_ISA {
namespace {

void encode_f16(const float* __restrict values, uint8_t* __restrict packed, size_t blocks) {
    uint16_t* __restrict out = reinterpret_cast<uint16_t*>(packed);
    for (size_t i = 0; i < blocks; ++i) out[i] = half_from(values[i]);
}

void decode_f16(const uint8_t* __restrict packed, float* __restrict values, size_t blocks) {
    const uint16_t* __restrict in = reinterpret_cast<const uint16_t*>(packed);
    for (size_t i = 0; i < blocks; ++i) values[i] = float_from_half(in[i]);
}

void encode_bf16(const float* __restrict values, uint8_t* __restrict packed, size_t blocks) {
    uint16_t* __restrict out = reinterpret_cast<uint16_t*>(packed);
    for (size_t i = 0; i < blocks; ++i) out[i] = bfloat_from(values[i]);
}

void decode_bf16(const uint8_t* __restrict packed, float* __restrict values, size_t blocks) {
    const uint16_t* __restrict in = reinterpret_cast<const uint16_t*>(packed);
    for (size_t i = 0; i < blocks; ++i) values[i] = float_of(static_cast<uint32_t>(in[i]) << 16);
}

// scale = max|x| / 127; quant = x / scale, rounded to nearest, halves away from zero.
void encode_q8_0(const float* __restrict values, uint8_t* __restrict packed, size_t blocks) {
    BlockQ8_0* __restrict out = reinterpret_cast<BlockQ8_0*>(packed);
    for (size_t b = 0; b < blocks; ++b, values += kBlockValues) {
        const float scale = float_of(largest_magnitude(values, kBlockValues)) / 127.0f;
        const float inverse = reciprocal(scale);
        out[b].scale = half_from(scale);
        for (int i = 0; i < kBlockValues; ++i) {
            const float scaled = finite_or_zero(values[i] * inverse);
            const float whole = truncated(scaled);
            out[b].quants[i] = static_cast<int8_t>(whole + truncated(2.0f * (scaled - whole)));
        }
    }
}

void decode_q8_0(const uint8_t* __restrict packed, float* __restrict values, size_t blocks) {
    const BlockQ8_0* __restrict in = reinterpret_cast<const BlockQ8_0*>(packed);
    for (size_t b = 0; b < blocks; ++b, values += kBlockValues) {
        const float scale = float_from_half(in[b].scale);
        for (int i = 0; i < kBlockValues; ++i) values[i] = static_cast<float>(in[b].quants[i]) * scale;
    }
}

inline int32_t steps_from(float value, int32_t top) {
    const int32_t quant = static_cast<int32_t>(finite_or_zero(value));
    return quant > top ? top : quant;
}

// The first of the values with this magnitude or a larger one; of NaN, whatever their bits, the first.
inline float first_of(const float* values, uint32_t magnitude) {
    const uint32_t enough = magnitude > kInfinity ? kInfinity + 1 : magnitude;
    int first = 0;
    while ((bits_of(values[first]) & kMagnitude) < enough) ++first;
    return values[first];
}

// The value of largest magnitude (the first such; a NaN if there is one) becomes quant 0, which stands for -half where
// half is (top + 1) / 2: scale = largest / -half; quant = x / scale + half + 0.5, cut to an integer in 0..top.
template <int kTop>
inline float around_zero(const float* values, uint8_t* quants) {
    constexpr float kHalf = (kTop + 1) / 2;
    const float scale = first_of(values, largest_magnitude(values, kBlockValues)) / -kHalf;
    const float inverse = reciprocal(scale);
    for (int i = 0; i < kBlockValues; ++i) {
        quants[i] = static_cast<uint8_t>(steps_from(values[i] * inverse + (kHalf + 0.5f), kTop));
    }
    return scale;
}

// The smallest value becomes quant 0 and the largest quant top; of equals the first, of NaN too. Gives the scale, and
// the smallest value in `minimum`.
template <int kTop>
inline float from_minimum(const float* values, float& minimum, uint8_t* quants) {
    float low = values[0], high = values[0];
    for (int i = 1; i < kBlockValues; ++i) {
        low = lesser(values[i], low);
        high = greater(values[i], high);
    }
    const uint32_t largest = largest_magnitude(values, kBlockValues);
    if (largest > kInfinity) low = high = first_of(values, largest);
    const float scale = (high - low) / static_cast<float>(kTop);
    const float inverse = reciprocal(scale);
    for (int i = 0; i < kBlockValues; ++i) {
        quants[i] = static_cast<uint8_t>(steps_from((values[i] - low) * inverse + 0.5f, kTop));
    }
    minimum = low;
    return scale;
}

inline void pack_low_bits(const uint8_t* quants, uint8_t* packed) {
    for (int i = 0; i < kBlockValues / 2; ++i) {
        packed[i] = static_cast<uint8_t>((quants[i] & 15) | (quants[i + kBlockValues / 2] << 4));
    }
}

inline void pack_fifth_bits(const uint8_t* quants, uint8_t* packed) {
    for (int byte = 0; byte < kBlockValues / 8; ++byte) {
        uint32_t bits = 0;
        for (int i = 0; i < 8; ++i) bits |= static_cast<uint32_t>(quants[8 * byte + i] >> 4) << i;
        packed[byte] = static_cast<uint8_t>(bits);
    }
}

// Quants of five bits from their two parts.
inline void unpack_five_bits(const uint8_t* low, const uint8_t* fifth, uint8_t* quants) {
    for (int i = 0; i < kBlockValues / 2; ++i) {
        quants[i] = static_cast<uint8_t>((low[i] & 15) | ((fifth[i / 8] >> (i % 8) & 1) << 4));
        quants[i + kBlockValues / 2] = static_cast<uint8_t>((low[i] >> 4) | ((fifth[2 + i / 8] >> (i % 8) & 1) << 4));
    }
}

void encode_q4_0(const float* __restrict values, uint8_t* __restrict packed, size_t blocks) {
    BlockQ4_0* __restrict out = reinterpret_cast<BlockQ4_0*>(packed);
    uint8_t quants[kBlockValues];
    for (size_t b = 0; b < blocks; ++b, values += kBlockValues) {
        out[b].scale = half_from(around_zero<15>(values, quants));
        pack_low_bits(quants, out[b].quants);
    }
}

void decode_q4_0(const uint8_t* __restrict packed, float* __restrict values, size_t blocks) {
    const BlockQ4_0* __restrict in = reinterpret_cast<const BlockQ4_0*>(packed);
    for (size_t b = 0; b < blocks; ++b, values += kBlockValues) {
        const float scale = float_from_half(in[b].scale);
        for (int i = 0; i < kBlockValues / 2; ++i) {
            values[i] = scale * static_cast<float>(static_cast<int32_t>(in[b].quants[i] & 15) - 8);
            values[i + kBlockValues / 2] = scale * static_cast<float>(static_cast<int32_t>(in[b].quants[i] >> 4) - 8);
        }
    }
}

void encode_q4_1(const float* __restrict values, uint8_t* __restrict packed, size_t blocks) {
    BlockQ4_1* __restrict out = reinterpret_cast<BlockQ4_1*>(packed);
    uint8_t quants[kBlockValues];
    float minimum;
    for (size_t b = 0; b < blocks; ++b, values += kBlockValues) {
        out[b].scale = half_from(from_minimum<15>(values, minimum, quants));
        out[b].minimum = half_from(minimum);
        pack_low_bits(quants, out[b].quants);
    }
}

void decode_q4_1(const uint8_t* __restrict packed, float* __restrict values, size_t blocks) {
    const BlockQ4_1* __restrict in = reinterpret_cast<const BlockQ4_1*>(packed);
    for (size_t b = 0; b < blocks; ++b, values += kBlockValues) {
        const float scale = float_from_half(in[b].scale), minimum = float_from_half(in[b].minimum);
        for (int i = 0; i < kBlockValues / 2; ++i) {
            values[i] = scale * static_cast<float>(in[b].quants[i] & 15) + minimum;
            values[i + kBlockValues / 2] = scale * static_cast<float>(in[b].quants[i] >> 4) + minimum;
        }
    }
}

void encode_q5_0(const float* __restrict values, uint8_t* __restrict packed, size_t blocks) {
    BlockQ5_0* __restrict out = reinterpret_cast<BlockQ5_0*>(packed);
    uint8_t quants[kBlockValues];
    for (size_t b = 0; b < blocks; ++b, values += kBlockValues) {
        out[b].scale = half_from(around_zero<31>(values, quants));
        pack_fifth_bits(quants, out[b].fifth);
        pack_low_bits(quants, out[b].quants);
    }
}

void decode_q5_0(const uint8_t* __restrict packed, float* __restrict values, size_t blocks) {
    const BlockQ5_0* __restrict in = reinterpret_cast<const BlockQ5_0*>(packed);
    uint8_t quants[kBlockValues];
    for (size_t b = 0; b < blocks; ++b, values += kBlockValues) {
        const float scale = float_from_half(in[b].scale);
        unpack_five_bits(in[b].quants, in[b].fifth, quants);
        for (int i = 0; i < kBlockValues; ++i) values[i] = scale * static_cast<float>(quants[i] - 16);
    }
}

void encode_q5_1(const float* __restrict values, uint8_t* __restrict packed, size_t blocks) {
    BlockQ5_1* __restrict out = reinterpret_cast<BlockQ5_1*>(packed);
    uint8_t quants[kBlockValues];
    float minimum;
    for (size_t b = 0; b < blocks; ++b, values += kBlockValues) {
        out[b].scale = half_from(from_minimum<31>(values, minimum, quants));
        out[b].minimum = half_from(minimum);
        pack_fifth_bits(quants, out[b].fifth);
        pack_low_bits(quants, out[b].quants);
    }
}

void decode_q5_1(const uint8_t* __restrict packed, float* __restrict values, size_t blocks) {
    const BlockQ5_1* __restrict in = reinterpret_cast<const BlockQ5_1*>(packed);
    uint8_t quants[kBlockValues];
    for (size_t b = 0; b < blocks; ++b, values += kBlockValues) {
        const float scale = float_from_half(in[b].scale), minimum = float_from_half(in[b].minimum);
        unpack_five_bits(in[b].quants, in[b].fifth, quants);
        for (int i = 0; i < kBlockValues; ++i) values[i] = scale * static_cast<float>(quants[i]) + minimum;
    }
}

}  // namespace

extern const Kernels kernels = {
    STARSCOPE_TEXT(STARSCOPE_ISA),
    {
        // ggml type, values, bytes
        {1, 1, 2, encode_f16, decode_f16},                                // F16
        {2, kBlockValues, sizeof(BlockQ4_0), encode_q4_0, decode_q4_0},   // Q4_0
        {3, kBlockValues, sizeof(BlockQ4_1), encode_q4_1, decode_q4_1},   // Q4_1
        {6, kBlockValues, sizeof(BlockQ5_0), encode_q5_0, decode_q5_0},   // Q5_0
        {7, kBlockValues, sizeof(BlockQ5_1), encode_q5_1, decode_q5_1},   // Q5_1
        {8, kBlockValues, sizeof(BlockQ8_0), encode_q8_0, decode_q8_0},   // Q8_0
        {12, kSuperValues, sizeof(BlockQ4_K), encode_q4_k, decode_q4_k},  // Q4_K
        {13, kSuperValues, sizeof(BlockQ5_K), encode_q5_k, decode_q5_k},  // Q5_K
        {14, kSuperValues, sizeof(BlockQ6_K), encode_q6_k, decode_q6_k},  // Q6_K
        {30, 1, 2, encode_bf16, decode_bf16},                             // BF16
    },
};

}  // namespace STARSCOPE_ISA
}  // namespace starscope
