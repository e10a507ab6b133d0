"""`rewrite fabrics`: what it prints, what it takes from nccl-tests, what it measures."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from nccl_logs import log
from ranks import run_ranks

from rewriter.cli import main
from rewriter.fabric import SOCKETS, Call, fabrics, load_fabric
from rewriter.fabric.tables import CurvePoint
from rewriter.predict import timing


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    return told


@pytest.mark.parametrize("words", [["list"], []], ids=["list", "alone"])
def test_the_list_names_every_fabric_and_marks_what_is_modelled(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fabrics", *words]) == 0
    lines = {
        line.split()[0]: line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ") and line
    }
    for name in fabrics():
        assert ("modelled" in lines[name]) is load_fabric(name).modelled
    assert main(["fabrics", *words, "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(fabrics())


def test_show_tells_figures_sources_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean 'h100-nvlink'" in refused(["fabrics", "show", "h100-nvlnk"], capsys)
    assert main(["fabrics", "show", "h100-nvlink"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for part in ("3.35 TB/s", "NVIDIA H100 datasheet", "351 GB/s", "tuning.cc", "vllm", "leave one out", "worst"):
        assert part in told
    assert main(["fabrics", "show", "h100-no-p2p"]) == 0
    assert "modelled" in capsys.readouterr().out


def test_show_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fabrics", "show", "pcie-gen5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    fabric = load_fabric("pcie-gen5")
    assert {row["figure"]: row["value"] for row in shown["figures"]}["inside.bandwidth"] == fabric.inside.bandwidth
    assert all(row["source"] for row in shown["figures"])
    curve = next(row for row in shown["curves"] if (row["collective"], row["ranks"]) == ("all_reduce", 2))
    assert 0 < curve["median_error"] < 0.1
    assert 0 < shown["median_error"] <= 0.04


def test_import_makes_a_fabric_that_answers_as_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reduce, gather, out = tmp_path / "a.log", tmp_path / "all_gather_perf.txt", tmp_path / "My box.yaml"
    reduce.write_text("mpirun -np 8 ./build/all_reduce_perf -b 0\n" + log())
    gather.write_text(log(ranks=4).replace("sum      -1", "none     -1"))
    assert main(["fabrics", "import", str(reduce), str(gather), "--out", str(out), "--device-of", "h200-nvlink"]) == 0
    assert "6 measurements of all_gather, all_reduce" in capsys.readouterr().out
    fabric = load_fabric(out)
    model = fabric.delay_model()
    assert (fabric.name, fabric.modelled, fabric.libraries) == ("my-box", False, ("nccl",))
    assert fabric.device == load_fabric("h200-nvlink").device
    assert model.delay(Call("all_reduce", 1 << 20, range(8))).seconds == pytest.approx(25.4e-6)
    assert model.delay(Call("all_gather", 1 << 26, range(4))).seconds == pytest.approx(410e-6)
    assert main(["fabrics", "show", str(out)]) == 0
    assert "nccl-tests" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert stat.S_IMODE(os.stat(out).st_mode) & 0o400


def test_import_across_hosts_is_what_groups_across_nodes_take(tmp_path: Path) -> None:
    path, out = tmp_path / "all_reduce_perf.log", tmp_path / "two.yaml"
    path.write_text("".join(f"[1,0]<stdout>:{line}\n" for line in log(ranks=16, hosts=2).splitlines()))
    assert main(["fabrics", "import", str(path), "--out", str(out)]) == 0
    delay = load_fabric(out).delay_model().delay(Call("all_reduce", 1 << 26, range(16)))
    assert (delay.seconds, delay.note) == (pytest.approx(410e-6), "")
    assert load_fabric(out).delay_model().delay(Call("all_reduce", 1 << 26, range(32))).note
    path.write_text(log(ranks=16, hosts=4))
    assert main(["fabrics", "import", str(path), "--out", str(out)]) == 0
    assert load_fabric(out).node == 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (lambda: "", "line 1: no header"),
        (lambda: "\x00\x01" * 50, "no header"),
        (lambda: log(rows=""), "no rows below the header"),
        (lambda: log().replace("12.58", "-3"), "line 19: time '-3' is no number"),
        (lambda: log().replace("12.58", "nan"), "line 19: time 'nan'"),
        (lambda: log().replace("12.58", "1e99"), "line 19: time '1e99'"),
        (lambda: log().replace("12.58    0.08    0.14      0     1.23", "12.58"), None),
        (lambda: log().replace("     float     sum      -1    12.58", ""), "line 19: not a row of size, count"),
        (lambda: log().replace("67108864 ", "9" * 40 + " "), "larger than any message"),
        (lambda: log() + log(), "rank 0 again: a second run"),
        (lambda: log(ranks=1), "`# Rank` lines of 1 ranks"),
        (lambda: log().replace("#  Rank  3", "#  Rbnk  3"), "`# Rank` lines of 7 ranks"),
        (lambda: log().replace("on  host0 device  7", "on  host1 device  0"), "unequally many"),
        (lambda: log() + "# all_gather_perf\n", "names several programs: all_gather_perf, all_reduce_perf"),
    ],
    ids=range(14),
)  # fmt: skip
def test_what_is_no_log_is_refused_by_file_and_line(
    text: object, why: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "x.log", tmp_path / "out.yaml"
    path.write_text("# all_reduce_perf\n" + text() if text() else "")  # type: ignore[operator]
    words = ["fabrics", "import", str(path), "--out", str(out)]
    if why is None:  # columns that are not needed may be missing
        assert main(words) == 0
        return
    told = refused(words, capsys)
    assert str(path) in told
    assert why in told
    assert not out.exists()


def test_what_import_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "x.log", tmp_path / "out.yaml"
    path.write_text(log())
    start = ["fabrics", "import", str(path)]
    assert "Say it with --op" in refused([*start, "--out", str(out)], capsys)
    assert "Did you mean 'all_reduce'" in refused([*start, "--out", str(out), "--op", "allreduce"], capsys)
    reduced = [*start, "--op", "all_reduce"]
    assert "ends in .yaml" in refused([*reduced, "--out", str(tmp_path / "out.txt")], capsys)
    assert "there is no directory" in refused([*reduced, "--out", str(tmp_path / "no" / "out.yaml")], capsys)
    assert "h100-nvlink" in refused([*reduced, "--out", str(out), "--device-of", "h100-nvlnk"], capsys)
    assert "has one per node" in refused([*reduced, "--out", str(out), "--device-of", "ethernet-10g"], capsys)
    assert "no such file" in refused(["fabrics", "import", str(tmp_path / "absent"), "--out", str(out)], capsys)
    path.write_text(log(ranks=16, hosts=2))
    assert "no link between nodes" in refused([*reduced, "--out", str(out), "--device-of", "pcie-gen5"], capsys)
    (other := tmp_path / "y.log").write_text(log().replace("2.27.3", "2.20.1"))
    assert "several versions" in refused([*reduced, str(other), "--out", str(out)], capsys)
    assert not out.exists()


def test_calibrate_looks_where_it_shall_write_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rewriter.cli.launching.start_ranks", lambda *_: pytest.fail("ranks were started"))
    (tmp_path / "here.yaml").mkdir()
    for place, why in (("x.txt", "ends in .yaml"), ("no/x.yaml", "no directory"), ("here.yaml", "is a directory")):
        assert why in refused(["fabrics", "calibrate", "--out", str(tmp_path / place)], capsys)


class Clock:
    """Stands still but where a collective waits, 20 ms; every look at the thread's clock takes 1 ms."""

    def __init__(self) -> None:
        self.now = self.busy = 100.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        self.busy += 1e-3
        return self.busy

    def wait(self) -> None:
        self.now += 0.02


