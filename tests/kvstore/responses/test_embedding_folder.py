"""A sentence-transformers folder as the embedding. The model has random weights: how good it is, is not measured."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError, ResourceError
from kvstore.responses.embedding.folder import FolderEmbedder

_MODEL = """
import sys
from pathlib import Path
import torch
from transformers import BertConfig, BertModel, BertTokenizerFast
from sentence_transformers import SentenceTransformer, models

torch.manual_seed(int(sys.argv[2]))
folder = Path(sys.argv[1])
bert = folder.with_name(folder.name + ".bert")
bert.mkdir()
words = "[PAD] [UNK] [CLS] [SEP] [MASK] how do i reset my password router".split()
(bert / "vocab.txt").write_text("\\n".join(words))
BertTokenizerFast(str(bert / "vocab.txt")).save_pretrained(bert)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
config = BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes)
BertModel(config).save_pretrained(bert)
inner = models.Transformer(str(bert))
SentenceTransformer(modules=[inner, models.Pooling(16)], device="cpu").save(str(folder))
"""


def model(folder: Path, seed: int = 1) -> Path:
    """In a process of its own: the library leaves threads behind."""
    subprocess.run([sys.executable, "-c", _MODEL, str(folder), str(seed)], check=True, capture_output=True)
    return folder


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed")
def test_a_folder_embeds_and_other_weights_have_another_name(tmp_path: Path) -> None:
    one, other = FolderEmbedder(model(tmp_path / "one")), FolderEmbedder(model(tmp_path / "other", 2))
    asked = one("How do I reset my password?")
    assert asked.shape == (16,)
    assert asked.dtype == np.float32
    assert np.allclose(asked, one("How do I reset my password?"))
    assert not np.allclose(asked, one("router"))
    assert not np.allclose(asked, other("How do I reset my password?"))
    assert one.name != other.name
    assert one.name == FolderEmbedder(tmp_path / "one").name


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"it has no modules\.json"):
            FolderEmbedder(path)


def test_the_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules.json").write_text("[]")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ResourceError, match=r"pip install 'kvstore-offload\[sentence-transformers\]'"):
        FolderEmbedder(tmp_path)


@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed")
def test_a_folder_that_can_not_be_loaded_is_refused_without_a_download(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"idx": 0, "name": "0", "path": "", "type": "nobody.Has.It"}]')
    with pytest.raises(ResourceError, match="can't be loaded"):
        FolderEmbedder(tmp_path)
