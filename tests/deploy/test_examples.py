"""The files of ``deploy/`` and the compose files: known settings, sizes that fit, probes and targets that answer."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main as cli
from kvstore.config.load import load_config
from kvstore.config.node import NodeConfig
from kvstore.config.setting import ENVIRONMENT_PREFIX
from kvstore.connector import vllm_plugin
from kvstore.connector.engine.options import Options
from kvstore.units import parse_size

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy/kvstore.service"
HEADERS = 1.03
"""An arena takes so much more than its pages."""


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def node_config(environment: dict[str, str], caplog: pytest.LogCaptureFixture) -> NodeConfig:
    """The settings of a node with this environment; every one is known."""
    plain = {name: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", value) for name, value in environment.items()}
    config = load_config(environment=plain)
    assert not caplog.records
    assert all(name.startswith(ENVIRONMENT_PREFIX) for name in plain)
    return config


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.cluster.yml"])
def test_a_compose_nodes_settings_are_known_and_its_arena_fits(file: str, caplog: pytest.LogCaptureFixture) -> None:
    base, told = read("docker-compose.yml"), read(file)
    for name in ("node1", "node2"):
        node = base["services"][name]
        config = node_config(node["environment"] | told["services"][name].get("environment", {}), caplog)
        assert config.metrics and config.listen and config.insecure
        volume, path = node["volumes"][0].split(":")
        assert path == "/run/kvstore"
        size = parse_size(re.search(r"size=(\d+[kmg])", told["volumes"][volume]["driver_opts"]["o"])[1].upper() + "iB")
        assert config.arena * HEADERS < size < parse_size(node["mem_limit"].upper() + "iB")


def test_prometheus_scrapes_every_node_of_the_compose_file() -> None:
    services = read("docker-compose.yml")["services"]
    nodes = {
        f"{name}:{service['environment']['KVSTORE_METRICS'].rpartition(':')[2]}"
        for name, service in services.items()
        if "KVSTORE_METRICS" in service.get("environment", {})
    }
    scraped = [job["static_configs"] for job in read("deploy/prometheus.yml")["scrape_configs"]]
    assert nodes == {target for configs in scraped for config in configs for target in config["targets"]} != set()


def test_the_sidecars_settings_are_known_its_sizes_fit_and_its_probes_are_commands(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pod = read("deploy/kubernetes-sidecar.yaml")["spec"]
    (node,), (engine,) = pod["initContainers"], pod["containers"]
    config = node_config({each["name"]: each["value"] for each in node["env"]}, caplog)
    volumes = {each["name"]: each["emptyDir"] for each in pod["volumes"]}
    memory = parse_size(node["resources"]["limits"]["memory"] + "B")
    assert config.arena * HEADERS < parse_size(volumes["run"]["sizeLimit"] + "B") < memory
    assert config.disk_limit < parse_size(volumes["disk"]["sizeLimit"] + "B")
    assert pod["terminationGracePeriodSeconds"] > config.drain_seconds
    # One user, no privilege, nothing of the host.
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
    assert node["restartPolicy"] == "Always"
    for container in (node, engine):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"name": "run", "mountPath": "/run/kvstore"} in container["volumeMounts"]
    startup = node["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 2 * config.arena / (1 << 30)
    for probe in ("startupProbe", "livenessProbe"):
        command, *arguments = node[probe]["exec"]["command"]
        assert command == "kvstore"
        cli._parser().parse_args(arguments)


def test_the_sidecars_engine_connects_to_its_socket() -> None:
    (engine,) = read("deploy/kubernetes-sidecar.yaml")["spec"]["containers"]
    (told,) = [each for each in engine["args"] if each.startswith("--kv-transfer-config=")]
    config = json.loads(told.partition("=")[2])
    socket = re.search(r"KVSTORE_SOCKET=(\S+)", (ROOT / "Dockerfile").read_text())[1]
    assert Options.parse(config["kv_connector_extra_config"]).url == f"unix://{socket}"
    assert config["kv_connector"] == vllm_plugin.CONNECTOR


def test_kubernetes_takes_the_pod() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for version in ("1.29", validate.latest_version()):  # 1.29: the first one with sidecars by default
        validate.validate(read("deploy/kubernetes-sidecar.yaml"), version, strict=True)


def test_a_nodes_command_needs_no_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a root file system that is for reading only has none."""

    def nowhere() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", nowhere)
    assert cli._parser().parse_args(["serve"]).command == "serve"


def unit_settings() -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            settings.setdefault(key, []).append(value)
    return settings


def test_the_units_command_and_environment_are_known(caplog: pytest.LogCaptureFixture) -> None:
    settings = unit_settings()
    (command,) = settings["ExecStart"]
    options = cli._parser().parse_args(shlex.split(command)[1:])
    assert options.command == "serve"
    environment = dict(each.split("=", 1) for line in settings["Environment"] for each in shlex.split(line))
    config = node_config(environment, caplog)
    assert int(settings["TimeoutStopSec"][0]) > config.drain_seconds
    assert (settings["Restart"], settings["StartLimitIntervalSec"]) == (["always"], ["0"]), "it never gives up"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "kvstore.service"
    unit.write_text(UNIT.read_text().replace("/opt/kvstore/bin/kvstore", shutil.which("true") or sys.executable))
    command = ["systemd-analyze", "verify", "--man=no", unit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "Failed to" in done.stderr and "kvstore.service:" not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert (done.returncode, done.stderr) == (0, "")
