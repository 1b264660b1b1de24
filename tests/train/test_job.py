"""A run as a whole: settings, presets, models to go on with, and ends that are checked."""

from __future__ import annotations

import errno
import json
import math
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

import starscope
from starscope import export
from starscope.errors import (
    CheckpointError,
    ContextOverflowError,
    DoesNotFitError,
    InputError,
    InvalidContentError,
    OutputError,
    OutputExistsError,
    StarscopeError,
    UnsupportedError,
    UsageError,
    VerificationError,
)
from starscope.family import all_families, find_family
from starscope.gguf import read_gguf, string, write_gguf
from starscope.tokenizer import Tokenizer
from starscope.train import job, output
from starscope.train.job import Job
from starscope.train.plan import make_plan
from starscope.train.presets import PRESETS, family_sizes
from starscope.train.settings import NAMES, Settings, read_settings, resolve, save_settings
from starscope.train.start import open_start
from support.training import DOCUMENTS

SMALL = {"context_length": 32, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "batch_size": 4, "vocab_size": 300}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.py").write_text(DOCUMENTS[number % 5] + f"# {number}\n", encoding="utf-8")
    return folder


def settings_of(corpus: Path, **given: object) -> Settings:
    asked = {"data": (str(corpus),), "precision": "float32", "held_out": 0.3, "sample_tokens": 0, "steps": 1, **SMALL}
    return resolve({**asked, **given})


def run(settings: Settings, out: Path, *, resume: bool = False) -> Job:
    made = Job(settings, out)
    made.check_output(resume=resume)
    made.prepare(resume=resume)
    made.train()
    made.finish()
    return made


# Settings.


def test_what_is_asked_for_wins_over_the_preset_and_that_over_what_was_saved():
    assert resolve({}).vocab_size == PRESETS["tiny"].values["vocab_size"]
    assert resolve({"steps": 7}, preset="demo").steps == 7
    assert resolve({}, preset="demo").hidden_size == 256
    saved = {"steps": 5, "hidden_size": 64, "data": ("a",)}
    assert resolve({"steps": 9}, saved=saved) == Settings(steps=9, hidden_size=64, data=("a",))
    assert resolve({"seed": 0, "data": ()}, saved={"seed": 4, "data": ("a",)}).seed == 0
    with pytest.raises(UsageError, match="no preset is called 'huge'; there are: tiny"):
        resolve({}, preset="huge")
    with pytest.raises(UsageError, match="no setting 'stepz'"):
        resolve({"stepz": 1})


def test_saved_settings_are_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    save_settings(tmp_path, Settings(steps=5))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_text", lambda self, *_args, **_named: (_ for _ in ()).throw(full))
    with pytest.raises(DoesNotFitError, match="the disk is full"):
        save_settings(tmp_path, Settings(steps=6))
    assert read_settings(tmp_path)["steps"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["settings.json"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"steps": "x"}', "steps 'x'; expected a whole number"),
        ('{"steps": true}', "steps True; expected a whole number"),
        ('{"steps": null}', "steps None; expected a whole number"),
        ('{"data": "x"}', "data 'x'; expected a list of texts"),
        ('{"data": [1]}', r"data \[1\]; expected a list of texts"),
        ('{"epochs": "1"}', "epochs '1'; expected a number"),
        ('{"recompute": 1}', "recompute 1; expected true or false"),
        ('{"stepz": 1}', "the key 'stepz', which is not a setting"),
    ],
)
def test_saved_settings_that_were_changed_by_hand_are_refused(tmp_path, text, said):
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(InvalidContentError, match=said):
        read_settings(tmp_path)
    (tmp_path / "settings.json").write_text('{"epochs": 1, "held_out": 0, "vocab_size": null, "data": ["a"]}')
    assert read_settings(tmp_path) == {"epochs": 1, "held_out": 0, "vocab_size": None, "data": ("a",)}


def test_a_folder_without_settings_says_how_to_go_on(tmp_path):
    with pytest.raises(InputError, match=r"holds no run to go on with: it has no settings\.json\. Leave --resume out"):
        read_settings(tmp_path)
    (tmp_path / "checkpoint.bin").touch()
    with pytest.raises(InputError, match=r"Give the options of the run again, with --checkpoint-in .*checkpoint\.bin"):
        read_settings(tmp_path)


