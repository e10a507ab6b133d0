"""The cost of rewiring the prompt before any training, beside rewiring all tokens: loss, KL and top-1 of what follows.

    python examples/real_models.py smollm2-135m-instruct models/smollm2
    python -m benchmarks.prefill.quality models/smollm2 --tp 3 --record

Windows of the packaged calibration text (or --text FILE), each a prompt and 64 tokens after it, which alone count: with
every token of the window rewired, with the prompt rewired but its last token, and with the ends that the recipe leaves
exact. fp32 on a CPU, all ranks in one process; every message quantized where a recipe quantizes any.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.prefill import page
from rewriter.api import rewrite
from rewriter.check.drift import CALIBRATION, load_tokenizer, other_weights
from rewriter.common.text_windows import text_windows
from rewriter.ir import Program
from rewriter.ir.phases import PromptPhase, agreed_phase, prompt_phase
from rewriter.ir.simulate import load_weights, simulate
from rewriter.passes.phases import both_wirings
from rewriter.passes.quantize_collectives import always_quantized
from rewriter.recipes import Recipe
from rewriter.recipes.catalogue import library
from rewriter.tracing import trace

AFTER = 64  # tokens whose loss counts
WINDOWS = 3
RECIPES = tuple(name for name in sorted(library()) if agreed_phase(Recipe.load(name).build()) is not None)
WAYS = ("all tokens", "the prompt", "with exact ends")


@dataclass(frozen=True)
class Quality:
    """Means over the tokens after the prompts: loss in nats per token, KL(original ‖ rewritten), share of equal
    greedy tokens."""

    loss: float
    kl: float
    top1: float


def windows(tokenizer: Any, text: str, prompt: int, count: int) -> Tensor:
    """int64 [count, prompt + AFTER]: a text, cut."""
    ids, length = torch.tensor(tokenizer(text).input_ids), prompt + AFTER
    found = text_windows(ids, length, begins=int(ids[0]) == tokenizer.bos_token_id)[:count]
    if len(found) < count or len(found[-1]) < length:
        raise SystemExit(f"the text has {len(ids)} tokens, too few for {count} windows of {length}")
    return torch.stack(found)


@dataclass(frozen=True)
class Figures:
    """A model's original, its weights and the windows int64 [N, T] that are measured on."""

    original: Program
    weights: Mapping[str, Tensor]
    windows: Tensor

    @classmethod
    def of(cls, model: Path, prompt: int, count: int, text: str) -> Figures:
        original = trace(model)
        ids = windows(load_tokenizer(str(model)), text, prompt, count)
        return cls(original, load_weights(original, torch.float32), ids)

    def logits(self, program: Program, rewired: Tensor | None = None) -> Tensor:
        """log-probabilities [N, AFTER, V] of the tokens after each prompt."""
        known = other_weights(program, self.original, self.weights)
        parts = []
        for window in self.windows:
            found = simulate(program, window[None], weights=known, rewired=rewired)
            parts.append(found[0, -AFTER - 1 : -1].log_softmax(-1))
        return torch.stack(parts)


def compared(found: Tensor, original: Tensor, windows: Tensor) -> Quality:
    """Of log-probabilities [N, AFTER, V] of the last tokens of `windows`, int64 [N, T], beside the original's."""
    following = windows[:, -AFTER:, None]
    return Quality(
        loss=-float(found.gather(2, following).mean()),
        kl=float((original.exp() * (original - found)).sum(-1).mean()),
        top1=float((found.argmax(-1) == original.argmax(-1)).float().mean()),
    )


def masks(phase: PromptPhase, prompt: int) -> Iterator[tuple[str, Tensor]]:
    """bool [1, T] by way."""
    length = prompt + AFTER
    yield WAYS[0], torch.ones(1, length, dtype=torch.bool)
    yield WAYS[1], PromptPhase().rewired(length, prompt=prompt)
    yield WAYS[2], phase.rewired(length, prompt=prompt)


@torch.no_grad()
def measured(
    model: Path, recipes: Sequence[str], tp: int, prompt: int, count: int, text: Path
) -> Iterator[dict[str, Any]]:
    """A record of each recipe."""
    figures = Figures.of(model, prompt, count, text.read_text(encoding="utf-8"))
    original = figures.logits(figures.original)
    for name in recipes:
        program = always_quantized(both_wirings(rewrite(figures.original, name, tp=tp)))
        phase = prompt_phase(program)
        assert phase is not None
        found = {
            way: compared(figures.logits(program, mask), original, figures.windows)
            for way, mask in masks(phase, prompt)
        }
        yield {
            "model": model.name, "text": text.stem, "recipe": name, "tp": tp, "prompt": prompt, "windows": count,
            "exact_head": phase.exact_head, "exact_tail": phase.exact_tail, "date": time.strftime("%Y-%m-%d"),
            "original_loss": compared(original, original, figures.windows).loss,
            "ways": {way: asdict(quality) for way, quality in found.items()},
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--recipe", action="append", help="a name; by default all that rewire the prompt alone")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--text", type=Path, default=CALIBRATION)
    parser.add_argument("--record", action="store_true", help="add what is found to record.json, and write the page")
    given = parser.parse_args()
    for record in measured(given.model, given.recipe or RECIPES, given.tp, given.prompt, given.windows, given.text):
        for way, quality in record["ways"].items():
            rise = quality["loss"] / record["original_loss"] - 1
            print(f"{record['recipe']:28s} {way:16s} {rise:+7.1%} KL {quality['kl']:.3f} top-1 {quality['top1']:.3f}")
        if given.record:
            page.RECORD.add("quality", record)
    if given.record:
        page.write()


if __name__ == "__main__":
    main()
