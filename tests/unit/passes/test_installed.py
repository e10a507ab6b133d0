"""Passes of installed packages: found by name, imported on demand, and refused with their package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from page_files import install, page_files
from repository import ROOT

from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.convert.rewritten_source import applied_recipe, check_packages
from rewriter.output.manifest import Manifest
from rewriter.passes import available, find, installed, known
from rewriter.recipes import Recipe

FILES = page_files(ROOT / "docs/howto/add-a-pass.md")
RECIPE = FILES["damp.yaml"]
WRONG = """
from dataclasses import dataclass
from rewriter.passes.base import Pass
word = "damp"
class Unfinished(Pass):
    name, effect = "unfinished", "exact"
@dataclass(frozen=True)
class Misspelt(Pass):
    name, effect = "misspelt", "aproximating"
    def apply(self, program): return program
@dataclass(frozen=True)
class Other(Pass):
    name, effect = "another", "exact"
    def apply(self, program): return program
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sys.path with `rewriter-damp`, as the page prints it."""
    place = tmp_path / "site"
    install("rewriter-damp", "0.1", "damp = rewriter_damp:Damp", place)
    (place / "rewriter_damp.py").write_text(FILES["rewriter_damp.py"], encoding="utf-8")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.delitem(sys.modules, "rewriter_damp", raising=False)
    yield place
    sys.modules.pop("rewriter_damp", None)


def recipe(name: str) -> Recipe:
    return Recipe.parse(RECIPE.replace("damp, factor: 0.5, layers: upper-half", name))


def test_a_recipe_finds_it_and_no_one_else_imports_it(site: Path) -> None:
    assert {"damp", "ladder"} < set(known())
    assert "damp" not in available()
    Recipe.load("ladder").build()
    assert "rewriter_damp" not in sys.modules
    _, damp = Recipe.parse(RECIPE).with_overrides({"damp.factor": "0.25"}).build()
    assert (type(damp).__module__, damp.factor, damp.layers) == ("rewriter_damp", 0.25, "upper-half")


def test_faults_of_its_options_have_their_lines(site: Path) -> None:
    with pytest.raises(RewriterError, match=r"line 6: damp.factor: expected float, not 'half'"):
        Recipe.parse(RECIPE.replace("0.5", "half")).build()
    with pytest.raises(RewriterError, match=r"line 6: damp: factor: 2.0; expected a number from 0 to 1"):
        Recipe.parse(RECIPE.replace("0.5", "2.0")).build()


def test_a_name_that_is_nearly_right_is_told(site: Path) -> None:
    with pytest.raises(RewriterError, match=r"unknown pass 'dampp'. Did you mean 'damp'\?"):
        recipe("dampp").build()


def test_without_its_package_it_is_unknown() -> None:
    with pytest.raises(RewriterError, match="unknown pass 'damp'"):
        Recipe.parse(RECIPE).build()
    assert installed.requirement("damp") is None


@pytest.mark.parametrize(
    ("point", "why"),
    [
        ("lost = rewriter_dmp:Damp", "cannot be imported (ModuleNotFoundError: No module named 'rewriter_dmp')"),
        ("misnamed = rewriter_damp:Dmap", "cannot be imported (AttributeError"),
        ("raising = raises:Pass", "cannot be imported (ZeroDivisionError: division by zero)"),
        ("word = wrong:word", "is 'damp', not a subclass of rewriter.passes.base.Pass"),
        ("unfinished = wrong:Unfinished", "has no `apply`"),
        ("misspelt = wrong:Misspelt", "effect = 'aproximating'"),
        ("other = wrong:Other", "has name = 'another'. Give the class and its entry point the same name"),
    ],
)
def test_a_broken_one_stops_only_its_recipes(
    point: str, why: str, site: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    install("broken-passes", "2.0", point, site)
    (site / "wrong.py").write_text(WRONG, encoding="utf-8")
    (site / "raises.py").write_text("1 / 0\n", encoding="utf-8")
    name = point.split()[0]
    assert name in known()
    Recipe.parse(RECIPE).build()
    file = tmp_path / "mine.yaml"
    file.write_text(recipe(name).to_yaml(), encoding="utf-8")
    assert main(["recipes", "validate", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"pass {name!r}: {point.split()[-1]} of the package broken-passes==2.0" in said
    assert why in said
    for module in ("wrong", "raises"):
        sys.modules.pop(module, None)


def test_two_packages_of_one_name_are_refused(site: Path) -> None:
    install("another-damp", "3.1", "damp = elsewhere:Damp", site)
    with pytest.raises(RewriterError, match=r"'damp': another-damp==3.1 and rewriter-damp==0.1 register it"):
        Recipe.parse(RECIPE).build()
    Recipe.load("ladder").build()


def test_a_name_of_ours_is_refused(site: Path) -> None:
    install("rival", "1.0", "ladder = elsewhere:Ladder", site)
    with pytest.raises(RewriterError, match=r"'ladder': rewriter has a pass of this name, and rival==1.0 registers"):
        Recipe.load("ladder").build()
    assert find("desync") is available()["desync"]


def test_what_is_handed_over_comes_first(site: Path) -> None:
    install("another-damp", "3.1", "damp = elsewhere:Damp", site)
    import rewriter_damp  # type: ignore[import-not-found]

    _, damp = Recipe.parse(RECIPE).knowing(rewriter_damp.Damp).build()
    assert type(damp) is rewriter_damp.Damp


def test_validate_names_the_package(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "damp.yaml").write_text(RECIPE, encoding="utf-8")
    assert main(["recipes", "validate", str(tmp_path / "damp.yaml")]) == 0
    assert "tensor_parallel → damp (rewriter-damp==0.1)" in capsys.readouterr().out


def test_an_output_says_which_package_is_missing() -> None:
    written = json.loads((ROOT / "tests/earlier_outputs/llama-ladder-tp2/rewrite.json").read_text(encoding="utf-8"))
    assert applied_recipe(Manifest.model_validate(written))
    manifest = Manifest.model_validate({**written, "packages": {"damp": "rewriter-damp==0.1"}})
    with pytest.raises(RewriterError) as caught:
        applied_recipe(manifest)
    assert str(caught.value) in (ROOT / "docs/howto/add-a-pass.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("rewriter-damp==0.1", None),
        ("rewriter-damp==0.2", r"of rewriter-damp==0.2, and rewriter-damp==0.1 is installed. Install that version"),
        ("another==0.1", r"another==0.1, which is not installed; rewriter-damp==0.1 registers a pass of this name"),
    ],
)
def test_an_output_wants_the_version_that_made_it(site: Path, package: str, said: str | None) -> None:
    made = Manifest.model_construct(packages={"damp": package})
    if said is None:
        check_packages(made)
        return
    with pytest.raises(RewriterError, match=said):
        check_packages(made)
    if package.startswith("rewriter-damp"):
        check_packages(made, of_any_version=True)  # as `rewrite refresh`, which compares what the code computes


@pytest.mark.parametrize("written", ["--index-url=x", "damp; rm -rf x==1", "damp", "a b==1"])
def test_a_manifest_names_packages_and_nothing_else(written: str) -> None:
    data = json.loads((ROOT / "tests/earlier_outputs/llama-ladder-tp2/rewrite.json").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="packages"):
        Manifest.model_validate({**data, "packages": {"damp": written}})
