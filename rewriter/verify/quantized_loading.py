"""How transformers loads a checkpoint with quantized weights, so that it computes with what they stand for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rewriter.common.text_settings import top_setting


def quantization(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What `AutoQuantizationConfig.from_dict` takes to dequantize the weights in `directory`; None: nothing to do.

    Without it transformers may keep them as they are and quantize activations too, which is another function.
    """
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    said = top_setting(config, "quantization_config")
    return {**said, "dequantize": True} if said else None


def loading_arguments(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """`quantization` as arguments of `from_pretrained`."""
    from transformers.quantizers import AutoQuantizationConfig

    said = quantization(directory)
    return {} if said is None else {"quantization_config": AutoQuantizationConfig.from_dict(said)}


def cannot_load(directory: str | os.PathLike[str]) -> str | None:
    """Why transformers cannot load the weights in `directory` in this environment: packages that it needs for them."""
    said = quantization(directory)
    if said is None:
        return None
    from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig

    try:
        quantizer = AutoHfQuantizer.from_config(AutoQuantizationConfig.from_dict(said), pre_quantized=True)
        quantizer.validate_environment(device_map=None)
    except (ImportError, RuntimeError, ValueError) as error:
        return f"transformers cannot load {said.get('quant_method')} weights here: {str(error).splitlines()[0]}"
    return None
