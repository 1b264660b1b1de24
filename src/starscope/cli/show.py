"""`show` and `graph`: what a model is, read from its headers alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from starscope.cli.common import MODEL, Session, everywhere, json_option
from starscope.cli.units import bytes_text, count_text, one_line
from starscope.errors import StarscopeError

if TYPE_CHECKING:
    from starscope.checkpoint import Checkpoint
    from starscope.family import Family, HParams
    from starscope.gguf import GGUFFile
    from starscope.graph import Graph

MOST_SHOWN = 200  # characters of a name or a text that a file holds, which may be of any length
SIZES = (  # standard names that `show` prints, in this order
    "context_length",
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "activation",
    "vocab_size",
)


@click.command()
@click.argument("file", type=MODEL)
@click.option("--tensors", is_flag=True, help="List every tensor: name, shape, format, bytes.")
@json_option
@everywhere
@click.pass_context
def show(ctx: click.Context, file: str, tensors: bool) -> None:
    """Tell what a model file or folder holds.

    Reads headers alone: vocabularies without weights and other architectures are shown too.
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


def describe_gguf(path: Path) -> dict[str, Any]:
    """Everything that `show` tells of a GGUF file."""
    from starscope.family import find_family_of_file, hparams_from_metadata
    from starscope.gguf import read_gguf

    with read_gguf(path) as file:
        family, hp, problems = None, None, []
        try:
            family = find_family_of_file(file)
            hp = hparams_from_metadata(family, file)
        except StarscopeError as error:
            problems.append(error.message)
        ours = {slot.gguf: slot.name for slot in family.slots(hp)} if family and hp else {}
        listed = [
            {
                "name": info.name,
                "value": ours.get(info.name),
                "shape": list(info.shape),
                "format": info.type_name,
                "bytes": info.nbytes,
            }
            for info in file.tensors.values()
        ]
        tokenizer, problem = describe_tokenizer(file, family)
        return {
            "path": str(path),
            "kind": f"GGUF v{file.version}",
            "file_bytes": sum(part.stat().st_size for part in file.paths),
            "architecture": text_of(file, "general.architecture"),
            "name": text_of(file, "general.name"),
            "license": text_of(file, "general.license"),
            **describe_model(family, hp, listed),
            "tokenizer": tokenizer,
            "metadata": {} if hp else own_keys(file),
            "problems": problems + ([problem] if problem else []),
            "tensors": listed,
        }


WEIGHT_FILES = (".safetensors", ".bin")


def describe_folder(path: Path) -> dict[str, Any]:
    """Everything that `show` tells of a Hugging Face folder."""
    from starscope.family import find_family_for_config
    from starscope.mapping import checkpoint_hparams, count_parameters
    from starscope.tokenizer import Tokenizer

    checkpoint, problems = open_folder(path)
    stored = [file for file in path.iterdir() if file.suffix in WEIGHT_FILES and file.is_file()]
    unreadable = {"vocabulary_only": False, "parameters": None} if problems and stored else {}
    with checkpoint:
        family, hp, parameters = None, None, None
        try:
            family = find_family_for_config(checkpoint.config)
            hp = checkpoint_hparams(family, checkpoint)
            parameters = count_parameters(family, checkpoint, hp)
        except StarscopeError as error:
            problems.append(error.message)
        ours = {slot.hf: slot.name for slot in family.slots(hp)} if family and hp else {}
        listed = [
            {
                "name": tensor.name,
                "value": ours.get(tensor.name),
                "shape": list(tensor.shape),
                "format": tensor.dtype,
                "bytes": tensor.nbytes,
            }
            for tensor in checkpoint.tensors.values()
        ]
        readme = checkpoint.readme_metadata()
        tokenizer = None
        try:
            read = Tokenizer.from_folder(path, checkpoint.config, checkpoint.generation_config)
            tokenizer = {
                "model": "gpt2",
                "pre": read.pre_tokenizer,
                "pre_is_assumed": False,
                "tokens": read.vocab_size,
                "bos": read.bos_id,
                "eos": read.eos_id,
                "fim": None if read.fim is None else fim_ids(vars(read.fim)),
            }
        except StarscopeError as error:
            problems.append(error.message)
        files = {tensor.path for tensor in checkpoint.tensors.values()}
        architectures, origin = (checkpoint.config.get(key) for key in ("architectures", "_name_or_path"))
        return {
            "path": str(path),
            "kind": "Hugging Face folder",
            "file_bytes": sum(file.stat().st_size for file in (stored if unreadable else files)),
            "architecture": next(filter(is_text, architectures if isinstance(architectures, list) else ()), None),
            "name": origin if origin and is_text(origin) else path.resolve().name,
            "license": readme.get("license"),
            **describe_model(family, hp, listed, parameters),
            **unreadable,
            "tokenizer": tokenizer,
            "metadata": {} if hp else scalars(checkpoint.config),
            "problems": problems,
            "tensors": listed,
        }


