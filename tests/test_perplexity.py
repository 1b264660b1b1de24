"""Windows cover every token once, and their losses are those of transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import starscope
from starscope import perplexity
from starscope.convert import convert
from starscope.errors import InvalidContentError, UsageError
from starscope.perplexity import measure, measure_texts, windows
from support.checkpoints import make_checkpoint

TEXTS = (
    "def add(a, b):\n    return a + b\n" * 12,
    "# naïve 日本語 <|endoftext|> <fim_suffix>\nx = 1\n",
    "",
    "for i in range(10):\n    print(i)\n" * 5,
)
CLOSE = 32 * 2.0**-23  # relative, of a sum of losses


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """transformers' model and the same as a file, with 128 positions."""
    folder = tmp_path_factory.mktemp("model")
    model = make_checkpoint(folder)
    return model, convert(folder, folder / "model.gguf", to="f32").out


def nats_of(model: Any, ids: list[int]) -> float:
    """transformers' own loss, a mean over all tokens but the first, as their sum."""
    with torch.no_grad():
        return float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss) * (len(ids) - 1)


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_the_loss_of_one_window_is_that_of_transformers(engine: str, reference: tuple[Any, Path]) -> None:
    theirs, path = reference
    model = starscope.load(path, engine=engine)
    texts = [text[:90] for text in TEXTS]  # each fits the context
    found = measure_texts(model.engine, model.tokenizer, texts)
    documents = [model.tokenizer.encode(text) for text in texts]
    expected = sum(nats_of(theirs, [0, *ids]) for ids in documents if ids)
    assert (found.window, found.stride) == (128, 64)
    assert found.tokens == sum(map(len, documents))
    assert found.bytes == sum(len(text.encode()) for text in texts)
    assert found.nats == pytest.approx(expected, rel=CLOSE)
    assert found.perplexity == pytest.approx(math.exp(expected / found.tokens), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / found.bytes, rel=CLOSE)


@pytest.mark.parametrize("rows", [24, 300])  # a window takes several steps; or a step takes several windows
@pytest.mark.parametrize(("window", "stride"), [(128, 64), (128, 128), (128, 5), (40, 7), (1, 1)])
def test_windows_give_each_token_what_transformers_gives_it_there(
    window: int, stride: int, rows: int, reference: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "LOGIT_BYTES", rows * 4 * 320)
    theirs, path = reference
    model = starscope.load(path, context_length=window)
    ids = model.tokenizer.encode(TEXTS[0])
    assert len(ids) > 128
    found = measure_texts(model.engine, model.tokenizer, TEXTS[:1], stride=stride)
    expected = 0.0
    with torch.no_grad():
        for part in windows(ids, 0, window, stride):
            scores = theirs(torch.tensor(part.ids[None, :-1])).logits[0].double().log_softmax(-1)
            picked = scores[torch.arange(len(scores)), torch.tensor(part.ids[1:])]
            expected -= picked[-part.scored :].sum().item()
    assert found.nats == pytest.approx(expected, rel=CLOSE)
    assert found.tokens == len(ids)


@given(
    length=st.integers(1, 80),
    window=st.integers(1, 20),
    part=st.integers(0, 19),
)
def test_windows_predict_every_token_once_with_enough_before_it(length: int, window: int, part: int) -> None:
    stride = min(window, part + 1)
    cut = list(windows(np.arange(1, length + 1), 0, window, stride))
    assert np.concatenate([w.ids[len(w.ids) - w.scored :] for w in cut]).tolist() == list(range(1, length + 1))
    for w in cut:
        assert len(w.ids) <= window + 1
        assert len(w.ids) - w.scored >= min(window - stride + 1, int(w.ids[-w.scored]))


def test_documents_are_measured_apart_and_summed(reference: tuple[Any, Path]) -> None:
    model = starscope.load(reference[1])
    alone = [measure_texts(model.engine, model.tokenizer, [text]) for text in TEXTS if text]
    told: list[tuple[int, int]] = []
    together = measure_texts(model.engine, model.tokenizer, TEXTS, progress=lambda *step: told.append(step))
    assert together.nats == pytest.approx(sum(one.nats for one in alone), rel=1e-12)
    assert together.tokens == sum(one.tokens for one in alone)
    assert told == sorted(told)
    assert told[-1] == (together.bytes, together.bytes)


def test_text_that_spells_a_special_token_is_measured_as_text(reference: tuple[Any, Path]) -> None:
    model = starscope.load(reference[1])
    assert measure_texts(model.engine, model.tokenizer, ["<fim_suffix>"]).tokens > 1


def test_a_model_that_knows_nothing_needs_as_many_bits_as_the_vocabulary(reference: tuple[Any, Path]) -> None:
    engine = starscope.load(reference[1]).engine
    engine.forward = lambda rows, *_: [np.zeros((len(rows[0]), 320), np.float32)]  # type: ignore[method-assign, assignment]
    found = measure(engine, [[1, 2, 3, 4]], 10, first=0, window=8, stride=4)
    assert found.perplexity == pytest.approx(320)
    assert found.bits_per_byte == pytest.approx(4 * math.log2(320) / 10)


def test_a_loss_beyond_a_float_is_an_infinite_perplexity() -> None:
    assert perplexity.Perplexity(8e5, 1000, 10, 8, 4).perplexity == math.inf


@pytest.mark.parametrize("stride", [0, -1, 129])
def test_a_stride_that_would_leave_tokens_out_is_refused(stride: int, reference: tuple[Any, Path]) -> None:
    model = starscope.load(reference[1])
    with pytest.raises(UsageError, match=rf"stride is {stride}; expected from 1 to the window, 128"):
        measure_texts(model.engine, model.tokenizer, ["x"], stride=stride)


def test_no_text_at_all_is_refused(reference: tuple[Any, Path]) -> None:
    model = starscope.load(reference[1])
    with pytest.raises(InvalidContentError, match="no text to measure"):
        measure_texts(model.engine, model.tokenizer, ["", ""])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_refused(value: float, reference: tuple[Any, Path]) -> None:
    engine = starscope.load(reference[1]).engine
    engine.forward = lambda rows, *_: [np.full((len(rows[0]), 320), value, np.float32)]  # type: ignore[method-assign, assignment]
    with pytest.raises(InvalidContentError, match="not all finite"):
        measure(engine, [[1, 2]], 2, first=0, window=8, stride=4)


@pytest.mark.parametrize("rows", [24, 300])
def test_no_step_has_more_rows_of_logits_than_allowed(
    rows: int, reference: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "LOGIT_BYTES", rows * 4 * 320)
    model = starscope.load(reference[1])
    forward, steps = model.engine.forward, []

    def counted(sequences: Any, *rest: Any) -> Any:
        steps.append(sum(map(len, sequences)))
        return forward(sequences, *rest)

    model.engine.forward = counted  # type: ignore[method-assign]
    measure_texts(model.engine, model.tokenizer, [*TEXTS, *TEXTS])
    assert rows / 2 < max(steps) <= rows
