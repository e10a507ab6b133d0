"""What a pass is: a frozen dataclass whose fields are its options, and `apply(program) -> Program`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol

from rewriter.ir import PassRecord, Program

Effect = Literal["exact", "approximating", "timing only"]
Scope = Literal["model", "per_rank", "runtime"]


class Pass(Protocol):
    """A rewrite of a Program; valid IR in, valid IR out, the input untouched.

    Effect "exact": the same function up to rounding. "approximating": another function, whose drift is reported.
    "timing only": it can be run and emulated, never emitted as a checkpoint.

    Scope "model": it changes what the model computes and shows in the adapted checkpoint. "per_rank": the same, but the
    function is bound to the number of ranks, each of which keeps values of its own (a lane); the adapted checkpoint
    computes all of them. "runtime": it changes how ranks compute, and shows in the runtime module only.
    `apply` raises RewriterError with the reason when it matches nothing.
    """

    name: ClassVar[str]
    effect: ClassVar[Effect]

    @property
    def scope(self) -> Scope: ...

    def apply(self, program: Program) -> Program: ...


def record(
    program: Program, rewrite: Any, summary: str, notes: tuple[str, ...] = (), fired: bool = True, **changes: Any
) -> Program:
    """`program` with `changes` and one more entry in its history."""
    entry = PassRecord(rewrite, summary, notes, fired)
    return program.with_(history=(*program.history, entry), origin=program.origin or program, **changes)


def scopes(program: Program) -> tuple[Scope, ...]:
    """The scope of every pass that was applied."""
    return tuple(entry.rewrite.scope for entry in program.history)


def bound_ranks(program: Program) -> int | None:
    """The number of ranks that the function of `program` is bound to; None where it is the same on any number."""
    return program.mesh["tp"] if "per_rank" in scopes(program) else None


def single_device(program: Program) -> Program:
    """What the adapted checkpoint computes: the program with its passes of scope "model" alone, on one device.

    A program that is bound to its ranks stays sharded: its lanes are what has to be computed. Passes of scope "runtime"
    that only schedule communication are left out there too.
    """
    bound = bound_ranks(program) is not None
    single = (program.origin or program).with_(mesh={"tp": program.mesh["tp"]} if bound else {})
    for entry in program.history:
        rewrite = entry.rewrite
        if rewrite.scope != "runtime" or (bound and rewrite.name in SHARDING):
            single = rewrite.apply(single)
    return single


# what lanes are made of: passes of scope "runtime" that say which rank computes what
SHARDING = ("tensor_parallel", "merge_reductions")
