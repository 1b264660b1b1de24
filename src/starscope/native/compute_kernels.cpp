// The small steps between products, and how rows are prepared for them. Compiled once per instruction set; the rules of
// kernels.cpp hold: float32, sums in a fixed order (16 lanes, then halves), no library code.
#include "compute.h"
#include "functions.h"
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

void rms_norm(const float* __restrict x, size_t cols, float epsilon, const float* __restrict weight,
              const float* __restrict bias, float* __restrict y) {
    const size_t whole = cols / kLanes * kLanes;
    float lanes[kLanes] = {};
    for (size_t c = 0; c < whole; c += kLanes) {
        for (int i = 0; i < kLanes; ++i) lanes[i] += x[c + i] * x[c + i];
    }
    for (size_t c = whole; c < cols; ++c) lanes[c - whole] += x[c] * x[c];
    const float inverse = 1.0f / __builtin_sqrtf(sum_of_lanes(lanes) / static_cast<float>(cols) + epsilon);
    if (bias != nullptr) {
        for (size_t c = 0; c < cols; ++c) y[c] = x[c] * inverse * weight[c] + bias[c];
    } else {
        for (size_t c = 0; c < cols; ++c) y[c] = x[c] * inverse * weight[c];
    }
}

void add(const float* a, const float* b, float* y, size_t count) {
    for (size_t i = 0; i < count; ++i) y[i] = a[i] + b[i];
}

void multiply_each(const float* a, const float* b, float* y, size_t count) {
    for (size_t i = 0; i < count; ++i) y[i] = a[i] * b[i];
}

inline Lanes activated(Activation activation, Lanes x) {
    switch (activation) {
        case kGelu:
            return gelu(x);
        case kGeluTanh:
            return gelu_tanh(x);
        case kSilu:
            return silu(x);
        default:
            return x;
    }
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

// Both halves of a pair are read before they are written: y may be x.
void rotate(const float* x, size_t heads, size_t dim, const float* turn, float* y) {
    const size_t half = dim / 2;
    for (size_t h = 0; h < heads; ++h, x += dim, y += dim) {
        for (size_t i = 0; i < half; i += kLanes) {
            const size_t n = half - i < kLanes ? half - i : kLanes;
            const bool whole = n == kLanes;
            const auto load = [&](const float* from) { return whole ? from_floats(from) : load_some(from, n); };
            const Lanes first = load(x + i), second = load(x + half + i);
            const Lanes cosine = load(turn + i), sine = load(turn + half + i);
            const Lanes a = minus(times(first, cosine), times(second, sine));
            const Lanes b = plus(times(second, cosine), times(first, sine));
            whole ? store(y + i, a) : store_some(y + i, a, n);
            whole ? store(y + half + i, b) : store_some(y + half + i, b, n);
        }
    }
}

// scale = max|x| / 127; quant = x / scale to nearest, ties to even. What is not finite gives a scale that is not.
// Block by block, so that what lies together is written together.
void prepare_int8(const PanelType& type, const float* const* x, size_t count, size_t blocks, size_t row, size_t rows,
                  uint8_t* tile) {
    int8_t* quants = reinterpret_cast<int8_t*>(tile) + row * 32;
    float* scales = reinterpret_cast<float*>(tile + blocks * rows * 32) + row;
    int32_t* starts = reinterpret_cast<int32_t*>(tile + blocks * rows * 36) + 2 * row;
    const int offset = weight_offset(type.type_id);
    const bool minima = type.type_id == kQ4_K || type.type_id == kQ5_K, halves = type.type_id == kQ6_K;
    for (size_t b = 0; b < blocks; ++b, quants += rows * 32, scales += rows, starts += 2 * rows) {
        for (size_t r = 0; r < count; ++r) {
            const float* values = x[r] + 32 * b;
            const float scale = float_of(largest_magnitude(values)) / 127.0f;
            const HalfSums sums = quantize(values, scale == 0.0f ? 0.0f : 1.0f / scale, quants + 32 * r);
            scales[r] = scale;
            if (minima) {
                starts[2 * r] = static_cast<int32_t>(bits_of(scale * static_cast<float>(sums.first + sums.second)));
            } else if (halves) {
                starts[2 * r] = -offset * sums.first;
                starts[2 * r + 1] = -offset * sums.second;
            } else {
                starts[2 * r] = -offset * (sums.first + sums.second);
            }
        }
    }
}

void prepare_floats(const float* const* x, size_t count, size_t cols, size_t row, size_t rows, float* tile) {
    const size_t fours = cols / 4 * 4;
    size_t r = 0;
    for (; r + 4 <= count; r += 4) {
        float* out = tile + row + r;
        for (size_t c = 0; c < fours; c += 4) transpose(x + r, c, out + c * rows, rows);
        for (size_t c = fours; c < cols; ++c) {
            for (size_t i = 0; i < 4; ++i) out[c * rows + i] = x[r + i][c];
        }
    }
    for (; r < count; ++r) {
        for (size_t c = 0; c < cols; ++c) tile[c * rows + row + r] = x[r][c];
    }
}

void prepare(const PanelType& type, const float* const* x, size_t count, size_t cols, size_t row, size_t rows,
             uint8_t* tile) {
    if (type.is_float) {
        prepare_floats(x, count, cols, row, rows, reinterpret_cast<float*>(tile));
    } else {
        prepare_int8(type, x, count, cols / 32, row, rows, tile);
    }
}

template <bool kGated>
void finish_panels(const float* products, size_t panel_stride, size_t rows, size_t cols, const Epilogue& epilogue,
                   float* out, size_t out_stride) {
    const float* gates = epilogue.gate;
    for (size_t first = 0; first < cols;
         first += kPanelRows, products += panel_stride, gates += kGated ? panel_stride : 0) {
        const size_t n = cols - first < kPanelRows ? cols - first : kPanelRows;
        const Lanes bias = epilogue.bias != nullptr ? from_floats(epilogue.bias + first) : zeros();
        const Lanes gate_bias =
            kGated && epilogue.gate_bias != nullptr ? from_floats(epilogue.gate_bias + first) : zeros();
        for (size_t r = 0; r < rows; ++r) {
            Lanes y = plus(from_floats(products + r * kPanelRows), bias);
            if (kGated) {
                const Lanes gate = plus(from_floats(gates + r * kPanelRows), gate_bias);
                y = times(activated(epilogue.activation, gate), y);
            } else {
                y = activated(epilogue.activation, y);
            }
            float* to = out + r * out_stride + first;
            if (epilogue.residual != nullptr) {
                const float* residual = epilogue.residual + r * epilogue.residual_stride + first;
                y = plus(n == kPanelRows ? from_floats(residual) : load_some(residual, n), y);
            }
            n == kPanelRows ? store(to, y) : store_some(to, y, n);
        }
    }
}

void finish(const float* products, size_t panel_stride, size_t rows, size_t cols, const Epilogue& epilogue, float* out,
            size_t out_stride) {
    const auto run = epilogue.gate != nullptr ? finish_panels<true> : finish_panels<false>;
    run(products, panel_stride, rows, cols, epilogue, out, out_stride);
}

}  // namespace

extern const ComputeKernels compute = {
    STARSCOPE_TEXT(STARSCOPE_ISA),
    layer_norm,
    rms_norm,
    add,
    multiply_each,
    rotate,
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
