"""The emulated backend as torch.distributed sees it: all collectives by all their names, their values and times."""

from __future__ import annotations

import gc
import itertools
import math
import sys
import threading
import time
import tracemalloc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from emulated import Constant, Modelled, job, together
from torch.distributed.device_mesh import init_device_mesh

from rewriter.common.errors import RewriterError
from rewriter.emulation import EmulationConfig
from rewriter.emulation.delay_cpu import DelayEngine
from rewriter.emulation.operation import EmulatedOperation
from rewriter.emulation.work import CollectiveAborted, CollectiveTimeout
from rewriter.fabric import Call, WhatIf, load_fabric

# renamed in torch 2.13
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# --- values ---


def test_reductions_of_uniform_ranks():
    def reduced(x, op):
        dist.all_reduce(y := x.clone(), op)
        return y.tolist()

    with job(4, rank=1):
        x = torch.arange(4.0)
        assert reduced(x, dist.ReduceOp.SUM) == [0, 4, 8, 12]
        assert reduced(x, dist.ReduceOp.MAX) == reduced(x, dist.ReduceOp.AVG) == x.tolist()
        assert reduced(x, dist.ReduceOp.PRODUCT) == [0, 1, 16, 81]
        assert reduced(torch.tensor([3]), dist.ReduceOp.BXOR) == [0]
        assert reduced(torch.tensor([True, False]), dist.ReduceOp.SUM) == [True, False]
        assert reduced(torch.tensor([6e4], dtype=torch.float16), dist.ReduceOp.SUM) == [65504]  # finite
        for root, expected in ((0, x), (1, 4 * x)):
            dist.reduce(y := x.clone(), dst=root)
            assert torch.equal(y, expected)


def test_what_others_give_is_what_this_rank_gives():
    with job(4, rank=1) as model:
        x = torch.arange(4.0)
        found, parts = torch.empty(8), [torch.empty(2) for _ in range(4)]
        all_gather_single(found, x[:2])
        dist.all_gather(parts, x[:2])
        assert found.tolist() == torch.cat(parts).tolist() == [0, 1] * 4
        found = torch.tensor([9, 9, 5.0, 6.0, 9, 9, 9, 9])
        all_gather_single(found, found[2:4])  # in place, as FSDP does
        assert found.tolist() == [5, 6] * 4
        own = torch.empty(1)
        reduce_scatter_single(own, x)
        assert own.item() == 4
        dist.reduce_scatter(own, list(x.flip(0).split(1)))
        assert own.item() == 8
        found = torch.empty(4)
        dist.all_to_all_single(found, x)
        assert found.tolist() == [1] * 4
        found = torch.empty(9)
        dist.all_to_all_single(found, x, [2, 2, 2, 3], [0, 2, 1, 1])
        assert found.tolist() == [0, 1] * 4 + [0]
        parts = [torch.empty(1) for _ in range(4)]
        dist.all_to_all(parts, list(x.split(1)))
        assert torch.cat(parts).tolist() == [1] * 4
        dist.broadcast(x, src=0)
        assert x.tolist() == [0, 1, 2, 3]
        parts = [torch.empty(4) for _ in range(4)]
        dist.gather(x, parts, dst=1)
        dist.gather(x, dst=0)
        assert torch.equal(torch.cat(parts), x.repeat(4))
        dist.scatter(own, list(x.split(1)), src=1)
        assert own.item() == 1
        dist.scatter(own, src=0)
        assert own.item() == 0
        dist.barrier()
    sizes = {kind: {call.nbytes for call in model.calls if call.kind == kind} for kind in model.kinds}
    assert sizes == {
        "all_gather": {32},
        "reduce_scatter": {16},
        "all_to_all": {16},
        "broadcast": {16},
        "gather": {64},
        "scatter": {16},
        "barrier": {0},
    }


