// What a program and its steps are checked for before they run: C++ may count on it from then on.
#pragma once

#include <stddef.h>

#include <string>
#include <vector>

#include "program.h"

namespace starscope {

// Raises Python's ValueError.
[[noreturn]] void refuse(const std::string& problem);
void expect(bool condition, const char* problem);

// A view of `cols` columns lies in its slot; `optional` ones may be absent.
void check_view(const View& view, size_t cols, const std::vector<size_t>& widths, bool optional = false);

// All numbers of an instruction are in range, and what it reads and writes lies in its slots.
void check_instruction(const Program& program, const Instruction& i, const std::vector<size_t>& widths);

// An attention's caches have its layer and its heads, all of one kind.
void check_caches(const Instruction& i, const std::vector<Sequence>& sequences);

void check_edits(const Instruction& i, const Step& step);

}  // namespace starscope
