"""The HTTP ingress actor: serves OpenAI's API to clients and exchanges messages with the other actors over the bus."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import orjson
from aiohttp import web

from pagebus.actors.runtime.actor import Actor
from pagebus.actors.runtime.version import version
from pagebus.actors.settings import Settings, SettingsError
from pagebus.bus.contract import Bus, BusError, BusUnavailable
from pagebus.bus.messages import BatchQueued
from pagebus.bus.outbox import Outbox
from pagebus.bus.streams import address_of
from pagebus.web.access.admission import Admission
from pagebus.web.access.auth import KeyRing
from pagebus.web.access.bodies import Bodies
from pagebus.web.access.cors import Cors
from pagebus.web.access.hosts import open_hosts
from pagebus.web.access.key_file import KeyFile
from pagebus.web.access.sagemaker import Sessions
from pagebus.web.answers.writing import Streams
from pagebus.web.http.connection import Connections
from pagebus.web.http.errors import unavailable
from pagebus.web.http.expect import check_expectation
from pagebus.web.http.limits import WRITE_TIMEOUT_S, max_body_bytes
from pagebus.web.ingress.adapter_folder import AdapterFolder
from pagebus.web.ingress.adapter_registry import AdapterRegistry
from pagebus.web.ingress.inbox import Inbox
from pagebus.web.ingress.membership import EAGER_REFRESH_S, FRESH_S, REFRESH_S, Membership
from pagebus.web.ingress.operations import Operations
from pagebus.web.ingress.request_log import open_request_log
from pagebus.web.observatory.facts import facts_of
from pagebus.web.observatory.observatory import Observatory
from pagebus.web.requests.served_model import ServedModel, cached_block_size, load_served_model
from pagebus.web.routes import EVENTS
from pagebus.web.routes.generate import (
    embeddings,
    generation,
    inference,
    invocations,
    messages,
    rendering,
    responses,
    scores,
    tokens,
)
from pagebus.web.routes.generate.background import Background
from pagebus.web.routes.openapi import describe
from pagebus.web.routes.operate import aborts, adapters, debug, docs, models, observatory, page, service, steering
from pagebus.web.routes.store import batches, files
from pagebus.web.server import listener
from pagebus.web.server.context import CONTEXT, Context
from pagebus.web.server.middleware import boundary, mark_response
from pagebus.web.server.open_tracing import open_tracing
from pagebus.web.storage.files import open_store
from pagebus.web.storage.quota import ResponseQuota
from pagebus.web.storage.responses import Responses
from pagebus.web.telemetry.load_report import load_of
from pagebus.web.telemetry.metrics import IngressMetrics, deployment_metrics

TEXT_ROUTES = (
    *generation.ROUTES,
    *embeddings.ROUTES,
    *scores.ROUTES,
    *invocations.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
    *responses.ROUTES,
    *messages.ROUTES,
    *tokens.ROUTES,
    *rendering.ROUTES,
)
"""Routes that need a tokenizer, or lead to such; absent with ``--tokens-only``."""
ROUTES = (
    *page.ROUTES,
    *service.ROUTES,
    *docs.ROUTES,
    *models.ROUTES,
    *aborts.ROUTES,
    *inference.ROUTES,
    *TEXT_ROUTES,
    *observatory.ROUTES,
    *steering.ROUTES,
    *adapters.ROUTES,
    *debug.ROUTES,
)
SHUTDOWN_S = 3.0
"""Seconds that handlers have to tell their clients that the server stops."""
TICK_S = 0.5
SWITCH_INTERVAL_S = 0.001
"""Python's thread switch interval: at the default of 5 ms, parsing in other threads would hold up each turn of the
event loop by as much."""


def make_application(context: Context) -> web.Application:
    """The aiohttp application over a context."""
    app = web.Application(middlewares=[boundary], client_max_size=context.bodies.max_bytes)
    app.on_response_prepare.append(mark_response)
    _add_routes(app, context)
    if context.settings.root_path is not None:  # a proxy may pass the path on, or take it away
        below = web.Application(client_max_size=context.bodies.max_bytes)
        _add_routes(below, context)
        app.router.add_get(context.settings.root_path, page.to_the_page, name="to_the_page")
        app.add_subapp(context.settings.root_path, below)
    return app


def _add_routes(app: web.Application, context: Context) -> None:
    routes = [route for route in ROUTES if not (context.settings.tokens_only and route in TEXT_ROUTES)]
    app[CONTEXT] = context
    root = context.settings.root_path or ""
    description: Callable[[], bytes] = cache(
        lambda: orjson.dumps(describe(routes, context.model, context.version, root=root))
    )
    app[docs.DESCRIPTION] = description
    for route in routes:
        if route.method == "GET":
            whole = EVENTS not in route.about.answer_types  # a HEAD has no body, and events know no end
            app.router.add_get(route.path, route.handler, name=route.name, allow_head=whole)
        else:
            app.router.add_route(
                route.method, route.path, route.handler, name=route.name, expect_handler=check_expectation
            )


class IngressActor(Actor):
    """Serves HTTP. ``model`` describes the served model; None: it is read from the model's config at the start."""

    kind = "ingress"

    def __init__(self, settings: Settings, bus: Bus, name: str, *, model: ServedModel | None = None) -> None:
        super().__init__(settings, bus, name)
        self.port: int | None = None
        """The port it listens on, once it does."""
        self._model = model
        self._key_file = KeyFile(settings.api_key_file) if settings.api_key_file else None
        self._runner: web.AppRunner | None = None
        self._listening: list[asyncio.Server] = []
        self.connections: Connections | None = None
        self.context: Context | None = None
        self._outbox: Outbox | None = None
        self._heavy: Outbox | None = None
        self._background: Background | None = None

    def lease_info(self) -> dict[str, object]:
        return super().lease_info() | ({} if self.port is None else {"port": self.port})

    def is_well(self) -> bool:
        """Like ``/readyz``: a request would be answered now."""
        return self.context is not None and not self.context.missing()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Learn about the model, start the tasks of the bus side, then listen."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        model = self._model or await load_served_model(self.settings, int(time.time()))
        self._outbox = Outbox(self.bus, self.epoch)
        self._heavy = Outbox(self.bus, self.epoch)
        self.context = self._make_context(model, self._outbox, self._heavy)
        await self.context.adapters.load_named()
        self.spawn(self.context.adapters.run(), "adapters")
        if folder := self.settings.lora_resolver_cache_dir:
            self.spawn(AdapterFolder(folder, self.context.adapters, self.log).run(), "adapter folder")
        self.spawn(self._outbox.run(), "outbox")
        self.spawn(self._heavy.run(), "heavy outbox")
        self.spawn(self.context.inbox.mailbox.keep_for_ever(), "mailbox")
        self.spawn(self.context.inbox.run(), "inbox")
        self.spawn(self._keep_membership(self.context.membership, self.context.observatory), "membership")
        self.spawn(self.context.observatory.history.run(), "history")
        self.spawn(self._tick(self.context), "tick")
        self._background = Background(self.context, self.bus, self.names, self.name)
        self.spawn(self._background.run(), "background")
        await self._listen(self.context)

    async def serve(self) -> None:
        """Answer until told to drain; then let what runs end."""
        await self.draining.wait()
        assert self.context is not None
        if self.settings.counts["ingress"] > 1 and self.context.membership.others_listen(self.name, self.port):
            self._listen_no_more()  # else its share of new connections would come here, and be refused
        self.log.info("waiting for open requests", requests=self.context.inbox.num_open)
        await self.context.inbox.idle()

    def bus_restarted(self) -> None:
        """Whatever is lost of the open requests, they are asked for again."""
        if self.context is not None:
            self.context.inbox.mailbox.doubt(lost=True)

    async def measure(self) -> None:
        if self.context is not None:
            self.context.metrics.open_requests.set(self.context.inbox.num_open)
            self.context.metrics.open_tokens.set(self.context.admission.open_tokens)

    def lease_lapsed(self) -> None:
        if self.context is not None:
            self.context.inbox.mailbox.doubt()

    async def stop(self) -> None:
        """End what still runs with an error, say so on the bus, close."""
        if self.context is not None:
            if self._background is not None:
                await self._background.stop()
            self.context.inbox.fail_all(unavailable("The server is shutting down."))
            await self.context.observatory.shut()
        self._listen_no_more()
        if self.settings.uds is not None and self._listening:
            listener.remove_path(self.settings.uds)
        if self._runner is not None:
            await self._runner.cleanup()
        if self._outbox is not None and self._heavy is not None and self.context is not None:
            with contextlib.suppress(BusError, TimeoutError):
                async with asyncio.timeout(self.settings.lease_ttl_s):
                    await asyncio.gather(self._heavy.flush(), self._outbox.flush())
            await self.context.inbox.mailbox.forget()
        if self.context is not None and self.context.tracing is not None:
            await self.context.tracing.stop()

    def _listen_no_more(self) -> None:
        """Take no new connection; those that are open stay."""
        for server in self._listening:
            server.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _make_context(self, model: ServedModel, outbox: Outbox, heavy: Outbox) -> Context:
        membership = Membership(self.bus, fresh_s=min(FRESH_S, self.settings.lease_ttl_s))
        metrics = IngressMetrics(self.metrics, model.max_model_len)
        address = address_of(self.name, self.epoch)
        tracing = open_tracing(self.settings, model.name, self.log)
        request_log = open_request_log(self.settings, self.log)
        inbox = Inbox(self.bus, self.names, address, outbox, metrics, self.log, tracing, request_log, heavy,
                      cached_block_size(self.settings), self.publish_soon)  # fmt: skip
        facts = facts_of(self.settings, model, self.name)
        keys = KeyRing(self.settings.api_key, self._key_file.news() or () if self._key_file else ())
        return Context(
            settings=self.settings,
            address=address,
            version=version(),
            model=model,
            inbox=inbox,
            membership=membership,
            metrics=metrics,
            streams=Streams(),
            keys=keys,
            admission=Admission(self.settings.max_num_queued_requests, self.settings.max_num_queued_tokens),
            cors=Cors(self.settings.allowed_origins),
            hosts=open_hosts(self.settings, keys),
            observatory=self._make_observatory(inbox, membership, facts),
            adapters=AdapterRegistry(self.bus, self.settings, model.adapters, model.names),
            sessions=Sessions(self.bus, self.settings.sagemaker_session_s),
            operations=Operations(self.bus, inbox.queries, membership, restarts_alone=bool(facts["restarts_alone"])),
            bodies=Bodies(max_body_bytes(model.max_model_len), keys),
            log=self.log,
            draining=self.draining.is_set,
            bus_trouble=lambda: self.bus_trouble,
            render_metrics=lambda: self._render_metrics(membership, model.name),
            read_load=lambda: load_of(self.bus, membership.leases),
            queue_batch=self._queue_batch,
            responses=self._make_responses(),
            store=open_store(self.settings),
            tracing=tracing,
            request_log=request_log,
        )

    async def _render_metrics(self, membership: Membership, model: str) -> str:
        await self.measure()
        return await deployment_metrics(self.bus, membership.leases, self.name, self.metrics.snapshot(), model)

    async def _queue_batch(self, batch: BatchQueued) -> None:
        await self.bus.publish([(self.names.jobs, batch)])

    def _make_observatory(self, inbox: Inbox, membership: Membership, facts: dict[str, Any]) -> Observatory:
        return Observatory(
            self.bus, self.names, inbox.queries, lambda: membership.leases, (self.name, self.metrics.snapshot), facts,
            self.log, lambda: ("bus",) if self.bus_trouble else membership.missing(),
        )  # fmt: skip

    def _make_responses(self) -> Responses:
        settings = self.settings
        quota = ResponseQuota(
            settings.max_responses_bytes, settings.max_responses_bytes_per_key, settings.response_ttl_s
        )
        return Responses(self.bus, self.names, settings.response_ttl_s, quota)

    async def _listen(self, context: Context) -> None:
        self._runner = web.AppRunner(
            make_application(context),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self.connections = Connections(self._runner.server, self.settings.max_connections_per_address)
        if (most := listener.allow_open_files()) <= listener.FEW_OPEN_FILES:
            remedy = "raise the hard limit (ulimit -Hn): every connection takes one, and more are reset"
            self.log.warning("few files may be open", limit=most, remedy=remedy)
        loop = asyncio.get_running_loop()
        if (path := self.settings.uds) is not None:
            for sock in listener.listen_on_path(path):
                server = await loop.create_unix_server(self.connections, sock=sock, backlog=listener.BACKLOG)
                self._listening.append(server)
            self.log.info("listening", path=path)
            return
        for sock in await listener.listen(
            self.settings.host, self.settings.port, share=self.settings.counts["ingress"] > 1
        ):
            self._listening.append(await loop.create_server(self.connections, sock=sock, backlog=listener.BACKLOG))
            self.port = self.port or sock.getsockname()[1]
        self.log.info("listening", host=self.settings.host, port=self.port)
        if context.keys.is_empty and not context.hosts.checked:
            remedy = "set --api-key, or --allowed-hosts against pages of the web"
            self.log.warning("open to the network: no API keys", host=self.settings.host, remedy=remedy)

    async def _keep_membership(self, membership: Membership, observatory: Observatory) -> None:
        while True:
            with contextlib.suppress(BusUnavailable):
                await membership.refresh()
            observatory.look()
            await asyncio.sleep(EAGER_REFRESH_S if membership.missing() else REFRESH_S)

    async def _tick(self, context: Context) -> None:
        """Twice a second: cut clients that take nothing, and look whether the file of keys has changed."""
        while True:
            await asyncio.sleep(TICK_S)
            if context.tracing is not None:
                context.tracing.tick()
            if cut := context.streams.cut_blocked(WRITE_TIMEOUT_S):
                self.log.warning("slow clients cut off", clients=cut)
            if self._key_file is not None:
                await self._renew_keys(context.keys, self._key_file)

    async def _renew_keys(self, keys: KeyRing, file: KeyFile) -> None:
        """Take over what the file says now; if it says nothing sensible, the keys stay as they are."""
        try:
            listed = await asyncio.to_thread(file.news)
        except SettingsError as error:
            self.log.error("keys not renewed", error=str(error))
            return
        if listed is not None:
            keys.replace(listed)
            self.log.info("keys renewed", keys=len(listed))
