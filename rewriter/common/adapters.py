"""Adapters in the place of a model, or beside it, which nothing here applies."""

from __future__ import annotations

import json
from pathlib import Path

from rewriter.common.errors import RewriterError, shortened

CONFIG = "adapter_config.json"


def refuse_adapter(directory: Path) -> None:
    """Raise RewriterError where a directory holds an adapter of peft, alone or beside a model: transformers adds it
    where peft is installed, and without it this is another model. Folders inside are not looked at, as transformers
    does not."""
    file = directory / CONFIG
    if not file.is_file():
        return
    if (directory / "config.json").is_file():
        raise RewriterError(
            f"{file}: an adapter lies beside the model. Merge it first (peft merge_and_unload): move {CONFIG} and "
            "adapter_model.* into a folder ADAPTER of their own, then PeftModel.from_pretrained(AutoModelForCausalLM."
            f"from_pretrained({str(directory)!r}), 'ADAPTER').merge_and_unload().save_pretrained('NEW'). Or leave it "
            "out: move them away"
        )
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    of = f" of {shortened(base)}" if base else ""
    raise RewriterError(
        f"{file}: this is an adapter{of}, not a model. Merge it first (peft merge_and_unload), and give NEW: "
        f"AutoPeftModelForCausalLM.from_pretrained({str(directory)!r}).merge_and_unload().save_pretrained('NEW')"
    )
