"""An executor's process: ``pagebus actor executor``, with torch's libraries loaded from the first moment on."""

from __future__ import annotations

import sys

from actors.executor.preload import preload_alone


def main() -> int:
    """Run the actor; returns the exit code."""
    preload_alone()
    from actors.cli import main as command

    return command(["actor", "executor", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
