"""An output's tokenizer is its source's, whatever its config says of rotary positions, and without running its code.

transformers reads a config that needs code of its own as one of no type: for most kinds of rotary positions that fails,
in the forms in which Llama 3.1, Phi-3.5 and DeepSeek are published.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from repository import TINY_LLAMA

from rewriter import api
from rewriter.check.drift import load_tokenizer
from rewriter.check.prompts import tokenizer_of

TEXT = "def read_lines(path):\n    return [line.strip() for line in open(path)]"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
LONG = {"short_factor": [1.0] * 12, "long_factor": [2.0] * 12, "original_max_position_embeddings": 256}
PARTS = {
    "Llama 3.1": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "without theta": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "as written today": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "yarn": {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", **YARN}},
    "longrope": {"rope_theta": 1e4, "rope_scaling": {"type": "longrope", **LONG}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
}


@pytest.mark.parametrize("said", PARTS)
@pytest.mark.fast("as written today", "yarn")
def test_it_is_the_sources(tmp_path: Path, said: str) -> None:
    source = Path(shutil.copytree(TINY_LLAMA, tmp_path / "source"))
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    (source / "config.json").write_text(json.dumps(config | PARTS[said]))
    api.convert(source, "ladder-upper-half", tp=2, out=tmp_path / "out", options=api.SaveOptions(verify="none"))
    wanted = load_tokenizer(str(source))
    assert wanted is not None
    assert tokenizer_of(tmp_path / "out", False)(TEXT).input_ids == wanted(TEXT).input_ids
    assert type(tokenizer_of(tmp_path / "out", False)) is type(wanted)


def test_one_of_a_type_that_transformers_does_not_have(tmp_path: Path) -> None:
    source = Path(shutil.copytree(TINY_LLAMA, tmp_path / "source", ignore=shutil.ignore_patterns("*.safetensors")))
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config |= {"model_type": "other", "auto_map": {"AutoConfig": "other.OtherConfig"}, "tokenizer_class": None}
    config |= {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}}
    (source / "config.json").write_text(json.dumps(config))
    assert tokenizer_of(source, False)(TEXT).input_ids == load_tokenizer(str(TINY_LLAMA))(TEXT).input_ids