def test_objects_come_from_real_ranks():
    with job(3, rank=1):
        found = [None] * 3
        dist.all_gather_object(found, {"rank": 1})
        assert found == [{"rank": 1}] * 3
        box = ["mine"]
        dist.broadcast_object_list(box, src=1)
        assert box == ["mine"]
        with pytest.raises(RewriterError, match=r"rank 0 is emulated and has no objects\. Make it real"):
            dist.broadcast_object_list(box, src=0)


@pytest.mark.parametrize("size", [3, 100_000])
def test_a_rank_receives_what_it_sends(size):
    with job(4, Constant(2e-3)):
        sent, found = torch.full((size,), 7.0), torch.empty(size)
        for receive_first in (True, False):
            operations = [dist.P2POp(dist.irecv, found, 1), dist.P2POp(dist.isend, sent, 3)]
            for work in dist.batch_isend_irecv(operations if receive_first else operations[::-1]):
                work.wait()
            assert torch.equal(found, sent)
            sent = sent + 1
        dist.recv(odd := torch.ones(size + 1))  # from anybody, and nothing of the kind was sent
        assert not odd.any()


def test_autograd_sees_the_writes_of_this_backend_as_little_as_those_of_others():
    with job(2):
        x = torch.ones(3, requires_grad=True)
        y = x.exp()  # keeps its result for backward
        with torch.no_grad():
            dist.all_reduce(y)
        assert y._version == 0
        with torch.inference_mode():
            dist.all_reduce(z := torch.ones(3), async_op=True).wait()
        assert z.tolist() == [2] * 3


# --- groups ---


def test_groups_of_some_ranks():
    with job(8, rank=5) as model:
        odd, none = dist.new_group([1, 3, 5, 7]), dist.new_group([0, 1])
        assert (odd.rank(), odd.size(), none) == (2, 4, dist.GroupMember.NON_GROUP_MEMBER)
        dist.all_reduce(x := torch.ones(1), group=odd)
        assert x.item() == 4
        assert model.calls[-1].ranks == range(1, 9, 2)
        pair, _ = dist.new_subgroups(2)
        assert dist.get_process_group_ranks(pair) == [4, 5]
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [1, 5]
        assert tuple(mesh.get_coordinate()) == (1, 1)
        part = odd.split_group([0, 2], group_name="part")
        assert (part.group_name, part.size(), part.rank()) == ("part", 2, 1)
        dist.destroy_process_group(odd)
        with pytest.raises(CollectiveAborted, match="was destroyed"):
            odd.allreduce([x])
        other = dist.new_group([4, 5], timeout=timedelta(seconds=7))
        assert other._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)


def test_functional_collectives_eager_and_compiled():
    with job(4, rank=1) as model:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.arange(4.0)
        world = dist.group.WORLD
        all_gathered = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
        reduce_scattered = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

        def everything(x):
            total = functional.all_reduce(x * 2, "sum", mesh["tp"].get_group())
            own = reduce_scattered(all_gathered(total, 0, world), "avg", 0, world)
            return functional.all_to_all_single(own + 1, None, None, world)

        expected = torch.full((4,), 5.0)  # 2 · 2 · x[1] + 1
        assert torch.equal(everything(x) + 0, expected)
        eager = model.kinds[:]
        model.calls.clear()
        assert torch.equal(torch.compile(everything, backend="aot_eager", fullgraph=True)(x) + 0, expected)
        assert model.kinds == eager == ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

        def in_place(x):
            dist.all_reduce(y := x * 2)
            return y + 1

        assert torch.equal(torch.compile(in_place, backend="aot_eager", fullgraph=True)(x), 8 * x + 1)


