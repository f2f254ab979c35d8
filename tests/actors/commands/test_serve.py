"""What `pagebus serve` says and chooses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import tempfile
from pathlib import Path

import httpx
import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from pagebus.actors.commands.before_start import check_settings, is_path
from pagebus.actors.commands.cli import main
from pagebus.actors.commands.serve import banner, bus_text, ready_text, show
from pagebus.actors.model.errors import ModelError
from pagebus.actors.runtime.one_machine import check_one_process, uses_one_process
from pagebus.actors.runtime.readiness import ingress_addresses
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus import connect
from pagebus.bus.contract import LeaseInfo
from pagebus.bus.streams import Names
from pagebus.web.server.listener import listen_on_path


def test_one_process_without_redis_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a redis-server on PATH everything runs in one process, and the banner says so and what is lost."""
    monkeypatch.setenv("PATH", "/nowhere")
    assert uses_one_process(Settings())
    text = banner(Settings(), one_process=True, gpus=0)
    assert "there is no redis-server on PATH" in text
    assert "none of them can be restarted" in text


def test_given_bus_decides() -> None:
    """A Redis URL means processes, a memory URL one process."""
    assert not uses_one_process(Settings(bus="redis://h"))
    assert uses_one_process(Settings(bus="memory://"))


def test_one_process_has_one_gpu() -> None:
    """Two executors in one process are refused where there are GPUs, and fine on the CPU."""
    check_one_process(Settings(executors=2), [])
    check_one_process(Settings(executors=2, device="cpu"), ["0", "1"])
    with pytest.raises(SettingsError, match="--executors 2: in one process"):
        check_one_process(Settings(executors=2), ["0", "1"])


def test_one_process_has_no_ranks() -> None:
    """They are processes, which find each other over Redis."""
    with pytest.raises(SettingsError, match=r"--tensor-parallel-size 2: .* install redis-server or give --bus"):
        check_one_process(Settings(tensor_parallel_size=2, device="cpu"), [])


def test_banner_names_everything() -> None:
    """Model, device, bus and actors."""
    settings = Settings(model="m", executors=2, bus="redis://user:pa55@h:1/0")
    assert banner(settings, one_process=False, gpus=2).splitlines()[1:] == [
        "  model    m",
        "  device   cuda",
        "  bus      redis://h:1/0",
        "  actors   ingress, jobs, tokenizer, scheduler, 2 x executor, detokenizer",
    ]


def test_banner_names_ranks() -> None:
    settings = Settings(executors=2, tensor_parallel_size=4, device="cpu")
    assert "2 x executor, detokenizer; executors of 4 ranks" in banner(settings, one_process=False, gpus=0)


def test_passwords_do_not_show() -> None:
    """Neither in the authority nor in the query of a bus URL."""
    text = bus_text(Settings(bus="redis+sentinel://:pa55@a:1,b:2/main?sentinel_password=pa55"))
    assert text == "redis+sentinel://a:1,b:2/main"


def test_ready_text_is_a_usable_address() -> None:
    """An address that listens everywhere is shown as one to connect to."""
    assert "http://127.0.0.1:8000" in ready_text(Settings(host="0.0.0.0"), ["0.0.0.0:8000"], 1.0)
    assert "http://[::1]:8000" in ready_text(Settings(host="::"), [":::8000"], 1.0)
    assert "Authorization" in ready_text(Settings(api_key=("k",)), ["h:1"], 1.0)


def test_a_full_disk_under_the_output() -> None:
    """Is no reason not to serve."""
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        show("ready")
        with open(os.devnull, "w") as nothing:  # or the end of the file would be an error
            os.dup2(nothing.fileno(), full.fileno())


def test_where_a_socket_answers() -> None:
    """A path is no address, and the command says how to ask there."""
    settings = Settings(uds="/run/pagebus.sock")
    lease = LeaseInfo("ingress", "ingress-0", 1, {"state": "ready"})
    assert ingress_addresses(settings, [lease]) == [("unix:/run/pagebus.sock", 0)]
    text = ready_text(settings, ["unix:/run/pagebus.sock:0"], 1.0)
    assert "curl --unix-socket /run/pagebus.sock http://localhost/v1/models" in text


