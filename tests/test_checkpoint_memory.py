"""How much memory a conversion takes: a few pieces of tensors, however large the files are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from starscope.families.gpt_bigcode import FAMILY
from starscope.family import read_config
from support.checkpoints import make_tokenizer, store_as_torch

CONFIG = {
    "architectures": ["GPTBigCodeForCausalLM"],
    "activation_function": "gelu_pytorch_tanh",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 4,
    "n_positions": 128,
    "vocab_size": 320,
    "tie_word_embeddings": True,
}
SHARDS = 2
MOST_BYTES = 40_000_000  # beside what importing takes

# The peak is told by the kernel for this process alone; what is imported before is not the conversion's.
CHILD = """
import sys
import numpy, tokenizers
from starscope.convert import convert

def peak():
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])

before = peak()
convert(sys.argv[1], sys.argv[2], to=sys.argv[3], verify=True)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize("to", ["f16", "q8_0"])
def test_a_sharded_pytorch_checkpoint_takes_less_memory_than_one_shard(to: str, tmp_path: Path) -> None:
    slots = [slot for slot in FAMILY.slots(read_config(FAMILY, CONFIG)) if slot.tied_to is None]
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    store_as_torch(tmp_path, {slot.hf: torch.zeros(slot.shape) for slot in slots}, SHARDS)
    smallest = min(path.stat().st_size for path in tmp_path.glob("*.bin"))
    assert smallest > MOST_BYTES
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path, tmp_path / "out.gguf", to], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MOST_BYTES
