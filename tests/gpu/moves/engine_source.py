"""A process with an engine on a GPU that has computed a prompt: ``python -m tests.gpu.moves.engine_source FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.actors.executor.moves.test_engines import compute
from tests.actors.executor.small_engine import SETTINGS
from tests.helpers.engine_driver import Driver

ON_GPU: dict[str, Any] = SETTINGS | {"device": "cuda", "threads": None}


def main() -> None:
    """Tell where the prompt's blocks are, and live until nobody listens."""
    driver = Driver(Path(sys.argv[1]), **ON_GPU)
    print(json.dumps({"address": driver.info.kv_address, "blocks": compute(driver)}), flush=True)
    sys.stdin.read()
    driver.close()


if __name__ == "__main__":
    main()
