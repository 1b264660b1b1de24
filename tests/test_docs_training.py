"""Every command line about training in the README and in docs/ runs, at a reduced size."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from starscope.cli.app import app
from starscope.train.flags import GONE
from starscope.train.presets import PRESETS
from support.training import DOCUMENTS

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "training.md"
PAGES = [path for path in (ROOT / "README.md", DOCUMENT) if "$ starscope train " in path.read_text(encoding="utf-8")]
SHAPE = ("--embd", "32", "--head", "4", "--layer", "2", "--ff", "64")
SMALL = ("--batch", "4", "--sample-tokens", "2", "--precision", "float32")


def commands(path: Path) -> list[list[str]]:
    """The words of each `$ starscope ...` of a document's console blocks that has to do with what was trained."""
    text = "".join(re.findall(r"^```console\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
    made = set()
    found = []
    for line in re.findall(r"^\$ starscope (.*)$", text, re.MULTILINE):
        if not line.startswith("train ") and not any(f" {folder}/" in line for folder in made):
            continue  # some go over several lines
        words = shlex.split(line, comments=True)
        if words[0] == "train":
            made.add(words[words.index("--out") + 1])
        found.append(words)
    return found


def reduced(words: list[str], steps: int) -> list[str]:
    """A command line of `train`, at a size that takes a second. Steps grow, so that a run can be continued."""
    words = [*words, *SMALL, "--steps", str(steps)]
    if "--resume" in words:
        return words
    if "--from" not in words:
        words += [*SHAPE]
        if not {"nano", "--tokenizer"} & set(words):
            words += ["--vocab-size", "300"]
    return [*words, "--ctx", "32"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_of_a_document_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mycode").mkdir()
    for number in range(12):
        (tmp_path / "mycode" / f"{number}.py").write_text(DOCUMENTS[number % 5] + f"# {number}\n", encoding="utf-8")
    (tmp_path / "verse.txt").write_text("Now is the winter of our discontent\n" * 60)
    found = commands(path)
    assert found
    for number, words in enumerate(found):
        words = reduced(words, number + 1) if words[0] == "train" else words
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (words, result.stderr)
        if words[0] == "train":
            folder = tmp_path / words[words.index("--out") + 1]
            assert {"model.gguf", "hf", "log.jsonl", "report.html", "checkpoint.bin"} <= {
                p.name for p in folder.iterdir()
            }


def test_the_document_names_every_preset():
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert list(rows) == list(PRESETS)
    for name, about in rows.items():
        values = PRESETS[name].values
        assert f"{values['num_layers']} blocks × {values['hidden_size']}" in about
        assert f"context {values['context_length']:,}" in about


def test_help_names_every_flag_of_the_original():
    text = CliRunner().invoke(app, ["train", "--help"]).stdout
    assert all(name in text for row in GONE for name in row.names)
