"""What a pass is: a frozen dataclass whose fields are its options, and `apply(program) -> Program`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Protocol

from rewriter.program import PassRecord, Program

Kind = Literal["exact", "approximating", "timing only"]
Scope = Literal["model", "runtime"]


class Pass(Protocol):
    """A rewrite of a Program; valid IR in, valid IR out, the input untouched.

    exact: the same function up to rounding. approximating: another function, whose drift is reported. timing only:
    can be run and emulated, never emitted as a checkpoint. Scope "model": it changes what the model computes and
    shows in the adapted checkpoint; "runtime": it changes how ranks compute it and shows in the runtime module only.
    `apply` raises RewriterError with the reason when it matches nothing.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    scope: ClassVar[Scope]

    def apply(self, program: Program) -> Program: ...


def record(
    program: Program, rewrite: Any, summary: str, notes: tuple[str, ...] = (), fired: bool = True, **changes: Any
) -> Program:
    """`program` with `changes` and one more entry in its history."""
    options = {f.name: getattr(rewrite, f.name) for f in dataclasses.fields(rewrite)}
    entry = PassRecord(rewrite.name, rewrite.kind, options, summary, notes, fired)
    return program.with_(history=(*program.history, entry), origin=program.origin or program, **changes)


def single_device(program: Program) -> Program:
    """The program with only its model-level passes: what one device computes, and what the adapted checkpoint holds."""
    from rewriter.passes import available

    rewrites = available()
    single = (program.origin or program).with_(mesh={})
    for entry in program.history:
        if rewrites[entry.name].scope == "model":
            single = rewrites[entry.name](**entry.options).apply(single)
    return single
