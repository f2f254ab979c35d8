"""One frame of `pagebus top`: an ingress's events so far, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from pagebus.actors.commands.terminal.columns import Columns, Fitting

GIB = 2**30
RATES_AFTER = 2
STATE_STYLES = {"ready": "green", "gone": "red"}


class View:
    """Follows the events (docs/page.md)."""

    def __init__(self) -> None:
        self.model = ""
        self.version = ""
        self.actors: Sequence[Mapping[str, Any]] = ()
        self.streams: Sequence[Mapping[str, Any]] = ()
        self.vitals: Mapping[str, float | None] = {}
        self.replicas: Sequence[Mapping[str, Any]] = ()
        self.away = ""
        self.held = ""
        self._figures: Sequence[str] = ()
        self._seen: Counter[str] = Counter()

    @property
    def is_whole(self) -> bool:
        """Whether every part has been received, or cannot be: actors twice, because their rates need two looks."""
        seen = self._seen
        return seen["actors"] >= RATES_AFTER and seen["vitals"] > 0 and seen["state"] + seen["away"] > 0

    def take(self, name: str, data: Mapping[str, Any]) -> None:
        """An event."""
        self._seen[name] += 1
        match name:
            case "hello":
                self.model, self.version, self._figures = str(data["model"]), str(data["version"]), data["figures"]
            case "state":
                self.replicas, self.away = data["replicas"], ""
            case "away":
                self.replicas, self.away = (), str(data["message"])
            case "actors":
                self.actors, self.streams, self.held = data["actors"], data["streams"], data.get("held", "")
            case "vitals":
                self.vitals = dict(zip(self._figures, data["figures"], strict=True))

    def draw(self, height: int | None = None) -> RenderableType:
        """The frame, of at most so many lines where the actors leave place for one stream."""
        parts: list[RenderableType] = [Text(f"Pagebus {self.version}  {self.model}", style="bold"), self._summary()]
        if self.away:
            parts.append(Text(self.away, style="red"))
        if self.held:
            parts.append(Text(f"An operator has paused the work ({self.held}).", style="yellow"))
        above = Group(*parts, self._replicas(), self._actors())
        return Fitting(above, Columns("stream", "entries"), self._streams(), height)

    def _summary(self) -> Columns:
        table = Columns(None, "running", "waiting", "output tok/s", "prompt tok/s", "requests/s", "TTFT p50",
                       "p99", "ITL p50", "p99", "cache", "hits", "busy")  # fmt: skip
        get = self.vitals.get
        counts = [_number(get(name)) for name in ("running", "waiting")]
        rates = [_number(get(f"{name}_per_s")) for name in ("output_tokens", "prompt_tokens", "requests")]
        times = [_ms(get(name)) for name in ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")]
        shares = [_share(get(name)) for name in ("kv_usage", "hit_rate", "device_busy")]
        table.add_row(*counts, *rates, *times, *shares)
        return table

    def _replicas(self) -> Columns:
        table = Columns("replica", "step", "in flight", "running", "slots", "blocks", "used", "cached", "host used",
                       "disk", "swaps", "recomputed", "pulled", "drafted", "accepted", "adapters")  # fmt: skip
        for each in self.replicas:
            used, host = each["num_blocks"] - each["num_free"], each["num_host_blocks"] - each["num_host_free"]
            disk = each["num_disk_used"] if each["num_disk_blocks"] else "-"
            numbers = (each["step"], each["num_in_flight"], each["num_running"], each["num_slots"], each["num_blocks"],
                       used, each["num_cached"], host, disk, each["num_swaps"], each["num_recomputes"],
                       each["pulled_blocks"])  # fmt: skip
            drafted, accepted = each["num_drafted"], each["num_accepted"]
            drafts = (str(drafted), _share(accepted / drafted if drafted else None)) if each["most_drafts"] else "--"
            adapters = f"{len(each['adapters'])} ({each['num_adapter_blocks']})" if each["most_adapters"] else "-"
            name = f"{each['name']} ({each['role']})" if each["role"] else each["name"]
            table.add_row(name, *map(str, numbers), *drafts, adapters)
        return table

    def _actors(self) -> Columns:
        table = Columns("actor", "state", "rate", "CPU", "GiB", "device", "GPU GiB", "restarts")
        for each in self.actors:
            state = str(each["phase"] or each["state"])
            rate = "" if each["rate"] is None else f"{_number(each['rate'])} {each['unit']}"
            if each["unit"] == "busy":
                rate = f"{_share(each['rate'])} busy"
            table.add_row(
                each["name"],
                Text(state, style=STATE_STYLES.get(state, "yellow")),
                rate,
                _share(each["cpu"]),
                _gib(each["memory_bytes"]),
                _share(each["gpu"]),
                _gib(each["gpu_memory_bytes"]),
                str(each["restarts"] or ""),
            )
        return table

    def _streams(self) -> list[tuple[str, str]]:
        """Those that hold something first: those are shown where there is no place for all."""
        streams = sorted(self.streams, key=lambda each: not each["length"])
        return [(each["name"], str(each["length"])) for each in streams]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1000:.3g} ms"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"
