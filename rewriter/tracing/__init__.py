"""Checkpoint → Program. The only room that runs Hugging Face model code.

`trace` exports the model on meta tensors (non-strict `torch.export`, attention and leaf modules lifted) and reads no
weights: only safetensors headers, to bind parameters to what is on disk.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import fx
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rewriter.common.errors import RewriterError, shortened
from rewriter.common.text_settings import vocabulary_size, with_text_settings
from rewriter.common.tokenizer_code import own_code
from rewriter.ir import LayerSource, Module, Parameter, Program, Source, parameters_of, wiring_tensors
from rewriter.ir.layer_drawing import program_drawing
from rewriter.ir.printing import draw_with
from rewriter.ir.resizing import CannotBuild, Sizes, Stored, resize_with
from rewriter.tracing.assemble import ModelTracer
from rewriter.tracing.hashed_tokens import hashed_tokens
from rewriter.tracing.image_features import joined_layers
from rewriter.tracing.interception import lifted_interfaces, replaced_forward
from rewriter.tracing.key_blocks import masks_of_chosen, modules_of_blocks
from rewriter.tracing.length_rotary import by_length, renewed_after, rotary_by_length
from rewriter.tracing.meta_model import Skeleton, build_skeleton, load_config
from rewriter.tracing.mixer_functions import lifted_mixers
from rewriter.tracing.model_errors import refused
from rewriter.tracing.parameters import checkpoint_expressions, tied_parameters
from rewriter.tracing.score_biases import dynamic_masks, relative_logits
from rewriter.tracing.shrink import text_config
from rewriter.tracing.stream_wiring import wire
from rewriter.tracing.wiring import layer_signature
from rewriter.tracing.written_experts import written_experts
from rewriter.tracing.written_mixers import written_mixers
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Expression, Tensor, is_dequantized, substituted
from rewriter.weights.padding import PaddedCheckpoint, PaddedTensors
from rewriter.weights.quantized_tensors import quantized_weights

# of a hub id; Python files are copied, never run without leave
_ALLOWED = ["*.safetensors", "*.json", "tokenizer*", "*.py", "*.txt", "*.model", "*.tiktoken", "*.jinja", "LICENSE*"]
_OTHER_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx*", "*/*"]

draw_with(program_drawing)  # every program comes from here, and is made anew here where a pass changes sizes


def trace(model: str | Path | PreTrainedConfig, *, trust_remote_code: bool = False) -> Program:
    """Trace a Hugging Face causal LM to a Program.

    `model` is a local directory, a hub id, a bare config.json or a config object; the last two give a Program without
    weights, which can be inspected but not saved. Raises RewriterError for everything a user can cause: no such model,
    pickled or corrupt weights, tensors that are missing, adapters, remote code that was not allowed, a model that
    cannot be represented (with the module and the reason).
    """
    config = load_config(model, trust_remote_code)
    checkpoint = _open_checkpoint(model)
    quantized = quantized_weights(checkpoint, config.to_dict()) if checkpoint else None
    skeleton = build_skeleton(config, trust_remote_code)
    if checkpoint is None:
        return trace_skeleton(skeleton, remote_code=trust_remote_code)
    tensors = quantized.tensors if quantized else {name: Tensor(name) for name in checkpoint.tensors}
    expressions, ties, unused = checkpoint_expressions(skeleton.model, checkpoint, tensors)
    program = trace_skeleton(skeleton, str(checkpoint.directory), expressions, ties, trust_remote_code)
    return program.with_(source=replace(program.source, unused=unused))


def trace_skeleton(
    skeleton: Skeleton,
    path: str | None = None,
    expressions: Mapping[str, Expression] = MappingProxyType({}),
    ties: Mapping[str, str] | None = None,
    remote_code: bool = False,
    traced: _Traced | None = None,
) -> Program:
    """The Program of a model that is already built on meta, its parameters bound to what a checkpoint holds.

    `ties` are by default those that its config asks for. `traced` is what was traced of it before.
    """
    graph, modules, layers = traced or _traced(skeleton)
    tied = tied_parameters(skeleton.model)
    ties = tied if ties is None else ties
    held = {f"{path}.{name}": shape for path, module in modules.items() for name, shape in parameters_of(module)}
    held |= {name: _own_shape(skeleton, name) for name in wiring_tensors(graph, modules)}
    first = {name: ties.get(name, name) for name in held}  # by which the model knows it
    ties = _ties_among(held, ties)
    parameters = {
        name: Parameter(
            shape,
            expressions.get(first[name]),
            parts=() if first[name] == name else (first[name],),
            buffer=name in skeleton.stored,
        )
        for name, shape in held.items()
        if name not in ties
    }
    lacking = [n for n, p in parameters.items() if n in skeleton.stored and p.expression is None]
    unread = [n for n, p in parameters.items() if p.expression is None and n not in skeleton.stored]
    if path is not None and unread:
        raise RewriterError(
            f"{unread[0]}: text passes through it, and a conversion of checkpoints that is not supported makes it. "
            "Load and save the model with transformers once: save_pretrained(…, save_original_format=False)."
        )
    if path is not None and lacking:  # transformers would leave it at its initial value
        raise RewriterError(
            f"the checkpoint in {path} lacks {lacking[0]}, a buffer that {type(skeleton.model).__name__} computes "
            "with. Load and save the model with transformers once, which adds it."
        )
    source = _source(layers, skeleton, path, remote_code)
    if tied and not ties:  # the config would still say so, and not everything that reads it compares the weights
        source = replace(source, config={**source.config, "tie_word_embeddings": False})
    return Program(source, graph, modules, parameters, ties)


def _resized(program: Program, sizes: Sizes, stored: Stored) -> Program:
    """See `rewriter.ir.resizing.resized`."""
    source = program.source
    try:
        config = _config_of(source, sizes)
        skeleton = build_skeleton(config, source.remote_code)
    except Exception as error:  # a class's own code raises what it likes
        said = shortened(" ".join(str(error).split()), 300)
        raise CannotBuild(f"{source.architecture} cannot be built with {sizes}: {said}") from error
    traced = _traced(skeleton)
    plain = trace_skeleton(skeleton, remote_code=source.remote_code, traced=traced)
    padded = stored(plain)
    made = plain if padded is None else _with_padded(skeleton, traced, source, padded)
    changed = replace(
        made.source,
        settings=dict(sizes.settings),
        on_load=dict(sizes.on_load),
        vocabulary=vocabulary_size(source.config),
    )
    return made.with_(source=changed)


def _with_padded(skeleton: Skeleton, traced: _Traced, source: Source, padded: PaddedTensors) -> Program:
    """The Program of a traced model of other sizes than its checkpoint's."""
    changes = padded.changes
    checkpoint = PaddedCheckpoint(padded.checkpoint, changes)
    quantized = quantized_weights(checkpoint, skeleton.config.to_dict())
    tensors = dict(quantized.tensors) if quantized else {name: Tensor(name) for name in checkpoint.tensors}
    tensors |= {name: change for name, change in changes.items() if is_dequantized(change)}
    expressions, ties, unused = checkpoint_expressions(skeleton.model, checkpoint, tensors)
    inside: dict[Expression, Expression] = {
        Tensor(name): change for name, change in changes.items() if not is_dequantized(change)
    }
    expressions = {name: substituted(expression, inside) for name, expression in expressions.items()}
    made = trace_skeleton(skeleton, source.path, expressions, ties, source.remote_code, traced)
    places = {name: dict(dims) for name, dims in padded.places.items()}
    return made.with_(source=replace(made.source, unused=unused, padded=changes, places=places))


