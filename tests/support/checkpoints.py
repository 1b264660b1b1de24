"""Small random GPT-BigCode folders, written by transformers itself, so that tests read what users have.

    model = make_checkpoint(tmp_path / "model", multi_query=False, dtype="bfloat16", shards=2)

The weights are spread so that logits differ clearly between tokens and a wrong bias, norm or head order shows. The
tokenizer is a byte-level BPE with StarCoder's special tokens and a few merges, smaller than the embedding, as real ones
are.
`PAIRWISE` covers every pair of settings of the six options that change a folder's form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from transformers import GPTBigCodeForCausalLM

SPECIAL_TOKENS = (
    "<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<filename>", "<gh_stars>",
    "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>",
    "<jupyter_output>", "<empty_output>", "<commit_before>", "<commit_msg>", "<commit_after>", "<reponame>",
)  # fmt: skip

MERGES = (
    "Ġ Ġ", "ĠĠ ĠĠ", "Ċ ĠĠĠĠ", "i n", "e r", "o n", "r e", "t h", "a d", "ad d", "d e", "de f", "Ġ def", "re t", "u r",
    "ret ur", "retur n", "Ġ a", "Ġ b", "Ġ =", "Ġ +", "s e", "se l", "sel f", "p r", "in t", "pr int", "f or", "o r",
    "Ġ in", "( self", "Ġ i", ") :",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One combination of the options that change what a folder looks like; `asdict` gives make_checkpoint's options."""

    multi_query: bool
    activation: str
    n_inner: int | None
    tied: bool
    dtype: str
    shards: int

    def __str__(self) -> str:
        heads = "mqa" if self.multi_query else "mha"
        head = "tied" if self.tied else "untied"
        return f"{heads}-{self.activation}-{self.n_inner}-{head}-{self.dtype}-{self.shards}"

    def options(self) -> dict[str, object]:
        return asdict(self)


PAIRWISE = (
    Setting(True,  "gelu_pytorch_tanh", None, True,  "float32",  1),
    Setting(False, "gelu",              None, False, "float32",  2),
    Setting(True,  "gelu",              192,  True,  "float16",  2),
    Setting(False, "gelu_pytorch_tanh", 192,  False, "float16",  1),
    Setting(False, "gelu_new",          None, True,  "bfloat16", 2),
    Setting(True,  "gelu_new",          192,  False, "bfloat16", 1),
    Setting(True,  "gelu",              192,  False, "float32",  2),
    Setting(False, "gelu_new",          192,  True,  "float32",  1),
    Setting(True,  "gelu_new",          None, False, "float16",  2),
    Setting(False, "gelu",              None, True,  "bfloat16", 1),
    Setting(True,  "gelu_pytorch_tanh", 192,  True,  "bfloat16", 2),
    Setting(False, "gelu_pytorch_tanh", None, False, "float16",  2),
)  # fmt: skip


def byte_characters() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes, in the order of the bytes."""
    kept = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in kept else next(spare)) for byte in range(256)]


def make_tokenizer(folder: Path, vocab_size: int = 320) -> None:
    """Write tokenizer.json and tokenizer_config.json: at most `vocab_size` tokens, StarCoder's specials first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*SPECIAL_TOKENS, *byte_characters()]
    if vocab_size < len(pieces):
        raise ValueError(f"a byte-level vocabulary needs at least {len(pieces)} tokens, not {vocab_size}")
    pairs: list[tuple[str, str]] = []
    for merge in MERGES[: vocab_size - len(pieces)]:
        left, right = merge.split(" ")
        if left in pieces and right in pieces:
            pairs.append((left, right))
            pieces.append(left + right)
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    end = SPECIAL_TOKENS[0]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=end,
        eos_token=end,
        unk_token=end,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
    wrapped.save_pretrained(folder)


