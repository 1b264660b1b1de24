// Products of int8 rows with quantized panels, and of float rows with float panels. Compiled once per instruction set:
// what differs between them is how 16 float sums are held (Lanes), how a block's quants are unpacked and how four bytes
// are multiplied at a time; the loops over blocks, rows and panels are the same for all.
#include "linear_kernels.h"

#include "vectors.h"

namespace starscope {
namespace STARSCOPE_ISA {
namespace {

// A tile of `stride` rows as `prepare` leaves it, from row `first` and block `from` on.
struct Rows {
    const int8_t* quants;
    const float* scales;
    const int32_t* starts;
    const size_t stride;

    Rows(const uint8_t* tile, size_t blocks, size_t stride, size_t first, size_t from = 0)
        : quants(reinterpret_cast<const int8_t*>(tile) + (from * stride + first) * 32),
          scales(reinterpret_cast<const float*>(tile + blocks * stride * 32) + from * stride + first),
          starts(reinterpret_cast<const int32_t*>(tile + blocks * stride * 36) + 2 * (from * stride + first)),
          stride(stride) {}

    int32_t word(size_t block, int row, int j) const { return load32(quants + (block * stride + row) * 32 + 4 * j); }
    float scale(size_t block, int row) const { return scales[block * stride + row]; }
    int32_t start(size_t block, int row, int half) const { return starts[2 * (block * stride + row) + half]; }
    float weighted(size_t block, int row) const { return float_of(static_cast<uint32_t>(start(block, row, 0))); }
};

// How each type lies in a group of `n` blocks: `quants(j)` gives vector j of block b, `scale` the block's 16 scales.
struct Q4_0 {
    static constexpr bool kWide = false;
    static constexpr size_t kGroup = 8 * (32 + 256);
    static constexpr bool kMinima = false;
    static constexpr int kHalves = 1;
    const uint8_t *scales, *nibbles;
    Q4_0(const uint8_t* group, size_t n) : scales(group), nibbles(group + 32 * n) {}
    Lanes scale(size_t b, int) const { return from_halves(scales + 32 * b); }
    Lanes minimum(size_t) const { return zeros(); }
    Quants quants(size_t b, int j) const { return nibble(nibbles + 256 * b, j); }
};

struct Q8_0 {
    static constexpr bool kWide = true;  // quants take all 8 bits: there is nothing to unpack
    static constexpr size_t kGroup = 8 * (32 + 512);
    static constexpr bool kMinima = false;
    static constexpr int kHalves = 1;
    const uint8_t *scales, *bytes;
    Q8_0(const uint8_t* group, size_t n) : scales(group), bytes(group + 32 * n) {}
    Lanes scale(size_t b, int) const { return from_halves(scales + 32 * b); }
    Lanes minimum(size_t) const { return zeros(); }
    Quants quants(size_t b, int j) const { return load_quants(bytes + 512 * b + 64 * j); }
};

struct Q4_K {
    static constexpr bool kWide = false;
    static constexpr size_t kGroup = 2368;
    static constexpr bool kMinima = true;
    static constexpr int kHalves = 1;
    const uint8_t* group;
    const Lanes d, dmin;
    Q4_K(const uint8_t* at, size_t) : group(at), d(from_halves(at)), dmin(from_halves(at + 32)) {}
    Lanes scale(size_t b, int) const { return times(d, from_uint8(group + 64 + 16 * b)); }
    Lanes minimum(size_t b) const { return times(dmin, from_uint8(group + 192 + 16 * b)); }
    Quants quants(size_t b, int j) const { return nibble(group + 320 + 256 * b, j); }
};

struct Q5_K {
    static constexpr bool kWide = false;
    static constexpr size_t kGroup = 2880;
    static constexpr bool kMinima = true;
    static constexpr int kHalves = 1;
    const uint8_t* group;
    const Lanes d, dmin;
    Q5_K(const uint8_t* at, size_t) : group(at), d(from_halves(at)), dmin(from_halves(at + 32)) {}
    Lanes scale(size_t b, int) const { return times(d, from_uint8(group + 64 + 16 * b)); }
    Lanes minimum(size_t b) const { return times(dmin, from_uint8(group + 192 + 16 * b)); }
    Quants quants(size_t b, int j) const {
        const uint8_t* block = group + 320 + 320 * b;
        return with_fifth_bit(nibble(block, j), block + 256, j);
    }
};

struct Q6_K {
    static constexpr bool kWide = false;
    static constexpr size_t kGroup = 3392;
    static constexpr bool kMinima = false;
    static constexpr int kHalves = 2;  // a scale for 16 columns
    const uint8_t* group;
    const Lanes d;
    Q6_K(const uint8_t* at, size_t) : group(at), d(from_halves(at)) {}
    Lanes scale(size_t b, int half) const { return times(d, from_int8(group + 32 + 32 * b + 16 * half)); }
    Lanes minimum(size_t) const { return zeros(); }
    Quants quants(size_t b, int j) const {
        const uint8_t* block = group + 320 + 384 * b;
        return with_upper_bits(nibble(block, j), block + 256 + 64 * (j / 4), j % 4);
    }
};

// A panel of any of these types once more, unpacked for many rows: bytes [blocks][512] in the order of `quants`, then
// float scales [blocks][halves][16], then float minima [blocks][16].
template <typename W>
struct Unpacked {
    static constexpr bool kWide = W::kWide;
    static constexpr bool kMinima = W::kMinima;
    static constexpr int kHalves = W::kHalves;
    static constexpr size_t kGroup = 8 * 512;
    static constexpr size_t bytes(size_t blocks) { return blocks * (512 + 64 * (kHalves + (kMinima ? 1 : 0))); }
    const uint8_t* quant_bytes;
    const float *scales, *minima;
    Unpacked(const uint8_t* panel, size_t blocks)
        : quant_bytes(panel),
          scales(reinterpret_cast<const float*>(panel + 512 * blocks)),
          minima(scales + 16 * kHalves * blocks) {}
    Lanes scale(size_t b, int half) const { return from_floats(scales + 16 * (kHalves * b + half)); }
    Lanes minimum(size_t b) const { return from_floats(minima + 16 * b); }
    Quants quants(size_t b, int j) const { return load_quants(quant_bytes + 512 * b + 64 * j); }
};

// Blocks first .. first+count-1 of a panel; `first` begins a group.
template <typename W>
const uint8_t* unpack(const uint8_t* panel, size_t first, size_t count, size_t blocks, uint8_t* out) {
    float* scales = reinterpret_cast<float*>(out + 512 * count);
    float* minima = scales + 16 * W::kHalves * count;
    uint8_t* bytes = out;
    panel += first / kGroupBlocks * W::kGroup;
    for (size_t g = first; g < first + count; g += kGroupBlocks, panel += W::kGroup) {
        const W w(panel, blocks - g < kGroupBlocks ? blocks - g : kGroupBlocks);
        const size_t n = first + count - g < kGroupBlocks ? first + count - g : kGroupBlocks;
        for (size_t b = 0; b < n; ++b, bytes += 512) {
            UNROLL for (int j = 0; j < 8; ++j) store_quants(bytes + 64 * j, w.quants(b, j));
            for (int half = 0; half < W::kHalves; ++half, scales += 16) store(scales, w.scale(b, half));
            if (W::kMinima) store(minima + 16 * (g - first + b), w.minimum(b));
        }
    }
    return out;
}

// Integer sums of vectors kFirst .. kFirst+kCount-1 of a block with M rows.
template <int M, int kFirst, int kCount, typename W>
inline void dot_products(const W& w, size_t b, size_t block, const Rows& rows, int half, Sums* dot) {
    UNROLL for (int r = 0; r < M; ++r) dot[r] = begin_sums(W::kMinima ? 0 : rows.start(block, r, half));
    UNROLL for (int j = kFirst; j < kFirst + kCount; ++j) {
        const Quants q = w.quants(b, j);
        UNROLL for (int r = 0; r < M; ++r) dot[r] = add_products<W::kWide>(dot[r], q, rows.word(block, r, j));
    }
}

// One block of one panel times M rows, added to their sums.
template <typename W, int M>
inline void add_block(const W& w, size_t b, size_t block, const Rows& rows, Lanes* sums) {
    Sums dot[M];
    if constexpr (W::kHalves == 1) {
        dot_products<M, 0, 8>(w, b, block, rows, 0, dot);
        const Lanes scale = w.scale(b, 0);
        UNROLL for (int r = 0; r < M; ++r) {
            sums[r] = plus_product(sums[r], times(to_floats(dot[r]), scale), repeated(rows.scale(block, r)));
        }
    } else {
        Lanes part[M];
        dot_products<M, 0, 4>(w, b, block, rows, 0, dot);
        const Lanes first = w.scale(b, 0), second = w.scale(b, 1);
        UNROLL for (int r = 0; r < M; ++r) part[r] = times(to_floats(dot[r]), first);
        dot_products<M, 4, 4>(w, b, block, rows, 1, dot);
        UNROLL for (int r = 0; r < M; ++r) {
            const Lanes both = plus_product(part[r], to_floats(dot[r]), second);
            sums[r] = plus_product(sums[r], both, repeated(rows.scale(block, r)));
        }
    }
    if constexpr (W::kMinima) {
        const Lanes minimum = w.minimum(b);
        UNROLL for (int r = 0; r < M; ++r) {
            sums[r] = minus_product(sums[r], minimum, repeated(rows.weighted(block, r)));
        }
    }
}

template <typename W, int M>
void unpacked_rows(const uint8_t* part, size_t blocks, const Rows& rows, bool goes_on, float* products) {
    const Unpacked<W> w(part, blocks);
    Lanes sums[M];
    UNROLL for (int r = 0; r < M; ++r) sums[r] = goes_on ? from_floats(products + r * kPanelRows) : zeros();
    for (size_t b = 0; b < blocks; ++b) add_block<Unpacked<W>, M>(w, b, b, rows, sums);
    UNROLL for (int r = 0; r < M; ++r) store(products + r * kPanelRows, sums[r]);
}

template <typename W, int M>
void quantized_rows(const uint8_t* panel, size_t blocks, const Rows& rows, bool goes_on, float* products) {
    Lanes sums[M];
    UNROLL for (int r = 0; r < M; ++r) sums[r] = goes_on ? from_floats(products + r * kPanelRows) : zeros();
    const size_t groups = blocks / kGroupBlocks;
    for (size_t g = 0; g < groups; ++g, panel += W::kGroup) {
        const W w(panel, kGroupBlocks);
        for (size_t b = 0; b < kGroupBlocks; ++b) {
            add_block<W, M>(w, b, g * kGroupBlocks + b, rows, sums);
        }
    }
    if (groups * kGroupBlocks < blocks) {
        const W w(panel, blocks - groups * kGroupBlocks);
        for (size_t b = groups * kGroupBlocks; b < blocks; ++b) {
            add_block<W, M>(w, b - groups * kGroupBlocks, b, rows, sums);
        }
    }
    UNROLL for (int r = 0; r < M; ++r) store(products + r * kPanelRows, sums[r]);
}

struct F32 {
    static constexpr size_t kBytes = 64;
    static Lanes load(const uint8_t* at) { return from_floats(at); }
};
struct F16 {
    static constexpr size_t kBytes = 32;
    static Lanes load(const uint8_t* at) { return from_halves(at); }
};
struct BF16 {
    static constexpr size_t kBytes = 32;
    static Lanes load(const uint8_t* at) { return from_bfloats(at); }
};

// P panels at once, so that a single row has P sums that do not wait for one another.
template <typename W, int M, int P>
void float_rows(const uint8_t* panel, size_t panel_bytes, size_t cols, const float* values, size_t stride, bool goes_on,
                float* products, size_t product_stride) {
    Lanes sums[P][M];
    UNROLL for (int p = 0; p < P; ++p) {
        UNROLL for (int r = 0; r < M; ++r) {
            sums[p][r] = goes_on ? from_floats(products + p * product_stride + r * kPanelRows) : zeros();
        }
    }
    for (size_t c = 0; c < cols; ++c, values += stride) {
        Lanes w[P];
        UNROLL for (int p = 0; p < P; ++p) w[p] = W::load(panel + p * panel_bytes + c * W::kBytes);
        UNROLL for (int r = 0; r < M; ++r) {
            const Lanes x = repeated(values[r]);
            UNROLL for (int p = 0; p < P; ++p) sums[p][r] = plus_product(sums[p][r], w[p], x);
        }
    }
    UNROLL for (int p = 0; p < P; ++p) {
        UNROLL for (int r = 0; r < M; ++r) store(products + p * product_stride + r * kPanelRows, sums[p][r]);
    }
}

// Calls run<M>() with the largest M of a few that is not above `rows`, and returns it.
template <typename Run>
inline size_t with_rows(size_t rows, const Run& run) {
    if constexpr (kMostRows >= 12) {
        if (rows >= 12) return run.template operator()<12>(), 12;
    }
    if constexpr (kMostRows >= 8) {
        if (rows >= 8) return run.template operator()<8>(), 8;
        if (rows >= 6) return run.template operator()<6>(), 6;
    }
    if constexpr (kMostRows >= 4) {
        if (rows >= 4) return run.template operator()<4>(), 4;
        if (rows >= 3) return run.template operator()<3>(), 3;
        if (rows >= 2) return run.template operator()<2>(), 2;
    }
    return run.template operator()<1>(), 1;
}

template <typename W>
void multiply_quantized(const uint8_t* panel, size_t blocks, const uint8_t* tile, size_t rows, float* products) {
    for (size_t r = 0; r < rows;) {
        r += with_rows(rows - r, [&]<int M>() {
            quantized_rows<W, M>(panel, blocks, Rows(tile, blocks, rows, r), false, products + r * kPanelRows);
        });
    }
}

template <typename W>
void multiply_quantized_part(const uint8_t* part, size_t first, size_t count, size_t blocks, const uint8_t* tile,
                             size_t rows, float* products) {
    for (size_t r = 0; r < rows;) {
        r += with_rows(rows - r, [&]<int M>() {
            const Rows from(tile, blocks, rows, r, first);
            if constexpr (W::kWide) {
                quantized_rows<W, M>(part, count, from, first > 0, products + r * kPanelRows);
            } else {
                unpacked_rows<W, M>(part, count, from, first > 0, products + r * kPanelRows);
            }
        });
    }
}

template <typename W>
void multiply_floats_part(const uint8_t* part, size_t first, size_t count, const uint8_t* tile, size_t rows,
                          float* products) {
    const float* values = reinterpret_cast<const float*>(tile) + first * rows;
    for (size_t r = 0; r < rows;) {
        r += with_rows(rows - r, [&]<int M>() {
            float_rows<W, M, 1>(part, 0, count, values + r, rows, first > 0, products + r * kPanelRows, 0);
        });
    }
}

template <typename W>
void multiply_floats(const uint8_t* panel, size_t panel_bytes, size_t panels, size_t cols, const uint8_t* tile,
                     size_t rows, float* products) {
    const float* values = reinterpret_cast<const float*>(tile);
    const size_t stride = rows * kPanelRows;
    size_t p = 0;
    for (; rows == 1 && p + 4 <= panels; p += 4) {
        float_rows<W, 1, 4>(panel + p * panel_bytes, panel_bytes, cols, values, 1, false, products + p * stride,
                            stride);
    }
    for (; p < panels; ++p) {
        multiply_floats_part<W>(panel + p * panel_bytes, 0, cols, tile, rows, products + p * stride);
    }
}

}  // namespace

int weight_offset(int type_id) {
    switch (type_id) {
        case kQ4_0:
            return 8;
        case kQ8_0:
            return kSignedBytes ? 0 : 128;
        case kQ6_K:
            return 32;
        default:
            return 0;
    }
}

void multiply(const PanelType& type, const uint8_t* panel, size_t panel_bytes, size_t panels, size_t cols,
              const uint8_t* tile, size_t rows, float* products) {
    switch (type.type_id) {
        case kF32:
            return multiply_floats<F32>(panel, panel_bytes, panels, cols, tile, rows, products);
        case kF16:
            return multiply_floats<F16>(panel, panel_bytes, panels, cols, tile, rows, products);
        case kBF16:
            return multiply_floats<BF16>(panel, panel_bytes, panels, cols, tile, rows, products);
        default:
            break;
    }
    const size_t blocks = cols / 32;
    for (size_t p = 0; p < panels; ++p, panel += panel_bytes, products += rows * kPanelRows) {
        switch (type.type_id) {
            case kQ4_0:
                multiply_quantized<Q4_0>(panel, blocks, tile, rows, products);
                break;
            case kQ8_0:
                multiply_quantized<Q8_0>(panel, blocks, tile, rows, products);
                break;
            case kQ4_K:
                multiply_quantized<Q4_K>(panel, blocks, tile, rows, products);
                break;
            case kQ5_K:
                multiply_quantized<Q5_K>(panel, blocks, tile, rows, products);
                break;
            case kQ6_K:
                multiply_quantized<Q6_K>(panel, blocks, tile, rows, products);
                break;
        }
    }
}

size_t part_bytes(const PanelType& type, size_t cols) {
    const size_t blocks = cols / 32;
    switch (type.type_id) {
        case kQ4_0:
            return Unpacked<Q4_0>::bytes(blocks);
        case kQ4_K:
        case kQ5_K:
            return Unpacked<Q4_K>::bytes(blocks);
        case kQ6_K:
            return Unpacked<Q6_K>::bytes(blocks);
        default:
            return 0;
    }
}

const uint8_t* unpack(const PanelType& type, const uint8_t* panel, size_t first, size_t count, size_t cols,
                      uint8_t* part) {
    if (type.is_float) return panel + first * type.group_bytes;
    if (type.type_id == kQ8_0) return panel + first / 32 / kGroupBlocks * type.group_bytes;  // bytes already
    const size_t from = first / 32, blocks = count / 32, all = cols / 32;
    switch (type.type_id) {
        case kQ4_0:
            return unpack<Q4_0>(panel, from, blocks, all, part);
        case kQ4_K:
            return unpack<Q4_K>(panel, from, blocks, all, part);
        case kQ5_K:
            return unpack<Q5_K>(panel, from, blocks, all, part);
        default:
            return unpack<Q6_K>(panel, from, blocks, all, part);
    }
}

void multiply_part(const PanelType& type, const uint8_t* part, size_t first, size_t count, size_t cols,
                   const uint8_t* tile, size_t rows, float* products) {
    switch (type.type_id) {
        case kF32:
            return multiply_floats_part<F32>(part, first, count, tile, rows, products);
        case kF16:
            return multiply_floats_part<F16>(part, first, count, tile, rows, products);
        case kBF16:
            return multiply_floats_part<BF16>(part, first, count, tile, rows, products);
        default:
            break;
    }
    const size_t from = first / 32, blocks = count / 32, all = cols / 32;
    switch (type.type_id) {
        case kQ4_0:
            return multiply_quantized_part<Q4_0>(part, from, blocks, all, tile, rows, products);
        case kQ8_0:
            return multiply_quantized_part<Q8_0>(part, from, blocks, all, tile, rows, products);
        case kQ4_K:
            return multiply_quantized_part<Q4_K>(part, from, blocks, all, tile, rows, products);
        case kQ5_K:
            return multiply_quantized_part<Q5_K>(part, from, blocks, all, tile, rows, products);
        default:
            return multiply_quantized_part<Q6_K>(part, from, blocks, all, tile, rows, products);
    }
}

}  // namespace STARSCOPE_ISA
}  // namespace starscope
