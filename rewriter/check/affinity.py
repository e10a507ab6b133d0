"""Heads and channels that belong on one rank, measured on real weights: the input of `permute`.

Where a rank has its own residual, each unit u (a head, a channel) reads a value x_r that lacks what
other ranks have added, instead of x. Its block's output is then wrong by Σ_u (h_u(x_r(u)) − h_u(x)) W_u: h_u are the
unit's activations, W_u its rows of the exit projection, r(u) its rank. The units are assigned to ranks of equal size so
that the mean square of this error is small on a text: each unit goes where the rank's own residual holds what it reads.

Blocks are arranged in the order of the model, during one forward pass of all ranks: what a block reads already comes
from the arranged blocks before it. What a block writes for later ones is not weighed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rewriter.check.drift import DriftSums, other_weights, windows
from rewriter.common.errors import RewriterError
from rewriter.common.run_context import ProgressCall, silent
from rewriter.common.text_windows import begins_texts
from rewriter.ir import Module, Program, walk_modules
from rewriter.ir.simulate import RankValues, Simulator, load_weights
from rewriter.passes.base import bound_ranks
from rewriter.passes.permute import DIGITS, PermutableUnits, moved_units, order_of, permutable_units
from rewriter.passes.phases import for_all_tokens, single_device
from rewriter.passes.placement.projections import is_row_split
from rewriter.recipes.apply import apply_recipe

if TYPE_CHECKING:
    from rewriter.recipes import Recipe

_FEWEST = 8


@dataclass(frozen=True)
class Affinity:
    """`ranks` by block, as `Permute.ranks`; empty where the order on disk is kept.

    `before` and `after` are drifts, KL in nats per token, of the order on disk and of the one that was found, whether
    or not it is better, on the tokens that it was not searched with. `left` are the blocks that could not be measured.
    """

    ranks: Mapping[str, str]
    before: float
    after: float
    left: Sequence[str] = ()

    def __str__(self) -> str:
        text = f"KL of the tokens held back {self.before:.4f} in the order on disk, {self.after:.4f} in the one found"
        if self.before == self.after:
            text = "no other order was found"
        elif not self.ranks:
            text += ", which is not taken"
        more = f" and {len(self.left) - 1} more" if len(self.left) > 1 else ""
        return text + (f"; not measured: {self.left[0]}{more}" if self.left else "")


def measurable(program: Program, recipe: Recipe, ranks: int) -> Program | None:
    """`program` (as traced) after the passes of `recipe` that say what ranks compute, for all tokens; None where all
    compute the same.

    None, too, for a recipe that cannot be applied: whoever applies it says why.
    """
    runtime = {p.name for p in recipe.build() if p.scope == "runtime" and not p.makes_partials}
    try:
        rewritten, _ = apply_recipe(program, recipe, ranks, disable=runtime)
    except RewriterError:
        return None
    return None if bound_ranks(rewritten) is None else single_device(for_all_tokens(rewritten))


@torch.no_grad()
def affinity(
    program: Program,
    rewritten: Program,
    tokens: torch.Tensor,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    progress: ProgressCall = silent,
) -> Affinity:
    """The dealing of units to ranks for `rewritten`, what `measurable` makes of `program` (as traced).

    `tokens`, int64 [T], are read in windows as `drift` reads them. The last quarter is held back: the order is kept
    only where it lowers the drift of the whole model there, and on the others too. `weights` are full fp32 tensors of
    `program` by runtime name; by default the checkpoint is read. Raises RewriterError for fewer than 8 tokens.
    """
    if len(tokens) < _FEWEST:
        raise RewriterError(f"permute: {len(tokens)} tokens to measure with; at least {_FEWEST} are needed")
    if weights is None:
        weights = load_weights(program, torch.float32)
    searched, held_back = tokens.split([len(tokens) - len(tokens) // 4, len(tokens) // 4])
    if begins_texts(tokens, program.source.config):
        held_back = torch.cat([tokens[:1], held_back])
    pieces = windows(program, searched)
    length = len(searched) // len(pieces)  # all windows at once, so of one length
    batch = torch.stack([window for window in windows(program, searched, length) if len(window) == length])
    known = other_weights(rewritten, program, weights)
    exits, left = exits_of(program)
    original = Recording(program, weights, set(exits))
    original.run(batch)
    arranging = Arranging(rewritten, dict(known), original, exits, progress)
    arranging.run(batch)
    assigned = {path: ranks for path, ranks in arranging.assigned.items() if moved_units(ranks)}
    if not assigned:
        return Affinity({}, 0.0, 0.0, left)
    lower, best = True, (0.0, 0.0)
    for part in (pieces, windows(program, held_back)):
        before, after = DriftSums(), DriftSums()
        for place, piece in enumerate(part):
            progress("measuring what another order of heads and channels changes", place, len(part))
            logits = Simulator(program, weights).run(piece[None])[0][0]
            before.add(piece, logits, Simulator(rewritten, known).run(piece[None])[0][0])
            after.add(piece, logits, Simulator(rewritten, arranging.arranged).run(piece[None])[0][0])
        lower, best = lower and after.kl < before.kl, (before.kl, after.kl)
    return Affinity(assigned if lower else {}, *best, left)


def reordered(
    weights: Mapping[str, torch.Tensor], block: PermutableUnits, order: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The full tensors of `block`, by runtime name, with unit order[i] at place i."""
    result = {}
    for name, shard in block.places.items():
        index = block.index(name, order, weights[name].shape[shard.dim])
        result[name] = weights[name].index_select(shard.dim, torch.tensor(index))
    return result


