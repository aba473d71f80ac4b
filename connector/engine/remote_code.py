"""A fingerprint of the Python code beside a model's weights, which an engine runs under ``trust_remote_code``.

Counted are the files that ``auto_map`` names in the model's configuration and in its processors', and what these import
relatively, however deep. A file that is in no folder here counts as absent: an engine that has its own code for a model
downloads none. In doubt the fingerprint is another one, which costs misses.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from kvstore.connector.engine.weights import CONFIGS, weights_folder
from kvstore.errors import ResourceError

_MAP = "auto_map"


def code_fingerprint(model: Any, folder: Path, config: Mapping[str, Any], download_dir: str | None) -> str:
    """32 hexadecimal digits for the code of a model: equal for equal code, whatever its folder is called.

    Empty where no configuration names any.

    Args:
        model: a ``ModelConfig`` of vLLM's.
        folder: with its weights.
        config: its configuration, as it is in effect.
        download_dir: where the engine keeps what it downloads; None: in the hub's cache.

    Raises:
        ResourceError: code that is here and can't be read.
    """
    named = sorted(set(_named(config)).union(*(_named(each) for each in _processors(folder))))
    if not named:
        return ""
    found: set[tuple[str, str]] = set()
    references = set()
    for each in named:
        repository, _, reference = each.rpartition("--")
        references.add(reference)
        module = reference.rpartition(".")[0]
        if re.fullmatch(r"\w+(\.\w+)*", module):
            file = PurePosixPath(*module.split(".")).with_suffix(".py")
            for root in _roots(model, folder, repository, str(file), download_dir):
                found.update(_read(root, file))
    return hashlib.sha256(json.dumps([sorted(references), sorted(found)]).encode()).hexdigest()[:32]


def without_code(config: Any) -> Any:
    """A configuration without what names its code: a hub's name for a folder is in it, which changes nothing."""
    if isinstance(config, Mapping):
        return {key: without_code(value) for key, value in config.items() if key != _MAP}
    return [without_code(each) for each in config] if isinstance(config, list | tuple) else config


def _named(config: Any) -> Iterator[str]:
    """What a configuration's maps refer to: ``module.Class``, or ``repository--module.Class``."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from _texts(value) if key == _MAP else _named(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _processors(folder: Path) -> Iterator[Any]:
    for name in CONFIGS:
        with suppress(OSError, ValueError, RecursionError):  # a file that is no JSON names nothing
            yield json.loads((folder / name).read_bytes())


def _roots(model: Any, folder: Path, repository: str, file: str, download_dir: str | None) -> Sequence[Path]:
    """Folders that a module may come from: the model's own, or another repository's."""
    revision = getattr(model, "code_revision", None)
    own = [str(each) for each in (model.model, getattr(model, "hf_config_path", None)) if each]
    roots = [] if repository and repository not in own else [folder]
    for name in own if roots else [repository]:
        for cache in dict.fromkeys((download_dir, None)):
            with suppress(ResourceError):
                roots.append(weights_folder(name, revision or (model.revision if name in own else None), cache, file))
    return [root for root in dict.fromkeys(roots) if (root / file).is_file()]


def _read(root: Path, file: PurePosixPath) -> set[tuple[str, str]]:
    """A file and what it imports relatively, below a folder: path and digest of each."""
    read: dict[PurePosixPath, str] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path in read or not (root / path).is_file():
            continue
        try:
            text = (root / path).read_bytes()
        except OSError as error:
            raise ResourceError(f"the model's code in {root / path} can't be read: {error}") from error
        read[path] = hashlib.sha256(text).hexdigest()
        waiting += _imported(path, text)
    return {(str(path), digest) for path, digest in read.items()}


def _imported(path: PurePosixPath, text: bytes) -> Iterator[PurePosixPath]:
    """Files that a file may mean by its relative imports; not all of them are there."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # nobody can run it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(path.parts):
            place = PurePosixPath(*path.parts[: len(path.parts) - node.level])
            modules = (node.module or "").split(".") if node.module else []
            packages = [place.joinpath(*modules[:depth]) for depth in range(len(modules) + 1)]
            for each in [*packages[1:], *(packages[-1] / name.name for name in node.names)]:
                yield each.with_suffix(".py") if each.name else each
                yield each / "__init__.py"
