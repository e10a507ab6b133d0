"""Random programs × random recipes × P ranks, against the independent references: logits, a step of training, text.

The passes, the simulator and the emitted files are what is checked. `PerRankReference` knows none of them: it runs P
copies of the eager model of transformers.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import draws
import torch
import zoo
from emitted_ranks import compare_gradients, on_rank
from oracles import greedy_oracle, relative_error
from programs import runtime_case
from random_mixes import check_generation, check_mixes
from ranks import run_ranks

from rewriter.check.per_rank_reference import PerRankReference
from rewriter.ir.simulate import simulate
from rewriter.tracing import trace
from soak.cases import Kind, Outcome, generator

RANKS = (1, 2, 3, 4, 8)
SAME_STEP = 1e-3  # gradients, relative to the largest of their parameter
SAME_ON_RANKS = 1e-4
RATE = 1e-2
TOKENS = 8
MIXES = 8  # of an architecture: tracing it takes longer than to rewrite and compare


def case(index: int, place: Path) -> Outcome:
    """A random architecture over P ranks. Most cases compare logits of eight mixes; the others cost more."""
    draw = generator("programs", index)
    family, ranks = draws.ALL_FAMILIES[index % len(draws.ALL_FAMILIES)], draw.choice(RANKS)
    checks = {"logits": (logits, 8), "training steps": (training_step, 4), "texts": (text, 2), "ranks": (real, 1)}
    what = draw.choices(list(checks), [weight for _, weight in checks.values()])[0]
    check = checks[what][0]
    outcome = Outcome()
    for found, count in check(draw, family, ranks, place).items():
        outcome.counts[f"{what}, {found}"] += count
    return outcome


def logits(draw: random.Random, family: str, ranks: int, place: Path) -> dict[str, int]:
    drawn = draws.architecture(draw, family, ranks)
    check_mixes(draw, drawn, [draws.mix(draw, drawn, ranks) for _ in range(MIXES)], draw.randrange(1000))
    return {_over(ranks): MIXES}


def training_step(draw: random.Random, family: str, ranks: int, place: Path) -> dict[str, int]:
    """Gradients of every parameter, and the logits after a step along them.

    Errors are relative to the parameter's largest gradient, but not to less than 1e-3 of the model's: a router of one
    expert whose weight is normalised has a gradient of rounding alone.
    """
    drawn = draws.architecture(draw, family, ranks)
    seed = draw.randrange(1000)
    model, program = draws.build(drawn, seed), trace(drawn.config)
    chosen = draws.mix(draw, drawn, ranks)
    rewritten = draws.rewrite(draw, program, drawn, chosen)
    about = f"{drawn.config}\n{chosen}"
    ids = zoo.batch(2, 21, drawn.config.vocab_size, seed)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    reference = PerRankReference(model, chosen.modes(), ranks, whole=drawn.whole(ranks))
    reference(ids).square().mean().backward()
    simulate(rewritten, ids, weights=weights).square().mean().backward()
    with torch.no_grad():
        largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
        for name, parameter in model.named_parameters():
            ours, theirs = (
                torch.zeros_like(parameter) if p.grad is None else p.grad for p in (weights[name], parameter)
            )
            scale = max(float(theirs.abs().max()), 1e-3 * largest)
            error = float((ours - theirs).abs().max()) / scale
            assert error <= SAME_STEP, f"the gradient of {name} differs by {error:.1e}: {about}"
            parameter -= RATE / largest * theirs
            weights[name] -= RATE / largest * ours
        after = PerRankReference(model, chosen.modes(), ranks, whole=drawn.whole(ranks))(ids)
        error = relative_error(simulate(rewritten, ids, weights=weights), after)
        assert error <= SAME_STEP, f"after a step logits differ by {error:.1e}: {about}"
    return {_over(ranks): 1}


def text(draw: random.Random, family: str, ranks: int, place: Path) -> dict[str, int]:
    """What the adapted checkpoint writes with a cache, after prompts padded on the left."""
    if family in draws.EXPERTS | draws.SUMS_INSIDE:
        ranks = 1  # the per-rank residuals of these are not computed on one device
    shutil.rmtree(place / "text", ignore_errors=True)
    (place / "text").mkdir()
    check_generation(family, draw.randrange(10**6), ranks, place / "text", TOKENS)
    return {_over(ranks): 1}


def real(draw: random.Random, family: str, ranks: int, place: Path) -> dict[str, int]:
    """Emitted modules on real ranks: logits, gradients, and text with a static cache and padding."""
    drawn = draws.architecture(draw, family, ranks)
    model, program = draws.build(drawn, draw.randrange(1000)), trace(drawn.config)
    full = {name: p.detach() for name, p in model.named_parameters()}
    ids, prompts = zoo.batch(2, 21, drawn.config.vocab_size), zoo.prompts(3, drawn.config.vocab_size)
    mixes = [draws.mix(draw, drawn, ranks) for _ in range(3)]
    rewritten = [draws.rewrite(draw, program, drawn, chosen) for chosen in mixes]
    cases = [runtime_case(one, full) for one in rewritten]
    by_rank = (
        [on_rank(None, cases, ids, prompts, TOKENS)]
        if ranks == 1
        else run_ranks(on_rank, ranks, cases, ids, prompts, TOKENS)
    )
    for number, chosen in enumerate(mixes):
        about = f"{drawn.config}\n{chosen}"
        reference = PerRankReference(model, chosen.modes(), ranks, whole=drawn.whole(ranks))
        model.zero_grad()
        expected = reference(ids)
        expected.square().mean().backward()
        with torch.no_grad():
            texts = greedy_oracle(reference, prompts, TOKENS)
        for found, _, tokens in (rank[number] for rank in by_rank):
            assert relative_error(found, expected.detach()) <= SAME_ON_RANKS, about
            assert tokens == texts, about
        compare_gradients(rewritten[number], [rank[number][1] for rank in by_rank], model)
    return {_over(ranks): 3}


def _over(ranks: int) -> str:
    return f"P={ranks}"


KIND = Kind("programs", share=0.4, limit=400, prepare=lambda place: None, run=case)
