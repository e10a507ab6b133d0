"""What collectives take: tables against what was measured and held out, formulas against closed forms, fabrics as
files."""

from __future__ import annotations

import csv
import itertools
import json
import re
import statistics
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository import TINY_LLAMA
from subprocesses import run_code

from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.fabric import KINDS, Call, Delay, DelayModel, Fabric, Kind, Link, Links, WhatIf, fabrics, load_fabric
from rewriter.fabric.alpha_beta import Algorithm, AlphaBeta, nccl
from rewriter.fabric.links import GroupPlacement, place
from rewriter.fabric.overlap import OverlapCosts
from rewriter.fabric.schema import DEVICES, LIBRARY, parse
from rewriter.fabric.tables import CSV, Curve, CurvePoint, Table, shipped, shipped_table
from rewriter.fabric.writing import measured_points

US = 1e-6
EXAMPLE = TINY_LLAMA
NAMES = (
    "a100-nvlink", "b200-nvlink", "ethernet-100g", "ethernet-10g", "gb10-roce", "h100-2x8-ib", "h100-no-p2p",
    "h100-nvlink", "h20-nvlink", "h200-nvlink", "h800-nvlink", "pcie-gen4", "pcie-gen5", "roce-100g", "rtx-3090-no-p2p",
    "rtx-3090-nvlink", "rtx-3090-p2p", "rtx-4090-no-p2p", "rtx-4090-p2p", "rtx-5090-no-p2p", "rtx-5090-p2p",
    "rtx-pro-6000-no-p2p", "two-nodes-100g", "two-nodes-25g",
)  # fmt: skip
MODELLED = {
    "ethernet-100g", "ethernet-10g", "h100-2x8-ib", "h100-no-p2p", "h20-nvlink", "h800-nvlink", "roce-100g",
    "rtx-3090-no-p2p", "rtx-3090-nvlink", "rtx-3090-p2p", "rtx-5090-no-p2p", "rtx-pro-6000-no-p2p", "two-nodes-100g",
    "two-nodes-25g",
}  # fmt: skip


def whole(name: str) -> str:
    """The text of a shipped fabric, with the figures of its device."""
    text = (LIBRARY / f"{name}.yaml").read_text()
    device = re.search(r"^device: (\S+)\n", text, re.MULTILINE)
    assert device is not None
    figures = (DEVICES / f"{device[1]}.yaml").read_text().replace("\n", "\n  ").rstrip()
    return text.replace(device[0], f"device:\n  {figures}\n")


# --- measured tables -------------------------------------------------------------------------------------------------


def test_shipped_tables_predict_their_own_held_out_points() -> None:
    """Each size between a curve's first and last, from all others: 2.4 % (3,735 points), 2.4 % of those in fabrics.
    Files have curves of a few sizes besides."""
    everything = [error for table in shipped().values() for error in table.errors()]
    chosen = [table for name in fabrics() for table in load_fabric(name).chosen_tables()]
    used = {table.key: table.errors() for table in chosen if table.key in shipped()}
    inside = list(itertools.chain(*used.values()))
    assert len(everything) > 3000
    assert len(inside) > 1500
    for key, errors in {**used, "all": everything, "of fabrics": inside}.items():
        assert statistics.median(errors) <= 0.04, key


def table(system: str, library: str, version: str) -> Table:
    shipped = shipped_table(system, library, version)
    assert shipped is not None
    return shipped


def test_an_error_is_that_of_a_curve_without_the_point() -> None:
    points = tuple(CurvePoint(1 << k, (1 + k % 3) * US) for k in range(6))
    for index, error in enumerate(Curve(points).errors(), start=1):
        without = Curve(points[:index] + points[index + 1 :])
        assert error == abs(without.seconds(1 << index) / points[index].seconds - 1)


