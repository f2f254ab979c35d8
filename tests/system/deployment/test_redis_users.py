"""The example of Redis users (docs/redis-users.acl): everything works, and nobody may do what he has no need of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from pagebus.actors.commands.cli import main
from pagebus.bus.contract import Bus
from pagebus.bus.private_redis.server import find_redis_server
from pagebus.bus.redis.bus import RedisBus
from pagebus.bus.streams import RESPONSES_GROUP, SCHEDULER_GROUP, TOKENIZER_GROUP, Names
from tests.helpers.model_factory import REFERENCE_CONFIGS, make_reference
from tests.helpers.waiting import eventually
from tests.system.serving import serving

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server on PATH")
ACL = Path(__file__).parents[3] / "docs" / "redis-users.acl"
ACTORS = ("ingress", "jobs", "tokenizer", "scheduler", "executor", "detokenizer")
NAMES = Names()
OTHERS_KEY = "something:else"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_reference(tmp_path_factory.mktemp("model"), REFERENCE_CONFIGS[0])


@asynccontextmanager
async def redis_with_users(folder: Path, *options: str) -> AsyncIterator[str]:
    """A server with the users of the example and one for the test; yields the path of its socket."""
    users = ACL.read_text().replace("CHANGE-ME", "secret")
    (folder / "users.acl").write_text(users + "user test on >secret ~* &* +@all\n")
    socket, program = folder / "redis.sock", find_redis_server()
    assert program is not None
    socket.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        program, "--port", "0", "--unixsocket", str(socket), "--aclfile", str(folder / "users.acl"), "--save", "",
        *options, cwd=folder, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:

        async def is_there() -> bool:
            assert process.returncode is None, "redis-server does not take the file"
            return socket.exists()

        await eventually(is_there)
        yield str(socket)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def client(socket: str, user: str) -> AsyncIterator[Redis]:
    """redis-py's own client, as one of the users."""
    redis = Redis(unix_socket_path=socket, username=user, password="secret", decode_responses=True)
    try:
        yield redis
    finally:
        await redis.aclose()


async def test_a_deployment_with_a_user_per_actor(folder, tmp_path):
    """Requests, streams, aborts, jobs and what operators do: Redis has refused nothing."""
    async with redis_with_users(tmp_path) as socket:

        def open_bus(kind: str) -> Bus:
            return RedisBus(f"unix://{kind}:secret@{socket}", client_name=kind)

        async with serving(folder, open_bus=open_bus, max_model_len=64) as served:
            body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            assert (await served.post("completions", **body))["usage"]["completion_tokens"] == 4
            assert await served.stream("completions", **body)
            for path in ("/health", "/metrics", "/api/history"):
                assert await served.get(path) == 200
            async with client(socket, "pagebus") as redis:
                line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
                await redis.xadd(NAMES.jobs, {"request": json.dumps(line)})

                async def done() -> bool:
                    return bool(await redis.xlen(NAMES.job_results))

                await eventually(done)
                ((_, [(_, result)]),) = await redis.xread({NAMES.job_results: "0"})
                assert json.loads(result["result"])["response"]["status_code"] == 200
            bus = f"unix://pagebus:secret@{socket}"
            assert await asyncio.to_thread(main, ["dead-letters", "list", "--bus", bus]) == 0
        async with client(socket, "test") as redis:
            assert [line for line in await redis.acl_log() if line["reason"] != "auth"] == []


async def test_a_killed_server_keeps_transactions(tmp_path):
    """A starting Redis replays its file as the default user, and leaves out transactions that it may not execute."""
    always = ("--appendonly", "yes", "--appendfsync", "always")
    async with redis_with_users(tmp_path, *always) as socket, client(socket, "scheduler") as redis:
        both = redis.pipeline(transaction=True)
        both.xadd(NAMES.journal, {"f": "first"}).xadd(NAMES.journal, {"f": "second"})
        await both.execute()
    async with redis_with_users(tmp_path, *always) as socket, client(socket, "test") as redis:
        assert [entry["f"] for _, entry in await redis.xrange(NAMES.journal)] == ["first", "second"]
        default = await redis.acl_getuser("default")
        assert ("off" in default["flags"], "nopass" in default["flags"], default["passwords"]) == (True, False, [])


