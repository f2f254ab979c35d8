"""Makes the helpers of this folder, and those of the scheduler's tests, importable."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "scheduler")]
