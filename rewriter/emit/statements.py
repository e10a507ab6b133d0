"""A graph as the lines of a function: short single-use expressions are inlined, everything else gets a name."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from rewriter.emit.node_code import NodePrinter, is_effect, is_infix
from rewriter.emit.python_source import UniqueNames, attribute, free_name, identifier
from rewriter.ir import Body, args_of, ops
from rewriter.ir.marks import marks
from rewriter.ir.op_semantics import function_of, is_movement, kind_of

aten = torch.ops.aten


_NEVER_INLINED = frozenset({
    ops.experts, ops.all_reduce, ops.all_reduce_start, ops.all_reduce_wait, ops.all_gather,
    ops.copy_to_group, ops.shard_tokens, ops.gather_tokens, ops.block_starts, ops.top_keys, *ops.CACHED,
})  # fmt: skip


class StatementPrinter:
    """Prints nodes in order into `text`.

    `env` names values; it holds the inputs at first and every printed node afterwards. A name is used again when the
    value that had it is not needed any more. `keep` are nodes whose names must survive to the end, with the names
    they must have (None: any). `role` proposes a name.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        env: dict[fx.Node, str],
        keep: dict[fx.Node, str | None],
        role: Callable[[fx.Node], str],
        module: Callable[[str], str] = attribute,
        attribute: Callable[[str], str] = attribute,
        inline: bool = True,
    ) -> None:
        self.nodes, self.env, self.keep, self.role, self.inline = nodes, env, keep, role, inline
        self.text: list[str] = []
        self.printer = NodePrinter(self._read, module, attribute)
        self.members = set(nodes)
        self.position = {n: i for i, n in enumerate(nodes)}
        self.inlined: dict[fx.Node, str] = {}
        self.last_use = {n: self._last_use(n) for n in (*env, *nodes)}
        self.owner: dict[str, fx.Node] = {name: node for node, name in env.items()}

    def _last_use(self, node: fx.Node) -> int:
        if node in self.keep:
            return len(self.nodes)
        return max((self.position[u] for u in node.users if u in self.members), default=-1)

    def _read(self, node: fx.Node) -> str:
        return self.inlined[node] if node in self.inlined else self.env[node]

    def run(self) -> None:
        """Print all nodes."""
        for node in self.nodes:
            if node in self.env or node in self.inlined:
                continue
            self.one(node)

    def one(self, node: fx.Node) -> None:
        """Print one node."""
        text = self.printer.expression(node)
        if node.op == "get_attr" or (node not in self.keep and self._inlined(node, text)):
            self.inlined[node] = text
            # an inlined expression reads its inputs where it stands, so they live until then
            user = next(iter(node.users), None)
            if user in self.position:
                for source in node.all_input_nodes:
                    self._extend(source, self.position[user])
            return
        if is_effect(node):
            self.text.append(text)
            return
        if (pieces := _unpacked(node)) is not None:
            names = [self._bind(p, node) if p else "_" for p in pieces]
            self.text.append(f"{', '.join(names)} = {text}")
            return
        self.text.append(f"{self._bind(node, node)} = {text}")

    def _inlined(self, node: fx.Node, text: str) -> bool:
        if self.inline:
            return may_inline(node, text)
        # what enters this rank's own sum stands in the sum
        user = next(iter(node.users), None)
        return node.target is ops.copy_to_group and len(node.users) == 1 and user in self.members and is_infix(user)

    def _extend(self, node: fx.Node, position: int) -> None:
        self.last_use[node] = max(self.last_use.get(node, -1), position)
        if node in self.inlined:
            for source in node.all_input_nodes:
                self._extend(source, position)

    def _bind(self, node: fx.Node, at: fx.Node) -> str:
        """Give `node` a name: the one demanded, or its role's, reused where the old value is dead."""
        wanted = identifier(self.keep.get(node) or self.role(node))
        name = free_name(wanted, lambda name: self._is_taken(name, self.position[at]))
        self.env[node], self.owner[name] = name, node
        return name

    def _is_taken(self, name: str, position: int) -> bool:
        owner = self.owner.get(name)
        return (
            name in _RESERVED
            or name.startswith("previous")
            or (owner is not None and self.last_use.get(owner, -1) > position)
        )


_RESERVED = frozenset({"self", "torch", "F", "nn", "layer", "logits_to_keep", "gather"})


def _unpacked(node: fx.Node) -> list[fx.Node | None] | None:
    """The getitems of a multi-output node by index, when it has no other users."""
    users = list(node.users)
    if not users or not all(u.target is operator.getitem and isinstance(args_of(u)[1], int) for u in users):
        return None
    value, call = node.meta.get("val"), marks(node).python
    if call is not None and isinstance(call.index, tuple):
        value = call.index  # one per result, of which a rewritten wiring may read some alone
    count = len(value) if isinstance(value, (tuple, list)) else max(args_of(u)[1] for u in users) + 1
    pieces: list[fx.Node | None] = [None] * count
    for user in users:
        index = args_of(user)[1]
        if not isinstance(index, int) or pieces[index] is not None:
            return None
        pieces[index] = user
    return pieces


def body_lines(body: Body, attribute: Callable[[str], str]) -> tuple[list[str], list[str]]:
    """(parameter names, lines of forward) of a body's graph."""
    names = UniqueNames(_RESERVED)
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    env = {node: names.new(str(node.target)) for node in inputs}
    parameters = list(env.values())
    nodes = [n for n in body.graph.nodes if n.op not in ("placeholder", "output")]
    output = body.graph.output_node()
    results = output.all_input_nodes
    lines = StatementPrinter(nodes, env, dict.fromkeys(results), _Names(body).of, attribute=attribute)
    lines.run()
    value = args_of(output)[0]
    values = [value] if isinstance(value, fx.Node) else value
    return parameters, returning(lines.text, ", ".join(map(lines.printer.value, values)))


