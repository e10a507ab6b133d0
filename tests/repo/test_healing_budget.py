"""`benchmarks/healing/budget.py`: its bytes are those of ranks, and the page has its numbers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from ranks import run_ranks
from repository import ROOT
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.healing import budget
from rewriter.training import node_local_optimizer, node_mesh

PAGE = ROOT / "docs/howto/8b-on-8-gpus.md"


def held(tensors: Any) -> int:
    """Bytes of this rank's parts."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local if t.dtype == torch.float32)


def state(group: Any, zero: str) -> tuple[int, int]:
    """Bytes of a rank of two nodes of two after a step, and the parameters of the model."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    nodes = node_mesh("cpu")
    mesh = nodes["local"] if zero == "node-local" else None
    student, teacher = zoo.build("llama"), zoo.build("llama").requires_grad_(False)
    count = sum(p.numel() for p in student.parameters())
    for model in (student, teacher):
        for part in [*model.model.layers, model]:
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))

    def make(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-3)

    optimizer = node_local_optimizer(student, nodes, make) if mesh is not None else make(student.parameters())
    ids = zoo.batch(1, 8)
    student(input_ids=ids, labels=ids).loss.backward()
    kept = [p.grad for p in student.parameters() if p.grad is not None]
    if mesh is not None:
        kept += [g for sliced in optimizer._groups for g in (sliced.master, sliced.gradient)]
    optimizer.step()
    inner = optimizer.inner if mesh is not None else optimizer
    moments = [v for s in inner.state.values() for name, v in s.items() if name.startswith("exp_avg")]
    dist.barrier()
    return held([*student.parameters(), *teacher.parameters(), *kept, *moments]), count


@pytest.mark.parametrize("zero", ["3", "node-local"])
def test_the_bytes_are_those_of_ranks(zero: str) -> None:
    """To a tenth: pieces are padded."""
    found = run_ranks(state, 4, zero)
    job = budget.Job(found[0][1], 64, 2, 2, 16)
    for bytes_, _ in found:
        assert bytes_ == pytest.approx(job.state(zero), rel=0.1)


def test_hours_follow_from_forward_passes() -> None:
    job = budget.Job(10**9, 1024, 2, 8, 1000)
    assert job.hours(16_000_000, 0.9) == pytest.approx(16_000_000 / 1000 / 16 * 4 * 0.9 / 3600)
    assert job.step(33_000_000) == 16_000


@pytest.mark.slow
def test_the_page_has_the_numbers_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    arguments = "llama-3.1-8b --nodes 2 --gpus 8 --fabric h100-2x8-ib --tokens 33000000 --tokens 3000000000"
    assert f"benchmarks.healing.budget {arguments}" in page
    budget.main(arguments.split())
    said = capsys.readouterr().out
    for number in (
        "32.1 GB", "257 GB", "16.1 GB", "10.0 GB", "503 steps of 65,536 tokens", "22,888 steps of 131,072 tokens",
        "0.07 h", "0.08 h", "6.08 h", "7.60 h", "119 ms",
    ):  # fmt: skip
        assert number in said, said
        assert number in page
