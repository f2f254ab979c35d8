"""The executor: the one package that computes. Importing it sets, before torch, how torch's CPU threads wait."""

import os

# OpenMP's threads spin while they wait for one another. Where other actors want the same cores, as on a laptop, a long
# spin keeps off the very thread that is waited for, and a step takes ten times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
