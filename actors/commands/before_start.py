"""What can be known to be wrong before any process is started, so that one says it, at once, and not each actor."""

from __future__ import annotations

import importlib
from pathlib import Path

from pagebus.actors.executor.device.gpu_limits import check_first_gpu
from pagebus.actors.model.config import ModelConfig, effective_max_model_len, resolve_model
from pagebus.actors.model.gguf.files import split_type
from pagebus.actors.settings import Settings, SettingsError


def check_settings(settings: Settings) -> None:
    """Compare the settings with the files and the GPU of this machine.

    Raises:
        SettingsError: the file of keys is wrong, or the GPU does not support what is asked.
        ModelError: the model is a path, and there is none that can be served.
    """
    if settings.api_key_file is not None:
        importlib.import_module("pagebus.web.access.key_file").KeyFile(settings.api_key_file).news()
    if is_path(settings.model):
        folder = resolve_model(settings, weights=False)
        if folder.is_dir():  # a GGUF file takes long to read
            effective_max_model_len(settings, ModelConfig.load(folder, settings.classifier_from_token))
    check_first_gpu(settings)


def is_path(model: str) -> bool:
    """Whether a model lies on this machine, or could only lie there: it is no name of the hub."""
    base = split_type(model)[0]
    named = base.startswith(("/", ".", "~")) or base.count("/") > 1
    return not model or named or any(Path(each).expanduser().exists() for each in (model, base))


async def check_port(settings: Settings) -> None:
    """Whether nobody listens on the port, or at the socket. Several ingresses share a port, so they would also share it
    with another deployment's.

    Raises:
        SettingsError: somebody does.
    """
    listener = importlib.import_module("pagebus.web.server.listener")
    if settings.uds is None:
        for sock in await listener.listen(settings.host, settings.port):
            sock.close()
    elif listener.is_listened_to(settings.uds):
        raise SettingsError(f"--uds {settings.uds}: another process listens there; end it, or give another path")
