"""The GitHub Action: its scripts run with hostile inputs, and upload what they wrote."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

ACTION: dict[str, Any] = yaml.safe_load((Path(__file__).parent.parent / "action.yml").read_text())
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]

# Stands where the installed `rewrite` would: writes down its arguments, a checkpoint and a report.
FAKE = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$(dirname "$0")/arguments"
while [[ "$1" != --out ]]; do shift; done
mkdir "$2" && echo '{}' > "$2/rewrite.json"
echo '{"report": true}'
"""


def convert(tmp_path: Path, **inputs: str) -> tuple[list[str], dict[str, str]]:
    """Runs the step that converts, and returns the arguments `rewrite` got and the outputs of the step."""
    [step] = [step for step in STEPS if step.get("id") == "convert"]
    fake = tmp_path / "venv/bin/rewrite"
    fake.parent.mkdir(parents=True)
    fake.write_text(FAKE)
    fake.chmod(0o755)
    output = tmp_path / "outputs"
    environment = {"MODEL": "m", "RECIPE": "ladder", "TP": "1", "ARGUMENTS": "", **inputs}
    assert set(environment) | {"WORK"} == set(step["env"])
    subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        env={**os.environ, **environment, "WORK": str(tmp_path), "GITHUB_OUTPUT": str(output)},
        check=True,
    )
    outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
    return (fake.parent / "arguments").read_text().splitlines(), outputs


def test_it_converts_and_names_what_it_wrote(tmp_path: Path) -> None:
    arguments, outputs = convert(tmp_path, TP="2", ARGUMENTS="--set=ladder.layers=[1, 5]\n--verify=full\n")
    assert arguments[:6] == ["m", "--recipe", "ladder", "--tp", "2", "--out"]
    assert arguments[7:] == ["--json", "--set=ladder.layers=[1, 5]", "--verify=full"]
    assert Path(outputs["directory"], "rewrite.json").exists()
    assert Path(outputs["report"]).read_text() == '{"report": true}\n'


def test_inputs_are_data_and_never_code(tmp_path: Path) -> None:
    hostile = f'$(touch {tmp_path}/pwned); `touch {tmp_path}/pwned` "; touch {tmp_path}/pwned #'
    arguments, _ = convert(tmp_path, MODEL=hostile, RECIPE=hostile, ARGUMENTS=hostile)
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
