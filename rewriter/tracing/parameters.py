"""Runtime parameters as expressions over checkpoint tensors, by the source type's own conversion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

# Transformers' own loading: a checkpoint's names on disk are not the runtime names (Mixtral's experts are stored one by
# one and run fused).
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from rewriter.common.errors import RewriterError
from rewriter.tracing.conversions import converted
from rewriter.tracing.unused_tensors import other_names, refuse_adapters, refuse_unexplained_scales
from rewriter.weights import Checkpoint
from rewriter.weights.expressions import Expression

FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
COMPARED = 1 << 24  # elements that are compared at a time


def tied_parameters(model: PreTrainedModel) -> dict[str, str]:
    """alias → canonical name, for parameters that are one tensor with several users."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    declared = model.get_expanded_tied_weights_keys(all_submodels=True)
    return {alias: name for alias, name in declared.items() if alias in names and name in names}


def checkpoint_expressions(
    model: PreTrainedModel, checkpoint: Checkpoint, tensors: Mapping[str, Expression]
) -> tuple[dict[str, Expression], dict[str, str], tuple[str, ...]]:
    """(expressions, ties, unused). Runtime name → expression, for every parameter of `model`, and for the buffers that
    the checkpoint holds of those that checkpoints hold; tied aliases are left out. `tensors` are the checkpoint's, by
    the names of one in which nothing is quantized.

    A pair that the config ties, and of which the checkpoint holds both with different values, is not tied:
    transformers does not tie it either (`PreTrainedModel.tie_weights`). `ties` are those that remain. `unused` are the
    names of `tensors` that transformers ignores on load: the model has no such parameter.

    Raises RewriterError naming tensors that are missing, of another shape or no floating-point numbers, and what the
    model cannot do without although it has no such parameter (adapters, scales of quantized weights), before any weight
    is read.
    """
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    ties = tied_parameters(model)
    renamings, converters = _transforms(model)
    known = dict.fromkeys(wanted, True)
    collected: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:  # a name of the running model, which only looks like one to rename
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, known)
        collected[target][pattern or name].append(name)
    by_pattern = {p: converter for converter in converters for p in converter.source_patterns}
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
            made = converted(model, converter, sources, target, tensors, checkpoint.shapes)
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
    where = f"the checkpoint in {checkpoint.directory}"
    refuse_adapters(where, unused)
    if missing:
        step = other_names([n for n in missing if n not in ties] or missing, unused) or _without(model, missing)
        raise RewriterError(_listing(f"{where} lacks", missing, len(trained)) + step)
    refuse_unexplained_scales(where, expressions, checkpoint.dtypes, unused)
    for name, expression in expressions.items():
        found = tuple(expression.shape(checkpoint.shapes))
        if found != wanted[name]:
            raise RewriterError(
                f"{name}: the checkpoint holds {_sizes(found)}, its config says {_sizes(wanted[name])}. "
                "Config and weights do not belong together. " + _other_size(model, name, found, wanted[name])
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


def _other_size(model: PreTrainedModel, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    tables = _parameters_of(model, model.get_input_embeddings(), model.get_output_embeddings())
    if name in tables and found[1:] == wanted[1:]:
        return f"Where its vocabulary was resized, vocab_size in config.json has to be {found[0]}, as its rows are."
    return "Download both again."


def _equal(checkpoint: Checkpoint, one: Expression, other: Expression) -> bool:
    """Whether two tensors have the same values, compared by parts that are given back to the system."""
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


def _listing(what: str, names: list[str], total: int | None = None) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{what} {shown}." + (f" The model has {total} parameters." if total else "")


def _transforms(model: PreTrainedModel) -> tuple[list[Any], list[Any]]:
    """(renamings, converters) that transformers applies when it loads this model."""
    transforms = get_model_conversion_mapping(model)
    renamings, converters = ([t for t in transforms if isinstance(t, k)] for k in (WeightRenaming, WeightConverter))
    return renamings, converters
