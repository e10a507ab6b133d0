"""Programs that rewire the prompt alone: what both wirings compute, token by token, beside an independent reference."""

from __future__ import annotations

import functools
import random

import pytest
import torch
import zoo
from oracles import relative_error
from programs import MERGE, OVERLAP, PASSES, Step, tensor_parallel, traced, weights

from rewriter.check.per_rank_reference import PerRankReference
from rewriter.check.reference_modes import layer_modes, reference_of
from rewriter.common.errors import RewriterError
from rewriter.ir import Program, ops
from rewriter.ir.marks import marks
from rewriter.ir.phases import PromptPhase, prompt_phase
from rewriter.ir.simulate import simulate
from rewriter.passes.phases import both_wirings, exact_wiring, single_device
from rewriter.recipes.apply import apply_recipe, lint, load_recipe

LENGTH = 21
ENDS = {"phase": "prompt", "exact_tail": 3, "exact_head": 2}
REWRITES: dict[str, list[Step]] = {
    "ladder": [("ladder", {})],
    "upper half": [("ladder", {"layers": "upper-half"})],
    "own partial": [("ladder", {"variant": "own_partial"})],
    "desync mean": [("desync", {"n": 2})],
    "desync sum": [("desync", {"n": 2, "resync": "sum"})],
    "desync 4": [("desync", {"n": 4, "resync": "sum"})],
    "drop": [("drop_sync", {"layers": [1, 3]})],
    "parallel": [("parallel_block", {})],
    "parallel, own norms": [("parallel_block", {"norm": "own"})],
    "mixed": [("parallel_block", {"layers": [0], "norm": "own"}), ("ladder", {"layers": [1]}),
              ("desync", {"layers": [2], "n": 2, "resync": "sum"}),
              ("ladder", {"layers": [3], "variant": "own_partial"})],
}  # fmt: skip
MODEL_SCOPE = ("ladder", "upper half", "parallel", "parallel, own norms")  # the same function on any number of ranks
CELLS = [
    (family, rewrite, ranks)
    for family in zoo.FAMILIES
    for ranks in (1, 2, 3, 4)
    for rewrite in (REWRITES if ranks > 1 else MODEL_SCOPE)
]


def rewritten(name: str, rewrite: str, ranks: int, phase: dict = ENDS) -> Program:
    """A family rewired for tokens of the prompt, or skip where the rewrite refuses it."""
    rewires = [(step, options | phase) for step, options in REWRITES[rewrite]]
    try:
        program = tensor_parallel(traced(name), ranks, MERGE, *rewires, MERGE, ("fuse_projections", {}), OVERLAP)
    except RewriterError as refusal:
        pytest.skip(f"refused: {refusal}")
    lint(program, rewrite)
    return program


@functools.cache
def ids(name: str) -> torch.Tensor:
    return zoo.batch(2, LENGTH, zoo.shared(name).config.vocab_size)


def mask(seed: int, share: float = 0.6) -> torch.Tensor:
    """Any tokens of two rows."""
    return torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(seed)) < share


@torch.no_grad()
def logits(program: Program, name: str, rewired: torch.Tensor | None = None) -> torch.Tensor:
    whole = {n: p.detach() for n, p in zoo.shared(name).named_parameters()}
    extra = program.parameters.keys() - whole.keys()
    assert all(program.parameters[n].parts for n in extra)
    return simulate(program, ids(name), weights=whole, rewired=rewired)


@pytest.mark.parametrize(("family", "rewrite", "ranks"), CELLS)
@pytest.mark.fast(
    *(f"{family}-{rewrite}-2" for family in ("llama", "gemma2") for rewrite in REWRITES),
    *(f"{family}-{rewrite}-{ranks}" for family in ("gpt2", "qwen3_moe", "gpt_neox")
      for rewrite, ranks in (("ladder", 1), ("desync sum", 3), ("own partial", 4), ("drop", 2))),
)  # fmt: skip
def test_each_token_is_what_an_independent_reference_makes_of_it(family, rewrite, ranks):
    name = f"{family}@3" if ranks == 3 else family
    program = rewritten(name, rewrite, ranks)
    both, model = both_wirings(program), zoo.shared(name)
    lint(both, "both wirings")
    reference = reference_of(program, [entry.rewrite for entry in program.history])
    rewired = mask(ranks)
    assert relative_error(logits(both, name, rewired), reference.logits(model, ids(name), rewired)) <= 1e-5
    by_default = PromptPhase(3, 2).rewired(LENGTH).expand(2, -1)
    assert by_default.sum() == 2 * (LENGTH - 5)
    assert torch.equal(logits(both, name), logits(both, name, by_default))
    assert relative_error(logits(both, name), reference.logits(model, ids(name))) <= 1e-5

    exact, plain = logits(both, name, torch.zeros_like(rewired)), logits(tensor_parallel(traced(name), ranks), name)
    assert relative_error(exact, plain) <= 1e-6
    assert torch.equal(logits(exact_wiring(program), name), exact)
    all_tokens = rewritten(name, rewrite, ranks, {})
    assert relative_error(logits(both, name, torch.ones_like(rewired)), logits(all_tokens, name)) <= 1e-6
    if ranks == 1:  # a product of fused projections may be another one's bits, so those are fused on both sides
        fused = tensor_parallel(traced(name), ranks, MERGE, ("fuse_projections", {}))
        assert torch.equal(exact, logits(fused, name))


