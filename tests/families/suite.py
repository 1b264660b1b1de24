"""Every check that a family must pass, once. A family's own test class says how to make its checkpoints.

    class TestGPTBigCode(FamilySuite):
        family = "gpt_bigcode"
        settings = PAIRWISE
        @staticmethod
        def make(folder, setting): ...              # writes a Hugging Face folder, returns transformers' model

The oracle is transformers, in float32 with the very weights of the folder. A tolerance is given in ulp: units of
2**-23 of the largest magnitude of the tensor compared.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import starscope
from starscope.convert import convert
from starscope.engine import ENGINES
from starscope.family import all_families
from starscope.graph import record
from support.numbers import TOLERANCE, ulps


class FamilySuite:
    family: ClassVar[str]
    settings: ClassVar[tuple[Any, ...]]

    @staticmethod
    def make(folder: Path, setting: Any) -> torch.nn.Module:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        """setting -> (GGUF file in F32, transformers' model in float32), each made once."""

        @cache
        def make(setting: Any) -> tuple[Path, torch.nn.Module]:
            folder = tmp_path_factory.mktemp("checkpoint")
            oracle = cls.make(folder, setting).float().eval()
            return convert(folder, to="f32").out, oracle

        return make

    @pytest.fixture
    def setting(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "setting" in metafunc.fixturenames:
            metafunc.parametrize("setting", self.settings, ids=str, indirect=True)
        if "engine" in metafunc.fixturenames:
            metafunc.parametrize("engine", list(ENGINES))

    def test_logits_equal_transformers(self, made: Any, setting: Any, engine: str) -> None:
        path, oracle = made(setting)
        model = starscope.load(path, engine=engine)
        ids = prompt(model.vocab_size, 50)
        assert ulps(model.forward(ids)[0], reference(oracle, ids)) <= TOLERANCE

    def test_greedy_tokens_equal_transformers_for_64_tokens(self, made: Any, setting: Any, engine: str) -> None:
        path, oracle = made(setting)
        model = starscope.load(path, engine=engine)
        ids = prompt(model.vocab_size, 20)
        made = greedy(model, ids, 64)
        # The oracle is causal: one run over the whole text says what it would have chosen at every step.
        assert made == reference(oracle, ids + made)[len(ids) - 1 : -1].argmax(-1).tolist()

    def test_a_prompt_split_anywhere_gives_the_same_logits(self, made: Any, setting: Any, engine: str) -> None:
        path, _ = made(setting)
        model = starscope.load(path, engine=engine)
        ids = prompt(model.vocab_size, 24)
        whole = model.forward(ids)[0].numpy()
        rng = np.random.default_rng(0)
        for cuts in [
            *([cut] for cut in range(1, 24)),
            *(sorted(rng.choice(np.arange(1, 24), 5, replace=False)) for _ in range(4)),
        ]:
            cache = model.engine.new_cache()
            parts = [model.engine.forward([part], [cache], "all")[0] for part in np.split(np.array(ids), cuts)]
            joined = np.concatenate(parts)
            assert ulps(joined, whole) <= TOLERANCE
            assert (joined.argmax(-1) == whole.argmax(-1)).all()

    def test_a_row_of_a_ragged_batch_equals_the_prompt_alone(self, made: Any, setting: Any, engine: str) -> None:
        path, _ = made(setting)
        model = starscope.load(path, engine=engine)
        prompts = [prompt(model.vocab_size, n, seed=n) for n in (7, 1, 19, 30)]
        caches = [model.engine.new_cache() for _ in prompts]
        together = model.engine.forward(prompts, caches, "all")
        for ids, rows in zip(prompts, together, strict=True):
            alone = model.engine.forward([ids], None, "all")[0]
            assert ulps(rows, alone) <= TOLERANCE
            assert (rows.argmax(-1) == alone.argmax(-1)).all()
        # The batch goes on decoding, every row at its own position.
        following = [[int(rows[-1].argmax())] for rows in together]
        for ids, new, rows in zip(prompts, following, model.engine.forward(following, caches), strict=True):
            assert ulps(rows, model.engine.forward([ids + new])[0]) <= TOLERANCE

    def test_the_last_row_alone_equals_the_last_of_all_rows(self, made: Any, setting: Any, engine: str) -> None:
        path, _ = made(setting)
        model = starscope.load(path, engine=engine)
        ids = prompt(model.vocab_size, 12)
        assert (
            ulps(model.engine.forward([ids], None, "last")[0][0], model.engine.forward([ids], None, "all")[0][-1])
            <= TOLERANCE
        )

    def test_embeddings_take_the_place_of_token_embeddings(self, made: Any, setting: Any, engine: str) -> None:
        path, _ = made(setting)
        model = starscope.load(path, engine=engine)
        ids = prompt(model.vocab_size, 9)
        embeddings = model.weights["embed_tokens.weight"][ids]
        assert ulps(model.forward(embeddings), model.forward(ids)) <= TOLERANCE

    def test_a_folder_and_its_gguf_file_give_equal_logits(self, made: Any, setting: Any, tmp_path: Path) -> None:
        path, _ = made(setting)
        folder = starscope.load(path.parent)
        ids = prompt(folder.vocab_size, 12)
        stored = folder.weights.format_name("layers.0.mlp.up_proj.weight")  # the file in the folder's own type
        same = convert(path.parent, tmp_path / "same.gguf", to=stored).out
        assert ulps(folder.forward(ids), starscope.load(same).forward(ids)) <= TOLERANCE

    def test_the_recording_uses_every_declared_tensor_and_names_every_block_alike(
        self, made: Any, setting: Any
    ) -> None:
        path, _ = made(setting)
        graph = starscope.load(path).graph
        assert set(graph.weights) == {slot.name for slot in graph.family.slots(graph.hp)}
        named = [
            {n.removeprefix(f"layers.{i}.") for n in graph.names if n.startswith(f"layers.{i}.")}
            for i in range(graph.hp.num_layers)
        ]
        assert all(names == named[0] for names in named)
        assert graph.edge("layers.0.layer_output").index == graph.edge("layers.1.layer_input").index
        assert record(graph.family, graph.hp).ops == graph.ops

    def test_the_family_is_found_by_its_own_names(self) -> None:
        family = all_families()[self.family]
        from starscope.family import find_family, find_family_for_config, find_family_for_gguf

        assert find_family(self.family) is family
        assert find_family_for_gguf(family.gguf_architecture) is family
        assert all(find_family_for_config({"architectures": [name]}) is family for name in family.hf_architectures)
        assert all(
            find_family_for_config({"model_type": model_type}) is family
            for name, model_type in zip(family.hf_architectures, family.hf_model_types, strict=True)
            if name not in family.layouts
        )


def prompt(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def reference(oracle: torch.nn.Module, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return oracle(torch.tensor([ids])).logits[0].numpy()


def greedy(model: starscope.Model, ids: list[int], count: int) -> list[int]:
    made: list[int] = []
    cache = model.engine.new_cache()
    new = ids
    for _ in range(count):
        new = [int(model.engine.forward([new], [cache])[0][0].argmax())]
        made += new
    return made
