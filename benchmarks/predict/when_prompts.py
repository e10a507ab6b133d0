"""Prompts: the section of docs/results/when.md on times to first token, with recipes that rewire the prompt alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.predict.backtest_points import traced
from rewriter.common.numbers import duration
from rewriter.fabric import load_fabric
from rewriter.ir import Program
from rewriter.ir.phases import PromptPhase
from rewriter.passes.phases import PhasedPass
from rewriter.predict.analytic import Predictor
from rewriter.predict.candidates import Candidates
from rewriter.predict.workload import FIRST_TOKEN_PROMPTS, Cluster, Workload
from rewriter.recipes import Recipe
from rewriter.recipes.apply import load_recipe

TP, GENERATE = 8, 512
FABRICS = {
    "NVLink: 8 H200": "h200-nvlink",
    "PCIe 5.0: 8 RTX PRO 6000": "pcie-gen5",
    "PCIe 4.0: 8 L40S": "pcie-gen4",
    "RoCE: 8 servers of one L40S": "roce-100g",
    "Ethernet: 8 servers of one L40S, TCP": "ethernet-100g",
}
STANDARD = "tensor-parallel"
ALL_TOKENS = ("tensor-parallel-int8", "ladder", "desync-2x-sum")
PROMPT_ALONE = ("tensor-parallel-int8", "ladder", "ladder-int8", "desync-2x-sum", "desync-4x-sum")
HEADING = "## Prompts"


@dataclass(frozen=True)
class PromptRow:
    """Times to first token of one model on one fabric and prompt, in seconds: of the standard model, of it cut into
    calls without being rewired, and of recipes; None where they cannot be applied, or do not fit in memory."""

    model: str
    fabric: str
    prompt: int
    standard: float | None
    cut: float | None
    all_tokens: tuple[float | None, ...]
    prompt_alone: tuple[float | None, ...]


def of_prompt(name: str) -> Recipe:
    """A shipped recipe whose passes rewire the prompt alone."""
    recipe = load_recipe(name)
    for index, rewrite in enumerate(recipe.build()):
        if isinstance(rewrite, PhasedPass):
            recipe = recipe.with_options(index, {"phase": "prompt"})
    return recipe.model_copy(update={"name": f"prompt: {name}"})


def rows(title: str, model: str) -> list[PromptRow]:
    """The rows of one model, called `title`."""
    names = [*(load_recipe(name) for name in (STANDARD, *ALL_TOKENS)), *map(of_prompt, PROMPT_ALONE)]
    made, _ = Candidates(traced(model, "bfloat16")).of(names, TP)
    programs = {candidate.recipe: candidate.program for candidate in made}
    found: list[PromptRow] = []
    for name, fabric in FABRICS.items():
        modelled = " (modelled)" if load_fabric(fabric).modelled else ""
        predictor = Predictor(Workload(generate=GENERATE, tp=TP), Cluster(fabric))
        found += [_row(title, name + modelled, prompt, predictor, programs) for prompt in FIRST_TOKEN_PROMPTS]
        print(title, name, *(row.standard for row in found[-len(FIRST_TOKEN_PROMPTS) :]), sep=" | ", flush=True)
    return found


def _row(model: str, fabric: str, prompt: int, predictor: Predictor, programs: Mapping[str, Program]) -> PromptRow:
    def seconds(recipe: str, cut: PromptPhase | None = None) -> float | None:
        if recipe not in programs:
            return None
        first = predictor.first_token(programs[recipe], prompt, cut)
        return first.seconds if first.fits else None

    return PromptRow(
        model, fabric, prompt, seconds(STANDARD), seconds(STANDARD, PromptPhase()), tuple(map(seconds, ALL_TOKENS)),
        tuple(seconds(f"prompt: {one}") for one in PROMPT_ALONE),
    )  # fmt: skip


def section(found: Sequence[PromptRow]) -> str:
    """The section in Markdown; of models that do not fit anywhere, nothing."""
    header = ["model", "fabric", "prompt", "standard", "cut", *(f"`{name}`" for name in ALL_TOKENS)]
    header += [f"prompt: `{name}`" for name in PROMPT_ALONE]
    lines = [_cells(row) for row in found if row.standard is not None]
    return "\n\n".join(
        [
            HEADING,
            f"Time to first token at TP {TP}, one sequence, in bf16: of the standard model, and what others gain over "
            "it in prefills per second. On a slow fabric fewer GPUs may be faster for all of them.",
            "- *Cut*: the standard model, its prompt in two calls, one for all tokens but the last and one for that. "
            "The first spares the last layer all but its keys and values; the second is as long as a decode step.\n"
            "- Columns of a recipe alone: all tokens are rewired, and generation is faster as well.\n"
            "- *prompt*: the passes of this recipe with `phase: prompt`. All tokens of the prompt but the last are "
            "rewired, in two calls as above. A decode step takes as long as the standard model's, and computes the "
            "same from the keys and values that it finds. What other keys and values cost in loss is not said here: "
            "[`rewrite search`](../concepts/search.md) measures it on a model's weights.",
            table(header, lines),
        ]
    )


def _cells(row: PromptRow) -> list[str]:
    assert row.standard is not None
    others = (row.cut, *row.all_tokens, *row.prompt_alone)
    gains = ["—" if seconds is None else f"{row.standard / seconds - 1:+.0%}" for seconds in others]
    return [row.model, row.fabric, f"{row.prompt:,}", duration(row.standard), *gains]


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines))


def replaced(page: str, text: str) -> str:
    """The page with this section in place of its own, or where it has none, before the first model's."""
    if HEADING in page:
        return re.sub(rf"{HEADING}\n.*?(?=\n## )", lambda _: text + "\n", page, count=1, flags=re.DOTALL)
    sections = re.split(r"(?m)^(?=## )", page)
    return "".join([*sections[:3], text + "\n\n", *sections[3:]])
