"""Recipes: what ships is right, faults are told all at once with their lines, and no file can make code run."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from repository import ROOT
from subprocesses import run_code

from rewriter.common.errors import RewriterError
from rewriter.common.yaml_documents import MAX_BYTES, read
from rewriter.passes.selection import Selection, resolve
from rewriter.recipes import PassSpec, Recipe
from rewriter.recipes.catalogue import entries, library

MINIMAL = """\
name: mine
summary: A recipe of my own.
paper: none
passes:
  - pass: rewire
    layers: upper-half
"""


@dataclasses.dataclass(frozen=True)
class Rewire:
    name: ClassVar[str] = "rewire"
    effect: ClassVar[str] = "approximating"
    layers: Selection = "all"
    strength: float = 1.0


@dataclasses.dataclass(frozen=True)
class Split:
    name: ClassVar[str] = "split"
    effect: ClassVar[str] = "exact"
    parts: int

    def __post_init__(self) -> None:
        if self.parts < 2:
            raise ValueError(f"parts: {self.parts} splits nothing. Use 2 or more.")


@pytest.fixture
def two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes `rewire` and `split` in place of the project's, whose options may grow."""
    monkeypatch.setattr("rewriter.passes.available", lambda: {"rewire": Rewire, "split": Split})


def refusal(text: str) -> str:
    with pytest.raises(RewriterError) as caught:
        Recipe.parse(text, source="mine.yaml").build()
    return str(caught.value)


# What ships


def test_the_library_holds_the_recipes_that_the_page_compares() -> None:
    page = (ROOT / "docs/reference/recipes.md").read_text()
    named = set(re.findall(r"^\| `([a-z][a-z0-9-]*)` \|", page, re.MULTILINE))
    assert set(library()) == named


@pytest.mark.parametrize("name", sorted(library()))
def test_a_shipped_recipe_builds_the_passes_it_lists(name: str) -> None:
    recipe = Recipe.load(name)
    assert recipe.name == name
    built = recipe.build()
    assert [instance.name for instance in built] == [spec.pass_name for spec in recipe.passes]
    for instance, spec in zip(built, recipe.passes, strict=True):
        for option, value in spec.options.items():
            assert getattr(instance, option) == value


@pytest.mark.parametrize(
    ("name", "layers"), [("ladder", "all"), ("ladder-upper-half", "upper-half"), ("ladder-last-20", "last:20")]
)
def test_ladder_recipes_rewire_the_layers_of_their_name(name: str, layers: str) -> None:
    [ladder] = [spec for spec in Recipe.load(name).passes if spec.pass_name == "ladder"]
    assert ladder.options == {"layers": layers}
    assert not ladder.optional


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("desync-2x", {"layers": "all", "n": 2, "resync": "mean"}),
        ("desync-4x", {"layers": "all", "n": 4, "resync": "mean"}),
        ("desync-2x-sum", {"layers": "all", "n": 2, "resync": "sum"}),
        ("desync-4x-sum", {"layers": "all", "n": 4, "resync": "sum"}),
        ("ladder-own-partial", {"layers": "all", "variant": "own_partial"}),
        ("parallel", {"layers": "all", "norm": "attention"}),
        ("drop-sync", {"drop": 0.5}),
    ],
)
def test_other_residual_recipes_do_what_their_name_says(name: str, options: dict[str, Any]) -> None:
    rewrites = [
        s for s in Recipe.load(name).passes if s.pass_name in ("desync", "ladder", "parallel_block", "drop_sync")
    ]
    assert [s.options for s in rewrites] == [options]
    assert not rewrites[0].optional


