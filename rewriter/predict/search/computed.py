"""Effects of rewrites on a text: only what they change is computed, then the rest of the original on the result.

The original is computed once in each window. Each of its layers is then run on the residual streams of all mixes that
ended before it, a few at a time. So a layer's weights are read once for many mixes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rewriter.check.sensitivity import between, given_names, with_stream
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.ir.live_model import opaque_modules
from rewriter.ir.marks import marks
from rewriter.ir.phases import REWIRED, PromptPhase, prompt_phase
from rewriter.ir.residual import by_layer, residual_blocks, stream_values
from rewriter.ir.simulate import RankValues, Simulator, simulate
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


@dataclass(frozen=True)
class WindowChange:
    """Effect of a rewrite on one window: sums in nats over the window's tokens.

    `divergence`: KL(original ‖ rewritten) over its `tokens` positions; `rise`: of the loss, over `predicted` tokens.
    """

    divergence: float
    rise: float
    tokens: int
    predicted: int


class WindowReference:
    """Predictions of the original in one window: from its token ids, int64 [T], and logits [T, vocabulary]."""

    def __init__(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        self.following = ids[1:, None]
        self.log = logits.float().log_softmax(-1)
        self.losses = -self.log[:-1].gather(-1, self.following)[:, 0].double()
        self.loss = float(self.losses.sum())

    def change(self, logits: torch.Tensor, since: int = 0) -> WindowChange:
        """Effect of other logits [T, vocabulary], of the tokens from `since` on."""
        divergence = loss = 0.0
        for first in range(since, len(logits), _ROWS):
            old, new = self.log[first : first + _ROWS], logits[first : first + _ROWS].float().log_softmax(-1)
            divergence += float(torch.linalg.vecdot(old.exp(), old - new).double().sum())
            following = self.following[first : first + _ROWS]
            loss -= float(new[: len(following)].gather(-1, following).double().sum())
        rise = loss - float(self.losses[since:].sum())
        return WindowChange(divergence, rise, len(logits) - since, len(logits) - 1 - since)


@dataclass(frozen=True)
class CutWindow:
    """A window of T tokens whose first half is a prompt, for programs that rewire a part of it: `rewired`, bool [1, T];
    `since`, the token whose logits begin the rest, which alone is measured."""

    rewired: torch.Tensor
    since: int

    @classmethod
    def of(cls, phase: PromptPhase, tokens: int) -> CutWindow:
        prompt = tokens // 2
        if prompt <= phase.exact_tail + phase.exact_head:
            raise RewriterError(
                f"a window of {tokens} tokens has a prompt of {prompt}: it leaves none to rewire of {phase}. Give a "
                "longer text"
            )
        return cls(phase.rewired(tokens, prompt=prompt), prompt - 1)


@dataclass(frozen=True)
class ChangedPart:
    """A program that is given stream values of the original, by name, and returns another one.

    `end`: the layer after the last one that differs, from which on the original goes on with what it returns. `given`:
    numbers of the original's stream values that it reads, by name. `phase`: the tokens that it rewires, where those are
    tokens of a prompt alone.
    """

    program: Program
    end: int
    given: Mapping[str, int]
    phase: PromptPhase | None = None


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
        original, count = self.original, self.original.source.num_layers
        blocks = by_layer(residual_blocks(original))
        if sorted(blocks) != list(range(count)):
            raise RewriterError(
                f"model type {original.source.model_type!r}: its layers are no blocks of one residual stream, so "
                "no rewrite of single layers applies. `rewrite inspect` says what does"
            )
        self.layers = count
        # numbers of the stream values that layers begin with, and of the last one
        self.starts = [*(blocks[layer][0].index for layer in range(count)), blocks[count - 1][-1].index + 1]
        self.batch = 1 if opaque_modules(original) else _BATCH  # a live module computes for the tokens it was given
        self._whole = with_stream(original, range(self.starts[-1] + 1))
        self._layers = [between(original, [self.starts[n]], self.starts[n + 1]) for n in range(count)]
        self._head = between(original, [self.starts[-1]])

    def part(self, mix: Mix) -> ChangedPart:
        """Effect of `mix`, compared with the original, which changes something, its messages quantized however short.
        Raises RewriterError as passes do."""
        recipe = recipe_of(mix)
        disable = [p.pass_name for p in recipe.passes if p.pass_name in SCHEDULES]
        changed = as_computed(apply_recipe(self.original, recipe, self.ranks, disable, known=self.known)[0])
        keep_shared(self.known)
        first, end = self.starts[mix.touched[0]], mix.touched[-1] + 1
        places = [place for place in (first - 1, first) if place >= 0]
        written = [n for n, value in enumerate(stream_values(changed.graph)) if marks(value).layer == end - 1]
        cut = between(changed, places, written[-1])
        given = dict(zip(given_names(places), places, strict=True))
        for node in list(cut.graph.nodes):
            if node.op == "placeholder" and str(node.target) in given and not node.users:
                del given[str(node.target)]
                cut.graph.erase_node(node)
        return ChangedPart(cut, end, given, prompt_phase(changed))

    @torch.no_grad()
    def changes(self, parts: Sequence[ChangedPart], ids: torch.Tensor) -> list[WindowChange]:
        """Effect of each part in one window, int64 [T]; of one that rewires the prompt alone, of its first half, on
        the rest."""
        cuts = [None if part.phase is None else CutWindow.of(part.phase, len(ids)) for part in parts]
        logits, *values = self._run(self._whole, ids)
        reference = WindowReference(ids, logits[0])
        groups: list[tuple[list[int], torch.Tensor]] = []  # numbers of parts, and their streams [N, T, D]
        for layer in range(self.layers):
            start = given_names([self.starts[layer]])[0]
            groups = [(some, self._run(self._layers[layer], ids, {start: x})) for some, x in groups]
            ended = [i for i, part in enumerate(parts) if part.end == layer + 1]
            for first in range(0, len(ended), self.batch):
                some = ended[first : first + self.batch]
                streams = []
                for i in some:
                    cut, given = cuts[i], {name: values[n] for name, n in parts[i].given.items()}
                    streams.append(
                        self._run(parts[i].program, ids, given, {} if cut is None else {REWIRED: cut.rewired})
                    )
                groups.append((some, torch.cat(streams)))
        changes: dict[int, WindowChange] = {}
        for some, x in groups:
            logits = self._run(self._head, ids, {given_names([self.starts[-1]])[0]: x})
            for i, of_part in zip(some, logits, strict=True):
                cut = cuts[i]
                changes[i] = reference.change(of_part, 0 if cut is None else cut.since)
        return [changes[i] for i in range(len(parts))]

    @torch.no_grad()
    def reference(self, ids: torch.Tensor) -> WindowReference:
        """Predictions of the original in one window, int64 [T]."""
        return WindowReference(ids, self._run(self.original, ids)[0])

    @torch.no_grad()
    def change_of(self, whole: Program, weights: Mapping[str, torch.Tensor], ids: torch.Tensor) -> WindowChange:
        """Effect of a whole program, as `as_computed` gives it, in one window, int64 [T]."""
        phase = prompt_phase(whole)
        cut = None if phase is None else CutWindow.of(phase, len(ids))
        logits = simulate(whole, ids[None], weights=weights, rewired=None if cut is None else cut.rewired)
        return self.reference(ids).change(logits[0], 0 if cut is None else cut.since)

    def _run(
        self,
        program: Program,
        ids: torch.Tensor,
        given: Mapping[str, torch.Tensor] | None = None,
        tokens: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`given`: values of the stream [N, T, D] by name; `tokens`: further inputs [1, T]."""
        rows = len(next(iter(given.values()))) if given else 1
        inputs = {**(given or {}), **{name: value.expand(rows, -1) for name, value in (tokens or {}).items()}}
        out: RankValues = Simulator(program, self.weights).run(ids.expand(rows, len(ids)), given=inputs)
        return out[0]


def as_computed(program: Program) -> Program:
    """A rewritten program with every message quantized, however short, where it has formats; else on one device. One
    that rewires the prompt alone, in the wiring of both phases."""
    return always_quantized(both_wirings(program)) if is_quantized(program) else single_device(program)
