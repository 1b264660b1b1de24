#include "key_values.h"

#define STARSCOPE_ISA plain  // whoever looks into a cache waits for nothing else
#include "numbers.h"

namespace starscope {
namespace {

using plain::float_from_half;
using plain::half_from;

inline void convert(uint16_t from, float& to) { to = float_from_half(from); }
inline void convert(float from, uint16_t& to) { to = half_from(from); }
inline void convert(float from, float& to) { to = from; }

// Where one key head's elements are; kPair dims of a key, and positions of a value, lie side by side.
template <typename Element, size_t kPair>
struct Layout {
    Element* base;
    size_t dims;  // of a key, or columns of a value
    bool is_key;

    Element& at(size_t position, size_t d) const {
        if (!is_key) return base[position / kPair * kPair * dims + d * kPair + position % kPair];
        return base[position / 16 * 16 * dims + d / kPair * kPair * 16 + position % 16 * kPair + d % kPair];
    }
};

// Calls f(element, its index in an array [kv_heads][stop - start][dim]).
template <typename Element, size_t kPair, typename F>
void each(KeyValues& cache, size_t layer, bool is_key, size_t start, size_t stop, F f) {
    const CacheShape& shape = cache.shape;
    const size_t dim = shape.dim, keys = kPair == 2 ? shape.even_dim() : dim;
    for (int head = 0; head < shape.kv_heads; ++head) {
        uint8_t* base = is_key ? cache.keys(layer) + head * shape.key_bytes(cache.capacity)
                               : cache.values(layer) + head * shape.value_bytes(cache.capacity);
        const Layout<Element, kPair> layout{reinterpret_cast<Element*>(base), is_key ? keys : shape.padded_dim(),
                                            is_key};
        size_t index = head * (stop - start) * dim;
        for (size_t position = start; position < stop; ++position) {
            for (size_t d = 0; d < dim; ++d) f(layout.at(position, d), index++);
        }
    }
}

}  // namespace

void KeyValues::read(size_t layer, bool is_key, size_t start, size_t stop, float* to) {
    const auto take = [to](auto& element, size_t index) { convert(element, to[index]); };
    if (shape.half) {
        each<uint16_t, 2>(*this, layer, is_key, start, stop, take);
    } else {
        each<float, 1>(*this, layer, is_key, start, stop, take);
    }
}

void KeyValues::write(size_t layer, bool is_key, size_t start, size_t stop, const float* from) {
    const auto put = [from](auto& element, size_t index) { convert(from[index], element); };
    if (shape.half) {
        each<uint16_t, 2>(*this, layer, is_key, start, stop, put);
    } else {
        each<float, 1>(*this, layer, is_key, start, stop, put);
    }
}

void round_to_half(float* values, size_t count) {
    for (size_t i = 0; i < count; ++i) values[i] = float_from_half(half_from(values[i]));
}

}  // namespace starscope
