"""Two sides of a benchmark in processes of their own: kvstore in this Python, vLLM in one that has it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def worker(python: str, script: str, side: str) -> Iterator[Callable[[str], str]]:
    """Start ``script --side SIDE`` and yield a call that sends it one line and gives its answer, one line too.

    The script says ``ready`` when it is, and ends when its standard input does.
    """
    with subprocess.Popen(
        [python, script, "--side", side],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
    ) as process:
        to, answers = process.stdin, process.stdout
        assert to is not None
        assert answers is not None
        for line in answers:
            if line == "ready\n":  # what a library prints while it is imported comes before
                break
        else:
            raise SystemExit(f"{python} could not measure {side}: exit code {process.wait()}")

        def ask(what: str) -> str:
            to.write(f"{what}\n")
            return answers.readline()

        yield ask
        to.close()
