"""How a command begins: it imports what it needs, and may be interrupted from its first moment on."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from importlib import import_module

import pytest

from kvstore.cli import main as cli

WHAT_STATUS_IMPORTS = """
import sys
from kvstore.cli import main as cli
code = cli.main(["status", "--url", "unix:///nowhere/kvstore.sock"])
heavy = ("kvstore.node.node", "kvstore.store.store", "kvstore.cli.bench.path", "kvstore.cli.doctor.command",
         "prometheus_client", "redis")
print(code, [name for name in heavy if name in sys.modules])
"""
INTERRUPTED = """
import os, signal, sys
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is started with it ignored
from kvstore.cli import main as cli
sys.exit(cli.main(["status"]))
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    return subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)


def test_a_probe_imports_nothing_of_a_node():
    assert run(WHAT_STATUS_IMPORTS).stdout == "1 []\n"


def test_each_module_has_the_commands_that_it_is_asked_for():
    for module, names in cli._COMMANDS.items():
        commands = argparse.ArgumentParser().add_subparsers()
        import_module(module).add_to(commands)
        assert tuple(commands.choices) == names


def test_all_commands_are_known_without_one():
    described = cli._parser().format_help()
    for name in ("completion", "demo", *(name for names in cli._COMMANDS.values() for name in names)):
        assert re.search(rf"^    {name}\b", described, re.M), name


@pytest.mark.parametrize("module", ["kvstore.cli.status", "numpy", "grpc"])
def test_an_interrupt_while_modules_load_is_quiet(module):
    ended = run(INTERRUPTED, module)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
