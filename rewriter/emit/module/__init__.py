"""Program → runtime/<mesh>/module.py: the sharded model as code that a person reviews.

One class per distinct body and per distinct layer, equal layers in one loop. Needs torch and `rewriter.runtime` only.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Mapping

from torch import fx

from rewriter.common.errors import RewriterError
from rewriter.emit.files.weights import kept_in_fp32
from rewriter.emit.module.classes import ClassTable, containers
from rewriter.emit.module.keys import keys_alone
from rewriter.emit.module.layers import RuntimeLayer, RuntimeLayerPrinter
from rewriter.emit.module.wiring import Wiring, previous
from rewriter.emit.node_code import NodePrinter
from rewriter.emit.python_source import UniqueNames, assignment, attribute, broken, literal
from rewriter.emit.statements import StatementPrinter
from rewriter.ir import Body, Opaque, Program, args_of, ops, parameters_of, walk_modules
from rewriter.ir.absolute_positions import counts_tokens
from rewriter.ir.marks import in_stream
from rewriter.ir.phases import has_both_phases, prompt_phase
from rewriter.ir.row_positions import RowPositions
from rewriter.ir.schedule import with_readers_first
from rewriter.ir.structure import is_dropout, without_dropout
from rewriter.passes.phases import both_wirings, exact_wiring
from rewriter.passes.sequence.sequence_plans import sequence_plan
from rewriter.weights.checkpoint import TORCH_DTYPES


def emit_runtime_module(program: Program) -> str:
    """The source of module.py for `program`, whose class `Model(mesh)` is a `rewriter.runtime.RuntimeModel`.

    Where passes rewire tokens of the prompt alone, layers have methods for tokens of both phases (`forward`, which
    training calls), for rewired and for exact ones, over the same modules, and one for the keys of rewired tokens.

    Raises RewriterError for what cannot be printed.
    """
    for path, module in program.modules.items():
        if isinstance(module, Opaque):
            raise _not_held(f"{path} is {module}")
    return _Emitter(program).source()


def _require_held(program: Program) -> None:
    if (kept := program.source.own_cache) is not None:
        raise _not_held(f"the model keeps keys and values by {kept}, a class of its own, which may forget some")
    if (where := counts_tokens(program)) is not None:
        raise _not_held(f"{where}, from 0, which is right without a key/value cache only")
    inside = [module.graph for _, module in walk_modules(program.modules) if isinstance(module, Body)]
    if any(node.target is ops.additive_mask for graph in (program.graph, *inside) for node in graph.nodes):
        raise _not_held("the model computes with its mask outside of attention, such as for ALiBi")


def _not_held(what: str) -> RewriterError:
    return RewriterError(
        f"{what}. The sharded runtime module cannot hold it yet, and no output is written without one. `rewrite "
        "inspect` and `rewrite predict` show what the recipe would do"
    )


class _Emitter:
    def __init__(self, program: Program) -> None:
        self.program, self.source_info = program, program.source
        self.plan, self.phase = sequence_plan(program), prompt_phase(program)
        names = UniqueNames({"Model", "nn", "F", "torch"})
        self.table = ClassTable(names=names)
        programs = {"": program}
        if self.phase is not None:
            programs = {"": both_wirings(program), "rewired": program, "exact": exact_wiring(program)}
        # one object for modules that are alike, which their wirings made more than once
        modules = {path: module for one in reversed(programs.values()) for path, module in one.modules.items()}
        numbered = RowPositions()
        programs = {name: numbered.program(one.with_(modules=modules)) for name, one in programs.items()}
        for one in programs.values():
            _require_held(one)
        modules = {path: module for one in reversed(programs.values()) for path, module in one.modules.items()}
        self.program = program.with_(modules=modules)
        # a program that was not split still has its dropout
        ready = {
            name: one.with_(modules=modules, graph=with_readers_first(without_dropout(one), copies=True))
            for name, one in programs.items()
        }
        self.wirings = {name: Wiring(one, self.table) for name, one in ready.items()}
        self.partial: dict[str, Wiring] = {}
        if self.phase is not None:
            keys, self.table.stores = keys_alone(ready["rewired"])
            self.partial["keys"] = Wiring(keys, self.table)
        self.printer = RuntimeLayerPrinter(self.wirings, self.partial, self.table, names)

    def source(self) -> str:
        layers, classes = self.printer.run()
        model = self._model(layers)
        parts = [p for p in (self.table.source(), classes, model) if p]
        code = broken("\n\n\n".join(parts)) + "\n"
        return f'"""{self._header()}"""\n\n{imports(code)}\n\n\n{code}'

    def _header(self) -> str:
        axes = {axis: f"{axis}={size}" for axis, size in self.program.mesh.items()}
        if self.plan is not None:
            axes["sp"] += f" ({self.plan})"
        mesh = " × ".join(axes.values()) or "one device"
        passes = ", ".join(r.name for r in self.program.history) or "none"
        paragraphs = [
            f"{self.source_info.architecture} on {mesh}. Generated by rewriter; passes: {passes}.",
            "Model(mesh)(input_ids_BS) returns logits [B, S, vocabulary] on every rank: the base class fills in "
            f"positions and context, then calls {'compute' if self.phase is None else 'one of compute_*'}. "
            "Sizes are this rank's, names the Hugging Face model's.",
        ]
        if self.plan is not None:
            paragraphs.append(
                "Every rank gets the full sequences. Between shard_tokens and gather_tokens it computes on its own "
                "tokens only. Attention finds the keys and values of the others by ctx."
            )
        if self.phase is not None:
            paragraphs.append(
                f"The passes rewire {self.phase}; all other tokens are exact. compute_rewired and compute_exact are "
                "for tokens of one phase, compute_mixed is for both, and compute_keys leaves keys and values of "
                "rewired tokens in the cache, without logits. By default rows without earlier tokens are prompts, and "
                "tokens after others exact; ctx.rewired says otherwise."
            )
        return "\n\n".join(textwrap.fill(p, 116, break_on_hyphens=False) for p in paragraphs) + "\n"

    # --- the model ---

    def _model(self, layers: list[RuntimeLayer]) -> str:
        inside = f"{self.source_info.layers}."
        outside = {p: m for p, m in self.program.modules.items() if not p.startswith(inside) and not is_dropout(m)}
        paths = {p: p.replace("#", "_variant_") for p in outside}
        dropout = max(
            m.dropout if isinstance(m, Body) else m.options.get("p", 0.0)
            for m in self.program.modules.values()
            if not isinstance(m, Opaque)
        )
        traced = (self.program.origin or self.program).graph.nodes  # tensor_parallel leaves dropout out
        dropout = max([dropout, *(args_of(n)[1] for n in traced if n.target is ops.dropout)])
        lines = ["class Model(RuntimeModel):", f"    slots = ({_folded(self.printer.slot_specs)})"]
        if dropout:
            lines.append(f"    dropout_probability = {dropout}")
        if self.phase is not None:
            lines.append(f"    phase = {self.phase!r}")
        if self.source_info.by_length:
            lines.append("    by_length = True  # rotary frequencies depend on the length of a call")
        if self.source_info.renewed_after is not None:
            lines.append(f"    renewed_after = {self.source_info.renewed_after}  # tokens: keys have other ones beyond")
        if in_fp32 := self._in_fp32():
            lines.append(f"    in_fp32 = {literal(in_fp32)}  # as transformers keeps them, by the model's dtype")
        lines += ["", "    def __init__(self, mesh=None):", "        super().__init__(mesh)"]
        made = [f"        {line}" for line in containers([*paths.values(), self.source_info.layers])]
        for path, module in outside.items():
            made.append(f"        {assignment(paths[path], self.table.construct(module))}")
        made += [f"        self.{self.source_info.layers} = nn.ModuleList(", *self._list(layers), "        )"]
        named = "tp = " if any(re.search(r"(?<![\w.])tp\b", line) for line in made) else ""
        lines.append(f'        {named}self.tp = None if mesh is None else mesh.get_group("tp")')
        if self.plan is not None:
            lines.append(f"        self.sequence = SequenceAxis(mesh, {_plan(self.plan)})")
        lines += made
        held = {f"{path}.{name}" for path, m in self.program.modules.items() for name, _ in parameters_of(m)}
        for alias, canonical in self.program.ties.items():
            if canonical in held:
                lines.append(f"        {assignment(alias, attribute(canonical))}")
            else:  # a parameter that no module of the graph holds has the one that does, which is its alias
                lines.append(f"        {assignment(canonical, attribute(alias))}")
        for method, wiring in {**self.wirings, **self.partial}.items():
            mixed, inputs = has_both_phases(wiring.program), ["input_ids", "position_ids"]
            name = f"compute_{'mixed' if mixed else method}".rstrip("_")
            inputs += ["rewired"] * mixed + ["ctx"]
            inputs += ["logits_to_keep=0", "gather=True"] if method in self.wirings else []
            lines += ["", f"    def {name}(self, {', '.join(inputs)}):"]
            lines += [f"        {line}" for line in self._compute(method, wiring, layers, paths)]
        return "\n".join(lines)

    def _in_fp32(self) -> dict[str, tuple[str, ...]]:
        """Parameters that are fp32 in a model of another dtype, by that dtype; * stands for the number of a layer."""
        by_dtype = {}
        for dtype in ("BF16", "F16"):
            names = [name for name in self.program.parameters if kept_in_fp32(self.program, dtype, name)]
            if names:
                alike = {re.sub(r"\.\d+\.", ".*.", name): None for name in names}
                by_dtype[TORCH_DTYPES[dtype]] = tuple(alike)
        return by_dtype

    def _list(self, layers: list[RuntimeLayer]) -> list[str]:
        """The layers, runs of equal ones as comprehensions."""
        lines, i = ["            ["], 0
        step = self._slot_step(layers)
        for _, run in itertools.groupby(layers, key=lambda layer: layer.cls):
            alike = list(run)
            if step is None or len(alike) == 1:
                lines += [f"                {layer.construct}," for layer in alike]
            else:
                text = re.sub(r"slot=\d+", "slot=i" if step == 1 else f"slot=i * {step}", alike[0].construct)
                lines.append(f"                *[{text} for i in range({f'{i}, ' if i else ''}{i + len(alike)})],")
            i += len(alike)
        return [*lines, "            ]"]

    def _slot_step(self, layers: list[RuntimeLayer]) -> int | None:
        """Slots per layer when layer i begins at slot i · step; None when layers differ."""
        slots = [re.search(r"slot=(\d+)", layer.construct) for layer in layers]
        if any(m is None for m in slots):
            return None
        numbers = [int(m.group(1)) for m in slots if m]
        step = numbers[1] if len(numbers) > 1 else 1
        return step if numbers == [i * step for i in range(len(numbers))] else None

    def _compute(self, method: str, wiring: Wiring, layers: list[RuntimeLayer], paths: Mapping[str, str]) -> list[str]:
        """The lines of the model's method that computes by `wiring`, by the layers' entries of `method`."""

        def module(path: str) -> str:
            return attribute(paths.get(path, path))

        env: dict[fx.Node, str] = {n: str(n.target) for n in wiring.program.graph.nodes if n.op == "placeholder"}
        outline = wiring.outline
        used_later = {n for r in outline.layers for n in r.inputs} | {
            s for n in outline.after for s in n.all_input_nodes
        }
        before = outline.before
        keep: dict[fx.Node, str | None] = {n: None for n in before if n in used_later}

        entries = [layer.calls[method].entry for layer in layers]
        crossing = {name for entry in entries for name in wiring.names_of(entry.gives).values()}

        def role(node: fx.Node) -> str:
            name = "x" if in_stream(node) else wiring.roles.in_context(node)
            return f"outer_{name}" if name in crossing and not in_stream(node) else name

        first = StatementPrinter(before, env, keep, role, module)
        first.run()
        lines, env = first.text, first.env
        calls = []
        for index, (layer, entry, region) in enumerate(zip(layers, entries, outline.layers, strict=True)):
            taken = ", ".join([*map(previous, entry.reads), *(env[n] for n in entry.takes)])
            env |= wiring.names_of(entry.gives)
            if not region.nodes:  # nothing of it is needed
                continue
            given = f"{', '.join(env[n] for n in entry.gives)} = " if entry.gives else ""
            called = f".{name}" if (name := layer.calls[method].method) else ""
            calls.append((index, layer.cls.name, entry.reads, f"{given}{{}}{called}({taken})"))
        lines += _loops(calls, f"self.{self.source_info.layers}")
        result = args_of(wiring.program.graph.output_node())[0]
        if not isinstance(result, fx.Node):
            return lines
        head = _head(wiring)
        gathered = result if result.target is ops.gather_tokens else None
        result = result if gathered is None else args_of(gathered)[0]
        tail = [n for n in outline.after if n is not gathered]
        last = StatementPrinter(
            tail,
            {s: env[s] for n in tail for s in n.all_input_nodes if s in env},
            {result: "logits"},
            wiring.roles.of,
            module,
            inline=False,
        )
        for node in tail:
            if node is head:
                last.text.append(self._last_tokens(last.env[node.all_input_nodes[0]]))
            if node not in last.env:
                last.one(node)
        if head is None:
            last.text.append(self._last_tokens(last.env[result]))
        returned = last.env[result]
        if gathered is not None:
            text = NodePrinter(last.env.__getitem__, module).expression(gathered)
            returned = f"{text} if gather else {returned}"
        return [*lines, *last.text, f"return {returned}"]

    def _last_tokens(self, name: str) -> str:
        wanted = f"{name}[:, -logits_to_keep:]" if self.plan is None else f"last_tokens({name}, logits_to_keep, ctx)"
        return f"{name} = {wanted}  # 0 keeps all"


def _head(wiring: Wiring) -> fx.Node | None:
    """The first node after the layers that leads to the head alone: only the wanted tokens need to pass it."""
    last = next((n for n in reversed(wiring.outline.after) if n.op == "call_module"), None)
    if last is None:
        return None
    entered = last.all_input_nodes[0]
    return entered if entered.target is ops.copy_to_group else last


def _plan(plan: ops.SequencePlan) -> str:
    overlap = ", overlap=True" if plan.overlap else ""
    keys = "" if plan.quantized is None else f', quantized="{plan.quantized}", min_bytes={plan.min_bytes}'
    return f'SequencePlan("{plan.kind}", {plan.grid}{overlap}{keys})'


def _folded(items: list[str]) -> str:
    """A tuple of specs, runs written as products."""
    runs = [(item, len(list(run))) for item, run in itertools.groupby(items)]
    parts = [item if count == 1 else f"*[{item}] * {count}" for item, count in runs]
    return ", ".join(parts) + ("," if len(parts) == 1 else "")


def _loops(calls: list[tuple[int, str, tuple[int, ...], str]], layers: str) -> list[str]:
    """Calls of layers (number, class, which layers before it calls, text); equal ones that follow each other in a
    loop."""
    lines = []
    for _, run in itertools.groupby(enumerate(calls), lambda item: (item[1][0] - item[0], *item[1][1:])):
        alike = [call for _, call in run]
        i, _, reads, text = alike[0]
        j = i + len(alike)
        if reads:
            names = ", ".join([*map(previous, reads), "layer"])
            slices = ", ".join(f"{layers}[{i - before}:{j - before}]" for before in (*reads, 0))
            lines.append(f"for {names} in zip({slices}, strict=True):")
        elif j - i > 1:
            lines.append(f"for layer in {layers}[{i}:{j}]:")
        inside = bool(reads) or j - i > 1
        lines.append(f"    {text.format('layer')}" if inside else text.format(f"{layers}[{i}]"))
    return lines


_RUNTIME_NAMES = (
    "ColumnParallelConv1D", "ColumnParallelLinear", "Conv1D", "MaskSpec", "OffloadedEmbedding", "PerRankConv1D",
    "PerRankLayerNorm", "PerRankLinear", "PromptPhase", "RowParallelConv1D", "RowParallelLinear", "RuntimeModel",
    "SequenceAxis", "SequencePlan", "Shared", "SlotSpec", "StateSpec", "VocabParallelEmbedding", "agreed", "all_gather",
    "all_reduce", "all_reduce_start", "all_reduce_wait", "attention", "block_starts", "causal_conv", "copy_to_group",
    "delta_rule", "experts", "fork", "gather_tokens", "last_tokens", "linear_scan", "own_ranges", "own_shard",
    "pool_blocks", "preceded", "remember", "remember_blocks", "repeat_shard", "selective_scan", "shard_tokens",
    "shared_gradient", "state_space", "store_keys", "top_keys", "vocab_embedding",
)  # fmt: skip


def imports(code: str) -> str:
    """The import block of an emitted module: what its code names, no more."""
    used = [n for n in _RUNTIME_NAMES if re.search(rf"(?<![\w.]){n}\b", code)]
    lines = ["import torch"] if re.search(r"(?<![\w.])torch\.", code) else []
    if re.search(r"(?<![\w.])F\.", code):
        lines.append("import torch.nn.functional as F")
    lines += ["from torch import nn", "", "from rewriter.runtime import ("]
    return "\n".join([*lines, *(f"    {n}," for n in used), ")"])
