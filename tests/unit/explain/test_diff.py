"""`rewrite diff`: what a recipe changed, what two outputs differ in; on the terminal, as JSON, as a page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import bisect_faults as faults
import pytest
import torch
import zoo
from page_parser import Balance
from safetensors.torch import load_file, save_file

from rewriter import api
from rewriter.cli import main
from rewriter.convert.reopened import find_source, recorded_path
from rewriter.convert.report import ConversionReport
from rewriter.explain.diff.tensors import tensors_between
from rewriter.ir.layer_drawing import program_drawing
from rewriter.ir.layer_plan import grouped, layer_plans
from rewriter.output.manifest import read_manifest
from rewriter.tracing import trace
from rewriter.weights import Checkpoint

LAYERS = "model.layers"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source") / "small"
    zoo.save("llama", root)
    return root


@pytest.fixture(scope="module")
def written(source: Path) -> Path:
    out = source.parent / "out"
    api.convert(source, "ladder", out=out, tp=2, set={"ladder.layers": [2, 3]}, options=api.SaveOptions(verify="none"))
    return out


def test_an_output_beside_its_source(written: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The source is found by its name, which stands beside the output."""
    assert main(["diff", str(written), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert not data["same"]
    assert (data["before"], data["after"]) == ("small", "out")
    assert data["facts"]["of them overlapped with computation"][0] == "0"
    passes = {p["name"]: p for p in data["passes"]}
    assert list(passes) == ["tensor_parallel", "merge_reductions", "ladder", "fuse_projections", "overlap"]
    # two reductions a layer, the embedding's, and the gathered logits
    assert passes["tensor_parallel"]["operators"]["all_reduce"] == [0, 9]
    assert passes["tensor_parallel"]["reads"] == []
    assert passes["ladder"]["operators"] == {}
    reads = passes["ladder"]["reads"]
    assert [r.partition(":")[0] for r in reads] == [f"{LAYERS}.{n}.{b}" for n in (2, 3) for b in ("self_attn", "mlp")]
    assert reads[0] == f"{LAYERS}.2.self_attn: x4 → x3"
    assert any(line.startswith("+") and "post_attention_layernorm" in line for line in passes["ladder"]["ir"])
    layers = data["layers"]
    assert [layer["same"] for layer in layers] == [True, False, False, False]
    assert [layer["after"]["hidden"] for layer in layers] == [0, 1, 2, 1]  # layer 1's MLP is hidden by layer 2
    late = [[b["late"] for b in layer["after"]["blocks"]] for layer in layers]
    assert late == [[[0], [0]], [[0], [0]], [[1], [1]], [[1], [1]]]
    module, modeling = data["code"]
    assert module["added"] > 0
    assert any(row[2] and "all_reduce_start" in row[2][1] for row in module["rows"])
    assert modeling["before"].endswith("transformers' own")
    assert data["tensors"]["changed"] == []
    assert data["tensors"]["same"] == len(Checkpoint.open(source).tensors)


@pytest.mark.slow
def test_the_source_is_found_where_it_was_or_nearby(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    shutil.copytree(source, "../models/a/small")
    out = Path("../outputs/today/out")
    api.convert("../models/a/small", "ladder", out=out, tp=2, options=api.SaveOptions(verify="none"))
    manifest = read_manifest(out)
    assert manifest.source.path == "../../../models/a/small"
    assert main(["diff", str(out)]) == 0
    assert "is not here" not in capsys.readouterr().out

    (here / "moved").mkdir()  # both
    for folder in ("models", "outputs"):
        shutil.move(tmp_path / folder, "moved")
    out = Path("moved/outputs/today/out")
    place = find_source(out, manifest)
    assert place is not None
    assert place.resolve() == here / "moved/models/a/small"

    shutil.move(place, "other")
    shutil.copytree(out, tmp_path / "out")
    assert find_source(tmp_path / "out", manifest) == here / "other"
    faults.spoil_tensor(Path("other"), f"{LAYERS}.1.mlp.up_proj.weight", lambda t: t * 2)
    assert main(["diff", str(tmp_path / "out")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the source, ../../../models/a/small, is not here: tensors were not compared. Give --source DIR" in told


def test_a_place_in_the_home_folder_is_named_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home/ada"))
    assert recorded_path(tmp_path / "home/ada/models/a", tmp_path / "out") == "~/models/a"
    assert recorded_path(tmp_path / "home/ada/models/a", tmp_path / "home/ada/out") == "../models/a"
    assert recorded_path(tmp_path / "models/a", tmp_path / "home/ada/out") == "../../../models/a"


@pytest.mark.slow
def test_two_outputs_of_one_recipe_are_the_same_but_for_what_somebody_changed(written: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(written, copy)
    assert api.diff(written, copy).same
    faults.spoil_tensor(copy, f"{LAYERS}.1.mlp.up_proj.weight", lambda t: t * 2)
    module = copy / "runtime/tp2/module.py"
    lines = module.read_text().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if re.fullmatch(r" +\w+ = \w+ \+ \w+\n", line))
    spoilt = lines[place].replace(" + ", " - ")
    module.write_text("".join([*lines[:place], spoilt, *lines[place + 1 :]]))
    ranges = copy / "runtime/tp2/weights.json"
    table = json.loads(ranges.read_text())
    for entry in table["parameters"].values():
        if entry[2]:
            entry[2].reverse()
    ranges.write_text(json.dumps(table))

    found = api.diff(written, copy)
    assert not found.same
    assert found.tensors is not None
    [changed] = found.tensors.changed
    assert changed.name == f"{LAYERS}.1.mlp.up_proj.weight"
    assert changed.norm_after == pytest.approx(2 * changed.norm_before)
    assert changed.norm_difference == pytest.approx(changed.norm_before)
    assert all(layer.before == layer.after for layer in found.layers)
    code, exchanged = (each for each in found.code if each.rows)
    assert code.title == "runtime module"
    assert (code.added, code.removed) == (1, 1)
    assert ("changed", (place + 1, lines[place].rstrip()), (place + 1, spoilt.rstrip())) in code.rows
    assert exchanged.title == "ranges of the ranks"
    assert exchanged.added == exchanged.removed > 0
    assert f"{module} was changed since it was written" in " ".join(found.notes)


def test_two_recipes(source: Path, written: Path, tmp_path: Path) -> None:
    api.convert(source, "ladder", out=tmp_path / "all", tp=2, options=api.SaveOptions(verify="none"))
    found = api.diff(written, tmp_path / "all", tensors=False)
    ladder = next(p for p in found.passes if p.name == "ladder")
    assert "[2, 3]" in ladder.options
    assert "all" in ladder.options
    assert ladder.reads
    assert next(p for p in found.passes if p.name == "tensor_parallel").ir == []
    assert found.tensors is None


def test_a_model_and_a_recipe_write_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["diff", str(source), "--recipe", "desync-4x", "--tp", "2", "--code", "--ir"]
    assert main([*words, "--html", "page.html"]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    out = capsys.readouterr().out
    for word in ("desync", "all_reduce 9 → ", "generated code", "class ", "@@"):
        assert word in out


def test_the_page_needs_nothing_else(written: Path, tmp_path: Path) -> None:
    assert main(["diff", str(written), "--html", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    page = Balance()
    page.feed(text)
    assert page.open == []
    assert not any({"src", "href", "onclick", "onload"} & attributes.keys() for _, attributes in page.seen)
    assert not {tag for tag, _ in page.seen} & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|url\(|@import", text)
    assert "prefers-color-scheme:dark" in text
    assert text.count("<svg") == 2
    # of layers 2 and 3 both blocks read late
    before, after = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert (before.count('class="re"'), after.count('class="re"')) == (0, 5)  # with the legend's
    assert api.diff(written).to_html() == text


def test_names_of_a_model_are_escaped(source: Path, tmp_path: Path) -> None:
    odd = tmp_path / "<b>&odd"
    shutil.copytree(source, odd)
    page = api.diff(odd, recipe="ladder", tp=2).to_html()
    assert "<b>&odd" not in page
    assert "&lt;b&gt;&amp;odd" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("diff nothing", "nothing: no such directory"),
        ("diff {m}", "no rewrite.json in it"),
        ("diff {m} {m} --recipe ladder", "leave out B"),
        ("diff {o} nothing", "nothing: no model"),
        ("diff {o} --html nowhere/page.html", "there is no directory nowhere"),
        ("diff {o} --source nowhere", "--source nowhere: no such directory"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    source: Path, written: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert main(words.format(m=source, o=written).split()) == 2
    assert message in capsys.readouterr().err


def test_tensors_renamed_reordered_cast_and_added(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "other")
    path = tmp_path / "other/model.safetensors"
    tensors = load_file(path)
    tensors["model.renamed.weight"] = tensors.pop("model.norm.weight")
    name = f"{LAYERS}.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].flip(0).contiguous()
    cast = f"{LAYERS}.0.self_attn.k_proj.weight"
    tensors[cast] = tensors[cast].bfloat16()
    tensors["new"] = torch.ones(3)
    save_file(tensors, path)
    found = tensors_between(Checkpoint.open(source), Checkpoint.open(tmp_path / "other"))
    assert found.renamed == [("model.norm.weight", "model.renamed.weight")]
    assert found.added == ["new"]
    assert found.removed == []
    assert {t.name: t.what for t in found.changed} == {
        name: "the same values in another order",
        cast: "another dtype",
    }


# the drawing


@pytest.mark.parametrize("recipe", ["tensor-parallel", "ladder", "ladder-own-partial", "desync-2x", "parallel"])
def test_the_drawing_has_what_the_blocks_have(source: Path, recipe: str) -> None:
    program = api.rewrite(trace(source), recipe, tp=2)
    drawing = program_drawing(program)
    shown = [b for group in grouped(layer_plans(program)) for b in group.blocks]
    boxes = re.findall(r"<rect[^>]*><title>([^<]*)</title>", drawing)
    assert len(boxes) == len(shown)
    late = sum(max(b.late, default=0) > 0 for b in shown)
    assert len(re.findall(r"<title>[^<(]* reads the stream as it was", drawing)) == late
    for words, reduction in (("nothing computes", "exposed"), ("overlaps with", "hidden"), ("left out", "dropped")):
        assert drawing.count(f"{words}") == sum(b.reduction == reduction for b in shown)
    assert sum(group.count for group in grouped(layer_plans(program))) == len(layer_plans(program))


def test_notebook_objects_show_the_drawing(source: Path, tmp_path: Path) -> None:
    program = api.rewrite(trace(source), "ladder", tp=2)
    assert program_drawing(program) in program._repr_html_()
    report = api.save(program, tmp_path / "out", options=api.SaveOptions(verify="none"))
    assert isinstance(report, ConversionReport)
    assert program_drawing(program) in report._repr_html_()
    assert "program" not in json.loads(report.to_json())
