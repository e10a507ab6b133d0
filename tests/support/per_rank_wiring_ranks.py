"""Programs that are bound to their ranks, on real ranks, compared with the reference."""

from __future__ import annotations

from typing import Any

import torch
import zoo
from emitted_ranks import on_rank
from oracles import greedy_oracle, relative_error
from programs import MERGE, OVERLAP, runtime_case, tensor_parallel, traced, weights
from ranks import run_ranks

from rewriter.ir import Program
from rewriter.ir.simulate import simulate, whole_parameter

TOLERANCE = 1e-4


Passes = list[tuple[str, dict[str, Any]]]


def rewritten(name: str, ranks: int, passes: Passes, overlap: bool = True) -> Program:
    """Family `name` over `ranks` ranks after `passes`."""
    first = [] if MERGE in passes else [MERGE]
    return tensor_parallel(traced(name), ranks, *first, *passes, *[OVERLAP] * overlap)


def full_weights(program: Program, name: str) -> dict[str, torch.Tensor]:
    """Full tensors by runtime name; norms that ranks do not share get other weights on each."""
    found = dict(weights(name))
    for parameter, spec in program.parameters.items():
        if parameter in found and spec.full_shape is not None and spec.full_shape != tuple(found[parameter].shape):
            copies = spec.full_shape[0] // found[parameter].shape[0]
            noise = torch.linspace(-0.3, 0.3, spec.full_shape[0])
            found[parameter] = found[parameter].repeat(copies) + noise
    return found


def check(name: str, ranks: int, cases: dict[str, Passes], new_tokens: int = 16, overlap: bool = True) -> None:
    vocabulary = zoo.shared(name).config.vocab_size
    ids, prompts = zoo.batch(2, 13, vocabulary), zoo.prompts(3, vocabulary)
    programs = {label: rewritten(name, ranks, passes, overlap) for label, passes in cases.items()}
    full = {label: full_weights(p, name) for label, p in programs.items()}
    emitted = [runtime_case(p, full[label]) for label, p in programs.items()]
    by_rank = run_ranks(on_rank, ranks, emitted, ids, prompts, new_tokens)
    original = simulate(traced(name), ids, weights=weights(name))
    for index, (label, program) in enumerate(programs.items()):
        leaves = {n: t.clone().requires_grad_() for n, t in full[label].items()}
        expected = simulate(program, ids, weights=leaves)
        assert relative_error(expected.detach(), original) >= 1e-2, label  # else equality would mean nothing
        expected.square().mean().backward()
        wanted = greedy_oracle(lambda x, p=program, w=full[label]: simulate(p, x, weights=w), prompts, new_tokens)
        for logits, gradients, tokens in (rank[index] for rank in by_rank):
            assert relative_error(logits, expected.detach()) <= TOLERANCE, label
            assert tokens == wanted, label
            assert gradients.keys() <= program.parameters.keys()
        compare_gradients(label, program, leaves, [rank[index][1] for rank in by_rank])


def compare_gradients(label: str, program: Program, leaves: dict[str, torch.Tensor], by_rank: list[Any]) -> None:
    """Every parameter's gradient on every rank is its part of the full one; what nothing reads has none."""
    whole = {n: t.grad if t.grad is not None else torch.zeros_like(t) for n, t in leaves.items()}
    for name, spec in program.parameters.items():
        expected = whole_parameter(name, spec, whole)
        for rank, gradients in enumerate(by_rank):
            part = expected
            if spec.ranges is not None:
                part = torch.cat([expected.narrow(spec.dim, a, b - a) for a, b in spec.ranges[rank]], spec.dim)
            if gradients[name] is None:
                assert not expected.any(), f"{label}: {name} on rank {rank} has no gradient"
            else:
                error = (gradients[name] - part).abs().max() / expected.abs().max()
                assert error <= TOLERANCE, f"{label}: {name} on rank {rank}: {error:.1e}"
