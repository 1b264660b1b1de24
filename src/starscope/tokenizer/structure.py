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

DIGITS = "Digits(individual_digits=true)"
BYTES = "ByteLevel(use_regex=false)"
WHOLE = "ignore_merges"  # not a step, but said beside them: a word that is a token is not cut, whatever the merges
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LETTERS = (  # those with upper and lower case, and their like; escaped where editors put another character
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


def _split(pattern: str) -> str:
    return f"Split({pattern})"


_LINES, _CJK = _split("[\r\n]"), _split("[一-龥ࠀ-一가-퟿]+")
# Steps -> the names that GGUF files give them; the first is the one that is written.
STRUCTURES = {
    ("ByteLevel",): ("gpt-2", "phi-2", "mellum"),
    (DIGITS, "ByteLevel"): ("starcoder", "refact", "smollm", "codeshell", "mellum2"),
    (WHOLE, _split(LLAMA_3), BYTES): ("llama-bpe", "llama3", "llama-v3"),
    (_split(LLAMA_3), BYTES): ("smaug-bpe", "dbrx"),
    (_LINES, _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _CJK, DIGITS, BYTES): ("deepseek-coder",),
    (
        _LINES, _split(rf"\s?[{LETTERS}]+"), _split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"), _split(r"\s+$"), _CJK,
        DIGITS, BYTES,
    ): ("deepseek-llm",),
}  # fmt: skip
WITH_BOS = frozenset(("llama-bpe", "llama3", "llama-v3"))  # a file that does not say it means bos before every text
# Options that change nothing at these values; trim_offsets (None: any value) moves offsets, which are not used.
NEUTRAL: dict[str, dict[str, bool | None]] = {
    "ByteLevel": {"add_prefix_space": False, "use_regex": True, "trim_offsets": None},
    "Digits": {"individual_digits": False},
}
_STEPS = {name: steps for steps, names in STRUCTURES.items() for name in names}


def find_name(pre_tokenizer: Any, ignore_merges: bool = False) -> str:
    """The GGUF name of the `pre_tokenizer` of a tokenizer.json. UnsupportedError says which steps it has."""
    found = [_describe(step) for step in flatten(pre_tokenizer, "pretokenizers", "pre-tokenizer")]
    steps = (WHOLE, *found) if ignore_merges else tuple(found)
    if steps not in STRUCTURES:
        known = "; ".join(f"{_brief(steps)} ({', '.join(names)})" for steps, names in STRUCTURES.items())
        raise UnsupportedError(f"the pre-tokenizer is {_brief(steps) or 'absent'}; known: {known}.")
    return STRUCTURES[steps][0]


def _brief(steps: tuple[str, ...]) -> str:
    """Steps for a message, on one line."""
    return cut(" + ".join(steps).replace("\r", r"\r").replace("\n", r"\n"))


def check_name(name: str) -> str:
    """`name`, if it is one that a GGUF file may give. UnsupportedError lists those."""
    if name not in _STEPS:
        raise UnsupportedError(f"tokenizer.ggml.pre is {short(name)}; known: {', '.join(_STEPS)}.")
    return name


def ignores_merges(name: str) -> bool:
    """Whether a word that is a token becomes that token without any merge."""
    return WHOLE in _STEPS.get(name, ())


def make_pre_tokenizer(name: str) -> PreTokenizer:
    """The `tokenizers` object that cuts a text as `name` says."""
    from tokenizers import Regex, pre_tokenizers

    def make(step: str) -> PreTokenizer:
        if step == DIGITS:
            return pre_tokenizers.Digits(individual_digits=True)
        if step in ("ByteLevel", BYTES):
            return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=step != BYTES)
        return pre_tokenizers.Split(Regex(step[len("Split(") : -1]), "isolated")

    return pre_tokenizers.Sequence([make(step) for step in _STEPS[check_name(name)] if step != WHOLE])


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
    pattern = step.get("pattern")
    isolated = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    if step == isolated and isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str) and len(pattern) == 1:
        return _split(pattern["Regex"])
    neutral = NEUTRAL.get(step["type"], {})
    options = [
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in step.items()
        if name != "type" and not (name in neutral and neutral[name] in (None, value))
    ]
    return f"{step['type']}({', '.join(options)})" if options else str(step["type"])
