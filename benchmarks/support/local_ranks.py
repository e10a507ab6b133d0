"""Real ranks of this machine, over gloo and loopback, whose most demanding one counts."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Figures = list[dict[str, Any]]


def largest(ranks: int, measure: Callable[..., Figures], *arguments: Any) -> Figures:
    """`measure(*arguments)` on every rank: rows of figures, each that of the rank where it is largest."""
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(_rank, (ranks, measure, arguments, scratch), nprocs=ranks)
        by_rank = [json.loads(Path(scratch, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return [{name: max(row[name] for row in rows) for name in rows[0]} for rows in zip(*by_rank, strict=True)]


def _rank(rank: int, ranks: int, measure: Callable[..., Figures], arguments: tuple[Any, ...], scratch: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(os.path.join(scratch, "store"), ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=timedelta(minutes=5))
    Path(scratch, f"{rank}.json").write_text(json.dumps(measure(*arguments)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
