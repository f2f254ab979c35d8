"""Who takes which GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagebus.actors.runtime import gpus
from pagebus.actors.runtime.gpus import list_gpus, take_free_gpus, visible_gpus

ROOT = Path(__file__).parents[3]
TAKE = """
import sys
from pathlib import Path
from pagebus.actors.runtime.gpus import take_free_gpus
print(*take_free_gpus(Path(sys.argv[1]), ["GPU-a", "GPU-b"]), flush=True)
sys.stdin.read()
"""


def test_visible_gpus_follow_the_environment() -> None:
    """CUDA_VISIBLE_DEVICES limits and orders what is used; without the tool there is no GPU."""
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 0"}) == ["2", "0"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []


def test_gpus_are_those_the_tool_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi is asked once; a tool that fails means no GPU."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-a\necho GPU-b\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "NODES", str(tmp_path / "nvidia[0-9]*"))
    assert list_gpus(uuids=True) == ["GPU-a", "GPU-b"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert visible_gpus({}) == []


def test_gpus_with_device_nodes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control nodes beside them are no GPUs."""
    monkeypatch.setattr(gpus, "NODES", str(tmp_path / "nvidia[0-9]*"))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}) == ["0", "1"]


def test_each_process_takes_another_gpu(tmp_path: Path) -> None:
    """Two processes take two GPUs, a third finds none, and a GPU is free again when its process has been killed."""
    command = [sys.executable, "-c", TAKE, str(tmp_path / "locks")]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def taken(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    processes = [start()]
    try:
        assert taken(processes[0]) == "GPU-a"
        processes.append(start())
        assert taken(processes[1]) == "GPU-b"
        assert take_free_gpus(tmp_path / "locks", ["GPU-a", "GPU-b"]) == []
        processes[0].kill()
        processes[0].wait()
        processes.append(start())
        assert taken(processes[2]) == "GPU-a"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_several_gpus_are_taken_together_or_not_at_all(tmp_path: Path) -> None:
    """Ranks of an executor need all of theirs; a lock that is of no use is given back."""
    uuids = ["GPU-a", "GPU-b", "GPU-c"]
    assert take_free_gpus(tmp_path, uuids, 2) == ["GPU-a", "GPU-b"]
    assert take_free_gpus(tmp_path, uuids, 2) == []
    assert take_free_gpus(tmp_path, uuids, 1) == ["GPU-c"]
