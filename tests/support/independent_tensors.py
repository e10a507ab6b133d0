"""Checkpoints in which every name on disk holds a random tensor of its own, in every spelling that transformers reads.

A model that transformers saves ties what its class ties, and names everything as its class does: a loader that swaps
two equal tensors, or never looks at an alias, passes. Here nothing equals anything else, so what is read from where
shows in the logits. `SPELLINGS` are the names under which the same model's tensors may lie on disk.
"""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import emitted
import torch
from ladder_reference import ladder_reference
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

import rewriter as rw
from rewriter.check.coverage.configs import small_config
from rewriter.check.random_model import EAGER, build_model, random_ids
from rewriter.check.stream_hooks import decoder_layers
from rewriter.common.errors import RewriterError
from rewriter.emit.huggingface import emit_huggingface
from rewriter.ir import Program
from rewriter.ir.simulate import RankValues, Simulator, load_weights, simulate
from rewriter.passes.phases import single_device
from rewriter.tracing.meta_model import build_skeleton, load_config
from rewriter.tracing.parameters import checkpoint_expressions
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Tensor
from rewriter.weights.references import RankWeights

Tensors = dict[str, torch.Tensor]
RANKS = 2
LENGTH = 21
LIMIT = 1e-4
"""Of the relative error of fp32 logits. Another tensor in the place of one gives 1e-2 and more."""


def _as_saved(model: PreTrainedModel) -> Tensors:
    """As `save_pretrained` names them, and tied aliases beside them."""
    return _reverted(model, _state(model))


def _one_of_tied(model: PreTrainedModel) -> Tensors:
    """As saved, without the aliases of tied parameters."""
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    return _reverted(model, {n: t for n, t in _state(model).items() if n not in ties})


def _alias_of_tied(model: PreTrainedModel) -> Tensors:
    """As saved, with an alias of what is tied in place of the parameter that the others are tied to."""
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    return _reverted(model, {n: t for n, t in _state(model).items() if n not in ties.values()})


def _as_run(model: PreTrainedModel) -> Tensors:
    """By the names of the running model: what its class merges is stored merged."""
    return _state(model)


def _of_old_versions(model: PreTrainedModel) -> Tensors:
    """As saved, and then every renaming that transformers knows of this type backwards."""
    renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    tensors = _as_saved(model)
    for renaming in reversed(renamings):
        back = renaming.reverse_transform()
        tensors = {back.rename_source_key(name)[0]: tensor for name, tensor in tensors.items()}
    return tensors


def _of_the_base_model(model: PreTrainedModel) -> Tensors:
    """As saved, without the prefix that the base model has in a causal LM."""
    prefix = f"{model.base_model_prefix}."
    return {name.removeprefix(prefix): tensor for name, tensor in _as_saved(model).items()}


def _with_more_prefix(model: PreTrainedModel) -> Tensors:
    """As saved, all below the base model's prefix."""
    prefix = f"{model.base_model_prefix}."
    return {prefix + name.removeprefix(prefix): tensor for name, tensor in _as_saved(model).items()}


def _with_buffers(model: PreTrainedModel) -> Tensors:
    """As saved, with the buffers that checkpoints of old versions hold and transformers computes anew."""
    computed = {n: b for n, b in model.named_buffers() if n not in model.state_dict() and b.is_floating_point()}
    return _as_saved(model) | {name: buffer.clone() for name, buffer in computed.items()}


SPELLINGS: Mapping[str, Callable[[PreTrainedModel], Tensors]] = MappingProxyType(
    {
        "as saved": _as_saved,
        "one of tied": _one_of_tied,
        "alias of tied": _alias_of_tied,
        "as run": _as_run,
        "of old versions": _of_old_versions,
        "of the base model": _of_the_base_model,
        "with more prefix": _with_more_prefix,
        "with buffers": _with_buffers,
    }
)


def _state(model: PreTrainedModel) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _reverted(model: PreTrainedModel, state: Tensors) -> Tensors:
    return {name: tensor.contiguous().clone() for name, tensor in revert_weight_conversion(model, state).items()}


