"""Runtime parameters as expressions over checkpoint tensors, by the conversions that transformers makes on load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from rewriter.common.errors import RewriterError
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Concat, Expression, Shapes, Slice, Stack, Take, Tensor, Transpose

FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
COMPARED = 1 << 24  # elements that are compared at a time


def tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    """alias → canonical name, for parameters that are one tensor with several users."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    declared = model.get_expanded_tied_weights_keys(all_submodels=True)
    return {alias: name for alias, name in declared.items() if alias in names and name in names}


def beside_text(model: PreTrainedModel) -> frozenset[str]:
    """Names of parameters that text alone never meets: those outside of the decoder, its embedding and its head."""
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    inside = {id(p) for part in parts if isinstance(part, torch.nn.Module) for p in part.parameters()}
    return frozenset(n for n, p in model.named_parameters(remove_duplicate=False) if id(p) not in inside)


def checkpoint_expressions(
    model: PreTrainedModel, checkpoint: Checkpoint, tensors: Mapping[str, Expression]
) -> tuple[dict[str, Expression], dict[str, str], tuple[str, ...]]:
    """(expressions, ties, unused). Runtime name → expression, for every parameter of `model`, and for the buffers that
    the checkpoint holds of those that checkpoints hold; tied aliases are left out. `tensors` are the checkpoint's, by
    the names of one in which nothing is quantized.

    A pair that the config ties, and of which the checkpoint holds both with different values, is not tied:
    transformers does not tie it either (`PreTrainedModel.tie_weights`). `ties` are those that remain. `unused` are the
    names of `tensors` that transformers ignores on load: the model has no such parameter. A parameter beside the text
    model has no expression where the conversion that makes it is not supported: its tensors are copied as they are.

    Raises RewriterError naming tensors that are missing, of another shape or no floating-point numbers, and what the
    model cannot do without although it has no such parameter (adapters, scales of quantized weights), before any weight
    is read.
    """
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    ties = tied_parameters(model)
    transforms = get_model_conversion_mapping(model)
    renamings, converters = ([t for t in transforms if isinstance(t, k)] for k in (WeightRenaming, WeightConverter))
    known = dict.fromkeys(wanted, True)
    collected: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:  # a name of the running model, which only looks like one to rename
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, known)
        collected[target][pattern or name].append(name)
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
    beside, left_out = beside_text(model), False
    expressions: dict[str, Expression] = {}
    unused: dict[str, str] = {}  # by name, what it would be called in the model
    for target, sources in collected.items():
        if target not in wanted:
            unused |= dict.fromkeys((n for names in sources.values() for n in names), target)
            continue
        pattern = next(iter(sources))
        converter = by_pattern.get(pattern)
        if converter is None:
            expressions[target] = tensors[sources[pattern][0]]
        else:
            try:
                made = converted(model, converter, sources, target, tensors, checkpoint.shapes)
            except RewriterError:
                if target not in beside:
                    raise
                made, left_out = {}, True
            expressions |= {name: expression for name, expression in made.items() if name in wanted}
    for alias, canonical in list(ties.items()):
        if alias in wanted and canonical in wanted:
            if canonical not in expressions and alias in expressions:
                expressions[canonical] = expressions[alias]
            elif alias in expressions and not _equal(checkpoint, expressions[alias], expressions[canonical]):
                del ties[alias]
                continue
            expressions.pop(alias, None)
    missing = [n for n in wanted if n in trained and n not in expressions and ties.get(n) not in expressions]
    missing = [n for n in missing if not left_out or n not in beside]
    where = f"the checkpoint in {checkpoint.directory}"
    refuse_adapters(where, unused)
    if missing:
        step = other_names([n for n in missing if n not in ties] or missing, unused) or _without(model, missing)
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise RewriterError(f"{where} lacks {shown}. The model has {len(trained)} parameters." + step)
    refuse_unexplained_scales(where, expressions, checkpoint.dtypes, unused)
    for name, expression in expressions.items():
        held = tuple(expression.shape(checkpoint.shapes))
        if held != wanted[name]:
            raise RewriterError(
                f"{name}: the checkpoint holds {_sizes(held)}, its config says {_sizes(wanted[name])}. "
                "Config and weights do not belong together. " + _other_size(model, name, held, wanted[name])
            )
        if state[name].is_floating_point() and (others := expression.dtypes(checkpoint.dtypes) - FLOATS):
            raise RewriterError(
                f"{name}: the checkpoint in {checkpoint.directory} stores it as {min(others)}, and a model computes "
                "with floating-point numbers. Where it is quantized, config.json has to say how (quantization_config); "
                "else save it in bf16."
            )
    return expressions, ties, tuple(unused)


