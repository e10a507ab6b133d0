"""A decode step from the user's cache gives the eager step's tokens, on one rank and several, whenever they change
over to it; what does not fit is not used, and what is missing or was killed does no harm."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runtime_qwen
import runtime_reference as reference
import torch
import traced_worker
from qwen_ranks import PROMPTS
from ranks import run_ranks
from runtime_qwen_outputs import write

from rewriter import RewriterError
from rewriter.runtime import Context, generate, load
from rewriter.runtime.cache import StaticCache
from rewriter.runtime.generation import cached_step, compile_worker, step_cache, step_parts
from rewriter.runtime.generation.decode_step import compilation, decode_step

PROMPT, COUNT = PROMPTS[1], 24


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and graphs in place of libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _without_compilers(monkeypatch.setattr)
    return tmp_path / "cache" / "rewriter" / "decode-steps"


def _without_compilers(change):
    change(step_cache, "WORKER", [traced_worker.SCRIPT])
    change(cached_step, "_loaded", traced_worker.loaded)
    change(cached_step, "LARGE", 0)
    change(cached_step, "TOKENS_BETWEEN_LOOKS", 1)


def loaded(directory, when="never", **options):
    model = load(directory, **options)
    cached_step.compile_steps(model, when)
    return model


def how(model):
    return decode_step(model, 1, len(PROMPT) + COUNT, None).how


def expected():
    return reference.greedy(
        {name: w.double() for name, w in reference.weights().items()}, PROMPT, COUNT, runtime_qwen.LADDER_FROM
    )


def tokens_of(model, **options):
    return generate(model, [PROMPT], COUNT, **options)[0]


def no_numbers(path):
    """A part that gives NaN: who uses it is seen."""
    run = traced_worker.loaded(path)
    return lambda tensors: [x * float("nan") for x in run(tensors)]


def steps_in(folder):
    return [path for path in folder.glob("*.json") if not path.name.endswith(".spec.json")]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """An output whose step was compiled by a generation that changed over to it midway, after a first attempt was
    killed; and the cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("compiled")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        _without_compilers(patch.setattr)
        output, cache = write(folder / "out", 1), step_cache.cache_folder()
        model = loaded(output, "background")
        generate(model, [PROMPT], 2)
        killed(model, cache)
        midway(loaded(output, "background"), cache)
        return output, cache


def killed(model, cache):
    (step,) = vars(model)["_decode_step"].cached.values()
    while not list(cache.glob("partial-*")):
        assert step._process.poll() is None
        time.sleep(0.01)
    os.kill(step._process.pid, signal.SIGKILL)
    step._process.wait()
    assert tokens_of(model) == expected()
    assert how(model).startswith("eager: the decode step could not be compiled")
    assert "log)" in compilation(model)[1][0]
    assert not steps_in(cache)


def midway(model, cache):
    seen = []

    def on_token(_, token):
        if len(seen) == 8:  # by now it is being compiled: generation goes on when that is done
            (step,) = vars(model)["_decode_step"].cached.values()
            assert step.how == "eager: being compiled"
            assert "still being compiled" in step.note
            step._process.wait()
        seen.append(token)
        return False

    assert tokens_of(model, on_token=on_token) == expected() == seen
    assert how(model) == "compiled parts"
    assert compilation(model) == (0.0, [])
    assert {path.suffix for path in cache.iterdir()} == {".so", ".json", ""}
    assert not list(cache.glob("partial-*"))
    assert len(steps_in(cache)) == 1


@pytest.fixture
def output(compiled, cache):
    """Copies of both."""
    shutil.copytree(compiled[1], cache)
    return Path(shutil.copytree(compiled[0], cache.parents[2] / "out"))


def test_tokens_are_the_eager_ones_from_the_cache(output, monkeypatch):
    model = loaded(output)
    w = {name: value.double() for name, value in reference.weights().items()}
    for prompt, count in ((PROMPTS[0], 5), (PROMPT, 70)):  # past the 64 keys that are looked at first
        assert generate(model, [prompt], count)[0] == reference.greedy(w, prompt, count, runtime_qwen.LADDER_FROM)
        assert decode_step(model, 1, count, None).how == "compiled parts"
    assert tokens_of(load(output, compile=False)) == expected()
    monkeypatch.setattr(cached_step, "_loaded", no_numbers)
    with pytest.raises(RewriterError, match="logits of prompt 0 are NaN"):
        tokens_of(loaded(output))


