"""What is held out: the same on every machine, about as much as was asked for, and never nothing to train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from starscope.errors import InvalidContentError
from starscope.train.documents import Passage, find_documents, survey
from starscope.train.split import name_fraction, split_text


def passages(count: int, size: int = 100) -> list[Passage]:
    return [Passage(f"package/module_{i}.py", Path(f"/nowhere/{i}"), 0, size, (size, 0)) for i in range(count)]


def written(folder: Path, sizes: list[int]) -> list[Passage]:
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_text(f"{number}".ljust(size, "é")[:size])
    return survey(find_documents([folder])).passages


def test_what_is_held_out_depends_on_the_name_alone():
    documents = passages(1000)
    parts = split_text(documents, 0.1, "auto")
    assert {*parts.train, *parts.held_out} == set(documents)
    assert not set(parts.train) & set(parts.held_out)
    assert 70 < len(parts.held_out) < 130
    assert split_text(documents[::-1], 0.1, "auto").held_out == parts.held_out[::-1]
    fewer = split_text(documents[:400], 0.1, "auto")
    assert set(fewer.held_out) == set(parts.held_out) & set(documents[:400])
    assert name_fraction("sched.py") == 0.013793653330377856  # so that no other rule slips in
    assert (
        parts.note
        == f"held out: {len(parts.held_out)} of 1000 documents, {len(parts.held_out) / 1000:.1%} of the text."
    )


@pytest.mark.parametrize("sizes", [[5000], [3000, 3000], [100_000, 10, 10]], ids=str)
def test_where_names_cannot_give_the_share_the_last_share_of_each_document_is_held_out(tmp_path, sizes):
    documents = written(tmp_path, sizes)
    parts = split_text(documents, 0.05, "auto")
    total = sum(document.bytes for document in documents)
    assert sum(p.bytes for p in parts.train) + sum(p.bytes for p in parts.held_out) == total
    assert sum(p.bytes for p in parts.held_out) == pytest.approx(0.05 * total, abs=4 * len(sizes))
    assert parts.note.startswith("held out: the last 5.0% of ")
    by_path = {part.path: part.text() for part in parts.train}
    for part in parts.held_out:
        by_path[part.path] = by_path.get(part.path, "") + part.text()
    assert by_path == {document.path: document.text() for document in documents}


def test_one_file_of_ascii_is_cut_where_a_share_of_its_characters_ends(tmp_path):
    text = "".join(chr(33 + number % 90) for number in range(1235))
    (tmp_path / "a.txt").write_text(text)
    parts = split_text(survey(find_documents([tmp_path])).passages, 0.1, "auto")
    assert [part.text() for part in parts.train] == [text[: int(len(text) * 0.9)]]  # as nanoGPT cuts it


def test_the_split_that_is_asked_for_is_the_one_that_is_made(tmp_path):
    documents = written(tmp_path, [2000] * 40)
    assert all(part in documents for part in split_text(documents, 0.1, "documents").held_out)
    assert len(split_text(documents, 0.1, "last").held_out) == 40
    assert split_text(documents, 0, "auto").train == documents
    assert split_text(documents, 0, "auto").note == "nothing is held out."


def test_a_split_that_leaves_a_side_empty_is_refused(tmp_path):
    [document] = written(tmp_path, [3])
    with pytest.raises(InvalidContentError, match=r"no document is held out at a share of 0.05 of 1"):
        split_text([document], 0.05, "documents")
    with pytest.raises(InvalidContentError, match=r"no document is to train on at a share of 0.99999 of 3"):
        split_text(passages(3), 0.99999, "documents")
    with pytest.raises(InvalidContentError, match=r"too few to hold out 0\.9 of it"):
        split_text([Passage("a", document.path, 0, 1, document.changed)], 0.9, "last")
