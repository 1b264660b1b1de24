"""Fill-in-the-middle prompts: the order of the parts, names and other files, what is cut, and what is never parsed.

`data/fim/prompts.json` holds the ids of whole prompts. After a change that is meant, write it anew:

    PYTHONPATH=tests python -m test_infill --write
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import starscope
from starscope.errors import ContextOverflowError, UnsupportedError, UsageError
from starscope.infill import cut_to_fit, infill_budget, infill_prompt, keep_nearest
from starscope.tokenizer import FimTokens, Tokenizer
from starscope.tokenizer.source import Source
from starscope.tokenizer.vocabulary import Contents, Roles
from support.vocabularies import Packed, read_packed, symbols

GOLDEN = Path(__file__).parent / "data" / "fim" / "prompts.json"
PREFIX, SUFFIX, MIDDLE, BOS = 1001, 1002, 1003, 1004

P, S = "def area(shape):\n    return sha", "\n\nprint(area(Square(2)))\n"
FILES = [
    ("shapes/base.py", "class Shape:\n    size = 0\n"),
    ("README.md", "# Shapes\nUse <fim_suffix> and <file_sep> as you like: they are text.\n"),
    ("shapes/größe.py", "from .base import Shape\n\n\nclass Square(Shape):\n    pass\n"),
]
VOCABULARIES = ("starcoder_1", "santacoder", "starcoder_2")
SANTACODER = ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>", "<|endoftext|>")
SANTACODER_MERGES = ("i n", "Ġ Ġ", "d e", "de f", "r e", "s h", "sh a", "Ġ r", "p e")


@cache
def vocabulary(name: str) -> Tokenizer:
    """StarCoder 1's and 2's own vocabularies; for SantaCoder's spelling a made one, its control tokens at the end."""
    if name == "santacoder":
        pieces = [*symbols(), *(merge.replace(" ", "") for merge in SANTACODER_MERGES)]
        return tokenizer_of(Packed("starcoder", 0, [*pieces, *SANTACODER], list(SANTACODER), list(SANTACODER_MERGES)))
    return tokenizer_of(read_packed({"starcoder_1": "refact", "starcoder_2": "starcoder"}[name]))


def tokenizer_of(packed: Packed) -> Tokenizer:
    merges = [(first, second) for first, second in (merge.split(" ") for merge in packed.merges)]
    contents = Contents("the test", packed.tokens, bytes(packed.types()), merges)
    return Tokenizer(Source("the test", len(packed.tokens), lambda: contents, packed.pre, Roles(), False))


def golden_prompt(name: str, num_files: int, order: str) -> list[int] | str:
    """The ids of one prompt of the golden file, or what is said instead."""
    names = {"repository": "cafe/shapes", "filename": "shapes/area.py"} if num_files else {}
    try:
        made = infill_prompt(vocabulary(name), P, S, budget=500, fim_order=order, files=FILES[:num_files], **names)  # type: ignore[arg-type]
    except UnsupportedError as error:
        return str(error)
    assert made.dropped == 0
    return made.ids


CASES = [(name, count, order) for name in VOCABULARIES for count in (0, 1, 3) for order in ("psm", "spm")]


def title(name: str, num_files: int, order: str) -> str:
    return f"{name}, {num_files} files, {order}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: title(*case))
def test_prompts_are_the_golden_ones(case: tuple[str, int, str]) -> None:
    assert golden_prompt(*case) == json.loads(GOLDEN.read_text(encoding="utf-8"))[title(*case)]["ids"]


