"""Measured kernels, what overlap costs, which all-reduce, and intervals: figures derived apart, and laws."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from grouped import predicting
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from rewriter import api
from rewriter.common.errors import RewriterError
from rewriter.emulation.delay_cpu import Late
from rewriter.fabric import Call, Delay, WhatIf, load_fabric
from rewriter.fabric.kernel_tables import Promised, kernel_table
from rewriter.fabric.links import KERNELS, kernel_systems
from rewriter.fabric.measured_delays import Best, FusedDelays
from rewriter.fabric.overlap import NONE, OverlapCosts
from rewriter.ir import Program
from rewriter.predict.kernel_cost import Kernel
from rewriter.predict.results import Prediction
from rewriter.predict.uncertainty import COVERED, interval, kernel_deviation
from rewriter.tracing import trace

H100 = "h100_sxm"
SIZES = st.integers(1, 2048), st.integers(64, 40000), st.integers(64, 40000)


def published(system: str, rows: int, columns: int, depth: int) -> float:
    """Seconds in the file itself."""
    found = json.loads(gzip.decompress((KERNELS / f"kernels-{system}.json.gz").read_bytes()))["products"]["bfloat16"]
    n, k, m = (found[axis] for axis in ("columns", "depth", "rows"))
    return float(found["us"][(n.index(columns) * len(k) + k.index(depth)) * len(m) + m.index(rows)]) * 1e-6


@pytest.fixture(scope="module")
def model() -> Program:
    """A layer is as large as one of Llama 3 70B's; two of them."""
    return trace(
        LlamaConfig(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, num_attention_heads=64,
            num_key_value_heads=8, vocab_size=1024, max_position_embeddings=4096, tie_word_embeddings=False,
            dtype="bfloat16",
        )
    )  # fmt: skip


_PREDICTED: dict[Any, Prediction] = {}


def predicted(model: Program, *what_if: str, recipe: str = "tensor-parallel", **options: Any) -> Prediction:
    """Of this module's one model; each is computed once."""
    key = what_if, recipe, *options.items()
    if key not in _PREDICTED:
        given: dict[str, Any] = dict(tp=8, prompt=512, generate=64, library="nccl") | options
        _PREDICTED[key] = api.predict(model, [recipe], **predicting(what_if=what_if, **given)).predictions[0]
    return _PREDICTED[key]


# --- tables ---


def test_a_measured_product_takes_what_was_published_less_a_sixth_of_the_gap_between_replays() -> None:
    assert kernel_table(H100).product(1, 8192, 4096, "bfloat16") == pytest.approx(
        published(H100, 1, 8192, 4096) - 3.1e-6 / 6
    )
    assert kernel_table(H100).product(1, 8192, 8192, "float16") == kernel_table(H100).product(1, 8192, 8192, "bfloat16")
    assert kernel_table(H100).product(1, 8192, 8192, "float32") is None


def test_weights_that_were_in_the_cache_come_from_memory() -> None:
    """Six of 6 MB fit into the 96 MB of an L40S, whose memory gives 864 GB/s at best."""
    found = kernel_table("l40s").product(1, 4096, 768, "bfloat16")
    assert found is not None
    assert published("l40s", 1, 4096, 768) < 4096 * 768 * 2 / 864e9 < found


@pytest.mark.parametrize("system", kernel_systems())
def test_held_out_errors_are_bounded(system: str) -> None:
    for what, errors in kernel_table(system).errors().items():
        assert np.median(errors) < 0.06, what
        assert np.quantile(errors, 0.9) < (0.6 if "float8" in what else 0.3), what


@settings(max_examples=60, deadline=None)
@given(*SIZES)
def test_a_larger_product_is_hardly_ever_faster(rows: int, columns: int, depth: int) -> None:
    """Libraries choose another kernel at some sizes, and a larger product is then faster, by what they miss."""
    table = kernel_table(H100)
    once = table.product(rows, columns, depth, "bfloat16")
    assert once is not None
    for other in ((2 * rows, columns, depth), (rows, 2 * columns, depth), (rows, columns, 2 * depth)):
        twice = table.product(*other, "bfloat16")
        assert twice is not None
        assert twice > 0.7 * once, other


def test_beyond_the_grid_a_kernel_is_as_efficient_as_at_its_edge() -> None:
    table = kernel_table(H100)
    at, beyond = (table.product(1, columns, 16384, "bfloat16") for columns in (65536, 4 * 65536))
    assert at is not None
    assert beyond is not None
    assert beyond / at == pytest.approx(4, rel=0.02)
    far = [table.attention(1, keys, 128, 8, 64, "bfloat16") or 0.0 for keys in (1 << 17, 1 << 19)]
    assert far[1] / far[0] == pytest.approx(4, rel=0.02)


