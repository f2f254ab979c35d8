"""Adapters that programs name by their folders: `LLM` loads each before its first use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagebus.actors.offline.client import Client


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of a request: ``lora_name`` for the folder ``lora_path``. With ``load_inplace`` the folder is read
    again, for its files may have changed.

    ``lora_int_id`` is vLLM's, from 1 on; here an adapter is known by its name and content.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, got {self.lora_int_id}")
        if not self.lora_name or not self.lora_path:
            raise ValueError("lora_name and lora_path must not be empty")


class LoadedAdapters:
    """The adapters that have been loaded, by name."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._paths: dict[str, str] = {}

    async def load(self, requests: Iterable[LoRARequest | None]) -> None:
        """Load adapters that are not loaded yet. If a name has another path than before, it means that one from now on.

        Raises:
            ValueError: an adapter cannot be used, or two folders have one name.
        """
        wanted = {each: None for each in requests if each is not None}
        paths: dict[str, str] = {}
        for request in wanted:
            if paths.setdefault(request.lora_name, request.lora_path) != request.lora_path:
                raise ValueError(f"two adapters are called {request.lora_name}")
        for request in wanted:
            name, path = request.lora_name, request.lora_path
            if self._paths.get(name) != path or request.load_inplace:
                body = {"lora_name": name, "lora_path": path, "load_inplace": True}
                await self._client.command("/v1/load_lora_adapter", body)
                self._paths[name] = path
