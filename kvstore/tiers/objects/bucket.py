"""The bucket: requests to the object storage, each counted, with deadlines, and left alone while they fail.

The library is ``obstore``. Everything that goes wrong is an ``OSError`` here, whose words hold no credentials, and
nothing that the server said: a server may name keys in what it says.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from kvstore.breaker import Breaker, Failure, State
from kvstore.errors import ConfigError
from kvstore.security.bucket_url import check_bucket_url
from kvstore.segments.io_threads import IoThreads, Job, LateError
from kvstore.tiers.tier import Traffic

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

T = TypeVar("T")
FAILURES = 4
"""Failed requests in a row behind which the server is left alone."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds for which it is."""
REQUESTS_AT_ONCE = 16
_WRITE_DEADLINES = 12
"""A pack is large: writing one may take so many times as long as reading a page."""
_RETRIES = 2
REQUESTS = ("get", "put", "list", "delete")
"""The classes of requests, as object storage charges for them."""
_KEYS_A_DELETE = 1000
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"\bstatus:? (\d{3})\b|\b([45]\d\d) [A-Z][a-z]")


class GoneError(FileNotFoundError):
    """There is no such object."""


class Listed(NamedTuple):
    """One object of a list."""

    path: str
    size: int
    mark: str
    """Another text whenever the object was written anew."""
    content: str
    """Another text whenever its bytes are others: where the server tells, the same as long as they are the same."""


