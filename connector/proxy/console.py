"""The proxy's console: a read-only page in a browser that shows what became of requests, and what was told again."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from aiohttp import hdrs, web

from kvstore.connector.proxy.instances import Instances
from kvstore.service.http.page_headers import PAGE_HEADERS

_OURS = {"index.html": "text/html", "responses.js": "text/javascript"}
_OF_THE_NODES = {"console.css": "text/css", "figures.js": "text/javascript"}


class ProxyConsole:
    """Its pages.

    Args:
        instances: whom the proxy asks.
        responses: what the cache of responses has done; None: it is off.
    """

    def __init__(self, instances: Instances, responses: Callable[[], dict[str, Any]] | None) -> None:
        self._instances = instances
        self._responses = responses
        self._began = time.monotonic()
        self._files = {
            name: ((files(package) / "console_files" / name).read_bytes(), kind)
            for package, kinds in (("kvstore.connector.proxy", _OURS), ("kvstore.service.http", _OF_THE_NODES))
            for name, kind in kinds.items()
        }

    def add_to(self, application: web.Application) -> None:
        """Serve them."""
        application.router.add_get("/console", self._page)
        application.router.add_get("/console/data", self._data)
        application.router.add_get("/console/{name}", self._page)

    async def _page(self, request: web.Request) -> web.Response:
        content, kind = self._files.get(request.match_info.get("name", "index.html"), (None, ""))
        if content is None:
            raise web.HTTPNotFound
        return web.Response(body=content, headers=_headers(f"{kind}; charset=utf-8"))

    async def _data(self, request: web.Request) -> web.Response:
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "uptime": time.monotonic() - self._began,
            "instances": self._instances.states(),
            "responses": None if self._responses is None else self._responses(),
        }
        return web.json_response(content, headers=dict(PAGE_HEADERS))


def _headers(kind: str) -> dict[str, str]:
    return {hdrs.CONTENT_TYPE: kind} | dict(PAGE_HEADERS)
