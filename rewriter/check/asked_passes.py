"""The passes that a recipe asks for, which a program is verified as, and not what they recorded of themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, zip_longest
from typing import Any

from rewriter.common.errors import VerificationError
from rewriter.ir import PassRecord, Program
from rewriter.ir.marks import marks
from rewriter.passes.selection import resolve, spans

_OPEN = (None, "auto")  # the recipe leaves it to the pass, which may record its choice
_FAULT = "It is a fault of the pass: mend its `apply`, or leave it out of the recipe"


def asked_passes(program: Program) -> list[Any]:
    """The passes that the recipe of `program` asks for, in order; of a program made by hand those that it records.

    Raises VerificationError for a pass that recorded other options than the recipe gives it, where two selections of
    the same layers are the same, and where a layer is wired otherwise that no pass was asked to rewire.
    """
    recorded = [entry.rewrite for entry in program.history]
    asked = recorded if program.asked is None else list(program.asked)
    for wanted, entry in zip_longest(asked, program.history):
        _check_record(wanted, entry, program.source.num_layers)
    _check_wiring(program, asked)
    return asked


def _check_record(wanted: Any, entry: PassRecord | None, count: int) -> None:
    if wanted is None or entry is None or wanted.name != entry.name:
        names = [f"pass {known.name}" if known is not None else "no further pass" for known in (wanted, entry)]
        raise VerificationError(f"the recipe asks for {names[0]}, but {names[1]} is recorded in its place. {_FAULT}")
    for option, value in entry.options.items():
        given = getattr(wanted, option, value)
        if given in _OPEN or given == value:
            continue
        if option != "layers":
            raise VerificationError(
                f"{wanted.name}: asked for {option}={given!r}, but {option}={value!r} is recorded. {_FAULT}"
            )
        if (layers := resolve(given, count)) != (done := resolve(value, count)):
            raise VerificationError(_other_layers([wanted], layers, done))


def _check_wiring(program: Program, asked: Sequence[Any]) -> None:
    """Compare the layers whose blocks have another mode in the program with those that passes of it select."""
    passes = [p for p in asked if p.effect == "approximating" and p.scope != "runtime"]
    selections = [p.kinds_of_layers(program.source.num_layers) for p in passes]
    layers: set[int] = set().union(*chain.from_iterable(selections))
    done = {layer for n in program.graph.nodes if marks(n).mode is not None and (layer := marks(n).layer) is not None}
    # Of one that selects no layers, any may be its own; one that leaves a layer out is found by what it computes.
    if all(selections) and not done <= layers:
        raise VerificationError(_other_layers(passes or asked, layers, done))


def _other_layers(passes: Sequence[Any], layers: Collection[int], done: Collection[int]) -> str:
    names = ", ".join(p.name for p in passes)
    wanted = f"layers {spans(sorted(layers))}" if layers else "no layer"
    return f"{names}: asked for {wanted}, but layers {spans(sorted(done))} were rewritten. {_FAULT}"
