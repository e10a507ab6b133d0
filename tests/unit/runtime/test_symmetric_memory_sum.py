"""Sums through symmetric memory, with stand-ins for the device: what is handed over, and in which order."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from rewriter.runtime.collectives import small_sums
from rewriter.runtime.collectives.small_sums import LARGEST, SymmetricMemorySums, why_not_symmetric

CUDA = torch.device("cuda")


@pytest.fixture
def done(monkeypatch):
    """What was asked of the device, in order."""
    found = []

    class Event:
        def record(self):
            found.append("record")

    @contextmanager
    def stream(which):
        found.append(f"on {which.name}")
        yield
        found.append("back")

    def summed(buffer, x, name, out):
        found.append(f"sum of {x.numel()} over {name}")
        assert buffer.dtype == x.dtype
        assert buffer.shape == x.shape == out.shape
        out.copy_(2 * x)

    current = SimpleNamespace(name="main", wait_event=lambda event: found.append("main waits"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(small_sums, "all_reduce_once", summed)
    return found


def sums(done):
    made = object.__new__(SymmetricMemorySums)
    made.name, made.device = "tp", torch.device("cpu")
    made.buffers = {
        dtype: torch.empty(LARGEST // dtype.itemsize, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    }
    made.stream = SimpleNamespace(name="side", wait_stream=lambda other: done.append(f"side waits for {other.name}"))
    return made


def test_the_side_stream_forks_sums_and_joins_in_the_wait(done):
    x = torch.randn(2, 1, 8)
    out, work = sums(done).start(x)
    assert done == ["side waits for main", "on side", "sum of 16 over tp", "record", "back"]
    assert work.x is x, "it is read until the wait"
    assert work.wait()
    assert done[-1] == "main waits"
    assert work.x is None
    assert torch.equal(out, 2 * x)


def test_it_takes_small_aligned_tensors_of_two_dtypes(done):
    takes = sums(done).takes
    assert takes(torch.ones(8, dtype=torch.bfloat16))
    assert takes(torch.ones(LARGEST // 4))
    assert not takes(torch.ones(LARGEST // 4 + 4))
    assert not takes(torch.ones(3))
    assert not takes(torch.ones(0))
    assert not takes(torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize(
    ("variable", "size", "backend", "device", "reason"),
    [
        ("", 4, "nccl", CUDA, "REWRITER_SYMMETRIC_MEMORY"),
        ("1", 4, "nccl", torch.device("cpu"), "not on GPUs"),
        ("1", 4, "gloo", CUDA, "not on GPUs"),
        ("1", 16, "nccl", CUDA, "16 ranks"),
        ("1", 8, "cuda:nccl", CUDA, None),
    ],
)
def test_where_it_is_used(variable, size, backend, device, reason, monkeypatch):
    monkeypatch.setenv("REWRITER_SYMMETRIC_MEMORY", variable)
    monkeypatch.setattr(small_sums.dist, "get_backend", lambda group: backend)
    found = why_not_symmetric(SimpleNamespace(size=lambda: size), device)
    assert found is None if reason is None else reason in found
