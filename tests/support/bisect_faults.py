"""Faults for `rewrite bisect`: what a wrong pass would make of a program, each in one place that is known."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import fx

from rewriter.ir import Body, Module, Program, ops
from rewriter.ir.marks import marks, set_marks
from rewriter.ir.residual import residual_blocks
from rewriter.weights.expressions import Tensor
from rewriter.weights.header import read_header

aten = torch.ops.aten


def block_node(program: Program, graph: fx.Graph, layer: int, place: int) -> fx.Node:
    """The stream value that block `place` of `layer` makes, in a copy of the wiring."""
    block = [b for b in residual_blocks(program) if b.layer == layer][place]
    return next(n for n in graph.nodes if n.name == block.add.name)


def in_body(program: Program, path: str, change: Callable[[fx.Graph], Any], inner: str = "") -> Program:
    """`program` with the body at `path` (a copy of its own) changed; `inner` names a body inside it."""

    def changed(module: Module, rest: str) -> Module:
        assert isinstance(module, Body)
        if rest:
            first, _, others = rest.partition(".")
            return replace(module, modules={**module.modules, first: changed(module.modules[first], others)})
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in module.graph.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        new = fx.Graph()
        env = {}
        for node in module.graph.nodes:
            args, kwargs = fx.map_arg(node.args, env.__getitem__), fx.map_arg(node.kwargs, env.__getitem__)
            env[node] = new.create_node(node.op, node.target, args, kwargs, name=node.name)
            env[node].meta = dict(node.meta)
        change(new)
        return replace(module, graph=new)

    return program.with_(modules={**program.modules, path: changed(program.modules[path], inner)})


def nodes(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target == target]


# wiring


def reduction_missing(program: Program, layer: int, place: int) -> Program:
    """The block's partial sums are added to the stream as they are."""
    graph, _ = program.edit()
    add = block_node(program, graph, layer, place)
    total = next(n for n in add.args if n.target is ops.all_reduce)
    total.replace_all_uses_with(total.args[0])
    graph.erase_node(total)
    return program.with_(graph=graph)


def scaled(program: Program, layer: int, place: int, factor: float) -> Program:
    """What the block writes is multiplied by a number."""
    graph, _ = program.edit()
    add = block_node(program, graph, layer, place)
    written = next(a for a in add.args if isinstance(a, fx.Node) and marks(a).stream is None)
    with graph.inserting_before(add):
        new = graph.call_function(operator.mul, (written, factor))
    set_marks(new, replace(marks(add), stream=None))
    add.replace_input_with(written, new)
    return program.with_(graph=graph)


def subtracted(program: Program, layer: int, place: int) -> Program:
    """The block's result is subtracted."""
    graph, _ = program.edit()
    block_node(program, graph, layer, place).target = operator.sub
    return program.with_(graph=graph)


def add_dropped(program: Program, layer: int, place: int) -> Program:
    """What the block writes is thrown away: its readers read the stream before it."""
    graph, _ = program.edit()
    add = block_node(program, graph, layer, place)
    before = add.args[0]
    add.replace_all_uses_with(before)
    graph.erase_node(add)
    return program.with_(graph=graph)


def wrong_operand(program: Program, layer: int, place: int) -> Program:
    """The block before it is added a second time, instead of this one."""
    graph, _ = program.edit()
    add = block_node(program, graph, layer, place)
    block = [b for b in residual_blocks(program) if b.layer == layer][place]
    earlier = next(b for b in residual_blocks(program) if b.index == block.index - 1)
    other = next(n for n in graph.nodes if n.name == earlier.add.name).args[1]
    add.args = (add.args[0], other)
    return program.with_(graph=graph)


def reduced_too_late(program: Program, layer: int, place: int) -> Program:
    """The sum of stream and block is reduced, instead of what the block writes."""
    graph, _ = program.edit()
    add = block_node(program, graph, layer, place)
    total = next(n for n in add.args if n.target is ops.all_reduce)
    add.replace_input_with(total, total.args[0])
    graph.erase_node(total)
    with graph.inserting_after(add):
        new = graph.call_function(ops.all_reduce, (add, "tp"))
    add.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    set_marks(new, marks(add))
    set_marks(add, replace(marks(add), stream=None))
    return program.with_(graph=graph)


