"""An executor's process whose GPU is the one that CUDA shows, or one of those of a rank: ``pagebus actor executor``,
but what takes long is begun before anything else is imported."""

from __future__ import annotations

import sys
import threading

from pagebus.actors.executor.preload import open_gpu, preload_alone


def main() -> int:
    """Run the actor; returns the exit code."""
    threading.Thread(target=open_gpu, args=(own_rank(),), name="open-gpu", daemon=True).start()
    preload_alone()
    from pagebus.actors.commands.cli import main as command

    return command(["actor", "executor", *sys.argv[1:]])


def own_rank() -> int:
    """What ``--rank=N`` says, before settings are read."""
    told = [word.partition("=")[2] for word in sys.argv if word.startswith("--rank=")]
    return int(told[-1]) if told and told[-1].isdecimal() else 0


if __name__ == "__main__":
    sys.exit(main())
