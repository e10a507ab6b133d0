"""Weights that are no finite numbers: found while they are copied or converted, and known to every comparison."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_checkpoints import make
from refusals import Capture, refused, written
from safetensors.torch import load_file, save_file

from rewriter.api import convert
from rewriter.check.comparison import Verification
from rewriter.check.drift import DriftSums
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.numbers import json_text
from rewriter.convert.save_options import SaveOptions
from rewriter.weights import Checkpoint, finite
from rewriter.weights.checkpoint import torch_dtype
from rewriter.weights.early_copies import EarlyCopies
from rewriter.weights.finite import check_finite, first_broken
from rewriter.weights.header import BITS, encode_header

NAME = "model.layers.1.mlp.down_proj.weight"
NAN, INF = float("nan"), float("inf")


def spoil(model: Path, value: float, dtype: torch.dtype = torch.bfloat16, name: str = NAME, at: int = -1) -> str:
    """Write the checkpoint with another value at one place; returns how that place is named."""
    file = model / "model.safetensors"
    tensors = {n: t.to(dtype) for n, t in load_file(file).items()}
    tensors.setdefault(name, torch.zeros(4, dtype=dtype)).view(-1)[at] = value
    place = torch.unravel_index(torch.tensor(tensors[name].numel() + at), tensors[name].shape)
    save_file(tensors, file, {"format": "pt"})
    return f"{name}{[int(i) for i in place]}"


@pytest.mark.parametrize(
    ("value", "said", "more"),
    [
        (NAN, "NaN", []),
        (NAN, "NaN", ["--dtype", "fp32"]),
        (INF, "infinity", ["--link"]),
        (-INF, "-infinity", ["--materialize", "--tp", "2"]),
    ],
)
def test_it_is_refused_while_it_streams(model: Path, capsys: Capture, value: float, said: str, more: list[str]) -> None:
    where = spoil(model, value)
    message = refused(capsys, "m", "--recipe", "ladder", "--out", "out", "--verify", "none", *more)
    assert message.startswith(f"m/model.safetensors: {where} is {said} (BF16), and a model computes nothing with that")


def test_a_number_beyond_fp16(model: Path, capsys: Capture) -> None:
    where = spoil(model, 70000.0)
    message = refused(capsys, "m", "--recipe", "ladder", "--out", "out", "--verify", "none", "--dtype", "fp16")
    assert f"m/model.safetensors: {where} is 70144, and F16 holds at most 65504" in message
    written(capsys)


def test_what_no_parameter_is_made_of_may_be_anything(model: Path, capsys: Capture) -> None:
    spoil(model, -INF, name="model.layers.0.self_attn.rotary_emb.inv_freq")
    written(capsys, "--tp", "2")


# Formats


def elements(dtype: str, *codes: int) -> torch.Tensor:
    data = bytearray(b"".join(code.to_bytes(BITS[dtype] // 8, "little") for code in codes))
    return torch.frombuffer(data, dtype=torch_dtype(dtype, "elements"))


@pytest.mark.parametrize(
    ("dtype", "largest", "broken"),
    [
        ("F64", 0xFFEF_FFFF_FFFF_FFFF, (0x7FF0_0000_0000_0000, 0xFFF8_0000_0000_0001)),
        ("F32", 0xFF7F_FFFF, (0x7F80_0000, 0xFFC0_0001)),
        ("F16", 0xFBFF, (0x7C00, 0xFE00)),
        ("BF16", 0xFF7F, (0xFF80, 0x7FC1)),
        ("F8_E5M2", 0xFB, (0x7C, 0xFE)),
        ("F8_E4M3", 0xFE, (0x7F, 0xFF)),
        ("F8_E8M0", 0xFE, (0xFF,)),
        ("F8_E4M3FNUZ", 0xFF, (0x80,)),
        ("F8_E5M2FNUZ", 0x7F, (0x80,)),
        ("U8", 0xFF, ()),
    ],
)
def test_every_format_has_numbers_of_its_own(dtype: str, largest: int, broken: tuple[int, ...]) -> None:
    """`largest` is a finite number of the greatest magnitude, by its bits."""
    assert first_broken(elements(dtype, 0, largest, 1)) is None
    for code in broken:
        assert first_broken(elements(dtype, 0, largest, code, code)) == 2


@pytest.mark.parametrize("shift", range(9))
def test_elements_across_the_ends_of_pieces(tmp_path: Path, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of others start a tensor at any byte."""
    monkeypatch.setattr(finite, "PIECE", 1 << 20)
    header = encode_header({"b": ("U8", (shift,), shift), "w": ("F32", (600_000,), 2_400_000)}, {})
    values = np.zeros(600_000, "<f4")
    for element in (0, (1 << 20) // 4 - 1, (1 << 20) // 4, 599_999):
        values[:] = 0
        values[element] = NAN
        (tmp_path / "model.safetensors").write_bytes(header + b"\xff" * shift + values.tobytes())
        checkpoint = Checkpoint.open(tmp_path)
        with pytest.raises(RewriterError, match=rf"w\[{element}\] is NaN"):
            check_finite(checkpoint, {"w": "F32"})
        with EarlyCopies(checkpoint, None) as early, pytest.raises(RewriterError, match=rf"w\[{element}\] is NaN"):
            early.sha256(checkpoint.files[0], {"w": "F32"})
        check_finite(checkpoint, {"b": "U8"})


@pytest.mark.parametrize(
    ("kind", "part", "code"),
    [("fp8-blocks", "_proj.weight", 0x7F), ("fp8-blocks", "_scale_inv", NAN), ("mxfp4", "_scales", 255)],
)
@pytest.mark.fast("fp8-blocks-_proj.weight-127", "fp8-blocks-_scale_inv-nan")
def test_codes_and_scales_of_quantized_weights(tmp_path: Path, kind: str, part: str, code: float) -> None:
    make(kind, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith(part))
    broken = tensors[name] if tensors[name].dtype == torch.float32 else tensors[name].view(torch.uint8)
    broken.view(-1)[3] = code
    save_file(tensors, file, {"format": "pt"})
    for dequantize in (False, True):
        with pytest.raises(RewriterError, match=rf"{name}\[.*\] is NaN"):
            convert(
                tmp_path / "m",
                "ladder",
                out=tmp_path / "out",
                options=SaveOptions(verify="none", dequantize=dequantize),
            )
        assert not (tmp_path / "out").exists()


# What computes with weights, and what compares


def broken_output(model: Path, capsys: Capture) -> str:
    """An output `out` as a trainer that diverged left it: its hashes are those of its files."""
    written(capsys)
    where = spoil(Path("out"), NAN, torch.float32)
    manifest = json.loads(Path("out/rewrite.json").read_text())
    manifest["files"]["model.safetensors"] = hashlib.sha256(Path("out/model.safetensors").read_bytes()).hexdigest()
    Path("out/rewrite.json").write_text(json.dumps(manifest))
    return where


def test_commands_on_an_output_that_is_not_finite(model: Path, capsys: Capture) -> None:
    where = broken_output(model, capsys)
    for words in (["verify", "out"], ["bisect", "out"]):
        assert f"out/model.safetensors: {where} is NaN" in refused(capsys, *words, code=3)


def test_commands_on_a_model_that_is_not_finite(model: Path, capsys: Capture) -> None:
    where = spoil(model, NAN)
    for words in (
        ["bisect", "m", "--recipe", "ladder", "--weights", "real"],
        ["m", "--recipe", "drop-sync", "--tp", "2", "--out", "out"],
        ["search", "m", "--tp", "2", "--out", "found.yaml"],
    ):
        message = refused(capsys, *words)
        assert message.startswith("m")
        assert f": {where} is NaN" in message


def test_comparisons_know_numbers_that_are_not_finite() -> None:
    good, bad = torch.ones(2, 3), torch.tensor([[1.0, NAN, 1.0], [1.0, 1.0, INF]])
    for actual, expected, said in (
        (bad, good, "2 of 6 values"),
        (good, bad, "2 of 6 expected"),
        (bad, bad, "2 of 6 v"),
    ):
        with pytest.raises(VerificationError, match=said):
            Verification().require("it", actual, expected, 1e-4)
        with pytest.raises(VerificationError):
            Verification().require_quantized("it", [actual], [expected], [good + 1], 0.5)
    drift = DriftSums()
    drift.add(torch.tensor([0, 1]), good, bad)
    with pytest.raises(VerificationError, match="logits are not finite"):
        drift.result("a text")
    drift = DriftSums()
    drift.add(torch.tensor([0, 1]), good, torch.tensor([[1e4, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    assert drift.result("a text").perplexity_after == pytest.approx(np.exp(700.0))


def test_json_is_what_every_reader_takes() -> None:
    data = {"a": [1.5, NAN, (INF, -INF)], "b": {"c": NAN, "d": True, "e": None, "f": 3}}
    assert json_text(data) == '{"a": [1.5, null, [null, null]], "b": {"c": null, "d": true, "e": null, "f": 3}}'
