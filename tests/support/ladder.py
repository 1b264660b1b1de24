"""The table of what `-ngl N` places where, for two models at their real shapes, and how it is written anew.

cd tests && python -m support.ladder --rewrite       # then read the difference against the rules of the ladder
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from starscope.family import find_family_for_config, read_config
from starscope.graph import Graph, record
from starscope.placement import Device, Plan, make_plan

GOLDEN = Path(__file__).parent.parent / "data" / "placement" / "ladder.txt"
CONTEXT = 8192
MODELS = {  # name -> what of a released config the sizes are read from
    "starcoder-15b": {
        "model_type": "gpt_bigcode",
        "architectures": ["GPTBigCodeForCausalLM"],
        "n_positions": 8192,
        "n_embd": 6144,
        "n_layer": 40,
        "n_inner": 24576,
        "n_head": 48,
        "multi_query": True,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_pytorch_tanh",
        "vocab_size": 49152,
    },
    "llama-7b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 16384,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "vocab_size": 32016,
    },
}


@cache
def graph_of(model: str) -> Graph:
    """A model's graph, recorded without a weight."""
    config = MODELS[model]
    family = find_family_for_config(config)
    return record(family, read_config(family, config))


def formats_of(graph: Graph, name: str = "Q4_0", *, tied: bool = False) -> dict[str, str]:
    """Matrices in a format, all else as float32; a tied head is not in a file."""
    return {
        slot.name: "F32" if slot.always_f32 else name
        for slot in graph.family.slots(graph.hp)
        if not (tied and slot.tied_to)
    }


@cache
def plan_of(model: str, layers: int, *, low_vram: bool, tied: bool = False) -> Plan:
    """On one device, whatever its size."""
    graph = graph_of(model)
    formats = formats_of(graph, tied=tied)
    return make_plan(graph, formats, [Device("cuda")], gpu_layers=layers, low_vram=low_vram, context_length=CONTEXT)


def table() -> str:
    """One line a number of layers, with and without low VRAM."""
    lines = [
        f"# Q4_0, context {CONTEXT}; bytes on the GPU. Rewritten by: cd tests && python -m support.ladder --rewrite"
    ]
    head = ("model", "ngl", "low", "blocks", "head", "norm", "v", "k", "offloaded", "weights", "kv", "scratch", "MB")
    rows = [head]
    for model in MODELS:
        graph = graph_of(model)
        for low_vram in (False, True):
            for layers in range(graph.hp.num_layers + 5):
                plan = plan_of(model, layers, low_vram=low_vram)
                rungs, found = plan.rungs, plan.on_gpus
                where = ["gpu" if yes else "cpu" for yes in (rungs.head, rungs.norm, rungs.values, rungs.keys)]
                offloaded = f"{rungs.offloaded}/{rungs.num_layers + 3}"
                total = plan.report()[-1].removeprefix("total VRAM used: ").removesuffix(" MB")
                sizes = (found.weights, found.kv, found.scratch)
                low = "low" if low_vram else "-"
                rows.append((model, layers, low, rungs.blocks, *where, offloaded, *sizes, total))  # type: ignore[arg-type]
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    lines += ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in texts]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit(f"usage: {sys.argv[0]} --rewrite")
    GOLDEN.write_text(table(), encoding="utf-8")
