"""GPT-BigCode: StarCoder, StarCoderBase, SantaCoder in both its forms, tiny_starcoder_py and their fine-tunes.

GPT-2's sequential block with multi-query attention: one key head and one value head serve every query head, and
queries, keys and values are rows of one fused projection. Learned positions, LayerNorm with bias, GELU. The block:

    h   = x + attention(input_layernorm(x))
    out = h + mlp(post_attention_layernorm(h))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from starscope.checkpoint import join
from starscope.checkpoint.content import cut, short, switch, typed
from starscope.errors import CheckpointError, UnsupportedError
from starscope.family import ALWAYS_REFUSED, Family, HParam, HParams, Module, Refused, Tensor

if TYPE_CHECKING:
    from starscope.checkpoint import CheckpointTensor
    from starscope.gguf.reader import GGUFFile
    from starscope.graph import Edge, Recorder

CONFIG = "config.json"
GELUS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
}

HPARAMS = [
    #      ours                 GGUF                             HF config
    HParam("context_length",    "context_length",                "n_positions", also=("max_position_embeddings",)),
    HParam("hidden_size",       "embedding_length",              "n_embd"),
    HParam("num_layers",        "block_count",                   "n_layer"),
    HParam("intermediate_size", "feed_forward_length",           lambda c: _intermediate_size(c), reads=("n_inner", "n_embd")),
    HParam("num_heads",         "attention.head_count",          "n_head"),
    HParam("num_kv_heads",      "attention.head_count_kv",       lambda c: _num_kv_heads(c), reads=("multi_query", "n_head", "n_head_kv", "num_key_value_heads", "attention_head_type")),
    HParam("norm_epsilon",      "attention.layer_norm_epsilon",  "layer_norm_epsilon", kind=float, default=1e-5),
    HParam("activation",        "hidden_activation",             "activation_function", kind=str, default="gelu_pytorch_tanh", choices=GELUS),
    HParam("vocab_size",        None,                            "vocab_size"),
]  # fmt: skip

DERIVED = {
    "head_dim": lambda hp: hp.hidden_size // hp.num_heads,
    "qk_head_dim": lambda hp: hp.hidden_size // hp.num_heads,
    "kv_size": lambda hp: hp.num_kv_heads * (hp.hidden_size // hp.num_heads),
}

REFUSED: Refused = {
    **ALWAYS_REFUSED,
    "scale_attn_by_inverse_layer_idx": (True, "scores are only scaled by 1/sqrt(head_dim) in every released model"),
    "scale_attn_weights": (False, "scores are scaled by 1/sqrt(head_dim) in every released model"),
}

IGNORED = {
    "attention_softmax_in_fp32": "the softmax is float32 whatever it says",
    "scale_attention_softmax_in_fp32": "the softmax is float32 whatever it says",
    "attn_pdrop": "dropout is only for training",
    "embd_pdrop": "dropout is only for training",
    "resid_pdrop": "dropout is only for training",
    "initializer_range": "it describes how the weights were drawn",
    "reorder_and_upcast_attn": "scores are float32 whatever it says",
    "inference_runner": "it chooses an implementation of the same arithmetic",
    "validate_runner_input": "it chooses an implementation of the same arithmetic",
    "pre_allocate_kv_cache": "it chooses an implementation of the same arithmetic",
    "max_sequence_length": "it sizes a cache; the positions are n_positions",
    "max_batch_size": "it sizes a cache",
    "summary_activation": "it belongs to a classification head",
    "summary_first_dropout": "it belongs to a classification head",
    "summary_proj_to_labels": "it belongs to a classification head",
    "summary_type": "it belongs to a classification head",
    "summary_use_proj": "it belongs to a classification head",
    "tie_word_embeddings": "the tensors say it; a contradiction between the two is an error of the conversion",
}

IGNORED_TENSORS = ["transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"]  # causal masks kept as buffers

TENSORS = [
    #      ours                                  GGUF                   HF                             shape [out in]
    Tensor("embed_tokens",                       "token_embd",          "transformer.wte",             "vocab_size hidden_size"),
    Tensor("embed_positions",                    "position_embd",       "transformer.wpe",             "context_length hidden_size", always_f32=True),
    Tensor("layers.{i}.input_layernorm",         "blk.{i}.attn_norm",   "transformer.h.{i}.ln_1",      "hidden_size", bias=True),
    Tensor("layers.{i}.self_attn.qkv_proj",      "blk.{i}.attn_qkv",    "transformer.h.{i}.attn.c_attn", "hidden_size+2*kv_size hidden_size", bias=True,
           hf_rows=lambda hp: _qkv_rows(hp)),
    Tensor("layers.{i}.self_attn.o_proj",        "blk.{i}.attn_output", "transformer.h.{i}.attn.c_proj", "hidden_size hidden_size", bias=True),
    Tensor("layers.{i}.post_attention_layernorm", "blk.{i}.ffn_norm",   "transformer.h.{i}.ln_2",      "hidden_size", bias=True),
    Tensor("layers.{i}.mlp.up_proj",             "blk.{i}.ffn_up",      "transformer.h.{i}.mlp.c_fc",  "intermediate_size hidden_size", bias=True),
    Tensor("layers.{i}.mlp.down_proj",           "blk.{i}.ffn_down",    "transformer.h.{i}.mlp.c_proj", "hidden_size intermediate_size", bias=True),
    Tensor("norm",                               "output_norm",         "transformer.ln_f",            "hidden_size", bias=True),
    Tensor("lm_head",                            "output",              "lm_head",                     "vocab_size hidden_size", tied_to="embed_tokens"),
]  # fmt: skip

MODULES = [
    #      ours                       HF                            class
    Module("",                        "",                           "GPTBigCodeForCausalLM"),
    Module("layers",                  "transformer.h",              "ModuleList"),
    Module("layers.{i}",              "transformer.h.{i}",          "GPTBigCodeBlock"),
    Module("layers.{i}.self_attn",    "transformer.h.{i}.attn",     "GPTBigCodeAttention"),
    Module("layers.{i}.mlp",          "transformer.h.{i}.mlp",      "GPTBigCodeMLP"),
    Module("layers.{i}.mlp.act_fn",   "transformer.h.{i}.mlp.act",  lambda hp: "GELUActivation" if hp.activation == "gelu" else "GELUTanh"),
]  # fmt: skip


def record(g: Recorder) -> None:
    """Tokens and positions in, logits out."""
    tokens = g.value("token_embeddings", g.embed("input_ids", "embed_tokens"))  # [rows hidden_size]
    positions = g.value("position_embeddings", g.embed("positions", "embed_positions"))  # [rows hidden_size]
    x = g.add(tokens, positions)
    for layer in g.layers():
        with layer:
            x = block(g, x)
    x = g.value("final_norm_output", g.layer_norm(x, "norm"))
    logits = g.value("lm_head_output", g.linear(g.wanted_rows(x), "lm_head"))  # [wanted vocab_size]
    g.value("logits", logits)


def block(g: Recorder, x: Edge) -> Edge:  # [rows hidden_size] -> the same
    x = g.value("layer_input", x)
    h = g.value("attention_norm_output", g.layer_norm(x, "input_layernorm"))
    shares = (g.hp.num_heads, g.hp.num_kv_heads, g.hp.num_kv_heads)
    q, k, v = g.split_heads(g.linear(h, "self_attn.qkv_proj"), *shares)  # [rows heads head_dim] each
    heads = g.attention(q, k, v)  # names its own inner values; [rows hidden_size]
    x = g.value("layer_mid", g.add(x, g.value("attention_output", g.linear(heads, "self_attn.o_proj"))))
    h = g.value("mlp_input", g.value("mlp_norm_output", g.layer_norm(x, "post_attention_layernorm")))
    h = g.gelu(g.linear(h, "mlp.up_proj"), exact=g.hp.activation == "gelu")  # [rows intermediate_size]
    h = g.value("mlp_neurons", g.value("mlp_activation", h))
    return g.value("layer_output", g.add(x, g.value("mlp_output", g.linear(h, "mlp.down_proj"))))


def _intermediate_size(config: Mapping[str, Any]) -> int:
    """n_inner, or four times the width where it is null."""
    inner = typed(config, "n_inner", int, CONFIG)
    if inner is not None and inner < 1:
        raise CheckpointError(f"{CONFIG}: n_inner is {short(inner)}; expected a positive number or null.")
    return 4 * _width(config, "n_embd") if inner is None else inner


def _width(config: Mapping[str, Any], key: str) -> int:
    """A size that has to be there."""
    size = typed(config, key, int, CONFIG)
    if size is None:
        raise KeyError(key)
    return size


def _num_kv_heads(config: Mapping[str, Any]) -> int:
    """One head, or as many as query heads when multi_query is false. Other keys may say it too, if they agree."""
    found = {key: typed(config, key, int, CONFIG) for key in ("n_head_kv", "num_key_value_heads")}
    said = {key: heads for key, heads in found.items() if heads is not None}
    kind = typed(config, "attention_head_type", str, CONFIG)
    if kind is not None:
        if kind not in ("multiquery", "multihead"):
            raise UnsupportedError(f"{CONFIG}: attention_head_type is {short(kind)}; supported: multiquery, multihead.")
        said["attention_head_type"] = 1 if kind == "multiquery" else _width(config, "n_head")
    if "multi_query" in config or not said:
        said["multi_query"] = 1 if switch(config, "multi_query", True, CONFIG) else _width(config, "n_head")
    if len(set(said.values())) > 1:
        listed = ", ".join(f"{key} {short(heads)}" for key, heads in said.items())
        raise CheckpointError(f"{CONFIG} contradicts itself about the number of key heads: {listed}.")
    return next(iter(said.values()))


def _qkv_rows(hp: HParams) -> np.ndarray | None:
    """Our rows are [Q | K | V]. With one key head so are Hugging Face's; otherwise it has [q|k|v] for each head."""
    if hp.num_kv_heads == 1:
        return None
    per_head = np.arange(3 * hp.hidden_size).reshape(hp.num_heads, 3, hp.head_dim)
    return per_head.transpose(1, 0, 2).ravel()


