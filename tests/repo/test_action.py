"""The GitHub Action, step by step as its file says: on the model that ships, with faults, and with hostile inputs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from action_runner import Runner, StepFailed, installed
from repository import ROOT, TINY_LLAMA
from transformers import AutoModelForCausalLM

import rewriter as rw

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
INSTALL = "Install rewriter"
MODEL = str(TINY_LLAMA)
RECIPE = "ladder-upper-half"

# Stands where the installed `rewrite` would: writes down its arguments, a checkpoint and a report.
FAKE = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$(dirname "$0")/arguments"
while [[ "$1" != --out ]]; do shift; done
mkdir "$2" && echo '{}' > "$2/rewrite.json"
echo '{"report": true}'
"""

# The ladder on all layers, said to be on the upper half.
FAULT = """
from rewriter.ir.residual import residual_blocks, stream_values
from rewriter.passes.ladder import Ladder
right = Ladder.apply
def late(self, program):  # the last block reads the whole stream
    program = right(self, program)
    block, stream = residual_blocks(program)[-1], stream_values(program.graph)
    graph, env = program.edit()
    for node in block.branch:
        env[node].replace_input_with(env[stream[block.reads[0]]], env[stream[block.index]])
    return program.with_(graph=graph)
Ladder.apply = late
"""


def converted(folder: Path, fault: str = "", action: dict[str, Any] = ACTION, **inputs: str) -> Runner:
    """A run of every step but the installation, which is there already."""
    run = Runner(action, ROOT, folder, {"model": MODEL, "recipe": RECIPE, "tp": "2", **inputs})
    installed(folder / "temp/rewriter/venv", ROOT, fault)
    run.run(left_out=(INSTALL,))
    return run


def faked(folder: Path, **inputs: str) -> tuple[list[str], Runner]:
    """A run with a fake `rewrite`, and the arguments that it got."""
    run = Runner(ACTION, ROOT, folder, {"model": "m", "recipe": "ladder", **inputs})
    fake = folder / "temp/rewriter/venv/bin/rewrite"
    fake.parent.mkdir(parents=True)
    fake.write_text(FAKE)
    fake.chmod(0o755)
    run.run(left_out=(INSTALL,))
    return (fake.parent / "arguments").read_text().splitlines(), run


def check_artifacts(run: Runner, prefix: str) -> None:
    """The uploaded checkpoint computes the recipe; manifest and report are those of it."""
    assert set(run.artifacts) == {f"{prefix}-{what}" for what in ("checkpoint", "manifest", "report")}
    checkpoint = run.artifacts[f"{prefix}-checkpoint"]
    manifest = json.loads((run.artifacts[f"{prefix}-manifest"] / "rewrite.json").read_text())
    report = json.loads((run.artifacts[f"{prefix}-report"] / "report.json").read_text())
    assert manifest == json.loads((checkpoint / "rewrite.json").read_text())
    assert (manifest["recipe"]["name"], manifest["mesh"]) == (RECIPE, {"tp": 2})
    assert report["files"] == sorted(p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file())
    ids = torch.arange(3, 40)[None] * 7 % 250
    expected = rw.simulate(rw.rewrite(rw.trace(MODEL), RECIPE, tp=2), ids, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
def test_it_converts_the_model_that_ships(tmp_path: Path) -> None:
    run = converted(tmp_path, artifact="small", arguments="--verify=shrunken\n")
    check_artifacts(run, "small")
    outputs = run.action_outputs()
    assert set(outputs) == set(ACTION["outputs"])
    assert Path(outputs["directory"], "rewrite.json").is_file()
    assert json.loads(Path(outputs["report"]).read_text())["mesh"] == {"tp": 2}


@pytest.mark.slow
def test_it_installs_itself_and_converts(tmp_path: Path) -> None:
    """The first step as it stands, too: without a package index this fails."""
    run = Runner(ACTION, ROOT, tmp_path, {"model": MODEL, "recipe": RECIPE, "tp": "2"})
    run.run()
    check_artifacts(run, "rewritten")
    assert list((tmp_path / "temp/rewriter/venv/lib").glob("python*/site-packages/rewriter/cli/app.py"))


@pytest.mark.parametrize(
    ("inputs", "fault", "code", "said"),
    [
        pytest.param({"recipe": "ladder-uper-half"}, "", 2, "ladder-uper-half", marks=pytest.mark.slow),
        ({"arguments": "--no-such-option"}, "", 2, "--no-such-option"),
        pytest.param({}, FAULT, 3, "rewritten = its reference", marks=pytest.mark.slow),
    ],
    ids=["recipe", "argument", "verification"],
)
def test_a_failed_conversion_fails_its_step(
    tmp_path: Path, inputs: dict[str, str], fault: str, code: int, said: str
) -> None:
    with pytest.raises(StepFailed, match=f"^Convert: exit code {code}\n") as failure:
        converted(tmp_path, fault, **inputs)
    assert said in str(failure.value)
    assert list((tmp_path / "artifacts").iterdir()) == []


@pytest.mark.slow
def test_a_failure_that_a_step_hides_is_found(tmp_path: Path) -> None:
    """Were its exit code lost, there would be nothing to upload."""
    hiding = copy.deepcopy(ACTION)
    [step] = [step for step in hiding["runs"]["steps"] if step.get("id") == "convert"]
    step["run"] = step["run"].replace('> "$out/report.json"', '> "$out/report.json" || true')
    with pytest.raises(StepFailed, match=r"^Upload the checkpoint: no files at "):
        converted(tmp_path, action=hiding, tp="3")


def test_arguments_are_lines(tmp_path: Path) -> None:
    arguments, run = faked(tmp_path, tp="2", arguments="--set=ladder.layers=[1, 5]\n--verify=full\n")
    assert arguments[:6] == ["m", "--recipe", "ladder", "--tp", "2", "--out"]
    assert arguments[7:] == ["--json", "--set=ladder.layers=[1, 5]", "--verify=full"]
    assert Path(run.action_outputs()["report"]).read_text() == '{"report": true}\n'


def test_inputs_are_data_and_never_code(tmp_path: Path) -> None:
    hostile = f'$(touch {tmp_path}/pwned); `touch {tmp_path}/pwned` "; touch {tmp_path}/pwned #'
    arguments, _ = faked(tmp_path, model=hostile, recipe=hostile, arguments=hostile)
    assert arguments.count(hostile) == 3
    assert not (tmp_path / "pwned").exists()
    for step in STEPS:
        assert "${{" not in step.get("run", "")


def test_it_uploads_checkpoint_manifest_and_report() -> None:
    uploads = {step["with"]["path"] for step in STEPS if step.get("uses", "").startswith("actions/upload-artifact@")}
    directory = "${{ steps.convert.outputs.directory }}"
    assert uploads == {directory, f"{directory}/rewrite.json", "${{ steps.convert.outputs.report }}"}


def test_every_input_is_used() -> None:
    text = yaml.safe_dump(ACTION["runs"])
    for name in ACTION["inputs"]:
        assert f"inputs.{name} " in text