def test_tables_answer_what_was_measured() -> None:
    for row in itertools.islice(csv.DictReader(CSV.open(newline="")), 0, None, 97):
        if row["library"] != "nccl" or row["dtype"] != "half" or row["library_version"] != "2.29.2":
            continue
        kind = row["op"].replace("alltoall", "all_to_all")
        curve = table(row["system"], "nccl", "2.29.2").curves[kind, int(row["gpus"])]  # type: ignore[index]
        assert curve.seconds(int(row["bytes"])) == pytest.approx(float(row["latency_us"]) * US)


def test_a_size_measured_twice_counts_by_its_median() -> None:
    curve = table("h100_sxm", "nccl", "2.27.3").curves["all_reduce", 8]
    assert curve.seconds(16384) == pytest.approx((16.58 + 16.69) / 2 * US)


sizes = st.lists(st.integers(1, 1 << 30), min_size=2, max_size=12, unique=True)


@given(sizes, st.data())
def test_between_two_sizes_a_curve_stays_between_them(found: list[int], data: st.DataObject) -> None:
    times = data.draw(st.lists(st.floats(1e-6, 1.0), min_size=len(found), max_size=len(found)))
    curve = Curve.of(CurvePoint(nbytes, seconds) for nbytes, seconds in zip(found, times, strict=True))
    for low, high in itertools.pairwise(curve.points):
        at = data.draw(st.integers(low.nbytes, high.nbytes))
        bounds = sorted((low.seconds, high.seconds))
        assert bounds[0] * (1 - 1e-9) <= curve.seconds(at) <= bounds[1] * (1 + 1e-9)


def test_beyond_the_sizes_measured() -> None:
    curve = Curve.of([CurvePoint(1000, 10 * US), CurvePoint(2000, 12 * US), CurvePoint(4000, 16 * US)])
    assert curve.seconds(0) == curve.seconds(7) == pytest.approx(10 * US)
    assert curve.seconds(14000) == pytest.approx(36 * US)  # 2 µs per 1000 bytes, as between the last two


def test_a_power_law_is_exact() -> None:
    curve = Curve.of(CurvePoint(1 << k, 1e-6 * (1 << k) ** 0.7) for k in range(0, 20, 3))
    assert curve.seconds(1000) == pytest.approx(1e-6 * 1000**0.7, rel=1e-9)


def test_what_a_collective_takes_of_a_core_and_how_it_is_hindered() -> None:
    figures = ((1000, 10 * US, 4 * US, 30 * US), (2000, 20 * US, 0.0, 0.0), (4000, 40 * US, US))
    curve = Curve.of(CurvePoint(*some) for some in figures)
    assert curve.hindrance(10) == curve.hindrance(1000) == pytest.approx(20 * US)
    assert curve.hindrance(1500) == pytest.approx(10 * US)
    assert (curve.cpu_seconds(1250), curve.hindrance(3000)) == (pytest.approx(3 * US), 0.0)
    assert curve.cpu_seconds(8000) == pytest.approx(2 * US)  # in proportion to the seconds
    assert CurvePoint(1, 1.0, 0.0, 0.5).hindrance == 0.0


def test_a_file_says_what_a_collective_takes_where_ranks_compute() -> None:
    text = (LIBRARY / "h100-nvlink.yaml").read_text()
    points = CurvePoint(1024, 1e-3, 2e-4, 3e-3), CurvePoint(2048, 2e-3)
    rows = measured_points(("all_reduce", 2, point) for point in points)
    assert rows[1] == {"kind": "all_reduce", "ranks": 2, "bytes": 2048, "seconds": 2e-3}
    given = {"library": "gloo", "version": "2", "source": "here", "points": rows}
    model = parse(f"{text[: text.index('tables:')]}measurements: {json.dumps(given)}\n", "mine").delay_model()
    call = Call("all_reduce", 1024, range(2))
    delay = model.delay(call)
    assert (delay.seconds, delay.cpu_seconds) == (pytest.approx(1e-3), pytest.approx(2e-4))
    assert delay.hindrance == pytest.approx(2e-3)
    # as many times as long, hindered in proportion; what is added is not
    for change, hindrance in (("all_reduce=x3", 6e-3), ("all_reduce=+5ms", 2e-3)):
        assert WhatIf.parse(model, [change]).delay(call).hindrance == pytest.approx(hindrance)


