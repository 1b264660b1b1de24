"""`demo`: the first minute, with the small model in the package; no network, no torch."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import click

from starscope import __version__
from starscope.cli.common import Session, everywhere
from starscope.cli.engines import EngineArguments, engine_options, headline
from starscope.cli.units import bytes_text, count_text

if TYPE_CHECKING:
    from starscope.generate import Completion
    from starscope.model import Model

PROMPT = """\
class Counter:
    def __init__(self, value=0):
        self.value = value

    def __eq__(self, other):
        if isinstance(other,"""
BEFORE = """\
def read(path):
    f = open(path)
    try:
        data ="""
AFTER = """
    finally:
        f.close()
    return data
"""
NEXT = (
    ("starscope run demo 'def main():' -n 60", "complete your own prompt"),
    ("starscope trace demo 'def f(x):' --value logits", "inspect any value of the forward pass"),
    ("starscope graph demo", "list every operation of the forward pass"),
    ("starscope convert FOLDER -o model.gguf", "convert a StarCoder model of your own"),
)


@click.command()
@engine_options
@everywhere
@click.pass_context
def demo(ctx: click.Context, where: EngineArguments) -> None:
    """Complete code with the bundled demo model.

    Completes a method, fills in the middle of a function, and shows which tokens the model attended to.
    """
    from starscope.model import load

    session: Session = ctx.obj
    session.write(f"starscope {__version__}\n")
    loaded = load("demo", **where)
    session.write(f"{headline(loaded)}\n{describe(loaded)}")
    session.write("\n# Completing a method:\n")
    session.write(PROMPT)
    first = stream(session, loaded, PROMPT, None)
    if loaded.tokenizer.fim is not None:
        session.write("\n\n# Filling in the middle of a function (between >>> and <<<):\n")
        session.write(BEFORE + ">>>")
        stream(session, loaded, BEFORE, AFTER)
        session.write("<<<" + AFTER)
    show_looks(session, loaded, PROMPT, first)
    timings = first.timings
    session.write(
        f"\nprompt {timings.prefill_tok_s:.0f} tok/s, new text {timings.decode_tok_s:.0f} tok/s, "
        f"loaded in {timings.load_s:.2f} s; no data left this machine\n"
    )
    session.write("\nNext steps:\n")
    here = [(command.replace("starscope", this_command(), 1), what) for command, what in NEXT]
    width = max(len(command) for command, _ in here)
    session.write("".join(f"  {command:<{width}}  {what}\n" for command, what in here))


def this_command() -> str:
    """How to call this program again: by its name where the shell finds it, by its path elsewhere."""
    called = sys.argv[0]
    found = shutil.which("starscope")
    if os.path.basename(called) != "starscope" or (found and os.path.samefile(found, called)):
        return "starscope"
    return os.path.relpath(called)


def describe(model: Model) -> str:
    """What the model is, and what to expect of one so small."""
    parameters = sum(slot.parameters for name, slot in model.weights.slots.items() if not model.weights.is_tied(name))
    size = bytes_text(model.path.stat().st_size)
    return (
        f"the demo model: {count_text(parameters)} parameters, {size}, {model.context_length} tokens of context, "
        "trained on Python's standard library\n"
        "Its output looks like Python and is rarely correct; the largest StarCoder has 15.5B parameters.\n"
    )


def show_looks(session: Session, model: Model, prompt: str, completion: Completion) -> None:
    """Print which tokens the last new token was predicted from: the five with the most attention."""
    ids = model.tokenizer.encode(prompt) + completion.token_ids[:-1]
    if not completion.token_ids or len(ids) < 3:
        return
    looks = attention_of_the_last(model, ids)
    new = model.tokenizer.piece(completion.token_ids[-1])
    session.write(f"\n\n# To predict its last token, {new!r}, the model attended most to:\n")
    for position in sorted(range(len(ids)), key=lambda i: -looks[i])[:5]:
        bar = "█" * max(1, round(40 * looks[position] / max(looks)))
        session.write(f"{looks[position]:>6.1%}  {bar}  {model.tokenizer.piece(ids[position])!r} (token {position})\n")


def attention_of_the_last(model: Model, ids: list[int]) -> list[float]:
    """The share of attention that the last position pays to each token: the mean over heads and blocks.

    The first token is left out: heads with nothing to look for rest on it.
    """
    patterns = model.keep_values(ids, "layers.*.self_attn.attention_probabilities", rows=-1).to_numpy()
    mean = sum(pattern[0, :, -1].mean(0) for pattern in patterns.values()) / len(patterns)
    return [0.0, *(float(share) for share in mean[1:] / mean[1:].sum())]


def stream(session: Session, model: Model, prompt: str, suffix: str | None) -> Completion:
    """Print a completion as it is generated."""
    completion = None
    # The model is too small to know where to end: a hole ends with its line, a function with the first empty one.
    if suffix is None:
        pieces = model.generate(prompt, max_new_tokens=60, stop="\n\n", stream=True)
    else:
        pieces = model.generate(prompt, suffix, max_new_tokens=60, stop="\n", fim_order="spm", stream=True)
    for piece in pieces:
        session.write(piece.text)
        completion = piece.completion
    assert completion is not None, "the last piece has the completion"
    return completion
