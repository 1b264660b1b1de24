"""LLaMA 1 to 3, Code Llama, TinyLlama, DeepSeek-Coder, Mistral without its mixtures, and their fine-tunes.

Rotary positions instead of learned ones, RMSNorm, a gated MLP, and query heads in groups that share a key head. Biases
are the exception. Mistral's sliding window lets a query see only so many keys. The block:

    h   = x + attention(input_layernorm(x))
    out = h + down_proj(silu(gate_proj(n)) · up_proj(n)),   n = post_attention_layernorm(h)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from starscope.checkpoint.content import short, typed
from starscope.errors import CheckpointError, UnsupportedError
from starscope.family import ALWAYS_REFUSED, Family, HParam, HParams, Module, Refused, Tensor
from starscope.formats import decode
from starscope.rope import dynamic_base, llama3_factors

if TYPE_CHECKING:
    from starscope.gguf.reader import GGUFFile
    from starscope.graph import Edge, Recorder

CONFIG = "config.json"
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")  # the first two until transformers 5, then the last
BASE, MOST_BASE = 10000.0, 1e12
LEAST_FACTOR = 1e-6  # frequencies are divided by such: they stay finite
# The released scalings of LLaMA 3.1 and 3.2: a file of another converter has the factors alone.
ROPE_FREQS = "rope_freqs.weight"
LLAMA3 = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))

HPARAMS = [
    #      ours                 GGUF                             HF config
    HParam("context_length",    "context_length",                "max_position_embeddings"),
    HParam("hidden_size",       "embedding_length",              "hidden_size"),
    HParam("num_layers",        "block_count",                   "num_hidden_layers"),
    HParam("intermediate_size", "feed_forward_length",           "intermediate_size"),
    HParam("num_heads",         "attention.head_count",          "num_attention_heads"),
    HParam("num_kv_heads",      "attention.head_count_kv",       "num_key_value_heads", default=lambda hp: hp["num_heads"]),
    HParam("qk_head_dim",       "attention.key_length",          "head_dim", default=lambda hp: _head_dim(hp), optional=True),
    HParam("head_dim",          "attention.value_length",        "head_dim", default=lambda hp: _head_dim(hp), optional=True),
    HParam("rope_dims",         "rope.dimension_count",          "head_dim", default=lambda hp: hp["qk_head_dim"]),
    HParam("norm_epsilon",      "attention.layer_norm_rms_epsilon", "rms_norm_eps", kind=float, default=1e-6),
    HParam("activation",        "hidden_activation",             "hidden_act", kind=str, default="silu", choices={"silu": "silu", "swish": "silu"}, optional=True),
    HParam("rope_base",         "rope.freq_base",                lambda c: _rope(c)["rope_theta"], reads=ROPE, kind=float, default=BASE),
    HParam("rope_scale",        "rope.scaling.factor",           lambda c: _scaling(c, "linear")["factor"], reads=ROPE, kind=float, default=1.0, also=("rope.scale_linear",), optional=True),
    HParam("rope_scaling",      "rope.scaling.type",             lambda c: None, kind=str, default=lambda hp: "none" if hp["rope_scale"] == 1 else "linear", choices={"none": "none", "linear": "linear"}, optional=True),
    HParam("rope_dynamic",      "rope.scaling.dynamic_factor",   lambda c: _scaling(c, "dynamic")["factor"], reads=ROPE, kind=float, default=1.0, optional=True),
    HParam("rope_factors",      None,                            lambda c: _rope(c)["rope_type"] == "llama3", reads=ROPE, kind=bool, default=False, tensor=ROPE_FREQS),
    HParam("llama3_factor",     "rope.scaling.llama3.factor",    lambda c: _scaling(c, "llama3")["factor"], reads=ROPE, kind=float, default=1.0, optional=True),
    HParam("llama3_low",        "rope.scaling.llama3.low_freq_factor", lambda c: _scaling(c, "llama3")["low_freq_factor"], reads=ROPE, kind=float, default=1.0, optional=True),
    HParam("llama3_high",       "rope.scaling.llama3.high_freq_factor", lambda c: _scaling(c, "llama3")["high_freq_factor"], reads=ROPE, kind=float, default=4.0, optional=True),
    HParam("llama3_context",    "rope.scaling.llama3.original_context_length", lambda c: _scaling(c, "llama3")["original_max_position_embeddings"], reads=ROPE, default=8192, optional=True),
    HParam("sliding_window",    "attention.sliding_window",      "sliding_window", default=0, optional=True),
    HParam("qkv_bias",          None,                            "attention_bias", kind=bool, default=False, tensor="blk.0.attn_q.bias"),
    HParam("o_bias",            None,                            "attention_bias", kind=bool, default=False, tensor="blk.0.attn_output.bias"),
    HParam("mlp_bias",          None,                            "mlp_bias", kind=bool, default=False, tensor="blk.0.ffn_up.bias"),
    HParam("vocab_size",        "vocab_size",                    "vocab_size"),
]  # fmt: skip

DERIVED = {
    "q_size": lambda hp: hp.num_heads * hp.qk_head_dim,
    "kv_size": lambda hp: hp.num_kv_heads * hp.head_dim,
    "rope_pairs": lambda hp: hp.qk_head_dim // 2,
}

REFUSED: Refused = {
    **ALWAYS_REFUSED,
    "partial_rotary_factor": (lambda value: value not in (None, 1, 1.0), "every dimension of a head is rotated here"),
}

IGNORED = {
    "attention_dropout": "dropout is only for training",
    "initializer_range": "it describes how the weights were drawn",
    "pretraining_tp": "it slices the same products",
    "tie_word_embeddings": "the tensors say it; a contradiction between the two is an error of the conversion",
}

IGNORED_TENSORS = ["model.layers.{i}.self_attn.rotary_emb.inv_freq"]  # frequencies kept as buffers by old checkpoints

TENSORS = [
    #      ours                                  GGUF                   HF                                      shape [out in]
    Tensor("embed_tokens",                       "token_embd",          "model.embed_tokens",                   "vocab_size hidden_size"),
    Tensor("rope_freqs",                         "rope_freqs",          "rope_freqs",                           "rope_pairs", when="rope_factors", positive=True,
           made=lambda hp: llama3_factors(hp.qk_head_dim, hp.rope_base, hp.llama3_factor, hp.llama3_low, hp.llama3_high, hp.llama3_context)),
    Tensor("layers.{i}.input_layernorm",         "blk.{i}.attn_norm",   "model.layers.{i}.input_layernorm",     "hidden_size"),
    Tensor("layers.{i}.self_attn.q_proj",        "blk.{i}.attn_q",      "model.layers.{i}.self_attn.q_proj",    "q_size hidden_size", bias="qkv_bias",
           gguf_rows=lambda hp: _paired(hp.num_heads, hp.qk_head_dim)),
    Tensor("layers.{i}.self_attn.k_proj",        "blk.{i}.attn_k",      "model.layers.{i}.self_attn.k_proj",    "kv_size hidden_size", bias="qkv_bias",
           gguf_rows=lambda hp: _paired(hp.num_kv_heads, hp.qk_head_dim)),
    Tensor("layers.{i}.self_attn.v_proj",        "blk.{i}.attn_v",      "model.layers.{i}.self_attn.v_proj",    "kv_size hidden_size", bias="qkv_bias"),
    Tensor("layers.{i}.self_attn.o_proj",        "blk.{i}.attn_output", "model.layers.{i}.self_attn.o_proj",    "hidden_size q_size", bias="o_bias"),
    Tensor("layers.{i}.post_attention_layernorm", "blk.{i}.ffn_norm",   "model.layers.{i}.post_attention_layernorm", "hidden_size"),
    Tensor("layers.{i}.mlp.gate_proj",           "blk.{i}.ffn_gate",    "model.layers.{i}.mlp.gate_proj",       "intermediate_size hidden_size", bias="mlp_bias"),
    Tensor("layers.{i}.mlp.up_proj",             "blk.{i}.ffn_up",      "model.layers.{i}.mlp.up_proj",         "intermediate_size hidden_size", bias="mlp_bias"),
    Tensor("layers.{i}.mlp.down_proj",           "blk.{i}.ffn_down",    "model.layers.{i}.mlp.down_proj",       "hidden_size intermediate_size", bias="mlp_bias"),
    Tensor("norm",                               "output_norm",         "model.norm",                           "hidden_size"),
    Tensor("lm_head",                            "output",              "lm_head",                              "vocab_size hidden_size", tied_to="embed_tokens"),
]  # fmt: skip

MODULES = [
    #      ours                       HF                               class
    Module("",                        "",                              lambda hp: f"{_brand(hp)}ForCausalLM"),
    Module("layers",                  "model.layers",                  "ModuleList"),
    Module("layers.{i}",              "model.layers.{i}",              lambda hp: f"{_brand(hp)}DecoderLayer"),
    Module("layers.{i}.self_attn",    "model.layers.{i}.self_attn",    lambda hp: f"{_brand(hp)}Attention"),
    Module("layers.{i}.mlp",          "model.layers.{i}.mlp",          lambda hp: f"{_brand(hp)}MLP"),
    Module("layers.{i}.mlp.act_fn",   "model.layers.{i}.mlp.act_fn",   "SiLUActivation"),
]  # fmt: skip


def record(g: Recorder) -> None:
    """Tokens and positions in, logits out."""
    x = g.value("token_embeddings", g.embed("input_ids", "embed_tokens"))  # [rows hidden_size]
    for layer in g.layers():
        with layer:
            x = block(g, x)
    x = g.value("final_norm_output", g.rms_norm(x, "norm"))
    logits = g.value("lm_head_output", g.linear(g.wanted_rows(x), "lm_head"))  # [wanted vocab_size]
    g.value("logits", logits)


def block(g: Recorder, x: Edge) -> Edge:  # [rows hidden_size] -> the same
    hp = g.hp
    x = g.value("layer_input", x)
    h = g.value("attention_norm_output", g.rms_norm(x, "input_layernorm"))
    (q,) = g.split_heads(g.linear(h, "self_attn.q_proj"), hp.num_heads)  # [rows heads head_dim]
    (k,) = g.split_heads(g.linear(h, "self_attn.k_proj"), hp.num_kv_heads)
    (v,) = g.split_heads(g.linear(h, "self_attn.v_proj"), hp.num_kv_heads)
    heads = g.attention(g.rope(q), g.rope(k), v)  # names its own inner values; [rows num_heads·head_dim]
    x = g.value("layer_mid", g.add(x, g.value("attention_output", g.linear(heads, "self_attn.o_proj"))))
    h = g.value("mlp_input", g.value("mlp_norm_output", g.rms_norm(x, "post_attention_layernorm")))
    gate = g.value("mlp_activation", g.silu(g.linear(h, "mlp.gate_proj")))  # [rows intermediate_size]
    h = g.value("mlp_neurons", g.multiply(gate, g.linear(h, "mlp.up_proj")))
    return g.value("layer_output", g.add(x, g.value("mlp_output", g.linear(h, "mlp.down_proj"))))


def _head_dim(values: Mapping[str, Any]) -> int:
    """The width divided among the heads, for models that do not say otherwise."""
    return int(values["hidden_size"] // max(1, values["num_heads"]))


def _paired(heads: int, dim: int) -> np.ndarray:
    """Our rows have a pair's dimensions half a head apart, as Hugging Face; GGUF has them side by side."""
    return np.arange(heads * dim).reshape(heads, dim // 2, 2).transpose(0, 2, 1).ravel()


def _brand(hp: HParams) -> str:
    """Mistral's classes are those that know a window."""
    return "Mistral" if hp.sliding_window else "Llama"


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_theta, rope_type and what belongs to it, whichever keys say it."""
    found: dict[str, Any] = {"rope_theta": typed(config, "rope_theta", float, CONFIG)}
    for key in ("rope_scaling", "rope_parameters"):
        said = config.get(key)
        if said is None:
            continue
        if not isinstance(said, dict):
            raise CheckpointError(f"{CONFIG}: {key} is {short(said)}; expected an object or null.")
        found |= {name: value for name, value in said.items() if value is not None}
    kind = typed(found, "rope_type", str, f"{CONFIG}: rope_parameters") or typed(found, "type", str, CONFIG)
    found["rope_type"] = kind or "default"
    if found["rope_type"] not in ("default", *SCALINGS):
        raise UnsupportedError(
            f"{CONFIG}: rotary positions are scaled by {short(kind)}; supported: default, {', '.join(SCALINGS)}."
        )
    known = {"rope_theta", "rope_type", "type", *SCALINGS.get(found["rope_type"], ())}
    unused = {"original_max_position_embeddings", "max_position_embeddings", "partial_rotary_factor", "factor"}
    unknown = sorted(set(found) - known - unused)
    if unknown:
        raise UnsupportedError(
            f"{CONFIG}: the rotary positions have {unknown[0]}, which {found['rope_type']} scaling does not use."
        )
    if found.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UnsupportedError(f"{CONFIG}: partial_rotary_factor: {REFUSED['partial_rotary_factor'][1]}.")
    return found


SCALINGS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _scaling(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The parameters of a kind of scaling, each None when the config has another kind."""
    rope = _rope(config)
    if rope["rope_type"] != kind:
        return dict.fromkeys(SCALINGS[kind])
    missing = [name for name in SCALINGS[kind] if name not in rope]
    if missing:
        raise CheckpointError(f"{CONFIG}: {kind} scaling of rotary positions has no {missing[0]}; expected a number.")
    return rope


def _check(hp: HParams) -> None:
    if hp.qk_head_dim != hp.head_dim or hp.rope_dims != hp.qk_head_dim:
        raise UnsupportedError(
            f"heads have {hp.qk_head_dim} dimensions in queries, {hp.head_dim} in values and {hp.rope_dims} "
            "that are rotated; supported: the same number for all three."
        )
    if not 0 < hp.head_dim <= hp.hidden_size or hp.head_dim % 2:
        raise CheckpointError(f"head_dim is {hp.head_dim}; expected an even number, 2 to {hp.hidden_size}.")
    for name in ("rope_scale", "rope_dynamic", "llama3_factor", "llama3_low", "llama3_high", "llama3_context"):
        if not LEAST_FACTOR <= hp[name] <= 2**31 - 1:
            raise CheckpointError(
                f"{name} is {short(hp[name])}; expected a number from {LEAST_FACTOR:g} to 2147483647."
            )
    if not 1 < hp.rope_base <= MOST_BASE:
        raise CheckpointError(f"rope_base is {short(hp.rope_base)}; expected a number above 1, up to {MOST_BASE:g}.")
    if hp.rope_scaling == "none" and hp.rope_scale != 1:
        raise CheckpointError(f"rope_scaling is none, but rope_scale is {hp.rope_scale}; expected 1.")
    if hp.rope_factors and hp.llama3_low >= hp.llama3_high:
        raise CheckpointError(
            f"low_freq_factor is {hp.llama3_low} and high_freq_factor {hp.llama3_high}; expected the second to be larger."
        )
    if not 0 <= hp.sliding_window <= 2**31 - 1:
        raise CheckpointError(f"sliding_window is {short(hp.sliding_window)}; expected a number of tokens, or 0.")


def _stretch(hp: HParams, length: int) -> HParams:
    """Dynamic scaling: a context of `length`, up to the factor times the trained one, with the base that fits it.

    transformers takes the base for each text's own length; here it is one for the whole run, so that what is cached
    stays true. The two agree on texts within the trained context, and on those of exactly `length` tokens.
    """
    trained = hp.context_length
    if not trained < length <= trained * hp.rope_dynamic:
        return hp
    if hp.qk_head_dim == 2:
        raise UnsupportedError(
            "heads of 2 dimensions have one frequency, which does not depend on rope_base.",
            hint=f"--ctx {trained} is the maximum.",
        )
    base = dynamic_base(hp.rope_base, hp.qk_head_dim, hp.rope_dynamic, trained, length)
    return hp.replace(context_length=length, rope_base=base)


def _recognise(hp: HParams, file: GGUFFile) -> tuple[HParams, Mapping[str, np.ndarray]]:
    """What LLaMA 3's factors were made of: other converters write the factors and not that. Rows stay as they are.

    llama3_factor is 1 when they are those of no scaling that is known: they are run with, and no config can say them.
    """
    if not hp.rope_factors:
        return hp, {}
    info = file.info(ROPE_FREQS)
    stored = decode(info.format, file.read(ROPE_FREQS)).ravel() if info.format else np.empty(0)
    names = ("llama3_factor", "llama3_low", "llama3_high", "llama3_context")
    for values in (tuple(hp[name] for name in names), *LLAMA3):
        made = llama3_factors(hp.qk_head_dim, hp.rope_base, *values)
        if stored.shape == made.shape and np.allclose(stored, made, rtol=1e-4, atol=0):
            return hp.replace(**dict(zip(names, values, strict=True))), {}
    return hp.replace(llama3_factor=1.0), {}


def _config(hp: HParams) -> Mapping[str, Any]:
    """The keys of rotary positions, in the form that old and new transformers read, and Mistral's name where it is one."""
    scaling: dict[str, Any] | None = None
    if hp.rope_factors:
        if hp.llama3_factor == 1:
            raise UnsupportedError("its rotary frequency factors match no scaling that a config.json can express.")
        values = (hp.llama3_factor, hp.llama3_low, hp.llama3_high, hp.llama3_context)
        scaling = {"rope_type": "llama3", **dict(zip(SCALINGS["llama3"], values, strict=True))}
    elif hp.rope_dynamic != 1:
        scaling = {"rope_type": "dynamic", "factor": hp.rope_dynamic}
    elif hp.rope_scale != 1:
        scaling = {"rope_type": "linear", "factor": hp.rope_scale}
    brand = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"} if hp.sliding_window else {}
    window = hp.sliding_window or None  # transformers takes 0 for a window of none
    return {"rope_theta": hp.rope_base, "rope_scaling": scaling, "sliding_window": window, **brand}


NOTES = """\
Several query heads share one key head and one value head (num_kv_heads of them): attention_keys and attention_values
have those heads, and an edit to one reaches its whole group. attention_queries and attention_keys are after the
rotation, their dimensions in Hugging Face's order: i and i + head_dim/2 are a pair. GGUF has a pair side by side; the
rows are put right when a file is read.

Positions are rotations, so there is no table that ends, but past context_length no model was trained: a longer prompt is
an error. Linear and LLaMA 3.1 scaling are part of the frequencies. Dynamic scaling lets --ctx ask for more than the
trained context, up to the factor times it, with frequencies fixed for that length.

token_embeddings are what enters the first block. mlp_activation is silu(gate_proj), mlp_neurons that times up_proj. The
readout is an RMSNorm, which keeps the mean, and usually a matrix of its own."""

FAMILY = Family(
    name="llama",
    title="LLaMA (Code Llama, TinyLlama, DeepSeek-Coder, Mistral)",
    gguf_architecture="llama",
    hf_architectures=("LlamaForCausalLM", "MistralForCausalLM"),
    hf_model_types=("llama", "mistral"),
    hparams=HPARAMS,
    derived=DERIVED,
    tensors=TENSORS,
    modules=MODULES,
    record=record,
    refused=REFUSED,
    ignored=IGNORED,
    ignored_tensors=IGNORED_TENSORS,
    default_pre_tokenizer="llama-bpe",
    size_classes={
        (22, 2048): "1.1B", (16, 2048): "1.2B", (24, 2048): "1.3B", (28, 3072): "3.2B", (32, 4096): "7B",
        (40, 5120): "13B", (48, 8192): "34B", (62, 7168): "33B", (80, 8192): "70B",
    },
    check=_check,
    notes=NOTES,
    usual=lambda given: {"intermediate_size": -(-given["hidden_size"] * 8 // 96) * 32, "num_kv_heads": given["num_heads"]},
    stretch=_stretch,
    fold=_recognise,
    config=_config,
    tied_by_default=False,
)  # fmt: skip
