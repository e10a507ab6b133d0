"""From a config to a model without weights: parameters on the meta device, buffers with their values."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from rewriter.common.errors import RewriterError, shortened
from rewriter.common.files import ADAPTER_CONFIG, read_json, refuse_adapter
from rewriter.common.model_class import auto_class, has_class
from rewriter.common.model_class import load_config as read_config
from rewriter.tracing.model_errors import refused

# The dtype of every trace. It differs from float32, so that casts to "the model's dtype" can be told from casts to
# fp32.
TRACE_DTYPE = torch.bfloat16
LARGE = 1 << 24  # elements
_FACTORIES = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn})
_EAGER = {"attn_implementation": "eager"}


@dataclass(frozen=True)
class Skeleton:
    """A model whose parameters are on meta, with where its decoder layers are and the values of its buffers.

    `stored` are the buffers whose values are in checkpoints, each with the dtype it keeps (None: the model's). `fp32`:
    see `kept_in_fp32`.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    layers_path: str
    layers: nn.ModuleList
    buffers: dict[str, torch.Tensor]
    stored: dict[str, torch.dtype | None]
    fp32: Mapping[str, tuple[str, ...]]


def load_config(source: str | Path | PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a local directory, a bare config.json, a hub id, or a config object itself.

    Raises RewriterError when there is no such model, or when it needs code that was not allowed to run.
    """
    if isinstance(source, PreTrainedConfig):
        refuse_output(source.model_type, source.to_dict())
        return source
    path = Path(source)
    looks_local = os.path.lexists(path) or str(source).startswith((".", "/", "~")) or path.suffix == ".json"
    if looks_local and not path.exists():
        raise RewriterError(f"no such model: {source}. Give a Hugging Face directory, a config.json or a hub id.")
    if path.is_dir():
        refuse_adapter(path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise RewriterError(f"{source} holds no config.json, so it is no Hugging Face model directory.")
    try:
        if path.exists():
            file = path if path.is_file() else path / "config.json"
            data = read_json(file, "It is no Hugging Face config: download it again, or name another model.")
            refuse_output(source, data)
            check_values(file, data)
            if needs_own_code(data) and not trust_remote_code:
                raise RewriterError(
                    f"{source} brings its own Python code (auto_map). Read it, then pass --trust-remote-code to run it."
                )
            if path.is_file() and "model_type" not in data:
                raise RewriterError(f"{source} has no model_type: it is not a Hugging Face config.")
            if path.is_file():
                return AutoConfig.for_model(**data)
        config = read_config(str(source), trust_remote_code)
        refuse_output(source, config.to_dict())
        if not path.exists():
            check_values(str(source), config.to_dict())
        return config
    except RewriterError:
        raise
    except Exception as error:  # a config class's own code raises what it likes
        if not looks_local:
            _refuse_adapter_of_the_hub(str(source))
        what = f"no such model: {source}" if not looks_local else f"{source}: its config cannot be read"
        said = f"{type(error).__name__}: " if isinstance(error, ArithmeticError | LookupError) else ""
        step = "" if not looks_local else ". Correct config.json: transformers' AutoConfig has to read it"
        raise RewriterError(f"{what}. {said}{' '.join(str(error).split()):.300}{step}") from error


def _refuse_adapter_of_the_hub(source: str) -> None:
    from huggingface_hub import hf_hub_download

    adapter = None
    with contextlib.suppress(Exception):  # no such id, no network, no such file
        adapter = hf_hub_download(source, ADAPTER_CONFIG)
    if adapter is not None:
        refuse_adapter(Path(adapter).parent)


def needs_own_code(config: Mapping[str, Any]) -> bool:
    """True if transformers has no classes for a config that names some of the model's own (`auto_map`). Where it has
    them it uses them unless it is told otherwise, and many models keep the names from before it had."""
    own, kind = config.get("auto_map") or {}, config.get("model_type")
    built = has_class(kind) or "AutoModelForCausalLM" not in own
    return bool(own) and not (kind in CONFIG_MAPPING and built)


def refuse_output(source: Any, config: Any) -> None:
    """Raise RewriterError for the config of an output, whose layers a recipe has wired already."""
    if isinstance(config, Mapping) and config.get("rewriter_layers"):
        raise RewriterError(
            f"{source} is an output of `rewrite`: a recipe has wired its layers already. `rewrite diff DIR` shows what "
            "it changed. For another recipe, or another number of ranks, give the original model"
        )


def build_skeleton(config: PreTrainedConfig, trust_remote_code: bool = False) -> Skeleton:
    """Instantiate the model of `config` without allocating its parameters.

    Raises RewriterError when no causal LM is registered for the config, when it has sizes that no model can have, and
    when its decoder layers cannot be found.
    """
    declared = getattr(config, "dtype", None)  # the build sets its own
    with refused(f"model type {config.model_type!r} cannot be built as a causal LM"):
        check_sizes(config)
        model = build_on_meta(config, torch.float32, trust_remote_code=trust_remote_code, **_EAGER)
    model.eval()
    model.config.dtype = declared
    left = tuple(getattr(model, "_no_placement_params", None) or ())  # what transformers does not move to a device
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and f"{name}.weight".endswith(left):
            vars(module)["offloaded"] = True
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    made_alike, declared = _dtypes_as_built(config, trust_remote_code)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            dtype = torch.float32 if name in declared else TRACE_DTYPE  # a forward may ask which it is
            parameter.data = torch.empty_like(parameter, dtype=dtype, device="meta")
    kept = kept_in_fp32(model, declared)
    stored = stored_buffers(model, kept["bfloat16"])
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full = f"{path}.{name}" if path else name
                follows = stored[full] is None if full in stored else full in made_alike
                module._buffers[name] = buffer.to("meta", TRACE_DTYPE if follows else buffer.dtype)
    path, layers = find_layers(model)
    return Skeleton(model, model.config, path, layers, buffers, stored, kept)


def kept_in_fp32(model: PreTrainedModel, declared: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
    """By the dtype to load in, regular expressions for the names of tensors that transformers then has in fp32.

    Those are what the class names (`PreTrainedModel._get_dtype_plan`), and what it makes in fp32 by itself: `declared`.
    """
    strict = {pattern.replace("*", ".*") for pattern in model._keep_in_fp32_modules_strict or ()}
    strict |= {re.sub(r"\.\d+\.", r"\\.\\d+\\.", f"^{name}$") for name in declared}
    half = strict | {pattern.replace("*", ".*") for pattern in model._keep_in_fp32_modules or ()}
    return {"bfloat16": tuple(sorted(strict)), "float16": tuple(sorted(half))}


def stored_buffers(model: PreTrainedModel, fp32: Collection[str] = ()) -> dict[str, torch.dtype | None]:
    """Buffers that checkpoints hold, by name, with the dtype that loading in another one leaves them; None: follows.

    `fp32` are those of `kept_in_fp32`.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    dtypes: dict[str, torch.dtype | None] = {}
    for name, tensor in model.state_dict().items():
        if name not in parameters:
            follows = not any(re.search(pattern, name) for pattern in fp32)
            dtypes[name] = tensor.dtype if not tensor.is_floating_point() else None if follows else torch.float32
    return dtypes


def _dtypes_as_built(config: PreTrainedConfig, trust_remote_code: bool) -> tuple[frozenset[str], frozenset[str]]:
    """(Buffers that have the dtype of the model, such as position tables; what checkpoints hold and is always fp32.)"""
    declared = getattr(config, "dtype", None)
    other = build_on_meta(config, TRACE_DTYPE, trust_remote_code=trust_remote_code, **_EAGER)
    config.dtype = declared
    alike = frozenset(name for name, buffer in other.named_buffers() if buffer.dtype == TRACE_DTYPE)
    return alike, frozenset(name for name, t in other.state_dict().items() if t.dtype == torch.float32)


def build_on_meta(config: PreTrainedConfig, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """The model of `config`: parameters on the meta device, never in memory; buffers with their values.

    `options` are those of `from_config`. Raises what the model's own code raises.
    """
    model: PreTrainedModel
    with contextlib.suppress(Exception), _parameters_on_meta(), _LargeOnMeta():
        model = auto_class(config).from_config(config, dtype=dtype, **options)
        if not any(buffer.is_meta for buffer in model.buffers()):
            return model
    with _parameters_on_meta():  # a buffer is large, or was filled after torch.empty made it
        model = auto_class(config).from_config(config, dtype=dtype, **options)
    return model


class _LargeOnMeta(TorchFunctionMode):
    """Makes what torch.empty makes, and all that is large, on the meta device: it will be a parameter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _FACTORIES or kwargs.get("device") is not None or "out" in kwargs:
            return func(*args, **kwargs)
        made = func(*args, **{**kwargs, "device": "meta"})
        return made if func is torch.empty or made.numel() >= LARGE else func(*args, **kwargs)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter that a module registers in the block goes to the meta device; buffers keep their values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


def find_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """(path, list) of the decoder layers: of the lists in the model's decoder that are in no other one, the one as long
    as its config says, else the longest. An encoder of images or sound next to it may have more layers."""
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and not any(name.startswith(f"{p}.") for p, _ in lists):
            lists.append((name, module))
    if not lists:
        raise RewriterError(f"{type(model).__name__} has no list of decoder layers, so there is nothing to rewrite.")
    inside = {id(module) for module in model.get_decoder().modules()}
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)

    def rank(item: tuple[str, nn.ModuleList]) -> tuple[bool, bool, int, int]:
        path, layers = item
        return id(layers) in inside, len(layers) == depth, len(layers), -path.count(".")

    return max(lists, key=rank)


# what differs between layers that trace alike, and what every module has
_NO_DIFFERENCE = frozenset({"layer_idx", "layer_index", "forward", *nn.Module().__dict__})


def fingerprint(module: nn.Module) -> Any:
    """Key of modules that trace alike: class tree, tensor shapes and plain attributes (layer indices aside)."""
    attributes = tuple(
        (
            name,
            repr(value) if _is_plain(value) else (getattr(value, "__module__", ""), getattr(value, "__qualname__", "")),
        )
        for name, value in sorted(module.__dict__.items())
        if name not in _NO_DIFFERENCE and (_is_plain(value) or inspect.isroutine(value))
    )
    tensors = tuple(
        (k, tuple(p.shape), p.dtype)
        for group in (module._parameters, module._buffers)
        for k, p in group.items()
        if p is not None
    )
    return (type(module), attributes, tensors, tuple((k, fingerprint(m)) for k, m in module.named_children()))


def _is_plain(value: Any) -> bool:
    """True if a value is told from others by how it prints: numbers, text, dtypes, and collections of them."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None), torch.dtype))


# --- numbers of a config that no model can have


MOST_LAYERS = 10_000
LARGEST = 1 << 24  # of a layer, a vocabulary, a number of heads or experts: a hundred times those of any model known

# As transformers calls them in every config; a list has a number per layer.
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
_BASES = ("rope_theta", "rotary_emb_base", "rope_local_base_freq")
_FACTORS = ("factor", "long_factor", "short_factor")  # of positions, which are divided by them
_Place = tuple[str, ...]


def check_values(file: str | Path, config: Mapping[str, Any]) -> None:
    """Raise RewriterError, naming file and key, for a NaN, an epsilon below 0, a rotary base or factor that is not
    above 0, and a `dtype` that transformers cannot read."""
    for place, value in _leaves(config):
        name = place[-1]
        if isinstance(value, str):
            if name not in ("dtype", "torch_dtype") or isinstance(getattr(torch, value, None), torch.dtype):
                continue
            raise RewriterError(
                f"{file}: {'.'.join(place)} is {value!r}, expected a name such as 'bfloat16'. Correct it."
            )
        if math.isnan(value):
            wrong = "expected a number"
        elif name.endswith(_BASES) and not 0 < value < math.inf:
            wrong = "expected a base above 0"
        elif name in _FACTORS and place[0].startswith("rope") and not 0 < value < math.inf:
            wrong = "expected a factor above 0"
        elif name.endswith(("_eps", "epsilon")) and not 0 <= value < math.inf:
            wrong = "expected a small number, 0 or more"
        else:
            continue
        raise RewriterError(f"{file}: {'.'.join(place)} is {value}, {wrong}. Correct it, or download the file again.")


def check_sizes(config: PreTrainedConfig) -> None:
    """Raise RewriterError, naming the key, for sizes below 1, and for those that no machine could hold."""
    text = config.get_text_config(decoder=True)
    values = text.to_dict()  # the attributes of some types cannot be asked for
    for name in ("num_hidden_layers", *_SIZES):
        written = text.attribute_map.get(name, name)
        given = values.get(written)
        most = MOST_LAYERS if name == "num_hidden_layers" else LARGEST
        least = 0 if name == "head_dim" and values.get("qk_rope_head_dim") == 0 else 1  # the rotated part of a head
        for value in given if isinstance(given, list | tuple) else [given]:
            if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= most:
                raise RewriterError(
                    f"config of model type {config.model_type!r}: {written} is {shortened(value, 30)}, "
                    f"expected {least} to {most:,}. Correct it, or download the config again."
                )


def _leaves(config: Mapping[str, Any], place: _Place = ()) -> Iterator[tuple[_Place, float | str]]:
    """Every number and text of a config with its place, those of a list at the place of the list."""
    for name, given in config.items():
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, Mapping):
                yield from _leaves(value, (*place, name))
            elif isinstance(value, int | float | str) and not isinstance(value, bool):
                yield (*place, name), min(value, 1 << 1000) if isinstance(value, int) else value
