"""The single-device model of an output directory as ONNX: explicit positions, no cache, any batch and length.

    input_ids, position_ids: int64 [batch, length]  →  logits: float32 [batch, length, vocabulary]

Attention is causal over the full row; rows of different lengths are padded on the right, where padding is not seen.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

from rewriter.common.errors import RewriterError, VerificationError
from rewriter.common.files import read_json
from rewriter.common.packages import require
from rewriter.common.run_context import RunContext
from rewriter.common.text_settings import quantization_settings
from rewriter.emit.files.output_directory import sha256_of
from rewriter.output.manifest import read_manifest
from rewriter.tracing.length_rotary import rotary_by_length
from rewriter.tracing.mixer_functions import loop_over_tokens

# A protobuf file ends at 2 GiB; above this many bytes of weights they are in FILE.data. Some room is for the graph.
MAX_INLINE_BYTES = 1_900_000_000

LIMIT = 1e-4  # relative error between onnxruntime and torch, both in float32
_CHECKED_SHAPES = ((2, 21), (1, 1), (3, 33))


def export_onnx(directory: Path, file: Path, context: RunContext = RunContext()) -> None:
    """Write the model in `directory` to `file` as ONNX in float32 and check it against torch under onnxruntime.

    The directory's own code runs only if it is what its manifest says, or where `context` trusts it. `file` and, for
    models above 2 GB, `file`.data are written next to their place and renamed once they have been checked.

    Raises RewriterError when the onnx extra is not installed, `file` exists or its directory does not, the directory
    holds no model, or its code was changed; VerificationError when onnxruntime computes something else.
    """
    require("onnx", "ONNX export")
    data = file.with_name(f"{file.name}.data")
    for target in (file, data):
        if target.exists():
            raise RewriterError(f"{target} exists already. Choose another file, or delete it yourself.")
    if not file.parent.is_dir():
        raise RewriterError(f"{file.parent}: no such directory to write {file.name} to. Make it first.")
    model = _load(directory, context.trust_remote_code)
    if (where := loop_over_tokens(model)) is not None:
        raise RewriterError(
            f"ONNX export: {where} computes its state in a loop as long as the sequence, and these files are for any "
            "length. Run the model with `rewrite generate`, or serve it in vLLM"
        )
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.writing-", dir=file.parent) as staging:
        written = Path(staging) / file.name
        _write(model, written)
        _check(model, written)
        for name in (data.name, file.name):  # the graph last: it is what says that the export is complete
            if (Path(staging) / name).exists():
                os.rename(Path(staging) / name, file.with_name(name))


def _load(directory: Path, trust_remote_code: bool) -> nn.Module:
    """The model in float32, with the attention and the experts that can be exported."""
    from rewriter.common.model_class import auto_class, load_config

    config = read_json(directory / "config.json", "It is no Hugging Face model.")
    if quantization_settings(config):
        raise RewriterError(
            f"{directory}: its weights are quantized, and the export is of plain ones. Rewrite the model with "
            "--dequantize, and export that."
        )
    if "auto_map" in config and not trust_remote_code:
        known = read_manifest(directory).files
        for path in sorted(directory.glob("*.py")):
            if known.get(path.name) != sha256_of(path):
                raise RewriterError(
                    f"{path}: not the code that `rewrite` wrote, so it is not run. Rewrite the model again, or trust "
                    "it: --trust-remote-code"
                )
    try:
        sizes = load_config(directory, True)
        model: nn.Module = auto_class(sizes).from_pretrained(
            directory,
            config=sizes,
            trust_remote_code=True,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="batched_mm",  # the one without a loop over what the router chose
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise RewriterError(f"{directory}: the model cannot be loaded: {str(error).splitlines()[0]}") from error
    return model.eval()


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
    dynamic, axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}, {0: "batch", 1: "length"}
    with contextlib.ExitStack() as context:
        logging.disable(logging.WARNING)  # the exporter names packages that it does not need
        context.callback(logging.disable, logging.NOTSET)
        context.enter_context(warnings.catch_warnings(action="ignore"))
        context.enter_context(torch.no_grad())
        context.enter_context(rotary_by_length(model, {}))
        shapes = {"input_ids": dynamic, "position_ids": dynamic}
        example = _example(model, *_CHECKED_SHAPES[0])
        program = torch.onnx.export(
            torch.export.export(_Logits(model), example, dynamic_shapes=shapes, strict=False),
            dynamo=True,
            verbose=False,
            input_names=["input_ids", "position_ids"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": axes, "position_ids": axes},
        )
    assert program is not None
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    program.save(path, external_data=nbytes > MAX_INLINE_BYTES)


def _check(model: nn.Module, path: Path) -> None:
    """Raise VerificationError unless onnxruntime and torch agree on shapes that were not traced."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
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
