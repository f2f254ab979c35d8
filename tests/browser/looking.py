"""Looking at the page until it shows what it will."""

from __future__ import annotations

import time
from collections.abc import Callable

from playwright.sync_api import Page

from tests.helpers.waiting import LIMIT_S

LOOK_MS = 50


def wait_until(page: Page, holds: Callable[[], object]) -> None:
    """Look again and again, as the page goes on."""
    limit_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit_s, "it has not come to hold"
        page.wait_for_timeout(LOOK_MS)