@pytest.mark.parametrize(
    ("library", "graphed", "microseconds"),
    [("nccl", False, 18.98), ("vllm", True, 5.31), ("vllm", False, 22.989), ("trtllm", True, 3.559)],
)
def test_the_library_and_how_it_is_launched_decide(library: str, graphed: bool, microseconds: float) -> None:
    delay = load_fabric("h100-nvlink").delay_model(library, graphed).delay(Call("all_reduce", 16384, range(8)))
    assert delay.seconds == pytest.approx(microseconds * US)
    assert delay.note == ""


def test_a_library_with_an_all_reduce_only_leaves_the_rest_to_nccl() -> None:
    fabric, call = load_fabric("h100-nvlink"), Call("all_gather", 1 << 20, range(4))
    assert fabric.delay_model("vllm").delay(call).seconds == fabric.delay_model("nccl").delay(call).seconds


def test_what_was_not_measured_is_scaled_and_says_so() -> None:
    fabric = load_fabric("h100-nvlink")
    model, formula = fabric.delay_model(), fabric.formula
    call, like = Call("all_reduce", 1 << 20, range(6)), Call("all_reduce", 1 << 20, range(8))
    ratio = formula.delay(call).seconds / formula.delay(like).seconds
    assert model.delay(call).seconds == pytest.approx(model.delay(like).seconds * ratio)
    assert "all_reduce among 8" in model.delay(call).note
    for kind in KINDS:
        assert model.delay(Call(kind, 1 << 20, range(2))).seconds > 0


def test_a_library_that_was_not_measured_is_named() -> None:
    with pytest.raises(RewriterError, match=r"h100-nvlink: 'gloo' was not measured on it; best, nccl, vllm, "):
        load_fabric("h100-nvlink").delay_model("gloo")
    with pytest.raises(RewriterError, match="no table of l40s"):
        shipped_table("l40s", "trtllm", "1.0")


# --- formulas --------------------------------------------------------------------------------------------------------

ALPHA, B, S = 1e-5, 1e9, 8e6
LINE = Link(ALPHA, B)
TWO_NODES = AlphaBeta(LINE, Link(4e-5, B / 10), 4)


def timed(model: AlphaBeta, algorithm: Algorithm, call: Call) -> tuple[float, float]:
    """(latency, transfer) by the model's first protocol."""
    return model.time(algorithm, model.protocols[0], call, model.placed(call)[0])


@pytest.mark.parametrize(
    ("algorithm", "kind", "alphas", "volumes"),
    [
        ("ring", "all_reduce", 14, 14 / 8), ("ring", "all_gather", 7, 7 / 8), ("ring", "reduce_scatter", 7, 7 / 8),
        ("ring", "all_to_all", 7, 7 / 8), ("ring", "broadcast", 7, 1), ("ring", "reduce", 7, 1),
        ("ring", "send", 1, 1), ("ring", "gather", 1, 7 / 8), ("ring", "scatter", 1, 7 / 8), ("ring", "barrier", 14, 0),
        ("tree", "all_reduce", 6, 2), ("tree", "broadcast", 3, 1), ("tree", "all_gather", 7, 7 / 8),
    ],
)  # fmt: skip
def test_formulas_by_hand(algorithm: Algorithm, kind: Kind, alphas: float, volumes: float) -> None:
    size = 0 if kind == "barrier" else int(S)
    times = timed(AlphaBeta(LINE, None, 8), algorithm, Call(kind, size, range(8)))
    assert times == pytest.approx((alphas * ALPHA, volumes * size / B))


