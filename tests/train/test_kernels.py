"""Every op's gradient against finite differences in float64, and training's own kernels against plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, autograd

from starscope.engine.torch_engine import KERNELS, Group, Step
from starscope.graph import Op
from starscope.ops import OPS
from starscope.train import kernels
from starscope.train.forward import Forward
from starscope.train.kernels import IGNORED, attend, linear_bfloat16, linear_loss
from support.numbers import TOLERANCE, ulps
from support.runs import make_engine, saved_bytes, trainer_gradients
from support.training import tiny_graph

N, SEQ, HEADS, DIM = 2, 3, 4, 2
ROWS = N * SEQ
STEP = Step([Group(N, SEQ, 0, None)], None)


def gradcheck(function: Callable[..., Any], inputs: tuple[Tensor, ...], **options: bool) -> bool:
    """Torch's, with a tolerance that a gradient wrong by a thousandth does not pass."""
    return autograd.gradcheck(function, inputs, rtol=1e-6, atol=1e-8, **options)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def run(kind: str, weights: list[Tensor], inputs: list[Any], **attrs: Any) -> Any:
    names = tuple(f"w{i}" for i in range(len(weights)))
    op = Op(0, kind, (), names, (0,), attrs, 0)
    return KERNELS[kind](dict(zip(names, weights, strict=True)), STEP, op, inputs)


Case = tuple[Callable[..., Any], tuple[Tensor, ...]]
SIZES = {"heads": (HEADS, 1, 1), "head_dim": DIM}
CASES: dict[str, Case] = {
    "embed": (lambda w: run("embed", [w], [torch.tensor([2, 0, 2])]), (draw(4, 3),)),
    "add": (lambda a, b: run("add", [], [a, b]), (draw(ROWS, 3), draw(ROWS, 3, seed=1))),
    "layer_norm": (
        lambda x, w, b: run("layer_norm", [w, b], [x], epsilon=1e-5),
        (draw(ROWS, 5), draw(5), draw(5, seed=1)),
    ),
    "rms_norm": (lambda x, w: run("rms_norm", [w], [x], epsilon=1e-5), (draw(ROWS, 5), draw(5))),
    "rope": (
        lambda x: run("rope", [], [x, torch.arange(SEQ).repeat(N)], base=10.0, scale=2.0),
        (draw(ROWS, HEADS, 2 * DIM),),
    ),
    "linear": (lambda x, w, b: run("linear", [w, b], [x]), (draw(ROWS, 4), draw(3, 4), draw(3))),
    "split_heads": (lambda x: run("split_heads", [], [x], **SIZES), (draw(ROWS, (HEADS + 2) * DIM),)),
    "cache": (lambda x: run("cache", [], [x], part="k")[0], (draw(ROWS, 1, DIM),)),
    "scores": (
        # Masked scores are the most negative float, too large for differences: those are left out.
        lambda q, k: run("scores", [], [q, [k]], scale=0.7, window=None)[0][:, :, *torch.tril_indices(SEQ, SEQ)],
        (draw(ROWS, HEADS, DIM), draw(N, 1, SEQ, DIM)),
    ),
    "softmax": (lambda x: run("softmax", [], [[x]])[0], (draw(N, HEADS, SEQ, SEQ),)),
    "mix": (lambda p, v: run("mix", [], [[p], [v]]), (draw(N, HEADS, SEQ, SEQ), draw(N, 1, SEQ, DIM))),
    "merge_heads": (lambda x: run("merge_heads", [], [x]), (draw(ROWS, HEADS, DIM),)),
    "gelu": (lambda x: run("gelu", [], [x]), (draw(ROWS, 3),)),
    "gelu_tanh": (lambda x: run("gelu_tanh", [], [x]), (draw(ROWS, 3),)),
    "silu": (lambda x: run("silu", [], [x]), (draw(ROWS, 3),)),
    "multiply": (lambda a, b: run("multiply", [], [a, b]), (draw(ROWS, 3), draw(ROWS, 3, seed=1))),
    "wanted_rows": (lambda x: run("wanted_rows", [], [x]), (draw(ROWS, 3),)),
}


def test_every_op_of_the_table_has_a_case():
    assert set(OPS) <= set(CASES), "give the new op a case here: training differentiates it"


@pytest.mark.parametrize("kind", sorted(CASES))
def test_an_ops_gradient_is_that_of_finite_differences(kind):
    function, inputs = CASES[kind]
    assert gradcheck(function, inputs)


