"""``kvstore proxy``: serves one OpenAI-compatible endpoint in front of prefill and decode instances."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import ssl
import sys
from pathlib import Path
from typing import Any

from kvstore.cli import similar_flags
from kvstore.cli.responses_store import StoreFlags, read_tenants
from kvstore.cli.stdout import print_ready
from kvstore.config.node import is_loopback, parse_address
from kvstore.errors import ConfigError, ResourceError
from kvstore.responses.cache import ResponseCache
from kvstore.responses.store import Limits
from kvstore.security.certificate import DAY, tell_of_end, validity_of
from kvstore.security.secret_files import read_file
from kvstore.security.tls import client_context, server_context
from kvstore.service.access.descriptor_budget import raise_limit
from kvstore.units import parse_duration, parse_named, parse_size

_LONGEST_DEADLINE = 86400.0
_LONGEST_TTL = 365 * 86400.0
_MOST_SIZE = 1 << 40
_MOST_ENTRIES = 10_000_000
_LONGEST_RESPONSES_DEADLINE = 60_000.0
_RESPONSES = StoreFlags.with_prefix("--responses-")
_log = logging.getLogger("kvstore.proxy")


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    proxy = commands.add_parser(
        "proxy",
        help="an OpenAI-compatible endpoint in front of prefill and decode instances (needs kvstore-offload[proxy])",
        description="Serve completions and chat completions with engines that divide the work: a prefill instance"
        " computes the prompt, a decode instance takes its KV pages from kvstore and answers. When an instance dies,"
        " requests go on with those that are left. Also serves /v1/models, /health and /metrics."
        " `kvstore docs disaggregation` says how to set it up.",
        epilog="example:\n  kvstore proxy --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200",
    )
    proxy.add_argument(
        "--prefill", metavar="URL", nargs="+", action="extend", required=True, help="instances that compute prompts"
    )
    proxy.add_argument(
        "--decode", metavar="URL", nargs="+", action="extend", required=True, help="instances that answer"
    )
    proxy.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:8000",
        help="where clients connect (default: 127.0.0.1:8000). The instances decide who may ask: the Authorization"
        " header is passed on",
    )
    proxy.add_argument(
        "--tls-cert", metavar="FILE", type=Path, help="serve HTTPS, with this certificate and its chain (PEM)"
    )
    proxy.add_argument(
        "--tls-key",
        metavar="FILE",
        type=Path,
        help="the certificate's private key (PEM); only its owner may be able to read it",
    )
    proxy.add_argument(
        "--client-ca",
        metavar="FILE",
        type=Path,
        help="clients must show a certificate signed by one of these authorities",
    )
    proxy.add_argument("--insecure", action="store_true", help="allow addresses other than loopback without TLS")
    proxy.add_argument(
        "--upstream-ca",
        metavar="FILE",
        type=Path,
        help="authorities that sign the certificates of https:// instances (default: those that the system trusts)",
    )
    proxy.add_argument(
        "--upstream-cert", metavar="FILE", type=Path, help="certificate to show to https:// instances (PEM)"
    )
    proxy.add_argument("--upstream-key", metavar="FILE", type=Path, help="that certificate's private key (PEM)")
    proxy.add_argument(
        "--prefill-deadline",
        metavar="SECONDS",
        type=float,
        default=120.0,
        help="how long a prefill instance may take before decode computes the prompt itself (default: 120)",
    )
    proxy.add_argument(
        "--decode-deadline",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="how long a decode instance may be silent; an answer that is not streamed must be complete by then"
        " (default: 600)",
    )
    _RESPONSES.add_to(
        proxy,
        "answer requests that were answered before from this store: sqlite (a file in the cache folder), a file's path,"
        " or the redis://, rediss:// or unix:// URL of a Redis that proxies share (default: off). `kvstore docs"
        " responses` says which requests",
        None,
    )
    _RESPONSES.add_key_to(proxy)
    proxy.add_argument(
        "--responses-ttl", metavar="TIME", default="1h", help="how long a response is told again (default: 1h)"
    )
    proxy.add_argument(
        "--responses-size", metavar="SIZE", default="1GiB", help="most bytes of responses that are kept (default: 1GiB)"
    )
    proxy.add_argument(
        "--responses-entries",
        metavar="N",
        type=int,
        default=100_000,
        help="most responses that are kept (default: 100000)",
    )
    proxy.add_argument(
        "--responses-deadline",
        metavar="MS",
        type=float,
        default=50.0,
        help="milliseconds that a request waits for the store before it is computed (default: 50)",
    )
    proxy.add_argument(
        "--responses-tenants",
        metavar="FILE",
        type=Path,
        help="API keys and their tenants, a token file as a node has it: the keys of a tenant share responses"
        " (default: each key has its own)",
    )
    similar_flags.add_to(proxy)
    proxy.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code."""
    for flag in ("prefill_deadline", "decode_deadline"):
        if not 0 < getattr(options, flag) <= _LONGEST_DEADLINE:
            raise ConfigError(
                f"--{flag.replace('_', '-')} must be above 0 and at most {_LONGEST_DEADLINE:g} seconds,"
                f" got {getattr(options, flag):g}"
            )
    host, port = parse_address(options.listen)
    tls = _tls_for_clients(options, host)
    from kvstore.connector.proxy.instances import Instances  # upwards, as what follows: for this command alone

    instances = Instances(options.prefill, options.decode)
    urls = [each.url for each in instances.all]
    upstream_tls = _tls_for_instances(options, urls)
    try:
        from kvstore.connector.proxy.server import Deadlines, Proxy
    except ModuleNotFoundError as error:
        if error.name not in ("aiohttp", "multidict"):
            raise
        raise ResourceError("aiohttp is missing; pip install 'kvstore-offload[proxy]'") from error
    deadlines = Deadlines(options.prefill_deadline, options.decode_deadline)
    tenants = read_tenants(options.responses_tenants)
    responses = _responses(options)

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        proxy = Proxy(instances, deadlines, tls, upstream_tls, responses, tenants)

        def reload() -> None:
            try:
                proxy.use(
                    _tls_for_clients(options, host),
                    _tls_for_instances(options, urls),
                    read_tenants(options.responses_tenants),
                )
            except ConfigError as error:
                _log.error("SIGHUP: nothing was reloaded: %s", error)
            else:
                _log.info("SIGHUP: certificates were reloaded" if tls or upstream_tls else "SIGHUP: there is no TLS")
                _tell_of_certificate(options.tls_cert)

        def look_daily() -> None:
            _tell_of_certificate(options.tls_cert)
            asyncio.get_running_loop().call_later(DAY, look_daily)

        def reopen() -> None:
            if responses is not None and responses.reopen_similar():
                _log.info("SIGUSR1: similar prompts are answered again, and their checks counted anew")
            else:
                _log.info("SIGUSR1: similar prompts are not answered here (--responses-similar)")

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, reopen)
        bound = await proxy.start(host, port)
        look_daily()
        shown = f"[{host}]" if ":" in host else host
        counts = f"{len(options.prefill)} prefill, {len(options.decode)} decode"
        print_ready(f"kvstore proxy: ready on {'https' if tls is not None else 'http'}://{shown}:{bound} ({counts})")
        try:
            await stop.wait()
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().remove_signal_handler(number)
            print(
                "kvstore proxy: stopping once the requests under way are done; a second signal stops it at once",
                file=sys.stderr,
            )
        finally:
            await proxy.stop()

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    raise_limit()  # often a thousand, and a request takes two or three
    asyncio.run(serve())
    return 0


