"""The matrix's command. What it has found is written down after every cell, so that it goes on where it was stopped.

PYTHONPATH=tools python -m matrix                                # what `make matrix` runs
PYTHONPATH=tools python -m matrix --only torch2.15 --again       # these cells, though they are known

It needs a package index, and 6 GB of disk for the environment of one torch, which is deleted when its cells are done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from matrix import cells as table
from matrix.cells import ROOT, Cell, Result

LIMIT = 3600.0
"""Seconds that a step may take. The tests need 60 of a core and an installation unpacks 5 GB; a machine may do more."""

FOUND = """
import json, platform, accelerate, numpy, rewriter, tokenizers, torch, transformers
packages = (accelerate, numpy, tokenizers, torch, transformers)
versions = {"python": platform.python_version()} | {p.__name__: str(p.__version__) for p in packages}
print(json.dumps([versions, rewriter.__file__]))
"""


class Failed(Exception):
    """A step of a cell failed. The message is its reason, short enough for a table."""


def ran(words: Sequence[str | Path], cwd: Path, **settings: str) -> str:
    """What a command prints. Raises Failed with the end of it where it fails or takes too long."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "REWRITER"))}
    # A machine's own settings may keep pip from versions of torch.
    environment |= {"PIP_CONSTRAINT": os.devnull, "OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1", **settings}
    process = subprocess.Popen(
        list(map(str, words)), cwd=cwd, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=LIMIT)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise Failed(f"{Path(words[0]).name}: not done after {LIMIT:.0f} s") from None
    if process.returncode:
        print(printed[-8000:], flush=True)
        raise Failed(reason(printed) or f"{Path(words[0]).name} ended with {process.returncode}")
    return printed


def reason(printed: str) -> str:
    """The lines of pip or pytest that say what failed."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    told = [line for line in lines if line.startswith(("FAILED ", "ERROR ", "ERROR: "))]
    return "; ".join(re.sub(r"\S*/(?=tests/)", "", line)[:160] for line in (told or lines[-1:])[:3])


def passed(printed: str) -> int:
    """How many tests passed, by pytest's closing line. Raises Failed where some were left out."""
    [line] = re.findall(r"^[\d ,a-z]*\d+ passed.* in .*", printed, re.MULTILINE)
    if left_out := re.search(r"\d+ (skipped|xfailed)", line):
        raise Failed(f"{left_out[0]}: {line}")
    return int(re.search(r"(\d+) passed", line)[1])


def interpreter(version: str) -> Path | None:
    """A Python of this version that runs. A name on the path may be a version manager's stub for one that is absent."""
    found = shutil.which(f"python{version}")
    if found is None:
        return None
    code = "import ensurepip, sys; print(sys.executable)"
    done = subprocess.run([found, "-c", code], capture_output=True, text=True, check=False)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def wheel(scratch: Path) -> Path:
    """The package as users install it. Built from a copy: what an earlier build left would be in it."""
    source = scratch / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "rewriter", source / "rewriter", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ran([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, source], scratch)
    [built] = scratch.glob("rewriter-*.whl")
    return built


class Environments:
    """One environment at a time, of one Python and one torch, in which versions of transformers replace each other."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.package = scratch, wheel(scratch)
        self.held: tuple[str, str] | None = None
        self.folder = scratch / "venv"
        self.python = self.folder / "bin" / "python"

    def of(self, cell: Cell, base: Path) -> Mapping[str, str]:
        """Make the environment that of a cell, and return the versions that are in it. Raises Failed where pip does."""
        if self.held != (cell.python, cell.torch):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.held = None
            ran([base, "-m", "venv", self.folder], self.scratch)
            ran([self.python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"], self.scratch)
            self.held = cell.python, cell.torch
        pip = [self.python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir"]
        chosen = [f"torch=={cell.torch}.*", f"transformers=={cell.transformers}.*"]
        ran([*pip, self.package, *chosen, "accelerate", "hypothesis", "pytest"], self.scratch)
        versions, place = json.loads(ran([self.python, "-W", "ignore", "-c", FOUND], self.scratch).splitlines()[-1])
        if not Path(place).is_relative_to(self.folder):
            raise Failed(f"{place} is tested, not what was installed")
        return versions


def tried(cell: Cell, environments: Environments, base: Path | None) -> Result:
    """The result of a cell."""
    result: Result = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit(), "source": table.fingerprint()}
    result |= {"seconds": 0.0, "versions": {}, "outcome": "green"}
    if base is None:
        return result | {"outcome": "absent", "why": f"no python{cell.python} on the path"}
    folder = environments.scratch / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    begun = time.monotonic()
    try:
        result["versions"] = dict(environments.of(cell, base))
        begun = time.monotonic()
        tests = [ROOT / name for name in table.SMOKE]
        pytest = [environments.python, "-m", "pytest", "-q", "-m", "smoke or not slow", "-p", "no:cacheprovider"]
        printed = ran([*pytest, "--rootdir", ROOT, *tests], folder, TMPDIR=str(folder))
        result["tests"] = passed(printed)
    except Failed as error:
        result |= {"outcome": "red", "why": str(error)}
    return result | {"seconds": round(time.monotonic() - begun, 1)}


def commit() -> str:
    """The commit that is tested, in short, with a plus where files that are tested differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=False)
    files = ["rewriter", "pyproject.toml", *table.SMOKE]
    same = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *files], capture_output=True, check=False)
    return (head.stdout.strip() or "unknown") + "+" * (same.returncode == 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every chosen cell is green, or its Python is not on the machine; else 1."""
    parser = argparse.ArgumentParser(prog="matrix", description="Smoke tests with many versions.")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells with this in their names")
    parser.add_argument("--again", action="store_true", help="also cells whose source was tried already")
    parser.add_argument("--red", action="store_true", help="also such cells that failed")
    options = parser.parse_args(arguments)
    source, known = table.fingerprint(), table.results()
    chosen = [cell for cell in table.cells() if options.only in cell.name]
    bases = {version: interpreter(version) for version in table.PYTHONS}

    def is_known(cell: Cell) -> bool:
        found = known.get(cell.name, {})
        outcomes = ("green",) if options.red else ("green", "red")
        return not options.again and found.get("source") == source and found["outcome"] in outcomes

    with tempfile.TemporaryDirectory(prefix="rewriter-matrix-") as scratch:
        environments = None
        for cell in chosen:
            if is_known(cell):
                print(f"{cell.name}: known, {known[cell.name]['outcome']}", flush=True)
                continue
            environments = environments or Environments(Path(scratch))
            print(f"{cell.name} …", flush=True)
            result = tried(cell, environments, bases[cell.python])
            table.keep(cell.name, result)
            told = result.get("why") or f"{result['tests']} tests passed"
            print(f"{cell.name}: {result['outcome']}, {result['seconds']:.0f} s: {told}", flush=True)
    found = table.results()
    return int(any(found[cell.name]["outcome"] == "red" for cell in chosen))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
