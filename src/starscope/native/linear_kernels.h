// Products of prepared rows with panels of weights, and what they want the rows to make up for.
#pragma once

#include "compute.h"

namespace starscope {
namespace STARSCOPE_ISA {

// What this instruction set has added to the weights' quants of a type when it multiplies them.
int weight_offset(int type_id);

void multiply(const PanelType& type, const uint8_t* panel, size_t panel_bytes, size_t panels, size_t cols,
              const uint8_t* tile, size_t rows, float* products);

size_t part_bytes(const PanelType& type, size_t cols);
const uint8_t* unpack(const PanelType& type, const uint8_t* panel, size_t first, size_t count, size_t cols,
                      uint8_t* part);
void multiply_part(const PanelType& type, const uint8_t* part, size_t first, size_t count, size_t cols,
                   const uint8_t* tile, size_t rows, float* products);

}  // namespace STARSCOPE_ISA
}  // namespace starscope
