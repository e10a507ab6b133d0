"""Sections runtime and ranks of `run.py`: distributed attention and an emitted model on the device."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import rank as gpu_rank
from benchmarks.gpu.report import Row, Scale, Table, short
from benchmarks.gpu.tiles import CAUSAL, Case, everything, factors, inputs, library, reference
from rewriter.ir.ops import SequenceKind, SequencePlan
from rewriter.runtime import generate
from rewriter.runtime.attention.sequence_axis import SequenceAxis
from rewriter.runtime.attention.sequence_op import sequence_attention
from rewriter.runtime.attention.tiles import Visibility
from rewriter.runtime.collectives import exchange

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"


def runtime(scale: Scale) -> Table:
    table = scale.table(
        "The runtime in one process", ("what", "dtype", "greatest errors", "× greatest", "× typical", "result")
    )
    cuda = scale.device.type == "cuda"
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=dist.FileStore(os.path.join(scratch, "store"), 1), rank=0, world_size=1
        )
        try:
            mesh = torch.distributed.device_mesh.init_device_mesh(scale.device.type, (1,))
            kinds: tuple[SequenceKind, ...] = ("attention2d", "ring", "ulysses")
            for kind in kinds:
                key = SequenceAxis(mesh, SequencePlan(kind, (1, 1, 1))).key
                table.attempt(f"{kind} attention", functools.partial(alone, scale, key))
            table.attempt("messages of a group of one", functools.partial(messages, scale))
            for dtype in (torch.float32, torch.bfloat16):
                table.attempt("emitted model, loss and gradients", functools.partial(trained, scale, dtype))
            table.attempt("emitted model, greedy tokens", functools.partial(continued, scale))
        finally:
            dist.destroy_process_group()
    return table


def alone(scale: Scale, key: str) -> Row:
    case = Case("", Visibility(CAUSAL, scale.pick(1000, 40)), (1, 1))
    given = [x.bfloat16() for x in inputs(case, scale.device)]
    q, k, v, do = (x.clone().requires_grad_() for x in given)
    factor = case.sizes[0] ** -0.5
    o = sequence_attention(q, k, v, key, mask=CAUSAL, scale=factor, length=q.shape[2])
    found = [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]
    exact = reference(*(x.double() for x in given), everything(case.seen, scale.device), factor)
    cells, wrong = factors(found, library(*given, case.seen, factor), exact)
    return ("bf16", *cells), wrong


def messages(scale: Scale) -> Row:
    """A gather and an exchange of packed tensors through the backend itself; those of attention need no messages."""
    given = torch.randn(3, 5, device=scale.device).bfloat16(), torch.randn(3, device=scale.device)
    # not `gather_start`, which gives a rank its own tensors back as they are
    rows = torch.full((1, sum(x.nbytes for x in given)), 0xAA, dtype=torch.uint8, device=scale.device)
    exchange.pack(given, out=rows[0])
    back = [exchange.unpack(exchange.gather_rows_start(rows, dist.group.WORLD, "alone").wait()[0], given)]
    note = "gather, exchange"
    if scale.device.type == "cuda":
        try:
            back.append(exchange.exchange_start(given, 0, 0, "alone", dist.group.WORLD).wait())
        except (ValueError, dist.DistBackendError) as refused:
            note = f"gather; an exchange needs two GPUs ({type(refused).__name__})"
    else:
        note = "gather; gloo sends nothing to itself"
    same = all(torch.equal(a, b) for found in back for a, b in zip(found, given, strict=True))
    return ("bytes", note, "–", "–"), "" if same else "other bytes came back"


def models(scale: Scale, dtype: torch.dtype) -> tuple[Any, Any]:
    """(transformers' model on the CPU, the emitted one on the device) with parameters of `dtype`."""
    from transformers import AutoModelForCausalLM

    from rewriter.emit.module import emit_runtime_module
    from rewriter.tracing import trace

    source = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    program = trace(MODEL)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "module.py")
        path.write_text(emit_runtime_module(program), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("emitted", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["emitted"] = module
        spec.loader.exec_module(module)
    model = module.Model()
    tensors = {name: torch.nn.Parameter(p.detach().clone()) for name, p in source.named_parameters()}
    tensors |= {alias: tensors[name] for alias, name in dict(program.ties).items()}
    model.load_state_dict(tensors, strict=True, assign=True)
    return source, model.to(scale.device).eval()


def tokens(source: Any, rows: int, length: int) -> Tensor:
    return torch.randint(source.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))


def trained(scale: Scale, dtype: torch.dtype) -> Row:
    """Loss and gradients of the emitted model and of transformers on the device, against transformers' in fp64."""
    source, emitted = models(scale, dtype)
    ids = tokens(source, 2, scale.pick(256, 16))

    def gradients(model: Any) -> list[Tensor]:
        here = ids.to(next(model.parameters()).device)
        loss = model(here, labels=here).loss
        loss.backward()
        return [loss.detach().view(1), *(p.grad for _, p in sorted(model.named_parameters()))]

    found, beside, exact = (
        [x.to(scale.device) for x in gradients(model)]
        for model in (emitted, copy.deepcopy(source).to(scale.device), copy.deepcopy(source).double())
    )
    # over all parameters: of one small tensor the greatest error says little
    flat = [[x[0].double(), torch.cat([g.double().flatten() for g in x[1:]])] for x in (found, beside, exact)]
    (_, greatest, typical), wrong = factors([flat[0][1]], [flat[1][1]], [flat[2][1]])
    loss = [float((x[0] - flat[2][0]).abs()) for x in flat[:2]]
    return (short(dtype), f"loss {loss[0]:.1e}, transformers {loss[1]:.1e}", greatest, typical), wrong


def continued(scale: Scale) -> Row:
    """Greedy tokens of prompts of different lengths with the cache, as transformers continues each by itself."""
    source, emitted = models(scale, torch.float32)
    count = scale.pick(32, 4)
    prompts = [tokens(source, 1, length)[0].tolist() for length in (3, 17)]
    found = generate(emitted, prompts, count)
    wanted = [
        source.generate(torch.tensor([p]), max_new_tokens=count, do_sample=False, eos_token_id=None)[
            0, len(p) :
        ].tolist()
        for p in prompts
    ]
    return ("fp32", f"{sum(map(len, found))} tokens", "–", "–"), "" if found == wanted else "other tokens"


def on_ranks(scale: Scale) -> Table:
    gpus = 0 if scale.tiny else torch.cuda.device_count()
    own_gpus, ranks = gpus > 1, scale.pick(2 if gpus in (2, 3) else 4, 2)
    how = "one on each GPU, NCCL" if own_gpus else "all on one device, gloo, messages staged through the CPU"
    table = scale.table(
        f"{ranks} ranks, {how}; causal, bf16",
        ("plan", "messages", "greatest error of o dq dk dv", "× greatest", "× typical", "result"),
    )
    for plan in gpu_rank.plans(ranks):
        table.attempt(str(plan), functools.partial(rank_row, scale, plan, own_gpus))
    return table


def rank_row(scale: Scale, plan: SequencePlan, own_gpus: bool) -> Row:
    case = Case("", Visibility(CAUSAL, scale.pick(1021, 37)), (1, 1), (8, 4))
    given, factor = [x.bfloat16() for x in inputs(case, scale.device)], case.sizes[0] ** -0.5
    exact = reference(*(x.double() for x in given), everything(case.seen, scale.device), factor)
    found = gpu_rank.launch(plan, [x.cpu() for x in given], scale.device.type, own_gpus)
    cells, wrong = factors([x.to(scale.device) for x in found], library(*given, case.seen, factor), exact)
    return ("NCCL" if own_gpus else "gloo, staged", *cells), wrong
