"""The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer.model, or vocab.json with merges.txt.

Beside either, tokenizer_config.json and special_tokens_map.json name special tokens, and config.json and
generation_config.json give the ids that end a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from starscope.checkpoint import read_json
from starscope.checkpoint.content import cut, short, typed
from starscope.checkpoint.files import is_there, read_text
from starscope.errors import InputError, TokenizerError, UnsupportedError
from starscope.tokenizer.model_file import read_model_file
from starscope.tokenizer.sentencepiece import finish_marked
from starscope.tokenizer.source import Source, split_merges
from starscope.tokenizer.tokenizer_json import Added, Files, checked_vocab, read_added, read_tokenizer_json
from starscope.tokenizer.vocabulary import Contents, Matching, Roles, TokenType, padding_piece

ROLE_NAMES = {"bos": "bos_token", "eos": "eos_token", "unk": "unk_token", "pad": "pad_token"}
SPECIAL_NAMES = (  # in the order in which transformers adds those that the vocabulary lacks
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
    "additional_special_tokens", "extra_special_tokens",
)  # fmt: skip
LISTED_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")  # the ones that vocab.json with merges.txt fully describes
MAX_HOLES = 65_536  # ids without a token; more is a mistake


def read_folder(folder: Path, config: Mapping[str, Any] | None, generation_config: Mapping[str, Any] | None) -> Source:
    """The tokenizer of a folder. The configs are read from it when not given."""
    settings_path = folder / "tokenizer_config.json"
    settings = _read_optional(settings_path)
    files = _read_files(folder, settings)
    spaces = files.spaces
    for key in ("add_prefix_space", "add_eos_token"):
        stated = typed(settings, key, bool, str(settings_path), TokenizerError)
        if key == "add_prefix_space" and spaces is not None:
            spaces = replace(spaces, prefix="never", unless_there=False) if stated is False else spaces
        elif stated:
            raise UnsupportedError(f"{settings_path}: {key} is {short(settings[key])}; supported: false.")
    sources = (files.names, _read_optional(folder / "special_tokens_map.json"), settings)
    names = {name: value for source in sources for name, value in source.items() if value is not None}
    _check_names(folder, names)
    added = _check_ids(files, [*files.added, *_added_by_id(settings, settings_path)])
    added = _mark_special(files, added, names)
    contents = make_contents(files, added)
    config = _read_optional(folder / "config.json") if config is None else config
    generation_config = (
        _read_optional(folder / "generation_config.json") if generation_config is None else generation_config
    )
    add_bos = typed(settings, "add_bos_token", bool, str(settings_path), TokenizerError)
    configs = {folder / "config.json": config, folder / "generation_config.json": generation_config}
    roles, notes = _read_roles(files, names, contents, configs)
    if spaces is not None and spaces.unless_there:
        where = "before the first text alone" if spaces.prefix == "first" else "before a text"
        notes.append(f"a space is put {where}, where none is; a GGUF file made of this puts one before every text.")
    return Source(
        where=str(folder),
        size=len(contents.pieces),
        load=lambda: contents,
        pre_tokenizer=files.pre_tokenizer,
        roles=roles,
        add_bos=files.bos is not None if add_bos is None else add_bos,
        spaces=spaces,
        chat_templates=_read_templates(folder, settings),
        notes=tuple(notes),
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if is_there(path) else {}


def _read_files(folder: Path, settings: Mapping[str, Any]) -> Files:
    if is_there(folder / "tokenizer.json"):
        files = read_tokenizer_json(folder / "tokenizer.json")
        return files if files.spaces is None else replace(files, scores=_scores_beside(folder, files))
    if is_there(folder / "tokenizer.model"):
        return _read_model(folder)
    listed = [name for name in ("vocab.json", "merges.txt") if is_there(folder / name)]
    if len(listed) == 2:
        return _read_lists(folder, settings)
    if listed:
        missing = "merges.txt" if "vocab.json" in listed else "vocab.json"
        raise InputError(f"{folder} has {listed[0]} and no {missing}; a tokenizer needs both, or tokenizer.json.")
    raise InputError(
        f"{folder} has no tokenizer; expected tokenizer.json, tokenizer.model, or vocab.json with merges.txt."
    )


def _scores_beside(folder: Path, files: Files) -> list[float] | None:
    """The scores of the tokenizer.model that a tokenizer.json was made from; None where it has other pieces."""
    path = folder / "tokenizer.model"
    if not is_there(path):
        return None
    model = read_model_file(path)
    same = all(files.vocab.get(piece) == token_id for token_id, piece in enumerate(model.pieces))
    return model.scores if same else None


def _read_model(folder: Path) -> Files:
    """tokenizer.model, with added_tokens.json beside it. Bos comes before every text, as LLaMA's class has it."""
    path = folder / "tokenizer.model"
    model = read_model_file(path)
    vocab = {piece: token_id for token_id, piece in enumerate(model.pieces)}
    if len(vocab) < len(model.pieces):
        found = next(piece for token_id, piece in enumerate(model.pieces) if vocab[piece] != token_id)
        raise TokenizerError(f"{path} has {short(found)} twice; expected distinct pieces.")
    added = checked_vocab(_read_optional(folder / "added_tokens.json"), folder / "added_tokens.json")
    roles = {role: token_id for role, token_id in model.roles.items() if token_id < len(model.pieces)}
    return Files(
        where=str(path),
        vocab=vocab,
        merges=[],
        added=[
            Added(token_id, content, False, Matching()) for content, token_id in added.items() if content not in vocab
        ],
        pre_tokenizer="default",
        bos=roles.get("bos"),
        names={ROLE_NAMES[role]: model.pieces[token_id] for role, token_id in roles.items()},
        spaces=model.spaces,
        scores=model.scores,
        types={i: kind for i, kind in enumerate(model.types) if kind != TokenType.NORMAL},
    )


