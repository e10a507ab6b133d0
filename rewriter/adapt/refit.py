"""Closed-form refit: every linear layer that a rewrite changed the input of learns to give what it gave before.

A block that reads a stale or a rank's own residual stream gets other inputs z than the original's x. Where z predicts x
linearly, that can be put into the weights: for each linear layer, in the order of computation,

    W ← argmin_V  Σ ‖V z + b − y‖² + λ ‖V − W‖²    with y what the layer of the original gives for the same token,

a ridge regression towards the weights that are there. It takes forward passes alone, and far fewer tokens than
gradient descent takes to the same loss; what it leaves is for training to heal.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rewriter.adapt.batches import stack
from rewriter.adapt.run import Run
from rewriter.adapt.run_ranks import RunRanks
from rewriter.adapt.students import HuggingFaceModel
from rewriter.adapt.teacher import frozen, load_model
from rewriter.common.errors import RewriterError
from rewriter.runtime.loss import IGNORED
from rewriter.tracing.meta_model import find_layers

LINEAR = (nn.Linear, Conv1D)
RIDGE = 1e-4  # λ, as a share of the mean square of the inputs
_SAME = 1e-6  # relative difference of inputs that leaves a layer alone

Batch = dict[str, Tensor]


class _Enough(Exception):
    """The layer that was asked for has been computed; the rest is not needed."""


@dataclass(frozen=True)
class Refitted:
    """What `refit` did: how many layers it changed, on how many tokens of all ranks."""

    layers: int
    tokens: int


@torch.no_grad()
def refit(
    student: Any, teacher: Any, batches: Sequence[Batch], ranks: RunRanks,
    progress: Callable[..., None] = lambda *_: None,
) -> Refitted:  # fmt: skip
    """Refit the linear layers in the student's decoder layers, in place, to the teacher's; both as transformers has
    them, whole on every rank.

    `batches` are this rank's: input_ids, position_ids and segment_ids, int64 [B, S]; padding is left out. Ranks add
    what they see, and end with equal weights. Rows that read several ranks' inputs are fitted to all of them.
    Raises RewriterError where student and teacher do not have the same linear layers.
    """
    modes = student.training, teacher.training
    student.eval(), teacher.eval()
    path, layers = find_layers(student)
    changed, tokens = 0, 0
    for index in range(len(layers)):
        progress("refitting the weights", index, len(layers))
        prefix = f"{path}.{index}."
        names = [prefix + name for name, module in layers[index].named_modules() if isinstance(module, LINEAR)]
        for name in names:
            if not isinstance(teacher.get_submodule(name), LINEAR):
                raise RewriterError(f"--refit: {name} is no linear layer in the original. Train without --refit")
        for group in _groups(student, names, batches[0]):
            sums = [_LayerSums(student.get_submodule(name)) for name in group]
            seen = 0
            for batch in batches:
                real = _real(batch)
                ours = _taken(student, group, batch)
                theirs = _taken(teacher, group, batch)
                for name, sum in zip(group, sums, strict=True):
                    sum.add(ours[name][0][real], theirs[name][0][real], theirs[name][1][real])
                seen += int(real.sum())
            for sum in sums:
                changed += sum.solve(ranks)
            tokens = seen
    student.train(modes[0]), teacher.train(modes[1])
    total = ranks.sum(torch.tensor(float(tokens))) / ranks.within
    return Refitted(changed, int(total))


def refit_to_original(run: Run, module: nn.Module) -> dict[str, float]:
    """Refit the student to the original model, on the rows that training begins with; the losses of the student before,
    of the original, and of the refitted student.

    Raises RewriterError where the original is not known.
    """
    ranks, rows, micro_batch, size = run.ranks, run.data.rows, run.sizes.micro_batch, run.options.refit
    if run.original is None:
        raise RewriterError(
            f"--refit {size}: the weights were trained since the rewrite, so they are no longer the original's. Give "
            "that as --teacher"
        )
    student = HuggingFaceModel(module, ranks.group)
    found = {"before": run.measured(student)}
    theirs = frozen(load_model(run.original, run.device))
    found["original"] = run.measured(HuggingFaceModel(theirs, ranks.group))
    wanted = -(-size // run.data.length)
    generator = torch.Generator().manual_seed(run.data_seed)
    order = torch.randperm(len(rows), generator=generator).tolist()[:wanted]  # type: ignore[arg-type]
    own = order[ranks.replica :: ranks.replicas] or order[:1]
    batches = [stack([rows[i] for i in own[at : at + micro_batch]]) for at in range(0, len(own), micro_batch)]
    batches = [{name: value.to(run.device) for name, value in batch.items()} for batch in batches]
    refit(module, theirs, batches, ranks, run.progress)
    return found | {"refitted": run.measured(student)}


def _real(batch: Batch) -> Tensor:
    """bool [B, S]: tokens that belong to examples. What is padded is its row's last segment, without a target."""
    targets = batch["labels"] != IGNORED
    last = batch["segment_ids"] == batch["segment_ids"].amax(1, keepdim=True)
    return ~(last & ~(targets & last).any(1, keepdim=True))


