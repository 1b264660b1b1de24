"""Folders in the form of particular releases: the first SantaCoder, and StarChat with its added tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast
from transformers.pytorch_utils import Conv1D

import starscope
from starscope.checkpoint import join, open_checkpoint
from starscope.convert import convert
from starscope.errors import CheckpointError, UnsupportedError
from starscope.gguf import read_gguf
from support.checkpoints import SPECIAL_TOKENS, edit_config, gguf_tensors, make_checkpoint, make_santacoder
from support.numbers import TOLERANCE, ulps

# The first SantaCoder


@pytest.mark.parametrize("torch_file", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_first_santacoder_has_the_tensors_of_the_later_one(dtype: str, torch_file: bool, tmp_path: Path) -> None:
    model = make_santacoder(tmp_path, dtype=dtype, torch_file=torch_file)
    report = convert(tmp_path, to="f32", verify=True)
    with read_gguf(report.out) as file:
        expected = gguf_tensors(model)
        assert set(file.tensors) == set(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(file.array(name), values, err_msg=name)
        assert file.get("starcoder.attention.head_count_kv") == 1
        assert file.get("starcoder.hidden_activation") == "gelu_pytorch_tanh"
    assert (report.family, report.notes) == ("gpt_bigcode", [])


def test_its_logits_are_those_of_transformers(tmp_path: Path) -> None:
    model = make_santacoder(tmp_path).float()
    ids = list(range(30, 70))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    for source in (convert(tmp_path, to="f32").out, tmp_path):
        assert ulps(starscope.load(source, engine="numpy").forward(ids)[0], expected) <= TOLERANCE


def test_its_projections_are_conv1d_as_transformers_defines_it(tmp_path: Path) -> None:
    model = make_santacoder(tmp_path, torch_file=False)
    state = load_file(tmp_path / "model.safetensors")
    x = torch.randn(5, 64)
    parts = []
    for module, size in (("q_attn", 64), ("kv_attn", 32)):
        projection = Conv1D(size, 64)
        projection.load_state_dict(
            {part: state[f"transformer.h.0.attn.{module}.{part}"] for part in ("weight", "bias")}
        )
        parts.append(projection(x))
    expected = model.transformer.h[0].attn.c_attn(x)
    torch.testing.assert_close(torch.cat(parts, dim=-1), expected)


def test_its_vocabulary_alone_needs_no_weights(tmp_path: Path) -> None:
    make_santacoder(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    assert read_gguf(convert(tmp_path, vocab_only=True).out).get("starcoder.block_count") == 2


@pytest.mark.parametrize("lost", ["q_attn.weight", "kv_attn.bias"])
def test_half_of_its_projection_is_not_enough(lost: str, tmp_path: Path) -> None:
    make_santacoder(tmp_path, torch_file=False)
    state = load_file(tmp_path / "model.safetensors")
    del state[f"transformer.h.1.attn.{lost}"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"has .* and no transformer\.h\.1\.attn\.{lost}; expected both"):
        convert(tmp_path)


def test_its_class_with_many_key_heads_is_refused_with_what_to_use(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_config(tmp_path, architectures=["GPT2LMHeadCustomModel"])
    with pytest.raises(UnsupportedError, match=r"c_attn\.\w+: this class .*gpt_bigcode-santacoder"):
        convert(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"attention_head_type": "grouped"},
            UnsupportedError,
            "attention_head_type is 'grouped'; supported: multiquery",
        ),
        (
            {"attention_head_type": "multihead", "multi_query": True},
            CheckpointError,
            "contradicts itself about the number",
        ),
        ({"scale_attn_by_inverse_layer_idx": True}, UnsupportedError, "scale_attn_by_inverse_layer_idx = True"),
        ({"n_head_kv": 4}, CheckpointError, "contradicts itself .* n_head_kv 4, attention_head_type 1"),
    ],
)
def test_its_config_is_read_to_the_end(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    make_santacoder(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(error, match=message):
        convert(tmp_path)


def test_a_matrix_of_another_shape_is_named_by_its_parts(tmp_path: Path) -> None:
    make_santacoder(tmp_path, torch_file=False)
    state = load_file(tmp_path / "model.safetensors")
    name = "transformer.h.0.attn.kv_attn.weight"
    save_file({**state, name: torch.zeros(64, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"q_attn\.weight \+ {name} is \[112 64\]; expected \[96 64\]"):
        convert(tmp_path)
    save_file({**state, name: torch.zeros(65, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected one type and rows of one size"):
        convert(tmp_path)
    save_file({**state, name: torch.zeros(64, 32, dtype=torch.float16)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"kv_attn\.weight is F16 \[32, 64\]; expected one type"):
        convert(tmp_path)


def test_rows_of_joined_and_turned_tensors_are_read_alone(tmp_path: Path) -> None:
    one, other = torch.randn(5, 3), torch.randn(5, 4)
    save_file({"one": one, "other": other, "vector": one[0].clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(tmp_path) as checkpoint:
        turned = [checkpoint.tensors[name].transposed() for name in ("one", "other")]
        assert turned[0].transposed() == checkpoint.tensors["one"]
        joined = join("both", turned)
        expected = torch.cat([one.T, other.T]).numpy()
        assert (joined.shape, joined.nbytes, joined.row_bytes) == ((7, 5), 140, 20)
        for start in range(8):
            for stop in range(start, 8):
                np.testing.assert_array_equal(joined.read_rows(start, stop), expected[start:stop])
        buffer = np.zeros(200, np.uint8)
        assert np.shares_memory(joined.read_raw_rows(2, 5, buffer), buffer)
        np.testing.assert_array_equal(buffer[:60].view(np.float32).reshape(3, 5), expected[2:5])
        for not_a_matrix in (joined, checkpoint.tensors["vector"]):
            with pytest.raises(CheckpointError, match="expected"):
                not_a_matrix.transposed()


# Vocabularies


SANTACODER_TOKENS = ("<|endoftext|>", "<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>")
STARCHAT_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


def store_vocabulary(folder: Path, first: tuple[str, ...], added: tuple[str, ...], **roles: Any) -> None:
    """tokenizer.json with 49,152 tokens, `first` among them, then the `added` ones; `roles` name some of either."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*first, *alphabet]
    pieces += [f"{one}{two}{three}" for one in alphabet for two in alphabet for three in "abc"][: 49152 - len(pieces)]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*first, *added])
    PreTrainedTokenizerFast(tokenizer_object=made, **roles).save_pretrained(folder)


