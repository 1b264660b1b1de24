"""`plan`, --mtest and the options that place a model, on a machine without a GPU."""

from __future__ import annotations

import json
import re

import pytest

import starscope
from starscope.errors import DoesNotFitError, UnsupportedError, UsageError


@pytest.fixture
def call(cli):
    """Run a command line that has to end with a status."""

    def run(*args, status=0):
        result = cli(*args)
        assert result.exit_code == status, result.stderr
        return result

    return run


def document(call, *args):
    return json.loads(call("plan", "demo", *args, "--json").stdout)


def test_the_document_has_the_keys_that_scripts_rely_on(call):
    found = document(call, "--devices", "cuda:24GiB", "-ngl", "7", "--ctx", "256")
    assert (found["repeating_layers"], found["non_repeating"], found["v_cache"], found["k_cache"]) == (
        6, True, False, False,
    )  # fmt: skip
    assert found["offloaded"] == 7
    assert found["max_offloadable"] == 9
    assert set(found["bytes"]) == {"weights", "kv", "scratch", "total"}
    assert found["bytes"]["total"] == sum(found["bytes"][part] for part in ("weights", "kv", "scratch"))
    assert found["tensors"]["layers.0.mlp.up_proj.weight"] == "cuda"
    assert found["context_length"] == 256
    assert found["fallback"] is None


def test_with_low_vram_keys_and_values_stay_with_the_host(call):
    found = document(call, "--devices", "cuda:24GiB", "-ngl", "all", "--low-vram")
    assert not found["v_cache"]
    assert not found["k_cache"]
    assert found["bytes"]["kv"] == 0
    assert found["max_offloadable"] == 7
    assert any("cannot offload" in line or "not allocating" in line for line in found["report"])


def test_too_small_a_device_is_refused_and_auto_takes_what_fits(call):
    refused = call("plan", "demo", "--devices", "cuda:3MiB", "-ngl", "all", status=5)
    assert "would fit" in refused.stderr
    found = document(call, "--devices", "cuda:71MiB")
    assert 0 < found["offloaded"] < 9
    assert "more on cuda" in found["fallback"]


def test_a_gpu_that_is_asked_for_and_not_there_is_refused_by_every_verb(call):
    for verb in (["plan", "demo"], ["run", "demo", "x", "-n", "1"], ["bench", "demo", "-p", "8", "-n", "1"]):
        result = call(*verb, "-ngl", "3", status=4)
        assert "GPU" in result.stderr
    assert call("run", "demo", "x", "-n", "1", "-ngl", "0").stdout
    assert call("run", "demo", "x", "-n", "1", "-ngl", "auto").stdout


def test_the_help_lists_what_is_of_plan_then_the_placing_then_what_every_verb_has(call):
    def listed(verb):
        return re.findall(r"^  (--?[a-z]+)", call(verb, "--help").stdout.partition("Options:")[2], re.MULTILINE)

    placing = ["-ngl", "-lv", "--kv", "-mg", "-ts"]
    assert listed("plan") == ["--devices", "--ctx", *placing, "--json", "-q", "-v", "--traceback", "-h"]
    of_run = listed("run")
    first = of_run.index("-ngl")
    assert of_run[first : first + 7] == [*placing, "--mtest", "--json"]


def test_mtest_tells_the_plan_and_runs_nothing(call):
    assert call("run", "demo", "--mtest").stdout == call("plan", "demo").stdout


@pytest.mark.parametrize(
    "args",
    [
        ["--devices", "cuda:24 pounds"],
        ["--devices", "cuda:1GB,cuda:1GB"],
        ["--devices", ""],
        ["--devices", "cpu:1GB"],
        ["-ngl", "-1"],
        ["-ngl", "most"],
        ["--devices", "cuda:1GB", "--main-gpu", "1"],
        ["--devices", "cuda:1GB", "--tensor-split", "1,1"],
        ["--devices", "cuda:1GB", "--tensor-split", "0"],
        ["--devices", "cuda:1GB", "--tensor-split", "a,b"],
        ["--ctx", "0"],
    ],
    ids=" ".join,
)
def test_options_that_mean_nothing_are_usage_errors(call, args):
    assert call("plan", "demo", *args, status=2).stderr


def test_a_context_that_the_model_does_not_have_is_refused(call):
    assert "513" in call("plan", "demo", "--ctx", "513", status=4).stderr


def test_load_places_as_the_command_line_does():
    with pytest.raises(UnsupportedError, match="none"):
        starscope.load("demo", gpu_layers=2)
    with pytest.raises(UsageError, match="gpu_layers"):
        starscope.load("demo", gpu_layers=-1)
    with pytest.raises((UnsupportedError, DoesNotFitError)):
        starscope.load("demo", device="cuda")
    model = starscope.load("demo", gpu_layers="auto", low_vram=True)
    assert model.placed.fallback is not None
    assert model.placed.fallback in model.notes


@pytest.mark.parametrize(
    "verb",
    [
        ["run", "demo", "x", "-n", "1"],
        ["perplexity", "demo", __file__],
        ["trace", "demo", "x", "--value", "logits"],
        ["bench", "demo", "-p", "8", "-n", "2", "-d", "0", "-b", "1", "--repeat", "1"],
    ],
    ids=lambda verb: verb[0],
)
def test_what_was_asked_for_and_is_not_so_is_a_line_and_a_field_of_every_verb(call, verb):
    assert "placement" not in json.loads(call(*verb, "--json").stdout)
    result = call(*verb, "--low-vram", "--json")
    fallback = json.loads(result.stdout)["placement"]["fallback"]
    assert "low VRAM" in fallback
    assert fallback in result.stderr
