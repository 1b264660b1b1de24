"""Reading every block's output at every step of a generation: nnsight on the transformers model, tokens per second.

    python benches/peers/traced.py HF_FOLDER [-n 32] [--rounds 3] [-t N]

Needs nnsight, transformers and torch. `benches/trace.py FILE.gguf --only layers` gives starscope's figure for the same
on a file of that shape; run them in turns on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("-n", "--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=2)
    asked = parser.parse_args()
    import torch
    from nnsight import LanguageModel

    torch.set_num_threads(asked.threads)
    model = LanguageModel(asked.folder, dispatch=True, dtype=torch.float32)
    layers, count = model.transformer.h, asked.tokens

    def run() -> float:
        began = time.perf_counter()
        with model.generate("def f(x):", max_new_tokens=count, min_new_tokens=count, do_sample=False) as tracer:
            kept = list().save()  # noqa: C408  # nnsight gives built-in classes a save()
            for _ in tracer.iter[:count]:
                for layer in layers:
                    kept.append(layer.output.save())
        return count / (time.perf_counter() - began)

    run()
    found = [run() for _ in range(asked.rounds)]
    print(f"{statistics.median(found):.1f} tok/s (rounds: {', '.join(f'{one:.1f}' for one in found)})")


if __name__ == "__main__":
    main()
