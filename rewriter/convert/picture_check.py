"""`rewrite verify --images`: does an output compute what its recipe says where a picture stands among the text?"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from rewriter.check.comparison import REAL_WEIGHTS, Verification
from rewriter.check.drift import memory_shortage
from rewriter.check.pictures import picture
from rewriter.check.reference_modes import reference_of
from rewriter.common.errors import RewriterError
from rewriter.common.files import scratch_folder
from rewriter.common.model_class import takes_images
from rewriter.common.run_context import RunContext
from rewriter.convert.rewritten_source import open_output, recipe_of, write_source
from rewriter.recipes.apply import apply_recipe
from rewriter.tracing import trace
from rewriter.weights import Checkpoint
from rewriter.weights.plain_model import plain_model

WHAT = "with a picture, adapted checkpoint"


@torch.no_grad()
def check_picture(directory: Path, context: RunContext = RunContext()) -> Verification:
    """One random picture and text through the output in `directory`, and through hooks on the model that it was made
    of, with the output's weights; both in fp32 in this process, which runs the output's code.

    Raises RewriterError for a model that takes no images, of which no form of pixels is known, or whose weights do not
    fit into memory twice; VerificationError where the logits differ.
    """
    opened, result = open_output(directory), Verification()
    if not takes_images(opened.manifest.source.architecture):
        raise RewriterError(f"--images: {opened.manifest.source.architecture} takes no images. Leave it out")
    context.progress("a picture: tracing the original")
    with scratch_folder("picture") as scratch:
        source = write_source(opened, scratch / "source")
        recipe = recipe_of(opened)
        program, left_out = apply_recipe(trace(source), recipe, opened.tensor_parallel)
        names = {name for name, _ in left_out}
        passes = [p for p in recipe.build() if p.name not in names]
        count = sum(math.prod(shape) for shape in Checkpoint.open(source).shapes.values())
        if shortage := memory_shortage(2 * count):
            raise RewriterError(f"--images: both models are computed in fp32, which takes {shortage}. Leave it out")
        context.progress("a picture: original and output")
        model, _ = plain_model(source)
        given, reference = picture(model), reference_of(program, passes)
        actual = plain_model(directory, remote_code=True)[0](**given, use_cache=False).logits
        expected = reference.logits(model, given.pop("input_ids"), given=given)
        result.require(f"{WHAT} = {reference.name}", actual, expected, REAL_WEIGHTS)
    return result
