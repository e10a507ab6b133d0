"""The command that follows from a comparison: convert, serve the model as it is, or compare on other ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rewriter.predict.engines import engine_named, options
from rewriter.predict.results import ExactChoice, RecipeComparison
from rewriter.predict.verdict import decide, of_several
from rewriter.recipes.apply import load_recipe
from rewriter.recipes.verdicts import converting, replaced


def next_words(
    comparison: RecipeComparison, words: Sequence[str], model: str, recipes: Sequence[str] = ()
) -> list[str]:
    """The words of the next command. `words`: those after `rewrite` that made the comparison; `model` and `recipes`
    (names or files): as in them.

    Empty where nothing follows: without exact choices, and for an engine without a command.
    """
    found = decide(comparison)
    if found is None or not comparison.predictions:
        return []
    first = comparison.predictions[0]
    if found.best is None:
        return ["rewrite", *replaced(words, "--tp", f"{2 * first.tp * first.sp}")]
    if (p := found.recipe) is not None:
        given = next((one for one in recipes if load_recipe(one).name == p.recipe), p.recipe)
        return converting(model, given, p.tp, p.sp)
    if of_several(found.over) and any(p.kind == "approximating" for p in comparison.predictions):
        return ["rewrite", *replaced(words, "--tp", f"{found.over.tp}")]
    return engine_words(comparison.engine, found.best, model)


def engine_words(engine: str, choice: ExactChoice, model: str) -> list[str]:
    """The engine's command that serves the model as it is by an exact choice; empty for an engine without one.

    A switch that needs a value which is not known here gets a word in capitals instead.
    """
    serve = engine_named(engine).serve
    if not serve:
        return []
    variables: list[str] = []
    flags: list[str] = []
    counts = {"pipeline": choice.stages, "replicas": choice.replicas}
    sums = {name for name, known in options().items() if known.libraries}
    # an available choice has a switch for each option; one GPU sums nothing
    for switch, option in zip(choice.switches, choice.options, strict=False):
        if choice.tp == 1 and option in sums:
            continue
        if re.match(r"[A-Z][A-Z0-9_]*=", switch):
            variables.append(switch)
        elif switch.startswith("-"):
            flags += [*switch.split(), *([f"{counts[option]}"] if option in counts else [])]
            flags += ["SETTINGS"] * (option == "draft")
    degree = [] if choice.tp == 1 else [part.format(tp=choice.tp) for part in serve[-2:]]
    return [*variables, *(part.format(model=model) for part in serve[:-2]), *degree, *flags]
