"""`rewrite bisect DIR`: a fault in written files is found where it was put."""

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
from rewriter.common.errors import VerificationError

LAYERS = "model.layers"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source") / "small"
    zoo.save("llama", root)
    return root


@pytest.fixture(scope="module")
def written(source: Path) -> Path:
    out = source.parent / "out"
    api.convert(source, "ladder", out=out, tp=2, options=api.SaveOptions(verify="none"))
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


def signed(fault: Callable[[Path], None]) -> Callable[[Path], None]:
    """Written wrong: the manifest has the hash of the wrong file."""

    def change(root: Path) -> None:
        fault(root)
        faults.sign(root)

    return change


MODULE, MODELING = "runtime/tp2/module.py", "modeling_rewriter_llama.py"
O_PROJ = '"model.layers.2.self_attn.o_proj.weight", 1, [[[0, 32]], [[32, 64]]]'

MLP_UP, MLP_DOWN, O_WEIGHT = (
    f"{LAYERS}.{n}.weight" for n in ("3.mlp.up_proj", "2.mlp.down_proj", "2.self_attn.o_proj")
)

# (what is done to the files, stage, layer, module, statement, part of the cause)
FAULTS: list[tuple[Any, str, int | None, str, str, str]] = [
    (tensor(MLP_UP, lambda t: t * 2), "weights", 3, f"{LAYERS}.3.mlp.up_proj", MLP_UP, "values"),
    (tensor(f"{LAYERS}.1.self_attn.k_proj.weight", shuffled), "weights", 1, f"{LAYERS}.1.self_attn.k_proj",
     f"{LAYERS}.1.self_attn.k_proj.weight", "another order"),
    (tensor(O_WEIGHT, one_element), "weights", 2, f"{LAYERS}.2.self_attn.o_proj", O_WEIGHT, "‖difference‖ 1"),
    (tensor("model.norm.weight", torch.zeros_like), "weights", None, "model.norm", "model.norm.weight", "values"),
    (text(MODULE, "F.silu(gate) * up", "F.silu(gate) + up"), "sharded module", 0, f"{LAYERS}.0.mlp",
     "F.silu(gate) * up", f"{MODULE}, line "),
    (text(MODELING, "+ mlp", "- mlp"), "adapted checkpoint", 0, f"{LAYERS}.0", "+ mlp", f"{MODELING}, line "),
    (text("runtime/tp2/weights.json", O_PROJ, O_PROJ.replace("[[32, 64]]", "[[0, 32]]")), "sharded module", 2,
     f"{LAYERS}.2.self_attn.o_proj", O_WEIGHT, "runtime/tp2/weights.json, line "),
    (text("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'), "adapted checkpoint", 0,
     f"{LAYERS}.0.input_layernorm", "rms_norm_eps: 1e-06", "config.json, line "),
    (signed(tensor(MLP_DOWN, torch.neg)), "weights", 2, f"{LAYERS}.2.mlp.down_proj", MLP_DOWN, "values"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "stage", "layer", "module", "statement", "cause"), FAULTS, ids=range(len(FAULTS))
)  # fmt: skip
@pytest.mark.fast("0", "1", "2", "3", "4", "5")
def test_a_file_that_is_wrong_is_found(
    copy: Path, source: Path, fault: Any, stage: str, layer: int | None, module: str, statement: str, cause: str
) -> None:
    fault(copy)
    got = api.bisect(copy, source=source).fault
    assert got is not None
    assert (got.stage, got.layer, got.module) == (stage, layer, module), got
    assert statement in got.statement, got
    assert cause in got.cause, got
    assert {line[0] for line in got.difference} >= {"-", "+"}


def test_what_was_written_wrong_is_found_where_hashes_agree(copy: Path, source: Path) -> None:
    """A fault of emission: the manifest has the hash of the wrong file."""
    faults.spoil_text(copy / MODULE, "x = x + self_attn\n", "x = x\n", 1)
    faults.sign(copy)
    found = api.bisect(copy, source=source)
    assert found.fault is not None
    assert found.steps[0].name == "files"
    assert found.steps[0].held
    assert (found.fault.stage, found.fault.statement) == ("sharded module", "x = x + self_attn"), found.fault
    assert found.fault.layer is not None


def test_without_the_source_what_is_not_finite_is_found(copy: Path) -> None:
    faults.spoil_tensor(copy, f"{LAYERS}.1.mlp.gate_proj.weight", lambda t: t * torch.nan)
    with pytest.raises(VerificationError, match=r"layers\.1\.mlp\.gate_proj\.weight"):
        api.bisect(copy)


def test_nothing_is_found_in_an_output_that_is_right(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The source is found by its name, beside the output."""
    assert main(["bisect", str(written), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    names = ["files", "tracing", "tensor_parallel", "merge_reductions", "ladder", "fuse_projections", "overlap"]
    assert [s["name"] for s in data["steps"]] == [*names, "weights", "adapted checkpoint", "sharded module"]
    assert all(s["held"] for s in data["steps"])


@pytest.mark.slow
def test_rounding_that_was_asked_for_is_no_fault(source: Path, tmp_path: Path) -> None:
    api.convert(source, "ladder", out=tmp_path / "out", tp=2, options=api.SaveOptions(verify="none", dtype="bf16"))
    found = api.bisect(tmp_path / "out", source=source)
    assert found.fault is None
    assert [step.held for step in found.steps[-2:]] == [True, True]


def test_another_model_is_no_source(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo.save("qwen2", tmp_path / "other")
    assert main(["bisect", str(copy), "--source", str(tmp_path / "other")]) == 2
    assert "is not the one that was rewritten" in capsys.readouterr().err


@pytest.mark.slow
def test_a_changed_module_of_another_number_of_ranks_is_named(copy: Path) -> None:
    api.reshard(copy, 4, verify="none")
    text("runtime/tp4/module.py", "silu", "relu")(copy)
    fault = api.bisect(copy).fault
    assert fault is not None
    assert fault.cause == "runtime/tp4/module.py is not as it was written"