def always_say(model: torch.nn.Module, token_id: int) -> None:
    """Make the head prefer one token wherever it is asked."""
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[token_id] = 10.0


@pytest.mark.parametrize("eos", [49152, 50256])  # as in the release, and as its conversion left it: no token of it
def test_santacoder_ends_at_its_own_end_token_and_fills_holes(eos: int, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, vocab_size=49280, hidden=16, heads=2, layers=1, positions=64)
    store_vocabulary(tmp_path, (), SANTACODER_TOKENS)
    always_say(model, 49152)
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, bos_token_id=eos, eos_token_id=eos)
    (tmp_path / "generation_config.json").unlink()
    for source in (convert(tmp_path, to="f16").out, tmp_path):
        loaded = starscope.load(source)
        fim = loaded.tokenizer.fim
        assert fim is not None
        assert (fim.prefix, fim.middle, fim.suffix, fim.pad) == (49153, 49154, 49155, 49156)
        assert loaded.tokenizer.stop_ids == {49152, 49156}
        for suffix in (None, "y"):
            completion = loaded.generate("x = 1", suffix=suffix, max_new_tokens=8)
            assert (completion.text, completion.finish_reason) == ("", "stop")


@pytest.fixture(scope="module")
def starchat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with StarChat's vocabulary: StarCoder's tokens and four added ones; its model always says <|end|>.

    As in the release, eos_token_id is 0 everywhere.
    """
    folder = tmp_path_factory.mktemp("starchat")
    model = make_checkpoint(folder, vocab_size=49156, hidden=16, heads=2, layers=1, positions=64)
    end, *others = SPECIAL_TOKENS
    special = [*others, *STARCHAT_TOKENS]
    store_vocabulary(
        folder, SPECIAL_TOKENS, STARCHAT_TOKENS,
        bos_token=end, eos_token=end, unk_token=end, additional_special_tokens=special,
    )  # fmt: skip
    always_say(model, 49155)
    model.save_pretrained(folder)
    return folder


def test_starchats_added_tokens_are_its_last_rows(starchat: Path) -> None:
    model = starscope.load(convert(starchat, to="q8_0", verify=True, force=True).out)
    assert model.vocab_size == 49156
    prompt = "<|system|>\n<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>"
    ids = model.tokenizer.encode(prompt, special=True)
    reference = PreTrainedTokenizerFast.from_pretrained(starchat).encode(prompt)
    assert ids == reference
    assert [token_id for token_id in ids if token_id >= 49152] == [49152, 49155, 49153, 49155, 49154]
    assert 49155 not in model.tokenizer.encode(prompt)  # text from a user


def test_starchat_ends_at_its_end_token(starchat: Path) -> None:
    for source in (convert(starchat, to="f16", force=True).out, starchat):
        model = starscope.load(source)
        assert {0, 49155} <= model.tokenizer.stop_ids
        completion = model.generate("x = 1", max_new_tokens=8)
        assert (completion.text, completion.finish_reason) == ("", "stop")
