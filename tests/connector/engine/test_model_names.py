"""One model under two names: its pages are shared, tickets are taken, and both names are listed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_objects import HfConfig, ModelConfig, VllmConfig

import kvstore
from kvstore.connector.disagg.peers import foreign
from kvstore.connector.disagg.ticket import Ticket, TicketError, check, fingerprint_of
from kvstore.connector.engine.identity import CacheGroup, Place, layouts, model_label, model_of
from kvstore.connector.engine.weights import weights_fingerprint
from kvstore.labels import MOST_LABEL, checked_label

HASHES = kvstore.hash_blocks(list(range(64)), 16)
GROUP = CacheGroup(block_size=16, page_bytes=4096, dtype="float32", layers=2, kv_heads=4, head_size=8, details=["x"])


def layouts_of(folder: Path | str) -> list[kvstore.Layout]:
    config = HfConfig({"architectures": ["LlamaForCausalLM"], "_name_or_path": str(folder)})
    model = model_of(VllmConfig(ModelConfig(str(folder), hf_config=config)))
    return layouts(model, [GROUP], Place(), "")


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "model.bin").write_bytes(b"weights")
    return tmp_path / "chat"


@pytest.fixture
def copy(chat: Path) -> Path:
    return Path(shutil.copytree(chat, chat.with_name("chat-copy")))


@pytest.fixture(params=["unix", "kv", "embedded"])
def connect(request: pytest.FixtureRequest, start_node: Callable[..., Any], short_folder: Path) -> Iterator[Any]:
    """Make a client; of an embedded store there is one."""
    if request.param == "embedded":
        client = kvstore.connect(f"embedded://{short_folder}/e?arena=8MiB&arena_dir={short_folder}/a")
        yield lambda: client
        client.close()
        return
    node = start_node()
    url = f"unix://{node.config.socket}" if request.param == "unix" else f"kv://127.0.0.1:{node.port}"
    clients = [kvstore.connect(url), kvstore.connect(url)]
    waiting = list(clients)
    yield waiting.pop
    for client in clients:
        client.close()


def test_engines_that_name_a_model_differently_share_its_pages(
    chat: Path, copy: Path, connect: Callable[[], kvstore.Client]
) -> None:
    data = os.urandom(4 * 4096)
    [one], [other] = layouts_of(chat), layouts_of(copy)
    writer, reader = connect(), connect()
    assert writer.namespace(one, label=model_label(str(chat))).store(HASHES, data).stored == 4
    into = bytearray(len(data))
    assert reader.namespace(other, label=model_label(str(copy))).load(HASHES, into) == 4
    assert into == data
    [status] = reader.status().namespaces
    assert status.labels == ("chat", "chat-copy")
    assert status.name.startswith(f"chat@{one.revision} · block 16 · ")


def test_a_ticket_of_an_engine_that_names_its_model_differently_is_taken(chat: Path, copy: Path) -> None:
    mine, theirs = layouts_of(chat), layouts_of(copy)
    ticket = Ticket("host-1", bytes(16), fingerprint_of(theirs), theirs[0].to_json(), 64, 1e10)
    check(ticket, mine, ["host-1"], 64)
    assert foreign([theirs[0].to_json()], mine[0]) == ""
    (copy / "model.bin").write_bytes(b"Weights")
    tuned = layouts_of(copy)
    ticket = Ticket("host-1", bytes(16), fingerprint_of(tuned), tuned[0].to_json(), 64, 1e10)
    with pytest.raises(TicketError, match="foreign ticket: revision"):
        check(ticket, mine, ["host-1"], 64)


def test_no_name_that_people_choose_is_in_a_layout(chat: Path, tmp_path: Path) -> None:
    link = tmp_path / "a-link"
    link.symlink_to(chat)
    assert layouts_of(link) == layouts_of(chat)
    assert layouts_of(chat)[0].model == "LlamaForCausalLM"
    (chat / "model.bin").rename(chat / "model.gguf")
    one, other = chat / "model.gguf", tmp_path / "other.gguf"
    shutil.copy(one, other)
    assert layouts_of(one) == layouts_of(other)


def test_what_names_a_model_of_which_its_configuration_says_less(chat: Path) -> None:
    def name(values: dict[str, Any]) -> str:
        return model_of(VllmConfig(ModelConfig(str(chat), hf_config=HfConfig(values)))).name

    assert name({"architectures": [], "model_type": "llama"}) == "llama"
    assert name({}) == "model"
    assert len(name({"architectures": ["x" * 5000]})) == MOST_LABEL


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("a\nb", "a\\nb"),
        ("\udcff", "\\udcff"),
        ("ä" * 100, "ä" * 100),
        ("acme/chat", "acme/chat"),
        ("x" * 999, "x" * 256),
    ],
)
def test_whatever_a_model_is_called_is_a_label(name: str, label: str, tmp_path: Path) -> None:
    assert checked_label(model_label(name)) == label
    if len(name) < 100 and not {"/", "\0"} & set(name):
        (tmp_path / name).mkdir()
        assert model_label(f"{tmp_path}/{name}/") == label


def test_weights_in_one_file_are_the_same_by_whatever_name(tmp_path: Path) -> None:
    for name in ("one.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(b"weights")
    assert weights_fingerprint(tmp_path / "one.gguf") == weights_fingerprint(tmp_path / "other.gguf")