def test_the_size_of_another_vocabulary_is_no_option():
    with pytest.raises(UsageError, match="the size of the vocabulary chars is its own"):
        resolve({"vocab": "chars", "vocab_size": 300})
    assert resolve({"vocab": "chars"}).vocab_size is None


def test_the_schedules_length_never_follows_from_the_steps():
    for preset in PRESETS:
        usual = resolve({}, preset=preset)
        assert resolve({"steps": 10 * usual.steps}, preset=preset).decay_steps == usual.decay_steps


def test_settings_are_read_as_they_were_saved(tmp_path):
    settings = resolve({"data": ("a", "b"), "prompts": ("x",), "epochs": 1.5, "warmup_steps": 3}, preset="nano")
    save_settings(tmp_path, settings)
    assert Settings(**read_settings(tmp_path)) == settings
    (tmp_path / "settings.json").write_text(json.dumps({"colour": "red"}))
    with pytest.raises(InvalidContentError, match="'colour', which is not a setting"):
        read_settings(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("family", all_families())
def test_every_preset_is_a_model_of_every_family(name, family):
    settings = resolve({}, preset=name)
    assert set(PRESETS[name].values) <= set(NAMES)
    hp = family_sizes(find_family(family), settings.sizes, 1000)
    assert (hp.num_layers, hp.hidden_size, hp.vocab_size) == (settings.num_layers, settings.hidden_size, 1000)


def test_the_demo_preset_is_the_shape_of_the_demo_model():
    demo = starscope.load("demo", engine="numpy").hparams
    settings = resolve({}, preset="demo")
    found = family_sizes(find_family("gpt_bigcode"), settings.sizes, settings.vocab_size)
    assert found.replace(norm_epsilon=np.float32(found.norm_epsilon)) == demo


# Before training.


def test_another_architecture_is_refused_early_with_what_there_is(corpus, tmp_path):
    with pytest.raises(UnsupportedError, match="no family is called 'phi3'; there are: gpt_bigcode"):
        Job(settings_of(corpus, family="phi3"), tmp_path / "out").prepare()
    phi = tmp_path / "phi.gguf"
    write_gguf(phi, {"general.architecture": string("phi3")}, [])
    with pytest.raises(UnsupportedError, match="'phi3'; supported: starcoder"):
        open_start(str(phi))


def test_what_no_file_could_hold_is_refused_before_training(corpus, tmp_path, monkeypatch):
    """As the original did not: there, such a vocabulary ended the run at its first save."""
    monkeypatch.setattr(Tokenizer, "to_files", lambda self: (_ for _ in ()).throw(UnsupportedError("no such file")))
    with pytest.raises(UnsupportedError, match="no such file"):
        Job(settings_of(corpus), tmp_path / "out").prepare()
    assert not (tmp_path / "out" / "checkpoint.bin").exists()
    with pytest.raises(UsageError, match="'q9' is unknown"):
        Job(settings_of(corpus, to="q9"), tmp_path / "out").check_output(resume=False)


def test_sizes_that_are_no_model_are_refused(corpus, tmp_path):
    for wrong in ({"num_heads": 5}, {"num_kv_heads": 3}, {"hidden_size": 0}):
        with pytest.raises((CheckpointError, UsageError)):
            Job(settings_of(corpus, **wrong), tmp_path / "out").prepare()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": 0}, "steps is 0; expected at least 1"),
        ({"epochs": math.nan, "steps": None}, "epochs is nan; expected a number above 0"),
        ({"epochs": 0.0, "steps": None}, "epochs is 0; expected a number above 0"),
        ({"weight_decay": math.nan}, "weight_decay is nan; expected 0 or more"),
        ({"beta1": 1.0}, "the betas are 1 and 0.95; expected from 0 to less than 1"),
        ({"beta2": math.nan}, "the betas are 0.9 and nan"),
        ({"clip_norm": -1.0}, "clip_norm is -1; expected 0 or more"),
        ({"final_share": 1.5}, "the lowest learning rate is 1.5 of the highest"),
        ({"seed": 2**63}, "the seed is 9223372036854775808; expected a whole number"),
        ({"sample_tokens": -1}, "sample_tokens is -1; expected 0 or more"),
        ({"name": "a\udcff"}, "the name 'a.*' is not valid UTF-8"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"family": "x"}, "no family is called 'x'"),
    ],
    ids=str,
)
def test_what_no_run_can_be_made_with_is_refused_before_the_text_is_read(tmp_path, wrong, said):
    settings = settings_of(tmp_path / "none", **wrong)
    with pytest.raises(StarscopeError, match=said):
        Job(settings, tmp_path / "out").check_output(resume=False)
    with pytest.raises(StarscopeError, match=said):
        make_plan(settings)