def test_hierarchical_by_hand() -> None:
    """4 ranks inside at 1 GB/s, 2 nodes with a quarter of the bytes over links of a tenth."""
    inside = 6 * ALPHA + 2 * 3 / 4 * S / B
    between = 2 * 4e-5 + 2 / 2 * (S / 4) / (B / 10)
    times = timed(TWO_NODES, "hierarchical", Call("all_reduce", int(S), range(8)))
    assert sum(times) == pytest.approx(inside + between)


def test_a_ring_across_nodes_changes_nodes_as_rarely_as_it_can() -> None:
    took = timed(TWO_NODES, "ring", Call("all_gather", int(S), range(8)))
    assert took == pytest.approx((6 * ALPHA + 4e-5, 7 / 8 * S / (4 * B / 10)))


def test_the_fastest_counts() -> None:
    one_node, one = AlphaBeta(Link(5e-6, 2e10), None, 8), ("ring", "tree")
    for model, algorithms in ((one_node, one), (TWO_NODES, (*one, "hierarchical"))):
        for size, kind in itertools.product((64, 1 << 16, 1 << 26), ("all_reduce", "broadcast")):
            call = Call(kind, size, range(8))  # type: ignore[arg-type]
            single = [sum(timed(model, name, call)) for name in algorithms]  # type: ignore[arg-type]
            assert model.delay(call).seconds == min(single)


def test_nccl_small_messages_as_its_own_model_has_them() -> None:
    """8 ranks over NVLink, ring LL: 6.6 + 14 × 0.6; 2 nodes of 8, tree LL: 6.8 + 2 (7 × 0.6 + 5.0)."""
    ll = nccl("nvlink")[:1]
    model = AlphaBeta(Link(3.4 * US, 351e9), Link(14 * US, 48e9), 8, ll)
    assert timed(model, "ring", Call("all_reduce", 0, range(8))) == pytest.approx((15.0 * US, 0))
    assert timed(model, "tree", Call("all_reduce", 0, range(16))) == pytest.approx((25.2 * US, 0))


def test_two_nodes_against_what_others_measured() -> None:
    """2 × 8 H100: bus bandwidth told to be expected is about 470 GB/s; 2 × 8 H20 take 46 to 48 µs for some bytes."""
    model = load_fabric("h100-2x8-ib").delay_model()
    large, small = (model.delay(Call("all_reduce", size, range(16))) for size in (1 << 30, 512))
    assert 2 * 15 / 16 * (1 << 30) / large.seconds == pytest.approx(470e9, rel=0.1)
    assert small.seconds == pytest.approx(47 * US, rel=0.15)
    assert "formula" in large.note


def test_one_rank_communicates_nothing_and_more_bytes_never_take_less_by_formula() -> None:
    for name, kind in itertools.product(NAMES, KINDS):
        fabric = load_fabric(name)
        assert fabric.delay_model().delay(Call(kind, 1 << 20, range(1))).seconds == 0
        ranks = range(8 if fabric.between else min(8, fabric.node))
        times = [fabric.formula.delay(Call(kind, size, ranks)).seconds for size in (0, 1 << 10, 1 << 20, 1 << 30)]
        assert times == sorted(times), (name, kind)


def test_a_group_that_no_link_joins_is_refused() -> None:
    for name in ("pcie-gen4", "pcie-gen5", "h100-no-p2p"):
        with pytest.raises(RewriterError, match="span 2 nodes of 8, and this fabric has no link between nodes"):
            load_fabric(name).delay_model().delay(Call("all_reduce", 1 << 20, range(16)))
    with pytest.raises(RewriterError, match="one node of 8 ranks"):
        load_fabric("pcie-gen4").channel(16)


# --- placement and sharing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [range(8), range(3, 16), range(1, 64, 8), range(0, 64, 2), range(8191, -1, -1)])
def test_a_range_lies_where_its_ranks_lie(ranks: range) -> None:
    by_range, by_tuple = place(ranks, 8), place(tuple(ranks), 8)
    assert set(by_range.first) == set(by_tuple.first)
    assert (by_range.nodes, by_range.size) == (by_tuple.nodes, by_tuple.size)


