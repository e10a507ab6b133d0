"""What another order of heads and channels changes for recipes whose ranks keep residuals of their own.

    python -m benchmarks.drift.permutation      # 2.5 minutes of one core; prints the table of docs/figures/rewrites.md

The shipped tiny model (4 key/value heads, 512 channels, 6 layers), fp32 on the CPU, all ranks in one process. Orders
are measured on the first half of examples/tiny-llama/heldout.txt ("same kind of text") and on the packaged calibration
text ("other text"); every figure is the drift on windows of the second half, which no order was measured on.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from rewriter.check.affinity import affinity, measurable, reordered
from rewriter.check.drift import DriftSums, calibration_tokens, load_tokenizer
from rewriter.ir import Program
from rewriter.ir.simulate import load_weights, simulate
from rewriter.passes.permute import DIGITS, order_of, permutable_units
from rewriter.recipes import Recipe
from rewriter.tracing import trace

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"
RECIPES = ("desync-2x", "desync-2x-sum", "desync-4x", "desync-4x-sum", "ladder-own-partial")
RANKS = (2, 4)
LENGTH, WINDOWS, MEASURED, SEEDS = 256, 12, 2048, (0, 1, 2)


class Bench:
    """The tiny model, the windows to compare on, and the original's logits, computed once."""

    @torch.no_grad()
    def __init__(self) -> None:
        self.program = trace(MODEL)
        self.weights = load_weights(self.program, torch.float32)
        self.blocks = {block.path: block for block in permutable_units(self.program)}
        tokenizer = load_tokenizer(str(MODEL))
        assert tokenizer is not None
        ids = torch.tensor(tokenizer((MODEL / "heldout.txt").read_text(encoding="utf-8")).input_ids)
        first, second = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        self.texts = {"same kind of text": spread(first, MEASURED // LENGTH).flatten()}
        self.texts["other text"] = calibration_tokens(self.program)[0]
        self.windows = spread(second, WINDOWS)
        self.logits = simulate(self.program, self.windows, weights=self.weights)

    @torch.no_grad()
    def drift(self, rewritten: Program, ranks: Mapping[str, str]) -> float:
        """KL(original ‖ rewritten) in nats per token, with units dealt to ranks by `ranks`."""
        weights = dict(self.weights)
        for path, given in ranks.items():
            weights |= reordered(self.weights, self.blocks[path], order_of(given))
        found = DriftSums()
        for window, before, after in zip(
            self.windows, self.logits, simulate(rewritten, self.windows, weights=weights), strict=True
        ):
            found.add(window, before, after)
        return found.kl

    def dealt_at_random(self, ranks: int, seed: int) -> dict[str, str]:
        """Units of every block dealt to ranks by chance."""
        generator, found = random.Random(seed), {}
        for path, block in self.blocks.items():
            units = [DIGITS[unit * ranks // block.count] for unit in range(block.count)]
            generator.shuffle(units)
            found[path] = "".join(units)
        return found

    def row(self, name: str, ranks: int) -> list[str]:
        """A recipe on `ranks` ranks: the drift of each order."""
        recipe = Recipe.load(name).with_overrides({"permute.ranks": {}})
        rewritten = measurable(self.program, recipe, ranks)
        assert rewritten is not None
        disk = self.drift(rewritten, {})
        chance = [self.drift(rewritten, self.dealt_at_random(ranks, seed)) for seed in SEEDS]
        cells = [f"`{name}`", str(ranks), f"{disk:.3f}", f"{statistics.mean(chance):.3f}"]
        for tokens in self.texts.values():
            found = affinity(self.program, rewritten, tokens, weights=self.weights)
            after = self.drift(rewritten, found.ranks)
            cells.append(f"{after:.3f} ({after / disk - 1:+.0%})" if found.ranks else "not taken")
        print(*cells, file=sys.stderr, flush=True)
        return cells


def spread(ids: torch.Tensor, count: int) -> torch.Tensor:
    """`count` windows [count, LENGTH] at even distances."""
    starts = [i * (len(ids) - LENGTH) // max(count - 1, 1) for i in range(count)]
    return torch.stack([ids[start : start + LENGTH] for start in starts])


def main() -> None:
    bench = Bench()
    print("| recipe | P | order on disk | by chance | measured, same kind of text | measured, other text |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in RECIPES:
        for ranks in RANKS:
            print("| " + " | ".join(bench.row(name, ranks)) + " |")


if __name__ == "__main__":
    main()