class Bucket:
    """One prefix of a bucket. Safe for threads.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…`` or ``az://…``: without credentials, which are the environment's.
        deadline: seconds that a read may take.
        clock: seconds that only grow.

    Raises:
        ConfigError: no such URL, or the package ``obstore`` is missing.
    """

    def __init__(self, url: str, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        check_bucket_url(url)
        try:
            import obstore
        except ModuleNotFoundError as error:
            raise ConfigError("an object tier needs a package: pip install 'kvstore-offload[objects]'") from error
        self._obstore = obstore
        self.deadline = deadline
        self._reads = _open(url, deadline)
        self._writes = _open(url, _WRITE_DEADLINES * deadline)
        self.threads = IoThreads(REQUESTS_AT_ONCE, name="kvstore-objects")
        self.reading = Breaker(FAILURES, FIRST_PAUSE, LONGEST_PAUSE, clock=clock)
        self.writing = Breaker(FAILURES, FIRST_PAUSE, LONGEST_PAUSE, clock=clock)
        self._lock = threading.Lock()
        self._requests = dict.fromkeys(REQUESTS, 0)
        self._seconds = dict.fromkeys(REQUESTS, 0.0)
        self._errors = dict.fromkeys(REQUESTS, 0)
        self._sent = self._received = 0

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def may_read(self) -> bool:
        """Whether to read now."""
        return not self.threads.all_hang and self.reading.allows()

    @property
    def read_failure(self) -> Failure | None:
        """Why reads fail; None: they don't."""
        if self.threads.all_hang:
            return Failure(self.reading.since, "it does not answer")
        return self.reading.failure

    @property
    def may_write(self) -> bool:
        """Whether to write now."""
        return self.writing.allows()

    @property
    def resting(self) -> bool:
        """Whether writes are left alone now. Who only asks this is no trial."""
        return self.writing.state is State.OPEN

    def get(self, path: str) -> bytes:
        """A whole, small object.

        Raises:
            GoneError: there is none.
            OSError: it can't be read.
        """
        return self._call("get", lambda: bytes(self._obstore.get(self._reads, path).bytes()), path, received=len)

    def get_range(self, path: str, start: int, length: int) -> memoryview:
        """A part of an object: exactly so many bytes.

        Raises:
            GoneError: there is no such object.
            OSError: it can't be read, or is shorter.
        """

        def get() -> memoryview:
            data = memoryview(cast("Any", self._obstore.get_range(self._reads, path, start=start, length=length)))
            if len(data) != length:
                raise OSError(errno.EIO, f"{len(data)} bytes came, {length} were asked for")
            return data

        return self._call("get", get, path, received=len)

    def begin(self, calls: Sequence[Callable[[], T]], who: object = None) -> list[Job[T]]:
        """Begin requests on threads that may hang."""
        return self.threads.submit_all(calls, cast("Any", who))

    def wait(self, job: Job[T], end: float) -> T:
        """What a request that was begun returned.

        Raises:
            LateError: it did not, before ``end`` (``time.monotonic``).
            OSError: it failed.
        """
        try:
            return job.wait(end - time.monotonic())
        except LateError:
            self.threads.give_up(job)
            late = LateError(self.deadline)
            late.strerror = f"no answer within {self.deadline:g} s"
            self.reading.failed(late.strerror, at_once=True)
            raise late from None

    def list(self, prefix: str, behind: str | None = None) -> list[Listed]:
        """The objects whose names begin with ``prefix``, in order; those behind a name alone.

        Raises:
            OSError: not all of them could be listed.
        """

        def collect() -> list[Listed]:
            found = []
            for page, some in enumerate(self._obstore.list(self._reads, prefix, offset=behind, chunk_size=1000)):
                if page:  # the first one is counted below, also where it is empty
                    self._count("list")
                for each in some:
                    mark = f"{each['e_tag']} {each['last_modified'].timestamp()} {each['size']}"
                    found.append(Listed(each["path"], each["size"], mark, each["e_tag"] or mark))
            return sorted(each for each in found if behind is None or each.path > behind)

        return self._call("list", collect, prefix)

    # -- writing -----------------------------------------------------------------------------------------------------

    def put(self, path: str, body: bytes | bytearray, *, quick: bool = False) -> None:
        """Write an object, whole or not at all; ``quick``: a small one, which has no longer than a read.

        Raises:
            OSError: it could not be written, for all that is known.
        """
        store = self._reads if quick else self._writes
        self._call(
            "put",
            lambda: self._obstore.put(store, path, cast("Any", body), use_multipart=False),
            path,
            writing=True,
        )
        with self._lock:
            self._sent += len(body)

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; those that are not there are passed over.

        Raises:
            OSError: some may still be there.
        """
        for at in range(0, len(paths), _KEYS_A_DELETE):
            some = list(paths[at : at + _KEYS_A_DELETE])
            try:
                self._call("delete", partial(self._obstore.delete, self._writes, some), some[0], writing=True)
            except GoneError:  # some servers say so, and then the others of the list may be left
                for path in some:
                    with suppress(GoneError):
                        self._call("delete", partial(self._obstore.delete, self._writes, path), path, writing=True)

    # -- all of them -------------------------------------------------------------------------------------------------

    def traffic(self) -> Traffic:
        """What was asked so far."""
        with self._lock:
            return Traffic(dict(self._requests), dict(self._seconds), dict(self._errors), self._sent, self._received)

    def close(self) -> None:
        """Let the threads end, each behind what it is doing."""
        self.threads.close()

    def _count(self, kind: str, seconds: float = 0.0, *, failed: bool = False, received: int = 0) -> None:
        with self._lock:
            self._requests[kind] += 1
            self._seconds[kind] += seconds
            self._errors[kind] += failed
            self._received += received

    def _call(
        self,
        kind: str,
        call: Callable[[], T],
        path: str,
        *,
        writing: bool = False,
        received: Callable[[T], int] | None = None,
    ) -> T:
        breaker = self.writing if writing else self.reading
        started = time.perf_counter()
        try:
            answer = call()
        except Exception as error:  # noqa: BLE001 - the library has errors of many kinds; all of them are OSErrors here
            seconds = time.perf_counter() - started
            found = _as_os_error(error, path)
            gone = isinstance(found, GoneError)
            self._count(kind, seconds, failed=not gone)
            if gone:
                breaker.succeeded()
            else:
                breaker.failed(found.strerror or str(found))
            raise found from None  # what the server said may name keys
        breaker.succeeded()
        self._count(kind, time.perf_counter() - started, received=received(answer) if received is not None else 0)
        return answer


def _open(url: str, seconds: float) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    plain = os.environ.get(
        "AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", ""))
    )
    options: ClientConfig = {
        "timeout": timedelta(seconds=seconds),
        "connect_timeout": timedelta(seconds=min(seconds, 5.0)),
        "allow_http": plain.startswith("http://"),
    }
    retry: RetryConfig = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=seconds),
        "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
    }
    more: dict[str, Any] = {}
    if url.startswith("s3://") and os.environ.get("AWS_PROFILE") and not os.environ.get("AWS_ACCESS_KEY_ID"):
        try:
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError as error:
            raise ConfigError(
                f"objects: AWS_PROFILE={os.environ['AWS_PROFILE']}: profile files need a package: pip install boto3"
            ) from error
        more["credential_provider"] = Boto3CredentialProvider()
    try:
        return from_url(url, client_options=options, retry_config=retry, **more)
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(f"objects: {url!r} can't be used: {_kind_of(error)}") from None


def _as_os_error(error: Exception, path: str) -> OSError:
    """What went wrong, in words of our own."""
    from obstore.exceptions import NotFoundError

    if isinstance(error, FileNotFoundError | NotFoundError):
        return GoneError(errno.ENOENT, "no such object", path)
    if isinstance(error, OSError) and error.strerror and error.errno == errno.EIO:
        return error
    return OSError(errno.EIO, _kind_of(error))


def _kind_of(error: Exception) -> str:
    said = str(error)
    code, status = _CODE.search(said), _STATUS.search(said)
    words = [type(error).__name__.removesuffix("Error").lower() + " error"]
    if status is not None:
        words.append(f"status {status[1] or status[2]}")
    if code is not None:
        words.append(code[1])
    if "timed out" in said or "kind: Timeout" in said:
        words.append("timed out")
    elif "onnection refused" in said:
        words.append("connection refused")
    elif "dns error" in said or "lookup address" in said:
        words.append("no such host")
    return ", ".join(words)
