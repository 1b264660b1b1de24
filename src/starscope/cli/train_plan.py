"""`train --dry-run`: what a run would read and take, before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from starscope.cli.common import Session
from starscope.cli.train_progress import clock
from starscope.cli.units import bytes_text, plural

if TYPE_CHECKING:
    from starscope.family import HParams
    from starscope.train.plan import Plan
    from starscope.train.settings import Settings


def tell_plan(session: Session, settings: Settings, out: Path | None) -> None:
    """Print the plan, or its document, and end with the status that a run would end with."""
    from starscope.train.plan import make_plan

    plan = make_plan(settings, out)
    for note in (*plan.data.notes, *plan.notes):
        session.note(f"note: {note}")
    for problem in plan.problems:
        session.note(f"problem: {problem.text}")
    if session.json:
        session.document(plan.as_json())
    else:
        session.write("".join(f"{name:<12} {text}\n" for name, text in rows(plan).items()))
    if plan.status:
        raise click.exceptions.Exit(plan.status)


def rows(plan: Plan) -> dict[str, str]:
    """What a person wants to know of it."""
    data, settings = plan.data, plan.settings
    about = "about " if data.is_estimate else ""
    made = {
        "text": f"{data.documents:,} documents, {bytes_text(data.bytes)}",
        "vocabulary": f"{data.vocab_size:,} tokens ({data.vocab})",
        "training": f"{data.train_documents:,} documents, {about}{data.train_tokens:,} tokens, "
        f"{data.samples:,} samples of {settings.context_length}",
        "held out": f"{data.held_out_documents:,} documents, {about}{data.held_out_tokens:,} tokens, "
        f"{data.held_out_share:.1%} of the text",
    }
    if data.leakage is not None:
        made["leakage"] = (
            f"{data.leakage.line_share:.1%} of the held-out lines and {data.leakage.gram_share:.1%} of its runs of "
            "13 words also occur in the training text"
        )
    return made | {
        "model": model(plan),
        "updates": f"{settings.steps:,} of {settings.batch_size} samples, {plan.epochs:.2f} epochs",
        "memory": f"{bytes_text(plan.memory.total)}: "
        + ", ".join(f"{name} {bytes_text(size)}" for name, size in plan.memory.parts.items()),
        "disk": bytes_text(plan.disk_bytes),
        "time": "not measured"
        if plan.seconds is None
        else f"{clock(plan.seconds)} in {plan.precision}, plus evaluations",
        "compiling": plan.compiled,
    }


def model(plan: Plan) -> str:
    """What is trained, and the sizes of the model."""
    if plan.ranks:
        layers = plural(len(plan.ranks), "linear layer")
        return f"{plan.parameters:,} parameters for {layers} of {shape(plan.graph.hp)}"
    return f"{plan.parameters:,} parameters: {shape(plan.graph.hp)}"


def shape(hp: HParams) -> str:
    """A model's sizes in words."""
    heads = f"{hp.num_heads} heads" + (
        f", {plural(hp.num_kv_heads, 'key head')}" if hp.num_kv_heads != hp.num_heads else ""
    )
    return (
        f"{hp.num_layers} blocks × {hp.hidden_size}, {heads}, MLP {hp.intermediate_size}, context {hp.context_length}"
    )
