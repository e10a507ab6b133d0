"""Kernels of emulated collectives: what they do in Triton's interpreter, and what they compile to."""

from __future__ import annotations

import sys
from functools import cache

import pytest
import subprocesses

SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}  # bytes of a multiprocessor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")


@cache
def interpreted():
    return subprocesses.interpreted("hold_interpreted.py", timeout=300)


LOOK = 300  # nanoseconds: a few looks at the interpreter's clock


def test_a_collective_lasts_its_delay_and_leaves_nothing_behind():
    found = interpreted()
    assert 10_000 <= found["duration"] <= 10_000 + LOOK
    assert 10_000 <= found["after its arrival"] <= 10_000 + LOOK
    assert found["state after"] == [0, 0, 0, 0]


def test_it_waits_for_its_links_and_takes_them_for_its_transfer():
    found = interpreted()
    assert 6_000 <= found["free"][0] <= 6_000 + LOOK
    assert found["free"][1:] == [0, 0, 0]
    assert 10_000 <= found["queued"] <= 10_000 + LOOK
    assert found["both links"] == [6_000, 6_000]


def test_it_sums_over_uniform_ranks_and_moves_its_bytes():
    found = interpreted()
    assert found["scaled"]
    assert found["finite"] == [65504.0] * 4
    assert found["words written"] == 2 * 8192
    assert found["only after"]


def test_no_wrong_table_makes_it_wait_for_ever():
    found = interpreted()["limits"]
    assert 1_000 <= found["lock"] <= 1_000 + LOOK
    assert 1_000 <= found["first"] <= 1_000 + LOOK
    assert 30_000 <= found["delay"] <= 30_000 + LOOK
    assert interpreted()["engine"]["too long"] == "a collective of 21 s, expected at most 20 s on a GPU"


def test_the_engine_launches_them_as_it_should():
    """Its code, with streams and events that do nothing: what the kernels did to tensors, tables and clock."""
    found = interpreted()["engine"]
    assert found["values"] == {
        "all_reduce": [8.0] * 5,  # by the kernel itself
        "maximum": [1.0] * 5,
        "all_gather": [1.0] * 8,
        "message": [1.0] * 5,
    }
    assert found["rows"] == 4  # the two all-reduces are one call to a model of delays
    for name, seconds in found["seconds"].items():
        assert 20e-6 <= seconds <= 20e-6 + 1e-9 * LOOK, name
    assert found["changed"] == pytest.approx(40e-6, abs=1e-9 * LOOK)
    assert found["asynchronous"] == "waited for its event"
    assert "Run what is captured once eagerly first" in found["captured"]
    assert found["held"] == 0
    assert found["links"] == [2, 2, 1, 2, 4]  # its own, in two directions, of 8 or 16 ranks' in a shipped fabric


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)]
)
def test_blocks_take_a_multiprocessor_each(capability, monkeypatch):
    from benchmarks.kernels.hold_code import arrive, hold

    for alone in (True, False):
        code, shared = hold(capability, alone)
        assert SHARED[capability] // 2 < shared <= SHARED[capability] - 1024
        assert code.stack + code.local == 0
        assert code.registers <= 128  # of 512 threads
        assert code.ptx.count("%globaltimer") == 3
        assert (code.loads, code.stores) >= (4, 4)  # copies of 16 bytes
    assert arrive(capability).registers <= 64