@contextlib.contextmanager
def _watched(model: nn.Module, names: list[str], see: Callable[[str, Tensor, Tensor], None]) -> Iterator[None]:
    """Call `see` with the name, the input and the output of each of the layers that is computed."""
    with contextlib.ExitStack() as hooks:
        for name in names:
            layer = model.get_submodule(name)
            hooks.enter_context(layer.register_forward_hook(lambda m, args, y, name=name: see(name, args[0], y)))
        yield


def _groups(model: nn.Module, names: list[str], batch: Batch) -> list[list[str]]:
    """The names in order of computation, those that read the same tensor together."""
    seen: list[tuple[str, Tensor]] = []
    with _watched(model, names, lambda name, x, y: seen.append((name, x))):
        _run(model, {key: value[:1] for key, value in batch.items()})
    runs = itertools.groupby(seen, lambda pair: (pair[1].data_ptr(), pair[1].shape))
    return [[name for name, _ in group] for _, group in runs]


def _taken(model: nn.Module, names: list[str], batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Input and output [B, S, …] of the named layers, which are of one group; nothing behind them is computed."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def take(name: str, x: Tensor, y: Tensor) -> None:
        found[name] = (x, y)
        if len(found) == len(names):
            raise _Enough

    with contextlib.suppress(_Enough), _watched(model, names, take):
        _run(model, batch)
    return found


def _run(model: nn.Module, batch: Batch) -> None:
    model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)


class _LayerSums:
    """Σ z zᵀ and Σ (y − b) zᵀ of one layer, fp64, for every set of rows that reads the same inputs."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.transposed = isinstance(module, Conv1D)
        self.readers = _readers(module)
        self.inputs: list[Tensor | int] = [0] * len(self.readers)
        self.products: list[Tensor | int] = [0] * len(self.readers)
        self.differ = 0.0
        self.norm = 0.0

    def add(self, ours: Tensor, theirs: Tensor, outputs: Tensor) -> None:
        """Tokens [N, inputs] of the student and of the teacher, and the teacher's outputs [N, outputs]."""
        y = outputs.double()
        if self.module.bias is not None:
            y = y - self.module.bias.double()
        for index, (rows, chunks) in enumerate(self.readers):
            for chunk in chunks:
                z = ours.double()[:, chunk]
                if z.shape[1] == theirs.shape[1]:
                    self.differ += float((z - theirs.double()).square().sum())
                    self.norm += float(theirs.double().square().sum())
                self.inputs[index] = self.inputs[index] + z.T @ z
                self.products[index] = self.products[index] + y[:, rows].T @ z

    def solve(self, ranks: RunRanks) -> int:
        """Put the solution into the weights; 1 where inputs differed at all, else 0."""
        device = self.module.weight.device
        totals = ranks.sum(torch.tensor([self.differ, self.norm], dtype=torch.float64, device=device))
        if totals[0] <= _SAME**2 * totals[1]:
            return 0
        weight = self.module.weight.data.T if self.transposed else self.module.weight.data
        for (rows, _), inputs, products in zip(self.readers, self.inputs, self.products, strict=True):
            assert isinstance(inputs, Tensor)
            assert isinstance(products, Tensor)
            ranks.sum(inputs), ranks.sum(products)
            scale = RIDGE * inputs.trace() / len(inputs)
            left = inputs + scale * torch.eye(len(inputs), dtype=inputs.dtype, device=device)
            right = products + scale * weight[rows].double()
            weight[rows] = torch.linalg.solve(left, right.T).T.to(weight.dtype)
        return 1


def _readers(module: Any) -> list[tuple[Tensor, list[slice]]]:
    """(rows of the weight, the parts of the input that they read), one entry for each set of rows.

    All rows read the whole input, but for a `PerRankColumn` of a generated modeling file: there rank r's rows read
    rank r's part of it, and rows that ranks hold in common read several.
    """
    weight = module.weight.T if isinstance(module, Conv1D) else module.weight
    outputs, inputs = weight.shape
    segments, rows = getattr(module, "segments", None), getattr(module, "rows", None)
    ranks = _ranks(module)
    if ranks is None:
        return [(torch.arange(outputs), [slice(0, inputs)])]
    reads = torch.zeros(outputs, ranks, dtype=torch.bool)  # whether a row reads a rank's input
    for rank, (start, stop) in enumerate(rows or ()):
        reads[start:stop, rank] = True
    start = 0
    for size in () if rows else segments or (outputs,):
        reads[start + torch.arange(size), torch.arange(size) * ranks // size] = True
        start += size
    return [
        (
            (reads == readers).all(1).nonzero().flatten(),
            [slice(r * inputs, (r + 1) * inputs) for r in range(ranks) if readers[r]],
        )
        for readers in reads.unique(dim=0)
        if readers.any()
    ]


def _ranks(module: nn.Module) -> int | None:
    """How many ranks' inputs a layer reads, by the name that the generated file gives it; None where it reads one."""
    if not any(cls.__name__ == "PerRankColumn" for cls in type(module).__mro__):
        return None
    return int(sys.modules[type(module).__module__].RANKS)
