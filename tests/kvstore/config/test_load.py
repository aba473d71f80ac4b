"""Settings from file, environment and flags."""

import logging
from pathlib import Path

import pytest

from kvstore.config.load import load_config
from kvstore.config.node import NodeConfig
from kvstore.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvstore.toml"


def test_file_then_environment_then_flags(file: Path) -> None:
    file.write_text('arena = "1MiB"\ndisk_limit = "2MiB"\nlog_level = "debug"\nverify_checksums = false\n')
    environment = {"KVSTORE_DISK_LIMIT": "3MiB", "KVSTORE_LOG_LEVEL": "error", "PATH": "/bin", "ARENA": "7MiB"}
    config = load_config(file, environment, {"log_level": "warning"})
    assert (config.arena, config.disk_limit, config.log_level) == (1 << 20, 3 << 20, "warning")
    assert config.verify_checksums is False
    assert config.drain_seconds == NodeConfig().drain_seconds


def test_every_kind_of_value_from_everywhere(file: Path) -> None:
    file.write_text('arena = 1048576\nlisten = 7420\ndrain_seconds = 3\nsocket = "~/s"\narena_dir = "/dev/shm/x"\n')
    config = load_config(file)
    assert (config.arena, config.listen, config.drain_seconds) == (1 << 20, "7420", 3.0)
    assert (config.socket, config.arena_dir) == (Path("~/s").expanduser(), Path("/dev/shm/x"))
    assert config.arena_directory == Path("/dev/shm/x")
    environment = {"KVSTORE_ARENA": "1.5 GiB", "KVSTORE_DRAIN_SECONDS": "0.5", "KVSTORE_VERIFY_CHECKSUMS": "False"}
    config = load_config(None, environment)
    assert (config.arena, config.drain_seconds, config.verify_checksums) == (3 << 29, 0.5, False)
    config = load_config(None, None, {"disk": Path("/d"), "disk_limit": 0, "verify_checksums": True})
    assert (config.disk, config.disk_limit, config.verify_checksums) == (Path("/d"), 0, True)


def test_an_unknown_key_is_refused_with_the_nearest_known_one(file: Path) -> None:
    file.write_text('aren = "1MiB"\n')
    with pytest.raises(ConfigError, match=rf"{file}: unknown key 'aren'; did you mean 'arena'\?"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"--disklimit: unknown key 'disklimit'; did you mean 'disk_limit'\?"):
        load_config(flags={"disklimit": "1MiB"})
    with pytest.raises(ConfigError, match="unknown key 'zzz'; known keys: socket, group, listen, bulk_port, "):
        load_config(flags={"zzz": 1})
    with pytest.raises(ConfigError, match="unknown key 'tier'"):
        file.write_text("[tier.disk]\nlimit = 1\n")
        load_config(file)


def test_an_unknown_name_in_the_environment_is_only_said(caplog: pytest.LogCaptureFixture) -> None:
    """Orchestrators set such variables, as KVSTORE_SERVICE_HOST."""
    with caplog.at_level(logging.WARNING):
        config = load_config(None, {"KVSTORE_AREN": "1MiB", "KVSTORE_SERVICE_HOST": "10.0.0.1"})
    assert config == NodeConfig()
    assert "KVSTORE_AREN is not a setting of kvstore; did you mean 'arena'?" in caplog.text
    assert "KVSTORE_SERVICE_HOST" in caplog.text


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("arena", "lots", "--arena: arena: not a size: 'lots'"),
        ("arena", "-1", "not a size"),
        ("arena", "1KiB", "arena is 1024 bytes, the least is 64KiB"),
        ("arena", 1.5, "--arena: arena can't be 1.5"),
        ("arena", True, "--arena"),
        ("disk_limit", "64KiB", "disk_limit is 65536 bytes, the least is 1MiB"),
        ("drain_seconds", "soon", "--drain-seconds: drain_seconds: "),
        ("drain_seconds", -1, "drain_seconds must lie between 0 and 3600, got -1"),
        ("drain_seconds", "nan", "drain_seconds must lie between 0 and 3600, got nan"),
        ("drain_seconds", True, "drain_seconds can't be True"),
        ("verify_checksums", "maybe", "verify_checksums can't be 'maybe'"),
        ("log_level", "loud", "log_level must be one of debug, info, warning, error, got 'loud'"),
        ("listen", "host", "not an address: 'host'"),
        ("socket", "", "socket can't be ''"),
        ("socket", "/" + "x" * 100, "more than the 100 bytes"),
        ("disk", "~nobody-of-this-name/x", "--disk: disk: "),
        ("disk", ["/d"], r"disk can't be \['/d'\]"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_its_key(key: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(flags={key: value})


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=f"{file} can't be read: No such file"):
        load_config(file)
    file.write_text("arena = ")
    with pytest.raises(ConfigError, match=f"{file} is not valid TOML"):
        load_config(file)
    file.write_bytes(b'disk = "\xff"')
    with pytest.raises(ConfigError, match=f"{file} is not valid TOML"):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arena = " + "[" * 5000, "is not valid TOML: brackets in brackets"),
        ("arena = " + "9" * 5000, "is not valid TOML: "),
        (f'arena = "{"9" * 5000}"', "arena: not a size"),
        ('arena = "9999999999TiB"', "arena: a size is below 8 EiB, got '9999999999TiB'"),
        ('arena = "٣GiB"', "arena: not a size"),
        (f'expire_namespaces = "{"9" * 400}d"', "expire_namespaces: not a time"),
        ("drain_seconds = " + "9" * 400, "drain_seconds: not a number of seconds"),
        ('socket = "/tmp/\\u0000"', "socket can't be .*a zero byte"),
        ('listen = "a\\u0000:1"', "listen can't be .*a zero byte"),
    ],
)
def test_nothing_in_a_file_ends_a_node_that_reads_it_again(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "mode", "warned"),
    [
        ('redis = "redis://:secret@cache"', 0o644, True),
        ('redis = "redis+sentinel://a:1/it?sentinel_password=secret"', 0o604, True),
        ('redis = "redis://:secret@cache"', 0o600, False),
        ('redis = "redis://cache"', 0o644, False),
    ],
)
def test_a_file_that_shows_others_a_password_is_warned_of(
    file: Path, caplog: pytest.LogCaptureFixture, text: str, mode: int, warned: bool
) -> None:
    file.write_text(text)
    file.chmod(mode)
    load_config(file)
    assert (f"{file} has mode {mode:04o}" in caplog.text and "the password of redis" in caplog.text) == warned
    assert "secret" not in caplog.text
    assert bool(caplog.records) == warned


def test_rules_are_for_the_file_alone() -> None:
    with pytest.raises(ConfigError, match=r"KVSTORE_TENANT: tenant is given in the file only, as \[\[tenant\]\]"):
        load_config(None, {"KVSTORE_TENANT": "search"})