def _read_lists(folder: Path, settings: Mapping[str, Any]) -> Files:
    """vocab.json and merges.txt. They leave the pre-tokenizer to the class that reads them, which is GPT-2's."""
    name = typed(settings, "tokenizer_class", str, str(folder / "tokenizer_config.json"), TokenizerError)
    if name is not None and name not in LISTED_CLASSES:
        raise UnsupportedError(
            f"{folder} has vocab.json with merges.txt for {cut(name)}; "
            f"supported in this form: {', '.join(LISTED_CLASSES)}.",
            hint="Save the tokenizer as tokenizer.json: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER).",
        )
    vocab = checked_vocab(read_json(folder / "vocab.json"), folder / "vocab.json")
    added = checked_vocab(_read_optional(folder / "added_tokens.json"), folder / "added_tokens.json")
    end = "<|endoftext|>"  # that class's own bos, eos and unk
    return Files(
        where=str(folder),
        vocab=vocab,
        merges=_read_merges(folder / "merges.txt"),
        added=[Added(token_id, content, False, Matching(normalized=True)) for content, token_id in added.items()],
        pre_tokenizer="gpt-2",
        names=dict.fromkeys(("bos_token", "eos_token", "unk_token"), end) if end in vocab else {},
    )


def _read_merges(path: Path) -> list[tuple[str, str]]:
    """One merge a line; a first line `#version …` is a header, and any other beginning with # is a merge."""
    try:
        lines = read_text(path).split("\n")
    except UnicodeDecodeError:
        raise TokenizerError(f"{path} is not UTF-8.") from None
    if lines[0].startswith("#version"):
        del lines[0]
    return split_merges(filter(None, lines), str(path))


def _added_by_id(settings: Mapping[str, Any], path: Path) -> list[Added]:
    """The added_tokens_decoder of tokenizer_config.json: ids, as strings, to tokens."""
    found = settings.get("added_tokens_decoder") or {}
    if not isinstance(found, dict) or not all(key.isdecimal() and len(key) < 20 for key in found):
        raise TokenizerError(f"{path}: added_tokens_decoder is not a table from ids to tokens.")
    return [read_added(entry, int(key), path) for key, entry in found.items()]


def _check_ids(files: Files, tokens: Iterable[Added]) -> dict[int, Added]:
    """Added tokens by id, later entries over earlier ones; no id may have two tokens, no token two ids."""
    ids: dict[str, int] = {}
    pieces: dict[int, str] = {}
    added = {token.token_id: token for token in tokens}
    for piece, token_id in [*files.vocab.items(), *((token.content, token.token_id) for token in tokens)]:
        if pieces.setdefault(token_id, piece) != piece:
            raise TokenizerError(
                f"{files.where}: {short(pieces[token_id])} and {short(piece)} both have the id {token_id}."
            )
        if ids.setdefault(piece, token_id) != token_id:
            raise TokenizerError(f"{files.where}: {short(piece)} has the ids {ids[piece]} and {token_id}.")
    return added


def _mark_special(files: Files, added: Mapping[int, Added], names: Mapping[str, Any]) -> dict[int, Added]:
    """`added`, with every token that is named special; one that the vocabulary lacks gets the next id."""
    marked = dict(added)
    ids = dict(files.vocab) | {token.content: token.token_id for token in added.values()}
    for content in (content for name in SPECIAL_NAMES for content in _contents_of(names.get(name))):
        token_id = ids.setdefault(content, 1 + max(ids.values(), default=-1))
        known = marked.get(token_id, Added(token_id, content, True, Matching()))
        marked[token_id] = replace(known, special=True)
    return marked


