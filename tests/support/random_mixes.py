"""Random mixes of layers: logits, gradients and generation compared with the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import draws
import emitted
import torch
import zoo
from oracles import greedy_oracle, relative_error

from rewriter.check.per_rank_reference import PerRankReference
from rewriter.emit.huggingface import emit_huggingface
from rewriter.ir.simulate import simulate
from rewriter.recipes.apply import lint
from rewriter.tracing import trace

SAME = 1e-5


DIFFERENT = 1e-2


@torch.no_grad()
def check_mixes(rng: random.Random, drawn: draws.Architecture, mixes: Sequence[draws.Mix], seed: int = 0) -> None:
    model, program = draws.build(drawn, seed), trace(drawn.config)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    ids = zoo.batch(2, 21, drawn.config.vocab_size, seed)
    original = model(input_ids=ids, use_cache=False).logits
    for chosen in mixes:
        rewritten = draws.rewrite(rng, program, drawn, chosen)
        lint(rewritten, "the last pass")
        reference = PerRankReference(model, chosen.modes(), chosen.ranks, whole=drawn.whole(chosen.ranks))
        expected = reference(ids)
        case = f"{drawn.config}\n{chosen}"
        changed = any(step.since < b or (step.split and not step.keep) for b, step in enumerate(reference.steps[0]))
        difference = relative_error(expected, original)
        assert difference >= DIFFERENT if changed else difference <= SAME, case
        assert relative_error(simulate(rewritten, ids, weights=weights), expected) <= SAME, case


def check_generation(family: str, seed: int, ranks: int, directory: Path, tokens: int = 8) -> None:
    """The adapted checkpoint of a random mix writes, with its cache, what recomputing with the reference gives."""
    rng = random.Random(f"{family} {seed} generation")
    drawn = draws.architecture(rng, family, ranks)
    while not drawn.equal_runs(ranks):  # on one device, ranks hold equal parts of a projection
        drawn = draws.architecture(rng, family, ranks)
    model, chosen = draws.build(drawn, seed), draws.mix(rng, drawn, ranks)
    model.save_pretrained(directory / "source")
    rewritten = draws.rewrite(rng, trace(directory / "source"), drawn, chosen)
    emitted.write(emit_huggingface(rewritten), directory / "source", directory / "adapted")
    adapted = emitted.load(directory / "adapted")
    for layer, blocks in enumerate(adapted.config.rewriter_pattern or []):
        mode = chosen.modes()[layer].mode
        assert mode == "desync" or set(blocks.values()) == {mode}
    reference = PerRankReference(model, chosen.modes(), ranks, whole=drawn.whole(ranks))
    prompts = zoo.prompts(3, drawn.config.vocab_size)
    with torch.no_grad():
        expected = greedy_oracle(reference, prompts, tokens)
    inputs = emitted.left_padded(prompts)
    text = adapted.generate(**inputs, max_new_tokens=tokens, do_sample=False, use_cache=True)
    assert text[:, inputs["input_ids"].shape[1] :].tolist() == expected, f"{drawn.config}\n{chosen}"