@dataclass(frozen=True)
class Exit:
    """The projection that a block's units leave by, and the columns of its inputs, those of unit 0 first."""

    block: PermutableUnits
    path: str
    dim: int
    columns: torch.Tensor


def exits_of(program: Program) -> tuple[dict[str, Exit], list[str]]:
    """(by path, the blocks that can be measured; the paths of those that cannot).

    Those are blocks whose output is not made by one projection inside them: experts, MLPs told out in the layer.
    """
    modules = dict(walk_modules(program.modules))
    by_path: dict[str, Exit] = {}
    left: list[str] = []
    for block in permutable_units(program):
        if block.reason is not None:
            continue  # the pass says so itself
        exits = []
        for name, shard in block.places.items():
            owner, _, parameter = name.rpartition(".")
            if parameter == "weight" and is_row_split(modules.get(owner), shard.dim):
                columns = [place for unit in shard.ranges for start, stop in unit for place in range(start, stop)]
                exits.append(Exit(block, owner, shard.dim, torch.tensor(columns)))
        if len(exits) == 1 and exits[0].path != block.path:
            by_path[block.path] = exits[0]
        else:
            left.append(block.path)
    return by_path, left


class Recording(Simulator):
    """The original model: keeps what the measured blocks read, and what reaches their exits."""

    def __init__(self, program: Program, weights: Mapping[str, torch.Tensor], paths: set[str]) -> None:
        super().__init__(program, weights)
        self.paths, self.exit = paths, ""
        self.read: dict[str, list[Any]] = {}
        self.activations = torch.empty(0)

    def _module(self, module: Module, path: str, inputs: list[Any]) -> Any:
        if path in self.paths and not self.exit:
            self.read[path] = [values[0][0] for values in inputs]
        return super()._module(module, path, inputs)

    def _leaf(self, module: Any, path: str, inputs: list[RankValues]) -> RankValues:
        if path == self.exit:
            self.activations = inputs[0][0]
        return super()._leaf(module, path, inputs)

    def units(self, exit: Exit, inputs: Sequence[Any]) -> torch.Tensor:
        """Activations [tokens, units · width] of one block, given `inputs`; those of unit 0 first."""
        self.exit = exit.path
        path = exit.block.path
        self._module(self.program.modules[path], path, [(RankValues((value,)),) for value in inputs])
        self.exit = ""
        return self.activations.flatten(0, -2)[:, exit.columns]


class Arranging(Simulator):
    """All ranks: before a block computes with values that differ by rank, its units are assigned to them."""

    def __init__(
        self,
        program: Program,
        weights: MutableMapping[str, torch.Tensor],
        original: Recording,
        exits: Mapping[str, Exit],
        progress: ProgressCall,
    ) -> None:
        super().__init__(program, weights)
        self.arranged, self.original, self.exits, self.progress = weights, original, exits, progress
        self.assigned: dict[str, str] = {}

    def _module(self, module: Module, path: str, inputs: list[Any]) -> Any:
        exit = self.exits.get(path)
        own = any(not values[0].replicated for values in inputs)
        if exit is not None and own and exit.block.count % self.ranks == 0 and exit.block.count > self.ranks:
            self.progress("measuring which heads and channels fit together", len(self.assigned), len(self.exits))
            ranks = self._ranks(exit, inputs)
            self.assigned[path] = ranks
            self.arranged.update(reordered(self.arranged, exit.block, order_of(ranks)))
        return super()._module(module, path, inputs)

    def _ranks(self, exit: Exit, inputs: list[Any]) -> str:
        """The rank of each unit of a block that is given `inputs`, as `Permute.ranks` has it."""
        true = self.original.units(exit, self.original.read[exit.block.path])
        errors = torch.stack(
            [self.original.units(exit, [values[0][rank] for values in inputs]) - true for rank in range(self.ranks)]
        )
        weight = self.original.weights[f"{exit.path}.weight"].movedim(exit.dim, 0)[exit.columns]
        return "".join(DIGITS[rank] for rank in assign_units(errors, weight, exit.block.count))


