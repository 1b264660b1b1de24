"""The log of a run: read whatever has happened to it, since no run may be lost for its sake."""

from __future__ import annotations

import errno

import pytest

from starscope.errors import DoesNotFitError, InputError, OutputError
from starscope.train.log import append_line, read_log, trim_log, unwritable
from support.runs import make_trainer, same_bits

DAMAGE = (
    b"\x00" * 40 + b"\n",
    b"zzz\n",
    b"[1]\n",
    b"5\n",
    b'{"a": 1}\n',
    b'{"step": "x"}\n',
    b"\xff\xfe\n",
    b'{"step": 9',
)


def test_lines_that_are_damaged_are_left_out(tmp_path):
    path = tmp_path / "log.jsonl"
    with pytest.raises(InputError, match="cannot be read"):
        read_log(path)
    path.write_bytes(b'{"step": 1}\n' + b"".join(DAMAGE[:-1]) + b'{"step": 2}\n' + DAMAGE[-1])
    assert read_log(path) == [{"step": 1}, {"step": 2}]
    trim_log(path, 1)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_text_with_line_separators_stays_in_its_line(tmp_path):
    path = tmp_path / "run" / "log.jsonl"
    line = {"step": 1, "samples": [{"text": "a\u2028b\x85c\x0cd\r\ne\udcff"}]}
    append_line(path, line)
    path.write_bytes(path.read_bytes() + '{"step": 2, "text": "a\u2028b"}\n'.encode())
    assert read_log(path) == [line, {"step": 2, "text": "a\u2028b"}]


def test_a_run_whose_log_is_damaged_goes_on_with_the_same_bits(tmp_path):
    whole = make_trainer(tmp_path / "whole", steps=4)
    whole.run()
    make_trainer(tmp_path / "parts", steps=2).run()
    log = tmp_path / "parts" / "log.jsonl"
    log.write_bytes(log.read_bytes() + b"".join(DAMAGE))
    rest = make_trainer(tmp_path / "parts", steps=4)
    rest.resume()
    rest.run()
    assert same_bits(rest.weights(), whole.weights())
    assert [line["step"] for line in read_log(log) if "loss" in line] == [1, 2, 3, 4]


def test_a_log_that_cannot_be_written_is_said_as_what_it_is(tmp_path):
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(OutputError, match=r"log\.jsonl cannot be written: Is a directory"):
        append_line(tmp_path / "log.jsonl", {"step": 1})
    assert isinstance(unwritable(tmp_path, OSError(errno.ENOSPC, "full")), DoesNotFitError)
