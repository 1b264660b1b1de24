"""Models by their name on the Hugging Face hub: `owner/name[@revision][:TYPE]`, for whatever takes a MODEL.

A path that exists is always the path. The shared cache comes first: what is complete there is used as it is, and nobody
is asked. Else the network is, unless HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; what comes is kept in that cache.
TYPE picks a GGUF file of the repository; without it that is the one of Q4_K_M, else Q8_0, else the only one. A
repository without GGUF files is taken as the folder of a checkpoint.

    name = find_name("bigcode/tiny_starcoder_py")
    path = fetch_model(name)                     # a .gguf file or a folder, in the cache
"""

from __future__ import annotations

import errno
import fnmatch
import glob
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starscope.checkpoint import KINDS, read_json
from starscope.checkpoint.content import cut
from starscope.checkpoint.files import is_there, read_bytes
from starscope.errors import DoesNotFitError, InputError, OfflineError, OutputError, StarscopeError, UsageError

MAIN = "main"
DEFAULT_TYPES = ("Q4_K_M", "Q8_0")
OFFLINE_FLAGS = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TIMEOUT_S = 10.0
FILE_ENDS = (".gguf", ".safetensors", ".bin", ".json")  # a name that ends so is a path
BESIDE = ("*.json", "merges.txt", "tokenizer.model", "*.jinja", "README.md")  # config, tokenizer, licence
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>\w[\w./-]*))?(?::(?P<type>\w+))?", re.ASCII
)
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[^/]*)/?(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class HubName:
    """`owner/name`, a branch, tag or commit, and the type of a GGUF file, None when it was not said."""

    repo: str
    revision: str = MAIN
    type: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision == MAIN else f"{self.repo}@{self.revision}"


Choose = Callable[[HubName, Sequence[str]], list[str]]
"""Picks files by name from those of a repository, the one that stands for the model first; InputError for none."""


def find_name(text: str | os.PathLike[str]) -> HubName | None:
    """The hub name that MODEL is; None for a path: one that exists, or a text that cannot be a name.

    InputError for a URL, which is neither.
    """
    if not isinstance(text, str):
        return None
    if (url := _URL.fullmatch(text)) is not None and not os.path.lexists(text):
        name = find_name("/".join(url["rest"].split("/")[:2]))
        raise InputError(
            f"{cut(text)} is a URL; expected a .gguf file, a Hugging Face folder, owner/name of the hub, or demo.",
            hint=f"If it is that repository, write {name}." if name else "Download it and give its path.",
        )
    if text.lower().endswith(FILE_ENDS):
        return None
    found = _NAME.fullmatch(text)
    if found is None or ".." in text or "--" in found["repo"] or os.path.lexists(text):
        return None
    return HubName(found["repo"], found["revision"] or MAIN, found["type"])


def fetch_model(name: HubName) -> Path:
    """The GGUF file (of one in parts, the first) or the folder of a model, downloaded when the cache lacks it.

    Raises InputError for a repository, revision, file or access that is not there, OfflineError when something has to
    be downloaded and cannot be, DoesNotFitError and OutputError when it cannot be kept.
    """
    folder, files = _fetch(name, choose_model)
    return folder / files[0] if files[0].endswith(".gguf") else folder


def fetch_folder(name: HubName, *, weights: bool = True) -> Path:
    """The folder of a checkpoint, whatever GGUF files lie beside it; errors as for `fetch_model`."""
    if name.type is not None:
        raise UsageError(f"{name}:{name.type} names a GGUF file; expected a checkpoint's folder: {name}.")
    return _fetch(name, choose_folder if weights else choose_config)[0]


def title(path: Path) -> str:
    """What a person calls a model: a file's or a folder's name, for a folder of the cache its hub name."""
    snapshot = find_snapshot(path)
    return path.name if snapshot is None else snapshot.repo


def find_snapshot(path: Path) -> HubName | None:
    """The repository and the commit that a folder of the shared cache is a snapshot of, from its name alone."""
    folder = path.resolve()
    storage = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not storage.startswith("models--"):
        return None
    return HubName(storage.removeprefix("models--").replace("--", "/"), folder.name)


# Which files


def choose_model(name: HubName, files: Sequence[str]) -> list[str]:
    """A GGUF file with all its parts, or else the files of a checkpoint."""
    models = _whole_ggufs(files)
    if not models and name.type is None:
        return choose_folder(name, files)
    for wanted in DEFAULT_TYPES if name.type is None else (name.type,):
        matching = [model for model in models if has_type(model[0], wanted)]
        if len(matching) > 1:
            names = _listed([model[0] for model in matching])
            raise InputError(f"{name} has {len(matching)} GGUF files of {wanted.upper()}: {names}.", hint=ONE_FILE)
        if matching:
            return matching[0]
    if name.type is None and len(models) == 1:
        return models[0]
    wanted = name.type.upper() if name.type else " or ".join(DEFAULT_TYPES)
    there = _listed([model[0] for model in models])
    raise InputError(
        f"{name} has no GGUF file of {wanted}; it has {there or 'none'}.",
        hint=f"Name the type, as in {name}:Q6_K." if models else f"Leave the type out: {name}.",
    )


ONE_FILE = "Download the one you want (hf download) and give its path."


def has_type(file: str, wanted: str) -> bool:
    """Whether a GGUF file's path names a type, as a word of its own: Q4_K is not in model-Q4_K_M.gguf."""
    return re.search(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9_])", file, re.IGNORECASE) is not None


