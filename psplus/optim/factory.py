"""From an optimizer to a distributed one."""

from collections.abc import Iterator
from functools import partial
from typing import Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch

from psplus import config
from psplus.errors import ConfigError
from psplus.lr_scale import Policy
from psplus.optim import guard
from psplus.optim import nonfinite as nonfinite_policy
from psplus.optim.absence import AbsenceWatch
from psplus.optim.blob import check_same, describe
from psplus.optim.buffers import SharedBuffers, declare, find_buffers
from psplus.optim.checks import (
    check_for_server,
    check_model,
    check_optimizer,
    check_parameters,
    check_trainable,
    declare_parameters,
)
from psplus.optim.distributed_optimizer import DistributedOptimizer
from psplus.optim.engine import Engine, LocalEngine
from psplus.optim.guard import OutsideWrites
from psplus.optim.names import NamedParameters, name_group, name_parameters
from psplus.optim.nonfinite import NonFinite
from psplus.optim.placed_engine import PlacedEngine
from psplus.optim.placement import PlacedOptimizer, check_placement
from psplus.optim.server_engine import ServerEngine
from psplus.optim.turn import TurnState
from psplus.schemes.base import Scheme
from psplus.schemes.resolve import resolve
from psplus.session import Session, check_timeout, connect

__all__ = ["wrap"]


