"""vLLM's plugin: it makes the connector known by its name, so that ``"kv_connector": "KVStoreConnector"`` is enough.

vLLM calls :func:`register` in each of its processes (the entry points ``vllm.general_plugins``), also where kvstore is
not asked for. So nothing is imported here but what vLLM has imported itself, and nothing is ever raised: an error would
end every vLLM of this environment.
"""

from __future__ import annotations

import logging

CONNECTOR, MODULE = "KVStoreConnector", "kvstore.connector.vllm"


def register() -> None:
    """Tell vLLM's factory of connectors where ours is. A second call changes nothing."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        try:
            KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
        except ValueError:  # it is there already: plugins may be loaded more than once in a process
            logging.getLogger("kvstore.connector").debug("%s is known already", CONNECTOR)
    except Exception:
        logging.getLogger("kvstore.connector").warning("vLLM could not be told of %s", CONNECTOR, exc_info=True)
