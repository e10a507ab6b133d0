"""One entry of a recipe's pass list, and how it becomes a pass: its options are the typed fields of the dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from rewriter import passes
from rewriter.common.errors import RewriterError, did_you_mean
from rewriter.common.yaml_documents import Problem
from rewriter.passes import selection


class Strict(BaseModel):
    """A frozen model that refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PassSpec(Strict):
    """One entry of the pass list. In YAML the options stand next to `pass`: `{pass: ladder, layers: upper-half}`."""

    pass_name: str = Field(alias="pass", min_length=1)
    optional: bool = False
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        own = {key: value[key] for key in ("pass", "optional") if key in value}
        return {**own, "options": {key: value[key] for key in value if key not in own}}

    def to_dict(self) -> dict[str, Any]:
        """As it stands in YAML."""
        return {"pass": self.pass_name, **self.options, **({"optional": True} if self.optional else {})}


Where = Callable[[int, str | None], Problem]
"""Line and name of an option (or of the pass itself, where the option is None) of the pass at an index."""


def instances(specs: Sequence[PassSpec], own: Mapping[str, type], where: Where) -> tuple[list[Any], list[Problem]]:
    """The passes that `specs` name, and every fault found on the way. The list is complete if there is no fault.

    `own` are passes that are neither shipped nor of an installed package; of a name, they come first.
    """
    built: list[Any] = []
    problems: list[Problem] = []
    for index, spec in enumerate(specs):
        try:
            pass_type = own.get(spec.pass_name) or passes.find(spec.pass_name)
        except RewriterError as error:
            problems.append(Problem(where(index, None).line, str(error)))
            continue
        if pass_type is None:
            known = dict.fromkeys((*passes.known(), *own))
            unknown = f"unknown pass {spec.pass_name!r}. {did_you_mean(spec.pass_name, known)}"
            problems.append(Problem(where(index, None).line, unknown))
            continue
        options, faults = _options(pass_type, spec, index, where)
        problems += faults
        if faults:
            continue
        try:
            built.append(pass_type(**options))
        except (RewriterError, ValueError) as error:
            problems.append(_at(where(index, None), str(error)))
    return built, problems


def _options(pass_type: type, spec: PassSpec, index: int, where: Where) -> tuple[dict[str, Any], list[Problem]]:
    fields = {field.name: field for field in dataclasses.fields(pass_type) if field.init}
    hints = get_type_hints(pass_type, include_extras=True)
    options: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in spec.options.items():
        place = where(index, name)
        if name not in fields:
            known = did_you_mean(name, fields, what=f"options of {spec.pass_name}")
            problems.append(_at(place, f"unknown option {name!r}. {known}"))
            continue
        try:
            if name == "layers":
                selection.check(value)
            if isinstance(value, bool) and hints[name] is int:
                raise TypeError
            options[name] = TypeAdapter(hints[name]).validate_python(value)
        except (TypeError, ValidationError):
            problems.append(_at(place, f"expected {_readable(hints[name])}, not {value!r:.60}."))
        except RewriterError as error:
            problems.append(_at(place, str(error).removeprefix("layers: ")))
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and name not in spec.options:
            problems.append(_at(where(index, None), f"option {name} ({_readable(hints[name])}) is missing."))
    return options, problems


def _at(place: Problem, fault: str) -> Problem:
    return Problem(place.line, f"{place.message}: {fault}")


def _readable(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
