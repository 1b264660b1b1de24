"""The `tokenizer.*` keys of a GGUF file, read and written.

`llama` names SentencePiece's vocabularies, with scores, `gpt2` byte-level BPE, with merges. Of the latter two forms
are read. Today's: pieces in byte-level symbols, with types. The first converter's: tokens as raw bytes,
every type "normal", merges in symbols all the same. It is recognised by its merges, which join pieces that the
tokens are only after re-encoding. Today's form is written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from starscope.checkpoint.content import short
from starscope.errors import TokenizerError, UnsupportedError
from starscope.gguf.format import Value, ValueType, array, boolean, string, strings, u32
from starscope.tokenizer.bytelevel import ALPHABET, bytes_to_piece
from starscope.tokenizer.joining import scores_of
from starscope.tokenizer.sentencepiece import finish_marked
from starscope.tokenizer.source import Source, padded, split_merges
from starscope.tokenizer.structure import WITH_BOS, check_name
from starscope.tokenizer.vocabulary import BYTE_PIECES, Contents, Roles, Spaces, TokenType, is_padding

if TYPE_CHECKING:
    from starscope.gguf.reader import GGUFFile

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # tokenizer.ggml.model
USUAL_IDS = {"unk": 0, "bos": 1, "eos": 2}  # of SentencePiece, where a file names none
ROLE_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
END_KEYS = ("eot", "eom")
FIM_KEYS = {
    "prefix": "fim_pre",
    "suffix": "fim_suf",
    "middle": "fim_mid",
    "pad": "fim_pad",
    "repo": "fim_rep",
    "separator": "fim_sep",
}
OLD_FIM_KEYS = {"prefix": "prefix", "suffix": "suffix", "middle": "middle"}
# Switches that change how a text is read: those that no vocabulary has here, and those that byte-level BPE has not.
REFUSED = {
    "add_eos_token": "an end token after every text",
    "add_sep_token": "a separator after every text",
}
OF_SPACES = {
    "add_space_prefix": "a space before every text",
    "remove_extra_whitespaces": "spaces removed",
}
SPECIAL = re.compile(r"<[^<>\s]+>|\[(?:PAD|UNK|CLS|SEP|MASK|BOS|EOS)\]")  # how control tokens are spelled


def model_name(source: Source) -> str:
    """What GGUF calls a tokenizer of this kind."""
    return BYTE_LEVEL if source.spaces is None else SENTENCEPIECE


def read_metadata(file: GGUFFile, default_pre: str) -> Source:
    """What the keys say; tokens and merges are decoded by `load`. `default_pre` serves files that name none."""
    model = _text(file, "tokenizer.ggml.model")
    if model is None:
        raise TokenizerError(f"{file.path} has no tokenizer: tokenizer.ggml.model is absent.")
    if model not in (BYTE_LEVEL, SENTENCEPIECE):
        supported = f"{BYTE_LEVEL!r}, byte-level BPE, and {SENTENCEPIECE!r}, SentencePiece"
        raise UnsupportedError(f"{file.path}: tokenizer.ggml.model is {short(model)}; supported: {supported}.")
    is_marked = model == SENTENCEPIECE
    for key, what in REFUSED.items() if is_marked else (REFUSED | OF_SPACES).items():
        if _flag(file, key):
            raise UnsupportedError(f"{file.path}: tokenizer.ggml.{key} asks for {what}, which is not supported.")
    size = _array(file, "tokens", (ValueType.STRING,)).count
    roles, templates = _read_roles(file), _read_templates(file)
    if is_marked:
        usual = {role: i for role, i in USUAL_IDS.items() if getattr(roles, role) is None and i < size}
        roles = replace(
            roles, bos=usual.get("bos", roles.bos), eos=usual.get("eos", roles.eos), unk=usual.get("unk", roles.unk)
        )
        return Source(
            where=str(file.path),
            size=size,
            load=lambda: _load_marked(file, roles),
            pre_tokenizer="default",
            roles=roles,
            add_bos=_flag(file, "add_bos_token", roles.bos is not None),
            spaces=Spaces(
                "always" if _flag(file, "add_space_prefix", True) else "never",
                remove_extra=_flag(file, "remove_extra_whitespaces"),
            ),
            chat_templates=templates,
            notes=tuple(
                f"tokenizer.ggml.{ROLE_KEYS[role]}_token_id is not in the file; {i} is assumed."
                for role, i in usual.items()
            ),
        )
    name = _text(file, "tokenizer.ggml.pre") or "default"
    is_assumed = name == "default"
    pre = check_name(default_pre if is_assumed else name)
    named = "'default'" if "tokenizer.ggml.pre" in file.metadata else "not in the file"
    return Source(
        where=str(file.path),
        size=size,
        load=lambda: _load(file, roles),
        pre_tokenizer=pre,
        roles=roles,
        add_bos=_flag(file, "add_bos_token", pre in WITH_BOS and roles.bos is not None),
        chat_templates=templates,
        notes=(f"tokenizer.ggml.pre is {named}; {pre} is assumed.",) if is_assumed else (),
        pre_is_assumed=is_assumed,
    )


def _read_roles(file: GGUFFile) -> Roles:
    ids = {role: _read_id(file, key) for role, key in ROLE_KEYS.items()}
    fim = {role: _read_id(file, key) for role, key in OLD_FIM_KEYS.items()}
    fim |= {role: token_id for role, key in FIM_KEYS.items() if (token_id := _read_id(file, key)) is not None}
    return Roles(
        bos=ids["bos"],
        eos=ids["eos"],
        unk=ids["unk"],
        pad=ids["pad"],
        ends=tuple(token_id for key in END_KEYS if (token_id := _read_id(file, key)) is not None),
        fim={role: token_id for role, token_id in fim.items() if token_id is not None},
    )


def _read_id(file: GGUFFile, key: str) -> int | None:
    key = f"tokenizer.ggml.{key}_token_id"
    token_id = file.get(key)
    if token_id is not None and type(token_id) is not int:
        raise TokenizerError(f"{file.path}: {key} is {short(file.metadata[key])}; expected a token id.")
    return token_id


def _text(file: GGUFFile, key: str) -> str | None:
    text = file.get(key)
    if text is not None and not isinstance(text, str):
        raise TokenizerError(f"{file.path}: {key} is {short(file.metadata[key])}; expected a text.")
    return text


def _flag(file: GGUFFile, key: str, usual: bool = False) -> bool:
    key = f"tokenizer.ggml.{key}"
    flag = file.get(key, usual)
    if not isinstance(flag, bool):
        raise TokenizerError(f"{file.path}: {key} is {short(file.metadata[key])}; expected true or false.")
    return flag


def _array(file: GGUFFile, key: str, kinds: Sequence[ValueType]) -> Value:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise TokenizerError(f"{file.path} has no tokenizer.ggml.{key}, which its vocabulary needs.")
    if value.element_type not in kinds:
        found = value.type.name if value.element_type is None else f"an array of {value.element_type.name}"
        expected = " or ".join(kind.name for kind in kinds)
        raise TokenizerError(f"{file.path}: tokenizer.ggml.{key} is {found}; expected an array of {expected}.")
    return value


def _read_templates(file: GGUFFile) -> dict[str, str]:
    head = "tokenizer.chat_template"
    keys = [key for key in file.metadata if key == head or key.startswith(f"{head}.")]
    return {key[len(head) + 1 :] or "default": text for key in keys if (text := _text(file, key)) is not None}


def _load(file: GGUFFile, roles: Roles) -> Contents:
    where = str(file.path)
    tokens = _strings(file, "tokens")
    merges = split_merges(_strings(file, "merges"), where)
    types = _read_types(file, len(tokens))
    if types.strip(bytes([TokenType.NORMAL])):
        pieces = tokens
    else:
        pieces, types = _recognise(tokens, merges, roles)
    _check_text(pieces, where)
    return Contents(where, pieces, types, merges, _read_scores(file, len(tokens)))


def _load_marked(file: GGUFFile, roles: Roles) -> Contents:
    where = str(file.path)
    pieces = _strings(file, "tokens")
    types = _read_types(file, len(pieces), TokenType.BYTE)
    if "tokenizer.ggml.token_type" not in file.metadata:
        types = _usual_types(pieces, roles)
    _check_text(pieces, where)
    scores = _read_scores(file, len(pieces))
    if scores is None:
        raise TokenizerError(f"{where} has no tokenizer.ggml.scores, which a SentencePiece vocabulary needs.")
    return finish_marked(Contents(where, pieces, types, (), scores, marked=True), roles.fim.values())


def _usual_types(pieces: Sequence[str], roles: Roles) -> bytes:
    """The types of a file that has none: byte tokens by their spelling, control tokens by their role."""
    bytes_ = set(BYTE_PIECES)
    types = bytearray(TokenType.BYTE if piece in bytes_ else TokenType.NORMAL for piece in pieces)
    for token_id, kind in (
        (roles.bos, TokenType.CONTROL),
        (roles.eos, TokenType.CONTROL),
        (roles.unk, TokenType.UNKNOWN),
    ):
        if token_id is not None:
            types[token_id] = kind
    return bytes(types)


def _strings(file: GGUFFile, key: str) -> list[str]:
    data = _array(file, key, (ValueType.STRING,)).data
    assert isinstance(data, list)
    return data


def _read_types(file: GGUFFile, size: int, last: TokenType = TokenType.UNUSED) -> bytes:
    """One byte a token, `last` the highest; all NORMAL when the file says nothing."""
    if "tokenizer.ggml.token_type" not in file.metadata:
        return bytes([TokenType.NORMAL]) * size
    types = np.asarray(_array(file, "token_type", (ValueType.INT32, ValueType.UINT32)).data)
    if len(types) != size:
        raise TokenizerError(f"{file.path} has {size} tokens and {len(types)} token types; expected as many.")
    unknown = np.flatnonzero((types < TokenType.NORMAL) | (types > last))
    if len(unknown):
        found = f"token {unknown[0]} has type {types[unknown[0]]}"
        why = "" if last == TokenType.BYTE else " (a byte-level vocabulary has no byte tokens)"
        raise TokenizerError(f"{file.path}: {found}; expected 1 to {last:d}{why}.")
    return types.astype(np.uint8).tobytes()


def _read_scores(file: GGUFFile, size: int) -> Sequence[float] | None:
    if "tokenizer.ggml.scores" not in file.metadata:
        return None
    scores = np.asarray(_array(file, "scores", (ValueType.FLOAT32, ValueType.FLOAT64, ValueType.INT32)).data)
    if len(scores) != size:
        raise TokenizerError(f"{file.path} has {size} tokens and {len(scores)} scores; expected as many.")
    found: list[float] = scores.tolist()
    return found


def _recognise(tokens: list[str], merges: list[tuple[str, str]], roles: Roles) -> tuple[list[str], bytes]:
    """Pieces and types of a file that calls every token normal, whichever form its tokens have."""
    encoded = [bytes_to_piece(token.encode("utf-8", "surrogateescape")) for token in tokens]
    pieces = encoded if _is_raw(tokens, encoded, merges) else list(tokens)
    made = {left + right for left, right in merges}
    named = {roles.bos, roles.eos, roles.unk, roles.pad, *roles.ends, *roles.fim.values()}
    types = bytearray([TokenType.NORMAL]) * len(pieces)
    for token_id, token in enumerate(tokens):
        if is_padding(token_id, token):
            types[token_id] = TokenType.UNUSED
        elif len(token) > 1 and pieces[token_id] not in made and (token_id in named or SPECIAL.fullmatch(token)):
            types[token_id] = TokenType.CONTROL
        else:
            continue
        pieces[token_id] = token
    return pieces, bytes(types)


def _is_raw(tokens: list[str], encoded: list[str], merges: list[tuple[str, str]]) -> bool:
    """Whether tokens are raw bytes: the merges then join pieces that are tokens only as `encoded`."""
    if not merges:  # a space, a line feed or half a character is no symbol
        return any(len(token) == 1 and token not in ALPHABET for token in tokens)
    joined = {piece for pair in merges for piece in pair}
    return not joined <= set(tokens) and joined <= set(encoded)


def _check_text(pieces: Sequence[str], where: str) -> None:
    try:
        "\n".join(pieces).encode()
    except UnicodeEncodeError:
        for token_id, piece in enumerate(pieces):
            if any(0xD800 <= ord(character) < 0xE000 for character in piece):
                found = piece.encode("utf-8", "surrogateescape")
                raise TokenizerError(f"{where}: token {token_id} is {short(found)}, which is not UTF-8.") from None


def write_metadata(
    source: Source, contents: Contents, fim: Mapping[str, int], end: int | None, num_rows: int | None
) -> dict[str, Value]:
    """The keys of today's form, padded with unused tokens up to `num_rows`.

    `fim` has the ids of FimTokens by name, `end` the token that ends a text.
    """
    where, roles = source.where, source.roles
    contents = contents if num_rows is None else padded(contents, num_rows)
    for token_id, flags in contents.matching.items():
        if flags.lstrip or flags.rstrip or flags.single_word:
            found = f"the added token {short(contents.pieces[token_id])} sets lstrip, rstrip or single_word"
            raise UnsupportedError(f"{where}: {found}, which a GGUF file cannot say.")
    if len(roles.ends) > len(END_KEYS):
        found = f"{where} names {1 + len(roles.ends)} end tokens"
        raise UnsupportedError(f"{found}; a GGUF file holds {1 + len(END_KEYS)}.")
    ids = {
        "bos": end if roles.bos is None else roles.bos,  # other readers take token 11 for an absent bos or eos
        "eos": end,
        **dict(zip(END_KEYS, roles.ends, strict=False)),
        "unknown": roles.unk,
        "padding": roles.pad,
        **{FIM_KEYS[role]: token_id for role, token_id in fim.items()},
    }
    return {
        "tokenizer.ggml.model": string(model_name(source)),
        "tokenizer.ggml.pre": string(source.pre_tokenizer),
        "tokenizer.ggml.tokens": strings(contents.pieces),
        **_write_joining(source.spaces, contents),
        **{f"tokenizer.ggml.{key}_token_id": u32(token_id) for key, token_id in ids.items() if token_id is not None},
        "tokenizer.ggml.add_bos_token": boolean(source.add_bos),
        **_write_templates(source.chat_templates),
    }


def _write_joining(spaces: Spaces | None, contents: Contents) -> dict[str, Value]:
    """What pieces are joined by, types, and what is done with spaces."""
    types = array(ValueType.INT32, np.frombuffer(contents.types, np.uint8).astype("<i4"))
    if spaces is None:
        merges = strings(f"{left} {right}" for left, right in contents.merges)
        return {"tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges}
    written = {
        "tokenizer.ggml.scores": array(ValueType.FLOAT32, np.asarray(scores_of(contents), "<f4")),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": boolean(spaces.prefix != "never"),
    }
    return written | ({"tokenizer.ggml.remove_extra_whitespaces": boolean(True)} if spaces.remove_extra else {})


def _write_templates(templates: Mapping[str, str]) -> dict[str, Value]:
    others = [name for name in templates if name != "default"]
    written = {"tokenizer.chat_template": string(templates["default"])} if "default" in templates else {}
    if others:
        written["tokenizer.chat_templates"] = strings(others)
    return written | {f"tokenizer.chat_template.{name}": string(templates[name]) for name in others}