def test_coalesced_collectives_are_one_operation():
    with job(4) as model:
        a, b = torch.ones(2), torch.ones(3)
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(a)
            dist.all_reduce(b)
        manager.wait()
        gathered = torch.empty(8), torch.empty(12)
        with dist._coalescing_manager():
            for whole, shard in zip(gathered, (a, b), strict=True):
                all_gather_single(whole, shard)
        assert [(call.kind, call.nbytes) for call in model.calls] == [("all_reduce", 20), ("all_gather", 80)]
        assert torch.equal(torch.cat(gathered), torch.full((20,), 4.0))
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.isend(a, 1)
            dist.irecv(found := torch.empty(2), 3)
        manager.wait()
        assert torch.equal(found, a)
        assert model.kinds[2:] == ["send", "send"]


# --- time ---


def test_operations_take_the_time_they_are_told():
    with job(4, model := Constant(5e-3)):  # how late it is, `benchmarks/emulation/jobs.py` measures
        for _ in range(20):
            begun = time.monotonic()
            work = dist.all_reduce(torch.ones(8), async_op=True)
            work.wait()
            assert time.monotonic() - begun >= 5e-3
            assert work.end - work.start == pytest.approx(5e-3)
        model.answer = Constant(0.0).answer
        future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
        assert future.wait()[0].tolist() == [4, 4]


@pytest.mark.parametrize("size", [8, 1 << 18])  # filled by the caller, and by the timer's thread
def test_computation_hides_an_asynchronous_collective(size):
    with job(4, Constant(0.3)):
        begun = time.monotonic()
        work = dist.all_reduce(x := torch.ones(size), async_op=True)
        assert not work.is_completed() or time.monotonic() >= work.end
        time.sleep(0.25)
        work.wait()
        assert time.monotonic() - begun >= 0.3
        assert work.is_completed()
        assert work.end - work.start == pytest.approx(0.3)  # what is computed meanwhile adds nothing
        assert x[-1] == 4


def test_groups_that_share_a_link_wait_for_each_other():
    class ByGroup(Constant):
        def delay(self, call):
            answer = super().delay(call)
            links = {4: ("nic",), 2: ("nic", "node0"), 3: ("node1",)}[call.size]
            return type(answer)(answer.seconds, answer.transfer, links)

    with job(4, ByGroup(200, transfer=150)):
        pair, three = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in (None, pair, three)]
        first, second, other = works
        assert second.start == pytest.approx(first.start + 150)
        assert other.start - first.start < 100
        ends = [dist.isend(torch.ones(1), 1), dist.irecv(torch.ones(1), 1)]
        assert ends[0].start == pytest.approx(ends[1].start)  # links have two directions
        dist.group.WORLD.abort()


def test_a_rank_waits_for_its_own_link_wherever_its_groups_begin():
    slow = WhatIf.parse(load_fabric("ethernet-10g").delay_model(), ["bandwidth=x0.00001"])
    with job(32, slow, rank=9):
        pairs = [dist.new_group([1, 9]), dist.new_group([9, 17])]
        first, second = (dist.all_reduce(torch.ones(1 << 18), group=pair, async_op=True) for pair in pairs)
        assert first.delay.links == ("rank9.network<", "rank9.network>")
        assert first.delay.transfer > 60
        assert second.start == pytest.approx(first.start + first.delay.transfer)
        dist.group.WORLD.abort()


def test_a_groups_collectives_follow_each_other_on_gpus():
    with job(4, Constant(100, transfer=0.0, blocks=8)):
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
        assert works[1].start == works[0].end
        dist.group.WORLD.abort()


def test_cpu_time_of_the_real_exchange_is_spent():
    with job(4, Constant(1.0, cpu_seconds=0.05)):
        before = time.process_time()
        dist.all_reduce(torch.ones(1000))
        spent = time.process_time() - before
    assert 0.049 < spent < 0.9
    with job(4, Constant(0.01, cpu_seconds=20.0)):  # a change made it shorter than what it takes of the core
        before = time.process_time()
        dist.all_reduce(torch.ones(1000))
        assert time.process_time() - before < 10