def make_checkpoint(
    folder: Path | str,
    *,
    multi_query: bool = True,
    activation: str = "gelu_pytorch_tanh",
    n_inner: int | None = None,
    tied: bool = True,
    dtype: str = "float32",
    shards: int = 1,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    positions: int = 128,
    vocab_size: int = 320,
    seed: int = 0,
) -> GPTBigCodeForCausalLM:
    """Write a random checkpoint and its tokenizer into `folder`; return the model as saved (in `dtype`, eval mode).

    `shards` > 1 asks for about that many files (a tensor is never cut), with model.safetensors.index.json beside them.
    """
    import torch
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    folder = Path(folder)
    config = GPTBigCodeConfig(
        vocab_size=vocab_size,
        n_positions=positions,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        n_inner=n_inner,
        activation_function=activation,
        multi_query=multi_query,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    generator = torch.Generator().manual_seed(seed)
    model = GPTBigCodeForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 0.1 if weight.dim() == 1 else 1.5 / weight.shape[1] ** 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
            if ".ln_" in name and name.endswith("weight"):
                weight.add_(1.0)
    model = model.to(getattr(torch, dtype)).eval()
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    model.save_pretrained(folder, max_shard_size=-(-size // shards) if shards > 1 else 2 * size)
    if shards > 1 and not (folder / "model.safetensors.index.json").is_file():
        raise RuntimeError(f"transformers wrote one file where {shards} were asked for")
    make_tokenizer(folder, vocab_size)
    return model


def edit_config(folder: Path, *, remove: tuple[str, ...] = (), **changes: object) -> None:
    """Change or remove keys of config.json in place."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.update(changes)
    for key in remove:
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


BLOCK_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def gguf_tensors(model: GPTBigCodeForCausalLM) -> dict[str, np.ndarray]:
    """What a GGUF file of this model has to hold, float32 by GGUF name: written down apart from the package."""
    config = model.config
    names = {"transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm"}
    names |= {
        f"transformer.h.{i}.{hf}": f"blk.{i}.{gguf}" for i in range(config.n_layer) for hf, gguf in BLOCK_NAMES.items()
    }
    if not config.tie_word_embeddings:
        names["lm_head"] = "output"
    found = {}
    for name, weight in model.state_dict().items():
        module, _, part = name.rpartition(".")
        if module not in names:
            assert name == "lm_head.weight", name
            continue
        values = weight.detach().float().numpy()
        if module.endswith("c_attn") and not config.multi_query:  # [q|k|v] of each head -> all q, all k, all v
            values = values.reshape(config.n_head, 3, config.n_embd // config.n_head, -1).swapaxes(0, 1)
            values = values.reshape(weight.shape)
        found[f"{names[module]}.{part}"] = values
    return found


def store_as_torch(folder: Path, state: Mapping[str, torch.Tensor], shards: int = 1) -> None:
    """Replace the folder's weights by pytorch_model.bin, or by `shards` parts with their index.

    Each part holds tensors that follow one another in `state`; what shares memory in one part shares a storage.
    """
    import torch

    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    if shards == 1:
        torch.save(dict(state), folder / "pytorch_model.bin")
        return
    names = list(state)
    weight_map = {}
    for part in range(shards):
        file = f"pytorch_model-{part + 1:05d}-of-{shards:05d}.bin"
        chosen = names[part * len(names) // shards : (part + 1) * len(names) // shards]
        torch.save({name: state[name] for name in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")


SANTACODER_CONFIG = {  # of bigcode/santacoder, without its sizes
    "activation_function": "gelu_fast",
    "architectures": ["GPT2LMHeadCustomModel"],
    "attention_head_type": "multiquery",
    "attn_pdrop": 0.1,
    "auto_map": {
        "AutoConfig": "configuration_gpt2_mq.GPT2CustomConfig",
        "AutoModelForCausalLM": "modeling_gpt2_mq.GPT2LMHeadCustomModel",
    },
    "embd_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.1,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "torch_dtype": "float32",
    "transformers_version": "4.24.0",
    "use_cache": True,
}


def make_santacoder(folder: Path, *, dtype: str = "float32", torch_file: bool = True) -> GPTBigCodeForCausalLM:
    """Write a folder in the form of bigcode/santacoder; return the model that transformers has for the same weights.

    That form is GPT-2's with multi-query attention: matrices are [in out], queries and keys with values apart, and
    the causal mask of each block is stored beside them.
    """
    import torch
    from safetensors.torch import save_file

    model = make_checkpoint(folder, activation="gelu_fast", n_inner=192, dtype=dtype)
    sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = ("n_embd", "n_head", "n_inner", "n_layer", "n_positions", "vocab_size", "bos_token_id", "eos_token_id")
    config = {**SANTACODER_CONFIG, **{key: sizes[key] for key in kept}}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    state = {}
    for name, tensor in model.state_dict().items():
        if ".attn.c_attn." in name:
            for part, rows in (("q_attn", slice(config["n_embd"])), ("kv_attn", slice(config["n_embd"], None))):
                state[name.replace("c_attn", part)] = tensor[rows].transpose(0, -1).contiguous()
        elif name.endswith(("c_proj.weight", "c_fc.weight")):
            state[name] = tensor.T.contiguous()
        else:
            state[name] = tensor
    for layer in range(config["n_layer"]):
        mask = torch.ones(1, 1, config["n_positions"], config["n_positions"], dtype=torch.bool).tril()
        state |= {
            f"transformer.h.{layer}.attn.bias": mask,
            f"transformer.h.{layer}.attn.masked_bias": torch.tensor(-1e4),
        }
    if torch_file:
        store_as_torch(folder, state)
    else:
        save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return model
