"""Wrong results without an error in other implementations of attention over many ranks, and around them: the cases
that no other test covers. docs/concepts/silent-failures.md lists the failures, tests/silent_failures.md their tests."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import zoo
from attention_cases import attention2d as grid
from attention_cases import attention_on, ring
from ranks import refusal, run_ranks
from repository import ROOT, TESTS
from sequence_training_ranks import batch, pair_model
from torch.utils.checkpoint import checkpoint

from rewriter.emit.module import emit_runtime_module
from rewriter.ir.ops import SequencePlan
from rewriter.recipes import Recipe
from rewriter.recipes.apply import apply_recipe
from rewriter.runtime import Context, StaticCache, generate, sequence_mesh
from rewriter.runtime.attention import attention2d, sequence_axis
from rewriter.runtime.attention.local import kernel_backward, kernel_forward
from rewriter.runtime.attention.mesh import AttentionMesh
from rewriter.tracing import trace

# --- attention by itself, on four ranks. Every comparison is bitwise: with what a plain call gives ---

TOKENS, SIZE = 6, 8


def own_tensors(rank):
    """q, k, v, do."""
    random = torch.Generator().manual_seed(rank)
    return tuple(torch.randn(2, heads, TOKENS, SIZE, generator=random) for heads in (4, 2, 2, 4))


def functions():
    square = sequence_mesh("cpu", (1, 2, 2))
    return {
        "square": attention_on(square, grid(1, 2, 2)),
        "overlapped": attention_on(square, grid(1, 2, 2, overlap=True)),
        "row": attention_on(sequence_mesh("cpu", (1, 1, 4)), grid(1, 1, 4)),
        "heads-first": attention_on(sequence_mesh("cpu", (2, 1, 2)), grid(2, 1, 2)),
        "ring": attention_on(torch.distributed.init_device_mesh("cpu", (4,)), ring(4)),
    }


def attended(function, q, k, v, do, needing="qkv"):
    """o and the gradients, None of what is not in `needing`."""
    leaves = [x.detach().requires_grad_(name in needing) for name, x in zip("qkv", (q, k, v), strict=True)]
    o = function(*leaves)
    o.backward(do)
    return [o.detach(), *(x.grad for x in leaves)]


def same(found, expected):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def again_after_delays(function, tensors, expected, rank):
    """In any order of arrival."""
    time.sleep(0.02 * (rank * 7 % 4))
    return same(attended(function, *tensors), expected)


def strided(function, tensors, expected, rank):
    """As views of other tensors, with NaN between the elements."""

    def view(x, dim):
        return torch.stack([x, torch.full_like(x, torch.nan)], dim).select(dim, 0)

    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    views = [view(x, 4) for x in tensors]
    held = [same(attended(function, *x), expected) for x in (turned, views)]  # both, or ranks fall out of step
    return all(held)


def expanded_gradient(function, tensors, expected, rank):
    """Such as that of a sum: one element for all."""
    *qkv, do = tensors
    one = do[:, :1, :1, :1].expand_as(do)
    return same(attended(function, *qkv, one), attended(function, *qkv, one.contiguous()))


def few_gradients(function, tensors, expected, rank):
    """Where only some of q, k, v need one, the others' messages still arrive."""
    held = []
    for needing in ("q", "k", "v", "qv"):
        wanted = [x if name in needing else None for name, x in zip("qkv", expected[1:], strict=True)]
        held.append(same(attended(function, *tensors, needing)[1:], wanted))
    return all(held)


def without_gradients(function, tensors, expected, rank):
    *qkv, _ = tensors
    with torch.no_grad():
        plain = function(*qkv)
    with torch.inference_mode():
        return all(torch.equal(o, expected[0]) for o in (plain, function(*qkv)))


