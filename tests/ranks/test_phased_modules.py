"""Runtime modules of programs that rewire tokens of the prompt alone, on real ranks: each of a module's entries
computes what the simulated ranks compute, token by token, whatever the chunks, the padding and the rows of a batch are.

Computed in fp64, where only norms and rotary tables round. What travels quantized is fp32, and there two right sums now
and then differ by a step of the format: errors are compared with what quantization itself changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import phased_ranks
import pytest
import torch
import zoo
from emitted_ranks import compare_gradients
from oracles import relative_error
from programs import MERGE, OVERLAP, Step, applied, runtime_case, tensor_parallel, traced, weights
from ranks import run_ranks

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.ops import SequencePlan
from rewriter.ir.phases import PromptPhase, prompt_phase
from rewriter.ir.simulate import simulate
from rewriter.passes.phases import both_wirings

SAME, NEW_TOKENS, LENGTH = 1e-5, 6, 21
PHASES = [(1, 0), (3, 2), (5, 0), (2, 7)]  # exact_tail, exact_head


def steps(kind: str, tail: int, head: int) -> list[Step]:
    phase = {"phase": "prompt", "exact_tail": tail, "exact_head": head}
    return {
        "ladder": [MERGE, ("ladder", phase), OVERLAP],
        "own_partial": [MERGE, ("ladder", {"variant": "own_partial", **phase}), OVERLAP],
        "desync": [MERGE, ("desync", {"n": 2, "resync": "sum", **phase}), OVERLAP],
        "drop_sync": [MERGE, ("drop_sync", {"layers": [1, 2], **phase}), OVERLAP],
        "parallel_block": [("parallel_block", phase), MERGE, OVERLAP],
        "int8": [MERGE, ("quantize_collectives", {"format": "int8", "min_bytes": 0, **phase}), OVERLAP],
        "upper": [MERGE, ("ladder", {"layers": [2, 3], **phase}), OVERLAP],
        "branches": [MERGE, ("ladder", phase), ("overlap", {"branches": 2})],
    }[kind]


KINDS = ("ladder", "own_partial", "desync", "drop_sync", "parallel_block", "int8")
HELD = [("llama", kind) for kind in (*KINDS, "upper", "branches")]
HELD += [("gpt2", "desync"), ("gemma3_text", "own_partial"), ("qwen3_moe", "ladder")]
FAST = [("llama", "branches"), ("llama", "int8"), ("gpt2", "desync"), ("gemma3_text", "own_partial")]
ALL = [*HELD, *((family, kind) for family in zoo.FAMILIES for kind in KINDS if (family, kind) not in HELD)]


@functools.cache
def double(family: str) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in weights(family).items()}


@functools.cache
def program(family: str, kind: str, ranks: int, tail: int, head: int) -> Program:
    return tensor_parallel(traced(family), ranks, *steps(kind, tail, head))


def batch(family: str) -> torch.Tensor:
    return zoo.batch(2, LENGTH, zoo.shared(family).config.vocab_size)


def random_mask() -> torch.Tensor:
    """Runs of both phases, of which some are all tokens of a column."""
    draw = torch.Generator().manual_seed(3)
    mask = torch.rand(2, LENGTH, generator=draw) < 0.5
    mask[:, 4:12], mask[:, 15:18] = True, False
    return mask


def simulated(both: Program, family: str, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return simulate(both, ids, weights=double(family), rewired=mask)


def greedy(both: Program, family: str, prompts: list[list[int]], phase: PromptPhase) -> list[list[int]]:
    """Greedy tokens, everything recomputed for every token, rows filled up on the right."""
    length = max(map(len, prompts)) + NEW_TOKENS
    ids = torch.tensor([[*prompt, *[prompt[0]] * (length - len(prompt))] for prompt in prompts])
    mask = torch.cat([phase.rewired(length, prompt=len(prompt)) for prompt in prompts])
    ends = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.arange(len(prompts))
    for step in range(NEW_TOKENS):
        ids[rows, ends + step] = simulated(both, family, ids, mask)[rows, ends + step - 1].argmax(-1)
    return [ids[row, end : end + NEW_TOKENS].tolist() for row, end in enumerate(ends.tolist())]


def on_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    return [function(None, *arguments)] if ranks == 1 else run_ranks(function, ranks, *arguments)


@torch.no_grad()
def check(family: str, kind: str, ranks: int, tail: int, head: int) -> None:
    sharded = program(family, kind, ranks, tail, head)
    both, phase, exact_sums = both_wirings(sharded), PromptPhase(tail, head), kind != "int8"
    assert prompt_phase(sharded) == phase
    ids, mask = batch(family), random_mask()
    prompts = [prompt[: 5 + 4 * i] for i, prompt in enumerate(zoo.prompts(4, zoo.shared(family).config.vocab_size))]
    every = torch.ones_like(mask)
    wanted = {"rewired": every, "exact": ~every, "mixed": mask, "default": phase.rewired(LENGTH).expand(2, -1)}
    expected = {name: simulated(both, family, ids, said) for name, said in wanted.items()}
    assert relative_error(expected["rewired"], expected["exact"]) >= (0.01 if exact_sums else 1e-4)
    alone = simulated(both, family, ids[1:, 5:], phase.rewired(LENGTH - 5))[0]
    with torch.enable_grad():
        full = {name: tensor.clone().requires_grad_() for name, tensor in double(family).items()}
        simulate(both, ids, weights=full, rewired=mask).square().mean().backward()
    tokens = greedy(both, family, prompts, phase) if exact_sums else []
    cases = [runtime_case(sharded, double(family) if exact_sums else weights(family))]
    by_rank = on_ranks(phased_ranks.everything, ranks, cases, ids, mask, prompts, NEW_TOKENS if exact_sums else 0)
    for (result,) in by_rank:
        for name, logits in result["whole"].items():
            if exact_sums or name == "exact":
                assert relative_error(logits, expected[name]) <= SAME, name
            else:
                error, effect = ((x - expected[name]).norm() for x in (logits, expected["exact"]))
                assert error <= effect / 4, name
        (filled, all_sums), (keys, sums) = result["stored"]
        assert all(map(torch.equal, filled, keys))
        assert ranks == 1 or sums < all_sums
        if exact_sums:  # a message has other blocks when it has other tokens
            assert all(relative_error(logits, expected["mixed"]) <= SAME for logits in result["chunks"])
            assert relative_error(result["padded"], alone) <= SAME
            assert result["tokens"] == [tokens] * 4
    if exact_sums:
        compare_gradients(sharded, [result["gradients"] for (result,) in by_rank], _Gradients(full))


class _Gradients:
    """Looks like a model to `compare_gradients`."""

    def __init__(self, full: dict[str, torch.Tensor]) -> None:
        self.get_parameter = full.__getitem__


@pytest.mark.parametrize(("source", "kind"), ALL)
@pytest.mark.fast(*(f"{family}-{kind}" for family, kind in FAST))
def test_every_entry_computes_what_simulated_ranks_compute(source: str, kind: str) -> None:
    tail, head = PHASES[(zoo.FAMILIES.index(source) + len(kind)) % len(PHASES)]
    try:
        program(source, kind, 2, tail, head)
    except RewriterError as refusal:  # of a family whose layers have no place for the rewrite
        assert (source, kind) not in HELD
        pytest.skip(f"refused: {refusal}")
    check(source, kind, 2, tail, head)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_on_four_ranks(kind: str) -> None:
    check("llama", kind, 4, 3, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("tail", "head"), PHASES)
def test_any_ends_of_the_prompt_stay_exact(tail: int, head: int) -> None:
    check("llama", "desync", 2, tail, head)


def test_a_ladder_on_one_rank() -> None:
    check("llama", "ladder", 1, 2, 3)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_the_exact_entry_is_the_standard_module_bit_for_bit(dtype: torch.dtype) -> None:
    """Logits, events of collectives, and a decode step."""
    full = {name: tensor.to(dtype) for name, tensor in weights("llama").items()}
    pairs = []
    for kind in (*KINDS, "branches"):
        sharded = program("llama", kind, 2, 2, 1)
        standard = tensor_parallel(traced("llama"), 2, *[s for s in steps(kind, 2, 1) if "phase" not in s[1]])
        pairs.append((runtime_case(sharded, full), runtime_case(standard, full)))
    assert run_ranks(phased_ranks.same_bits, 2, pairs, batch("llama")) == [[(True, True, True)] * len(pairs)] * 2


def test_an_exact_sum_that_is_left_out_is_seen() -> None:
    """Of one layer's attention, in the exact entry alone."""
    sharded = program("llama", "desync", 2, 2, 1)
    source, tensors, ties = runtime_case(sharded, double("llama"))
    before, after = source.split("    def exact(", 1)
    reduction = 'self_attn = all_reduce(self_attn, self.tp, name="self_attn")'
    broken = f"{before}    def exact({after.replace(reduction, 'pass', 1)}"
    assert broken.count(reduction) == source.count(reduction) - 1
    found = run_ranks(phased_ranks.same_bits, 2, [((broken, tensors, ties), _standard("desync"))], batch("llama"))
    assert found == [[(False, False, False)]] * 2


