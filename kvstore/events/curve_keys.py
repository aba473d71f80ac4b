"""CURVE keys for events over ZeroMQ, which has CURVE in place of TLS: the node's own, and its subscribers'.

Both ends have a key pair, in files as ``zmq.auth.create_certificates`` writes them: ``NAME.key`` has the public key,
``NAME.key_secret`` both. What is sent is encrypted; who connects must know the node's public key, and the node theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.security.secret_files import check_private

if TYPE_CHECKING:
    import zmq

_DOMAIN = "kvstore"
"""With one, ZeroMQ lets nobody in when whoever it asks does not answer."""


class CurveKeys:
    """The node's own key, and whose it knows, for the sockets of one context. Serves until ``stop``.

    Args:
        context: whose sockets these keys are for.
        own: file of the node's key pair, which nobody else may read.
        clients: folder of the public keys of those who may connect, ``*.key``.

    Raises:
        ConfigError: a file can't be used, or libzmq was built without CURVE.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], own: Path, clients: Path) -> None:
        import zmq
        import zmq.auth
        from zmq.auth.thread import ThreadAuthenticator

        if not zmq.has("curve"):
            raise ConfigError("events_key needs a libzmq with CURVE; pyzmq's own wheels have it")
        self._load, self._load_all = zmq.auth.load_certificate, zmq.auth.load_certificates
        self._clients = clients
        check_private(own, "events_key")
        try:
            public, secret = self._load(own)
            if secret is None:
                raise ConfigError(f"events_key {own} has no secret key: name the file NAME.key_secret")
            if zmq.curve_public(secret) != public:
                raise ConfigError(f"events_key {own}: its two keys are no pair")
        except (OSError, ValueError, zmq.ZMQError) as error:
            raise ConfigError(f"events_key {own} can't be used: {error}") from error
        self._public, self._secret = public, secret
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        try:
            self.read_clients()
        except BaseException:
            self.stop()
            raise

    def guard(self, listener: zmq.Socket[bytes]) -> None:
        """Let only those connect whose keys are known. Before it is bound."""
        listener.curve_publickey = self._public
        listener.curve_secretkey = self._secret
        listener.curve_server = True
        listener.zap_domain = _DOMAIN.encode()

    def read_clients(self) -> None:
        """Read the folder of clients' keys: they are good from now on, and no others. Open connections stay.

        Raises:
            ConfigError: it can't be read, or no key is in it.
        """
        try:
            found = self._load_all(self._clients)
        except (OSError, ValueError) as error:
            raise ConfigError(f"events_clients {self._clients} can't be used: {error}") from error
        if not found:
            raise ConfigError(f"events_clients {self._clients} holds no public key (NAME.key)")
        self._authenticator.configure_curve(domain=_DOMAIN, location=self._clients)

    def stop(self) -> None:
        """Answer nobody any more."""
        self._authenticator.stop()
