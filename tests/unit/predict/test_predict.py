"""Prediction without a GPU: timelines that were computed by hand, laws that every simulation keeps, and what others
count of the same models."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grouped import predicting
from predict_cases import by_name, small_config
from transformers import AutoConfig

from rewriter import api
from rewriter.common.errors import RewriterError
from rewriter.fabric import Call, Delay, load_fabric
from rewriter.ir import Program
from rewriter.predict.analytic import bytes_per_rank, with_front
from rewriter.predict.as_json import to_json
from rewriter.predict.break_even import BreakEven
from rewriter.predict.kernel_cost import CostedOperation, Kernel, fused
from rewriter.predict.kernel_time import Contention, Rates, seconds
from rewriter.predict.results import Phase, PredictedPoint
from rewriter.predict.steps import Await, Begin, Step, TimelineRun
from rewriter.predict.timeline import KernelDurations, Timeline
from rewriter.recipes import Recipe
from rewriter.tracing import trace

MS = 1e-3
# glue of a million bytes takes a millisecond
SIMPLE = Rates(product_flops=1e12, attention_flops=1e12, bandwidth=1e9, sms=132, gap=0.0, launch=0.0)
RECIPES = ["tensor-parallel", "ladder", "parallel", "desync-4x-sum", "tensor-parallel-int8", "ladder-own-partial"]


@pytest.fixture(scope="module")
def small() -> Program:
    return trace(small_config())


# --- timelines by hand ---


def run(*milliseconds: float) -> TimelineRun:
    return TimelineRun("block", 0, tuple(Kernel("k", "glue", m * 1e6) for m in milliseconds))


def begin(layer: int = 0, axis: str = "tp", nbytes: int = 8) -> Begin:
    call = Call("all_reduce", nbytes, (0, 1))
    return Begin("all-reduce", layer, axis, (call,), call, True)


def simulated(steps: list[Step], delay: Delay, rates: Rates = SIMPLE) -> Phase:
    return Timeline(KernelDurations(rates), lambda _, call: delay).phase(steps)


def test_a_collective_that_is_waited_for_at_once_is_exposed() -> None:
    reduce = begin()
    phase = simulated([run(1), reduce, Await(reduce), run(2)], Delay(3 * MS, 0.0, ()))
    assert phase.seconds == pytest.approx(6 * MS)
    assert phase.exposed_seconds == pytest.approx(3 * MS)
    assert phase.exposed_by_layer == {0: pytest.approx(3 * MS)}
    assert (phase.compute_seconds, phase.host_seconds) == (pytest.approx(3 * MS), pytest.approx(0.0, abs=1e-12))
    spans = [(s.lane, round(s.start / MS, 6), round(s.end / MS, 6), s.exposed) for s in phase.spans]
    assert spans == [
        ("compute", 0, 1, False),
        ("communication", 1, 4, True),
        ("compute", 1, 4, True),
        ("compute", 4, 6, False),
    ]


def test_what_runs_between_start_and_wait_hides_a_collective() -> None:
    reduce = begin(layer=7)
    phase = simulated([run(1), reduce, run(2), Await(reduce), run(1)], Delay(3 * MS, 0.0, ()))
    assert phase.seconds == pytest.approx(5 * MS)  # 1, then 3 of which 2 are hidden, then 1
    assert phase.exposed_by_layer == {7: pytest.approx(1 * MS)}
    assert phase.communication_seconds == pytest.approx(3 * MS)


def test_collectives_of_one_stream_follow_each_other_and_share_links_with_others() -> None:
    first, second = begin(axis="tp"), begin(axis="tp")
    steps: list[Step] = [first, second, Await(first), Await(second)]
    assert simulated(steps, Delay(3 * MS, 0.0, ())).seconds == pytest.approx(6 * MS)
    other = begin(axis="sp")
    steps = [first, other, Await(first), Await(other)]
    assert simulated(steps, Delay(3 * MS, 0.0, ())).seconds == pytest.approx(3 * MS)
    # the transfer, 2 of 3 ms, has the link for itself: the second one starts when the first one's is over
    assert simulated(steps, Delay(3 * MS, 2 * MS, ("node0",))).seconds == pytest.approx(5 * MS)


def test_a_collective_that_takes_half_the_memory_bandwidth_slows_kernels_down() -> None:
    reduce = begin()
    steps: list[Step] = [run(1), reduce, run(2), Await(reduce)]
    phase = simulated(steps, Delay(3 * MS, 0.0, (), memory_bytes=1_500_000))
    # beside 3 ms of communication 1.5 ms of the 2 are done
    assert phase.seconds == pytest.approx(4.5 * MS)
    assert phase.compute_seconds == pytest.approx(4.5 * MS)
    assert phase.exposed_seconds == 0.0


def test_a_collective_that_takes_a_third_of_a_core_slows_a_cpu_down() -> None:
    reduce = begin()
    steps: list[Step] = [reduce, run(4), Await(reduce)]
    phase = simulated(steps, Delay(3 * MS, 0.0, (), cpu_seconds=1 * MS), replace(SIMPLE, sms=1))
    assert phase.seconds == pytest.approx(5 * MS)  # 2 of 4 ms are done beside it


def test_a_product_that_just_fits_takes_twice_as_long_beside_24_blocks() -> None:
    product = Kernel("gemm", "product", 0.0, 2.0 * 128 * 132 * 128 * 8192, rows=128, columns=132 * 128, depth=8192)
    alone, beside = seconds(product, SIMPLE), seconds(product, SIMPLE, Contention(blocks=24))
    assert alone == pytest.approx(product.flops / SIMPLE.product_flops)
    assert beside == pytest.approx(2 * alone)


def test_a_slow_host_is_waited_for_and_hides_communication() -> None:
    rates = replace(SIMPLE, launch=1 * MS)
    # kernels of half a millisecond, launched one per millisecond: the last one is launched at 4, and ends at 4.5
    phase = simulated([run(0.5, 0.5, 0.5, 0.5)], Delay(0.0, 0.0, ()), rates)
    assert phase.seconds == pytest.approx(4.5 * MS)
    assert (phase.compute_seconds, phase.host_seconds) == (pytest.approx(2 * MS), pytest.approx(2.5 * MS))
    # launched at 1, 2 and 3: the collective ends at 2.2, before the host launches the next kernel
    reduce = begin()
    phase = simulated([run(0.5), reduce, Await(reduce), run(0.5)], Delay(0.2 * MS, 0.0, ()), rates)
    assert phase.seconds == pytest.approx(3.5 * MS)
    assert phase.exposed_seconds == 0.0
    # one of 3 ms, from 2 to 5, is exposed from 3 on, when the next kernel would have run
    phase = simulated([run(0.5), reduce, Await(reduce), run(0.5)], Delay(3 * MS, 0.0, ()), rates)
    assert (phase.seconds, phase.exposed_seconds) == (pytest.approx(5.5 * MS), pytest.approx(2 * MS))


def test_break_even_is_where_the_extra_work_is_paid_for() -> None:
    reduces = [begin() for _ in range(4)]
    first = [step for reduce in reduces for step in (run(1), reduce, Await(reduce))]
    # the recipe drops three of four all-reduces, and computes 0.3 ms more: it pays from 0.1 ms on
    recipe: list[Step] = [run(4.3), reduces[0], Await(reduces[0])]
    compared = BreakEven([first], KernelDurations(SIMPLE), lambda _, call: Delay(1 * MS, 0.0, ()))
    value, note = compared.of([recipe])
    assert note is None
    assert value == pytest.approx(0.1 * MS, rel=0.05)
    value, note = compared.of([[run(3), *recipe[1:]]])
    assert value is None
    assert note is not None
    assert note.startswith("always")
    value, note = compared.of([[*first, run(1)]])
    assert value is None
    assert note is not None
    assert note.startswith("never")


def test_a_compiler_fuses_glue_but_not_across_a_product() -> None:
    def op(name: str, reads: dict[str, int], writes: dict[str, int], product: bool = False) -> CostedOperation:
        return CostedOperation(name, reads, writes, (Kernel(name, "product", 0.0, 1.0),) if product else ())

    operations = [
        op("square", {"x": 10}, {"s": 10}),
        op("scale", {"s": 10, "x": 10}, {"n": 10}),
        op("linear", {"n": 10}, {"y": 10}, product=True),
        op("add", {"x": 10, "y": 10}, {"out": 10}),
    ]
    items = fused(operations, frozenset({"out"}))
    assert [(i.name, i.nbytes) for i in items if isinstance(i, Kernel)] == [
        ("square+scale", 20),  # x once, n; s stays in registers
        ("linear", 0.0),
        ("add", 30),
    ]


# --- laws ---


@pytest.mark.parametrize("graphed", [True, False])
@pytest.mark.parametrize("fabric", ["h100-nvlink", "h100-no-p2p"])
def test_time_is_conserved(small: Program, fabric: str, graphed: bool) -> None:
    found = api.predict(
        small,
        RECIPES,
        api.Workload(tp=8, batch=4, prompt=256, generate=64, graphed=graphed),
        api.Cluster(fabric=fabric),
    )
    for prediction in found.predictions:
        for phase in (prediction.prefill, prediction.decode):
            total = phase.compute_seconds + phase.exposed_seconds + phase.host_seconds
            assert phase.seconds == pytest.approx(total, rel=1e-9)
            assert phase.exposed_seconds <= phase.communication_seconds * (1 + 1e-9)
            assert sum(phase.exposed_by_layer.values()) == pytest.approx(phase.exposed_seconds)
            lanes: dict[Any, float] = defaultdict(float)
            for span in phase.spans:
                assert 0.0 <= span.start <= span.end <= phase.seconds * (1 + 1e-9)
                assert span.start >= lanes[span.lane, span.stream] - 1e-12, span
                lanes[span.lane, span.stream] = span.end
            idle = sum(s.seconds for s in phase.spans if s.lane == "compute" and s.exposed)
            assert idle == pytest.approx(phase.exposed_seconds)
        assert prediction.seconds_per_token == prediction.decode.seconds
        assert prediction.exposed_communication_seconds_per_token == prediction.decode.exposed_seconds
        whole = prediction.prefill.seconds + 63 * prediction.decode.seconds
        assert prediction.generation_seconds == pytest.approx(whole)
        assert prediction.tokens_per_second == pytest.approx(4 * 64 / whole)


def test_slower_links_never_help(small: Program) -> None:
    def seconds_of(*what_if: str) -> list[float]:
        found = api.predict(
            small, RECIPES, api.Workload(tp=8, prompt=512, generate=16), api.Cluster(what_if=tuple(what_if))
        )
        return [x for p in found.predictions for x in (p.prefill.seconds, p.decode.seconds)]

    usual = seconds_of()
    for change in ("latency=+5us", "bandwidth=x0.5", "all_reduce=x1.5"):
        slower = seconds_of(change)
        assert all(a <= b * (1 + 1e-9) for a, b in zip(usual, slower, strict=True))
        assert slower[0] > usual[0]


@pytest.mark.parametrize("graphed", [True, False])
def test_ladder_is_never_slower_and_gains_nothing_where_communication_is_free(small: Program, graphed: bool) -> None:
    options: dict[str, Any] = dict(tp=8, prompt=512, generate=64, graphed=graphed, library="nccl")
    standard, ladder = api.predict(small, ["tensor-parallel", "ladder"], **predicting(**options)).predictions
    # where the host is what is waited for, kernels beside sums take longer for nothing
    assert ladder.prefill.seconds <= standard.prefill.seconds * (1 + 1e-4)
    assert ladder.decode.seconds <= standard.decode.seconds * (1 + 1e-4)
    nothing = ("all_reduce=x0", "crossing=x0", "contention=x0", "jitter=x0")
    free = api.predict(small, ["tensor-parallel", "ladder"], **predicting(what_if=nothing, **options)).predictions
    assert free[1].decode.seconds == pytest.approx(free[0].decode.seconds, rel=0.02)
    assert free[1].prefill.seconds == pytest.approx(free[0].prefill.seconds, rel=0.02)


def test_what_if_delays_every_collective(small: Program) -> None:
    usual, slow = (
        api.predict(small, ["tensor-parallel"], api.Workload(tp=8), api.Cluster(what_if=tuple(change)))
        .predictions[0]
        .decode
        for change in ([], ["all_reduce=+100us"])
    )
    reduces = sum(s.name.startswith("all-reduce") for s in usual.spans if s.lane == "communication")
    assert reduces == 9  # two of each layer, and the embedding's
    assert slow.seconds - usual.seconds == pytest.approx(reduces * 100e-6, rel=1e-6)


@pytest.mark.parametrize("recipe", ["desync-4x-sum", "ladder-own-partial"])
def test_break_even_is_where_the_simulation_says(small: Program, recipe: str) -> None:
    options: dict[str, Any] = dict(tp=8, batch=32, prompt=512, library="nccl")
    found = api.predict(small, ["tensor-parallel", recipe], **predicting(**options)).predictions[1]
    at = found.break_even_seconds
    assert at is not None
    assert at > 1e-8

    def speedup(all_reduce: float) -> float:
        change = (f"all_reduce={all_reduce * 1e9:.3f}ns", "jitter=x0")  # waits for the last rank are part of it
        standard, other = api.predict(
            small, ["tensor-parallel", recipe], **predicting(what_if=change, **options)
        ).predictions
        return standard.decode.seconds / other.decode.seconds

    assert speedup(3 * at) > 1 > speedup(at / 3)


def test_the_upper_bound_has_no_communication(small: Program) -> None:
    found = by_name(
        api.predict(small, ["tensor-parallel", "upper-bound"], api.Workload(tp=8), api.Cluster(library="nccl"))
    )
    bound = found["upper-bound"]
    assert bound.kind == "timing only"
    assert bound.decode.communication_seconds == bound.prefill.exposed_seconds == 0.0
    assert found["tensor-parallel"].decode.compute_seconds == pytest.approx(bound.decode.compute_seconds, rel=0.01)


# --- the public surface ---


def test_a_bare_config_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    small_config(num_hidden_layers=1, architectures=["LlamaForCausalLM"]).to_json_file(path, use_diff=False)
    found = api.predict(
        path, ["tensor-parallel", "ladder"], api.Workload(tp=2, batch=2, prompt=32, generate=4), pareto=True
    )
    objects = json.loads(json.dumps(to_json(found)))
    assert [o["recipe"] for o in objects] == ["tensor-parallel", "ladder"]
    assert {"prefill_seconds", "seconds_per_token", "tokens_per_second", "end_to_end"} <= set(objects[0])
    assert objects[0]["exposed_communication_seconds_per_token"] > 0
    points = found.pareto["ladder"]
    assert {(p.tp, p.batch) for p in points} == {(tp, batch) for tp in (1, 2, 4, 8) for batch in (1, 2, 4, 16, 64)}
    asked = next(p for p in points if (p.tp, p.batch) == (2, 2))
    assert asked.seconds_per_token == found.predictions[1].seconds_per_token
    assert asked.tokens_per_second_per_gpu == pytest.approx(found.predictions[1].tokens_per_second / 2)
    assert objects[1]["pareto"][0] == {
        "tp": 1, "batch": 1, "seconds_per_token": points[0].seconds_per_token,
        "tokens_per_second_per_gpu": points[0].tokens_per_second_per_gpu, "fits": True, "front": points[0].front,
        "sp": 1,
    }  # fmt: skip
    assert "pareto" not in to_json(replace(found, pareto={}))[0]
    latencies = [p.seconds_per_token for p in sorted(points, key=lambda p: p.seconds_per_token) if p.front]
    rates = [p.tokens_per_second_per_gpu for p in sorted(points, key=lambda p: p.seconds_per_token) if p.front]
    assert latencies
    assert rates == sorted(rates)  # on the front, more throughput costs latency


def test_the_front_leaves_out_what_does_not_fit() -> None:
    points = [
        PredictedPoint(1, 1, 1.0, 5.0, True),
        PredictedPoint(2, 1, 2.0, 4.0, True),
        PredictedPoint(4, 1, 0.5, 9.0, False),
    ]
    assert [p.front for p in with_front(points)] == [True, False, False]


def test_ranks_are_spread_over_nodes(small: Program) -> None:
    one, two = (
        api.predict(
            small, ["tensor-parallel"], api.Workload(tp=8, nodes=nodes), api.Cluster(fabric="h100-2x8-ib")
        ).predictions[0]
        for nodes in (1, 2)
    )
    assert (one.nodes, two.nodes) == (1, 2)
    assert two.decode.seconds > one.decode.seconds
    with pytest.raises(RewriterError, match="--nodes 3: 8 ranks"):
        api.predict(small, ["tensor-parallel"], api.Workload(tp=8, nodes=3), api.Cluster(fabric="h100-2x8-ib"))


def test_ranks_are_spread_evenly_without_being_asked(small: Program) -> None:
    threes = replace(load_fabric("h100-2x8-ib"), node=3)
    assert (
        api.predict(small, ["tensor-parallel"], api.Workload(tp=8), api.Cluster(fabric=threes)).predictions[0].nodes
        == 4
    )


def test_a_front_has_no_points_that_the_fabric_cannot_hold(small: Program) -> None:
    alone = replace(load_fabric("h100-no-p2p"), node=2, between=None)
    found = api.predict(
        small, ["tensor-parallel"], api.Workload(tp=2, prompt=16, generate=2), api.Cluster(fabric=alone), pareto=True
    )
    assert {p.tp for p in found.pareto["tensor-parallel"]} == {1, 2}


@pytest.mark.slow
def test_points_are_told_apart_by_recipes_of_one_name_and_by_ranks_that_share_tokens(small: Program) -> None:
    upper = Recipe.load("ladder").with_overrides({"ladder.layers": "last:1"})
    found = api.predict(
        small, ["ladder", upper, "ring-attention"], api.Workload(tp=8, prompt=64, generate=8), pareto=True
    )
    assert [p.recipe for p in found.predictions] == ["ladder", "ladder-2", "ring-attention"]
    whole, last = (found.pareto[name] for name in ("ladder", "ladder-2"))
    assert whole[-1].seconds_per_token < last[-1].seconds_per_token
    assert {(p.sp, p.tp) for p in found.pareto["ring-attention"]} == {(2, 1), (4, 1), (8, 1)}


class OnlyReductions:
    """A delay model that knows all-reduces and all-gathers, and no more."""

    def __init__(self, *_: object) -> None: ...

    def delay(self, call: Call) -> Delay:
        if call.kind not in ("all_reduce", "all_gather"):
            raise RewriterError(f"{call.kind} is not known")
        return Delay(10e-6, 0.0, ())


def test_what_a_fabric_has_no_answer_for_is_told(small: Program) -> None:
    partial = replace(load_fabric("h100-nvlink"), model=OnlyReductions)
    options: dict[str, Any] = dict(fabric=partial, batch=8, prompt=1024)  # long messages, which are quantized
    found = api.predict(small, ["tensor-parallel", "tensor-parallel-int8", "ladder"], **predicting(**options))
    assert [p.recipe for p in found.predictions] == ["tensor-parallel", "ladder"]
    assert [(s.recipe, s.reason) for s in found.skipped] == [("tensor-parallel-int8", "all_to_all is not known")]
    with pytest.raises(RewriterError, match="all_to_all"):
        api.predict(small, ["tensor-parallel-int8"], **predicting(**options))


def test_a_duration_without_end_is_refused(small: Program) -> None:
    with pytest.raises(RewriterError, match="takes inf s"):
        api.predict(small, ["tensor-parallel"], cluster=api.Cluster(what_if=("all_reduce=x1e6",) * 60))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("5", "not an object"),
        ("{", "not valid JSON"),
        ("{}", "no model_type"),
        ('{"model_type": "llama", "hidden_size": "x"}', "hidden_size"),
        ('{"model_type": "llama", "dtype": "nonsense"}', "nonsense"),
    ],
    ids=["number", "broken", "empty", "type", "dtype"],
)
def test_a_config_that_cannot_be_is_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(RewriterError, match=why):
        api.predict(file, ["tensor-parallel"], api.Workload(tp=2))


@pytest.mark.slow
def test_scores_that_no_kernel_fuses_take_memory() -> None:
    sizes: dict[str, Any] = dict(
        vocab_size=512, hidden_size=128, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        intermediate_size=256, dtype="bfloat16",
    )  # fmt: skip
    plain, capped = (
        api.rewrite(trace(AutoConfig.for_model("gemma2", **sizes, attn_logit_softcapping=cap)), "tensor-parallel", tp=2)
        for cap in (None, 50.0)
    )
    scores = 3 * 4 * 1024**2 * (2 + 4 + 2)  # of 3 sequences and 4 heads
    assert bytes_per_rank(capped, 3, 1024, 8) - bytes_per_rank(plain, 3, 1024, 8) == scores


def test_what_a_config_leaves_open_is_told() -> None:
    config = small_config(num_hidden_layers=1, dtype=None, max_position_embeddings=64)
    config.quantization_config = {"quant_method": "fp8"}
    (found,) = api.predict(config, ["tensor-parallel"], api.Workload(tp=2, prompt=100, generate=8)).predictions
    for words in ("float32 is assumed", "Weights of layers: float8", "108 tokens are more than the 64 positions"):
        assert any(words in note for note in found.notes), words


def test_recipes_that_cannot_be_applied_are_told(small: Program) -> None:
    found = api.predict(small, ["tensor-parallel", "desync-2x"], api.Workload(tp=1))
    assert [s.recipe for s in found.skipped] == ["desync-2x"]
    with pytest.raises(RewriterError, match="desync"):
        api.predict(small, ["desync-2x"], api.Workload(tp=1))
    with pytest.raises(RewriterError, match="batch: 0"):
        api.predict(small, ["tensor-parallel"], api.Workload(batch=0))
    with pytest.raises(RewriterError, match="--tp 0"):
        api.predict(small, ["tensor-parallel"], api.Workload(tp=0))
    with pytest.raises(RewriterError, match="no recipe"):
        api.predict(small, [])


@pytest.mark.slow
def test_models_of_other_kinds_are_predicted() -> None:
    """Experts, windows, sinks, state-space mixers: a mixer that stays opaque is estimated, and said so."""
    common = dict(vocab_size=512, hidden_size=128, num_hidden_layers=2, dtype="bfloat16")
    heads = dict(num_attention_heads=8, num_key_value_heads=4)
    moe = AutoConfig.for_model("mixtral", **common, **heads, intermediate_size=256, num_local_experts=8)
    found = api.predict(moe, ["tensor-parallel", "ladder"], api.Workload(tp=2, prompt=64, generate=8)).predictions
    expert = 3 * 128 * 256 * 2 // 2  # bytes on one of two ranks
    dense = api.predict(moe, ["tensor-parallel"], api.Workload(tp=2, batch=64, prompt=64, generate=8)).predictions[0]
    # one token reads 2 of 8 experts in each of 2 layers, 64 tokens all
    assert dense.decode.weight_bytes - found[0].decode.weight_bytes == pytest.approx(2 * 6 * expert, rel=0.01)
    eager = api.predict(moe, ["tensor-parallel"], api.Workload(tp=2, prompt=64, generate=8, graphed=False)).predictions[
        0
    ]
    assert eager.decode.kernels > found[0].decode.kernels
    mamba = AutoConfig.for_model("mamba", **common, intermediate_size=256, state_size=16)
    told = api.predict(mamba, ["tensor-parallel"], api.Workload(tp=2, prompt=64, generate=8)).predictions[0]
    assert any("estimated by its projections" in note for note in told.notes)
    assert told.decode.weight_bytes > 0
    normed = AutoConfig.for_model("olmo2", **common, **heads, intermediate_size=256)
    spans = (
        api.predict(normed, ["tensor-parallel"], api.Workload(tp=2, prompt=64, generate=8)).predictions[0].decode.spans
    )
    # norms of all query and key heads sum their statistics over ranks
    assert sum("inside" in s.name for s in spans if s.lane == "communication") == 2 * 2
    bloom = AutoConfig.for_model(
        "bloom", vocab_size=512, hidden_size=128, n_layer=2, n_head=8
    )  # constants in its wiring
    told = api.predict(bloom, ["tensor-parallel", "ladder"], api.Workload(tp=2, prompt=64, generate=8)).predictions[1]
    assert told.end_to_end > 1
    assert sum("refuses a key/value cache" in note for note in told.notes) == 1
    sinks = AutoConfig.for_model("gpt_oss", **common, **heads, head_dim=16, intermediate_size=128, num_local_experts=4)
    assert (
        api.predict(sinks, ["tensor-parallel", "ladder"], api.Workload(tp=2, prompt=64, generate=8))
        .predictions[1]
        .end_to_end
        > 1
    )
