"""How a text is cut before the merges: read from the steps of a tokenizer.json, named as in a GGUF file.

A GGUF file holds the name of a pre-tokenizer, a tokenizer.json its steps. One table ties the two together, so the
name is found from what the steps are, never from a hash of what they produce:

    >>> find_name({"type": "ByteLevel", "add_prefix_space": False, "use_regex": True})
    'gpt-2'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starscope.checkpoint.content import cut, short
from starscope.errors import TokenizerError, UnsupportedError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

# Steps -> the names that GGUF files give them; the first is the one that is written.
STRUCTURES = {
    ("ByteLevel",): ("gpt-2", "phi-2", "mellum"),
    ("Digits(individual_digits=true)", "ByteLevel"): ("starcoder", "refact", "smollm", "codeshell", "mellum2"),
}
# Options that change nothing at these values; trim_offsets (None: any value) moves offsets, which are not used.
NEUTRAL: dict[str, dict[str, bool | None]] = {
    "ByteLevel": {"add_prefix_space": False, "use_regex": True, "trim_offsets": None},
    "Digits": {"individual_digits": False},
}
_STEPS = {name: steps for steps, names in STRUCTURES.items() for name in names}


def find_name(pre_tokenizer: Any) -> str:
    """The GGUF name of the `pre_tokenizer` of a tokenizer.json. UnsupportedError says which steps it has."""
    steps = tuple(_describe(step) for step in flatten(pre_tokenizer, "pretokenizers", "pre-tokenizer"))
    if steps not in STRUCTURES:
        known = "; ".join(f"{' + '.join(steps)} ({', '.join(names)})" for steps, names in STRUCTURES.items())
        raise UnsupportedError(f"the pre-tokenizer is {cut(' + '.join(steps)) or 'absent'}; known: {known}.")
    return STRUCTURES[steps][0]


def check_name(name: str) -> str:
    """`name`, if it is one that a GGUF file may give. UnsupportedError lists those."""
    if name not in _STEPS:
        raise UnsupportedError(f"tokenizer.ggml.pre is {short(name)}; known: {', '.join(_STEPS)}.")
    return name


def make_pre_tokenizer(name: str) -> PreTokenizer:
    """The `tokenizers` object that cuts a text as `name` says."""
    from tokenizers import pre_tokenizers

    def byte_level() -> PreTokenizer:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    def digits() -> PreTokenizer:
        return pre_tokenizers.Digits(individual_digits=True)

    makers = {"ByteLevel": byte_level, "Digits(individual_digits=true)": digits}
    return pre_tokenizers.Sequence([makers[step]() for step in _STEPS[check_name(name)]])


def flatten(part: Any, key: str, what: str) -> list[dict[str, Any]]:
    """The steps of a part of a tokenizer.json, those of nested sequences (listed under `key`) in order."""
    steps: list[dict[str, Any]] = []
    waiting = [] if part is None else [part]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict) or not isinstance(step.get("type"), str):
            raise TokenizerError(f"the {what} holds {short(step)}; expected an object with a type.")
        if step["type"] != "Sequence":
            steps.append(step)
        elif isinstance(step.get(key), list):
            waiting += reversed(step[key])
        else:
            raise TokenizerError(f"the {what} is a Sequence of {short(step.get(key))}; expected a list of steps.")
    return steps


def _describe(step: dict[str, Any]) -> str:
    """A step's type with every option that changes what it does, so that an unknown option is an unknown step."""
    neutral = NEUTRAL.get(step["type"], {})
    options = [
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in step.items()
        if name != "type" and not (name in neutral and neutral[name] in (None, value))
    ]
    return f"{step['type']}({', '.join(options)})" if options else str(step["type"])