def test_timeouts_name_the_operation():
    with job(4, Constant(1.0), timeout=timedelta(seconds=0.05)):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
        with pytest.raises(CollectiveTimeout, match=r"group '0', operation 1: all_reduce of 8 bytes among 4 ranks"):
            dist.all_reduce(torch.ones(2))
        work = dist.broadcast(torch.ones(2), 0, group=group, async_op=True)
        with pytest.raises(RuntimeError, match=r"not done within 0\.03 s"):
            work.wait(timedelta(seconds=0.03))
        assert work.wait()


def test_abort_ends_what_is_under_way():
    with job(4, Constant(60.0)):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        large = dist.all_reduce(torch.ones(1 << 20), async_op=True)
        timer = threading.Timer(0.05, dist.group.WORLD.abort)
        timer.start()
        for pending in (work, large):
            with pytest.raises(CollectiveAborted, match="the group was aborted meanwhile"):
                pending.wait()
        timer.join()
    assert not any(thread.name == "rewriter-emulated" for thread in threading.enumerate())


# --- large worlds ---


def _steps(run):
    """Python calls of `run`, and the most bytes that they held."""
    count = itertools.count()
    sys.setprofile(lambda frame, event, argument: next(count) if event in ("call", "c_call") else None)
    run()
    sys.setprofile(None)
    gc.collect()
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return next(count), peak


def test_8192_ranks_cost_what_8_do():
    found = {}
    for ranks in (8, 8192):
        with job(ranks, Constant(0.0)):
            x = torch.ones(64)
            for _ in range(3):
                dist.all_reduce(x, dist.ReduceOp.AVG)
            found[ranks] = _steps(lambda x=x: dist.all_reduce(x, dist.ReduceOp.AVG))
    (few, small), (many, large) = found.values()
    assert abs(many - few) < 30, found  # some branches depend on the clock
    assert abs(large - small) < 2000, found


