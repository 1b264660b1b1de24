"""`doctor` and `demo`: what they tell, and what they do without the parts that may be absent."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import starscope
from starscope import __version__, machine, native
from starscope.cli import doctor
from starscope.engine.base import choose_engine


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name == "torch" else "1.0")


@pytest.fixture
def demo_model(model, tmp_path, monkeypatch):
    """The small model in the place of the one in the package."""
    (tmp_path / "demo").mkdir()
    shutil.copy(model, tmp_path / "demo" / "demo.gguf")
    monkeypatch.setattr("starscope.model.resources.files", lambda package: tmp_path)


@pytest.fixture
def no_demo_model(tmp_path, monkeypatch):
    monkeypatch.setattr("starscope.model.resources.files", lambda package: tmp_path)


def test_the_document_of_doctor_has_exactly_these_keys(cli):
    result = cli("doctor", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert list(document) == [
        "starscope", "python", "platform", "packages", "torch", "native", "engine",
        "cpu", "memory", "offline", "demo_model", "verdict",
    ]  # fmt: skip
    assert document["starscope"] == __version__
    assert list(document["torch"]) == ["version", "problem", "cuda_devices"]
    assert document["native"]["present"] == (native.kernels() is not None)
    assert list(document["cpu"]) == ["model", "cores", "usable_cores", "cgroup_cores"]
    assert 1 <= document["cpu"]["usable_cores"] <= document["cpu"]["cores"]
    assert document["memory"]["total"] > document["memory"]["available"] > 0
    assert document["verdict"].startswith("ready")


def test_the_last_line_is_the_verdict(cli, without_torch):
    lines = cli("doctor").stdout.splitlines()
    assert lines[-1].startswith("verdict     ready")
    assert "without torch (no training, gradients or GPU)" in lines[-1]
    assert any(line.startswith("torch       not installed") for line in lines)


def test_missing_kernels_are_told_with_the_reason(cli, without_torch, monkeypatch):
    monkeypatch.setattr(native, "kernels", lambda: None)
    monkeypatch.setattr(native, "why_missing", lambda: "it was not built")
    text = cli("doctor").stdout
    assert "kernels     missing: it was not built" in text
    assert "without compiled kernels" in text.splitlines()[-1]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("torch", [True, False])
def test_the_engine_told_is_the_one_that_load_chooses(compiled, torch, cli, monkeypatch, model):
    if not compiled:
        monkeypatch.setattr(native, "kernels", lambda: None)
        monkeypatch.setattr(native, "why_missing", lambda: "no compiler")
    if not torch:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    monkeypatch.setattr(doctor, "version_of", lambda name: "1.0" if torch or name != "torch" else None)
    name, note = choose_engine("cpu")
    document = json.loads(cli("doctor", "--json").stdout)
    assert list(document["engine"]) == ["name", "reason"]
    assert document["engine"]["name"] == name == starscope.load(model).engine.name
    assert note is None or document["engine"]["reason"] == note
    assert f"\nengine      the {name} engine runs it: " in cli("doctor").stdout
    slower = f"without compiled kernels (the {name} engine runs models, and everything is slower)"
    assert (slower in document["verdict"]) is not compiled


def test_a_torch_that_would_run_models_and_does_not_import_makes_it_not_ready(cli, monkeypatch):
    monkeypatch.setattr(native, "kernels", lambda: None)
    found = {"version": "9.9", "problem": "OSError: libgomp.so is missing", "cuda_devices": []}
    monkeypatch.setattr(doctor, "examine_torch", lambda: found)
    verdict = json.loads(cli("doctor", "--json").stdout)["verdict"]
    assert verdict.startswith("not ready: the torch engine would run models, but torch fails to import: OSError")


def test_the_packages_looked_at_are_those_that_the_installation_requires():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(doctor.PACKAGES) == {re.match(r"\w+", line)[0] for line in project["dependencies"]}


def test_doctor_runs_where_numpy_is_missing():
    code = "import sys; sys.modules['numpy'] = None; from starscope.cli import main; sys.argv[1:] = ['doctor']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "engine      import of numpy halted" in done.stdout


def test_a_torch_that_does_not_import_is_told_with_the_reason(cli, monkeypatch):
    found = {"version": "9.9", "problem": "OSError: libgomp.so is missing", "cuda_devices": []}
    monkeypatch.setattr(doctor, "examine_torch", lambda: found)
    assert "9.9, which fails to import: OSError: libgomp.so is missing" in cli("doctor").stdout


def test_a_missing_package_makes_it_not_ready(cli, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda name: None if name in ("torch", "tokenizers") else "1.0")
    assert "not ready: tokenizers not installed" in cli("doctor").stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"/sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 0.5),
    ],
)
def test_the_containers_limit_on_cores_is_read(files, cores, monkeypatch):
    monkeypatch.setattr(machine, "read_lines", lambda path: files[path].splitlines() if path in files else [])
    assert machine.cgroup_cores() == cores


def test_the_containers_limit_on_memory_is_read(monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 400 kB\n", "/sys/fs/cgroup/memory.max": "512000\n"}
    monkeypatch.setattr(machine, "read_lines", lambda path: files.get(path, "").splitlines())
    found = machine.memory()
    assert found == {"total": 1_024_000, "available": 409_600, "cgroup_limit": 512_000, "cgroup_left": 512_000}


def test_offline_switches_are_told(cli, without_torch, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "offline     HF_HUB_OFFLINE" in cli("doctor").stdout


def test_demo_completes_fills_a_hole_and_says_how_to_go_on(cli, demo_model):
    result = cli("demo")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"starscope {__version__}"
    assert "native engine · cpu" in lines[1]
    assert "parameters" in lines[2]
    assert "class Counter:" in lines
    assert ">>>" in result.stdout
    assert "<<<" in result.stdout
    assert "the model attended most to:" in result.stdout
    assert "tok/s" in result.stdout
    assert sum(line.startswith("  starscope ") for line in lines) == 4


def test_demo_without_its_model_is_status_3(cli, no_demo_model, tmp_path):
    result = cli("demo")
    assert result.exit_code == 3
    assert "the demo model is not in this installation" in result.stderr
    assert "Install the package again." in result.stderr


def test_demo_is_a_model_everywhere(cli, demo_model):
    assert cli("show", "demo").exit_code == 0
    assert cli("graph", "demo").exit_code == 0
    assert cli("tokenize", "demo", "def").exit_code == 0
    assert cli("run", "demo", "def", "-n", 2, "-q").exit_code == 0