def test_nodes_of_any_size() -> None:
    assert place(range(0, 64, 8), 1 << 40) == GroupPlacement(tuple(range(0, 64, 8)), 1, 8)


def test_a_large_world_names_few_links() -> None:
    delay = load_fabric("h100-nvlink").delay_model().delay(Call("all_reduce", 1 << 20, range(8192)))
    assert len(delay.links) == 16
    model = load_fabric("pcie-gen5").delay_model()
    assert model.delay(Call("all_reduce", 1 << 20, range(4))).links == ("node0",)


def test_transfers_on_one_link_wait_for_each_other() -> None:
    nic, other = Delay(5.0, 3.0, ("nic",)), Delay(5.0, 3.0, ("bus",))
    start, end, links = Links().occupy(10.0, nic)
    assert (start, end) == (10.0, 15.0)
    assert links.occupy(11.0, nic)[:2] == (13.0, 18.0)  # once the first's transfer is over, not its latency
    assert links.occupy(11.0, other)[:2] == (11.0, 16.0)
    assert links.occupy(14.0, nic)[:2] == (14.0, 19.0)
    assert Links().occupy(10.0, nic)[2] == links  # nothing is changed in place


def test_groups_of_other_ranks_share_a_bus_but_not_a_switch() -> None:
    halves = [Call("all_reduce", 1 << 24, range(4)), Call("all_reduce", 1 << 24, range(4, 8))]
    for name, together in (("h100-nvlink", True), ("pcie-gen5", False)):
        first, second = (load_fabric(name).delay_model().delay(call) for call in halves)
        links = Links().occupy(0.0, first)[2]
        assert (links.occupy(0.0, second)[0] == 0.0) is together


def test_what_a_collective_holds_of_a_gpu() -> None:
    """8 ranks, ring: one block for 16 KB, two for 64 KB, all 24 for 1 MB; memory is read and written once per byte."""
    model = load_fabric("h100-nvlink").delay_model()
    blocks = [model.delay(Call("all_reduce", size, range(8))).blocks for size in (1 << 14, 1 << 16, 1 << 20)]
    assert blocks == [1, 2, 24]
    assert model.delay(Call("all_reduce", 1 << 20, range(8))).memory_bytes == 2 * 2 * 7 * (1 << 20) // 8
    assert model.delay(Call("all_gather", 1 << 20, range(8))).memory_bytes == 2 * 7 * (1 << 20) // 8
    custom = load_fabric("h100-nvlink").delay_model("vllm", graphed=True)
    assert [custom.delay(Call(kind, 1 << 24, range(8))).blocks for kind in ("all_reduce", "all_gather")] == [36, 24]


# --- what if ---------------------------------------------------------------------------------------------------------


class Fixed:
    def delay(self, call: Call) -> Delay:
        return Delay(100 * US, 60 * US, ("nic",))


