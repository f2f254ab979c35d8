"""Host memory that a process may take, under each kind of limit."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pagebus.actors.executor.device.free_memory import free_bytes

GIB = 1 << 30


def system(folder: Path, groups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A machine with 100 GiB left, whose process is in ``groups``, with the files of these."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {100 * GIB // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    (proc / "self" / "statm").write_text(f"{GIB // resource.getpagesize()} 1 1 1 0 1 0\n")
    for name, text in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


V2 = {"memory.current": str(3 * GIB), "memory.stat": f"anon 5\ninactive_file {GIB}\n"}
V1 = {
    "memory/memory.usage_in_bytes": str(3 * GIB),
    "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
}
POD = {"pod/memory.max": f"{9 * GIB}", "pod/memory.current": "0", "pod/memory.stat": ""}


@pytest.mark.parametrize(
    ("groups", "files", "left"),
    [
        ("", {}, 100),
        ("0::/\n", V2 | {"memory.max": "max\n"}, 100),
        ("0::/\n", V2 | {"memory.max": f"{8 * GIB}\n"}, 6),
        ("0::/pod/container\n", V2 | {"memory.max": f"{8 * GIB}\n"}, 6),
        ("0::/pod\n", POD | V2 | {"memory.max": f"{8 * GIB}\n"}, 6),
        ("4:cpu,memory:/docker/1\n0::/\n", V1 | {"memory/memory.limit_in_bytes": f"{4 * GIB}\n"}, 2),
        ("4:memory:/\n", V1 | {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 100),
        ("0::/\n", V2 | {"memory.max": f"{GIB}\n"}, 0),
    ],
    ids=["no groups", "no limit", "version 2", "a container's path", "a group above", "version 1", "v1 none", "full"],
)
def test_control_groups(tmp_path: Path, groups: str, files: dict[str, str], left: int) -> None:
    """The strictest group counts; pages of files that the system can drop are free."""
    assert free_bytes(*system(tmp_path, groups, files)) == left * GIB


def test_limited_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ulimit -v`` counts what is mapped already."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (3 * GIB, 3 * GIB))
    assert free_bytes(*system(tmp_path, "", {})) == 2 * GIB


def test_a_system_that_states_nothing(tmp_path: Path) -> None:
    """Nothing is limited."""
    assert free_bytes(tmp_path / "proc", tmp_path / "cgroup") == float("inf")
