"""Exact choices: what they are made of, and that each option spares what it is said to spare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from predict_cases import small_config

from rewriter.common.errors import RewriterError
from rewriter.fabric import load_fabric
from rewriter.ir import Program
from rewriter.passes.placement.rank_memory import cache_elements
from rewriter.predict.analytic import Predictor, bytes_per_rank
from rewriter.predict.candidates import Candidates
from rewriter.predict.engines import engine_named, engines, options
from rewriter.predict.exact import ExactChoices, best_exact, first_token_of
from rewriter.predict.results import ExactChoice
from rewriter.predict.steps import Await, Begin, TimelineRun, sequence_parallel
from rewriter.predict.workload import Cluster, Draft, Workload
from rewriter.recipes.apply import load_recipe
from rewriter.tracing import trace_skeleton
from rewriter.tracing.meta_model import build_skeleton

LOAD = Workload(tp=4, batch=4, prompt=4096, generate=64)


@pytest.fixture(scope="module")
def program() -> Program:
    """As wide as a model of 8B, so that sums take a part of its time, and four layers deep."""
    wide = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    return trace_skeleton(build_skeleton(small_config(num_hidden_layers=4, dtype="bfloat16", **wide)))


def choices(
    program: Program, fabric: str = "pcie-gen5", engine: str = "vllm", load: Workload = LOAD, draft: Draft | None = None
) -> dict[str, ExactChoice]:
    predictor = Predictor(load, Cluster(fabric))
    return {one.name: one for one in ExactChoices(predictor, Candidates(program), engine, draft).all()}


def test_where_not_all_gpus_can_share_a_layer_parts_of_them_can(program: Program) -> None:
    found = choices(program, "h100-2x8-ib", load=replace(LOAD, tp=24))
    assert found
    assert all(one.tp < 24 for one in found.values())
    assert [name for name, one in found.items() if one.replicas * one.stages == 1] == ["TP 16 on 16 of 24 GPUs"]


def test_every_option_says_who_has_it_and_who_says_so() -> None:
    for name, option in options().items():
        assert option.source, name
        assert set(option.engines) <= set(engines()), name
    assert engine_named("vllm").library == "vllm"
    with pytest.raises(RewriterError, match=r"--engine 'vlm'.*Did you mean 'vllm'"):
        engine_named("vlm")


def test_an_option_is_switched_on_by_the_engine_or_not_there(program: Program) -> None:
    ours, theirs = choices(program), choices(program, engine="tensorrt-llm")
    assert ours["TP 4, one-shot PCIe sums"].switches == ("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=1",)
    assert not theirs["TP 4, one-shot PCIe sums"].available
    assert not ours["TP 4, 8-bit prompt sums"].available
    assert theirs["TP 4, 8-bit prompt sums"].rounds
    assert "TP 4, sums that norm" not in ours  # no such sums were measured over PCIe
    assert "TP 4, sums that norm" in choices(program, "h100-nvlink")
    assert best_exact(list(theirs.values())).name not in ("TP 4, one-shot PCIe sums", "TP 4, 8-bit prompt sums")


def test_each_option_spares_its_part(program: Program) -> None:
    found = choices(program)
    plain = found["TP 4"]
    assert found["TP 4, one-shot PCIe sums"].decode_seconds < plain.decode_seconds
    assert found["TP 4, one-shot PCIe sums"].prefill_seconds == pytest.approx(plain.prefill_seconds, rel=0.02)
    assert found["TP 4, L2 prefetch"].decode_seconds < plain.decode_seconds
    assert found["TP 4, 8-bit prompt sums"].prefill_seconds < plain.prefill_seconds
    assert found["TP 4, 8-bit prompt sums"].decode_seconds == plain.decode_seconds


def test_prefetching_hides_no_more_than_the_sums(program: Program) -> None:
    """Nor more than half of what comes after them."""
    one = Candidates(program).one(load_recipe("tensor-parallel"), 4).program
    without, usual = (
        Predictor(replace(LOAD, l2_prefetch=on), Cluster("pcie-gen5", (), "nccl")).simulate(one) for on in (True, False)
    )
    spared = usual.decode.seconds - without.decode.seconds
    assert 0 < spared <= usual.decode.communication_seconds


def test_a_sequence_parallel_prefill_scatters_and_gathers_what_was_summed(program: Program) -> None:
    one = Candidates(program).one(load_recipe("tensor-parallel"), 4).program
    usual = Predictor(LOAD, Cluster("pcie-gen5", (), "nccl")).simulate(one).steps[0][0]
    changed = sequence_parallel(usual)

    def kinds(listed: Sequence[object]) -> list[str]:
        return [part.kind for step in listed if isinstance(step, Begin) for part in step.parts if hasattr(part, "kind")]

    sums = [step for step in usual if isinstance(step, Begin) and step.exact.norm]
    assert kinds(changed).count("reduce_scatter") == len(sums) > 0
    assert kinds(changed).count("all_gather") == len(sums) + kinds(usual).count("all_gather")
    begun = [step for step in changed if isinstance(step, Begin)]
    assert {step.begin for step in changed if isinstance(step, Await)} == set(begun)
    work = [
        sum(k.nbytes for s in listed if isinstance(s, TimelineRun) for k in s.kernels) for listed in (usual, changed)
    ]
    assert work[1] < work[0]


def test_stages_hold_a_part_of_the_layers_and_take_all_of_the_time(program: Program) -> None:
    usual, found = choices(program), [one for one in choices(program).values() if one.stages > 1]
    assert found
    for one in found:
        each = choices(program, load=replace(LOAD, tp=one.tp, batch=4 // one.stages))
        alone = next(iter(each.values()))
        assert alone.decode_seconds < one.decode_seconds < 1.1 * alone.decode_seconds  # and messages
        whole = alone.prefill_seconds * one.stages  # of a batch of four, of 4,096 tokens each
        assert whole / one.stages < one.prefill_seconds < whole
        assert one.prefill_seconds > whole * (one.stages - 1 + 8) / 8 / one.stages  # later parts attend to more
        assert one.tp * one.stages == 4
        assert one.switches[0] == "--pipeline-parallel-size"
        assert one.decode_seconds > usual["TP 4"].decode_seconds


def test_stages_divide_weights_and_keys_and_not_what_a_prefill_needs(program: Program) -> None:
    weights, one = (bytes_per_rank(program, batch, 4096, 64) for batch in (0, 1))
    keys = 2 * cache_elements(program, 4096 + 64)
    temporary = one - weights - keys
    assert min(weights, keys, temporary) > 0
    assert bytes_per_rank(program, 8, 4096, 64, stages=4) == pytest.approx((weights + 8 * keys) / 4 + 2 * temporary)


@pytest.mark.parametrize("batch", [1, 8])
def test_stages_fit_where_one_gpu_does_not(program: Program, batch: int) -> None:
    """Also with the prompts of other times to first token."""
    usual = load_fabric("pcie-gen5")
    most = bytes_per_rank(program, batch, 32768, 64, stages=4)
    assert bytes_per_rank(program, 1, 32768, 64) > most or batch > 1
    small = replace(usual, device=replace(usual.device, memory=most))
    predictor = Predictor(replace(LOAD, batch=batch), Cluster(small))
    exact = ExactChoices(predictor, Candidates(program))
    stages = exact._staged(4, 1, [])
    assert stages is not None
    assert stages.fits
    assert [first.fits for first in stages.time_to_first_token] == [True] * 3
    one_byte_less = replace(small, device=replace(small.device, memory=most - 1))
    exact = ExactChoices(replace(predictor, cluster=Cluster(one_byte_less)), Candidates(program))
    stages = exact._staged(4, 1, [])
    assert stages is not None
    assert [first.fits for first in stages.time_to_first_token] == [True, True, False]


def test_layouts_that_lead_in_something_are_choices(program: Program) -> None:
    """For long prompts other stages are best than for a generation of a short one."""
    load = replace(LOAD, tp=8, batch=1, prompt=1024)
    found = [one for one in choices(program, "pcie-gen4", load=load).values() if one.stages > 1]
    exact = ExactChoices(Predictor(load, Cluster("pcie-gen4")), Candidates(program))
    every = [exact._staged(p, 8 // p, exact.available) for p in (2, 4)]  # of four layers
    for prompt in (1024, 8192, 32768):
        best = min(first_token_of(one, prompt).seconds for one in every)
        assert min(first_token_of(one, prompt).seconds for one in found) == pytest.approx(best)
    assert max(one.tokens_per_second for one in found) == max(one.tokens_per_second for one in every)
    assert found == sorted(found, key=lambda one: -one.tokens_per_second)


def test_the_library_that_the_user_names_is_that_of_all(program: Program) -> None:
    predictor = Predictor(LOAD, Cluster("pcie-gen5", library="nccl"))
    exact = ExactChoices(predictor, Candidates(program))
    found = {one.name: one for one in exact.all()}
    assert "TP 4, one-shot PCIe sums" not in found
    assert exact.usable(exact.available) == "nccl"
    assert found["TP 4"].decode_seconds == choices(program)["TP 4"].decode_seconds


def test_recipes_are_compared_with_what_does_not_fit_where_nothing_does(program: Program) -> None:
    usual = load_fabric("pcie-gen4")
    tiny = replace(usual, device=replace(usual.device, memory=1))
    found = ExactChoices(Predictor(LOAD, Cluster(tiny)), Candidates(program), "tensorrt-llm").all()
    assert not any(one.fits for one in found)
    best = best_exact(found)
    assert best.available
    assert not best.rounds


def test_a_draft_is_verified_in_one_pass(program: Program) -> None:
    found = choices(program, draft=Draft(3, 0.8))
    plain, drafted = found["TP 4, one-shot PCIe sums"], list(found.values())[-1]
    assert drafted.options == ("draft", "one-shot-pcie")
    assert drafted.prefill_seconds == plain.prefill_seconds
    assert plain.decode_seconds / Draft(3, 0.8).expected_tokens < drafted.decode_seconds < plain.decode_seconds
    never = list(choices(program, draft=Draft(3, 0.0)).values())[-1]
    assert never.decode_seconds > plain.decode_seconds


def test_one_gpu_has_nothing_to_choose(program: Program) -> None:
    assert list(choices(program, load=replace(LOAD, tp=1))) == ["1 GPU"]
