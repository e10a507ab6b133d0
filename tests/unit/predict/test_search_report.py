"""What `rewrite search` shows and writes, from a result made by hand; what the command line passes on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import searched
from fake_api import flat, installed
from page_parser import Balance
from rich.console import Console

from rewriter.cli import main
from rewriter.cli.search import parse_share
from rewriter.common.errors import RewriterError
from rewriter.recipes import Recipe
from rewriter.show.search import SearchReport, place
from rewriter.show.search import search_page as page


class Api(ModuleType):
    """Stands in for `rewriter.api`."""

    def __init__(self) -> None:
        super().__init__("rewriter.api")
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.result = searched.result()

    def search(self, *args: Any, **kwargs: Any) -> Any:
        (model,), options = flat(args, kwargs)
        self.calls.append((model, options))
        return self.result


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Api:
    monkeypatch.chdir(tmp_path)
    return installed(Api(), monkeypatch)


def shown(width: int) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(SearchReport(searched.result()))
    return capture.get()


@pytest.mark.parametrize("width", [60, 100, 160])
def test_the_terminal_shows_the_front_and_the_choice(width: int) -> None:
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "chosen: 1.20× the speed of plain tensor parallelism (predicted)" in words
    assert "drop-mlp" in words
    assert "layers 4–5: the MLP's reduction waits for the next layer's attention" in words
    assert "Not applied, desync-8x: <why>" in words


def test_places_on_the_axis_rise_with_the_loss() -> None:
    assert place(0.0, 0.001, 1.0) == 0
    assert place(0.001, 0.001, 1.0) == pytest.approx(0.06)
    assert place(1.0, 0.001, 1.0) == pytest.approx(1.0)


def test_the_page_is_one_file_without_script_or_network() -> None:
    text = page(searched.result(), "rewrite search models/tiny")
    assert page(searched.result(), "rewrite search models/tiny") == text
    parser = Balance()
    parser.feed(text)
    assert not parser.open
    assert "<script" not in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "&lt;why&gt;" in text
    points = re.findall(r'class="pp (s\d)', text)  # the chosen one, the others of the front, and what none needs
    assert sorted(points) == ["s0", "s1", "s1", "s1", "s2"]
    assert ">4.00<" in text  # what drop costs in layer 3


def test_what_is_asked_reaches_the_api_and_the_recipe_is_written(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some.txt").write_text("words")
    words = "search org/model --fabric pcie-gen4 --tp 3 --loss 2% --calibration some.txt --sp 1 --seed 7"
    more = "--batch 4 --prompt 2048 --generate 128 --what-if all_reduce=+5us --eager --html page.html --out mine.yaml"
    assert main([*words.split(), *more.split()]) == 0
    assert api.calls == [
        (
            "org/model",
            dict(
                fabric="pcie-gen4", tp=3, sp=1, nodes=None, batch=4, prompt=2048, generate=128, graphed=False,
                what_if=("all_reduce=+5us",), library=None, loss=0.02, engine="vllm", text="words", seed=7,
                state=Path("mine.search"), trust_remote_code=False, compiled=None, attention="fused", all_logits=False,
                served=False, weights=None, cache=None, l2_prefetch=False, sequence_parallel=False,
            ),
        )
    ]  # fmt: skip
    assert Recipe.load(tmp_path / "mine.yaml").passes
    assert "rewrite search org/model" in (tmp_path / "page.html").read_text()
    assert capsys.readouterr().out.endswith("\nNext: rewrite org/model --recipe mine.yaml --tp 3\n")


def test_what_is_slower_than_the_model_as_it_is_is_not_advised(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    slower = api.result.measured.model_copy(update={"over": "3 replicas of 1 GPU", "end_to_end": 0.35})
    api.result = replace(api.result, measured=slower)
    assert main(["search", "org/model", "--fabric", "pcie-gen4", "--tp", "3", "--out", "mine.yaml"]) == 0
    told = capsys.readouterr().out
    assert "Keep the model: as it is, it is faster with 3 replicas of 1 GPU." in told
    assert "wrote mine.yaml" in told
    assert "--recipe mine.yaml" not in told
    assert told.endswith("Next: rewrite predict org/model --recipe tensor-parallel --fabric pcie-gen4 --tp 3\n")


def test_the_recipe_has_a_name_of_its_own(api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "org/model", "--fabric", "h100-nvlink", "--tp", "8", "--json"]) == 0
    assert (tmp_path / "model-h100-nvlink-tp8.yaml").is_file()
    assert api.calls[0][1]["state"] == Path("model-h100-nvlink-tp8.search")
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"]["speedup"] == 1.2
    assert [p["speedup"] for p in found["points"]] == [1.4, 1.2, 1.1, 1.02, 1.0]
    assert found["file"] == "model-h100-nvlink-tp8.yaml"
    assert found["verdict"].startswith("The recipe gives 1.20× of plain tensor parallelism (predicted), for a rise")
    assert found["next"] == "rewrite org/model --recipe model-h100-nvlink-tp8.yaml --tp 3"


@pytest.mark.parametrize(
    ("text", "value"), [("1%", 0.01), ("0.01", 0.01), (" 2.5 % ", 0.025), ("3", 3.0), (".5%", 0.005)]
)
def test_shares_are_read(text: str, value: float) -> None:
    assert parse_share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "one", "-1%", "1%%", "1e3", "nan", "1 2"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(RewriterError, match=r"--loss .*expected a share of the loss, such as 1% or 0.01"):
        parse_share(text)


def test_a_place_that_cannot_be_written_is_refused_before_the_search(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--out", "--html"):
        assert main(["search", "m", option, "no/where.yaml"]) == 2
        assert f"{option} no/where.yaml: there is no directory no" in capsys.readouterr().err
    assert api.calls == []
