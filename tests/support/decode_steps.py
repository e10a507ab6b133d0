"""Decode steps of emitted models on one rank: begun, replayed, and what they produce."""

from __future__ import annotations

import sys

import pytest
import torch
import zoo
from emitted_ranks import build as emitted_model
from programs import program, runtime_case, weights
from torch.fx.experimental.proxy_tensor import make_fx

from rewriter.runtime import generate
from rewriter.runtime.generation.decode_step import DecodeStep, Sampling

STEPS = 32


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """All of the cache in every step, without masks; experts by choice, and nothing captured."""
    for room in ("generation.decode_step", "experts"):
        monkeypatch.setattr(sys.modules[f"rewriter.runtime.{room}"], "host_waits", lambda x: True)
    monkeypatch.setattr(sys.modules["rewriter.runtime.attention.cached"], "without_masks", lambda q: True)
    monkeypatch.setattr(DecodeStep, "_capture", lambda self: None)


def emitted(family):
    source, tensors, ties = runtime_case(program(family), weights(family))
    return emitted_model(source, tensors[0], ties, None)


def begun(model, prompts, sampling=Sampling()):
    """A step that has its first tokens, of prompts without padding."""
    step = DecodeStep(model, len(prompts), len(prompts[0]) + STEPS + 1)
    step.begin(len(prompts[0]), None, sampling, 3, (), 0)
    step.prefill(torch.tensor(prompts))
    return step


def prompts_of(model_or_family, rows=1):
    vocabulary = 60 if model_or_family is None else zoo.config(model_or_family).vocab_size
    return torch.randint(3, vocabulary, (rows, 11), generator=torch.Generator().manual_seed(5)).tolist()


def produced(step, count):
    return step.produced[:count].T.tolist()


@torch.no_grad()
def replayed(model, prompts):
    """Tokens by running one recorded step again and again, and those of a generation."""
    step = begun(model, prompts)
    graph = make_fx(lambda: (step.run(), step.token)[1])()
    for _ in range(STEPS - 1):
        graph()
    return produced(step, STEPS), generate(model, prompts, STEPS)