def test_a_key_is_of_all_that_the_code_depends_on(output, cache):
    unknown = "eager: it is not in the cache of compiled steps"
    tokens_of(other := loaded(output, dtype=torch.float64))
    assert how(other) == unknown
    torch.set_num_threads(2)
    try:
        tokens_of(other := loaded(output))
        assert how(other) == unknown
    finally:
        torch.set_num_threads(1)
    module = output / "runtime/tp1/module.py"
    code = module.read_text()
    module.write_text(f"{code}\n# edited\n")
    tokens_of(other := loaded(output))
    assert how(other) == unknown
    module.write_text(code)

    swapped = loaded(output)
    swapped.lm_head.__class__ = type("Other", (type(swapped.lm_head),), {})
    tokens_of(swapped)
    assert how(swapped) == unknown
    hooked = loaded(output)
    hooked.lm_head.register_forward_hook(lambda *_: None)
    tokens_of(hooked)
    assert how(hooked) == "eager: lm_head has hooks"

    file = next(path for path in cache.glob("*.so"))
    file.write_bytes(file.read_bytes()[:-1])
    other = loaded(output)
    assert tokens_of(other) == expected()
    assert how(other) == unknown
    assert not steps_in(cache), "what is damaged goes"


def told(output, when):
    model = loaded(output, when)
    assert tokens_of(model) == expected()
    return compilation(model)[1]


def test_what_cannot_be_compiled_is_eager_and_says_so(tmp_path, monkeypatch, cache):
    output = write(tmp_path / "out", 1)
    monkeypatch.setenv("CXX", "no-such-compiler")
    for when in ("background", "first"):
        assert told(output, when) == ["no C++ compiler to compile the decode step with: install g++, or set CXX"]
    monkeypatch.delenv("CXX")
    cache.mkdir(parents=True, exist_ok=True)
    cache.chmod(0o777)
    closed = f"{cache}: other users can write to it. Make it your own (chmod 700), or remove it"
    assert told(output, "background") == [closed]
    cache.chmod(0o700)
    cache.parent.chmod(0o777)  # in which another folder could be put in its place
    assert told(output, "background") == [closed.replace(str(cache), str(cache.parent))]
    cache.parent.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(output / "rewrite.json"))  # no folder can be made in a file
    assert "Set XDG_CACHE_HOME to a folder" in told(output, "background")[0]
    assert told(output, "never") == [], "who asked for nothing is told nothing"


def changed_over(group, directory, cache):
    """Tokens of a generation that waits until both ranks' steps are compiled, at which token this one changed over, and
    the tokens of the next one."""
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(cache.parents[1])  # the server that forks ranks has that of an earlier test
    _without_compilers(setattr)
    model, steps = loaded(directory, "background"), []
    plain = cached_step.CachedStep.logits

    def logits(self, *inputs):
        found = plain(self, *inputs)
        steps.append(self.how)
        if len(steps) == 4 + 3 * group.rank():  # one rank knows of it before the other
            while len(steps_in(cache)) < group.size():
                time.sleep(0.05)
        return found

    cached_step.CachedStep.logits = logits
    first = tokens_of(model)
    return first, steps, tokens_of(model), decode_step(model, 1, len(PROMPT) + COUNT, group).how


@pytest.mark.slow
def test_ranks_change_over_together(tmp_path, cache):
    ranks = run_ranks(changed_over, 2, str(write(tmp_path / "out", 2)), cache, timeout=240)
    assert ranks[0] == ranks[1]
    first, steps, second, how = ranks[0]
    assert first == second == expected()
    assert how == "compiled parts"
    assert steps[2] == "eager: being compiled"
    assert steps[-1] == "compiled parts"


@pytest.mark.slow
def test_what_fails_is_not_tried_again_in_every_run(tmp_path, monkeypatch, cache):
    output = write(tmp_path / "out", 1)
    monkeypatch.setenv("TRACED_WORKER_FAILS", "1")
    (note,) = told(output, "first")
    assert "could not be compiled: OSError: no space left (more in " in note
    (note,) = told(output, "background")
    assert note == "the decode step could not be compiled: OSError: no space left. --compile tries again"
    assert not steps_in(cache)


