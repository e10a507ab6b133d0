"""Two programs beside each other: the effect of each pass on the IR, the reads and communication of each layer."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from rewriter.common.errors import RewriterError
from rewriter.explain.diff.differences import LayerDifference, PassDifference
from rewriter.ir import PassRecord, Program, nodes_inside
from rewriter.ir.layer_plan import LayerGroup, layer_plans, relative
from rewriter.ir.residual import residual_blocks

_CONTEXT = 2
Step = tuple[PassRecord, Program, Program]
"""(pass, program before it, program after it)."""


def _steps(program: Program) -> Iterator[Step]:
    """Every pass of a program, applied again to the program as traced."""
    origin = program.origin or program
    before = origin.with_(mesh=program.mesh, origin=origin) if program.mesh else origin
    for entry in program.history:
        after = entry.rewrite.apply(before)
        yield entry, before, after
        before = after


def passes_of(program: Program) -> list[PassDifference]:
    """The effect of every pass on the IR."""
    return [_alone(step, "both") for step in _steps(program)]


def passes_between(ours: Program, theirs: Program, names: tuple[str, str]) -> list[PassDifference]:
    """The passes of two programs in order: those of both that differ in their options or results, those of one."""
    left, right = list(_steps(ours)), list(_steps(theirs))
    differences: list[PassDifference] = []
    matcher = difflib.SequenceMatcher(None, [e.name for e, *_ in left], [e.name for e, *_ in right], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            differences += [_beside(a, b, names) for a, b in zip(left[i1:i2], right[j1:j2], strict=True)]
        else:
            differences += [_alone(step, names[0]) for step in left[i1:i2]]
            differences += [_alone(step, names[1]) for step in right[j1:j2]]
    return differences


def _beside(ours: Step, theirs: Step, names: tuple[str, str]) -> PassDifference:
    a, b = ours[0], theirs[0]
    options = "" if a.arguments() == b.arguments() else f"{a.arguments() or '–'} | {b.arguments() or '–'}"
    summary = a.summary if a.summary == b.summary else f"{a.summary} | {b.summary}"
    return replace(_difference(a, "both", ours[2], theirs[2], names), summary=summary, options=options)


def _alone(step: Step, where: str) -> PassDifference:
    entry, before, after = step
    return _difference(entry, where, before, after, ("before", f"after {entry.name}"))


def _difference(
    entry: PassRecord, where: str, before: Program, after: Program, names: tuple[str, str]
) -> PassDifference:
    """The difference between two programs, ascribed to a pass; of the printed IR without its history."""
    a, b = (program.text().partition("\nhistory\n")[0].splitlines() for program in (before, after))
    ir = list(difflib.unified_diff(a, b, *names, lineterm="", n=_CONTEXT))
    operators, reads = _operators(before, after), _reads(before, after)
    return PassDifference(entry.name, entry.kind, entry.summary, where, operators, reads, ir, entry.arguments())


def _operators(before: Program, after: Program) -> dict[str, tuple[int, int]]:
    then, now = _count(before), _count(after)
    return {name: (then[name], now[name]) for name in sorted({*then, *now}) if then[name] != now[name]}


def _count(program: Program) -> Counter[str]:
    """Calls of a forward pass by operator, those inside of modules included."""
    counts: Counter[str] = Counter()
    for node in program.graph.nodes:
        inner = nodes_inside(program.modules[str(node.target)]) if node.op == "call_module" else ()
        for each in (node, *(n for _, n in inner)):
            if each.op == "call_function":
                name = str(each.target) if "." in str(each.target)[:5] else getattr(each.target, "__name__", "?")
                counts[name.removesuffix(".default")] += 1
    return counts


def _reads(before: Program, after: Program) -> list[str]:
    """The blocks that read other values of the stream: `path: x4 → x3`."""
    try:
        then = {b.path: b for b in residual_blocks(before)}
        now = {b.path: b for b in residual_blocks(after)}
    except RewriterError:
        return []
    return [
        f"{path}: x{_values(then[path].reads)} → x{_values(block.reads)}"
        for path, block in now.items()
        if path in then and (then[path].reads, then[path].index) != (block.reads, block.index)
    ]


def _values(reads: Sequence[int]) -> str:
    return ",".join(map(str, reads)) or "–"


def layers_between(before: Program, after: Program) -> list[LayerDifference]:
    """Every layer of both; neighbours that are equal on both sides are one entry."""
    layers = []
    pairs = zip(layer_plans(before), layer_plans(after), strict=False)
    for _, run in groupby(pairs, key=lambda pair: [relative(plan) for plan in pair]):
        (then, now), *others = run
        last = then.layer + len(others)
        sides = (LayerGroup(then.layer, last, plan) for plan in (then, now))
        layers.append(LayerDifference(then.layer, last, *sides))
    return layers
