"""The optimizer of ZeRO stages 1 and 2 as a trainer meets it: overflows, wrong uses, one rank, and files."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import zoo
from ranks import refusal, run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_stage_model import WIDTH, adam, gradient_of, model, rows

from rewriter import RewriterError
from rewriter.training import zero_optimizer
from rewriter.training.zero.buckets import Bucket


def scaled(group):
    """fp16 with a GradScaler: an overflow on one rank's part lets no rank step; later ones step. (stepped, scale)"""
    made = model(torch.float32)
    optimizer = zero_optimizer(made, adam, group, stage=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for overflow in (True, False):
        before = made.embed.weight.detach().clone()
        scaler.scale(made(rows(0, 0, group.rank()), True)).backward()
        if overflow and group.rank() == 1:
            next(p for p in optimizer.param_groups[0]["params"] if p.grad is not None).grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((not torch.equal(before, made.embed.weight), scaler.get_scale()))
    return found


def refusals(group):
    found = {}
    made = model()
    with torch.no_grad():
        made.up.weight += group.rank()
    found["weights"] = refusal(lambda: zero_optimizer(made, adam, group, stage=1))
    made = model()
    made.gain.requires_grad_(group.rank() == 0)
    found["frozen"] = refusal(lambda: zero_optimizer(made, adam, group, stage=1))
    made = model()
    optimizer = zero_optimizer(made, adam, group, stage=1)
    state = optimizer.state_dict()
    found["place"] = refusal(lambda: optimizer.load_state_dict({**state, "place": [7, 8]}))
    found["layout"] = refusal(lambda: optimizer.load_state_dict({**state, "layout": state["layout"][1:]}))
    made.float()
    found["moved"] = refusal(optimizer.step)
    return found


def everything(group):
    return scaled(group), refusals(group)


@functools.cache
def of_two():
    return run_ranks(everything, 2)


def test_no_rank_steps_where_one_overflows():
    for found, _ in of_two():
        assert found == [(False, 512.0), (True, 512.0)]


def test_refusals_name_what_is_wrong():
    for _, errors in of_two():
        assert "up.weight" in errors["weights"]
        assert "different names" in errors["frozen"]
        assert "[7, 8]" in errors["place"]
        assert "gain" in errors["layout"]
        assert "converted" in errors["moved"]


def test_one_rank_needs_no_group():
    made, plain = model(), model()
    optimizer, expected = zero_optimizer(made, adam, None, stage=1), adam(p for p in plain.parameters())
    for step in range(3):
        for m, o in ((made, optimizer), (plain, expected)):
            m(rows(step, 0, 0), True).backward()
            o.step()
            o.zero_grad()
    for p, q in zip(made.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 3}, "shard_parameters"),
        ({"stage": 1, "bucket_bytes": 0}, "bucket_bytes 0"),
        ({"stage": 1, "params": [nn.Parameter(torch.ones(2))]}, r"of shape \[2\] is not the model's"),
        ({"stage": 1, "params": "twice"}, "comes twice"),
        ({"stage": 1, "params": "frozen"}, "frozen.weight does not require a gradient"),
    ],
)
def test_wrong_arguments(options, message):
    made = model()
    given = {"twice": [made.gain, made.gain], "frozen": [made.frozen.weight]}
    if isinstance(options.get("params"), str):
        options = {**options, "params": given[options["params"]]}
    with pytest.raises(RewriterError, match=message):
        zero_optimizer(made, adam, None, **options)


def test_a_parameter_has_one_optimizer():
    made = model()
    zero_optimizer(made, adam, None, stage=1, params=[made.gain])
    with pytest.raises(RewriterError, match="gain belongs to another zero_optimizer"):
        zero_optimizer(made, adam, None, stage=1)


def test_a_second_gradient_after_the_bucket_was_sent_is_refused():
    """What reentrant checkpointing of a weight that is used twice gives: without the refusal it would be lost."""

    def loss(module, reentrant):
        x = torch.ones(2, WIDTH, requires_grad=True)
        for _ in range(2):
            x = checkpoint(module.shared, x, use_reentrant=reentrant)
        return module.head(x).square().sum()

    torch.manual_seed(0)
    made = nn.ModuleDict({"shared": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, 3)})
    plain = copy.deepcopy(made)
    optimizer = zero_optimizer(made, adam, None, stage=2, bucket_bytes=1)
    with pytest.raises(RewriterError, match=r"shared\.\w+ got a second gradient.*use_reentrant=False"):
        loss(made, True).backward()
    optimizer.zero_grad()
    loss(made, False).backward()
    loss(plain, False).backward()
    for p, q in zip(made.parameters(), plain.parameters(), strict=True):
        assert torch.equal(gradient_of(optimizer, p), q.grad)


def test_buckets_are_sent_while_backward_runs(monkeypatch):
    made, order = model(), []
    zero_optimizer(made, adam, None, stage=2, bucket_bytes=1)
    names = {parameter: name for name, parameter in made.named_parameters()}
    start, finish = Bucket.start, Bucket.finish
    monkeypatch.setattr(Bucket, "start", lambda self: [order.append(names[self.parameters[0]]), start(self)][1])
    monkeypatch.setattr(Bucket, "finish", lambda self: [order.append("taken"), finish(self)][1])
    made.up.register_full_backward_pre_hook(lambda module, gradients: order.append("backward of up"))
    made(rows(0, 0, 0), True).backward()
    assert order[:3] == ["head.bias", "down.weight", "backward of up"]
    assert order.index("taken") < order.index("embed.weight")  # memory is given back before the last ones fill


def test_a_model_of_flat_parameters_saves_as_before(tmp_path):
    made = zoo.build("llama_tied")
    before = {name: value.clone() for name, value in made.state_dict().items()}
    zero_optimizer(made, adam, None, stage=2)
    made.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert set(before) - set(saved) == {"lm_head.weight"}
    for name, value in saved.items():
        assert torch.equal(value, before[name]), name
