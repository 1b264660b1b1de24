"""What is seen of a model in training: measures that are what they say, samples, and TensorBoard's numbers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from starscope.engine import make_engine
from starscope.engine.weights import ArraySource, Weights
from starscope.errors import TokenizerError, UsageError
from starscope.model import Model
from starscope.tokenizer import Tokenizer
from starscope.train.looks import Looks
from starscope.train.optim import initial_weights
from starscope.train.samples import Prompt, read_prompts, usual_prompts, write_samples
from starscope.train.vocabularies import character_vocabulary, save_vocabulary
from support.training import DOCUMENTS, tiny_bpe, tiny_graph, tiny_ids


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_bpe().save(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return Tokenizer.from_folder(folder)


def model_of(arrays, tokenizer, **changes) -> Model:
    graph = tiny_graph(**changes)
    weights = Weights(graph.family.slots(graph.hp), ArraySource(arrays))
    return Model(Path("tiny"), weights, tokenizer, make_engine("torch", graph, weights))


def test_lens_losses_are_those_of_each_blocks_output_and_the_last_is_the_models(tokenizer):
    arrays = {name: array * 3 for name, array in initial_weights(tiny_graph(), 1).items()}
    model = model_of(arrays, tokenizer)
    ids = tiny_ids(3)
    looks = Looks(model, ids, seed=0)
    found = looks.lens_loss()
    nats, count = 0.0, 0
    for window in looks._windows:
        logits = torch.as_tensor(model.forward(window[:-1].tolist()))[0].double()
        nats += torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum").item()
        count += len(window) - 1
    assert count >= 64
    assert found[-1] == pytest.approx(nats / count, rel=1e-6)
    assert len(found) == 2
    assert abs(found[0] - found[1]) > 1e-3


def test_a_head_that_looks_at_what_followed_scores_one_and_no_other_does(tokenizer):
    """Queries and keys that depend on the position alone: query t scores key t - 15 highest, what followed t's twin."""
    half, heads, width = 16, 4, 128
    graph = tiny_graph(hidden_size=width, intermediate_size=64, num_layers=1)
    arrays = initial_weights(graph, 0)
    dim = width // heads
    positions = np.zeros((32, width), np.float32)
    positions[np.arange(32), np.arange(32)] = 100.0  # position t is unit t of the stream, after the norm too
    arrays["embed_positions.weight"] = positions
    arrays["embed_tokens.weight"] *= 0.0
    qkv = np.zeros_like(arrays["layers.0.self_attn.qkv_proj.weight"])
    for t in range(half, 32):
        qkv[2 * dim + (t - half + 1) % dim, t] = 10.0  # head 2's query at t is unit t - 15
    for t in range(dim):
        qkv[width + t, t] = 10.0  # the key at t is unit t
    arrays["layers.0.self_attn.qkv_proj.weight"] = qkv
    model = model_of(arrays, tokenizer, hidden_size=width, intermediate_size=64, num_layers=1)
    looks = Looks(model, tiny_ids(2), seed=0)
    [scores] = looks.induction()
    assert scores[2] > 0.99
    assert scores[[0, 1, 3]].max() < 0.1
    assert looks()["induction"] == [round(float(scores[2]), 4)]


