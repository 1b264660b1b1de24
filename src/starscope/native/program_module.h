#pragma once

#include <nanobind/nanobind.h>

namespace starscope {

// Adds Program and what goes with it to the module.
void bind_program(nanobind::module_& m);

}  // namespace starscope
