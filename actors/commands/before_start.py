"""What can be known to be wrong before any process is started, so that one says it, at once, and not each actor."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

from pagebus.actors.executor.device.gpu_limits import check_first_gpu
from pagebus.actors.executor.ranks.same_model import SameModel
from pagebus.actors.model.config import (
    CONFIG_FILE,
    SMALL_FILES,
    ModelConfig,
    effective_max_model_len,
    hub_files,
    resolve_model,
    snapshot,
)
from pagebus.actors.model.errors import ModelError
from pagebus.actors.model.gguf.files import choose, split_type
from pagebus.actors.runtime.one_machine import check_folders
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.contract import Bus


def check_settings(settings: Settings) -> None:
    """Compare the settings with the files and the GPU of this machine.

    Raises:
        SettingsError: the file of keys or the template is wrong, a folder cannot be written to, or the GPU does not
            support what is asked.
        ModelError: there is no such model, or it cannot be served.
    """
    if settings.chat_template is not None:
        _check_template(settings.chat_template)
    if settings.api_key_file is not None:
        importlib.import_module("pagebus.web.access.key_file").KeyFile(settings.api_key_file).news()
    check_folders(settings)
    if is_path(settings.model):
        _check_folder(settings, resolve_model(settings, weights=False))
    elif not _is_cached(settings.model):  # else nothing has to wait for the hub
        _check_repository(settings)
    check_first_gpu(settings)


def _check_template(setting: str) -> None:
    chat = importlib.import_module("pagebus.actors.tokenizer.chat")
    try:
        chat.own_template(setting)
    except chat.TokenizerError as error:
        raise SettingsError(str(error)) from error


def _check_folder(settings: Settings, folder: Path) -> None:
    if folder.is_dir():  # a GGUF file takes long to read
        effective_max_model_len(settings, ModelConfig.of(settings, folder))


def _check_repository(settings: Settings) -> None:
    """Fetch the small files, without which no actor begins; of GGUF files only the names are looked at."""
    name, kind = split_type(settings.model)
    folder = snapshot(name, settings.revision, SMALL_FILES)
    if kind or not (folder / CONFIG_FILE).is_file():
        chosen = choose(hub_files(name, settings.revision, kind), kind, name)
        if chosen is not None:
            return
        if kind:
            raise ModelError(f"model {settings.model!r}: the repository has no GGUF file")
    _check_folder(settings, folder)


def _is_cached(model: str) -> bool:
    """Whether something of a repository has been fetched before."""
    cache = Path(importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE)
    return (cache / f"models--{split_type(model)[0].replace('/', '--')}" / "snapshots").is_dir()


def is_path(model: str) -> bool:
    """Whether a model lies on this machine, or could only lie there: it is no name of the hub."""
    base = split_type(model)[0]
    named = base.startswith(("/", ".", "~")) or base.count("/") > 1
    return not model or named or any(Path(each).expanduser().exists() for each in (model, base))


async def check_model(bus: Bus, settings: Settings) -> None:
    """Whether executors of a running deployment of this name serve the same model, if there are any: its requests and
    jobs would else be taken by tokenizers of another.

    Raises:
        SettingsError: they serve another model.
        ModelError: there is no such model, or it cannot be served.
        BusUnavailable: the bus is away.
    """
    if await bus.leases("executor"):
        await SameModel(bus, settings).confirm(await asyncio.to_thread(resolve_model, settings, weights=False))


async def check_port(settings: Settings) -> None:
    """Whether nobody listens on the port, or at the socket, and it can be had. Several ingresses share a port, so they
    would also share it with another deployment's.

    Raises:
        SettingsError: somebody does, or it cannot.
    """
    listener = importlib.import_module("pagebus.web.server.listener")
    if settings.uds is None:
        for sock in await listener.listen(settings.host, settings.port):
            sock.close()
    else:
        for sock in listener.listen_on_path(settings.uds):
            sock.close()
            listener.remove_path(settings.uds)
