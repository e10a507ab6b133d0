"""The inputs and results of every module of a running model: of a reference, and of an output in its own processes.

`python -m rewriter.explain.bisect.watching KIND REQUEST RESULT` runs an output. KIND is "checkpoint" (transformers
loads it, one process) or "ranks"; the request (JSON) names a directory and token ids. Every rank writes RESULT.RANK
(safetensors): PLACE|SIDE|PATH for the points of `values`, in order.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from rewriter.check.reference_modes import ModelReference
from rewriter.check.subprocess_logits import TIMEOUT
from rewriter.common.errors import VerificationError
from rewriter.common.processes import Processes, environment, placed, reported, write_json
from rewriter.explain.bisect.values import LOGITS, Point, Ranks, Values, merged


class Calls:
    """The calls of modules, by the thread that made them: a reference has one for each rank."""

    def __init__(self) -> None:
        self.by_thread: dict[str, list[tuple[nn.Module, torch.Tensor | None, torch.Tensor | None]]] = {}

    def note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls = self.by_thread.setdefault(threading.current_thread().name, [])
        calls.append((module, _tensor((args, kwargs)), _tensor(output)))

    def of_ranks(self) -> list[dict[Point, torch.Tensor]]:
        """Values of the last forward pass of each rank: of the newest threads of a pool, else of this thread."""
        threads = [name for name in self.by_thread if name.startswith("ThreadPoolExecutor")]
        if not threads:
            return [_last_pass(self.by_thread[threading.current_thread().name])]
        pool = threads[-1].rpartition("_")[0]
        ranks = [name for name in threads if name.rpartition("_")[0] == pool]
        return [_last_pass(self.by_thread[n]) for n in sorted(ranks, key=lambda name: int(name.rpartition("_")[2]))]


def _last_pass(calls: list[tuple[nn.Module, torch.Tensor | None, torch.Tensor | None]]) -> dict[Point, torch.Tensor]:
    """Values of the last call, which is that of a whole model, by the paths of its modules.

    Modules that are called several times are left out: which call is meant is not known.
    """
    root = calls[-1][0]
    names = {id(module): name for name, module in root.named_modules()}
    begin = max((i + 1 for i, call in enumerate(calls[:-1]) if call[0] is root), default=0)
    values: dict[Point, torch.Tensor] = {}
    repeated: set[str] = set()
    for module, given, returned in calls[begin:-1]:
        if (name := names.get(id(module))) is None:
            continue
        sides = {("given", name): given, ("returned", name): returned}
        repeated |= {name for point in sides if point in values}
        values |= {point: value for point, value in sides.items() if value is not None}
    return {point: value for point, value in values.items() if point[1] not in repeated}


def _tensor(tree: Any) -> torch.Tensor | None:
    """A copy of the first floating-point tensor among arguments or results, else of the first tensor."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    first = next((leaf for leaf in leaves if leaf.is_floating_point()), leaves[0] if leaves else None)
    return None if first is None else first.detach().clone()  # some models add in place


@contextmanager
def _watched_calls() -> Iterator[Calls]:
    calls = Calls()
    handle = register_module_forward_hook(calls.note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


@torch.no_grad()
def expected_values(reference: ModelReference, model: PreTrainedModel, ids: torch.Tensor) -> dict[Point, Ranks]:
    """Values that `reference` makes of the eager `model` (in eval mode) for `ids` [B, S] (int64).

    The residual stream is given by number, before each block and at the end, where the reference keeps it.
    """
    with _watched_calls() as calls:
        logits = reference.logits(model, ids)
    ranks = calls.of_ranks()
    values: dict[Point, Ranks] = {}
    for point in ranks[0]:
        each = [rank[point] for rank in ranks if point in rank]
        if len(each) == len(ranks) and all(bool(v.isfinite().all()) for v in each):  # the stream itself is NaN there
            values[point] = merged(each)
    for built in reference._built.values():
        values |= {("stream", str(i)): merged(list(each)) for i, each in enumerate(built.streams)}
    return values | {LOGITS: (logits,)}


# --- outputs ---------------------------------------------------------------------------------------------------------


def run_output(directory: Path, ids: torch.Tensor, ranks: int | None = None) -> Values:
    """Values of an output for `ids` [B, S] (int64) in fp32: of its checkpoint, loaded by transformers, or with `ranks`
    of its sharded module on as many gloo processes. Raises VerificationError where it fails, with its reason."""
    kind, count, variables = ("checkpoint", 1, lambda rank: environment()) if ranks is None else (
        "ranks", ranks, placed(ranks)
    )  # fmt: skip
    with Processes() as job:
        request, result = job.scratch / "request.json", job.scratch / "values"
        write_json(request, {"directory": str(directory.resolve()), "ids": ids.tolist()})
        own = {"HF_MODULES_CACHE": str(job.scratch / "modules"), "HF_HUB_OFFLINE": "1"}
        words = ["-m", __name__, kind, str(request), str(result)]
        for rank in range(count):
            job.fork(f"rank {rank}", words, {**variables(rank), **own})
        failure = job.wait(TIMEOUT)
        if failure is not None:
            what = "the adapted checkpoint" if ranks is None else f"the module on {ranks} ranks"
            raise VerificationError(f"{what} fails: {failure.line}")
        files = [load_file(f"{result}.{rank}") for rank in range(count)]
    shared = [name for name in sorted(files[0]) if all(name in file for file in files)]
    points = {name: (name.split("|")[1], name.split("|")[2]) for name in shared}
    return {points[name]: merged([file[name] for file in files]) for name in shared}


def _main(kind: str, request_path: str, result: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    ids = torch.tensor(request["ids"])
    if kind == "checkpoint":
        from rewriter.weights.plain_model import plain_model

        model, _ = plain_model(request["directory"], True)
        _save(lambda: model(input_ids=ids, use_cache=False).logits, f"{result}.0")
        return
    import torch.distributed as dist

    from rewriter.runtime.context import Context
    from rewriter.runtime.loading.load import load

    sharded = load(request["directory"], device="cpu", dtype=torch.float32)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    _save(lambda: sharded(ids, positions, Context()), f"{result}.{dist.get_rank() if dist.is_initialized() else 0}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@torch.no_grad()
def _save(run: Callable[[], torch.Tensor], path: str) -> None:
    with _watched_calls() as calls:
        logits = run()
    [values] = calls.of_ranks()
    points = enumerate((values | {LOGITS: logits}).items())
    save_file({f"{i:06}|{side}|{name}": t.float().contiguous() for i, ((side, name), t) in points}, path)


if __name__ == "__main__":
    with reported():
        _main(*sys.argv[1:])
