"""Two programs beside each other: what each pass did, what each layer reads and communicates."""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Sequence

from rewriter.analysis.layer_wiring import WiredLayers, each_layer
from rewriter.analysis.residual import residual_blocks
from rewriter.common.errors import RewriterError
from rewriter.explain.diff.differences import LayerDifference, PassDifference
from rewriter.ir import PassRecord, Program, nodes_inside

_CONTEXT = 2


def steps(program: Program) -> Iterator[tuple[PassRecord, Program, Program]]:
    """(pass, program before it, program after it) of every pass, applied again to the program as traced."""
    origin = program.origin or program
    before = origin.with_(mesh=program.mesh, origin=origin) if program.mesh else origin
    for entry in program.history:
        after = entry.rewrite.apply(before)
        yield entry, before, after
        before = after


def passes_of(program: Program) -> list[PassDifference]:
    """What every pass did to the IR."""
    return [
        PassDifference(
            entry.name, entry.kind, entry.summary, "both", _operators(before, after), _reads(before, after),
            text_difference(before.text(), after.text(), "before", f"after {entry.name}"), entry.arguments(),
        )
        for entry, before, after in steps(program)
    ]  # fmt: skip


def passes_between(ours: Program, theirs: Program, names: tuple[str, str]) -> list[PassDifference]:
    """The passes of two programs in order: those of both that differ in their options or results, those of one."""
    left, right = list(steps(ours)), list(steps(theirs))
    found = []
    matcher = difflib.SequenceMatcher(None, [e.name for e, *_ in left], [e.name for e, *_ in right], autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(left[i1:i2], right[j1:j2], strict=True)
            found += [_beside(a[0], b[0], a[2], b[2], names) for a, b in pairs]
        else:
            found += [_alone(step, names[0]) for step in left[i1:i2]]
            found += [_alone(step, names[1]) for step in right[j1:j2]]
    return found


def _beside(a: PassRecord, b: PassRecord, ours: Program, theirs: Program, names: tuple[str, str]) -> PassDifference:
    options = "" if a.arguments() == b.arguments() else f"{a.arguments() or '–'} | {b.arguments() or '–'}"
    summary = a.summary if a.summary == b.summary else f"{a.summary} | {b.summary}"
    ir = text_difference(ours.text(), theirs.text(), *names)
    return PassDifference(
        a.name, a.kind, summary, "both", _operators(ours, theirs), _reads(ours, theirs), ir, options
    )  # fmt: skip


def _alone(step: tuple[PassRecord, Program, Program], side: str) -> PassDifference:
    entry, before, after = step
    ir = text_difference(before.text(), after.text(), "before", f"after {entry.name}")
    return PassDifference(
        entry.name, entry.kind, entry.summary, side, _operators(before, after), _reads(before, after), ir,
        entry.arguments(),
    )  # fmt: skip


def text_difference(before: str, after: str, name_before: str, name_after: str) -> list[str]:
    """A unified diff of printed IR without its history; empty where the rest is the same."""
    a, b = (text.partition("\nhistory\n")[0].splitlines() for text in (before, after))
    return list(difflib.unified_diff(a, b, name_before, name_after, lineterm="", n=_CONTEXT))


def _operators(before: Program, after: Program) -> dict[str, tuple[int, int]]:
    then, now = _count(before), _count(after)
    return {name: (then[name], now[name]) for name in sorted({*then, *now}) if then[name] != now[name]}


def _count(program: Program) -> Counter[str]:
    """Calls of a forward pass by operator, those inside of modules included."""
    found: Counter[str] = Counter()
    for node in program.graph.nodes:
        inner = nodes_inside(program.modules[str(node.target)]) if node.op == "call_module" else ()
        for each in (node, *(n for _, n in inner)):
            if each.op == "call_function":
                name = str(each.target) if "." in str(each.target)[:5] else getattr(each.target, "__name__", "?")
                found[name.removesuffix(".default")] += 1
    return found


def _reads(before: Program, after: Program) -> list[str]:
    """The blocks that read other values of the stream, in words."""
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
    """Every layer of both, neighbours that are alike on both sides together."""
    pairs = list(zip(each_layer(before), each_layer(after), strict=False))
    found: list[LayerDifference] = []
    for then, now in pairs:
        last = found[-1] if found else None
        if last is not None and (_key(last.before), _key(last.after)) == (_key(then), _key(now)):
            found[-1] = LayerDifference(
                last.first, then.first, _until(last.before, then.first), _until(last.after, then.first)
            )  # fmt: skip
        else:
            found.append(LayerDifference(then.first, then.first, then, now))
    return found


def _key(layers: WiredLayers) -> str:
    return json.dumps({k: v for k, v in layers.to_dict().items() if k not in ("first", "last")})


def _until(layers: WiredLayers, last: int) -> WiredLayers:
    return WiredLayers(
        layers.first, last, layers.blocks, layers.collectives, layers.hidden, layers.bytes_per_token
    )  # fmt: skip