def _parameters_of(model: PreTrainedModel, *modules: Any) -> set[str]:
    """The names of what these modules of a model have of their own."""
    places = [path for path, module in model.named_modules() if any(module is one for one in modules)]
    return {f"{path}.{name}" for path in places for name in ("weight", "bias")}


def _without(model: PreTrainedModel, missing: Iterable[str]) -> str:
    """The next step for a checkpoint that lacks parameters."""
    if not _parameters_of(model, model.get_output_embeddings()).issuperset(missing):
        return " Download it again; or config.json is another model's."
    return (
        ' Where the embeddings are its head, config.json has to say so ("tie_word_embeddings": true). A model without '
        "a head, or with another one (a classifier), is no causal language model."
    )


def _other_size(model: PreTrainedModel, name: str, held: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    tables = _parameters_of(model, model.get_input_embeddings(), model.get_output_embeddings())
    if name in tables and held[1:] == wanted[1:]:
        return f"Where its vocabulary was resized, vocab_size in config.json has to be {held[0]}, as its rows are."
    return "Download both again."


def _equal(checkpoint: Checkpoint, one: Expression, other: Expression) -> bool:
    """True if two tensors have the same values, compared by parts that are given back to the system."""
    if one == other:
        return True
    if one.shape(checkpoint.shapes) != other.shape(checkpoint.shapes):
        return False
    first, second = checkpoint.evaluate(one).flatten(), checkpoint.evaluate(other).flatten()
    for start in range(0, len(first), COMPARED):
        if not first[start : start + COMPARED].equal(second[start : start + COMPARED].to(first.dtype)):
            return False
        checkpoint.release()
    return True


def _sizes(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "a scalar"


# --- tensors that the model does not use


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
    part = next((name for name in unused if not _ADAPTERS.isdisjoint(name.split("."))), None)
    if part is not None:
        raise RewriterError(f"{where} holds {part}: these are {_PEFT}.")


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
    """The unused tensors that are `missing` parameters of a model under longer or shorter names: which, and
    the next step. Empty where they are not. `unused` maps names to what they would be called in the model."""
    names = {*unused, *unused.values()}
    bare = {".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names}
    if bare.issuperset(missing):
        present = {part for name in names for part in name.split(".")}
        what, who = next((part, who) for part, who in _WRAPPERS.items() if part in present)
        return f" Its names hold '{what}.', which {who} puts there. " + _renamed(f"name.replace('{what}.', '')")
    first = next(iter(missing))
    for name in names:
        longer, shorter = name.removesuffix(f".{first}"), first.removesuffix(f".{name}")
        if longer != name and names.issuperset(f"{longer}.{other}" for other in missing):
            if longer.startswith("base_model"):
                return f" Its names begin with '{longer}.': these are {_PEFT}."
            told = f" It has them with '{longer}.' in front, as of a model inside another one. "
            return told + _renamed(f"name.removeprefix('{longer}.')")
        if shorter != first and all(other.removeprefix(f"{shorter}.") in names for other in missing):
            return f" It has them without '{shorter}.' in front. " + _renamed(f"'{shorter}.' + name")
    return ""


def _renamed(new: str) -> str:
    return (
        "Save the model itself with save_pretrained; or rename the tensors in every file F (and in its index): "
        f"save_file({{{new}: t for name, t in load_file(F).items()}}, F, {{'format': 'pt'}}) of safetensors.torch."
    )


# Operations that only move elements, along one dimension (`dim`, else the first): run on places, they say where to.
_MOVING = ("Chunk", "Split", "Interleave", "PermuteForRope", "Inkling2UnpadVocab")


def converted(
    model: PreTrainedModel,
    converter: Any,
    sources: Mapping[str, list[str]],
    target: str,
    tensors: Mapping[str, Expression],
    shapes: Shapes,
) -> dict[str, Expression]:
    """The parameters that transformers' `converter` makes, by name, of the tensors that `sources` names by pattern.

    `target` is the first parameter's name, `shapes` are those of the stored tensors. Raises RewriterError where a
    source is missing, and for an operation that does not only move elements.
    """
    patterns, targets = converter.source_patterns, converter.target_patterns
    kinds = [type(operation).__name__ for operation in converter.operations]
    if unknown := [kind for kind in kinds if kind not in ("MergeModulelist", "Concatenate", "Transpose", *_MOVING)]:
        raise RewriterError(
            f"{target}: transformers makes it by {unknown[0]}, a conversion of its type's checkpoints that is not "
            "supported. Load the model with transformers and save it in its present form (save_pretrained with "
            "save_original_format=False)."
        )
    if lacking := [p for p in patterns if p not in sources]:
        raise RewriterError(f"{target}: the checkpoint has no tensor like *{lacking[0]}, needed to build it.")
    values = {p: [tensors[n] for n in sources[p]] for p in patterns}
    for kind, operation in zip(kinds, converter.operations, strict=True):
        alone = all(len(group) == 1 for group in values.values())
        if kind == "MergeModulelist":
            stacked: list[list[Expression]] = [[Stack(tuple(group), operation.dim)] for group in values.values()]
            values = dict(zip(targets if len(values) == 1 else values, stacked, strict=False))
        elif kind == "Concatenate":
            values = {targets[0]: [Concat(tuple(e for group in values.values() for e in group), operation.dim)]}
        elif kind == "Transpose" and alone:
            # Undone where the stored tensor has the parameter's shape already, if the operation looks at that.
            fits = tuple(model.get_parameter(target).shape) if getattr(operation, "check_dims", False) else None
            names = targets if len(values) == len(targets) == 1 else values
            moved: list[list[Expression]] = [
                [e if e.shape(shapes) == fits else Transpose(e, operation.dim0, operation.dim1)]
                for [e] in values.values()
            ]
            values = dict(zip(names, moved, strict=True))
        elif kind in _MOVING and alone:
            values = _moved(model, converter, operation, target, {p: e for p, [e] in values.items()}, shapes)
        else:
            raise RewriterError(f"{target}: the checkpoint has several tensors where its conversion takes one of each.")
    if not all(len(group) == 1 for group in values.values()):
        raise RewriterError(f"{target}: its conversion gives several tensors where one is expected.")
    for pattern in values:  # as transformers does: what stands around the first that is found
        before, separator, behind = target.partition(pattern)
        if separator:
            return {before + name + behind: e for name, [e] in values.items()}
    [[expression], *others] = values.values()
    if others:
        raise RewriterError(f"{target}: its conversion gives {1 + len(others)} tensors where one is expected.")
    return {target: expression}


def _moved(
    model: PreTrainedModel, converter: Any, operation: Any, target: str, given: Mapping[str, Expression], shapes: Shapes
) -> dict[str, list[Expression]]:
    """Results of `operation` on `given`: it is run on the places along its dimension, all other sizes being 1."""
    dim = getattr(operation, "dim", 0)
    places: dict[str, torch.Tensor] = {}
    begins: list[tuple[int, Expression]] = []
    total = 0
    for pattern, expression in given.items():
        shape = expression.shape(shapes)
        size = shape[dim]
        thin = [size if d == dim % len(shape) else 1 for d in range(len(shape))]
        places[pattern] = torch.arange(total, total + size).view(thin)
        begins.append((total, expression))
        total += size
    result = operation.convert(
        places,
        source_patterns=converter.source_patterns,
        target_patterns=converter.target_patterns,
        full_layer_name=target,
        model=_PlacesModel(model),
        config=model.config,
        missing_keys=None,
    )
    made: dict[str, list[Expression]] = {}
    for name, moved in result.items():
        begin, expression = max((b, e) for b, e in begins if b <= int(moved.min()))
        made[name] = [_picked(expression, dim % moved.dim(), [p - begin for p in moved.flatten().tolist()], shapes)]
    return made


class _PlacesModel:
    """The model, as operations look at it: its parameters have their shapes, and the dtype of places."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty(self.model.get_parameter(name).shape, dtype=torch.int64, device="meta")


def _picked(expression: Expression, dim: int, places: list[int], shapes: Shapes) -> Expression:
    """The elements of `expression` at `places` along `dim`, in the plainest form."""
    begin, end = places[0], places[0] + len(places)
    if places != list(range(begin, end)):
        return Take(expression, dim, tuple(places))
    if len(places) == expression.shape(shapes)[dim]:
        return expression
    return Slice(expression, dim, ((begin, end),))
