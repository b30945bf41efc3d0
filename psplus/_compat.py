"""All that depends on the version of torch."""

import torch

__all__ = ["check_torch"]


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


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
