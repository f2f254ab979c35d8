"""The bus, and how many actors of each kind run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagebus.actors.settings.declaring import setting
from pagebus.bus.redis.url_check import url_problem

SHARED_OUT = "(default: one for each executor, if there are cores enough)"
BUS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "memory")


def _check_bus(url: Any) -> str | None:
    scheme = str(url).partition(":")[0]
    if scheme in BUS_SCHEMES:
        return None if scheme == "memory" else url_problem(str(url))
    return f"needs a URL that starts with one of {', '.join(s + '://' for s in BUS_SCHEMES)}"


def _check_name(value: Any) -> str | None:
    allowed = all(c.isalnum() or c in "-_." for c in str(value)) and str(value).isascii()
    return None if value and allowed else "may hold only letters, digits, '-', '_' and '.', and not be empty"


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """The bus, and how many actors of each kind run."""

    name: str = setting("pagebus", help="name of the deployment; it prefixes every key on the bus", check=_check_name)
    bus: str | None = setting(
        None,
        help="URL of the bus: redis://, rediss://, unix://, redis+sentinel:// or memory:// "
        "(default: a private redis-server, or everything in one process where there is none)",
        check=_check_bus,
    )
    redis_password: str | None = setting(
        None, help="password of the Redis of --bus, unescaped, if the URL has none", secret=True
    )
    redis_ca_file: str | None = setting(None, help="CA certificates for a Redis with TLS (default: the system's)")
    redis_cert_file: str | None = setting(None, help="client certificate for a Redis that requires one")
    redis_key_file: str | None = setting(None, help="key of --redis-cert-file")
    allow_open_redis: bool = setting(False, help="use a Redis on another machine that needs no password")
    executors: int = setting(1, help="executors to start, one per GPU", low=1, high=1024)
    tensor_parallel_size: int = setting(
        1,
        help="ranks of each executor, processes among which the model is divided; on GPUs one for each rank",
        low=1,
        high=64,
    )
    pipeline_parallel_size: int = setting(
        1,
        help="stages of each executor, each of --tensor-parallel-size ranks, among which a model's layers are divided",
        low=1,
        high=64,
    )
    enable_expert_parallel: bool = setting(
        False, help="divide the experts of a layer among ranks as a whole, in place of a part of each for every rank"
    )
    rank: int = setting(0, help="which rank of its executor `pagebus actor executor` is", low=0, high=63)
    tokenizers: int | None = setting(None, help=f"tokenizers to start {SHARED_OUT}", low=1, high=1024)
    schedulers: int = setting(1, help="schedulers to start: one leads, others stand by", low=1, high=16)
    detokenizers: int | None = setting(None, help=f"detokenizers to start {SHARED_OUT}", low=1, high=1024)
    ingresses: int | None = setting(
        None,
        help=f"HTTP servers to start; they share the port, or use one each with --port 0 {SHARED_OUT}",
        low=1,
        high=1024,
    )
    job_actors: int = setting(1, help="jobs actors to start, which run queued jobs; 0: jobs wait", low=0, high=1024)
    lease_ttl_s: float = setting(5.0, help="seconds after which a silent actor counts as dead", low=0.2, high=300)
    data_dir: str | None = setting(None, help="folder of the private redis-server (default: a temporary one)")
    actor_name: str | None = setting(
        None, help="name of this actor on the bus (default: made unique)", check=_check_name
    )
    health_file: str | None = setting(
        None,
        help="file that `pagebus actor` touches at least every third of --lease-ttl-s while the actor is well "
        "(default: none)",
    )
    kernels_dir: str | None = setting(
        None,
        help="folder of kernels compiled ahead: used in place of TRITON_CACHE_DIR if it holds all kernels of this "
        "start (default: none)",
    )
    launch_shapes_dir: str | None = setting(
        None,
        help="folder of the launch shapes that `pagebus tune` has measured (default: pagebus/launch-shapes in the "
        "user's cache folder)",
    )
    gpu_lock_dir: str | None = setting(
        None,
        help="folder of locks by which executors of one machine share its GPUs (default: each uses the first it sees)",
    )
