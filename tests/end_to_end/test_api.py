"""From a checkpoint to an output directory, and back: convert, load, verify, generate."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
import yaml
import zoo
from grouped import saving
from safetensors.torch import load_file
from tiny_tokenizer import add_tokenizer
from transformers import AutoModelForCausalLM

import rewriter as rw
from rewriter import api
from rewriter.check import saved_output, shrunken_check, subprocess_logits
from rewriter.common.errors import RewriterError, VerificationError
from rewriter.convert import conversion as convert_module
from rewriter.convert.report import ConversionReport
from rewriter.emit.card import model_card
from rewriter.emit.files import output_files
from rewriter.output.manifest import GOLDEN, read_manifest
from rewriter.weights.expressions import Reference

UPPER = {2, 3}


def hashes(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer, in a directory that holds nothing else."""
    root = tmp_path_factory.mktemp("models") / "small-llama"
    zoo.save("llama", root)
    add_tokenizer(root)
    (root / "README.md").write_text("---\nlicense: apache-2.0\n---\n# small\n")
    return root


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ConversionReport]:
    """Its ladder for two ranks, verified as by default: the conversion that most tests read."""
    out = tmp_path_factory.mktemp("out") / "ladder"
    return out, api.convert(source, "ladder-upper-half", out=out, tp=2)


# What a conversion leaves


def test_the_output_holds_what_the_architecture_says(written: tuple[Path, ConversionReport]) -> None:
    out, report = written
    names = set(hashes(out))
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "rewrite.json"}
    assert names >= {"runtime/tp2/module.py", "runtime/tp2/weights.json"}
    assert names >= {"README.md", "verification/golden.tensors"}
    assert sorted(names) == report.files
    assert [p.name for p in out.parent.iterdir()] == [out.name]


def test_the_manifest_names_every_file_with_its_hash(written: tuple[Path, Any], source: Path) -> None:
    out, _ = written
    manifest = read_manifest(out)
    found = hashes(out)
    assert found.pop("rewrite.json")
    assert manifest.files == found
    assert manifest.source.files == {"model.safetensors": hashes(source)["model.safetensors"]}
    assert manifest.recipe["name"] == "ladder-upper-half"
    assert [p.name for p in manifest.passes] == [
        "tensor_parallel", "merge_reductions", "ladder", "fuse_projections", "overlap",
    ]  # fmt: skip
    assert manifest.passes[2].options == {"layers": "upper-half", "variant": "paper", "coefficients": "fresh"}
    assert manifest.mesh == {"tp": 2}
    assert set(manifest.versions) == {"rewriter", "torch", "transformers", "python"}


def test_nothing_published_holds_a_path_of_this_machine(written: tuple[Path, Any], source: Path) -> None:
    out, _ = written
    for path in out.rglob("*"):
        if path.suffix in (".json", ".md", ".py"):
            assert str(source.parent) not in path.read_text(), path
            assert str(out.parent) not in path.read_text(), path


def test_what_was_verified_is_reported(written: tuple[Path, ConversionReport]) -> None:
    out, report = written
    compared = {check.name for check in read_manifest(out).verification.checks}
    assert compared == {
        "trace = original model",
        "rewritten = its reference",
        "2 simulated ranks = 1 device",
        "adapted checkpoint = rewritten",
        "sharded module on 2 ranks = rewritten",
        "real weights: sharded module on 2 ranks = its reference",
    }
    assert compared < set(report.verification)
    assert report.verification["drift"]["text"] == "the packaged calibration text"
    assert 0 < report.verification["drift"]["top1_agreement"] < 1
    assert json.loads(report.to_json())["mesh"] == {"tp": 2}
    assert report.communication["block reductions"] == 8
    assert report.communication["hidden behind computation"] == 4


def test_golden_logits_are_the_oracles_on_the_real_weights(written: tuple[Path, Any]) -> None:
    golden = load_file(written[0] / GOLDEN)
    expected = oracles.ladder_logits(zoo.shared("llama"), UPPER, golden["input_ids"])[0, -1]
    original = oracles.ladder_logits(zoo.shared("llama"), set(), golden["input_ids"])[0, -1]
    assert oracles.relative_error(golden["logits"], expected) <= 1e-5
    assert oracles.relative_error(golden["logits"], original) >= 1e-2


