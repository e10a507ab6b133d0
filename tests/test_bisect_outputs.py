"""`rewrite bisect DIR` and `rewrite bisect A B`: a fault in written files is found where it was put."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bisect_faults as faults
import pytest
import torch
import zoo

from rewriter import api
from rewriter.cli import main

LAYERS = "model.layers"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source") / "small"
    zoo.save("llama", root)
    return root


@pytest.fixture(scope="module")
def written(source: Path) -> Path:
    out = source.parent / "out"
    api.convert(source, "ladder", out=out, tp=2, verify="none")
    return out


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "copy")
    return tmp_path / "copy"


def shuffled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[torch.randperm(len(tensor), generator=torch.Generator().manual_seed(0))]


def one_element(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[1, 2] += 1
    return changed


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return partial(faults.spoil_tensor, name=name, change=change)


def text(file: str, old: str, new: str, number: int = 0) -> Callable[[Path], None]:
    return lambda root: faults.spoil_text(root / file, old, new, number)


MODULE, MODELING = "runtime/tp2/module.py", "modeling_rewriter_llama.py"
O_PROJ = '"model.layers.2.self_attn.o_proj.weight", 1, [[[0, 32]], [[32, 64]]]'

# (what is done to the files, stage, layer, operator, module, part of the cause)
FAULTS: list[tuple[Any, str, int | None, str, str, str]] = [
    (
        tensor(f"{LAYERS}.3.mlp.up_proj.weight", lambda t: t * 2),
        "weights",
        3,
        "up_proj",
        "layers.3.mlp.up_proj",
        "2 times",
    ),
    (
        tensor(f"{LAYERS}.1.self_attn.k_proj.weight", shuffled),
        "weights",
        1,
        "k_proj",
        "self_attn.k_proj",
        "another order",
    ),
    (tensor(f"{LAYERS}.2.self_attn.o_proj.weight", one_element), "weights", 2, "o_proj", "o_proj", "1 of 4,096"),
    (tensor("model.norm.weight", torch.zeros_like), "weights", None, "norm", "model.norm", "zero"),
    (
        text(MODULE, "F.silu(gate) * up", "F.silu(gate) + up"),
        "sharded module",
        0,
        "F.silu(gate) * up",
        "mlp",
        "`*` became `+`",
    ),
    (text(MODELING, "+ mlp", "- mlp"), "adapted checkpoint", 0, "+ mlp", "layers.0", "`+` became `-`"),
    (
        text("runtime/tp2/weights.json", O_PROJ, O_PROJ.replace("[[32, 64]]", "[[0, 32]]")),
        "sharded module",
        2,
        "o_proj",
        "self_attn.o_proj",
        "other elements",
    ),
]


@pytest.mark.parametrize(("fault", "stage", "layer", "operator", "module", "cause"), FAULTS, ids=range(len(FAULTS)))
def test_a_changed_file_is_found(
    copy: Path, source: Path, fault: Any, stage: str, layer: int | None, operator: str, module: str, cause: str
) -> None:
    fault(copy)
    got = api.bisect(copy, source=source).fault
    assert got is not None
    assert (got.stage, got.layer) == (stage, layer), got
    assert operator in got.operator, got
    assert module in got.module, got
    assert cause in got.cause, got


def test_a_changed_config_is_found_with_the_module_that_it_changes(copy: Path, source: Path) -> None:
    faults.spoil_text(copy / "config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1')
    got = api.bisect(copy, source=source).fault
    assert got is not None
    assert (got.stage, got.layer, got.operator) == ("adapted checkpoint", 0, "input_layernorm")
    assert "rms_norm_eps is 0.1, and was written as 1e-06" in got.cause


def test_what_was_written_wrong_is_found_where_hashes_agree(copy: Path, source: Path) -> None:
    """A fault of emission: the manifest has the hash of the wrong file."""
    faults.spoil_text(copy / MODULE, "x = x + self_attn\n", "x = x\n", 1)
    faults.sign(copy)
    found = api.bisect(copy, source=source)
    assert found.fault is not None
    assert found.steps[0].name == "files"
    assert found.steps[0].held
    assert (found.fault.stage, found.fault.operator) == ("sharded module", "x = x + self_attn"), found.fault
    assert found.fault.layer is not None


def test_weights_that_were_written_wrong_are_found_where_hashes_agree(copy: Path, source: Path) -> None:
    faults.spoil_tensor(copy, f"{LAYERS}.2.mlp.down_proj.weight", lambda t: -t)
    faults.sign(copy)
    got = api.bisect(copy, source=source).fault
    assert got is not None
    assert (got.stage, got.layer) == ("weights", 2)
    assert "-1 times" in got.cause


def test_without_the_source_what_is_not_finite_is_found(copy: Path) -> None:
    faults.spoil_tensor(copy, f"{LAYERS}.1.mlp.gate_proj.weight", lambda t: t * torch.nan)
    found = api.bisect(copy)
    assert found.fault is not None
    assert (found.fault.stage, found.fault.layer) == ("weights", 1)
    assert "is not here (--source DIR)" in found.notes[0]


def test_nothing_is_found_in_an_output_that_is_right(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The source is found by its name, beside the output."""
    assert main(["bisect", str(written), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    names = ["files", "tracing", "tensor_parallel", "merge_reductions", "ladder", "fuse_projections", "overlap"]
    assert [s["name"] for s in data["steps"]] == [*names, "weights", "adapted checkpoint", "sharded module"]
    assert all(s["held"] for s in data["steps"])


def test_rounding_that_was_asked_for_is_no_fault(source: Path, tmp_path: Path) -> None:
    api.convert(source, "ladder", out=tmp_path / "out", tp=2, verify="none", dtype="bf16")
    found = api.bisect(tmp_path / "out", source=source)
    assert found.fault is None
    assert [step.held for step in found.steps[-2:]] == [True, True]


def test_another_model_is_no_source(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo.save("qwen2", tmp_path / "other")
    assert main(["bisect", str(copy), "--source", str(tmp_path / "other")]) == 2
    assert "is not the one that was rewritten" in capsys.readouterr().err


# two directories


def test_two_that_agree(written: Path, copy: Path) -> None:
    found = api.bisect(written, copy)
    assert found.fault is None, found.sentence()
    assert [s.name for s in found.steps] == ["weights", "adapted checkpoint", "sharded module"]


def test_a_tensor_of_one_of_two(written: Path, copy: Path) -> None:
    faults.spoil_tensor(copy, f"{LAYERS}.3.self_attn.q_proj.weight", lambda t: t * 0.5)
    got = api.bisect(copy, written).fault
    assert got is not None
    assert (got.stage, got.layer) == ("weights", 3)
    assert "q_proj" in got.operator
    assert "0.5 times" in got.cause


def test_two_recipes_part_at_a_pass(source: Path, written: Path, tmp_path: Path) -> None:
    """Layers 2 and 3 alone: they part where layer 0's MLP reads."""
    api.convert(source, "ladder", out=tmp_path / "other", tp=2, verify="none", set={"ladder.layers": [2, 3]})
    got = api.bisect(tmp_path / "other", written).fault
    assert got is not None
    assert (got.stage, got.layer) == ("ladder", 0)
    assert "post_attention_layernorm" in got.operator


def test_an_output_beside_its_model(source: Path, tmp_path: Path) -> None:
    api.convert(source, "tensor-parallel", out=tmp_path / "exact", tp=2, verify="none")
    assert api.bisect(tmp_path / "exact", source).fault is None
    faults.spoil_text(tmp_path / "exact/config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1')
    got = api.bisect(tmp_path / "exact", source).fault
    assert got is not None
    assert got.layer == 0
    assert "input_layernorm" in got.operator + got.module
