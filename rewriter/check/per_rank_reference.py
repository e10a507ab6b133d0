"""An independent reference for any mix of layers over P ranks: P copies of the eager model, run side by side.

Nothing here knows the IR, the analyses or the passes; they are what it checks. Each rank is a thread that runs the
unmodified code of the Hugging Face model on a copy of it, with the stream in a ledger of its own (see `stream`). Where
a rank's part of a block matters, the copy's exit projections are its part: rank r keeps input features r·F/P to
(r+1)·F/P (heads and channels lie in order) and 1/P of the bias, so that it writes f_r, and the block is Σ_r f_r. The
ledger then is the definition of each mode, written as a rank sees it, with `AR` for all-reduce:

    standard     x ← x + AR(f_r(x))
    parallel     x ← x + AR(f_r(X)), where X is the stream before the first block of the layer
    ladder       the same, where X is the stream one block earlier (X_{-1} := X_0)
    own_partial  the same, where the block reads X + the rank's own f_r of the blocks in between
    desync       x_r ← x_r + f_r(x_r)                      where the reduction is dropped
                 x   ← AR(f_r(x_r) + x_r / P)              where it is kept, resync "mean"
                 x   ← x_sync + AR(all f_r since x_sync)   where it is kept, resync "sum"

A norm N after the exits moves to where their sum is complete. A rank's own part is then what its copy writes, N(f_r),
and what all ranks have together, N(AR(f_r)), stands for every AR(f_r): where a sum is kept, each rank's share of it is
1/P.

Transitions: a first ladder or own-partial block after a standard layer reads the same, after a parallel layer that
layer's input, after anything else the whole stream. The last reduction of a run of desynced layers is kept. A block
that every rank computes in full writes g(x_r): added as it is, and counted 1/P per rank where a sum is taken.

A second mix and a mask may say that some tokens are exact: at these, blocks are wired by the second mix. Both wirings
see the same parts, written from what each token read, and one stream, which at each token is its own wiring's.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from rewriter.check.exit_shares import Shares, set_tensor
from rewriter.check.stream_hooks import Carry, Ledger, Structure, check_layers, find_structure, watched
from rewriter.common.errors import RewriterError

Mode = Literal["standard", "ladder", "own_partial", "desync", "parallel"]


@dataclass(frozen=True)
class LayerMode:
    """Mode of a layer. `keep` and `resync` are about desync, `norm` about parallel layers, `coefficients` about ladder
    layers that mix several streams: by weights of the newest stream, or of the late one. Where a stream can be followed
    by its additions, it is scaled by constants alone, so that both are the same.

    `keep` says per block of the layer whether its reduction is kept. `norm` is whose entry norm serves all blocks of
    the layer: the "attention"'s (the first block), the "mlp"'s (the last), or each its "own".
    """

    mode: Mode = "standard"
    keep: tuple[bool, ...] = ()
    resync: Literal["mean", "sum"] = "mean"
    norm: Literal["own", "attention", "mlp"] = "own"
    coefficients: Literal["fresh", "late"] = "fresh"


class PerRankReference:
    """The model of `mix` (layer number → mode, others standard) over `ranks` ranks, as a function of token ids.

    `exact` is the mix of tokens that are exact where a call says which are rewired; by default all standard.
    `whole` are paths of modules that every rank computes in full (a block of which nothing can be split has to be
    among them, if it has an exit projection that could). `untied` are weights per rank, [ranks · n, …] by the
    parameter's name, of which rank r holds the r-th part.

    Gradients reach the parameters of `model`. Raises RewriterError for a mix that the model does not have, when the
    stream cannot be followed, and when a block that has to be split is not the sum of its ranks' parts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mix: Mapping[int, LayerMode],
        ranks: int,
        *,
        exact: Mapping[int, LayerMode] | None = None,
        whole: Collection[str] = (),
        untied: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        check_layers("per-rank reference", model, mix)
        self.model, self.ranks = model, ranks
        self.structure = find_structure(model)
        check_layers("per-rank reference", model, exact or {})
        mixes = (mix, exact or {})
        of_both = [[m.get(layer, LayerMode()) for layer in self.structure.layers] for m in mixes]
        self._shares = Shares(model, self.structure, ranks, whole)
        self.split = _split(self.structure, of_both, self._shares.splittable)
        self.steps = [_plan(self.structure, modes, self.split) for modes in of_both]
        self._shares.check(sorted(self.split))
        self._norms = [_shared_norms(self.structure, modes) for modes in of_both]
        self._untied = untied or {}
        self.streams: list[list[torch.Tensor]] = []
        """Streams of the last call: per block and at the end, what each rank held."""

    def __call__(self, input_ids: torch.Tensor, rewired: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """Logits [B, S, vocabulary] for `input_ids` [B, S] (int64); `kwargs` as for the model. No cache is used.

        `rewired`, bool [B, S], is False at tokens that the unmodified model computes; by default all are rewired.
        """
        copies = [self._copy(rank, rewired) for rank in range(self.ranks)]
        group = Group(self.ranks)
        ledgers = [_Rank(rank, group, self.structure, self.steps, rewired) for rank in range(self.ranks)]

        def run(rank: int) -> torch.Tensor:
            for path in (path for b in self.split for path in self._shares.norms[b]):
                norm = copies[rank].get_submodule(path)
                norm.forward = ledgers[rank].with_norm(norm.forward)
            with watched(copies[rank], ledgers[rank], self.structure.chain):
                logits: torch.Tensor = copies[rank](input_ids=input_ids, use_cache=False, **kwargs).logits
            return logits

        results = group.run(run)
        self.streams = [list(values) for values in zip(*(ledger.seen for ledger in ledgers), strict=True)]
        if not bool(results[0].isfinite().all()):
            raise RewriterError("per-rank reference: the logits are not finite: something reads the stream unnoticed")
        if any(not torch.equal(result, results[0]) for result in results):
            raise RewriterError("per-rank reference: the ranks end with different logits")
        return results[0]

    def _copy(self, rank: int, rewired: torch.Tensor | None) -> PreTrainedModel:
        twin = self._shares.copy(rank, self.split)
        names = {id(module): name for name, module in self.model.named_modules()}
        own = {name: module.forward for name, module in twin.named_modules()}
        for reader in {**self._norms[0], **self._norms[1]}:
            forwards = [own[names[id(norms.get(reader, reader))]] for norms in self._norms]
            twin.get_submodule(names[id(reader)]).forward = _by_token(rewired, *forwards)
        for name, values in self._untied.items():
            set_tensor(twin, name, values.chunk(self.ranks)[rank])
        return twin


@dataclass(frozen=True)
class _Step:
    """Rule of a block: it reads the stream as it was before block `since`, with the rank's own parts of the
    blocks from there if `own`; `split` says that the rank's copy writes its part only."""

    mode: LayerMode
    since: int
    own: bool = False
    split: bool = False
    keep: bool = True


def _split(structure: Structure, of_both: Sequence[Sequence[LayerMode]], splittable: Callable[[int], bool]) -> set[int]:
    """The blocks of which one of the wirings needs a rank's own part."""
    first = [structure.layers.index(layer) for layer in structure.layers]
    needed: set[int] = set()
    for modes in of_both:
        needed |= {b for b, mode in enumerate(modes) if mode.mode in ("desync", "own_partial")}
        own = (j for j, mode in enumerate(modes) if mode.mode == "own_partial")
        needed |= {b for j in own for b in range(_since(j, modes, first), j)}
    return set(filter(splittable, needed))


def _plan(structure: Structure, modes: Sequence[LayerMode], split: set[int]) -> list[_Step]:
    first = [structure.layers.index(layer) for layer in structure.layers]
    steps = []
    for b, mode in enumerate(modes):
        since = _since(b, modes, first)
        own = mode.mode == "own_partial" and since < b
        if own and b not in split and any(i in split for i in range(since, b)):
            raise RewriterError(
                f"per-rank reference: block {b} (layer {structure.layers[b]}) is computed in full by every rank and "
                "reads a rank's own partial sum: the ranks would drift apart"
            )
        keep = mode.mode != "desync" or _kept(b, modes, structure, first, split)
        steps.append(_Step(mode, since, own, b in split, keep))
    return steps


def _since(b: int, modes: Sequence[LayerMode], first: Sequence[int]) -> int:
    mode = modes[b].mode
    if mode == "parallel":
        return first[b]
    if mode not in ("ladder", "own_partial") or b == 0:
        return b
    before = modes[b - 1].mode
    if before in (mode, "standard"):
        return b - 1
    return first[b - 1] if before == "parallel" else b


def _kept(b: int, modes: Sequence[LayerMode], structure: Structure, first: Sequence[int], split: set[int]) -> bool:
    """True if the reduction of desynced block `b` is kept: it is asked for, or the last of its run of layers."""
    place, count = b - first[b], structure.layers.count(structure.layers[b])
    if len(modes[b].keep) != count:
        raise RewriterError(
            f"per-rank reference: layer {structure.layers[b]} has {count} blocks, keep={modes[b].keep} is about "
            f"{len(modes[b].keep)}"
        )
    run = itertools.takewhile(lambda later: modes[later].mode == "desync", range(b + 1, len(modes)))
    return modes[b].keep[place] if any(later in split for later in run) else True


def _shared_norms(structure: Structure, modes: Sequence[LayerMode]) -> dict[nn.Module, nn.Module]:
    """By entry norm of a parallel layer, the norm that computes in its place."""
    pairs: dict[nn.Module, nn.Module] = {}
    for layer in sorted(set(structure.layers)):
        blocks = [b for b, number in enumerate(structure.layers) if number == layer]
        mode = modes[blocks[0]]
        if mode.mode != "parallel" or mode.norm == "own" or len(blocks) == 1:
            continue
        for b in blocks:
            if len(structure.readers[b]) != 1 or list(structure.readers[b][0].children()):
                raise RewriterError(f"per-rank reference: layer {layer} has no one norm at the entry of each block")
        source = structure.readers[blocks[0 if mode.norm == "attention" else -1]][0]
        pairs |= {structure.readers[b][0]: source for b in blocks if structure.readers[b][0] is not source}
    return pairs


def _multiple(written: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """The number that a block multiplies what its norm computed by before it is written."""
    number = (written * normed).sum() / (normed * normed).sum().clamp(min=1e-30)
    if not torch.allclose(written, number * normed, rtol=1e-3, atol=1e-5):
        raise RewriterError("per-rank reference: what is written is not a multiple of what the norm before it computed")
    return number


class _Rank(Ledger):
    """The stream as one rank holds it. What a model multiplies the stream by (`carry`) holds for all that is in it."""

    def __init__(
        self,
        rank: int,
        group: Group,
        structure: Structure,
        steps: Sequence[Sequence[_Step]],
        rewired: torch.Tensor | None,
    ) -> None:
        super().__init__()
        self.rewired = rewired
        self.rank, self.group, self.structure = rank, group, structure
        self.wirings = [_Wiring(of_one) for of_one in (steps if rewired is not None else steps[:1])]
        self.block_of = {start: block for block, start in enumerate((*structure.starts, structure.last))}
        self.seen: list[torch.Tensor] = []  # x at the start of each block
        self.parts: list[torch.Tensor] = []  # what this rank wrote in each block
        self.normed: tuple[torch.Tensor, torch.Tensor] | None = None  # of this rank's part and of all ranks', just now
        self.carries: list[list[Carry]] = []  # what was made of x in each block

    def begin(self, stream: torch.Tensor) -> None:
        self.x = stream
        for wiring in self.wirings:
            wiring.synchronised, wiring.added = stream, torch.zeros_like(stream)
        self.written, self.share = torch.zeros_like(stream), torch.zeros_like(stream)
        self.seen, self.parts, self.carries = [stream], [], [[]]

    def read(self, value: int) -> torch.Tensor:
        block = self.block_of[value]
        if block == len(self.structure.starts):
            return self.x
        return _at_rewired(self.rewired, *(self._given(wiring.steps[block], block) for wiring in self.wirings))

    def between(self, value: int) -> torch.Tensor:
        return self.x

    def change(self, value: int, change: Carry) -> None:
        block = self.block_of[value]
        late = [later for w in self.wirings for later, step in enumerate(w.steps) if step.since < block <= later]
        if late:
            raise RewriterError(
                f"per-rank reference: block {late[0]} (layer {self.structure.layers[late[0]]}) reads the stream as it "
                f"was before the model changed it behind layer {self.structure.layers[block - 1]}"
            )
        self.x = change(self.x)
        self.seen[-1] = self.x
        for wiring in self.wirings:
            if wiring.synchronised is not None:
                wiring.synchronised = change(wiring.synchronised)

    def _given(self, step: _Step, block: int) -> torch.Tensor:
        given = self.seen[step.since]
        for earlier in range(step.since, block):
            given = _carried(self.carries[earlier], given)
            given = given + self.parts[earlier] if step.own else given
        return given

    def write(self, value: int, carry: Carry, written: torch.Tensor) -> None:
        self.written = carry(self.written) + written
        self.share = carry(self.share) + self._share(value, written)
        self.carries[-1].append(carry)
        block = self.block_of.get(value + 1)
        if block is not None:
            self.parts.append(self.written)
            after = [self._after(wiring, block - 1, self.written, self.share) for wiring in self.wirings]
            self.x = _at_rewired(self.rewired, *after)
            for wiring in self.wirings:
                if wiring.synchronised is None:
                    wiring.synchronised, wiring.added = self.x, torch.zeros_like(self.x)
            self.seen.append(self.x)
            self.carries.append([])
            self.written, self.share = torch.zeros_like(self.x), torch.zeros_like(self.x)

    def with_norm(self, norm: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """`norm` of what this rank gives it; the norm of what all ranks give together is kept for the write."""

        def normed(part: torch.Tensor) -> torch.Tensor:
            self.normed = norm(part), norm(self.group.all_reduce(self.rank, part))
            return self.normed[0]

        return normed

    def _share(self, value: int, written: torch.Tensor) -> torch.Tensor:
        """This rank's share of what all ranks write where this one wrote `written`."""
        normed, self.normed = self.normed, None
        if normed is not None:
            own, complete = (x.reshape(written.shape) for x in normed)
            return complete * _multiple(written, own) / self.group.ranks
        block = next(b for start, b in sorted(self.block_of.items(), reverse=True) if start <= value)
        return written if self.wirings[0].steps[block].split else written / self.group.ranks

    def _after(self, wiring: _Wiring, block: int, f: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """The stream by a wiring after a block that wrote `f` here, `share` of what all ranks write."""
        ranks, reduce = self.group.ranks, lambda part: self.group.all_reduce(self.rank, part)
        step, known = wiring.steps[block], (self.x, wiring.synchronised, wiring.added)
        x, synchronised, added = (_carried(self.carries[-1], v) for v in known if v is not None)
        if step.mode.mode == "desync" and not (step.split and step.keep):
            wiring.synchronised, wiring.added = synchronised, added + share
            return x + f
        wiring.synchronised = None  # the stream to come
        if step.mode.mode != "desync":
            return x + (reduce(share) if step.split else f)
        if step.mode.resync == "mean":
            return reduce(share + x / ranks)
        return synchronised + reduce(added + share)


@dataclass
class _Wiring:
    """The rules of one wiring on a rank: the stream when ranks last agreed, and what this one added since."""

    steps: Sequence[_Step]
    synchronised: torch.Tensor | None = None
    added: torch.Tensor | None = None


def _at_rewired(rewired: torch.Tensor | None, value: torch.Tensor, exact: torch.Tensor | None = None) -> torch.Tensor:
    return value if rewired is None or exact is None else torch.where(rewired[..., None], value, exact)


def _by_token(
    rewired: torch.Tensor | None, norm: Callable[..., torch.Tensor], exact: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    return norm if rewired is None else lambda x: _at_rewired(rewired, norm(x), exact(x))


def _carried(carries: Sequence[Carry], x: torch.Tensor) -> torch.Tensor:
    for carry in carries:
        x = carry(x)
    return x


class Group:
    """Threads that stand for ranks. One runs at a time; they wait for each other in `all_reduce`."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._parts: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks, self._sum)
        self._running = threading.Lock()
        self._total: Any = None

    def all_reduce(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        """The sum of what every rank gives, the same tensor on all."""
        self._parts[rank] = part
        self._running.release()
        try:
            self._barrier.wait()
        finally:
            self._running.acquire()
        total: torch.Tensor = self._total
        return total

    def _sum(self) -> None:
        self._total = sum(self._parts[1:], self._parts[0])

    def run(self, function: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """`function` of every rank. Raises what a rank raised."""
        enabled = torch.is_grad_enabled()

        def body(rank: int) -> torch.Tensor:
            with self._running, torch.set_grad_enabled(enabled):
                try:
                    return function(rank)
                except Exception:
                    self._barrier.abort()
                    raise

        with ThreadPoolExecutor(self.ranks) as threads:
            results = [threads.submit(body, rank) for rank in range(self.ranks)]
        errors = [error for result in results if (error := result.exception()) is not None]
        # the others could not go on
        if first := next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), None):
            raise first
        return [result.result() for result in results]