def _check_names(folder: Path, names: Mapping[str, Any]) -> None:
    """Every special token that the files name is a text, or an object or a list with texts."""
    for name in SPECIAL_NAMES:
        found = names.get(name)
        if not all(isinstance(content, str) for content in _contents_of(found)):
            raise TokenizerError(
                f"{folder}: {name} is {short(found)}; expected a text, an object with its content, or several."
            )


def _contents_of(value: Any) -> list[Any]:
    """The tokens that a setting names: one, several or a table of them, each a text or an object with its content."""
    if isinstance(value, dict):
        value = list(value.values()) if "content" not in value else [value]
    several = value if isinstance(value, list) else [] if value is None else [value]
    return [entry.get("content") if isinstance(entry, dict) else entry for entry in several]


def make_contents(files: Files, added: Mapping[int, Added]) -> Contents:
    """All pieces by id; ids that no token has become unused padding."""
    by_id = {token_id: piece for piece, token_id in files.vocab.items()}
    by_id |= {token_id: token.content for token_id, token in added.items()}
    if not by_id:
        raise TokenizerError(f"{files.where} has an empty vocabulary.")
    size = 1 + max(by_id)
    if size - len(by_id) > MAX_HOLES:
        raise TokenizerError(
            f"{files.where} has {len(by_id)} tokens with ids up to {size - 1}; expected few ids between."
        )
    types = bytearray([TokenType.NORMAL]) * size
    for token_id, kind in files.types.items():
        types[token_id] = kind
    for token_id, token in added.items():
        if types[token_id] != TokenType.UNKNOWN:
            types[token_id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    for token_id in range(size) if len(by_id) < size else ():
        if token_id not in by_id:
            types[token_id] = TokenType.UNUSED
            by_id[token_id] = padding_piece(token_id)
    matching = {token_id: token.flags for token_id, token in added.items()}
    pieces = [by_id[token_id] for token_id in range(size)]
    if files.spaces is None:
        return Contents(files.where, pieces, bytes(types), files.merges, None, matching)
    unk = files.names.get("unk_token", "")
    if unk in files.vocab:
        types[files.vocab[unk]] = TokenType.UNKNOWN
    return finish_marked(
        Contents(
            files.where, pieces, bytes(types), files.merges,
            None if files.scores is None else [*files.scores, *[0.0] * (size - len(files.scores))], matching, True,
        )
    )  # fmt: skip


def _read_roles(
    files: Files, names: Mapping[str, Any], contents: Contents, configs: Mapping[Path, Mapping[str, Any]]
) -> tuple[Roles, list[str]]:
    """Ids by role: as the tokenizer's files name them, else from the configs.

    A config's id outside the vocabulary is left out with a note: most often it is a default of the config's class.
    """
    size = len(contents.pieces)
    stated: dict[str, list[int]] = {role: [] for role in ROLE_NAMES}
    notes: list[str] = []
    for path, config in configs.items():
        for role in ("bos", "eos", "pad"):
            value = config.get(f"{role}_token_id")
            values = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(token_id) is int for token_id in values):
                raise TokenizerError(f"{path}: {role}_token_id is {short(value)}; expected an id, or a list of them.")
            inside = [token_id for token_id in values if 0 <= token_id < size]
            stated[role] += inside
            if len(inside) < len(values):
                found = f"{path.name}: {role}_token_id is {short(value)}"
                notes.append(f"{found}, and the vocabulary has {size} tokens; what is outside it is left out.")
    ids = {role: next(iter(found), None) for role, found in stated.items()}
    for role, name in ROLE_NAMES.items():
        for content in _contents_of(names.get(name)):
            ids[role] = contents.pieces.index(content)
    roles = Roles(
        bos=ids["bos"] if files.bos is None else files.bos,
        eos=ids["eos"],
        unk=ids["unk"],
        pad=ids["pad"],
        ends=tuple(dict.fromkeys(token_id for token_id in stated["eos"] if token_id != ids["eos"])),
    )
    return roles, notes


def _read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: of a file of their own, else of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if is_there(path):
        try:
            return {"default": read_text(path)}
        except UnicodeDecodeError as error:
            raise InputError(f"{path} cannot be read: {error}.") from error
    template = _read_optional(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    named = template if isinstance(template, list) else [{"name": "default", "template": template}]
    found: dict[str, str] = {}
    for entry in named if template is not None else ():
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str) or name in found:
            raise TokenizerError(f"{folder}: chat_template is not a text or a list of texts with distinct names.")
        found[name] = text
    return found
