"""Recipes applied to a traced program, ready to be predicted."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count

from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.predict.analytic import Candidate
from rewriter.predict.results import SkippedRecipe
from rewriter.recipes import Recipe
from rewriter.recipes.apply import Applied, apply_recipe, load_recipe
from rewriter.recipes.catalogue import library
from rewriter.recipes.unfired import Rule, skipped_rules, unfired, without_measurements


@dataclass
class Candidates:
    """Makes the programs of recipes from one traced program; passes that recipes have in common run once.

    A recipe that shards tokens runs on as many ranks as the others: `sp` of them share the tokens, all of them where
    it is None.
    """

    original: Program
    sp: int | None = None
    known: Applied = field(default_factory=dict)
    standard: dict[int, Program] = field(default_factory=dict)

    def of(
        self, recipes: Sequence[str | os.PathLike[str] | Recipe], tp: int
    ) -> tuple[list[Candidate], list[SkippedRecipe]]:
        """(candidates, recipes that cannot be applied) on `tp` ranks in all.

        Raises RewriterError where the first recipe, with which the others are compared, or all of them cannot be.
        """
        candidates: list[Candidate] = []
        skipped: list[SkippedRecipe] = []
        for given in recipes:
            recipe = load_recipe(given)
            try:
                candidates.append(self.one(recipe, tp))
            except RewriterError as error:
                if not candidates:
                    raise
                skipped.append(SkippedRecipe(recipe.name, str(error)))
        return candidates, skipped

    def one(self, recipe: Recipe, tp: int) -> Candidate:
        """One recipe. Raises RewriterError where it cannot be applied."""
        sp, rest = self._ranks(recipe, tp)
        supposed, rules = without_measurements(recipe, partial(self._standard, rest))
        program, left_out = apply_recipe(self.original, supposed, rest, sp=sp, known=self.known)
        told = [*rules, *unfired(program), *skipped_rules(recipe, left_out)]
        notes = [_note(one) for one in told if not one["routine"]]
        details = [_note(one) for one in told if one["routine"]]
        if sp > 1:
            notes.append(f"{sp} ranks share the tokens of a sequence" + (f", {rest} its heads" if rest > 1 else ""))
        return Candidate(recipe.name, program, tuple(dict.fromkeys(notes)), tuple(dict.fromkeys(details)))

    def _ranks(self, recipe: Recipe, tp: int) -> tuple[int, int]:
        """(ranks that share tokens, ranks that share heads)."""
        if not any(rewrite.shards_tokens for rewrite in recipe.build()):
            return 1, tp
        sp = tp if self.sp is None else self.sp
        if sp < 1 or tp % sp:
            raise RewriterError(f"--sp {sp}: it does not divide the {tp} ranks that recipes are compared on")
        return sp, tp // sp

    def _standard(self, tp: int) -> Program:
        """Plain tensor parallelism, which says what a measurement would choose among."""
        if tp == 1:
            return self.original
        if tp not in self.standard:
            self.standard[tp] = apply_recipe(self.original, load_recipe("tensor-parallel"), tp, known=self.known)[0]
        return self.standard[tp]


def distinct(recipes: Sequence[Recipe]) -> list[Recipe]:
    """The recipes, those of one name numbered: "mine", "mine-2". Reports are by name."""
    named: list[Recipe] = []
    for recipe in recipes:
        taken, names = {r.name for r in named}, chain([recipe.name], (f"{recipe.name}-{n}" for n in count(2)))
        name = next(name for name in names if name not in taken)
        named.append(recipe if name == recipe.name else recipe.model_copy(update={"name": name}))
    return named


def all_recipes() -> Collection[str]:
    """The names of the library's recipes, plain tensor parallelism first."""
    return sorted(library(), key=lambda name: (name != "tensor-parallel", name))


def _note(rule: Rule) -> str:
    return f"{rule['rule']}: {rule['reason']}"
