"""The standard values: one name, one host, one layout and one meaning for each.

They are the vocabulary of the whole package: a family names the edges of its graph with them, and whoever reads
a value asks for it by them. Layouts are what a reader sees, batch first:

    VALUES["attention_queries"].axes   ->  ("batch", "num_heads", "seq", "qk_head_dim")
    qualified("layer_output", 3)       ->  "layers.3.layer_output"
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL, BLOCK, ATTENTION, MLP = "model", "layers.{i}", "layers.{i}.self_attn", "layers.{i}.mlp"

LAYOUTS: dict[str, tuple[str, ...]] = {
    "Tokens": ("batch", "seq"),
    "Residual": ("batch", "seq", "hidden_size"),
    "Queries": ("batch", "num_heads", "seq", "qk_head_dim"),
    "Keys": ("batch", "num_kv_heads", "seq", "qk_head_dim"),
    "Values": ("batch", "num_kv_heads", "seq", "head_dim"),
    "Pattern": ("batch", "num_heads", "query", "key"),
    "HeadOutputs": ("batch", "seq", "num_heads", "head_dim"),
    "Neurons": ("batch", "seq", "intermediate_size"),
    "Logits": ("batch", "seq", "vocab_size"),
    "NextTokenProbs": ("batch", "vocab_size"),
}


@dataclass(frozen=True)
class StandardValue:
    """A value of the forward pass that has a name. `host` is where it is read: a module path, `{i}` the block."""

    name: str
    host: str
    layout: str
    meaning: str

    @property
    def axes(self) -> tuple[str, ...]:
        return LAYOUTS[self.layout]


def _table(*rows: tuple[str, str, str, str]) -> dict[str, StandardValue]:
    return {name: StandardValue(name, host, layout, meaning) for host, name, layout, meaning in rows}


VALUES: dict[str, StandardValue] = _table(
    (MODEL, "input_ids", "Tokens", "The token ids the model was called with"),
    (MODEL, "attention_mask", "Tokens", "The attention mask the model was called with; zeros are padding"),
    (MODEL, "token_embeddings", "Residual", "The embedding module's output; layers[0].input is what enters the first block"),
    (MODEL, "position_embeddings", "Residual", "The learned position embedding of each position"),
    (BLOCK, "layer_input", "Residual", "The residual stream entering the block"),
    (BLOCK, "attention_norm_output", "Residual", "The normed stream entering the attention"),
    (ATTENTION, "attention_queries", "Queries", "The queries entering attention"),
    (ATTENTION, "attention_keys", "Keys", "The keys entering attention"),
    (ATTENTION, "attention_values", "Values", "The values entering attention"),
    (ATTENTION, "attention_scores", "Pattern", "The attention scores entering the softmax, masked"),
    (ATTENTION, "attention_probabilities", "Pattern", "The attention pattern the values are mixed with"),
    (ATTENTION, "attention_head_outputs", "HeadOutputs", "The per-head outputs before the output projection"),
    (ATTENTION, "attention_premix", "HeadOutputs", "Every head's output side by side, as the output projection takes it"),
    (ATTENTION, "attention_output", "Residual", "What the attention adds to the residual stream"),
    (BLOCK, "layer_mid", "Residual", "The residual stream after the attention add"),
    (BLOCK, "mlp_norm_output", "Residual", "The normed stream entering the MLP"),
    (BLOCK, "mlp_input", "Residual", "What the MLP is called with"),
    (MLP, "mlp_activation", "Neurons", "The activation function's output"),
    (MLP, "mlp_neurons", "Neurons", "What the down projection receives: act(gate)·up on a gated MLP, the activation itself otherwise"),
    (MLP, "mlp_output", "Residual", "What the MLP adds to the residual stream"),
    (BLOCK, "layer_output", "Residual", "The residual stream leaving the block, a tensor even when the block returns a tuple"),
    (MODEL, "final_norm_output", "Residual", "The residual stream after the final norm, what lm_head reads"),
    (MODEL, "lm_head_output", "Logits", "The head's logits before anything the model does past lm_head (a softcap, a scale)"),
    (MODEL, "logits", "Logits", "The logits the model returns, after anything it does past lm_head (a softcap, a scale)"),
    (MODEL, "next_token_probs", "NextTokenProbs", "The next-token distribution at the last position; derived, read-only"),
)  # fmt: skip
# Not edges of the graph: they come with the call, or follow from the logits.
BESIDE_THE_GRAPH = frozenset({"attention_mask", "next_token_probs"})


def qualified(name: str, layer: int | None) -> str:
    """The full path of a standard value: `layers.3.self_attn.attention_queries`, or the bare name on the model."""
    host = VALUES[name].host
    return name if host == MODEL else f"{host.format(i=layer)}.{name}"
