"""What did versions of transformers change in the classes that emitted files are made from?

    .venv/bin/python -m benchmarks.models.fingerprints           # exit status 1: the package has another table
    .venv/bin/python -m benchmarks.models.fingerprints --write   # rewriter/emit/huggingface/fingerprints.json

Asks pip for every version that pyproject.toml allows, reads the modeling files of its wheel (about 13 MB each; nothing
is installed or imported), and fingerprints the decoder layers of every causal-LM type that the installed version has:
without how children are made, and with all of their code. Prints those whose wiring changed, and in which version.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import AutoModelForCausalLM

from rewriter.check.coverage.configs import registered_types, small_config
from rewriter.emit.huggingface.source_check import TABLE, fingerprint, table
from rewriter.tracing.meta_model import find_layers

PACKAGE = "transformers.models."
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table instead of comparing with it")
    parser.add_argument("--wheels", type=Path, help="a directory of wheels that are already there, and that keeps them")
    options = parser.parse_args()
    layers = decoder_layers()
    with tempfile.TemporaryDirectory(prefix="rewriter-wheels-") as scratch:
        wheels = options.wheels or Path(scratch)
        files = {version: modeling_files(version, wheels) for version in supported_versions()}
    found = {
        "versions": [*files],
        "forward": histories(layers, files, True),
        "whole": histories(layers, files, False),
    }
    for module, names in found["forward"].items():
        for name, history in names.items():
            if isinstance(history, dict) and None not in history.values() and len(history) > 1:
                print(f"{module}.{name} changed in {', '.join([*history][1:])}")
    text = as_json(found)
    print(f"{len(layers)} decoder layers, {len(files)} versions, {len(text) / 1e3:.0f} kB")
    if options.write:
        TABLE.write_text(text, encoding="utf-8")
    elif found != table():
        print(f"{TABLE} is another table. `--write` replaces it.")
        return 1
    return 0


def supported_versions() -> list[str]:
    """The versions of transformers that pyproject.toml allows and the package index has, oldest first."""
    stated = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    allowed = next(r.specifier for r in map(Requirement, stated) if r.name == "transformers")
    listed = subprocess.run([*PIP, "index", "versions", "transformers"], capture_output=True, text=True, check=True)
    offered = re.search(r"Available versions: (.*)", listed.stdout)
    assert offered is not None, listed.stdout
    return sorted(allowed.filter(offered[1].split(", ")), key=Version)


def modeling_files(version: str, wheels: Path) -> dict[str, str]:
    """The text of every modeling file of a version, by its module below `transformers.models`."""
    name = f"transformers-{version}-py3-none-any.whl"
    if not (wheels / name).exists():
        command = [*PIP, "download", "--quiet", "--no-deps", "--dest", str(wheels), f"transformers=={version}"]
        subprocess.run(command, check=True)
    with zipfile.ZipFile(wheels / name) as wheel:
        paths = [re.fullmatch(r"transformers/models/(\w+/modeling_\w+)\.py", path) for path in wheel.namelist()]
        return {path[1].replace("/", "."): wheel.read(path[0]).decode() for path in paths if path}


def decoder_layers() -> set[tuple[str, str]]:
    """The classes of decoder layers of all causal-LM types that can be built, as (module, class)."""
    found: set[type] = set()
    for model_type in registered_types():
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(small_config(model_type))
        except Exception as error:
            print(f"{model_type} cannot be built: {str(error).strip().splitlines()[0]}", file=sys.stderr)
            continue
        found |= {type(layer) for layer in find_layers(model)[1]}
    return {(c.__module__.removeprefix(PACKAGE), c.__name__) for c in found if c.__module__.startswith(PACKAGE)}


def histories(
    wanted: set[tuple[str, str]], files: Mapping[str, Mapping[str, str]], forward_only: bool
) -> dict[str, dict[str, Any]]:
    """By module and class: its fingerprint where all versions have the same, else by the version that brought it."""
    result: dict[str, dict[str, Any]] = {}
    for module, name in sorted(wanted):
        history: dict[str, str | None] = {}
        current = None
        for version, texts in files.items():
            before, current = current, digest(texts.get(module), name, forward_only)
            if current != before:
                history[version] = current
        alone = [*history] == [next(iter(files))]
        result.setdefault(module, {})[name] = next(iter(history.values())) if alone else history
    return result


known: dict[tuple[str, str, bool], str | None] = {}  # most files are the same in several versions


def digest(text: str | None, name: str, forward_only: bool) -> str | None:
    """The fingerprint of a class; None where the file, or the class in it, does not exist."""
    if text is None:
        return None
    if (text, name, forward_only) not in known:
        exists = re.search(rf"^ *class {name}\b", text, re.MULTILINE)
        known[text, name, forward_only] = fingerprint(text, name, forward_only) if exists else None
    return known[text, name, forward_only]


def as_json(found: Mapping[str, Any]) -> str:
    """The table as JSON, a module on a line."""
    parts = [f' "versions": {json.dumps(found["versions"])}']
    for kind in ("forward", "whole"):
        rows = [f"  {json.dumps(module)}: {json.dumps(names)}" for module, names in found[kind].items()]
        parts.append(f' "{kind}": {{\n' + ",\n".join(rows) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
