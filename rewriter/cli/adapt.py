"""`rewrite adapt DIR --out DIR2`: a rewritten checkpoint, healed by a light fine-tuning."""

from __future__ import annotations

import typer

from rewriter.cli import launching, options
from rewriter.common.run_context import RunContext


def adapt(
    context: typer.Context,
    directory: options.Output,
    out: options.AdaptedTo,
    data: options.Data = None,
    tokens: options.Tokens = None,
    eval: options.EvaluationData = None,
    teacher: options.Teacher = None,
    method: options.Method = None,
    train: options.Train = None,
    prompt_weights: options.PromptWeights = False,
    temperature: options.Temperature = 1.0,
    cross_entropy: options.CrossEntropy = 0.0,
    lora: options.Lora = 0,
    base: options.Base = None,
    zero: options.Zero = None,
    ep: options.ExpertRanks = 1,
    ep_order: options.ExpertOrder = "D+E",
    tp: options.Ranks = 1,
    sp: options.SequenceRanks = 1,
    from_scratch: options.FromScratch = False,
    length: options.Length = None,
    too_long: options.TooLong = None,
    packing: options.Packing = True,
    set: options.TrainerSettings = None,
    resume: options.ResumeRun = False,
    link: options.LinkTrained = False,
    verify: options.VerifyAdapted = "shrunken",
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Fine-tune DIR, which `rewrite` wrote, and write the result to DIR2.

    Settings follow from the tokens of the run, or for sft from the recipe, unless --set gives them. With --tp, --sp or
    --ep it starts these ranks on this machine; under torchrun, ranks beyond tp × sp are data-parallel.
    """
    if tp * sp * ep > 1 and not launching.is_rank():
        launching.start_ranks(context.obj, tp * sp * ep)
        return
    from rewriter.adapt.options import AdaptOptions, parse_settings
    from rewriter.cli.progress import ProgressLine

    chosen = AdaptOptions(
        method=method, tokens=tokens, train=train, temperature=temperature, cross_entropy=cross_entropy, lora=lora,
        base=base, zero=zero, ep=ep, ep_order=ep_order, tp=tp, sp=sp, from_scratch=from_scratch, length=length,
        too_long=too_long, packing=packing, prompt_weights=prompt_weights, link=link,
        settings=parse_settings(set or []),
    )  # fmt: skip
    with ProgressLine() as progress:
        from transformers.utils import logging

        logging.disable_progress_bar()
        from rewriter import api

        report = api.adapt(
            directory, out=out, data=data, eval=eval, teacher=teacher, resume=resume, verify=verify, options=chosen,
            context=RunContext(progress, trust_remote_code),
        )  # fmt: skip
    if launching.is_rank():
        from rewriter.adapt.ranks import leave

        leave()
    if not launching.is_first():
        return
    if json:
        typer.echo(report.to_json(context.obj or []))
        return
    from rewriter.cli.rendering import print_adaptation

    print_adaptation(report.to_json(context.obj or []))
