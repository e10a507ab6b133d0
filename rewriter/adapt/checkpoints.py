"""Checkpoints of a run: written beside their place by all ranks with DCP, and renamed when they are complete.

Whatever moment a run is killed at, `last` finds one that holds everything, or none.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as read_sharded
from torch.distributed.checkpoint.state_dict_saver import save as write_sharded
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rewriter.adapt.run_ranks import RunRanks
from rewriter.common.errors import RewriterError
from rewriter.training.zero.master_weights import MasterWeightOptimizer

_NAME = re.compile(r"checkpoint-(\d+)")
_SCHEDULE = "schedule.json"


def last(run: Path) -> Path | None:
    """The complete checkpoint of the latest step in the directory of a run."""
    return next(reversed(_complete(run)), None)


def step_of(checkpoint: str | Path) -> int:
    """After how many steps it was written."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def _complete(run: Path) -> list[Path]:
    """All complete checkpoints, by their steps."""
    found = {int(m[1]): path for path in run.glob("checkpoint-*") if (m := _NAME.fullmatch(path.name))}
    return [found[step] for step in sorted(found)]


def begin(run: Path, step: int, ranks: RunRanks) -> Path:
    """Where to write the checkpoint of a step; what an interrupted run left there is gone."""
    staging = run / f".checkpoint-{step}.partial"
    if ranks.first:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    ranks.barrier()
    return staging


def commit(staging: Path, step: int, keep: int | None, ranks: RunRanks) -> None:
    """Give a complete checkpoint its name, and delete those before the last `keep`."""
    ranks.barrier()
    if ranks.first:
        final = staging.with_name(f"checkpoint-{step}")
        shutil.rmtree(final, ignore_errors=True)
        staging.rename(final)
        for old in _complete(final.parent)[: -keep if keep else 0]:
            shutil.rmtree(old, ignore_errors=True)
    ranks.barrier()


def save(
    place: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, ranks: RunRanks, own: int
) -> None:
    """Write trained parameters, the optimizer's and the scheduler's state, and every rank's random state.

    `own` is this rank's number among those that share rows: their parameters have the same names and other values.
    """
    state: dict[str, Any] = {
        "model": {_part(own): get_model_state_dict(model, options=_TRAINED)},
        "random": _random_state(ranks),
    }
    if isinstance(optimizer, MasterWeightOptimizer):  # its state is of this rank's pieces, which have no names
        torch.save(optimizer.state_dict(), place / _own_optimizer(ranks))
    else:
        state["optimizer"] = {_part(own): get_optimizer_state_dict(model, optimizer, options=_TRAINED)}
    with _plain_errors(place):
        write_sharded(state, checkpoint_id=str(place / "state"), no_dist=ranks.world == 1)
    if ranks.first:
        # its functions are made again from the settings
        plain = {name: value for name, value in scheduler.state_dict().items() if _is_plain(value)}
        (place / _SCHEDULE).write_text(json.dumps(plain), encoding="utf-8")


@contextlib.contextmanager
def _plain_errors(place: Path) -> Iterator[None]:
    """Raise what went wrong on a rank. torch wraps it into a BaseException, whose text is a traceback."""
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = next(iter(failed.failures.items()))
        if isinstance(error, OSError):
            raise error from None
        raise RewriterError(f"{place}: rank {rank}: {type(error).__name__}: {error}") from error


def _read(place: Path, state: dict[str, Any], alone: bool, planner: DefaultLoadPlanner | None = None) -> None:
    """Read what `save` wrote into `state`: this rank `alone`, or all together."""
    with _plain_errors(place):
        read_sharded(state, checkpoint_id=str(place / "state"), planner=planner, no_dist=alone)


def load_model(place: Path, model: nn.Module, ranks: RunRanks, own: int) -> None:
    """Read the trained parameters back, in place."""
    state = {"model": {_part(own): get_model_state_dict(model, options=_TRAINED)}}
    _read(place, state, alone=ranks.world == 1)
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    set_model_state_dict(model, state["model"][_part(own)], options=options)


def load_rest(
    place: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, ranks: RunRanks, own: int
) -> None:
    """Read back what `save` wrote beside the parameters, the random state excepted.

    Raises RewriterError where the optimizer's state is in pieces of other ranks.
    """
    pieces = sorted(path.name for path in place.glob("optimizer-*.pt"))
    if (_own_optimizer(ranks) not in pieces) if isinstance(optimizer, MasterWeightOptimizer) else pieces:
        of = f"in pieces: {', '.join(pieces)}" if pieces else "not in pieces"
        raise RewriterError(
            f"--resume: {place} has the optimizer's state {of}. Resume on as many ranks as it was written on, or use "
            "--zero 3 from the start, whose checkpoints go on with any number"
        )
    if isinstance(optimizer, MasterWeightOptimizer):
        optimizer.load_state_dict(torch.load(place / _own_optimizer(ranks), weights_only=True))
    else:
        state = {"optimizer": {_part(own): get_optimizer_state_dict(model, optimizer, options=_TRAINED)}}
        _read(place, state, alone=ranks.world == 1)
        set_optimizer_state_dict(model, optimizer, state["optimizer"][_part(own)], options=_TRAINED)
    scheduler.load_state_dict({**scheduler.state_dict(), **json.loads((place / _SCHEDULE).read_text("utf-8"))})


def load_random_state(place: Path, ranks: RunRanks) -> None:
    """Go on with the random numbers of this rank; one that the checkpoint does not know keeps its own."""
    state = {"random": _random_state(ranks)}
    _read(place, state, alone=True, planner=DefaultLoadPlanner(allow_partial_load=True))
    own = state["random"][str(ranks.rank)]
    torch.set_rng_state(own["cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])


_TRAINED = StateDictOptions(ignore_frozen_params=True)


def _own_optimizer(ranks: RunRanks) -> str:
    return f"optimizer-{ranks.rank}-of-{ranks.world}.pt"


def _random_state(ranks: RunRanks) -> dict[str, dict[str, torch.Tensor]]:
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    return {str(ranks.rank): own}


def _part(own: int) -> str:
    return f"part-{own}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)
