"""Sections of benchmarks/gpu/run.py: one that hangs or dies loses its own rows only, and each would notice a fault."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from repository import ROOT
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import fake_pg

from rewriter.emit.module import emit_runtime_module
from rewriter.runtime.loading import build
from rewriter.runtime.streams import why_not_captured

SCRIPT = """
from benchmarks.gpu import run as gpu
from benchmarks.gpu.sections import Section

gpu.DRY = 1
gpu.CHECKS = gpu.SECTIONS = {
    "hangs": Section("seeded:hangs", 30),
    "crashes": Section("seeded:crashes", 90),
    "raises": Section("seeded:raises", 90),
    "loses the device": Section("seeded:loses", 90),
    "runs": Section("seeded:runs", 90),
}
gpu.main()
"""
SEEDED = """
import os, signal, subprocess, time
from pathlib import Path
from benchmarks.gpu import report as gpu_report

def first(scale):
    table = scale.table("seeded", ("what", "result"))
    table.add("first")
    return table

def hangs(scale):
    first(scale)
    Path("pids").write_text(f"{os.getpid()} {subprocess.Popen(['sleep', '1000']).pid}")
    time.sleep(1000)

def crashes(scale):
    first(scale)
    os.kill(os.getpid(), signal.SIGSEGV)

def raises(scale):
    first(scale)
    raise ValueError("seeded")

def loses(scale):
    gpu_report.is_lost = lambda: True
    table = first(scale)
    table.attempt("second", lambda: 1 / 0)
    table.add("third")

def runs(scale):
    first(scale)
"""


@pytest.fixture
def scale() -> Any:
    from benchmarks.gpu.report import Scale

    return Scale(torch.device("cpu"), True)


def script(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "script.py").write_text(SCRIPT)
    (directory / "seeded.py").write_text(SEEDED)
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py", "--cpu", *arguments]
    return subprocess.run(command, env=settings, cwd=directory, capture_output=True, text=True, timeout=280)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
def test_sections_that_hang_or_die_lose_their_own_rows_only(tmp_path: Path) -> None:
    rows, page = tmp_path / "rows.json", tmp_path / "page.md"
    ran = script(tmp_path, "--json", str(rows), "--out", str(page))
    assert ran.returncode == 1, ran.stderr
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    found = [(r["section"], next(iter(r["cells"].values())), r["cells"]["result"]) for r in records if "cells" in r]
    assert found == [
        ("hangs", "first", "ok"),
        ("hangs", "the rest", "ended after 30 s"),
        ("crashes", "first", "ok"),
        ("crashes", "the rest", "died of signal 11 (SIGSEGV)"),
        ("raises", "first", "ok"),
        ("raises", "all of it", "ValueError: seeded"),
        ("loses the device", "first", "ok"),
        ("loses the device", "second", "ZeroDivisionError: division by zero"),
        ("loses the device", "the rest", "not run: CUDA has an error that stays"),
        ("runs", "first", "ok"),
    ]
    assert [r["failed"] for r in records if "cells" in r] == [result != "ok" for _, _, result in found]
    assert "in hangs" in ran.stderr  # it said where it was
    assert all(is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert page.read_text() == ran.stdout.removesuffix("\n")
    assert "| the rest | **died of signal 11 (SIGSEGV)** |" in ran.stdout
    again = script(tmp_path, "--page", str(rows))
    assert again.stdout == ran.stdout


def test_what_does_not_fit_into_the_time_is_not_begun(tmp_path: Path) -> None:
    ran = script(tmp_path, "--within", "10", "--only", "runs", "hangs")
    assert ran.returncode == 1, ran.stderr
    assert ran.stdout.count("not begun: the 10 s are over") == 2


class Clock:
    """Stands for a GPU's events: what was asked of it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.slept: list[int] = []
        names = iter(range(1000))

        def event(enable_timing: bool) -> Any:
            name = f"event {next(names) % 2}"
            return SimpleNamespace(
                record=lambda: self.asked.append(name), synchronize=lambda: None, elapsed_time=lambda other: 3.0
            )

        monkeypatch.setattr(torch.cuda, "Event", event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)

    def sleep(self, cycles: int) -> None:
        self.asked.append("sleep")
        self.slept.append(cycles)


