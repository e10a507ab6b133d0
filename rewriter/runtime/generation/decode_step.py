"""One decode step of an emitted model that reads nothing on the host: compiled on a CPU, captured on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rewriter.common.errors import RewriterError
from rewriter.ir.phases import PromptPhase
from rewriter.runtime.cache import SequenceCache, StaticCache, make_cache
from rewriter.runtime.collectives.small_sums import small_gather
from rewriter.runtime.compiled import backend_of, compile_step
from rewriter.runtime.context import Context, positions
from rewriter.runtime.generation.cached_step import CachedStep
from rewriter.runtime.generation.prompt import Call, prompt_calls
from rewriter.runtime.loading import Origin
from rewriter.runtime.parallel import OffloadedEmbedding
from rewriter.runtime.streams import capture, host_waits, why_not_captured

PREFILL_CHUNK = 2048
_BUCKET = 256  # tokens: caches have such lengths, so that few of them differ
_RUN = 64  # keys: on a CPU attention looks at a multiple of these
_ENDS = 8  # end-of-sequence tokens that there is room for; more need more


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0; else a draw from softmax(logits / temperature), cut to the `top_k` likeliest and then to
    the likeliest whose probabilities reach `top_p`.

    Raises RewriterError for a value outside of its range, and for a cut where nothing is drawn.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        temperature, top_k, top_p = self.temperature, self.top_k, self.top_p
        for name, value, fits, expected in (
            ("temperature", temperature, math.isfinite(temperature) and temperature >= 0, "a number of at least 0"),
            ("top_k", top_k, top_k is None or top_k >= 1, "at least 1"),
            ("top_p", top_p, top_p is None or 0 < top_p <= 1, "more than 0 and at most 1"),
        ):
            if not fits:
                raise RewriterError(f"generate: {name} is {value}, expected {expected}")
        for name, cut_to in (("top_k", top_k), ("top_p", top_p)):
            if cut_to is not None and self.greedy:
                raise RewriterError(
                    f"generate: {name} is {cut_to}, but at temperature 0 the likeliest token is taken. Give a "
                    f"temperature, such as 1, or leave {name} out"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def choose(self, logits_BV: Tensor, noise_BV: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B], and bool [B]: rows whose logits hold a NaN, or whose greatest is infinite.

        `noise_BV` is drawn from the exponential distribution; greedy choices need none. The draw is
        argmax(probability / noise), as `torch.multinomial` makes it, which also reads values on the host.
        """
        scores = logits_BV.float()
        if not self.greedy:
            assert noise_BV is not None
            scores = cut(scores / self.temperature, self.top_k, self.top_p).softmax(-1) / noise_BV
        greatest, token = scores.max(-1)  # a NaN is the greatest
        return token, ~greatest.isfinite() if self.greedy else greatest.isnan()  # noise near 0 makes a draw's infinite