def test_a_device_alike_is_as_efficient() -> None:
    table = kernel_table(H100)
    twice = Promised({"bfloat16": 2 * 989e12}, 2 * 3.35e12)
    own, other = table.product(64, 28672, 8192, "bfloat16"), table.product(64, 28672, 8192, "bfloat16", twice)
    assert own is not None
    assert other is not None
    assert other == pytest.approx(own / 2, rel=0.03)


def test_decode_reads_its_cache_at_most_as_fast_as_the_memory_is() -> None:
    for system in kernel_systems():
        table = kernel_table(system)
        for streams, keys in ((1, 131072), (32, 32768), (512, 4096)):
            took = table.attention(1, keys, 128, 4, streams, "bfloat16")
            assert took is not None
            assert 4 * 128 * streams * keys / took < table.own.bandwidth


def test_unknown_kernels_are_refused_by_name() -> None:
    with pytest.raises(RewriterError, match="Did you mean 'h100_sxm'"):
        kernel_table("h100_sxmm")


# --- predictions with them ---


def test_a_decode_step_is_the_sum_of_its_measured_kernels(model: Program) -> None:
    """One layer more adds its four products, its attention, its glue and two all-reduces, and nothing else."""
    table, given = kernel_table(H100), predicted(model, "jitter=x0", "all_reduce=x0", "step=x0")
    products = [table.product(1, n, k, "bfloat16") for n, k in ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584))]
    attention = table.attention(1, 576, 128, 8, 1, "bfloat16")
    least = 2 * (sum(map(float, filter(None, products))) + float(attention or 0))
    glue = given.decode.seconds - least
    assert 0 < glue < 2 * 5 * 4e-6 + 3 * 10e-6  # five kernels a layer; embedding, head, norm
    assert given.decode.measured_seconds == pytest.approx(given.decode.compute_seconds, rel=1e-6)
    assert any("100% of a decode step" in note for note in given.details)


def test_what_was_not_measured_is_on_the_roofline_and_says_so() -> None:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=512, dtype="float32",
    )  # fmt: skip
    single = api.predict(config, ["tensor-parallel"], api.Workload(tp=2)).predictions[0]
    assert 0 < single.decode.measured_seconds < single.decode.compute_seconds
    (none,) = api.predict(
        config, ["tensor-parallel"], api.Workload(tp=2), api.Cluster(what_if=("kernels=roofline",))
    ).predictions
    assert none.decode.measured_seconds == 0
    assert any("by roofline" in note for note in none.details)


def test_uncompiled_passes_run_more_kernels(model: Program) -> None:
    fused, plain = predicted(model), predicted(model, compiled=False)
    assert plain.decode.kernels > 2 * fused.decode.kernels
    assert plain.decode.seconds > fused.decode.seconds
    assert plain.decode.host_seconds == pytest.approx(fused.decode.host_seconds, abs=1e-9)  # still a graph


# --- what overlap costs ---


def test_the_last_of_eight_is_late_by_one_and_four_tenths_deviations() -> None:
    """1.4236 is the expected largest of eight normal deviates (Teichroew 1956)."""
    overlap = OverlapCosts(jitter=0.03, jitter_seconds=4e-6)
    assert overlap.skew(8, 100e-6) == pytest.approx(1.4236 * 5e-6, rel=0.02)
    assert overlap.skew(1, 1.0) == NONE.skew(8, 1.0) == 0.0


def test_jitter_lengthens_every_collective_by_the_skew(model: Program) -> None:
    usual, still = predicted(model, "jitter=2us"), predicted(model, "jitter=x0")
    added = usual.decode.exposed_seconds - still.decode.exposed_seconds
    each = NormalDist().inv_cdf(7.625 / 8.25) * 2e-6
    assert (
        usual.decode.collectives * each < added < usual.decode.collectives * each * 1.5
    )  # and 2 % of what runs between
    assert usual.decode.compute_seconds == pytest.approx(still.decode.compute_seconds)


