"""Weights of fewer bits, as servers read them: how many bytes a product reads, and what it computes in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from rewriter.ir import Program
from rewriter.ir.marks import marks
from rewriter.predict.workload import StoredWeights, WeightFormat


def parameters_of_format(program: Program, stored: StoredWeights) -> frozenset[str]:
    """The names of a program's parameters that are of a format: matrices of layers, but for those whose parts are all
    kept."""
    called = [node for node in program.graph.nodes if node.op == "call_module"]
    layers = {str(node.target) for node in called if marks(node).layer is not None}
    layers |= {str(node.target) for node in called[-1:] if stored.head}
    return frozenset(
        name
        for name, spec in program.parameters.items()
        if len(spec.shape) >= (3 if stored.only_experts else 2)
        and any(parent in layers for parent in _parents(name))
        and not all(any(_matches(said, part) for said in stored.kept) for part in spec.parts or (name,))
    )


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _matches(said: str, name: str) -> bool:
    if said.startswith("re:"):
        try:
            return re.match(said[3:], name) is not None
        except re.error:
            return False
    return fnmatchcase(name, said) if "*" in said else said in name


_STORED: dict[str, StoredWeights] = {
    "float8": StoredWeights("float8", 8.0, "float8"),
    "int8": StoredWeights("int8", 8.0),
    "int4": StoredWeights("int4", 4.25),  # a scale and a zero of 16 and 4 bits for each group of 128 (GPTQ, AWQ)
    "nvfp4": StoredWeights("nvfp4", 4.5, "float4"),  # a scale of 8 bits for each 16
    "mxfp4": StoredWeights("mxfp4", 4.25, only_experts=True),  # one for each 32, as gpt-oss has them
}


_KEPT = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")


def stored_weights(asked: WeightFormat | None, settings: Any) -> StoredWeights | None:
    """The format `asked` for, or without one that of a config's quantization `settings`; None where weights are of
    the model's dtype, or of a format that is not known."""
    said = settings if isinstance(settings, Mapping) else {}
    if (name := asked or _named(said)) is None:
        return None
    kept = [one for key in _KEPT for one in said.get(key) or () if isinstance(one, str)]
    if asked is not None:
        return _STORED[name]
    return replace(_STORED[name], kept=tuple(kept), head=said.get("lm_head") is True)


def _named(said: Mapping[str, Any]) -> str | None:
    """The format of a config's settings, by the tools that write them."""
    method = str(said.get("quant_method", "")).replace("_", "-")
    if method in ("fp8", "fbgemm-fp8", "finegrained-fp8") or said.get("quant_algo") in ("FP8", "FP8_PB_WO"):
        return "float8"
    if method == "mxfp4":
        return "mxfp4"
    if said.get("quant_algo") == "NVFP4":
        return "nvfp4"
    if method == "bitsandbytes":
        return "int4" if said.get("load_in_4bit") else "int8" if said.get("load_in_8bit") else None
    if method in ("awq", "gptq", "auto-round", "gptq-marlin", "awq-marlin"):
        return {4: "int4", 8: "int8"}.get(said.get("bits", said.get("w_bit", 4)))
    groups = said.get("config_groups")
    weights = next((g.get("weights") or {} for g in groups.values()), {}) if isinstance(groups, Mapping) else {}
    kinds: dict[tuple[Any, Any], str] = {
        ("float", 8): "float8", ("int", 8): "int8", ("int", 4): "int4", ("float", 4): "nvfp4",
    }  # fmt: skip
    return kinds.get((weights.get("type"), weights.get("num_bits")))
