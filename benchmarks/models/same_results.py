"""Do two commits compute the same? Every shipped recipe on every family of the tests' zoo, bit for bit.

    .venv/bin/python -m benchmarks.models.same_results BASE [HEAD] [--families llama,gpt2] [--recipes ladder,desync-2x]

Both commits are checked out beside each other and convert the same small models (made by BASE's zoo of tests) by the
same recipes (the files of BASE, so that what a shipped recipe lists may change between the commits). Of every output,
the adapted checkpoint's logits, as transformers computes them, and the runtime module's on two gloo ranks are compared:
equal bits, else the largest difference in units of the largest logit. A conversion that one commit refuses must be
refused by the other. Exits with 1 where anything differs by more than `--tolerance` (default: 0, equal bits).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rewriter.common.processes import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
LENGTHS = (21, 12)  # tokens: beyond every window of the zoo, and few
RANKS = 2

MAKE = """
import sys, zoo
from pathlib import Path
for name in sys.argv[2].split(",") if sys.argv[2] else zoo.FAMILIES:
    zoo.save(name, Path(sys.argv[1]) / name)
"""

CONVERT = """
import inspect, json, sys, warnings
from pathlib import Path
import torch
from rewriter.api import convert
from rewriter.convert.save_options import SaveOptions
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
models, outputs, lengths = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[4])
refused = {}
# Earlier commits take the fields of SaveOptions one by one.
takes_options = "context" in inspect.signature(convert).parameters
unverified = {"options": SaveOptions(verify="none")} if takes_options else {"verify": "none"}
for model in sorted(models.iterdir()):
    for recipe in sys.argv[3].split(","):
        name = Path(recipe).stem
        out = outputs / f"{model.name}+{name}"
        sequence = any(word in name for word in ("attention", "ulysses", "long-context"))
        try:
            convert(model, recipe, out=out, **unverified, **({"sp": 2} if sequence else {"tp": 2}))
        except Exception as error:
            refused[out.name] = f"{type(error).__name__}: {error}"
            continue
        torch.manual_seed(0)
        try:
            found = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32).eval()
            with torch.no_grad():
                logits = {str(n): found(torch.arange(3, 3 + n)[None] * 7 % 250).logits.contiguous() for n in lengths}
        except Exception as error:
            refused[out.name] = f"loading: {type(error).__name__}: {error}"
            continue
        save_file(logits, outputs / f"{out.name}.checkpoint.safetensors")
(outputs / "refused.json").write_text(json.dumps(refused))
"""

RUN = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from safetensors.torch import save_file
from rewriter.runtime import Context, load
torch.set_num_threads(1)
outputs, lengths = Path(sys.argv[1]), json.loads(sys.argv[2])
failed = {}
for out in sorted(p for p in outputs.iterdir() if p.is_dir() and (p / "runtime").is_dir()):
    try:
        model = load(out, device="cpu", dtype=torch.float32)
        with torch.no_grad():
            logits = {}
            for n in lengths:
                ids = torch.arange(3, 3 + n)[None] * 7 % 250
                logits[str(n)] = model(ids, torch.arange(n)[None], Context()).float().contiguous()
    except Exception as error:
        failed[out.name] = f"{type(error).__name__}: {error}"
        continue
    if dist.get_rank() == 0:
        save_file(logits, outputs / f"{out.name}.ranks.safetensors")
if dist.get_rank() == 0:
    (outputs / "failed.json").write_text(json.dumps(failed))
dist.barrier()
dist.destroy_process_group()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("head", nargs="?", default="HEAD")
    parser.add_argument("--families", default="", help="of tests/support/zoo.py; all without it")
    parser.add_argument("--recipes", default="", help="names of shipped recipes; all of BASE without it")
    parser.add_argument("--tolerance", type=float, default=0.0, help="of the largest logit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rewriter-same-") as scratch:
        return compare(options, Path(scratch))


def compare(options: argparse.Namespace, scratch: Path) -> int:
    """Convert and run with both commits, then print what differs."""
    trees = {
        name: checkout(commit, scratch / name) for name, commit in (("base", options.base), ("head", options.head))
    }
    models = scratch / "models"
    models.mkdir()
    try:
        python(trees["base"], MAKE, models, options.families)
        library = trees["base"] / "rewriter/recipes/library"
        wanted = options.recipes.split(",") if options.recipes else sorted(p.stem for p in library.glob("*.yaml"))
        recipes = ",".join(str(library / f"{name}.yaml") for name in wanted if name != "upper-bound")
        for name, tree in trees.items():
            outputs = scratch / f"{name}-outputs"
            outputs.mkdir()
            python(tree, CONVERT, models, outputs, recipes, json.dumps(LENGTHS))
            python(tree, RUN, outputs, json.dumps(LENGTHS), ranks=RANKS)
    finally:
        for tree in trees.values():
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=REPOSITORY, check=False)
    return report(scratch / "base-outputs", scratch / "head-outputs", options.tolerance)


def checkout(commit: str, place: Path) -> Path:
    subprocess.run(["git", "worktree", "add", "-q", "--detach", str(place), commit], cwd=REPOSITORY, check=True)
    return place


def python(tree: Path, code: str, *arguments: object, ranks: int = 0) -> None:
    """Run `code` with the package and the tests of `tree`; on gloo ranks, which share this machine's loopback."""
    script = tree.parent / "script.py"
    script.write_text(code)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(tree / part) for part in (".", "tests", "tests/support")),
        "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error", "HF_MODULES_CACHE": str(tree.parent / f"{tree.name}-modules"),
        "GLOO_SOCKET_IFNAME": "lo", "TQDM_DISABLE": "1",
    }  # fmt: skip
    command = [sys.executable, "-P", str(script)]
    if ranks:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={ranks}",
            f"--master-port={free_port()}",
        ]
        command.append(str(script))
    subprocess.run([*command, *map(str, arguments)], env=environment, cwd=tree, check=True)


def report(base: Path, head: Path, tolerance: float) -> int:
    """Print a line for every output that differs, and a summary; the exit code."""
    import torch
    from safetensors.torch import load_file

    wrong = equal = 0
    for kind in ("refused.json", "failed.json"):
        old, new = (json.loads((place / kind).read_text()) for place in (base, head))
        for name in sorted(old.keys() ^ new.keys()):
            wrong += 1
            print(f"{name}: {kind.removesuffix('.json')} by one only: {old.get(name)!r}, now {new.get(name)!r}")
    largest: dict[str, Any] = {}
    for path in sorted(base.glob("*.safetensors")):
        if not (head / path.name).is_file():
            continue  # reported above
        old, new = load_file(path), load_file(head / path.name)
        if all(torch.equal(old[key], new[key]) for key in old):
            equal += 1
            continue
        error = max(float((old[key] - new[key]).abs().max() / old[key].abs().max()) for key in old)
        largest[path.name.removesuffix(".safetensors")] = error
        wrong += error > tolerance
    for name, error in sorted(largest.items(), key=lambda item: -item[1]):
        print(f"{name}: differs by {error:.1e} of the largest logit")
    print(f"{equal} results equal bit for bit, {len(largest)} not, {wrong} beyond the tolerance or refused by one only")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
