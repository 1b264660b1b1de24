"""Every Python block of the README and of docs/ runs, in order, one document's blocks in one session."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
GIVEN = "import numpy as np\nvector = np.zeros(256, np.float32)\n"


def blocks(path: Path) -> list[str]:
    return BLOCK.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks(path)], ids=lambda path: path.name)
def test_every_python_block_of_a_document_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {}
    exec(GIVEN, session)
    for number, block in enumerate(blocks(path)):
        exec(compile(block, f"{path.name}, block {number}", "exec"), session)
    assert capsys.readouterr().out


def test_the_microscopes_document_is_among_them() -> None:
    assert len(blocks(ROOT / "docs" / "microscope.md")) >= 4