def ends_with(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The sentence that `pagebus serve` ends with before it has started or printed anything else."""
    assert main(["serve", *words]) == 2
    out, text = capfd.readouterr()
    assert out == ""
    assert text.startswith("pagebus: ")
    assert text.count("\n") == 1
    return text


def test_a_model_that_cannot_be_served_is_all_that_is_told(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One that is a path, or the shipped one: nothing has been started by then."""
    assert "model '/no/such/model': there is no such folder" in ends_with(capfd, "/no/such/model")
    assert "config.json" in ends_with(capfd, str(tmp_path))
    assert "--max-model-len 5000: the model has only 1024" in ends_with(capfd, "--max-model-len", "5000")


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--chat-template", "{% if", "--chat-template, line 1: "),
        ("--chat-template", "no_such_file", "--chat-template 'no_such_file': "),
        ("--uds", "no_such_folder/s", "--uds no_such_folder/s: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_used_is_all_that_is_told(
    capfd: pytest.CaptureFixture[str], flag: str, value: str, why: str
) -> None:
    """Before it ends actors that have just been started."""
    assert why in ends_with(capfd, flag, value)


@pytest.mark.parametrize("more", [(), ("--bus", "memory://"), ("--ingresses", "2")])
def test_a_port_in_use_is_all_that_is_told(capfd: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    """Also where ingresses would share it among them, and so with whoever has it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in ends_with(capfd, "--port", port, *more)


def test_a_socket_in_use_is_all_that_is_told(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It stays with whoever has it. One that was left behind is taken."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        assert f"--uds {path}: another process listens there" in ends_with(capfd, "--uds", path)
        with pytest.raises(SettingsError, match="another process listens there"):
            listen_on_path(path)
    for sock in listen_on_path(path):
        sock.close()


@pytest.mark.parametrize(
    ("model", "files", "problem"),
    [
        ("org/none", None, "model 'org/none': no such folder and no such repository on the hub"),
        ("org/none:Q4_K_M", None, "model 'org/none': no such folder and no such repository on the hub"),
        ("a b", None, "model 'a b' is neither a folder nor an id of the Hugging Face hub"),
        ("org/text", {"README.md": ""}, "config.json: no such file, so this is not a Hugging Face model folder"),
        ("org/foreign", {"config.json": '{"architectures": ["FooForCausalLM"]}'}, "FooForCausalLM"),
        ("org/many", {"a-Q8_0.gguf": "", "a-Q4_0.gguf": ""}, "org/many has several GGUF files"),
        ("org/text:Q4_0", {"README.md": ""}, "model 'org/text:Q4_0': the repository has no GGUF file"),
    ],
)
def test_a_name_of_the_hub_without_a_model_is_all_that_is_told(
    model: str, files: dict[str, str] | None, problem: str,
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nothing of it has been fetched yet, so the hub is asked once, before any actor is started."""

    def snapshot_download(
        name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        if files is None:
            validate_repo_id(name)
            raise RepositoryNotFoundError(
                "no", response=httpx.Response(404, request=httpx.Request("GET", "http://hub"))
            )
        for each, text in files.items():
            (tmp_path / each).write_text(text)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, name, revision=None: list(files or ()))
    assert problem in ends_with(capfd, model)


@pytest.mark.parametrize("flag", ["--data-dir", "--files-dir"])
def test_a_folder_that_cannot_be_had_is_told(capfd: pytest.CaptureFixture[str], tmp_path: Path, flag: str) -> None:
    """With the flag, the path and the reason."""
    (file := tmp_path / "file").touch()
    assert ends_with(capfd, flag, str(file / "in")) == f"pagebus: {flag} {file}/in: Not a directory\n"


@pytest.mark.parametrize("flag", ["--data-dir", "--files-dir"])
def test_a_folder_that_is_read_only_is_told(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """As on a disk that is mounted so: permissions alone do not show it."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert ends_with(capfd, flag, str(tmp_path)) == f"pagebus: {flag} {tmp_path}: it cannot be written to\n"


def test_a_machine_without_room_for_temporary_files_is_told(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose root is read-only."""

    def gettempdir() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "gettempdir", gettempdir)
        text = ends_with(capfd)
    assert "set TMPDIR to a folder that can be written to, or give --data-dir" in text


def test_a_repository_in_the_cache_is_left_to_the_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read it from there, without waiting for the hub before they are started."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--name" / "snapshots").mkdir(parents=True)
    check_settings(Settings(model="org/name", device="cpu"))


def test_a_tokenizer_that_is_not_there_is_told_before_the_start() -> None:
    """By its own name, and once: each actor would say it."""
    with pytest.raises(ModelError, match=r"^tokenizer '/no/such/folder': there is no such folder"):
        check_settings(Settings(tokenizer="/no/such/folder", device="cpu"))
    check_settings(Settings(tokenizer="/no/such/folder", device="cpu", skip_tokenizer_init=True))


@pytest.mark.parametrize(
    ("model", "told"),
    [("", True), ("/models/a", True), ("./a", True), ("a/b/c", True), ("org/name", False), ("org/name:Q4_K_M", False)],
)
def test_names_of_the_hub_are_no_paths(model: str, told: bool) -> None:
    assert is_path(model) == told


def test_a_redis_that_is_down_is_told_twice(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """Once that it is waited for, and by which time, and once that it did not come; no actor is started for it."""
    waits = functools.partial(connect.open_bus, connect_timeout_s=0.2)
    monkeypatch.setattr(connect, "open_bus", waits)
    bus = f"redis://127.0.0.1:{unused_tcp_port}"
    assert main(["serve", "--bus", bus, "--port", "0"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert [json.loads(line)["event"].partition(":")[0] for line in lines[:-1]] == [
        "waiting up to 0.2 s for the bus",
        "no bus",
    ]
    assert lines[-1].startswith(f"pagebus: no connection to Redis at {bus} (")


def test_a_deployment_with_another_model_is_all_that_is_told(
    capfd: pytest.CaptureFixture[str], redis_url: str, redis_names: Names
) -> None:
    """No tokenizer or jobs actor takes part in it before."""

    async def there_is_one() -> None:
        bus = connect.open_bus(redis_url, redis_names.deployment)
        await bus.connect()
        await bus.acquire_lease("executor", "executor-0", {"model": "other"}, ttl_s=60)
        await bus.close()

    asyncio.run(there_is_one())
    name = redis_names.deployment
    words = ("--bus", redis_url, "--name", name, "--port", "0", "--lease-ttl-s", "0.2")
    assert main(["serve", *words]) == 2
    out, text = capfd.readouterr()
    assert out.startswith("Pagebus ")
    problem = f"executor-0 of the deployment {name!r} serves another model on this bus: give this one another --name"
    assert text == f"pagebus: {problem}\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [("nonsense = [", "it is not valid TOML"), ("", "it has no keys"), (None, "No such file or directory")],
)
def test_a_wrong_file_of_keys_is_all_that_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str | None, problem: str
) -> None:
    """Nothing has been started by then that could end with anything else."""
    path = tmp_path / "keys.toml"
    if content is not None:
        path.write_text(content)
    assert main(["serve", "--api-key-file", str(path)]) == 2
    assert capfd.readouterr() == ("", f"pagebus: --api-key-file {path}: {problem}\n")