def recovery(user: str) -> list[tuple[str, ...]]:
    """What only happens when something has failed."""
    common: list[tuple[str, ...]] = [
        ("SREM", NAMES.leases, NAMES.lease("scheduler", "x")),
        ("XADD", NAMES.dead_letters(user), "MAXLEN", "1000", "*", "f", "v"),
    ]

    def claims(stream: str, group: str) -> list[tuple[str, ...]]:
        return [
            ("XPENDING", stream, group, "-", "+", "10", "x"), ("XCLAIM", stream, group, "x", "0", "1-1"),
            ("XGROUP", "DELCONSUMER", stream, group, "x"), ("XINFO", "CONSUMERS", stream, group),
            ("XINFO", "GROUPS", stream), ("XLEN", stream), ("XRANGE", stream, "-", "+"),
        ]  # fmt: skip

    own: dict[str, list[tuple[str, ...]]] = {
        "ingress": [
            ("UNLINK", NAMES.replies("ingress-0@1")), ("EXPIRE", NAMES.replies("ingress-0@1"), "30"),
            ("XADD", NAMES.replies("ingress-0@1"), "MAXLEN", "0", "*", "f", "v"),
            ("XADD", NAMES.control, "*", "f", "v"), ("XADD", NAMES.jobs, "*", "batch_id", "x"),
            *claims(NAMES.responses, RESPONSES_GROUP), ("HSETNX", NAMES.table("adapters"), "a", "{}"),
            ("HSET", NAMES.table("adapters"), "a", "{}"), ("HDEL", NAMES.table("adapters"), "a"),
        ],
        "jobs": [*claims(NAMES.jobs, "jobs"), ("HGETALL", NAMES.table("adapters")),
                 ("UNLINK", NAMES.replies("jobs-0@1")),
                 ("XADD", NAMES.replies("jobs-0@1"), "MAXLEN", "0", "*", "f", "v")],
        "tokenizer": [*claims(NAMES.requests, TOKENIZER_GROUP), ("XADD", NAMES.replies("ingress-0@1"), "*", "f", "v")],
        "scheduler": [
            *claims(NAMES.tokenized, SCHEDULER_GROUP), *claims(NAMES.control, SCHEDULER_GROUP),
            ("SET", NAMES.key("granted", "executor", "x"), "2"), ("XADD", NAMES.results("x"), "1-1", "f", "v"),
            ("XADD", NAMES.replies("ingress-0@1"), "NOMKSTREAM", "*", "f", "v"),
            ("XTRIM", NAMES.journal, "MINID", "=", "1"), ("XINFO", "STREAM", NAMES.results("x")),
            ("XTRIM", NAMES.steps("x"), "MINID", "=", "1"),
        ],
        "executor": [("XINFO", "STREAM", NAMES.results("x")), ("XADD", NAMES.results("x"), "1-1", "f", "v")],
        "detokenizer": [("XADD", NAMES.control, "*", "f", "v"), ("XTRIM", NAMES.sequences("x"), "MINID", "=", "1")],
    }  # fmt: skip
    return common + own[user]


FOREIGN: dict[str, list[tuple[str, ...]]] = {
    "ingress": [("XADD", NAMES.tokenized, "*", "f", "v"), ("XACK", NAMES.requests, "g", "1-1"),
                ("SET", NAMES.lease("scheduler", "leader"), "x")],
    "jobs": [("XADD", NAMES.tokenized, "*", "f", "v"), ("HDEL", NAMES.table("adapters"), "a"),
             ("SET", NAMES.lease("scheduler", "leader"), "x")],
    "tokenizer": [("XREAD", "STREAMS", NAMES.replies("ingress-0@1"), "0"), ("XADD", NAMES.steps("x"), "*", "f", "v")],
    "scheduler": [("XREAD", "STREAMS", NAMES.requests, "0"), ("XADD", NAMES.jobs, "*", "f", "v"),
                  ("UNLINK", NAMES.replies("ingress-0@1"))],
    "executor": [("XADD", NAMES.steps("x"), "*", "f", "v"), ("XREAD", "STREAMS", NAMES.replies("ingress-0@1"), "0")],
    "detokenizer": [("XADD", NAMES.results("x"), "*", "f", "v"), ("XREAD", "STREAMS", NAMES.requests, "0")],
}  # fmt: skip
"""What belongs to other actors."""
DANGEROUS: list[tuple[str, ...]] = [
    ("FLUSHALL",), ("CONFIG", "GET", "*"), ("EVAL", "return 1", "0"), ("KEYS", "*"), ("SHUTDOWN",), ("ACL", "LIST"),
    ("DEBUG", "SLEEP", "1"), ("MONITOR",), ("SAVE",), ("REPLICAOF", "NO", "ONE"), ("SCRIPT", "LOAD", "x"),
    ("MODULE", "LIST"), ("CLIENT", "KILL", "ID", "1"), ("SUBSCRIBE", "x"), ("SET", OTHERS_KEY, "x"),
]  # fmt: skip


async def test_what_each_user_may(tmp_path):
    """All that recovery needs; nothing that is another actor's, dangerous, or outside the deployment."""
    async with redis_with_users(tmp_path) as socket, client(socket, "test") as redis:

        async def verdict(user: str, command: tuple[str, ...]) -> str:
            return str(await redis.execute_command("ACL", "DRYRUN", user, *command))

        for user in ACTORS:
            for command in recovery(user):
                assert (user, command, await verdict(user, command)) == (user, command, "OK")
            for command in FOREIGN[user]:
                assert (user, command, await verdict(user, command)) != (user, command, "OK")
        for user in (*ACTORS, "pagebus"):
            for command in DANGEROUS:
                assert (user, command, await verdict(user, command)) != (user, command, "OK")
            async with client(socket, user) as own:
                with pytest.raises(NoPermissionError):
                    await own.flushall()
