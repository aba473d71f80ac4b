"""TLS contexts from PEM files, for either end of a connection: 1.2 or newer."""

from __future__ import annotations

import ssl
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.security.secret_files import check_private, read_file


def server_context(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """For whoever listens.

    Args:
        cert: the certificate, its chain behind it.
        key: its private key.
        client_ca: the authorities whose clients may connect; None: clients need no certificate.

    Raises:
        ConfigError: a file can't be read or used, or others can read the private key.
    """
    check_private(key, "tls_key")
    for path, what in ((cert, "tls_cert"), (key, "tls_key"), (client_ca, "client_ca")):
        if path is not None:
            read_file(path, what)  # says which of them it is
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # connections are kept, not resumed
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # or it would ask at the terminal
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"tls_cert {cert} and tls_key {key} can't be used: {error}") from error
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"client_ca {client_ca} can't be used: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """For whoever connects.

    Args:
        ca: the authorities that sign servers' certificates; None: those that the system trusts.
        cert: the client's own certificate, None for none.
        key: its private key.

    Raises:
        ConfigError: a file can't be read or used, or others can read the private key.
    """
    if key is not None:
        check_private(key, "key")
    try:
        context = ssl.create_default_context(cafile=ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if cert is not None:
            context.load_cert_chain(cert, key, password=lambda: "")  # or it would ask at the terminal
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"ca {ca}, cert {cert}, key {key} can't be used: {error}") from error
    return context
