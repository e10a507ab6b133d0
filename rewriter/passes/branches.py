"""Blocks that run in a branch beside the next block, where neither needs the other (Ladder Residual, Alg. 1)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from rewriter import ops
from rewriter.analysis.op_semantics import kind_of, starts_sum
from rewriter.analysis.residual import computes
from rewriter.ir import Module, reachable
from rewriter.ir.marks import in_stream, mark, marks, running_layer, stream_index


@dataclass
class _Stretch:
    """What a layer computes up to a reduction, and that reduction."""

    nodes: list[fx.Node]
    end: fx.Node


def put_in_branches(graph: fx.Graph, modules: Mapping[str, Module]) -> int:
    """Let blocks of a scheduled wiring run beside the next block of their layer; the number of such blocks.

    Such a block's reduction is waited for after the next block, which therefore does not need it. Its nodes up to the
    start get the mark `beside`. The two blocks share no value that one of them computes: a residual add that both need
    is there twice, with the same operands in the same order, so that no bit changes.
    """
    count = 0
    for layer, nodes in itertools.groupby(list(graph.nodes), key=running_layer):
        if layer is None:
            continue
        stretches, index = _stretches(list(nodes)), 0
        while index + 1 < len(stretches):
            block, following = stretches[index : index + 2]
            branch = _branch(block, following, modules)
            if branch:
                _separate(block, branch)
                count += 1
            index += 2 if branch else 1
    return count


def _stretches(nodes: Sequence[fx.Node]) -> list[_Stretch]:
    found: list[_Stretch] = []
    current: list[fx.Node] = []
    for node in nodes:
        if starts_sum(node):
            found.append(_Stretch(current, node))
            current = []
        else:
            current.append(node)
    return found


def _branch(block: _Stretch, following: _Stretch, modules: Mapping[str, Module]) -> list[fx.Node]:
    """The nodes of `block` that can run beside `following`, in order; none where it has to come before."""
    if block.end.target is not ops.all_reduce_start or not _works(following, modules):
        return []
    if any(user in following.nodes for user in block.end.users):  # the wait
        return []
    own = [n for n in block.nodes if kind_of(n) != "collective"]
    needed = reachable([block.end], lambda n: (s for s in n.all_input_nodes if s in own))
    branch = [n for n in own if n in needed]
    leaves = any(user not in branch and user is not block.end for n in branch if not in_stream(n) for user in n.users)
    return [] if leaves else branch


def _works(stretch: _Stretch, modules: Mapping[str, Module]) -> bool:
    return any(n.op == "call_module" and computes(modules[str(n.target)]) for n in stretch.nodes)


def _separate(block: _Stretch, branch: Sequence[fx.Node]) -> None:
    """Let the branch have residual adds of its own, and move what the layer goes on with after the start."""
    graph, own = block.end.graph, dict[fx.Node, fx.Node]()
    for node in branch:
        if in_stream(node):
            with graph.inserting_before(node):
                own[node] = graph.node_copy(node, lambda n: own.get(n, n))
            mark(own[node], stream=None, mode=None, reads=stream_index(node), beside=True)
        else:
            for value, copy in own.items():
                node.replace_input_with(value, copy)
            mark(node, beside=True)
    mark(block.end, beside=True)
    first = own.get(branch[0], branch[0])
    for node in block.nodes:
        if kind_of(node) == "collective":
            first.prepend(node)  # a wait that the branch needs: before it begins
    for node in reversed(block.nodes):
        if kind_of(node) != "collective" and not marks(node).beside:
            _put_off(node, block.end)


def _put_off(node: fx.Node, end: fx.Node) -> None:
    """Move `node` to its first reader in the layer, after `end`."""
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    readers = [n for n in node.users if running_layer(n) == running_layer(node)]
    if readers:
        min(readers, key=order.__getitem__).prepend(node)
    else:
        end.append(node)
