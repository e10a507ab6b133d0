"""The models of a run behind one interface: Hugging Face's, on data-parallel ranks, and the sharded runtime module.

Student and teacher hold and compute once what is frozen and equal in both.

What the forward of a Hugging Face model allows is measured, since no attribute says it.
"""

from __future__ import annotations

import contextlib
import inspect
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from rewriter.common.model_class import auto_class, load_config
from rewriter.ir.phases import REWIRED
from rewriter.runtime.cache import StateSpec
from rewriter.runtime.context import Context
from rewriter.runtime.module import LocalLogits, RuntimeModel
from rewriter.tracing.meta_model import find_layers
from rewriter.tracing.parameters import beside_text
from rewriter.weights.finite import require_finite
from rewriter.weights.plain_model import PlainTensors, plain_model

Batch = Mapping[str, Tensor]
"""input_ids, labels, position_ids, segment_ids: int64 [B, S]; of models that rewire the prompt alone, `rewired` too:
bool [B, S], True where a token is rewired."""


@dataclass(frozen=True)
class TokenStates:
    """The output of a model for the n tokens of each row that this rank holds. `indices`: their places in the row.
    `states` [B, n, D] are the last ones, of which `head` makes logits, as many at a time as there is memory for;
    without a head, they are the logits [B, n, V]."""

    states: Tensor
    indices: Tensor
    head: Head | None = None

    def logits_of(self, states_ND: Tensor) -> Tensor:
        """Logits [N, V] of some of the states."""
        return states_ND if self.head is None else self.head(states_ND[None])[0]


class Model(Protocol):
    """`module` has the parameters; `group` are the ranks whose sums make up a whole batch (None: this one alone)."""

    module: nn.Module
    group: ProcessGroup | None

    def __call__(self, batch: Batch, module: nn.Module | None = None) -> TokenStates:
        """Compute a batch, with `module` in place of `self.module` where a trainer has wrapped that."""
        ...


def base_of(module: nn.Module) -> Any:
    """The model of transformers below adapters; `module` itself where there are none."""
    return cast(Any, module).get_base_model() if hasattr(module, "peft_config") else module


def takes_rewired(module: nn.Module) -> bool:
    """True for a model of transformers that is told which tokens are rewired."""
    return REWIRED in inspect.signature(type(base_of(module)).forward).parameters


class HuggingFaceModel:
    """A causal LM of transformers, whole on each rank or sharded by FSDP2."""

    def __init__(self, module: nn.Module, group: ProcessGroup | None) -> None:
        self.module, self.group = module, group
        self._takes_positions = "position_ids" in inspect.signature(type(base_of(module)).forward).parameters
        self._apart: bool | None = None  # whether the head can be computed apart from the body; asked once

    def __call__(self, batch: Batch, module: nn.Module | None = None) -> TokenStates:
        ids = batch["input_ids"]
        given = {"input_ids": ids, "use_cache": False}
        # without a mask, transformers tells packed sequences by positions that begin anew
        given |= {"position_ids": batch["position_ids"]} if self._takes_positions else {}
        given |= {REWIRED: batch[REWIRED]} if REWIRED in batch and takes_rewired(self.module) else {}
        indices = torch.arange(ids.shape[1], device=ids.device)
        if self._apart is None:
            self._apart = head_is_apart(self.module)
        if not self._apart:
            return TokenStates((module or self.module)(**given).logits, indices)
        base = base_of(self.module)
        output = base.base_model(**given)
        return TokenStates(output.last_hidden_state, indices, Head(base, output))


class Head:
    """Logits [1, N, V] of states [1, N, D]: a causal LM of transformers that is given its body's output. `weights`: the
    parameters to train that it uses."""

    def __init__(self, model: Any, output: Any) -> None:
        self.model, self.output = model, {name: value for name, value in output.items() if name in _KEPT}
        self.kind = type(output)
        embeddings = model.get_output_embeddings()
        self.vocabulary = int(embeddings.weight.shape[0])
        inside = {id(p) for p in model.base_model.parameters()} - {id(p) for p in embeddings.parameters()}
        self.weights = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]

    def __call__(self, states_1ND: Tensor) -> Tensor:
        ids = torch.zeros(states_1ND.shape[:2], dtype=torch.int64, device=states_1ND.device)
        given, body = self.kind(**self.output | {"last_hidden_state": states_1ND}), self.model.base_model
        with giving([body], given):
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


_KEPT = ("router_logits",)  # what else a forward may ask of the body's output