def test_the_mixed_recipe_leaves_the_lower_half_alone_and_no_gap_above() -> None:
    ladder, desync = [s for s in Recipe.load("ladder-then-desync").passes if "layers" in s.options]
    for depth in (4, 6, 7, 32, 61, 80):
        first, second = resolve(ladder.options["layers"], depth), resolve(desync.options["layers"], depth)
        assert (*first, *second) == tuple(range(depth // 2, depth))


def test_options_that_were_measured_are_set_as_they_are() -> None:
    recipe = Recipe.load("drop-sync")
    measured = recipe.with_options(2, {"sensitivity": [0.1, None], "measured_on": "text: no YAML"})
    [_, _, drop, *_] = measured.build()
    assert drop.sensitivity == (0.1, None)
    assert drop.measured_on == "text: no YAML"
    assert drop.drop == 0.5
    assert Recipe.parse(measured.to_yaml()).to_dict() == measured.to_dict()
    assert recipe.build()[2].request is not None, "the recipe itself is untouched"


def test_partial_ladders_suggest_the_adaptation_of_the_paper() -> None:
    adapt = Recipe.load("ladder-upper-half").adapt
    assert adapt is not None
    assert (adapt.optimizer, adapt.learning_rate, adapt.warmup_steps) == ("adamw", 5e-6, 200)
    assert (adapt.schedule, adapt.batch_size, adapt.epochs, adapt.data.tokens) == ("cosine", 32, 2, 3e9)


def test_listing_reads_what_loading_reads() -> None:
    for entry in entries():
        recipe = Recipe.load(entry.name)
        assert entry.summary == recipe.summary
        assert entry.passes == tuple(spec.pass_name for spec in recipe.passes)


def test_listing_imports_neither_torch_nor_pydantic() -> None:
    program = (
        "import sys; from rewriter.recipes.catalogue import entries; entries();"
        "print(sorted({'torch', 'transformers', 'pydantic'} & set(sys.modules)))"
    )
    assert run_code(program).stdout.strip() == "[]"


def test_loading_imports_no_torch() -> None:
    program = "import sys; import rewriter as rw; rw.Recipe.load('ladder'); print('torch' in sys.modules)"
    assert run_code(program).stdout.strip() == "False"


# Loading and overriding


@pytest.mark.usefixtures("two_passes")
def test_a_file_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    recipe = Recipe.load(path)
    assert recipe.passes[0] == PassSpec.model_validate({"pass": "rewire", "layers": "upper-half"})
    assert recipe.build() == [Rewire(layers="upper-half")]


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(RewriterError, match="Did you mean 'ladder-upper-half'"):
        Recipe.load("ladder-uper-half")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RewriterError, match=r"absent\.yaml: no such file"):
        Recipe.load(tmp_path / "absent.yaml")


@pytest.mark.usefixtures("two_passes")
@pytest.mark.parametrize(
    ("override", "built"),
    [
        ({"rewire.layers": "last:20"}, Rewire(layers="last:20")),
        ({"rewire.layers": "[1, 5, 9]"}, Rewire(layers=[1, 5, 9])),
        ({"rewire.layers": [1, 5, 9]}, Rewire(layers=[1, 5, 9])),
        ({"rewire.layers": "12"}, Rewire(layers=12)),
        ({"rewire.strength": "1e-3"}, Rewire(layers="upper-half", strength=0.001)),
        ({"rewire.strength": "2"}, Rewire(layers="upper-half", strength=2.0)),
    ],
)
def test_an_override_replaces_one_option(override: dict[str, Any], built: Rewire) -> None:
    recipe = Recipe.parse(MINIMAL)
    assert recipe.with_overrides(override).build() == [built]
    assert recipe.build() == [Rewire(layers="upper-half")], "the recipe itself is untouched"


@pytest.mark.usefixtures("two_passes")
def test_an_override_can_make_a_pass_optional() -> None:
    assert Recipe.parse(MINIMAL).with_overrides({"rewire.optional": "true"}).passes[0].optional is True
    with pytest.raises(RewriterError, match=r"--set rewire\.optional: .*'perhaps'"):
        Recipe.parse(MINIMAL).with_overrides({"rewire.optional": "perhaps"})


@pytest.mark.usefixtures("two_passes")
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ({"rewir.layers": "all"}, ["--set rewir.layers", "no pass 'rewir'", "Did you mean 'rewire'?"]),
        ({"rewire.pass": "split"}, ["--set rewire.pass", "PASS.OPTION=VALUE"]),
        ({"layers": "all"}, ["--set layers", "PASS.OPTION=VALUE"]),
        ({"rewire.layer": "all"}, ["--set rewire.layer=all", "Did you mean 'layers'?", "layers, strength"]),
        ({"rewire.strength": "much"}, ["--set rewire.strength=much", "expected float", "'much'"]),
        ({"rewire.layers": "[1, 5"}, ["--set rewire.layers=[1, 5", "not YAML"]),
        ({"rewire.layers": "*x"}, ["--set rewire.layers=*x", "alias"]),
        ({"rewire.layers": "!!python/name:os.system"}, ["tag !!python/name:os.system"]),
        ({"rewire.layers": "uper-half"}, ["--set rewire.layers=uper-half", "Did you mean upper-half?"]),
        ({"rewire.layers": "{a: 1}"}, ["--set rewire.layers={a: 1}", "no selection of layers"]),
    ],
)
def test_a_wrong_override_is_told_as_it_was_written(override: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(RewriterError) as caught:
        Recipe.parse(MINIMAL).with_overrides(override).build()
    for part in parts:
        assert part in str(caught.value)


def test_an_override_of_a_pass_that_occurs_twice_is_ambiguous() -> None:
    twice = Recipe.parse(MINIMAL + "  - pass: rewire\n    layers: first:1\n")
    with pytest.raises(RewriterError, match="has 2 rewire passes"):
        twice.with_overrides({"rewire.layers": "all"})


@pytest.mark.parametrize("name", sorted(library()))
def test_a_recipe_written_out_reads_back_the_same(name: str) -> None:
    recipe = Recipe.load(name)
    assert Recipe.parse(recipe.to_yaml()).to_dict() == recipe.to_dict()


def test_a_recipe_written_out_holds_its_overrides() -> None:
    recipe = Recipe.load("ladder").with_overrides({"ladder.layers": "[1, 5]"})
    assert Recipe.parse(recipe.to_yaml()).to_dict() == recipe.to_dict()
    assert {"pass": "ladder", "layers": [1, 5]} in recipe.to_dict()["passes"]


def test_a_notebook_shows_the_passes_with_their_options() -> None:
    shown = Recipe.load("ladder").with_overrides({"ladder.layers": "last:2"})._repr_html_()
    assert "<td><b>ladder</b></td><td>layers: last:2</td>" in shown


# Faults


@pytest.mark.usefixtures("two_passes")
def test_every_fault_of_a_file_is_told_at_once_with_its_line() -> None:
    text = """\
name: Mine!
sumary: A recipe with many faults.
paper: none
passes:
  - pass: rewire
    layer: all
  - pass: rewyre
  - pass: split
    parts: many
  - pas: split
adapt:
  optimizer: adamw
  learning_rate: -1
  warmup_steps: 0
  schedule: cosine
  batch_size: 0
  epochs: 1
  data: {dataset: any}
  sheduler: cosine
"""
    message = refusal(text)
    lines = message.splitlines()
    assert lines[0] == "recipe mine.yaml has 10 faults:"
    told = [line.strip().split(": ", 1) for line in lines[1:]]
    assert [place for place, _ in told] == [f"line {number}" for number in (1, 1, 2, 6, 7, 9, 10, 13, 16, 19)]
    for expected in (
        "name: 'Mine!' is not made of small letters",
        "summary is missing",
        "unknown key sumary. Did you mean 'summary'?",
        "unknown option 'layer'. Did you mean 'layers'?",
        "unknown pass 'rewyre'. Did you mean 'rewire'?",
        "split.parts: expected int, not 'many'",
        "passes[3].pass is missing. Is it meant by 'pas'?",
        "adapt.learning_rate: Input should be greater than 0, not -1",
        "adapt.batch_size",
        "unknown key adapt.sheduler. Did you mean 'schedule'?",
    ):
        assert expected in message


@pytest.mark.usefixtures("two_passes")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL.replace("upper-half", "9-3"), "recipe mine.yaml, line 6: rewire.layers: 9-3 runs backwards."),
        (MINIMAL.replace("upper-half", "yes"), "recipe mine.yaml, line 6: rewire.layers: 'yes' is no selection"),
        (MINIMAL.replace("upper-half", "true"), "recipe mine.yaml, line 6: rewire.layers: True is no selection"),
        (MINIMAL + "  - pass: split\n    parts: 1\n", "recipe mine.yaml, line 7: split: parts: 1 splits nothing."),
        (MINIMAL + "  - pass: split\n", "recipe mine.yaml, line 7: split: option parts (int) is missing."),
        (MINIMAL + "  - rewire\n", "line 7: passes[1] must be a mapping: write `- pass: NAME`, not 'rewire'."),
        (MINIMAL + "name: again\n", "line 7: key 'name' again; it stands on line 1 already."),
        (MINIMAL.replace("rewire", "[rewire]"), "line 5: passes[0].pass: Input should be a valid string"),
        ("", "line 1: a recipe is a mapping"),
        ("- 1\n", "line 1: a recipe is a mapping"),
        ("name: mine\n---\nname: other\n", "line 2: a second document"),
        ("name: [1, 2\nsummary: x\n", "line 2: not YAML"),
        ("name: mine\n\tsummary: x\n", "line 2: not YAML"),
        ("name: \x00\n", "not YAML"),
        (MINIMAL.replace("- pass: rewire\n    layers: upper-half", "[]"), "passes"),
    ],
)
def test_a_fault_is_told_with_its_line(text: str, message: str) -> None:
    assert message in refusal(text)