def independent(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Random values for floating-point tensors, by name; as large as those of a model that computes something."""
    found = {}
    for name, tensor in tensors.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if not tensor.is_floating_point():
            found[name] = tensor.contiguous()
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim < 2:  # around what initialisation gave: norms that multiply by the weight hold 1
            found[name] = (tensor.float() + 0.3 * noise).contiguous()
        else:
            found[name] = noise / math.sqrt(min(tensor.shape[-1], 64))
    return found


@dataclass(frozen=True)
class Source:
    """A checkpoint, the model that transformers loads from it, and what it says of names that it did not find."""

    path: Path
    model: PreTrainedModel
    unread: tuple[str, ...]

    @property
    def lacking(self) -> list[str]:
        """Parameters that transformers does not find, or finds in another shape; it leaves those as initialised."""
        return [name for name in self.unread if not name.startswith("unexpected")]


class Types:
    """A small model of one type, and its checkpoints below `scratch`."""

    def __init__(self, model_type: str, scratch: Path) -> None:
        self.type, self.scratch = model_type, scratch
        self.small = small_config(model_type)
        self.model = build_model(copy.deepcopy(self.small))

    def spelled(self, spelling: str) -> Tensors:
        return independent(SPELLINGS[spelling](self.model))

    def source(self, spelling: str) -> Source:
        """Raises what transformers raises for names that it cannot read at all."""
        path = self.scratch / spelling.replace(" ", "-")
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        config = self.model.config if type(self.model.config) is type(self.small) else self.small
        config.save_pretrained(path)
        save_file(self.spelled(spelling), path / "model.safetensors", metadata={"format": "pt"})
        model, unread = loaded(path)
        return Source(path, model, unread)


def loaded(path: Path) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """(model, names that are missing, left over or of another shape), as transformers loads a directory in fp32."""
    model, info = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, output_loading_info=True, **EAGER)
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    return model.eval(), tuple(f"{kind[:-5]} {name}" for kind in kinds for name in sorted(map(str, info[kind])))


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return found


class OfRanks(Simulator):
    """A program computed with what each rank reads from an output directory."""

    def __init__(self, program: Program, out: Path, host: PreTrainedModel) -> None:
        super().__init__(program, {"": torch.zeros(1)}, host)
        path = out / f"runtime/tp{RANKS}/weights.json"
        self.read = [RankWeights.open(out, path, rank) for rank in range(RANKS)]

    def parameter(self, name: str) -> RankValues:
        name = self.program.ties.get(name, name)
        if name not in self.cache:
            values = [weights.read({name: None}, "cpu")[name] for weights in self.read]
            shared = self.program.parameters[name].ranges is None
            assert not shared or all(value.equal(values[0]) for value in values)
            self.cache[name] = RankValues(tuple(values[:1] if shared else values))
        return self.cache[name]


def parameters(path: Path) -> tuple[Tensors, Mapping[str, str]]:
    """(values, ties): what a program traced from `path` computes with, by runtime name, without tracing it."""
    model, checkpoint = build_skeleton(load_config(path)).model, Checkpoint.open(path)
    tensors = {name: Tensor(name) for name in checkpoint.tensors}
    expressions, ties, _ = checkpoint_expressions(model, checkpoint, tensors)
    return {name: checkpoint.evaluate(expression) for name, expression in expressions.items()}, ties


def other_values(model: PreTrainedModel, values: Tensors, ties: Mapping[str, str]) -> list[str]:
    """The tensors of a loaded model that are not, bit by bit, what a program would compute with."""
    state = {name: (tensor, values.get(ties.get(name, name))) for name, tensor in model.state_dict().items()}
    return [n for n, (tensor, found) in state.items() if found is not None and not torch.equal(found, tensor)]


def _outputs(types: Types, source: Source, recipe: str, out: Path, ids: torch.Tensor) -> tuple[torch.Tensor, Path]:
    """(logits of the ranks, the adapted checkpoint). Where the runtime module cannot hold a kind of layer, ranks are
    simulated with the program's own weights, and the checkpoint alone is emitted."""
    program = rw.rewrite(rw.trace(source.path), recipe, tp=RANKS)
    try:
        rw.save(program, out, options=rw.SaveOptions(verify="none"))
    except RewriterError as error:
        if "The sharded runtime module cannot hold" not in str(error) and "the source's own module" not in str(error):
            raise
        emitted.write(emit_huggingface(single_device(program)), source.path, out)
        return simulate(program, ids, weights=load_weights(program)), out
    return OfRanks(program, out, source.model).run(ids)[0], out


@torch.no_grad()
def differences(types: Types, spelling: str, recipe: str = "tensor-parallel") -> dict[str, float]:
    """The relative errors of logits of "ranks" and "adapted checkpoint" of a recipe against the source's, that is with
    "ladder" against its reference on the source. The source is one of which transformers reads every parameter."""
    source = types.source(spelling)
    assert not source.lacking, source.lacking
    ids = random_ids(source.model.config, LENGTH)
    layers = range(len(decoder_layers(source.model)))
    with ladder_reference(source.model, layers) if recipe == "ladder" else contextlib.nullcontext():
        expected = logits(source.model, ids)
    assert bool(expected.isfinite().all()), "the source's own logits are not finite"
    # a folder's name is the name of a Python module
    out = types.scratch / f"{types.type}_{spelling}_{recipe}".replace(" ", "_").replace("-", "_")
    shutil.rmtree(out, ignore_errors=True)
    ranks, adapted = _outputs(types, source, recipe, out, ids)
    model, unread = loaded(adapted)
    assert not [name for name in unread if not name.startswith("unexpected")], unread
    return {"ranks": error(ranks, expected), "adapted checkpoint": error(logits(model, ids), expected)}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest expected magnitude."""
    return float((found - expected).abs().max() / expected.abs().max())
