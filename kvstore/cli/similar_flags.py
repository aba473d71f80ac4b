"""The proxy's flags for answers to similar prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvstore.cli import embedding_flags
from kvstore.cli.responses_store import read_secret
from kvstore.errors import ConfigError
from kvstore.responses.semantic.comparers import Compare, Judge, compare_short
from kvstore.responses.similar import Similar
from kvstore.security.secret_files import check_private, read_file

_PREFIX = "--responses-"
_SHORT = "short"
_SCHEMES = ("http://", "https://")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    parser.add_argument(
        "--responses-similar",
        metavar="PERCENT",
        type=float,
        help="answer chats whose last prompt is only similar to one that was answered, too, with at most this share of"
        " wrong answers among these, as 2 (default: off)",
    )
    parser.add_argument(
        "--responses-compare",
        metavar="HOW",
        help="how answers are compared: short (by their words, up to 200 characters), or the URL of an"
        " OpenAI-compatible API with a model that judges, as http://10.0.0.7:8300/v1 (default: not at all, and no"
        " similar prompt is answered)",
    )
    parser.add_argument("--responses-judge-model", metavar="NAME", help="the model that judges")
    parser.add_argument(
        "--responses-judge-prompt",
        metavar="FILE",
        type=Path,
        help="what it is asked, with {prompt}, {answer} and {kept} where these belong; it answers yes or no",
    )
    parser.add_argument(
        "--responses-judge-key-file", metavar="FILE", type=Path, help="the API key for it (default: none)"
    )
    parser.add_argument(
        "--responses-shadow",
        metavar="PERCENT",
        type=float,
        default=5.0,
        help="share of answers to similar prompts that is computed as well, and compared (default: 5)",
    )
    embedding_flags.add_to(parser, _PREFIX)


def read(options: argparse.Namespace) -> Similar | None:
    """How similar prompts are answered; None: they are computed.

    Raises:
        ConfigError: a value can't be used, or is for what is off.
    """
    judge = {
        f"--responses-judge-{name}": getattr(options, f"responses_judge_{name.replace('-', '_')}")
        for name in ("model", "prompt", "key-file")
    }
    if options.responses_similar is None:
        others = {"--responses-compare": options.responses_compare} | judge | embedding_flags.given(options, _PREFIX)
        for flag, value in others.items():
            if value is not None:
                raise ConfigError(f"{flag} is for similar prompts: give --responses-similar PERCENT as well")
        return None
    for name, least, most in (("similar", 0.0, 50.0), ("shadow", 0.0, 100.0)):
        value = getattr(options, f"responses_{name}")
        if not least < value <= most:
            raise ConfigError(f"--responses-{name} must be above {least:g} and at most {most:g} percent, got {value:g}")
    compare, embedding = _compare(options), embedding_flags.read(options, _PREFIX)
    return Similar(
        compare,
        options.responses_similar / 100,
        options.responses_shadow / 100,
        embedding.vector,
        embedding.vectors,
        embedding.deadline,
        embedding.close,
    )


def _compare(options: argparse.Namespace) -> Compare | None:
    how = options.responses_compare
    model, prompt, key_file = (getattr(options, f"responses_judge_{name}") for name in ("model", "prompt", "key_file"))
    if how is None or how == _SHORT:
        if model or prompt or key_file:
            raise ConfigError("--responses-judge-… are for a model that judges: give its URL by --responses-compare")
        return None if how is None else compare_short
    if not how.startswith(_SCHEMES):
        raise ConfigError(f"--responses-compare is {_SHORT} or a URL with {' or '.join(_SCHEMES)}, not {how!r}")
    if model is None or prompt is None:
        raise ConfigError("--responses-compare URL needs --responses-judge-model and --responses-judge-prompt")
    words = read_file(prompt, "judge's prompt").decode(errors="replace")
    missing = [name for name in ("{answer}", "{kept}") if name not in words]
    if missing:
        raise ConfigError(f"the judge's prompt {prompt} has no {missing[0]}: it could not compare")
    key = ""
    if key_file is not None:
        check_private(key_file, "API key file")
        key = read_secret(key_file, "API key file")
    return Judge(how, model, words, key)
