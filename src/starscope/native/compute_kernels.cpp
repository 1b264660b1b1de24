// The small steps between products, and how rows are prepared for them. Compiled once per instruction set; the rules of
// kernels.cpp hold: float32, sums in a fixed order (16 lanes, then halves), no library code.
#include "compute.h"
#include "linear_kernels.h"
#include "vectors.h"

#define STARSCOPE_TEXT_(x) #x
#define STARSCOPE_TEXT(x) STARSCOPE_TEXT_(x)

namespace starscope {
namespace STARSCOPE_ISA {
namespace {

constexpr int kLanes = 16;

inline float sum_of_lanes(const float* lanes) {
    float halves[kLanes];
    for (int i = 0; i < kLanes; ++i) halves[i] = lanes[i];
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) halves[i] += halves[i + width];
    }
    return halves[0];
}

void layer_norm(const float* __restrict x, size_t cols, float epsilon, const float* __restrict weight,
                const float* __restrict bias, float* __restrict y) {
    const size_t whole = cols / kLanes * kLanes;
    float lanes[kLanes] = {};
    for (size_t c = 0; c < whole; c += kLanes) {
        for (int i = 0; i < kLanes; ++i) lanes[i] += x[c + i];
    }
    for (size_t c = whole; c < cols; ++c) lanes[c - whole] += x[c];
    const float mean = sum_of_lanes(lanes) / static_cast<float>(cols);
    for (int i = 0; i < kLanes; ++i) lanes[i] = 0.0f;
    for (size_t c = 0; c < whole; c += kLanes) {
        for (int i = 0; i < kLanes; ++i) lanes[i] += (x[c + i] - mean) * (x[c + i] - mean);
    }
    for (size_t c = whole; c < cols; ++c) lanes[c - whole] += (x[c] - mean) * (x[c] - mean);
    const float variance = sum_of_lanes(lanes) / static_cast<float>(cols);
    const float inverse = 1.0f / __builtin_sqrtf(variance + epsilon);
    if (bias != nullptr) {
        for (size_t c = 0; c < cols; ++c) y[c] = (x[c] - mean) * inverse * weight[c] + bias[c];
    } else {
        for (size_t c = 0; c < cols; ++c) y[c] = (x[c] - mean) * inverse * weight[c];
    }
}

void add(const float* a, const float* b, float* y, size_t count) {
    for (size_t i = 0; i < count; ++i) y[i] = a[i] + b[i];
}

inline Lanes activated(Activation activation, Lanes x) {
    return activation == kGelu ? gelu(x) : activation == kGeluTanh ? gelu_tanh(x) : x;
}

// Fewer than sixteen numbers go through a whole vector of them.
inline Lanes load_some(const float* x, size_t count) {
    float all[kLanes] = {};
    for (size_t i = 0; i < count; ++i) all[i] = x[i];
    return from_floats(all);
}

inline void store_some(float* y, Lanes x, size_t count) {
    float all[kLanes];
    store(all, x);
    for (size_t i = 0; i < count; ++i) y[i] = all[i];
}

void activate(Activation activation, const float* x, float* y, size_t count) {
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(y + i, activated(activation, from_floats(x + i)));
    if (i < count) store_some(y + i, activated(activation, load_some(x + i, count - i)), count - i);
}

// scale = max|x| / 127; quant = x / scale to nearest, ties to even. What is not finite gives a scale that is not.
void prepare_int8(const PanelType& type, const float* x, size_t blocks, size_t row, size_t rows, uint8_t* tile) {
    int8_t* quants = reinterpret_cast<int8_t*>(tile) + row * 32;
    float* scales = reinterpret_cast<float*>(tile + blocks * rows * 32) + row;
    int32_t* starts = reinterpret_cast<int32_t*>(tile + blocks * rows * 36) + 2 * row;
    const int offset = weight_offset(type.type_id);
    const bool minima = type.type_id == kQ4_K || type.type_id == kQ5_K, halves = type.type_id == kQ6_K;
    for (size_t b = 0; b < blocks; ++b, x += 32, quants += rows * 32, scales += rows, starts += 2 * rows) {
        const float scale = float_of(largest_magnitude(x)) / 127.0f;
        const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
        const int32_t first = quantize(x, inverse, quants), second = quantize(x + 16, inverse, quants + 16);
        *scales = scale;
        if (minima) {
            starts[0] = static_cast<int32_t>(bits_of(scale * static_cast<float>(first + second)));
        } else if (halves) {
            starts[0] = -offset * first;
            starts[1] = -offset * second;
        } else {
            starts[0] = -offset * (first + second);
        }
    }
}

void prepare(const PanelType& type, const float* x, size_t cols, size_t row, size_t rows, uint8_t* tile) {
    if (!type.is_float) return prepare_int8(type, x, cols / 32, row, rows, tile);
    float* out = reinterpret_cast<float*>(tile) + row;
    for (size_t c = 0; c < cols; ++c) out[c * rows] = x[c];
}

void finish(const float* products, size_t panel_stride, size_t rows, size_t cols, const Epilogue& epilogue, float* out,
            size_t out_stride) {
    for (size_t first = 0; first < cols; first += kPanelRows, products += panel_stride) {
        const size_t n = cols - first < kPanelRows ? cols - first : kPanelRows;
        const Lanes bias = epilogue.bias != nullptr ? from_floats(epilogue.bias + first) : zeros();
        for (size_t r = 0; r < rows; ++r) {
            Lanes y = activated(epilogue.activation, plus(from_floats(products + r * kPanelRows), bias));
            float* to = out + r * out_stride + first;
            if (epilogue.residual != nullptr) {
                const float* residual = epilogue.residual + r * epilogue.residual_stride + first;
                y = plus(n == kPanelRows ? from_floats(residual) : load_some(residual, n), y);
            }
            n == kPanelRows ? store(to, y) : store_some(to, y, n);
        }
    }
}

}  // namespace

extern const ComputeKernels compute = {
    STARSCOPE_TEXT(STARSCOPE_ISA),
    layer_norm,
    add,
    activate,
    prepare,
    multiply,
    part_bytes,
    unpack,
    multiply_part,
    finish,
};

}  // namespace STARSCOPE_ISA
}  // namespace starscope