def test_a_folder_that_cannot_be_made_is_refused_before_the_text_is_read(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"file is a file; expected a folder, to make .*deep in"):
        Job(settings_of(corpus), tmp_path / "file" / "deep").check_output(resume=False)
    monkeypatch.setattr(job.os, "access", lambda *_: False)
    with pytest.raises(OutputError, match=r"cannot be written: .* allows nothing new"):
        Job(settings_of(corpus), tmp_path / "out").check_output(resume=False)


def test_what_is_asked_of_the_disk_has_room_for_a_checkpoint_beside_two(corpus, tmp_path):
    made = run(settings_of(corpus, hidden_size=128, steps=2, save_every=1), tmp_path / "out")
    two = sum((tmp_path / "out" / name).stat().st_size for name in ("checkpoint.bin", "checkpoint.previous.bin"))
    both = sum((tmp_path / "out" / name).stat().st_size for name in ("model.gguf", "hf/model.safetensors"))
    assert job.disk_bytes(made.parameters) >= max(two * 1.5, two + both)


def test_what_ended_a_run_is_told_even_where_its_report_cannot_be_written(corpus, tmp_path, monkeypatch):
    made = Job(settings_of(corpus), tmp_path / "out")
    made.prepare()
    full = DoesNotFitError("the disk is full")
    monkeypatch.setattr(made.trainer, "run", lambda: (_ for _ in ()).throw(full))
    monkeypatch.setattr(job, "write_report", lambda _: (_ for _ in ()).throw(OutputError("no report")))
    with pytest.raises(DoesNotFitError, match="the disk is full"):
        made.train()


def test_a_run_that_begins_again_leaves_nothing_of_the_one_before_to_go_on_from(corpus, tmp_path, monkeypatch):
    run(settings_of(corpus, steps=3, save_every=1), tmp_path / "out")
    again = Job(settings_of(corpus, steps=3, learning_rate=1e-4), tmp_path / "out", force=True)
    again.prepare()
    killed = KeyboardInterrupt()
    monkeypatch.setattr(again.trainer, "train_step", lambda _stop: (_ for _ in ()).throw(killed))
    with pytest.raises(KeyboardInterrupt):
        again.train()
    with pytest.raises(InputError, match="There is no checkpoint from before it"):
        Job(read_back(tmp_path / "out"), tmp_path / "out").prepare(resume=True)


def read_back(out: Path) -> Settings:
    return resolve({}, saved=read_settings(out))


