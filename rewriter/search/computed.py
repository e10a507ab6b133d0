"""What ranks compute under a mix, and the part of it that differs from the original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rewriter.analysis.residual import by_layer, residual_blocks
from rewriter.common.errors import RewriterError
from rewriter.ir import Program
from rewriter.passes.base import single_device
from rewriter.passes.quantize_collectives import always_quantized, is_quantized
from rewriter.passes.tensor_parallel import TensorParallel
from rewriter.recipes import Recipe
from rewriter.recipes.apply import Applied, apply_recipe
from rewriter.search.choices import Mix, recipe_of
from rewriter.verify.sensitivity import between, given_names

SCHEDULES = ("fuse_projections", "overlap")
_ANY_GRID = "ring-attention"  # it asks nothing of the number of heads


def keep_shared(known: Applied) -> None:
    """Forget what passes made, but for the sharded model that all mixes begin with: hundreds of them fill the
    memory."""
    for key in [key for key in known if not key[-1].startswith(TensorParallel.__name__)]:
        del known[key]


@dataclass(frozen=True)
class Part:
    """A program that is given stream values of the original, by name, and returns another one, or the logits.

    `start`: the first layer that differs from the original; `end`: the layer after the last one that does, from which
    on the original goes on with what it returns. `given`: the original's stream values that it reads, by name.
    """

    program: Program
    start: int
    end: int
    given: Mapping[str, int]


@dataclass
class Computed:
    """Makes the programs of mixes of one traced model on `ranks` ranks. Raises RewriterError as passes do."""

    original: Program
    ranks: int
    known: Applied = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers = by_layer(residual_blocks(self.original))
        count = self.original.source.num_layers
        if sorted(layers) != list(range(count)):
            raise RewriterError(
                f"model type {self.original.source.model_type!r}: its layers are no blocks of one residual stream, so "
                "no rewrite of single layers applies. `rewrite inspect` says what does"
            )
        self.starts = [layers[layer][0].index for layer in range(count)]
        self.last = layers[count - 1][-1].index + 1

    @property
    def layers(self) -> int:
        return len(self.starts)

    def program(self, recipe: Recipe) -> Program:
        """What ranks compute under `recipe`, its messages quantized however short: one device, where that is the
        same."""
        passes = [p.pass_name for p in recipe.passes]
        disable = [name for name in (*SCHEDULES, "permute") if name in passes]
        rewritten, _ = apply_recipe(self.original, recipe, self.ranks, disable, known=self.known)
        return always_quantized(rewritten) if is_quantized(rewritten) else single_device(rewritten)

    def sharing(self, mix: Mix) -> Program:
        """What ranks compute that share tokens, with keys and values quantized: the same on every grid of ranks."""
        recipe = recipe_of(replace(mix, base=_ANY_GRID))
        disable = [p.pass_name for p in recipe.passes if p.pass_name in SCHEDULES]
        return always_quantized(apply_recipe(self.original, recipe, 1, disable, sp=self.ranks, known=self.known)[0])

    def boundary(self, layer: int) -> int:
        """The number of the stream value that `layer` begins with; of the number of layers, the last one's."""
        return self.starts[layer] if layer < self.layers else self.last

    def part(self, mix: Mix) -> Part:
        """What differs from the original under `mix`, which changes something."""
        touched = mix.touched
        start, end = touched[0], touched[-1] + 1
        changed = self.program(recipe_of(mix))
        first = self.boundary(start)
        places = [place for place in (first - 1, first) if place >= 0]
        final = by_layer(residual_blocks(changed))[end - 1][-1].index + 1
        cut = between(changed, places, final)
        used = {str(n.target) for n in cut.graph.nodes if n.op == "placeholder" and n.users}
        given = {name: place for name, place in zip(given_names(places), places, strict=True) if name in used}
        for node in list(cut.graph.nodes):
            if node.op == "placeholder" and str(node.target) in given_names(places) and not node.users:
                cut.graph.erase_node(node)
        return Part(cut, start, end, given)
