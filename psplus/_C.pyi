"""Native half of psplus: sessions with the host's server, dense streams, kernels.

Every call that waits releases the GIL, has a time-out in seconds of silence, and raises
``psplus.TimeoutError``, ``psplus.PeerLost``, ``psplus.LayoutMismatch``, ``psplus.ConfigError`` or
``psplus.Error`` (the classes handed over by ``set_error_types``).
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor
from torch._C._distributed_c10d import Backend, Store

def set_error_types(types: dict[str, type[Exception]]) -> None:
    """Hand over the exception classes: keys error, timeout, peer_lost, layout_mismatch, config."""

def kernel_isa() -> str:
    """Name of the instruction set that the kernels use on this machine."""

class SgdOptions:
    """Options of a fused step, as ``torch.optim.SGD`` names them."""

    def __init__(
        self,
        *,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        maximize: bool,
    ) -> None: ...

class AdamOptions:
    """The same for ``Adam`` and, with ``decoupled`` weight decay, ``AdamW``."""

    def __init__(
        self,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        amsgrad: bool,
        maximize: bool,
    ) -> None: ...

class AdagradOptions:
    """The same for ``Adagrad``."""

    def __init__(
        self, *, lr: float, lr_decay: float, eps: float, weight_decay: float, maximize: bool
    ) -> None: ...

class StepGroup:
    """One group of parameters at one step: those with a gradient, and what belongs to them.

    Args:
        options: Hyper-parameters of the group, now.
        indices: Places of the parameters in the list given to `FusedStep.prepare`.
        gradients: One a parameter.
        states: Columns of state tensors, each as long as ``indices``: ``momentum_buffer``;
            ``exp_avg``, ``exp_avg_sq`` (and ``max_exp_avg_sq``); ``sum``. None in the column of
            momentum buffers: there is none yet, and the step makes one.
        steps: Step counters, one a parameter; none for SGD.
    """

    def __init__(
        self,
        *,
        options: SgdOptions | AdamOptions | AdagradOptions,
        indices: Sequence[int],
        gradients: Sequence[Tensor],
        states: Sequence[Sequence[Tensor | None]],
        steps: Sequence[Tensor],
    ) -> None: ...

class FusedStep:
    """A step that computes updates, pushes them and pulls in one pass over memory."""

    @staticmethod
    def prepare(params: Sequence[Tensor], groups: Sequence[StepGroup]) -> FusedStep | None:
        """None if a tensor is not dense, contiguous and of a dtype with a kernel.

        ``params`` are all of a stream, in its order. Changes nothing.
        """
    @property
    def made(self) -> list[tuple[int, Tensor]]:
        """Momentum buffers that run() fills for the first time, by place of their parameter."""
    def run(self, stream: DenseStream, local_scale: float | None) -> int:
        """Count the step, write updates into the next slot, and state.

        With a ``local_scale`` also parameter = W - local_scale * update; without one parameters
        stay. Parameters in no group are not pushed, and take W. Returns the place of the first
        parameter whose update is not finite, -1 if all are.
        """

class GradientWatch:
    """Looks at gradients as backward passes accumulate them, while they are in cache.

    Args:
        params: Leaf tensors. A gradient that was made or changed without a backward pass is looked
            at when it is asked for.
    """

    def __init__(self, params: Sequence[Tensor]) -> None: ...
    def first_nonfinite(self) -> int:
        """Place of the first parameter whose gradient has a NaN or an infinity, -1 if none does.

        -2 when a gradient is not a dense CPU tensor of a dtype that the kernels know.
        """
    def stop(self) -> None:
        """Look no more. Idempotent."""

class Session:
    """This process's attachment to its host's server, which is started when none is there."""

    def __init__(
        self,
        *,
        job_dir: str,
        server_path: str,
        rank: int,
        world_size: int,
        timeout: float = 60.0,
        straggler_timeout: float = 1800.0,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def num_workers(self) -> int:
        """Workers that are attached and alive now."""
    @property
    def server_pid(self) -> int: ...
    @property
    def server_restarts(self) -> int:
        """Take-overs of a killed server that this session has seen."""
    def open_stream(
        self,
        *,
        ordinal: int,
        mode: str,
        bound: int | None,
        buffered: bool,
        params: Sequence[tuple[str, str, Sequence[int]]],
        blob: bytes | None,
        rule: str | None = None,
        planes: int = 0,
        timeout: float = 60.0,
        straggler_timeout: float = 1800.0,
        chunk_bytes: int = 65536,
    ) -> DenseStream:
        """Register the ``ordinal``-th stream of the job, with one extent of ``params``.

        Args:
            ordinal: Number of this stream by order of construction, from 0; equal on all workers.
            mode: ``"async"`` (ASP, SSP, PS+) or ``"bsp"``.
            bound: Staleness bound in steps; ``None``: none.
            buffered: Cuts of the server instead of a mapped shard.
            params: Name, dtype name (``"float32"``) and shape of each parameter.
            blob: What others shall find in ``DenseStream.blob``: hyper-parameters and state; the
                server keeps that of the rank whose values count.
            rule: ``"sgd"``, ``"adam"`` or ``"adagrad"``: pushes are gradients, and the servers
                step; ``None``: pushes are updates.
            planes: State tensors that the servers keep for each parameter.
            timeout: Longest silence of whoever is waited for, in seconds.
            straggler_timeout: Longest wait for a live but slow worker, in seconds.
            chunk_bytes: Copy-on-write unit of the shard, a multiple of 64.

        The first stream of a job waits until ``world_size`` workers have registered it.
        """
    def close(self, timeout: float = 5.0) -> None:
        """Flush, detach and stop the session's thread. Idempotent."""

