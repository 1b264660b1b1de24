"""--lora, merge and finetune on the command line: what is said, what is refused, and with which status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import starscope
from starscope.cli.app import app
from starscope.cli.common import Session
from starscope.convert import convert
from support.adapters import make_adapter
from support.training import DOCUMENTS

SMALL = ("-c", "32", "-b", "4", "--steps", "3", "--sample-tokens", "0", "--precision", "float32", "--log-every", "1")


def cli(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args], obj=Session(), prog_name="starscope")


@pytest.fixture(scope="module")
def place(checkpoint, tmp_path_factory):
    """base.gguf, adapter/, and text/."""
    folder = tmp_path_factory.mktemp("cli")
    convert(checkpoint, folder / "base.gguf", to="q8_0")
    make_adapter(checkpoint, folder / "adapter", targets=["c_attn", "c_fc"])
    (folder / "text").mkdir()
    for number, text in enumerate(DOCUMENTS * 2):
        (folder / "text" / f"{number}.py").write_text(text, encoding="utf-8")
    return folder


def test_run_says_what_adapts_the_model(place):
    plain, adapted = (
        cli("run", place / "base.gguf", "def f(", "-n", 8, *more) for more in ((), ("--lora", place / "adapter"))
    )
    assert plain.exit_code == adapted.exit_code == 0, adapted.stderr
    assert "adapter adapts 4 matrices of rank 4, times 1." in adapted.stderr
    model = starscope.load(place / "base.gguf", lora=place / "adapter")
    assert adapted.stdout == model.generate("def f(", max_new_tokens=8).text


def test_a_scale_follows_behind_a_colon_and_several_are_taken(place):
    zero = cli("run", place / "base.gguf", "def f(", "-n", 8, "--lora", f"{place / 'adapter'}:0")
    assert zero.stdout == cli("run", place / "base.gguf", "def f(", "-n", 8).stdout
    both = ("--lora", f"{place / 'adapter'}:1.5", "--lora", f"{place / 'adapter'}:-1.5")
    assert "times 1.5" in cli("run", place / "base.gguf", "def f(", "-n", 8, *both).stderr


def test_every_verb_that_runs_a_model_takes_adapters(place, tmp_path):
    lora = ("--lora", place / "adapter")
    text = place / "text" / "0.py"
    found = [json.loads(cli("perplexity", place / "base.gguf", text, "--json", *more).stdout) for more in ((), lora)]
    assert found[0]["perplexity"] != found[1]["perplexity"]
    traced = cli("trace", place / "base.gguf", "def f(", "--value", "logits", "--json", *lora)
    [value] = json.loads(traced.stdout)["values"].values()
    model = starscope.load(place / "base.gguf", lora=place / "adapter")
    [wanted] = model.engine.forward([model.tokenizer.encode("def f(")], None, "all")
    assert np.allclose(np.array(value["data"])[0], wanted, atol=1e-5)
    bench = cli("bench", place / "base.gguf", "-p", 8, "-n", 4, "-d", 0, "-b", 1, "--repeat", 1, *lora)
    assert bench.exit_code == 0, bench.stderr


REFUSED = {
    "no such file": (("--lora", "none"), 3, "none does not exist"),
    "a model": (("--lora", "base.gguf"), 4, "general.type"),
    "no number": (("--lora", "adapter:much"), 2, "expected FILE or FILE:SCALE, with a finite number"),
    "an infinite scale": (("--lora", "adapter:inf"), 2, "expected FILE or FILE:SCALE, with a finite number"),
    "a base alone": (("--lora-base", "base.gguf"), 2, "expected --lora too"),
    "an empty name": (("--lora-base", ""), 2, "empty"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_adapter_is_refused(place, what, monkeypatch):
    options, status, said = REFUSED[what]
    monkeypatch.chdir(place)
    result = cli("run", "base.gguf", "x", "-n", "1", *options)
    assert result.exit_code == status, result.stderr
    assert said in result.stderr
    assert result.stderr.startswith("error: ")


def test_merge_writes_a_file_that_needs_no_adapter(place, tmp_path):
    result = cli("merge", place / "base.gguf", "--lora", place / "adapter", "-o", tmp_path / "out.gguf", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["out"] == str(tmp_path / "out.gguf")
    assert "verified" in result.stderr
    assert "its adapters beside it" in result.stderr
    assert cli("run", tmp_path / "out.gguf", "def f(", "-n", 4).exit_code == 0
    again = cli("merge", place / "base.gguf", "--lora", place / "adapter", "-o", tmp_path / "out.gguf")
    assert again.exit_code == 2
    assert "--force" in again.stderr


@pytest.mark.parametrize(
    "options", [("-o", "x.gguf"), ("--lora", "adapter"), ("--lora", "adapter", "-o", "x", "--to", "q9")]
)
def test_merge_says_what_is_missing(place, options, monkeypatch):
    monkeypatch.chdir(place)
    assert cli("merge", "base.gguf", *options).exit_code == 2


def test_the_old_verb_is_told_the_new_one():
    assert "Did you mean merge?" in cli("export-lora").stderr


def test_finetune_ends_with_an_adapter_and_goes_on(place, tmp_path):
    out = tmp_path / "out"
    made = cli("finetune", place / "base.gguf", place / "text", "--out", out, "--json", *SMALL, "--merge")
    assert made.exit_code == 0, made.stderr
    document = json.loads(made.stdout)
    assert document["steps"] == 3
    assert {Path(document[key]).exists() for key in ("adapter", "file", "merged", "report", "log")} == {True}
    assert set(document["ranks"].values()) == {8}
    for lora in (document["adapter"], document["file"]):
        assert cli("run", place / "base.gguf", "def f(", "-n", 2, "--lora", lora).exit_code == 0
    on = cli("finetune", "--out", out, "--resume", "--steps", 5, "--json")
    assert on.exit_code == 0, on.stderr
    assert json.loads(on.stdout)["steps"] == 5
    assert cli("finetune", place / "base.gguf", place / "text", "--out", out, *SMALL).exit_code == 2


def test_a_dry_run_of_finetune_says_what_it_would_take_and_makes_nothing(place, tmp_path):
    asked = ("finetune", place / "base.gguf", place / "text", "--out", tmp_path / "out", *SMALL)
    planned = cli(*asked, "--dry-run", "--json")
    assert planned.exit_code == 0, planned.stderr
    assert not (tmp_path / "out").exists()
    plan, made = json.loads(planned.stdout), json.loads(cli(*asked, "--json").stdout)
    for name in ("parameters", "ranks", "steps"):
        assert plan[name] == made[name], name
    assert plan["memory_bytes"]["gradients"] == 4 * plan["parameters"]
    assert plan["seconds"] > 0
    assert "parameters for 8 linear layers of 2 blocks" in cli(*asked, "--dry-run", "--force").stdout
    assert cli(*asked, "--dry-run").exit_code == 2  # the folder holds a run


def test_an_adapter_given_as_a_model_is_told_apart(place, tmp_path):
    made = cli("finetune", place / "base.gguf", place / "text", "--out", tmp_path / "out", "--json", *SMALL)
    document = json.loads(made.stdout)
    for path in (document["file"], document["adapter"]):
        for verb in (("run", path, "x"), ("show", path), ("merge", path, "--lora", document["file"], "-o", "o.gguf")):
            result = cli(*verb)
            assert f"{path} is an adapter; expected a model." in result.stderr + result.stdout, verb
            assert result.exit_code == (0 if verb == ("show", document["file"]) else 4), verb


def test_the_flags_of_llama_cpps_finetune_are_taken(place, tmp_path):
    out, file = tmp_path / "out", tmp_path / "lora-ITERATION.gguf"
    flags = ("--model_base", place / "base.gguf", "--train-data", place / "text", "--lora_r", 2, "--lora-alpha", 4)
    flags += ("--rank-ffn_up", 3, "--rank-att-norm", 1, "--lora-out", file, "--adam-alpha", 1e-3, "--use-checkpointing")
    flags += ("--adam-iter", 2, "-c", 32, "-b", 4, "--checkpoint-out", tmp_path / "check-ITERATION", "--no-flash")
    made = cli("finetune", "--out", out, "--json", "--predict", 0, *flags)
    assert made.exit_code == 0, made.stderr
    document = json.loads(made.stdout)
    assert document["alpha"] == 4
    assert document["ranks"]["layers.0.self_attn.qkv_proj.weight"] == 2
    assert document["ranks"]["layers.1.mlp.up_proj.weight"] == 3
    assert (tmp_path / "lora-2.gguf").read_bytes() == Path(document["file"]).read_bytes()
    assert (tmp_path / "check-2").exists()
    assert "norms and the token embedding get no adapter" in made.stderr
    assert "--no-flash has no effect" in made.stderr


WRONG = {
    "no model": (("--data", "text", "--out", "o"), 2, "MODEL is missing"),
    "no data": (("base.gguf", "--out", "o"), 2, "--data is missing"),
    "no folder": (("base.gguf", "text"), 2, "--out is missing"),
    "no rank": (("base.gguf", "text", "--out", "o", "-r", "0"), 2, "the rank is 0"),
    "a rank too large": (("base.gguf", "text", "--out", "o", "-r", "65"), 2, "expected 1 to 64"),
    "a target that is none": (
        ("base.gguf", "text", "--out", "o", "--targets", "q_proj"),
        2,
        "'q_proj'; there are: qkv_proj",
    ),
    "queries of a fused projection": (("base.gguf", "text", "--out", "o", "--rank-wq", "2"), 2, "there are: qkv_proj"),
    "an alpha that is none": (("base.gguf", "text", "--out", "o", "--alpha", "-1"), 2, "alpha is -1"),
    "a model that is not there": (("none.gguf", "text", "--out", "o"), 3, "none.gguf does not exist"),
    "more positions than there are": (("base.gguf", "text", "--out", "o", "-c", "999"), 4, "999"),
}


@pytest.mark.parametrize("what", WRONG)
def test_finetune_refuses_before_it_begins(place, what, monkeypatch, tmp_path):
    options, status, said = WRONG[what]
    monkeypatch.chdir(place)
    result = cli("finetune", *(tmp_path / "o" if option == "o" else option for option in options))
    assert result.exit_code == status, result.stderr
    assert said in result.stderr


def test_every_option_of_training_is_finetunes_or_about_a_new_model():
    from starscope.cli.finetune import OF_A_NEW_MODEL, finetune
    from starscope.cli.train_options import ROWS
    from starscope.train.settings import NAMES

    names = {param.name for param in finetune.params}
    assert {row[1][0] for row in ROWS} >= OF_A_NEW_MODEL
    assert {row[1][0] for row in ROWS} - OF_A_NEW_MODEL <= names
    assert {"rank", "alpha", "targets"} <= names & set(NAMES)


def test_the_help_has_sections():
    text = cli("finetune", "--help").stdout
    assert re.findall(r"^(\w[\w ]*):$", text, re.M)[:2] == ["Data", "Adapter"]
