"""An executor's process whose GPU is the one that CUDA shows: ``pagebus actor executor``, but what takes long is begun
before anything else is imported."""

from __future__ import annotations

import sys
import threading

from pagebus.actors.executor.preload import open_gpu, preload_alone


def main() -> int:
    """Run the actor; returns the exit code."""
    threading.Thread(target=open_gpu, name="open-gpu", daemon=True).start()
    preload_alone()
    from pagebus.actors.commands.cli import main as command

    return command(["actor", "executor", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