# Rounds of exchanges; each costs about as much as the exit projection forward and backward.
_ROUNDS = 32


@torch.no_grad()
def assign_units(errors: torch.Tensor, weight: torch.Tensor, units: int) -> list[int]:
    """The rank of each unit that makes ‖Σ_u errors[rank(u), :, u] · weight[u]‖² small; every rank gets equally many.

    `errors`, fp32 [ranks, tokens, units · width], is by how much each unit's activations are wrong on each rank, those
    of unit 0 first; `weight`, fp32 [units · width, outputs], is what they are multiplied by. First the sum of the
    units' own squared errors is minimised, exactly for two ranks; then units are exchanged between ranks as long as the
    error of the sum falls, where errors of different units also cancel.
    """
    ranks, _, size = errors.shape
    width = size // units
    own = _own_errors(errors, weight, units)
    rank_of = _balanced(own)
    step = max(1, units // (8 * ranks))
    wrong = _chosen(errors, rank_of, width)
    best = float((wrong @ weight).square().sum())
    for _ in range(_ROUNDS):
        towards = (wrong @ weight) @ weight.T
        # the change of the squared error if unit u alone went to rank q: [ranks, units]
        change = 2 * ((errors - wrong) * towards).sum(1).reshape(ranks, units, width).sum(-1)
        change += _own_errors(errors - wrong, weight, units)
        other = _exchanged(rank_of, change, step)
        if torch.equal(other, rank_of):
            break
        moved = _chosen(errors, other, width)
        cost = float((moved @ weight).square().sum())
        if cost < best:
            rank_of, wrong, best = other, moved, cost
        elif step == 1:
            break
        else:
            step = max(1, step // 2)
    return rank_of.tolist()


def _own_errors(errors: torch.Tensor, weight: torch.Tensor, units: int) -> torch.Tensor:
    """The squared error [ranks, units] of each unit's part of the output alone, summed over the tokens."""
    ranks, tokens, size = errors.shape
    width = size // units
    if width == 1:
        return errors.square().sum(1) * weight.square().sum(1)
    by_unit = weight.reshape(units, width, -1)
    gram = by_unit @ by_unit.transpose(1, 2)
    parts = errors.reshape(ranks, tokens, units, width)
    return torch.einsum("rtui,uij,rtuj->ru", parts, gram, parts)


def _chosen(errors: torch.Tensor, rank_of: torch.Tensor, width: int) -> torch.Tensor:
    """[tokens, units · width] of `errors`: those of each unit on its rank."""
    places = torch.arange(errors.shape[2])
    return errors[rank_of.repeat_interleave(width), :, places].T


def _balanced(own: torch.Tensor) -> torch.Tensor:
    """The rank [units] of each unit that makes the sum of `own` [ranks, units] small: best for every two ranks."""
    ranks, units = own.shape
    share = units // ranks
    rank_of = torch.arange(units) // share
    for _ in range(_ROUNDS):
        before = rank_of.clone()
        for first, second in itertools.combinations(range(ranks), 2):
            both = ((rank_of == first) | (rank_of == second)).nonzero()[:, 0]
            preference = (own[first] - own[second])[both]
            sorted_ = both[preference.argsort(stable=True)]
            rank_of[sorted_[:share]], rank_of[sorted_[share:]] = first, second
        if torch.equal(rank_of, before):
            break
    return rank_of


def _exchanged(rank_of: torch.Tensor, change: torch.Tensor, most: int) -> torch.Tensor:
    """`rank_of` after the most promising exchanges between every two ranks, at most `most` of each pair."""
    ranks, result = len(change), rank_of.clone()
    for first, second in itertools.combinations(range(ranks), 2):
        there = ((rank_of == first) & (result == first)).nonzero()[:, 0]
        back = ((rank_of == second) & (result == second)).nonzero()[:, 0]
        there = there[change[second, there].argsort(stable=True)[:most]]
        back = back[change[first, back].argsort(stable=True)[:most]]
        count = min(len(there), len(back))
        worth = change[second, there[:count]] + change[first, back[:count]] < 0
        result[there[:count][worth]], result[back[:count][worth]] = second, first
    return result
