"""From a directory to running ranks: loading, its refusals, and generation under torchrun."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import runtime_qwen
import runtime_reference as reference
import torch
from ranks import RankError, run_ranks
from runtime_qwen_outputs import manifest, write
from safetensors.torch import load_file, save_file

from rewriter import RewriterError
from rewriter.runtime import Context, load
from rewriter.runtime.generation.worker import launch
from rewriter.runtime.loading import rank_device

PROMPTS = [[5, 9, 33], [60, 2, 17, 40, 8]]


def edit(root, change):
    """Apply `change` to the tensors of rank 0."""
    path = root / "runtime/tp1/rank-0.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def test_loads_every_tensor_and_keeps_constants(tmp_path):
    model = load(write(tmp_path, 1))
    assert not model.training
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(state, reference.weights(), rtol=0, atol=0)
    torch.testing.assert_close(model.model.inv_freq, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    ids = torch.tensor([PROMPTS[1]])
    expected = reference.logits(reference.weights(), ids, runtime_qwen.LADDER_FROM)
    torch.testing.assert_close(model(ids, torch.arange(5)[None], Context()), expected, rtol=1e-4, atol=1e-4)
    assert not list(tmp_path.rglob("__pycache__"))


def test_dtype_applies_to_weights_and_not_to_constants(tmp_path):
    model = load(write(tmp_path, 1), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.model.inv_freq.dtype == torch.float32


TIED = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(2))
"""


@pytest.mark.parametrize("stored", [["embed.weight"], ["head.weight"]])
def test_tied_weights_stay_one_parameter_under_either_name(tmp_path, stored):
    write(tmp_path, 1, source=TIED)
    tensors = {name: torch.arange(32.0).reshape(8, 4) for name in stored} | {"seen": torch.ones(2)}
    save_file(tensors, tmp_path / "runtime/tp1/rank-0.safetensors")
    model = load(tmp_path)
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(model.head.weight.detach(), torch.arange(32.0).reshape(8, 4))
    torch.testing.assert_close(model.seen, torch.ones(2))


def test_names_and_shapes_are_checked_both_ways(tmp_path):
    write(tmp_path, 1)
    edit(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(
        RewriterError, match=r"rank-0.safetensors: it does not fit its module: missing model.norm.weight"
    ):
        load(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31), "extra": torch.ones(1)}))
    with pytest.raises(
        RewriterError, match=r"unknown extra; model.norm.weight has shape \[31\], the module expects \[32\]"
    ):
        load(tmp_path)


def test_padding_of_other_rows_is_refused(tmp_path):
    model, ids = load(write(tmp_path, 1)), torch.tensor([PROMPTS[0]])
    with pytest.raises(RewriterError, match=r"first_valid \[2\]: expected the padding of each row, \[1\]"):
        model(ids, ctx=Context(first_valid=torch.zeros(2, dtype=torch.int64)))


def runtime(change):
    """An edit of the manifest's entry of the runtime module."""
    return lambda root: manifest(root, lambda m: change(m["runtime"]["tp1"]))


def shared(grid):
    return runtime(lambda m: m.update(sequence={"kind": "ring", "grid": grid, "overlap": False}))


BREAKAGES = {
    "no manifest": (lambda root: (root / "rewrite.json").unlink(), "no rewrite.json in it"),
    "half a manifest": (lambda root: (root / "rewrite.json").write_text('{"mesh"'), "not valid JSON"),
    "a manifest without runtime": (
        lambda root: manifest(root, lambda m: m.pop("runtime")),
        "describes no runtime module",
    ),
    "a manifest of lists": (lambda root: (root / "rewrite.json").write_text("[]"), "it holds a list, not an object"),
    "too few files": (runtime(lambda m: m.update(ranks=[])), "lists 0 rank files for 1 ranks"),
    "a path outside": (
        runtime(lambda m: m.update(module="../module.py")),
        "'../module.py' points outside the directory",
    ),
    "no module": (lambda root: (root / "runtime/tp1/module.py").unlink(), "module.py: no such file"),
    "another class": (runtime(lambda m: m.update({"class": "Other"})), "no class 'Other' in it"),
    "a cut file": (
        lambda root: os.truncate(root / "runtime/tp1/rank-0.safetensors", 1000),
        "rank-0.safetensors: not a valid safetensors file",
    ),
    "a grid that is none": (shared([2, 1, 1]), r"describes no runtime module \(at grid \[2, 1, 1\]: a ring"),
    "a grid of other ranks": (shared([1, 2, 1]), "its mesh has sp=1, but its tokens are sharded by ring 1×2×1"),
    "another number of ranks": (
        lambda root: (shutil.rmtree(root), root.mkdir(), write(root, 2)),
        "for 2 ranks, but 1 runs. Start it with torchrun --nproc-per-node 2",
    ),
}


