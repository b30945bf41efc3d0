"""Exceptions of psplus.

Wrong arguments and settings raise `ConfigError` or `LayoutMismatch`, which are ``ValueError`` too;
what the world can do to a run raises one of the others.
"""

import builtins

__all__ = [
    "AuthenticationError",
    "CheckpointError",
    "ConfigError",
    "Error",
    "LayoutMismatch",
    "PeerLost",
    "TimeoutError",
]


class Error(Exception):
    """Base class of everything that psplus raises on its own account."""


class TimeoutError(Error, builtins.TimeoutError):  # noqa: A001 - it is the built-in one too
    """Nobody that was waited for gave a sign of life in time; the message names who is missing."""


class PeerLost(Error):
    """A worker or server is gone for good; the message names it, its host and how it died."""


class LayoutMismatch(Error, ValueError):
    """Two workers disagree on a parameter; the message names it and both shapes."""


class AuthenticationError(Error):
    """A peer could not prove that it knows the job's secret."""


class CheckpointError(Error):
    """A checkpoint cannot be written, or is damaged, incomplete or of another layout."""


class ConfigError(Error, ValueError):
    """A setting or argument is wrong; the message names it, the value found and the fix."""
