"""An executor that other executors take to be on another host: ``python -m tests.system.far_executor SETTINGS``."""

from __future__ import annotations

import os
import sys

from pagebus.actors.commands.cli import main
from pagebus.actors.executor.moves import own_cache

if __name__ == "__main__":
    own_cache.host_id = lambda: f"host of process {os.getpid()}"
    sys.exit(main(["actor", "executor", *sys.argv[1:]]))