def test_a_duration_is_from_arrival_to_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing, "_gathered", lambda mine: mine[None])
    found = timing.durations(lambda: clock, 4, torch.device("cpu"))
    assert found.seconds == pytest.approx([0.019] * 4)  # the call itself took 1 ms of the thread


def test_ranks_that_share_cores_wait_from_the_last_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through sockets the last one, here the third, waits for nobody: its time does not count."""
    monkeypatch.setattr(timing, "_gathered", lambda mine: mine[None] + torch.tensor([[0.0], [1.0], [2.0]]))
    starts, ends = [0.0, 10.0], [2.5, 12.3]  # of the first rank; the others start and end later by 1 and 2
    assert timing._waits(starts, ends, False, False) == pytest.approx([2.5, 2.3])
    assert timing._waits(starts, ends, False, True) == pytest.approx([1.5, 1.3])
    assert timing._waits(starts, ends, True, True) == pytest.approx([2.5, 2.3])
    assert timing._waits(starts, ends, False, True, sockets=True) == pytest.approx([1.0, 0.8])


def calibrated_here(group: object) -> tuple[str, list[tuple[str, CurvePoint]]]:
    from rewriter.predict.calibration import calibrated, measure

    large = measure(("all_reduce", "all_gather", "send"), (1 << 22,), 3)
    return calibrated(Path("here.yaml"), 2048, 3)[0], [(m.kind, m.point) for m in large]


@pytest.mark.slow
def test_calibration_measures_every_collective(tmp_path: Path) -> None:
    """On two real ranks: all ranks agree, durations are real, and the file is a fabric that answers with them."""
    (text, found), (_, other) = run_ranks(calibrated_here, 2)
    assert found == other
    for _, point in found:
        # not faster than memory, nor than a system call
        assert point.seconds > max(2e-6, point.nbytes / 200e9)
        assert 0 <= point.cpu_seconds <= point.seconds
        assert point.busy_seconds == 0 or point.seconds < point.busy_seconds <= 10.01 * point.seconds
    # 4 MB are copied by this process's threads, those of a message too
    assert any(point.cpu_seconds > 0 for kind, point in found if kind != "send")
    assert all(point.cpu_seconds > 0 for kind, point in found if kind == "send")
    out = tmp_path / "here.yaml"
    out.write_text(text)
    fabric = load_fabric(out)
    assert (fabric.name, fabric.modelled, fabric.libraries) == ("here", False, ("gloo", SOCKETS))
    assert fabric.device.peak["float32"] > 1e6
    assert fabric.device.bandwidth > 1e6
    table, small = fabric.chosen_tables()
    assert {kind for kind, _ in table.curves} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send",
    }  # fmt: skip
    assert {kind for kind, _ in small.curves} == {"all_reduce", "all_gather", "broadcast"}
    assert small.most_bytes == 2048
    point = table.curves["all_gather", 2].points[0]
    delay = fabric.delay_model("gloo").delay(Call("all_gather", point.nbytes, (0, 1)))
    assert (delay.seconds, delay.note) == (pytest.approx(point.seconds), "")
    assert fabric.delay_model().delay(Call("all_reduce", 1 << 20, range(8))).seconds > 0
    assert fabric.delay_model().delay(Call("all_reduce", 4096, (0, 1))).library == "gloo"  # sockets take 2 kB here


@pytest.mark.slow
def test_calibrate_starts_ranks_and_writes_a_whole_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "here.yaml"
    assert main(["fabrics", "calibrate", "--out", str(out), "--largest", "4096", "--repetitions", "5"]) == 0
    assert f"wrote {out}" in capfd.readouterr().out
    assert load_fabric(out).libraries == ("gloo", SOCKETS)
    assert list(tmp_path.iterdir()) == [out]
