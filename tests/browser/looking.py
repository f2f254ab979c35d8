"""Looking at the page until it shows what it will, and what it is told instead of the truth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page

from pagebus.web.observatory.vitals import FIGURES
from tests.helpers.waiting import LIMIT_S

LOOK_MS = 50


def wait_until(page: Page, holds: Callable[[], object]) -> None:
    """Look again and again, as the page goes on."""
    limit_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit_s, "it has not come to hold"
        page.wait_for_timeout(LOOK_MS)


def history(rows: list[dict[str, float]], every_s: float = 2.0) -> dict[str, Any]:
    """An answer of /api/history: what a row does not tell is not known."""
    first_s = time.time() - every_s * (len(rows) - 1)
    samples = [[first_s + every_s * place, *map(row.get, FIGURES)] for place, row in enumerate(rows)]
    return {"every_s": every_s, "figures": list(FIGURES), "samples": samples}


def pixel_of(page: Page, block: int) -> list[int]:
    """The colour of a block, beside what marks it as shared."""
    found: list[int] = page.evaluate(
        """async (block) => {
          await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          const canvas = document.querySelector(".map canvas"), copy = new OffscreenCanvas(canvas.width, canvas.height);
          const context = copy.getContext("2d", { willReadFrequently: true });
          context.drawImage(canvas, 0, 0);
          const [replica] = (await import(document.querySelector("script[type=module]").src)).world.replicas.values();
          const count = replica.device.owners.length;
          const fits = (rows) => rows && Math.ceil(count / Math.round(canvas.width / (canvas.height / rows))) === rows;
          const rows = [...Array(count).keys()].find(fits), size = canvas.height / rows, columns = Math.round(canvas.width / size);
          const x = Math.round(((block % columns) * canvas.width) / columns) + 4, y = Math.floor(block / columns) * size + 4;
          return [...context.getImageData(x, y, 1, 1).data];
        }""",  # noqa: E501
        block,
    )
    return found
