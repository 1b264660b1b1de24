// The K formats: blocks of 256 values whose groups have small integer scales. The rules are those of kernels.cpp.
//
// An encoder searches, for each group, the scale (and minimum) with the least weighted squared error: it rounds the
// values to steps of slightly different sizes, and for each rounding solves for the best scale by least squares. 16
// groups are searched at a time, one in each lane of a vector, so every sum runs over a group's values in their order,
// whatever the width of the vectors is. Within a group values count in units of its range: then the sizes of the trial
// steps are constants, and nothing overflows.
#include "kernels_k.h"

#include "blocks.h"
#include "numbers.h"

namespace starscope {
namespace STARSCOPE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t Mask __attribute__((vector_size(4 * kLanes)));

constexpr int kBatch = 16;  // groups searched side by side
constexpr int kGroup = 32;  // values in a group of Q4_K and Q5_K
constexpr int kGroups = kSuperValues / kGroup;
constexpr int kSmallGroup = 16;       // values in a group of Q6_K, which has kBatch of them
constexpr float kTrialStep = 0.1f;    // trial steps differ by this part of one quant at the top of the range
constexpr float kDegenerate = 8e-6f;  // least-squares determinants below this part of their terms are rounding errors
constexpr uint32_t kTooLarge = 0x4e800000u;  // 2^30, which no float16 scale reaches
constexpr uint16_t kHalfInfinity = 0x7c00u;

inline Lanes load(const float* values) {
    Lanes lanes;
    __builtin_memcpy(&lanes, values, sizeof lanes);
    return lanes;
}

inline void store(float* values, Lanes lanes) { __builtin_memcpy(values, &lanes, sizeof lanes); }

inline Lanes all(float value) { return Lanes{} + value; }

inline Lanes finite_or_zero(Lanes lanes) {
    Mask bits;
    __builtin_memcpy(&bits, &lanes, sizeof bits);
    return (bits & static_cast<int32_t>(kMagnitude)) < static_cast<int32_t>(kInfinity) ? lanes : all(0.0f);
}

inline Lanes magnitude(Lanes lanes) {
    Mask bits;
    __builtin_memcpy(&bits, &lanes, sizeof bits);
    bits &= static_cast<int32_t>(kMagnitude);
    __builtin_memcpy(&lanes, &bits, sizeof lanes);
    return lanes;
}

inline Lanes lesser(Lanes a, Lanes b) { return a < b ? a : b; }
inline Lanes greater(Lanes a, Lanes b) { return a > b ? a : b; }

inline Lanes square_root(Lanes lanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] = __builtin_sqrtf(lanes[i]);
    return lanes;
}

// To the nearest integer, ties to even, for magnitudes below 2^22: there a float32 of 2^23 and more has no fraction.
template <typename Number>
inline Number rounded(Number value) {
    constexpr float kNoFraction = 12582912.0f;  // 1.5 * 2^23
    return (value + kNoFraction) - kNoFraction;
}

