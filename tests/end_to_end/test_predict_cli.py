"""`rewrite predict`: what it passes on, what it prints, what it refuses; how measured passes become a prediction."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_api import flat, installed
from grouped import predicting
from predictions import comparison

from rewriter.cli import main
from rewriter.common.errors import RewriterError
from rewriter.predict.results import RecipeComparison, SkippedRecipe
from rewriter.predict.validation import Row, Validation
from rewriter.show.predict import predict_page as page

ROWS = (
    Row("tensor-parallel", "prefill", (0.0102, 0.0101, 0.0103), (0.0100, 0.0101, 0.0099)),
    Row("tensor-parallel", "decode", (0.0030, 0.0030, 0.0031), (0.0020, 0.0020, 0.0020)),
    Row("ladder", "prefill", (0.0080, 0.0081, 0.0082), (0.0080, 0.0080, 0.0081)),
    Row("ladder", "decode", (0.0032, 0.0032, 0.0032), (0.0015, 0.0015, 0.0015)),
)
VALIDATION = Validation("2 ranks on a CPU core each, gloo", "a fabric calibrated on this machine", ROWS)
KEYS = (
    "recipe", "prefill_seconds", "seconds_per_token", "tokens_per_second", "exposed_communication_seconds_per_token",
    "end_to_end",
)  # fmt: skip


class Api(ModuleType):
    """Stands in for `rewriter.api`: records how the CLI calls it, and answers."""

    def __init__(self) -> None:
        super().__init__("rewriter.api")
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.validation = VALIDATION
        self.answer: Callable[[Sequence[str]], RecipeComparison] = comparison

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("predict", *flat(args, kwargs)))
        return self.answer(args[1])

    def measure(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("measure", *flat(args, kwargs)))
        return comparison(args[1])

    def validate(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("validate", *flat(args, kwargs)))
        return self.validation


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    return installed(Api(), monkeypatch)


def test_what_is_asked_reaches_the_api(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict org/model --recipe tensor-parallel --recipe ladder --fabric h100-2x8-ib --tp 16 --nodes 2 --sp 2"
    more = "--batch 4 --prompt 2048 --generate 128 --what-if all_reduce=+5us --what-if bandwidth=x0.5 --eager --pareto"
    design = "--attention plain --all-logits --served --weights int4 --cache float8 --engine sglang --draft 3:0.7"
    assert main([*words.split(), *more.split(), *design.split()]) == 0
    assert api.calls == [
        (
            "predict",
            ("org/model", ["tensor-parallel", "ladder"]),
            dict(
                fabric="h100-2x8-ib", library=None, tp=16, nodes=2, sp=2, batch=4, prompt=2048, generate=128,
                graphed=False, what_if=("all_reduce=+5us", "bandwidth=x0.5"), pareto=True, compiled=None,
                attention="plain", all_logits=True, served=True, weights="int4", cache="float8", l2_prefetch=False,
                sequence_parallel=False, exact=True, engine="sglang", tokens=3, acceptance=0.7, trust_remote_code=False,
            ),
        )
    ]  # fmt: skip
    shown = capsys.readouterr().out
    assert "ladder" in shown
    assert "Best TP degrees" in shown


def test_json_is_a_list_with_an_object_per_recipe(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "m", "--recipe", "tensor-parallel", "--recipe", "ladder", "--pareto", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["recipe"] for one in found] == ["tensor-parallel", "ladder"]
    assert found[0]["end_to_end"] == 1.0
    assert found[1]["end_to_end"] == pytest.approx(found[1]["tokens_per_second"] / found[0]["tokens_per_second"])
    for one in found:
        assert all(key in one for key in KEYS)
        assert {point["tp"] for point in one["pareto"]} == {2, 4, 8}
        assert all(point["seconds_per_token"] > 0 for point in one["pareto"])


def test_json_says_on_stderr_what_it_leaves_out(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    given = replace(
        comparison(("tensor-parallel",), points=0), skipped=(SkippedRecipe("odd", "8 heads do not divide by 3."),)
    )
    api.answer = lambda _: given
    assert main(["predict", "m", "--recipe", "tensor-parallel", "--recipe", "odd", "--json"]) == 0
    printed = capsys.readouterr()
    assert [one["recipe"] for one in json.loads(printed.out)] == ["tensor-parallel"]
    assert printed.err == "warning: odd: not predicted. 8 heads do not divide by 3.\n"


def test_a_real_rank_is_asked_for_by_name(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "m", "--recipe", "ladder", "--tp", "2", "--measure"]) == 0
    assert [name for name, _, _ in api.calls] == ["measure"]


def test_validation_stands_beside_the_prediction(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "m", "--recipe", "tensor-parallel", "--recipe", "ladder", "--tp", "2", "--validate"]
    assert main(words) == 0
    assert [name for name, _, _ in api.calls] == ["predict", "validate"]
    shown = capsys.readouterr().out
    assert "+2.0 %" in shown
    assert "Ranked the wrong way in decode: tensor-parallel and ladder." in " ".join(shown.split())
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["validation"]["prefill"]["error"] == pytest.approx(0.02)
    assert found[0]["validation"]["prefill"]["holds"]
    assert not found[1]["validation"]["decode"]["holds"]


def test_a_machine_that_cannot_validate_says_why(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    api.validation = Validation("", "h100-nvlink", (), "8 real ranks need a GPU each")
    assert main(["predict", "m", "--recipe", "ladder", "--tp", "8", "--validate"]) == 0
    assert "Not validated: 8 real ranks need a GPU each" in capsys.readouterr().out
    assert main(["predict", "m", "--recipe", "ladder", "--tp", "8", "--validate", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["validation"] == {"reason": "8 real ranks need a GPU each"}


def test_errors_are_shares_of_what_was_measured() -> None:
    prefill, decode = ROWS[0], ROWS[3]
    assert prefill.error == pytest.approx(0.02)
    assert prefill.spread == pytest.approx(0.02)
    assert (prefill.holds, decode.holds) == (True, False)
    assert replace(prefill, predicted=(0.0105,)).error == pytest.approx(0.05)
    assert not replace(prefill, predicted=(0.0105,)).holds
    assert replace(prefill, predicted=(0.0105,), measured=(0.0097, 0.01, 0.0102)).holds  # launches differ by 5 %
    assert VALIDATION.misordered == [("tensor-parallel", "ladder", "decode")]
    close = replace(ROWS[3], measured=(0.00199, 0.0020, 0.0021))
    assert replace(VALIDATION, rows=(ROWS[1], close)).misordered == []


def test_a_busy_machine_is_told() -> None:
    assert not any("busy" in words for words in replace(VALIDATION, busy=0.05).said())
    assert any("for 60 % of the time" in words for words in replace(VALIDATION, busy=0.6).said())
    assert replace(VALIDATION, busy=0.6).of("ladder")["busy"] == 0.6


def test_the_page_shows_a_validation() -> None:
    text = page(comparison(), validation=VALIDATION)
    assert "<h2>Validation</h2>" in text
    assert "+113.3 %" in text
    without = Validation("", "x", (), "<no> GPU")
    assert "Not validated: &lt;no&gt; GPU" in page(comparison(), validation=without)


@pytest.mark.parametrize(
    "words",
    ["--tp 0", "--batch -1", "--prompt 0", "--generate x", "--nodes 0", "--sp -2", "--recipe"],
)
def test_a_number_that_cannot_be_or_no_recipe_is_refused_by_name(
    api: Api, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    named = [] if words == "--recipe" else ["--recipe", "ladder", *words.split()]
    assert main(["predict", "m", *named]) == 2
    assert words.split()[0] in capsys.readouterr().err
    assert not api.calls


def test_a_page_in_no_directory_is_refused_before_any_work(
    api: Api, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for place, why in ((tmp_path / "none" / "a.html", "there is no directory"), (tmp_path, "it is a directory")):
        assert main(["predict", "m", "--recipe", "ladder", "--html", str(place)]) == 2
        error = capsys.readouterr().err
        assert "--html" in error
        assert why in error
    assert not api.calls


def test_a_real_rank_has_no_points_and_fills_its_nodes(api: Api, capsys: pytest.CaptureFixture[str]) -> None:
    from rewriter.predict import entry
    from rewriter.predict.workload import Cluster, Workload

    assert main(["predict", "m", "--recipe", "ladder", "--measure", "--pareto"]) == 2
    assert "--pareto: with --measure" in capsys.readouterr().err
    assert main(["predict", "m", "--recipe", "ladder", "--wire"]) == 2
    assert "--wire: only with --measure" in capsys.readouterr().err
    assert not api.calls
    with pytest.raises(RewriterError, match="--nodes 2: with --measure, 8 ranks fill their nodes one by one, 1 of"):
        entry.measure("no/such/model", ["ladder"], Workload(1, 16, 4, False, tp=8, nodes=2), Cluster("h100-2x8-ib"))


def test_measured_passes_replace_predicted_ones() -> None:
    from rewriter.predict.measurement import PassSeconds, with_measured

    predicted = comparison(("tensor-parallel", "ladder"))
    measured = {
        "tensor-parallel": PassSeconds(0.100, 0.004, 0.090, 0.003),
        "ladder": PassSeconds(0.090, 0.003, 0.090, 0.0031),
    }
    first, second = with_measured(predicted, measured, "cpu").predictions
    assert (first.decode.seconds, first.decode.compute_seconds) == (0.004, 0.003)
    assert first.decode.exposed_seconds == pytest.approx(0.001)
    assert second.decode.exposed_seconds == 0.0  # noise between the two launches is no communication
    whole = 0.1 + 511 * 0.004
    assert first.seconds_per_token == 0.004
    assert first.generation_seconds == pytest.approx(whole)
    assert first.tokens_per_second == pytest.approx(512 / whole)
    assert first.exposed_communication_seconds_per_token == pytest.approx(0.001)
    assert second.end_to_end == pytest.approx(second.tokens_per_second / first.tokens_per_second)
    assert "One decode step" in page(with_measured(predicted, measured, "cpu"))


def test_a_pass_takes_as_long_as_its_slowest_rank() -> None:
    from rewriter.predict.measurement import PassSeconds, _together, slowest

    ranks = [{"prefill": [1, 5, 3], "decode": [1, 1, 1]}, {"prefill": [2, 1, 1], "decode": [2, 3, 1]}]
    assert _together(ranks) == PassSeconds(3, 2)
    assert slowest([PassSeconds(1, 4), PassSeconds(2, 3)]) == PassSeconds(2, 4)
    assert slowest([PassSeconds(1, 4, 1, 2), PassSeconds(2, 3, 1.5, 1)]) == PassSeconds(2, 4, 1.5, 2)


def test_a_spec_survives_its_file() -> None:
    from rewriter.predict.rank_worker import SPEC, Spec, Variant
    from rewriter.predict.workload import Workload

    variants = (
        Variant("ladder", "a.py", {"0": "b"}, "bfloat16", 2, (1, 2, 1)),
        Variant("x", "c.py", {}, "float32", 4, None),
    )
    job = Workload(1, 64, 16, False, tp=4)
    spec = Spec(variants, job, "cpu", "s", {"world_size": 4}, True, (0, 1), 5)
    assert SPEC.validate_python(json.loads(json.dumps(asdict(spec)))) == spec


def test_what_this_machine_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from rewriter.predict import measurement, validate
    from rewriter.predict.workload import Workload

    def job(ranks: int) -> Workload:
        return Workload(1, 64, 16, False, tp=ranks)

    monkeypatch.setattr(measurement, "free_memory", lambda _: 10**9)
    monkeypatch.setattr(validate, "cores", lambda ranks, where: tuple(range(ranks)) if ranks <= 4 else ())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert validate.how_real(job(4), 10**8)[0] == "cpu"
    for ranks, nbytes, why in (
        (1, 10**8, "nothing is communicated"),
        (8, 1, "a CPU core each"),
        (2, 10**9, "2,000.00 MB"),
    ):
        with pytest.raises(RewriterError, match=why):
            validate.how_real(job(ranks), nbytes)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert validate.how_real(job(8), 10**12) == ("cuda", "8 GPUs, NCCL")


def test_ranks_that_share_tokens_are_of_several_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from rewriter.ir.ops import SequencePlan
    from rewriter.predict import measurement

    program: Any = SimpleNamespace(mesh={"sp": 4, "tp": 2})
    monkeypatch.setattr(measurement, "sequence_plan", lambda _: SequencePlan("attention2d", (1, 2, 2), True))
    assert measurement.classes(program) == (0, 2, 4, 6)
    monkeypatch.setattr(measurement, "sequence_plan", lambda _: None)
    assert measurement.classes(program) == (0,)


@pytest.mark.slow
def test_a_real_rank_waits_for_the_delays_of_the_fabric(tmp_path: Path) -> None:
    from rewriter import api

    recipes = ["tensor-parallel", "desync-2x"]
    job = dict(fabric="ethernet-10g", what_if=("all_reduce=20ms",), tp=2, prompt=16, generate=4)
    found = api.measure("examples/tiny-llama", recipes, **predicting(**job))
    standard, desync = found.predictions
    reductions = [p.decode.collectives for p in found.predictions]
    assert reductions[0] > 1.5 * reductions[1]
    for p, count in zip(found.predictions, reductions, strict=True):
        # two more gather logits and embed tokens
        assert (count - 2) * 0.02 * 0.9 < p.decode.exposed_seconds < count * 0.02 + 0.2
    assert desync.end_to_end > 1.3
    assert standard.prefill.spans == ()
    # a bare config gets random weights
    config = tmp_path / "config.json"
    config.write_bytes(Path("examples/tiny-llama/config.json").read_bytes())
    (bare,) = api.measure(config, recipes[:1], **predicting(**job)).predictions
    assert bare.decode.exposed_seconds > (reductions[0] - 2) * 0.02 * 0.9


@pytest.mark.slow
def test_a_real_rank_exchanges_messages_with_an_environment_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(Path("examples/tiny-llama/config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = "--recipe tensor-parallel --fabric ethernet-10g --tp 2 --prompt 16 --generate 2"
    assert (
        main(
            ["predict", str(tmp_path), *words.split(), "--what-if", "all_reduce=20ms", "--measure", "--wire", "--json"]
        )
        == 0
    )
    found = next(one for one in json.loads(capsys.readouterr().out) if one["recipe"] == "tensor-parallel")
    assert "sets the pace of messages over TCP" in " ".join(found["notes"])
    count = found["decode"]["collectives"]
    assert found["decode"]["exposed_seconds"] > (count - 2) * 0.02 * 0.9  # two are no all-reduces


@pytest.mark.slow
def test_real_ranks_are_compared_with_an_emulated_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = "predict examples/tiny-llama --recipe tensor-parallel --recipe ladder --tp 2 --prompt 32 --generate 8"
    assert main([*words.split(), "--validate", "--json"]) == 0
    objects = json.loads(capsys.readouterr().out)
    assert [one["recipe"] for one in objects if one.get("bound") is False] == ["tensor-parallel", "ladder"]
    for one in objects[:2]:
        found = one["validation"]
        if len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2:
            assert "a CPU core each" in found["reason"]
            continue
        for kind in ("prefill", "decode"):
            assert len(found[kind]["measured_launches"]) == len(found[kind]["predicted_launches"]) == 3
            # of the same size at least, on whatever machine this runs beside whatever else
            assert 0.1 < found[kind]["predicted_seconds"] / found[kind]["measured_seconds"] < 10
