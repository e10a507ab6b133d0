"""The interface of a pass: a frozen dataclass whose fields are its options, and `apply(program) -> Program`.

What the rest of the package has to know of a pass, the pass declares here; nothing else names one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from rewriter.common.errors import RewriterError
from rewriter.ir import PassRecord, Program
from rewriter.ir.ops import SequencePlan
from rewriter.ir.phases import PromptPhase, is_phased
from rewriter.passes.selection import ALL, resolve

Effect = Literal["exact", "approximating", "timing only"]
Scope = Literal["model", "per_rank", "runtime"]

Reducing = Mapping[int, Sequence[bool]]
"""By layer, for each of its blocks: whether it ends in a reduction."""

LayerModes = Mapping[int, Mapping[str, Any]]
"""By layer, the arguments of a `LayerMode` of `rewriter.check.per_rank_reference`."""


@dataclass(frozen=True)
class Request:
    """A measurement on real weights that a pass needs before it is applied.

    `kind` is one of `rewriter.convert.pass_measurements`. `option` takes the result; the pass has an option
    `measured_on` too, which says on what, or why nothing was measured. Where the weights cannot be run, the error says
    that `chosen`, but why not, and what can be done `instead`.
    """

    kind: str
    option: str
    chosen: str
    instead: str


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of a Program; valid IR in, valid IR out, the input untouched.

    Effect "exact": the same function up to rounding. "approximating": another function, whose drift is reported.
    "timing only": it can be run and emulated, never emitted as a checkpoint.

    Scope "model": it changes what the model computes and shows in the adapted checkpoint. "per_rank": the same, but the
    function is bound to the number of ranks, each of which keeps values of its own; the adapted checkpoint computes all
    of them. "runtime": it changes how ranks compute, and shows in the runtime module only.

    Only `name`, `effect` and `apply` are needed. An approximating pass also says what it is verified with, by one of

    - `reference_modes(count, reducing) -> LayerModes`: what the package's reference has to run in each of `count`
      layers. It reads the options a second time, and shares no code with `apply`, which it checks;
    - `oracle(model)`, a context manager: inside it the eager Hugging Face `model` computes what the pass makes of it.
    """

    name: ClassVar[str]
    effect: ClassVar[Effect]

    # Of scope "runtime": which partial sums a rank holds follows from it, so that it is part of a per-rank function.
    makes_partials: ClassVar[bool] = False
    # It only changes when reductions begin and are waited for.
    schedules: ClassVar[bool] = False
    # It is exact, and whether it found anything to change, and its notes, decide nothing: printed with --verbose.
    routine: ClassVar[bool] = False
    # It shards the tokens of a sequence. Its option `tokens` is the length to plan for, or "auto".
    shards_tokens: ClassVar[bool] = False
    # The options that it needs next to its own on weights that it has changed already.
    again: ClassVar[Mapping[str, Any]] = {}
    # The options that it has instead of its own where nothing is written: limits that only what is written has.
    planning: ClassVar[Mapping[str, Any]] = {}

    reference_modes: ClassVar[Callable[..., LayerModes] | None] = None
    oracle: ClassVar[Callable[..., AbstractContextManager[Any]] | None] = None

    @property
    def scope(self) -> Scope:
        return "model"

    @abstractmethod
    def apply(self, program: Program) -> Program:
        """`program` rewritten. Raises RewriterError with the reason when it matches nothing."""

    def check_mesh(self, mesh: Mapping[str, int]) -> None:
        """Raises RewriterError, before any work, where it cannot be applied on these numbers of ranks ("tp", "sp")."""
        if self.scope == "per_rank" and mesh["tp"] == 1:
            raise RewriterError(
                f"{self.name} is bound to a number of ranks: what it computes differs with it. Give --tp 2 or more."
            )

    def for_degrees(self, degrees: Sequence[int]) -> Mapping[str, Any]:
        """The options that it needs where one checkpoint serves several numbers of tensor-parallel ranks."""
        return {}

    @property
    def request(self) -> Request | None:
        """The measurement that is missing before it can be applied."""
        return None

    def supposed(self, standard: Program) -> tuple[Mapping[str, Any], str]:
        """(options that stand for the requested measurement where only costs are asked for, a sentence on that).

        `standard` is the model under tensor parallelism alone.
        """
        raise NotImplementedError(f"{self.name} requests nothing")

    def kinds_of_layers(self, count: int) -> list[set[int]]:
        """The layers, of `count`, that it treats differently from others, one set for each way."""
        layers = getattr(self, "layers", None)
        return [] if layers is None else [set(resolve(layers, count))]

    def shrunken(self, kept: Sequence[int], count: int, plan: SequencePlan | None = None) -> Sequence[Pass]:
        """The passes that stand for it on a shrunken copy of a model of `count` layers, the `kept` ones alone.

        `plan` is how ranks share the tokens of a sequence, if they do.
        """
        layers = getattr(self, "layers", None)
        if layers is None or layers == ALL:
            return [self]
        options: dict[str, Any] = {"layers": places_of(resolve(layers, count), kept)}
        return [replace(self, **options)]


def places_of(chosen: Collection[int], kept: Sequence[int]) -> list[int]:
    """Places of the chosen layers among those that are kept."""
    return [place for place, layer in enumerate(kept) if layer in chosen]


def record(
    program: Program, rewrite: Any, summary: str, notes: tuple[str, ...] = (), fired: bool = True, **changes: Any
) -> Program:
    """`program` with `changes` and one more entry in its history.

    `rewrite` is the pass with the options that it was given, which verification compares with the recipe. What the
    recipe leaves open (None, "auto") may be filled in.
    """
    if is_phased(rewrite):
        summary += f", at tokens of {PromptPhase(rewrite.exact_tail, rewrite.exact_head)}"
    entry = PassRecord(rewrite, summary, notes, fired)
    return program.with_(history=(*program.history, entry), origin=program.origin or program, **changes)


def scopes(program: Program) -> tuple[Scope, ...]:
    """The scope of every pass that was applied."""
    return tuple(entry.rewrite.scope for entry in program.history)


def with_paths(reasons: Mapping[str, Sequence[str]], what: str = "") -> tuple[str, ...]:
    """A note for each reason: the first path that it holds for, how many like it, `what` became of them, and why."""
    return tuple(
        f"{paths[0]}{f' and {len(paths) - 1} like it' if len(paths) > 1 else ''}{what}: {reason}"
        for reason, paths in reasons.items()
    )


def bound_ranks(program: Program) -> int | None:
    """The number of ranks that the function of `program` is bound to; None where it is the same on any number."""
    return program.mesh["tp"] if "per_rank" in scopes(program) else None
