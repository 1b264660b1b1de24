"""Every command line of docs/lora.md runs, at a reduced size."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from click.testing import CliRunner

from starscope.cli.app import app
from starscope.cli.common import Session
from support.training import DOCUMENTS

PAGE = Path(__file__).parent.parent.parent / "docs" / "lora.md"
SMALL = ("--batch", "4", "--sample-tokens", "0", "--precision", "float32", "--steps", "2", "--ctx", "32")


def test_every_command_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mycode").mkdir()
    for number in range(12):
        (tmp_path / "mycode" / f"{number}.py").write_text(DOCUMENTS[number % 5] + f"# {number}\n", encoding="utf-8")
    lines = re.findall(r"^\$ starscope (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        words = shlex.split(line, comments=True)
        words += SMALL if words[0] == "finetune" else ()
        result = CliRunner().invoke(app, words, obj=Session(), prog_name="starscope")
        assert result.exit_code == 0, (words, result.stderr)
    assert {"adapter", "adapter.gguf", "report.html"} <= {path.name for path in (tmp_path / "style").iterdir()}


def test_the_page_names_options_that_exist():
    from starscope.cli.finetune import finetune

    names = {name for param in finetune.params for name in param.opts}
    table = re.findall(r"^\| `(--[^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for row in table for name in re.findall(r"(--?[a-z][a-z-]*)", row)}
    assert named
    assert named <= names