@pytest.mark.parametrize("what", BREAKAGES)
def test_a_broken_directory_is_refused_with_its_reason(tmp_path, what):
    root = tmp_path / "out"
    write(root, 1)
    breakage, reason = BREAKAGES[what]
    breakage(root)
    with pytest.raises(RewriterError, match=reason):
        load(root)


def load_here(group, directory):
    return load(directory)


def test_the_wrong_number_of_processes_names_both(tmp_path):
    with pytest.raises(RankError, match=r"for 4 ranks, but 2 run. Start it with torchrun --nproc-per-node 4"):
        run_ranks(load_here, 2, str(write(tmp_path, 4)))


def load_copies(group, directory):
    model = load(directory, dp=2)
    return model.model.embed_tokens.weight.detach()


def test_copies_of_the_model_stand_side_by_side(tmp_path):
    """dp=2 of a module for two ranks: neighbours are one copy's tensor-parallel ranks."""
    shards = run_ranks(load_copies, 4, str(write(tmp_path, 2)))
    own = [
        reference.shard("model.embed_tokens.weight", reference.weights()["model.embed_tokens.weight"], r, 2)
        for r in (0, 1)
    ]
    assert not torch.equal(*own)
    torch.testing.assert_close(shards, [*own, *own], rtol=0, atol=0)


def load_too_few(group, directory):
    return load(directory, dp=3)


def test_a_product_of_axes_is_refused_by_name(tmp_path):
    wrong = r"for 6 ranks \(dp=3 × tp=2\), but 2 run. Start it with torchrun --nproc-per-node 6, pass dp=1, or rewrite"
    with pytest.raises(RankError, match=wrong):
        run_ranks(load_too_few, 2, str(write(tmp_path, 2)))
    with pytest.raises(RewriterError, match="dp=0: expected 1 or more"):
        load(tmp_path, dp=0)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_launch_generates_on_real_ranks(tmp_path, ranks):
    w = {name: value.double() for name, value in reference.weights().items()}
    expected = [reference.greedy(w, prompt, 12, runtime_qwen.LADDER_FROM) for prompt in PROMPTS]
    request = {"prompts": PROMPTS, "max_new_tokens": 12}
    heard = [[] for _ in PROMPTS]

    def on_token(prompt, token, seconds, compiling):
        assert compiling == 0
        heard[prompt].append((token, seconds))
        return False

    found = launch(write(tmp_path, ranks), ranks, request, timeout=600, on_token=on_token)
    assert found["tokens"] == expected
    for times in found["seconds"]:
        assert len(times) == 12
        assert times[0] > 0
        assert times == sorted(times)
    assert heard == [list(zip(*both, strict=True)) for both in zip(found["tokens"], found["seconds"], strict=True)]


@pytest.mark.slow
def test_tokens_come_while_ranks_run_and_a_listener_ends_a_prompt(tmp_path):
    """The first prompt would get 100,000 tokens: the second begins because the listener has enough of it."""
    heard = [[], []]

    def on_token(prompt, token, *_):
        heard[prompt].append(token)
        return len(heard[prompt]) == 3

    w = {name: value.double() for name, value in reference.weights().items()}
    expected = [reference.greedy(w, prompt, 3, runtime_qwen.LADDER_FROM) for prompt in PROMPTS]
    request = {"prompts": PROMPTS, "max_new_tokens": 100_000}
    found = launch(write(tmp_path, 2), 2, request, timeout=600, on_token=on_token)
    assert found["tokens"] == heard == expected
    assert [len(times) for times in found["seconds"]] == [3, 3]


@pytest.mark.slow
def test_one_seed_gives_one_text_on_any_ranks_and_beside_any_prompts(tmp_path):
    request = {"max_new_tokens": 12, "temperature": 1.2, "top_p": 0.9, "top_k": 30, "seed": 5}
    (tmp_path / "alone").mkdir()
    both = launch(write(tmp_path, 2), 2, {**request, "prompts": PROMPTS}, timeout=600)["tokens"]
    alone = launch(write(tmp_path / "alone", 1), 1, {**request, "prompts": PROMPTS[1:]}, timeout=600)["tokens"]
    assert alone == both[1:]


def alive(directory):
    """Processes whose command line names `directory`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] if os.fsencode(directory) in path.read_bytes() else []
        except OSError:
            continue
    return found


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that a process of this local rank sees so many; the list of those made current."""

    def pretend(count, local_rank, visible=None):
        current = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(str(device)))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return current

    return pretend


