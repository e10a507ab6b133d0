"""How far each rewrite takes models from themselves before any fine-tuning: writes docs/results/drift.md.

    python examples/real_models.py smollm2-135m-instruct models/smollm2
    python examples/real_models.py gemma3-270m models/gemma3
    python -m benchmarks.drift.run --tiny --smollm2 models/smollm2 --gemma3 models/gemma3  # an hour of one core

Models that are not asked for keep their tables.

Nothing is drawn at random: windows of 256 tokens at even distances in examples/tiny-llama/heldout.txt, which the tiny
model was not trained on, and for the real ones in the packaged calibration text; weights as shipped; fp32 on the CPU,
all ranks in one process. What the text of the document claims is checked against the figures first: it exits with 1,
and writes nothing, where a claim fails.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rewriter.api import rewrite
from rewriter.check.drift import CALIBRATION, DriftSums, calibration_tokens, load_tokenizer, other_weights
from rewriter.check.sensitivity import sensitivity
from rewriter.ir import Program
from rewriter.ir.communication import collectives
from rewriter.ir.phases import agreed_phase
from rewriter.ir.simulate import load_weights, simulate
from rewriter.kernels import parse_format
from rewriter.passes.base import bound_ranks
from rewriter.passes.phases import single_device
from rewriter.passes.quantize_collectives import always_quantized, is_quantized
from rewriter.recipes import Recipe
from rewriter.recipes.catalogue import library
from rewriter.tracing import trace

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-llama"
DOCUMENT = ROOT / "docs" / "results" / "drift.md"
TEMPLATE = Path(__file__).with_name("page.md")
WINDOWS, LENGTH = 48, 256
REAL_WINDOWS = 3
RANKS = (2, 4, 8)
TOKEN_SHARDING = ("attention2d", "long-context", "ring-attention", "ulysses")
# Recipes of the prompt are measured on what comes after it: benchmarks/prefill.
PROMPT = tuple(name for name in library() if agreed_phase(Recipe.load(name).build()) is not None)
LEFT_OUT = ("ladder-last-20", "upper-bound", "fit-tp", *TOKEN_SHARDING, *PROMPT)


@dataclass(frozen=True)
class Row:
    """One rewrite compared with the original. `ranks` is None for a function that their number does not change.

    Where reductions are quantized, all of those of the blocks are, however short the message.
    """

    ranks: int | None
    reductions: int
    kl: float
    error: float
    agreement: float
    bits: float

    def cells(self) -> list[str]:
        return [
            "any" if self.ranks is None else str(self.ranks),
            str(self.reductions),
            f"{self.kl:.4f} ± {self.error:.4f}",
            f"{self.agreement:.1%}",
            f"{self.bits:.3f}",
            f"{2**self.bits:.2f}",
        ]


@dataclass
class Bench:
    """A model, windows of text, and the original's logits, computed once."""

    program: Program
    weights: dict[str, torch.Tensor]
    windows: list[torch.Tensor]
    logits: list[torch.Tensor]
    known: dict[str, Row] = field(default_factory=dict)

    @classmethod
    @torch.no_grad()
    def build(cls, model: Path = MODEL, text: Path = MODEL / "heldout.txt", count: int = WINDOWS) -> Bench:
        program = trace(model)
        weights, windows = load_weights(program, torch.float32), windows_of(model, text, count)
        return cls(program, weights, windows, [simulate(program, w[None], weights=weights)[0] for w in windows])

    @property
    def bits(self) -> float:
        """Bits per byte of the original on the same windows."""
        found = DriftSums()
        for window, logits in zip(self.windows, self.logits, strict=True):
            found.add(window, logits, logits)
        return math.log2(found.result("").perplexity_before)

    def recipe(self, name: str, ranks: int) -> Row:
        """A shipped recipe on `ranks` ranks."""
        return self._row(name, name, ranks)

    def passes(self, ranks: int, *passes: dict[str, Any]) -> Row:
        """Tensor parallelism and `passes` on `ranks` ranks."""
        listed = [{"pass": "tensor_parallel"}, *passes, {"pass": "merge_reductions", "optional": True}]
        recipe = Recipe.model_validate({"name": "x", "summary": "x", "paper": "x", "passes": listed})
        return self._row(str(passes), recipe, ranks)

    @torch.no_grad()
    def _row(self, key: str, recipe: str | Recipe, ranks: int) -> Row:
        if (known := self.known.get(f"{key} {ranks}") or self.known.get(f"{key} None")) is not None:
            return known
        rewritten = rewrite(self.program, recipe, tp=ranks)
        computed, bound = single_device(rewritten), bound_ranks(rewritten)
        if is_quantized(rewritten):  # what ranks compute, which their number changes too
            computed, bound = always_quantized(rewritten), ranks
        weights = other_weights(computed, self.program, self.weights)
        found = DriftSums()
        for window, original in zip(self.windows, self.logits, strict=True):
            found.add(window, original, simulate(computed, window[None], weights=weights)[0])
        result = found.result("")
        row = Row(
            ranks=bound,
            reductions=sum(c.place == "block" for c in collectives(rewritten)),
            kl=result.kl,
            error=statistics.stdev(found.divergences) / math.sqrt(len(found.divergences)),
            agreement=result.top1_agreement,
            bits=math.log2(result.perplexity_after),
        )
        print(f"{key} {bound}: KL {row.kl:.4f}", file=sys.stderr, flush=True)
        return self.known.setdefault(f"{key} {bound}", row)


