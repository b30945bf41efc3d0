"""Settings: what is read, what is refused, and where a job's directory lies."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import psplus
from psplus import config

Environment = dict[str, str]
Workers = Callable[..., list[Any]]


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_variables(**variables: str) -> config.JobConfig:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return config.read()

    return set_variables


def test_one_worker_needs_no_setting(setting: Any) -> None:
    job = setting()
    assert (job.rank, job.world_size, job.job) == (0, 1, "")


def test_torchruns_variables(setting: Any) -> None:
    job = setting(RANK="2", WORLD_SIZE="3", MASTER_ADDR="localhost", MASTER_PORT="29500")
    assert (job.rank, job.world_size) == (2, 3)
    assert "29500" in job.job


def test_the_default_group_counts_more_than_variables(setting: Any, clean_job: Path) -> None:
    store = dist.FileStore(str(clean_job / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        job = setting(RANK="2", WORLD_SIZE="3", PSPLUS_JOB="j")
        assert (job.rank, job.world_size) == (0, 1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "zero"}, "RANK='zero' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0' is not a whole number"),
        ({"RANK": "3", "WORLD_SIZE": "3"}, "RANK=3 is not below WORLD_SIZE=3"),
        ({"RANK": "-1", "WORLD_SIZE": "3"}, "RANK=-1 is not below"),
        ({"RANK": "1"}, "RANK=1 is not below WORLD_SIZE=1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "PSPLUS_JOB"),
        ({"PSPLUS_SERVERS": "a:1,b:2"}, "PSPLUS_SERVERS"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "one host"),
    ],
)
def test_wrong_settings_are_refused(setting: Any, variables: Environment, message: str) -> None:
    with pytest.raises(psplus.ConfigError, match=message):
        setting(**variables)


def directory_of(setting: Any, **variables: str) -> str:
    return config.job_directory(setting(**variables))


def test_equal_jobs_share_a_private_directory(setting: Any, clean_job: Path) -> None:
    first = directory_of(setting, PSPLUS_JOB="one")
    assert directory_of(setting, PSPLUS_JOB="one") == first
    assert directory_of(setting, PSPLUS_JOB="two") != first
    assert directory_of(setting, PSPLUS_JOB="one", PSPLUS_HOST_ID="other") != first
    path = Path(first)
    assert path.parent == clean_job / f"psplus-{os.geteuid()}"
    for directory in (path, path.parent):
        assert directory.stat().st_mode & 0o777 == 0o700


def test_a_restarted_generation_finds_its_directory(setting: Any) -> None:
    variables = {"TORCHELASTIC_RUN_ID": "r", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    first = directory_of(setting, TORCHELASTIC_RESTART_COUNT="0", **variables)
    assert directory_of(setting, TORCHELASTIC_RESTART_COUNT="1", **variables) == first
    for name, value in {"TORCHELASTIC_RUN_ID": "s", "MASTER_PORT": "2"}.items():
        assert directory_of(setting, **{**variables, name: value}) != first


def test_a_lone_worker_gets_and_exports_a_name(setting: Any) -> None:
    directory = directory_of(setting)
    assert os.environ["PSPLUS_JOB"].startswith("alone-")
    assert directory_of(setting) == directory


def test_a_directory_that_others_could_have_made_is_refused(setting: Any, clean_job: Path) -> None:
    directory = Path(directory_of(setting, PSPLUS_JOB="j"))

    directory.chmod(0o750)
    with pytest.raises(psplus.ConfigError, match="mode 0750"):
        directory_of(setting)

    directory.rmdir()
    elsewhere = clean_job / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    directory.symlink_to(elsewhere)
    with pytest.raises(psplus.ConfigError, match="not a directory"):
        directory_of(setting)

    directory.unlink()
    directory.write_text("a file")
    with pytest.raises(psplus.ConfigError, match="not a directory"):
        directory_of(setting)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(setting: Any) -> None:
    directory = directory_of(setting, PSPLUS_JOB="j")
    os.chown(directory, 65534, -1)
    with pytest.raises(psplus.ConfigError, match="belongs to user 65534"):
        directory_of(setting)


def test_a_path_too_long_for_a_socket_is_refused(
    setting: Any, clean_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = clean_job / ("x" * 80)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(psplus.ConfigError, match="TMPDIR"):
        directory_of(setting, PSPLUS_JOB="j")


def test_the_servers_path(monkeypatch: pytest.MonkeyPatch, clean_job: Path) -> None:
    assert os.access(config.server_path(), os.X_OK)
    for path in (clean_job, clean_job / "missing"):
        monkeypatch.setenv("PSPLUS_SERVER", str(path))
        with pytest.raises(psplus.ConfigError, match="correct PSPLUS_SERVER"):
            config.server_path()
    executable = clean_job / "server"
    executable.touch(mode=0o755)
    monkeypatch.setenv("PSPLUS_SERVER", str(executable))
    assert config.server_path() == str(executable)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"server": "never"}, "'auto' or 'always'"),
        ({"servers": "a:1"}, "servers is for several hosts"),
        ({"secret": b"x" * 16}, "secret is for several hosts"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"timeout": float("nan")}, "timeout must be a positive number"),
        ({"timeout": "60"}, "timeout must be a positive number"),
    ],
)
def test_connect_refuses_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(psplus.ConfigError, match=message):
        psplus.connect(**arguments)


def test_connect_starts_nothing() -> None:
    assert "not attached" in repr(psplus.connect(server="always"))


def test_another_torch_is_refused_with_both_versions() -> None:
    from psplus._compat import check_torch

    check_torch(torch.__version__)
    with pytest.raises(ImportError, match=r"built for torch 1\.2\.3") as error:
        check_torch("1.2.3")
    assert torch.__version__ in str(error.value)
    assert "pip install" in str(error.value)


def wrap_where_nothing_can_be_made(place: str) -> str:
    tempfile.tempdir = place
    parameter = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(psplus.ConfigError) as caught:
        psplus.wrap(torch.optim.SGD([parameter], lr=0.1), session=psplus.connect(server="always"))
    return str(caught.value)


def test_a_job_directory_that_cannot_be_made(workers: Workers, clean_job: Path) -> None:
    for place, reason in ((clean_job / "file", "Not a directory"), (clean_job / "no", "No such")):
        if reason == "Not a directory":
            place.touch()
        (told,) = workers(wrap_where_nothing_can_be_made, 1, place=str(place))
        assert told.startswith(f"cannot make the job's directory {place}/psplus-{os.geteuid()}: ")
        assert reason in told
        assert "set TMPDIR to a folder that can be written to" in told