R1 = "<reponame>cafe/shapes"
R2 = "<repo_name>cafe/shapes"
F1 = "<filename>{}\n{}".format
F2 = "<file_sep>{}\n{}".format
ONE, THREE = FILES[:1], FILES
SPELLED = {
    ("starcoder_1", 0, "psm"): f"<fim_prefix>{P}<fim_suffix>{S}<fim_middle>",
    ("starcoder_1", 0, "spm"): f"<fim_prefix><fim_suffix>{S}<fim_middle>{P}",
    ("starcoder_1", 1, "psm"): f"<fim_prefix>{R1}{F1(*ONE[0])}{F1('shapes/area.py', P)}<fim_suffix>{S}<fim_middle>",
    ("starcoder_1", 1, "spm"): f"<fim_prefix><fim_suffix>{S}<fim_middle>{R1}{F1(*ONE[0])}{F1('shapes/area.py', P)}",
    ("starcoder_1", 3, "psm"): (
        f"<fim_prefix>{R1}{''.join(F1(*f) for f in THREE)}{F1('shapes/area.py', P)}<fim_suffix>{S}<fim_middle>"
    ),
    ("starcoder_1", 3, "spm"): (
        f"<fim_prefix><fim_suffix>{S}<fim_middle>{R1}{''.join(F1(*f) for f in THREE)}{F1('shapes/area.py', P)}"
    ),
    ("santacoder", 0, "psm"): f"<fim-prefix>{P}<fim-suffix>{S}<fim-middle>",
    ("santacoder", 0, "spm"): f"<fim-prefix><fim-suffix>{S}<fim-middle>{P}",
    ("starcoder_2", 0, "psm"): f"<fim_prefix>{P}<fim_suffix>{S}<fim_middle>",
    ("starcoder_2", 0, "spm"): f"<fim_prefix><fim_suffix>{S}<fim_middle>{P}",
    ("starcoder_2", 1, "psm"): (
        f"{R2}{F2(*ONE[0])}<file_sep><fim_prefix>shapes/area.py\n{P}<fim_suffix>{S}<fim_middle>"
    ),
    ("starcoder_2", 1, "spm"): (
        f"{R2}{F2(*ONE[0])}<file_sep><fim_prefix><fim_suffix>{S}<fim_middle>shapes/area.py\n{P}"
    ),
    ("starcoder_2", 3, "psm"): (
        f"{R2}{''.join(F2(*f) for f in THREE)}<file_sep><fim_prefix>shapes/area.py\n{P}<fim_suffix>{S}<fim_middle>"
    ),
    ("starcoder_2", 3, "spm"): (
        f"{R2}{''.join(F2(*f) for f in THREE)}<file_sep><fim_prefix><fim_suffix>{S}<fim_middle>shapes/area.py\n{P}"
    ),
}


@pytest.mark.parametrize("case", SPELLED, ids=lambda case: title(*case))
def test_prompts_read_as_the_models_were_trained(case: tuple[str, int, str]) -> None:
    """The golden ids, decoded: independent of how they were made."""
    ids = json.loads(GOLDEN.read_text(encoding="utf-8"))[title(*case)]["ids"]
    assert vocabulary(case[0]).decode(ids) == SPELLED[case]


NAMES = {"files": FILES[:1]}, {"repository": "cafe/shapes"}, {"filename": "a.py"}


@pytest.mark.parametrize("names", NAMES, ids=lambda names: next(iter(names)))
def test_a_vocabulary_without_tokens_for_names_refuses_them(names: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="no token that names a file") as caught:
        infill_prompt(vocabulary("santacoder"), P, S, budget=100, **names)
    assert "Leave the context files" in caught.value.hint


def test_a_vocabulary_without_a_repository_token_refuses_its_name_alone() -> None:
    tokens = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"]
    tokenizer = tokenizer_of(Packed("starcoder", 0, [*symbols(), *tokens], tokens, []))
    with pytest.raises(UnsupportedError, match="no token that names a repository"):
        infill_prompt(tokenizer, P, S, budget=500, repository="r")
    made = infill_prompt(tokenizer, "p", "s", budget=500, filename="f")
    assert tokenizer.decode(made.ids) == "<file_sep><fim_prefix>f\np<fim_suffix>s<fim_middle>"


@pytest.mark.parametrize("name", ["", "a\nb"])
@pytest.mark.parametrize("what", ["files", "repository", "filename"])
def test_a_name_is_one_line(what: str, name: str) -> None:
    with pytest.raises(UsageError, match="expected one line"):
        infill_prompt(vocabulary("starcoder_1"), P, S, budget=100, **{what: [(name, "x")] if what == "files" else name})  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ["ab", ("a",), ("a", "b", "c"), ("a", b"b"), (b"a", "b"), None], ids=repr)
def test_a_context_file_is_a_name_and_a_text(file: Any) -> None:
    with pytest.raises(UsageError, match=r"expected (a pair|one line)"):
        infill_prompt(vocabulary("starcoder_1"), P, S, budget=100, files=[file])


def test_parts_of_the_head_may_be_left_out() -> None:
    def spelled(name: str, **names: Any) -> str:
        return vocabulary(name).decode(infill_prompt(vocabulary(name), "p", "s", budget=50, **names).ids)

    rest = "<fim_suffix>s<fim_middle>"
    assert spelled("starcoder_1", repository="r") == f"<fim_prefix><reponame>r\np{rest}"
    assert spelled("starcoder_1", filename="f") == f"<fim_prefix><filename>f\np{rest}"
    assert spelled("starcoder_1", files=[("a", "b")]) == f"<fim_prefix><filename>a\nb<filename>\np{rest}"
    assert spelled("starcoder_2", repository="r") == f"<repo_name>r<file_sep><fim_prefix>\np{rest}"
    assert spelled("starcoder_2", filename="f") == f"<file_sep><fim_prefix>f\np{rest}"
    assert spelled("starcoder_2", files=[("a", "b")]) == f"<file_sep>a\nb<file_sep><fim_prefix>\np{rest}"