def _standard(kind: str) -> tuple[Any, ...]:
    steps_of_all = [s for s in steps(kind, 2, 1) if "phase" not in s[1]]
    return runtime_case(tensor_parallel(traced("llama"), 2, *steps_of_all), double("llama"))


SEQUENCES: dict[str, tuple[SequencePlan, str, int, int, bool]] = {  # plan, kind, tp, dp, FSDP2
    "ring": (SequencePlan("ring", (1, 2, 1)), "desync", 2, 1, False),
    "ulysses": (SequencePlan("ulysses", (2, 1, 1)), "ladder", 1, 2, True),
    "attention2d": (SequencePlan("attention2d", (1, 1, 2)), "own_partial", 2, 1, False),
}


@pytest.mark.slow
@pytest.mark.parametrize(("tail", "head"), [(2, 3), (1, 0)])
def test_sharded_sequences_have_both_phases(tail: int, head: int) -> None:
    """Every entry, the gradients of the loss, and generation: a prompt's exact end follows its sharded tokens."""
    ids, mask, phase, cases, programs = batch("llama"), random_mask(), PromptPhase(tail, head), [], []
    prompts = [prompt[: 5 + 4 * i] for i, prompt in enumerate(zoo.prompts(3, 256))][::-1]
    for plan, kind, tp, dp, fsdp in SEQUENCES.values():
        first = ("sequence_parallel", {"kind": plan.kind, "grid": plan.grid})
        sharded = applied(
            traced("llama").with_(mesh={"tp": tp, "sp": plan.ranks}),
            ("tensor_parallel", {}), first, *steps(kind, tail, head),
        )  # fmt: skip
        programs.append(sharded)
        cases.append((*runtime_case(sharded, double("llama")), plan.grid, tp, dp, fsdp))
    by_rank = run_ranks(phased_ranks.over_sequences, 4, cases, ids, mask, prompts, NEW_TOKENS)
    every = torch.ones_like(mask)
    wanted = {"rewired": every, "exact": ~every, "mixed": mask, "default": phase.rewired(LENGTH).expand(2, -1)}
    for index, (sharded, (_, kind, tp, _, _)) in enumerate(zip(programs, SEQUENCES.values(), strict=True)):
        both = both_wirings(program("llama", kind, tp, tail, head))
        full = {name: tensor.clone().requires_grad_() for name, tensor in double("llama").items()}
        logits = simulate(both, ids, weights=full, rewired=mask)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        with torch.no_grad():
            tokens = greedy(both, "llama", prompts, phase)
            for rank in by_rank:
                for name, found in rank[index][0].items():
                    assert relative_error(found, simulated(both, "llama", ids, wanted[name])) <= SAME, (kind, name)
                assert rank[index][2] == [tokens, tokens[:1]], kind
        by_tp = [rank[index][1] for rank in by_rank[:tp]]
        compare_gradients(sharded, by_tp, _Gradients(full))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_segments_generate_the_same(ranks: int) -> None:
    kind = "desync" if ranks > 1 else "ladder"
    sharded, phase = program("llama", kind, ranks, 3, 2), PromptPhase(3, 2)
    prompts = zoo.prompts(3, 256)
    wanted = greedy(both_wirings(sharded), "llama", prompts, phase)
    by_rank = on_ranks(phased_ranks.compiled, ranks, [runtime_case(sharded, double("llama"))], prompts, NEW_TOKENS)
    assert by_rank == [[([wanted] * 3, "compiled segments" if ranks > 1 else "compiled")]] * ranks
