"""What cannot be had together with a pipeline of stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagebus.actors.settings.declaring import SettingsError

if TYPE_CHECKING:
    from pagebus.actors.settings.engine import EngineSettings


def check_stages(settings: EngineSettings, stages: int) -> None:
    """Check what is asked for beside so many stages.

    Raises:
        SettingsError: something that they do not do.
    """
    if stages == 1:
        return
    why = ""
    if settings.spec_method not in (None, "none"):
        why = f"--spec-method {settings.spec_method}"
    elif settings.enable_lora:
        why = "--enable-lora"
    if why:
        raise SettingsError(f"{why}: not with --pipeline-parallel-size yet")
