"""The rooms of the house, top floor first: who may import from whom. The rules are in ``test_rules.py``.

A row's name stands for a folder and what lies in it, or for one module; the longest name counts. A room may import from
those behind its name, and from itself.
"""

from __future__ import annotations

ROOMS: dict[str, str] = {
    "web": (
        "web.routes.generate web.routes.operate web.routes.store web.routes web.server web.storage web.ingress "
        "web.observatory web.access web.answers web.requests web.telemetry web.http actors.runtime actors.settings "
        "bus bus.messages"
    ),
    "web.routes.generate": (
        "web.routes.operate web.routes web.server web.storage web.adapters web.access web.answers "
        "web.pooling web.requests web.calls web.http actors.runtime bus bus.messages"
    ),
    "web.routes.operate": (
        "web.routes web.server web.ingress web.observatory web.access web.answers web.requests web.telemetry "
        "web.http actors.runtime actors.settings bus.messages"
    ),
    "web.routes.store": "web.routes web.server web.storage web.access web.answers web.requests web.http bus.messages",
    "web.routes": "web.access web.answers web.requests web.http",
    "web.jobs": (
        "web.server web.storage web.ingress web.answers web.pooling web.requests web.telemetry web.calls web.http "
        "actors.runtime actors.telemetry actors.settings bus bus.messages"
    ),
    "web.server": (
        "web.storage web.ingress web.observatory web.access web.answers web.requests web.telemetry web.http "
        "actors.runtime actors.telemetry actors.settings bus bus.messages"
    ),
    "web.storage": "web.adapters web.access web.http actors.settings bus bus.messages",
    "web.adapters": "web.answers web.requests web.calls web.http",
    "web.ingress": (
        "web.observatory web.telemetry web.calls web.http actors.runtime actors.model actors.telemetry actors.settings "
        "bus bus.messages"
    ),
    "web.observatory": "web.requests web.http actors.runtime actors.telemetry actors.settings bus bus.messages",
    "web.access": "web.requests web.http actors.settings bus",
    "web.answers": "web.pooling web.requests web.calls web.calls.parsing web.http bus.messages",
    "web.pooling": "web.requests web.calls web.http",
    "web.requests": "web.calls web.calls.parsing web.http actors.model actors.settings bus.messages",
    "web.telemetry": "web.calls web.http actors.runtime actors.telemetry bus bus.messages",
    "web.calls": "web.calls.parsing web.http bus.messages",
    "web.calls.parsing": "actors.model",
    "web.http": "bus.messages",
    "actors.commands": (
        "actors.commands.jobs actors.commands.terminal actors.bench actors.simulator actors.executor "
        "actors.executor.loading actors.executor.ranks actors.executor.device actors.runtime actors.model "
        "actors.telemetry actors.settings bus bus.messages"
    ),
    "actors.commands.jobs": "actors.runtime actors.telemetry actors.settings bus.memory bus bus.messages",
    "actors.commands.terminal": "actors.settings",
    "actors.offline": "actors.runtime actors.model actors.telemetry actors.settings",
    "actors.bench": (
        "actors.bench.measures actors.bench.driver actors.simulator actors.runtime actors.model actors.telemetry "
        "actors.settings bus bus.messages"
    ),
    "actors.bench.measures": (
        "actors.bench.driver actors.simulator.recording actors.simulator.drawing actors.runtime actors.model "
        "actors.telemetry bus bus.messages"
    ),
    "actors.bench.driver": (
        "actors.simulator actors.simulator.recording actors.runtime actors.model actors.telemetry actors.settings "
        "bus.connect bus.private_redis bus bus.messages"
    ),
    "actors.simulator": (
        "actors.simulator.recording actors.simulator.drawing actors.scheduler.core actors.scheduler.replica "
        "actors.scheduler.events actors.scheduler.config actors.telemetry actors.settings bus bus.messages"
    ),
    "actors.simulator.recording": (
        "actors.simulator.drawing actors.runtime actors.model actors.settings bus bus.messages"
    ),
    "actors.simulator.drawing": "bus.messages",
    "actors.tokenizer": "actors.runtime actors.model.grammars actors.model actors.settings bus bus.messages",
    "actors.detokenizer": "actors.runtime actors.model actors.settings bus bus.messages",
    "actors.scheduler": (
        "actors.scheduler.recovery actors.scheduler.service actors.scheduler.core actors.scheduler.events "
        "actors.scheduler.config actors.runtime actors.model actors.telemetry actors.settings bus bus.messages"
    ),
    "actors.scheduler.recovery": (
        "actors.scheduler.service actors.scheduler.core actors.scheduler.request actors.scheduler.states "
        "actors.scheduler.sequence_output bus bus.messages"
    ),
    "actors.scheduler.service": (
        "actors.scheduler.core actors.scheduler.replica actors.scheduler.events actors.scheduler.request "
        "actors.scheduler.states actors.scheduler.order actors.runtime actors.telemetry bus bus.messages"
    ),
    "actors.scheduler.core": (
        "actors.scheduler.fleet actors.scheduler.moves actors.scheduler.replica actors.scheduler.events "
        "actors.scheduler.request actors.scheduler.states actors.scheduler.readers actors.scheduler.kv "
        "actors.scheduler.sequence_output actors.scheduler.order actors.scheduler.config actors.model bus.messages"
    ),
    "actors.scheduler.fleet": (
        "actors.scheduler.moves actors.scheduler.replica actors.scheduler.request actors.scheduler.kv "
        "actors.scheduler.order actors.model bus.messages"
    ),
    "actors.scheduler.moves": ("actors.scheduler.replica actors.scheduler.request actors.scheduler.kv bus.messages"),
    "actors.scheduler.replica": (
        "actors.scheduler.events actors.scheduler.request actors.scheduler.held_blocks actors.scheduler.states "
        "actors.scheduler.kv actors.scheduler.beam_search actors.scheduler.order actors.model bus.messages"
    ),
    "actors.scheduler.events": "actors.scheduler.request bus.messages",
    "actors.scheduler.request": (
        "actors.scheduler.held_blocks actors.scheduler.progress actors.scheduler.states actors.scheduler.readers "
        "actors.scheduler.sequence_output actors.scheduler.beam_search actors.scheduler.order actors.model bus.messages"
    ),
    "actors.scheduler.held_blocks": "",
    "actors.scheduler.progress": "",
    "actors.scheduler.states": "",
    "actors.scheduler.readers": "",
    "actors.scheduler.kv": "actors.model bus.messages",
    "actors.scheduler.sequence_output": "bus.messages",
    "actors.scheduler.beam_search": "bus.messages",
    "actors.scheduler.order": "",
    "actors.scheduler.config": "actors.model actors.settings",
    "actors.executor.adapters": (
        "actors.executor.models actors.executor.layers actors.executor.memory actors.executor.device actors.model "
        "actors.settings kernels.lora kernels.moe.adapted bus.messages"
    ),
    "actors.executor": (
        "actors.executor.metrics actors.executor.tuning actors.executor.loading actors.executor.ranks "
        "actors.executor.step actors.executor.graphs actors.executor.sampling actors.executor.moves "
        "actors.executor.memory "
        "actors.executor.batch actors.executor.device actors.runtime actors.model.grammars actors.model "
        "actors.telemetry actors.settings kernels.linear.tuning kernels.linear kernels.moe kernels.moe.launch "
        "kernels.quantized.tuning kernels.common bus bus.messages"
    ),
    "actors.executor.metrics": (
        "actors.executor.loading actors.executor.step actors.telemetry actors.settings bus.messages"
    ),
    "actors.executor.tuning": (
        "actors.executor.loading actors.executor.step actors.executor.graphs actors.executor.models "
        "actors.executor.memory actors.executor.batch actors.executor.device actors.model kernels.quantized.tuning "
        "kernels.linear.tuning kernels.linear kernels.moe kernels.moe.launch kernels.attention.forms kernels.common"
    ),
    "actors.executor.loading": (
        "actors.executor.adapters actors.executor.step actors.executor.graphs actors.executor.sampling "
        "actors.executor.pooling actors.executor.models actors.executor.layers actors.executor.memory "
        "actors.executor.batch actors.executor.device actors.executor.moves actors.executor.ranks actors.runtime "
        "actors.model actors.executor.loading.formats "
        "actors.executor.loading.weight_copy actors.settings "
        "kernels.attention kernels.latent kernels.linear kernels.common bus.messages"
    ),
    "actors.executor.loading.formats": (
        "actors.executor.loading.weight_copy actors.executor.layers actors.model kernels.quantized"
    ),
    "actors.executor.loading.weight_copy": "actors.executor.device actors.model",
    "actors.executor.moves": (
        "actors.executor.moves.nixl actors.executor.moves.carriers actors.executor.ranks actors.executor.memory "
        "actors.executor.batch actors.executor.device actors.model actors.settings bus bus.messages"
    ),
    "actors.executor.moves.nixl": "actors.executor.moves.carriers actors.executor.memory bus.messages",
    "actors.executor.moves.carriers": "actors.executor.memory actors.executor.device bus.messages",
    "actors.executor.ranks": (
        "actors.executor.models actors.executor.batch actors.executor.device actors.runtime actors.model "
        "actors.settings kernels.exchange kernels.coded bus bus.messages"
    ),
    "actors.executor.step": (
        "actors.executor.graphs actors.executor.sampling actors.executor.models actors.executor.pooling "
        "actors.executor.layers actors.executor.memory actors.executor.batch actors.executor.device actors.model "
        "actors.telemetry actors.settings kernels.attention kernels.attention.forms kernels.latent kernels.linear "
        "kernels.moe kernels.moe.launch kernels.quantized kernels.common bus.messages"
    ),
    "actors.executor.graphs": (
        "actors.executor.models actors.executor.layers actors.executor.batch actors.executor.device kernels.cublas"
    ),
    "actors.executor.sampling": (
        "actors.executor.batch actors.executor.device actors.model.grammars actors.model kernels.sampling bus.messages"
    ),
    "actors.executor.models": (
        "actors.executor.pooling actors.executor.layers actors.executor.device actors.model actors.settings "
        "kernels.attention kernels.quantized kernels.common bus.messages"
    ),
    "actors.executor.pooling": "actors.executor.layers actors.executor.device actors.model",
    "actors.executor.layers": (
        "actors.executor.memory actors.executor.device actors.model kernels.attention kernels.latent kernels.common "
        "kernels.moe kernels.moe.adapted kernels.layers kernels.lora kernels.coded kernels.quantized bus.messages"
    ),
    "actors.executor.memory": (
        "actors.executor.batch actors.executor.device actors.runtime actors.model actors.settings kernels.common "
        "bus.messages"
    ),
    "actors.executor.batch": "actors.executor.device actors.model kernels.attention bus.messages",
    "actors.executor.device": (
        "actors.model actors.settings kernels.attention kernels.latent kernels.moe kernels.moe.adapted "
        "kernels.quantized kernels.sampling kernels.batch kernels.layers kernels.lora kernels.coded kernels.common"
    ),
    "actors.runtime": "actors.telemetry actors.settings bus.connect bus.redis bus.memory bus.private_redis bus",
    "actors.model.grammars": "actors.model bus.messages",
    "actors.model": "actors.settings actors.shipped_model bus.messages",
    "actors.telemetry": "actors.settings bus",
    "actors.settings": "bus.redis",
    "actors.shipped_model": "",
    "actors": "",
    "kernels": "",
    "kernels.attention": "kernels.attention.forms kernels.layers kernels.common",
    "kernels.attention.forms": "kernels.linear kernels.common",
    "kernels.latent": "kernels.attention kernels.attention.forms kernels.layers kernels.common",
    "kernels.linear.tuning": "kernels.linear kernels.specialized kernels.layers kernels.common",
    "kernels.linear": "kernels.cublas kernels.specialized kernels.coded kernels.lora kernels.layers kernels.common",
    "kernels.specialized": "kernels.coded kernels.layers kernels.common",
    "kernels.moe.adapted": "kernels.moe kernels.moe.launch kernels.quantized kernels.lora kernels.common",
    "kernels.quantized": (
        "kernels.moe kernels.moe.launch kernels.linear kernels.specialized kernels.coded kernels.lora kernels.layers "
        "kernels.common"
    ),
    "kernels.quantized.tuning": (
        "kernels.quantized kernels.linear.tuning kernels.linear kernels.layers kernels.coded kernels.common"
    ),
    "kernels.moe": (
        "kernels.moe.launch kernels.linear.tuning kernels.linear kernels.specialized kernels.coded kernels.common"
    ),
    "kernels.moe.launch": "kernels.linear kernels.specialized kernels.common",
    "kernels.coded": "kernels.common",
    "kernels.cublas": "kernels.common",
    "kernels.sampling": "kernels.common",
    "kernels.batch": "kernels.common",
    "kernels.exchange": "kernels.layers kernels.common",
    "kernels.layers": "kernels.coded kernels.common",
    "kernels.lora": "kernels.common",
    "kernels.common": "",
    "bus.connect": "bus.redis bus.memory bus",
    "bus.redis": "bus bus.messages",
    "bus.memory": "bus bus.messages",
    "bus.private_redis": "bus",
    "bus": "bus.messages",
    "bus.messages": "",
}
FROM_ACTORS = ("actors.runtime", "actors.telemetry", "actors.settings", "actors.model")
"""What ``web`` may take from ``actors``."""
PURE = (
    "actors.scheduler.core",
    "actors.scheduler.fleet",
    "actors.scheduler.moves",
    "actors.scheduler.replica",
    "actors.scheduler.kv",
    "actors.scheduler.events",
    "actors.scheduler.request",
    "actors.scheduler.held_blocks",
    "actors.scheduler.progress",
    "actors.scheduler.states",
    "actors.scheduler.readers",
    "actors.scheduler.sequence_output",
    "actors.scheduler.beam_search",
    "actors.scheduler.order",
)
"""What decides in the scheduler: the same news give the same plans, on any clock and any bus."""
IMPURE = ("asyncio", "threading", "time", "random", "os", "torch", "bus", "actors.runtime", "actors.telemetry")
"""What none of these may know; messages of the bus they may."""
