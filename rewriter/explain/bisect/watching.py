"""The inputs and results of every module of a reference, while it runs."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from rewriter.check.reference_modes import Reference
from rewriter.explain.bisect.values import LOGITS, Point, Ranks, merged

Call = tuple[nn.Module, torch.Tensor | None, torch.Tensor | None]
"""(module, what it is given, what it returns)."""


def _tensor(tree: Any) -> torch.Tensor | None:
    """A copy of the first floating-point tensor among arguments or results, else of the first tensor."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    first = next((leaf for leaf in leaves if leaf.is_floating_point()), leaves[0] if leaves else None)
    return None if first is None else first.detach().clone()  # some models add in place


def _last_pass(calls: list[Call]) -> dict[Point, torch.Tensor]:
    """Values of the last call, which is that of a whole model, by the paths of its modules.

    Modules that are called several times are left out: which call is meant is not known.
    """
    root = calls[-1][0]
    begin = max((i + 1 for i, call in enumerate(calls[:-1]) if call[0] is root), default=0)
    names, count = {module: name for name, module in root.named_modules()}, [call[0] for call in calls[begin:]].count
    return {
        (side, names[module]): value
        for module, given, returned in calls[begin:-1]
        if module in names and count(module) == 1
        for side, value in (("given", given), ("returned", returned))
        if value is not None
    }


@torch.no_grad()
def expected_values(reference: Reference, model: PreTrainedModel, ids: torch.Tensor) -> dict[Point, Ranks]:
    """Values that `reference` makes of the eager `model` (in eval mode) for `ids` [B, S] (int64).

    The residual stream is given by number, before each block and at the end, where the reference keeps it.
    """
    calls: dict[str, list[Call]] = {}  # by the thread that makes them: one for each rank

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = module, _tensor((args, kwargs)), _tensor(output)
        calls.setdefault(threading.current_thread().name, []).append(call)

    handle = register_module_forward_hook(note, with_kwargs=True)
    try:
        logits = reference.logits(model, ids)
    finally:
        handle.remove()
    # ranks are the threads of the newest pool, POOL_RANK
    pools = [name.rpartition("_") for name in calls if name.startswith("ThreadPoolExecutor")]
    newest = sorted(int(rank) for pool, _, rank in pools if pool == pools[-1][0])
    threads = [f"{pools[-1][0]}_{rank}" for rank in newest] or [threading.current_thread().name]
    ranks = [_last_pass(calls[thread]) for thread in threads]
    values: dict[Point, Ranks] = {}
    for point in ranks[0]:
        each = [rank[point] for rank in ranks if point in rank]
        if len(each) == len(ranks) and all(bool(v.isfinite().all()) for v in each):  # the stream itself is NaN there
            values[point] = merged(each)
    for built in reference._built.values():
        values |= {("stream", str(i)): merged(list(each)) for i, each in enumerate(built.streams)}
    return values | {LOGITS: (logits,)}
