"""Every setting of Pagebus: name, default, bounds and help text, in one file per group.

The flag is ``--max-model-len``, the environment variable ``PAGEBUS_MAX_MODEL_LEN``, and the key in the TOML file given
with ``--config`` is ``max_model_len`` (or ``max-model-len``). The command line overrides the environment, which
overrides the file, which overrides the default. Settings with vLLM's meaning have vLLM's names.
:mod:`pagebus.actors.settings.sources` reads the three sources.
"""

from pagebus.actors.settings.declaring import SettingsError, flag_of
from pagebus.actors.settings.settings import GROUPS, Settings

__all__ = ["GROUPS", "KINDS", "Settings", "SettingsError", "flag_of"]

KINDS = ("ingress", "jobs", "tokenizer", "scheduler", "executor", "detokenizer")
"""The kinds of actors."""
