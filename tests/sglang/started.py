"""Starts SGLang's servers, each as a fork of this process: SGLang is imported once, which takes most of a start.

Each line of the standard input is a JSON object with ``flags``, ``environment``, ``log`` and ``folder``; the answer is
a line with the process id of the server, which leads a session of its own. The servers end with SIGTERM or SIGKILL, and
with this process, which ends with its input.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import traceback
from typing import Any

PR_SET_PDEATHSIG = 1
"""Of Linux: a signal for when the parent ends."""


def import_sglang() -> None:
    """Whatever a server and its processes import."""
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry
    import sglang.srt.server_args  # noqa: F401


def serve(order: dict[str, Any]) -> None:
    """In the fork: become a server."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *method, **force: None  # type: ignore[method-assign]  # SGLang's: spawn
    from sglang.launch_server import prepare_server_args, run_server

    run_server(prepare_server_args(order["flags"]))


def main() -> None:
    """Serve orders until the input ends."""
    import_sglang()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        process = os.fork()
        if not process:
            code = 1
            try:
                serve(order)
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException:  # noqa: BLE001 - it goes into the server's log
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(process, flush=True)


if __name__ == "__main__":
    main()
