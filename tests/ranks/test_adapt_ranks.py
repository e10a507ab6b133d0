"""`rewrite adapt` on real ranks: the losses, gradients and weights of one device, however the ranks share the work."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
from general_streams import HEALED
from ranks import run_ranks
from safetensors.torch import load_file

from rewriter.adapt.adaptation import adapt
from rewriter.adapt.loop import read_metrics
from rewriter.adapt.options import AdaptOptions
from rewriter.output.manifest import read_manifest

STEPS, ROWS = 4, 8
SETTINGS = {"max_steps": STEPS, "learning_rate": 1e-2, "warmup_steps": 1, "use_cpu": True}
Case = tuple[str, dict[str, Any]]
"""Name of the directory, options."""
Gathered = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def train(group: Any, files: dict[str, Path], out: Path, cases: list[Case]) -> None:
    """Each case in turn, into directories `out`/0, 1, …; every rank calls it."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")  # for node-local weights
    world = 1 if group is None else group.size()
    for index, (name, options) in enumerate(cases):
        replicas = world // (options.get("tp", 1) * options.get("sp", 1))
        train_one(files, name, out / str(index), replicas, **options)


PLAIN = {"method": "sft", "too_long": "truncate"}


def train_one(
    files: dict[str, Path],
    name: str,
    out: Path,
    replicas: int = 1,
    resume: bool = False,
    save_steps: int = 100,
    **options: Any,
) -> None:
    """Two backward passes a step, whose rows have different numbers of targets."""
    settings = SETTINGS | {"gradient_accumulation_steps": 2, "per_device_train_batch_size": ROWS // 2 // replicas}
    settings["save_steps"] = save_steps
    adapt(
        files[name], data=files["text"], evaluation=files["evaluation"], out=out, verify="none", resume=resume,
        options=AdaptOptions(length=adapted.LENGTH, settings=settings, **(PLAIN | options)),
    )  # fmt: skip


CHECKPOINTS: dict[str, tuple[Any, ...]] = {
    "ladder": ("ladder", 2),
    "wide": ("ladder", 2, "llama", 256),
    "desync": ("desync-4x-sum", 2),
    "mixtral": ("ladder", 2, "mixtral"),
    "prompt-ladder": ("prompt-ladder", 2),
    "prompt-desync": ("prompt-desync", 2),
    **{family: ("ladder", 2, family) for family in HEALED},
}
"""By the name of a case, what `adapted.directory` takes."""


def files(cases: list[Case]) -> dict[str, Path]:
    """The texts, and the directories of the cases by name."""
    texts = {"text": adapted.text_file(), "evaluation": adapted.text_file(20, 1)}
    return texts | {name: adapted.directory(*CHECKPOINTS[name]) for name, _ in cases}


def alone(name: str, **options: Any) -> Path:
    """The result on one device, trained once."""
    out = adapted.root() / "-".join(["alone", name, *map(str, options.values())])
    if not out.exists():
        train(None, files([(name, options)]), out, [(name, options)])
    return out / "0"


def assert_same_metrics(result: Path, expected: Path) -> None:
    """Losses and gradient norms, within rounding."""
    ours, theirs = read_metrics(result / "training"), read_metrics(expected / "training")
    assert len(ours) == len(theirs) == STEPS
    for a, b in zip(ours, theirs, strict=True):
        assert math.isclose(a["loss"], b["loss"], rel_tol=2e-5), (a, b)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-3), (a, b)
        assert a["learning_rate"] == b["learning_rate"]


def assert_same_training(result: Path, expected: Path) -> None:
    """Losses, gradient norms and losses after training, within rounding; weights, which bf16 rounds, mostly equal."""
    assert_same_metrics(result, expected)
    written = load_file(expected / "model.safetensors")
    for name, tensor in load_file(result / "model.safetensors").items():
        differs = (tensor != written[name]).float().mean()
        assert differs < 0.02, f"{name}: {differs:.1%} of its elements"


def assert_same_change(result: Path, expected: Path, source: Path) -> None:
    """Losses within rounding; weights that training moved from `source` to the same place, within 2 % of the way.

    Adam divides small gradients by their size, those of mixing coefficients too, so that more elements round
    otherwise than `assert_same_training` takes. A doubly stochastic mixture is the same for biases that differ by a
    number per row or column: along these the gradient of `hc_…_base` is rounding, of which Adam makes whole steps.
    """
    assert_same_metrics(result, expected)
    before, found, wanted = (load_file(folder / "model.safetensors") for folder in (source, result, expected))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        off, way = ((tensor.double() - other[name].double()).norm() for other in (found, before))
        assert off <= (0.1 if "hc_" in name and name.endswith("_base") else 0.02) * way, (
            f"{name}: {off / way:.1%} of its change"
        )


