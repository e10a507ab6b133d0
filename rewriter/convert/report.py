"""Report of a conversion: on the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from html import escape
from typing import Any

from rewriter.common.numbers import json_text
from rewriter.ir import Program
from rewriter.ir.layer_drawing import program_drawing
from rewriter.ir.phases import prompt_phase
from rewriter.output.manifest import Verified
from rewriter.passes.sequence.sequence_plans import bytes_per_token
from rewriter.recipes.verdicts import of_conversion


@dataclass
class ConversionReport:
    """Results of a conversion, or with `dry_run` what it would do. `to_json()` is what `--json` prints, with the
    verdict on the output and the next command as `verdict` and `next`.

    `program` is what was written, for the drawing in notebooks; JSON leaves it out.
    """

    model: str
    recipe: str
    out: str
    mesh: Mapping[str, int]
    passes: list[dict[str, Any]]
    verification: dict[str, Any] = field(default_factory=dict)
    communication: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False
    program: Program | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "program": None}  # what holds code of the traced model cannot be sent to other ranks

    def to_json(self) -> str:
        """The report as JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "program"}
        return json_text(values | of_conversion(values)._asdict(), indent=2)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><b>{escape(p['name'])}</b></td><td>{escape(p['kind'])}</td><td>{escape(p['summary'])}</td></tr>"
            for p in self.passes
        )
        facts = "".join(
            f"<tr><td>{escape(str(name))}</td><td>{escape(f'{value:.3g}' if isinstance(value, float) else str(value))}"
            "</td></tr>"
            for name, value in {**self.verification, **self.communication}.items()
        )
        return (
            f"<div><b>{escape(self.model)}</b> → <b>{escape(self.recipe)}</b>, {escape(self.out)}</div>"
            f"{'' if self.program is None else program_drawing(self.program)}<table>{rows}</table>"
            f"<details><summary>verification and communication</summary><table>{facts}</table></details>"
        )


def communication(program: Program) -> dict[str, Any]:
    """Collectives of a forward pass as `rewrite inspect` counts them; empty where nothing is communicated.

    Where tokens are sharded also what attention sends, forward and backward: bytes of a rank for each token that it
    holds, in all layers together.
    """
    from rewriter.ir.communication import by_place, collectives, quantized, summary

    sent = collectives(program)
    if not sent:
        return {}
    total, places, travel = summary(sent), by_place(sent), quantized(sent)
    blocks = places.get("block")
    phase = prompt_phase(program)
    return {
        **({} if phase is None else {"computing": str(phase)}),
        "block reductions": blocks.collectives if blocks else 0,
        "hidden behind computation": blocks.hidden if blocks else 0,
        "other collectives": total.collectives - (blocks.collectives if blocks else 0),
        "bytes per token": total.bytes_per_token,
        **({} if travel is None else {"quantized reductions": asdict(travel)}),
        **{
            f"attention {when}": {"bytes per token of a rank": sum(sizes.values()), **sizes}
            for when, sizes in bytes_per_token(program).items()
        },
    }


def unused_note(program: Program, dropped: bool) -> list[str]:
    """A sentence on the checkpoint's tensors that the model does not use, if there are any."""
    names = sorted(program.source.unused)
    if not names:
        return []
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    kept = "left out (--drop-unused)" if dropped else "kept on disk; --drop-unused leaves them out"
    return [f"tensors that {program.source.architecture} does not use, as transformers says: {shown}. They are {kept}"]


def verification_table(verified: Verified) -> dict[str, Any]:
    """Names and values for the terminal and for `--json`."""
    table: dict[str, Any] = {check.name: check.error for check in verified.checks}
    if verified.drift is not None:
        table["drift"] = verified.drift.model_dump()
    for index, note in enumerate(verified.notes, start=1):
        table[f"note {index}" if len(verified.notes) > 1 else "note"] = note
    return table
