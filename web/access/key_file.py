"""``--api-key-file``: a TOML file with a table per key, read again whenever it changes.

.. code-block:: toml

    [alice]
    key = "a-long-secret"
    max_requests = 16       # under way at once
    max_tokens = 200_000    # of prompts and answers under way at once
    tokens_per_minute = 1_000_000
    weight = 2.0            # its share, beside other keys that have work (default 1)
    private_cache = true    # no cached prompts are shared with other keys
    operator = true         # may use /api and /debug, which show and end what belongs to others

    [batch]
    sha256 = "..."          # the key's SHA-256 in hexadecimal digits, instead of the key
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pagebus.actors.settings import SettingsError
from pagebus.web.access.auth import ApiKey, digest_of

LIMITS = ("max_requests", "max_tokens", "tokens_per_minute")
SWITCHES = ("private_cache", "operator")
FIELDS = frozenset({"key", "sha256", "weight", *LIMITS, *SWITCHES})
GIVEN_NAME = re.compile(r"key [0-9]+")
"""Names of the keys given by ``--api-key``."""
MIN_KEY_CHARS = 8
MAX_WEIGHT = 1e6


class KeyFile:
    """The key file and its last known content."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None

    def news(self) -> Sequence[ApiKey] | None:
        """The keys, if the file has changed since the last call; None if not.

        Raises:
            SettingsError: it cannot be read or understood; the text never holds a key. Told once per change.
        """
        try:
            stat = os.stat(self._path)
            state = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if state == self._seen:
                return None
            self._seen = state
            with open(self._path, "rb") as file:
                tables = tomllib.load(file)
        except OSError as error:
            if self._seen == ():
                return None
            self._seen = ()
            raise SettingsError(f"--api-key-file {self._path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError):
            raise SettingsError(f"--api-key-file {self._path}: it is not valid TOML") from None
        return self._read(tables)

    def _read(self, tables: Mapping[str, Any]) -> Sequence[ApiKey]:
        if not tables:
            raise self._wrong("it has no keys")
        keys = [self._read_key(name, table) for name, table in tables.items()]
        if len({key.digest for key in keys}) < len(keys):
            raise self._wrong("two of its keys are the same")
        return keys

    def _read_key(self, name: str, table: Any) -> ApiKey:
        if not name or GIVEN_NAME.fullmatch(name):  # reserved: no owner, and the keys of --api-key
            raise self._wrong(f"[{name}] cannot be the name of a key")
        if not isinstance(table, dict):
            raise self._wrong(f"{name} must be a table: [{name}]")
        if unknown := table.keys() - FIELDS:
            raise self._wrong(f"{name} has the unknown field {min(unknown)!r}")
        limits = {field: self._read_limit(name, field, table.get(field)) for field in LIMITS}
        private, operator = (self._read_switch(name, field, table.get(field, False)) for field in SWITCHES)
        weight = table.get("weight", 1.0)
        if type(weight) not in (int, float) or not 0 < weight <= MAX_WEIGHT:
            raise self._wrong(f"{name}.weight must be a number above 0 and at most {MAX_WEIGHT:g}")
        digest = self._read_digest(name, table)
        return ApiKey(name, digest, **limits, private_cache=private, operator=operator, weight=float(weight))

    def _read_digest(self, name: str, table: Mapping[str, Any]) -> bytes:
        key, digest = table.get("key"), table.get("sha256")
        if isinstance(digest, str) and key is None and re.fullmatch("[0-9a-fA-F]{64}", digest):
            return bytes.fromhex(digest)
        plain = isinstance(key, str) and len(key) >= MIN_KEY_CHARS and key.isascii() and key.isprintable()
        if digest is not None or not plain or " " in str(key):
            text = f"a key of at least {MIN_KEY_CHARS} ASCII characters without spaces, or 64 digits of sha256"
            raise self._wrong(f"{name} needs {text}")
        return digest_of(str(key))

    def _read_limit(self, name: str, field: str, value: Any) -> int | None:
        if value is None or (type(value) is int and value > 0):
            return value
        raise self._wrong(f"{name}.{field} must be a positive whole number")

    def _read_switch(self, name: str, field: str, value: Any) -> bool:
        if type(value) is bool:
            return value
        raise self._wrong(f"{name}.{field} must be true or false")

    def _wrong(self, problem: str) -> SettingsError:
        return SettingsError(f"--api-key-file {self._path}: {problem}")
