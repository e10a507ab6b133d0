"""The drawing of layers: a residual stream, which block reads which of its values, and what becomes of its sum.

One drawing serves light and dark grounds: lines and letters have the colour of the text around them. Alike neighbouring
layers are drawn once.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.common.errors import RewriterError
from rewriter.common.svg import circle, number, path, rectangle, svg, text
from rewriter.ir import Program
from rewriter.ir.layer_plan import BlockPlan, LayerGroup, grouped, layer_plans

_STEP, _LEFT, _TOP = 96.0, 26.0, 44.0  # from one value of the stream to the next; where the first stands
_WIDE, _HIGH = 64.0, 26.0  # of a box
_LETTER = 6.1
_STREAM = 118.0  # height of the stream
_MOST = 8  # groups of layers
_LINES, _APART = 6, 4.5  # of several streams: the most lines, and from one to the next
_CARRIED = {"mixed": "mix", "scaled": "scale", "normed": "norm"}
STYLE = (
    ".rl{stroke:currentColor;fill:none;stroke-width:1.3}.rs{stroke:currentColor;stroke-width:3.4;fill:none}"
    ".ro{stroke:currentColor;stroke-width:3.4;fill:none;stroke-dasharray:7 4}.rb{fill:#4a86d0}.rm{fill:#8a63b8}"
    ".rt{font:12px system-ui,sans-serif;fill:currentColor}.rw{font:11px system-ui,sans-serif;fill:#fff;"
    "text-anchor:middle}.rc{text-anchor:middle}.rq{font-size:11px;opacity:.75}.rn{fill:currentColor}"
    ".rx{fill:#d8552f}.rh{fill:#4f9c78}.rd{fill:none;stroke:#d8552f;stroke-width:1.6}"
    ".rp{stroke:var(--ground,#fff);stroke-width:1.4}.re{stroke:#c07a10;fill:none;stroke-width:1.9}"
    ".rv{stroke-width:1.7;fill:none}.rk{stroke:currentColor;fill:var(--ground,#fff);stroke-width:1.3}"
    ".rj{font:10px system-ui,sans-serif;fill:currentColor;text-anchor:middle}"
    ".ra{stroke-dasharray:4 3}.rg{stroke:currentColor;opacity:.3;stroke-dasharray:2 4;fill:none}"
)
LEGEND = (
    ("re", "reads an earlier value"), ("re ra", "reads an earlier value and its rank's own part"),
    ("rx", "all-reduce, exposed"), ("rh", "all-reduce overlapped with computation"),
    ("rd", "all-reduce dropped"), ("ro", "ranks hold values of their own"),
)  # fmt: skip


def program_drawing(program: Program) -> str:
    """The drawing of a program's layers; empty where it has no residual stream, or its blocks cannot be told."""
    try:
        layers = grouped(layer_plans(program))
    except (RewriterError, KeyError, IndexError):  # a program that is wrong is shown without
        return ""
    mesh = ", ".join(f"{axis}={size}" for axis, size in program.mesh.items())
    return layers_drawing(layers, mesh or "one device") if layers else ""


def layers_drawing(layers: Sequence[LayerGroup], what: str) -> str:
    """The drawing of some layers. `what` stands above it."""
    shown, left_out = list(layers[:_MOST]), layers[_MOST:]
    count = sum(len(group.blocks) for group in shown)
    width = _LEFT + count * _STEP + 30
    streams = shown[0].plan.streams
    parts, value = [text(0, 13, what + f", {streams} streams" * (streams > 1), "rt")], 0
    for group in shown:
        parts += _group(group, value)
        value += len(group.blocks)
    parts.append(circle(_x(0), _STREAM, max(4, _spread(streams)), "rn"))
    blocks = [block for group in shown for block in group.blocks]
    for place, block in enumerate(blocks, start=1):  # above what reads them
        parts += _carried(block, _x(place - 0.5)) + _sum(_x(place), streams)
    if left_out:
        width += 90
        parts.append(text(_x(value) + 14, _STREAM + 4, f"… {sum(g.count for g in left_out)} more layers", "rt rq"))
    legend, needed = _legend(shown)
    sentence = ". ".join(f"{group.label}: " + "; ".join(_words(b) for b in group.blocks) for group in layers)
    return svg(max(width, needed), _STREAM + 52, what, sentence, STYLE, [*parts, *legend])


def _x(value: float) -> float:
    return _LEFT + value * _STEP


def _group(group: LayerGroup, first: int) -> list[str]:
    """The blocks of one group of alike layers; its first block reads stream value number `first` of the drawing."""
    begin, end = _x(first), _x(first + len(group.blocks))
    words = group.label + (f"  ×{group.count}" if group.count > 1 else "")
    parts = [path(f"M{number(begin)} 24V{number(_STREAM + 14)}", "rg")] if first else []
    parts.append(text((begin + end) / 2, 30, words, "rt rc"))
    for place, block in enumerate(group.blocks):
        parts += _block(block, first + place, group.plan.streams)
    return parts