@pytest.mark.parametrize(
    ("text", "seconds", "transfer"),
    [
        ("all_reduce=+5us", 105, 60), ("all_reduce=-5us", 95, 60), ("all_reduce=x1.5", 150, 90),
        ("all_reduce=20us", 20, 12), ("all-reduce = +0.1ms", 200, 60), ("all_reduce=-1s", 0, 0),
        ("bandwidth=x0.5", 160, 120), ("latency=+2us", 102, 60), ("latency=x2", 140, 60), ("latency=1us", 61, 60),
        ("all_gather=+5us", 100, 60), ("all_reduce=x2,all_reduce=+1µs", 201, 120), ("all_reduce=500ns", 0.5, 0.3),
    ],
)  # fmt: skip
def test_changes(text: str, seconds: float, transfer: float) -> None:
    delay = WhatIf.parse(Fixed(), [text]).delay(Call("all_reduce", 1024, range(2)))
    assert (delay.seconds, delay.transfer) == (pytest.approx(seconds * US), pytest.approx(transfer * US))
    assert delay.links == ("nic",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("all_reduce", "no `=`"), ("allreduce=+5us", "Did you mean 'all_reduce'"), ("all_reduce=5", "has no unit"),
        ("all_reduce=+5 parsecs", "is no change"), ("bandwidth=+5us", "changes by a factor"), ("=x2", "unknown ''"),
        ("bandwidth=x0", "bandwidth of nothing"), ("all_reduce=x-1", "is no change"), ("all_reduce=", "is no change"),
        ("all_reduce=xnan", "is no change"), ("all_reduce=x1e99", "1000000 times"),
        ("all_reduce=" + "9" * 400 + "s", "1000000 seconds"), ("bandwidth=x1e-9", "bandwidth of nothing"),
    ],
)  # fmt: skip
def test_what_is_no_change_is_told(text: str, why: str) -> None:
    with pytest.raises(RewriterError, match=re.escape(why)):
        WhatIf.parse(Fixed(), [text])


# --- other people's models -------------------------------------------------------------------------------------------

PLUGIN = """
from rewriter.fabric import Delay
class Flat:
    def __init__(self, fabric, library, graphed):
        self.seconds = 1e-6 * fabric.node
    def delay(self, call):
        return Delay(self.seconds, 0.0, ())
class Useless:
    def __init__(self, *arguments): pass
word = "flat"
"""


def with_model(model: str) -> Fabric:
    text = (LIBRARY / "h100-nvlink.yaml").read_text()
    return parse(text.replace("model: measured", f"model: {model}"), "mine")


def test_models_of_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flat_delays.py").write_text(PLUGIN)
    installed = tmp_path / "flat_delays-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: flat-delays\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[rewriter.delay_models]\nflat = flat_delays:Flat\nuseless = flat_delays:Useless\nword = flat_delays:word\n"
        "wrong = flat_delays:Flta\nlost = flat_delay:Flat\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import flat_delays  # type: ignore[import-not-found]

    for fabric in (with_model("flat"), replace(load_fabric("h100-nvlink"), model=flat_delays.Flat)):
        model = fabric.delay_model()
        assert isinstance(model, DelayModel)
        assert model.delay(Call("all_reduce", 1, range(8))).seconds == pytest.approx(8e-6)
    for name, why in (
        ("wrong", "cannot be imported"), ("lost", "cannot be imported"), ("flta", "'flat'"),
        ("useless", "no class with a method delay"), ("word", "no class with a method delay"),
    ):  # fmt: skip
        with pytest.raises(RewriterError, match=why):
            with_model(name).delay_model()