// The scales s and minima m of kLanes groups of kGroup values each, x[i][lane], such that x is about s * q - m with q
// in 0..kTop and m >= 0. Trial steps make the range kTop + kTrialStep * t quants wide, t in kFirst..kLast. Errors count
// by |x| plus the group's root mean square.
template <int kTop, int kFirst, int kLast>
inline void fit_with_minimum(const float (*x)[kBatch], float* scale, float* minimum) {
    constexpr float top = kTop;
    Lanes low = load(x[0]), high = low;
    for (int i = 1; i < kGroup; ++i) {
        low = lesser(load(x[i]), low);
        high = greater(load(x[i]), high);
    }
    low = lesser(low, all(0.0f));
    const Lanes range = high - low;
    const Lanes inverse = finite_or_zero(top / range);
    const Lanes zero = (0.0f - low) * inverse;  // where x = 0 is
    Lanes value[kGroup], weight[kGroup];        // in units of range / kTop, from `low`
    Lanes squares = all(0.0f);
    for (int i = 0; i < kGroup; ++i) {
        value[i] = (load(x[i]) - low) * inverse;
        weight[i] = magnitude(load(x[i])) * inverse;
        squares += weight[i] * weight[i];
    }
    const Lanes root = square_root(squares * (1.0f / kGroup));
    Lanes w = all(0.0f), wv = all(0.0f);
    for (int i = 0; i < kGroup; ++i) {
        weight[i] += root;
        w += weight[i];
        wv += weight[i] * value[i];
    }
    Lanes least = all(float_of(kInfinity)), best_scale = all(1.0f), best_offset = all(0.0f);
    for (int t = kFirst; t <= kLast; ++t) {
        // Quants are counted from the best offset so far, which the values between it and the largest then span.
        const Lanes factor = finite_or_zero((top + kTrialStep * static_cast<float>(t)) / (top - best_offset));
        const Lanes start = best_offset * factor;
        Lanes wq = all(0.0f), wqq = all(0.0f), wqv = all(0.0f);
        for (int i = 0; i < kGroup; ++i) {
            const Lanes quant = greater(lesser(rounded(value[i] * factor - start), all(top)), all(0.0f));
            const Lanes weighted = weight[i] * quant;
            wq += weighted;
            wqq += weighted * quant;
            wqv += weighted * value[i];
        }
        // Least squares of value = s * quant + offset, or of s alone where the offset would make a minimum above 0.
        const Lanes determinant = w * wqq - wq * wq;
        Lanes s = (w * wqv - wv * wq) / determinant;
        Lanes offset = (wqq * wv - wq * wqv) / determinant;
        s = offset > zero ? (wqv - zero * wq) / wqq : s;
        offset = lesser(offset, zero);
        const Lanes error = (s * (s * wqq - 2.0f * wqv) + offset * (offset * w - 2.0f * wv)) + 2.0f * s * offset * wq;
        const Mask better = (determinant > kDegenerate * (w * wqq)) & (error < least);
        least = better ? error : least;
        best_scale = better ? s : best_scale;
        best_offset = better ? offset : best_offset;
    }
    const Lanes unit = range / top;
    store(scale, greater(unit * best_scale, all(0.0f)));
    store(minimum, greater(0.0f - (low + unit * best_offset), all(0.0f)));
}

// The scales s of kLanes groups of kSmallGroup values each, such that x is about s * q with q in -32..31. Errors count
// by x squared.
inline void fit_around_zero(const float (*x)[kBatch], float* scale) {
    Lanes largest = load(x[0]);
    for (int i = 1; i < kSmallGroup; ++i) {
        const Lanes value = load(x[i]);
        largest = magnitude(value) > magnitude(largest) ? value : largest;
    }
    const Lanes inverse = finite_or_zero(-32.0f / largest);
    Lanes value[kSmallGroup], square[kSmallGroup], cube[kSmallGroup];  // in units of the largest / -32
    for (int i = 0; i < kSmallGroup; ++i) {
        value[i] = load(x[i]) * inverse;
        square[i] = value[i] * value[i];
        cube[i] = square[i] * value[i];
    }
    Lanes most = all(0.0f), best_scale = all(0.0f);
    for (int t = -9; t <= 9; ++t) {
        const float factor = 1.0f + static_cast<float>(t) * (kTrialStep / 32.0f);
        Lanes wqq = all(0.0f), wqv = all(0.0f);
        for (int i = 0; i < kSmallGroup; ++i) {
            const Lanes quant = greater(lesser(rounded(value[i] * factor), all(31.0f)), all(-32.0f));
            wqq += square[i] * quant * quant;
            wqv += cube[i] * quant;
        }
        // Least squares: s = wqv / wqq takes s * wqv off the error.
        const Lanes s = wqv / wqq;
        const Mask better = (wqq > all(0.0f)) & (wqv * wqv > most * wqq);
        most = better ? s * wqv : most;
        best_scale = better ? s : best_scale;
    }
    store(scale, best_scale * (largest / -32.0f));
}

// Whether a block can be scaled at all. Otherwise (a value that is no number, or too large) it becomes an infinite
// scale and zeros, which decode as NaN.
inline bool encodable(const float* values) { return largest_magnitude(values, kSuperValues) < kTooLarge; }

