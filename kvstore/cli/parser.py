"""The parser of every command: flags stand anywhere, none is abbreviated, and a wrong word is told the nearest one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from kvstore.cli.exit_codes import EXIT_USAGE

_ONE_MORE = "\0"
"""A word that nobody writes."""


class Help(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal; those with indented lines (lists, examples) stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = super()._fill_text
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join(each if "\n " in each else wrap(each, width, indent) for each in paragraphs)


class Parser(argparse.ArgumentParser):
    """The parser of ``kvstore``, and of each of its commands.

    Its arguments may stand before, between and behind its flags, and there are no abbreviations of flags. A command
    that gets an argument it does not know says so itself, with the nearest that it knows.
    """

    def __init__(self, **options: Any) -> None:
        settings: dict[str, Any] = {"formatter_class": Help, "allow_abbrev": False} | options
        super().__init__(**settings)

    # Typed as the base class is, whose overloads tell namespaces apart.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As the base class, but flags may stand anywhere; what it does not know is an error here, where the command is
        known."""
        given = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # otherwise what is behind a subcommand's name is the subcommand's
            # The base class takes all arguments that it can from the first run of them: a list of any length would take
            # none where a flag comes before it, and what comes behind the flag would be one too many.
            flags, arguments = self._divided(given)
            given = [*flags, *(["--"] if "--" in given else []), *arguments]
            if not {"-h", "--help"} & set(flags):  # before what is required is missed: that may be what is misspelt
                wrong = [each for each in flags if self._is_flag(each) and not self._is_known(each)]
                self._refuse(wrong + (arguments if wrong and not self._get_positional_actions() else []))
        options, unknown = super().parse_known_args(given, namespace)
        self._refuse(unknown)
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Print usage, message and where there is more, and end with 2."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (`{self.prog} --help` says more)\n")

    def awaits(self, words: Sequence[str]) -> str | None:
        """What one more word behind these would be: the name that help has for it. None: nothing is expected."""
        if self._subparsers is not None:
            (group,) = self._subparsers._group_actions  # noqa: SLF001 - argparse shows it nowhere else
            parsers: Any = group.choices
            inner = parsers.get(words[0]) if words else None
            return inner.awaits(words[1:]) if isinstance(inner, Parser) else None
        flags, arguments = self._divided([*words, _ONE_MORE])
        if not arguments:
            metavar = self._option_string_actions[flags[-2]].metavar
        else:
            known = self._get_positional_actions()
            metavar = known[min(len(arguments), len(known)) - 1].metavar if known else None
        return metavar if isinstance(metavar, str) else None

    def _refuse(self, unknown: Sequence[str]) -> None:
        if unknown:
            near = _near(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")

    def _divided(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Flags, each with its value behind it, and arguments."""
        flags: list[str] = []
        arguments: list[str] = []
        left = list(words)
        while left:
            word = left.pop(0)
            if word == "--":  # nothing behind it is a flag
                return flags, arguments + left
            if not self._is_flag(word):
                arguments.append(word)
                continue
            flags.append(word)
            action = self._option_string_actions.get(word)
            takes = 0 if action is None else 1 if action.nargs is None else len(left) if action.nargs == "+" else 0
            while takes and left and not self._is_flag(left[0]):
                flags.append(left.pop(0))
                takes -= 1
        return flags, arguments

    def _is_flag(self, word: str) -> bool:
        return self._parse_optional(word) is not None

    def _is_known(self, flag: str) -> bool:
        return flag in self._option_string_actions or flag.partition("=")[0] in self._option_string_actions

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As the base class; whoever is nearly right is not told all that there are."""
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            near = _near(str(value), known) or f" (choose from {', '.join(map(repr, known))})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{near}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """As the base class, but an error of stdout is one here."""
        if file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)


def _near(word: str, known: Iterable[str]) -> str:
    from kvstore.config.rules import did_you_mean  # for a mistake alone: what it imports takes longer than a probe may

    return did_you_mean(word, known)
