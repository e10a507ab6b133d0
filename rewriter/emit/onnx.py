"""The single-device model of an output directory as ONNX: explicit positions, no cache, any batch and length.

    input_ids, position_ids: int64 [batch, length]  →  logits: float32 [batch, length, vocabulary]

Attention is causal over the full row; rows of different lengths are padded on the right, where padding is not seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.files import read_json
from rewriter.common.packages import require
from rewriter.common.run_context import RunContext
from rewriter.common.text_settings import quantization_settings
from rewriter.output.manifest import read_manifest
from rewriter.tracing.length_rotary import rotary_by_length

# A protobuf file ends at 2 GiB; above this many bytes of weights they are in FILE.data. Some room is for the graph.
MAX_INLINE_BYTES = 1_900_000_000

LIMIT = 1e-4  # relative error between onnxruntime and torch, both in float32
_CHECKED_SHAPES = ((2, 21), (1, 1), (3, 33))


def export_onnx(directory: Path, file: Path, context: RunContext = RunContext()) -> None:
    """Write the model in `directory` to `file` as ONNX in float32 and check it against torch under onnxruntime.

    The directory's own code runs only if it is what its manifest says, or where `context` trusts it. `file` and, for
    models above 2 GB, `file`.data are written beside their place and renamed once they have been checked.

    Raises RewriterError when the onnx extra is not installed, `file` exists or its directory does not, the directory
    holds no model, or its code was changed; VerificationError when onnxruntime computes something else.
    """
    require("onnx", "ONNX export")
    import onnxruntime

    data = file.with_name(f"{file.name}.data")
    for target in (file, data):
        if target.exists():
            raise RewriterError(f"{target} exists already. Choose another file, or delete it yourself.")
    if not file.parent.is_dir():
        raise RewriterError(f"{file.parent}: no such directory to write {file.name} to. Make it first.")
    model = _load(directory, context.trust_remote_code)
    staging = Path(tempfile.mkdtemp(prefix=f".{file.name}.writing-", dir=file.parent))
    try:
        _write(model, staging / file.name)
        _check(model, onnxruntime, staging / file.name)
        for name in (data.name, file.name):  # the graph last: it is what says that the export is complete
            if (staging / name).exists():
                with open(staging / name, "rb") as written:
                    os.fsync(written.fileno())
                os.rename(staging / name, file.with_name(name))
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _load(directory: Path, trust_remote_code: bool) -> nn.Module:
    """The model in float32, with the attention and the experts that can be exported."""
    from transformers import AutoModelForCausalLM

    config = read_json(directory / "config.json", "It is no Hugging Face model.")
    if quantization_settings(config):
        raise RewriterError(
            f"{directory}: its weights are quantized, and the export is of plain ones. Rewrite the model with "
            "--dequantize, and export that."
        )
    if "auto_map" in config and not trust_remote_code:
        _require_own_code(directory)
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            directory,
            trust_remote_code=True,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="batched_mm",  # the one without a loop over what the router chose
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise RewriterError(f"{directory}: the model cannot be loaded: {str(error).splitlines()[0]}") from error
    return model.eval()


def _require_own_code(directory: Path) -> None:
    """Raise RewriterError unless every Python file here is the one that `rewrite` wrote."""
    files = read_manifest(directory).files
    for path in sorted(directory.glob("*.py")):
        if files.get(path.name) != hashlib.sha256(path.read_bytes()).hexdigest():
            raise RewriterError(
                f"{path}: not the code that `rewrite` wrote, so it is not run. Rewrite the model again, or trust it: "
                "--trust-remote-code"
            )


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        # Positions without a mask would be searched for packed sequences, which depends on their values.
        mask = torch.ones_like(input_ids)
        out: torch.Tensor = self.model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False
        ).logits
        return out


def _example(model: nn.Module, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary: int = model.config.get_text_config(decoder=True).vocab_size  # type: ignore[operator]
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(length))
    return ids, torch.arange(length).expand(batch, length).contiguous()


def _write(model: nn.Module, path: Path) -> None:
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    axes = {0: "batch", 1: "length"}
    with _quiet(), torch.no_grad(), rotary_by_length(model, {}):
        exported = torch.export.export(
            _Logits(model),
            _example(model, *_CHECKED_SHAPES[0]),
            dynamic_shapes={"input_ids": dynamic, "position_ids": dynamic},
            strict=False,
        )
        program = torch.onnx.export(
            exported,
            dynamo=True,
            verbose=False,
            input_names=["input_ids", "position_ids"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": axes, "position_ids": axes},
        )
    assert program is not None
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    program.save(path, external_data=nbytes > MAX_INLINE_BYTES)


def _check(model: nn.Module, runtime: Any, path: Path) -> None:
    """Raise VerificationError unless onnxruntime and torch agree on shapes that were not traced."""
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for shape in _CHECKED_SHAPES:
        ids, positions = _example(model, *shape)
        with torch.no_grad():
            expected = _Logits(model)(ids, positions)
        actual = session.run(["logits"], {"input_ids": ids.numpy(), "position_ids": positions.numpy()})[0]
        error = float((torch.from_numpy(actual) - expected).abs().max() / expected.abs().max())
        if not error <= LIMIT:  # NaN fails too
            raise VerificationError(
                f"the ONNX model differs from torch at {shape}: relative error {error:.1e} > {LIMIT}"
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says about packages that it does not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