def test_a_gpu_is_kept_busy_until_all_of_a_call_is_in_its_queue(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.report import MOST_CYCLES, SLEEP_CYCLES

    clock = Clock(monkeypatch)
    on_gpu = dataclasses.replace(scale, device=torch.device("cuda"), tiny=False)
    assert on_gpu.seconds(lambda: clock.asked.append("call"), rounds=2) == pytest.approx(3e-3)
    assert clock.asked == ["call"] * 3 + ["sleep", "event 0", "call", "event 1"] * 2
    assert set(clock.slept) == {SLEEP_CYCLES}
    clock.slept.clear()
    on_gpu.seconds(lambda: time.sleep(0.02), rounds=1)
    assert SLEEP_CYCLES < 2 * 0.02 * 1.98e9 <= clock.slept[0] <= MOST_CYCLES


def test_kernels_are_told_from_ranges_and_copies() -> None:
    from benchmarks.gpu.report import kernel_names

    kinds = {"kernel": "gemv", "gpu_user_annotation": "rewriter::all_reduce_start", "gpu_memcpy": "Memcpy", None: "x"}
    events = [{"name": name} | ({"cat": kind} if kind else {}) for kind, name in kinds.items()]
    assert kernel_names({"traceEvents": events}) == ["gemv"]


def test_a_product_that_is_wrong_or_no_reduction_fails(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import gemv as gpu_gemv
    from benchmarks.gpu.report import Scale

    def row(way: str) -> str:
        return str(gpu_gemv.product_row(scale, 1e9, (1280, 8192), way, [])[1])

    assert [row(way) for way in gpu_gemv.WAYS] == ["", ""]
    for names, wrong in ((["triton_red_fused_mm_0"], ""), (["gemvx"], "no reduction of Inductor's")):
        monkeypatch.setattr(Scale, "kernels", lambda self, call, names=names: names)
        assert (row("cuBLAS"), row("Inductor")) == ("", wrong)
    monkeypatch.setattr(gpu_gemv, "compiled", lambda scale, call, **options: lambda x, weight: 1.05 * (x @ weight.T))
    assert row("Inductor").startswith("error above")


def test_a_wrong_attention_fails_and_a_kernel_that_is_not_there_does_not(
    scale: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu import attention as gpu_attention

    def row(backend: str) -> Any:
        return gpu_attention.attention_row(scale, 1e9, 40, True, "rows", backend)

    assert row("math")[1] == ""
    assert row("cuDNN") == (("–", "–", "refused"), "")
    real = gpu_attention.one_token("rows")
    monkeypatch.setattr(gpu_attention, "one_token", lambda form: lambda q, k, v, mask: real(q, k, v, None))
    assert row("math")[1].startswith("above")

    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_attention, "one_token", lambda form: broken)
    with pytest.raises(RuntimeError, match="illegal"):
        row("math")


@pytest.mark.slow
def test_a_step_that_goes_other_ways_fails(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import decode_step as gpu_decode_step
    from benchmarks.gpu.runtime import models
    from rewriter.runtime.generation.decode_step import DecodeStep, Sampling

    model = models(scale, torch.float32)[1]

    def row() -> str:
        return str(gpu_decode_step.step_row(scale, model, (3, 17, 9), Sampling(), 6)[1])

    assert row() == ""
    with monkeypatch.context() as patch:  # on a GPU an eager step is a fault
        patch.setattr(type(scale), "cuda", property(lambda self: True))
        assert row() == "eager, expected captured"
    run, count = DecodeStep.run, iter(range(1000))

    def stale(self: Any) -> None:
        run(self)
        if next(count) > 8:  # not in the eager step's tokens
            self.choice.zero_()

    monkeypatch.setattr(DecodeStep, "run", stale)
    assert row().endswith("tokens differ")


@pytest.fixture
def bench(scale: Any, tmp_path: Path) -> Any:
    from benchmarks.gpu import decode as gpu_decode

    size = gpu_decode.Size(64, 128, 16, 8, 3, 64)
    with gpu_decode.job(gpu_decode.delays()):
        yield gpu_decode.Bench(scale, size, gpu_decode.programs(size), 1e9, tmp_path, {})


@pytest.mark.slow
def test_a_decode_step_with_other_tokens_fails(bench: Any) -> None:
    from benchmarks.gpu import decode as gpu_decode

    model = gpu_decode.model_of(bench, "ladder")
    assert gpu_decode.decode_row(bench, model, "ladder", "eager")[1] == ""
    assert gpu_decode.decode_row(bench, model, "ladder", "captured")[1] == ""
    assert set(bench.seconds) == {("ladder", "eager"), ("ladder", "captured")}
    branches = gpu_decode.model_of(bench, "ladder, two branches")
    assert gpu_decode.decode_row(bench, branches, "ladder, two branches", "eager")[1] == ""
    bench.tokens["ladder"][0][0] += 1
    assert "1 tokens differ from the eager" in gpu_decode.decode_row(bench, model, "ladder", "captured")[1]
    assert "from ladder's" in gpu_decode.decode_row(bench, branches, "ladder, two branches", "eager")[1]
    with pytest.raises(ValueError, match="no time of standard, bound"):
        gpu_decode.gain_row(bench, "ladder", "captured")


@pytest.mark.slow
def test_a_step_reads_what_a_70b_models_layers_hold(bench: Any, tmp_path: Path) -> None:
    from benchmarks.gpu import decode as gpu_decode

    mesh = init_device_mesh("cpu", (gpu_decode.RANKS,), mesh_dim_names=("tp",))
    found: list[int] = []
    for count in (4, 2):
        program = gpu_decode.programs(gpu_decode.Size(layers=count))["standard"]
        path = tmp_path / f"{count}.py"
        path.write_text(emit_runtime_module(program))
        found.append(gpu_decode.read_bytes(build(path, "Model", mesh).bfloat16()))
    assert (found[0] - found[1]) / 2 == pytest.approx(213.9e6, rel=1e-3)


def test_collectives_of_an_emulated_job_can_be_in_a_graph() -> None:
    from benchmarks.gpu.emulated import Constant, job

    with job(Constant(0.0)):
        assert why_not_captured(dist.group.WORLD) is None
    assert fake_pg  # which registers the backend
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        assert why_not_captured(dist.group.WORLD) == "a CUDA graph holds no collectives of fake"
    finally:
        dist.destroy_process_group()