TWO: list[Case] = [
    ("ladder", {"zero": "3"}),
    ("desync", {"tp": 2}),
    ("mixtral", {"ep": 2}),
]
SHARED = ("method", "train", "lora", "base", "packing")
"""Options that change what is learned."""


def learned(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in SHARED}


def of_two(group: Any, files: dict[str, Path], out: Path) -> Gathered:
    train(group, files, out, TWO)
    halves(group, files, out / "resumed", {"zero": "3", "dp": 2})
    return gathered(group)


@pytest.fixture(scope="module")
def two() -> tuple[Path, list[Gathered]]:
    """The results of `TWO`, of a run by FSDP2 that was resumed, and what each rank computes with quantized weights."""
    out = adapted.root() / "two"
    return out, run_ranks(of_two, 2, files(TWO), out)


@pytest.mark.parametrize("index", range(len(TWO)), ids=["fsdp2", "tp", "ep"])
def test_two_ranks_train_as_one_device(index: int, two: tuple[Path, list[Gathered]]) -> None:
    """Data-parallel by FSDP2; tensor-parallel, a checkpoint bound to its ranks, which one device computes too;
    expert-parallel."""
    name, options = TWO[index]
    assert_same_training(two[0] / str(index), alone(name, **learned(options)))


MORE_OF_TWO: list[Case] = [
    ("ladder", {}),  # ZeRO 1
    ("ladder", {"tp": 2}),
    ("ladder", {"zero": "2"}),
    ("desync", {"zero": "3"}),
    ("ladder", {"sp": 2}),
    ("mixtral", {"tp": 2}),
    ("ladder", {"tp": 2, "method": "distill", "train": "all"}),
    ("ladder", {"zero": "3", "method": "distill", "train": "all"}),
    ("ladder", {"zero": "3", "lora": 4}),
    ("mixtral", {"ep": 2, "method": "distill", "lora": 4}),
    ("wide", {"zero": "3", "lora": 4, "base": "int8"}),
    ("prompt-ladder", {"method": "distill"}),
    ("prompt-ladder", {"zero": "3", "method": "distill", "train": "all"}),
    ("prompt-ladder", {"tp": 2, "method": "distill", "train": "all"}),
    ("prompt-ladder", {"sp": 2, "method": "distill", "train": "all"}),
    ("prompt-desync", {"tp": 2}),
    ("prompt-desync", {"tp": 2, "method": "distill", "train": "all"}),
]


@pytest.mark.slow
def test_two_ranks_train_as_one_device_in_every_other_way(tmp_path: Path) -> None:
    run_ranks(train, 2, files(MORE_OF_TWO), tmp_path, MORE_OF_TWO, timeout=600)
    for index, (name, options) in enumerate(MORE_OF_TWO):
        assert_same_training(tmp_path / str(index), alone(name, **learned(options)))


@pytest.mark.slow
@pytest.mark.parametrize("family", HEALED)
def test_two_ranks_heal_values_that_layers_hand_on_as_one_device(family: str, tmp_path: Path) -> None:
    """Tensor-parallel; data-parallel, where indexers have no gradient, with optimizers in shards and by FSDP2."""
    whole = {"packing": family not in ("zaya", "deepseek_v4")}  # whose rows have a state
    cases: list[Case] = [(family, whole | options) for options in ({"tp": 2}, {}, {"zero": "3"})]
    run_ranks(train, 2, files(cases), tmp_path, cases, timeout=1800)
    expected = alone(family, **whole)
    for index in range(len(cases)):
        assert_same_change(tmp_path / str(index), expected, files(cases)[family])
    done = read_manifest(expected).adaptation
    assert done is not None
    assert done.losses["after"] < done.losses["before"]


FOUR: list[Case] = [
    ("ladder", {}),
    ("ladder", {"zero": "3"}),
    ("ladder", {"tp": 2}),
    ("ladder", {"tp": 2, "zero": "3"}),
    ("desync", {"tp": 2, "zero": "3"}),
    ("ladder", {"sp": 2, "zero": "3"}),
    ("ladder", {"tp": 2, "sp": 2}),
    ("mixtral", {"ep": 2, "ep_order": "D+E"}),
    ("mixtral", {"ep": 2, "ep_order": "E+D"}),
]


@pytest.mark.slow
def test_four_ranks_train_as_one_device(tmp_path: Path) -> None:
    """dp 4 by ZeRO 1 and FSDP2; tp 2 × dp 2 with summed gradients and with FSDP2; sequence ranks with either; experts
    on pairs of neighbours, and of ranks far apart."""
    run_ranks(train, 4, files(FOUR), tmp_path, FOUR, timeout=900)
    for index, (name, _) in enumerate(FOUR):
        assert_same_training(tmp_path / str(index), alone(name))


