// The small steps between products, and how rows are prepared for them. Compiled once per instruction set; the rules of
// kernels.cpp hold: float32, sums in a fixed order (16 lanes, then halves), no library code.
#include "compute.h"

#include "elementwise.h"
#include "linear_kernels.h"

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

void activate(Activation activation, const float* x, float* y, size_t count) {
    if (activation == kGelu) {
        for (size_t i = 0; i < count; ++i) y[i] = gelu(x[i]);
    } else if (activation == kGeluTanh) {
        for (size_t i = 0; i < count; ++i) y[i] = gelu_tanh(x[i]);
    } else if (x != y) {
        for (size_t i = 0; i < count; ++i) y[i] = x[i];
    }
}

// scale = max|x| / 127; quant = x / scale to nearest, ties to even. What is not finite gives a scale that is not.
void prepare_int8(const PanelType& type, const float* __restrict x, size_t blocks, size_t row, size_t rows,
                  uint8_t* tile) {
    int8_t* quants = reinterpret_cast<int8_t*>(tile);
    float* scales = reinterpret_cast<float*>(quants + blocks * rows * 32);
    int32_t* starts = reinterpret_cast<int32_t*>(scales + blocks * rows);
    const int offset = weight_offset(type.type_id);
    const bool minima = type.type_id == kQ4_K || type.type_id == kQ5_K;
    for (size_t b = 0; b < blocks; ++b, x += 32) {
        uint32_t largest = 0;
        for (int i = 0; i < 32; ++i) {
            const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        const float scale = float_of(largest) / 127.0f;
        const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
        int8_t* __restrict out = quants + (b * rows + row) * 32;
        int32_t sums[2] = {0, 0};
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 16; ++i) {
                const float scaled = maximum(-127.0f, minimum(127.0f, x[16 * half + i] * inverse));
                const int32_t quant = static_cast<int32_t>(bits_of(scaled + kRounder) - bits_of(kRounder));
                out[16 * half + i] = static_cast<int8_t>(quant);
                sums[half] += static_cast<int8_t>(quant);
            }
        }
        const size_t at = b * rows + row;
        scales[at] = scale;
        if (minima) {
            const float weighted = scale * static_cast<float>(sums[0] + sums[1]);
            starts[2 * at] = static_cast<int32_t>(bits_of(weighted));
        } else if (type.type_id == kQ6_K) {
            starts[2 * at] = -offset * sums[0];
            starts[2 * at + 1] = -offset * sums[1];
        } else {
            starts[2 * at] = -offset * (sums[0] + sums[1]);
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
        for (size_t r = 0; r < rows; ++r) {
            float y[kPanelRows];
            for (size_t c = 0; c < kPanelRows; ++c) y[c] = products[r * kPanelRows + c];
            if (epilogue.bias != nullptr) {
                for (size_t c = 0; c < kPanelRows; ++c) y[c] += epilogue.bias[first + c];
            }
            activate(epilogue.activation, y, y, kPanelRows);
            float* to = out + r * out_stride + first;
            if (epilogue.residual != nullptr) {
                const float* residual = epilogue.residual + r * epilogue.residual_stride + first;
                for (size_t c = 0; c < n; ++c) to[c] = residual[c] + y[c];
            } else {
                for (size_t c = 0; c < n; ++c) to[c] = y[c];
            }
        }
    }
}

uint64_t read(const uint64_t* words, size_t count) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; ++i) sum += words[i];
    return sum;
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
    read,
};

}  // namespace STARSCOPE_ISA
}  // namespace starscope
