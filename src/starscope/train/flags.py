"""The flags of llama.cpp's train-text-from-scratch, every one, and what became of each here.

Most are second names of options that mean the same. Some mean something else than their name says or are put
together with others: `translate` turns those into settings. What a few were about is gone; they are taken, and a line
says why nothing follows from them (`GONE`). Differences that are deliberate: decay is multiplied by the learning rate
and leaves norms and biases alone, restarts do get longer, and every update has a batch of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starscope.errors import UsageError


@dataclass(frozen=True)
class Gone:
    """A flag whose meaning is gone: its names, whether a value follows, and why, as the end of a sentence."""

    names: tuple[str, ...]
    takes_value: bool
    reason: str


PACKED = "every token of the data is a target exactly once per epoch, wherever its sample begins"
MEMORY = "memory is allocated as needed; --dry-run shows how much"
SEPARATED = "documents are always followed by the end-of-text token"

GONE = (
    Gone(("--mem-model", "--mem-lora", "--mem-compute", "--mem-compute0", "--mem-compute1"), True, MEMORY),
    Gone(("--use-scratch", "--no-scratch"), False, MEMORY),
    Gone(("--use-alloc", "--no-alloc"), False, MEMORY),
    Gone(("--use-flash", "--no-flash"), False, "attention is always one fused operation with a tested gradient"),
    Gone(("--rotmax",), True, "rotary positions apply to the whole head"),
    Gone(
        ("--rope-freq-base", "--rope-freq-scale"),
        True,
        "a new model's rotary positions use the usual base, unscaled",
    ),
    Gone(("--samples-after-nl", "--overlapping-samples", "--sample-random-offsets"), False, PACKED),
    Gone(("--no-overlapping-samples", "--no-sample-random-offsets"), False, PACKED),
    Gone(("--sample-start",), True, "a file is a document; " + PACKED),
    Gone(("--include-sample-start", "--escape"), False, PACKED),
    Gone(("--fill-with-next-samples",), False, "samples are always full: they are filled with the data that follows"),
    Gone(("--separate-with-eos", "--separate-with-bos"), False, SEPARATED),
    Gone(("--no-separate-with-eos", "--no-separate-with-bos"), False, SEPARATED),
    Gone(("--force-reshuffle",), False, "each epoch has its own order, derived from the seed"),
    Gone(("--print-details-interval",), True, "samples are printed at every evaluation; see --prompt"),
    Gone(("--pattern-fn-it", "--fn-latest"), True, "use ITERATION or LATEST in the checkpoint's name"),
    Gone(("-ngl", "--n-gpu-layers"), True, "training runs on the CPU"),
    Gone(("--adam-decay-min-ndim",), True, "weight decay applies to matrices only"),
)


SWITCHES = {  # flags that are a value of a setting
    "use_adam": ("optimizer", "adamw"),
    "use_lbfgs": ("optimizer", "lbfgs"),
    "enable_restart": ("schedule", "cosine_restarts"),
    "disable_restart": ("schedule", "cosine"),
}
TRANSLATED = (*SWITCHES, "examples", "adam_iter", "mult", "adam_min_alpha")


def translate(asked: Mapping[str, Any], usual: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What was asked for with every flag of `TRANSLATED` made into settings, and sentences about what they became.

    `asked` has None, False or () where nothing was given; `usual` are the settings where nothing is asked for.
    UsageError for two that say different things.
    """
    given = {name: value for name, value in asked.items() if not (value is None or value is False or value == ())}
    made: dict[str, Any] = {}
    notes: list[str] = []

    def say(name: str, value: Any, flag: str) -> None:
        other = made.get(name, given.get(name))
        if other is not None and other != value:
            raise UsageError(f"{flag} asks for {name} {value}, and something else for {other}.")
        made[name] = value

    for flag, (name, value) in SWITCHES.items():
        if flag in given:
            say(name, value, f"--{flag.replace('_', '-')}")
    inner = given.get("adam_iter")
    if "examples" in given:
        steps = given["examples"] * (inner or 1)
        notes.append(
            f"-n {given['examples']}{f' × {inner}' if inner else ''}: {steps} updates, each with its own batch."
        )
        say("steps", steps, "-n")
    elif inner is not None:
        say("steps", inner, "--adam-iter")
    if "mult" in given:
        width, mult = given.get("hidden_size", usual["hidden_size"]), given["mult"]
        if mult < 1:
            raise UsageError(f"--mult is {mult}; expected a number of at least 1.")
        say("intermediate_size", (2 * (4 * width) // 3 + mult - 1) // mult * mult, "--mult")
    if "adam_min_alpha" in given:
        rate = given.get("learning_rate", usual["learning_rate"])
        say("final_share", given["adam_min_alpha"] / rate, "--adam-min-alpha")
    if "restart_growth" in given and "schedule" not in {**given, **made}:
        made["schedule"] = "cosine_restarts"
    kept = {name: value for name, value in asked.items() if name not in TRANSLATED}
    return {**kept, **made}, notes