def windows_of(model: Path, text: Path, count: int) -> list[torch.Tensor]:
    """Token ids int64 [LENGTH] each, at even distances in the text."""
    tokenizer: Any = load_tokenizer(str(model))
    tokenizer.model_max_length = 1 << 30
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False).input_ids)
    # the tiny model was trained on pieces of texts, others on texts that begin as their tokenizer has them begin
    begin = ids.new_tensor([] if model == MODEL else tokenizer("").input_ids)
    length = LENGTH - len(begin)
    starts = ((len(ids) - length) * i // (count - 1) for i in range(count))
    return [torch.cat([begin, ids[start : start + length]]) for start in starts]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def kl(row: Row) -> str:
    return f"{row.kl:.3f}" if row.kl >= 0.1 else f"{row.kl:.4f}"


# --- the tables ------------------------------------------------------------------------------------------------------


def recipes(
    bench: Bench, several: Sequence[int] = RANKS, unit: str = "byte", left_out: Sequence[str] = LEFT_OUT
) -> str:
    """Every shipped recipe that the model can have, but those that compute nothing or only shard tokens."""
    rows = []
    for name in library():
        if name in left_out:
            continue
        found = {row.ranks: row for row in (bench.recipe(name, ranks) for ranks in several)}
        rows += [[f"`{name}`", *row.cells()] for row in found.values()]
    columns = ("recipe", "P", "block reductions", "KL, nats per token", "top-1", f"bits per {unit}", "perplexity")
    return table(columns, rows)


def real_model(directory: Path, ranks: Sequence[int]) -> str:
    """The same table for a pretrained model, on prose."""
    bench = Bench.build(directory, CALIBRATION, REAL_WINDOWS)
    layers = bench.program.source.config["num_hidden_layers"]
    left_out = [name for name in LEFT_OUT if name != "ladder-last-20" or layers < 20]
    original = ["original", "any", "", "", "", f"{bench.bits:.3f}", f"{2**bench.bits:.2f}"]
    return recipes(bench, ranks, "token", left_out) + "\n| " + " | ".join(original) + " |"


def desync(bench: Bench, layers: str, n: int, resync: str, ranks: int) -> Row:
    return bench.passes(ranks, {"pass": "desync", "layers": layers, "n": n, "resync": resync})


def mean_and_sum(bench: Bench) -> str:
    rows = []
    for layers in ("all", "upper-half"):
        for n in (2, 4):
            for resync in ("mean", "sum"):
                found = [kl(desync(bench, layers, n, resync, ranks)) for ranks in RANKS]
                rows.append([f"{layers}, {n}x, {resync}", *found])
    return table(("layers, n, resync", *(f"P = {r}" for r in RANKS)), rows)


def ladder(bench: Bench, layers: str, variant: str, ranks: int) -> Row:
    return bench.passes(ranks, {"pass": "ladder", "layers": layers, "variant": variant})


def paper_and_own(bench: Bench) -> str:
    rows = []
    for layers in ("all", "upper-half", "last-quarter"):
        own = [kl(ladder(bench, layers, "own_partial", ranks)) for ranks in RANKS]
        rows.append([layers, kl(ladder(bench, layers, "paper", 2)), *own])
    return table(("layers", "paper, any P", *(f"own partial, P = {r}" for r in RANKS)), rows)


def every_n(bench: Bench) -> str:
    rows = []
    for n in (2, 3, 4, 6, 12):
        whole = desync(bench, "all", n, "sum", 2)
        upper = desync(bench, "upper-half", n, "sum", 2) if n <= 6 else None
        rows.append(
            [str(n), str(whole.reductions), kl(whole), *([str(upper.reductions), kl(upper)] if upper else "––")]
        )
    return table(("n", "reductions, all layers", "KL", "reductions, upper half", "KL"), rows)


def costs(bench: Bench) -> dict[int, tuple[float, ...]]:
    """By number of ranks, what dropping each layer's attention reduction alone costs on the calibration text."""
    tokens, _ = calibration_tokens(bench.program)
    found = {ranks: sensitivity(bench.program, tokens, ranks, weights=bench.weights) for ranks in RANKS}
    return {ranks: tuple(cost for cost in per_layer if cost is not None) for ranks, per_layer in found.items()}


def dropped(bench: Bench, layers: Sequence[int], ranks: int) -> Row:
    return bench.passes(ranks, {"pass": "drop_sync", "layers": sorted(layers)})


def ranked(found: Sequence[float]) -> list[int]:
    """Layers by cost, cheapest first; as drop_sync ranks them."""
    return sorted(range(len(found)), key=lambda layer: (found[layer], -layer))


def sensitivities(found: dict[int, tuple[float, ...]]) -> str:
    rows = [[f"P = {ranks}", *(f"{cost:.4f}" for cost in per_layer)] for ranks, per_layer in found.items()]
    return table(("", *(f"layer {i}" for i in range(len(found[2])))), rows)


def counts(bench: Bench, found: dict[int, tuple[float, ...]]) -> str:
    order = ranked(found[4])
    rows = []
    for k in range(1, len(order) + 1):
        cheap, dear = (dropped(bench, chosen, 4) for chosen in (order[:k], order[-k:]))
        rows.append([str(k), str(cheap.reductions), kl(cheap), kl(dear)])
    return table(("dropped", "block reductions", "KL, the cheapest", "KL, the dearest"), rows)


def parallel(bench: Bench, layers: str, norm: str) -> Row:
    return bench.passes(2, {"pass": "parallel_block", "layers": layers, "norm": norm})


def norms(bench: Bench) -> str:
    names = ("attention", "mlp", "own")
    rows = [[layers, *(kl(parallel(bench, layers, norm)) for norm in names)] for layers in ("all", "upper-half")]
    return table(("layers", *(f"norm: {name}" for name in names)), rows)


QUANTIZED = {"int8": "tensor-parallel-int8", "int4-hadamard": "tensor-parallel-int4"}  # those that have a recipe
FORMATS = ("int8", "fp8", "int6", "int4-hadamard", "int4", "int2-hadamard")


def quantized(bench: Bench, format: str, ranks: int) -> Row:
    if format in QUANTIZED:
        return bench.recipe(QUANTIZED[format], ranks)
    return bench.passes(ranks, {"pass": "quantize_collectives", "format": format})


def formats(bench: Bench) -> str:
    rows = []
    for name in FORMATS:
        format = parse_format(name)
        bits = format.bits + 16 / format.block
        rows.append([name, f"{bits:.3f}", *(kl(quantized(bench, name, ranks)) for ranks in RANKS)])
    return table(("format", "bits per element", *(f"P = {r}" for r in RANKS)), rows)


# --- what is said about them -----------------------------------------------------------------------------------------


def claims(bench: Bench, found: dict[int, tuple[float, ...]]) -> dict[str, bool]:
    """Every comparison that the document puts into words, and whether the figures bear it out."""
    both = ("all", "upper-half")
    order = ranked(found[4])
    last = len(order) - 1
    return {
        "tensor parallelism does not drift": bench.recipe("tensor-parallel", 2).kl < 1e-6,
        "sum is closer than mean": all(
            desync(bench, where, n, "sum", ranks).kl < desync(bench, where, n, "mean", ranks).kl
            for where in both for n in (2, 4) for ranks in RANKS
        ),
        "more ranks drift more": all(
            desync(bench, where, 2, how, a).kl < desync(bench, where, 2, how, b).kl
            for where in both for how in ("mean", "sum") for a, b in ((2, 4), (4, 8))
        ),
        "own partial is closer than paper": all(
            ladder(bench, where, "own_partial", ranks).kl < ladder(bench, where, "paper", ranks).kl
            for where in (*both, "last-quarter") for ranks in RANKS
        ),
        "own partial nears paper with more ranks": all(
            ladder(bench, where, "own_partial", a).kl < ladder(bench, where, "own_partial", b).kl
            for where in both for a, b in ((2, 4), (4, 8))
        ),
        "upper half is closer than all, by a factor of 4": all(
            4 * upper.kl < whole.kl
            for ranks in RANKS
            for whole, upper in (
                *((desync(bench, "all", n, how, ranks), desync(bench, "upper-half", n, how, ranks))
                  for n in (2, 4) for how in ("mean", "sum")),
                *((ladder(bench, "all", how, ranks), ladder(bench, "upper-half", how, ranks))
                  for how in ("paper", "own_partial")),
                *((parallel(bench, "all", norm), parallel(bench, "upper-half", norm))
                  for norm in ("attention", "mlp", "own")),
            )
        ),
        "all layers cost more than half a bit": all(
            row.bits > bench.bits + 0.5
            for ranks in RANKS
            for row in (
                *(desync(bench, "all", n, how, ranks) for n in (2, 4) for how in ("mean", "sum")),
                *(ladder(bench, "all", how, ranks) for how in ("paper", "own_partial")),
                *(parallel(bench, "all", norm) for norm in ("attention", "mlp", "own")),
            )
        ),
        "half of the layers means the upper half": all(
            sorted(ranked(per_layer)[:3]) == [3, 4, 5] for per_layer in found.values()
        ),
        "drop-sync and ladder-then-desync are the closest": all(
            max(bench.recipe(name, ranks).kl for name in ("drop-sync", "ladder-then-desync"))
            < min(
                bench.recipe(name, ranks).kl
                for name in library()
                if name not in ("drop-sync", "ladder-then-desync", "tensor-parallel", *QUANTIZED.values(), *LEFT_OUT)
            )
            for ranks in RANKS
        ),
        "int8 costs less than a thousandth of a nat": all(
            quantized(bench, "int8", ranks).kl < 1e-3 for ranks in RANKS
        ),
        "fp8 costs more than int8": all(
            quantized(bench, "int8", ranks).kl < quantized(bench, "fp8", ranks).kl for ranks in RANKS
        ),
        "on a ladder 8 bits are within its standard error": all(
            abs(row.kl - bench.recipe("ladder", 2).kl) < row.error
            for row in (bench.recipe("ladder-int8", ranks) for ranks in RANKS)
        ),
        "4 bits are closer rotated": all(
            quantized(bench, "int4-hadamard", ranks).kl < quantized(bench, "int4", ranks).kl for ranks in RANKS
        ),
        "the first layer is the dearest": all(ranked(per_layer)[-1] == 0 for per_layer in found.values()),
        "the cheapest beat the dearest": all(
            dropped(bench, order[:k], 4).kl < dropped(bench, order[-k:], 4).kl for k in range(1, last + 1)
        ),
        "upper desync: sum, then ladder, then mean": all(
            desync(bench, "upper-half", 2, "sum", ranks).kl < ladder(bench, "upper-half", "paper", ranks).kl
            < desync(bench, "upper-half", 2, "mean", ranks).kl
            for ranks in RANKS
        ),
    }  # fmt: skip


def tiny_parts() -> tuple[dict[str, str], list[str]]:
    """The tables of the tiny model by name, and what the text claims of it wrongly."""
    bench = Bench.build()
    found = costs(bench)
    parts = {
        "recipes": recipes(bench),
        "mean_and_sum": mean_and_sum(bench),
        "paper_and_own": paper_and_own(bench),
        "every_n": every_n(bench),
        "sensitivities": sensitivities(found),
        "counts": counts(bench, found),
        "norms": norms(bench),
        "formats": formats(bench),
        "bits": f"{bench.bits:.3f}",
        "perplexity": f"{2**bench.bits:.2f}",
    }
    return parts, [claim for claim, holds in claims(bench, found).items() if not holds]


def parts_of(template: str, page: str) -> dict[str, str]:
    """What a written page has in place of each `<<name>>` of its template; none of a page of another template."""
    pieces = re.split(r"<<(\w+)>>", template)
    pattern = "".join(re.escape(x) if i % 2 == 0 else f"(?P<{x}>(?:.|\n)+?)" for i, x in enumerate(pieces))
    found = re.fullmatch(pattern, page)
    return {} if found is None else found.groupdict()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="measure examples/tiny-llama")
    parser.add_argument("--smollm2", type=Path, help="directory of SmolLM2-135M-Instruct, to measure it")
    parser.add_argument("--gemma3", type=Path, help="directory of Gemma 3 270M, to measure it")
    asked = parser.parse_args()
    template = TEMPLATE.read_text(encoding="utf-8")
    parts = parts_of(template, DOCUMENT.read_text(encoding="utf-8"))
    if asked.tiny:
        found, wrong = tiny_parts()
        if wrong:
            print(f"not borne out by the figures: {'; '.join(wrong)}. Correct {TEMPLATE.name}.", file=sys.stderr)
            return 1
        parts |= found
    for name, directory, ranks in (("smollm2", asked.smollm2, 3), ("gemma3", asked.gemma3, 2)):
        if directory is not None:
            parts[name] = real_model(directory, (ranks,))
    parts |= {"tokens": f"{WINDOWS * LENGTH:,}", "real_tokens": f"{REAL_WINDOWS * LENGTH:,}"}
    if missing := [name for name in re.findall(r"<<(\w+)>>", template) if name not in parts]:
        print(f"{DOCUMENT.name} has no {', '.join(missing)} to keep. Measure all models.", file=sys.stderr)
        return 1
    DOCUMENT.write_text(re.sub(r"<<(\w+)>>", lambda name: parts[name[1]], template), encoding="utf-8")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