def test_data_that_is_not_there_fails_at_once(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        Job(settings_of(tmp_path / "none"), tmp_path / "out").prepare()


def test_a_disk_that_is_too_small_is_told_before_training(corpus, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(job.shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10, 10))
    with pytest.raises(DoesNotFitError, match="its disk has 10 free"):
        Job(settings_of(corpus), tmp_path / "out").prepare()
    plan = make_plan(settings_of(corpus), tmp_path / "out")
    assert "its disk has 10 free" in plan.problems[-1].text
    assert plan.status == DoesNotFitError.exit_status


def test_a_model_that_does_not_fit_into_memory_is_told_before_training(corpus, tmp_path, monkeypatch):
    """As the original did not: there, the process was gone before "begin training"."""
    monkeypatch.setattr(job, "free_memory", lambda: 100_000)
    with pytest.raises(DoesNotFitError, match=r"takes \d+ bytes of memory \(parameters .* and 100000 are free"):
        Job(settings_of(corpus), tmp_path / "out").prepare()
    plan = make_plan(settings_of(corpus))
    assert plan.seconds is None
    assert "100000 are free" in plan.problems[-1].text
    assert plan.status == DoesNotFitError.exit_status


def test_an_output_that_is_something_else_is_left_alone(corpus, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="is a file"):
        Job(settings_of(corpus), tmp_path / "file").check_output(resume=False)
    (tmp_path / "out" / "hf").mkdir(parents=True)
    (tmp_path / "out" / "hf" / "notes.txt").write_text("mine")
    for made in (Job(settings_of(corpus), tmp_path / "out"), Job(settings_of(corpus), tmp_path / "out", force=True)):
        with pytest.raises(OutputExistsError):
            made.check_output(resume=False)


# The end.


def test_a_model_that_is_not_what_was_trained_fails_and_is_not_there(corpus, tmp_path, monkeypatch):
    """A run that seems to have worked has a model: never an empty file, and never another one."""
    made = Job(settings_of(corpus), tmp_path / "out")
    made.prepare()
    made.train()
    real = output.decode
    monkeypatch.setattr(output, "decode", lambda to, raw: real(to, raw) * np.float32(1.001))
    with pytest.raises(VerificationError, match="ulp from the weights"):
        made.finish()
    assert not (tmp_path / "out" / "model.gguf").exists()
    monkeypatch.undo()
    real_rows = export._their_rows
    monkeypatch.setattr(export, "_their_rows", lambda slot, ours: real_rows(slot, ours) + np.float32(1e-6))
    with pytest.raises(VerificationError, match="differs from the weights that it was made of"):
        made.finish()
    assert not (tmp_path / "out" / "hf").exists()


def test_no_path_and_no_time_enters_the_model(corpus, tmp_path):
    for place in ("one", "another place"):
        run(settings_of(corpus, name="Mine", license="mit"), tmp_path / place)
    one, other = (tmp_path / place / "model.gguf" for place in ("one", "another place"))
    assert one.read_bytes() == other.read_bytes()
    assert str(tmp_path).encode() not in one.read_bytes()
    with read_gguf(one) as file:
        assert (file.get("general.name"), file.get("general.license")) == ("Mine", "mit")


def test_epochs_are_so_many_times_through_the_data(corpus, tmp_path):
    made = Job(settings_of(corpus, steps=None, epochs=2.0), tmp_path / "out")
    made.prepare()
    per_epoch = made.trainer.batches.per_epoch
    assert made.settings.steps == -(-2 * per_epoch // 4)
    assert make_plan(settings_of(corpus, steps=None, epochs=2.0)).settings.steps == made.settings.steps


def test_training_touches_no_gpu(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("a GPU was asked for"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: pytest.fail("a GPU was asked for"))
    run(settings_of(corpus, precision="auto"), tmp_path / "out")


# Going on with a model.


def test_a_model_to_go_on_with_is_read_with_its_sizes_tokenizer_and_weights():
    start, demo = open_start("demo"), starscope.load("demo", engine="numpy")
    assert start.hparams == demo.hparams
    assert "lm_head.weight" not in start.weights
    assert all(array.dtype == np.float32 for array in start.weights.values())
    assert start.tokenizer.encode("x = 1") == demo.tokenizer.encode("x = 1")


def test_fewer_positions_of_it_may_be_kept_and_no_more_than_it_has(corpus, tmp_path):
    start, demo = open_start("demo", 64), starscope.load("demo", engine="numpy")
    assert start.hparams == demo.hparams.replace(context_length=64)
    assert start.weights["embed_positions.weight"].tobytes() == demo.weights["embed_positions.weight"][:64].tobytes()
    with pytest.raises((UsageError, ContextOverflowError, InvalidContentError)):
        open_start("demo", 1024)


def test_a_head_of_its_own_goes_on_as_one(corpus, tmp_path):
    first = run(settings_of(corpus), tmp_path / "first")
    weights = first.trainer.weights()
    weights["lm_head.weight"] = weights["embed_tokens.weight"] + np.float32(0.01)
    graph = first.graph
    export.write_folder(tmp_path / "untied", graph.family, graph.hp, weights, first.tokenizer)
    given = {"start": str(tmp_path / "untied"), "vocab_size": None}
    sizes = dict.fromkeys(("hidden_size", "num_layers", "num_heads"))
    going_on = settings_of(corpus, **given, **sizes)
    made = run(going_on, tmp_path / "out")
    assert made.parameters == first.parameters + weights["lm_head.weight"].size
    model = starscope.load(tmp_path / "out" / "model.gguf", engine="numpy")
    assert np.abs(model.weights["lm_head.weight"] - model.weights["embed_tokens.weight"]).max() > 1e-3
    whole = run(settings_of(corpus, **given, **sizes, steps=2), tmp_path / "whole")
    run(resolve({"steps": 2}, saved=read_settings(tmp_path / "out")), tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "model.gguf").read_bytes() == (tmp_path / "whole" / "model.gguf").read_bytes()
    assert whole.trainer.step == 2
