"""One decode step of an emitted model that reads nothing on the host: compiled whole on a CPU, captured on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.runtime.cache import SequenceCache, StaticCache, make_cache
from rewriter.runtime.compiled import backend_of, compile_step
from rewriter.runtime.context import Context, positions
from rewriter.runtime.generation.cached_step import CachedStep
from rewriter.runtime.generation.decode_state import DecodeState, Sampling
from rewriter.runtime.loading.load import Origin
from rewriter.runtime.streams import capture, host_waits, why_not_captured

PREFILL_CHUNK = 2048
_BUCKET = 256  # tokens: caches have such lengths, so that few of them differ
_RUN = 64  # keys: on a CPU attention looks at a multiple of so many


class DecodeStep(DecodeState):
    """The state of a batch and its cache, both made once for many generations, and the step from token to token.

    `begin` and `prefill`, then `take` and `next` in turns; `run` is both. `how` says what computes a step: "eager",
    "compiled", "compiled segments", "compiled parts", "captured", or one of them with the reason why it is not another.

    What a model's `compute` must keep to, so that a step can be captured in a CUDA graph: shapes and branches of Python
    depend on its static arguments only, every collective that it starts is awaited before it returns, nothing is read
    on the host or copied from it, and it uses parameters, the cache and what it is given, no other memory.

    Raises RewriterError for a model that does not say what it caches.
    """

    def __init__(self, model: nn.Module, batch: int, length: int, group: ProcessGroup | None = None) -> None:
        weight = next(model.parameters())
        super().__init__(batch, -(-length // _BUCKET) * _BUCKET, weight.device, group)
        self.model = model
        self.cache = make_cache(model, batch, self.capacity, weight)
        self.written = 0  # positions in the cache, padding counted
        self.prompts: Tensor | None = None
        self._view: tuple[int, StaticCache] | None = None
        self._forget()

    def fits(self, batch: int, length: int, group: ProcessGroup | None) -> bool:
        """True if it can generate so many rows of so many tokens, prompts counted."""
        return self.batch == batch and self.group is group and length <= self.capacity

    def begin(
        self, length: int, first_valid: Tensor | None, sampling: Sampling, seed: int, ends: Collection[int], pad: int
    ) -> None:
        if self.how == "captured" and (sampling != self.sampling or len(ends) > len(self.ends)):
            self._forget()
        super().begin(length, first_valid, sampling, seed, ends, pad)
        self.cache.clear()
        self.written = length

    @torch.no_grad()
    def prefill(self, ids_BS: Tensor, chunk: int | None = PREFILL_CHUNK) -> None:
        """Compute the prompts int64 [B, S], `chunk` tokens at a time, and choose the first new tokens."""
        length, device = ids_BS.shape[1], ids_BS.device
        if chunk is None or isinstance(self.cache, SequenceCache) or getattr(self.model, "by_length", False):
            chunk = length
        self.prompts = ids_BS
        padding = self.first_valid if self.padded else None  # without any, attention takes faster ways
        here_BS = positions(length, padding, self.batch, device)
        for start in range(0, length, chunk):
            end = min(start + chunk, length)
            place = None if start == 0 else torch.full((), start, device=device)
            cache = self._first(end) if start else self.cache
            ctx = Context(cache, place, padding)
            logits = self.model(ids_BS[:, start:end], here_BS[:, start:end], ctx, logits_to_keep=1)[:, -1]
        self.choose(logits)

    def take(self) -> None:
        self._take()

    @torch.no_grad()
    def next(self) -> None:
        """Compute the logits after the last tokens, and choose by them."""
        self.written += 1
        if self.prompts is not None and self.written - 1 == getattr(self.model, "renewed_after", None):
            self.cache.clear()
            made = self.produced[: self.written - self.prompts.shape[1]]
            self.prefill(torch.cat([self.prompts, made.T], dim=1))
            return
        if not self._prepared:
            self._prepare()
        self._compute()

    def run(self) -> None:
        """The chosen tokens become the last ones, and the next are chosen."""
        self.take()
        self.next()

    def _forget(self) -> None:
        """Compute eagerly, until the next step has prepared something better."""
        self.how, self._prepared = "eager", False
        self._logits: Callable[..., Tensor] = logits_after
        self._compute: Callable[[], None] = self._compute_eagerly
        self._take: Callable[[], None] = super().take

    def _compute_eagerly(self) -> None:
        cache = self.cache if host_waits(self.place) else self._first(self.written)
        self.choose(self._logits(self.model, self.token, self.place, self.first_valid, cache))

    def _first(self, length: int) -> StaticCache | SequenceCache:
        """The cache as far as the first `length` positions need it, and some more, so that few views differ."""
        if isinstance(self.cache, SequenceCache):
            return self.cache
        end = min(-(-length // _RUN) * _RUN, self.capacity)
        if self._view is None or self._view[0] != end:
            self._view = end, self.cache.first(end)
        return self._view[1]

    def _prepare(self) -> None:
        self._prepared = True
        if host_waits(self.place):
            self._capture()
        elif (backend := backend_of(self.model)) is not None:
            self.how = "compiled segments"
            if (self.group is None or self.group.size() == 1) and isinstance(self.cache, StaticCache):
                self._compile(backend)
        elif (origin := getattr(self.model, "origin", None)) is not None and isinstance(self.cache, StaticCache):
            self._compute_by_parts(origin, self.cache.rings)

    def _compute_by_parts(self, origin: Origin, rings: Sequence[bool]) -> None:
        known, kind = _kept(self.model).cached, (self.group, self.batch, *rings)
        if kind not in known:
            known[kind] = CachedStep(self.model, origin, self.group, logits_after)
        step = known[kind]

        def compute() -> None:
            self._compute_eagerly()
            self.how = step.how

        self._logits, self._compute = step.logits, compute

    def _compile(self, backend: str) -> None:
        kept = _kept(self.model)
        if kept.compiled is None:
            kept.compiled = compile_step(logits_after, backend)
        try:  # what it stores is stored again, the same, by the step itself
            kept.compiled(self.model, self.token, self.place, self.first_valid, self._first(self.written))
        except torch._dynamo.exc.Unsupported as error:
            self.how = f"compiled segments: {str(error).partition(chr(10))[0]}"
        else:
            self._logits, self.how = kept.compiled, "compiled"

    def _capture(self) -> None:
        reason = why_not_captured(self.group)
        if isinstance(self.cache, SequenceCache):
            reason = "tokens are sharded over ranks"
        if reason is None:
            changed = [self.token, self.place, self.at, self.choice, self.lengths]
            changed += [self.finished, self.stopped, self.broken, self.produced]
            captured = capture([self._compute_eagerly, super().take], changed, self.random, self.group)
            if not isinstance(captured, str):
                self._compute, self._take = captured
                self.how = "captured"
                return
            reason = captured
        self.how = f"eager: {reason}"


def logits_after(
    model: nn.Module, token_B1: Tensor, place: Tensor, first_valid_B: Tensor, cache: StaticCache | SequenceCache
) -> Tensor:
    """Logits [B, V] after tokens at `place`. Padding is always given, so that one graph serves prompts with and
    without it."""
    here_B = place - first_valid_B
    logits: Tensor = model(token_B1, here_B[:, None], Context(cache, place, first_valid_B))[:, -1]
    return logits


class _Kept:
    """What stays with a model from one generation to the next; a copy of the model has nothing of it."""

    def __init__(self) -> None:
        self.step: DecodeStep | None = None
        self.compiled: Callable[..., Tensor] | None = None
        self.cached: dict[object, CachedStep] = {}
        self.contents: tuple[object, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()

    def __reduce__(self) -> Any:
        return _Kept, ()


def _kept(model: nn.Module) -> _Kept:
    found: _Kept = vars(model).setdefault("_decode_step", _Kept())
    if found.contents != (contents := _contents(model)):
        found.step, found.compiled, found.cached, found.contents = None, None, {}, contents
    return found


def decode_step(model: nn.Module, batch: int, length: int, group: ProcessGroup | None) -> DecodeStep:
    """The step of the model's last generation where it fits, else a new one: its cache, and what was compiled or
    captured for it, are used again. Not where the model's modules or tensors are others now."""
    kept = _kept(model)
    if kept.step is None or not kept.step.fits(batch, length, group):
        kept.step = None  # its cache need not stay beside the new one
        kept.step = DecodeStep(model, batch, length, group)
    return kept.step


def compilation(model: nn.Module) -> tuple[float, list[str]]:
    """How many seconds generations of `model` have waited for compilations so far, and what its user might want to know
    of them."""
    kept: _Kept | None = vars(model).get("_decode_step")
    steps = () if kept is None else kept.cached.values()
    return sum(step.seconds for step in steps), [step.note for step in steps if step.note]


def _contents(model: nn.Module) -> tuple[object, ...]:
    """What a compiled or captured step relies on: the modules, and where their tensors are. Not those of weights that
    are read for every use."""
    found: list[object] = []
    for module in model.modules():
        found.append(id(module))
        for tensors in (module._parameters, module._buffers):
            if type(tensors) is dict:
                found += [(id(x), x.dtype, _address(x)) for x in tensors.values() if x is not None]
    return tuple(found)


def _address(x: Tensor) -> int:
    """Where its numbers are; 0 for a weight that is stored in parts, which is never moved."""
    return x.data_ptr() if type(x) in (Tensor, nn.Parameter) else 0
