"""Every check that a family must pass under the microscope, once: each standard value read and written, on any engine.

    class TestGPTBigCodeTraced(TracedSuite):
        traced_settings = PAIRWISE[:2]
        make = staticmethod(make_checkpoint)
        hooked = staticmethod(hooked_values)     # what plain hooks on the original see, under the standard names

A file is float32, or quantized; then values are held against those of an engine that does the same roundings in NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import starscope
from families.traced_changes import ChangesSuite
from families.traced_parts import PartsSuite
from families.traced_support import (
    HALF,
    OTHER,
    PROMPT,
    STEPS,
    TYPES,
    assert_equal_but_for_attention,
    ids_of_step,
    shape_of,
    unpadded,
)
from starscope.convert import convert
from starscope.engine import ENGINES
from starscope.engine.numpy_engine import NumpyEngine
from starscope.values import VALUES
from support.numbers import TOLERANCE
from support.rounding import RoundingEngine
from support.traces import all_values, logits_of, read, same, value_names, value_ulps, write


class TracedSuite(ChangesSuite, PartsSuite):
    traced_settings: ClassVar[tuple[Any, ...]]

    @staticmethod
    def make(folder: Path, setting: Any) -> torch.nn.Module:
        raise NotImplementedError

    @staticmethod
    def hooked(oracle: Any, steps: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor]]:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def files(cls, tmp_path_factory: pytest.TempPathFactory) -> Any:
        """(setting, type) -> (GGUF file, transformers' model in float32), each made once."""

        @cache
        def checkpoint(setting: Any) -> tuple[Path, torch.nn.Module]:
            folder = tmp_path_factory.mktemp("traced")
            return folder, cls.make(folder, setting).float().eval()

        @cache
        def make(setting: Any, to: str) -> tuple[Path, torch.nn.Module]:
            folder, oracle = checkpoint(setting)
            return convert(folder, folder / f"{to}.gguf", to=to).out, oracle

        return make

    @pytest.fixture(scope="class")
    @classmethod
    def load(cls, files: Any) -> Any:
        @cache
        def load(setting: Any, to: str, engine: str) -> starscope.Model:
            return starscope.load(files(setting, to)[0], engine=engine, threads=1)

        return load

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest, load: Any) -> starscope.Model:
        made: starscope.Model = load(*request.param)
        return made

    @pytest.fixture
    def oracle(self, model: starscope.Model, files: Any, request: pytest.FixtureRequest) -> torch.nn.Module:
        setting, to, _ = request.node.callspec.params["model"]
        if to != "f32":
            pytest.skip("the original is in float32")
        made: torch.nn.Module = files(setting, to)[1]
        return made

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "model" in metafunc.fixturenames:
            types = TYPES[:1] if "oracle" in metafunc.fixturenames else TYPES
            cases = list(product(self.traced_settings, types, ENGINES))
            metafunc.parametrize("model", cases, ids=["-".join(map(str, case)) for case in cases], indirect=True)

    # What the values are.

    def test_every_value_of_the_prompt_and_of_decoded_steps_is_what_a_hook_on_transformers_sees(
        self, model: starscope.Model, oracle: torch.nn.Module
    ) -> None:
        expected = self.hooked(oracle, STEPS)
        with model.trace(PROMPT, max_new_tokens=len(STEPS)) as t:
            for step in t.steps():
                model.input_ids = torch.tensor([STEPS[step]])
                for name in value_names(model):
                    found = value_ulps(read(model, name), expected[step][name])
                    assert found <= TOLERANCE, (step, name, found)
        assert step == len(STEPS) - 1

    def test_every_value_follows_from_those_before_it_as_the_rounding_model_says(
        self, model: starscope.Model, load: Any, request: pytest.FixtureRequest
    ) -> None:
        # On from the same numbers after each value, so that a rounding to the other side is seen once and no more.
        weights = model.weights
        kind = RoundingEngine if model.engine.name == "native" else NumpyEngine
        definition = starscope.Model(model.path, weights, model.tokenizer, kind(model.graph, weights))
        is_half = weights.half_cache
        names = value_names(model)
        with model.trace(PROMPT, max_new_tokens=2) as t, definition.trace(PROMPT, max_new_tokens=2) as other:
            for step, _ in zip(t.steps(), other.steps(), strict=False):
                model.input_ids = definition.input_ids = torch.tensor([STEPS[step]])
                for name in names:
                    found, expected = read(model, name), read(definition, name)
                    inner = is_half and ".attention_" in name and "norm" not in name and "queries" not in name
                    limit = HALF * 2**23 if inner else TOLERANCE
                    assert value_ulps(found, expected) <= limit, (step, name)
                    if name not in ("logits", "lm_head_output"):
                        write(definition, name, found.clone())

    def test_values_have_the_shapes_of_their_layouts(self, model: starscope.Model) -> None:
        with model.trace(PROMPT):
            for name in value_names(model):
                value = read(model, name)
                assert isinstance(value, torch.Tensor)
                assert value.dtype == torch.float32
                assert list(value.shape) == shape_of(model, name), name
                assert torch.isfinite(value).all()
        with model.trace(PROMPT):
            assert list(model.next_token_probs.shape) == shape_of(model, "next_token_probs")
        for name in ("input_ids", "attention_mask"):
            with model.trace(PROMPT):
                value = read(model, name)
                assert value.dtype == torch.int64
                assert list(value.shape) == shape_of(model, name)

    def test_while_decoding_rows_are_new_ones_and_keys_have_the_whole_history(self, model: starscope.Model) -> None:
        with model.trace(PROMPT, max_new_tokens=3) as t:
            for step in t.steps():
                key = len(PROMPT) + step
                for name in value_names(model):
                    seq = 1 if step else len(PROMPT)
                    assert list(read(model, name).shape) == shape_of(model, name, seq=seq, key=key), (step, name)
                assert tuple(model.input_size) == (1, seq)
                assert list(model.attention_mask.shape) == [1, key]
                assert list(model.next_token_probs.shape) == [1, model.vocab_size]

    def test_a_block_adds_its_parts_bit_for_bit(self, model: starscope.Model) -> None:
        for i in range(model.num_layers):
            block = model.layers[i]
            with model.trace(PROMPT):
                before, attention = block.layer_input, block.self_attn.attention_output
                mid, feed, after = block.layer_mid, block.mlp.mlp_output, block.layer_output
            assert same(before + attention, mid)
            assert same(mid + feed, after)
            assert same(before + attention + feed, after)

    def test_one_value_under_two_names_is_one_tensor(self, model: starscope.Model) -> None:
        with model.trace(PROMPT):
            for i, block in enumerate(model.layers):
                assert block.layer_input is block.layer_input
                assert same(block.input, block.layer_input)
                assert block.input.data_ptr() == block.layer_input.data_ptr()
                assert block.mlp_norm_output is block.mlp_input
                is_gated = f"layers.{i}.mlp.gate_proj.weight" in model.weights
                assert (block.mlp.mlp_activation is block.mlp.mlp_neurons) == (not is_gated)
                if i + 1 < model.num_layers:
                    assert block.layer_output is model.layers[i + 1].layer_input
            assert model.lm_head_output is model.logits
            assert model.lm_head.output is model.logits
        with model.trace(PROMPT):
            attention = model.layers[0].self_attn
            assert same(attention.attention_head_outputs, attention.attention_premix)
            assert same(attention.o_proj.input, attention.attention_premix.flatten(-2))
            assert attention.output[0] is attention.attention_output
            assert len(attention.output) == 2

    def test_module_inputs_are_what_the_modules_before_them_give(self, model: starscope.Model) -> None:
        with model.trace(PROMPT):
            assert same(model.embed_tokens.output, model.token_embeddings)
            for block in model.layers:
                norm = block.input_layernorm.output
                assert same(block.self_attn.input, norm)
                assert same(block.attention_norm_output, norm)
                attention = block.self_attn.output[0]
                assert same(block.post_attention_layernorm.input, block.layer_mid)
                assert same(block.mlp.input, block.post_attention_layernorm.output)
                assert same(block.mlp.output, block.mlp.mlp_output)
                assert attention.shape == block.output.shape
            assert same(model.norm.output, model.final_norm_output)
            assert model.norm.output.shape[-1] == model.hidden_size
            assert model.lm_head.output.shape[-1] == model.vocab_size

    def test_the_pattern_is_causal_sums_to_one_and_mixes_the_values(self, model: starscope.Model) -> None:
        patterns = []
        groups = model.num_heads // model.num_kv_heads
        for i in range(model.num_layers):
            attention = model.layers[i].self_attn
            with model.trace(PROMPT):
                v, scores = attention.attention_values, attention.attention_scores
                pattern, heads = attention.attention_probabilities, attention.attention_head_outputs
            assert same(pattern.tril(), pattern)
            assert (pattern.sum(-1) - 1).abs().max() <= 8 * 2.0**-23
            mixed = (pattern @ v.repeat_interleave(groups, dim=1)).transpose(1, 2)
            rounded = model.engine.name == "native" and model.weights.half_cache
            limit = 2.0**-8 * 2**23 if rounded else TOLERANCE
            assert value_ulps(mixed, heads) <= limit
            assert value_ulps(scores.softmax(-1), pattern) <= limit
            patterns.append(pattern)
        assert not torch.equal(patterns[0], patterns[-1])
        with model.trace(PROMPT):
            assert same(model.layers[0].self_attn.attention_probabilities, patterns[0])

    # Reading.

    def test_reading_everything_changes_no_logit(self, model: starscope.Model) -> None:
        plain = logits_of(model, PROMPT)
        assert same(plain[:, -1], model.engine.forward([PROMPT])[0])
        if model.engine.name == "native":  # whose sums do not depend on how many rows there are
            assert same(plain, model.forward(PROMPT))
        with model.trace(PROMPT) as t:
            for name in value_names(model):
                read(model, name)
            assert model.next_token_probs.shape == (1, model.vocab_size)
        assert same(t.result.logits, plain)

    def test_a_value_alone_is_the_value_among_all(self, model: starscope.Model) -> None:
        with model.trace(PROMPT):
            together = all_values(model)
        for name, expected in together.items():
            with model.trace(PROMPT):
                assert same(read(model, name), expected), name

    # While generating, and in batches.

    def test_what_is_likeliest_at_each_step_is_what_is_chosen(self, model: starscope.Model) -> None:
        chosen = []
        with model.trace(PROMPT, max_new_tokens=6) as t:
            for _ in t.steps():
                chosen.append(int(model.next_token_probs.argmax()))
        assert t.result[0].tolist() == [*PROMPT, *chosen]
        [completion] = model.generate([PROMPT], max_new_tokens=6)
        assert t.tokens[0][: len(completion.token_ids)] == completion.token_ids

    def test_an_edit_of_one_step_leaves_those_before_alone_and_later_ones_run(self, model: starscope.Model) -> None:
        with model.trace(PROMPT, max_new_tokens=4) as t:
            plain = [model.logits.clone() for _ in t.steps()]
        edited = []
        with model.trace(PROMPT, max_new_tokens=4) as t:
            for step in t.steps():
                model.input_ids = ids_of_step(model, step, plain)
                if step == 1:
                    model.layers[1].layer_output[:] = 0
                edited.append(model.logits.clone())
        assert same(edited[0], plain[0])
        assert not same(edited[1], plain[1])

    def test_a_row_of_a_batch_is_the_prompt_alone_and_padding_is_nothing(self, model: starscope.Model) -> None:
        prompts = [PROMPT[:3], OTHER, PROMPT[:1]]
        alone = []
        for one in prompts:
            with model.trace(one):
                alone.append(all_values(model))
        longest = max(map(len, prompts))
        with model.trace(prompts):
            mask = model.attention_mask
            assert mask.tolist() == [[0] * (longest - len(one)) + [1] * len(one) for one in prompts]
            for name in value_names(model):
                together = read(model, name)
                assert list(together.shape) == shape_of(model, name, batch=3, seq=longest)
                for row, one in enumerate(prompts):
                    real = unpadded(name, together[row], longest - len(one))
                    expected = alone[row][name][0]
                    found = value_ulps(real, expected)
                    limit = (
                        0 if model.engine.name == "native" else 4 * TOLERANCE if model.weights.half_cache else TOLERANCE
                    )
                    assert found <= limit or (model.weights.half_cache and found <= HALF * 2**23), (name, row, found)

    def test_what_is_written_to_padding_is_ignored(self, model: starscope.Model) -> None:
        prompts = [PROMPT[:3], OTHER]
        plain = logits_of(model, prompts)
        missing = len(OTHER) - 3
        for name in value_names(model):
            with model.trace(prompts) as t:
                value = read(model, name)
                padding = VALUES[name.rpartition(".")[2]].layout
                if padding == "Pattern":
                    value[0, :, :missing] = 7.0
                    value[0, :, :, :missing] = 7.0
                elif padding in ("Queries", "Keys", "Values"):
                    value[0, :, :missing] = 7.0
                else:
                    value[0, :missing] = 7.0
            result = t.result.logits
            if name in ("logits", "lm_head_output"):
                result[0, :missing] = 0
            assert_equal_but_for_attention(model, name, result, plain)
