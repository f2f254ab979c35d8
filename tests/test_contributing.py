"""What CONTRIBUTING.md says about the code is so."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_FILES = 5


def test_a_sampling_parameter_takes_few_files() -> None:
    """The files of the worked example are all that name the parameter."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Where does a new sampling parameter go?") :].split("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w/.]+)` \|", section, re.MULTILINE))
    naming = {
        str(path.relative_to(ROOT))
        for folder in ("actors", "bus", "kernels", "web")
        for path in (ROOT / folder).rglob("*.py")
        if "logprob_token_ids" in path.read_text()
    }
    assert listed == naming
    assert len(naming) <= MOST_FILES