def _from_custom_gpt2(stored: Mapping[str, CheckpointTensor]) -> Mapping[str, CheckpointTensor]:
    """bigcode/santacoder's own class: GPT-2's, whose matrices are [in out], with queries apart from keys and values.

    q_attn has the heads one after another, kv_attn the key and then the value: c_attn's rows, once turned over.
    """
    ours: dict[str, CheckpointTensor] = {}
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if module.endswith(".attn.c_attn"):
            raise UnsupportedError(
                f"{tensor.path} has {cut(name)}: this class with one key head for each query head; supported: multiquery.",
                hint="Convert bigcode/gpt_bigcode-santacoder instead, or another model of GPTBigCodeForCausalLM.",
            )
        is_turned = kind == "weight" and module.endswith((".q_attn", ".kv_attn", ".c_proj", ".c_fc"))
        ours[name] = tensor.transposed() if is_turned else tensor
    halves = {name.replace(".kv_attn.", ".q_attn.") for name in ours if ".q_attn." in name or ".kv_attn." in name}
    for queries in sorted(halves):
        pair = (queries, queries.replace(".q_attn.", ".kv_attn."))
        for name, other in (pair, pair[::-1]):
            if name not in ours:
                raise CheckpointError(f"{ours[other].path} has {cut(other)} and no {cut(name)}; expected both.")
        ours[queries.replace(".q_attn.", ".c_attn.")] = join(" + ".join(pair), [ours.pop(name) for name in pair])
    return ours


