"""A recipe applied to a program, pass by pass, each checked and timed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rewriter.common.errors import RewriterError, did_you_mean

if TYPE_CHECKING:
    from rewriter.ir import Program
    from rewriter.recipes import Recipe


def apply_recipe(
    program: Program,
    recipe: Recipe,
    tp: int = 1,
    disable: Collection[str] = (),
    sp: int = 1,
    known: Applied | None = None,
) -> tuple[Program, list[tuple[str, str]]]:
    """(the rewritten program, (name, reason) of every pass that was not applied).

    The mesh has an axis "sp" of `sp` ranks over the tokens and "tp" of `tp` over heads and channels, where above 1.
    An optional pass without effect is left out, with its reason; `disable` and the environment's REWRITER_DISABLE
    (names separated by commas) leave out passes by name. With REWRITER_DEBUG the IR before and after each pass and its
    time go to stderr. `known` keeps what passes made: recipes for one traced program that begin with the same passes
    share their work. Raises RewriterError, naming the pass, when one cannot be applied.
    """
    if program.history:
        raise RewriterError(f"{program!r} is rewritten already: start from the program as traced")
    for axis, size in (("tp", tp), ("sp", sp)):
        if size < 1:
            raise RewriterError(f"{axis}={size}: expected 1 or more ranks")
    passes = recipe.build()
    disabled = _disabled(disable, [p.name for p in passes])
    _check_tokens_are_sharded(recipe, passes, disabled, sp)
    original = program
    if mesh := {axis: size for axis, size in (("sp", sp), ("tp", tp)) if size > 1}:
        program = program.with_(mesh=mesh, origin=original)
    asked: list[Any] = []
    skipped: list[tuple[str, str]] = []
    before = (id(original), *sorted(program.mesh.items()))
    debug = os.environ.get("REWRITER_DEBUG", "0") not in ("", "0")
    if debug:
        _show("as traced", program)
    for spec, rewrite in zip(recipe.passes, passes, strict=True):
        if rewrite.name in disabled:
            skipped.append((rewrite.name, "disabled by name"))
            continue
        begin = time.perf_counter()
        before = (*before, repr(rewrite))
        try:
            program = _applied(rewrite, program, before, known)
        except RewriterError as error:
            if not spec.optional:
                raise
            skipped.append((rewrite.name, str(error)))
            continue
        asked.append(rewrite)
        if debug:
            _show(f"after {rewrite.name}, {(time.perf_counter() - begin) * 1e3:.1f} ms", program)
    return program.with_(recipe=recipe.to_dict(), asked=tuple(asked), origin=program.origin or original), skipped


# What a pass made of a program, by the traced program's id, the mesh and the passes so far; or why it could not.
Applied = dict[tuple[Any, ...], "Program | RewriterError"]


def _applied(rewrite: Any, program: Program, key: tuple[Any, ...], known: Applied | None) -> Program:
    """`program` rewritten and checked, or what `known` says of it."""
    if known is None:
        made: Program = rewrite.apply(program)
        lint(made, rewrite.name)
        return made
    if key not in known:
        try:
            known[key] = _applied(rewrite, program, key, None)
        except RewriterError as error:
            known[key] = error
    result = known[key]
    if isinstance(result, RewriterError):
        raise result
    return result


def check_bound(recipe: Recipe, passes: Sequence[Any], tp: int, sp: int = 1) -> None:
    """Refuse, before any work, ranks that the passes would refuse once the model is traced.

    Raises RewriterError where a pass that the recipe needs cannot be applied on them, and for several ranks of "sp"
    where no pass shards tokens.
    """
    disabled = _disabled((), [p.name for p in passes])
    _check_tokens_are_sharded(recipe, passes, disabled, sp)
    for spec, rewrite in zip(recipe.passes, passes, strict=True):
        if not spec.optional and rewrite.name not in disabled:
            rewrite.check_mesh({"tp": tp, "sp": sp})


def _check_tokens_are_sharded(recipe: Recipe, passes: Sequence[Any], disabled: Collection[str], sp: int) -> None:
    if sp > 1 and not any(p.shards_tokens and p.name not in disabled for p in passes):
        raise RewriterError(
            f"--sp {sp}: recipe {recipe.name} has no sequence_parallel, so nothing would shard the tokens. Use a "
            "recipe that has it (attention2d, ring-attention, ulysses, long-context), or add "
            "`- pass: sequence_parallel`."
        )


def lint(program: Program, after: str) -> None:
    """Check what every pass must leave: a well-formed wiring that calls only modules that exist.

    Raises RewriterError naming the pass: it is a fault of the pass, and nothing should be made from its result.
    """
    try:
        program.graph.lint()
    except (RuntimeError, ValueError) as error:
        raise RewriterError(f"{after}: it left a wiring that is not well formed: {error}") from error
    for node in program.graph.nodes:
        if node.op == "call_module" and str(node.target) not in program.modules:
            raise RewriterError(f"{after}: {node.name} calls {node.target}, which the program does not have")


def _disabled(disable: Collection[str], known: Sequence[str]) -> set[str]:
    named = {*disable, *filter(None, (n.strip() for n in os.environ.get("REWRITER_DISABLE", "").split(",")))}
    for name in sorted(named):
        if name not in known:
            raise RewriterError(f"disable: the recipe has no pass {name!r}. {did_you_mean(name, known, what='it has')}")
    return named


def _show(title: str, program: Program) -> None:
    sys.stderr.write(f"--- {title}\n{program.text()}\n")


def load_recipe(recipe: str | os.PathLike[str] | Recipe, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A Recipe from a shipped name, a file or a Recipe, with options replaced. Raises RewriterError for every fault."""
    from rewriter.recipes import Recipe

    loaded = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    return loaded.with_overrides(overrides) if overrides else loaded