# Hostile files


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("!!python/object/apply:os.system ['touch pwned']", "tag !!python/object/apply:os.system"),
        ("!!python/name:os.system", "tag !!python/name:os.system"),
        ("!include /etc/passwd", "tag !include"),
        ("!!binary aGk=", "tag !!binary"),
        ("&a [x]", "anchor &a"),
        ("*a", "alias *a"),
        ("[" * 60 + "]" * 60, "nested deeper"),
        ("{a: " * 60 + "1" + "}" * 60, "nested deeper"),
        ("{[1, 2]: 3}", "a key must be a word"),
    ],
)
def test_a_recipe_constructs_nothing(
    value: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_passes: None
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(MINIMAL.replace("upper-half", value))
    assert "line 6: " in message
    assert part in message
    assert list(tmp_path.iterdir()) == []


def test_a_bomb_of_aliases_is_refused_before_it_grows() -> None:
    levels = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))
    document = read(f"a0: &a0 [x, x]\n{levels}\n")
    assert all("alias" in problem.message or "anchor" in problem.message for problem in document.problems)
    assert len(document.problems) == 30 + 29 * 9


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading all of it would not end
    with pytest.raises(RewriterError, match=f"larger than {MAX_BYTES // 1024} KiB"):
        Recipe.load(path)