def resized_config(program: Program) -> PreTrainedConfig:
    """The config of the model of a program, with the sizes that a pass has given it."""
    source = program.source
    return _config_of(source, Sizes(source.settings, source.on_load, source.model_type))


def _config_of(source: Source, sizes: Sizes) -> PreTrainedConfig:
    """The config of a traced model with other sizes."""
    if source.path:
        config = load_config(source.path, source.remote_code)
    else:
        config = AutoConfig.for_model(**source.config)
    table = with_text_settings(config.to_dict(), sizes.settings)
    if sizes.model_type not in (None, config.model_type, text_config(config).model_type):
        config = AutoConfig.for_model(**{**table, "model_type": sizes.model_type})
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[sizes.model_type]]
    else:
        config = type(config).from_dict(table)
    if sizes.on_load and text_config(config) is not config:
        raise RewriterError("its text model's config refuses them")
    for name, value in sizes.on_load.items():
        setattr(config, name, value)
    return config


def _own_shape(skeleton: Skeleton, name: str) -> tuple[int, ...]:
    """The shape of a tensor that a layer itself computes with. Raises RewriterError where no checkpoint has it."""
    buffers = dict(skeleton.model.named_buffers())
    if name in buffers and skeleton.stored.get(name, False) is not None:
        raise RewriterError(
            f"{name}: a layer's own forward computes with this buffer, which no checkpoint holds in the model's dtype: "
            "not supported yet"
        )
    return tuple((buffers[name] if name in buffers else skeleton.model.get_parameter(name)).shape)