// x[i][g] is value i of group g; groups of a block that cannot be scaled are zeros.
template <int kSize>
inline void lay_in_lanes(const float* values, float (*x)[kBatch], int first_group) {
    const bool usable = encodable(values);
    for (int g = 0; g < kSuperValues / kSize; ++g) {
        for (int i = 0; i < kSize; ++i) x[i][first_group + g] = usable ? values[g * kSize + i] : 0.0f;
    }
}

inline float quant_of(float value, float inverse, float bottom, float top) {
    return greater(lesser(rounded(value * inverse), top), bottom);
}

// Six-bit numbers for the scales of a block's groups under one float16 scale, which is returned. They are counted in
// what float16 makes of it: for small weights it has few bits.
inline uint16_t six_bits(const float* values, uint8_t* numbers) {
    float largest = 0.0f;
    for (int g = 0; g < kGroups; ++g) largest = greater(values[g], largest);
    const uint16_t scale = half_from(largest / 63.0f);
    const float inverse = reciprocal(float_from_half(scale));
    for (int g = 0; g < kGroups; ++g) {
        numbers[g] = static_cast<uint8_t>(static_cast<int32_t>(quant_of(values[g], inverse, 0.0f, 63.0f)));
    }
    return scale;
}

// Scale, minimum and groups of a block from those of its groups, and its quants. False when a scale is beyond float16.
template <int kTop, typename Block>
inline bool fill_with_minimum(const float* values, const float* scales, const float* minima, Block& out,
                              uint8_t (*quants)[kGroup]) {
    uint8_t s[kGroups], m[kGroups];
    out.scale = six_bits(scales, s);
    out.minimum = six_bits(minima, m);
    if (out.scale >= kHalfInfinity || out.minimum >= kHalfInfinity) return false;
    for (int g = 0; g < 4; ++g) {
        out.groups[g] = static_cast<uint8_t>(s[g] | (s[g + 4] >> 4 << 6));
        out.groups[g + 4] = static_cast<uint8_t>(m[g] | (m[g + 4] >> 4 << 6));
        out.groups[g + 8] = static_cast<uint8_t>((s[g + 4] & 15) | ((m[g + 4] & 15) << 4));
    }
    const float scale = float_from_half(out.scale), minimum = float_from_half(out.minimum);
    for (int g = 0; g < kGroups; ++g, values += kGroup) {
        const float inverse = reciprocal(scale * static_cast<float>(s[g])), low = minimum * static_cast<float>(m[g]);
        for (int i = 0; i < kGroup; ++i) {
            quants[g][i] = static_cast<uint8_t>(static_cast<int32_t>(quant_of(values[i] + low, inverse, 0.0f, kTop)));
        }
    }
    return true;
}

inline void pack(BlockQ4_K& out, const uint8_t (*quants)[kGroup]) {
    for (int g = 0; g < kGroups; g += 2) {
        for (int i = 0; i < kGroup; ++i) {
            out.quants[g / 2 * kGroup + i] = static_cast<uint8_t>(quants[g][i] | (quants[g + 1][i] << 4));
        }
    }
}

inline void pack(BlockQ5_K& out, const uint8_t (*quants)[kGroup]) {
    for (int i = 0; i < kGroup; ++i) out.fifth[i] = 0;
    for (int g = 0; g < kGroups; g += 2) {
        for (int i = 0; i < kGroup; ++i) {
            const uint8_t low = quants[g][i], high = quants[g + 1][i];
            out.quants[g / 2 * kGroup + i] = static_cast<uint8_t>((low & 15) | ((high & 15) << 4));
            out.fifth[i] = static_cast<uint8_t>(out.fifth[i] | ((low >> 4) << g) | ((high >> 4) << (g + 1)));
        }
    }
}

