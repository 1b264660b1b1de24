"""prepare(): what a run reads, made once, reused while nothing changes, and refused in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from starscope.errors import DoesNotFitError, InvalidContentError, OutputError, UsageError
from starscope.train import prepare as module
from starscope.train.data import HEADER_BYTES, Batches
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


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 310},
        {"held_out": 0.1},
        {"split": "last"},
        {"vocab": "chars", "vocab_size": None},
        {"suffixes": (".py", ".pyi")},
    ],
    ids=str,
)
def test_tokens_are_made_again_when_what_they_depend_on_is_asked_for_otherwise(tree, tmp_path, change):
    prepare(options(tree, split="documents", held_out=0.2), tmp_path / "data")
    again = prepare(options(tree, **{"split": "documents", "held_out": 0.2, **change}), tmp_path / "data")
    assert again.reused == ("suffixes" in change)  # other suffixes, and still the same files


def test_tokens_are_reused_for_other_samples_of_the_same_text_and_the_facts_differ(tree, tmp_path):
    first = prepare(options(tree), tmp_path / "data")
    for change in ({"context_length": 8}, {"seed": 3}, {"fim_rate": 0.25}, {"fim_rate": 0.0}, {"spm_rate": 1.0}):
        other = prepare(options(tree, **change), tmp_path / "data")
        assert other.reused, change
        assert other.facts != first.facts, change
        assert {name: other.facts[name] for name in ("data", "tokenizer", "held_out")} == {
            name: first.facts[name] for name in ("data", "tokenizer", "held_out")
        }
        assert other.batches().batch(0, 4).shape == (4, other.options.context_length + 1)


def test_files_that_were_only_touched_or_moved_are_the_same_data(tree, tmp_path):
    first = prepare(options(tree), tmp_path / "data")
    os.utime(tree / "part_0" / "0.py")
    assert prepare(options(tree), tmp_path / "data").reused
    moved = tree.rename(tmp_path / "elsewhere")
    again = prepare(options(moved), tmp_path / "data")
    assert again.reused
    assert again.facts == first.facts


def test_files_are_recognised_by_their_times_once_those_are_old_enough(tree, tmp_path, monkeypatch):
    prepare(options(tree), tmp_path / "data")
    record = tmp_path / "data" / "data.json"
    assert json.loads(record.read_text())["stamp"] == ""  # written a moment ago: their times could stay the same
    monkeypatch.setattr(module, "SETTLED", -60.0)
    assert prepare(options(tree), tmp_path / "data").reused
    assert json.loads(record.read_text())["stamp"] != ""

    def read_again(*_: object) -> None:
        raise AssertionError("nothing has changed, and the text is read again")

    monkeypatch.setattr(module, "survey", read_again)
    assert prepare(options(tree), tmp_path / "data").reused
    (tree / "part_0" / "new.py").write_text("x = 1\n")
    with pytest.raises(AssertionError, match="read again"):
        prepare(options(tree), tmp_path / "data")


def test_a_change_that_keeps_size_and_time_is_noticed(tree, tmp_path):
    prepare(options(tree), tmp_path / "data")
    prepare(options(tree), tmp_path / "data")
    path = tree / "part_0" / "0.py"
    before = path.stat()
    path.write_text(path.read_text().replace("add", "dad"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert not prepare(options(tree), tmp_path / "data").reused


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def swap(path: Path) -> None:
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(data))


def poke(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES : HEADER_BYTES + 2] = b"\xff\xff"
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train.tokens", cut),
        ("train.tokens", poke),
        ("held_out.tokens", Path.unlink),
        ("held_out.tokens", lambda path: path.write_bytes(b"")),
        ("train.tokens", lambda path: path.write_bytes((path.parent / "held_out.tokens").read_bytes()[:-2])),
        ("tokenizer.json", Path.unlink),
        ("tokenizer.json", cut),
        ("tokenizer.json", swap),
        ("data.json", cut),
        ("data.json", lambda path: path.write_text('{"asked": 1}')),
        ("data.json", lambda path: path.write_text("[]")),
        ("data.json", Path.unlink),
    ],
)
def test_what_is_damaged_is_made_again_as_it_was(tree, tmp_path, name, damage):
    first = prepare(options(tree), tmp_path / "data")
    batch = first.batches().batch(0, 16)
    contents = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir() if path.name != "data.json"}
    damage(tmp_path / "data" / name)
    again = prepare(options(tree), tmp_path / "data")
    assert not again.reused
    assert again.facts == first.facts
    assert (again.batches().batch(0, 16) == batch).all()
    assert contents == {
        path.name: path.read_bytes() for path in (tmp_path / "data").iterdir() if path.name != "data.json"
    }


def test_an_interrupt_leaves_nothing_that_is_taken_for_whole(tree, tmp_path):
    prepare(options(tree), tmp_path / "data")

    def interrupt(what: str, done: int, total: int) -> None:
        assert 0 < done <= total
        if what == "tokenizing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(options(tree, vocab_size=310), tmp_path / "data", progress=interrupt)
    assert not list((tmp_path / "data").glob("*.tmp"))
    again = prepare(options(tree), tmp_path / "data")
    assert (again.reused, again.vocab_size) == (False, 300)


def test_progress_reaches_the_end_of_every_step(tree, tmp_path):
    last: dict[str, tuple[int, int]] = {}
    prepare(options(tree), tmp_path / "data", progress=lambda what, done, total: last.update({what: (done, total)}))
    assert set(last) == {"reading", "making the vocabulary", "tokenizing"}
    assert all(done == total > 0 for done, total in last.values())


def test_a_vocabulary_that_exists_is_used_as_it_is(tree, tmp_path):
    first = prepare(options(tree), tmp_path / "one")
    path = tmp_path / "one" / "tokenizer.json"
    second = prepare(options(tree, vocab=path, vocab_size=None), tmp_path / "two")
    assert (second.train.ids == first.train.ids).all()
    assert second.facts == first.facts
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["data.json", "held_out.tokens", "train.tokens"]
    write_tree(tmp_path / "other", {"a.txt": TEXT})
    third = prepare(options(tmp_path / "other" / "a.txt"), tmp_path / "three")
    other = prepare(options(tree, vocab=tmp_path / "three", vocab_size=None), tmp_path / "two")
    assert not other.reused
    assert other.facts["tokenizer"] == third.facts["tokenizer"]


def test_a_vocabulary_without_the_tokens_for_it_leaves_filling_in_the_middle_out_and_says_so(tree, tmp_path):
    prepare(options(tree, vocab="chars", vocab_size=None, fim_rate=0.0), tmp_path / "chars")
    notes: list[str] = []
    asked = options(tree, vocab=tmp_path / "chars", vocab_size=None)
    prepared = prepare(asked, tmp_path / "data", notes.append)
    assert (prepared.fim, prepared.pad, prepared.facts["fim"]) == (None, None, None)
    assert "the vocabulary has no tokens for filling in the middle: all text stays in its order." in notes
    plain = Batches(prepared.train.ids, context_length=16, seed=0)
    assert (prepared.batches().batch(0, 32) == plain.batch(0, 32)).all()


@pytest.mark.parametrize("vocab", ["bpe", "chars"])
def test_a_rearranged_sample_has_the_characters_of_its_text_and_of_no_special_token(tmp_path, vocab):
    spelled = "x = '<fim_prefix><|endoftext|>'  # é 日本 <fim_middle>\n"
    path = write_tree(tmp_path, {"a.txt": spelled * 40}) / "a.txt"
    asked = options(path, vocab=vocab, vocab_size=None, context_length=120, fim_rate=1.0, held_out=0)
    prepared = prepare(asked, tmp_path / "data")
    assert prepared.fim is not None
    special = set(vars(prepared.fim).values())
    assert special.isdisjoint(prepared.train.ids[:-1].tolist())
    moved = 0
    for sample in prepared.batches().batch(0, 10):
        assert len(sample) == 121
        moved += prepared.fim.middle in sample
        text = prepared.tokenizer.decode([token for token in sample.tolist() if token not in special])
        assert set(text) <= {*spelled, "\ufffd"}
    assert moved > 5


def test_a_model_with_fewer_rows_than_the_tokenizer_has_tokens_is_refused(tree, tmp_path):
    prepared = prepare(options(tree), tmp_path / "data")
    prepared.check_fits(300)
    prepared.check_fits(512)
    with pytest.raises(InvalidContentError, match="the tokenizer has 300 tokens; the model has 280"):
        prepared.check_fits(280)


def test_a_full_disk_is_said_and_leaves_nothing(tree, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.tokens.tmp").symlink_to("/dev/full")
    with pytest.raises(DoesNotFitError, match=r"the disk is full after \d+ bytes of .*train\.tokens\. Free some space"):
        prepare(options(tree), tmp_path / "data")
    assert not (tmp_path / "data" / "train.tokens.tmp").is_symlink()
    assert not prepare(options(tree), tmp_path / "data").reused


def test_a_folder_that_cannot_be_made_or_written_is_said(tree, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be made: Not a directory"):
        prepare(options(tree), tmp_path / "file" / "data")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.tokens.tmp").mkdir()
    with pytest.raises(OutputError, match=r"train\.tokens cannot be written: Is a directory"):
        prepare(options(tree), tmp_path / "data")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paths": ()}, "there is nothing to train on; expected files or folders"),
        ({"held_out": 1.0}, "the held-out share is 1.0; expected from 0 to less than 1"),
        ({"held_out": float("nan")}, "the held-out share is nan"),
        ({"fim_rate": 1.5}, "the rates are 1.5 and 0.5; expected probabilities between 0 and 1"),
        ({"split": "halves"}, "the split is 'halves'; expected auto, documents, last"),
        ({"context_length": 0}, "the context is 0 tokens; expected at least 1"),
        ({"vocab_size": 10}, "the vocabulary is of 10 tokens; expected at least 275"),
        ({"vocab_size": 10**12}, "the vocabulary is of 1000000000000 tokens; expected at most 16777216"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        DataOptions(**{"paths": ["a.txt"], **changes})


def test_every_epoch_is_of_all_the_text_and_in_another_order(tree, tmp_path):
    prepared = prepare(options(tree, fim_rate=0.0), tmp_path / "data")
    batches = prepared.batches()
    targets = []
    for epoch in range(3):
        samples = batches.batch(epoch * batches.per_epoch, batches.per_epoch)
        assert samples[:, 1:].size > len(prepared.train.ids) - 16
        targets.append(samples[:, 1:])
    assert (targets[0] != targets[1]).any()
    assert (targets[1] != targets[2]).any()
    again = prepare(options(tree, fim_rate=0.0), tmp_path / "data").batches()
    assert (again.batch(batches.per_epoch + 1, 2)[:, 1:] == targets[1][1:3]).all()


def test_memory_does_not_grow_with_the_length_of_a_line(tmp_path):
    program = """
        import pathlib, sys
        from starscope.bench import peak_rss_bytes
        from starscope.train.prepare import DataOptions, prepare
        def run(name, megabytes):
            path = pathlib.Path(sys.argv[1], name)
            with path.open("wb") as file:
                for part in range(megabytes * 16):
                    file.write(b"".join(b"%x" % (part * 7919 + n) for n in range(1 << 14))[: 1 << 16])
            made = prepare(DataOptions([path], vocab_size=300, split="last"), path.with_suffix(""))
            assert made.train.bytes + made.held_out.bytes == path.stat().st_size
            return peak_rss_bytes()
        small = run("small.txt", 1)
        print(run("large.txt", 3) - small)
    """
    code = textwrap.dedent(program)
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 8 << 20


def test_what_a_run_writes_beside_its_text_is_no_text_of_it(tree):
    first = prepare(options(tree), tree / "run" / "data")
    (tree / "run" / "data" / "notes.txt").write_text("not for training")
    assert prepare(options(tree), tree / "run" / "data").facts == first.facts
    (tree / "run" / "report.html").write_text("not for training either")
    again = prepare(options(tree, exclude=(tree / "run",)), tree / "run" / "data")
    assert (again.reused, again.facts) == (True, first.facts)


def test_a_run_that_goes_on_refuses_changed_text_and_options_and_keeps_its_own(tree, tmp_path):
    first = prepare(options(tree), tmp_path / "data")
    before = {path: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    for change in ({"vocab_size": 310}, {"held_out": 0.1}):
        with pytest.raises(InvalidContentError, match=r"began with another vocabulary, another held-out share"):
            prepare(options(tree, **change), tmp_path / "data", resume=True)
    (tree / "part_0" / "0.py").write_text("changed = True\n")
    with pytest.raises(InvalidContentError, match=r"the text has changed since the run .* had \d+ bytes and has \d+"):
        prepare(options(tree), tmp_path / "data", resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "data").iterdir()} == before
    (tree / "part_0" / "0.py").write_text(f"# 0\n{DOCUMENTS[0]}")
    assert prepare(options(tree), tmp_path / "data", resume=True).facts == first.facts
    (tmp_path / "data" / "train.tokens").unlink()  # what is missing is made again
    assert prepare(options(tree), tmp_path / "data", resume=True).facts == first.facts