@pytest.mark.parametrize("term", ["crossing", "contention", "order"])
def test_terms_of_overlap_leave_standard_models_alone(model: Program, term: str) -> None:
    changes = {"crossing": "crossing=20us", "contention": "contention=40%", "order": "order=100%"}
    assert predicted(model, changes[term]).decode.seconds == pytest.approx(predicted(model).decode.seconds)
    long = "all_reduce=100us"  # so that not all of it is hidden
    none, usual, more = (
        predicted(model, change, long, recipe="ladder").decode.seconds
        for change in (f"{term}=x0", f"{term}=x1", changes[term])
    )
    assert none <= usual <= more
    assert none < more


def test_without_contention_kernels_beside_collectives_take_as_long(model: Program) -> None:
    alone = predicted(model).decode.compute_seconds
    free, usual = (predicted(model, c, recipe="ladder").decode for c in ("contention=x0", "contention=x1"))
    assert free.compute_seconds == pytest.approx(alone, rel=0.01)
    # beside a collective kernels progress by 1 / 1.189 of their speed
    most = alone + usual.communication_seconds * (1 - 1 / 1.189)
    assert alone < usual.compute_seconds <= most * 1.01


def test_clocks_slow_down_arithmetic_alone(model: Program) -> None:
    usual, boosted = predicted(model, prompt=2048), predicted(model, "clocks=x0", prompt=2048)
    assert usual.decode.compute_seconds == pytest.approx(boosted.decode.compute_seconds)
    assert 1.02 < usual.prefill.compute_seconds / boosted.prefill.compute_seconds < 1.08


def test_a_step_and_all_kernels_change_as_told(model: Program) -> None:
    usual, longer = predicted(model, "step=x0"), predicted(model, "step=30us")
    assert longer.decode.seconds - usual.decode.seconds == pytest.approx(30e-6)
    twice = predicted(model, "kernels=x2").decode.compute_seconds
    assert twice == pytest.approx(2 * usual.decode.compute_seconds, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("jitter=+2us", "to a value"), ("order=5us", "order=100%"), ("kernels=5us", "by a factor"),
        ("all_reduce=10%", "is no share"), ("crosing=x0", "Did you mean 'crossing'"),
    ],
)  # fmt: skip
def test_changes_that_mean_nothing_are_refused(text: str, why: str) -> None:
    with pytest.raises(RewriterError, match=why):
        WhatIf.parse(load_fabric("h100-nvlink").delay_model(), [text])


def test_emulated_peers_come_late_and_real_ones_do_not() -> None:
    class Fixed:
        def delay(self, call: Call) -> Delay:
            return Delay(10e-6, 0.0, ())

    overlap = OverlapCosts(jitter=0.02, jitter_seconds=3e-6)
    late = Late(Fixed(), overlap, frozenset({0}))
    among = Call("all_reduce", 1024, range(8))
    assert late.delay(among).seconds == pytest.approx(10e-6 + overlap.skew(8, 0.0))
    assert late.later(among, 1e-3) == pytest.approx(overlap.skew(8, 1e-3) - overlap.skew(8, 0.0))
    assert late.delay(Call("send", 1024, (0, 1))).seconds == 10e-6
    assert Late(Fixed(), overlap, frozenset(range(8))).delay(among).seconds == 10e-6


# --- which all-reduce ---


@pytest.mark.parametrize("name", ["h100-nvlink", "h200-nvlink", "b200-nvlink", "a100-nvlink", "pcie-gen5"])
def test_the_best_backend_is_no_slower_than_any(name: str) -> None:
    fabric = load_fabric(name)
    assert fabric.backends[0] == "best"
    model = fabric.delay_model(graphed=True)
    assert isinstance(model, Best)
    for nbytes in (8 << 10, 256 << 10, 8 << 20):  # no more than a one-shot sum is given
        call = Call("all_reduce", nbytes, range(8), "bfloat16", True)
        each = {lib: fabric.delay_model(lib, graphed=True).delay(call).seconds for lib in fabric.libraries}
        found = model.delay(call)
        assert found.seconds == min(each.values())
        assert each[found.library] == found.seconds


def test_a_fused_sum_takes_the_norm_with_it_up_to_its_size(model: Program) -> None:
    fabric = load_fabric("h100-nvlink")
    fused = fabric.delay_model("fused", graphed=True)
    assert isinstance(fused, FusedDelays)
    small = Call("all_reduce", 16 << 10, range(8), "bfloat16", True, norm=True)
    plain = fabric.delay_model("trtllm", graphed=True).delay(small)
    assert fused.delay(small).seconds == pytest.approx(plain.seconds + 1e-6)
    assert fused.delay(small).normed
    assert not fused.delay(replace(small, norm=False)).normed
    assert not fused.delay(replace(small, nbytes=1 << 20)).normed
    separate, together = (predicted(model, library=library).decode for library in ("trtllm", "fused"))
    assert separate.kernels - together.kernels == 4  # the norm after each sum of both layers
    assert together.seconds < separate.seconds


