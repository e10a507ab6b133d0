"""Tensors of a checkpoint that its model does not use: which of them are harmless, and what the others are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rewriter.common.errors import RewriterError
from rewriter.weights.expressions import Expression, Tensor

_PEFT = "peft's names of an adapter that is not merged. Merge it first: peft's merge_and_unload(), then save_pretrained"
# Parts of names that a wrapper around a model or a module of it adds, and who adds them.
_WRAPPERS = {
    "_orig_mod": "torch.compile",
    "module": "DataParallel or DistributedDataParallel",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "a trainer",
}
_ADAPTERS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "base_layer", "modules_to_save"})
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2")


def refuse_adapters(where: str, unused: Iterable[str]) -> None:
    """Raise RewriterError where tensors are parts of an adapter, which the model would be without."""
    found = next((name for name in unused if not _ADAPTERS.isdisjoint(name.split("."))), None)
    if found is not None:
        raise RewriterError(f"{where} holds {found}: these are {_PEFT}.")


def refuse_unexplained_scales(
    where: str, expressions: Mapping[str, Expression], dtypes: Mapping[str, str], unused: Iterable[str]
) -> None:
    """Raise RewriterError where the numbers of a weight in 8 bits mean nothing without a tensor that is not used."""
    modules: dict[str, str] = {}
    for name in unused:
        modules.setdefault(name.rpartition(".")[0], name)
    for expression in expressions.values():
        for name in expression.tensors() if modules and expression.dtypes(dtypes) & {*_EIGHT_BITS} else ():
            scale = modules.get(name.rpartition(".")[0])
            if expression == Tensor(name) and scale is not None and dtypes[name] in _EIGHT_BITS:
                raise RewriterError(
                    f"{where} stores {name} as {dtypes[name]} with {scale} beside it, and config.json does not say how "
                    "it is quantized. Put the quantization_config of the tool that wrote it there."
                )


def other_names(missing: Collection[str], unused: Mapping[str, str]) -> str:
    """Where the `missing` parameters of a model are among the unused tensors under longer or shorter names: which, and
    the next step. Empty where they are not. `unused` maps names to what they would be called in the model."""
    found = {*unused, *unused.values()}
    bare = {".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in found}
    if bare.issuperset(missing):
        present = {part for name in found for part in name.split(".")}
        what, who = next((part, who) for part, who in _WRAPPERS.items() if part in present)
        return f" Its names hold '{what}.', which {who} puts there. " + _renamed(f"name.replace('{what}.', '')")
    first = next(iter(missing))
    for name in found:
        longer, shorter = name.removesuffix(f".{first}"), first.removesuffix(f".{name}")
        if longer != name and found.issuperset(f"{longer}.{other}" for other in missing):
            if longer.startswith("base_model"):
                return f" Its names begin with '{longer}.': these are {_PEFT}."
            told = f" It has them with '{longer}.' in front, as of a model inside another one. "
            return told + _renamed(f"name.removeprefix('{longer}.')")
        if shorter != first and all(other.removeprefix(f"{shorter}.") in found for other in missing):
            return f" It has them without '{shorter}.' in front. " + _renamed(f"'{shorter}.' + name")
    return ""


def _renamed(new: str) -> str:
    return (
        "Save the model itself with save_pretrained; or rename the tensors in every file F (and in its index): "
        f"save_file({{{new}: t for name, t in load_file(F).items()}}, F, {{'format': 'pt'}}) of safetensors.torch."
    )
