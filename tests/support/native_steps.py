"""The native program run one instruction at a time, each held against its NumPy definition on the very same input.

So a rounding that falls the other way, which changes all that follows, is never between the two.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from starscope.engine import numpy_engine
from starscope.engine.base import input_values, make_batch
from starscope.engine.native_engine import NativeEngine
from starscope.formats import INTEGER_FORMATS, round_activation
from support import rounding
from support.stored import distance

SUMS = 2e-6  # of float32 products, a few hundred to a sum; relative to the largest of the result
ROUNDING = 2.0**-22  # of a few float32 operations
WEIGHT = 2.0**-8  # by how much two roundings of one weight to bfloat16 can differ


class Steps:
    """An engine's program with all its slots in sight."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine, self.compiled, self.kinds = engine, engine._plain.compiled, engine._module.kinds
        self.widths = self.compiled.widths
        self.code = engine._program.compile(self.compiled.instructions, self.widths, len(self.widths))
        self.matrices = {number: name for name, number in engine._matrices.items()}
        self.vectors = {number: name for name, number in engine._vectors.items()}

    def check(self, prompts: list[list[int]], wanted: Any = "last") -> None:
        """One step of all prompts from their beginnings."""
        engine, batch = self.engine, make_batch(self.engine, prompts, None, wanted)
        known, _ = input_values(engine.graph, batch)
        self.rows, self.wanted, self.lengths = len(batch.positions), batch.wanted, batch.lengths
        self.arrays = [np.full((self.rows, width), np.nan, np.float32) for width in self.widths]
        for one, array in zip(self.compiled.inputs, self.arrays, strict=False):
            array[:] = engine.weights.rows(one.table, known[one.source])
        logits = len(self.compiled.inputs)
        self.arrays[logits] = np.full((len(batch.wanted), self.widths[logits]), np.nan, np.float32)
        starts = zip(batch.starts, batch.lengths, batch.caches, strict=False)
        pieces = [(first, length, 0, cache.stored) for first, length, cache in starts]
        buffers = engine._module.Buffers()
        for n, instruction in enumerate(self.compiled.instructions):
            given = [array.copy() for array in self.arrays]
            engine._program.run(self.code, buffers, n, n + 1, self.rows, batch.wanted, pieces, self.arrays)
            self._check_one(instruction, given)
        assert np.isfinite(self.arrays[logits]).all()

    def _check_one(self, i: Any, given: list[np.ndarray]) -> None:
        rows = len(self.wanted) if i.wanted else self.rows

        def columns(view: Any, count: int) -> np.ndarray:
            return given[view.slot][:rows, view.column : view.column + count]

        found = self.arrays[i.out.slot][:rows, i.out.column : i.out.column + i.cols]
        if i.kind == self.kinds["add"]:
            np.testing.assert_array_equal(found, columns(i.a, i.cols) + columns(i.b, i.cols))
        elif i.kind == self.kinds["multiply"]:
            np.testing.assert_array_equal(found, columns(i.a, i.cols) * columns(i.b, i.cols))
        elif i.kind == self.kinds["rope"]:
            assert distance(found, self._turned(i, columns(i.a, i.cols))) <= ROUNDING
        elif i.kind == self.kinds["gather"]:
            np.testing.assert_array_equal(found[: len(self.wanted)], columns(i.a, i.cols)[self.wanted])
        elif i.kind == self.kinds["norm"]:
            assert distance(found, self._norm(i, columns(i.a, i.cols), i.weight, i.bias)) <= SUMS
        elif i.kind == self.kinds["linear"]:
            x = columns(i.a, self.engine.weights.slots[self.matrices[i.matrices[0]]].shape[1])
            residual = columns(i.b, i.cols) if i.b.slot >= 0 else None
            self._check_linear(i, x[self.wanted] if i.gather else x, residual, found)
        elif i.kind == self.kinds["attention"]:
            width = i.kv_heads * i.dim
            self._check_attention(i, [columns(i.a, i.cols), columns(i.b, width), columns(i.c, width)], found)
        else:
            assert distance(found, self._activated(columns(i.a, i.cols), i.activation)) <= SUMS

    def _vector(self, number: int) -> np.ndarray | None:
        return None if number < 0 else self.engine.weights[self.vectors[number]].astype(np.float64)

    def _norm(self, i: Any, x: np.ndarray, weight: int, bias: int) -> np.ndarray:
        centred = x.astype(np.float64) - (0 if i.rms else x.mean(axis=-1, keepdims=True, dtype=np.float64))
        normed = centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + i.epsilon) * self._vector(weight)
        return normed if bias < 0 else normed + self._vector(bias)

    def _normalized(self, i: Any, x: np.ndarray) -> np.ndarray:
        """The rows that a linear layer makes of its input, by an instruction of their own."""
        module, program, norm = self.engine._module, self.engine._program, self.engine._module.Instruction()
        norm.kind, norm.cols, norm.epsilon, norm.rms = self.kinds["norm"], x.shape[1], i.epsilon, i.rms
        norm.a, norm.out, norm.weight, norm.bias = module.View(0), module.View(1), i.norm_weight, i.norm_bias
        made = np.full(x.shape, np.nan, np.float32)
        code = program.compile([norm], [x.shape[1]] * 2, 2)
        program.run(code, module.Buffers(), 0, 1, len(x), np.empty(0, np.int64), [], [np.ascontiguousarray(x), made])
        assert distance(made, self._norm(i, x, i.norm_weight, i.norm_bias)) <= SUMS
        return made

    def _turned(self, i: Any, x: np.ndarray) -> np.ndarray:
        op = next(op for op in self.engine.graph.ops if op.kind == "rope")
        batch = np.concatenate([np.arange(length) for length in self.lengths])
        turned = numpy_engine.rope(self.engine, None, op, [x.reshape(len(x), -1, i.dim), batch])
        return turned.reshape(x.shape)

    def _activated(self, x: np.ndarray, activation: int) -> np.ndarray:
        kind = next(kind for kind, number in self.engine._module.activations.items() if number == activation)
        return numpy_engine.KERNELS[kind](None, None, None, [x])

    def _check_linear(self, i: Any, x: np.ndarray, residual: np.ndarray | None, found: np.ndarray) -> None:
        if i.norm_weight >= 0:
            x = self._normalized(i, x)
        names, biases = [self.matrices[number] for number in i.matrices], i.biases or [-1] * len(i.matrices)
        parts, allowed = [], 0.0
        for name, bias in zip(names, biases, strict=True):
            given = round_activation(x) if self.engine.weights.format_name(name) in INTEGER_FORMATS else x
            part = given.astype(np.float64) @ self.engine.weights[name].astype(np.float64).T
            allowed = max(allowed, SUMS * np.abs(part).max())
            parts.append(part if bias < 0 else part + self._vector(bias))
        if i.activation:
            parts[0] = self._activated(parts[0], i.activation)
        y = parts[0] * parts[1] if i.gated else np.concatenate(parts, axis=1)
        if i.gated:
            allowed *= np.abs(np.stack(parts)).max()
        if residual is not None:
            y = y + residual
        assert np.abs(found - y).max() <= allowed + SUMS * np.abs(y).max(), names

    def _check_attention(self, i: Any, parts: list[np.ndarray], found: np.ndarray) -> None:
        half = self.engine.weights.half_cache
        engine = SimpleNamespace(weights=SimpleNamespace(half_cache=half))
        op = rounding.Op(0, "scores", (), (), (), {"scale": i.scale, "window": i.window or None}, i.layer)
        start = 0
        for length in self.lengths:
            batch = SimpleNamespace(starts=[0, length], pasts=[0])
            q, k, v = (part[start : start + length].reshape(length, -1, i.dim) for part in parts)
            if half:
                k, v = (one.astype(np.float16).astype(np.float32) for one in (k, v))
            scores = rounding.scores(engine, batch, op, [q, [k.swapaxes(0, 1)]])
            weights = rounding.softmax(engine, batch, op, [scores])
            expected = rounding.mix(engine, batch, op, [weights, [v.swapaxes(0, 1)]]).reshape(length, -1)
            difference = np.abs(found[start : start + length] - expected) / np.abs(expected).max()
            assert np.median(difference) <= SUMS
            assert difference.max() <= (WEIGHT if half else SUMS)
            start += length
