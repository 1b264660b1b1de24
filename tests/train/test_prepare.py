"""prepare(): what a run reads, made once, reused while nothing changes, and refused in words."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from starscope.train.prepare import DataOptions, Prepared, prepare
from support.training import DOCUMENTS

TEXT = "".join(DOCUMENTS)


def write_tree(folder: Path, texts: dict[str, str | bytes]) -> Path:
    """Files below a folder, old enough for their times to be trusted."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        os.utime(path, (time.time() - 100,) * 2)
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "tree", {f"part_{i}/{i}.py": f"# {i}\n{text}" for i, text in enumerate(DOCUMENTS * 6)})


def options(path: Path, **changes: object) -> DataOptions:
    return DataOptions([path], **{"vocab_size": 300, "context_length": 16, **changes})  # type: ignore[arg-type]


def text_of(prepared: Prepared) -> str:
    """All text that is trained on, decoded."""
    return "".join(prepared.tokenizer.decode(ids.tolist()) for ids in prepared.train.split(prepared.end_of_text))


def test_tokens_are_made_once_and_reused_while_nothing_changes(tree, tmp_path):
    first = prepare(options(tree), tmp_path / "data")
    assert not first.reused
    made = (tmp_path / "data" / "train.tokens").stat().st_mtime_ns
    second = prepare(options(tree), tmp_path / "data")
    assert second.reused
    assert (tmp_path / "data" / "train.tokens").stat().st_mtime_ns == made
    assert second.facts == first.facts
    assert (second.batches().batch(0, 8) == first.batches().batch(0, 8)).all()
    (tree / "part_0" / "0.py").write_text("changed = True\n" * 9)
    third = prepare(options(tree), tmp_path / "data")
    assert not third.reused
    assert third.facts["data"] != first.facts["data"]


def test_one_document_is_held_out_from_its_last_share_on(tmp_path):
    path = write_tree(tmp_path, {"a.txt": TEXT * 4}) / "a.txt"
    notes: list[str] = []
    prepared = prepare(options(path, held_out=0.1, vocab="chars", vocab_size=None), tmp_path / "data", notes.append)
    assert prepared.held_out is not None
    assert "held out: the last 10.0% of the text." in notes
    size = len((TEXT * 4).encode())
    assert prepared.train.bytes + prepared.held_out.bytes == size
    assert abs(prepared.train.bytes - int(size * 0.9)) <= 3
    held_out = b"".join(map(prepared.tokenizer.token_bytes, prepared.held_out.ids[:-1].tolist()))
    assert text_of(prepared).encode() + held_out == (TEXT * 4).encode()


def test_documents_are_held_out_whole_by_their_names(tree, tmp_path):
    prepared = prepare(options(tree, held_out=0.2, split="documents"), tmp_path / "data")
    assert prepared.held_out is not None
    assert prepared.train.documents + prepared.held_out.documents == 30
    assert prepared.train.documents == np.count_nonzero(prepared.train.ids == prepared.end_of_text)
    held_out = [prepared.tokenizer.decode(ids.tolist()) for ids in prepared.held_out.split(prepared.end_of_text)]
    assert all(text in (f"# {i}\n{t}" for i, t in enumerate(DOCUMENTS * 6)) for text in held_out)
