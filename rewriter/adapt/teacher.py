"""The teacher: the original model, which shares equal weights and equal computation with the student."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rewriter.adapt.models import base_of, giving
from rewriter.adapt.options import AdaptOptions
from rewriter.common.adapters import refuse_adapter
from rewriter.common.errors import RewriterError
from rewriter.common.files import read_json
from rewriter.common.text_settings import text_settings
from rewriter.convert.rewritten_source import Opened, source_config
from rewriter.tracing.meta_model import build_on_meta, find_layers, load_config
from rewriter.weights.finite import require_finite
from rewriter.weights.plain_model import PlainTensors, plain_model


def load_model(directory: Path, device: torch.device, trust_remote_code: bool = False) -> nn.Module:
    """The Hugging Face model in a directory, in fp32 on `device`. Raises RewriterError where a weight is not finite."""
    if not PlainTensors(directory).loadable:
        return plain_model(directory, trust_remote_code)[0].to(device)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    config._attn_implementation = None  # one that a config names may not be installed here
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        directory, config=config, trust_remote_code=trust_remote_code, dtype=torch.float32
    )
    require_finite(model.named_parameters(), str(directory))
    return model.to(device)


def original_directory(opened: Opened, options: AdaptOptions, source: Path, teacher: Any) -> Path | None:
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
    theirs, ours = text_settings(config), text_settings(source_config(opened))
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


def below_adapters(student: nn.Module, source: Path, device: torch.device) -> nn.Module:
    """The model of `source` whose parameters are those below the student's adapters: no second copy.

    Names are equal, because a rewritten model keeps its source's. Raises RewriterError where a parameter of the teacher
    is none of the student's, naming it.
    """
    teacher = build_on_meta(load_config(source), torch.float32)
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


# --- the trunk: layers below the first rewritten one, frozen, and computed and held once for both


def freeze_unchanged(student: nn.Module) -> None:
    """Freeze the layers below the first rewritten one, the embeddings, and a head that is tied to them.

    Rewritten layers are of classes of their own; what is of a class of transformers is unchanged. A model without a
    rewritten layer is trained whole.
    """
    layers = _layers(student)
    below = _unchanged(layers)
    if below == len(layers):
        return
    for part in (*layers[:below], base_of(student).get_input_embeddings()):
        part.requires_grad_(False)


def _unchanged(layers: list[nn.Module]) -> int:
    rewritten = (i for i, layer in enumerate(layers) if type(layer).__module__.partition(".")[0] != "transformers")
    return next(rewritten, len(layers))


def _layers(module: nn.Module) -> list[nn.Module]:
    return list(find_layers(base_of(module))[1])


def share_frozen(student: nn.Module, teacher: nn.Module) -> None:
    """Let the teacher read the student's frozen parameters where the two are equal: they are in memory once."""
    held = {name: p for name, p in student.named_parameters() if not p.requires_grad}
    same = {
        id(parameter): held[name]
        for name, parameter in teacher.named_parameters()
        if name in held and torch.equal(held[name], parameter)
    }
    for part in teacher.modules():  # those that are tied, too
        for leaf, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in same:
                part._parameters[leaf] = same[id(parameter)]


class Trunk:
    """The first `depth` layers. Within `kept` a forward of the teacher leaves their output, and within `given` a
    forward of the student takes it in their place."""

    def __init__(self, student: nn.Module, teacher: nn.Module, depth: int) -> None:
        self.own, self.last = _layers(student)[:depth], _layers(teacher)[depth - 1]
        self._output: Any = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the output of the last layer."""

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._output = output

        hook = self.last.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """Give the kept output, by every layer: nothing below the last one reads it."""
        output, self._output = self._output, None
        with giving(self.own, output):
            yield


@torch.no_grad()
def trunk_of(student: nn.Module, teacher: nn.Module) -> Trunk | None:
    """The trunk of the layers that both models hold together (`share_frozen`).

    None where there is none, or where layers above read more of it than its output: that is tried on two short rows.
    """
    own, theirs, depth = _layers(student), _layers(teacher), 0
    while depth < _unchanged(own) and _held_together(own[depth], theirs[depth]):
        depth += 1
    embeddings = base_of(student).get_input_embeddings().weight
    if not depth or embeddings is not base_of(teacher).get_input_embeddings().weight:
        return None
    trunk = Trunk(student, teacher, depth)
    ids = torch.arange(14, device=embeddings.device).reshape(2, 7) % len(embeddings)
    training = student.training
    student.eval()
    try:
        with trunk.kept():
            teacher(input_ids=ids, use_cache=False)
        with trunk.given():
            above = student(input_ids=ids, use_cache=False).logits
        whole = student(input_ids=ids, use_cache=False).logits  # last: what it leaves behind must not help
    finally:
        student.train(training)
    return trunk if torch.allclose(whole, above, rtol=1e-4, atol=1e-5) else None


def _held_together(own: nn.Module, theirs: nn.Module) -> bool:
    other = dict(theirs.named_parameters())
    return all(other.get(name) is parameter for name, parameter in own.named_parameters())
