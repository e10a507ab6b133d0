"""A rank's part of the blocks of an eager Hugging Face model: the exit projections, divided by input features.

Nothing here knows the IR, the analyses or the passes; they are what it checks.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from rewriter.check.stream_hooks import Ledger, Structure, watch_few
from rewriter.common.errors import RewriterError

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
