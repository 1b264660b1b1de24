"""Files and folders -> documents, read a little at a time whatever their size.

A document is a file of UTF-8 text. A file that is named must be one; in folders, whatever is hidden, of another kind,
empty, binary or a copy of another file is left out and counted. A byte-order mark is dropped, line ends stay as they
are. Long documents come in pieces, cut where no tokenizer would join the two sides:

    corpus = survey(find_documents(["src"]))
    for passage in corpus.passages:
        for piece in passage.pieces():
            ...
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starscope.checkpoint.files import open_regular, read_bytes, unreadable
from starscope.errors import InputError, InvalidContentError

# What is taken from a folder when no suffixes are asked for: code by its usual extensions, and plain text.
CODE_SUFFIXES = (
    ".ada", ".adb", ".ads", ".agda", ".asm", ".awk", ".bash", ".bat", ".bzl", ".c", ".cc", ".clj", ".cljs",
    ".cmake", ".coffee", ".cpp", ".cs", ".css", ".cu", ".cuh", ".cxx", ".d", ".dart", ".el", ".elm", ".erl", ".ex",
    ".exs", ".f", ".f03", ".f08", ".f90", ".f95", ".fish", ".fs", ".fsx", ".glsl", ".go", ".gradle", ".groovy",
    ".h", ".hcl", ".hh", ".hpp", ".hrl", ".hs", ".htm", ".html", ".hxx", ".idr", ".inl", ".java", ".jl", ".js",
    ".jsx", ".kt", ".kts", ".lean", ".less", ".lisp", ".lua", ".m", ".metal", ".mjs", ".mk", ".ml", ".mli", ".mm",
    ".nim", ".nix", ".pas", ".php", ".pl", ".pm", ".proto", ".ps1", ".py", ".pyi", ".pyx", ".r", ".rb", ".rkt",
    ".rs", ".s", ".sass", ".scala", ".scm", ".scss", ".sh", ".sol", ".sql", ".sv", ".svelte", ".swift", ".tcl",
    ".tex", ".tf", ".toml", ".ts", ".tsx", ".v", ".vb", ".vhd", ".vhdl", ".vim", ".vue", ".yaml", ".yml", ".zig",
    ".zsh",
)  # fmt: skip
CODE_NAMES = frozenset(("dockerfile", "makefile", "rakefile", "gemfile"))  # code without an extension
TEXT_SUFFIXES = (".adoc", ".md", ".markdown", ".org", ".rst", ".text", ".txt")
LEFT_OUT_FOLDERS = frozenset(("__pycache__", "node_modules"))

READ_BYTES = 1 << 20
PIECE = 1 << 14  # characters
BOM = codecs.BOM_UTF8
# The byte-level pre-tokenizers begin a word at white space that follows something else, so that a text cut there is
# cut into the same tokens.
SEARCHED = 1 << 12  # characters in which a place after a letter or digit is looked for
BLANKS = " \t\n\v\f\r\x85\xa0"
RUN_FILES = frozenset(("settings.json", "log.jsonl"))  # what the folder of a training run has


@dataclass(frozen=True, slots=True)
class Document:
    """One file. `name` is its path relative to where the search began, with `/`; `named`: it was asked for itself."""

    name: str
    path: Path
    named: bool = False

    def text(self) -> str:
        """The text with a byte-order mark removed and line ends as they are. InvalidContentError when not UTF-8."""
        raw = read_bytes(self.path)
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InvalidContentError(
                f"{self.path} is not UTF-8 (byte {error.start}).", hint="Convert it or leave it out."
            ) from None


@dataclass(frozen=True)
class Found:
    """Documents by name, and how many other files were left out, by reason."""

    documents: list[Document]
    left_out: Counter[str] = field(default_factory=Counter)

    def stamp(self) -> tuple[str, float]:
        """A digest of what the file system says about the documents, and when the latest of them changed (seconds).

        While it stays the same, so do the files: nothing rewrites a file without a new change time.
        """
        digest, latest = hashlib.sha256(), 0.0
        for document, about in self.states():
            facts = (document.name, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
            digest.update(repr(facts).encode())
            latest = max(latest, about.st_mtime, about.st_ctime)
        return digest.hexdigest(), latest

    def states(self) -> Iterator[tuple[Document, os.stat_result]]:
        """Each document with what the file system says about it; InputError when it is gone."""
        for document in self.documents:
            try:
                about = document.path.stat()
            except OSError as error:
                raise InputError(f"{document.path} {unreadable(document.path, error)}.") from error
            yield document, about


def find_documents(
    paths: Iterable[str | os.PathLike[str]],
    *,
    suffixes: Sequence[str] = (),
    keep: Callable[[str], bool] = lambda name: True,
    exclude: Sequence[str | os.PathLike[str]] = (),
) -> Found:
    """Every text file under the paths, by name; InputError when there is none.

    In folders only files with one of the suffixes (none given: code and text by their usual ones) and whose relative
    name `keep` accepts; hidden files and folders, and those in `exclude`, are left out, and links to folders are not
    followed. A file that is named itself is taken as it is.
    """
    given = [Path(path) for path in paths]
    wanted = frozenset(suffix.lower() for suffix in suffixes) or frozenset(CODE_SUFFIXES + TEXT_SUFFIXES)
    names = frozenset[str]() if suffixes else CODE_NAMES
    found: dict[str, Document] = {}  # by where the file really is
    left_out: Counter[str] = Counter()
    own = frozenset(map(os.path.realpath, exclude))
    for path in given:
        if not os.path.lexists(path):
            raise InputError(f"{path} does not exist.")
        if path.is_dir():
            for inside in _walk(path, own, left_out):
                name = inside.relative_to(path).as_posix()
                if inside.suffix.lower() not in wanted and inside.name.lower() not in names:
                    left_out["of another kind"] += 1
                elif keep(name):
                    found.setdefault(os.path.realpath(inside), Document(name, inside))
        else:
            os.close(open_regular(path))
            found[os.path.realpath(path)] = Document(path.name, path, named=True)
    if not found:
        where = ", ".join(map(str, given))
        others = f" ({counted(left_out)} left out)" if +left_out else ""
        raise InputError(f"no file to train on under {where}{others}.", hint="Name files, or give suffixes.")
    return Found(sorted(found.values(), key=lambda document: (document.name, str(document.path))), left_out)


def _walk(folder: Path, exclude: frozenset[str], left_out: Counter[str]) -> Iterator[Path]:
    """The regular files below a folder that are not hidden and not in one of `exclude`, which are real paths."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename} {unreadable(Path(error.filename), error)}.") from error

    for base, folders, files in os.walk(folder, onerror=refuse):
        hidden = [name for name in folders if name.startswith(".") or name in LEFT_OUT_FOLDERS]
        left_out["hidden folders"] += len(hidden)
        others = {name for name in folders if exclude and os.path.realpath(Path(base, name)) in exclude}
        folders[:] = sorted(set(folders) - set(hidden) - others)
        if set(files) >= RUN_FILES:  # what a run wrote is no text to train on: it would change the data as it goes
            left_out["folders of training runs"] += 1
            folders.clear()
            continue
        for name in sorted(files):
            path = Path(base, name)
            if name.startswith("."):
                left_out["hidden"] += 1
            elif not path.is_file():
                left_out["not regular files"] += 1
            else:
                yield path


