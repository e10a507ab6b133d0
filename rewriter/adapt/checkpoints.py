"""The directory of a run while it goes on: the options that a resumed run must repeat, facts, and checkpoints.

All ranks write checkpoints with DCP under another name, which is changed when they are complete: at any moment that
a run is killed, `last` finds one that holds everything, or none.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
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

from rewriter.adapt.ranks import RunRanks
from rewriter.common.errors import RewriterError
from rewriter.common.files import replace_text
from rewriter.training.zero.master_weights import MasterWeightOptimizer

_NAME = re.compile(r"checkpoint-(\d+)")
_SCHEDULE = "schedule.pt"
_JOB = "job.json"
_FACTS = "facts.json"
_TRAINED = StateDictOptions(ignore_frozen_params=True)


def place_of(out: Path) -> Path:
    """The directory in which a run works whose result goes to `out`."""
    return out.parent / f".{out.name}.adapting"  # `with_name` raises for the root


@contextmanager
def claimed(out: Path, description: Mapping[str, Any], resume: bool) -> Iterator[None]:
    """Hold the directory of a run, `.NAME.adapting` next to NAME, which no other run can open meanwhile; on rank 0.

    A run that ends leaves nothing, nor does one that fails without a checkpoint to go on from. Raises RewriterError
    where another run is at work, an interrupted one is neither to be resumed nor gone, or had another `description`.
    """
    place = place_of(out)
    described = json.loads(json.dumps(dict(description)))
    interrupted = place.exists()
    if interrupted and not (place / _JOB).is_file():
        raise RewriterError(f"{place}: exists, and is not a run of `rewrite adapt`. Move it away.")
    if not interrupted:
        place.mkdir(parents=True)
        (place / _JOB).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    with (place / _JOB).open(encoding="utf-8") as job:
        try:
            # before any advice to delete what another run writes
            fcntl.flock(job, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RewriterError(
                f"{place}: another run is at work there. Wait for it, or choose another --out."
            ) from error
        if interrupted:
            _require_same(place, json.load(job), described, resume)
        done = False
        try:
            yield
            done = True
        finally:
            if done or last(place) is None:
                shutil.rmtree(place)


def _require_same(place: Path, before: Mapping[str, Any], now: Mapping[str, Any], resume: bool) -> None:
    if not resume:
        raise RewriterError(
            f"{place}: an interrupted run left its checkpoints there. Continue it with --resume, or delete the "
            "directory to start over."
        )
    for name in dict.fromkeys([*before, *now]):
        if before.get(name) != now.get(name):
            raise RewriterError(
                f"--resume: the run in {place} had {name} {before.get(name)!r}, this one has {now.get(name)!r}. Repeat "
                "it with the same options, or delete the directory to start over."
            )


def remember(place: Path, **facts: Any) -> dict[str, Any]:
    """All facts of the run in `place` so far, these included; they outlive an interruption."""
    file = place / _FACTS
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    known |= facts
    replace_text(file, json.dumps(known))
    return known


# --- checkpoints


def last(run: Path) -> Path | None:
    """The complete checkpoint of the latest step in the directory of a run."""
    return next(reversed(_complete(run)), None)


def step_of(checkpoint: str | Path) -> int:
    """The step after which it was written."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def _complete(run: Path) -> list[Path]:
    """All complete checkpoints, by their steps."""
    return sorted((path for path in run.glob("checkpoint-*") if _NAME.fullmatch(path.name)), key=step_of)


@contextmanager
def writing(run: Path, step: int, keep: int | None, ranks: RunRanks) -> Iterator[Path]:
    """A directory for the checkpoint of a step, which gets its name when the block has ended on all ranks. Checkpoints
    before the last `keep` are deleted then."""
    staging, final = run / f".checkpoint-{step}.partial", run / f"checkpoint-{step}"
    if ranks.first:
        shutil.rmtree(staging, ignore_errors=True)  # of an interrupted run
        staging.mkdir(parents=True)
    ranks.barrier()
    yield staging
    ranks.barrier()
    if ranks.first:
        shutil.rmtree(final, ignore_errors=True)
        staging.rename(final)
        for old in _complete(run)[: -keep if keep else 0]:
            shutil.rmtree(old, ignore_errors=True)
    ranks.barrier()


def save(
    place: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, ranks: RunRanks, own: int
) -> None:
    """Write trained parameters, the optimizer's and the scheduler's state, and every rank's random state.

    `own` is this rank's number among those that share rows: their parameters have the same names and other values.
    """
    state: dict[str, Any] = {"model": {f"part-{own}": get_model_state_dict(model, options=_TRAINED)}}
    if isinstance(optimizer, MasterWeightOptimizer):  # its state is of this rank's pieces, which have no names
        torch.save(optimizer.state_dict(), place / _own_optimizer(ranks))
    else:
        state["optimizer"] = {f"part-{own}": get_optimizer_state_dict(model, optimizer, options=_TRAINED)}
    with _plain_errors(place), _no_warning_of_one_process():
        write_sharded(state, checkpoint_id=str(place / "state"), no_dist=ranks.world == 1)
    torch.save(_random_state(), place / f"random-{ranks.rank}.pt")
    if ranks.first:
        torch.save(scheduler.state_dict(), place / _SCHEDULE)


def load_model(place: Path, model: nn.Module, ranks: RunRanks, own: int) -> None:
    """Read the trained parameters back, in place."""
    state = get_model_state_dict(model, options=_TRAINED)
    _read(place, {"model": {f"part-{own}": state}}, ranks)
    set_model_state_dict(model, state, options=StateDictOptions(ignore_frozen_params=True, strict=False))


def load_rest(
    place: Path, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, ranks: RunRanks, own: int
) -> None:
    """Read back the state of the optimizer and of the scheduler.

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
        state = get_optimizer_state_dict(model, optimizer, options=_TRAINED)
        _read(place, {"optimizer": {f"part-{own}": state}}, ranks)
        set_optimizer_state_dict(model, optimizer, state, options=_TRAINED)
    scheduler.load_state_dict(torch.load(place / _SCHEDULE, weights_only=True))


def load_random_state(place: Path, ranks: RunRanks) -> None:
    """Go on with the random numbers of this rank; one that the checkpoint does not know keeps its own."""
    file = place / f"random-{ranks.rank}.pt"
    if file.is_file():
        own = torch.load(file, weights_only=True)
        torch.set_rng_state(own["cpu"])
        if "cuda" in own and torch.cuda.is_available():
            torch.cuda.set_rng_state(own["cuda"])


def _random_state() -> dict[str, torch.Tensor]:
    own = {"cpu": torch.get_rng_state()}
    return own | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else own


def _own_optimizer(ranks: RunRanks) -> str:
    return f"optimizer-{ranks.rank}-of-{ranks.world}.pt"


def _read(place: Path, state: dict[str, Any], ranks: RunRanks) -> None:
    """Read what `save` wrote into `state`."""
    with _plain_errors(place), _no_warning_of_one_process():
        read_sharded(state, checkpoint_id=str(place / "state"), no_dist=ranks.world == 1)


@contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    """torch warns if it saves or loads in a single process, also if it is asked to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


@contextmanager
def _plain_errors(place: Path) -> Iterator[None]:
    """Raise what went wrong on a rank. torch wraps it into a BaseException, whose text is a traceback."""
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = next(iter(failed.failures.items()))
        if isinstance(error, OSError):
            raise error from None
        raise RewriterError(f"{place}: rank {rank}: {type(error).__name__}: {error}") from error
