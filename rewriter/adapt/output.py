"""The output of a run: the trained weights under the source's names, rewritten again, with what was measured."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rewriter.adapt.loop import METRICS, read_metrics
from rewriter.adapt.models import HuggingFaceModel, base_of
from rewriter.adapt.options import FREE, AdaptOptions
from rewriter.adapt.padded import require_padding
from rewriter.adapt.students import Run, Student
from rewriter.adapt.unshard import full_tensors, write_model, write_trained
from rewriter.convert.conversion import save
from rewriter.convert.reopened import taken_over
from rewriter.convert.rewritten_source import rewritten, write_source
from rewriter.convert.save_options import Level, SaveOptions
from rewriter.ir import Program
from rewriter.output.manifest import AdaptationEntry
from rewriter.tracing.meta_model import build_skeleton, load_config
from rewriter.training.zero.plus_plus import free_gathered
from rewriter.weights import Checkpoint


def merge(built: Student) -> None:
    """Add adapters to the weights that they adapt: what is stored has none. Of a quantized base, to the exact weights,
    which are loaded again.

    What is around the model stays: by it FSDP2 gathers what is in no layer.
    """
    module = built.model.module
    if base_of(module) is module:
        return
    free_gathered(module)
    if built.exact is not None:
        trained = {name: _whole(p) for name, p in module.named_parameters() if p.requires_grad}
        device = next(module.parameters()).device
        module = built.exact()
        module.load_state_dict(trained, strict=False)
        built.model, built.optimizer, built.master_weights = HuggingFaceModel(module, built.model.group), None, None
        module.to(device)  # once nothing holds the quantized model
    cast(Any, module).merge_and_unload()


@torch.no_grad()
def round_to(module: nn.Module, source: Path, dtype: str) -> None:
    """Round all weights to the dtype that they are stored in: the loss after training is of those.

    Weights of the model in `source` that transformers keeps in fp32 when it loads in `dtype` ("bfloat16") stay so.
    """
    free_gathered(module)
    fp32 = build_skeleton(load_config(source)).fp32.get(dtype, ())
    for name, parameter in base_of(module).named_parameters():
        if parameter.is_floating_point() and not any(re.search(pattern, name) for pattern in fp32):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(local.to(getattr(torch, dtype)))


def collect(run: Run, built: Student) -> None:
    """Write the trained weights under the source's names, with the source's config. Every rank calls it."""
    like, trained, module = Checkpoint.open(run.source), run.place / "trained", built.model.module
    ranks, tp, program, link = run.ranks, run.options.tp, built.program, run.options.link
    free_gathered(module)
    if program is None:
        base = base_of(module)
        if built.experts is not None:
            state = built.experts.full_state_dict()
        else:
            state = {name: _whole(tensor) for name, tensor in base.state_dict().items()}
        ranks.on_first(lambda: write_model(base, state, like, run.place / "made", trained, link))
    else:
        shards = run.place / "shards"
        own = shard_of(module, program)
        ranks.on_first(lambda: shards.mkdir(exist_ok=True))
        if ranks.rank < tp:  # of the first replica, and of its sequence ranks the first
            save_file(own, shards / f"{built.own}.safetensors")
        ranks.barrier()

        def put_together() -> None:
            full = full_tensors(program, like, [load_file(shards / f"{rank}.safetensors") for rank in range(tp)])
            write_trained(like, full.__getitem__, trained, link)

        ranks.on_first(put_together)
    ranks.on_first(lambda: write_source(run.opened, trained, weights=False) and None)


def shard_of(module: nn.Module, program: Program) -> dict[str, Tensor]:
    """This rank's tensors of a sharded module by name, on the CPU: those of its checkpoint, which are not all trained:
    scales of layers, biases of routers and tables of experts are buffers."""
    held = (*module.named_parameters(), *module.named_buffers())
    return {name: _whole(tensor) for name, tensor in held if name in program.parameters}


def _whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().contiguous().clone()


def entry(run: Run, losses: dict[str, float]) -> AdaptationEntry:
    """The manifest's entry of a run."""
    options, data, sizes = run.options, run.data, run.sizes
    plain = {f.name: f.default for f in dataclasses.fields(AdaptOptions)}
    given = {k: v for k, v in asdict(options).items() if k not in ("settings", "method", "link") and v != plain[k]}
    seconds, before = 0.0, 0  # of steps, in all parts of a run that was interrupted
    for line in read_metrics(run.place):
        if "tokens_per_second" in line:
            seconds += (line["tokens"] - before) / line["tokens_per_second"]
            before = line["tokens"]
    return AdaptationEntry(
        method="prompt weights" if options.prompt_weights else str(options.method),
        data=data.data,
        counts=data.counts,
        evaluation=data.evaluation,
        steps=sizes.steps,
        tokens=sizes.steps * sizes.batch * data.length,
        rows_per_step=sizes.batch,
        length=data.length,
        settings={k: v for k, v in run.settings.items() if k not in (*FREE, "num_train_epochs")},
        options=given,
        ranks={"dp": run.ranks.replicas, "sp": options.sp, "tp": options.tp},
        losses=losses,
        seconds=round(seconds, 1),
    )


def write(run: Run, out: Path, done: AdaptationEntry, verify: Level) -> None:
    """Rewrite the trained weights by the recipe, and write the output directory. Raises VerificationError where padding
    was trained."""
    if run.padding is not None:
        require_padding(run.padding, run.place / "trained")
    source = taken_over(run.opened.manifest.source, run.opened.root, out)
    logged = [run.place / METRICS, *sorted((run.place / "tensorboard").glob("*tfevents*"))]
    save(
        rewritten(run.opened, run.place / "trained"),
        out,
        source.name,
        SaveOptions(verify=verify, link=run.options.link),
        run.context,
        adaptation=done,
        original=source,
        padding=run.padding,
        beside={f"training/{file.name}": file for file in logged},
    )