def _check(hp: HParams) -> None:
    if hp.num_kv_heads not in (1, hp.num_heads):
        raise CheckpointError(
            f"num_kv_heads is {hp.num_kv_heads}; expected 1 (multi-query) or num_heads = {hp.num_heads}."
        )


def _kv_copies(hp: HParams) -> np.ndarray:
    """For each row of [Q | K × heads | V × heads], the row of [Q | K | V] that it repeats."""
    q = np.arange(hp.hidden_size)
    k = hp.hidden_size + np.arange(hp.head_dim)
    return np.concatenate([q, np.tile(k, hp.num_heads), np.tile(k + hp.head_dim, hp.num_heads)])


def expand(hp: HParams) -> tuple[Mapping[str, np.ndarray], Mapping[str, int]]:
    """The form that repeats the one key and value head for every query head.

    Returns, for each GGUF tensor that changes, which of our rows each of its rows is, and the keys that change.
    """
    rows = {f"blk.{i}.attn_qkv.{part}": _kv_copies(hp) for i in range(hp.num_layers) for part in ("weight", "bias")}
    return rows, {"attention.head_count_kv": hp.num_heads, "max_position_embeddings": hp.context_length}


def fold(hp: HParams, file: GGUFFile) -> tuple[HParams, Mapping[str, np.ndarray]]:
    """The inverse of `expand`: when every head of every block repeats the same K and V, one of each is kept.

    Returns the hyperparameters and, for each GGUF tensor that changes, which of its rows to keep; unchanged and
    empty when the copies differ anywhere. Rows are compared as stored, so quantized files fold too.
    """
    if hp.num_heads == 1 or hp.num_kv_heads != hp.num_heads:
        return hp, {}
    folded = hp.replace(num_kv_heads=1, kv_size=hp.head_dim)
    keep = np.concatenate(
        [
            np.arange(hp.hidden_size),
            hp.hidden_size + np.arange(hp.head_dim),
            2 * hp.hidden_size + np.arange(hp.head_dim),
        ]
    )
    names = [f"blk.{i}.attn_qkv.{part}" for i in range(hp.num_layers) for part in ("weight", "bias")]
    for name in names:
        if name not in file.tensors or file.tensors[name].shape[0] != 3 * hp.hidden_size:
            return hp, {}
        stored = file.read(name)
        stored = stored.reshape(3 * hp.hidden_size, -1)[hp.hidden_size :]  # K and V
        copies = stored.reshape(2, hp.num_heads, hp.head_dim, -1)
        if not (copies == copies[:, :1]).all():
            return hp, {}
    return folded, dict.fromkeys(names, keep)


