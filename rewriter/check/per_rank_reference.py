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
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from rewriter.check.stream_hooks import Carry, Ledger, Structure, check_layers, find_structure, watch_few, watched
from rewriter.common.errors import RewriterError

Mode = Literal["standard", "ladder", "own_partial", "desync", "parallel"]


@dataclass(frozen=True)
class LayerMode:
    """Mode of a layer. `keep` and `resync` are about desync, `norm` about parallel layers.

    `keep` says per block of the layer whether its reduction is kept. `norm` is whose entry norm serves all blocks of
    the layer: the "attention"'s (the first block), the "mlp"'s (the last), or each its "own".
    """

    mode: Mode = "standard"
    keep: tuple[bool, ...] = ()
    resync: Literal["mean", "sum"] = "mean"
    norm: Literal["own", "attention", "mlp"] = "own"


class PerRankReference:
    """The model of `mix` (layer number → mode, others standard) over `ranks` ranks, as a function of token ids.

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
        whole: Collection[str] = (),
        untied: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        check_layers("per-rank reference", model, mix)
        self.model, self.ranks = model, ranks
        self.structure = find_structure(model)
        modes = [mix.get(layer, LayerMode()) for layer in self.structure.layers]
        self._shares = Shares(model, self.structure, ranks, whole)
        self.steps = _plan(self.structure, modes, self._shares.splittable)
        self._shares.check([b for b, step in enumerate(self.steps) if step.split])
        self._norms = _shared_norms(self.structure, modes)
        self._untied = untied or {}
        self.streams: list[list[torch.Tensor]] = []
        """Streams of the last call: per block and at the end, what each rank held."""

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Logits [B, S, vocabulary] for `input_ids` [B, S] (int64); `kwargs` as for the model. No cache is used."""
        split = [b for b, step in enumerate(self.steps) if step.split]
        copies = [self._copy(rank, split) for rank in range(self.ranks)]
        group = Group(self.ranks)
        ledgers = [_Rank(rank, group, self.structure, self.steps) for rank in range(self.ranks)]

        def run(rank: int) -> torch.Tensor:
            for path in (path for b in split for path in self._shares.norms[b]):
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

    def _copy(self, rank: int, split: Collection[int]) -> PreTrainedModel:
        twin = self._shares.copy(rank, split)
        names = {id(module): name for name, module in self.model.named_modules()}
        for reader, source in self._norms:
            twin.get_submodule(names[id(reader)]).forward = twin.get_submodule(names[id(source)]).forward
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


def _plan(structure: Structure, modes: Sequence[LayerMode], splittable: Callable[[int], bool]) -> list[_Step]:
    count = len(modes)
    first = [structure.layers.index(layer) for layer in structure.layers]
    since = [_since(b, modes, first) for b in range(count)]
    needed = {b for b in range(count) if modes[b].mode in ("desync", "own_partial")}
    needed |= {b for j in range(count) if modes[j].mode == "own_partial" for b in range(since[j], j)}
    split = {b for b in needed if splittable(b)}
    steps = []
    for b, mode in enumerate(modes):
        own = mode.mode == "own_partial" and since[b] < b
        if own and b not in split and any(i in split for i in range(since[b], b)):
            raise RewriterError(
                f"per-rank reference: block {b} (layer {structure.layers[b]}) is computed in full by every rank and "
                "reads a rank's own partial sum: the ranks would drift apart"
            )
        keep = mode.mode != "desync" or _kept(b, modes, structure, first, split)
        steps.append(_Step(mode, since[b], own, b in split, keep))
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


def _shared_norms(structure: Structure, modes: Sequence[LayerMode]) -> list[tuple[nn.Module, nn.Module]]:
    """(entry norm, the norm that computes in its place) of the parallel layers."""
    pairs = []
    for layer in sorted(set(structure.layers)):
        blocks = [b for b, number in enumerate(structure.layers) if number == layer]
        mode = modes[blocks[0]]
        if mode.mode != "parallel" or mode.norm == "own" or len(blocks) == 1:
            continue
        for b in blocks:
            if len(structure.readers[b]) != 1 or list(structure.readers[b][0].children()):
                raise RewriterError(f"per-rank reference: layer {layer} has no one norm at the entry of each block")
        source = structure.readers[blocks[0 if mode.norm == "attention" else -1]][0]
        pairs += [(structure.readers[b][0], source) for b in blocks if structure.readers[b][0] is not source]
    return pairs