def after_an_error(function, tensors):
    """What is said by the call after one that failed with messages under way."""

    def broken(*args):
        raise MemoryError("no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention2d, "tile_forward", broken)
        with pytest.raises(MemoryError):
            function(*tensors[:3])
    return refusal(lambda: function(*tensors[:3]))


ALONE = {
    case.__name__: case
    for case in (
        again_after_delays,
        strided,
        expanded_gradient,
        few_gradients,
        without_gradients,
    )
}


def on_four(group):
    """{case: {function: whether it held}}, whether several axes at once did, and what is said after an error."""
    rank = group.rank()
    tensors, made = own_tensors(rank), functions()
    expected = {name: attended(function, *tensors) for name, function in made.items()}
    held = {
        case: {name: check(function, tensors, expected[name], rank) for name, function in made.items()}
        for case, check in ALONE.items()
    }
    # pairs {0, 1} and {2, 3}; pairs {0, 2} and {1, 3}
    meshes = [sequence_mesh("cpu", (1, 2, 1), data_parallel=2), sequence_mesh("cpu", (1, 2, 1), tensor_parallel=2)]
    several = [attention_on(mesh, grid(1, 2, 1)) for mesh in meshes] + list(made.values())
    alone = [attended(function, *tensors) for function in several]
    *qkv, do = tensors
    leaves = [[x.detach().requires_grad_() for x in qkv] for _ in several]
    outputs = [function(*own) for function, own in zip(several, leaves, strict=True)]
    for o in outputs:
        o.backward(do)
    together = [[o.detach(), *(x.grad for x in own)] for o, own in zip(outputs, leaves, strict=True)]
    return held, all(map(same, together, alone)), after_an_error(made["overlapped"], tensors)


@functools.cache
def of_four():
    return run_ranks(on_four, 4)


@pytest.mark.parametrize("case", ALONE)
def test_results_are_bitwise_those_of_a_plain_call(case):
    for held, *_ in of_four():
        assert held[case] == dict.fromkeys(held[case], True)


def test_axes_of_one_process_do_not_mix():
    """All forward passes before all backward passes, with the same plan on other ranks and other plans on the same."""
    assert all(together for _, together, _ in of_four())


def test_a_second_job_of_a_process_connects_its_own_groups(monkeypatch):
    """A registration outlives the groups that it was made with."""
    connected = []
    monkeypatch.setattr(sequence_axis, "_connect", connected.append)
    monkeypatch.setattr(sequence_axis, "_axes", {})
    plan, keys = SequencePlan("attention2d", (1, 2, 2)), set()
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            mesh = AttentionMesh(1, 2, 2, 0, 0, 0, (0, 1, 2, 3), None, None, None, dist.group.WORLD)
            keys |= {sequence_axis.SequenceAxis(mesh, plan).key for _ in range(2)}
        finally:
            dist.destroy_process_group()
    assert len(keys) == 1
    assert len(connected) == len(set(map(id, connected))) == 2


def test_an_error_with_messages_under_way_is_not_forgotten():
    """The next call would take them for its own."""
    for *_, said in of_four():
        assert "an earlier call in this process ended in MemoryError(no room) with messages under way" in said


def test_a_row_that_sees_no_key_weighs_nothing():
    """Kernels answer 0 for it, as output and as log-sum-exp: a weight of 1 among those of other keys."""
    q, k, v, do = own_tensors(0)
    seen = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    seen[..., 2, :] = False
    o, lse = kernel_forward(q, k, v, seen, False, 1.0)
    assert torch.equal(lse[:, :, 2], torch.full((2, 4), -torch.inf))
    assert not o[:, :, 2].any()
    assert lse[:, :, 3].isfinite().all()
    dq, *dkv = kernel_backward(do, q, k, v, o, lse, seen, False, 1.0)
    without = [x.index_select(2, torch.tensor([0, 1, 3, 4, 5])) for x in (do, q, o)]
    rows = lse[:, :, [0, 1, 3, 4, 5]].contiguous()
    _, *expected = kernel_backward(*without[:2], k, v, without[2], rows, None, False, 1.0)
    assert not dq[:, :, 2].any()
    for found, wanted in zip(dkv, expected, strict=True):
        torch.testing.assert_close(found, wanted)


# --- a model on two ranks ---


def gradients(model, backward):
    model.zero_grad()
    backward(model)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def plain(model):
    ids, labels = batch()
    model(ids, labels=labels).loss.backward()


def under_autocast(model):
    ids, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=labels).loss
    loss.backward()


def checkpointed(model):
    """Layers are computed again in backward, messages included."""
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    plain(model)


def second_order(model):
    ids, labels = batch()
    weight = model.model.layers[0].self_attn.q_proj.weight
    (gradient,) = torch.autograd.grad(model(ids, labels=labels).loss, weight, create_graph=True)
    gradient.square().sum().backward()


def disagreements(model, rank) -> dict[str, Callable[[], object]]:
    """Calls in which rank 1 passes something else than rank 0."""
    ids, labels = batch()
    other = ids.clone()
    other[2, 3] += 1
    swapped = ids.clone()
    swapped[0, [4, 9]] = ids[0, [9, 4]]
    assert ids[0, 4] != ids[0, 9]
    segments = torch.zeros_like(ids)
    return {
        "input_ids": lambda: model(other if rank else ids),
        "input_ids, swapped": lambda: model(swapped if rank else ids),
        "input_ids, of other lengths": lambda: model(ids[:, : 30 + rank]),
        "input_ids, of other rows": lambda: model(ids[2 * rank : 2 * rank + 2]),
        "labels": lambda: model(ids, labels=labels if rank else ids),
        "labels, missing": lambda: model(ids, labels=labels if rank else None),
        "position_ids": lambda: model(ids, torch.arange(ids.shape[1])[None] + rank),
        "segment_ids": lambda: model(ids, ctx=Context(segment_ids=segments + rank * torch.arange(ids.shape[1]))),
        "first_valid": lambda: model(ids, ctx=Context(first_valid=torch.tensor([0, 3, 20, 4 + rank]))),
    }


