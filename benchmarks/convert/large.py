"""Does a checkpoint that is larger than memory convert with --link? One of holes: headers and sizes, no blocks.

    python -m benchmarks.convert.large [--gigabytes 40] [--tp 8] [--seed 0] [--verify none] [--dir DIR] [--json]

Tensors stand in a random order in files of 5 GB. The conversion reads and hashes all bytes, which are zeros, and writes
links. Prints its seconds, memory and bytes written. Exit code: 1 if more than 0.8 GB were resident (without
verification), if more than 20 MB were written, or if the manifest's hashes are not those of the files.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from benchmarks.convert.run import CONVERT, RECIPE, taken
from benchmarks.support.process_tree import run
from benchmarks.support.random_checkpoint import Sizes, make
from rewriter.emit.files.output_directory import sha256_of

RESIDENT_LIMIT = 0.8e9
WRITTEN_LIMIT = 20e6


def main() -> int:
    parser = argparse.ArgumentParser(description="A checkpoint of holes, larger than memory, converted with --link.")
    parser.add_argument("--gigabytes", type=float, default=40, help="size of the checkpoint (default 40)")
    parser.add_argument("--tp", type=int, default=8, help="ranks (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of tensors over files (default 0)")
    parser.add_argument("--verify", default="none", help="none (default), shrunken or full")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: the system's temporary files)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    wrong = []
    with tempfile.TemporaryDirectory(prefix="large-", dir=options.dir) as root:
        source, out = Path(root, "source"), Path(root, "out")
        source.mkdir()
        layers = make(source, options.gigabytes, replace(Sizes(), file_bytes=5e9), holes=True, shuffle=options.seed)
        arguments = {"tp": options.tp, "link": True, "verify": options.verify}
        used = run(CONVERT, source, RECIPE, out, json.dumps(arguments))
        written = taken(out, source)
        hashes = json.loads((out / "rewrite.json").read_text())["files"]
        last = sorted(source.glob("*.safetensors"))[-1].name
        if hashes[last] != sha256_of(out / last):
            wrong.append(f"{last} does not have the hash that the manifest says")
        figures = {
            "bytes": taken(source),
            "blocks": sum(512 * path.stat().st_blocks for path in source.iterdir()),
            "layers": layers,
            "seconds": used.seconds,
            "resident": used.resident,
            "written": written,
        }
    if used.resident > RESIDENT_LIMIT and options.verify == "none":
        wrong.append(f"{used.resident / 1e9:.2f} GB resident, limit {RESIDENT_LIMIT / 1e9}")
    if written > WRITTEN_LIMIT:
        wrong.append(f"{written / 1e6:.1f} MB written, limit {WRITTEN_LIMIT / 1e6}")
    console = Console(highlight=False)
    if options.json:
        print(json.dumps(figures | {"faults": wrong}, indent=2))
    else:
        console.print(
            f"{figures['bytes'] / 1e9:.1f} GB in {layers} layers, of which {figures['blocks'] / 1e6:.1f} MB are on the "
            f"disk: converted in {used.seconds:.0f} s, {used.resident / 1e9:.2f} GB resident, {written / 1e6:.2f} MB "
            "written"
        )
    for fault in wrong:
        console.print(f"FAILED: {fault}", style="red")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