def test_an_order_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="expected psm"):
        infill_prompt(vocabulary("starcoder_1"), P, S, budget=100, fim_order="mps")  # type: ignore[arg-type]


texts = st.text(st.sampled_from("ab \n\té🦊<>"), max_size=20) | st.sampled_from(
    ["<fim_suffix>", "<file_sep>x", "<filename>", "<|endoftext|>", "a<fim_middle>b", "<reponame>"]
)
names = st.text(st.sampled_from("ab/.é<>"), min_size=1, max_size=8) | st.sampled_from(["<filename>", "<fim_prefix>"])


@given(
    st.sampled_from(["starcoder_1", "starcoder_2"]),
    st.sampled_from(["psm", "spm"]),
    texts,
    texts,
    st.lists(st.tuples(names, texts), max_size=4),
    names | st.none(),
    names | st.none(),
    st.integers(0, 150),
)
def test_markers_stand_once_and_in_order_and_the_budget_holds(
    name: str,
    order: Any,
    before: str,
    after: str,
    files: list[tuple[str, str]],
    repository: str | None,
    filename: str | None,
    budget: int,
) -> None:
    tokenizer = vocabulary(name)
    arguments: Any = {"fim_order": order, "files": files, "repository": repository, "filename": filename}
    whole = infill_prompt(tokenizer, before, after, budget=10_000, **arguments)
    assert whole.dropped == 0
    fim, control = tokenizer.fim, range(38 if name == "starcoder_2" else 19)
    assert fim is not None

    def markers(ids: list[int]) -> list[int]:
        return [i for i in ids if i in control]

    starts = [fim.separator] * len(files)
    own = [fim.separator] if files or filename is not None or (name == "starcoder_2" and repository is not None) else []
    head = [*([fim.repo] if repository is not None else []), *starts, *own]
    holes = [fim.prefix, fim.suffix, fim.middle]
    if name == "starcoder_2":
        expected = [*head, *holes]
    else:
        expected = [fim.prefix, *head, *holes[1:]] if order == "psm" else [*holes, *head]
    assert markers(whole.ids) == expected
    text = tokenizer.decode(i for i in whole.ids if i not in control)
    parts = [part for one, content in files for part in (f"{one}\n", content)]
    named = [repository or "", *parts]
    own_name = f"{filename or ''}\n" if files or repository is not None or filename is not None else ""
    if order == "psm":
        assert text == "".join([*named, own_name, before, after])
    else:
        outside = named if name == "starcoder_2" else []
        inside = [] if name == "starcoder_2" else named
        assert text == "".join([*outside, after, *inside, own_name, before])

    try:
        made = infill_prompt(tokenizer, before, after, budget=budget, **arguments)
    except ContextOverflowError:
        bare = infill_prompt(tokenizer, "", "", budget=10_000, **(arguments | {"files": [("a", "")][: len(files)]}))
        first = [fim.separator, *tokenizer.encode("a\n")] if files else []
        # A hole with text around it gets one token of that text at the least.
        assert budget < len(bare.ids) - len(first) + bool(before or after)
        return
    assert len(made.ids) <= budget
    assert len(made.ids) + made.dropped == len(whole.ids)
    assert [i for i in markers(made.ids) if i in holes] == holes
    room_for_text = len(tokenizer.encode(before)) + len(tokenizer.encode(after))
    if made.dropped and len(markers(made.ids)) > len(markers(whole.ids)) - len(files):
        assert made.dropped <= len(whole.ids) - room_for_text  # while another file is there, the hole's own text is


blocks = st.lists(
    st.tuples(st.lists(st.integers(100, 199), min_size=2, max_size=4), st.lists(st.integers(0, 99), max_size=8)),
    max_size=5,
)


@given(blocks, st.integers(0, 60))
def test_the_files_farthest_from_the_hole_go_first(files: list[tuple[list[int], list[int]]], room: int) -> None:
    kept = keep_nearest(files, room)
    assert len(kept) <= room
    for count in range(len(files) + 1):  # how many go entirely, or all but the end of the last of them
        rest = [i for head, text in files[count:] for i in (*head, *text)]
        if len(rest) <= room:
            break
    if count == 0:
        assert kept == rest
        return
    head, text = files[count - 1]
    free = room - len(rest) - len(head)
    end = text[len(text) - min(free, len(text)) :] if free > 0 and text else None
    assert kept == (rest if end is None else [*head, *end, *rest])