def on_two_nodes(group: Any, files: dict[str, Path], out: Path) -> tuple[list[int], list[torch.Tensor]]:
    """Node-local training on nodes of two ranks: the ranks that this rank's weights are sharded over, and its shards
    after the last step."""
    from rewriter.adapt import output

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found: list[Any] = []
    merge = output.merge

    def watched(built: Any) -> None:
        parameters = list(built.model.module.parameters())
        found.append(parameters[0].device_mesh.mesh.tolist())
        found.append([p.to_local().clone() for p in parameters])
        merge(built)

    output.merge = watched
    train(group, files, out, [("ladder", {"zero": "node-local"})])
    return found[0], found[1]


@pytest.mark.slow
def test_weights_stay_in_their_node(tmp_path: Path) -> None:
    """Nodes hold equal bits, and training is that of one device but for what messages between nodes round."""
    ranks = run_ranks(on_two_nodes, 4, files([("ladder", {})]), tmp_path, timeout=300)
    assert [held for held, _ in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for (_, one), (_, other) in zip(ranks[:2], ranks[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    ours, theirs = (read_metrics(path / "training") for path in (tmp_path / "0", alone("ladder")))
    assert len(ours) == len(theirs) == STEPS
    assert math.isclose(ours[0]["loss"], theirs[0]["loss"], rel_tol=2e-5)
    assert theirs[-1]["loss"] < 0.8 * theirs[0]["loss"]
    for a, b in zip(ours, theirs, strict=True):
        assert math.isclose(a["loss"], b["loss"], rel_tol=0.03), (a, b)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=0.1), (a, b)
    assert a["loss"] != b["loss"], "messages were not quantized"


def halves(group: Any, files: dict[str, Path], out: Path, options: dict[str, Any]) -> None:
    """A run that stops after its first checkpoint, by an error on all ranks, and is resumed."""
    from rewriter.adapt.loop import AdaptTrainer

    before, calls, name = AdaptTrainer.training_step, [], "mixtral" if "ep" in options else "ladder"
    os.environ["LOCAL_WORLD_SIZE"] = "1"

    def step(self: AdaptTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2 * 3:
            raise KeyboardInterrupt
        return before(self, *args, **kwargs)

    AdaptTrainer.training_step = step  # type: ignore[method-assign]
    replicas = options.pop("dp", 1)
    for resume in (False, True):
        try:
            train_one(files, name, out, replicas, resume, save_steps=2, **options)
        except KeyboardInterrupt:
            assert not resume
    AdaptTrainer.training_step = before  # type: ignore[method-assign]


def assert_same_losses(result: Path, expected: Path) -> None:
    ours, theirs = (read_metrics(path / "training") for path in (result, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert (a["step"], a["loss"], a["grad_norm"]) == (b["step"], b["loss"], b["grad_norm"])


def test_ranks_that_are_interrupted_go_on_with_the_same_losses(two: tuple[Path, list[Gathered]]) -> None:
    assert_same_losses(two[0] / "resumed", two[0] / "0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"ep": 2, "dp": 2}, {"zero": "node-local", "dp": 2}, {"zero": "2", "dp": 2}, {"tp": 2}],
    ids=["ep", "node-local", "zero 2", "tp"],
)
def test_ranks_of_every_other_kind_that_are_interrupted_do(options: dict[str, Any], tmp_path: Path) -> None:
    case = ("mixtral" if "ep" in options else "ladder", {k: v for k, v in options.items() if k != "dp"})
    run_ranks(halves, 2, files([case]), tmp_path / "out", dict(options))
    run_ranks(train, 2, files([case]), tmp_path, [case])
    assert_same_losses(tmp_path / "out", tmp_path / "0")


def gathered(group: Any) -> Gathered:
    """What a layer computes: with weights as they are, quantized on their way, and within `exact_weights`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from rewriter.training import zero_plus_plus
    from rewriter.training.zero.plus_plus import exact_weights

    torch.manual_seed(0)
    model, x = torch.nn.Linear(64, 64), torch.randn(4, 64)
    whole = model(x)
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size(),)))
    zero_plus_plus(model, weights="int8", node=group.size())
    with torch.no_grad():
        quantized = model(x)  # FSDP2 keeps what the root gathered
        with exact_weights(model):
            exact = model(x)
        again = model(x)
    assert torch.equal(quantized, again)
    return whole.detach(), quantized, exact


def test_what_is_measured_is_what_is_stored_though_weights_travel_quantized(two: tuple[Path, list[Gathered]]) -> None:
    for whole, quantized, exact in two[1]:
        assert torch.allclose(exact, whole, rtol=1e-6, atol=1e-7)
        assert (quantized - whole).abs().max() > 1e-4
