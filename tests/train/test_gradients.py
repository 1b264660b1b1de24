"""The gradients of the recorded graph are those of transformers' model with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from starscope.engine.torch_engine import KERNELS, TorchEngine, gelu_tanh
from starscope.engine.weights import ArraySource, Weights
from starscope.graph import Graph
from starscope.train.forward import Forward
from support.numbers import TOLERANCE, ulps
from support.training import VOCAB_SIZE, tiny_graph

IDS = torch.randint(0, VOCAB_SIZE, (3, 33), generator=torch.Generator().manual_seed(1))


def reference(graph: Graph) -> torch.nn.Module:
    """transformers' model with clearly different weights in every place."""
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    hp = graph.hp
    config = GPTBigCodeConfig(
        vocab_size=hp.vocab_size,
        n_positions=hp.context_length,
        n_embd=hp.hidden_size,
        n_layer=hp.num_layers,
        n_head=hp.num_heads,
        n_inner=hp.intermediate_size,
        multi_query=hp.num_kv_heads == 1,
        activation_function=hp.activation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = GPTBigCodeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def worst_difference(graph: Graph, model: torch.nn.Module, engine: TorchEngine, ids: torch.Tensor) -> float:
    """The largest difference of any gradient, in ulp of that tensor's largest."""
    loss = Forward(engine).loss_sum(ids, None)
    loss.backward()
    logits = model(ids[:, :-1]).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    model.zero_grad()
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    named = dict(model.named_parameters())
    worst = 0.0
    for slot in graph.family.slots(graph.hp):
        if slot.name not in engine.parameters:
            continue
        theirs = named[slot.hf].grad.numpy()
        theirs = theirs if slot.hf_rows is None else theirs[slot.hf_rows]
        ours = engine.parameters[slot.name].grad.numpy()
        worst = max(worst, ulps(ours, theirs))
    return worst


def make_engine(graph: Graph, model: torch.nn.Module) -> TorchEngine:
    state = model.state_dict()
    arrays = {}
    for slot in graph.family.slots(graph.hp):
        if not slot.tied_to:
            array = state[slot.hf].numpy()
            arrays[slot.name] = array if slot.hf_rows is None else array[slot.hf_rows]
    engine = TorchEngine(graph, Weights(graph.family.slots(graph.hp), ArraySource(arrays)))
    for parameter in engine.parameters.values():
        parameter.requires_grad_()
    return engine


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_gradients_equal_those_of_transformers(activation, num_kv_heads):
    graph = tiny_graph(activation=activation, num_kv_heads=num_kv_heads)
    model = reference(graph)
    assert worst_difference(graph, model, make_engine(graph, model), IDS) <= TOLERANCE


@pytest.mark.parametrize("changes", [{"activation": "gelu"}, {"norm_epsilon": 1.1e-5}])
def test_a_slightly_wrong_graph_gives_gradients_that_differ(changes):
    right, wrong = tiny_graph(), tiny_graph(**changes)
    model = reference(right)
    assert worst_difference(right, model, make_engine(wrong, model), IDS) > 2 * TOLERANCE


def test_a_slightly_wrong_backward_gives_gradients_that_differ(monkeypatch):
    def gelu_with_less_gradient(*step: Any) -> torch.Tensor:
        y = gelu_tanh(*step)
        return y.detach() + 0.999 * (y - y.detach())

    monkeypatch.setitem(KERNELS, "gelu_tanh", gelu_with_less_gradient)
    graph = tiny_graph()
    model = reference(graph)
    assert worst_difference(graph, model, make_engine(graph, model), IDS) > 2 * TOLERANCE
