"""All weights in one row: the same tensors as before, and one place for what is done to each."""

from __future__ import annotations

import torch

from starscope.train.parameters import ALIGNMENT, Parameters


def drawn() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


SHAPES = {"bias": (3,), "table": (5, 7), "norm": (4,), "matrix": (2, 3)}


def test_weights_keep_their_values_and_their_tensors_and_lie_aligned_in_one_row():
    named, before = drawn(), drawn()
    parameters = Parameters(named)
    for name, tensor in named.items():
        assert torch.equal(tensor.detach(), before[name])
        place = parameters.part(parameters.values, name)
        assert place.data_ptr() == tensor.data_ptr()
        assert place.shape == tensor.shape
        assert (place.data_ptr() - parameters.values.data_ptr()) % (4 * ALIGNMENT) == 0
    assert int(parameters.values.count_nonzero()) == sum(tensor.numel() for tensor in before.values())


def test_gradients_of_the_weights_are_those_of_the_leaves():
    named = drawn()
    parameters = Parameters(named)
    (named["table"] * 3).sum().backward()
    (named["norm"] * 5).sum().backward()
    (named["norm"] * 5).sum().backward()  # they add up
    matrices, vectors = parameters.leaves
    assert matrices.grad.sum() == 3 * 35
    assert vectors.grad.sum() == 10 * 4
    assert torch.equal(parameters.part(parameters.gradients, "norm"), torch.full((4,), 10.0))
    parameters.gradients.zero_()
    assert not named["table"].grad.any()


def test_what_changes_a_leaf_changes_the_weights_and_matrices_come_first():
    named = drawn()
    matrices, vectors = Parameters(named).leaves
    with torch.no_grad():
        matrices.fill_(1.0)
        vectors.fill_(2.0)
    assert all((tensor == (1 if tensor.dim() == 2 else 2)).all() for tensor in named.values())
