"""Two programs compared: the effect of each pass on the IR, the reads and communication of each layer."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from rewriter.common.errors import RewriterError
from rewriter.explain.diff.differences import LayerDifference, PassDifference
from rewriter.ir import PassRecord, Program, nodes_inside
from rewriter.ir.layer_plan import LayerGroup, layer_plans, relative
from rewriter.ir.residual import residual_blocks

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


def passes_between(ours: Program | None, theirs: Program, names: tuple[str, str]) -> list[PassDifference]:
    """The passes of two programs in order: those of both that differ in their options or results, those of one. Without
    `ours`, the effect of every pass of `theirs`."""
    left, right = list(_steps(ours)) if ours is not None else [], list(_steps(theirs))
    differences: list[PassDifference] = []
    matcher = difflib.SequenceMatcher(None, [e.name for e, *_ in left], [e.name for e, *_ in right], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            differences += [_of_both(a, b, names) for a, b in zip(left[i1:i2], right[j1:j2], strict=True)]
            continue
        for where, steps in ((names[0], left[i1:i2]), ("both" if ours is None else names[1], right[j1:j2])):
            differences += [_difference(*step, ("before", f"after {step[0].name}"), where) for step in steps]
    return differences


def _of_both(ours: Step, theirs: Step, names: tuple[str, str]) -> PassDifference:
    a, b = ours[0], theirs[0]
    options = "" if a.arguments() == b.arguments() else f"{a.arguments() or '–'} | {b.arguments() or '–'}"
    summary = a.summary if a.summary == b.summary else f"{a.summary} | {b.summary}"
    return replace(_difference(a, ours[2], theirs[2], names, "both"), summary=summary, options=options)


def _difference(
    entry: PassRecord, before: Program, after: Program, names: tuple[str, str], where: str
) -> PassDifference:
    """The difference between two programs, ascribed to a pass; of the printed IR without its history."""
    a, b = (program.text().partition("\nhistory\n")[0].splitlines() for program in (before, after))
    ir = list(difflib.unified_diff(a, b, *names, lineterm="", n=2))
    then, now = _operators(before), _operators(after)
    operators = {name: (then[name], now[name]) for name in sorted({*then, *now}) if then[name] != now[name]}
    reads = _reads(before, after)
    return PassDifference(entry.name, entry.kind, entry.summary, where, operators, reads, ir, entry.arguments())


def _operators(program: Program) -> Counter[str]:
    """Number of calls of a forward pass by operator, those inside of modules included."""
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
        then, now = ({b.path: b for b in residual_blocks(program)} for program in (before, after))
    except RewriterError:
        return []
    changed = [
        (then[path], block)
        for path, block in now.items()
        if path in then and (then[path].reads, then[path].index) != (block.reads, block.index)
    ]
    read = [(new.path, *(",".join(map(str, b.reads)) or "–" for b in (old, new))) for old, new in changed]
    return [f"{path}: x{old} → x{new}" for path, old, new in read]


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
