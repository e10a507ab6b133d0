"""Bodies as nn.Module classes of an emitted file: each distinct one once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from rewriter.common.errors import RewriterError
from rewriter.emit.module.keys import STORE_KEYS
from rewriter.emit.python_source import UniqueNames, assignment, attribute
from rewriter.emit.statements import body_lines
from rewriter.ir import Body, Leaf, Module, ops

_GROUP_OPS = frozenset({
    ops.copy_to_group, ops.all_reduce, ops.all_reduce_start, ops.all_gather, ops.vocab_embedding, ops.repeat_shard,
    ops.own_shard, ops.own_ranges,
})  # fmt: skip
MAX_BUFFER = 65536  # elements; a constant printed into source stays readable and loads fast


@dataclass(frozen=True)
class PrintedClass:
    """A printed class: `arguments` of its constructor in order, and whether its forward communicates."""

    name: str
    text: str
    arguments: tuple[str, ...]
    communicates: bool
    base: str = "nn.Module"


@dataclass
class ClassTable:
    """Prints bodies; equal texts share one class. Classes are in the order in which they must be defined."""

    names: UniqueNames = field(default_factory=UniqueNames)
    by_text: dict[str, PrintedClass] = field(default_factory=dict)
    by_body: dict[int, PrintedClass] = field(default_factory=dict)
    per_rank: set[int] = field(default_factory=set)  # ids of bodies whose input differs by rank
    stores: dict[int, Body] = field(default_factory=dict)  # by id of a body, what of it only stores keys and values
    keep: list[Body] = field(default_factory=list)  # ids in `by_body` stay valid while their bodies live

    def add(self, body: Body) -> PrintedClass:
        if id(body) in self.by_body:
            return self.by_body[id(body)]
        self.keep.append(body)
        for child in body.modules.values():
            if isinstance(child, Body):
                self.add(child)
        inner = [self.by_body[id(m)] for m in body.modules.values() if isinstance(m, Body)]
        own = any(n.target in _GROUP_OPS for n in body.graph.nodes) or bool(body.shared)
        leaves = [m for m in body.modules.values() if isinstance(m, Leaf)]
        needs_group = own or any("tp" in c.arguments for c in inner) or any(map(leaf_needs_group, leaves))
        cached = any(n.target in ops.CACHED for n in body.graph.nodes)
        communicates = any(c.communicates for c in inner) or any(n.target is ops.all_reduce for n in body.graph.nodes)
        sizes = _size_arguments(body)
        arguments = (*(["tp"] if needs_group else []), *(["slot"] if cached else []), *sizes)
        text = self._text(body, arguments, own, sizes)
        if text not in self.by_text:
            name = self.names.new(_title(body, id(body) in self.per_rank))
            base = "nn.ModuleList" if list_size("", _held(body)) else "nn.Module"
            self.by_text[text] = PrintedClass(name, text, arguments, communicates, base)
        self.by_body[id(body)] = self.by_text[text]
        return self.by_text[text]

    def construct(self, module: Module, slot: str = "slot") -> str:
        """The expression that builds `module`, inside a constructor that has `tp`; `slot` is its first cache entry."""
        if isinstance(module, Leaf):
            return leaf_constructor(module)
        assert isinstance(module, Body)
        cls = self.add(module)
        given = {"tp": "tp", "slot": slot} | {n: str(s) for n, s in _size_arguments(module).items()}
        return f"{cls.name}({', '.join(given[a] for a in cls.arguments)})"

    def _text(self, body: Body, arguments: tuple[str, ...], own_group: bool, sizes: Mapping[str, int]) -> str:
        items = f"nn.Module() for _ in range({length})" if (length := list_size("", _held(body))) else ""
        lines = [f"    def __init__(self{''.join(f', {a}' for a in arguments)}):", f"        super().__init__({items})"]
        if own_group:
            lines.append("        self.tp = tp")
        if "slot" in arguments:
            lines.append("        self.slot = slot")
        lines += [f"        {line}" for line in containers(_held(body), body.parameters)]
        for name, module in body.modules.items():
            lines.append(f"        {assignment(name, self.construct(module))}")
        for name, shape in body.parameters.items():
            size = name if name in sizes else ", ".join(map(str, shape)) or "()"
            if name not in body.stored:
                lines.append(f"        {assignment(name, f'nn.Parameter(torch.empty({size}))')}")
                continue
            dtype = body.stored[name]
            made = f"torch.empty({size}{f', dtype={dtype}' if dtype else ''})"
            lines.append(f"        {registered(name, made)}")
        if keeps := [name for name in body.parameters if body.stored.get(name)]:
            lines.append(f"        self.keeps_dtype = {tuple(keeps)!r}")
        for name, value in body.buffers.items():
            lines.append(f"        {registered(name, f'{tensor_literal(name, value)}, persistent=False')}")
        for name, rows in body.shared.items():
            lines.append(f"        {attribute(name)}_shared = {shared_rows(*rows)}")

        def tensor(name: str) -> str:
            own = attribute(name)
            return f"shared_gradient({own}, {own}_shared)" if name in body.shared else own

        parameters, forward = body_lines(body, tensor)
        lines += ["", f"    def forward({', '.join(['self', *parameters])}):", *(f"        {line}" for line in forward)]
        if id(body) in self.stores:
            parameters, stored = body_lines(self.stores[id(body)], tensor)
            lines += ["", f"    def {STORE_KEYS}({', '.join(['self', *parameters])}):"]
            lines += [f"        {line}" for line in stored]
        return "\n".join(lines)

    def source(self) -> str:
        return "\n\n\n".join(f"class {c.name}({c.base}):\n{c.text}" for c in self.by_text.values())


def registered(name: str, value: str) -> str:
    """The statement that makes `value` the buffer `name`, which may be one of a module inside."""
    owner, _, last = name.rpartition(".")
    return f'{attribute(owner) if owner else "self"}.register_buffer("{last}", {value})'


def _size_arguments(body: Body) -> dict[str, int]:
    """A norm of another width is the same class: its one-dimensional parameters are constructor arguments."""
    if body.modules or any(len(s) != 1 or not name.isidentifier() for name, s in body.parameters.items()):
        return {}
    return {name: shape[0] for name, shape in body.parameters.items()}


def _title(body: Body, per_rank: bool) -> str:
    kinds = {n.kwargs["mask"].kind for n in body.graph.nodes if n.target is ops.attention}
    kind = next(iter(kinds)) if len(kinds) == 1 else "causal"
    return ("PerRank" if per_rank else "") + body.class_name + ("" if kind == "causal" else kind.capitalize())


def _held(body: Body) -> list[str]:
    """The paths of all that a body holds itself."""
    return [*body.modules, *body.parameters, *body.buffers]


def list_size(prefix: str, paths: Collection[str]) -> int:
    """The length of the list at `prefix` whose items, by numbers, are on `paths`; 0 where it is no list."""
    start = f"{prefix}." if prefix else ""
    parts = {path.removeprefix(start).partition(".")[0] for path in paths if path.startswith(start)}
    numbers = [int(part) for part in parts if part.isdecimal()]
    if numbers and len(numbers) < len(parts):
        raise RewriterError(f"{prefix or 'a module'} holds {sorted(parts)}: numbers beside names cannot be printed")
    return max(numbers, default=-1) + 1


def containers(paths: Collection[str], parameters: Collection[str] = ()) -> list[str]:
    """Statements that make the modules through which dotted paths go, lists among them; `parameters` are tensors."""
    made: dict[str, str] = {}
    for path in paths:
        parts = path.split(".")[:-1]
        for i in range(len(parts)):
            prefix = ".".join(parts[: i + 1])
            if prefix in paths or prefix in made:
                continue
            size = list_size(prefix, paths)
            item = "ParameterList(torch.empty(0)" if f"{prefix}.0" in parameters else "ModuleList(nn.Module()"
            of = f"nn.{item} for _ in range({size}))" if size else "nn.Module()"
            if size or not parts[i].isdecimal():  # the items of a list are there already
                made[prefix] = of
    return [assignment(prefix, of) for prefix, of in made.items()]


def tensor_literal(name: str, value: torch.Tensor) -> str:
    if value.numel() > MAX_BUFFER:
        raise RewriterError(
            f"constant {name} has {value.numel()} elements, more than {MAX_BUFFER}: it cannot be printed"
        )
    numbers = re.sub(r"-?\b(?:inf|nan)\b", lambda match: f'float("{match[0]}")', repr(value.tolist()))
    return f"torch.tensor({numbers}, dtype={value.dtype})"


def shared_rows(size: int, ranges: tuple[tuple[tuple[int, int], ...], ...]) -> str:
    """The `Shared` of this rank: which rows of the full parameter it holds."""
    count, starts = ranges[0][0][1] - ranges[0][0][0], [r[0][0] for r in ranges]
    if all(r == ((a, a + count),) for r, a in zip(ranges, starts, strict=True)):
        return f"Shared.run({size}, {count}, {starts}, tp)"
    return f"Shared.rows_of({size}, {ranges}, tp)"


def leaf_needs_group(leaf: Leaf) -> bool:
    parallel = leaf.kind.startswith(("RowParallel", "VocabParallel"))
    return parallel or "shared" in leaf.options or "entered" in leaf.options


def leaf_constructor(leaf: Leaf) -> str:
    """The expression by which an emitted file builds a leaf; the group is called `tp`.

    `entered` leaves are replicated, and each rank has another input.
    """
    o = leaf.options
    if o.get("entered"):
        if leaf.kind not in ("Linear", "Conv1D", "LayerNorm"):
            raise RewriterError(f"no constructor for a module of kind {leaf.kind} whose input differs by rank")
        plain = leaf_constructor(replace(leaf, options={k: v for k, v in o.items() if k != "entered"}))
        return f"PerRank{plain.removeprefix('nn.').removesuffix(')')}, group=tp)"
    if leaf.kind.endswith("Linear") or leaf.kind.endswith("Conv1D"):
        sizes = (o["in_features"], o["out_features"]) if leaf.kind.endswith("Linear") else (o["nx"], o["nf"])
        extra = f", bias={'bias' in leaf.parameters}"
        if leaf.kind.startswith("RowParallel"):
            extra += ", group=tp" + (", bias_share=True" if o.get("bias_share") else "")
        if "shared" in o:
            extra += f", shared={shared_rows(*o['shared'])}"
        prefix = "nn." if leaf.kind == "Linear" else ""
        return f"{prefix}{leaf.kind}({sizes[0]}, {sizes[1]}{extra})"
    if leaf.kind.endswith("Embedding"):
        padding = f", padding_idx={o['padding_idx']}" if "padding_idx" in o else ""
        prefix = "nn." if leaf.kind == "Embedding" else ""
        group = ", group=tp" if leaf.kind == "VocabParallelEmbedding" else ""
        return f"{prefix}{leaf.kind}({o['num_embeddings']}, {o['embedding_dim']}{padding}{group})"
    if leaf.kind == "LayerNorm":
        return f"nn.LayerNorm({o['normalized_shape']}, eps={o['eps']})"
    raise RewriterError(f"no constructor for a module of kind {leaf.kind}")