@pytest.mark.parametrize("rewrite", MODEL_SCOPE)
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_exact_tokens_have_the_bits_of_the_model(family, rewrite):
    """Of a prompt that is exact up to a token, all before it are the model's as traced."""
    single = single_device(rewritten(family, rewrite, 1))
    rewired = torch.zeros(2, LENGTH, dtype=torch.bool)
    rewired[:, 9:] = True
    expected = logits(traced(family), family)
    found = logits(single, family, rewired)
    assert torch.equal(found[:, :9], expected[:, :9])
    assert relative_error(found[:, 9:], expected[:, 9:]) > 1e-2


@pytest.mark.parametrize("recipe", ["prefill-ladder-upper-half", "prefill-ladder", "prefill-desync-2x-sum",
                                    "prefill-desync-4x-sum", "prefill-int8", "prefill-desync-2x-sum-int8"])  # fmt: skip
def test_shipped_recipes_leave_both_ends_of_a_prompt_and_what_follows_exact(recipe):
    program, _ = apply_recipe(traced("llama"), load_recipe(recipe), 2)
    assert prompt_phase(program) is not None
    standard, _ = apply_recipe(traced("llama"), load_recipe("tensor-parallel"), 2)
    exact = exact_wiring(program)
    assert [entry.name for entry in exact.history if entry.kind == "approximating"] == []
    assert torch.equal(logits(exact, "llama"), logits(standard, "llama"))


def test_two_phases_and_all_tokens_side_by_side():
    """Layers rewired for all tokens are so at exact ones, and transitions are those of each token's wiring."""
    everywhere, prompt = ("ladder", {"layers": [1]}), ("desync", {"layers": [0, 2, 3], "n": 2, "resync": "sum"} | ENDS)
    program = tensor_parallel(traced("llama"), 2, MERGE, everywhere, prompt, OVERLAP)
    reference = reference_of(program, [entry.rewrite for entry in program.history])
    for seed in range(3):
        found = logits(both_wirings(program), "llama", mask(seed))
        assert relative_error(found, reference.logits(zoo.shared("llama"), ids("llama"), mask(seed))) <= 1e-5
    only_everywhere = tensor_parallel(traced("llama"), 2, MERGE, everywhere, OVERLAP)
    assert torch.equal(logits(exact_wiring(program), "llama"), logits(only_everywhere, "llama"))


@pytest.mark.parametrize("rewrite", REWRITES)
def test_gradients_reach_each_parameter_once(rewrite):
    """Those of the reference, whose autograd knows nothing of ranks but their sums."""
    program = rewritten("llama", rewrite, 2)
    model = zoo.build("llama")
    names = dict(model.named_parameters())
    reference = reference_of(program, [entry.rewrite for entry in program.history])
    mix = layer_modes(model, reference.passes, reference.whole)
    wanted = PerRankReference(model, mix, reference.ranks, whole=reference.whole)(ids("llama"), mask(7))
    wanted.square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in names.items()}
    model.zero_grad()
    out = simulate(both_wirings(program), ids("llama"), weights=names, rewired=mask(7))
    out.square().mean().backward()
    for name, gradient in expected.items():
        assert relative_error(names[name].grad, gradient) <= 1e-4, name


# --- seeded faults: what a test above has to see


def tail_off_by_one(rewired: torch.Tensor) -> torch.Tensor:
    """The last rewired token of each row is exact."""
    shifted = rewired.clone()
    for row in shifted:
        row[int(row.nonzero().max())] = False
    return shifted


