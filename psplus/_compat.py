"""All that depends on the version of torch."""

import sys

import torch

__all__ = ["check_torch", "is_called_to_make_state"]

_CHECKPOINT = "torch.distributed.checkpoint.state_dict"
_FRAMES = 6  # our own, and a scheduler's or a profiler's wrapper


def check_torch(built_for: str) -> None:
    """The native half uses torch's C++ interfaces, which change with each minor version.

    Raises:
        ImportError: If the torch in use has another major.minor than the one built for.
    """
    wanted, found = (_minor(version) for version in (built_for, torch.__version__))
    if wanted != found:
        raise ImportError(
            f"psplus was built for torch {built_for}, but torch {torch.__version__} is in use; "
            f"install torch {wanted}.*, or build psplus again for this one with "
            "`pip install --no-build-isolation --force-reinstall .`"
        )


def is_called_to_make_state() -> bool:
    """Whether torch's distributed checkpoint calls, for an optimizer's state and not for a step.

    Before it reads or fills a state dict it gives an optimizer that has no state zero gradients and
    a learning rate of zero, and steps. That must not count as a step among workers: only those who
    save or load a checkpoint do it.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "_init_optim_state":
            return frame.f_globals.get("__name__") == _CHECKPOINT
    return False


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
