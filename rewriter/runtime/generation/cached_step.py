"""A decode step by compiled parts of the user's cache; until they are there, by the model's own code."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.runtime.compiled import ModulePart
from rewriter.runtime.generation import step_cache
from rewriter.runtime.generation.step_parts import (
    CompiledPart,
    PartCall,
    in_place_of,
    parts_of,
    watched,
    why_no_parts,
)
from rewriter.runtime.loading import Origin

# never: what is in the cache is used. background: what is not is compiled meanwhile, for models of LARGE bytes and
# more. first: it is compiled before the second token.
Compiling = Literal["never", "background", "first"]
LARGE = 32 * 2**20
TOKENS_BETWEEN_LOOKS = 16  # at what is compiled in the background; the same on all ranks, which change over together
_READY, _WAITING, _NEVER = 2, 1, 0


def compile_steps(model: nn.Module, when: Compiling) -> None:
    """Set when decode steps of `model`, made by `load`, are compiled that are not in the cache."""
    origin: Origin | None = getattr(model, "origin", None)
    if origin is not None:
        vars(model)["origin"] = replace(origin, compiling=when)


class CachedStep:
    """Steps of one batch size, with one kind of cache. All ranks of `group` make and call it together.

    The first step is watched: the calls of its parts say which compiled ones replace them. `how` names what computes a
    step, with the reason where it is not compiled; `seconds` were spent waiting for a compilation; `note` is for users.
    """

    def __init__(
        self, model: nn.Module, origin: Origin, group: ProcessGroup | None, eager: Callable[..., Tensor]
    ) -> None:
        self._model, self._origin, self._group, self._eager = model, origin, group, eager
        self.how, self.seconds = "eager", 0.0
        self._note: str | None = None
        self._state: int | None = None  # None: no step was watched yet
        self._steps = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder, self._key = Path(), ""
        self._parts: list[ModulePart] = []
        self._calls: Mapping[str, PartCall] = {}
        self._compiled: list[CompiledPart] | None = None

    def logits(self, *inputs: Any) -> Tensor:
        """Those that the eager step gives for `inputs`, up to rounding."""
        if self._state == _READY:
            assert self._compiled is not None
            with in_place_of(self._parts, self._compiled):
                return self._eager(*inputs)
        if self._state is None:
            with watched(parts := parts_of(self._model)) as calls:
                logits = self._eager(*inputs)
            self._agree(self._told(lambda: self._begin(parts, calls)))
            return logits
        logits = self._eager(*inputs)
        self._steps += 1
        if self._state == _WAITING and self._steps % TOKENS_BETWEEN_LOOKS == 0:
            self._agree(self._told(self._look))
        return logits

    @property
    def note(self) -> str | None:
        if self._process is not None and self._process.poll() is None:
            return (
                f"the decode step is still being compiled, for later runs: process {self._process.pid} goes on at low "
                "priority for a minute or a few. `kill` ends it without harm; --no-compile starts none"
            )
        return self._note

    def _agree(self, own: int) -> None:
        """Change over once all ranks can, and give up if one does."""
        if self._group is not None and self._group.size() > 1:
            votes = torch.tensor([own])
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._group)
            if int(votes) == _NEVER != own:
                self.how = "eager: another rank has no compiled step"
            own = int(votes)
        self._state = own
        if own == _READY:
            self.how = "compiled parts"
        elif own == _WAITING:
            self.how = "eager: being compiled"

    def _begin(self, parts: Sequence[ModulePart], calls: Mapping[str, PartCall]) -> int:
        if (reason := why_no_parts(self._model)) is not None:
            return self._never(reason)
        self._parts, self._calls = list(parts), calls
        self._folder = step_cache.cache_folder()
        spec = self._spec()
        self._key = step_cache.key_of(spec)
        return _READY if self._taken() else self._start(spec)

    def _told(self, look: Callable[[], int]) -> int:
        """The result of `look`; an error keeps the step eager: one rank must not leave the others alone."""
        try:
            return look()
        except (RewriterError, OSError) as error:
            return self._never(str(error), tell=self._origin.compiling != "never")

    def _spec(self) -> dict[str, Any]:
        """All that a compiled step depends on besides the machine, which is also all that compiles it but a folder."""
        versions = [torch.__version__, torch.version.git_version, torch.backends.cpu.get_cpu_capability()]
        place = (dist.get_rank(), dist.get_world_size()) if self._group is not None else (0, 1)
        modules = [(path, type(module).__qualname__) for path, module in self._model.named_modules()]
        calls = {name: asdict(call) for name, call in self._calls.items()}
        return {
            "torch": versions, "threads": torch.get_num_threads(), "code": self._origin.code, "dp": self._origin.dp,
            "rank": place[0], "world": place[1], "modules": modules, "calls": calls,
        }  # fmt: skip

    def _start(self, spec: Mapping[str, Any]) -> int:
        """Have it compiled, if that is asked for."""
        when = self._origin.compiling
        small = sum(x.nbytes for x in self._model.parameters()) < LARGE
        if when == "never" or (when == "background" and small):
            return self._never("it is not in the cache of compiled steps")
        step_cache.made(self._folder)
        if when == "background" and (why := step_cache.failure(self._folder, self._key)) is not None:
            return self._never(f"the decode step could not be compiled: {why}. --compile tries again", tell=True)
        if step_cache.compiler() is None:
            return self._never("no C++ compiler to compile the decode step with: install g++, or set CXX", tell=True)
        spec = {**spec, "directory": self._origin.directory}
        begin = time.perf_counter()
        self._process = step_cache.start_compiling(self._folder, self._key, spec, background=when == "background")
        if when == "background":
            return _WAITING
        self._process.wait()
        self.seconds += time.perf_counter() - begin
        return self._look()

    def _look(self) -> int:
        """The state, by what was compiled meanwhile."""
        ended = self._process is None or self._process.poll() is not None
        if self._compiled is not None or self._taken():
            return _READY
        if not ended:
            return _WAITING
        why = step_cache.failure(self._folder, self._key) or "who did so was ended"
        log = self._folder / f"{self._key}.log"
        return self._never(f"the decode step could not be compiled: {why} (more in {log})", tell=True)

    def _taken(self) -> bool:
        """Take the compiled parts from the cache; False if they are not there."""
        files = step_cache.find(self._folder, self._key)
        if files is None:
            return False
        if not files:
            raise RewriterError("no part of the decode step can be compiled")
        runs = {path: _loaded(path) for path in {path for path, _ in files.values()}}
        self._parts = [part for part in self._parts if part.name in files]
        self._compiled = [
            CompiledPart(part, self._calls[part.name], runs[path], single)
            for part in self._parts
            for path, single in [files[part.name]]
        ]
        return True

    def _never(self, reason: str, tell: bool = False) -> int:
        self.how, self._note = f"eager: {reason}", reason if tell else self._note
        return _NEVER


def _loaded(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    """Function that runs a library of AOTInductor. torch._inductor.aoti_load_package, which wraps the same class,
    imports Dynamo and Inductor, which takes seconds, and unpacks a copy into /tmp, which a kill would leave there."""
    try:
        library = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    except (RuntimeError, AttributeError) as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)  # it is compiled again
        raise RewriterError(f"{path} cannot be loaded: {str(error).partition(chr(10))[0]}") from error
    run: Callable[[list[Tensor]], list[Tensor]] = library.run
    return run
