"""`starscope train`: from text to a model that runs, in one command line."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import starscope  # noqa: E402
from starscope.train.flags import GONE, SWITCHES  # noqa: E402
from starscope.train.settings import NAMES  # noqa: E402
from support.training import DOCUMENTS  # noqa: E402

ULP = 2.0**-23
SHAPE = ("--ctx", 32, "--embd", 32, "--head", 4, "--layer", 2)
SIZES = (
    *("--vocab-size", 300, *SHAPE, "--batch", 4, "--precision", "float32", "--held-out", 0.3),
    *("--eval-every", 100, "--save-every", 100, "--log-every", 1, "--sample-tokens", 4),
)

# Every flag of the original and of what became of it, with a value where one follows.
ORIGINAL = """
--vocab-model X --train-data X --checkpoint-in X --checkpoint-out X --model-out X -s 1 --seed 1 -c 32 --ctx 32 --embd 32
--mult 8 --head 4 --layer 2 --rotmax 8 -t 2 -b 4 --batch 4 -n 3 --examples 3 --predict 4 --print-info-interval 1
--print-details-interval 2 --samples-after-nl --use-adam --use-lbfgs --use-flash --no-flash --use-scratch --no-scratch
--warmup 2 --cos-decay-steps 9 --cos-decay-restart 1.1 --cos-decay-alpha 0 --lbfgs-iter 2 --adam-iter 2
--adam-alpha 1e-3 --adam-decay 0.1 --mem-model 2 --mem-compute 24 --mem-compute0 8 --mem-compute1 2
--save-every 10 --pattern-fn-it X --fn-latest X --grad-acc 1 --use-checkpointing --no-checkpointing --sample-start X
--include-sample-start --escape --overlapping-samples --fill-with-next-samples --separate-with-eos --separate-with-bos
--no-separate-with-eos --no-separate-with-bos --sample-random-offsets --force-reshuffle --adam-min-alpha 0
--adam-decay-min-ndim 2 --adam-beta1 0.9 --adam-beta2 0.95 --adam-gclip 1 --adam-epsf 0 --cos-decay-min 0.1
--enable-restart --disable-restart --opt-past 0 --opt-delta 1e-5 --opt-max-no-improvement 0 --epochs 1 -ngl 1
--n-gpu-layers 1 --only-write-model --norm-rms-eps 1e-5 --rope-freq-base 1e4 --rope-freq-scale 1 --ff 64 --use-alloc
--no-alloc --mem-lora 1
"""


def flags() -> list[tuple[str, ...]]:
    """Each with its value."""
    words = ORIGINAL.split()
    starts = [i for i, word in enumerate(words) if re.match(r"--?[a-z]", word)]
    return [tuple(words[start:stop]) for start, stop in zip(starts, [*starts[1:], None], strict=True)]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files of code, some of which are held out."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(12):
        text = DOCUMENTS[number % len(DOCUMENTS)] + f"# {number}\n"
        (folder / f"{number}.py").write_text(text, encoding="utf-8")
    return folder


def log_of(folder: Path, key: str) -> list:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line[key] for line in lines if key in line]


def test_text_becomes_a_model_that_runs_here_and_in_transformers(cli, corpus, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    result = cli("train", "--data", corpus, "--out", out, "--steps", 3, *SIZES, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["steps"], document["model"]) == (3, str(out / "model.gguf"))
    assert document["bits_per_byte"] == pytest.approx(log_of(out, "bits_per_byte")[-1], abs=1e-5)
    assert len(log_of(out, "loss")) == 3
    assert (out / "report.html").is_file()
    assert cli("run", out / "model.gguf", "def add(", "-n", 3).exit_code == 0
    model, text = starscope.load(out / "model.gguf", engine="numpy"), "def add(a, b):"
    ids = model.tokenizer.encode(text)
    assert AutoTokenizer.from_pretrained(out / "hf").encode(text) == ids
    ours = np.asarray(model.forward(ids))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(out / "hf", attn_implementation="eager")(torch.tensor([ids]))
    assert np.abs(ours - theirs.logits.numpy()).max() <= 32 * ULP * np.abs(ours).max()


def test_stopped_and_resumed_gives_the_bytes_of_never_stopped(cli, corpus, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert cli("train", corpus, "--out", whole, "--steps", 6, *SIZES).exit_code == 0
    assert cli("train", corpus, "--out", parts, "--steps", 4, *SIZES).exit_code == 0
    resumed = cli("train", "--out", parts, "--resume", "--steps", 6)
    assert resumed.exit_code == 0, resumed.stderr
    assert (whole / "model.gguf").read_bytes() == (parts / "model.gguf").read_bytes()
    assert (whole / "hf" / "model.safetensors").read_bytes() == (parts / "hf" / "model.safetensors").read_bytes()
    assert log_of(whole, "loss") == log_of(parts, "loss")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_anywhere_and_resumed_is_byte_for_byte_uninterrupted(spawn, cli, corpus, tmp_path, sent):
    out, options = tmp_path / "out", (*SIZES, "--grad-acc", 2, "--save-every", 7)
    process = spawn("train", corpus, "--out", out, "--steps", 100_000, *options)
    end = time.monotonic() + 90
    while time.monotonic() < end and not (out / "checkpoint.previous.bin").exists():
        time.sleep(0.02)
    process.send_signal(sent)
    _, stderr = process.communicate(timeout=60)
    assert not (out / "model.gguf").exists()
    if sent == signal.SIGKILL:
        assert process.returncode == -sent
    else:
        assert process.returncode == 128 + sent, stderr
        assert b"--resume continues from there" in stderr
        assert (out / "report.html").is_file()
    steps = len(log_of(out, "loss")) + 3
    resumed = cli("train", "--out", out, "--resume", "--steps", steps)
    assert resumed.exit_code == 0, resumed.stderr
    assert cli("train", corpus, "--out", tmp_path / "whole", "--steps", steps, *options).exit_code == 0
    assert log_of(out, "loss") == log_of(tmp_path / "whole", "loss")
    for name in ("model.gguf", "hf/model.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_that_is_there_is_neither_replaced_nor_mixed_up(cli, corpus, tmp_path):
    out = tmp_path / "out"
    assert cli("train", corpus, "--out", out, "--steps", 1, *SIZES).exit_code == 0
    again = cli("train", corpus, "--out", out, "--steps", 1, *SIZES)
    assert again.exit_code == 2
    assert "holds a run" in again.stderr
    assert cli("train", corpus, "--out", out, "--steps", 2, "--force", *SIZES).exit_code == 0
    assert log_of(out, "step")[-1] == 2
    assert sum(step == 1 for step in log_of(out, "step")) == 1
    other = cli("train", "--out", out, "--resume", "--steps", 3, "--seed", 5)
    assert other.exit_code == 4
    assert "was made with" in other.stderr
    missing = cli("train", "--out", tmp_path / "none", "--resume")
    assert missing.exit_code == 3
    assert "settings.json" in missing.stderr


def test_a_run_inside_of_its_data_is_no_part_of_it(cli, corpus, tmp_path):
    """As in `starscope train . --out model`: report.html is text, and would be other text every time."""
    folder = shutil.copytree(corpus, tmp_path / "code")
    assert cli("train", folder, "--out", folder / "out", "--steps", 1, *SIZES).exit_code == 0
    resumed = cli("train", "--out", folder / "out", "--resume", "--steps", 2)
    assert resumed.exit_code == 0, resumed.stderr
    again = cli("train", folder, "--out", folder / "out", "--steps", 2, "--force", *SIZES)
    assert again.exit_code == 0, again.stderr
    outside = tmp_path / "out"
    assert cli("train", corpus, "--out", outside, "--steps", 2, *SIZES).exit_code == 0
    assert (outside / "model.gguf").read_bytes() == (folder / "out" / "model.gguf").read_bytes()


def test_going_on_with_a_gguf_file_or_a_folder_begins_with_its_weights(cli, corpus, tmp_path):
    first = tmp_path / "first"
    assert cli("train", corpus, "--out", first, "--steps", 2, *SIZES).exit_code == 0
    before = starscope.load(first / "model.gguf", engine="numpy")
    for source in (first / "model.gguf", first / "hf"):
        out = tmp_path / f"from {source.name}"
        slow = ("--lr", 1e-30, "--weight-decay", 0, "--steps", 1, "--batch", 4, "--precision", "float32")
        result = cli("train", corpus, "--from", source, "--out", out, *slow, "--sample-tokens", 0)
        assert result.exit_code == 0, result.stderr
        after = starscope.load(out / "model.gguf", engine="numpy")
        assert after.hparams == before.hparams
        assert after.vocab() == before.vocab()
        for name, array in after.weights.items():
            assert np.abs(array - before.weights[name]).max() <= 1e-12
        resumed = cli("train", "--out", out, "--resume", "--steps", 2)  # it needs the other model no more
        assert resumed.exit_code == 0, resumed.stderr
    refused = cli("train", corpus, "--from", first / "hf", "--out", tmp_path / "x", "--layer", 3)
    assert refused.exit_code == 2
    assert "num_layers is that of the model to start from" in refused.stderr
    longer = cli("train", corpus, "--from", first / "hf", "--out", tmp_path / "x", "--ctx", 64)
    assert longer.exit_code in (2, 4)


def test_a_dry_run_says_what_it_would_take_and_makes_nothing(cli, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = cli("train", corpus, "--dry-run", *SIZES, "--json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["data"]["documents"] == 12
    assert plan["data"]["train_tokens"] > 32
    assert 0 <= plan["data"]["leakage"]["line_share"] <= 1
    assert list(tmp_path.iterdir()) == []
    assert plan["memory_bytes"]["total"] == sum(plan["memory_bytes"].values()) / 2
    assert plan["seconds"] > 0
    text = cli("train", corpus, "--dry-run", *SIZES).stdout
    assert f"{plan['parameters']:,} parameters: 2 blocks × 32, 4 heads" in text
    assert re.search(r"^memory +\S+ MiB: process .*, activations", text, re.MULTILINE)
    real = cli("train", corpus, "--out", tmp_path / "out", "--steps", 1, *SIZES, "--json")
    assert json.loads(real.stdout)["parameters"] == plan["parameters"]


def test_every_flag_of_the_original_is_taken_or_said_to_be_gone(cli, corpus, tmp_path):
    gone = {name for row in GONE for name in row.names}
    for flag in flags():
        result = cli("train", corpus, "--dry-run", *SIZES, *flag)
        assert "unknown option" not in result.stderr, flag
        assert (f"{flag[0]} has no effect" in result.stderr) == (flag[0] in gone), flag
    assert len({flag[0] for flag in flags()}) > 80


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (["--adam-alpha", "2e-3", "--adam-decay", "0.2"], {"learning_rate": 2e-3, "weight_decay": 0.2}),
        (["-n", "8", "--adam-iter", "16"], {"steps": 128}),
        (["-n", "8"], {"steps": 8}),
        (["--adam-iter", "16"], {"steps": 16}),
        (["--use-lbfgs", "--lbfgs-iter", "3"], {"optimizer": "lbfgs", "lbfgs_iterations": 3}),
        (["--cos-decay-steps", "50", "--cos-decay-alpha", "0.3"], {"decay_steps": 50, "final_share": 0.3}),
        (["--cos-decay-restart", "1.5"], {"schedule": "cosine_restarts", "restart_growth": 1.5}),
        (["--cos-decay-restart", "1.5", "--disable-restart"], {"schedule": "cosine"}),
        (["--adam_min_alpha", "1e-4", "--adam_alpha", "1e-3"], {"final_share": pytest.approx(0.1)}),
        (["--embd", "256", "--mult", "256"], {"intermediate_size": 768}),
        (["--opt-past", "5", "--opt-delta", "0.1"], {"past": 5, "delta": 0.1}),
        (["--predict", "9", "--print-info-interval", "3"], {"sample_tokens": 9, "log_every": 3}),
        (["--grad-acc", "2", "--use-checkpointing"], {"accumulation": 2, "recompute": True}),
        (["--adam-gclip", "0", "--adam-beta2", "0.99"], {"clip_norm": 0.0, "beta2": 0.99}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_originals_flags_mean_what_they_meant(cli, corpus, given, settings):
    result = cli("train", corpus, "--dry-run", *SIZES, *given, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["settings"]
    assert {name: found[name] for name in settings} == settings


def test_flags_that_contradict_each_other_are_refused(cli, corpus):
    for given, said in (
        (["-n", "8", "--steps", "9"], "-n asks for steps 8"),
        (["--use-lbfgs", "--use-adam"], "--use-lbfgs asks for optimizer lbfgs"),
        (["--epochs", "1", "--steps", "9"], "both epochs and steps"),
        (["--grad-acc", "3", "--batch", "4"], "not 3 equal parts"),
    ):
        result = cli("train", corpus, "--dry-run", *SIZES, *given)
        assert result.exit_code == 2, given
        assert said in result.stderr


def test_the_options_are_those_of_the_settings(cli):
    from starscope.cli.train_options import ROWS
    from starscope.train.flags import TRANSLATED

    destinations = {names[0] for _, names, _ in ROWS}
    assert set(NAMES) - {"rank", "alpha", "targets"} <= destinations  # of an adapter: finetune has them
    own = {"out", "preset", "resume", "force", "dry_run", "threads"}
    own |= {"checkpoint_in", "checkpoint_out", "model_out", "only_write_model"}
    assert destinations - set(NAMES) - set(TRANSLATED) - set(SWITCHES) == own


def test_checkpoints_and_the_model_go_where_the_originals_flags_say(cli, corpus, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    places = ("--checkpoint-out", tmp_path / "chk-ITERATION.bin", "--model-out", tmp_path / "m.gguf")
    assert cli("train", corpus, "--out", out, "--steps", 2, *SIZES, *places).exit_code == 0
    assert (tmp_path / "chk-2.bin").read_bytes() == (out / "checkpoint.bin").read_bytes()
    assert (tmp_path / "m.gguf").read_bytes() == (out / "model.gguf").read_bytes()
    went_on = cli("train", corpus, "--out", other, "--checkpoint-in", tmp_path / "chk-2.bin", "--steps", 3, *SIZES)
    assert went_on.exit_code == 0, went_on.stderr
    assert cli("train", "--out", out, "--resume", "--steps", 3).exit_code == 0
    assert (other / "model.gguf").read_bytes() == (out / "model.gguf").read_bytes()
    (out / "model.gguf").unlink()
    written = cli("train", "--out", out, "--only-write-model", "--json")
    assert written.exit_code == 0
    assert json.loads(written.stdout)["bits_per_byte"] == log_of(out, "bits_per_byte")[-1]
    assert (other / "model.gguf").read_bytes() == (out / "model.gguf").read_bytes()
    absent = cli("train", corpus, "--out", tmp_path / "x", "--checkpoint-in", tmp_path / "none.bin", *SIZES)
    assert absent.exit_code == 3


@pytest.mark.parametrize("to", ["q8_0", "q4_k_m"])
def test_the_file_has_the_type_that_was_asked_for(cli, corpus, tmp_path, to):
    out = tmp_path / "out"
    assert cli("train", corpus, "--out", out, "--steps", 1, *SIZES, "--to", to, "--name", "Mine").exit_code == 0
    shown = json.loads(cli("show", out / "model.gguf", "--json").stdout)
    assert shown["name"] == "Mine"
    assert "Q8_0" in shown["bytes_by_format"]
    assert str(tmp_path).encode() not in (out / "model.gguf").read_bytes()
    unknown = cli("train", corpus, "--out", tmp_path / "x", *SIZES, "--to", "q9")
    assert unknown.exit_code == 2
    assert not (tmp_path / "x").exists()


def test_characters_make_a_vocabulary_and_the_loss_is_measured_on_the_end_of_the_text(cli, tmp_path):
    text = tmp_path / "verse.txt"
    text.write_text("Now is the winter of our discontent\nMade glorious summer by this sun of York;\n" * 40)
    out = tmp_path / "out"
    options = ("--preset", "nano", *SHAPE, "--batch", 4, "--steps", 3, "--held-out", 0.1, "--eval-every", 3)
    result = cli("train", "--data", text, "--out", out, *options, "--prompt", "Now is", "--precision", "float32")
    assert result.exit_code == 0, result.stderr
    assert "held out: the last 10.0% of the text" in result.stderr
    [samples] = log_of(out, "samples")
    assert samples[0]["before"] == "Now is"
    assert len(starscope.load(out / "model.gguf").tokenizer.encode("Now is")) == len("Now is")
    unknown = cli("train", "--data", text, "--out", tmp_path / "x", *options, "--prompt", "日")
    assert unknown.exit_code == 4


def test_on_a_terminal_a_bar_shows_the_loss_the_speed_and_the_time_left(corpus, tmp_path):
    master, slave = pty.openpty()
    command = ["train", corpus, "--out", tmp_path / "out", "--steps", 3, *SIZES]
    process = subprocess.Popen(
        [sys.executable, "-m", "starscope", *map(str, command)],
        stderr=slave, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "160"},
    )  # fmt: skip
    os.close(slave)
    seen = b""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([master], [], [], 1)[0]:
            try:
                data = os.read(master, 1 << 16)
            except OSError:
                break
            if not data:
                break
            seen += data
        elif process.poll() is not None:
            break
    os.close(master)
    assert process.communicate(timeout=60)[0] == b""
    assert process.returncode == 0
    shown = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", seen).decode()
    assert re.search(r"training .* 3/3 loss \d+\.\d+ · rate \S+ · [\d,]+ tokens/s · 0 s left", shown)
    assert "bits per byte of held-out text" in shown


def test_a_dry_run_ends_as_the_run_would_and_counts_nothing_of_an_earlier_one(cli, corpus, tmp_path):
    folder = shutil.copytree(corpus, tmp_path / "code")
    assert cli("train", folder, "--out", folder / "out", "--steps", 1, *SIZES).exit_code == 0
    there = cli("train", folder, "--out", folder / "out", "--dry-run", *SIZES)
    assert there.exit_code == 2
    assert "holds a run" in there.stderr
    again = cli("train", folder, "--out", folder / "out", "--dry-run", "--force", "--json", *SIZES)
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["data"]["documents"] == 12
    short = ("--ctx", 8192, "--steps", 1)
    planned = cli("train", corpus, "--dry-run", *SIZES, *short)
    real = cli("train", corpus, "--out", tmp_path / "x", *SIZES, *short)
    assert planned.exit_code == real.exit_code == 4


def test_the_command_and_its_dry_run_say_whether_it_compiles(cli, tmp_path):
    from starscope.train.compiling import ON_A_CPU as why

    text = tmp_path / "text.py"
    text.write_text("def f(x):\n    return x + 1\n" * 100)
    small = ("--ctx", 16, "--embd", 16, "--head", 2, "--layer", 1, "--vocab-size", 280, "--batch", 2, "--steps", 1)
    planned = cli("train", text, "--dry-run", *small)
    assert f"compiling    {why}\n" in planned.stdout
    assert json.loads(cli("train", text, "--dry-run", "--json", "--compile", "off", *small).stdout)["compiled"] == (
        "not compiled: as asked"
    )
    done = cli("train", text, "--out", tmp_path / "out", *small, "--sample-tokens", 0)
    assert done.exit_code == 0, done.stderr
    assert why in done.stderr


def test_a_zero_is_what_was_asked_for(cli, corpus):
    for flag, said in (("-n", "steps is 0"), ("--adam-iter", "steps is 0"), ("--mult", "--mult is 0")):
        result = cli("train", corpus, "--dry-run", *SIZES, flag, 0)
        assert result.exit_code == 2, flag
        assert f"{said}; expected" in result.stderr
    unheard = cli("train", corpus, "--dry-run", *SIZES, "--adam-min-alpha", "nan")
    assert unheard.exit_code == 2
    assert "the lowest learning rate is nan of the highest" in unheard.stderr
    assert cli("train", corpus, "--dry-run", *SIZES, "-t", 10**12).exit_code == 2


def test_copies_that_could_not_be_written_at_the_end_are_refused_at_the_beginning(cli, corpus, tmp_path):
    (tmp_path / "file").touch()
    for flag, target in (("--checkpoint-out", tmp_path), ("--model-out", tmp_path / "file" / "m.gguf")):
        result = cli("train", corpus, "--out", tmp_path / "out", *SIZES, flag, target)
        assert result.exit_code == 3, flag
        assert "is not a regular file" in result.stderr or "is a file; expected" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_dry_run_looks_at_the_checkpoint_that_the_run_would_go_on_from(cli, corpus, tmp_path):
    out = tmp_path / "out"
    absent = cli("train", corpus, "--out", out, *SIZES, "--dry-run", "--checkpoint-in", tmp_path / "none.bin")
    assert absent.exit_code == 3
    assert cli("train", corpus, "--out", out, "--steps", 1, *SIZES).exit_code == 0
    (out / "checkpoint.bin").write_bytes(b"half")
    cut = cli("train", "--out", out, "--resume", "--dry-run")
    assert cut.exit_code == 4
    assert "There is no checkpoint from before it; begin again with --force" in cut.stderr


def test_a_finished_checkpoint_without_its_log_still_makes_a_model(cli, corpus, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    assert cli("train", corpus, "--out", out, "--steps", 1, *SIZES).exit_code == 0
    given = ("--checkpoint-in", out / "checkpoint.bin", "--steps", 1, *SIZES)
    made = cli("train", corpus, "--out", other, *given)
    assert made.exit_code == 0, made.stderr
    assert (other / "model.gguf").read_bytes() == (out / "model.gguf").read_bytes()
    assert "report.html" not in made.stderr


def test_a_run_with_weights_of_its_own_does_not_go_on_with_those_of_another_model(cli, corpus, tmp_path):
    out = tmp_path / "out"
    assert cli("train", corpus, "--out", out, "--steps", 1, *SIZES).exit_code == 0
    result = cli("train", "--out", out, "--resume", "--from", "demo")
    assert result.exit_code == 2
    assert "started from scratch; expected the same --from" in result.stderr


def test_a_file_whose_name_is_no_text_is_trained_on_like_others(cli, corpus, tmp_path):
    name = os.fsencode(tmp_path / "na") + b"\xff.py"
    with open(name, "wb") as file:
        file.write(b"def f(x):\n    return x + 1\n" * 200)
    small = ("--ctx", 16, "--embd", 16, "--head", 2, "--layer", 1, "--vocab-size", 280, "--batch", 2, "--steps", 1)
    result = cli("train", os.fsdecode(name), "--out", tmp_path / "out", *small, "--sample-tokens", 0)
    assert result.exit_code == 0, result.stderr
    assert "udcff.py" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_folder_in_which_another_run_is_at_work_is_refused(cli, corpus, tmp_path):
    from starscope.train.lock import held

    with held(tmp_path / "out"):
        result = cli("train", corpus, "--out", tmp_path / "out", "--steps", 1, *SIZES)
        assert result.exit_code == 3
        assert "another run is at work in" in result.stderr
        assert list((tmp_path / "out").iterdir()) == []
    assert cli("train", corpus, "--out", tmp_path / "out", "--steps", 1, *SIZES).exit_code == 0


@pytest.mark.parametrize("option", [["--prompt", "--some_flag = 1"], ["--prompt=--some_flag = 1"]], ids=["two", "one"])
def test_underscores_are_hyphens_in_the_names_of_options_alone(cli, corpus, option):
    asked = ("train", corpus, "--dry-run", *SIZES, "--eval_every", 7, "--log_every=3")
    result = cli(*asked, *option, "--name", "--my_model", "--no_flash", "--no_recompute", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["settings"]
    assert (found["prompts"], found["name"]) == (["--some_flag = 1"], "--my_model")
    assert (found["evaluate_every"], found["log_every"], found["recompute"]) == (7, 3, False)
    assert "--no-flash has no effect" in result.stderr


def test_an_option_with_underscores_that_is_none_is_told_with_the_nearest(cli):
    result = cli("train", "--model_ouf", "x")
    assert result.exit_code == 2
    assert "unknown option --model-ouf" in result.stderr
    assert "Did you mean --model-out?" in result.stderr
    folder = cli("train", "--dry-run", "--", "--no_such_folder")
    assert "--no_such_folder" in folder.stderr
