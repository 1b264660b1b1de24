"""What a SentencePiece tokenizer does with spaces, as the parts of a tokenizer.json say it.

Two forms are in use. In the older one the normalizer puts `▁` before each text between special tokens; in the newer
one a Metaspace pre-tokenizer does, before the first text alone or before each, and only where none is:

    {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                                         {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starscope.checkpoint.content import short
from starscope.errors import UnsupportedError
from starscope.tokenizer.vocabulary import SPACE, Spaces

if TYPE_CHECKING:
    import tokenizers

PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
DECODER = (
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
SCHEMES = ("never", "first", "always")


@dataclass(frozen=True)
class Parts:
    """The three parts of a tokenizer.json that are about spaces."""

    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    decoder: dict[str, Any]


def read_spaces(normalizer: list[dict[str, Any]], pre_tokenizer: list[dict[str, Any]]) -> Spaces:
    """What the steps of a normalizer and of a pre-tokenizer do with spaces; UnsupportedError for any other step."""
    if normalizer in ([PREPEND, REPLACE], [REPLACE, PREPEND]) and not pre_tokenizer:
        return Spaces("always")
    if normalizer == [REPLACE] and not pre_tokenizer:
        return Spaces("never")
    if not normalizer and len(pre_tokenizer) == 1 and pre_tokenizer[0]["type"] == "Metaspace":
        step = dict(pre_tokenizer[0])
        scheme = step.pop("prepend_scheme", "always")
        step.pop("str_rep", None)
        if step == {"type": "Metaspace", "replacement": SPACE, "split": False} and scheme in SCHEMES:
            return Spaces(scheme, unless_there=scheme != "never")
    found = f"the normalizer is {short(normalizer)} and the pre-tokenizer {short(pre_tokenizer)}"
    known = f"Prepend {SPACE} and Replace, Replace alone, or Metaspace without splitting"
    raise UnsupportedError(f"{found}; known for byte fallback: {known}.")


def check_decoder(steps: list[dict[str, Any]]) -> None:
    """UnsupportedError for a decoder that does more than to undo what the other parts do."""
    for step in steps:
        if step["type"] not in ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"):
            raise UnsupportedError(f"the decoder has the step {short(step)}; known: ByteFallback and steps for spaces.")


def write_spaces(spaces: Spaces) -> Parts:
    """The parts that do it. UnsupportedError for what they cannot say."""
    if spaces.remove_extra:
        raise UnsupportedError("the tokenizer removes spaces from texts, which a tokenizer.json is not written for.")
    strip = [] if spaces.prefix == "never" else [STRIP]
    decoder = {"type": "Sequence", "decoders": [*DECODER, *strip]}
    if spaces.prefix == "never":
        return Parts(REPLACE, None, decoder)
    if spaces.prefix == "always" and not spaces.unless_there:
        return Parts({"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, None, decoder)
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": spaces.prefix, "split": False}
    return Parts(None, metaspace, decoder)


def set_spaces(library: tokenizers.Tokenizer, spaces: Spaces, begins: bool) -> None:
    """Give a library's tokenizer the same rules; without `begins` no text gets a space before it."""
    from tokenizers import normalizers, pre_tokenizers

    replace = normalizers.Replace(" ", SPACE)
    if spaces.prefix == "never" or not begins:
        library.normalizer = replace
    elif spaces.prefix == "always" and not spaces.unless_there:
        library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=spaces.prefix, split=False)
