"""benchmarks/gpu/run.py runs as a whole without a GPU, says what failed, and would notice a wrong tile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from repository import BENCHMARKS, ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu.run", *arguments]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=900)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch):
    """The module of the tiles' section."""
    from benchmarks.gpu import tiles as gpu_tiles

    return gpu_tiles


@pytest.fixture
def scale(tiles):
    from benchmarks.gpu.report import Scale

    return Scale(torch.device("cpu"), True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_device_it_says_so() -> None:
    ran = run()
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no CUDA device" in ran.stderr


@pytest.mark.slow
def test_the_kernel_and_tiles_run_dry(tmp_path: Path) -> None:
    ran = run("--cpu", "--only", "merge", "split", "--out", str(tmp_path / "page.md"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page == ran.stdout.removesuffix("\n")
    assert [line.split(" | ")[0] for line in page.splitlines() if line.endswith("| ok |")] == [
        *("| 2", "| 4", "| 8"),
        *("| 2 × 2", "| 2 × 3", "| 3 × 2", "| 4 × 2", "| 1 × 4"),
    ]


@pytest.mark.slow
def test_emulated_collectives_run_dry() -> None:
    ran = run("--cpu", "--only", "emulated")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len([line for line in ran.stdout.splitlines() if line.endswith("| ok |")]) == 7


@pytest.mark.slow
def test_healing_runs_dry_and_goes_on_where_it_was_stopped() -> None:
    ran = run("--cpu", "--only", "healing")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (row,) = (line for line in ran.stdout.splitlines() if "ladder-upper-half" in line)
    cells = row.split(" | ")
    assert cells[-1] == "ok |"
    original, before, after = (float(cell) for cell in cells[2:5])
    assert original < after < before


FIRST = {
    "environment": 16,
    "kernels": 21,
    "decode-step": 10,
    "decode-layers": 38,
    "prefill-layers": 10,
    "rates-by-size": 6,
    "serving": 6,
}  # rows of a dry run
REST = {
    "mixers": 18,
    "mixer-steps": 9,
    "hybrid-layers": 22,
    "emulated": 7,
    "decode-attention": 17,
    "gemv": 10,
    "runtime": 7,
    "merge": 3,
    "tiles": 30,
    "ranks": 4,
    "decode": 18,
    "quantize": 76,
    "rates": 37,
    "split": 5,
    "rates-compiled": 30,
}


@pytest.mark.slow
@pytest.mark.parametrize(("option", "expected"), [("--first", FIRST), ("--rest", REST)])
def test_everything_runs_dry(option: str, expected: dict[str, int], tmp_path: Path) -> None:
    ran = run("--cpu", option, "--json", str(tmp_path / "rows.json"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [line for line in ran.stdout.splitlines() if line.endswith("| ok |")]
    found = [json.loads(line) for line in (tmp_path / "rows.json").read_text(encoding="utf-8").splitlines()]
    assert Counter(row["section"] for row in found if "section" in row) == expected
    assert list(dict.fromkeys(row["section"] for row in found if "section" in row)) == list(expected)
    assert len(rows) == sum(expected.values())


def test_what_runs_first_is_over_in_seven_minutes_though_every_section_hangs(tiles: Any) -> None:
    from benchmarks.gpu import run as gpu
    from benchmarks.gpu.sections import STACK_SECONDS

    assert set(gpu.FIRST) == set(FIRST)
    assert set(gpu.REST) == set(REST)
    assert sum(section.seconds + STACK_SECONDS for section in gpu.FIRST.values()) <= 420


def test_the_page_of_figures_has_the_rows_that_were_kept(tiles: Any) -> None:
    """The tables of benchmarks/gpu/RESULTS.md are those of benchmarks/gpu/h100.json."""
    from benchmarks.gpu import run as gpu
    from benchmarks.gpu.sections import read

    page = (BENCHMARKS / "gpu" / "RESULTS.md").read_text(encoding="utf-8")
    assert page.endswith(gpu.page(read(BENCHMARKS / "gpu" / "h100.json"), gpu.FIRST))


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it lies on a GPU, as the runtime asks."""

    is_cuda = True


def staged(group: Any, benchmarks: str) -> tuple[list[int], list[float], bool, bool]:
    """(what the runtime's gather of tensors on a GPU gives, what an exchange does, whether anything came before it was
    waited for, whether all went through copies)."""
    sys.path.insert(0, benchmarks)
    from benchmarks.gpu import rank as gpu_rank
    from rewriter.runtime.collectives import exchange

    rank = group.rank()
    gpu_rank.stage()
    rows = torch.zeros(2, 2, dtype=torch.uint8)
    rows[rank] = torch.tensor([1, 2]) + 10 * rank
    gathered = exchange.gather_rows_start(rows.as_subclass(OnGpu), group, "rows")
    sent, arriving = torch.tensor([1.0, 2.0]) + 10 * rank, torch.zeros(2)
    works = exchange._start({1 - rank: sent}, {1 - rank: arriving}, group)
    sent.zero_()  # a copy is on its way
    early = bool(rows[1 - rank].any() or arriving.any())
    for w in [gathered, *works]:
        w.wait()
    copied = all(isinstance(w, gpu_rank.Staged) for w in [*gathered.works, *works])
    return rows.flatten().tolist(), arriving.tolist(), early, copied


def test_messages_of_ranks_that_share_a_gpu_travel_as_copies() -> None:
    for rank, found in enumerate(run_ranks(staged, 2, str(BENCHMARKS))):
        assert found == ([1, 2, 11, 12], [11, 12] if rank == 0 else [1, 2], False, True)


def test_a_gather_that_loses_bytes_fails_its_row(tiles, scale, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import runtime as gpu_runtime
    from rewriter.runtime.collectives import exchange

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert gpu_runtime.messages(scale)[1] == ""
        for name, wrong in (
            ("pack", lambda *_, out: out),
            ("_all_to_all", lambda _, rows, group: [rows[0].zero_()][1:]),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(exchange, name, wrong)
                assert gpu_runtime.messages(scale)[1] == "other bytes came back", name
    finally:
        dist.destroy_process_group()


def test_kernels_of_messages_are_compared_in_both_their_variants(tiles, scale, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles one for strides and lengths that 16 divides, and one for others."""
    from benchmarks.gpu import quantize as gpu_quantize

    seen = []
    quantize = gpu_quantize.quantize_rows

    def spied(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append((x.dtype, x.stride(0) % 16 == 0))
        return quantize(x, *rest, **options)

    monkeypatch.setattr(gpu_quantize, "quantize_rows", spied)
    monkeypatch.setattr(gpu_quantize, "kernels", lambda scale: nullcontext())
    monkeypatch.setattr(gpu_quantize, "compiled_beforehand", lambda scale, module, count: None)
    monkeypatch.setattr(gpu_quantize, "FORMATS", ("int8", "int4@32"))
    table = gpu_quantize.quantizing(scale)
    assert (table.failed, len(table.rows)) == (0, 16)
    assert {aligned for dtype, aligned in seen if dtype == torch.bfloat16} == {True, False}
    assert {aligned for dtype, aligned in seen if dtype == torch.float16} == {True}


# The runtime raises the limit. (`monkeypatch` would delete torch's settings when it restores them.)
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, recompile_limit=8)
def test_what_is_timed_as_compiled_is_compiled(scale) -> None:
    """Torch runs a function eagerly from its ninth graph on."""
    from benchmarks.gpu.report import compiled

    def double(x: torch.Tensor, times: int) -> torch.Tensor:
        return 2 * times * x if torch.compiler.is_compiling() else x

    for times in range(12):
        assert compiled(scale, double)(torch.ones(1), times) == 2 * times
    one = compiled(scale, double)
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        [one(torch.ones(1), times) for times in range(12)]


def test_ranks_have_gpus_of_their_own_where_there_are_several(tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import rank as gpu_rank
    from benchmarks.gpu import runtime as gpu_runtime
    from benchmarks.gpu.report import Scale

    ran = []
    monkeypatch.setattr(
        gpu_runtime, "rank_row", lambda scale, plan, own: (ran.append((plan.ranks, own)), (("",) * 4, ""))[1]
    )
    for gpus, expected in {1: (4, False), 2: (2, True), 3: (2, True), 4: (4, True), 8: (4, True)}.items():
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        table = gpu_runtime.on_ranks(Scale(torch.device("cuda"), False))
        assert ran == [expected] * len(gpu_rank.plans(expected[0]))
        assert ("NCCL" in table.title, "staged through the CPU" in table.title) == (expected[1], not expected[1])
        ran.clear()


def test_a_wrong_tile_fails_and_an_exception_is_a_row(tiles, scale, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.report import Table

    case = next(case for case in tiles.cases(scale) if case.name == "causal, 2 × 3, offset")
    given, mask = tiles.inputs(case, scale.device), tiles.everything(case.seen, scale.device)
    table = Table("tiles", ("case", "dtype", "errors", "greatest", "typical", "result"))

    def attempt() -> None:
        table.attempt(case.name, lambda: tiles.tile_row(case, given, mask, torch.bfloat16))

    attempt()
    assert (table.failed, table.rows[-1][-1]) == (0, "ok")
    forward = tiles.tile_forward
    for rows in (3, 4):  # one query's output is another's; a kernel that does not run

        def wrong(*arguments: object, rows: int = rows) -> object:
            if rows == 4:
                raise RuntimeError("no kernel | for this")
            o, lse = forward(*arguments)
            return torch.cat([o[:, :, :rows], o[:, :, rows - 1 : rows], o[:, :, rows + 1 :]], 2), lse

        monkeypatch.setattr(tiles, "tile_forward", wrong)
        attempt()
    assert table.failed == 2
    assert table.rows[-2][-1] == "**above 2.0 or 1.5**"
    assert table.rows[-1] == (case.name, "–", "–", "–", "–", "**RuntimeError: no kernel | for this**")
    assert "no kernel \\| for this" in table.markdown()


def test_how_many_scores_are_visible(tiles) -> None:
    for queries, keys in (
        (tiles.TokenRun(1, 2, 9), tiles.TokenRun(0, 3, 6)),
        (tiles.TokenRun(0, 1, 5), tiles.TokenRun(3, 4, 7)),
    ):
        seen = queries.positions()[:, None] >= keys.positions()[None]
        assert tiles.count_visible(queries, keys) == int(seen.sum())