def test_the_least_recently_used_steps_are_removed(cache, monkeypatch):
    monkeypatch.setattr(step_cache, "KEPT", 2)
    folder = step_cache.cache_folder()
    step_cache.made(folder)
    assert folder == cache
    for age, key in enumerate(("aa", "bb", "cc")):
        (folder / f"{key}.so").write_bytes(key.encode())
        step_cache.store(folder, key, {"part": (f"{key}.so", True)}, 1.0)
        os.utime(folder / f"{key}.json", (1000 + age, 1000 + age))
        if key == "bb":
            assert step_cache.find(folder, "aa") == {"part": (folder / "aa.so", True)}  # used now
    assert sorted(path.name for path in folder.iterdir()) == ["aa.json", "aa.so", "cc.json", "cc.so"]
    assert json.loads((folder / "cc.json").read_text())["parts"] == {"part": ["cc.so", True]}


def test_a_damaged_index_of_another_step_does_no_harm(cache):
    step_cache.made(cache)
    (cache / "aa.json").write_text("{")
    for name in ("bb.so", "old.so"):
        (cache / name).write_bytes(b"code")
    step_cache.store(cache, "bb", {"part": ("bb.so", True)}, 1.0)
    assert sorted(path.name for path in cache.iterdir()) == ["aa.json", "bb.json", "bb.so"]


def test_the_compiler_that_was_found_is_the_one_that_compiles(tmp_path, monkeypatch, cache):
    """TorchInductor itself looks for no other than g++."""
    (tmp_path / "clang++").write_text("")
    (tmp_path / "clang++").chmod(0o755)
    (tmp_path / "worker.py").write_text("import os; print(os.environ['CXX'])")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(step_cache, "WORKER", [str(tmp_path / "worker.py")])
    step_cache.made(cache)
    assert step_cache.start_compiling(cache, "aa", {}, background=False).wait() == 0
    assert (cache / "aa.log").read_text() == "clang++\n"


@pytest.mark.slow
def test_a_compilation_in_the_background_gives_way_with_its_session():
    """Its niceness counts among all processes only where the autogroup of its session has it too."""
    group = Path("/proc/self/autogroup")
    if not group.is_file():
        pytest.skip("Linux's autogroups are not in this kernel")
    command = f"from {compile_worker.__name__} import give_way; give_way(); print(open('{group}').read())"
    ran = subprocess.run([sys.executable, "-c", command], start_new_session=True, capture_output=True, check=True)
    assert ran.stdout.split()[-1] == b"10"


@pytest.mark.slow
def test_inductor_compiles_a_part(tmp_path):
    """The one real library: a segment with attention, looking at some and at all of a cache."""
    torch.manual_seed(0)
    layer = runtime_qwen.LadderLayer(None, 0).eval()
    (part,) = (part for part in step_parts.parts_of(layer) if part.method == "segment_0")
    cache = StaticCache(runtime_qwen.Model(None).slots, 1, 256, torch.float32)
    ctx = Context(cache.first(64), torch.tensor(9), torch.tensor([2]))
    x, other = torch.randn(2, 1, 1, reference.HIDDEN)
    cos, sin = torch.randn(2, 1, 1, reference.HEAD)
    with torch.no_grad():
        call = step_parts.PartCall.of(part, (x, other, cos, sin, ctx))
        assert step_parts.PartCall.read(json.loads(json.dumps(dataclasses.asdict(call)))) == call
        program, single = compile_worker._traced(part, call)
        compile_worker._build(program, tmp_path / "part.so")
        run = torch._C._aoti.AOTIModelContainerRunnerCpu(str(tmp_path / "part.so"), 1).run
        compiled = step_parts.CompiledPart(part, call, run, single)
        for length, place in ((64, 9), (128, 100), (256, 200)):
            ctx = Context(cache.first(length), torch.tensor(place), torch.tensor([2]))
            wanted = layer.segment_0(x, other, cos, sin, ctx)
            stored = [memory.clone() for memory in (*cache.keys, *cache.values)]
            cache.clear()
            torch.testing.assert_close(compiled(x, other, cos, sin, ctx), wanted)
            torch.testing.assert_close([*cache.keys, *cache.values], stored)
            cache.clear()
