"""A deployment on one machine, in one process or several, with its own Redis server and folder for files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from pagebus.actors.runtime.child import die_with_parent
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.private_redis.server import PrivateRedis, find_redis_server


def check_folders(settings: Settings) -> None:
    """Make the folders that settings name, and look whether they, or one for temporary files, can be written to.

    Raises:
        SettingsError: one cannot.
    """
    for flag, name in (("--data-dir", settings.data_dir), ("--files-dir", settings.files_dir)):
        if name is not None:
            try:
                Path(name).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SettingsError(f"{flag} {name}: {error.strerror}") from error
            if not os.access(name, os.W_OK | os.X_OK):
                raise SettingsError(f"{flag} {name}: it cannot be written to")
    if settings.data_dir is None and (settings.bus is None or settings.files_dir is None):
        try:
            tempfile.gettempdir()
        except FileNotFoundError as error:
            remedy = "set TMPDIR to a folder that can be written to, or give --data-dir"
            raise SettingsError(f"there is no room for temporary files: {remedy}") from error


@contextlib.asynccontextmanager
async def private_redis(data_dir: str | None) -> AsyncIterator[PrivateRedis]:
    """A Redis server for this deployment, in ``data_dir`` or in a temporary folder."""
    redis = PrivateRedis(data_dir, before_exec=die_with_parent())
    try:
        await redis.start()
        yield redis
    finally:
        await redis.stop()


@contextlib.contextmanager
def with_files(settings: Settings) -> Iterator[Settings]:
    """Settings with a folder for files: beside Redis's data, or a temporary one."""
    if settings.files_dir is not None:
        yield settings
    elif settings.data_dir is not None:
        yield settings.replace(files_dir=str(Path(settings.data_dir).resolve() / "files"))
    else:
        with tempfile.TemporaryDirectory(prefix="pagebus-files-") as folder:
            yield settings.replace(files_dir=folder)


def uses_one_process(settings: Settings) -> bool:
    """Whether everything runs in this process, by request or because there is no redis-server."""
    if settings.bus is not None:
        return settings.bus.startswith("memory:")
    return find_redis_server() is None


REMEDY = "install redis-server or give --bus"


def check_one_process(settings: Settings, gpus: Sequence[str], remedy: str = REMEDY) -> None:
    """Check that one process suffices: it can use only one GPU, and has no ranks. ``remedy``: what to do otherwise.

    Raises:
        SettingsError: more executors are requested, or ranks.
    """
    if settings.num_ranks > 1:
        raise SettingsError(f"{settings.rank_flags}: ranks are processes, which find each other over Redis; {remedy}")
    if settings.executors > 1 and gpus and settings.device != "cpu":
        raise SettingsError(
            f"--executors {settings.executors}: in one process all would use the same GPU; {remedy}, so that each "
            "executor gets a process of its own"
        )
