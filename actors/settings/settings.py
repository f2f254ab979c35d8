"""All settings of a deployment in one object, checked together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pagebus.actors.settings.combinations.disk import check_disk
from pagebus.actors.settings.combinations.lora import check_lora
from pagebus.actors.settings.combinations.roles import check_roles
from pagebus.actors.settings.combinations.speculation import check_speculation
from pagebus.actors.settings.combinations.stages import check_stages
from pagebus.actors.settings.declaring import SettingsError, check_value
from pagebus.actors.settings.engine import EngineSettings
from pagebus.actors.settings.logging import LoggingSettings
from pagebus.actors.settings.memory import MemorySettings
from pagebus.actors.settings.model import ModelSettings
from pagebus.actors.settings.processes import ProcessSettings
from pagebus.actors.settings.service import ServiceSettings

SHARED = ("ingresses", "tokenizers", "detokenizers")
"""Actors among which the text of all executors is shared out."""
CORES_OF_RANK = 2
"""A thread that launches steps and one that speaks with the bus."""
DTYPE_ALIASES = {"float": "float32", "half": "float16"}
GROUPS: dict[str, type] = {
    "model": ModelSettings,
    "service": ServiceSettings,
    "processes": ProcessSettings,
    "engine": EngineSettings,
    "memory": MemorySettings,
    "logging": LoggingSettings,
}
"""By the name under which a command's help shows them."""


@dataclass(frozen=True, kw_only=True)
class Settings(LoggingSettings, MemorySettings, EngineSettings, ProcessSettings, ServiceSettings, ModelSettings):
    """One deployment's settings, checked when made.

    Raises:
        SettingsError: a value is out of its bounds or conflicts with another.
    """

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value is not None and (value != spec.default or spec.default is not None):
                check_value(spec.name, value, spec.metadata)
        object.__setattr__(self, "dtype", DTYPE_ALIASES.get(self.dtype, self.dtype))
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise SettingsError("--enable-auto-tool-choice needs --tool-call-parser")
        if self.uds is not None and (self.ingresses or 1) > 1:
            raise SettingsError("--uds: one ingress can listen on a socket, --ingresses has to be 1")
        if self.rank >= self.num_ranks:
            raise SettingsError(f"--rank {self.rank}: {self.rank_flags} is all that there are")
        check_speculation(self, self.tensor_parallel_size)
        check_lora(self)
        if self.roles is not None:
            check_roles(self.roles, self.executors, self)
        check_disk(self)
        if self.disk_cache_dir is not None and self.num_ranks > 1:
            raise SettingsError(f"--disk-cache-dir: not with {self.rank_flags} yet")
        if self.roles is not None and self.pipeline_parallel_size > 1:
            raise SettingsError(f"--roles: not with {self.rank_flags} yet")
        check_stages(self, self.pipeline_parallel_size)
        if self.enable_log_outputs and not self.enable_log_requests:
            raise SettingsError("--enable-log-outputs needs --enable-log-requests")

    @property
    def num_ranks(self) -> int:
        """Ranks of each executor."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def rank_flags(self) -> str:
        """What asks for that many, for messages."""
        stages = self.pipeline_parallel_size
        flag = f"--tensor-parallel-size {self.tensor_parallel_size}"
        return flag if stages == 1 else f"{flag} --pipeline-parallel-size {stages}"

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be texts, and answers are."""
        return not (self.skip_tokenizer_init or self.tokens_only)

    @property
    def num_host_loras(self) -> int:
        """How many adapters an executor keeps in host memory."""
        return self.max_cpu_loras or self.max_loras

    @property
    def counts(self) -> dict[str, int]:
        """How many actors of each kind are wanted, one where no number is given."""
        return {
            "ingress": self.ingresses or 1,
            "jobs": self.job_actors,
            "tokenizer": self.tokenizers or 1,
            "scheduler": self.schedulers,
            "executor": self.executors,
            "detokenizer": self.detokenizers or 1,
        }

    def shared_out(self, cores: int) -> Settings:
        """A copy in which each executor has a tokenizer, a detokenizer and an ingress, where no number is given and
        ``cores`` suffice: with a small model one of each is busy with one executor's tokens. There is one ingress on a
        socket, and one where keys have limits, which hold per ingress."""
        for_one = CORES_OF_RANK * self.tensor_parallel_size + len(SHARED)
        count = max(1, min(self.executors, cores // for_one))
        absent = {name: count for name in SHARED if getattr(self, name) is None}
        if "ingresses" in absent and (self.uds is not None or self.api_key_file is not None):
            absent["ingresses"] = 1
        return self.replace(**absent)

    def replace(self, **changes: Any) -> Settings:
        """A copy with some settings changed, checked again."""
        return dataclasses.replace(self, **changes)
