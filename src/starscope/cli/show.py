"""`show` and `graph`: what a model is, read from its headers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from starscope.cli.common import MODEL, Session, everywhere, json_option
from starscope.cli.describe import SIZES, describe_folder, describe_gguf, open_folder
from starscope.cli.units import bytes_text, one_line

if TYPE_CHECKING:
    from starscope.graph import Graph

MOST_SHOWN = 200  # characters of a name or a text that a file holds, which may be of any length


@click.command()
@click.argument("file", type=MODEL)
@click.option("--tensors", is_flag=True, help="List every tensor: name, format, shape and bytes.")
@json_option
@everywhere
@click.pass_context
def show(ctx: click.Context, file: str, tensors: bool) -> None:
    """Describe a model file or folder.

    Reads only headers. Vocabularies without weights and unsupported architectures are shown too.
    """
    from starscope.model import find_model

    session: Session = ctx.obj
    path = find_model(file)
    document = describe_folder(path) if path.is_dir() else describe_gguf(path)
    listed = document.pop("tensors")
    if session.json:
        session.document({**document, "tensors": listed} if tensors else document)
    else:
        session.write(as_text(document) + (tensor_lines(listed) if tensors else ""))


def as_text(document: dict[str, Any]) -> str:
    """The description in lines of a name and a value."""
    known = document["family"] is not None
    rows: list[tuple[str, Any]] = [
        ("file", f"{document['path']} ({document['kind']}, {bytes_text(document['file_bytes'])})"),
        (
            "architecture",
            f"{brief(document['architecture'])} ({document['family'] if known else 'not supported'})",
        ),
        ("name", brief(document["name"])),
        ("license", brief(document["license"])),
        ("size class", document["size_class"]),
        ("parameters", f"{document['parameters']:,}" if document["parameters"] else None),
        ("weights", weights_text(document)),
    ]
    rows += [(name, document[name]) for name in SIZES]
    rows += [(brief(key), brief(value)) for key, value in document["metadata"].items()]
    tokenizer = document["tokenizer"]
    if tokenizer:
        pre = f"{brief(tokenizer['pre'])}{' (assumed)' if tokenizer['pre_is_assumed'] else ''}"
        rows.append(("tokenizer", f"{brief(tokenizer['model'])}, pre-tokenizer {pre}, {tokenizer['tokens']} tokens"))
        rows.append(("bos, eos", f"{tokenizer['bos']}, {tokenizer['eos']}"))
        fim = ", ".join(f"{role} {token}" for role, token in (tokenizer["fim"] or {}).items())
        rows.append(("fill-in-middle", fim or "no tokens"))
    rows += [("note", problem) for problem in document["problems"]]
    lines = [(one_line(name), one_line(value)) for name, value in rows if value is not None]
    width = max(len(name) for name, _ in lines)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in lines)


def brief(value: Any) -> Any:
    """A text as far as it is shown; anything else as it is."""
    return f"{value[:MOST_SHOWN]}..." if isinstance(value, str) and len(value) > MOST_SHOWN else value


def weights_text(document: dict[str, Any]) -> str:
    """What the weights are stored as, or why there is nothing to say."""
    if document["vocabulary_only"]:
        return "none (vocabulary only)"
    return formats_text(document) or "unreadable"


def formats_text(document: dict[str, Any]) -> str:
    """Bytes by format, the largest first."""
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in document["bytes_by_format"].items())


def tensor_lines(listed: list[dict[str, Any]]) -> str:
    """One line a tensor."""
    names = [one_line(tensor["name"]) for tensor in listed]  # a folder's may hold anything
    width = max(map(len, names), default=0)
    lines = []
    for name, tensor in zip(names, listed, strict=True):
        shape = "[" + " ".join(map(str, tensor["shape"])) + "]"
        lines.append(f"{name:<{width}}  {tensor['format']:<6} {shape:<16} {tensor['bytes']:>14,}\n")
    return "".join(lines)


@click.command()
@click.argument("model", type=MODEL)
@json_option
@everywhere
@click.pass_context
def graph(ctx: click.Context, model: str) -> None:
    """Print a model's forward pass, one operation per line.

    Each line shows the operation's number, block and kind, its inputs and weights, and the values it produces with
    their standard names and shapes. %N is a value without a name. Reads no weights.
    """
    session: Session = ctx.obj
    recorded = read_graph(model)
    if session.json:
        session.document(graph_document(recorded))
    else:
        session.write("".join(line + "\n" for line in graph_lines(recorded)))


def read_graph(model: str) -> Graph:
    """The graph that MODEL's header gives."""
    from starscope.family import find_family_of_file, hparams_from_metadata
    from starscope.gguf import read_gguf
    from starscope.graph import record
    from starscope.model import find_model

    path = find_model(model)
    if path.is_dir():
        from starscope.family import find_family_for_config
        from starscope.mapping import checkpoint_hparams

        checkpoint, _ = open_folder(path)
        with checkpoint:
            family = find_family_for_config(checkpoint.config)
            return record(family, checkpoint_hparams(family, checkpoint))
    with read_gguf(path) as file:
        family = find_family_of_file(file)
        hp = hparams_from_metadata(family, file)
        if family.fold and file.tensors:
            hp, _ = family.fold(hp, file)
        return record(family, hp)


def graph_lines(graph: Graph) -> list[str]:
    """One line an operation, under a line of titles; names lose the block that the line has already."""
    wide = max(len(op.kind) for op in graph.ops)
    lines = [f"{'#':>4}  block  {'op':<{wide}}  inputs · weights -> values [shape]"]
    for op in graph.ops:
        block = "" if op.layer is None else str(op.layer)
        own = f"layers.{block}."
        parts = [", ".join(value_name(graph, index).removeprefix(own) for index in op.inputs)]
        if op.weights:
            module, _, first = op.weights[0].removeprefix(own).rpartition(".")
            parts.append(" ".join([f"{module}.{first}", *(f".{name.rpartition('.')[2]}" for name in op.weights[1:])]))
        made = ", ".join(f"{value_name(graph, index, every=True)} {shape_of(graph, index)}" for index in op.outputs)
        lines.append(f"{op.index:>4}  {block:>5}  {op.kind:<{wide}}  {' · '.join(parts)} -> {made}")
    return lines


def value_name(graph: Graph, index: int, *, every: bool = False) -> str:
    """A value's standard names (the last one, or `every` one), or %N."""
    names = graph.edges[index].names
    if not names:
        return "positions" if graph.producers[index] is None else f"%{index}"
    return " = ".join(names) if every else names[-1]


def shape_of(graph: Graph, index: int) -> str:
    """A value's axes: sizes, or names of those known when it runs."""
    return "[" + " ".join(map(str, graph.edges[index].axes)) + "]"


def graph_document(graph: Graph) -> dict[str, Any]:
    """The same as one document: operations over values that are numbered."""
    return {
        "family": graph.family.name,
        "ops": [
            {
                "index": op.index,
                "layer": op.layer,
                "op": op.kind,
                "inputs": list(op.inputs),
                "weights": list(op.weights),
                "outputs": list(op.outputs),
                "attributes": dict(op.attrs),
            }
            for op in graph.ops
        ],
        "values": [{"index": edge.index, "names": list(edge.names), "shape": list(edge.axes)} for edge in graph.edges],
    }
