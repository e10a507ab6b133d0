"""The teacher: the original model. With a frozen base it reads the student's own weights, and costs no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rewriter.adapt.options import Options
from rewriter.adapt.students import base_of
from rewriter.common.adapters import refuse_adapter
from rewriter.common.errors import RewriterError
from rewriter.common.files import read_json
from rewriter.common.text_settings import text_settings
from rewriter.convert.rewritten_source import Opened, source_config
from rewriter.tracing.meta_model import build_on_meta, load_config
from rewriter.verify.plain_model import PlainTensors, plain_model
from rewriter.weights.finite import require_finite


def load_model(directory: Path, device: torch.device, trust_remote_code: bool = False, **options: Any) -> nn.Module:
    """The Hugging Face model in a directory, in fp32 on `device`. Raises RewriterError where a weight is not finite."""
    if not PlainTensors(directory).loadable:
        return plain_model(directory, trust_remote_code)[0].to(device)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    config._attn_implementation = None  # one that a config names may not be installed here
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        directory, config=config, trust_remote_code=trust_remote_code, dtype=torch.float32, **options
    )
    require_finite(model.named_parameters(), str(directory))
    return model.to(device)


def original_directory(opened: Opened, options: Options, source: Path, teacher: Any) -> Path | None:
    """The directory of the original model; None where it is not known, or nothing to compare with.

    `source` will have the weights to train under the original wiring. Raises RewriterError where `teacher` is another
    model than the one that was rewritten, and where weights to distil from are no longer the original's.
    """
    if options.from_scratch:
        return None
    if teacher is None:
        if opened.manifest.adaptation is None:
            return source
        if options.method == "distill":
            raise RewriterError(
                f"{opened.root} has been trained since it was rewritten, so its weights are no longer the original's. "
                "Give the original model as --teacher"
            )
        return None
    place = Path(teacher)
    refuse_adapter(place)
    config = {}
    if (place / "config.json").is_file():
        config = read_json(place / "config.json", "Give the original model as --teacher.")
    expected = source_config(opened)
    theirs, ours = text_settings(config), text_settings(expected)
    for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers"):
        if theirs.get(name) != ours.get(name):
            raise RewriterError(
                f"--teacher {place}: its {name} is {theirs.get(name)!r}, that of the rewritten model "
                f"{ours.get(name)!r}. Give the model that was rewritten"
            )
    return place


def frozen(model: nn.Module) -> nn.Module:
    """`model`, in eval mode, with no parameter to train."""
    return model.eval().requires_grad_(False)


def sharing(student: nn.Module, source: Path, device: torch.device) -> nn.Module:
    """The model of `source` whose parameters are those below the student's adapters: no second copy.

    Names are equal, because a rewritten model keeps its source's. Raises RewriterError where a parameter of the teacher
    is none of the student's, naming it.
    """
    config = load_config(source)
    teacher = build_on_meta(config, torch.float32)
    base = base_of(student)
    teacher.tie_weights()
    held = {name.replace(".base_layer.", "."): tensor for name, tensor in base.named_parameters()}
    for name, _ in list(teacher.named_parameters()):
        if name not in held:
            raise RewriterError(f"the teacher's {name} is no parameter of the student. Distil without --lora")
        path, _, leaf = name.rpartition(".")
        teacher.get_submodule(path)._parameters[leaf] = nn.Parameter(held[name].detach(), requires_grad=False)
    for name, buffer in base.named_buffers():  # checkpoints hold some of them
        path, _, leaf = name.replace(".base_layer.", ".").rpartition(".")
        if leaf in (own := teacher.get_submodule(path)._buffers):
            own[leaf] = buffer
    teacher.tie_weights()
    return frozen(teacher.to(device))
