"""Dense values of the key-value store, and the work that their operations return."""

import asyncio
import contextlib
import io
import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from workers import REPOSITORY, stop_process

import psplus

Workers = Callable[..., list[Any]]

PUSHES = 40


def use_every_operation(server: str) -> dict[str, Any]:
    """One worker; what it finds is the same with a server and without."""
    kv = psplus.KVStore(psplus.connect(server=server))
    initial = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    w = kv.dense("w", initial)
    found: dict[str, Any] = {"initial": w.pull()}
    initial.fill_(99.0)  # it was copied
    w.push(torch.ones(2, 3), scale=2.0)
    out = torch.empty(3, 2).t()  # not contiguous
    assert w.pull(out=out) is out
    found["pushed"] = out.clone()
    work = w.push(torch.full((2, 3), 5.0), async_op=True)
    pulled = w.pull(async_op=True)
    found["result"] = pulled.wait()
    assert work.done()
    assert work.wait() is None
    w.set(torch.zeros(2, 3))
    w.push(torch.ones(2, 3))
    found["set"] = w.pull(consistent=True)
    found["version"], found["step_vector"] = w.version, w.step_vector
    with pytest.raises(psplus.Error, match=r"update of 'w' holds a NaN or an infinity"):
        w.push(torch.full((2, 3), float("nan")))
    with pytest.raises(psplus.ConfigError, match=r"update is .* of shape \[3\]"):
        w.push(torch.ones(3))
    with pytest.raises(psplus.ConfigError, match=r"out is .*float64"):
        w.pull(out=torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(psplus.ConfigError, match="scale must be a finite number, got nan"):
        w.push(torch.ones(2, 3), scale=float("nan"))
    with pytest.raises(psplus.ConfigError, match="'w' has been declared"):
        kv.dense("w", torch.ones(1))
    found["unchanged"] = w.pull()
    half = kv.dense("half", torch.zeros(3, dtype=torch.bfloat16))
    for _ in range(3):
        half.push(torch.full((3,), 0.5, dtype=torch.bfloat16))
    found["half"] = half.pull()
    kv.close()
    kv.close()
    with pytest.raises(psplus.Error, match="the store of 'w' has been closed"):
        w.push(torch.ones(2, 3))
    return found


@pytest.mark.parametrize("server", ["auto", "always"])
def test_one_worker(workers: Workers, server: str) -> None:
    (found,) = workers(use_every_operation, 1, server=server)
    initial = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert torch.equal(found["initial"], initial)
    assert torch.equal(found["pushed"], initial + 2)
    assert torch.equal(found["result"], initial + 7)
    assert torch.equal(found["set"], torch.ones(2, 3))
    assert torch.equal(found["unchanged"], torch.ones(2, 3))
    assert torch.equal(found["half"], torch.full((3,), 1.5, dtype=torch.bfloat16))
    assert found["version"] == 3  # sets do not count
    assert found["step_vector"].tolist() == [3]


def push_from_threads(kill: bool) -> dict[str, Any]:
    """Two threads a worker, integers, so that the sum does not depend on the order."""
    kv = psplus.KVStore()
    rank = int(os.environ["RANK"])
    # Large enough for the stores that go past the caches.
    small, large = kv.dense("small", torch.zeros(5)), kv.dense("large", torch.zeros(3 << 20))

    def push(value: psplus.DenseValue, asynchronously: bool) -> None:
        for n in range(PUSHES):
            update = torch.full(value.shape, float(n + rank))
            if asynchronously:
                value.push(update, scale=2.0, async_op=True)
                del update  # the work keeps it
            else:
                value.push(update, scale=2.0)

    threads = [
        threading.Thread(target=push, args=(value, asynchronously))
        for value in (small, large)
        for asynchronously in (False, True)
    ]
    for thread in threads:
        thread.start()
    if kill and rank == 0:
        native = psplus.session._attachment.native
        assert native is not None
        for _ in range(3):
            os.kill(native.server_pid, signal.SIGKILL)
            small.pull()  # waits for the successor
    for thread in threads:
        thread.join()
    for value in (small, large):
        value.pull()  # own pushes are in
    wait_for_all([small, large], 2 * PUSHES * int(os.environ["WORLD_SIZE"]))
    result = large.pull(consistent=True)
    found = {
        "small": small.pull(),
        "large": [result.min().item(), result.max().item()],
        "versions": [small.version, large.version],
        "step_vector": small.step_vector,
    }
    kv.close()
    return found


def wait_for_all(values: list[psplus.DenseValue], pushes: int) -> None:
    ended = threading.Event()
    while any(value.version < pushes for value in values):
        assert not ended.wait(0.01)


@pytest.mark.parametrize("kill", [False, True])
def test_pushes_of_all_threads_and_workers_add_up(workers: Workers, kill: bool) -> None:
    for found in workers(push_from_threads, 2, kill=kill):
        total = sum(2.0 * 2.0 * (n + rank) for n in range(PUSHES) for rank in range(2))
        assert torch.equal(found["small"], torch.full((5,), total))
        assert found["large"] == [total, total]
        assert found["versions"] == [4 * PUSHES, 4 * PUSHES]
        assert found["step_vector"].tolist() == [2 * PUSHES, 2 * PUSHES]


def wait_in_every_way() -> bool:
    session = psplus.connect(server="always")
    kv = psplus.KVStore(session)
    w = kv.dense("w", torch.zeros(4))
    native = psplus.session._attachment.native
    assert native is not None
    server = native.server_pid
    stop_process(server)
    try:
        # Two slots are free; the third push waits for the server.
        works = [w.push(torch.ones(4), async_op=True) for _ in range(3)]
        works[1].wait()
        with pytest.raises(psplus.TimeoutError, match=r"push of 'w' has not ended after 0.1 s"):
            works[2].wait(timeout=0.1)
        assert not works[2].done()
        reached = threading.Event()
        works[2].future().then(lambda _: reached.set())

        async def cancelled() -> None:
            await asyncio.wait_for(works[2], 0.1)  # type: ignore[arg-type]

        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(cancelled())
    finally:
        os.kill(server, signal.SIGCONT)
    works[2].future().wait()
    assert reached.wait(10.0)

    async def pull() -> torch.Tensor:
        return await w.pull(async_op=True)

    assert torch.equal(asyncio.run(pull()), torch.full((4,), 3.0))
    bad = w.push(torch.full((4,), float("inf")), async_op=True)
    with pytest.raises(psplus.Error, match="holds a NaN or an infinity"):
        bad.wait()
    with pytest.raises(psplus.Error, match="holds a NaN or an infinity"):
        bad.future().wait()
    allowing = psplus.KVStore(session, nonfinite="allow")
    v = allowing.dense("v", torch.zeros(1))
    v.push(torch.full((1,), float("inf")))
    assert torch.isinf(v.pull()).item()
    allowing.close()
    kv.close()
    return True


def test_work(workers: Workers) -> None:
    assert workers(wait_in_every_way, 1) == [True]


def push_a_wrong_shape() -> list[float]:
    """Rank 1's mistake is its own: it is told, and everybody goes on."""
    kv = psplus.KVStore()
    w = kv.dense("w", torch.zeros(2, 2))
    if os.environ["RANK"] == "1":
        with pytest.raises(psplus.ConfigError, match=r"update is .* of shape \[4\]"):
            w.push(torch.ones(4))
    w.push(torch.ones(2, 2))
    while w.version < 2:
        w.pull()
    values = w.pull().flatten().tolist()
    kv.close()
    return values


def test_c26_pushes_add_where_there_is_no_optimizer(workers: Workers) -> None:
    assert workers(push_a_wrong_shape, 2) == [[2.0] * 4] * 2


def push_more_than_two_gigabytes() -> bool:
    n = 2**29 + 4
    kv = psplus.KVStore(psplus.connect(server="always"), nonfinite="allow")
    w = kv.dense("w", torch.zeros(n))
    update = torch.ones(n)
    update[-4:] = torch.arange(4.0) + 2
    w.push(update)
    pulled = w.pull(out=update)
    assert all(bool((piece == 1).all()) for piece in pulled[:-4].split(2**26))
    assert torch.equal(pulled[-4:], torch.arange(4.0) + 2)
    kv.close()
    return True


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_c36_a_value_over_two_gigabytes(workers: Workers) -> None:
    assert workers(push_more_than_two_gigabytes, 1, limit=280.0) == [True]


def push_beside_three_others() -> list[int]:
    kv = psplus.KVStore()
    values = [kv.dense(name, torch.zeros(5000)) for name in ("a", "b")]
    for turn in range(PUSHES):
        values[turn % 2].push(torch.full((5000,), 1.0))
    while any(value.version < 4 * PUSHES // 2 for value in values):
        values[0].pull()
    found = [int(value.pull().unique().item()) for value in values]
    kv.close()
    return found


def test_c71_one_server_thread_serves_four_workers(workers: Workers) -> None:
    assert workers(push_beside_three_others, 4) == [[2 * PUSHES] * 2] * 4


def declare_differently() -> str:
    kv = psplus.KVStore(timeout=10.0)
    kv.dense("w", torch.zeros(4))
    rank = int(os.environ["RANK"])
    try:
        kv.dense("v", torch.zeros(4 + rank))
        return "well"
    except psplus.LayoutMismatch as error:
        return str(error)
    finally:
        kv.close()


def test_a_different_shape_is_named(workers: Workers) -> None:
    told = workers(declare_differently, 2)
    assert sorted(text == "well" for text in told) == [False, True]
    (error,) = (text for text in told if text != "well")
    assert "'v'" in error or "v of shape" in error, error


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (torch.zeros(2, dtype=torch.int64), r"'w' is torch.int64; servers hold float32"),
        (torch.zeros(0), "'w' has no elements"),
        (torch.zeros(2).to_sparse(), "'w' is torch.sparse_coo on cpu"),
        (torch.zeros(2, device="meta"), "'w' is torch.strided on meta"),
    ],
)
def test_what_servers_cannot_hold(tensor: torch.Tensor, told: str) -> None:
    with pytest.raises(psplus.ConfigError, match=told):
        psplus.KVStore().dense("w", tensor)


def test_wrong_arguments() -> None:
    with pytest.raises(psplus.ConfigError, match="nonfinite must be 'raise' or 'allow'"):
        psplus.KVStore(nonfinite="skip")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a tensor, got list"):
        psplus.KVStore().dense("w", [1.0])  # type: ignore[arg-type]


def run_a_block(number: int) -> str:
    """A block of the page as it stands there; what it prints."""
    page = (REPOSITORY / "docs" / "kv.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(blocks[number], {})
    return said.getvalue()


@pytest.mark.parametrize("world", [1, 2])
def test_the_blocks_of_the_page_run(workers: Workers, world: int) -> None:
    for said in workers(run_a_block, world, number=0):
        value, version = said.split()
        # Pushes so far, of all workers: another's may have come since the value was read.
        assert 1 <= 2 * float(value) <= int(version) <= world
    for said in workers(run_a_block, world, number=1):
        done, pulled, awaited = said.splitlines()
        assert done == "True"
        assert pulled in [f"pulled {number}.0" for number in range(1, world + 1)]
        assert awaited in [f"awaited {number}.0" for number in range(1, world + 1)]
