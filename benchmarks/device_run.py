"""What is run on a machine with a CUDA device: three parts, each one command of ten minutes at most.

- `A`: the machine; whether it registers memory; every test that needs a device; those of the kernel under
  compute-sanitizer; figures of each copy strategy, and of what runs beside it.
- `B`, when what `A` found is mended: the tests again, the same figures, and an arena of 64 GiB that two processes
  register at once.
- `C`: the tests a last time, the reference engine over a node and over an embedded store, and the layouts.

Nothing is installed and nothing is fetched. A step that fails or lasts too long ends alone, but where memory can't be
registered figures are skipped: they would be those of a detour. What steps print also goes to `PART.log`, and their
figures to `PART.json`, in the folder that the environment's OUT names, else in a new one. Ends with 1 if a step failed.

`--dry-run` has each step run on a machine without a device: tests are skipped, and figures are the processor's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from device import print_section

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable
TESTS = (
    *(PYTHON, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "--import-mode=importlib", "-ra", "--tb=short"),
    *("-p", "no:cacheprovider", "-o", "markers=cuda: needs a CUDA device", "-m", "cuda"),
    *("-o", "faulthandler_timeout=60", "-o", "faulthandler_exit_on_timeout=true"),  # what hangs says where, and ends
)
MARKED = tuple(str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.cuda" in path.read_text())
SANITIZER = "compute-sanitizer"
MACHINE = """
nvidia-smi
nvidia-smi --query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
echo "processors: $(nproc), locked memory: $(ulimit -l) KiB"
free -g
df -h /dev/shm
cat /sys/kernel/mm/transparent_hugepage/shmem_enabled
"$0" -c '
import importlib.metadata, sys
names = ("torch", "triton", "cuda-bindings", "numpy", "grpcio", "protobuf", "pytest", "hypothesis")
there = {each.name.lower() for each in importlib.metadata.distributions()}
print(sys.version, *(f"{name} {importlib.metadata.version(name)}" for name in names if name in there), sep=", ")
import torch
print("CUDA", torch.version.cuda, *map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))
'
"""


@dataclass(frozen=True)
class Step:
    """One command."""

    name: str
    seconds: int
    """After which it is ended."""
    command: tuple[str, ...]
    figures: bool = False
    """Whether it prints figures as JSON, which mean nothing where memory can't be registered."""


def figures(section: str, seconds: int) -> Step:
    """A section of `device.py`."""
    return Step(section, seconds, (PYTHON, "benchmarks/device.py", "--json", "--only", section), figures=True)


REGISTERING = Step("registering", 45, (*TESTS, "tests/gpu/test_cudart.py"))
EVERY_TEST = Step("tests", 150, (*TESTS, *MARKED))
QUEUEING = Step("queueing", 30, (PYTHON, "benchmarks/copy_cost.py", "--device", "cuda"))
PARTS = {
    "A": (
        Step("machine", 30, ("sh", "-c", MACHINE, PYTHON)),
        REGISTERING,
        EVERY_TEST,
        Step(
            "sanitizer",
            105,
            (
                *(SANITIZER, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "86"),
                *(*TESTS, "tests/gpu/test_cuda.py", "-k", "kernel or (every and bfloat16)"),
            ),
        ),
        figures("strategies", 90),
        figures("pin", 45),
        figures("decode", 60),
        figures("python", 30),
        QUEUEING,
    ),
    "B": (
        REGISTERING,
        EVERY_TEST,
        figures("strategies", 90),
        figures("decode", 60),
        figures("arena", 240),
    ),
    "C": (
        REGISTERING,
        EVERY_TEST,
        figures("node", 90),
        figures("first-token", 90),
        figures("layouts", 60),
        figures("python", 30),
        QUEUEING,
    ),
}
DRY_FIGURES = ("--device", "cpu", "--rounds", "1", "--pages", "1", "--tokens", "64")


class Run:
    """Steps, one after the other, and what is kept of them."""

    def __init__(self, folder: Path, part: str, log: IO[str], *, dry: bool) -> None:
        self._figures: dict[str, Any] = {}
        self._figures_file = folder / f"{part}.json"
        self._log = log
        self._dry = dry
        self.outcomes: dict[str, str] = {}

    def say(self, text: str) -> None:
        for stream in (sys.stdout, self._log):
            print(text, file=stream, flush=True)

    def step(self, step: Step) -> None:
        """Run it, unless it can't be, and keep what it says."""
        self.say(f"== {step.name}")
        if step.command[0] == SANITIZER and shutil.which(SANITIZER) is None:
            self.outcomes[step.name] = f"skipped: {SANITIZER} is not installed"
            return
        if step.figures and self.outcomes.get("registering") != "done":
            self.outcomes[step.name] = "skipped: memory can't be registered, so its figures would be those of a detour"
            return
        start = time.monotonic()
        code, output = self._execute(step)
        taken = time.monotonic() - start
        if code is None:
            self.outcomes[step.name] = f"failed: it lasted longer than {step.seconds} s"
        else:
            self.outcomes[step.name] = "done" if code == 0 else f"failed: it ended with {code}"
        if step.figures and code == 0:
            self._keep(output)
        self.say(f"== {step.name}: {self.outcomes[step.name]}, {taken:.0f} s")

    def _execute(self, step: Step) -> tuple[int | None, str]:
        """Its exit code, None if it had to be ended, and what it printed. Figures are printed as tables, later."""
        command = list(step.command)
        if self._dry and step.figures:
            command += DRY_FIGURES
        if self._dry and step is QUEUEING:
            command[-1:] = ["cpu", "--rounds", "1"]
        path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests/fixtures"), os.environ.get("PYTHONPATH")]))
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT if not step.figures else self._log,
                start_new_session=True,  # its own processes end with it
            )
            try:
                code = process.wait(step.seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            printed = output.read()
        if not step.figures or code != 0:
            self.say(printed.rstrip())
        return code, printed

    def _keep(self, output: str) -> None:
        found = json.loads(output)
        self._figures |= found
        self._figures_file.write_text(json.dumps(self._figures, indent=1))
        for name, value in found.items():
            if isinstance(value, list | dict):
                print_section(name, value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS])
    parser.add_argument("--dry-run", action="store_true", help="on a machine without a device: that each step runs")
    options = parser.parse_args()
    folder = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="kvstore-device-"))
    with (folder / f"{options.part}.log").open("w") as log:
        run = Run(folder, options.part, log, dry=options.dry_run)
        try:
            for step in PARTS[options.part]:
                run.step(step)
        finally:
            run.say("\n".join(f"{name}: {outcome}" for name, outcome in run.outcomes.items()))
            run.say(f"log and figures: {folder}")
    return int(any(outcome.startswith("failed") for outcome in run.outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
