"""`support()`: which values there are, and why one is not. And the sizes, which nobody assigns."""

from __future__ import annotations

import operator

import numpy as np
import pytest

import starscope
from starscope.errors import Unavailable
from starscope.values import MODEL, VALUES

ROOT = {name for name, value in VALUES.items() if value.host == MODEL} | {"input_size"}
BLOCK = {
    f"{value.host.removeprefix('layers.{i}')}.{name}".removeprefix(".")
    for name, value in VALUES.items()
    if value.host != MODEL
}


@pytest.fixture(scope="module")
def model() -> starscope.Model:
    return starscope.load("demo", engine="numpy")


def test_every_standard_value_is_there(model: starscope.Model) -> None:
    assert model.support() == dict.fromkeys(ROOT | BLOCK)


def test_of_one_block_it_is_flat_and_without_the_models_own(model: starscope.Model) -> None:
    assert model.support(layer=0) == dict.fromkeys(BLOCK)
    assert model.support(-1) == model.support(layer=model.num_layers - 1) == model.layers[-1].support()
    with pytest.raises(IndexError, match="layer 6 is out of range; this model has layers 0 to 5"):
        model.support(6)


def test_of_a_part_its_names_are_from_there(model: starscope.Model) -> None:
    assert model.layers[2].mlp.support() == dict.fromkeys(["mlp_activation", "mlp_neurons", "mlp_output"])
    assert "attention_scores" in model.layers[2].self_attn.support()
    assert model.lm_head.support() == {}
    assert set(model.layers.support()) == BLOCK


def test_in_a_trace_the_values_of_a_skipped_block_have_that_reason_and_no_others(model: starscope.Model) -> None:
    with model.trace("def add(a, b):"):
        assert not any(model.support().values())  # nothing has run
        model.skip_layers(2, 3)
        support = model.support()
        assert support["self_attn.attention_scores"] == {2: "block 2 was skipped", 3: "block 3 was skipped"}
        assert support["layer_output"] is None
        assert support["layer_input"] is None
        for name, reason in model.support(3).items():
            value = operator.attrgetter(name)
            if reason is None:
                assert value(model.layers[3]).shape[0] == 1
            else:
                with pytest.raises(Unavailable, match=reason):
                    value(model.layers[3])
        assert not any(model.support(1).values())
    assert not any(model.support().values())


def test_with_embeddings_there_are_no_input_ids(model: starscope.Model) -> None:
    with model.trace(np.zeros((3, model.hidden_size), np.float32)):
        assert model.support()["input_ids"] == "the model was given embeddings"
        assert model.support()["token_embeddings"] is None


def test_sizes_are_read_only_and_the_message_says_where_they_come_from(model: starscope.Model) -> None:
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    assert (attention.num_heads, attention.num_kv_heads) == (model.num_heads, model.num_kv_heads)
    assert (attention.head_dim, attention.qk_head_dim) == (model.head_dim, model.qk_head_dim)
    assert mlp.intermediate_size == model.intermediate_size
    for host, name in [
        *((model, name) for name in ("num_layers", "hidden_size", "vocab_size", "num_heads", "context_length")),
        *((attention, name) for name in ("num_heads", "num_kv_heads", "head_dim", "qk_head_dim")),
        (mlp, "intermediate_size"),
    ]:
        before = getattr(host, name)
        with pytest.raises(AttributeError, match=f"^{name} is read off the model's file; "):
            setattr(host, name, 1)
        assert getattr(host, name) == before
