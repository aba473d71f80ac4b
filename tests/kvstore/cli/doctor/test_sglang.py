"""What the doctor says of SGLang's flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.doctor.sglang import check_flags, check_version, is_sglang
from kvstore.cli.doctor.verdict import FAIL, OK, WARN

SOCKET = Path("/run/kvstore.sock")
EXTRA = {
    "backend_name": "kvstore",
    "module_path": "kvstore.connector.sglang",
    "class_name": "KVStoreBackend",
    "interface_v1": 1,
    "url": "unix:///run/kvstore.sock",
}
LAUNCH = "python -m sglang.launch_server --model-path m"


def command(*flags: str, **extra: Any) -> str:
    value = json.dumps({key: value for key, value in (EXTRA | extra).items() if value is not None})
    hicache = f"--enable-hierarchical-cache --hicache-storage-backend=dynamic {' '.join(flags)}"
    return f"{LAUNCH} {hicache} --hicache-storage-backend-extra-config '{value}'"


def test_flags_that_are_right() -> None:
    (verdict,) = check_flags(command(), SOCKET)
    assert (verdict.level, verdict.text) == (OK, "KVStoreBackend at unix:///run/kvstore.sock")
    assert check_flags(json.dumps(EXTRA), SOCKET) == [verdict]
    (unnamed,) = check_flags(command(url=None), SOCKET)
    assert (unnamed.level, "the node that it finds by itself" in unnamed.text) == (OK, True)
    assert check_flags(command("--load-format safetensors", "--weight-cache-mode off"), SOCKET) == [verdict]


@pytest.mark.parametrize(
    ("given", "level", "says"),
    [
        (LAUNCH, FAIL, "--enable-hierarchical-cache is not among them"),
        (f"{LAUNCH} --enable-hierarchical-cache", FAIL, "--hicache-storage-backend is not among them"),
        (f"{LAUNCH} --hicache-storage-backend file", FAIL, "--hicache-storage-backend is 'file'"),
        (f"{LAUNCH} --hicache-storage-backend dynamic", FAIL, "extra-config is not among them"),
        (f"{LAUNCH} 'x", FAIL, "can't be read as a command"),
        ("{", FAIL, "is not a JSON object"),
        (f"{LAUNCH} --hicache-storage-backend dynamic --hicache-storage-backend-extra-config @f.json", WARN, "f.json"),
        (command(module_path="kvstore.sglang"), FAIL, "module_path must be 'kvstore.connector.sglang'"),
        (command(class_name=None), FAIL, "class_name must be 'KVStoreBackend', is None"),
        (command(backend_name=None), FAIL, "'backend_name' is missing"),
        (command(interface_v1=None), FAIL, "'interface_v1' must be 1"),
        (command(tennant="a"), FAIL, "did you mean 'tenant'"),
        (command(url="unix:///run/other.sock"), WARN, "the node looked at is unix:///run/kvstore.sock"),
        (command("--hicache-mem-layout page_head"), FAIL, "page_head is not kept"),
        (command("--hicache-storage-prefetch-policy best_effort"), WARN, "best_effort"),
        (command("--hicache-write-policy write_back"), WARN, "write_back"),
        (command("--trust-mm-content-hashes"), WARN, "keys are what callers say"),
        (command("--load-format dummy"), FAIL, "with --load-format dummy the weights are not those in the model's"),
        (command("--kt-weight-path /w"), FAIL, "with --kt-weight-path the model is not what its folder says"),
    ],
)
def test_flags_that_are_wrong(given: str, level: str, says: str) -> None:
    verdicts = [each for each in check_flags(given, SOCKET) if says in each.text]
    assert [each.level for each in verdicts] == [level], check_flags(given, SOCKET)
    assert all(each.advice for each in verdicts)


def test_a_server_is_known_by_its_command() -> None:
    assert is_sglang(LAUNCH.split())
    assert is_sglang(["/opt/bin/python", "/opt/bin/sglang", "serve"])
    assert not is_sglang(["vllm", "serve", "m", "--kv-transfer-config", "{}"])


def test_its_release() -> None:
    assert check_version(None) == []
    assert [each.level for each in check_version("0.5.23")] == [OK]
    assert [each.level for each in check_version("0.4.0")] == [FAIL]
