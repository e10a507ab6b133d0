"""Every command from another folder: relative paths, through links, with spaces and letters beyond ASCII."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import adapted
import pytest
from nccl_logs import log
from repository import ROOT

from rewriter.cli import main
from rewriter.cli.app import COMMANDS
from rewriter.common import packages

# Where a command runs, then its words, with every option that takes a place; what it writes is named last.
# `../ein Löwe` is a link, and so is the output `../ein Löwe/link é`.
LINES = """
d 'modèle 1' --recipe '{r}' --tp 2 --verify full --calibration '{d}/text é.txt' --out '{d}/ganz é'
h convert '{m}' --recipe '{r}' --tp 2 --verify none --out '{d}/convertì é'
h verify '{d}/ganz é'
m inspect .
h predict '{m}/config.json' --recipe '{r}' --fabric '{f}' --tp 2 --html '{d}/pré diction.html'
h recipes show '{r}'
h recipes validate '{r}'
m diff . --recipe '{r}' --tp 2 --html '{d}/a é.html'
h diff '{o}' --html '{d}/b é.html'
l diff .
h diff '{o}' '{l}' --source '{m}'
o bisect . --source '{m}'
m bisect . --recipe '{r}' --tp 2
h reshard '{o}' --tp 1
l reshard . --tp 4 --verify none
o verify .
h refresh '{l}'
h generate '{o}' --prompts '{d}/prompts é.txt' --max-new-tokens 2 --check
h serve '{o}' --dry-run --engine transformers
h export '{o}' --onnx '{d}/ein modèle.onnx'
m search . --fabric '{f}' --tp 2 --calibration '{d}/text é.txt' --loss 90% --out '{d}/gefunden é.yaml'
o adapt . --data '{t}' --eval '{t}' --teacher '{m}' --set max_steps=1 --length 32 --verify none --out '{d}/geheilt é'
h doctor --json
h coverage llama --json
h fabrics show '{f}'
h fabrics import '{d}/nccl é.log' --op all_reduce --out '{d}/測定.yaml'
h fabrics calibrate --largest 4096 --repetitions 3 --out '{d}/測定 2.yaml'
"""
NAMES = {
    "h": "hier é",
    "d": "ein Löwe",
    "m": "ein Löwe/modèle 1",
    "r": "ein Löwe/régime é.yaml",
    "f": "ein Löwe/fa bric é.yaml",
    "o": "ein Löwe/aus gabe",
    "l": "ein Löwe/link é",
    "t": "ein Löwe/dåta.jsonl",
}
PARTS = [line.partition(" ")[::2] for line in LINES.strip().splitlines()]
SLOW = (
    "ganz",
    "export",
    "search",
    "calibrate",
    "coverage",
    "diff .",
    "reshard",
    "bisect",
    "refresh",
    "adapt .",
    "predict",
)


def run(base: Path, where: str, line: str) -> tuple[int, list[str]]:
    """The exit code of a line that runs in `where`, and its words."""
    here = base / NAMES[where]
    places = {key: os.path.relpath(base / name, os.path.realpath(here)) for key, name in NAMES.items()}
    words = shlex.split(line.format(**places))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        return main(words), words


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all lies. The model's weights are a link, as in the cache of the Hub."""
    base = tmp_path_factory.mktemp("places")
    real = base / "far/wirklich da"
    model = adapted.write_source(real / "modèle 1", layers=2)
    (real / "blobs").mkdir()
    (model / "model.safetensors").rename(real / "blobs/0123")
    (model / "model.safetensors").symlink_to("../blobs/0123")
    (base / "hier é").mkdir()
    (base / "ein Löwe").symlink_to("far/wirklich da")
    shutil.copy(ROOT / "rewriter/recipes/library/ladder.yaml", real / "régime é.yaml")
    shutil.copy(ROOT / "rewriter/fabric/library/h100-nvlink.yaml", real / "fa bric é.yaml")
    (real / "prompts é.txt").write_text("def x\n", encoding="utf-8")
    (real / "text é.txt").write_text("def x return y\n" * 60, encoding="utf-8")
    (real / "dåta.jsonl").write_text('{"text": "def x return y z"}\n' * 40, encoding="utf-8")
    (real / "nccl é.log").write_text(log(), encoding="utf-8")
    assert run(base, "h", "'{m}' --recipe '{r}' --tp 2 --verify none --out '{o}'")[0] == 0
    shutil.copytree(real / "aus gabe", real / "zweite")
    (real / "link é").symlink_to("zweite")
    return base


def test_every_command_is_among_them() -> None:
    assert {line.split()[0] for _, line in PARTS} >= set(COMMANDS)


@pytest.mark.parametrize(
    ("where", "line"),
    [pytest.param(*part, marks=[pytest.mark.slow] * any(word in part[1] for word in SLOW)) for part in PARTS],
    ids=[f"{number}-{line.partition(' --')[0]}" for number, (_, line) in enumerate(PARTS)],
)
def test_a_command_from_another_folder(
    where: str, line: str, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(packages.EXTRAS, "serve", ())
    code, words = run(base, where, line)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "not here" not in printed.out
    assert ("note: not healed: it computes another function" in printed.err) is (words[0] in ("generate", "serve"))
    if words[-2] in ("--html", "--out", "--onnx"):
        assert (base / NAMES[where] / words[-1]).exists()
    assert not list((base / "hier é").iterdir())
    assert not list(base.rglob(".*"))
