"""Reductions that travel quantized: the pass, what simulated and real ranks compute, and the bytes they send.

The oracle is hooks on the eager Hugging Face model's exit projections, in fp64 where nothing else may round: a message
is rounded in steps, so that two right computations in fp32 now and then differ by a whole step, and by what that makes.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from emitted_ranks import build, import_source, load, prefill_and_step
from oracles import ladder_oracle, relative_error
from programs import MERGE, OVERLAP, Step, applied, runtime_case, shards, tensor_parallel, traced, weights
from ranks import run_ranks

from rewriter.check.comparison import Verification
from rewriter.check.per_rank_reference import Group, LayerMode, PerRankReference
from rewriter.common.errors import RewriterError
from rewriter.emit.module import emit_runtime_module
from rewriter.ir import Program, ops
from rewriter.ir.communication import collectives, quantized, sent_bytes
from rewriter.ir.marks import marks
from rewriter.ir.simulate import simulate
from rewriter.kernels import dequantize, parse_format, quantize, slice_length
from rewriter.passes.base import bound_ranks
from rewriter.passes.phases import both_wirings, single_device
from rewriter.passes.quantize_collectives import QuantizeCollectives, always_quantized, exact
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe

EXITS = ("o_proj", "down_proj", "c_proj")
# Quantized sums absorb what norms and rotary tables, which compute in fp32, make of another order of additions.
SAME, EXACT_SUMS, VISIBLE = 1e-9, 1e-6, 1e-3
FORMATS = ("int8", "int4-hadamard@16")

Combine = Callable[[Sequence[torch.Tensor]], torch.Tensor]

# --- the oracle ------------------------------------------------------------------------------------------------------


def combine(parts: Sequence[torch.Tensor], format: str, fault: str = "") -> torch.Tensor:
    """Every rank's result of the quantized sum of `parts`, one a rank, step by step."""
    ranks, count, block = len(parts), parts[0].numel(), parse_format(format).block
    size = -(-count // ranks)
    size += -size % block
    flat = [torch.cat([p.flatten().float(), torch.zeros(ranks * size - count)]) for p in parts]

    def sent(values: torch.Tensor) -> torch.Tensor:
        return dequantize(quantize(values, format), format, values.shape, torch.float32)

    found = []
    for owner in range(ranks):
        mine = slice(owner * size, (owner + 1) * size)
        total = torch.zeros(size)
        for rank in range(ranks):
            if rank != owner:
                total += sent(flat[rank][mine])
        own = flat[(owner + 1) % ranks if fault == "wrong part" else owner][mine]
        total += sent(own) if fault == "own part quantized" else own
        found.append(total if fault == "sum not requantized" else sent(total))
    return torch.cat(found)[:count].view(parts[0].shape).to(parts[0].dtype)


@contextmanager
def quantized_exits(model: Any, ranks: int, reduce: Combine) -> Iterator[None]:
    """Exit projections whose input channels are cut into a part per rank; `reduce` makes one of the ranks' outputs."""

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        weight = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
        parts = [x @ w for x, w in zip(args[0].chunk(ranks, -1), weight.chunk(ranks, 0), strict=True)]
        if module.bias is not None:
            parts[0] = parts[0] + module.bias
        return reduce(parts)

    handles = [m.register_forward_hook(hook) for name, m in model.named_modules() if name.endswith(EXITS)]
    assert len(handles) == 2 * model.config.num_hidden_layers
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@functools.cache
def fp64(family: str) -> Any:
    return copy.deepcopy(zoo.shared(family)).double()


def batch(family: str, length: int = 21) -> torch.Tensor:
    return zoo.batch(2, length, zoo.shared(family).config.vocab_size)


@torch.no_grad()
def oracle(family: str, ranks: int, reduce: Combine, layers: Sequence[int] = (), length: int = 21) -> torch.Tensor:
    model = fp64(family)
    with quantized_exits(model, ranks, reduce), ladder_oracle(model, layers):
        logits: torch.Tensor = model(input_ids=batch(family, length), use_cache=False).logits
    return logits


# --- programs --------------------------------------------------------------------------------------------------------


def wired(family: str, ranks: int, *steps: Step) -> Program:
    return tensor_parallel(traced(family), ranks, *steps)


def quantizing(format: str = "int8", min_bytes: int = 0) -> Step:
    return "quantize_collectives", {"format": format, "min_bytes": min_bytes}


@torch.no_grad()
def simulated(program: Program, family: str, length: int = 21) -> torch.Tensor:
    return simulate(program, batch(family, length), weights=doubled(family))


def doubled(family: str) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in weights(family).items()}


