"""Runs the steps of a composite GitHub Action as GitHub's runner does: their own shell text, their own environment."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")  # what GitHub starts for `shell: bash`


class StepFailed(Exception):
    """A step ended with an exit code other than 0, or found nothing to upload; later steps do not run."""


@dataclass
class Runner:
    """A run of an action on one machine. Raises StepFailed where a step fails, and KeyError for an expression, an input
    or an action that a runner would not know."""

    action: dict[str, Any]
    home: Path  # where the action's repository lies
    folder: Path  # of this run
    inputs: dict[str, str]
    path: str = os.environ["PATH"]
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    artifacts: dict[str, Path] = field(default_factory=dict)
    log: str = ""

    def __post_init__(self) -> None:
        for name in ("temp", "workspace", "artifacts"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        declared = self.action["inputs"]
        if missing := [name for name in declared if declared[name].get("required") and name not in self.inputs]:
            raise KeyError(f"inputs that are required: {missing}")
        defaults = {name: str(spec["default"]) for name, spec in declared.items() if "default" in spec}
        self.inputs = {**defaults, **{name: value for name, value in self.inputs.items() if declared[name]}}

    def run(self, left_out: tuple[str, ...] = ()) -> None:
        """Every step in order but those `left_out` by name."""
        assert set(left_out) <= {step.get("name") for step in self.action["runs"]["steps"]}
        for step in self.action["runs"]["steps"]:
            if step.get("name") not in left_out:
                self._script(step) if "run" in step else self._action(step)

    def action_outputs(self) -> dict[str, str]:
        """What the action gives to the workflow that uses it."""
        return {name: self.text(spec["value"]) for name, spec in self.action["outputs"].items()}

    def text(self, value: Any) -> str:
        """A value with its `${{ … }}` replaced."""
        return re.sub(r"\$\{\{ *([\w.-]+) *\}\}", lambda found: self._expression(found[1]), str(value))

    def _expression(self, name: str) -> str:
        known = {"github.action_path": str(self.home), "runner.temp": str(self.folder / "temp")}
        known |= {f"inputs.{key}": value for key, value in self.inputs.items()}
        known |= {f"steps.{id}.outputs.{key}": v for id, named in self.outputs.items() for key, v in named.items()}
        if name not in known and (step := re.fullmatch(r"steps\.([\w-]+)\.outputs\.[\w-]+", name)):
            return "" if step[1] in self.outputs else known[name]  # GitHub's expressions know no missing output
        return known[name]

    def _script(self, step: dict[str, Any]) -> None:
        assert step["shell"] == "bash"
        script, output, summary = (self.folder / "temp" / name for name in ("step.sh", "output", "summary"))
        script.write_text(self.text(step["run"]))
        for file in (output, summary):
            file.write_text("")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))},
            **{name: self.text(value) for name, value in step.get("env", {}).items()},
            "PATH": self.path,
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(summary),
            "GITHUB_WORKSPACE": str(self.folder / "workspace"),
            "RUNNER_TEMP": str(self.folder / "temp"),
        }
        done = subprocess.run(
            [*BASH, str(script)], cwd=self.folder / "workspace", env=environment, timeout=1800, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.log += done.stdout
        if done.returncode:
            raise StepFailed(f"{step['name']}: exit code {done.returncode}\n{done.stdout}")
        self.outputs[step.get("id", "")] = dict(line.split("=", 1) for line in output.read_text().splitlines())

    def _action(self, step: dict[str, Any]) -> None:
        """What the actions do here: the Python is on the path already, and an upload is a copy."""
        used = step["uses"].partition("@")[0]
        given = {name: self.text(value) for name, value in step["with"].items()}
        if used == "actions/setup-python":
            assert re.fullmatch(r"3\.\d+", given["python-version"])
        elif used == "actions/upload-artifact":
            place = self.folder / "artifacts" / given["name"]
            found = [Path(file) for file in glob.glob(given["path"])] if given["path"].strip() else []
            if not found and given["if-no-files-found"] == "error":
                raise StepFailed(f"{step['name']}: no files at {given['path']}")
            for file in found:
                shutil.copytree(file, place) if file.is_dir() else shutil.copy(file, _folder(place))
            self.artifacts[given["name"]] = place
        else:
            raise KeyError(f"uses: {step['uses']}")


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def installed(folder: Path, home: Path, prelude: str = "") -> None:
    """What the step of installing leaves, without an index: an environment with `home`'s `rewrite` and the packages of
    this process. `prelude` runs before the command, to seed a fault."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text("\n".join([str(home), *(p for p in sys.path if p.endswith("site-packages"))]))
    command = folder / "bin/rewrite"
    start = "import sys\nfrom rewriter.cli import main\nsys.exit(main())\n"
    command.write_text(f"#!{folder}/bin/python\n{prelude}\n{start}")
    command.chmod(0o755)