# --- intervals ---


def test_an_interval_holds_eighty_of_a_hundred_lognormal_cases() -> None:
    low, high = interval(10.0, [10.0 * math.exp(0.03), 10.0 * math.exp(-0.04)])
    assert low * high == pytest.approx(100.0)
    draws = np.exp(np.random.default_rng(0).normal(math.log(10.0), 0.05, 100_000))
    assert ((draws > low) & (draws < high)).mean() == pytest.approx(COVERED, abs=0.01)
    assert interval(0.0, [0.0]) == (0.0, 0.0)


def test_predictions_carry_intervals_wider_where_collectives_are_formulas(model: Program) -> None:
    def width(fabric: str) -> float:
        found = predicted(model, fabric=fabric, library=None)
        assert found.seconds_per_token_interval is not None
        low, high = found.seconds_per_token_interval
        assert low < found.seconds_per_token < high
        return high / low

    assert 1.05 < width("h100-nvlink") < 1.5
    assert width("h100-no-p2p") > width("h100-nvlink")


def test_what_is_off_for_both_is_not_off_for_their_quotient(model: Program) -> None:
    standard, ladder = api.predict(
        model, ["tensor-parallel", "ladder"], api.Workload(tp=8, prompt=512, generate=64)
    ).predictions
    assert standard.end_to_end_interval == (1.0, 1.0)
    assert ladder.end_to_end_interval is not None
    assert ladder.seconds_per_token_interval is not None
    low, high = ladder.end_to_end_interval
    assert low < ladder.end_to_end < high
    assert high / low < ladder.seconds_per_token_interval[1] / ladder.seconds_per_token_interval[0]


def test_the_deviation_of_kernels_is_that_of_what_they_are() -> None:
    rates = replace(_rates(), overlap=NONE)
    product = Kernel("p", "product", 2.0 * 8192 * 8192, 2.0 * 8192 * 8192, 2 * 8192 * 8192, 1, 1, 8192, 8192)
    assert kernel_deviation(rates, [product]) == pytest.approx(0.06)
    assert kernel_deviation(replace(rates, table=None), [product]) == pytest.approx(0.25)
    assert kernel_deviation(rates, []) == 0.0


def _rates() -> Any:
    from rewriter.predict.kernel_time import rates_of

    return rates_of(load_fabric("h100-nvlink").device, "bfloat16", True)


# --- baselines ---


def test_exact_choices_stand_beside_what_was_asked_for(model: Program) -> None:
    """On 8 H100, whose sums vLLM can fuse with norms: recipes use the same sums, and are compared with the best."""
    asked = api.Workload(tp=8, prompt=512, generate=64, batch=8)
    found = api.predict(model, ["tensor-parallel", "ladder"], asked, api.Cluster("h100-nvlink"), exact=True)
    by_name = {one.name: one for one in found.exact}
    replicas = next(one for one in found.exact if one.replicas > 1)
    each = replace(asked, tp=replicas.tp, batch=8 // replicas.replicas)
    (alone,) = api.predict(model, ["tensor-parallel"], each, api.Cluster(library=("nccl", "vllm", "fused"))).predictions
    assert replicas.tokens_per_second == pytest.approx(replicas.replicas * alone.tokens_per_second)
    assert replicas.decode_seconds == pytest.approx(alone.decode.seconds)
    best = by_name[found.over]
    had = [one for one in found.exact if one.available and not one.rounds]
    assert best.tokens_per_second == max(one.tokens_per_second for one in had)
    assert by_name[found.over_decode].decode_seconds == min(one.decode_seconds for one in had)
    assert by_name[found.over_prefill].prefill_seconds == min(one.prefill_seconds for one in had)
    for p in found.predictions:
        assert p.end_to_end == pytest.approx(p.tokens_per_second / best.tokens_per_second)
        assert p.decode_speedup == pytest.approx(min(one.decode_seconds for one in had) / p.decode.seconds)
        assert p.prefill_speedup == pytest.approx(min(one.prefill_seconds for one in had) / p.prefill.seconds)
    assert found.bound is not None
    assert found.bound.recipe == "upper-bound"
    assert not by_name["TP 8, L2 prefetch"].available
    assert not api.predict(model, ["ladder"], asked).exact