def on_two(group):
    ids, _ = batch()
    found = {name: gradients(pair_model(True), BACKWARD[name]) for name in BACKWARD}
    prompt = ids[:1, :9].tolist()
    model = pair_model(True)
    with torch.autocast("cpu", torch.bfloat16):
        continued = generate(model, prompt, 5)
    refused = {name: refusal(call) for name, call in disagreements(model, group.rank()).items()}
    refused["second order"] = refusal(lambda: second_order(model))
    cache = StaticCache(model.slots, *ids.shape, torch.float32)
    refused["cache"] = refusal(lambda: model(ids, ctx=Context(cache)))
    return found, continued, refused


BACKWARD = {f.__name__: f for f in (plain, under_autocast, checkpointed)}


@functools.cache
def of_two():
    return run_ranks(on_two, 2)


@functools.cache
def on_one_device(name):
    return gradients(pair_model(False), BACKWARD[name])


def test_activation_checkpointing_gives_the_same_gradients():
    for found, *_ in of_two():
        for name, expected in found["plain"].items():
            torch.testing.assert_close(found["checkpointed"][name], expected, rtol=0, atol=0)


def test_autocast_rounds_as_it_does_on_one_device():
    """Rotated queries and keys are fp32 there, values bf16. Both errors are those of bf16, in other orders of sums."""
    exact = on_one_device("plain")

    def typical(found):
        return sum(float((found[n] - x).norm() / x.norm()) for n, x in exact.items()) / len(exact)

    limit = typical(on_one_device("under_autocast"))
    for found, continued, _ in of_two():
        assert 1e-3 < typical(found["under_autocast"]) <= 1.5 * limit
        with torch.autocast("cpu", torch.bfloat16):
            assert continued == generate(pair_model(False), batch()[0][:1, :9].tolist(), 5)


def test_ranks_that_are_given_different_inputs_say_so():
    """As a sampler gives them that deals rows to all processes."""
    for *_, refused in of_two():
        for name, message in refused.items():
            if name not in ("second order", "cache"):
                assert message.startswith(f"{name.partition(',')[0]} differ between ranks 0 and 1 of 2"), name
        assert "None and shape [4, 37]" in refused["labels, missing"]
        assert "shape [4, 30] with check sum" in refused["input_ids, of other lengths"]


def test_gradients_of_gradients_are_refused():
    for *_, refused in of_two():
        assert refused["second order"].startswith("sequence attention: its gradient has no gradient of its own")


def test_a_cache_of_all_keys_is_refused_where_a_rank_has_its_own():
    for *_, refused in of_two():
        assert refused["cache"].startswith("StaticCache: it holds all keys on each rank, but tokens are sharded over 2")


def test_dropout_of_attention_is_known_to_the_runtime_module():
    """Ranks would draw other numbers than one device; it refuses to train, as tests of the runtime say."""
    config = zoo.config("llama")
    config.attention_dropout = 0.1
    passes = [{"pass": "sequence_parallel", "kind": "ring"}]
    recipe = Recipe.model_validate({"name": "ring", "summary": "one", "paper": "none", "passes": passes})
    assert "dropout_probability = 0.1" in emit_runtime_module(apply_recipe(trace(config), recipe, sp=2)[0])


# --- the list of them ---


def table(page, part):
    """Rows of cells of a section's table, without its head and the rows that group others."""
    text = (ROOT / page).read_text().partition(f"\n## {part}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| **")]
    return [line.strip("| ").split(" | ") for line in lines[1:]]


@pytest.mark.parametrize(("part", "least"), [("Attention over sharded tokens", 40), ("Quantized collectives", 20)])
def test_the_page_names_tests_that_exist(part, least):
    """Each failure has one test at least; an id in brackets stands in that file or in tests/support."""
    rows = table("tests/silent_failures.md", part)
    assert len(rows) >= least
    assert [failure for failure, _ in rows] == [
        failure for failure, _ in table("docs/concepts/silent-failures.md", part)
    ]
    imported = [path.read_text() for path in (TESTS / "support").glob("*.py")]
    defined: dict[str, list[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)", text := path.read_text(), re.MULTILINE):
            defined.setdefault(name, imported[:]).append(text)
    for _, tests in rows:
        names = re.findall(r"`(\w+)(?:\[([\w-]+)\])?`", tests)
        assert names, tests
        for test, case in names:
            assert test in defined, test
            assert not case or any(re.search(rf"\b{case}\b", text) for text in defined[test]), (test, case)
