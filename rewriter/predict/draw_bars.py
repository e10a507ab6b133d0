"""How many times the first recipe's tokens per second each recipe gives, as bars from zero."""

from __future__ import annotations

from collections.abc import Sequence

from rewriter.common.numbers import digits, times
from rewriter.predict.results import Prediction
from rewriter.predict.svg import drawing, number, path, rectangle, text, ticks

WIDTH, LEFT, RIGHT = 1000.0, 200.0, 260.0
ROW, BAR = 28.0, 18.0
NAME = 28  # letters of a recipe's name that fit before its bar


def bars(name: str, predictions: Sequence[Prediction]) -> str:
    if not predictions:
        return ""
    most = max(1.0, *(p.speedup for p in predictions)) * 1.02
    across = (WIDTH - LEFT - RIGHT) / most
    bottom = 8 + ROW * len(predictions)
    parts = []
    for value in ticks(0, most):
        x = LEFT + value * across
        parts.append(path(f"M{number(x)} 4V{number(bottom)}", "g"))
        parts.append(text(x, bottom + 14, f"{value:g}×", "m c"))
    for index, p in enumerate(predictions):
        y = 8 + ROW * index
        name_of = p.recipe if len(p.recipe) <= NAME else f"…{p.recipe[1 - NAME :]}"
        words = f"{p.recipe}: {times(p.speedup)}, {digits(p.tokens_per_second)} tokens per second"
        parts.append(text(LEFT - 10, y + BAR - 4, name_of, "e"))
        look = "bn" if not p.fits else "b0" if index == 0 else "bt" if p.kind == "timing only" else "b1"
        parts.append(rectangle(LEFT, y, max(p.speedup * across, 1), BAR, look, words))
        remark = " · does not fit" if not p.fits else " · timing only" if p.kind == "timing only" else ""
        x = LEFT + p.speedup * across + 8
        parts.append(text(x, y + BAR - 4, times(p.speedup), "b"))
        parts.append(text(x + 46, y + BAR - 4, f"{digits(p.tokens_per_second)} tokens/s{remark}", "m"))
    one = LEFT + across
    parts.append(path(f"M{number(one)} 4V{number(bottom)}", "r1"))
    words = ", ".join(f"{p.recipe} {times(p.speedup)}" for p in predictions)
    return drawing(name, WIDTH, bottom + 22, f"Tokens per second against {predictions[0].recipe}", words, parts)