def test_the_card_says_what_this_is(written: tuple[Path, Any]) -> None:
    card = (written[0] / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["base_model"] == "small-llama"
    assert front["license"] == "apache-2.0"
    first = card.split("\n# ")[1].split("\n\n")[1]
    drift = read_manifest(written[0]).verification.drift
    assert drift is not None
    assert first.startswith(f"> **Damaged until it is healed**: its predictions are {drift.kl:.3g} nats (KL) from")
    assert "`rewrite adapt THIS_DIRECTORY --out THIS_DIRECTORY-healed --tokens 100000` heals it" in first
    exact = read_manifest(written[0])
    for entry in exact.passes:
        entry.kind = "exact"
    assert "> **" not in model_card(exact)
    assert "trust_remote_code=True" in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert recipe == read_manifest(written[0]).recipe
    assert "| sharded module on 2 ranks = rewritten |" in card
    serving = " ".join(card.split("## Serve\n")[1].split("\n## ")[0].split())
    assert "rewrite serve THIS_DIRECTORY --tp 2" in serving
    assert "all-reduces overlap with computation: in vLLM with rewriter's plugin, and not without it." in serving


# Loading


def test_load_gives_the_rewritten_model_on_one_device(written: tuple[Path, Any]) -> None:
    model = rw.load(written[0])
    ids = zoo.batch()
    with torch.no_grad():
        logits = model(ids).logits
    assert oracles.relative_error(logits, oracles.ladder_logits(zoo.shared("llama"), UPPER, ids)) <= 1e-5


def test_code_that_was_changed_is_not_run(written: tuple[Path, Any], tmp_path: Path) -> None:
    out = tmp_path / "copy"
    shutil.copytree(written[0], out)
    trap = tmp_path / "ran"
    modeling = out / str(read_manifest(out).adapted.modeling)
    modeling.write_text(f"open({str(trap)!r}, 'w')\n" + modeling.read_text())
    with pytest.raises(VerificationError, match=r"modeling_\w+.py: changed since it was written"):
        rw.load(out)
    module = out / "runtime/tp2/module.py"
    module.write_text(f"open({str(trap)!r}, 'w')\n" + module.read_text())
    with pytest.raises(VerificationError, match=r"module\.py: changed since it was written"):
        api.generate(out, ["hello"], max_new_tokens=2)
    assert not trap.exists()


@pytest.mark.parametrize("name", ["config.json", "runtime/tp2/weights.json", "model.safetensors"])
def test_verify_finds_a_changed_file(written: tuple[Path, Any], tmp_path: Path, name: str) -> None:
    out = tmp_path / "copy"
    shutil.copytree(written[0], out)
    data = bytearray((out / name).read_bytes())
    data[-3] ^= 1
    (out / name).write_bytes(data)
    with pytest.raises(VerificationError, match=f"{name}: changed since it was written"):
        api.verify(out)
    (out / name).unlink()
    with pytest.raises(VerificationError, match=f"{name}: missing"):
        api.verify(out)


@pytest.mark.slow
def test_verify_compares_both_sides_with_the_golden_logits(written: tuple[Path, Any]) -> None:
    table = api.verify(written[0])
    assert table["adapted checkpoint = golden logits"] <= 1e-5
    assert table["sharded module on 2 ranks = golden logits"] <= 1e-4


@pytest.mark.parametrize("content", [None, "{", "[]", '{"schema": 99}', '{"schema": 1}'])
def test_verify_refuses_what_is_no_output(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "rewrite.json").write_text(content)
    with pytest.raises(RewriterError, match=r"rewrite\.json"):
        api.verify(tmp_path)


CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
QUESTION = [{"role": "user", "content": "Why?"}]


def test_generate_continues_texts_and_answers_messages_as_the_oracle_does(
    written: tuple[Path, Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    out = tmp_path / "copy"
    shutil.copytree(written[0], out)
    (out / "chat_template.jinja").write_text(CHAT)
    tokenizer = AutoTokenizer.from_pretrained(written[0])
    ids = [tokenizer(text).input_ids for text in ("def read_lines(path):", "[user]Why?[assistant]")]
    model = zoo.shared("llama")
    expected = oracles.greedy_oracle(lambda t: oracles.ladder_logits(model, UPPER, t), ids, 8)
    shown: list[list[Any]] = [[], []]

    def on_text(index: int, piece: str, generation: Any) -> None:
        shown[index].append((piece, generation))

    found = api.generate(out, ["def read_lines(path):", QUESTION], max_new_tokens=8, on_text=on_text)
    assert [generation.tokens for generation in found] == expected
    for generation, tokens, pieces in zip(found, expected, shown, strict=True):
        assert generation.text == tokenizer.decode(tokens) == "".join(piece for piece, _ in pieces)
        assert [done for _, done in pieces] == [None] * (len(pieces) - 1) + [generation]
        assert generation.seconds_to_first_token > 0

    stop = found[0].text[2:4]
    [stopped] = api.generate(out, ["def read_lines(path):"], max_new_tokens=8, stop=[stop])
    assert stopped.text == found[0].text[: found[0].text.index(stop)]
    assert stopped.tokens == found[0].tokens[: len(stopped.tokens)]


def test_messages_need_a_chat_template_that_takes_them(written: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(RewriterError, match="its tokenizer has no chat template"):
        api.generate(written[0], [QUESTION])
    out = tmp_path / "copy"
    shutil.copytree(written[0], out)
    (out / "chat_template.jinja").write_text("{{ raise_exception('no system prompt, please') }}")
    with pytest.raises(RewriterError, match="fails on these messages: no system prompt, please"):
        api.generate(out, [QUESTION])
    with pytest.raises(RewriterError, match="the prompt '' gives no tokens"):
        api.generate(out, [""])


# Options


def quick(source: Path, out: Path, recipe: str = "ladder-upper-half", **options: Any) -> ConversionReport:
    return api.convert(source, recipe, out=out, **saving(**{"verify": "none", **options}))


def test_a_dry_run_writes_nothing_and_names_what_would_be(source: Path, tmp_path: Path) -> None:
    dry = quick(source, tmp_path / "a", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    wet = quick(source, tmp_path / "a")
    assert dry.files == wet.files
    assert dry.passes == wet.passes
    assert dry.bytes >= (source / "model.safetensors").stat().st_size


def test_weights_can_be_converted(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "a", dtype="bf16", tp=2, materialize=True)
    original, converted = load_file(source / "model.safetensors"), load_file(tmp_path / "a/model.safetensors")
    assert original.keys() == converted.keys()
    assert all(torch.equal(converted[name], original[name].to(torch.bfloat16)) for name in original)
    shards = load_file(tmp_path / "a/runtime/tp2/rank-0.tensors")
    assert {t.dtype for t in shards.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "a/config.json").read_text())["dtype"] == "bfloat16"
    assert read_manifest(tmp_path / "a").source.files["model.safetensors"] == hashes(source)["model.safetensors"]


def test_a_later_save_into_the_output_leaves_the_source(source: Path, tmp_path: Path) -> None:
    before = hashes(source)
    quick(source, tmp_path / "a")
    model = rw.load(tmp_path / "a")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(tmp_path / "a")  # type: ignore[operator]
    assert hashes(source) == before
    assert (tmp_path / "a/model.safetensors").stat().st_ino != (source / "model.safetensors").stat().st_ino


def test_links_are_made_on_request_only(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "a", link=True)
    assert (tmp_path / "a/model.safetensors").stat().st_ino == (source / "model.safetensors").stat().st_ino
    with pytest.raises(RewriterError, match="--link with --dtype"):
        quick(source, tmp_path / "b", link=True, dtype="bf16")


def test_an_interrupted_run_is_resumed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a"

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "model_card", interrupt)
        with pytest.raises(KeyboardInterrupt):
            quick(source, out, tp=2)
    assert not out.exists()
    with pytest.raises(RewriterError, match="tp"):
        quick(source, out, tp=4, resume=True)
    untouched: list[Path] = []
    monkeypatch.setattr(output_files, "convert_files", lambda c, copies, plans, **k: untouched.extend(copies + plans))
    quick(source, out, tp=2, resume=True)
    assert untouched == []
    assert sorted(hashes(out)) == read_manifest_names(out)
    again = quick(source, out, tp=2, resume=True)
    assert "complete already" in again.notes[-1]


def read_manifest_names(out: Path) -> list[str]:
    return sorted([*read_manifest(out).files, "rewrite.json"])


def test_overrides_reach_the_pass(source: Path, tmp_path: Path) -> None:
    report = quick(source, tmp_path / "a", set={"ladder.layers": "[1, 3]"})
    assert read_manifest(tmp_path / "a").passes[2].options == {
        "layers": [1, 3],
        "variant": "paper",
        "coefficients": "fresh",
    }
    assert report.passes[2]["summary"] == "4 of 8 blocks read the stream one block earlier"


def test_a_program_saves_what_the_command_writes(source: Path, tmp_path: Path) -> None:
    program = rw.rewrite(rw.trace(source), "ladder-upper-half", tp=2)
    rw.save(program, str(tmp_path / "a"), options=rw.SaveOptions(verify="none"))
    quick(source, tmp_path / "b", tp=2)
    ours, theirs = hashes(tmp_path / "a"), hashes(tmp_path / "b")
    assert ours == theirs


def test_a_pass_can_be_disabled_by_name(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = rw.trace(source)
    assert [e.name for e in rw.rewrite(traced, "ladder", disable=["overlap"]).history][-1] == "fuse_projections"
    monkeypatch.setenv("REWRITER_DISABLE", "ladder, overlap")
    applied = [e.name for e in rw.rewrite(traced, "ladder").history]
    assert applied == ["tensor_parallel", "merge_reductions", "fuse_projections"]
    monkeypatch.setenv("REWRITER_DISABLE", "laddr")
    with pytest.raises(RewriterError, match=r"no pass 'laddr'\. Did you mean 'ladder'"):
        rw.rewrite(traced, "ladder")


def test_debug_shows_the_ir_between_passes(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REWRITER_DEBUG", "1")
    rw.rewrite(rw.trace(source), "ladder")
    err = capsys.readouterr().err
    positions = [err.index(f"--- {title}") for title in ("as traced", "after tensor_parallel, ", "after ladder, ")]
    assert positions == sorted(positions)
    assert " ms\n" in err


def test_a_rewritten_program_is_not_rewritten_again(source: Path) -> None:
    program = rw.rewrite(rw.trace(source), "ladder")
    with pytest.raises(RewriterError, match="start from the program as traced"):
        rw.rewrite(program, "ladder")


def test_the_original_and_the_upper_bound_are_not_written(source: Path, tmp_path: Path) -> None:
    with pytest.raises(RewriterError, match="is the original model"):
        rw.save(rw.trace(source), str(tmp_path / "a"))
    with pytest.raises(RewriterError, match="no_communication is for timing only"):
        quick(source, tmp_path / "a", recipe="upper-bound", tp=2)
    assert list(tmp_path.iterdir()) == []


def test_an_exact_recipe_keeps_the_function(source: Path, tmp_path: Path) -> None:
    quick(source, tmp_path / "a", recipe="tensor-parallel", tp=2)
    ids = zoo.batch()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "a")(ids).logits
    assert oracles.relative_error(logits, oracles.ladder_logits(zoo.shared("llama"), set(), ids)) <= 1e-5


# A wrong result is noticed, and leaves nothing


def test_an_emitter_that_forgets_the_rewiring_is_noticed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rewriter.emit import huggingface

    emit = huggingface.emit_huggingface
    monkeypatch.setattr(huggingface, "emit_huggingface", lambda program: emit(program.origin or program))
    monkeypatch.setattr(shrunken_check, "MOST_RANKS", 0)
    with pytest.raises(VerificationError, match="adapted checkpoint = rewritten: worst at row"):
        api.convert(source, "ladder-upper-half", out=tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_wrong_shard_is_noticed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = output_files.weight_references

    def all_as_rank_0(*args: Any) -> dict[str, Reference]:
        held = right(*args)
        return {name: r if r.ranges is None else replace(r, ranges=(r.ranges[0],) * 2) for name, r in held.items()}

    monkeypatch.setattr(output_files, "weight_references", all_as_rank_0)
    monkeypatch.setattr(subprocess_logits, "huggingface_logits", lambda d, batches: [torch.zeros(1)] * len(batches))
    require = shrunken_check.Verification.require

    def only_ranks(self: Any, name: str, *rest: Any) -> None:
        if "adapted checkpoint" not in name:
            require(self, name, *rest)

    monkeypatch.setattr(shrunken_check.Verification, "require", only_ranks)
    with pytest.raises(VerificationError, match="sharded module on 2 ranks = rewritten: worst at row"):
        api.convert(source, "ladder-upper-half", out=tmp_path / "a", tp=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_failed_verification_exits_with_3_and_one_message(source: Path, tmp_path: Path) -> None:
    # In a process of its own, with a pass that reads one block too far back.
    program = (
        "import sys; from dataclasses import replace; from rewriter.passes import residual_rewrite;"
        "from rewriter.cli import main; right = residual_rewrite.blocks_of;"
        "early = lambda found: [replace(b, skip=found[max(b.index - 1, 0)].skip) for b in found];"
        "residual_rewrite.blocks_of = lambda *given: early(right(*given));"
        f"sys.exit(main([{str(source)!r}, '--recipe', 'ladder', '--out', {str(tmp_path / 'a')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ.copy(), check=False
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: rewritten = its reference: worst at row")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp"), [("llama_tied", 2), ("gpt2", 4), ("mixtral", 2), ("gemma3_text", 1)])
def test_full_verification_compares_the_real_weights(family: str, tp: int, tmp_path: Path) -> None:
    zoo.save(family, tmp_path / "m")
    api.convert(tmp_path / "m", "ladder", out=tmp_path / "out", tp=tp, options=api.SaveOptions(verify="full"))
    verified = read_manifest(tmp_path / "out").verification
    names = {check.name for check in verified.checks if check.name.startswith("real weights: ")}
    ranks = f"{tp} rank{'s' * (tp > 1)}"
    assert names == {
        "real weights: rewritten = its reference",
        "real weights: adapted checkpoint = rewritten",
        f"real weights: sharded module on {ranks} = rewritten",
    }
    assert all(check.error <= check.limit <= 1e-4 for check in verified.checks)
    assert saved_output.verify(tmp_path / "out")["files with the hash of the manifest"] > 6