@pytest.mark.parametrize(
    ("count", "local_rank", "visible", "device", "expected"),
    [
        (4, 2, None, None, "cuda:2"),
        (4, 2, "4,5,6,7", "cuda", "cuda:2"),
        (1, 3, "3", None, "cuda:0"),  # SLURM's --gpus-per-task=1
        (1, 3, None, "cuda:0", "cuda:0"),
        (4, 0, None, "cuda:3", "cuda:3"),
        (4, 2, None, "cpu", None),
        (0, 2, None, None, None),
    ],
)
def test_a_rank_takes_its_gpu_and_makes_it_current(gpus, count, local_rank, visible, device, expected):
    current = gpus(count, local_rank, visible)
    assert str(rank_device(device)) == (expected or "cpu")
    assert current == ([expected] if expected else [])


def test_a_gpus_attention_does_not_plan_for_every_length_unless_asked_to(gpus, monkeypatch):
    from rewriter.common.processes import environment

    name = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
    monkeypatch.setenv(name, "0")
    gpus(1, 0)
    rank_device()
    assert os.environ[name] == environment()[name] == "0"
    monkeypatch.delenv(name)
    assert environment()[name] == "1"
    rank_device("cpu")
    assert name not in os.environ
    rank_device()
    assert os.environ[name] == "1"


def test_ranks_that_srun_starts_have_slurms_numbers(gpus, monkeypatch):
    gpus(4, 1)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert str(rank_device()) == "cuda:1"  # torchrun's, within a task of SLURM's
    monkeypatch.delenv("LOCAL_RANK")
    assert str(rank_device()) == "cuda:3"
    monkeypatch.delenv("SLURM_LOCALID")
    assert str(rank_device()) == "cuda:0"


@pytest.mark.parametrize(
    ("count", "local_rank", "visible", "device", "message"),
    [
        (1, 1, None, None, r"local rank 1: this process sees 1 GPU\. Use .*device='cuda:0' if each process sees a GPU"),
        (2, 2, "0,1", None, r"local rank 2: this process sees 2 GPUs\. Use fewer ranks, or device='cpu'$"),
        (0, 0, None, "cuda", r"local rank 0: this process sees 0 GPUs\."),
        (2, 0, None, "cuda:3", r"device cuda:3: this process sees 2 GPUs\. Choose another"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(gpus, count, local_rank, visible, device, message):
    current = gpus(count, local_rank, visible)
    with pytest.raises(RewriterError, match=message):
        rank_device(device)
    assert current == []


HANGS = "import time\nfrom torch import nn\nclass Model(nn.Module):\n    def __init__(self, mesh):\n        {body}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_that_hang_are_stopped(tmp_path):
    write(tmp_path, 2, source=HANGS.format(body="time.sleep(3600)"))
    with pytest.raises(RewriterError, match="2 ranks gave no result in 3 s, and were stopped"):
        launch(tmp_path, 2, {"prompts": PROMPTS, "max_new_tokens": 2}, timeout=3)
    deadline = time.monotonic() + 120
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(tmp_path)


@pytest.mark.slow
def test_a_failing_rank_is_reported_with_its_traceback_and_stops_the_others(tmp_path):
    body = 'if mesh.get_rank() == 1: raise ValueError("the reason")\n        time.sleep(3600)'
    write(tmp_path, 2, source=HANGS.format(body=body))
    with pytest.raises(RewriterError, match=r"rank 1 failed:\n(.|\n)*ValueError: the reason"):
        launch(tmp_path, 2, {"prompts": PROMPTS, "max_new_tokens": 2}, timeout=600)


KILLED = """
import os, signal, threading, time, torch
from torch import nn
class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def end():
            os.kill(os.getpid(), signal.SIGKILL)
        if mesh.get_rank() == 1:
            threading.Timer(1.0, end).start()
        {body}
"""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("time.sleep(3600)", marks=pytest.mark.slow),
        "torch.distributed.barrier(); torch.distributed.recv(torch.ones(1), 1 - mesh.get_rank())",
    ],
    ids=["waits for nothing", "waits for the killed rank"],
)
def test_a_killed_rank_is_named_and_the_others_end(tmp_path, body):
    """Also where the other ranks ignore SIGTERM, or fail themselves because the killed one is gone."""
    write(tmp_path, 2, source=KILLED.format(body=body))
    with pytest.raises(RewriterError, match="rank 1 was killed by SIGKILL"):
        launch(tmp_path, 2, {"prompts": PROMPTS, "max_new_tokens": 2}, timeout=600)
    assert not alive(tmp_path)