def counted(left_out: Counter[str]) -> str:
    """What was left out, in words: 3 empty, 1 hidden."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()) if count)


@dataclass(frozen=True, slots=True)
class Passage:
    """The bytes [start, stop) of a file: a document, or a part of one."""

    name: str
    path: Path
    start: int
    stop: int
    changed: tuple[int, int]  # the file's size in bytes and its modification time in nanoseconds when it was surveyed

    @property
    def bytes(self) -> int:
        return self.stop - self.start

    def pieces(self, limit: int = PIECE) -> Iterator[str]:
        """The text, at most `limit` characters at a time. InvalidContentError when the file has changed."""
        return cut_pieces(self._decoded(), limit)

    def text(self) -> str:
        return "".join(self._decoded())

    def _decoded(self) -> Iterator[str]:
        pending, left = b"", self.bytes
        with open(open_regular(self.path), "rb") as file:
            about = os.fstat(file.fileno())
            file.seek(self.start)
            while left and (chunk := file.read(min(left, READ_BYTES))):
                left -= len(chunk)
                try:
                    text, used = codecs.utf_8_decode(pending + chunk, "strict", not left)
                except UnicodeDecodeError:
                    break
                pending = (pending + chunk)[used:]
                yield text
        if left or (about.st_size, about.st_mtime_ns) != self.changed:
            raise InvalidContentError(f"{self.path} changed while it was being read.", hint="Run it again.")

    def split(self, share: float) -> tuple[Passage, Passage]:
        """What comes before its last `share` of bytes, and that; cut between two characters."""
        at = self.start + int(self.bytes * (1 - share))
        if self.start < at < self.stop:
            at = _character_start(self.path, at, self.start)
        return (
            Passage(self.name, self.path, self.start, at, self.changed),
            Passage(self.name, self.path, at, self.stop, self.changed),
        )


def _character_start(path: Path, at: int, lowest: int) -> int:
    """Where the character begins that has the byte `at` in it."""
    low = max(lowest, at - 3)
    with open(open_regular(path), "rb") as file:
        file.seek(low)
        data = file.read(at - low + 1)
    while at > low and data[at - low : at - low + 1] and data[at - low] & 0xC0 == 0x80:
        at -= 1
    return at


def cut_pieces(texts: Iterable[str], limit: int) -> Iterator[str]:
    """The same text in pieces of at most `limit` characters, cut at safe places where there are any."""
    waiting = ""
    for text in texts:
        waiting += text
        start = 0
        while len(waiting) - start > limit:
            stop = _safe_cut(waiting, start, start + limit)
            yield waiting[start:stop]
            start = stop
        waiting = waiting[start:]
    if waiting:
        yield waiting


def _safe_cut(text: str, start: int, stop: int) -> int:
    """The last safe place in (start, stop]: before a blank that has a space, a line feed or a tab in it.

    Behind an ASCII letter or digit no vocabulary has a word across it; some have words of a sign and a blank.
    Where there is no such place, any before a blank will do, and where there is no blank, `stop`.
    """
    other, place = stop, stop + 1
    while (place := max(text.rfind(blank, start, place) for blank in " \n\t")) > start:
        while place > start and text[place - 1].isspace():
            place -= 1
        if place > start and text[place] in BLANKS:
            if text[place - 1].isascii() and text[place - 1].isalnum():
                return place
            other = place if other == stop else other
        if stop - place > SEARCHED and other != stop:
            break
    return other


@dataclass(frozen=True)
class Corpus:
    """Documents that were read once from end to end: all of them are text, and no two the same.

    `fingerprint` depends on names and contents alone.
    """

    passages: list[Passage]
    left_out: Counter[str]
    notes: list[str]
    fingerprint: str

    @property
    def bytes(self) -> int:
        return sum(passage.bytes for passage in self.passages)


Progress = Callable[[int, int], None]
"""Is told the bytes done and the bytes in all."""


def survey(found: Found, progress: Progress = lambda done, total: None) -> Corpus:
    """Read every document once. InvalidContentError for a named file that is not text; InputError when none has any."""
    passages: list[Passage] = []
    left_out, notes = Counter(found.left_out), []
    seen: set[bytes] = set()
    marks = returns = done = 0
    whole = hashlib.sha256()
    total = sum(about.st_size for _, about in found.states())
    for document in found.documents:
        about = _read_through(document)
        done += about.changed[0]
        progress(done, total)
        if about.problem:
            if document.named:
                raise InvalidContentError(f"{document.path} {about.problem}.", hint="Convert it or leave it out.")
            left_out["not text"] += 1
        elif about.changed[0] <= about.start:
            left_out["empty"] += 1
        elif about.digest in seen:
            left_out["copies of others"] += 1
        else:
            seen.add(about.digest)
            marks += about.start > 0
            returns += about.has_returns
            name = document.name.encode("utf-8", "surrogateescape")
            whole.update(b"%d %b " % (len(name), name) + about.digest)
            size = about.changed[0]
            passages.append(Passage(document.name, document.path, about.start, size, about.changed))
    if not passages:
        raise InputError(f"no text to train on ({counted(left_out)}).")
    if +left_out:
        notes.append(f"left out: {counted(left_out)}.")
    if marks:
        notes.append(f"{marks} of {len(passages)} documents begin with a byte-order mark, which is dropped.")
    if returns:
        notes.append(f"{returns} of {len(passages)} documents have CRLF line ends, which are kept.")
    return Corpus(passages, left_out, notes, whole.hexdigest())


@dataclass(frozen=True)
class _About:
    """What reading a file through has shown."""

    problem: str  # why it is not text, as the rest of a sentence; "" when it is
    digest: bytes  # of its bytes
    start: int  # where its text begins: behind a byte-order mark
    has_returns: bool
    changed: tuple[int, int]


def _read_through(document: Document) -> _About:
    digest, pending, read = hashlib.sha256(), b"", 0
    problem, start, has_returns = "", 0, False
    with open(open_regular(document.path), "rb") as file:
        about = os.fstat(file.fileno())
        while not problem and (chunk := file.read(READ_BYTES)):
            digest.update(chunk)
            if read == 0:
                start = len(BOM) if chunk.startswith(BOM) else 0
            has_returns = has_returns or b"\r\n" in chunk
            read += len(chunk)
            problem, pending = _check(pending + chunk, read, final=read >= about.st_size)
        if not problem and pending:
            problem = f"is not UTF-8 (byte {read - len(pending)})"
    if not problem and read != about.st_size:
        raise InvalidContentError(f"{document.path} changed while it was being read.", hint="Run it again.")
    return _About(problem, digest.digest(), start, has_returns, (about.st_size, about.st_mtime_ns))


def _check(data: bytes, end: int, *, final: bool) -> tuple[str, bytes]:
    """What is wrong with data that ends at byte `end` of its file, and the beginning of a character at its own end."""
    if (zero := data.find(0)) >= 0:
        return f"is not text: byte {end - len(data) + zero} is zero", b""
    if data.isascii():
        return "", b""
    try:
        used = codecs.utf_8_decode(data, "strict", final)[1]
    except UnicodeDecodeError as error:
        return f"is not UTF-8 (byte {end - len(data) + error.start})", b""
    return "", data[used:]
