"""What each module of the independent reference is given and gives: the eager model, watched while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from rewriter.explain.bisect.values import Ranks
from rewriter.verify.reference_modes import Reference


@dataclass
class Expected:
    """Right values: of modules' first tensor input and first output by path, of the stream by number, and the logits.

    What the reference does not show is missing. `streams` are those before each block and at the end.
    """

    given: dict[str, Ranks] = field(default_factory=dict)
    returned: dict[str, Ranks] = field(default_factory=dict)
    streams: dict[int, Ranks] = field(default_factory=dict)
    logits: torch.Tensor | None = None


@dataclass
class _Call:
    module: nn.Module
    given: torch.Tensor | None
    returned: torch.Tensor | None
    versions: tuple[int, int]


class _Calls:
    """The calls of modules, by the thread that made them: the reference has one for each rank."""

    def __init__(self) -> None:
        self.by_thread: dict[str, list[_Call]] = {}

    def of_ranks(self) -> list[list[_Call]]:
        """Those of each rank, in order: of the newest threads of a pool, else of this thread."""
        pools = [name for name in self.by_thread if name.startswith("ThreadPoolExecutor")]
        if not pools:
            return list(self.by_thread.values())
        newest = pools[-1].rpartition("_")[0]
        mine = [name for name in pools if name.rpartition("_")[0] == newest]
        return [self.by_thread[name] for name in sorted(mine, key=lambda name: int(name.rpartition("_")[2]))]

    def note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, returned = _tensor((args, kwargs)), _tensor(output)
        versions = (-1 if given is None else given._version, -1 if returned is None else returned._version)
        self.by_thread.setdefault(threading.current_thread().name, []).append(_Call(module, given, returned, versions))


@contextmanager
def _watched_calls() -> Iterator[_Calls]:
    calls = _Calls()
    handle = register_module_forward_hook(calls.note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


@torch.no_grad()
def expected_values(reference: Reference, model: PreTrainedModel, ids: torch.Tensor) -> Expected:
    """What `reference` makes of the eager `model` (in eval mode) for `ids` [B, S] (int64), module by module."""
    with _watched_calls() as calls:
        logits = reference.logits(model, ids)
    found = Expected(logits=logits)
    runs = [run for run in map(_last_run, calls.of_ranks()) if run is not None]
    for side, which in ((found.given, "given"), (found.returned, "returned")):
        for name in {name for run in runs for name in run}:
            values = [getattr(run[name], which) if name in run else None for run in runs]
            if all(v is not None and bool(v.isfinite().all()) for v in values):  # the stream itself is NaN there
                side[name] = _merged(values)
    for built in reference._built.values():
        found.streams = {i: _merged(list(values)) for i, values in enumerate(built.streams)}
    return found


def _merged(values: list[Any]) -> Ranks:
    """One tensor where all ranks hold the same."""
    same = all(torch.equal(v, values[0]) for v in values[1:])
    return (values[0],) if same else tuple(values)


def _last_run(calls: list[_Call]) -> dict[str, _Call] | None:
    """The calls of the last whole forward pass among `calls`, by path in its model."""
    roots = [i for i, call in enumerate(calls) if isinstance(call.module, PreTrainedModel)]
    if not roots or roots[-1] != len(calls) - 1:
        return None
    root = calls[-1].module
    names = {id(module): name for name, module in root.named_modules()}
    found: dict[str, _Call] = {}
    repeated: set[str] = set()
    begin = max((i + 1 for i in roots[:-1] if calls[i].module is root), default=0)
    for call in calls[begin:]:
        name = names.get(id(call.module))
        if name is None:
            continue
        if name in found:
            repeated.add(name)  # which call is meant is not known
        given, returned = call.given, call.returned
        if given is not None and given._version != call.versions[0]:
            given = None
        if returned is not None and returned._version != call.versions[1]:
            returned = None
        found[name] = _Call(call.module, given, returned, call.versions)
    return {name: call for name, call in found.items() if name not in repeated}


def _tensor(tree: Any) -> torch.Tensor | None:
    """The first floating-point tensor among arguments or results, else the first tensor."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return next((leaf for leaf in leaves if leaf.is_floating_point()), leaves[0] if leaves else None)
