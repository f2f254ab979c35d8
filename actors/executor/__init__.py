"""The executor actor: runs models on one device, and is the only actor that imports torch.

Importing it sets how long torch's CPU threads spin while they wait; this must happen before torch is imported.
"""

import os

# OpenMP's threads spin while they wait for each other. If other actors share the cores, as on a laptop, a long spin
# keeps the awaited thread off its core, and a step takes ten times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
