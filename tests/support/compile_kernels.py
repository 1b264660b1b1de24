"""Compiles Triton's kernels for GPUs that are not here: `compile_kernels.py cuda:90 hip:gfx942`. Prints a line each.

In a process of its own: where Triton interprets kernels, it compiles none.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from starscope.engine.gpu import triton_kernels
from starscope.engine.gpu.products import MANY_ROWS, ONE_ROW, options
from starscope.engine.gpu.stored import LAYOUTS

TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int8: "*i8"}


def main() -> None:
    for name in sys.argv[1:]:
        backend, _, chip = name.partition(":")
        target = GPUTarget("cuda", int(chip), 32) if backend == "cuda" else GPUTarget("hip", chip, 64)
        way = "tf32x3" if backend == "cuda" else "ieee"
        for format_name, layout in LAYOUTS.items():
            quants = TYPES[layout["quants"].dtype]
            fields = {
                part: TYPES[layout[part].dtype] if part in layout else quants
                for part in ("quants", "high", "groups", "scale")
            }
            for kernel, tile in [(triton_kernels.one_row, ONE_ROW), (triton_kernels.many_rows, MANY_ROWS[way][-1])]:
                constants = options(format_name, tile, has_bias=True)
                numbers = {name: "i32" for name in ("n", "rows", "cols") if name in kernel.arg_names}
                types = {"x": "*fp32", **fields, "bias": "*fp32", "out": "*fp32", **numbers}
                settings = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
                source = ASTSource(
                    kernel, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants
                )
                made = triton.compile(source, target=target, options=settings)
                print(name, format_name, kernel.__name__, made.metadata.shared)


main()