def _multiple(written: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """The number that a block multiplies what its norm computed by before it is written."""
    number = (written * normed).sum() / (normed * normed).sum().clamp(min=1e-30)
    if not torch.allclose(written, number * normed, rtol=1e-3, atol=1e-5):
        raise RewriterError("per-rank reference: what is written is not a multiple of what the norm before it computed")
    return number


class _Rank(Ledger):
    """The stream as one rank holds it. What a model multiplies the stream by (`carry`) holds for all that is in it."""

    def __init__(self, rank: int, group: Group, structure: Structure, steps: Sequence[_Step]) -> None:
        super().__init__()
        self.rank, self.group, self.structure, self.steps = rank, group, structure, steps
        self.block_of = {start: block for block, start in enumerate((*structure.starts, structure.last))}
        self.seen: list[torch.Tensor] = []  # x at the start of each block
        self.parts: list[torch.Tensor] = []  # what this rank wrote in each block
        self.normed: tuple[torch.Tensor, torch.Tensor] | None = None  # of this rank's part and of all ranks', just now
        self.carries: list[list[Carry]] = []  # what was made of x in each block

    def begin(self, stream: torch.Tensor) -> None:
        self.x = self.synchronised = stream
        self.added, self.written, self.share = (torch.zeros_like(stream) for _ in range(3))
        self.seen, self.parts, self.carries = [stream], [], [[]]

    def read(self, value: int) -> torch.Tensor:
        block = self.block_of[value]
        if block == len(self.steps):
            return self.x
        step = self.steps[block]
        given = self.seen[step.since]
        if step.own:
            for earlier in range(step.since, block):
                given = _carried(self.carries[earlier], given) + self.parts[earlier]
        return given

    def write(self, value: int, carry: Carry, written: torch.Tensor) -> None:
        self.written = carry(self.written) + written
        self.share = carry(self.share) + self._share(value, written)
        self.carries[-1].append(carry)
        block = self.block_of.get(value + 1)
        if block is not None:
            self.parts.append(self.written)
            self.x = self._after(self.steps[block - 1], self.written, self.share)
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
        return written if self.steps[block].split else written / self.group.ranks

    def _after(self, step: _Step, f: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """The stream after a block that wrote `f` here, `share` of what all ranks write."""
        ranks, reduce = self.group.ranks, lambda part: self.group.all_reduce(self.rank, part)
        x, synchronised, added = (_carried(self.carries[-1], v) for v in (self.x, self.synchronised, self.added))
        if step.mode.mode == "desync" and not (step.split and step.keep):
            self.synchronised, self.added = synchronised, added + share
            return x + f
        if step.mode.mode != "desync":
            x = x + (reduce(share) if step.split else f)
        elif step.mode.resync == "mean":
            x = reduce(share + x / ranks)
        else:
            x = synchronised + reduce(added + share)
        self.synchronised, self.added = x, torch.zeros_like(x)
        return x


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


# How paths of projections back into the stream end: of modules, or of weights that hold all experts.
_EXITS = (
    *(".o_proj", ".o_proj.linear", ".out_proj", ".out_lin", ".dense", ".c_proj", ".proj", ".wo", ".Wo", ".o"),
    *(".attention_out", ".output_proj", ".down_proj", ".fc2", ".fc2.linear", ".w2", ".dense_4h_to_h", ".fc_out"),
    *(".output_linear", ".linear_out", ".lin2", ".w_out", ".ffn.2"),
)


@dataclass(frozen=True)
class Share:
    """A weight whose features along `dim` are divided over the ranks, and the bias that each rank adds 1/P of."""

    path: str
    weight: str
    dim: int
    bias: str | None

    def of_weight(self, full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """`full` with zeros outside features r·F/P … (r+1)·F/P. Raises RewriterError when F does not divide."""
        features = full.shape[self.dim]
        if features % ranks:
            raise RewriterError(
                f"per-rank reference: {self.path} has {features} input features, which do not divide by {ranks}; "
                "name it, or a module around it, in `whole`"
            )
        size = features // ranks
        mask = torch.zeros(features, dtype=full.dtype, device=full.device)
        mask[rank * size : (rank + 1) * size] = 1
        return full * mask.view([-1 if d == self.dim else 1 for d in range(full.ndim)])


def exit_shares(path: str, module: nn.Module, hidden: int) -> Iterator[Share]:
    """The exit projections that `module` itself holds, `hidden` being the width of the stream."""
    if "norm" in path:
        return  # one that multiplies by a small network of the stream
    parameters = dict(module.named_parameters(recurse=False))
    for name, weight in parameters.items():
        if not (path if name == "weight" else f"{path}.{name}").endswith(_EXITS):
            continue
        dim = _input_dim(path, module, weight, hidden)
        if dim is not None:
            bias = "bias" if name == "weight" else f"{name}_bias"
            yield Share(path, name, dim, bias if parameters.get(bias) is not None else None)


def _input_dim(path: str, module: nn.Module, weight: torch.Tensor, hidden: int) -> int | None:
    """The input dimension of an exit's weight; None when its output is not the stream."""
    if weight.ndim == 2:
        turned = type(module).__name__ == "Conv1D"  # [in, out], not [out, in]
        if hidden not in weight.shape:
            return None
        if not turned and not isinstance(module, nn.Linear):
            raise RewriterError(f"per-rank reference: {path} is a {type(module).__name__}, whose layout is not known")
        return (0 if turned else 1) if weight.shape[1 if turned else 0] == hidden else None
    if weight.ndim != 3 or hidden not in weight.shape[1:]:
        return None
    if weight.shape[1] == weight.shape[2] and not hasattr(module, "is_transposed"):
        raise RewriterError(
            f"per-rank reference: {path} holds square experts: which dimension is their input is not known"
        )
    turned = bool(module.is_transposed) if weight.shape[1] == weight.shape[2] else weight.shape[2] == hidden
    return 1 if turned else 2


class Shares:
    """The exit projections of a model's blocks, and copies of the model that hold a rank's part of them."""

    def __init__(self, model: PreTrainedModel, structure: Structure, ranks: int, whole: Collection[str]) -> None:
        self.model, self.structure, self.ranks = model, structure, ranks
        self.plain = Ledger()
        watch_few(model, self.plain, structure.chain)
        hidden = self.plain.values[0].shape[-1]
        names = {id(module): name for name, module in model.named_modules()}
        self.of_block: list[list[Share]] = []
        for modules in structure.modules:
            paths = {names[id(m)]: m for m in modules}
            mine = {p: m for p, m in paths.items() if not any(p == w or p.startswith(f"{w}.") for w in whole)}
            self.of_block.append([s for path, module in mine.items() for s in exit_shares(path, module, hidden)])
        self.norms = [_norms_after(list(m), names, s) for m, s in zip(structure.modules, self.of_block, strict=True)]
        """By block, the paths of the norms that its exits' sum passes before it is added to the stream."""

    def splittable(self, block: int) -> bool:
        """True if something of the block can be divided over ranks."""
        return bool(self.of_block[block])

    def copy(self, rank: int, split: Collection[int]) -> PreTrainedModel:
        """A copy of the model that shares its parameters, and holds `rank`'s part of the exits of blocks `split`."""
        twin = copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})
        whole = {share.path for b, shares in enumerate(self.of_block) if b not in split for share in shares}
        for share in (share for block in split for share in self.of_block[block]):
            if share.path in whole:
                raise RewriterError(f"per-rank reference: {share.path} runs in blocks that are split and in others")
            module = self.model.get_submodule(share.path)
            prefix = share.path + "."
            set_tensor(twin, prefix + share.weight, share.of_weight(getattr(module, share.weight), rank, self.ranks))
            if share.bias is not None:
                set_tensor(twin, prefix + share.bias, getattr(module, share.bias) / self.ranks)
        return twin

    @torch.no_grad()
    def check(self, split: Sequence[int]) -> None:
        """Raises RewriterError for a block in which the parts of the ranks, given the same stream, do not add up.

        Where a norm follows, its inputs have to add up to what it is given in the model."""
        parts = [self._writes(self.copy(rank, split), split) for rank in range(self.ranks if split else 0)]
        whole = self._writes(self.model, split)
        ends = (*self.structure.starts, self.structure.last)
        for b in split:
            span = range(ends[b], ends[b + 1])
            expected = torch.stack([whole[i] for i in span]).sum(0)
            actual = torch.stack([part[i] for part in parts for i in span]).sum(0)
            if not torch.allclose(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
                raise RewriterError(
                    f"per-rank reference: block {b} (layer {self.structure.layers[b]}) is not the sum of its ranks' "
                    f"parts: after {', '.join(share.path for share in self.of_block[b])} it is not linear, or more "
                    "than that writes. Leave the layer out, or name what every rank computes in `whole`"
                )

    def _writes(self, model: PreTrainedModel, split: Sequence[int]) -> list[torch.Tensor]:
        """Writes of `model`, whose blocks read what they read in the other run; of `split` blocks without norms."""
        with ExitStack() as stack:
            for path in (path for b in split for path in self.norms[b]):
                norm = model.get_submodule(path)
                stack.callback(setattr, norm, "forward", norm.forward)
                norm.forward = lambda x: x
            ledger = Ledger(lambda _, value: self.plain.values[value])
            watch_few(model, ledger, self.structure.chain)
        return ledger.writes


def _norms_after(modules: Sequence[nn.Module], names: Mapping[int, str], shares: Sequence[Share]) -> list[str]:
    """The norms among `modules` (of a block, in the order of their calls) that are called after its last exit."""
    paths = [names[id(module)] for module in modules]
    exits = [i for i, path in enumerate(paths) if any(share.path == path for share in shares)]
    after = paths[exits[-1] + 1 :] if exits else []
    return [path for path in after if "norm" in path.rpartition(".")[2]]


def set_tensor(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Let a parameter of a copy be `value`, which may be part of an autograd graph."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    del module._parameters[leaf]
    object.__setattr__(module, leaf, value)
