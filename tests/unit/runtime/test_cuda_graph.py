"""Capturing, without a GPU: what is asked of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from rewriter.runtime.streams import replay_of


def test_a_pass_is_captured_on_the_stream_that_warmed_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else cuBLAS would take another workspace for the graph than for what ran before."""
    main, running, graphs = Mock(), [], []

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        running.append(stream)
        yield
        running.pop()

    @contextmanager
    def graph(_: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        graphs.append(capture_error_mode)
        with on(stream):
            yield

    fakes = {"Stream": Mock(), "CUDAGraph": Mock(), "stream": on, "graph": graph, "current_stream": lambda device: main}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    ran: list[Any] = []
    replay = replay_of(lambda: ran.append(running[-1]), torch.device("cuda"))
    assert len(ran) == 4
    assert set(ran) == {fakes["Stream"].return_value}
    assert graphs == ["thread_local"]
    assert replay is fakes["CUDAGraph"].return_value.replay
