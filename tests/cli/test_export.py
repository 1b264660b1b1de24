"""`starscope export`: a GGUF file as a Hugging Face folder, from the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np

import starscope


def test_the_folder_runs_and_is_told_of(cli, model, tmp_path):
    result = cli("export", model, tmp_path / "hf", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["out"], report["format"], report["family"]) == (str(tmp_path / "hf"), "f32", "gpt_bigcode")
    assert "parameters in" in result.stderr
    ids = [1, 2, 3]
    one, two = (starscope.load(path, engine="numpy").forward(ids) for path in (model, tmp_path / "hf"))
    assert np.array_equal(np.asarray(one), np.asarray(two))
    assert cli("run", tmp_path / "hf", "def", "-n", "2").exit_code == 0


def test_what_cannot_be_exported_ends_with_its_status(cli, model, folder, tmp_path):
    assert cli("export", model, tmp_path / "hf").exit_code == 0
    for args, status, said in (
        ((model, tmp_path / "hf"), 2, "exists"),
        ((model, tmp_path / "x", "--to", "q8_0"), 4, "f32, f16, bf16"),
        ((folder, tmp_path / "x"), 2, "is a folder already"),
        ((tmp_path / "none.gguf", tmp_path / "x"), 3, "does not exist"),
    ):
        result = cli("export", *args)
        assert result.exit_code == status, result.stderr
        assert said in result.stderr
    assert cli("export", model, tmp_path / "hf", "--force", "--to", "bf16").exit_code == 0
    assert not (tmp_path / "x").exists()


def test_exporting_imports_no_torch(model, tmp_path):
    paths = f"{str(model)!r}, {str(tmp_path / 'hf')!r}"
    code = f"import sys; from starscope.export import export_gguf as e; e({paths}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