def wrap(
    optimizer: torch.optim.Optimizer,
    scheme: str | Scheme = "ps+",
    *,
    model: torch.nn.Module | None = None,
    named_parameters: NamedParameters | None = None,
    session: Session | None = None,
    staleness_bound: int | None = None,
    lr_scale: str | Policy | None = None,
    local_scale: float | None = None,
    placement: Literal["worker", "server"] = "worker",
    pull: Literal["auto", "mapped", "buffered", "jit"] = "auto",
    nonfinite: NonFinite = "skip",
    outside_writes: OutsideWrites = "raise",
    timeout: float = 60.0,
    straggler_timeout: float = 1800.0,
) -> DistributedOptimizer:
    """Make an optimizer's steps shared between workers.

    With one worker the inner optimizer runs as it is, bit for bit. With several, a job's first
    call waits until all have come, and everybody begins with rank 0's parameters, buffers (of
    ``model``), hyper-parameters and optimizer state. Wrappers match between workers by order of
    construction, parameters within one by name.

    Rank and world size are the default process group's if there is one, else torchrun's variables.

    Args:
        optimizer: Any optimizer that behaves like those of ``torch.optim``, over dense CPU
            parameters of dtype float32, float64, bfloat16, float16, complex64 or complex128.
        scheme: ``"bsp"``, ``"ssp"``, ``"asp"``, ``"ps+"``, or an object of `psplus.schemes`.
        model: Gives parameters their names. Its buffers, such as BatchNorm's, are shared too: in
            `synchronize()` and `evaluation()` they are the mean over all workers (integers: rank
            0's), in between each worker goes on with its own.
        named_parameters: Names instead of the model's. With neither they are ``group.index``.
        session: From `connect()`; by default a server is used when there are several workers.
        staleness_bound: Steps that a worker may be ahead of the slowest (``"ssp"``, ``"ps+"``).
        lr_scale: Policy that scales an update by its staleness: a name or a callable, see
            `psplus.lr_scale`. Default: the scheme's own.
        local_scale: How much of its own pending update a worker sees (``"ps+"``); default 1.
        placement: Where the optimizer steps: in each ``"worker"``, whose updates are pushed, or on
            the ``"server"``, to which gradients are pushed and which keeps the optimizer's state:
            SGD, Adam, AdamW and Adagrad under ``"bsp"``, ``"ssp"`` and ``"asp"``.
        pull: ``"mapped"`` (the default) reads the server's memory, ``"buffered"`` has the server
            copy a cut for each pull.
        nonfinite: What a step with a NaN or an infinity in a gradient does: ``"skip"`` changes no
            state, pushes nothing, counts and warns; ``"raise"``; ``"allow"`` does not look.
        outside_writes: What a parameter does that somebody else has written since the last step:
            ``"raise"`` at the next step, or ``"ignore"``.
        timeout: Longest silence of those waited for, in seconds.
        straggler_timeout: Longest wait for a live but slow worker, in seconds.

    Raises:
        psplus.ConfigError: For wrong arguments, settings or parameters; the message has the fix.
        psplus.LayoutMismatch: If workers disagree on a parameter's shape or dtype.
        psplus.TimeoutError: If workers do not come; the message says how many joined and who is
            missing.
    """
    check_optimizer(optimizer)
    if isinstance(optimizer, DistributedOptimizer):
        raise ConfigError("this optimizer is wrapped already; wrap the plain one")
    _check_free(optimizer)
    if pull not in ("auto", "mapped", "buffered"):
        raise ConfigError(f"pull={pull!r} is not in this version; use 'mapped' or 'buffered'")
    nonfinite_policy.check_policy(nonfinite)
    guard.check_policy(outside_writes)
    timeout = check_timeout("timeout", timeout)
    straggler_timeout = check_timeout("straggler_timeout", straggler_timeout)
    resolved = resolve(
        scheme, staleness_bound=staleness_bound, lr_scale=lr_scale, local_scale=local_scale
    )
    check_placement(placement, optimizer, resolved)
    check_model(model)
    if isinstance(named_parameters, Iterator):
        named_parameters = list(named_parameters)  # read again when a group is added
    parameters = name_parameters(optimizer, model, named_parameters)
    check_parameters(parameters)
    check_trainable(parameters)

    session = connect(timeout=timeout) if session is None else session
    if not isinstance(session, Session):
        raise TypeError(f"session must come from psplus.connect(), got {session!r}")
    job = config.read()
    if not session.uses_server(job):
        return _wrapped(optimizer, LocalEngine(optimizer, parameters, nonfinite))
    check_for_server(optimizer, parameters, model, job.world_size)
    native = session.attach(straggler_timeout=straggler_timeout)
    buffers = find_buffers(model)
    placed = PlacedOptimizer(optimizer) if placement == "server" else None
    with session.opening() as ordinals:
        ordinal = next(ordinals)
        stream = native.open_stream(
            ordinal=ordinal,
            mode=resolved.mode,
            bound=resolved.staleness_bound,
            buffered=pull == "buffered",
            params=declare_parameters(parameters),
            blob=describe(
                optimizer,
                optimizer.param_groups,
                parameters,
                model,
                resolved.name,
                job.rank,
                with_state=placed is None,
            ),
            rule=None if placed is None else placed.rule,
            planes=0 if placed is None else placed.add(parameters),
            timeout=timeout,
            straggler_timeout=straggler_timeout,
        )

        def open_buffers() -> SharedBuffers | None:
            if not buffers:
                return None
            own_stream = native.open_stream(
                ordinal=next(ordinals),
                mode=resolved.mode,
                bound=None,
                buffered=False,
                params=declare(buffers),
                blob=None,
                timeout=timeout,
                straggler_timeout=straggler_timeout,
            )
            return SharedBuffers(own_stream, buffers)

        came_late = session.came_late(ordinal, stream)
        begins = ordinal == 0 and not came_late
        workers = job.world_size if begins else native.num_workers
        if stream.blob is not None:
            check_same(stream.blob, optimizer, resolved.name, job.rank)
        state = TurnState(optimizer, parameters, stream, resolved.policy, nonfinite, job.rank)
        try:
            engine = (ServerEngine if placed is None else partial(PlacedEngine, placed))(
                native,
                state,
                resolved,
                came_late,
                AbsenceWatch(stream, job.rank, workers),
                outside_writes,
                model,
                open_buffers,
                lambda g: name_group(optimizer, g, model, named_parameters),
            )
        except BaseException:
            state.stop()
            raise
    return _wrapped(optimizer, engine)


# Who steps an optimizer, so that nobody else does beside it: their pushes would count twice.
_wrappers: WeakKeyDictionary[torch.optim.Optimizer, ReferenceType[DistributedOptimizer]] = (
    WeakKeyDictionary()
)


def _check_free(optimizer: torch.optim.Optimizer) -> None:
    reference = _wrappers.get(optimizer)
    wrapper = None if reference is None else reference()
    if wrapper is not None and not wrapper.closed:
        raise ConfigError(
            "this optimizer is wrapped already, and that wrapper is still open; close() it first"
        )


def _wrapped(optimizer: torch.optim.Optimizer, engine: Engine) -> DistributedOptimizer:
    wrapper = DistributedOptimizer(optimizer, engine)
    _wrappers[optimizer] = ref(wrapper)
    return wrapper