def cut(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """[B, V] with -inf for what is not among the `top_k` likeliest, then not among those that reach `top_p`, in the
    order in which transformers cuts."""
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        beyond = (before >= top_p).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(beyond & (logits < ordered[:, :1]), float("-inf"))
    return logits


class DecodeState:
    """The tokens of `batch` rows, up to `capacity` each, and how the next ones are chosen.

    token int64 [B, 1]: each row's last one. place int64 []: where it stands, left padding counted. first_valid int64
    [B]: the left padding. finished bool [B]. lengths int64 [B]: tokens up to the end of sequence. produced int64
    [capacity, B], of which `at` [1] is the next row. choice int64 [B]: the next tokens, not taken yet. stopped bool
    [B]: rows that the host ends with their next token. broken bool [B]: rows that had a NaN among their logits.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device, group: ProcessGroup | None) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.batch, self.capacity, self.group = batch, capacity, group
        self.token, self.place, self.at = zeros(batch, 1), zeros(), zeros(1)
        self.first_valid, self.choice, self.lengths = zeros(batch), zeros(batch), zeros(batch)
        self.finished, self.stopped, self.broken = (zeros(batch, dtype=torch.bool) for _ in range(3))
        self.produced = zeros(capacity, batch)
        self.noise: Tensor | None = None  # [B, V], as soon as something is drawn
        self.random = torch.Generator(device)
        self.ends, self.pad = zeros(_ENDS), zeros()
        self.sampling, self.padded = Sampling(), False

    def begin(
        self, length: int, first_valid: Tensor | None, sampling: Sampling, seed: int, ends: Collection[int], pad: int
    ) -> None:
        """For prompts of `length` tokens, padding counted. What was generated before is gone."""
        for x in (self.at, self.lengths, self.finished, self.stopped, self.broken, self.first_valid):
            x.zero_()
        self.padded = first_valid is not None
        if first_valid is not None:
            self.first_valid.copy_(first_valid)
        self.place.fill_(length - 1)
        self.pad.fill_(pad)
        if len(ends) > len(self.ends):
            self.ends = self.ends.new_empty(len(ends))
        self.ends.fill_(-1)  # no token
        self.ends[: len(ends)] = torch.tensor(sorted(ends), dtype=torch.int64)
        self.sampling = sampling
        self.random.manual_seed(seed)

    def choose(self, logits_BV: Tensor) -> None:
        """The next tokens, by logits."""
        if not self.sampling.greedy:
            if self.noise is None:
                self.noise = torch.empty_like(logits_BV, dtype=torch.float32)
            self.noise.exponential_(generator=self.random)
        token, broken = self.sampling.choose(logits_BV, self.noise)
        self.choice.copy_(token)
        self.broken.logical_or_(broken & ~self.finished)

    def take(self) -> None:
        """The chosen tokens become the last ones; the first rank's on all ranks, which may differ by rounding."""
        token = torch.where(self.finished, self.pad, self.choice)
        ended = self.finished | self.stopped | (token[:, None] == self.ends).any(dim=1)
        if self.group is not None and self.group.size() > 1:
            both = torch.stack([token, ended.long()])
            if (of_all := small_gather(both, self.group)) is not None:
                both = of_all[0]
            else:
                dist.broadcast(both, group=self.group, group_src=0)
            token, ended = both[0], both[1].bool()
        self.produced.index_copy_(0, self.at, token[None])
        self.token.copy_(token[:, None])
        self.lengths += ~self.finished
        self.finished.copy_(ended)
        self.at += 1
        self.place += 1


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
        """True if it can generate `batch` rows of `length` tokens, prompts counted."""
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
        """Compute the prompts int64 [B, S], `chunk` tokens at a time, and choose the first new tokens.

        Where a model rewires tokens of the prompt alone, their ends are calls of their own, and the others give no
        logits.
        """
        self.prompts = ids_BS
        self._fill(ids_BS, chunk)

    def _fill(self, ids_BS: Tensor, chunk: int | None) -> None:
        """Compute the prompts and what was generated after them, on an empty cache."""
        assert self.prompts is not None
        length, device, sharded = ids_BS.shape[1], ids_BS.device, isinstance(self.cache, SequenceCache)
        phase: PromptPhase | None = getattr(self.model, "phase", None)
        padding = self.first_valid if self.padded else None  # without any, attention takes faster ways
        here_BS = positions(length, padding, self.batch, device)
        if getattr(self.model, "by_length", False):  # one call
            mask = None if phase is None else phase.rewired(length, padding, self.prompts.shape[1]).to(device)
            calls = [Call(0, length, mask)]
        else:
            calls = prompt_calls(
                length, None if sharded else chunk, phase, padding, self.prompts.shape[1], whole=sharded
            )
        for call in calls:
            place = None if call.start == 0 else torch.full((), call.start, device=device)
            cache = self._first(call.end) if call.start else self.cache
            fills = False
            if isinstance(cache, StaticCache) and 0 < call.start <= call.end - call.start:
                cache, fills = cache.first(call.end), True
            rewired = call.rewired.to(device) if isinstance(call.rewired, Tensor) else call.rewired
            tokens = slice(call.start, call.end)
            wanted = None if phase is not None and call.end < length else 1
            ctx = Context(cache, place, padding, rewired=rewired, fills=fills)
            logits = self.model(ids_BS[:, tokens], here_BS[:, tokens], ctx, logits_to_keep=wanted)
        self.choose(logits[:, -1])

    def take(self) -> None:
        self._take()

    @torch.no_grad()
    def next(self) -> None:
        """Compute the logits after the last tokens, and choose by them."""
        self.written += 1
        if self.prompts is not None and self.written - 1 == getattr(self.model, "renewed_after", None):
            self.cache.clear()
            made = self.produced[: self.written - self.prompts.shape[1]]
            self._fill(torch.cat([self.prompts, made.T], dim=1), PREFILL_CHUNK)
            return
        if not self._prepared:
            self._prepare()
        self._compute()

    def run(self) -> None:
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
            self._compute_by_parts(origin, self.cache.fixed)

    def _compute_by_parts(self, origin: Origin, fixed: Sequence[bool]) -> None:
        known, kind = _kept(self.model).cached, (self.group, self.batch, *fixed)
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
        saved = [state.clone() for state in self.cache.states]
        try:  # keys that it stores are stored again, the same, by the step itself
            kept.compiled(self.model, self.token, self.place, self.first_valid, self._first(self.written))
        except torch._dynamo.exc.Unsupported as error:
            self.how = f"compiled segments: {str(error).partition(chr(10))[0]}"
        else:
            self._logits, self.how = kept.compiled, "compiled"
        for state, before in zip(self.cache.states, saved, strict=True):
            state.copy_(before)

    def _capture(self) -> None:
        reason = why_not_captured(self.group)
        if isinstance(self.cache, SequenceCache):
            reason = "tokens are sharded over ranks"
        if any(isinstance(module, OffloadedEmbedding) for module in self.model.modules()):
            reason = "an embedding is looked up in the host's memory"
        if reason is None:
            changed = [self.token, self.place, self.at, self.choice, self.lengths]
            changed += [self.finished, self.stopped, self.broken, self.produced, *self.cache.states]
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


class _KeptSteps:
    """The steps that stay with a model from one generation to the next; a copy of the model has none."""

    def __init__(self) -> None:
        self.step: DecodeStep | None = None
        self.compiled: Callable[..., Tensor] | None = None
        self.cached: dict[object, CachedStep] = {}
        self.contents: tuple[object, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _KeptSteps:
        return _KeptSteps()

    def __reduce__(self) -> Any:
        return _KeptSteps, ()


def _kept(model: nn.Module) -> _KeptSteps:
    kept: _KeptSteps = vars(model).setdefault("_decode_step", _KeptSteps())
    if kept.contents != (contents := _contents(model)):
        kept.step, kept.compiled, kept.cached, kept.contents = None, None, {}, contents
    return kept


def decode_step(model: nn.Module, batch: int, length: int, group: ProcessGroup | None) -> DecodeStep:
    """The step of the model's last generation where it fits, else a new one: its cache, and what was compiled or
    captured for it, are used again. Not where the model's modules or tensors are others now."""
    kept = _kept(model)
    if kept.step is None or not kept.step.fits(batch, length, group):
        kept.step = None  # its cache is freed before the new one is made
        kept.step = DecodeStep(model, batch, length, group)
    return kept.step


def compilation(model: nn.Module) -> tuple[float, list[str]]:
    """Seconds that generations of `model` have waited for compilations so far, and notes on these for its user."""
    kept: _KeptSteps | None = vars(model).get("_decode_step")
    steps = () if kept is None else kept.cached.values()
    return sum(step.seconds for step in steps), [step.note for step in steps if step.note]


def _contents(model: nn.Module) -> tuple[object, ...]:
    """The modules and the places of their tensors, on which a compiled or captured step relies. Without weights that
    are read for every use; a weight that is stored in parts is never moved."""
    contents: list[object] = []
    for module in model.modules():
        contents.append(id(module))
        for tensors in (module._parameters, module._buffers):
            if type(tensors) is dict:
                contents += [
                    (id(x), x.dtype, x.data_ptr() if type(x) in (Tensor, nn.Parameter) else 0)
                    for x in tensors.values()
                    if x is not None
                ]
    return tuple(contents)
