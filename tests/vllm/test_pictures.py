"""Prompts with pictures: a block behind a picture is named by it, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from made_models import PICTURE, PICTURE_TOKENS

from tests.vllm.engine import Prompt

OPTIONS = {"skip_tokenizer_init": False}  # vLLM looks for a picture's place by its name


@pytest.fixture(autouse=True, scope="module")
def _reads_pictures() -> None:
    transformers = pytest.importorskip("transformers")
    try:
        transformers.Idefics3ImageProcessorPil()
    except ImportError as error:  # up to 5.17 also the one that works with Pillow alone needs torchvision
        pytest.skip(
            f"transformers {transformers.__version__} reads no pictures here: {str(error).split('.')[0].strip()}"
        )


def test_the_same_picture_hits_and_another_one_only_up_to_its_place(
    transfer: dict[str, Any],
    start_engine: Callable[..., Any],
    plain: Callable[..., Any],
    prompt: Callable[..., list[int]],
) -> None:
    before, behind = prompt(70), prompt(100, 1)
    length = len(before) + 3 + PICTURE_TOKENS + len(behind)
    one, another = (Prompt([*before, PICTURE, *behind], picture=number) for number in (1, 2))
    expected = [plain([each], model="idefics", options=OPTIONS).tokens for each in (one, another)]
    assert expected[0] != expected[1]
    with start_engine("idefics", transfer=transfer, **OPTIONS) as first:
        assert first.run([one]).tokens == expected[0]
    with start_engine("idefics", transfer=transfer, **OPTIONS) as second:
        again = second.run([one])
        assert (again.tokens, again.external_hits) == (expected[0], length // 32 * 32)
        second.drain()
        second.forget()
        other = second.run([another])
        assert (other.tokens, other.external_hits) == (expected[1], len(before) // 32 * 32)