def _ties_among(held: Collection[str], ties: Mapping[str, str]) -> dict[str, str]:
    """Alias → first name of `ties` among the parameters that are computed with, which may not hold the first one."""
    first = {name: name for name in held if name not in ties}
    for name in held:
        first.setdefault(ties.get(name, name), name)
    return {name: first[ties[name]] for name in held if name in ties and first[ties[name]] != name}


@dataclass(frozen=True)
class _Layers:
    """Per layer: the arguments that it is never given, the length of the tuple that it returns (None: no tuple), and
    whether its keys of blocks of tokens were recorded, so that what its cache keeps is known."""

    absent: tuple[tuple[str, ...], ...]
    returns: tuple[int | None, ...]
    known_caches: Sequence[bool]


_Traced = tuple[fx.Graph, dict[str, Module], _Layers]


def _traced(skeleton: Skeleton) -> _Traced:
    """The wiring, the modules that it calls, and what was seen of the layers."""
    # an error of a model's own code on meta tensors is the model's limit, not a crash
    hint = ". Its forward does something that needs values or a call form this version does not know."
    of_blocks = modules_of_blocks(skeleton.model)
    written = (*(find(skeleton.model) for find in _WRITTEN), of_blocks)
    with (
        refused(f"{type(skeleton.model).__name__} cannot be traced", hint),
        rotary_by_length(skeleton.model, skeleton.buffers),
        lifted_interfaces(skeleton.model),
        replaced_forward({module: forward for each in written for module, forward in each.items()}),
        masks_of_chosen(skeleton.model, of_blocks),
        lifted_mixers(skeleton.model),
        dynamic_masks(skeleton.model),
    ):
        tracer = ModelTracer(skeleton)
        around = tracer.surroundings()
        graph, modules = wire(tracer, around)
    if around.constants:
        raise RewriterError(f"the model makes constants in its forward ({min(around.constants)}), not supported yet")
    absent = tuple(tuple(tracer.absent[layer]) for layer in skeleton.layers)
    known = [any(part in of_blocks for part in layer.modules()) for layer in skeleton.layers]
    return graph, modules, _Layers(absent, tuple(map(tracer.returned, skeleton.layers)), known)


_WRITTEN = (written_experts, written_mixers, relative_logits, hashed_tokens)  # by module, the forward that is traced


def _source(seen: _Layers, skeleton: Skeleton, path: str | None, remote_code: bool) -> Source:
    model = skeleton.model
    config = json.loads(model.config.to_json_string(use_diff=False))
    kinds = {type(layer): layer for layer in skeleton.layers}
    classes = tuple(LayerSource(cls.__name__, *layer_signature(layer), cls.__module__) for cls, layer in kinds.items())
    return Source(
        path=path,
        config=config,
        model_type=model.config.model_type,
        architecture=type(model).__name__,
        base_class=type(model.base_model).__name__,
        layer_class=classes[0].name,
        config_class=type(model.config).__name__,
        module=type(model).__module__,
        layers=skeleton.layers_path,
        num_layers=len(skeleton.layers),
        layer_arguments=classes[0].arguments,
        layer_var_kwargs=classes[0].var_kwargs,
        layer_classes=classes,
        layer_kinds=tuple(list(kinds).index(type(layer)) for layer in skeleton.layers),
        absent=seen.absent,
        returns=seen.returns,
        remote_code=remote_code,
        fp32=skeleton.fp32,
        by_length=by_length(model),
        renewed_after=renewed_after(model),
        joined=joined_layers(model, skeleton.layers_path),
        own_cache=_own_cache(model, seen.known_caches),
    )


def _own_cache(model: PreTrainedModel, known: Sequence[bool]) -> str | None:
    """The first class by which `model` itself keeps keys and values of some layers; None where transformers' do, or
    where, by `known` of each layer, it is known what is kept.

    Such a cache may forget what a forward without a cache sees: Unlimited OCR's keeps the prompt and a window of what
    was generated. A model's module enters its classes in transformers' table by their layer type.
    """
    kinds = getattr(text_config(model.config), "layer_types", None) or ()
    for layer, kind in enumerate(kinds):
        made = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.get(kind)
        recorded = layer < len(known) and known[layer]
        if not recorded and made is not None and made.__module__ != cache_utils.__name__:
            return str(made.__name__)
    return None


def _open_checkpoint(model: Any) -> Checkpoint | None:
    if isinstance(model, PreTrainedConfig):
        return None
    path = Path(model)
    if path.is_file():
        return None
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(str(model), allow_patterns=_ALLOWED))
        if own_code(path):  # its vocabulary may have any name
            path = Path(snapshot_download(str(model), ignore_patterns=_OTHER_WEIGHTS))
    return Checkpoint.open(path)


resize_with(_resized)
