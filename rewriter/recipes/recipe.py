"""Contents of a recipe, and the `Recipe` that the API and the CLI pass around."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails

from rewriter.common.errors import RewriterError, did_you_mean, nearest, shortened
from rewriter.common.yaml_documents import Document, Location, Problem, read, read_file
from rewriter.recipes import catalogue
from rewriter.recipes.pass_options import PassSpec, Strict, instances

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]


class AdaptationData(Strict):
    """The data of the suggested fine-tuning."""

    dataset: Text
    tokens: Positive | None = None


class Adaptation(Strict):
    """The fine-tuning that the paper used, or that we suggest, after an approximating recipe."""

    optimizer: Literal["adamw"]
    learning_rate: Positive
    warmup_steps: Annotated[int, Field(ge=0)]
    schedule: Literal["constant", "cosine", "linear"]
    batch_size: Count
    epochs: Positive
    data: AdaptationData


class MeasuredRise(Strict):
    """Share of the original's `loss` (nats per token) by which the recipe's is higher, with its standard error.

    `kl`: mean KL(original ‖ rewritten), nats per token. `seen`: the share on the words that stand there, where `rise`
    is what is expected over all that the model could have written.
    """

    loss: float
    rise: float
    error: float
    kl: float
    seen: float


class MeasuredRecipe(Strict):
    """Measurements and predictions of `rewrite search` for the recipe that it found; nothing is done with it.

    `speedup`: over plain tensor parallelism with the same sums. `end_to_end`: tokens per second over those of `over`,
    the best that an engine does with the model as it is. `calibration`: the rise in loss on the text by which it was
    chosen, `held_out`: on text that it was not.
    """

    model: str
    fabric: str
    tp: Count
    sp: Count = 1
    workload: str
    speedup: Positive
    over: str = ""
    end_to_end: Positive | None = None
    seconds_per_token: Positive
    text: str
    loss: float
    budget: Positive
    calibration: MeasuredRise
    held_out: MeasuredRise | None = None


class Recipe(Strict):
    """A named list of passes with their options.

    `Recipe.load("ladder")` reads a shipped recipe, `Recipe.load("mine.yaml")` a file. Every fault of a file is raised
    at once, as one RewriterError with line numbers. `kind` and `recommended` (the purpose that it is recommended for)
    are for the listing of `rewrite recipes`; nothing else reads them.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
    summary: Text
    paper: Text
    kind: catalogue.Kind | None = None
    recommended: Text | None = None
    passes: Annotated[tuple[PassSpec, ...], Field(min_length=1)]
    adapt: Adaptation | None = None
    measured: MeasuredRecipe | None = None

    _source: str = PrivateAttr("")
    _document: Document = PrivateAttr(default_factory=Document)
    _overrides: dict[str, Any] = PrivateAttr(default_factory=dict)
    _own_passes: dict[str, type[Any]] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Self:
        """A shipped recipe by name, a file ending in .yaml, or several of these joined by "+" (`fit-tp+ladder`): the
        passes of the last, after those of the others that it lacks. Does not import torch unless there are faults to
        list.

        Raises RewriterError: no such recipe (with the nearest name), or all faults of the file.
        """
        first, plus, others = os.fspath(name_or_path).partition("+")
        if plus and not os.path.exists(name_or_path):
            if not first or not others:
                raise RewriterError(f"recipe {os.fspath(name_or_path)!r}: name a recipe on either side of the +")
            return cls.load(first)._before(cls.load(others))
        path = catalogue.find(name_or_path)
        return cls.parse(read_file(path), source=os.fspath(name_or_path))

    def _before(self, other: Self) -> Self:
        """`other` after the passes of this recipe that it lacks."""
        names = {spec.pass_name for spec in other.passes}
        own = tuple(spec for spec in self.passes if spec.pass_name not in names)
        said = {"name": f"{self.name}-{other.name}"[:64], "summary": f"{self.summary} Then: {other.summary}"}
        return other.model_copy(update={**said, "passes": (*own, *other.passes)})

    @classmethod
    def parse(cls, text: str, source: str = "recipe") -> Self:
        """A recipe from YAML text; `source` names it in messages."""
        document = read(text)
        problems = list(document.problems)
        recipe: Self | None = None
        try:
            recipe = cls.model_validate(document.data)
        except ValidationError as error:
            if document.data is not None or not problems:
                problems += [_explained(document, detail) for detail in error.errors()]
        if problems or recipe is None:
            # The user will have to edit the file: say what its passes would refuse as well.
            problems += _problems_of_readable_passes(document)
            raise RewriterError(_report(source, problems))
        recipe._source, recipe._document = source, document
        return recipe

    def with_overrides(self, overrides: Mapping[str, Any]) -> Self:
        """A copy with options replaced: `{"ladder.layers": "last:20"}`. Strings are read as YAML scalars or lists.

        Raises RewriterError for a key that is not PASS.OPTION or names a pass that the recipe does not have. Whether
        the option exists and takes the value is found by `build`.
        """
        specs = list(self.passes)
        for key, value in overrides.items():
            index, option = self._target(key)
            entry = {**specs[index].to_dict(), option: _override_value(key, value)}
            try:
                specs[index] = PassSpec.model_validate(entry)
            except ValidationError as error:
                detail = error.errors()[0]
                raise RewriterError(f"--set {key}: {detail['msg']}, not {detail['input']!r:.60}.") from None
        return self._with_specs(specs, overrides)

    def with_options(self, index: int, options: Mapping[str, Any]) -> Self:
        """A copy in which the pass at `index` has `options`, as they are, added to those that it has."""
        spec = self.passes[index]
        changed = spec.model_copy(update={"options": {**spec.options, **options}})
        return self._with_specs([*self.passes[:index], changed, *self.passes[index + 1 :]], {})

    def knowing(self, *passes: type[Any]) -> Self:
        """A copy that also finds these subclasses of `rewriter.passes.base.Pass`, by their names.

        For a pass that no installed package registers. A file names it as it does any other pass; whoever reads the
        file has to hand the class in.
        """
        copy = self._with_specs(self.passes, {})
        copy._own_passes = {**self._own_passes, **{p.name: p for p in passes}}
        return copy

    def _with_specs(self, specs: Sequence[PassSpec], overrides: Mapping[str, Any]) -> Self:
        copy = self.model_copy(update={"passes": tuple(specs)})
        copy._overrides = {**self._overrides, **overrides}
        return copy

    def build(self) -> list[Any]:
        """The pass instances, in order. Imports the passes, and with them torch.

        Raises RewriterError with every unknown pass, unknown option and value of the wrong type, each with its line.
        """
        built, problems = instances(self.passes, self._own_passes, self._where)
        if problems:
            raise RewriterError(_report(self._source or self.name, problems))
        return built

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the order of the file, as the manifest keeps it: without `kind` and `recommended`."""
        data: dict[str, Any] = {"name": self.name, "summary": self.summary, "paper": self.paper}
        data["passes"] = [spec.to_dict() for spec in self.passes]
        if self.adapt is not None:
            data["adapt"] = self.adapt.model_dump(exclude_none=True)
        if self.measured is not None:
            data["measured"] = self.measured.model_dump(exclude_none=True)
        return data

    def _repr_html_(self) -> str:
        """The summary and the passes with their options, in a notebook."""
        rows = ""
        for spec in self.passes:
            options = ", ".join(f"{name}: {value}" for name, value in spec.to_dict().items() if name != "pass")
            rows += f"<tr><td><b>{escape(spec.pass_name)}</b></td><td>{escape(options)}</td></tr>"
        return f"<div><b>{escape(self.name)}</b>: {escape(self.summary)}</div><table>{rows}</table>"

    def to_yaml(self) -> str:
        """A recipe file of `to_dict`, overrides included: `Recipe.parse` reads it back."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100)

    def _target(self, key: str) -> tuple[int, str]:
        pass_name, dot, option = key.partition(".")
        if not dot or option in ("", "pass"):
            raise RewriterError(f"--set {key}: expected PASS.OPTION=VALUE, such as ladder.layers=last:20.")
        names = [spec.pass_name for spec in self.passes]
        if pass_name not in names:
            has = did_you_mean(pass_name, names, what="it has")
            raise RewriterError(f"--set {key}: recipe {self.name} has no pass {pass_name!r}. {has}")
        if names.count(pass_name) > 1:
            raise RewriterError(
                f"--set {key}: recipe {self.name} has {names.count(pass_name)} {pass_name} passes. Edit a copy."
            )
        return names.index(pass_name), option

    def _where(self, index: int, option: str | None) -> Problem:
        """The place where an option was written: the line of the file, or the override."""
        key = f"{self.passes[index].pass_name}.{option}"
        if key in self._overrides:
            return Problem(0, f"--set {key}={shortened(self._overrides[key])}")
        location: Location = ("passes", index) if option is None else ("passes", index, option)
        return Problem(
            self._document.line(location) if self._document.lines else 0, key if option else key.split(".")[0]
        )


