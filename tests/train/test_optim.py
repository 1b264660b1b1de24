"""Initial weights, the optimizer's groups, and the schedule's ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from starscope.engine.torch_engine import TorchEngine
from starscope.engine.weights import ArraySource, Weights
from starscope.errors import UsageError
from starscope.train.optim import (
    AdamW,
    clip_gradients,
    initial_weights,
    residual_projections,
)
from starscope.train.parameters import Parameters
from support.training import tiny_graph


@pytest.mark.parametrize("init", ["scaled", "xavier"])
@pytest.mark.parametrize("vocab_size", [300, 4096])
def test_the_first_loss_is_the_logarithm_of_the_vocabulary(vocab_size, init):
    graph = tiny_graph(vocab_size=vocab_size, hidden_size=64)
    engine = TorchEngine(graph, Weights(graph.family.slots(graph.hp), ArraySource(initial_weights(graph, 0, init))))
    ids = torch.randint(0, vocab_size, (16, 33), generator=torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(engine.logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(vocab_size), rel=0.05)


def test_what_writes_into_the_residual_stream_starts_smaller():
    graph = tiny_graph(hidden_size=128, num_layers=8)
    inward = residual_projections(graph)
    assert inward == {f"layers.{i}.{name}.weight" for i in range(8) for name in ("self_attn.o_proj", "mlp.down_proj")}
    weights = initial_weights(graph, 0)
    for name, array in weights.items():
        if array.ndim == 2:
            assert array.std() == pytest.approx(0.02 / (4 if name in inward else 1), rel=0.1)
        else:
            assert (array == (0 if name.endswith(".bias") else 1)).all()
    assert all((initial_weights(graph, 0)[name] == array).all() for name, array in weights.items())


def test_decay_pulls_matrices_alone():
    parameters = {"matrix": torch.ones(2, 2, requires_grad=True), "bias": torch.ones(2, requires_grad=True)}
    AdamW(Parameters(parameters), weight_decay=0.5).update(0.1)
    assert np.allclose(parameters["matrix"].detach(), 1 - 0.1 * 0.5)  # decay times learning rate, not through Adam
    assert np.allclose(parameters["bias"].detach(), 1)


def test_gradients_are_clipped_to_a_common_norm():
    gradients = torch.tensor([3.0, 0.0, 4.0])
    assert clip_gradients(gradients, 1.0) == pytest.approx(5.0)
    assert gradients.tolist() == pytest.approx([0.6, 0.0, 0.8], rel=1e-4)


def test_gradients_within_the_limit_keep_their_bits_and_no_limit_clips_nothing():
    for limit in (10.0, 0.0):
        gradients = torch.tensor([3.0, 4.0])
        assert clip_gradients(gradients, limit) == pytest.approx(5.0)
        assert gradients.tolist() == [3.0, 4.0]


def test_the_sources_xavier_scale_draws_cut_normal_numbers_over_the_root_of_rows_and_columns():
    graph = tiny_graph(hidden_size=128, num_layers=2)
    weights = initial_weights(graph, 0, "xavier")
    for name, array in weights.items():
        if array.ndim == 2:
            scaled = array * math.sqrt(sum(array.shape))
            assert np.abs(scaled).max() == pytest.approx(1.0, rel=1e-6)
            assert (np.abs(scaled) > 0.999).mean() == pytest.approx(0.317, abs=0.03)  # what lay beyond one deviation
        else:
            assert (array == (0 if name.endswith(".bias") else 1)).all()  # its gains were noise
    with pytest.raises(UsageError, match="'he'; expected scaled or xavier"):
        initial_weights(graph, 0, "he")