def test_8192_ranks_begin_quickly():
    def run(ranks):
        with job(ranks, Constant(0.0), rank=ranks - 1):
            half = dist.new_group(range(ranks // 2, ranks))
            dist.all_reduce(x := torch.ones(1), group=half)
        assert x.item() == ranks // 2

    (few, _), (many, _) = _steps(lambda: run(8)), _steps(lambda: run(8192))
    assert many < few + 2 * 4096  # once for every member of the group


# --- several real ranks ---


def _ranks(real, ranks=8):
    """An engine for each real rank, and a function that makes operations for them."""
    engines = together(lambda rendezvous: DelayEngine(Constant(0.02), rendezvous), real)

    def begin(rank, kind="all_reduce", x=None, sequence=1, root=None, timeout=300.0):
        x = torch.ones(2) if x is None else x
        call = Call(kind, x.nbytes, range(ranks))
        return engines[rank].submit(EmulatedOperation(call, "world", sequence, rank, (x,), (x,), timeout, root=root))

    return engines, begin


def test_a_collective_begins_when_its_last_real_rank_has_come():
    engines, begin = _ranks((0, 2, 5))
    works = [begin(5), begin(0)]
    time.sleep(0.1)
    assert not any(work.is_completed() for work in works)
    with pytest.raises(CollectiveTimeout):
        begin(0, sequence=2, timeout=0.05).wait()
    last = begin(2)
    [work.wait() for work in (*works, last)]
    assert {work.start for work in (*works, last)} == {last.start}
    given, found = torch.arange(3.0), torch.zeros(3)
    sent = [begin(r, "broadcast", x, 3, root=2) for r, x in ((2, given), (0, found), (5, torch.zeros(3)))]
    [work.wait() for work in sent]
    assert torch.equal(found, given)
    [engine.close() for engine in engines.values()]


def test_a_message_comes_while_its_receiver_waits():
    engines, _ = _ranks((0, 5))
    call, given, found = Call("send", 12, (5, 0)), torch.arange(3.0), torch.zeros(3)
    receive = EmulatedOperation(call, "world", 1, 1, (), (found,), 300.0, asynchronous=True, root=5)
    send = EmulatedOperation(call, "world", 1, 0, (given,), (), 300.0, asynchronous=True, root=5)
    receiving = engines[0].submit(receive)
    sender = threading.Timer(0.1, engines[5].submit, [send])
    sender.start()
    receiving.wait()
    assert torch.equal(found, given)
    sender.join()
    [engine.close() for engine in engines.values()]


def test_large_objects_of_two_groups_do_not_mix():
    """Threads of one rank tell the same peer: what one says is not cut by the other."""
    engines, begin = _ranks((0, 5))
    given = [torch.full((1 << 20,), i) for i in range(4)]

    def one(rank, i):
        x = given[i] if rank == 0 else torch.zeros_like(given[i])
        begin(rank, "broadcast", x, i + 1, root=0).wait()
        assert torch.equal(x, given[i])
        done.append((rank, i))

    done: list[tuple[int, int]] = []
    threads = [threading.Thread(target=one, args=(rank, i)) for rank in (0, 5) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(done) == 8
    [engine.close() for engine in engines.values()]


def test_real_ranks_that_disagree_or_leave_are_named():
    engines, begin = _ranks((0, 5))
    works = [begin(0), begin(5, "broadcast", root=0)]
    for rank, work in zip((5, 0), works, strict=True):
        with pytest.raises(RewriterError, match=f"rank {rank} calls (broadcast|all_reduce) of 8 bytes among 8 ranks"):
            work.wait()
    left = begin(0, sequence=2)
    engines[5].close()
    with pytest.raises(CollectiveAborted, match="rank 5 has left the job"):
        left.wait()
    with pytest.raises(CollectiveAborted, match="rank 5 has left the job"):
        begin(0, sequence=3).wait()
    engines[0].close()


def test_a_job_writes_how_long_it_took(tmp_path):
    file = tmp_path / "seconds"
    with job(8, Modelled(world_size=8, seconds_file=str(file), seconds=0.02)):
        dist.all_reduce(torch.ones(1))
        assert not file.exists()
    assert 0.02 <= float(file.read_text()) < 300


# --- configuration ---


def test_configurations_are_checked_and_travel_in_the_environment():
    config = EmulationConfig.of(world_size=8, real=(4, 0), what_if=("all_reduce=+5us",))
    assert EmulationConfig.from_environment({"REWRITER_EMULATE": config.to_environment()}) == config
    assert config.real == (0, 4)
    assert EmulationConfig.from_environment({}) is None
    for wrong, message in (
        ({"real": (8,)}, "real: rank 8, expected 0 to 7"),
        ({"real": ()}, "expected at least one"),
        ({"modes": "delay"}, "modes: Extra inputs are not permitted"),
    ):
        with pytest.raises(RewriterError, match=message):
            EmulationConfig.of(world_size=8, **wrong)


def test_a_job_has_to_be_configured(monkeypatch):
    monkeypatch.delenv("REWRITER_EMULATE", raising=False)
    with pytest.raises(RewriterError, match="REWRITER_EMULATE is not set, and pg_options is 3"), job(4, 3):
        pass
    config = Modelled(world_size=8, real=(1,))
    for ranks, rank, message in ((4, 1, "has 4 ranks, but 8 are emulated"), (8, 0, "rank 0, but the real ones are 1")):
        with pytest.raises(RewriterError, match=message), job(ranks, config, rank):
            pass
    with job(8, config, rank=1):
        dist.all_reduce(x := torch.ones(1))
    assert math.isclose(x.item(), 8)


def test_a_fabric_and_a_change_say_how_long():
    config = EmulationConfig.of(world_size=8, fabric="h100-nvlink", what_if=("all_reduce=+20ms",))
    with job(8, config):
        work = dist.all_reduce(torch.ones(8192), async_op=True)
        assert 0.02 < work.delay.seconds < 0.0201  # an H100's own takes some 20 µs
        work.wait()