@pytest.mark.parametrize("name", ["left_here:Model", "os:system", "subprocess:Popen", "left_here.Model"])
def test_a_file_runs_no_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a module that lies beside the file, nor one that is installed."""
    (tmp_path / "left_here.py").write_text("open('ran', 'w').close()\n" + PLUGIN.replace("Flat", "Model"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RewriterError, match="names no code" if ":" in name else "nor an entry point"):
        with_model(name).delay_model()
    assert "left_here" not in sys.modules
    assert not (tmp_path / "ran").exists()


def test_a_file_with_code_stops_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (LIBRARY / "h100-nvlink.yaml").read_text().replace("model: measured", "model: left_here:Model")
    Path("mine.yaml").write_text(text)
    Path("left_here.py").write_text("open('ran', 'w').close()\n" + PLUGIN.replace("Flat", "Model"))
    assert main(["fabrics", "show", "mine.yaml"]) == 2
    assert main(["predict", str(EXAMPLE), "--recipe", "ladder", "--fabric", "mine.yaml", "--tp", "2"]) == 2
    said = capsys.readouterr().err
    assert said.count("A fabric's file names no code") == 2
    assert "line " in said
    assert not Path("ran").exists()


# --- fabrics as files ------------------------------------------------------------------------------------------------


def test_the_fabrics_that_ship() -> None:
    assert fabrics() == NAMES
    assert {name for name in NAMES if load_fabric(name).modelled} == MODELLED


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name: str) -> None:
    text = whole(name)
    sources = load_fabric(name).sources
    own = [figure for figure in sources if not figure.startswith("overlap.")]  # not named in the file: as everywhere
    assert text.count("value:") + text.count("- library:") == text.count("source:")
    assert len(own) + text.count("most_bytes: {value") == text.count("value:")
    assert (
        len(own) == len({figure for figure in own if "measurements" not in figure}) == text.count("\n") * 0 + len(own)
    )
    others = {figure.removeprefix("overlap.") for figure in set(sources) - set(own)}
    assert others == {f.name for f in fields(OverlapCosts)}
    with pytest.raises(RewriterError, match="source is missing"):
        parse(re.sub(r', source: "[^"]*"', "", text, count=1), "mine")


def test_the_planner_has_the_figures_that_it_had() -> None:
    for name, flops, bandwidth, network in (("h100", 740e12, 351e9, 48e9), ("a100", 228e12, 219e9, 24e9)):
        fabric = load_fabric(f"{name}-nvlink")
        assert (fabric.device.flops, fabric.device.memory, fabric.device.call) == (flops, 80 * 10**9, 10e-6)
        assert (fabric.node, fabric.inside, fabric.between) == (8, Link(3.4e-6, bandwidth), Link(14e-6, network))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("value: 3.35e12", "value: -1", "memory_bandwidth.value"), ("model: measured", "modle: measured", "modle"),
        ("modelled: false", "modelled: perhaps", "modelled"), ("protocols: nvlink", "protocols: rope", "protocols"),
        ("name: h100-nvlink", "name: H 100", "name"), ("latency: {value: 3.4e-6,", "latency: {", "inside.latency"),
        ("{value: 132,", "{value: .nan,", "multiprocessors"), ("system: h100_sxm, ", "", "tables.0.system"),
        ("blocks:", "overlap: {jiter: {value: 0, source: s}}\nblocks:", "Did you mean 'jitter'"),
    ],
)  # fmt: skip
def test_faults_are_told_with_their_lines(old: str, new: str, why: str) -> None:
    text = whole("h100-nvlink")
    line = text[: text.index(old)].count("\n") + 1
    with pytest.raises(RewriterError, match=rf"line {line}: .*{re.escape(why)}"):
        parse(text.replace(old, new, 1), "mine.yaml")


def test_all_faults_at_once_and_links_that_are_missing() -> None:
    text = (LIBRARY / "h100-nvlink.yaml").read_text()
    with pytest.raises(RewriterError, match="has 3 faults"):
        parse(text.replace("modelled: false", "modelled: 7").replace("node:", "nodes:"), "mine.yaml")
    without = re.sub(r"inside:\n(  .*\n)+", "", text)
    with pytest.raises(RewriterError, match="no link `inside`"):
        parse(without, "mine.yaml")
    with pytest.raises(RewriterError, match="neither `tables` nor `measurements`"):
        parse(text[: text.index("tables:")], "mine.yaml")
    with pytest.raises(RewriterError, match="never construct objects"):
        parse("!!python/object/apply:os.system [true]", "mine.yaml")


def test_names_that_are_none() -> None:
    with pytest.raises(RewriterError, match="Did you mean 'h100-nvlink'"):
        load_fabric("h100-nvlnk")
    with pytest.raises(RewriterError, match="no such file"):
        load_fabric("absent.yaml")


def test_no_torch_is_imported() -> None:
    program = (
        "import sys, rewriter.fabric as f; f.load_fabric('h100-nvlink').delay_model(); print('torch' in sys.modules)"
    )
    assert run_code(program).stdout.strip() == "False"
