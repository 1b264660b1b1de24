// The arithmetic, written once as plain loops that a compiler can vectorize and compiled once per instruction set.
//
// Rules that keep the bits equal on all of them: float32 throughout, no sum whose order could change, no fused
// multiply-add (-ffp-contract=off), rounding written out in integers. No library code is called here: an inline
// function compiled for AVX-512 could be the copy that the linker keeps for everybody.
#include "kernels.h"

#include "blocks.h"

#define STARSCOPE_TEXT_(x) #x
#define STARSCOPE_TEXT(x) STARSCOPE_TEXT_(x)

namespace starscope {
namespace STARSCOPE_ISA {
namespace {

constexpr uint32_t kSign = 0x80000000u;
constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;

inline uint32_t bits_of(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// `condition ? a : b` without a branch, so that the loop around it is vectorized.
inline uint32_t select(bool condition, uint32_t a, uint32_t b) {
    const uint32_t mask = 0u - static_cast<uint32_t>(condition);
    return (a & mask) | (b & ~mask);
}

// float32 -> float16, to nearest, ties to even. A NaN keeps its sign and the upper bits of its payload.
inline uint16_t half_from(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & kMagnitude;
    // Below 2^-14 a float16 counts in steps of 2^-24, which is the step of a float32 in [0.5, 1): the adder rounds.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    // Above it the exponent is rebiased from 127 to 15; a carry out of the mantissa is the next exponent, or infinity.
    const uint32_t normal = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    const uint32_t payload = (magnitude & 0x007fffffu) >> 13;
    uint32_t half = select(magnitude < (113u << 23), subnormal, normal);
    half = select(magnitude >= (143u << 23), 0x7c00u, half);
    half = select(magnitude > kInfinity, 0x7c00u + payload + static_cast<uint32_t>(payload == 0), half);
    return static_cast<uint16_t>(half | ((bits & kSign) >> 16));
}

inline float float_from_half(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu;
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t bits = select(magnitude < 0x0400u, subnormal, normal);
    bits = select(magnitude >= 0x7c00u, normal + (112u << 23), bits);
    return float_of(bits | (static_cast<uint32_t>(half & 0x8000u) << 16));
}

// float32 -> bfloat16, to nearest, ties to even; a NaN comes out quiet.
inline uint16_t bfloat_from(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const uint32_t quiet = bits | 0x00400000u;
    return static_cast<uint16_t>(select((bits & kMagnitude) > kInfinity, quiet, rounded) >> 16);
}

// 1 / scale, and 0 for a block of zeros.
inline float reciprocal(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

// What cannot be scaled (a NaN, an infinity, a scale so small that its reciprocal overflows) becomes quant 0.
inline float finite_or_zero(float value) { return (bits_of(value) & kMagnitude) < kInfinity ? value : 0.0f; }

// Toward zero; for magnitudes below 2^31.
inline float truncated(float value) { return static_cast<float>(static_cast<int32_t>(value)); }

// The largest magnitude of a block as bits: their order as integers is that of the magnitudes, a NaN above all.
inline uint32_t largest_magnitude(const float* values) {
    uint32_t largest = 0;
    for (int i = 0; i < kBlockValues; ++i) {
        const uint32_t magnitude = bits_of(values[i]) & kMagnitude;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

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
        const float scale = float_of(largest_magnitude(values)) / 127.0f;
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

inline int32_t nibble_from(float value) {
    const int32_t quant = static_cast<int32_t>(finite_or_zero(value));
    return quant > 15 ? 15 : quant;
}

// The value of largest magnitude (the first such; a NaN if there is one) becomes quant 0, which stands for -8:
// scale = max / -8; quant = x / scale + 8.5, cut to an integer in 0..15.
void encode_q4_0(const float* __restrict values, uint8_t* __restrict packed, size_t blocks) {
    BlockQ4_0* __restrict out = reinterpret_cast<BlockQ4_0*>(packed);
    for (size_t b = 0; b < blocks; ++b, values += kBlockValues) {
        const uint32_t largest = largest_magnitude(values);
        const uint32_t enough = largest > kInfinity ? kInfinity + 1 : largest;
        int first = 0;
        while ((bits_of(values[first]) & kMagnitude) < enough) ++first;
        const float scale = values[first] / -8.0f;
        const float inverse = reciprocal(scale);
        out[b].scale = half_from(scale);
        for (int i = 0; i < kBlockValues / 2; ++i) {
            const int32_t low = nibble_from(values[i] * inverse + 8.5f);
            const int32_t high = nibble_from(values[i + kBlockValues / 2] * inverse + 8.5f);
            out[b].quants[i] = static_cast<uint8_t>(low | (high << 4));
        }
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

}  // namespace

extern const Kernels kernels = {
    STARSCOPE_TEXT(STARSCOPE_ISA),
    {
        // ggml type, values, bytes
        {1, 1, 2, encode_f16, decode_f16},                               // F16
        {2, kBlockValues, sizeof(BlockQ4_0), encode_q4_0, decode_q4_0},  // Q4_0
        {8, kBlockValues, sizeof(BlockQ8_0), encode_q8_0, decode_q8_0},  // Q8_0
        {30, 1, 2, encode_bf16, decode_bf16},                            // BF16
    },
};

}  // namespace STARSCOPE_ISA
}  // namespace starscope
