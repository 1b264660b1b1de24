r"""Fill-in-the-middle prompts (Bavarian et al. 2022), written as token ids, with P before the hole and S after it:

    PSM   <fim_prefix> P <fim_suffix> S <fim_middle>
    SPM   <fim_prefix> <fim_suffix> S <fim_middle> P          (variant 2, as StarCoder was trained)

Code Llama writes ▁<PRE> P ▁<SUF> S ▁<MID>, DeepSeek-Coder <｜fim▁begin｜> P <｜fim▁hole｜> S <｜fim▁end｜>. Where a
tokenizer puts a space before a text, P gets it and S does not, in either order: S goes on from the hole (Rozière et
al. 2023, §2.3, and their `infilling_prompt_tokens`).

Other files and the names of things are written with the vocabulary's own tokens, as `FORMS` says. Texts and names are
never parsed for special tokens: code that contains "<fim_suffix>" stays text. What does not fit is cut where it
matters least: first the other files, the farthest from the hole first; then the prefix keeps its end, the suffix its
start.

    prompt = infill_prompt(tokenizer, "def add(a, b): ", "return c", budget=1024)
    generate(engine, tokenizer, prompt.ids, stop_ids=tokenizer.infill_stop_ids)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from starscope.checkpoint.content import short
from starscope.errors import ContextOverflowError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from starscope.tokenizer import FimTokens, Tokenizer

SUFFIX_SHARE = 4  # one token in four is the suffix's, where prefix and suffix both have more than fits

FimOrder = Literal["psm", "spm"]
Ids = list[int]


class InfillArguments(TypedDict, total=False):
    """What `infill_prompt` takes beside the texts, for functions that take it as keywords and pass it on."""

    fim_order: FimOrder
    files: Sequence[tuple[str, str]]
    repository: str | None
    filename: str | None


class InfillPrompt(NamedTuple):
    """A prompt: its ids, the number of tokens left out to make it fit, and the bytes that healing took back."""

    ids: Ids
    dropped: int
    begin: bytes = b""


class Frame(NamedTuple):
    """The ids of names and of their markers: `outside` before <fim_prefix>, `inside` where P begins.

    `context` stands after the repository, and so between `repository` and the rest.
    """

    repository: Ids
    outside: Ids
    inside: Ids
    context_is_inside: bool


NO_NAMES = Frame([], [], [], False)


def starcoder_1(fim: FimTokens, encode: Callable[[str], Ids], repository: Ids, filename: str | None) -> Frame:
    r"""StarCoder 1: `<fim_prefix><reponame>R<filename>F1\ntext1<filename>F2\ntext2<filename>F\nP<fim_suffix>S…`.

    Its training documents are `<reponame>R<filename>F<gh_stars>N\ncode<|endoftext|>`, each part of the head there or
    not (Li et al. 2023, §5.1; BigCode's playground, "Model Formats"), and their middle was moved with the head in
    place (bigcode's Megatron-LM, megatron/data/gpt_dataset.py): so the head belongs to P. It saw one file a document;
    further ones go into the same document, since an end of text says that what follows has nothing to do with it.
    """
    own = [] if filename is None or fim.separator is None else [fim.separator, *encode(filename)]
    return Frame(repository, [], [*own, *encode("\n")], context_is_inside=True)


def starcoder_2(fim: FimTokens, encode: Callable[[str], Ids], repository: Ids, filename: str | None) -> Frame:
    r"""StarCoder 2: `<repo_name>R<file_sep>F1\ntext1<file_sep><fim_prefix>F\nP<fim_suffix>S<fim_middle>`.

    Its training samples are whole repositories whose files had their middles moved one by one, each with its name at
    its beginning (Lozhkov et al. 2024, §5.1). In SPM the name goes with P, after the suffix.
    """
    separator = [] if fim.separator is None else [fim.separator]
    return Frame(repository, separator, encode(f"{filename or ''}\n"), context_is_inside=False)


# The token that begins a file tells whose form it is.
FORMS = {
    "<filename>": starcoder_1,
    "<file_sep>": starcoder_2,
}


def infill_prompt(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    *,
    budget: int,
    fim_order: FimOrder = "psm",
    files: Sequence[tuple[str, str]] = (),
    repository: str | None = None,
    filename: str | None = None,
    heal: bool = False,
) -> InfillPrompt:
    """A prompt of at most `budget` tokens that asks for the text between `prefix` and `suffix`.

    `files` are (name, text) pairs of other files, the most useful last, next to the hole; `repository` and `filename`
    name the repository and the file with the hole. With `files` and no `filename`, its name is left empty. With
    `heal` the prefix's last token is taken back (see `take_back`).

    Raises UnsupportedError when the vocabulary has no markers for what is asked, UsageError for names that are empty
    or of several lines, and ContextOverflowError where not even the markers and the names fit.
    """
    fim = tokenizer.fim
    if fim is None:
        raise UnsupportedError(
            "this model's vocabulary has no fill-in-the-middle tokens (prefix, suffix, middle).",
            hint="Leave the suffix out, or use a model that was trained to fill in the middle.",
        )
    if fim_order not in ("psm", "spm"):
        raise UsageError(f"fim_order is {fim_order!r}; expected psm (prefix first) or spm (suffix first).")
    _check_files(files)
    frame = _frame(tokenizer, fim, files, repository, filename)
    blocks = [([fim.separator or 0, *tokenizer.encode(f"{name}\n")], tokenizer.encode(text)) for name, text in files]
    begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []

    markers = len(begin) + 3 + len(frame.repository) + len(frame.outside) + len(frame.inside)
    room = budget - markers
    least = markers + bool(prefix or suffix)
    if budget < least:
        raise ContextOverflowError(f"a fill-in-the-middle prompt needs {least} tokens; {budget} are free.")
    before, after = tokenizer.encode(prefix), tokenizer.encode(suffix, begins=False)
    whole = len(before) + len(after) + sum(len(head) + len(text) for head, text in blocks)
    before, after = cut_to_fit(before, after, room)
    context = keep_nearest(blocks, room - len(before) - len(after))
    dropped = whole - len(before) - len(after) - len(context)
    before, taken = take_back(tokenizer, before) if heal else (before, b"")

    named = [*frame.repository, *context]
    outside = [*begin, *(() if frame.context_is_inside else named), *frame.outside]
    inside = [*(named if frame.context_is_inside else ()), *frame.inside, *before]
    if fim_order == "psm":
        ids = [*outside, fim.prefix, *inside, fim.suffix, *after, fim.middle]
    else:
        ids = [*outside, fim.prefix, fim.suffix, *after, fim.middle, *inside]
    return InfillPrompt(ids, dropped, taken)


def _frame(
    tokenizer: Tokenizer,
    fim: FimTokens,
    files: Sequence[tuple[str, str]],
    repository: str | None,
    filename: str | None,
) -> Frame:
    """The markers and names around the texts, none where nothing is named."""
    if not files and repository is None and filename is None:
        return NO_NAMES
    _check_name(repository, "the repository's name")
    _check_name(filename, "the file's name")
    for name, _ in files:
        _check_name(name, "the name of a context file")
    spelling = None if fim.separator is None else tokenizer.piece(fim.separator)
    form = FORMS.get(spelling or "")
    if form is None or (repository is not None and fim.repo is None):
        missing = "a file (<filename>, <file_sep>)" if form is None else "a repository (<reponame>, <repo_name>)"
        raise UnsupportedError(
            f"this model's vocabulary has no token that names {missing}, as StarCoder 1 and 2 have.",
            hint="Leave the context files, the repository and the file's name out.",
        )
    of_repository = [] if repository is None or fim.repo is None else [fim.repo, *tokenizer.encode(repository)]
    return form(fim, tokenizer.encode, of_repository, filename if filename is not None or not files else "")


def _check_files(files: object) -> None:
    if not isinstance(files, Sequence) or isinstance(files, str):
        raise UsageError(f"files is {short(files)}; expected a list of pairs, a name and a text each.")
    for file in files:
        if not isinstance(file, (tuple, list)) or len(file) != 2 or not isinstance(file[1], str):
            raise UsageError(f"a context file is {type(file).__name__}; expected a pair, its name and its text.")


def _check_name(name: object, what: str) -> None:
    """A line feed ends a name, so that none may hold one."""
    if name is None:
        return
    if not isinstance(name, str):
        raise UsageError(f"{what} is {type(name).__name__}; expected one line of text.")
    if not name or "\n" in name:
        found = "has several lines" if name else "is empty"
        raise UsageError(f"{what} {found}; expected one line of text.")


def keep_nearest(files: Sequence[tuple[Ids, Ids]], room: int) -> Ids:
    """The ids of the last files, at most `room`: whole files from the last on, then the end of the one before them.

    A file is its head (marker and name) and its text. A file that is cut keeps its head; it is left out where not
    even one token of its text would fit.
    """
    kept: Ids = []
    for head, text in reversed(files):
        free = room - len(kept) - len(head)
        if free < min(1, len(text)):
            break
        cut = max(0, len(text) - free)
        kept = [*head, *text[cut:], *kept]
        if cut:
            break
    return kept


def cut_to_fit(prefix: Ids, suffix: Ids, room: int) -> tuple[Ids, Ids]:
    """The end of the prefix and the start of the suffix, together at most `room` tokens.

    A quarter of the room is the suffix's and the rest the prefix's; what one of them does not need, the other gets.
    """
    for_suffix = min(len(suffix), max(room // SUFFIX_SHARE, room - len(prefix)))
    for_prefix = min(len(prefix), room - for_suffix)
    return prefix[len(prefix) - for_prefix :], suffix[:for_suffix]


def take_back(tokenizer: Tokenizer, ids: Ids) -> tuple[Ids, bytes]:
    """Token healing at the cursor: the ids without the last one, and the bytes R of that one.

    A text that ends inside a word has been cut into tokens where the word would not have been, and a model seldom
    goes on well from there. So the last token is taken back, and `generate(..., begin=R)` starts with tokens that
    agree with R: each next token's bytes begin with what is left of R, or what is left of R begins with them, until R
    is used up. R itself is not given out again. Special tokens never agree with a text. Nothing is taken back from an
    empty list, nor where the last token is one that ends a text.
    """
    if not ids or ids[-1] in tokenizer.infill_stop_ids:
        return ids, b""
    return ids[:-1], tokenizer.token_bytes(ids[-1])


def check_there_is_a_hole(
    fim_order: FimOrder = "psm",
    files: Sequence[tuple[str, str]] = (),
    repository: str | None = None,
    filename: str | None = None,
) -> None:
    """UsageError for arguments of `infill_prompt` where there is no suffix: they would do nothing."""
    _check_files(files)
    given = {"fim_order": fim_order != "psm", "files": files, "repository": repository, "filename": filename}
    if names := [name for name, value in given.items() if value]:
        raise UsageError(
            f"{', '.join(names)}: only for filling a hole, which needs a suffix; expected one (--suffix, suffix=).",
            hint="The suffix may be empty.",
        )


def infill_budget(context_length: int, max_new_tokens: int) -> int:
    """The tokens that the prompt may take: what the answer leaves free, three quarters of the context at the least."""
    return context_length - min(max_new_tokens, context_length // 4)