// Two blocks at a time; an odd one at the end has zeros beside it.
template <int kTop, int kFirst, int kLast, typename Block>
inline void encode_with_minimum(const float* values, uint8_t* packed, size_t blocks) {
    constexpr size_t kTogether = kBatch / kGroups;
    Block* out = reinterpret_cast<Block*>(packed);
    float x[kGroup][kBatch] = {}, scales[kBatch], minima[kBatch];
    uint8_t quants[kGroups][kGroup];
    for (size_t b = 0; b < blocks; b += kTogether) {
        const int count = static_cast<int>(blocks - b < kTogether ? blocks - b : kTogether);
        for (int k = 0; k < count; ++k) lay_in_lanes<kGroup>(values + (b + k) * kSuperValues, x, k * kGroups);
        for (int lane = 0; lane < count * kGroups; lane += kLanes) {
            const float (*part)[kBatch] = reinterpret_cast<const float (*)[kBatch]>(&x[0][lane]);
            fit_with_minimum<kTop, kFirst, kLast>(part, scales + lane, minima + lane);
        }
        for (int k = 0; k < count; ++k) {
            const float *source = values + (b + k) * kSuperValues, *s = scales + k * kGroups, *m = minima + k * kGroups;
            Block& block = out[b + k];
            if (encodable(source) && fill_with_minimum<kTop>(source, s, m, block, quants)) {
                pack(block, quants);
            } else {
                __builtin_memset(&block, 0, sizeof block);
                block.scale = kHalfInfinity;
            }
        }
    }
}

inline bool fill_around_zero(const float* values, const float* scales, BlockQ6_K& out) {
    float largest = scales[0];
    for (int g = 1; g < kBatch; ++g) {
        const bool larger = (bits_of(scales[g]) & kMagnitude) > (bits_of(largest) & kMagnitude);
        largest = larger ? scales[g] : largest;
    }
    out.scale = half_from(largest / -128.0f + 0.0f);  // + 0: no -0 for zeros
    if ((out.scale & 0x7fffu) >= kHalfInfinity) return false;
    const float scale = float_from_half(out.scale), inverse = reciprocal(scale);
    uint8_t quants[kSuperValues];
    for (int g = 0; g < kBatch; ++g) {
        const float number = quant_of(scales[g], inverse, -128.0f, 127.0f);
        out.scales[g] = static_cast<int8_t>(static_cast<int32_t>(number));
        const float step = reciprocal(scale * number);
        for (int i = g * kSmallGroup; i < (g + 1) * kSmallGroup; ++i) {
            quants[i] = static_cast<uint8_t>(static_cast<int32_t>(quant_of(values[i], step, -32.0f, 31.0f)) + 32);
        }
    }
    for (int half = 0; half < 2; ++half) {
        const uint8_t* q = quants + 128 * half;
        for (int i = 0; i < 64; ++i) {
            out.low[64 * half + i] = static_cast<uint8_t>((q[i] & 15) | ((q[i + 64] & 15) << 4));
        }
        for (int i = 0; i < 32; ++i) {
            out.high[32 * half + i] = static_cast<uint8_t>((q[i] >> 4) | ((q[i + 32] >> 4) << 2) |
                                                           ((q[i + 64] >> 4) << 4) | ((q[i + 96] >> 4) << 6));
        }
    }
    return true;
}

// scale * quant - minimum of the groups of Q4_K and Q5_K.
template <typename Block>
inline void group_scales(const Block& in, float* scales, float* minima) {
    const float scale = float_from_half(in.scale), minimum = float_from_half(in.minimum);
    for (int g = 0; g < 4; ++g) {
        const uint8_t s = in.groups[g], m = in.groups[g + 4], rest = in.groups[g + 8];
        scales[g] = scale * static_cast<float>(s & 63);
        minima[g] = minimum * static_cast<float>(m & 63);
        scales[g + 4] = scale * static_cast<float>((rest & 15) | (s >> 6 << 4));
        minima[g + 4] = minimum * static_cast<float>((rest >> 4) | (m >> 6 << 4));
    }
}

}  // namespace

void encode_q4_k(const float* __restrict values, uint8_t* __restrict packed, size_t blocks) {
    encode_with_minimum<15, -10, 10, BlockQ4_K>(values, packed, blocks);
}