# --- what ranks compute ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "ranks", "format"),
    [("llama", 2, "int8"), ("llama", 4, "int4-hadamard@16"), ("gpt2", 4, "int8"), ("llama", 2, "fp8"),
     ("gemma2", 2, "int4-hadamard"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in [("olmo2", 2, "int6@32"), ("qwen3", 4, "int2")])],
)  # fmt: skip
@pytest.mark.fast("gpt2-4-int8", "llama-2-int8", "llama-2-fp8", "llama-4-int4-hadamard@16")
def test_simulated_ranks_equal_the_oracle(family: str, ranks: int, format: str) -> None:
    program = wired(family, ranks, quantizing(format), OVERLAP)
    expected = oracle(family, ranks, functools.partial(combine, format=format))
    plain = oracle(family, ranks, lambda parts: sum(parts[1:], parts[0]))
    assert relative_error(expected, plain) >= VISIBLE  # else equality would mean nothing
    assert relative_error(simulated(program, family), expected) <= SAME
    assert relative_error(simulated(exact(program), family), plain) <= EXACT_SUMS


@pytest.mark.parametrize("fault", ["own part quantized", "wrong part", "sum not requantized"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_sum_that_is_made_otherwise_is_seen(format: str, fault: str) -> None:
    wrong = oracle("llama", 2, functools.partial(combine, format=format, fault=fault))
    assert relative_error(simulated(wired("llama", 2, quantizing(format)), "llama"), wrong) >= VISIBLE


def test_with_a_ladder_it_equals_the_ladders_oracle_in_any_order() -> None:
    ladder = ("ladder", {"layers": [2, 3]})
    expected = oracle("llama", 2, functools.partial(combine, format="int8"), [2, 3])
    orders = ([ladder, quantizing(), OVERLAP], [quantizing(), ladder, OVERLAP], [ladder, OVERLAP, quantizing()])
    texts = set()
    for steps in orders:
        program = wired("llama", 2, *steps)
        assert relative_error(simulated(program, "llama"), expected) <= SAME
        texts.add(program.with_(history=()).text())
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("rewrite", "keep"),
    [(("desync", {"n": 2, "resync": "sum"}), {0: (False, True), 1: (False, True), 2: (False, True), 3: (False, True)}),
     (("drop_sync", {"layers": [1, 3]}), {1: (False, True), 3: (False, True)})],
    ids=["desync", "drop_sync"],
)  # fmt: skip
def test_with_per_rank_residuals_it_equals_ranks_run_side_by_side(
    rewrite: Step, keep: dict[int, tuple[bool, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The per-rank reference runs the eager model once a rank; here what it sums travels quantized."""
    programs = [wired("llama", 2, *steps) for steps in ([rewrite, quantizing(), OVERLAP], [quantizing(), rewrite])]
    marked = [marks(n).layer for n in programs[1].graph.nodes if n.target is ops.all_reduce and n.kwargs]
    if len(keep) < traced("llama").source.num_layers:  # others sum nothing
        programs = [only(program, set(keep)) for program in programs]
    assert set(marked) == set(range(4))
    mix = {layer: LayerMode("desync", kept, "sum") for layer, kept in keep.items()}
    with torch.no_grad():
        plain = PerRankReference(fp64("llama"), mix, 2)(batch("llama"))
        monkeypatch.setattr(Group, "_sum", lambda self: setattr(self, "_total", combine(self._parts, "int8")))
        expected = PerRankReference(fp64("llama"), mix, 2)(batch("llama"))
    assert relative_error(expected, plain) >= VISIBLE
    for program in programs:
        assert relative_error(simulated(program, "llama"), expected) <= SAME


def test_a_recipe_in_fp8_for_prompts_equals_ranks_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums travel in fp8 at rewired tokens, and exact at the others."""
    passes = [
        {"pass": "tensor_parallel"},
        {"pass": "quantize_collectives", "format": "fp8", "min_bytes": 0, "phase": "prompt"},
    ]
    recipe = Recipe.model_validate({"name": "x", "summary": "x", "paper": "x", "passes": passes})
    both = both_wirings(apply_recipe(traced("llama"), recipe, tp=2)[0])
    rewired = torch.rand(2, 21, generator=torch.Generator().manual_seed(0)) < 0.6
    mix = {layer: LayerMode("desync", (True, True), "sum") for layer in range(4)}  # every sum is kept

    def summed(self: Any) -> None:
        self._total = torch.where(rewired[..., None], combine(self._parts, "fp8"), sum(self._parts))

    with torch.no_grad():
        plain = PerRankReference(fp64("llama"), mix, 2)(batch("llama"))
        monkeypatch.setattr(Group, "_sum", summed)
        expected = PerRankReference(fp64("llama"), mix, 2)(batch("llama"))
        found = simulate(both, batch("llama"), weights=doubled("llama"), rewired=rewired)
    assert relative_error(expected, plain) >= VISIBLE
    assert relative_error(found, expected) <= SAME


def only(program: Program, layers: set[int]) -> Program:
    """`program` whose other layers' sums are exact."""
    graph, _ = program.edit()
    for node in graph.nodes:
        if node.kwargs.get("format") and marks(node).layer not in layers:
            node.kwargs = {}
    return program.with_(graph=graph)


def test_reductions_are_merged_whether_they_are_quantized_before_or_after() -> None:
    """A sum of two quantized sums is quantized once, where the two travel alike."""
    parallel = ("parallel_block", {})
    orders = ([quantizing(), parallel, MERGE], [parallel, quantizing(), MERGE], [parallel, MERGE, quantizing()])
    programs = [wired("llama", 2, *steps) for steps in orders]
    assert len({program.with_(history=()).text() for program in programs}) == 1
    travel = quantized(collectives(programs[0]))
    assert travel is not None
    assert travel.reductions == traced("llama").source.num_layers


@pytest.mark.parametrize("seed", range(6))
def test_every_place_after_tensor_parallelism_gives_the_same_program(seed: int) -> None:
    others: list[Step] = [
        ("drop_sync", {"layers": [0]}), ("ladder", {"layers": [1]}), ("parallel_block", {"layers": [2]}),
        ("desync", {"layers": [3], "n": 2, "resync": "sum"}), MERGE,
    ]  # fmt: skip
    random.Random(seed).shuffle(others)
    others.append(OVERLAP)
    orders = [[*others[:place], quantizing(), *others[place:]] for place in range(len(others) + 1)]
    first, *rest = [wired("llama", 2, *steps) for steps in orders]
    assert all(program.with_(history=()).text() == first.with_(history=()).text() for program in rest)
    travel = quantized(collectives(first))
    assert travel is not None
    assert travel.reductions == sum(c.place == "block" for c in collectives(first))


def test_reductions_that_travel_otherwise_are_not_merged() -> None:
    program = wired("llama", 2, ("parallel_block", {}), quantizing())
    graph, _ = program.edit()
    mixed = [n for n in graph.nodes if n.kwargs.get("format") and marks(n).layer == 1]
    mixed[0].kwargs = {}
    merged = applied(program.with_(graph=graph), MERGE)
    counts = [sum(c.layer == layer for c in collectives(merged)) for layer in range(4)]
    assert counts == [1, 2, 1, 1]


def test_small_messages_travel_exact() -> None:
    """Decided by the tensor's bytes: here [2, S, 64] of fp64."""
    size = 2 * 21 * zoo.HIDDEN * 8
    at, above = (simulated(wired("llama", 2, quantizing("int8", limit)), "llama") for limit in (size, size + 1))
    plain = simulated(wired("llama", 2), "llama")
    assert torch.equal(above, plain)
    assert relative_error(at, plain) >= VISIBLE
    assert torch.equal(at, simulated(wired("llama", 2, quantizing()), "llama"))


def test_the_gradient_is_that_of_exact_sums_at_the_values_of_quantized_ones() -> None:
    leaves = {n: t.double().requires_grad_() for n, t in weights("llama").items()}
    simulate(wired("llama", 2, quantizing()), batch("llama"), weights=leaves).square().mean().backward()
    model = copy.deepcopy(fp64("llama"))

    def straight(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        total = sum(parts[1:], parts[0])
        return total + (combine([p.detach() for p in parts], "int8") - total).detach()

    with quantized_exits(model, 2, straight):
        model(input_ids=batch("llama"), use_cache=False).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert relative_error(leaves[name].grad, parameter.grad) <= 1e-6, name


# --- the pass --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "inside"), [("llama", {}), pytest.param("olmo2", {"inside a block": None}, marks=pytest.mark.slow)]
)
def test_only_reductions_of_blocks_are_quantized(family: str, inside: dict[str, None]) -> None:
    program = wired(family, 2, quantizing())
    found = {c.place: c.format for c in collectives(program)}
    assert found == {"block": "int8", "embedding": None, "head": None} | inside
    assert "8 of 9 all-reduces travel as int8" in program.history[-1].summary


def test_layers_are_chosen_and_others_get_another_format() -> None:
    program = wired(
        "llama", 2, ("quantize_collectives", {"format": "int8", "layers": [0, 2]}),
        ("quantize_collectives", {"format": "int4", "layers": "last:1"}),
    )  # fmt: skip
    last = traced("llama").source.num_layers - 1
    found = {c.layer: c.format for c in collectives(program) if c.place == "block"}
    assert found == {0: "int8", 2: "int8", last: "int4"} | dict.fromkeys({*range(last)} - {0, 2})
    with pytest.raises(RewriterError, match=r"quantized already \(int8\)"):
        applied(program, quantizing("int4"))


def test_the_adapted_checkpoint_is_that_of_the_exact_function() -> None:
    program = wired("llama", 2, quantizing(), OVERLAP)
    assert bound_ranks(program) is None
    assert single_device(program).fingerprint() == traced("llama").with_(mesh={}).fingerprint()


def test_quantization_is_taken_out_and_made_complete() -> None:
    program = wired("llama", 2, quantizing("int8", 1 << 20))
    everything = wired("llama", 2, quantizing("int8", 0))
    for made, same in ((exact(program), wired("llama", 2)), (always_quantized(program), everything)):
        assert made.with_(history=()).text() == same.with_(history=()).text()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "int7"}, r"format 'int7': expected one of int8, int6"),
        ({"format": "int8@100"}, r"block 100, expected a power of two"),
        ({"format": "int8/int4-hadamard"}, r"names two hops .* one mesh axis.* Give int8 or int4-hadamard"),
        ({"format": "int8", "min_bytes": -1}, r"min_bytes: -1"),
        ({"format": "int8", "axis": "sp", "layers": [0]}, "layers: .* the keys and values of all layers travel alike"),
        ({"format": "int8", "axis": "dp"}, r"quantize_collectives.axis: expected"),
        ({}, r"option format \(str\) is missing"),
    ],
)
def test_faults_are_told_by_the_recipe(options: dict[str, Any], reason: str) -> None:
    passes = [{"pass": "tensor_parallel"}, {"pass": "quantize_collectives", **options}]
    with pytest.raises(RewriterError, match=reason):
        Recipe.model_validate({"name": "x", "summary": "x", "paper": "x", "passes": passes}).build()


