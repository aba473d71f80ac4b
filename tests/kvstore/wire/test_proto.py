"""The generated code: what proto/ says, and loadable in the environments that engines bring."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GENERATED = [f"{name}_{kind}" for name in ("bulk", "cache", "events") for kind in ("pb2.py", "pb2.pyi", "pb2_grpc.py")]


def test_the_generated_code_is_what_proto_says(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    command += [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    files = [f"kvstore/v1/{name}.proto" for name in ("bulk", "cache", "events")]
    subprocess.run([*command, *files], check=True, timeout=60)
    assert sorted(path.name for path in (tmp_path / "kvstore/v1").iterdir()) == sorted(GENERATED)
    for name in GENERATED:
        made = (tmp_path / "kvstore/v1" / name).read_text()
        kept = (ROOT / "kvstore/v1" / name).read_text()
        assert kept == made, f"kvstore/v1/{name} is not what proto/ says: run `make proto`"


ROUND_TRIP = """
import sys
import google.protobuf
from kvstore.v1 import cache_pb2 as pb

def check(message):
    data = message.SerializeToString(deterministic=True)
    again = type(message).FromString(data)
    assert again == message
    assert again.SerializeToString(deterministic=True) == data

check(pb.LookupRequest(queries=[pb.PageList(fingerprint=b"f" * 32, hashes=b"h" * 64), pb.PageList()]))
check(pb.PrepareStoreReply(ticket=2**64 - 1, outcomes=b"\\0\\1\\2", offsets=[0, 4096, 2**63]))
check(pb.StorePages(ticket=1, checksums=[0, 2**64 - 1]))
check(pb.StatusReply(version="1", uptime_seconds=0.5, tiers=[pb.TierStatus(name="arena", counters={"hit": 7})]))
assert pb.StatusReply.FromString(pb.StatusReply(pid=7).SerializeToString()).pid == 7
assert pb.PAGE_TIER_DISK == 2 and pb.PageTier.Name(1) == "PAGE_TIER_ARENA"
assert len(pb.DESCRIPTOR.services_by_name["Cache"].methods) == 16

import kvstore.service.grpc.health_reflection  # whose messages are described by hand
import kvstore.client.client
print(google.protobuf.__version__)
"""


def with_protobuf(requirement: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``ROUND_TRIP`` over a protobuf of its own."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    got = subprocess.run(
        [*pip, "--target", str(folder), requirement], capture_output=True, text=True, timeout=100, check=False
    )
    if got.returncode:
        pytest.skip(f"{requirement} can't be had here: {got.stderr.strip().splitlines()[-1:]}")
    # Whatever else is needed comes from this environment, behind the folder.
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", ROUND_TRIP],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("requirement", ["protobuf==6.33.5", "protobuf"])
def test_it_loads_with_the_protobuf_of_engines_and_with_the_newest(tmp_path, requirement):
    done = with_protobuf(requirement, tmp_path)
    assert done.returncode == 0, done.stderr
    version = done.stdout.strip()
    assert version == "6.33.5" if "==" in requirement else int(version.split(".")[0]) >= 6


def test_an_older_protobuf_is_refused_clearly(tmp_path):
    done = with_protobuf("protobuf==5.29.6", tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "VersionError" in last, done.stderr
    assert "5.29.6" in last
    assert "cache.proto" in last