def _whole_ggufs(files: Sequence[str]) -> list[list[str]]:
    """The GGUF files, each with all its parts; those with parts missing are left out."""
    groups: dict[tuple[str, int], list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf"):
            part = _PART.fullmatch(file)
            groups.setdefault((part[1], int(part[3])) if part else (file, 1), []).append(file)
    return [group for (_, count), group in groups.items() if len(group) == count]


def choose_folder(name: HubName, files: Sequence[str]) -> list[str]:
    """config.json, what lies beside it for a person and a tokenizer, and one form of the weights."""
    beside = choose_config(name, files)
    for kind in KINDS:  # one file, or an index with its shards; the first form that is there
        if kind.single in files:
            return [*beside, kind.single]
        if kind.index in files:
            return [*beside, kind.index, *fnmatch.filter(files, kind.shards)]
    expected = " or ".join(kind.single for kind in KINDS)
    raise InputError(
        f"{name} has config.json but no weights; expected {expected}, whole or in shards; it has {_listed(files)}.",
        hint="Give a repository that holds a whole checkpoint.",
    )


def choose_config(name: HubName, files: Sequence[str]) -> list[str]:
    """The same without weights."""
    if "config.json" not in files:
        raise InputError(
            f"{name} has neither a GGUF file nor config.json; it has {_listed(files) or 'no files'}.",
            hint="Give a repository that holds a model.",
        )
    indexes = {kind.index for kind in KINDS}
    return [
        "config.json",
        *(
            file
            for file in files
            if "/" not in file
            and file not in indexes | {"config.json"}
            and any(fnmatch.fnmatchcase(file, pattern) for pattern in BESIDE)
        ),
    ]


def _listed(files: Collection[str]) -> str:
    shown = sorted(files)[:6]
    return ", ".join(shown) + (f" and {len(files) - len(shown)} more" if len(files) > len(shown) else "")


# Where from


def _fetch(name: HubName, choose: Choose) -> tuple[Path, list[str]]:
    """The snapshot's folder and the chosen files in it."""
    import huggingface_hub
    from huggingface_hub import constants

    refusal = ""
    folder = _cached(name, Path(constants.HF_HUB_CACHE))
    if folder is not None:
        cached = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        try:
            chosen = choose(name, cached)
            if _is_whole(folder, chosen):
                return folder, chosen
        except InputError as error:  # what is wanted may not be there yet
            refusal = error.message
    absent = "only a part of it is" if folder is not None else "it is not"
    absent = f"{absent} in {_short(constants.HF_HUB_CACHE)}"
    if constants.HF_HUB_OFFLINE:
        flag = next((flag for flag in OFFLINE_FLAGS if os.environ.get(flag)), OFFLINE_FLAGS[0])
        if refusal:
            cache = _short(constants.HF_HUB_CACHE)
            raise OfflineError(f"In {cache}, {refusal} Nothing is downloaded: {flag} is set.", hint=_way_out(name))
        raise OfflineError(_cannot(name, absent, f"{flag} is set"), hint=_way_out(name))
    with _explained(name, absent):
        # Its other calls that list files try six times over 23 seconds where there is no network.
        info = huggingface_hub.HfApi(endpoint=constants.ENDPOINT).model_info(
            name.repo, revision=name.revision, timeout=TIMEOUT_S
        )
        listed = [sibling.rfilename for sibling in info.siblings or ()]
    chosen = choose(name, listed)
    patterns, bars = [glob.escape(file) for file in chosen], _bars()
    with _explained(name, absent):
        made = huggingface_hub.snapshot_download(
            name.repo,
            revision=name.revision,
            cache_dir=constants.HF_HUB_CACHE,
            endpoint=constants.ENDPOINT,
            allow_patterns=patterns,
            tqdm_class=bars,
        )
    missing = [file for file in chosen if not Path(made, file).is_file()]
    if missing:
        raise InputError(f"{name} changed while it was downloaded: {missing[0]} is gone.", hint="Try again.")
    return Path(made), chosen


def _bars() -> type[Any]:
    """Progress bars that are drawn on a terminal alone; huggingface_hub draws one of its own anywhere."""
    from huggingface_hub.utils.tqdm import tqdm

    hidden = sys.stderr is None or not sys.stderr.isatty()

    class Bars(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": hidden or options.get("disable")})  # type: ignore[no-untyped-call]

    return Bars


def _cached(name: HubName, cache: Path) -> Path | None:
    """The folder of the cached snapshot of a revision, complete or not."""
    storage = cache / f"models--{name.repo.replace('/', '--')}"
    commit, ref = name.revision, storage / "refs" / name.revision
    if is_there(ref) and not ref.is_dir():  # refs/pr is the folder of refs/pr/1
        with suppress(ValueError):  # bytes that are no text
            commit = read_bytes(ref).decode("ascii").strip()
    folder = storage / "snapshots" / commit
    return folder if re.fullmatch(r"\w+", commit) and folder.is_dir() else None


def _is_whole(folder: Path, chosen: Sequence[str]) -> bool:
    """Whether a cached model can be used as it is: a folder with a tokenizer and every shard of its index."""
    if chosen[0].endswith(".gguf"):
        return True
    if not any(all(name in chosen for name in names) for names in TOKENIZERS):
        return False
    for kind in KINDS:
        if kind.index in chosen:
            with suppress(StarscopeError):  # the checkpoint's reader says what is wrong
                shards = read_json(folder / kind.index).get("weight_map")
                return not isinstance(shards, dict) or all(shard in chosen for shard in shards.values())
    return True


@contextmanager
def _explained(name: HubName, absent: str) -> Iterator[None]:
    """Turn what goes wrong on the way to the hub into one sentence each.

    For its calls and the reading of their answers and nothing else: here a ValueError is the hub's.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    host = constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        token = "the token found has no access" if huggingface_hub.get_token() else "no token was found"
        raise InputError(
            f"{name.repo} is gated: you have to accept its terms first, and {token}.",
            hint=f"Accept them at {host}/{name.repo}, then log in: hf auth login, or set HF_TOKEN.",
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"{name.repo} is neither a local path nor a repository on {host} that you may see.",
            hint="Check the name; for a private repository log in: hf auth login, or set HF_TOKEN.",
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(
            f"{name.repo} has no revision {name.revision!r}.", hint="Give a branch, a tag or a whole commit hash."
        ) from None
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):  # the connection was lost between two requests
            raise OfflineError(_cannot(name, absent, _reason(host, error.__cause__)), hint=_way_out(name)) from None
        raise InputError(f"{name} lacks a file that it lists: {_first_line(error)}.", hint="Try again.") from None
    except errors.HFValidationError as error:
        raise InputError(f"{name.repo} is neither a local path nor a hub name: {_first_line(error)}.") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if 400 <= status < 500 and status not in (408, 429):
            raise InputError(
                f"{host} refuses {name} with status {status}.",
                hint="Check the token: hf auth whoami, or HF_TOKEN.",
            ) from None
        raise OfflineError(_cannot(name, absent, f"{host} answers with status {status}"), hint=_way_out(name)) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFitError(
                f"{name} does not fit on the disk of {_short(constants.HF_HUB_CACHE)}.",
                hint="Free some space, or set HF_HUB_CACHE to another place.",
            ) from None
        if error.filename is not None:
            raise OutputError(f"{os.fsdecode(error.filename)} cannot be written: {error.strerror}.") from None
        raise OfflineError(_cannot(name, absent, _reason(host, error)), hint=_way_out(name)) from None
    except (ValueError, TypeError, KeyError, AttributeError):  # a proxy's page, say
        why = f"{host} does not answer as a hub does"
        raise OfflineError(_cannot(name, absent, why), hint=_way_out(name)) from None
    except errors.HTTPError as error:  # type: ignore[attr-defined]  # of the HTTP library that it uses
        raise OfflineError(_cannot(name, absent, _reason(host, error)), hint=_way_out(name)) from None


def _cannot(name: HubName, absent: str, why: str) -> str:
    return f"{name} is not a local path, {absent}, and {why}."


def _way_out(name: HubName) -> str:
    return f"With a network: hf download {name.repo}; copy that folder into this cache. Or try: starscope demo"


def _reason(host: str, error: BaseException | None) -> str:
    return f"{host} cannot be reached" + (f" ({_first_line(error)})" if error is not None and str(error) else "")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _short(path: str) -> str:
    """A path with the home folder as ~."""
    home = os.path.expanduser("~")
    return "~" + path[len(home) :] if path.startswith(home + os.sep) else path
