"""Effects of rewrites on a text: only what they change is computed, then the rest of the original on the result.

The original is computed once in each window. Each of its layers is then run on the residual streams of all mixes that
ended before it, a few at a time. So a layer's weights are read once for many mixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rewriter.check.sensitivity import between, given_names, with_stream
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.live_model import opaque_modules
from rewriter.ir.marks import marks
from rewriter.ir.phases import REWIRED, PromptPhase, prompt_phase
from rewriter.ir.residual import by_layer, residual_blocks, stream_values
from rewriter.ir.simulate import Simulator
from rewriter.passes.phases import both_wirings, single_device
from rewriter.passes.quantize_collectives import always_quantized, is_quantized
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.predict.search.choices import Mix, recipe_of
from rewriter.recipes.apply import Applied, apply_recipe

SCHEDULES = ("fuse_projections", "overlap")
_BATCH = 8  # streams that go through a layer at a time
_ROWS = 16  # tokens whose distributions are compared at a time, which stay in the processor's cache


def keep_shared(known: Applied) -> None:
    """Forget what passes made, but for the sharded model that all mixes begin with: hundreds of them fill the
    memory."""
    for key in [key for key in known if not key[-1].startswith(TensorParallel.__name__)]:
        del known[key]


class WindowChange(NamedTuple):
    """Effect of a rewrite on one window: sums in nats over the window's tokens.

    `divergence`: KL(original ‖ rewritten) over its `tokens` positions; `rise`: of the loss, over `predicted` tokens.
    """

    divergence: float
    rise: float
    tokens: int
    predicted: int


def change(ids: torch.Tensor, old: torch.Tensor, logits: torch.Tensor, since: int = 0) -> WindowChange:
    """Effect, on a window of tokens `ids` (int64 [T]) from `since` on, of other `logits` than those of the
    log-probabilities `old`, both [T, vocabulary]."""
    divergence = rise = 0.0
    for first in range(since, len(ids), _ROWS):
        before, after = old[first : first + _ROWS], logits[first : first + _ROWS].float().log_softmax(-1)
        divergence += float(torch.linalg.vecdot(before.exp(), before - after).double().sum())
        following = ids[first + 1 : first + 1 + _ROWS, None]
        rise += float((before - after)[: len(following)].gather(-1, following).double().sum())
    return WindowChange(divergence, rise, len(ids) - since, len(ids) - 1 - since)


def rewired(phase: PromptPhase | None, tokens: int) -> tuple[torch.Tensor | None, int]:
    """(tokens that are rewired in a window of T = `tokens`, bool [1, T], None for all; the first that is measured).

    Where a prompt alone is rewired, that is the first half of the window, and the rest is measured. Raises
    RewriterError for a window too short for that.
    """
    if phase is None:
        return None, 0
    prompt = tokens // 2
    if prompt <= phase.exact_tail + phase.exact_head:
        raise RewriterError(
            f"a window of {tokens} tokens has a prompt of {prompt}: it leaves none to rewire of {phase}. Give a "
            "longer text"
        )
    return phase.rewired(tokens, prompt=prompt), prompt - 1


def as_computed(program: Program) -> Program:
    """A rewritten program with every message quantized, however short, where it has formats; else on one device. One
    that rewires the prompt alone, in the wiring of both phases."""
    return always_quantized(both_wirings(program)) if is_quantized(program) else single_device(program)


@dataclass(frozen=True)
class ChangedPart:
    """A program that is given the original's stream values of numbers `places`, and returns the one that layer `end`
    begins with, from which on the original goes on."""

    program: Program
    end: int
    places: Sequence[int]


@dataclass
class Computed:
    """Computes mixes of one traced model on `ranks` ranks, whose full `weights` in fp32 are given by runtime name.

    Raises RewriterError for a model whose layers are no blocks of one residual stream.
    """

    original: Program
    ranks: int
    weights: Mapping[str, torch.Tensor]
    known: Applied = field(default_factory=dict)

    def __post_init__(self) -> None:
        original, self.layers = self.original, self.original.source.num_layers
        blocks = by_layer(residual_blocks(original))
        if sorted(blocks) != list(range(self.layers)):
            raise RewriterError(
                f"model type {original.source.model_type!r}: its layers are no blocks of one residual stream, so "
                "no rewrite of single layers applies. `rewrite inspect` says what does"
            )
        # numbers of the stream values that layers begin with, and of the last one
        self.starts = [*(blocks[n][0].index for n in range(self.layers)), blocks[self.layers - 1][-1].index + 1]
        self.batch = 1 if opaque_modules(original) else _BATCH  # a live module computes for the tokens it was given
        self._whole = with_stream(original, range(self.starts[-1] + 1))
        self._layers = [between(original, [self.starts[n]], self.starts[n + 1]) for n in range(self.layers)]
        self._head = between(original, [self.starts[-1]])

    def part(self, mix: Mix) -> ChangedPart:
        """The layers that `mix` changes, messages quantized however short. Raises RewriterError as passes do."""
        recipe, end = recipe_of(mix), mix.touched[-1] + 1
        changed = as_computed(apply_recipe(self.original, recipe, self.ranks, SCHEDULES, known=self.known)[0])
        keep_shared(self.known)
        first = self.starts[mix.touched[0]]
        places = range(max(first - 1, 0), first + 1)
        written = [n for n, value in enumerate(stream_values(changed.graph)) if marks(value).layer == end - 1]
        return ChangedPart(between(changed, places, written[-1]), end, places)

    @torch.no_grad()
    def changes(self, parts: Sequence[ChangedPart], ids: torch.Tensor) -> list[WindowChange]:
        """Effect of each part in one window, int64 [T]; of one that rewires the prompt alone, of its first half, on
        the rest."""
        cuts = [rewired(prompt_phase(part.program), len(ids)) for part in parts]
        logits, *values = self._run(self._whole, ids, {})
        old = logits[0].float().log_softmax(-1)
        groups: list[tuple[list[int], torch.Tensor]] = []  # numbers of parts, and their streams [N, T, D]
        for layer, whole in enumerate(self._layers):
            groups = [(some, self._run(whole, ids, {self.starts[layer]: x})) for some, x in groups]
            ended = [i for i, part in enumerate(parts) if part.end == layer + 1]
            for some in (ended[first : first + self.batch] for first in range(0, len(ended), self.batch)):
                given = [{place: values[place] for place in parts[i].places} for i in some]
                streams = [self._run(parts[i].program, ids, g, cuts[i][0]) for i, g in zip(some, given, strict=True)]
                groups.append((some, torch.cat(streams)))
        changes: dict[int, WindowChange] = {}
        for some, x in groups:
            logits = self._run(self._head, ids, {self.starts[-1]: x})
            changes |= {i: change(ids, old, new, cuts[i][1]) for i, new in zip(some, logits, strict=True)}
        return [changes[i] for i in range(len(parts))]

    @torch.no_grad()
    def loss(self, ids: torch.Tensor) -> float:
        """The original's loss in a window, int64 [T]: the sum over its predicted tokens, nats."""
        log = self._run(self.original, ids, {})[0].float().log_softmax(-1)
        return -float(log[:-1].gather(-1, ids[1:, None]).double().sum())

    def _run(
        self, program: Program, ids: torch.Tensor, streams: Mapping[int, torch.Tensor], rewired: Any = None
    ) -> Any:
        """Output of the program on rank 0, from values of the stream [N, T, D] by number, in tokens `rewired`."""
        rows = max([1, *map(len, streams.values())])
        given = {given_names([place])[0]: x for place, x in streams.items()}
        if rewired is not None:
            given[REWIRED] = rewired.expand(rows, -1)
        return Simulator(program, self.weights).run(ids.expand(rows, len(ids)), given=given)[0]
