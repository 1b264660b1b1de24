"""Choosing the next token from its logits: a chain of small pure functions, and the little state of a sampler.

    logit bias -> penalties -> temperature -> top_k -> typical_p -> top_p -> min_p -> draw, plain or mirostat's

The order between bias and draw is `samplers`' to choose. At temperature 0 the most likely token is taken.

    sample = make_sampler(SamplingOptions(temperature=0.8, top_p=0.95, seed=7), prompt_ids)
    token = sample(logits)  # float32 [vocab_size] -> id; the sampler remembers it
"""

from starscope.sampling.filters import (
    Candidates,
    Logits,
    apply_logit_bias,
    apply_temperature,
    check_tokens,
    draw,
    every_token,
    keep_best,
    keep_min_p,
    keep_surprise,
    keep_top_k,
    keep_top_p,
    keep_typical,
    mirostat_top_k,
    most_likely,
    penalize,
    surprises,
    top_log_probabilities,
)
from starscope.sampling.options import SAMPLERS, SamplingArguments, SamplingOptions, is_number
from starscope.sampling.sampler import Choice, Sampler, chain, describe, make_sampler

__all__ = [
    "SAMPLERS",
    "Candidates",
    "Choice",
    "Logits",
    "Sampler",
    "SamplingArguments",
    "SamplingOptions",
    "apply_logit_bias",
    "apply_temperature",
    "chain",
    "check_tokens",
    "describe",
    "draw",
    "every_token",
    "is_number",
    "keep_best",
    "keep_min_p",
    "keep_surprise",
    "keep_top_k",
    "keep_top_p",
    "keep_typical",
    "make_sampler",
    "mirostat_top_k",
    "most_likely",
    "penalize",
    "surprises",
    "top_log_probabilities",
]