MEAN = ("desync", {"n": 2, "resync": "mean"})


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([quantizing(), quantizing("int4")], r"quantized already \(int8\)"),
        ([MEAN, quantizing()], "carries the residual stream itself"),
        ([MEAN, OVERLAP, quantizing()], "carries the residual stream itself"),
        ([quantizing(), MEAN], "carries the residual stream itself"),
        ([("no_communication", {}), quantizing()], "no block ends in a reduction"),
    ],
)
def test_what_cannot_be_quantized_is_refused(steps: Sequence[Step], reason: str) -> None:
    with pytest.raises(RewriterError, match=reason):
        wired("llama", 2, *steps)


def test_it_needs_ranks_and_tensor_parallelism_before_it() -> None:
    with pytest.raises(RewriterError, match=r"one rank sends nothing\. Give --tp 2"):
        QuantizeCollectives("int8").apply(traced("llama"))
    with pytest.raises(RewriterError, match="Put tensor_parallel before it"):
        QuantizeCollectives("int8").apply(traced("llama").with_(mesh={"tp": 2}))


def test_bytes_per_token_are_codes_and_scales() -> None:
    found = quantized(collectives(wired("llama", 2, quantizing("int4@32", 1 << 16))))
    assert found is not None
    width, depth = zoo.HIDDEN, 2 * traced("llama").source.num_layers
    assert (found.reductions, found.exact_bytes_per_token) == (depth, depth * width * 4)
    assert found.bytes_per_token == depth * (width // 2 + 2 * width // 32)
    assert found.from_tokens == (1 << 16) // (width * 4)


def test_the_bytes_of_a_message_hold_padding() -> None:
    """100 elements over 4 ranks: slices of a whole block of 128, each 128 + 2 bytes, in rows of 16."""
    assert slice_length(100, 4, parse_format("int8")) == 128
    assert sent_bytes(100, 4, "int8") == 2 * 3 * 144


# --- real ranks -------------------------------------------------------------------------------------------------------

RANKS = 2
SUM = ("desync", {"n": 2, "resync": "sum"})
CASES: dict[str, list[Step]] = {
    "tensor parallel": [quantizing(), OVERLAP],
    "fp8": [quantizing("fp8"), OVERLAP],
    "ladder": [("ladder", {}), quantizing("int4-hadamard"), OVERLAP],
    "desync": [SUM, quantizing(), OVERLAP],
    "exact when short": [quantizing("int8", 1 << 20), OVERLAP],
}


def on_rank(group: Any, cases: list[Any], ids: torch.Tensor) -> list[Any]:
    """Per case: logits, gradients by name, bytes sent and sums started in a prefill and a decode step."""
    from rewriter.runtime import Context

    results = []
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    for source, tensors, ties in cases:
        model = build(source, tensors[group.rank()], ties, group)
        logits = model(ids, positions, Context())
        logits.square().mean().backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        counts = [
            (sum(e.sent for e in events if e.kind == "wire"), sum(e.kind == "start" for e in events))
            for events in prefill_and_step(model, ids)
        ]
        results.append((logits.detach(), grads, counts))
    return results


@functools.cache
def real() -> tuple[dict[str, Program], list[dict[str, Any]]]:
    """The programs of CASES, and by rank what their modules computed and sent."""
    programs = {name: wired("llama", RANKS, *steps) for name, steps in CASES.items()}
    cases = [runtime_case(p, weights("llama")) for p in programs.values()]
    by_rank = run_ranks(on_rank, RANKS, cases, batch("llama"))
    return programs, [dict(zip(CASES, results, strict=True)) for results in by_rank]


@pytest.mark.parametrize("case", CASES)
def test_real_ranks_compute_what_simulated_ones_do(case: str) -> None:
    programs, by_rank = real()
    leaves = {n: t.clone().requires_grad_() for n, t in weights("llama").items()}
    traced_logits = simulate(programs[case], batch("llama"), weights=leaves)
    traced_logits.square().mean().backward()
    expected = traced_logits.detach()
    with torch.no_grad():
        plain = simulate(exact(programs[case]), batch("llama"), weights=weights("llama"))
    logits = [rank[case][0] for rank in by_rank]
    assert torch.equal(*logits)
    if case == "exact when short":
        assert relative_error(logits[0], plain) <= 1e-4
    else:
        assert relative_error(expected, plain) >= VISIBLE
        Verification().require_quantized(case, logits[:1], [expected], [plain], 0.1)
    for name, parameter in programs[case].parameters.items():
        for rank, results in enumerate(by_rank):
            part = leaves[name].grad
            if parameter.ranges is not None:
                spans = parameter.ranges[rank]
                part = torch.cat([part.narrow(parameter.dim, a, b - a) for a, b in spans], parameter.dim)
            # a message that jumps by a step moves gradients a little; a gradient that is summed twice doubles
            assert relative_error(results[case][1][name], part) <= 0.05, f"{name} on rank {rank}"


@pytest.mark.parametrize("case", CASES)
def test_ranks_send_the_bytes_that_inspect_tells(case: str) -> None:
    """Exactly, with padding; and for long messages the bytes per token. Exact sums are no messages of ours."""
    programs, by_rank = real()
    found = [c for c in collectives(programs[case]) if c.kind == "all-reduce"]
    travel = quantized(found)
    assert travel is not None
    for results in by_rank:
        for tokens, (sent, started) in zip((2 * 21, 2), results[case][2], strict=True):
            each = sent_bytes(tokens * zoo.HIDDEN, RANKS, travel.format) if tokens >= travel.from_tokens else 0
            assert (sent, started) == (travel.reductions * each, len(found))
    long = 1 << 16
    wire = travel.reductions * sent_bytes(long * zoo.HIDDEN, RANKS, travel.format)
    assert wire == pytest.approx(2 * (RANKS - 1) / RANKS * long * travel.bytes_per_token, rel=0.02)


def over_tokens(
    group: Any, source: str, tensors: list[Any], ties: dict[str, str], grid: Any, ids: torch.Tensor
) -> torch.Tensor:
    """A rank's logits of all tokens, where ranks share tokens and channels."""
    from rewriter.runtime import sequence_mesh

    mesh = sequence_mesh("cpu", grid, tensor_parallel=RANKS)
    model = load(import_source(source).Model(mesh), tensors[mesh.get_local_rank("tp")], ties)
    with torch.no_grad():
        logits: torch.Tensor = model(ids)
    return logits


@pytest.mark.slow
def test_ranks_that_share_tokens_too_quantize_the_sums_of_their_own() -> None:
    steps = [("ladder", {"layers": [2, 3]}), quantizing()]
    tokens = {"pass": "sequence_parallel", "kind": "attention2d", "grid": [1, 2, 1]}
    passes = [{"pass": name, **options} for name, options in [("tensor_parallel", {}), *steps]]
    recipe = Recipe.model_validate({"name": "x", "summary": "x", "paper": "x", "passes": [*passes, tokens]})
    program = apply_recipe(traced("llama"), recipe, tp=RANKS, sp=2)[0]
    source, tensors = emit_runtime_module(program), shards(program, weights("llama"))
    results = run_ranks(over_tokens, 4, source, tensors, dict(program.ties), (1, 2, 1), batch("llama"))
    with torch.no_grad():
        expected = simulate(program, batch("llama"), weights=weights("llama"))
        plain = simulate(exact(program), batch("llama"), weights=weights("llama"))
    assert all(torch.equal(result, results[0]) for result in results)
    Verification().require_quantized("tokens", results[:1], [expected], [plain], 0.1)
