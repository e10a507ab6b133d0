"""Checkpoints in which no tensor equals another: ranks, adapted checkpoint and source agree, however names are spelled.

Weights that transformers treats otherwise than their names say (tied, renamed, split, merged, ignored) would show here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from independent_tensors import LIMIT, SPELLINGS, Types, differences, other_values, parameters
from repository import ROOT
from transformers import AutoModelForCausalLM

from rewriter import trace
from rewriter.check.coverage.configs import registered_types
from rewriter.common.errors import RewriterError
from rewriter.emit.files.weights import cast_dtypes
from rewriter.tracing import parameters as reading
from rewriter.weights import Checkpoint

# Tied, merged experts, a shared head, names that old versions had, fused projections, a model without ties.
FAMILIES = ("llama", "gpt2", "mixtral", "qwen3_moe", "gemma3_text", "gpt_neox")
ROWS = dict(
    re.findall(r"^\| ([\w-]+) \|(.*)\|$", (ROOT / "docs" / "results" / "coverage.md").read_text(), re.MULTILINE)
)
BUILDS = [name for name in registered_types() if ROWS.get(name, "").startswith(" ✓ |")]
STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
TRACES = [name for name in BUILDS if ROWS[name].startswith(" ✓ | ✓ |")]
LADDERS = [name for name in TRACES if ROWS[name].startswith(" ✓ | ✓ | ✓ |")]
# transformers builds these from a config inside theirs, which it does not know alone. A recipe that leaves the function
# as it is writes that one, and transformers refuses to load the adapted checkpoint.
INNER = ("emu3", "mllama")
WRITTEN = [
    pytest.param(name, marks=pytest.mark.xfail(raises=ValueError, strict=True)) if name in INNER else name
    for name in TRACES
]


def agree(types: Types) -> None:
    """Every spelling: what transformers reads is what a program computes with, or both refuse."""
    tried: set[frozenset[str]] = set()
    for spelling in SPELLINGS:
        names = frozenset(types.spelled(spelling))
        if names in tried:
            continue
        tried.add(names)
        source = types.source(spelling)
        try:
            values, ties = parameters(source.path)
        except RewriterError as error:
            if not source.unread and types.type in TRACES:
                pytest.fail(f"{spelling}: transformers reads it: {error}")
            continue
        assert not source.lacking, f"{spelling}: transformers does not find {source.lacking[:3]}"
        assert not (others := other_values(source.model, values, ties)), f"{spelling}: {others[:3]}"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_program_computes_with_what_transformers_reads(model_type: str, tmp_path: Path) -> None:
    agree(Types(model_type, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", BUILDS)
def test_a_program_of_any_type_computes_with_what_transformers_reads(model_type: str, tmp_path: Path) -> None:
    agree(Types(model_type, tmp_path))


@pytest.mark.parametrize(
    ("model_type", "spelling"), [("gpt2", "as saved"), ("mixtral", "as run"), ("cohere_compass_text", "as saved")]
)
@pytest.mark.fast("mixtral-as run")
def test_ranks_and_adapted_checkpoint_agree_with_the_source(model_type: str, spelling: str, tmp_path: Path) -> None:
    found = differences(Types(model_type, tmp_path), spelling)
    assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", WRITTEN)
def test_ranks_and_adapted_checkpoint_of_any_type_agree(model_type: str, tmp_path: Path) -> None:
    found = differences(Types(model_type, tmp_path), "as saved")
    assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
@pytest.mark.parametrize("model_type", LADDERS)
def test_ladders_of_any_type_agree_with_their_reference(model_type: str, tmp_path: Path) -> None:
    found = differences(Types(model_type, tmp_path), "as saved", "ladder")
    assert max(found.values()) <= LIMIT, found


def cast_alike(types: Types, dtype: torch.dtype) -> int:
    """How many parameters transformers keeps in fp32 beside `dtype`: ranks have all of them in the same dtypes."""
    model = AutoModelForCausalLM.from_pretrained(types.source("as saved").path, dtype=dtype, trust_remote_code=True)
    model.save_pretrained(path := types.scratch / "half")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=True)
    program, checkpoint = trace(path), Checkpoint.open(path)
    casts = cast_dtypes(program, checkpoint, checkpoint.dtypes, program.source.config)
    expressions = {name: spec.expression for name, spec in program.parameters.items() if spec.expression is not None}
    found = {name: {casts[name]} if name in casts else e.dtypes(checkpoint.dtypes) for name, e in expressions.items()}
    wanted = {name: {STORED[tensor.dtype]} for name, tensor in model.state_dict().items()}
    assert found == {name: wanted[name] for name in found}
    return sum(dtypes == {"F32"} for dtypes in wanted.values())


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [("deepseek_v3", torch.bfloat16), pytest.param("gpt_oss", torch.float16, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_ranks_keep_in_fp32_what_transformers_keeps(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    assert cast_alike(Types(model_type, tmp_path), dtype) > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", TRACES)
def test_ranks_of_any_type_keep_in_fp32_what_transformers_keeps(
    model_type: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    types = Types(model_type, tmp_path)
    if not (types.model._keep_in_fp32_modules_strict or types.model._keep_in_fp32_modules):
        pytest.skip("it keeps nothing in fp32")
    cast_alike(types, dtype)


def test_a_tie_that_is_not_one_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A loader that believes the config, and not the weights."""
    monkeypatch.setattr(reading, "_equal", lambda *_: True)
    types = Types("gpt2", tmp_path)
    with pytest.raises(AssertionError, match=r"as saved: .*lm_head"):
        agree(types)
    assert differences(types, "as saved")["ranks"] > 1e-2


def test_experts_in_another_order_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reading, "dot_natural_key", lambda name: [-ord(letter) for letter in name])
    with pytest.raises(AssertionError, match="experts"):
        agree(Types("mixtral", tmp_path))


@pytest.mark.parametrize("model_type", ["axk1", "laguna"])
def test_names_of_the_running_model_that_look_like_old_ones(model_type: str, tmp_path: Path) -> None:
    """A renaming of names on disk matches names of the running model too, which transformers then takes as they are."""
    types = Types(model_type, tmp_path)
    source = types.source("as run")
    assert not source.unread
    values, ties = parameters(source.path)
    assert not other_values(source.model, values, ties)
    assert set(values) | set(ties) >= {name for name, _ in source.model.named_parameters()}


def test_values_are_independent(tmp_path: Path) -> None:
    tensors = [t for t in Types("gpt2", tmp_path).spelled("as saved").values() if t.ndim > 1]
    assert len(tensors) > 9
    for index, one in enumerate(tensors):
        assert not any(one.shape == other.shape and torch.equal(one, other) for other in tensors[:index])
