"""HTTP with the instances behind the proxy: requests with deadlines, and checks of who is in service."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Self

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore.connector.proxy.instances import Instance, Instances
from kvstore.errors import UnavailableError

CONNECT_SECONDS = 5.0
CHECK_INTERVAL = 1.0
CHECK_SECONDS = 4.0
"""How long an instance may take to say that it serves. :data:`kvstore.connector.proxy.instances.FAILED_CHECKS` of them
in a row and it counts as lost: what waits for it is asked elsewhere, long before its deadline."""
MOST_ANSWER_BYTES = 128 << 20
"""Longest answer that is not a stream."""

_logger = logging.getLogger("kvstore.proxy")


class InstanceError(UnavailableError):
    """An instance did not answer. ``reason`` is a word for metrics: connect, broken, deadline, lost, garbage."""

    def __init__(self, instance: Instance, reason: str, words: str) -> None:
        super().__init__(f"{instance.role} instance {instance.url}: {words}")
        self.reason = reason


class Reply:
    """An instance's answer, of which the status and the headers are there. Each read has a deadline of its own.

    Raises:
        InstanceError: (from every method) it broke off, was late, is out of service, or is too long.
    """

    def __init__(
        self, upstream: Upstream, instance: Instance, response: aiohttp.ClientResponse, silence: float
    ) -> None:
        self._upstream = upstream
        self._instance = instance
        self._response = response
        self._silence = silence

    @property
    def status(self) -> int:
        """HTTP status."""
        return self._response.status

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """As they came."""
        return self._response.headers

    def broke(self, words: str) -> InstanceError:
        """For answers that can be read and are no answers."""
        return InstanceError(self._instance, "garbage", words)

    async def read(self) -> bytes:
        """More of the body; nothing: it is at its end."""
        async with self._upstream.waiting(self._instance, self._silence):
            return await self._response.content.readany()

    async def read_all(self) -> bytes:
        """The whole body."""
        body = bytearray()
        while data := await self.read():
            body += data
            if len(body) > MOST_ANSWER_BYTES:
                raise self.broke(f"its answer is longer than {MOST_ANSWER_BYTES} bytes")
        return bytes(body)


class Upstream:
    """Speaks with the instances. A context manager, in whose task the checks run.

    Each request has a connection of its own: nothing next to what it asks for, and so a connection that was closed
    meanwhile is never mistaken for an instance that died. ``tls`` is for instances with ``https://``; None: as the
    system trusts them.
    """

    def __init__(self, instances: Instances, tls: ssl.SSLContext | None = None) -> None:
        self._instances = instances
        self.use(tls)
        self._waits: defaultdict[Instance, set[asyncio.Timeout]] = defaultdict(set)
        self._lost: set[asyncio.Timeout] = set()
        self._checks: list[asyncio.Task[None]] = []

    def use(self, tls: ssl.SSLContext | None) -> None:
        """What new connections have from now on."""
        self._tls: ssl.SSLContext | bool = True if tls is None else tls

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=1 << 16,
            max_field_size=1 << 16,
        )
        self._checks = [asyncio.create_task(self._check_forever(instance)) for instance in self._instances.all]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await self._session.close()

    @asynccontextmanager
    async def ask(
        self,
        instance: Instance,
        method: str,
        path: str,
        headers: Mapping[str, str] | CIMultiDict[str],
        body: bytes | None,
        silence: float,
    ) -> AsyncIterator[Reply]:
        """One request.

        Args:
            instance: whom.
            method: GET, POST or OPTIONS.
            path: from the instance's URL on, with a slash before it.
            headers: of the request.
            body: of it.
            silence: seconds that the instance may say nothing, before its answer and between two parts of it.

        Raises:
            InstanceError: no answer came.
        """
        with self._instances.busy(instance):
            async with self.waiting(instance, silence):
                response = await self._session.request(
                    method, instance.url + path, headers=headers, data=body, allow_redirects=False, ssl=self._tls
                )
            try:
                yield Reply(self, instance, response, silence)
            finally:
                response.close()  # an instance stops working when whoever asked hangs up

    async def look(self, instance: Instance, path: str, most_bytes: int) -> bytes | None:
        """What an instance says of itself, which is no request: it changes nothing of who is in service. Empty: it
        answers, and not with that. None: it does not answer, or says more than so many bytes."""
        try:
            async with (
                asyncio.timeout(CHECK_SECONDS),
                self._session.get(instance.url + path, allow_redirects=False, ssl=self._tls) as response,
            ):
                if response.status != 200:
                    return b""
                body = bytearray()
                while (data := await response.content.readany()) and len(body) <= most_bytes:
                    body += data
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None
        return bytes(body) if len(body) <= most_bytes else None

    @asynccontextmanager
    async def waiting(self, instance: Instance, silence: float) -> AsyncIterator[None]:
        """Around a wait for an instance, and nothing else: whatever goes wrong in it is the instance's failure."""
        limit = asyncio.timeout(silence)
        try:
            async with limit:
                self._waits[instance].add(limit)
                try:
                    yield
                finally:
                    self._waits[instance].discard(limit)
        except aiohttp.ClientConnectorError as error:
            self._is_out(instance, self._instances.unreachable(instance), str(error))
            raise InstanceError(instance, "connect", str(error)) from error
        except TimeoutError as error:
            if limit in self._lost:
                raise InstanceError(instance, "lost", "it went out of service on the way") from error
            if not limit.expired():
                self._is_out(instance, self._instances.unreachable(instance), "it can't be connected to")
                raise InstanceError(instance, "connect", f"no connection within {CONNECT_SECONDS:g} s") from error
            raise InstanceError(instance, "deadline", f"it said nothing for {silence:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InstanceError(instance, "broken", f"{type(error).__name__}: {error}") from error
        finally:
            self._lost.discard(limit)

    async def _check_forever(self, instance: Instance) -> None:
        while True:
            try:
                async with (
                    asyncio.timeout(CHECK_SECONDS),
                    self._session.get(f"{instance.url}/health", allow_redirects=False, ssl=self._tls) as response,
                ):
                    status = response.status
            except aiohttp.ClientConnectorError as error:
                self._is_out(instance, self._instances.unreachable(instance), str(error))
            except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
                words = f"it leaves checks unanswered: {type(error).__name__} {error}".strip()
                self._is_out(instance, self._instances.check_failed(instance), words)
            else:
                if status >= 500:
                    self._is_out(instance, self._instances.unreachable(instance), f"/health says {status}")
                elif self._instances.check_passed(instance):
                    _logger.info("%s instance %s is in service again", instance.role, instance.url)
            await asyncio.sleep(CHECK_INTERVAL)

    def _is_out(self, instance: Instance, news: bool, words: str) -> None:
        """Say so, and give up what waits for it."""
        if not news:
            return
        _logger.warning("%s instance %s is out of service: %s", instance.role, instance.url, words)
        for limit in self._waits[instance]:
            if not limit.expired():
                self._lost.add(limit)
                limit.reschedule(asyncio.get_running_loop().time())
