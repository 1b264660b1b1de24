// The cache of one sequence: keys and values of every block, laid out for attention (attention.h says how).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "attention.h"
#include "memory.h"

namespace starscope {

// Keys and values of one sequence in every block. Memory is taken as positions are written to.
struct KeyValues {
    CacheShape shape;
    size_t layers, capacity;
    Memory memory;

    KeyValues(CacheShape shape, size_t layers, size_t context_length)
        : shape(shape),
          layers(layers),
          capacity((context_length + kTileKeys - 1) / kTileKeys * kTileKeys),
          memory(layers * layer_bytes()) {}

    size_t layer_bytes() const { return shape.kv_heads * (shape.key_bytes(capacity) + shape.value_bytes(capacity)); }
    uint8_t* keys(size_t layer) { return memory.data() + layer * layer_bytes(); }
    uint8_t* values(size_t layer) { return keys(layer) + shape.kv_heads * shape.key_bytes(capacity); }

    // Positions start .. stop-1 of a layer's keys, or of its values, as float32 [kv_heads][stop - start][dim]. What is
    // written is rounded to the cache's type.
    void read(size_t layer, bool is_key, size_t start, size_t stop, float* to);
    void write(size_t layer, bool is_key, size_t start, size_t stop, const float* from);
};

// To the nearest float16, in place.
void round_to_half(float* values, size_t count);

}  // namespace starscope
