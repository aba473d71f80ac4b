"""Flags that several benchmarks have: ``--json`` and ``--plot``, ``--rounds``, and lists of numbers."""

from __future__ import annotations

import argparse

from kvstore.errors import ConfigError


def add_output_flags(parser: argparse.ArgumentParser, plot_help: str) -> None:
    """Add the flags that say how figures are printed, behind all others."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plot", metavar="FILE", help=plot_help)


def check_rounds(rounds: int) -> None:
    """Whether there is something to measure.

    Raises:
        ConfigError: there is not.
    """
    if rounds < 1:
        raise ConfigError(f"--rounds is {rounds}, the least is 1")


def parse_numbers(flag: str, text: str, least: int, most: int) -> list[int]:
    """The numbers in ``text``, with commas between, as they are given.

    Raises:
        ConfigError: they are none, or not all from ``least`` to ``most``; the message names the flag.
    """
    try:
        numbers = [int(each) for each in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}, it must be numbers with commas between") from error
    if min(numbers) < least or max(numbers) > most:
        raise ConfigError(f"{flag} is {text!r}, each must be from {least} to {most}")
    return numbers