NOTES = """\
One key head and one value head serve every query head (multi_query): attention_keys and attention_values have one
head, and an edit to either reaches every query head. With multi_query false there are as many as query heads; Hugging
Face then lays the fused projection out per head, [q|k|v] for each, and here it is always [Q | K | V].

Positions are learned: there is no embedding past context_length, so a longer prompt is an error and nothing is ever
shifted. token_embeddings are the tokens alone; the position is added before the first block.

The readout is a LayerNorm with a bias and, in every released checkpoint, the token embedding itself. There is no BOS:
position 0 is the first token of the prompt. StarCoder's activation is the exact GELU, SantaCoder's and
tiny_starcoder_py's the tanh form; a GGUF file that does not say gets the tanh form."""

FAMILY = Family(
    name="gpt_bigcode",
    title="GPT-BigCode (StarCoder, SantaCoder)",
    gguf_architecture="starcoder",
    hf_architectures=("GPTBigCodeForCausalLM", "GPT2LMHeadCustomModel"),
    hf_model_types=("gpt_bigcode", "gpt2"),
    hparams=HPARAMS,
    derived=DERIVED,
    tensors=TENSORS,
    modules=MODULES,
    record=record,
    refused=REFUSED,
    ignored=IGNORED,
    ignored_tensors=IGNORED_TENSORS,
    default_pre_tokenizer="starcoder",
    size_classes={(24, 2048): "1B", (36, 2816): "3B", (42, 4096): "7B", (40, 6144): "15B"},
    check=_check,
    layouts={"GPT2LMHeadCustomModel": _from_custom_gpt2},
    notes=NOTES,
    fold=fold,
    expand=expand,
    usual=lambda given: {"intermediate_size": 4 * given["hidden_size"], "num_kv_heads": 1},
    config=lambda hp: {"n_inner": hp.intermediate_size, "multi_query": hp.num_kv_heads == 1},
)