def prompt_token_as_generated(rewired: torch.Tensor) -> torch.Tensor:
    changed = rewired.clone()
    changed[0, int(changed[0].nonzero()[0])] = False
    return changed


@pytest.mark.parametrize("fault", [tail_off_by_one, prompt_token_as_generated, torch.logical_not])
@pytest.mark.parametrize("rewrite", REWRITES)
def test_a_token_of_the_other_phase_shows(rewrite, fault):
    program = rewritten("llama", rewrite, 2)
    reference = reference_of(program, [entry.rewrite for entry in program.history])
    expected = reference.logits(zoo.shared("llama"), ids("llama"), mask(2))
    assert relative_error(logits(both_wirings(program), "llama", fault(mask(2))), expected) > 1e-3


@pytest.mark.parametrize("rewrite", ["desync sum", "drop", "desync mean"])
def test_an_exact_sum_that_is_not_waited_for_shows(rewrite):
    """Each reduction of exact tokens in turn is left out: ranks disagree, or the numbers are wrong."""
    program = rewritten("llama", rewrite, 2)
    both = both_wirings(program)
    expected = logits(both, "llama", mask(2))
    choices = [n.name for n in both.graph.nodes if n.target is ops.all_reduce and marks(n).layer is not None]
    assert len(choices) >= 8
    for name in choices:
        graph, _ = both.edit()
        node = next(n for n in graph.nodes if n.name == name)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
        try:
            found = logits(both.with_(graph=graph), "llama", mask(2))
        except RewriterError:
            continue
        assert relative_error(found, expected) > 1e-3, name


# --- options


@pytest.mark.parametrize(("rewrite", "options", "message"), [
    ("ladder", {"phase": "prompt", "exact_tail": 0}, "exact_tail: 0"),
    ("ladder", {"phase": "prompt", "exact_head": -1}, "exact_head: -1"),
    ("ladder", {"phase": "decode"}, "phase: 'decode'; expected all or prompt"),
    ("ladder", {"phase": "prompt", "exact_tail": 2.5}, "exact_tail: 2.5; expected a number of tokens"),
    ("drop_sync", {"phase": "prompt", "exact_tail": "3"}, "exact_tail: '3'"),
    ("ladder", {"phase": "prompt", "exact_head": True}, "exact_head: True"),
    ("desync", {"n": 2, "exact_tail": 8}, "give phase: prompt"),
    ("desync", {"n": 2, "untie_norms": True, "phase": "prompt"}, "untie_norms"),
    ("quantize_collectives", {"format": "int8", "axis": "sp", "phase": "prompt"}, "over sp"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused(rewrite, options, message):
    with pytest.raises(RewriterError, match=message):
        PASSES[rewrite](**options)


def test_passes_of_a_program_agree_on_the_tokens():
    program = tensor_parallel(
        traced("llama"), 2, ("ladder", {"layers": [1]} | ENDS), ("desync", {"layers": [2], "n": 2, "phase": "prompt"})
    )
    with pytest.raises(RewriterError, match="same exact_head and exact_tail"):
        both_wirings(program)


def test_the_wiring_of_rewired_tokens_is_not_taken_for_both():
    program = rewritten("llama", "ladder", 2)
    with pytest.raises(RewriterError, match="both_wirings"):
        simulate(program, ids("llama"), weights=weights("llama"))
    with pytest.raises(RewriterError, match="leave out `rewired`"):
        simulate(traced("llama"), ids("llama"), weights=weights("llama"), rewired=mask(0))
    with pytest.raises(RewriterError, match="expected bool"):
        simulate(both_wirings(program), ids("llama"), weights=weights("llama"), rewired=mask(0)[:, 1:])


def test_padding_and_prompts_are_counted_by_row():
    phase = PromptPhase(exact_tail=2, exact_head=1)
    rewired = phase.rewired(9, torch.tensor([0, 3]), prompt=7)
    assert rewired.tolist() == [[False, *[True] * 4, *[False] * 4], [*[False] * 4, True, *[False] * 4]]
    for length in (1, 2, 3):
        assert not phase.rewired(length).any()
    draws = random.Random(3)
    for _ in range(20):
        padding, length = draws.randrange(5), draws.randrange(1, 12)
        row = phase.rewired(padding + length, torch.tensor([padding]))[0]
        assert torch.equal(row[padding:], phase.rewired(length)[0])
