"""What the compiled module refuses, and how starscope.native reports that it is missing."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from starscope import native
from starscope.formats import FORMATS

kernels = native.kernels()
assert kernels is not None, native.why_missing()

VALUES = np.zeros((2, 64), np.float32)
PACKED = np.zeros((2, 68), np.uint8)


def test_the_fastest_usable_instruction_set_is_chosen():
    assert kernels.isas()[0] == "scalar"
    assert kernels.isa() == kernels.isas()[-1]


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="'sse9' is not usable here; expected one of scalar"):
        kernels.set_isa("sse9")


def test_the_codecs_are_those_of_the_formats_written():
    written = sorted(f.type_id for f in FORMATS.values() if f.encode is not None and f.name != "F32")
    assert kernels.encodes() == kernels.decodes() == written


@pytest.mark.parametrize(
    ("type_id", "values", "packed", "threads", "message"),
    [
        (9, VALUES, PACKED, 1, "no native codec for type 9"),
        (-1, VALUES, PACKED, 1, "no native codec for type -1"),
        (8, VALUES, PACKED, 0, "threads is 0"),
        (8, VALUES, PACKED, -3, "threads is -3"),
        (8, np.zeros((2, 48), np.float32), PACKED, 1, "48 columns; expected a multiple of the block size 32"),
        (8, VALUES, np.zeros((2, 64), np.uint8), 1, r"are \[2, 64\]; expected \[2, 68\] for values \[2, 64\]"),
        (8, VALUES, np.zeros((3, 68), np.uint8), 1, r"are \[3, 68\]; expected \[2, 68\]"),
        (2, VALUES, PACKED, 1, r"are \[2, 68\]; expected \[2, 36\]"),
        (8, VALUES, np.zeros(137, np.uint8)[1:].reshape(2, 68), 1, "not aligned"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(type_id, values, packed, threads, message):
    with pytest.raises(ValueError, match=message):
        kernels.encode(type_id, values, packed, threads)
    with pytest.raises(ValueError, match=message):
        kernels.decode(type_id, packed, values, threads)


def test_overlapping_arrays_are_refused():
    buffer = np.zeros(1024, np.uint8)
    values, packed = buffer[:512].view(np.float32).reshape(2, 64), buffer[444 : 444 + 136].reshape(2, 68)
    with pytest.raises(ValueError, match="overlap"):
        kernels.encode(8, values, packed)
    with pytest.raises(ValueError, match="overlap"):
        kernels.decode(8, packed, values)


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("values", "packed"),
    [
        (VALUES.astype(np.float64), PACKED),
        (VALUES.astype(">f4"), PACKED),
        (VALUES.astype(np.float16), PACKED),
        (VALUES.view(np.int32), PACKED),
        (VALUES, PACKED.view(np.int8)),
        (VALUES[0], PACKED),
        (VALUES, PACKED[0]),
        (VALUES[None], PACKED),
        (np.zeros((2, 128), np.float32)[:, ::2], PACKED),
        (np.zeros((64, 2), np.float32).T, PACKED),
        (VALUES, np.zeros((2, 136), np.uint8)[:, ::2]),
        ([[0.0] * 64] * 2, PACKED),
        (VALUES, bytes(136)),
        (VALUES, None),
        (None, PACKED),
    ],
)
def test_arrays_of_another_type_or_layout_are_refused(values, packed):
    with pytest.raises(TypeError):
        kernels.encode(8, values, packed)
    with pytest.raises(TypeError):
        kernels.decode(8, packed, values)


def test_the_destination_must_be_writable_and_the_source_need_not_be():
    kernels.encode(8, read_only(VALUES), PACKED.copy())
    kernels.decode(8, read_only(PACKED), VALUES.copy())
    with pytest.raises(TypeError):
        kernels.encode(8, VALUES, read_only(PACKED))
    with pytest.raises(TypeError):
        kernels.decode(8, PACKED, read_only(VALUES))


@pytest.mark.parametrize("shape", [(0, 0), (0, 64), (3, 0)])
def test_empty_arrays_are_fine(shape):
    packed = np.zeros((shape[0], shape[1] // 32 * 34), np.uint8)
    kernels.encode(8, np.zeros(shape, np.float32), packed, 4)
    kernels.decode(8, packed, np.zeros(shape, np.float32), 4)


def test_why_missing_names_the_reason_and_is_none_when_nothing_is():
    assert native.why_missing() is None
    hide = "import sys; sys.modules['starscope.native._kernels'] = None\n"
    ask = "from starscope import native; print(native.kernels(), native.why_missing())"
    done = subprocess.run([sys.executable, "-c", hide + ask], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("None import of starscope.native._kernels halted")
