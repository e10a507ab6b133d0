"""Checkpoints that hold quantized weights: which of their tensors are parts of which weight.

The names and layouts are those of the tools that write them; config.json's `quantization_config` says which tool.
Whatever is not known here is refused by what the config calls it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from rewriter.common.errors import RewriterError, shortened
from rewriter.common.text_settings import declared_dtype, quantization_settings
from rewriter.weights.checkpoint import Checkpoint
from rewriter.weights.expressions import Dequantized, Expression, Tensor, Transpose

FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
OF_TORCH: Mapping[str, str] = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# how activations are scaled: of what weights stand for, nothing
ACTIVATIONS = ("activation_scale", "input_scale", "output_scale", "qscale_act")
AWQ_SCALED = ("act.scales", "gelu_impl.scales")  # AutoAWQ divides what enters a layer instead of its weights
Parts = tuple[str, ...]


@dataclass(frozen=True)
class QuantizedWeights:
    """`kind` describes the method; `tensors` has every tensor by its name in a checkpoint without quantization.

    Those that are stored as they are, are `Tensor`s of the checkpoint; the others stand for tensors of `dtype`.
    """

    kind: str
    dtype: str
    tensors: Mapping[str, Expression]


def quantized_weights(checkpoint: Checkpoint, config: Mapping[str, Any]) -> QuantizedWeights | None:
    """The tensors of the checkpoint of a model with this config.json; None where nothing is quantized.

    Weights are taken to stand for tensors of `usual_dtype`. Raises RewriterError for what cannot be read, by its name:
    the method, its bits and what else is special about it.
    """
    said = quantization_settings(config)
    if not said:
        return None
    if not isinstance(said, Mapping):
        raise RewriterError(f"{checkpoint.directory}: its quantization_config is {shortened(said)}, not an object.")
    method = str(said.get("quant_method", "unknown")).replace("_", "-")
    dtype = usual_dtype(checkpoint, config)
    find = _METHODS.get(method)
    if find is None:
        raise _refused(checkpoint, f"{method}{_bits(said)}", f"{', '.join(sorted(_METHODS))} are known")
    try:
        kind, weights, dropped = find(checkpoint, said, dtype)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {shortened(error)}"
        raise _refused(checkpoint, method, f"its quantization_config is not as known ({what})") from error
    if not weights:
        raise RewriterError(
            f"{checkpoint.directory}: config.json says that weights are quantized ({kind}), but none of the tensors is."
            " Remove its quantization_config, or download both again."
        )
    used = dropped | {part for expression in weights.values() for part in expression.tensors()}
    plain = {name: Tensor(name) for name in checkpoint.tensors if name not in used}
    return QuantizedWeights(kind, dtype, {**plain, **weights})


def usual_dtype(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str:
    """The dtype, as safetensors calls it, that transformers loads a checkpoint in: the config's, or where that names
    none that of the first tensor of 16 bits or more."""
    named = declared_dtype(config) or ""
    inside = sorted(checkpoint.headers[checkpoint.files[0]].tensors)
    first = next((dtype for name in inside if (dtype := checkpoint.dtypes[name]) in OF_TORCH.values()), "F32")
    return OF_TORCH.get(named, first)


def read_otherwise(checkpoint: Checkpoint, config: Mapping[str, Any], gpu: bool) -> str | None:
    """The reason why transformers, with or without a `gpu`, reads other numbers; None where it does not.

    Up to 5.24 it does not know the names of AutoFP8's scales, and takes the weights to have none. A weight in FP8 that
    its blocks do not divide it takes, where it dequantizes it, to be in smaller blocks, or raises ValueError.
    """
    quantized, said = quantized_weights(checkpoint, config), quantization_settings(config)
    for name, expression in {} if quantized is None else quantized.tensors.items():
        if isinstance(expression, Dequantized) and expression.scheme == "fp8":
            scale, shape = next(expression.parts[1].tensors()), expression.shape(checkpoint.shapes)
            if said and said.get("quant_method") == "fp8" and scale == f"{name}_scale":
                return f"transformers does not know {scale}, and computes without it"
            sizes = shape[len(shape) - len(expression.numbers) :]
            if not gpu and any(size % per for size, per in zip(sizes, expression.numbers, strict=True)):
                return f"blocks of FP8 do not divide {name}, and transformers does not read it rightly without a GPU"
    return None


def _refused(checkpoint: Checkpoint, what: str, why: str) -> RewriterError:
    return RewriterError(
        f"{checkpoint.directory}: its weights are quantized by {what}, which is not supported: {why}. Start from the "
        "checkpoint before quantization, or load it with transformers, dequantize it and save that."
    )


def _bits(said: Mapping[str, Any]) -> str:
    """The bits of a config that names them, and what else changes the layout."""
    bits = said.get("bits", said.get("w_bit"))
    more = [f"{key}: {said[key]}" for key in ("desc_act", "version", "checkpoint_format") if key in said]
    return ", ".join(["" if bits is None else f", {bits} bits", *more])


Found = tuple[str, dict[str, Expression], set[str]]


def _fine_grained_fp8(checkpoint: Checkpoint, said: Mapping[str, Any], dtype: str) -> Found:
    """transformers' "fp8": DeepSeek-V3, Qwen3-FP8. Scales in blocks, or one per tensor, as AutoFP8 names it too, whose
    checkpoints only engines load."""
    block = said.get("weight_block_size")
    kind = f"fp8 in blocks of {block[0]}×{block[1]}" if block else "fp8 per tensor"
    if said.get("expert_dtype", "fp8") != "fp8":
        raise _refused(checkpoint, f"fp8 with experts in {said['expert_dtype']}", "only fp8 experts are")
    return _scaled_fp8(checkpoint, kind, ("_scale_inv", "_scale", ".scale", ".qscale_weight"), block, dtype)


def _compressed_tensors(checkpoint: Checkpoint, said: Mapping[str, Any], dtype: str) -> Found:
    """compressed-tensors with fp8 weights: one scale per tensor, per output channel, or per block."""
    block, strategies = None, []
    for group in (said.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        form = group.get("format") or said.get("format")
        what = f"compressed-tensors, {form}, {weights.get('num_bits')} bits {weights.get('type')}"
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8) or form not in _FP8_FORMATS:
            raise _refused(checkpoint, what, "of compressed-tensors only 8 bits float, float-quantized, is")
        if not weights.get("symmetric", True):
            raise _refused(checkpoint, f"{what}, asymmetric", "zero points are not")
        strategies.append(str(weights.get("strategy")))
        block = weights.get("block_structure") or block
    for key in ("kv_cache_scheme", "transform_config"):
        if said.get(key):
            raise _refused(checkpoint, f"compressed-tensors with a {key}", "it changes more than weights")
    if (said.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refused(checkpoint, "compressed-tensors with a sparsity_config", "sparse weights are not")
    kind = f"fp8 per {' and '.join(dict.fromkeys(strategies))} (compressed-tensors)"
    return _scaled_fp8(checkpoint, kind, ("_scale",), block, dtype)


_FP8_FORMATS = ("float-quantized", "naive-quantized")


def _scaled_fp8(checkpoint: Checkpoint, kind: str, suffixes: Parts, block: Any, dtype: str) -> Found:
    """Every tensor of an 8-bit float dtype, scaled by the one with its name and one of `suffixes`."""
    weights: dict[str, Expression] = {}
    for name, info in checkpoint.tensors.items():
        names = [(name if suffix[0] == "_" else name.removesuffix(".weight")) + suffix for suffix in suffixes]
        scale = next((other for other in names if other in checkpoint.tensors), None)
        if info.dtype not in FP8:
            if scale is not None and len(info.shape) > 1:
                raise _refused(checkpoint, f"{kind}, with {name} of {info.dtype}", "of it only fp8 tensors are")
            continue
        if scale is None:
            raise RewriterError(
                f"{checkpoint.directory}: {name} is {info.dtype}, but has no scale: {' or '.join(names)} is missing. "
                "Download the checkpoint again."
            )
        per = _elements_per_scale(info.shape, checkpoint.info(scale).shape, block)
        if per is None:
            shape, scales = (list(checkpoint.info(n).shape) for n in (name, scale))
            raise _refused(checkpoint, kind, f"{name} {shape} does not divide into the blocks of {scale} {scales}")
        weights[name] = Dequantized("fp8", (Tensor(name), Tensor(scale)), per, dtype)
    return kind, weights, {name for name in checkpoint.tensors if name.endswith(ACTIVATIONS)}


def _elements_per_scale(shape: tuple[int, ...], scales: tuple[int, ...], block: Any) -> tuple[int, ...] | None:
    """One number for each dimension of the scales, the last ones of the weight; None where they do not fit."""
    sizes = shape[len(shape) - len(scales) :]
    if prod(scales) == 1:
        return sizes if len(scales) <= len(shape) else None
    if len(scales) != len(shape):
        return None
    wished = [1] * (len(sizes) - 2) + [int(size) for size in block or ()]
    if len(wished) == len(sizes) and scales == tuple(-(-s // w) for s, w in zip(sizes, wished, strict=True)):
        return tuple(wished)
    if any(size % count for size, count in zip(sizes, scales, strict=True)):
        return None
    return tuple(size // count for size, count in zip(sizes, scales, strict=True))


def _mxfp4(checkpoint: Checkpoint, said: Mapping[str, Any], dtype: str) -> Found:
    """gpt-oss: experts [E, outputs, groups, 16], which the model multiplies as [E, inputs, outputs]."""
    weights: dict[str, Expression] = {}
    for name in checkpoint.tensors:
        stem = name.removesuffix("_blocks")
        if stem == name:
            continue
        blocks, scales = checkpoint.info(name), checkpoint.tensors.get(f"{stem}_scales")
        if scales is None or (blocks.dtype, scales.dtype) != ("U8", "U8") or len(blocks.shape) != 4:
            raise _refused(checkpoint, "mxfp4", f"{name} {list(blocks.shape)} {blocks.dtype} is not as gpt-oss has it")
        weights[stem] = Transpose(Dequantized("mxfp4", (Tensor(name), Tensor(f"{stem}_scales")), (), dtype), 1, 2)
    return "mxfp4", weights, set()


def _packed(checkpoint: Checkpoint, names: Parts) -> Iterator[tuple[str, Parts]]:
    """(module, names of its tensors) of every module with a qweight."""
    for name in checkpoint.tensors:
        if name.endswith(".qweight"):
            parts = tuple(f"{name.removesuffix('.qweight')}.{part}" for part in names)
            lacking = next((part for part in parts if part not in checkpoint.tensors), None)
            if lacking is not None:
                raise RewriterError(
                    f"{checkpoint.directory}: {name} needs {lacking}, which is missing. Download it again."
                )
            yield name.removesuffix(".qweight"), parts


def _awq(checkpoint: Checkpoint, said: Mapping[str, Any], dtype: str) -> Found:
    bits = said.get("bits", said.get("w_bit", 4))
    version = str(said.get("version", said.get("format", "gemm"))).lower()
    what = f"awq, {bits} bits, version: {version}"
    if bits != 4 or version != "gemm" or not said.get("zero_point", True):
        zero = "" if said.get("zero_point", True) else ", zero_point: False"
        raise _refused(checkpoint, what + zero, "of awq only 4 bits, version gemm, with zero points, is")
    if scaled := next((name for name in checkpoint.tensors if name.endswith(AWQ_SCALED)), None):
        raise _refused(checkpoint, f"{what}, with {scaled}", "activations that are divided are not")
    weights: dict[str, Expression] = {}
    for module, parts in _packed(checkpoint, ("qweight", "qzeros", "scales")):
        inputs, groups = checkpoint.info(parts[0]).shape[0], checkpoint.info(parts[2]).shape[0]
        size = said.get("group_size", said.get("q_group_size", 128))
        group = int(size) if int(size) > 0 and -(-inputs // int(size)) == groups else -(-inputs // groups)
        weights[f"{module}.weight"] = _matrix("awq", parts, (4, group), dtype)
    return f"awq, 4 bits, groups of {said.get('group_size', 128)}", weights, set()


def _gptq(checkpoint: Checkpoint, said: Mapping[str, Any], dtype: str) -> Found:
    bits, form = said.get("bits"), str(said.get("checkpoint_format", said.get("format", "gptq"))).lower()
    what = f"gptq, {bits} bits, desc_act: {said.get('desc_act', False)}, checkpoint_format: {form}"
    if bits not in (2, 4, 8) or form not in ("gptq", "gptq_v2"):
        raise _refused(checkpoint, what, "of gptq 2, 4 and 8 bits in the formats gptq and gptq_v2 are")
    if said.get("dynamic"):
        raise _refused(checkpoint, f"{what}, dynamic", "other bits for some modules are not")
    weights: dict[str, Expression] = {}
    for module, parts in _packed(checkpoint, ("qweight", "qzeros", "scales", "g_idx")):
        numbers = (int(bits), checkpoint.info(parts[2]).shape[0], int(form == "gptq"))
        weights[f"{module}.weight"] = _matrix("gptq", parts, numbers, dtype)
    return f"gptq, {bits} bits, groups of {said.get('group_size')}", weights, set()


def _bitsandbytes(checkpoint: Checkpoint, said: Mapping[str, Any], dtype: str) -> Found:
    """bitsandbytes: NF4 and FP4, which keep what they need next to every weight, numbers as JSON in a tensor; LLM.int8.

    Of the last what weights stand for: that activations are quantized too is another function, as with FP8.
    """
    weights: dict[str, Expression] = {}
    if not said.get("load_in_4bit"):
        formats = {name for name in checkpoint.tensors if name.endswith(".weight_format")}
        if other := next((name for name in formats if int(checkpoint.read(name))), None):
            raise _refused(checkpoint, "bitsandbytes, 8 bits", f"{other} is not 0: only rows one after another are")
        for name in checkpoint.tensors:
            weight = f"{name.removesuffix('.SCB')}.weight"
            if name.endswith(".SCB") and weight in checkpoint.tensors:
                weights[weight] = Dequantized("bnb8", (Tensor(weight), Tensor(name)), (), dtype)
        return "bitsandbytes, 8 bits", weights, formats
    for name in checkpoint.tensors:
        weight, mark, _ = name.partition(".quant_state.bitsandbytes__")
        if mark:
            state = json.loads(bytes(checkpoint.read(name).tolist()))
            nested = ("nested_absmax", "nested_quant_map") if "nested_blocksize" in state else ()
            parts = (weight, *(f"{weight}.{part}" for part in ("absmax", *nested, "quant_map")), name)
            lacking = next((part for part in parts if part not in checkpoint.tensors), None)
            if lacking is not None or len(state["shape"]) != 2:
                raise _refused(checkpoint, "bitsandbytes, 4 bits", f"{name} says {state}, and {lacking} is missing")
            weights[weight] = Dequantized("bnb4", tuple(map(Tensor, parts)), tuple(state["shape"]), dtype)
    return f"bitsandbytes, 4 bits, {said.get('bnb_4bit_quant_type', 'fp4')}", weights, set()


def _matrix(scheme: str, parts: Parts, numbers: tuple[int, ...], dtype: str) -> Expression:
    """A linear layer's weight [outputs, inputs], stored as [inputs, outputs]."""
    return Transpose(Dequantized(scheme, tuple(map(Tensor, parts)), numbers, dtype), 0, 1)


_METHODS: Mapping[str, Callable[[Checkpoint, Mapping[str, Any], str], Found]] = {
    "fp8": _fine_grained_fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "gptq": _gptq,
}