_SECTIONS: dict[Location, type[BaseModel]] = {
    (): Recipe,
    ("adapt",): Adaptation,
    ("adapt", "data"): AdaptationData,
    ("measured",): MeasuredRecipe,
    ("measured", "calibration"): MeasuredRise,
    ("measured", "held_out"): MeasuredRise,
}


def _problems_of_readable_passes(document: Document) -> list[Problem]:
    """Faults of those entries of the pass list that could be read although the file has other faults."""
    entries = document.data.get("passes") if isinstance(document.data, dict) else None
    specs: list[PassSpec] = []
    places: list[int] = []
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        with suppress(ValidationError):
            specs.append(PassSpec.model_validate(entry))
            places.append(index)
    if not specs:
        return []

    def where(index: int, option: str | None) -> Problem:
        name = specs[index].pass_name
        location: Location = ("passes", places[index], *([option] if option else []))
        return Problem(document.line(location), f"{name}.{option}" if option else name)

    return instances(specs, {}, where)[1]


def _override_value(key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    document = read(value)
    if document.problems:
        raise RewriterError(f"--set {key}={shortened(value)}: {document.problems[0].message}")
    return document.data


# --- faults


def _report(source: str, problems: Iterable[Problem]) -> str:
    """One message for all faults of a recipe, in the order of its lines."""
    lines = [str(problem) for problem in sorted(set(problems))]
    if len(lines) == 1:
        return f"recipe {source}, {lines[0]}" if lines[0].startswith("line ") else f"recipe {source}: {lines[0]}"
    return "\n  ".join([f"recipe {source} has {len(lines)} faults:", *lines])


def _explained(document: Document, detail: ErrorDetails) -> Problem:
    """A pydantic error in the words of a recipe file."""
    location: Location = tuple(detail["loc"])
    line = document.line(location)
    if not location:
        return Problem(line, "a recipe is a mapping with name, summary, paper and passes.")
    place, name = location[:-1], str(location[-1])
    if detail["type"] == "extra_forbidden":
        known = list(_SECTIONS[place].model_fields) if place in _SECTIONS else []
        return Problem(line, f"unknown key {_path(location)}. {did_you_mean(name, known)}")
    if detail["type"] == "missing":
        written = _at(document.data, place)
        guess = nearest(name, written) if place and isinstance(written, dict) else None
        return Problem(line, f"{_path(location)} is missing." + (f" Is it meant by {guess!r}?" if guess else ""))
    if detail["type"] == "model_type":
        hint = ": write `- pass: NAME`" if place == ("passes",) else ""
        return Problem(line, f"{_path(location)} must be a mapping{hint}, not {detail['input']!r:.60}.")
    if location == ("name",) and detail["type"] == "string_pattern_mismatch":
        return Problem(line, f"name: {detail['input']!r:.80} is not made of small letters, digits and hyphens.")
    return Problem(line, f"{_path(location)}: {detail['msg']}, not {detail['input']!r:.60}.")


def _at(data: Any, location: Location) -> Any:
    for part in location:
        data = data[part]
    return data


def _path(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