def test_the_same_tokens_are_looked_at_every_time(tokenizer):
    arrays = initial_weights(tiny_graph(), 1)
    one, two = (Looks(model_of(arrays, tokenizer), tiny_ids(), seed=4) for _ in range(2))
    assert one() == two() == one()
    other = Looks(model_of(arrays, tokenizer), tiny_ids(), seed=5)
    assert other._repeated != one._repeated
    for sequence in one._repeated:
        assert sequence[: len(sequence) // 2] == sequence[len(sequence) // 2 :]
        assert set(sequence) <= set(tiny_ids().tolist())


def test_prompts_are_read_with_their_holes(tokenizer):
    assert read_prompts(["def f", "a <FILL> b"], tokenizer) == [Prompt("def f"), Prompt("a ", " b")]
    with pytest.raises(UsageError, match="two <FILL>"):
        read_prompts(["a <FILL> b <FILL>"], tokenizer)


def test_a_vocabulary_without_holes_or_without_a_character_refuses_such_prompts(tmp_path):
    save_vocabulary(character_vocabulary("abc ", fim=False), tmp_path)
    characters = Tokenizer.from_folder(tmp_path)
    with pytest.raises(UsageError, match="without <FILL>"):
        read_prompts(["a <FILL> b"], characters)
    with pytest.raises(TokenizerError):
        read_prompts(["xyz"], characters)


def test_usual_prompts_are_of_the_text_and_say_what_stood_there(tokenizer):
    documents = [np.array(tokenizer.encode(text)) for text in DOCUMENTS]
    begin, hole = usual_prompts(documents, tokenizer, 32, fim=True)
    longest = DOCUMENTS[int(np.argmax([len(ids) for ids in documents]))]
    assert longest.startswith(begin.before + begin.truth)
    assert hole.before + hole.truth + hole.after in longest
    assert [p.after for p in usual_prompts(documents, tokenizer, 32, fim=False)] == [None]
    assert usual_prompts([], tokenizer, 32, fim=True) == []
    assert usual_prompts([np.array([5])], tokenizer, 32, fim=True) == []


def test_samples_are_the_same_for_the_same_weights(tokenizer):
    model = model_of(initial_weights(tiny_graph(), 1), tokenizer)
    prompts = [Prompt("def f"), Prompt("a = ", "\n", "1")]
    one, two = (write_samples(model, prompts, 6) for _ in range(2))
    assert one == two
    assert [set(sample) for sample in one] == [{"before", "text"}, {"before", "text", "after", "truth"}]
    [long] = write_samples(model, [Prompt("def " * 100)], 6)
    assert "the context has 32" in long["text"]


def test_tensorboard_gets_the_numbers_where_it_is_installed(tmp_path, monkeypatch, corpus_job):
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder):
            assert folder == str(tmp_path / "out" / "tensorboard")

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append(("closed", 0.0, 0))

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    job = corpus_job(tmp_path / "out", steps=2, log_every=1, evaluate_every=2)
    job.train()
    names = {name for name, _, _ in written}
    assert {"loss/train", "loss/held_out_bits_per_byte", "learning_rate", "induction/block_1"} <= names
    assert written[-1][0] == "closed"
    assert [step for name, _, step in written if name == "loss/train"] == [1, 2]


def test_the_files_of_tensorboard_are_read_by_it(tmp_path, corpus_job):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    corpus_job(tmp_path / "out", steps=2, log_every=1, evaluate_every=2).train()
    found = events.EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    found.Reload()
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in log if "loss" in line}
    assert {one.step: one.value for one in found.Scalars("loss/train")} == pytest.approx(losses, rel=1e-6)
    assert {"loss/held_out_bits_per_byte", "lens_loss/block_0", "induction/block_1"} <= set(found.Tags()["scalars"])


@pytest.fixture
def corpus_job(tmp_path):
    """A prepared job over a few files."""
    from starscope.train.job import Job
    from starscope.train.settings import resolve

    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.py").write_text(DOCUMENTS[number % 5] + f"# {number}\n", encoding="utf-8")

    def make(out, **given):
        sizes = {"context_length": 32, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 300}
        asked = {"data": (str(folder),), "batch_size": 4, "precision": "float32", "held_out": 0.3, **sizes, **given}
        job = Job(resolve(asked), out)
        job.check_output(resume=False)
        job.prepare()
        return job

    return make


def test_looking_changes_no_bit_of_the_training(tmp_path, corpus_job, monkeypatch):
    seen = corpus_job(tmp_path / "seen", steps=4, evaluate_every=1, log_every=1)
    seen.train()
    blind = corpus_job(tmp_path / "blind", steps=4, evaluate_every=1, log_every=1)
    monkeypatch.setattr(blind, "_watcher", types.SimpleNamespace(close=lambda: None, __call__=None))
    blind._watcher = lambda line: iter(())
    blind._watcher.close = lambda: None
    blind.train()
    for name, array in seen.trainer.weights().items():
        assert array.tobytes() == blind.trainer.weights()[name].tobytes()


def test_with_nothing_held_out_the_model_is_looked_at_as_often(tmp_path, corpus_job):
    job = corpus_job(tmp_path / "out", steps=7, evaluate_every=3, log_every=2, held_out=0.0)
    job.train()
    lines = [json.loads(line) for line in job.trainer.log_path.read_text().splitlines()]
    assert [line["step"] for line in lines if "induction" in line] == [4, 6, 7]
    assert not any("bits_per_byte" in line for line in lines)