void encode_q5_k(const float* __restrict values, uint8_t* __restrict packed, size_t blocks) {
    encode_with_minimum<31, -5, 10, BlockQ5_K>(values, packed, blocks);
}

void encode_q6_k(const float* __restrict values, uint8_t* __restrict packed, size_t blocks) {
    BlockQ6_K* out = reinterpret_cast<BlockQ6_K*>(packed);
    float x[kSmallGroup][kBatch], scales[kBatch];
    for (size_t b = 0; b < blocks; ++b, values += kSuperValues) {
        lay_in_lanes<kSmallGroup>(values, x, 0);
        for (int lane = 0; lane < kBatch; lane += kLanes) {
            fit_around_zero(reinterpret_cast<const float (*)[kBatch]>(&x[0][lane]), scales + lane);
        }
        if (!encodable(values) || !fill_around_zero(values, scales, out[b])) {
            __builtin_memset(&out[b], 0, sizeof out[b]);
            out[b].scale = kHalfInfinity;
        }
    }
}

void decode_q4_k(const uint8_t* __restrict packed, float* __restrict values, size_t blocks) {
    const BlockQ4_K* __restrict in = reinterpret_cast<const BlockQ4_K*>(packed);
    float scales[kGroups], minima[kGroups];
    for (size_t b = 0; b < blocks; ++b) {
        group_scales(in[b], scales, minima);
        for (int g = 0; g < kGroups; g += 2, values += 2 * kGroup) {
            const uint8_t* quants = in[b].quants + g / 2 * kGroup;
            for (int i = 0; i < kGroup; ++i) {
                values[i] = scales[g] * static_cast<float>(quants[i] & 15) - minima[g];
                values[i + kGroup] = scales[g + 1] * static_cast<float>(quants[i] >> 4) - minima[g + 1];
            }
        }
    }
}

void decode_q5_k(const uint8_t* __restrict packed, float* __restrict values, size_t blocks) {
    const BlockQ5_K* __restrict in = reinterpret_cast<const BlockQ5_K*>(packed);
    float scales[kGroups], minima[kGroups];
    for (size_t b = 0; b < blocks; ++b) {
        group_scales(in[b], scales, minima);
        for (int g = 0; g < kGroups; g += 2, values += 2 * kGroup) {
            const uint8_t* quants = in[b].quants + g / 2 * kGroup;
            for (int i = 0; i < kGroup; ++i) {
                const int32_t low = (quants[i] & 15) | ((in[b].fifth[i] >> g & 1) << 4);
                const int32_t high = (quants[i] >> 4) | ((in[b].fifth[i] >> (g + 1) & 1) << 4);
                values[i] = scales[g] * static_cast<float>(low) - minima[g];
                values[i + kGroup] = scales[g + 1] * static_cast<float>(high) - minima[g + 1];
            }
        }
    }
}

void decode_q6_k(const uint8_t* __restrict packed, float* __restrict values, size_t blocks) {
    const BlockQ6_K* __restrict in = reinterpret_cast<const BlockQ6_K*>(packed);
    for (size_t b = 0; b < blocks; ++b) {
        const float scale = float_from_half(in[b].scale);
        for (int g = 0; g < kBatch; ++g, values += kSmallGroup) {
            const int half = g / 8, run = g % 8 / 2;  // of 128 values, and of 32 within them
            const uint8_t* low = in[b].low + 64 * half + run % 2 * 32 + g % 2 * kSmallGroup;
            const uint8_t* high = in[b].high + 32 * half + g % 2 * kSmallGroup;
            const float group_scale = scale * static_cast<float>(in[b].scales[g]);
            const int low_shift = run / 2 * 4, high_shift = run * 2;
            for (int i = 0; i < kSmallGroup; ++i) {
                const int32_t quant = (low[i] >> low_shift & 15) | ((high[i] >> high_shift & 3) << 4);
                values[i] = group_scale * static_cast<float>(quant - 32);
            }
        }
    }
}

}  // namespace STARSCOPE_ISA
}  // namespace starscope
