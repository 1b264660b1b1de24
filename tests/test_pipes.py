"""A named pipe where a file is expected is refused by name: opening it would wait for ever for somebody to write."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from starscope.checkpoint import open_checkpoint
from starscope.errors import InputError
from starscope.hub import HubName, fetch_model
from starscope.tokenizer import Tokenizer
from starscope.train.checkpoints import read_checkpoint
from starscope.train.data import open_tokens
from starscope.train.documents import Document
from starscope.train.vocabularies import BPE
from support.hub import fill_cache
from support.tokenizer_folders import small_json, small_vocab, write

PATIENCE_S = 20


@pytest.fixture(autouse=True)
def impatience() -> Iterator[None]:
    """A test that waits fails."""

    def fail(number: int, frame: Any) -> None:
        raise TimeoutError("it waits for the pipe's other end")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "config": ("config.json", lambda path: open_checkpoint(path.parent)),
    "tokenizer": ("tokenizer.json", lambda path: Tokenizer.from_folder(path.parent)),
    "settings": ("tokenizer_config.json", lambda path: Tokenizer.from_folder(path.parent)),
    "vocabulary": ("vocab.json", lambda path: Tokenizer.from_folder(path.parent)),
    "merges": ("merges.txt", lambda path: Tokenizer.from_folder(path.parent)),
    "template": ("chat_template.jinja", lambda path: Tokenizer.from_folder(path.parent)),
    "document": ("a.py", lambda path: Document("a.py", path).text()),
    "tokens": ("train.tokens", open_tokens),
    "bpe": ("tokenizer.json", BPE.read),
    "checkpoint": ("checkpoint.bin", read_checkpoint),
}


@pytest.mark.parametrize("what", READERS)
def test_a_pipe_is_no_file(what: str, tmp_path: Path) -> None:
    name, read = READERS[what]
    folder = tmp_path / "folder"
    if what in ("vocabulary", "merges"):
        write(folder, vocab_json=small_vocab(), merges_txt="i n\n")
    else:
        write(folder, tokenizer_json=small_json())
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.message == f"{path} is not a regular file."


def test_a_pipe_in_the_hubs_cache_is_no_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fill_cache(tmp_path, "owner/name", {"m-Q8_0.gguf": b"x"})
    reference = tmp_path / "models--owner--name" / "refs" / "main"
    assert fetch_model(HubName("owner/name")).name == "m-Q8_0.gguf"
    reference.unlink()
    os.mkfifo(reference)
    with pytest.raises(InputError) as caught:
        fetch_model(HubName("owner/name"))
    assert caught.value.message == f"{reference} is not a regular file."