# names of operands
_OPERANDS: dict[Any, tuple[str, ...]] = {
    ops.attention: ("q", "k", "v"),
    ops.delta_rule: ("q", "k", "v", "g", "beta"),
    ops.state_space: ("x", "dt", "A", "B", "C"),
    ops.selective_scan: ("x", "dt", "A", "B", "C", "D", "z"),
}


def _operands(graph: fx.Graph) -> dict[fx.Node, str]:
    """The pieces of a fused projection that become operands of attention or of a recurrence, by their names there."""
    named: dict[fx.Node, str] = {}
    for node in [n for n in graph.nodes if n.target in _OPERANDS]:
        for role, operand in zip(_OPERANDS[node.target], args_of(node), strict=False):
            while isinstance(operand, fx.Node) and operand.op == "call_function" and operand.all_input_nodes:
                if operand.target is operator.getitem:
                    named.setdefault(operand, role)
                    break
                operand = operand.all_input_nodes[0]
    return named


def returning(lines: Sequence[str], results: str) -> list[str]:
    """`lines` and the return of `results`, which are not named first where the last line computes just them; without
    `results` no return."""
    if not results:
        return list(lines)
    last = lines[-1] if lines else ""
    if last.startswith(f"{results} = "):
        return [*lines[:-1], f"return {last.removeprefix(f'{results} = ')}"]
    return [*lines, f"return {results}"]


def last_name(path: str) -> str:
    """The last name of a module's path; of one in a list, the list's with its number."""
    owner, _, name = path.rpartition(".")
    return f"{owner.rpartition('.')[2]}_{name}" if name.isdecimal() else name


# values of another kind than what they are computed from, by the name of the operator
_COMPUTED = {
    "sum": "total", "max": "largest", "amax": "largest", "pow": "power", "linear": "projected", "matmul": "product",
    "bmm": "product", "experts": "expert_output", "embedding": "embedded", "vocab_embedding": "embedded",
    "causal_conv": "convolved", "delta_rule": "mixed", "state_space": "mixed", "selective_scan": "mixed",
    "linear_scan": "mixed", "top_keys": "chosen", "pool_blocks": "pooled", "remember_blocks": "entries",
    "block_starts": "starts", "conv1d": "convolved", "preceded": "with_earlier",
    **{name: name for name in ("cos", "sin", "exp", "sqrt", "rsqrt", "mean", "softmax", "sigmoid", "cumsum")},
}  # fmt: skip
_SEVERAL = {"topk": ("top_values", "top_indices"), "sort": ("sorted_values", "order"), "max": ("largest", "place")}


class _Names:
    """Names of the values of a body."""

    def __init__(self, body: Body) -> None:
        self.modules, self.operands = body.modules, _operands(body.graph)

    def of(self, node: fx.Node) -> str:
        """A projection's name without its suffix; the operator's where it gives a value of another kind; else the name
        of what is moved, scaled or added to."""
        if (role := marks(node).role or self.operands.get(node)) is not None:
            return role
        if node.op == "call_module":
            return last_name(str(node.target)).removesuffix("_proj")
        if node.op in ("placeholder", "get_attr"):
            return str(node.target).rpartition(".")[2]
        if node.target is aten.sym_size.int:
            return {0: "batch", 1: "length"}.get(args_of(node)[1], "size")
        if node.target is ops.attention:
            return "attended"
        if node.target is operator.getitem and isinstance(args_of(node)[0], fx.Node):
            return self._of_item(*args_of(node)[:2])
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        name = _operator_name(node)
        if name in ("mul", "matmul", "bmm") and len(tensors) == 2 and (counted := next(filter(_counts, tensors), None)):
            return f"scaled_{self.of(counted).removeprefix('scaled_')}"
        if name in _COMPUTED:
            return _COMPUTED[name]
        tensors = tensors[1:] if function_of(node) == "where" and len(tensors) > 1 else tensors
        tensors = [n for n in tensors if n.op != "get_attr"] or tensors
        return self.of(tensors[0]) if tensors else "size"

    def _of_item(self, source: fx.Node, index: Any) -> str:
        """One of several results: a module's are named as they are inside of it."""
        child = self.modules.get(str(source.target)) if source.op == "call_module" else None
        if isinstance(child, Body):
            return _Names(child).of(args_of(child.graph.output_node())[0][index])
        named = _SEVERAL.get(_operator_name(source))
        return self.of(source) if named is None else named[index]


def _operator_name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", ""))


def _counts(node: fx.Node) -> bool:
    """True if a value holds integers (positions), cast or moved."""
    while is_movement(node) or kind_of(node) in ("cast", "view"):
        node = node.all_input_nodes[0]
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


def may_inline(node: fx.Node, text: str) -> bool:
    """True if a node's expression may stand where its one use is, without changing the order of module calls."""
    if node.op not in ("call_function", "call_method") or node.target in _NEVER_INLINED or len(node.users) != 1:
        return False
    user = next(iter(node.users))
    if user.op == "output" or user.target is operator.getitem:
        return False
    uses: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), lambda n: uses.append(n) or n)  # type: ignore[func-returns-value]
    return uses.count(node) == 1 and len(text) < (48 if is_infix(node) else 60)
