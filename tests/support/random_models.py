"""Small models of any type with weights large enough that a block that reads the wrong value shows, from a config."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rewriter.check.random_model import randomize
from rewriter.ir import Program
from rewriter.tracing import trace


class Models:
    """Models and traces of `configs`, by name, each made once."""

    def __init__(self, configs: Mapping[str, dict[str, Any]]) -> None:
        self.configs = configs
        self.model = cache(self._model)
        self.traced = cache(self._traced)

    def _model(self, name: str) -> PreTrainedModel:
        config = AutoConfig.for_model(**self.configs[name])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            randomize(model, 2.0)
        return model.eval()

    def _traced(self, name: str) -> Program:
        return trace(AutoConfig.for_model(**self.configs[name]))

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Parameters by name, detached."""
        return {n: p.detach() for n, p in self.model(name).named_parameters()}
