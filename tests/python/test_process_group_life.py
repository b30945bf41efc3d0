"""How the process group "psplus" begins and ends: forks, deaths, threads, and what is left."""

import gc
import os
import signal
import socket
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import begin
from torch.utils.data import DataLoader, TensorDataset
from workers import start_worker, wait_workers

pytestmark = pytest.mark.cluster


@pytest.fixture
def store(clean_job: Path) -> str:
    return str(clean_job / "store")


@pytest.fixture
def port() -> Iterator[int]:
    """A TCPStore that outlives forked children: a child's FileStore would remove its file."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield server.port
    del server


def summed(rank: int, size: int, n: int = 1000, **keywords: Any) -> None:
    """An all_reduce that must be right."""
    tensor = torch.arange(n) * (rank + 1)
    dist.all_reduce(tensor, **keywords)
    assert torch.equal(tensor, torch.arange(n) * (size * (size + 1) // 2))


def in_child(body: Callable[[], None]) -> None:
    """Run ``body`` in a forked child, which leaves as a program does that just ends."""
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads is what we want
        child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException as error:
            print("in the child:", repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
    assert ended[1] == 0, f"the child ended with status {ended[1]}"


def calls_in_the_child_raise() -> None:
    group = dist.group.WORLD
    peer = 1 - dist.get_rank()
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(3), async_op=True),
        lambda: dist.broadcast(torch.ones(3), 0),
        lambda: dist.barrier(),
        lambda: dist.send(torch.ones(3), peer),
        lambda: dist.isend(torch.ones(3), peer),
        lambda: dist.recv(torch.ones(3)),
        lambda: group.monitored_barrier(timedelta(seconds=1)),
        lambda: group.set_timeout(timedelta(seconds=1)),
    ]
    for call in calls:
        with pytest.raises(dist.DistBackendError, match=r"forked from rank \d"):
            call()


def fork_in_every_way(port: int, placement: str) -> bool:
    rank, size = begin(port, placement=placement)
    summed(rank, size)
    pending = dist.all_reduce(torch.ones(10), async_op=True)  # its thread exists, and sleeps
    pending.wait()
    received = torch.zeros(5)
    request = dist.irecv(received, 1 - rank)  # the thread for messages exists too
    in_child(lambda: None)
    in_child(calls_in_the_child_raise)
    in_child(dist.destroy_process_group)

    def wait_for_the_parents_work() -> None:
        with pytest.raises(dist.DistBackendError, match="forked"):
            request.wait()

    if placement == "00":  # messages between hosts are Gloo's
        in_child(wait_for_the_parents_work)

    def collect_everything() -> None:
        dist.destroy_process_group()
        gc.collect()
        dist.init_process_group("psplus", store=dist.HashStore(), rank=0, world_size=1)
        summed(0, 1)
        dist.destroy_process_group()

    in_child(collect_everything)
    dist.send(torch.full((5,), float(rank)), 1 - rank)
    request.wait()
    assert torch.equal(received, torch.full((5,), 1.0 - rank))
    for _ in range(3):
        summed(rank, size, 100_000)
    summed(rank, size, group=dist.new_group())
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("placement", ["00", "01"])
def test_forked_children_leave_the_group_alone(
    workers: Callable[..., Any], port: int, placement: str
) -> None:
    assert all(workers(fork_in_every_way, 2, port=port, placement=placement))


def fork_and_exit(port: int) -> bool:
    rank, size = begin(port)
    summed(rank, size)
    if rank == 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            sys.exit(0)  # as a program ends, with all that the interpreter then destroys
        assert os.waitpid(child, 0)[1] == 0
    summed(rank, size)
    dist.destroy_process_group()
    return True


def test_the_interpreter_of_a_forked_child_exits(workers: Callable[..., Any], port: int) -> None:
    assert all(workers(fork_and_exit, 2, port=port))


def load_data_meanwhile(store: str, placement: str) -> int:
    rank, size = begin(store, placement=placement)
    data = TensorDataset(torch.arange(240))
    seen = 0
    stop = threading.Event()
    failures: list[BaseException] = []

    def chatter() -> None:
        other = groups[0]
        try:
            while True:
                flag = torch.tensor([int(stop.is_set())])
                dist.all_reduce(flag, dist.ReduceOp.MIN, group=other)
                if flag.item():
                    return
        except BaseException as error:
            failures.append(error)

    groups = [dist.new_group()]
    thread = threading.Thread(target=chatter)
    thread.start()
    for epoch in range(3):
        loader = DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork")
        for (batch,) in loader:
            seen += len(batch)
            work = dist.all_reduce(torch.full((1000,), float(epoch)), async_op=True)
            summed(rank, size)
            work.wait()
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert not failures, failures
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("placement", ["00", "01"])
def test_forked_data_loaders_while_collectives_run(
    workers: Callable[..., Any], store: str, placement: str
) -> None:
    assert workers(load_data_meanwhile, 2, store=store, placement=placement) == [720, 720]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def leftovers() -> dict[str, Any]:
    """Descriptors, threads and memory that a process group could leave behind."""
    files = [str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    names = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
    return {
        "fds": len(files),
        "memory": sum("memfd:psplus" in name for name in files),
        "maps": Path("/proc/self/maps").read_text().count("psplus-group"),
        "threads": sum(name.startswith("psplus") for name in names),
    }


def again_and_again(port: int, place: str, placement: str, turns: int) -> dict[str, Any]:
    first: dict[str, Any] = {}
    for turn in range(turns):
        # Nobody may still find the last group's TCPStore at the port.
        while turn and not Path(place, f"destroyed-{turn - 1}").exists():
            time.sleep(0.001)
        if turn and os.environ["RANK"] == "1":
            time.sleep(0.03)  # a client that finds no server yet waits a third of a second
        rank, size = begin(f"tcp://127.0.0.1:{port}", placement=placement)
        other = dist.new_group()
        works = [dist.all_reduce(torch.ones(10), async_op=True, group=g) for g in (None, other)]
        summed(rank, size)
        summed(rank, size, group=other)
        for work in works:
            work.wait()
        request = dist.isend(torch.ones(3), 1 - rank)
        dist.recv(torch.zeros(3), 1 - rank)
        request.wait()
        del works, work, request, other
        dist.destroy_process_group()
        if rank == 0:
            Path(place, f"destroyed-{turn}").touch()
        if turn == 4:  # torch's own lazily made files are there
            gc.collect()
            first = leftovers()
    gc.collect()
    last = leftovers()
    assert last["memory"] == last["maps"] == last["threads"] == 0, last
    assert last["fds"] <= first["fds"] + 2, (first, last)
    return last


@pytest.mark.parametrize(("placement", "turns"), [("00", 100), ("01", 30)])
def test_a_hundred_groups_on_one_port(
    workers: Callable[..., Any], clean_job: Path, placement: str, turns: int
) -> None:
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names are what is wanted
    workers(
        again_and_again, 2, port=free_port(), place=str(clean_job), placement=placement,
        turns=turns, limit=100.0,
    )  # fmt: skip
    assert {n for n in set(os.listdir("/dev/shm")) - before if "psplus" in n} == set()  # noqa: PTH208


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ever_smaller_tensors(store: str) -> list[int]:
    begin(store)
    sizes = []
    for turn in range(2000):
        dist.all_reduce(torch.ones(30000 - turn, 4))
        if turn in (200, 1999):
            gc.collect()
            sizes.append(resident_bytes())
    dist.destroy_process_group()
    return sizes


def test_c70_memory_does_not_grow_with_varying_sizes(
    workers: Callable[..., Any], store: str
) -> None:
    for early, late in workers(ever_smaller_tensors, 2, store=store):
        assert late - early < 50e6


def meet_a_death(store: str, victim: int, moment: str, how: str, seconds: float) -> list[Any]:
    rank, _ = begin(store, seconds)
    dist.all_reduce(torch.ones(10))
    number = signal.SIGKILL if how == "killed" else signal.SIGSTOP
    if rank == victim:
        if moment == "before":
            os.kill(os.getpid(), number)
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    if moment == "before":
        time.sleep(0.3)
    begun = time.monotonic()
    try:
        # In a collective: the victim sends and receives all the time until it is hit.
        for _ in range(1_000_000):
            dist.all_reduce(torch.ones(100_000))
            if time.monotonic() - begun > 20:
                break
            finished = time.monotonic()
    except dist.DistBackendError as error:
        since = time.monotonic() - (finished if moment == "in" else begun)
        again = time.monotonic()
        with pytest.raises(dist.DistBackendError):
            dist.barrier()
        assert time.monotonic() - again < 0.5, "a lost group fails at once"
        begun = time.monotonic()
        dist.destroy_process_group()
        return [str(error), since, time.monotonic() - begun]
    return ["no error", 0.0, 0.0]


@pytest.mark.parametrize("moment", ["before", "in"])
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_lost_rank_is_named_in_time(clean_job: Path, store: str, how: str, moment: str) -> None:
    seconds = 30.0 if how == "killed" else 2.0
    keywords = {"store": store, "victim": 1, "moment": moment, "how": how, "seconds": seconds}
    processes = [
        start_worker(meet_a_death, rank, 3, clean_job, "lost", **keywords) for rank in range(3)
    ]
    try:
        for rank in (0, 2):
            processes[rank].wait(60)
    finally:
        for process in processes:
            process.kill()
        ended = wait_workers(processes, clean_job, 10)
    for rank in (0, 2):
        assert ended[rank].result is not None, ended[rank].stderr
        message, waited, destroyed = ended[rank].result
        assert "rank 1" in message
        assert waited < (1.0 if how == "killed" else seconds + 1.0)
        assert destroyed < 2.0


def many_threads(store: str, placement: str) -> bool:
    rank, size = begin(store, placement=placement)
    groups = [dist.new_group() for _ in range(4)] + [dist.new_group([0, 2])]
    failures: list[BaseException] = []

    def work_in(group: Any, seed: int, ranks: list[int]) -> None:
        try:
            for turn in range(60):
                n = 1 + (turn * 977 + seed) % 30_000
                tensor = torch.arange(n) * (rank + 1) + seed
                pending = dist.all_reduce(tensor, group=group, async_op=turn % 2 == 0)
                if pending is not None:
                    pending.wait()
                weight = sum(r + 1 for r in ranks)
                assert torch.equal(tensor, torch.arange(n) * weight + seed * len(ranks))
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work_in, args=(group, i, list(range(size))))
        for i, group in enumerate(groups[:4])
    ]
    if rank != 1:
        threads.append(threading.Thread(target=work_in, args=(groups[4], 9, [0, 2])))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("placement", ["000", "001"])
def test_overlapping_groups_on_several_threads(
    workers: Callable[..., Any], store: str, placement: str
) -> None:
    assert all(workers(many_threads, 3, store=store, placement=placement))


def callbacks_that_wait(store: str, placement: str) -> list[float]:
    rank, size = begin(store, placement=placement)
    results: list[float] = []
    total = float(size)

    def after(count: int, how: str, then: Callable[[Any], Any] | None = None) -> Any:
        """An all_reduce whose callback starts another one and waits, ``count`` deep."""
        tensor = torch.ones(50_000)

        def callback(future: Any) -> Any:
            results.append(float(future.value()[0][0]))
            if count == 0:
                return future.value()[0]
            if how == "sync":
                inner = torch.ones(70)
                dist.all_reduce(inner)
                results.append(float(inner[0]))
            elif how == "work":
                inner = torch.ones(70)
                dist.all_reduce(inner, async_op=True).wait()
                results.append(float(inner[0]))
            return after(count - 1, how).wait()

        return dist.all_reduce(tensor, async_op=True).get_future().then(callback)

    for how in ("sync", "work", "future"):
        after(3, how).wait()
    assert set(results) == {total}, results

    # Queued before the callback runs, so that nothing that the callback calls could help.
    first = dist.all_reduce(torch.ones(2_000_000), async_op=True)
    second = dist.all_reduce(torch.ones(10), async_op=True)
    fut = second.get_future()
    chained = first.get_future().then(lambda _: (fut.wait(), second.wait())[0])
    chained.wait()

    if placement == "01":  # messages between hosts are Gloo's, which have no futures
        dist.destroy_process_group()
        return results

    # A callback of a message waits for another message.
    a, b = torch.zeros(3), torch.zeros(4)
    request = dist.irecv(a, 1 - rank)
    chained = request.get_future().then(lambda _: dist.recv(b, 1 - rank))
    for n in (3, 4):
        dist.send(torch.full((n,), float(n)), 1 - rank)
    chained.wait()
    assert a.tolist() == [3.0] * 3
    assert b.tolist() == [4.0] * 4
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("placement", ["00", "01"])
def test_callbacks_may_start_collectives_and_wait(
    workers: Callable[..., Any], store: str, placement: str
) -> None:
    workers(callbacks_that_wait, 2, store=store, placement=placement, limit=50.0)


def destroy_beside_a_call(store: str, placement: str) -> float:
    rank, size = begin(store, placement=placement)
    group = dist.new_group()
    summed(rank, size)
    if rank == 0:
        entered = threading.Event()

        def call() -> None:
            entered.set()
            summed(rank, size, group=group)

        thread = threading.Thread(target=call)
        thread.start()
        entered.wait(10)
        time.sleep(0.2)  # it waits for rank 1 on its own thread
        begun = time.monotonic()
        dist.destroy_process_group(group)
        seconds = time.monotonic() - begun
        thread.join(10)
    else:
        time.sleep(1.0)
        summed(rank, size, group=group)
        seconds = 0.0
    dist.barrier()
    dist.destroy_process_group()
    return seconds


@pytest.mark.parametrize("placement", ["00", "01"])
def test_destroy_returns_when_another_threads_call_has_ended(
    workers: Callable[..., Any], store: str, placement: str
) -> None:
    seconds = workers(destroy_beside_a_call, 2, store=store, placement=placement)[0]
    assert 0.1 < seconds < 2.5


def end_in_a_call(store: str, placement: str, how: str) -> list[float]:
    """Rank 0 ends a group in which a thread of its own waits for rank 1, which does not come."""
    rank, _ = begin(store, placement=placement)
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    if rank == 1:
        dist.barrier()
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            dist.all_reduce(torch.ones(3), group=group)
        dist.destroy_process_group()
        return [0.0, 0.0]
    raised: list[float] = []

    def call() -> None:
        with pytest.raises(
            (dist.DistBackendError, ValueError)
        ):  # torch's own for a destroyed group
            dist.all_reduce(torch.ones(3), group=group)
        raised.append(time.monotonic())

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.3)
    begun = time.monotonic()
    if how == "abort":
        group._get_backend(torch.device("cpu")).abort()
    else:
        dist.destroy_process_group(group)
    ended = time.monotonic()
    thread.join(10)
    dist.barrier()
    dist.destroy_process_group()
    return [raised[0] - begun, ended - begun]


@pytest.mark.parametrize("placement", ["00", "01"])
@pytest.mark.parametrize(("how", "limit"), [("abort", 1.0), ("destroy", 6.0)])
def test_a_call_without_an_answer_holds_nobody_up(
    workers: Callable[..., Any], store: str, placement: str, how: str, limit: float
) -> None:
    raised, ended = workers(end_in_a_call, 2, store=store, placement=placement, how=how)[0]
    assert raised < limit
    assert ended < limit


def destroy_from_a_callback(store: str) -> float:
    begin(store)
    ended = threading.Event()

    def callback(future: Any) -> None:
        dist.destroy_process_group()
        ended.set()

    begun = time.monotonic()
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    future = work.get_future().then(callback)
    future.wait()
    assert ended.wait(10)
    assert not dist.is_initialized()
    return time.monotonic() - begun


def test_a_callback_may_destroy_the_group(workers: Callable[..., Any], store: str) -> None:
    assert max(workers(destroy_from_a_callback, 2, store=store)) < 3.0


@pytest.mark.parametrize("kind", ["fifo", "terminal"])
def test_an_invitation_to_something_else_does_not_block(clean_job: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(clean_job / "pipe")
        fd = os.open(clean_job / "pipe", os.O_RDWR)
    else:
        fd, other = os.openpty()
        os.close(other)
    store = dist.HashStore()
    store.set("psplus/memory", struct.pack("qqQQ", os.getpid(), fd, 1, 2) + b"host")
    store.set("psplus/verdict", "apart")
    store.set("psplus/host/0", "another")
    store.set("psplus/together/0", "no")
    begun = time.monotonic()
    group = join(store, 1)
    assert not group.shares_memory
    assert store.get("psplus/joined/1") == b"apart"
    assert time.monotonic() - begun < 2
    os.close(fd)


def join(store: dist.Store, rank: int) -> Any:
    from psplus import _C

    return _C.ProcessGroupPSPlus(
        store=store,
        rank=rank,
        size=2,
        timeout=timedelta(seconds=10),
        host_id="host",
        global_ranks=[0, 1],
        make_gloo=lambda *_: None,
        make_nccl=lambda *_: None,
    )


def test_a_store_serves_one_group_only() -> None:
    store = dist.HashStore()
    groups: list[Any] = [None, None]
    first = threading.Thread(target=lambda: groups.__setitem__(0, join(store, 0)))
    first.start()
    groups[1] = join(store, 1)
    first.join(10)
    assert groups[0].shares_memory
    with pytest.raises(ValueError, match=r"rank 1 .* process \d+ already"):
        join(store, 1)
    for group in groups:
        group.shutdown()
    del group
    groups.clear()
    gc.collect()
    with pytest.raises(ValueError, match="keys of an earlier group"):
        join(store, 1)