def _responses(options: argparse.Namespace) -> ResponseCache | None:
    """The cache of responses; None: it is off.

    Raises:
        ConfigError: a flag's value can't be used, or is for a cache that is off.
        ResourceError: the file can't be used.
    """
    if options.responses is None:
        for flag in (
            "responses_key_file",
            "responses_plain",
            "responses_password_file",
            "responses_tenants",
            "responses_similar",
        ):
            if getattr(options, flag):
                name = flag.replace("_", "-")
                raise ConfigError(f"--{name} is for responses that are kept: give --responses WHERE as well")
        return None
    ttl, size = (
        parse_named(f"--responses-{name}", parse, getattr(options, f"responses_{name}"))
        for name, parse in (("ttl", parse_duration), ("size", parse_size))
    )
    deadline = options.responses_deadline
    for name, value, most in (
        ("ttl", ttl, _LONGEST_TTL),
        ("size", size, _MOST_SIZE),
        ("entries", options.responses_entries, _MOST_ENTRIES),
        ("deadline", deadline, _LONGEST_RESPONSES_DEADLINE),
    ):
        if not 0 < value <= most:
            raise ConfigError(f"--responses-{name} must be above 0 and at most {most:g}, got {value:g}")
    similar = similar_flags.read(options)
    sealing = _RESPONSES.sealing(options)
    store = _RESPONSES.open(options, Limits(options.responses_entries, int(size)))
    return ResponseCache(store, sealing, ttl, deadline / 1000, similar=similar)


def _tls_for_clients(options: argparse.Namespace, host: str) -> ssl.SSLContext | None:
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key are given together, or neither")
    if options.tls_cert is None:
        if options.client_ca is not None:
            raise ConfigError("--client-ca needs TLS: give --tls-cert and --tls-key as well")
        if not is_loopback(host) and not options.insecure:
            raise ConfigError(
                f"--listen: {options.listen!r} can be reached from other hosts, which needs TLS (--tls-cert and"
                " --tls-key); with --insecure, prompts, answers and API keys are sent as they are"
            )
        return None
    return server_context(options.tls_cert, options.tls_key, options.client_ca)


def _tell_of_certificate(file: Path | None) -> None:
    if file is not None:
        with contextlib.suppress(ConfigError):  # it is being replaced: a reload says what is wrong with it
            tell_of_end(f"the certificate {file}", validity_of(read_file(file, "--tls-cert")))


def _tls_for_instances(options: argparse.Namespace, urls: list[str]) -> ssl.SSLContext | None:
    files = options.upstream_ca, options.upstream_cert, options.upstream_key
    if (options.upstream_cert is None) != (options.upstream_key is None):
        raise ConfigError("--upstream-cert and --upstream-key are given together, or neither")
    if not any(files):
        return None
    if not any(url.startswith("https://") for url in urls):
        raise ConfigError("--upstream-ca and --upstream-cert are for https:// instances, and there is none")
    return client_context(*files)
