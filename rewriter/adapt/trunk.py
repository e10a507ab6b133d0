"""The layers below the first rewritten one: frozen, and computed and held once for student and teacher."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rewriter.adapt.students import base_of
from rewriter.tracing.meta_model import find_layers


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
    """The first `depth` layers. Within `kept` a forward of the teacher leaves what they gave, and within `given` a
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
        """Give what was kept, by every layer: nothing below the last one reads it."""
        output = self._output
        for layer in self.own:
            layer.__dict__["forward"] = lambda *args, **kwargs: output
        try:
            yield
        finally:
            for layer in self.own:
                del layer.__dict__["forward"]
            self._output = None


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
