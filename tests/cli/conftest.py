"""A small model made without torch, the command in this process, and the command as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from support.vocabularies import added_token, symbols, whole_json

SPECIAL = ("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<filename>", "<reponame>")
MERGES = ("Ġ Ġ", "i n", "d e", "de f", "Ġ a", "r e")
CONFIG = {
    "architectures": ["GPTBigCodeForCausalLM"],
    "model_type": "gpt_bigcode",
    "activation_function": "gelu_pytorch_tanh",
    "layer_norm_epsilon": 1e-5,
    "multi_query": True,
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 64,
    "n_layer": 2,
    "n_positions": 4096,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_folder(folder: Path, *, fim: bool = True) -> None:
    """A random GPT-BigCode folder; greedy text goes on to the end of the context, for the end token's row is low."""
    from safetensors.numpy import save_file

    special = SPECIAL if fim else SPECIAL[:1]
    pieces = [*special, *symbols(), *(merge.replace(" ", "") for merge in MERGES)]
    added = [added_token(token, piece, special=True) for token, piece in enumerate(special)]
    tokenizer = whole_json({piece: token for token, piece in enumerate(pieces)}, list(MERGES), added)
    hidden, inner, rng = CONFIG["n_embd"], CONFIG["n_inner"], np.random.default_rng(7)
    shapes = {
        "transformer.wte.weight": (len(pieces), hidden),
        "transformer.wpe.weight": (CONFIG["n_positions"], hidden),
    }
    for layer in range(CONFIG["n_layer"]):
        block = f"transformer.h.{layer}"
        rows = {"attn.c_attn": (hidden + 16, hidden), "attn.c_proj": (hidden, hidden)}
        rows |= {"mlp.c_fc": (inner, hidden), "mlp.c_proj": (hidden, inner), "ln_1": (hidden,), "ln_2": (hidden,)}
        for name, shape in rows.items():
            shapes |= {f"{block}.{name}.weight": shape, f"{block}.{name}.bias": shape[:1]}
    shapes |= {"transformer.ln_f.weight": (hidden,), "transformer.ln_f.bias": (hidden,)}
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["transformer.ln_f.bias"][0], tensors["transformer.wte.weight"][: len(special), 0] = 10.0, -10.0
    tensors["transformer.wte.weight"][len(special) :, 0] = 0.0
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": len(pieces)}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder."""
    path = tmp_path_factory.mktemp("cli") / "tiny"
    write_folder(path)
    return path


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    """The same as a GGUF file, F32."""
    from starscope.convert import convert

    return convert(folder, folder.with_suffix(".gguf"), to="f32").out


@pytest.fixture(scope="session")
def model_without_fim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose vocabulary has no infilling tokens."""
    path = tmp_path_factory.mktemp("cli") / "plain"
    write_folder(path, fim=False)
    return path


@pytest.fixture
def cli() -> Callable[..., Result]:
    """Run a command line in this process."""
    from starscope.cli.app import app

    def run(*args: object, stdin: bytes | None = None) -> Result:
        result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.stderr or "--traceback" in args
        return result

    return run


@pytest.fixture
def spawn() -> Callable[..., subprocess.Popen[bytes]]:
    """Start a command line as a process; Ctrl-C reaches it even where the tests themselves ignore it."""

    def start(*args: object, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [sys.executable, "-m", "starscope", *map(str, args)],
            env={**os.environ, "PYTHONUNBUFFERED": "", **(env or {})},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            bufsize=0,
            **{**streams, **options},
        )

    return start
