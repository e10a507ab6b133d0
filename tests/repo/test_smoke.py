"""The way of a user through the package on the model that ships, in two minutes: what `make matrix` runs per cell.

Each result is compared with one that comes from elsewhere: transformers' eager model, the program simulated in one
process, or a count by hand.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import TINY_LLAMA
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rewriter as rw
from rewriter import api
from rewriter.ir import Program

MODEL = TINY_LLAMA
RECIPE = "ladder-upper-half"
IDS = torch.arange(3, 40)[None] * 7 % 250
PYTHON = [sys.executable, "-W", "ignore"]

# A rank of the written module, or, without torchrun, the checkpoint by transformers alone.
RUN = """
import os, sys, torch
from safetensors.torch import save_file
ids = torch.arange(3, 40)[None] * 7 % 250
if "RANK" in os.environ:
    import rewriter as rw
    model = rw.load(sys.argv[1], device="cpu", dtype=torch.float32).eval()
else:
    sys.modules["rewriter"] = None
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32).eval()
with torch.no_grad():
    logits = model(ids)
logits = getattr(logits, "logits", logits)
save_file({"logits": logits.contiguous()}, f"{sys.argv[2]}-{os.environ.get('RANK', 'one')}.safetensors")
"""


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of logits, as a share of the largest logit."""
    assert found.shape == expected.shape == (1, IDS.shape[1], 264)
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def ran(words: list[str]) -> str:
    """What a command prints. Fails with what it says where it does not end well."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return done.stdout


@pytest.fixture(scope="module")
def program() -> Program:
    return rw.trace(MODEL)


@pytest.fixture(scope="module")
def simulated(program: Program) -> torch.Tensor:
    """Logits of the rewritten program, both ranks in this process, in fp32."""
    return rw.simulate(rw.rewrite(program, RECIPE, tp=2), IDS, dtype=torch.float32)


@pytest.fixture(scope="module")
def original() -> torch.Tensor:
    """Logits of transformers' eager model, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes, its ranks verified."""
    out = tmp_path_factory.mktemp("smoke") / "out"
    ran([*PYTHON, "-m", "rewriter.cli", str(MODEL), "--recipe", RECIPE, "--tp", "2", "--out", str(out)])
    return out


def test_every_module_can_be_imported() -> None:
    """A private name that torch or transformers no longer has is found here."""
    import rewriter

    failed = {}
    # What vLLM needs, scripts, what Triton needs, templates.
    left_out = ("serving.vllm", "__main__", "load_huggingface", "_triton", "huggingface.verbatim")
    names = [module.name for module in pkgutil.walk_packages(rewriter.__path__, "rewriter.", onerror=failed.setdefault)]
    for name in names:
        if not any(part in name for part in left_out):
            try:
                importlib.import_module(name)
            except Exception as error:
                failed[name] = repr(error)
    assert len(names) > 300
    assert failed == {}


def test_the_trace_computes_what_the_model_computes(program: Program, original: torch.Tensor) -> None:
    assert difference(rw.simulate(program, IDS, dtype=torch.float32), original) < 1e-5


@pytest.mark.slow
@pytest.mark.smoke
def test_the_checkpoint_is_the_program_in_transformers_alone(
    written: Path, simulated: torch.Tensor, original: torch.Tensor, tmp_path: Path
) -> None:
    ran([*PYTHON, "-c", RUN, str(written), str(tmp_path / "logits")])
    assert difference(load_file(tmp_path / "logits-one.safetensors")["logits"], simulated) < 1e-5
    assert difference(simulated, original) > 1e-2  # the recipe changes the function


@pytest.mark.slow
@pytest.mark.smoke
def test_two_ranks_are_one(written: Path, simulated: torch.Tensor, tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(RUN)
    torchrun = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran([*torchrun, str(tmp_path / "run.py"), str(written), str(tmp_path / "logits")])
    ranks = [load_file(tmp_path / f"logits-{rank}.safetensors")["logits"] for rank in range(2)]
    assert torch.equal(*ranks)
    assert difference(ranks[0], simulated) < 1e-5


@pytest.mark.slow
@pytest.mark.smoke
def test_two_steps_on_two_ranks_are_those_on_one(written: Path, tmp_path: Path) -> None:
    text = (MODEL / "heldout.txt").read_text()
    lines = [json.dumps({"text": text[i : i + 400]}) for i in range(0, 24 * 400, 400)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:16]))
    (tmp_path / "eval.jsonl").write_text("\n".join(lines[16:]))
    words = ["--data", str(tmp_path / "train.jsonl"), "--eval", str(tmp_path / "eval.jsonl"), "--length", "128"]
    words += ["--verify", "none", "--json", "--train", "all"]  # as the sharded module trains
    for setting in ("max_steps=2", "learning_rate=2e-4", "warmup_steps=0", "use_cpu=true", "bf16=false"):
        words += ["--set", setting]
    losses = {}
    for name, more in {"one": [], "two": ["--tp", "2"]}.items():
        command = [*PYTHON, "-m", "rewriter.cli", "adapt", str(written), "--out", str(tmp_path / name)]
        report = json.loads(ran([*command, *words, *more]))
        assert report["adaptation"]["steps"] == 2
        losses[name] = report["losses"]
    assert losses["one"]["original"] < losses["one"]["after"] < losses["one"]["before"]
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-5)


def test_the_prediction_counts_what_ranks_send() -> None:
    """Six layers of two sums, one of the embeddings, and one gather of logits; half of the weights are a rank's."""
    found = {
        p.recipe: p.decode
        for p in api.predict(MODEL, workload=api.Workload(tp=2), cluster=api.Cluster(fabric="pcie-gen4")).predictions
    }
    sizes = [span.nbytes for span in found["tensor-parallel"].spans if span.lane == "communication"]
    assert sizes == [192 * 2] * 13 + [264 * 2]
    attention, mlp = (8 + 2 * 4 + 8) * 24 * 192, 3 * 512 * 192
    norms = (2 * 6 + 1) * 192
    weights = 6 * (attention + mlp) // 2 + 264 // 2 * 192 + norms
    assert found["tensor-parallel"].weight_bytes == 2 * weights
    assert found["ladder"].exposed_seconds < found["tensor-parallel"].exposed_seconds