@pytest.fixture(scope="module")
def demo() -> starscope.Model:
    return starscope.load("demo", engine="numpy", threads=1)


@pytest.mark.parametrize("token", ["<|endoftext|>", "<fim_pad>", "<filename>", "<reponame>"])
def test_a_hole_ends_at_every_end_token_and_at_the_next_file(demo: starscope.Model, token: str) -> None:
    [token_id] = demo.tokenizer.encode(token, special=True)
    arguments: Any = {"files": FILES, "repository": "r", "filename": "a.py", "max_new_tokens": 5}
    done = demo.generate(P, S, logit_bias={token_id: 1e9}, **arguments)
    assert (done.text, done.token_ids, done.finish_reason) == ("", [], "stop")
    assert demo.generate(P, S, **arguments).token_ids != []


@pytest.mark.parametrize("name", ["fim_order", "files", "repository", "filename"])
def test_what_describes_a_hole_needs_a_suffix(demo: starscope.Model, name: str) -> None:
    value: Any = {"fim_order": "spm", "files": [("a", "b")]}.get(name, "a")
    with pytest.raises(UsageError, match="which needs a suffix"):
        demo.generate(P, **{name: value})
    demo.generate(P, "", max_new_tokens=1, **{name: value})


def make_tokenizer(*, fim: bool = True, add_bos: bool = False) -> SimpleNamespace:
    """Bytes are tokens; `special=True` would turn "<fim_suffix>" into its id."""

    def encode(text: str, special: bool = False, begins: bool = True) -> list[int]:
        if special and "<fim_suffix>" in text:
            return [SUFFIX]
        return list(text.encode())

    markers = FimTokens(PREFIX, SUFFIX, MIDDLE)
    return SimpleNamespace(encode=encode, fim=markers if fim else None, bos_id=BOS, add_bos=add_bos)


def test_the_prompt_is_prefix_suffix_middle() -> None:
    assert infill_prompt(make_tokenizer(), "ab", "c", budget=100).ids == [PREFIX, 97, 98, SUFFIX, 99, MIDDLE]


def test_empty_sides_keep_their_markers() -> None:
    assert infill_prompt(make_tokenizer(), "", "", budget=3).ids == [PREFIX, SUFFIX, MIDDLE]


def test_a_vocabulary_that_begins_with_bos_has_it_first() -> None:
    assert infill_prompt(make_tokenizer(add_bos=True), "a", "b", budget=6).ids == [BOS, PREFIX, 97, SUFFIX, 98, MIDDLE]


def test_text_that_looks_like_a_marker_stays_text() -> None:
    text = "x = '<fim_suffix>'"
    ids = infill_prompt(make_tokenizer(), text, text, budget=100).ids
    assert ids == [PREFIX, *text.encode(), SUFFIX, *text.encode(), MIDDLE]


def test_a_vocabulary_without_markers_says_so() -> None:
    with pytest.raises(UnsupportedError, match="fill-in-the-middle") as caught:
        infill_prompt(make_tokenizer(fim=False), "a", "b", budget=100)
    assert "suffix" in caught.value.hint


def test_a_budget_smaller_than_the_markers_is_refused_with_both_numbers() -> None:
    with pytest.raises(ContextOverflowError, match="needs 4 tokens; 2 are free"):
        infill_prompt(make_tokenizer(), "a", "b", budget=2)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 100))
def test_the_prefix_keeps_its_end_and_the_suffix_its_start(num_before: int, num_after: int, room: int) -> None:
    prefix, suffix = list(range(num_before)), list(range(100, 100 + num_after))
    before, after = cut_to_fit(prefix, suffix, room)
    assert list(before) == prefix[num_before - len(before) :]
    assert list(after) == suffix[: len(after)]
    assert len(before) + len(after) == min(room, num_before + num_after)
    assert len(after) >= min(num_after, room // 4)
    assert len(before) >= min(num_before, room - room // 4)


@pytest.mark.parametrize(("max_new_tokens", "budget"), [(0, 100), (10, 90), (25, 75), (90, 75), (1000, 75)])
def test_the_answer_gets_its_tokens_up_to_a_quarter_of_the_context(max_new_tokens: int, budget: int) -> None:
    assert infill_budget(100, max_new_tokens) == budget


def write_golden() -> None:
    """Every case with its text beside its ids, for people."""
    found = {}
    for case in CASES:
        made = golden_prompt(*case)
        found[title(*case)] = {"text": "" if isinstance(made, str) else vocabulary(case[0]).decode(made), "ids": made}
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in found.items()]
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m test_infill --write")
    write_golden()