class Observation:
    """What a worker knows when it has taken a snapshot."""

    @property
    def observed(self) -> int:
        """Foreign pushes between this worker's last two snapshots."""
    @property
    def actual(self) -> int:
        """Staleness that the server reported for the last applied push; -1 before the first."""
    @property
    def step(self) -> int:
        """Steps this worker has pushed or is about to push: 1 for the first."""
    @property
    def step_vector(self) -> list[int]:
        """Gate counter of each rank, 0 for absent ones; length at least world_size."""
    @property
    def rates(self) -> list[float]:
        """Pushes a second of each rank over its last 16 pushes, 0.0 while unknown."""
    @property
    def num_workers(self) -> int:
        """Workers that take part in this stream now."""

class DenseStream:
    """One ``wrap``: push slots, gates, step vector and shard of a set of dense parameters.

    Tensor lists are in the order of ``params`` of ``open_stream``, then of each ``add_extent``:
    dense CPU tensors with the declared dtype and shape. Contiguous and channels_last tensors are
    used in place; others are handled by a copy. Written tensors have their version counter bumped.
    """

    @property
    def provides(self) -> bool:
        """Whether the last extent's first values are this worker's.

        For the stream's first extent: it must call publish_values().
        """
    @property
    def blob(self) -> bytes | None:
        """The last extent's blob of the rank whose values count; None when this worker provides."""
    @property
    def rejoined(self) -> bool:
        """Whether the server already held values when this worker came."""
    @property
    def steps(self) -> int:
        """Steps pushed by this worker."""
    @property
    def total_pushes(self) -> int:
        """Pushes of all workers that are applied."""
    @property
    def bytes_pushed(self) -> int: ...
    @property
    def bytes_pulled(self) -> int: ...
    @property
    def wait_seconds(self) -> float: ...
    @property
    def retries(self) -> int:
        """Chunks read again because the server changed them meanwhile."""
    def add_extent(
        self,
        params: Sequence[tuple[str, str, Sequence[int]]],
        blob: bytes | None,
        tensors: Sequence[Tensor],
        *,
        planes: Sequence[Sequence[Tensor]] = (),
        counts: Sequence[int] = (),
    ) -> None:
        """Append parameters; tensor lists are longer by them from here on. Between two steps.

        Workers append the same ones in the same order, each at a moment of its own. The first to
        come gives them the values of ``tensors``, the others find the servers' values in them.
        Nothing has been appended when it raises.

        Args:
            params: As for ``open_stream``.
            blob: Likewise.
            tensors: The parameters.
            planes: Where the servers step: state to begin with, by plane and parameter.
            counts: The steps that are in it, by parameter.
        """
    def publish_values(self, params: Sequence[Tensor]) -> None:
        """Make these values the global ones.

        An ordered batch that sets instead of adding; waits until it is applied. Not a step.
        """
    def publish_plane(self, plane: int, params: Sequence[Tensor], counts: Sequence[int]) -> None:
        """Set a plane of the servers' state, and the steps taken, by parameter.

        Extents without that plane stay as they are. Who provides an extent sets all planes before
        its values.
        """
    def read_state(self, planes: Sequence[Sequence[Tensor]]) -> list[int]:
        """Copy the servers' state, as it is now, into tensors by plane and parameter.

        Returns the steps taken, by parameter. Tensors of planes that an extent lacks stay as they
        are. Each chunk is consistent in itself.
        """
    def wait_initialised(self) -> bool:
        """Wait until the servers hold somebody's values; True then.

        False at once when this worker has to publish_values() first, also because the worker that
        was to do so died: ``while not s.wait_initialised(): s.publish_values(params)``.
        """
    def begin_step(self) -> None:
        """The gradients at hand were computed on the last snapshot taken. Before all below."""
    def snapshot(self, params: Sequence[Tensor]) -> None:
        """Remember the parameters as they are before the inner optimizer's step."""
    def write_delta(self, params: Sequence[Tensor], carried: Sequence[bool]) -> int:
        """Delta = snapshot - parameter, in float32 (float64), into the next push slot.

        Waits until that slot is free. Parameters that are not carried are not pushed.
        Returns the index of the first parameter whose delta is not finite, -1 if all are.
        """
    def write_gradients(
        self,
        gradients: Sequence[Tensor],
        carried: Sequence[bool],
        options: Sequence[SgdOptions | AdamOptions | AdagradOptions],
        groups: Sequence[int],
    ) -> int:
        """Gradients and their hyper-parameters into the next push slot, for servers that step.

        ``groups`` has a place in ``options`` for each parameter; in place of a gradient that is not
        ``carried`` any tensor like it will do. Returns as write_delta() does.
        """
    @property
    def was_outvoted(self) -> bool:
        """Whether the last BSP step was taken with other hyper-parameters than this worker's."""
    def push_sum(self, values: Sequence[Tensor], scale: float, must_be_finite: bool) -> int:
        """Push ``values``: the servers add ``scale * values``, not divided by the workers.

        Returns the index of the first tensor that is not finite, -1 if all are; nothing is pushed
        for one that ``must_be_finite`` and is not. Counts as a step.
        """
    def write_nothing(self) -> None:
        """The next push is a skipped step: it counts and carries nothing."""
    def first_overflow(self, scale: float) -> int:
        """Index of the first parameter whose prepared update ``scale`` makes non-finite, or -1."""
    def publish(self, lam: float) -> None:
        """Publish the push prepared by write_delta() or write_nothing(), scaled by ``lam``."""
    def wait_round(self, lag: int) -> None:
        """Wait until own push ``steps - lag`` is applied, visible and released by the gate.

        ``lag`` 0: the last one published (BSP, SSP, ASP). PS+ calls it before publish(), where 0
        names the previous step's push. Counts below 1 return at once.
        """
    def refresh(self) -> None:
        """Wait until all own pushes are applied; observe() and pull() then show W as it is now.

        In buffered mode the reply to the last push may be older than what others have pushed since.
        """
    def observe(self) -> Observation:
        """Begin a snapshot: loads the step vector. Call before pull()."""
    def peek(self) -> Observation:
        """The last observation, with the newest ``actual`` and step vector; begins nothing."""
    def pull(self, params: Sequence[Tensor], local_scale: float) -> None:
        """Parameter = W - local_scale * (delta in the push slot that was written last).

        ``local_scale`` 0, and parameters that were not carried: parameter = W. W is the mapped
        shard or, in buffered mode, the cut that came with the last released push.
        """
    def pull_cut(self, params: Sequence[Tensor]) -> Observation:
        """Copy one cut, made between two batches, that contains all own pushes."""
    def arrive(self) -> None:
        """Stand at the next barrier() already, whose gates then do not wait for this worker."""
    def barrier(self) -> None:
        """Wait for all workers that have not closed this stream: the n-th calls match."""
    def step_vector(self) -> list[int]:
        """Gate counter of each rank now."""
    def close(self, timeout: float = 5.0) -> None:
        """Leave the gates of this stream once the published pushes are in. Idempotent."""

def await_callbacks(seconds: float) -> None:
    """Wait until no process group runs a callback of a future, at most so long."""

class ProcessGroupPSPlus(Backend):
    """The backend behind ``init_process_group("psplus")``."""

    def __init__(
        self,
        *,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        host_id: str,
        global_ranks: Sequence[int],
        make_gloo: Callable[[Store, int, int, timedelta, list[int]], Backend],
        make_nccl: Callable[[Store, int, int, timedelta, list[int]], Backend | None],
    ) -> None:
        """Meet the other ranks through ``store``, whose keys are this group's own.

        Ranks with equal ``host_id`` share memory if they can open it. ``make_gloo`` is called on
        all ranks when some are elsewhere, ``make_nccl`` with the first CUDA tensor; both with the
        store, rank, size, time-out and global ranks of this group or of one split from it.
        """
    @property
    def options(self) -> Backend.Options:
        """Time-out and global ranks, as of any backend of torch."""
    @property
    def shares_memory(self) -> bool:
        """Whether CPU tensors travel through shared memory."""