def open_folder(path: Path) -> tuple[Checkpoint, list[str]]:
    """The folder, without its weights when they cannot be opened; then, why."""
    from starscope.checkpoint import open_checkpoint

    try:
        return open_checkpoint(path), []
    except StarscopeError as error:
        return open_checkpoint(path, weights=False), [error.message]


def describe_model(
    family: Family | None, hp: HParams | None, listed: list[dict[str, Any]], parameters: int | None = None
) -> dict[str, Any]:
    """Sizes, parameters, and what the formats take; a vocabulary alone gets the parameters of the model it is of.

    `parameters` is given where not every tensor listed holds some.
    """
    by_format: dict[str, int] = {}
    for tensor in listed:
        by_format[tensor["format"]] = by_format.get(tensor["format"], 0) + tensor["bytes"]
    parameters = parameters or sum(math.prod(tensor["shape"]) for tensor in listed)
    if not listed and family and hp:
        parameters = sum(slot.parameters for slot in family.slots(hp) if slot.tied_to is None)
    size = family.size_class(hp) if family and hp else None
    return {
        "family": family.name if family else None,
        "size_class": size or (count_text(parameters) if parameters else None),
        "parameters": parameters or None,
        "vocabulary_only": not listed,
        "bytes_by_format": dict(sorted(by_format.items(), key=lambda item: -item[1])),
        **{name: hp[name] if hp else None for name in SIZES},
    }


def describe_tokenizer(file: GGUFFile, family: Family | None) -> tuple[dict[str, Any] | None, str | None]:
    """The tokenizer's names and ids, and what is wrong with it, if anything."""
    from starscope.tokenizer import Tokenizer
    from starscope.tokenizer.metadata import read_metadata

    if "tokenizer.ggml.model" not in file.metadata:
        return None, None
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    bos, eos = (file.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos"))
    described: dict[str, Any] = {
        "model": text_of(file, "tokenizer.ggml.model"),
        "pre": text_of(file, "tokenizer.ggml.pre"),
        "pre_is_assumed": False,
        "tokens": tokens.count if tokens else 0,
        "bos": bos if type(bos) is int else None,
        "eos": eos if type(eos) is int else None,
        "fim": None,
    }
    try:
        source = read_metadata(file, family.default_pre_tokenizer if family else "gpt-2")
        described["pre"], described["pre_is_assumed"] = source.pre_tokenizer, source.pre_is_assumed
        named = source.roles.fim
        if not {"prefix", "suffix", "middle"} <= named.keys():  # only then is the vocabulary searched
            fim = Tokenizer(source).fim
            named = {} if fim is None else vars(fim)
        described["fim"] = fim_ids(named) or None
    except StarscopeError as error:
        return described, error.message
    return described, None


def fim_ids(named: Any) -> dict[str, int]:
    """The ids of the infilling tokens that there are, in their usual order."""
    order = ("prefix", "suffix", "middle", "pad", "repo", "separator")
    return {role: named[role] for role in order if named.get(role) is not None}


def text_of(file: GGUFFile, key: str) -> str | None:
    """The text under a key; None where the file has none, or a value of another type there."""
    value = file.get(key)
    return value if isinstance(value, str) else None


def is_text(value: Any) -> bool:
    """Whether it is a text."""
    return isinstance(value, str)


def own_keys(file: GGUFFile) -> dict[str, Any]:
    """The architecture's own keys as the file spells them."""
    prefix = f"{text_of(file, 'general.architecture')}."
    return scalars({key: value.data for key, value in file.metadata.items() if key.startswith(prefix)})


def scalars(values: dict[str, Any]) -> dict[str, Any]:
    """What can be printed in one line each."""
    kinds = (str, int, float, bool)
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, kinds) and (not isinstance(value, float) or math.isfinite(value))
    }


def as_text(document: dict[str, Any]) -> str:
    """The description in lines of a name and a value."""
    known = document["family"] is not None
    rows: list[tuple[str, Any]] = [
        ("file", f"{document['path']} ({document['kind']}, {bytes_text(document['file_bytes'])})"),
        (
            "architecture",
            f"{brief(document['architecture'])} ({document['family'] if known else 'not supported here'})",
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
        rows.append(("fill-in-middle", fim or "no tokens for it"))
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
        return "none, a vocabulary alone"
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
    """Print a model's forward pass, one line an operation.

    A line has the operation's number, its block, what it is, what goes in, and the value that comes out with its
    standard names and its shape. %N is a value without a name. No weights are read.
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
