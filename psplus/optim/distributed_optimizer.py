"""The optimizer that `psplus.wrap()` returns."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from psplus.errors import Error
from psplus.optim.engine import Closure, Engine
from psplus.optim.step_hooks import StepCall
from psplus.session import check_timeout
from psplus.stats import Stats

__all__ = ["DistributedOptimizer"]

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps are shared with other workers.

    ``param_groups``, ``state`` and ``defaults`` are the inner optimizer's own objects, so
    schedulers (made before or after wrapping), ``GradScaler``, clipping and checkpoints work as
    they do without psplus. Parameters are written only inside the methods of this class.

    Every method that waits raises `psplus.TimeoutError` or `psplus.PeerLost` when those it waits
    for are silent or gone, and `psplus.Error` after `close()` or in a forked child. After such an
    error in `step()` the parameters may hold the local update; `pull()` takes the servers' values.
    """

    # GradScaler shall unscale and look for infinities itself, even if the inner optimizer could.
    _step_supports_amp_scaling = False

    def __init__(self, inner: torch.optim.Optimizer, engine: Engine) -> None:
        self._inner = inner
        self._engine = engine
        self._make_hooks()

    def _make_hooks(self) -> None:
        for name in _HOOKS:
            setattr(self, name, OrderedDict())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's own groups."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's own state."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's own defaults."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name in ("_inner", "_engine"):  # while being unpickled
            raise AttributeError(name)
        return getattr(self._inner, name)

    def step(self, closure: Closure | None = None) -> Any:
        """One step of the inner optimizer, exchanged as the scheme says.

        A parameter whose ``grad`` is None is not pushed, not decayed, and takes the pulled value.

        Args:
            closure: Evaluates the model and returns the loss; run with gradients enabled, as often
                as the inner optimizer wants (once, except for LBFGS).

        Returns:
            What the inner optimizer's step returns: the closure's loss, or None.

        Raises:
            psplus.Error: If a gradient is not finite and ``nonfinite="raise"``, or if a parameter
                was changed from outside since the last step.
            psplus.ConfigError: For a sparse gradient, or a policy's wrong value.
        """
        call = StepCall(self, closure)
        loss = self._engine.step(call.run_pre_hooks(self._optimizer_step_pre_hooks.values()))
        call.run_post_hooks(self._optimizer_step_post_hooks.values())
        return loss

    # Tells torch not to wrap step() once more: hooks for all optimizers, and the profiler's range,
    # belong to the inner optimizer's step, and would otherwise run twice.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer does."""
        self._inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the inner optimizer does; with a server the group is shared between the workers.

        All workers add the same groups in the same order, each when it comes to it: nobody waits
        for another. The first to come gives the parameters their values and the group its
        hyper-parameters (and state, if there is any), the others take over what the servers hold
        by then. A worker that has not added the group goes on with the parameters it has. Of each
        step the servers apply what its worker has.

        Names are the model's, as it is now, or from ``named_parameters``; parameters that have
        none there are named ``group.index``. Buffers of layers that the model has got since it was
        wrapped stay each worker's own. Call it between steps.

        Raises:
            psplus.LayoutMismatch: If another worker's group of the same number has parameters of
                other names, shapes or dtypes. The optimizer is then as it was before.
            psplus.ConfigError: For parameters that `psplus.wrap` would refuse, and for more than
                63 groups. Likewise.
        """
        self._engine.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict; may be called on one rank alone.

        With ``placement="server"`` its state is what the servers hold now, in torch's form.
        """
        for pre_hook in list(self._optimizer_state_dict_pre_hooks.values()):
            pre_hook(self)
        result = self._engine.state_dict()
        for post_hook in list(self._optimizer_state_dict_post_hooks.values()):
            changed = post_hook(self, result)
            result = result if changed is None else changed
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the inner optimizer: a state dict of this class or of the plain optimizer.

        Concerns this worker's hyper-parameters and state; parameters are the model's, see
        `publish()`. With ``placement="server"`` the state waits for `publish()` of this worker,
        and is dropped, with a warning, at a `step()` without one.
        """
        state_dict = state_dict.copy()  # which hooks may change, as with torch
        for pre_hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._inner.load_state_dict(state_dict)
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def synchronize(self) -> None:
        """Give all workers the same parameters: every push made so far is in them.

        Collective over the workers that have not closed: the n-th calls match, and a worker that
        closes or dies counts as arrived. Buffers of the model become the mean over all workers,
        integer ones rank 0's. Under ``"bsp"`` a step moves them by the mean over those that made
        it, which is the same unless some workers make fewer steps.
        """
        self._engine.synchronize()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside the block the parameters are one state of the servers between two batches.

        It includes this worker's own pushes. Not collective, so rank 0 may evaluate alone; the
        worker's own parameters are back after the block. Likewise buffers, which are the workers'
        mean inside it.
        """
        with self._engine.evaluation():
            yield

    def pull(self) -> None:
        """Take the servers' values, own pushes included; concerns this worker alone."""
        self._engine.pull()

    def publish(self) -> None:
        """Make this worker's parameters the global ones, in order with all pushes.

        With ``placement="server"`` state that was loaded since the last step too; without such the
        servers keep theirs.

        For use after the parameters were changed from outside, by loading a checkpoint into the
        model for example. Others find them at their next pull. Not a step.
        """
        self._engine.publish()

    @property
    def stats(self) -> Stats:
        """What this worker has done so far."""
        return self._engine.stats

    @property
    def step_vector(self) -> Tensor:
        """Pushes applied per worker, int64, shape ``(world size,)``, indexed by rank."""
        return self._engine.step_vector

    @property
    def closed(self) -> bool:
        """Whether `close()` has been called; also when it has failed and can be tried again."""
        return self._engine.closed

    def close(self, timeout: float = 5.0) -> None:
        """Leave the scheme once own pushes are in: others no longer wait for this worker.

        Idempotent; also done when the process ends. State dicts remain available.

        Args:
            timeout: Longest time to flush pushes, in seconds.
        """
        self._engine.close(check_timeout("timeout", timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._engine.uses_server:
            raise Error(
                "an optimizer that uses a server cannot be copied or pickled; copy its "
                "state_dict() instead"
            )
        return {"_inner": self._inner, "_engine": self._engine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_hooks()

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self._engine.description}) of {self._inner!r}"