@contextlib.contextmanager
def giving(modules: Sequence[nn.Module], output: Any) -> Iterator[None]:
    """While the block runs, each of `modules` returns `output`, and computes nothing."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "forward", return_value=output))
        yield


@torch.no_grad()
def head_is_apart(module: nn.Module) -> bool:
    """True where the forward of `module` makes its logits of its body's output, token by token: it is tried on a few
    tokens. False where FSDP2 gathers weights for a whole forward."""
    base = base_of(module)
    if isinstance(module, FSDPModule) or base.base_model is base or base.base_model_prefix not in base._modules:
        return False
    training = module.training
    module.eval()
    try:
        weight = base.get_input_embeddings().weight
        ids = torch.arange(4, device=weight.device)[None] % len(weight)
        whole = base(input_ids=ids, use_cache=False).logits
        output = base.base_model(input_ids=ids, use_cache=False)
        apart = Head(base, output)(output.last_hidden_state[:, 1:3])
    except (TypeError, AttributeError, ValueError, RuntimeError, IndexError):  # a forward of another form
        return False
    finally:
        module.train(training)
    return bool(torch.allclose(whole[:, 1:3], apart, rtol=1e-4, atol=1e-5))


class ShardedModel:
    """A runtime module: its ranks share heads, channels or tokens."""

    def __init__(self, module: RuntimeModel) -> None:
        self.module: nn.Module = module
        self.carries_state = carries_state(module)
        self.group = module.replicas.group

    def __call__(self, batch: Batch, module: nn.Module | None = None) -> TokenStates:
        phased = cast(RuntimeModel, self.module).phase is not None
        # rows with a state are not packed, and nothing of theirs reads the padding behind them
        segments = None if self.carries_state else batch["segment_ids"]
        context = Context(segment_ids=segments, rewired=batch.get(REWIRED) if phased else None)
        output = (module or self.module)(batch["input_ids"], ctx=context, gather=False)
        assert isinstance(output, LocalLogits)
        return TokenStates(output.logits, output.indices)


def carries_state(module: RuntimeModel) -> bool:
    """True if a mixer of `module` carries a state from token to token."""
    return any(isinstance(spec, StateSpec) for spec in module.slots)


# --- packed rows

# Of the first two rows' segments. Two rows, as some attention kernels find segments in a batch of one row only; short,
# so that a window over the last few tokens reaches across the boundaries, and none as long as another.
_SEGMENTS = ((7, 11, 6), (9, 4, 11))


def isolates_segments(model: Any) -> bool:
    """True where `model` computes each segment of a packed row as if it were alone.

    `model` is a causal LM of transformers, called as in training with packed rows: input_ids and position_ids that
    restart at 0, no attention mask, no cache. Measured by one forward and backward pass over two rows of 24 tokens, in
    eval mode: nothing of a segment's logits may depend on the embedding of a token of an earlier one (the gradient is
    exactly 0, in any dtype), and they are those of the segment alone, up to rounding. False where positions or
    boundaries are not heeded; such a model has to be trained on rows without packing. Its gradients and mode stay as
    they were.
    """
    weight = model.get_input_embeddings().weight
    drawn = torch.randint(len(weight), (2, sum(_SEGMENTS[0])), generator=torch.Generator().manual_seed(0))
    ids_BS = drawn.to(weight.device)
    positions_BS = torch.tensor([[i for size in row for i in range(size)] for row in _SEGMENTS], device=weight.device)
    places = [
        (row, slice(start, start + size))
        for row, sizes in enumerate(_SEGMENTS)
        for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
    ]
    training = model.training
    model.eval()
    try:
        with torch.enable_grad():
            logits_BSV, embedded_BSD = _with_embeddings(model, ids_BS, positions_BS)
            for place in (place for place in places if place[1].start):
                reads = logits_BSV[place].float().logsumexp(-1).sum()
                (gradient,) = torch.autograd.grad(reads, embedded_BSD, retain_graph=True)
                others = gradient.clone()
                others[place] = 0
                if others.count_nonzero():  # NaN counts too
                    return False
        with torch.no_grad():
            return all(_as_alone(model, ids_BS[place], logits_BSV[place]) for place in places)
    finally:
        model.train(training)


def _with_embeddings(model: Any, ids_BS: Tensor, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of packed rows and the embeddings that they were computed from, with a graph between them."""
    seen: list[Tensor] = []

    def keep(module: Any, args: Any, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        seen.append(leaf)
        return leaf.clone()  # a leaf may not be changed in place

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        told = _every_other(model, positions_BS)
        logits = model(input_ids=ids_BS, position_ids=positions_BS, use_cache=False, **told).logits
    finally:
        hook.remove()
    return logits, seen[0]


def _as_alone(model: Any, ids_S: Tensor, packed_SV: Tensor) -> bool:
    told = _every_other(model, torch.arange(len(ids_S), device=ids_S.device)[None])
    alone_SV = model(input_ids=ids_S[None], use_cache=False, **told).logits[0]
    errors = (packed_SV.float() - alone_SV.float()).norm(dim=-1) / alone_SV.float().norm(dim=-1)
    # The median: rounding may send a token to another expert, which changes its logits altogether.
    return statistics.median(errors.tolist()) <= torch.finfo(alone_SV.dtype).eps ** 0.5


def _every_other(model: Any, positions_BS: Tensor) -> dict[str, Tensor]:
    """Every other token of a segment, where a model rewires some alone: the same ones wherever it stands."""
    return {REWIRED: positions_BS % 2 == 1} if takes_rewired(model) else {}


def load_model(directory: Path, device: torch.device, trust_remote_code: bool = False) -> nn.Module:
    """The Hugging Face model in a directory, in fp32 on `device`. Raises RewriterError where a weight is not finite."""
    if not PlainTensors(directory).loadable:
        return plain_model(directory, trust_remote_code)[0].to(device)
    config = load_config(directory, trust_remote_code)
    config._attn_implementation = None  # one that a config names may not be installed here
    model: nn.Module = auto_class(config).from_pretrained(
        directory, config=config, trust_remote_code=trust_remote_code, dtype=torch.float32
    )
    require_finite(model.named_parameters(), str(directory))
    return model.to(device)


def frozen(model: nn.Module) -> nn.Module:
    """`model`, in eval mode, with no parameter to train."""
    return model.eval().requires_grad_(False)


def freeze_towers(student: nn.Module) -> None:
    """Freeze what text never meets, such as a vision tower: no gradient says how, and a decay of weights would."""
    for name in beside_text(student):
        student.get_parameter(name).requires_grad_(False)


def freeze_unchanged(student: nn.Module) -> None:
    """Freeze the layers below the first rewritten one, the embeddings, and a head that is tied to them.

    A layer of a class of transformers is unchanged; the classes of rewritten ones are elsewhere. A model without a
    rewritten layer is trained whole.
    """
    layers = layers_of(student)
    below = first_rewritten(student)
    if below < len(layers):
        for part in (*layers[:below], base_of(student).get_input_embeddings()):
            part.requires_grad_(False)


def first_rewritten(model: nn.Module) -> int:
    """The number of the first layer that is not as transformers has it; the number of all layers where none is."""
    layers = layers_of(model)
    rewritten = (i for i, layer in enumerate(layers) if type(layer).__module__.partition(".")[0] != "transformers")
    return next(rewritten, len(layers))


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model of transformers, with adapters or without."""
    return list(find_layers(base_of(module))[1])


def share_frozen(student: nn.Module, teacher: nn.Module) -> None:
    """Let the teacher read the student's frozen parameters where the two are equal: they are in memory once.

    Names are equal, because a rewritten model keeps its source's; those below adapters stand a level deeper.
    """
    parameters = base_of(student).named_parameters()
    held = {name.replace(".base_layer.", "."): p for name, p in parameters if not p.requires_grad}
    same = {
        id(parameter): held[name]
        for name, parameter in teacher.named_parameters()
        if name in held and held[name].dtype == parameter.dtype and torch.equal(held[name].cpu(), parameter.cpu())
    }
    for part in teacher.modules():  # those that are tied, too
        for leaf, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in same:
                part._parameters[leaf] = same[id(parameter)]


class Trunk:
    """The first `depth` layers. Within `kept` a forward of the teacher leaves their output, and within `given` a
    forward of the student takes it in their place."""

    def __init__(self, student: nn.Module, teacher: nn.Module, depth: int) -> None:
        self.own, self.last = layers_of(student)[:depth], layers_of(teacher)[depth - 1]
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
    own, theirs, depth = layers_of(student), layers_of(teacher), 0
    while depth < first_rewritten(student) and _held_together(own[depth], theirs[depth]):
        depth += 1
    embeddings = base_of(student).get_input_embeddings().weight
    if not depth or embeddings is not base_of(teacher).get_input_embeddings().weight:
        return None
    trunk = Trunk(student, teacher, depth)
    ids = torch.arange(14, device=embeddings.device).reshape(2, 7) % len(embeddings)
    told = _every_other(student, torch.arange(7, device=ids.device).expand(2, 7))
    training = student.training
    student.eval()
    try:
        with trunk.kept():
            teacher(input_ids=ids, use_cache=False)
        try:
            with trunk.given():
                above = student(input_ids=ids, use_cache=False, **told).logits
        except LookupError:  # keys that a layer of the trunk stores for those above
            return None
        whole = student(input_ids=ids, use_cache=False, **told).logits  # last: what it leaves behind must not help
    finally:
        student.train(training)
    return trunk if torch.allclose(whole, above, rtol=1e-4, atol=1e-5) else None


def _held_together(own: nn.Module, theirs: nn.Module) -> bool:
    other = dict(theirs.named_parameters())
    return all(other.get(name) is parameter for name, parameter in own.named_parameters())