def reads(program: Program, layer: int, place: int, value: int) -> Program:
    """The block reads stream value number `value`."""
    block = [b for b in residual_blocks(program) if b.layer == layer][place]
    graph, env = program.edit()
    stream = {marks(n).stream: n for n in program.graph.nodes if marks(n).stream is not None}
    for node in block.branch:
        env[node].replace_input_with(env[stream[block.reads[0]]], env[stream[value]])
    return program.with_(graph=graph)


# inside of modules


def constant(program: Program, path: str, target: Any, value: float, number: int = 0, inner: str = "") -> Program:
    """The last argument of an operator is another number."""

    def change(graph: fx.Graph) -> None:
        node = nodes(graph, target)[number]
        node.args = (*node.args[:-1], value)

    return in_body(program, path, change, inner)


def other_operator(program: Program, path: str, target: Any, other: Any, inner: str = "") -> Program:
    """One operator in place of another one."""

    def change(graph: fx.Graph) -> None:
        nodes(graph, target)[-1].target = other

    return in_body(program, path, change, inner)


def dropped(program: Program, path: str, target: Any, number: int = 0, inner: str = "") -> Program:
    """An operator hands on its input."""

    def change(graph: fx.Graph) -> None:
        node = nodes(graph, target)[number]
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    return in_body(program, path, change, inner)


def inserted(program: Program, path: str, after: str, factor: float) -> Program:
    """The result of a module inside is multiplied by a number."""

    def change(graph: fx.Graph) -> None:
        node = nodes(graph, after)[0]
        with graph.inserting_after(node):
            new = graph.call_function(aten.mul.Tensor, (node, factor))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    return in_body(program, path, change)


def exchanged(program: Program, path: str, target: Any, number: int = 0) -> Program:
    """The first two arguments of an operator change places."""

    def change(graph: fx.Graph) -> None:
        node = nodes(graph, target)[number]
        first, second, *rest = node.args
        node.args = (second, first, *rest)

    return in_body(program, path, change)


def attention_scale(program: Program, path: str, factor: float) -> Program:
    """The scores are scaled by another number."""

    def change(graph: fx.Graph) -> None:
        node = nodes(graph, ops.attention)[0]
        node.kwargs = {**node.kwargs, "scale": node.kwargs["scale"] * factor}

    return in_body(program, path, change)


# weights


def ranks_exchanged(program: Program, name: str) -> Program:
    """The ranks hold each other's part of a weight."""
    spec = program.parameters[name]
    return program.with_(parameters={**program.parameters, name: replace(spec, ranges=spec.ranges[::-1])})


def other_tensor(program: Program, name: str, tensor: str) -> Program:
    """A weight is read from another tensor of the checkpoint."""
    spec = program.parameters[name]
    return program.with_(parameters={**program.parameters, name: replace(spec, expression=Tensor(tensor))})


def buffer_changed(program: Program, path: str, name: str) -> Program:
    """A constant of a body has other values."""
    body = program.modules[path]
    assert isinstance(body, Body)
    buffers = {**body.buffers, name: body.buffers[name] * 1.5}
    return program.with_(modules={**program.modules, path: replace(body, buffers=buffers)})


# written files


def spoil_tensor(root: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a tensor of a checkpoint in place."""
    path = root / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path, {"format": "pt"})


def spoil_text(path: Path, old: str, new: str, number: int = 0) -> None:
    """Replace one occurrence of `old` in a file."""
    parts = path.read_text().split(old)
    assert len(parts) > number + 1, f"{path} has no {old!r} number {number}"
    path.write_text(old.join(parts[: number + 1]) + new + old.join(parts[number + 1 :]))


def sign(root: Path) -> None:
    """Let the manifest agree with the files: they are wrong as they were written."""
    path = root / "rewrite.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in manifest["files"]}
    path.write_text(json.dumps(manifest))
    for weights in root.glob("runtime/*/weights.json"):
        text = weights.read_text()
        header = read_header(root / "model.safetensors")
        known = json.loads(text)
        known["files"]["model.safetensors"] = {"size": header.size, "header": header.sha256}
        weights.write_text(json.dumps(known))
        manifest["files"][weights.relative_to(root).as_posix()] = hashlib.sha256(weights.read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))