@pytest.mark.parametrize("kind", ["gelu_tanh", "layer_norm", "linear", "softmax"])
def test_a_wrong_backward_is_found(kind, monkeypatch):
    """So that the suite cannot pass whatever the gradients are."""
    right = KERNELS[kind]

    def wrong(*given: Any) -> Any:
        made = right(*given)
        if isinstance(made, list):
            return [y.detach() + 0.999 * (y - y.detach()) for y in made]
        return made.detach() + 0.999 * (made - made.detach())

    monkeypatch.setitem(KERNELS, kind, wrong)
    function, inputs = CASES[kind]
    assert not gradcheck(function, inputs, raise_exception=False)


@pytest.mark.parametrize("short", [0, 128])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
def test_attention_is_that_of_the_three_ops_fused_and_plain(kv_heads, window, short, monkeypatch):
    monkeypatch.setattr(kernels, "SHORT", short)
    q, k, v = draw(N, SEQ, HEADS, DIM), draw(N, kv_heads, SEQ, DIM, seed=1), draw(N, kv_heads, SEQ, DIM, seed=2)
    scores = run("scores", [], [q.flatten(0, 1), [k]], scale=0.7, window=window)
    expected = run("mix", [], [run("softmax", [], [scores]), [v]])
    assert torch.allclose(attend(q, k, v, 0.7, window), expected, rtol=0, atol=1e-14)
    assert gradcheck(lambda q, k, v: attend(q, k, v, 0.7, window), (q, k, v))


@pytest.mark.parametrize("chunk_rows", [1, 2, 100])
def test_the_loss_in_parts_is_the_loss_and_so_are_its_gradients(chunk_rows, monkeypatch):
    vocab = 11
    monkeypatch.setattr(kernels, "CHUNK_BYTES", chunk_rows * 4 * vocab)
    x, weight = draw(ROWS, 4), draw(vocab, 4)
    targets = torch.tensor([3, IGNORED, 10, 0, 3, IGNORED])
    assert gradcheck(lambda x, w: linear_loss(x, w, targets, torch.float64) * 0.3, (x, weight))
    expected = F.cross_entropy(F.linear(x, weight), targets, ignore_index=IGNORED, reduction="sum")
    assert linear_loss(x, weight, targets, torch.float64).item() == pytest.approx(expected.item(), rel=1e-14)


def test_a_linear_layer_in_bfloat16_has_the_gradients_of_rounded_operands():
    x, weight, bias = (draw(*shape, dtype=torch.float32) for shape in ((64, 32), (16, 32), (16,)))
    g = draw(64, 16, seed=9, dtype=torch.float32).detach().bfloat16()
    linear_bfloat16(x, weight, bias, weight.detach().bfloat16(), bias.detach().bfloat16()).backward(g)
    wide = g.double()
    assert x.grad.dtype == weight.grad.dtype == bias.grad.dtype == torch.float32
    for found, expected in (
        (x.grad, wide @ weight.detach().bfloat16().double()),
        (weight.grad, wide.T @ x.detach().bfloat16().double()),
        (bias.grad, wide.sum(0)),
    ):
        assert (found.double() - expected).abs().max() <= 2.0**-8 * expected.abs().max()  # one rounding to bfloat16


def test_bfloat16_gradients_of_the_model_are_near_those_of_float32():

    exact, low = (trainer_gradients(dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    for name in exact:
        distance = (exact[name] - low[name]).norm() / exact[name].norm()
        assert distance < 0.02, name  # bfloat16 has 8 bits


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_activations_give_the_same_bits(dtype, num_kv_heads):

    kept, again = (trainer_gradients(dtype=dtype, num_kv_heads=num_kv_heads, recompute=r) for r in (False, True))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_recomputing_holds_less_for_the_backward_pass():

    assert saved_bytes(recompute=True) < 0.5 * saved_bytes(recompute=False)


def test_a_large_vocabulary_made_in_parts_has_the_same_gradients():

    whole, parts = (trainer_gradients(logit_bytes=limit) for limit in (1 << 30, 0))
    assert max(ulps(parts[name], whole[name]) for name in whole) <= TOLERANCE


def test_the_training_forward_gives_the_engines_logits():

    engine = make_engine(tiny_graph())
    ids = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        assert ulps(Forward(engine).logits(ids), engine.logits(ids)) <= TOLERANCE
