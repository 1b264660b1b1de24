"""examine(): what prepare() would make, told beforehand, in constant memory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from starscope.errors import InputError, InvalidContentError
from starscope.train.examine import DataReport, examine
from starscope.train.prepare import DataOptions, prepare
from support.training import DOCUMENTS

TREE = {f"part_{i}/{i}.py": f"# {i}\n{text}" for i, text in enumerate(DOCUMENTS * 6)}


def write_tree(folder: Path) -> Path:
    for name, text in TREE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def options(path: Path, **changes: object) -> DataOptions:
    return DataOptions([path], **{"vocab_size": 300, "context_length": 16, **changes})  # type: ignore[arg-type]


def sizes(report: DataReport) -> list[int]:
    train = [report.train_documents, report.train_bytes, report.train_tokens]
    return [*train, report.held_out_documents, report.held_out_bytes, report.held_out_tokens, report.vocab_size]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vocab": "chars", "vocab_size": None},
        {"vocab": "chars", "vocab_size": None, "fim_rate": 0},
        {"held_out": 0.2, "split": "documents"},
        {"held_out": 0},
        {"vocab_size": None},
    ],
    ids=str,
)
def test_the_report_says_what_is_then_made_and_writes_nothing(tmp_path, changes):
    tree = write_tree(tmp_path / "tree")
    before = sorted(tmp_path.rglob("*"))
    report = examine(options(tree, **changes))
    assert sorted(tmp_path.rglob("*")) == before
    made = prepare(options(tree, **changes), tmp_path / "data")
    expected = [file for file in (made.train, made.held_out) if file is not None]
    found = [x for file in expected for x in (file.documents, file.bytes, len(file.ids))]
    assert sizes(report) == [*found, *[0] * (6 - len(found)), made.vocab_size]
    assert not report.is_estimate
    assert report.samples == made.batches().per_epoch
    assert report.notes == made.notes
    assert (report.leakage is None) == (made.held_out is None)
    assert json.loads(json.dumps(report.as_json()))["vocab_size"] == made.vocab_size


def test_held_out_text_that_is_trained_on_too_is_a_problem(tmp_path):
    report = examine(options(write_tree(tmp_path / "tree"), held_out=0.2, split="documents"))
    assert report.leakage is not None
    assert report.leakage.gram_share > 0.5  # the tree repeats five texts
    [problem] = report.problems
    assert "runs of 13 words are in the training text too" in problem.text
    assert problem.status == 0  # the run would go on


def test_a_text_shorter_than_the_context_and_one_too_poor_for_the_vocabulary_are_problems(tmp_path):
    tree = write_tree(tmp_path / "tree")
    [problem] = examine(options(tree, context_length=100_000, held_out=0)).problems
    assert problem.text.endswith("tokens; expected at least the context, 100000.")
    with pytest.raises(InvalidContentError, match="expected at least context_length, 100000") as refused:
        prepare(options(tree, context_length=100_000, held_out=0), tmp_path / "a").batches()
    assert refused.value.exit_status == problem.status
    [problem] = examine(options(tree, vocab_size=30_000, held_out=0)).problems
    assert problem.text.endswith("tokens; a vocabulary of 30000 was asked for.")
    with pytest.raises(InvalidContentError, match="expected 30000") as refused:
        prepare(options(tree, vocab_size=30_000, held_out=0), tmp_path / "b")
    assert refused.value.exit_status == problem.status


def test_missing_data_fails_at_once(tmp_path):
    for refuse in (examine, lambda asked: prepare(asked, tmp_path / "data")):
        with pytest.raises(InputError, match=r"train\.bin does not exist"):
            refuse(options(tmp_path / "train.bin"))
    assert not (tmp_path / "data").exists()


def test_a_large_text_is_examined_in_constant_memory_and_its_tokens_are_estimated(tmp_path):
    line = "".join(f"w{number % 977} = call_{number % 89}({number})\n" for number in range(40_000))
    (tmp_path / "small.txt").write_text(line * 2)
    (tmp_path / "large.txt").write_text(line * 16)
    program = """
        import json, sys
        from starscope.bench import peak_rss_bytes as peak
        from starscope.train import examine as module, leakage
        from starscope.train.prepare import DataOptions
        module.VOCABULARY_BYTES = module.COUNTED_BYTES = leakage.MOST_BYTES = 1 << 20
        def run(name):
            return module.examine(DataOptions([name], vocab_size=512))
        before = run(sys.argv[1] + "/small.txt") and peak()
        report = run(sys.argv[1] + "/large.txt")
        print(json.dumps([report.train_tokens, report.is_estimate, peak() - before]))
    """
    code = textwrap.dedent(program)
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    tokens, is_estimate, more = json.loads(run.stdout)
    assert is_estimate
    assert more < 8 << 20
    small = examine(DataOptions([tmp_path / "small.txt"], vocab_size=512))
    assert tokens == pytest.approx(8 * small.train_tokens, rel=0.02)
