"""Settings from the environment: the one place of the Python package that reads variables.

================================  ==============================================================
``PSPLUS_JOB``                    Name of the job; workers with equal names share a server.
``PSPLUS_HOST_ID``                Who counts as one host (default: the boot id of the kernel).
``PSPLUS_SERVER``                 Path of the server's executable (default: beside the package).
``PSPLUS_SERVERS``                Several hosts: refused by this version.
``PSPLUS_SECRET``, ``PSPLUS_SECRET_FILE``   The secret between hosts: not read by this version.
``RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``,
``TORCHELASTIC_RUN_ID``           As torchrun sets them.
================================  ==============================================================
"""

import errno
import hashlib
import os
import resource
import secrets
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from psplus.errors import ConfigError, Error

__all__ = ["JobConfig", "host_id", "job_directory", "read", "server_path"]

_MAX_SOCKET_PATH = 107  # sun_path holds 108 bytes, the last one NUL
_SOCKET_NAME = "/server.sock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class JobConfig:
    """Who this worker is.

    Attributes:
        rank: 0 <= rank < world_size.
        world_size: Workers that the job starts with.
        job: What workers of one job have in common; empty for a worker that runs alone.
        host: What workers of one host have in common.
    """

    rank: int
    world_size: int
    job: str
    host: str


def read() -> JobConfig:
    """The settings as they are now: the default process group's if there is one, else variables.

    Raises:
        ConfigError: For a malformed or contradictory value, or several workers without a job id.
    """
    _refuse_several_hosts()
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = _rank_and_world_size()
    job = _job()
    if world_size > 1 and not job:
        raise ConfigError(
            f"{world_size} workers have nothing in common to find each other by: start them with "
            "torchrun, or set MASTER_ADDR and MASTER_PORT, or PSPLUS_JOB, to the same on each"
        )
    return JobConfig(rank=rank, world_size=world_size, job=job, host=host_id())


def job_directory(config: JobConfig) -> str:
    """Makes the job's private directory on this host and returns its path.

    A worker that runs alone without a job's name gets a random one, exported as ``PSPLUS_JOB``.

    Raises:
        ConfigError: If the directory is not a real one of ours with mode 0700, or its path is too
            long for a Unix socket.
    """
    job = config.job
    if not job:
        job = os.environ["PSPLUS_JOB"] = f"alone-{secrets.token_hex(16)}"
    digest = hashlib.sha256(f"{config.host}\n{job}".encode()).hexdigest()[:16]
    parent = Path(tempfile.gettempdir()) / f"psplus-{os.geteuid()}"
    directory = parent / digest
    if len(os.fsencode(directory)) + len(_SOCKET_NAME) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"{directory} is too long for a Unix socket inside it; set TMPDIR to a shorter path"
        )
    for path in (parent, directory):
        _make_private(path)
    return str(directory)


def server_path() -> str:
    """Path of the server's executable.

    Raises:
        ConfigError: If there is no executable file.
    """
    named = os.environ.get("PSPLUS_SERVER")
    path = Path(named) if named else Path(__file__).parent / "bin" / "psplus-server"
    if not (path.is_file() and os.access(path, os.X_OK)):
        fix = "correct PSPLUS_SERVER" if named else "build psplus, or set PSPLUS_SERVER"
        raise ConfigError(f"no server executable at {path}; {fix}")
    return str(path)


def host_id() -> str:
    """What workers of one host have in common: ``PSPLUS_HOST_ID``, else the kernel's boot id.

    Raises:
        ConfigError: If neither can be read.
        Error: If no more files can be opened.
    """
    named = os.environ.get("PSPLUS_HOST_ID")
    if named:
        return named
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise Error(
                f"cannot read {_BOOT_ID}: a process may have {_open_files()} open files "
                "(RLIMIT_NOFILE); raise it with `ulimit -n`"
            ) from error
        raise ConfigError(f"cannot read {_BOOT_ID} ({error}); set PSPLUS_HOST_ID") from error


def _open_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _refuse_several_hosts() -> None:
    if os.environ.get("PSPLUS_SERVERS"):
        raise ConfigError("PSPLUS_SERVERS is set, but this version trains on one host; unset it")
    local, world = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if local and world and local != world:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE={local} but WORLD_SIZE={world}: this version trains on one host"
        )


def _rank_and_world_size() -> tuple[int, int]:
    world_size = _number("WORLD_SIZE", default=1)
    if world_size < 1:
        raise ConfigError(f"WORLD_SIZE={world_size}, but at least one worker takes part")
    if world_size > 1 and not os.environ.get("RANK"):
        raise ConfigError(
            f"WORLD_SIZE={world_size} but RANK is not set; give each worker its own, from 0"
        )
    rank = _number("RANK", default=0)
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} is not below WORLD_SIZE={world_size}; ranks start at 0")
    return rank, world_size


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a whole number") from None


def _job() -> str:
    named = os.environ.get("PSPLUS_JOB")
    if named:
        return named
    # Not TORCHELASTIC_RESTART_COUNT: a restarted generation shall find what the last one left.
    variables = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    values = [os.environ.get(variable, "") for variable in variables]
    return "\n".join(values) if any(values) else ""


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
        path.chmod(0o700)  # whatever the umask took away
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(
            f"cannot make the job's directory {path}: {error}; set TMPDIR to a folder that can be "
            "written to"
        ) from error
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path} is not a directory (or a link to one); remove it")
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to user {found.st_uid}, not to us; set TMPDIR")
    if stat.S_IMODE(found.st_mode) != 0o700:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, others could get in; "
            "make it 0700 or remove it"
        )