@pytest.mark.parametrize("path", ["/dev/zero", "."])
def test_what_is_no_regular_file_is_not_read(path: str) -> None:
    with pytest.raises(RewriterError, match="is no regular file"):
        Recipe.load(Path(path))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(RewriterError, match="not UTF-8 text"):
        Recipe.load(path)


@given(st.text(alphabet=st.sampled_from("name: &*!{}[]-|>'\"\n #,%@?\t1e.~"), max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    document = read(text)
    if not document.problems:
        assert isinstance(document.data, str | int | float | bool | list | dict | None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("1e-5", 1e-5),
        ("5.0e-6", 5e-6),
        ("4:30", "4:30"),
        ("12-31", "12-31"),
        ("'12'", "12"),
        ("0x10", "0x10"),
        ("~", None),
        ("true", True),
        ("-3", -3),
        ("1_000", "1_000"),
        ("2026-11-21", "2026-11-21"),
    ],
)
def test_scalars_mean_what_yaml_1_2_says(text: str, value: object) -> None:
    data = read(text).data
    assert data == value
    assert type(data) is type(value)


@pytest.mark.parametrize(("option", "message"), [
    ("exact_head: true", "ladder.exact_head: expected int, not True"),
    ("phase: answer", "ladder.phase: expected all or prompt, not 'answer'"),
])  # fmt: skip
def test_what_is_expected_is_said_in_a_recipes_words(option: str, message: str) -> None:
    text = f"name: mine\nsummary: mine.\npaper: '-'\npasses:\n  - pass: ladder\n    {option}\n"
    assert message in refusal(text)