def _lines(streams: int) -> list[float]:
    """Heights of the lines that the stream is drawn as: one for each of several, at most `_LINES`."""
    count = min(streams, _LINES)
    return [_STREAM + (line - (count - 1) / 2) * _APART for line in range(count)]


def _spread(streams: int) -> float:
    """Half the height of all of them."""
    return (min(streams, _LINES) - 1) / 2 * _APART + 1.7 * (streams > 1)


def _block(block: BlockPlan, value: int, streams: int) -> list[str]:
    """A box above the stream, its reads from the left, its write to the right."""
    high, wide = _HIGH, _WIDE + 26 * (len(block.name) > 10)
    middle, next_value = _x(value + 0.5), _x(value + 1)
    left, right, bottom = middle - wide / 2, middle + wide / 2, _TOP + high
    style = ("ro" if block.ranks_differ else "rs") + " rv" * (streams > 1)
    parts = [path(f"M{number(_x(value))} {number(y)}H{number(next_value)}", style) for y in _lines(streams)]
    for late in block.late:
        x, to = _x(max(value - late, -0.2)), left + 9
        style = "rl" if not late else "re ra" if block.own_part else "re"
        title = f"{block.name} reads the stream {_late(late)}"
        curve = f"C{number(x)} {number(bottom + 14)} {number(to)} {number(_STREAM - 14)} {number(to)} {number(bottom)}"
        parts += [path(f"M{number(x)} {number(_STREAM)}{curve}", style, title)]
    curve = f"C{number(right + 14)} {number(bottom - high / 2)} {number(next_value)} {number(bottom)}"
    down = f"{number(next_value)} {number(_STREAM)}"
    parts.append(path(f"M{number(right)} {number(bottom - high / 2)}{curve} {down}", "rl"))
    parts.append(rectangle(left, _TOP, wide, high, "rb" if block.kind == "attention" else "rm", _words(block), 4))
    short = block.name if len(block.name) <= 15 else block.name[:14] + "…"
    parts.append(text(middle, _TOP + 17, short, "rw"))
    return [*parts, *_reduction(block, next_value, bottom)]


def _sum(x: float, streams: int) -> list[str]:
    cross = f"M{number(x - 3)} {number(_STREAM)}h6M{number(x)} {number(_STREAM - 3)}v6"
    return [circle(x, _STREAM, max(6, _spread(streams)), "rn"), path(cross, "rp")]


def _carried(block: BlockPlan, x: float) -> list[str]:
    """The word for K(X) under a block; nothing where the block only adds to the stream."""
    word = _CARRIED.get(block.carries)
    if word is None:
        return []
    title = f"{block.name} adds to the stream {_becomes(block)}"
    return [rectangle(x - 17, _STREAM - 9, 34, 18, "rk", title, 9), text(x, _STREAM + 3.5, word, "rj")]


def _reduction(block: BlockPlan, x: float, bottom: float) -> list[str]:
    """A diamond on the write; none on one device."""
    style = {"exposed": "rx", "hidden": "rh", "dropped": "rd"}.get(block.reduction)
    if style is None:
        return []
    y = (bottom + _STREAM) / 2 + 2
    shape = f"M{number(x)} {number(y - 7)}l7 7l-7 7l-7 -7z"
    words = {
        "exposed": "all-reduce: nothing computes meanwhile",
        "hidden": "all-reduce: overlaps with the next computation",
    }
    return [path(shape, style, words.get(block.reduction, "all-reduce left out"))]


def _late(late: int) -> str:
    return "as it is" if not late else f"as it was {late} block{'s' * (late > 1)} before"


def _words(block: BlockPlan) -> str:
    reads = ", ".join(f"the stream {_late(late)}" for late in block.late) or "nothing of the stream"
    own = ", with what this rank has added since" if block.own_part else ""
    carried = f", adds to the stream {_becomes(block)}" if block.carries in _CARRIED else ""
    return f"{block.name} ({block.kind}, {block.mode.label}): reads {reads}{own}{carried}"


def _becomes(block: BlockPlan) -> str:
    return {"mixed": "whose lines it mixes"}.get(block.carries, f"that is {block.carries} before")


def _legend(layers: Sequence[LayerGroup]) -> tuple[list[str], float]:
    """The signs that occur, and how wide they are together."""
    blocks = [b for group in layers for b in group.blocks]
    used = {
        "re": any(max(b.late, default=0) and not b.own_part for b in blocks),
        "re ra": any(max(b.late, default=0) and b.own_part for b in blocks),
        "rx": any(b.reduction == "exposed" for b in blocks),
        "rh": any(b.reduction == "hidden" for b in blocks),
        "rd": any(b.reduction == "dropped" for b in blocks),
        "ro": any(b.ranks_differ for b in blocks),
    }
    parts: list[str] = []
    x, y = _LEFT, _STREAM + 40
    for style, words in LEGEND:
        if used[style]:
            line = style in ("re", "re ra", "ro")
            mark = f"M{number(x)} {number(y - 4)}h18" if line else f"M{number(x + 9)} {number(y - 10)}l6 6l-6 6l-6 -6z"
            parts += [path(mark, style), text(x + 24, y, words, "rt rq")]
            x += 42 + _LETTER * len(words)
    return parts, x
