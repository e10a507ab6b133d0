"""The drawings of the concept pages, docs/figures/stream-*.svg, attention-grid.svg and two-hop.svg.

    python tools/docs/drawings.py

Residual streams are drawn from programs: a small Llama, traced and rewritten by the recipes that ship.
"""

from __future__ import annotations

import re
from pathlib import Path

from rewriter import api
from rewriter.common.svg import number, path, rectangle, text
from rewriter.ir.layer_drawing import program_drawing
from rewriter.recipes import Recipe
from rewriter.tracing import trace

FIGURES = Path(__file__).parents[2] / "docs/figures"
STREAMS = {
    "stream-standard": "tensor-parallel",
    "stream-ladder": "ladder",
    "stream-desync": "desync-2x",
    "stream-own-partial": "ladder-own-partial",
}
_GROUND = (
    "svg{color:#1b2028;--ground:#fff}.bg{fill:#fff;stroke:#d5dae1}"
    "@media (prefers-color-scheme:dark){svg{color:#e6e9ee;--ground:#171b21}.bg{fill:#171b21;stroke:#363d48}}"
)
_STYLE = (
    ".t{font:600 14px system-ui,sans-serif;fill:currentColor}.m{font:13px system-ui,sans-serif;fill:currentColor}"
    ".w{font:12px system-ui,sans-serif;fill:#fff;text-anchor:middle}.c{text-anchor:middle}"
    ".l{stroke:currentColor;fill:none;stroke-width:1.4}.a{fill:#3f76bf}.b{fill:#7a5aa8}.h{fill:#4f9c78}.x{fill:#c07a10}"
    ".o{fill:none;stroke:currentColor;opacity:.45}"
)


def drawings() -> dict[str, str]:
    """All drawings by file name."""
    found = {f"{name}.svg": stream(recipe) for name, recipe in STREAMS.items()}
    return found | {"attention-grid.svg": attention_grid(), "two-hop.svg": two_hop(), "phases.svg": phases()}


def stream(recipe: str) -> str:
    """The residual stream of a Llama of 4 layers under a recipe on 2 ranks."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    program = api.rewrite(trace(config), Recipe.load(recipe), tp=2)
    return standalone(program_drawing(program), recipe)


def standalone(drawing: str, title: str) -> str:
    """A drawing for a page's text as a file with a ground of its own."""
    width, height = (float(v) for v in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing)[0])
    inner = drawing[drawing.index("<desc>") : drawing.rindex("</svg>")]
    return _file(width + 24, height + 24, title, f'<g transform="translate(12 12)">{inner}</g>')


def _file(width: float, height: float, title: str, inner: str) -> str:
    ground = rectangle(0.5, 0.5, width - 1, height - 1, "bg", round=8)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="{number(width)}" role="img"><title>{title}</title><style>{_GROUND}</style>{ground}\n{inner}\n</svg>\n'
    )


def phases() -> str:
    """The tokens of a request, rewired and exact ones."""
    parts = [text(24, 30, "One request", "t")]
    spans = [("exact_head", 70, "b"), ("rewired", 270, "a"), ("exact_tail", 110, "b"), ("generated", 170, "b")]
    x = 24.0
    for name, width, kind in spans:
        parts.append(rectangle(x, 46, width - 4, 34, kind, round=4))
        parts.append(text(x + width / 2 - 2, 67, name, "w"))
        x += width
    parts += [path("M24 92v8h446v-8", "l"), text(247, 118, "prompt, n tokens", "m c")]
    parts.append(text(24, 148, "Rewired tokens: what the pass makes of the model.", "m"))
    parts.append(text(24, 168, "Exact tokens: the model without the pass. All read one cache.", "m"))
    return _file(x + 20, 188, "The phases of a request's tokens", "".join(parts))


def attention_grid() -> str:
    """Four ranks: a ring, on which all keys and values travel, and a grid of 2 × 2."""
    parts = [text(24, 30, "Ring attention: keys and values go round", "t")]
    for rank in range(4):
        x = 24 + 92 * rank
        parts += _rank(x, 62, rank, "kv")
        if rank < 3:
            parts.append(path(f"M{x + 64} 90h26m-6 -4l6 4l-6 4", "l", "keys and values"))
    parts.append(path("M332 122v18H56v-18m-4 6l4 -6l4 6", "l", "keys and values"))
    parts += [text(24, 172, "Each rank sends all keys and", "m"), text(24, 190, "values once: P − 1 steps.", "m")]
    parts.append(text(424, 30, "Attention2D: a grid of rows and columns", "t"))
    for rank in range(4):
        row, column = divmod(rank, 2)
        parts += _rank(474 + 150 * column, 54 + 84 * row, rank, "")
    for row in range(2):
        y = 82 + 84 * row
        parts += [path(f"M540 {y}h82m-6 -4l6 4l-6 4M546 {y - 4}l-6 4l6 4", "l"), text(581, y - 8, "queries", "m c")]
    for column in range(2):
        x = 506 + 150 * column
        parts += [
            path(f"M{x} 112v24m-4 -6l4 6l4 -6M{x - 4} 118l4 -6l4 6", "l"),
            text(x + 50, 129, "keys, values", "m c"),
        ]
    parts += [text(424, 216, "Queries travel along rows, keys and values along", "m")]
    parts.append(text(424, 234, "columns: a share of 1/√P of the whole per rank.", "m"))
    return _file(790, 252, "Attention over tokens that ranks share", f"<style>{_STYLE}</style>" + "\n".join(parts))


def _rank(x: float, y: float, rank: int, what: str) -> list[str]:
    inside = "its k, v" if what else "tokens"
    return [
        rectangle(x, y, 64, 56, "a", f"rank {rank}", 5),
        text(x + 32, y + 24, f"rank {rank}", "w"),
        text(x + 32, y + 42, inside, "w"),
    ]


def two_hop() -> str:
    """A quantized all-reduce: quantize, exchange, sum in fp32, quantize again, gather."""
    steps = (
        ("a", "its part, bf16", "each rank has a", "whole tensor"),
        ("x", "quantize", "blocks of numbers", "with one scale"),
        ("b", "all-to-all", "hop 1: shard r", "goes to rank r"),
        ("h", "sum in fp32", "of dequantized", "parts, no bits lost"),
        ("x", "quantize", "the sum, once", "more"),
        ("b", "all-gather", "hop 2: every rank", "gets every shard"),
        ("a", "the sum, bf16", "the same bytes", "on all ranks"),
    )
    parts = [text(24, 30, "An all-reduce of quantized messages: two hops, two roundings", "t")]
    for i, (style, name, *words) in enumerate(steps):
        x = 24 + 124 * i
        parts += [rectangle(x, 52, 104, 44, style, round=5), text(x + 52, 79, name, "w")]
        parts += [text(x + 52, 116 + 18 * j, word, "m c") for j, word in enumerate(words)]
        if i + 1 < len(steps):
            parts.append(path(f"M{x + 104} 74h18m-6 -4l6 4l-6 4", "l"))
    return _file(896, 154, "A two-hop quantized all-reduce", f"<style>{_STYLE}</style>" + "\n".join(parts))


if __name__ == "__main__":
    for name, drawing in drawings().items():
        (FIGURES / name).write_text(drawing, encoding="utf-8")
