"""Padding stays as it is while a model is healed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
from adapt_runs import run
from safetensors.torch import load_file

from rewriter.adapt import padded, students
from rewriter.api import convert
from rewriter.common.errors import VerificationError
from rewriter.convert.padding import padded_places
from rewriter.convert.save_options import SaveOptions
from rewriter.output.manifest import read_manifest


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads on two groups, padded for six ranks: some queries are padding beside real keys and values."""
    root = tmp_path_factory.mktemp("padded")
    adapted.write_source(root / "model")
    options = SaveOptions(verify="none")
    convert(
        root / "model",
        "fit-tp+ladder-upper-half",
        out=root / "out",
        tp=6,
        set={"fit_ranks.waste": 1e9},
        options=options,
    )
    return root / "out"


def padding_of(directory: Path) -> list[torch.Tensor]:
    """All that a checkpoint holds of padding."""
    tensors, padding = load_file(directory / "model.safetensors"), read_manifest(directory).padding
    assert padding is not None
    return [
        tensors[name].narrow(dim, start, stop - start)
        for name, places in padded_places(padding, list(tensors)).items()
        for dim, ranges, _ in places
        for start, stop in ranges
    ]


def healed(directory: Path, out: Path, **options: Any) -> Path:
    run(out, files=(directory, adapted.text_file(), adapted.text_file(20, 1)), **options)
    return out


@pytest.mark.parametrize("options", [
    {"method": "sft"}, pytest.param({"method": "sft", "lora": 4}, marks=pytest.mark.slow)
])  # fmt: skip
def test_padding_is_not_trained(directory: Path, options: dict[str, Any], tmp_path: Path) -> None:
    before, after = padding_of(directory), padding_of(healed(directory, tmp_path / "out", **options))
    assert len(before) > 20
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    weights = [load_file(path / "model.safetensors") for path in (directory, tmp_path / "out")]
    moved = [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
    assert any("q_proj" in name for name in moved)
    assert any("o_proj" in name for name in moved)


def test_padding_that_is_trained_is_found(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded leak: gradients are not masked."""
    monkeypatch.setattr(students, "mask_gradients", lambda module, masks: [])
    with pytest.raises(
        VerificationError, match=r"self_attn\.[qo]_proj\.weight: padding at .* was trained, and is not zero any more"
    ):
        healed(directory, tmp_path / "out", method="sft")
    assert not (tmp_path / "out").exists()


def test_masks_of_what_ranks_hold(directory: Path, tmp_path: Path) -> None:
    """Each element of the whole model's mask is in the mask of the rank that holds it."""
    from rewriter.convert.rewritten_source import open_output, rewritten, write_source

    opened = open_output(directory)
    padding = opened.manifest.padding
    assert padding is not None
    source = write_source(opened, tmp_path / "source")
    program = rewritten(opened, source)
    whole = padded.masks_of_program(padding, source, program.origin, 0)  # type: ignore[arg-type]
    kept = 0
    for rank in range(6):
        for name, own in padded.masks_of_program(padding, source, program, rank).items():
            parameter = program.parameters[name]
            for dim, mask in own.items():
                assert mask.shape == (parameter.shape[dim],)
                kept += int((mask == 0).sum())
    fused = sum(int((m == 0).sum()) for name, own in whole.items() for m in own.values() if "embed" not in name)
    assert kept >= fused > 0
