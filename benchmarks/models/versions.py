"""Do emitted checkpoints run with other versions of transformers, and compute the same there?

    .venv/bin/python -m benchmarks.models.versions [--versions 5.17.0,5.20.0,5.23.0] [--families llama,mixtral]

Small models of the tests' zoo are rewritten (ladder, and desync bound to two ranks) and emitted with the installed
version. Each other version loads and runs what was emitted, with transformers alone: a forward pass of 21 tokens, and 8
more by greedy generation with its cache. Then the other way round: emitted with each other version, run with the
installed one. Logits must agree with those of the emitting version to `--tolerance` of the largest one, and nothing may
warn of a name that a version gave up.

Another version is installed into a directory that stands before the environment's own packages, with those of its
requirements that the environment does not meet; torch is the environment's. Needs a package index, unless `--packages`
has them all. Exits with 1 where anything is not as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import transformers
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
VERSIONS = "5.17.0,5.20.0,5.23.0"
FAMILIES = "llama,qwen3,gemma3_text,mixtral,gpt_oss,olmo2"
EMIT = """
import sys
from pathlib import Path
import emitted, zoo
from rewriter.emit.huggingface import emit_huggingface
from rewriter.passes.desync import Desync
from rewriter.passes.ladder import Ladder
from rewriter.passes.merge_reductions import MergeReductions
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.tracing import trace
root = Path(sys.argv[1])
for family in sys.argv[2].split(","):
    source = root / "sources" / family
    zoo.save(family, source)
    program = trace(source)
    emitted.write(emit_huggingface(Ladder().apply(program)), source, root / f"{family}-ladder")
    ranks = MergeReductions().apply(TensorParallel().apply(program.with_(mesh={"tp": 2})))
    emitted.write(emit_huggingface(Desync(n=2).apply(ranks)), source, root / f"{family}-desync")
"""

RUN = """
import json, sys, warnings
from pathlib import Path
import torch, transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
assert transformers.__version__ == sys.argv[3], (transformers.__version__, transformers.__file__)
torch.set_num_threads(1)
ids = torch.arange(3, 24)[None] * 7 % 250
refused, names = {}, ("past_key_values", "cache_params", "layer_past")
warnings.simplefilter("always")
warnings.showwarning = lambda message, *_: said.append(str(message))
for path in sorted(Path(sys.argv[1]).glob("*-*")):
    said = []
    try:
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float32).eval()
    except ImportError as error:
        refused[path.name] = str(error)
        continue
    with torch.no_grad():
        steps = model.generate(ids, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
        logits = torch.cat([model(ids).logits, torch.stack(steps.logits, 1)], 1)
    if said := [text for text in said if any(name in text for name in names)]:
        refused[path.name] = f"{len(said)} warnings, {said[0]}"
        continue
    save_file({"logits": logits.contiguous()}, Path(sys.argv[2]) / f"{path.name}.safetensors")
(Path(sys.argv[2]) / "refused.json").write_text(json.dumps(refused))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", default=VERSIONS, help=f"of transformers (default: {VERSIONS})")
    parser.add_argument("--families", default=FAMILIES, help=f"of tests/support/zoo.py (default: {FAMILIES})")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of the largest logit (default: 1e-5)")
    parser.add_argument("--packages", type=Path, help="a folder that keeps what is installed, a folder per version")
    options = parser.parse_args()
    here, others = transformers.__version__, options.versions.split(",")
    with tempfile.TemporaryDirectory(prefix="rewriter-versions-") as scratch:
        root = Path(scratch)
        if options.packages is not None:
            (root / "packages").symlink_to(options.packages.resolve())
        for version in others:
            if not (root / "packages" / version / "transformers").exists():
                install(version, root / "packages" / version)
        failures = 0
        for emitting in (here, *others):
            checkpoints = root / emitting
            python(root, emitting, EMIT, checkpoints, options.families)
            for running in (emitting, *(others if emitting == here else [here])):
                results = root / f"{emitting} in {running}"
                results.mkdir()
                python(root, running, RUN, checkpoints, results, running)
                own = root / f"{emitting} in {emitting}"
                failures += compare(own, results, emitting, running, options.tolerance) if results != own else 0
    return int(failures > 0)


def install(version: str, target: Path) -> None:
    """transformers of a version into `target`, with what it requires and the environment does not meet."""
    missing = [Requirement(f"transformers=={version}")]
    while missing:
        requirement = missing.pop()
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*pip, "--no-deps", "--target", str(target), str(requirement)], check=True)
        added = next(
            d for d in distributions(path=[str(target)]) if canonical(d) == canonicalize_name(requirement.name)
        )
        needed = [r for r in map(Requirement, added.requires or ()) if r.marker is None or r.marker.evaluate()]
        missing += [r for r in needed if r.name not in {m.name for m in missing} and not met(r, target)]


def met(requirement: Requirement, target: Path) -> bool:
    """Whether a package of `target`, or of the environment where it is not there, is what a requirement asks for."""
    name = canonicalize_name(requirement.name)
    found = next((d for d in distributions(path=[str(target)]) if canonical(d) == name), None)
    try:
        return requirement.specifier.contains((found or distribution(name)).version, prereleases=True)
    except ModuleNotFoundError:
        return False


def canonical(package: Distribution) -> str:
    return canonicalize_name(package.metadata["Name"])


def python(root: Path, version: str, code: str, *arguments: object) -> None:
    """`code` in a process of its own with a version of transformers. Raises CalledProcessError where it fails."""
    paths = [root / "packages" / version] * (version != transformers.__version__) + [
        REPOSITORY,
        REPOSITORY / "tests" / "support",
    ]
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_MODULES_CACHE": str(root / "modules" / version),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TQDM_DISABLE": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    subprocess.run(command, env={**os.environ, **settings}, check=True, stdout=subprocess.DEVNULL)


def compare(expected: Path, results: Path, emitting: str, running: str, tolerance: float) -> int:
    """Print a line per checkpoint, and return how many are not as expected."""
    refused = json.loads((results / "refused.json").read_text())
    if unusable := json.loads((expected / "refused.json").read_text()):
        raise SystemExit(f"{emitting} does not run what it emitted: {unusable}")
    failures = 0
    for file in sorted(expected.glob("*.safetensors")):
        if file.stem in refused:
            good, text = False, f"refused: {refused[file.stem]}"
        else:
            logits, found = (load_file(folder / file.name)["logits"] for folder in (expected, results))
            error = float((logits - found).abs().max() / logits.abs().max())
            good, text = error <= tolerance, f"{error:.1e}"
        failures += not good
        print(f"{emitting} in {running}  {file.stem:20} {'ok' if good else 'WRONG'}  {text}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())
