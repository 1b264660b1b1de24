"""Finding and reading text: what is taken, what is left out and said, and pieces that change no token."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from starscope.errors import InputError, InvalidContentError
from starscope.tokenizer.structure import STRUCTURES, make_pre_tokenizer
from starscope.train.documents import BOM, cut_pieces, find_documents, survey
from starscope.train.leakage import measure_leakage
from starscope.train.split import split_text

CHARACTERS = st.sampled_from(" \n\t\r\x0b\x1c\xa0　ab9'ßé日🐍.,_(s")


def write(folder: Path, texts: dict[str, str | bytes]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def names(corpus_or_found: object) -> list[str]:
    documents = getattr(corpus_or_found, "documents", None) or corpus_or_found.passages  # type: ignore[attr-defined]
    return [document.name for document in documents]


def test_a_folder_gives_code_and_text_and_leaves_out_what_is_hidden_or_of_another_kind(tmp_path):
    taken = {"b.py": "b", "sub/a.rs": "a", "notes.TXT": "n", "Makefile": "m", "sub/__pycache___.py": "p"}
    others = {".hidden.py": "h", ".git/x.py": "g", "__pycache__/y.py": "y", "node_modules/z.js": "z", "c.png": "c"}
    found = find_documents([write(tmp_path, {**taken, **others})])
    assert names(found) == sorted(taken)
    assert +found.left_out == {"hidden": 1, "hidden folders": 3, "of another kind": 1}
    assert names(find_documents([tmp_path], suffixes=[".PNG"])) == ["c.png"]
    assert names(find_documents([tmp_path / "c.png"])) == ["c.png"]  # named itself: taken as it is
    assert names(find_documents([tmp_path], keep=lambda name: name.startswith("sub/"))) == [
        "sub/__pycache___.py",
        "sub/a.rs",
    ]


def test_a_file_that_is_reached_twice_is_taken_once_and_links_to_folders_are_not_followed(tmp_path):
    write(tmp_path, {"a/x.py": "x", "b/x.py": "another"})
    (tmp_path / "a" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "a" / "y.py").symlink_to(tmp_path / "a" / "x.py")
    (tmp_path / "a" / "gone.py").symlink_to(tmp_path / "nothing.py")
    found = find_documents([tmp_path / "a", tmp_path / "a" / "x.py", tmp_path / "b", tmp_path / "a"])
    assert [(d.name, d.path.parent.name, d.named) for d in found.documents] == [
        ("x.py", "a", True),
        ("x.py", "b", False),
    ]
    assert found.left_out["not regular files"] == 2  # once for each visit of the folder


def test_names_that_are_not_utf_8_are_names_like_others(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.py")).write_text("x = 1\n" * 50)
    corpus = survey(find_documents([tmp_path]))
    parts = split_text(corpus.passages, 0.5, "auto")
    assert parts.train[0].bytes == 150
    assert measure_leakage(parts.train, parts.held_out).lines == 0
    assert find_documents([tmp_path]).stamp()[0]


def test_a_folder_that_is_excluded_gives_nothing_however_it_is_reached(tmp_path):
    write(tmp_path, {"a.py": "a", "run/report.html": "r", "run/data/b.txt": "b"})
    (tmp_path / "link").symlink_to(tmp_path / "run", target_is_directory=True)
    assert names(find_documents([tmp_path], exclude=[tmp_path / "link"])) == ["a.py"]
    assert len(find_documents([tmp_path]).documents) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "missing.txt", r"missing\.txt does not exist"),
        (lambda p: (p / "gone").symlink_to("nowhere") or p / "gone", r"is a link to nowhere, which does not exist"),
        (lambda p: os.mkfifo(p / "pipe") or p / "pipe", r"is not a regular file"),
        (lambda p: write(p, {"data.bin": b"x"}), r"no file to train on under .* \(1 of another kind left out\)"),
        (lambda p: p, r"no file to train on under [^()]*\. Name files"),
    ],
    ids=["missing", "dangling link", "pipe", "nothing of a known kind", "nothing at all"],
)
def test_what_cannot_be_read_is_refused_at_once_and_named(tmp_path, make, message):
    with pytest.raises(InputError, match=message):
        find_documents([make(tmp_path)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caf\xe9 au lait", r"is not UTF-8 \(byte 3\)"),
        (b"x" * 3_000_000 + b"\xff", r"is not UTF-8 \(byte 3000000\)"),
        ("é".encode() * 600_000 + b"\xc3", r"is not UTF-8 \(byte 1200000\)"),
        (b"ends in a cut character \xe6\x97", r"is not UTF-8 \(byte 24\)"),
        (b"\xed\xa0\x80 half a surrogate pair", r"is not UTF-8 \(byte 0\)"),
        ("UTF-16".encode("utf-16"), r"is not UTF-8 \(byte 0\)|is not text"),
        (b"zero \0 byte", r"is not text: byte 5 is zero"),
    ],
    ids=["latin-1", "late", "cut at a chunk", "cut", "surrogate", "utf-16", "zero"],
)
def test_a_named_file_that_is_not_text_is_an_error_and_in_a_folder_it_is_left_out(tmp_path, content, message):
    path = write(tmp_path, {"bad.txt": content, "good.txt": "good"}) / "bad.txt"
    with pytest.raises(InvalidContentError, match=message):
        survey(find_documents([path, tmp_path / "good.txt"]))
    corpus = survey(find_documents([tmp_path]))
    assert names(corpus) == ["good.txt"]
    assert corpus.notes == ["left out: 1 not text."]


def test_empty_files_and_copies_are_left_out_and_said(tmp_path):
    corpus = survey(find_documents([write(tmp_path, {"a.py": "same", "b.py": "same", "c.py": "", "d.py": BOM})]))
    assert names(corpus) == ["a.py"]
    assert corpus.notes == ["left out: 1 copies of others, 2 empty."]
    with pytest.raises(InputError, match=r"no text to train on \(2 empty\)"):
        survey(find_documents([tmp_path / "c.py", tmp_path / "d.py"]))


def test_a_byte_order_mark_is_dropped_and_crlf_is_kept_and_both_are_said(tmp_path):
    write(tmp_path, {"a.txt": BOM + b"one\r\ntwo\r\n", "b.txt": "\ufeff", "c.txt": "x\ufeffy"})
    corpus = survey(find_documents([tmp_path]))
    assert [passage.text() for passage in corpus.passages] == ["one\r\ntwo\r\n", "x\ufeffy"]
    assert corpus.bytes == 10 + 5
    assert corpus.notes[1:] == [
        "1 of 2 documents begin with a byte-order mark, which is dropped.",
        "1 of 2 documents have CRLF line ends, which are kept.",
    ]


def test_the_fingerprint_depends_on_names_and_contents_alone(tmp_path):
    first = survey(find_documents([write(tmp_path / "one", {"a.py": "a", "b/c.py": "c"})])).fingerprint
    assert survey(find_documents([write(tmp_path / "two", {"b/c.py": "c", "a.py": "a"})])).fingerprint == first
    for change in ({"a.py": "b"}, {"c.py": "new"}):
        assert survey(find_documents([write(tmp_path / "two", change)])).fingerprint != first


@example(" " * 60, 10, [])
@example("\x1c " * 30, 7, [3])
@given(st.text(CHARACTERS, max_size=200), st.integers(1, 40), st.lists(st.integers(0, 200), max_size=4))
def test_pieces_are_the_text_and_no_longer_than_asked_for(text, limit, places):
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = list(cut_pieces((text[a:b] for a, b in pairwise(bounds)), limit))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= limit for piece in pieces)


WORDS = st.text(st.sampled_from("ab9'ßé日🐍.,_(s\x1c"), min_size=1, max_size=3)
OTHERS = st.text(st.sampled_from("\r\v\f\x85\xa0"), max_size=1)
SIMPLE = ("gpt-2", "starcoder")
GAPS = st.builds("{}{}{}".format, OTHERS, st.sampled_from([" ", "\n", "\t", "\n\n", "\r\n"]), OTHERS)


@pytest.mark.parametrize("pre_tokenizer", [names[0] for names in STRUCTURES.values()])
@given(parts=st.lists(st.tuples(WORDS, GAPS)), limit=st.integers(12, 30))
def test_pieces_are_cut_into_the_same_words_as_the_whole(pre_tokenizer, parts, limit):
    def words(part: str) -> list[str]:
        return [word for word, _ in make_pre_tokenizer(pre_tokenizer).pre_tokenize_str(part)]

    end = "" if pre_tokenizer in SIMPLE else "a"  # others have words of a sign and the blank behind it
    text = "".join(word + end + gap for word, gap in parts).replace("\x1c", "\x1cx")
    assert [word for piece in cut_pieces([text], limit) for word in words(piece)] == words(text)


@given(st.text(CHARACTERS, min_size=1, max_size=60), st.floats(0.01, 0.99))
@settings(deadline=None)
def test_a_passage_is_split_between_two_characters_at_the_share_of_its_bytes(tmp_path_factory, text, share):
    path = tmp_path_factory.mktemp("split") / "a.txt"
    path.write_bytes(BOM + text.encode())
    [passage] = survey(find_documents([path])).passages
    before, after = passage.split(share)
    assert before.text() + after.text() == text
    assert 0 <= int(len(text.encode()) * (1 - share)) - before.bytes <= 3


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    [passage] = survey(find_documents([write(tmp_path, {"a.txt": "before"})])).passages
    (tmp_path / "a.txt").write_text("afterwards")
    with pytest.raises(InvalidContentError, match=r"a\.txt changed while it was being read"):
        list(passage.pieces())
    (tmp_path / "a.txt").write_text("cut")
    with pytest.raises(InvalidContentError, match="changed while"):
        list(passage.pieces())


def peak_memory(program: str, *arguments: object) -> int:
    """Bytes that a program takes at its peak as it prints it itself."""
    code = textwrap.dedent(program)
    found = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return int(found.stdout.split()[-1])


def long_line(path: Path, megabytes: int) -> Path:
    block = b"".join(b"%x" % number for number in range(10**6, 10**6 + 2**18))[: 1 << 20]
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(block)
    return path


def test_one_line_of_200_megabytes_is_read_in_constant_memory(tmp_path):
    program = """
        import sys
        from starscope.bench import peak_rss_bytes
        from starscope.train.documents import find_documents, survey
        before = peak_rss_bytes()
        [passage] = survey(find_documents([sys.argv[1]])).passages
        assert sum(map(len, passage.pieces())) == 200 << 20
        print(peak_rss_bytes() - before)
    """
    assert peak_memory(program, long_line(tmp_path / "long.txt", 200)) < 16 << 20
