"""``kvstore check``: verifies every record of a disk tier that no node uses, or of a bucket; repairs if asked to."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from kvstore.cli.progress import Progress
from kvstore.cli.tables import figures_table, print_line, print_table
from kvstore.errors import ConfigError, KVStoreError, ResourceError
from kvstore.segments.check import SegmentReport, check_log
from kvstore.segments.folder import describe_foreign_files
from kvstore.units import format_size

EXIT_SOUND, EXIT_DAMAGED = 0, 1
_CODES = """\
exit codes:
  0  every record is what was stored
  1  damage was found (with --repair: and repaired), or the check failed; the last line says which
  2  a flag is wrong, DIR is not a directory, or it holds no segments (of a bucket: the URL is wrong)
"""


def add_to(commands: argparse._SubParsersAction[Any]) -> None:
    """Add its parser."""
    check = commands.add_parser(
        "check",
        help="verify every record of a disk tier while no node uses it",
        description="Verify every record of a disk tier while no node uses it. Nothing is changed without --repair,"
        " which cuts torn tails, drops damaged pages (to a node they are misses anyway), and deletes segments in which"
        " nothing can be trusted.",
        epilog=_CODES,
    )
    check.add_argument("directory", metavar="DIR", nargs="?", help="folder of the disk tier")
    check.add_argument(
        "--objects",
        metavar="URL",
        help="verify the packs in object storage instead, as s3://bucket/prefix; nodes may use it meanwhile",
    )
    check.add_argument("--repair", action="store_true", help="cut, drop and delete what is damaged")
    check.add_argument("--json", action="store_true", help="print one JSON object")
    check.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check, print, and return the exit code."""
    if (options.directory is None) == (options.objects is None):
        raise ConfigError("give either the folder of a disk tier, or --objects URL")
    if options.objects is not None:
        return _check_objects(options)
    progress = Progress("kvstore check", show_size=format_size, lines=True)
    foreign: list[Path] = []
    reports = list(
        check_log(Path(options.directory), repair=options.repair, progress=progress.update, left_alone=foreign.extend)
    )
    progress.end()
    if foreign:
        print(f"kvstore check: {options.directory}: {describe_foreign_files(foreign)}", file=sys.stderr)
    if not reports:
        raise ConfigError(f"no segments in {options.directory}")
    damaged = [report for report in reports if report.damaged]
    if options.json:
        segments = [dataclasses.asdict(report) | {"damaged": report.damaged} for report in reports]
        left_alone = sorted(path.name for path in foreign)
        told = {"segments": segments, "damaged": len(damaged), "repaired": options.repair, "left_alone": left_alone}
        print(json.dumps(told, indent=2))
    else:
        _print(reports, repair=options.repair)
    return EXIT_DAMAGED if damaged else EXIT_SOUND


def _check_objects(options: argparse.Namespace) -> int:
    from kvstore.tiers.objects.check import check_bucket  # the extra `objects`

    if options.repair:
        raise ConfigError("--repair is for folders: nodes delete from object storage what nobody can use")
    progress = Progress("kvstore check", show_size=format_size, lines=True)
    try:
        reports = list(check_bucket(options.objects, progress.update))
    except KVStoreError:
        raise
    except OSError as error:
        raise ResourceError(f"{options.objects} can't be read: {error.strerror or error}") from error
    progress.end()
    damaged = [report for report in reports if report.damaged]
    untold = sum(not report.told for report in reports)
    if options.json:
        packs = [dataclasses.asdict(report) | {"damaged": report.damaged} for report in reports]
        print(json.dumps({"packs": packs, "damaged": len(damaged), "untold": untold}, indent=2))
    else:
        for report in damaged:
            what = "nothing in it can be trusted" if report.unreadable else f"{report.damaged_pages:,} damaged pages"
            print_line(f"{report.name}: {what}")
        pages = sum(report.pages for report in reports)
        print_line(
            f"{len(reports)} packs with {pages:,} pages: {len(damaged)} damaged, {untold} that nobody is told of"
        )
    return EXIT_DAMAGED if damaged else EXIT_SOUND


def _print(reports: list[SegmentReport], *, repair: bool) -> None:
    table = figures_table("segment", "size", "pages", "damaged", "", left=("segment", ""))
    for report in reports:
        figures = (format_size(report.bytes), f"{report.pages:,}", f"{report.damaged_pages:,}")
        table.add_row(report.name, *figures, _words(report))
    print_table(table)
    damaged = sum(report.damaged for report in reports)
    pages = sum(report.pages for report in reports)
    if damaged:
        what = "repaired" if repair else "nothing was changed; --repair drops what is damaged"
        print_line(f"damage in {damaged} of {len(reports)} segments: {what}")
    else:
        print_line(f"{len(reports)} segments with {pages:,} pages are sound")


def _words(report: SegmentReport) -> str:
    if report.unreadable:
        return "nothing in it can be trusted" + ("; deleted" if report.repaired else "")
    words = []
    if report.header_damaged:
        words.append("segment header damaged" + (" (written anew)" if report.repaired else ""))
    if report.cut_bytes:
        words.append(f"torn tail or footer, {report.cut_bytes:,} bytes" + (" (cut)" if report.repaired else ""))
    if report.damaged_pages:
        words.append("damaged pages" + (" (dropped)" if report.repaired else ""))
    return ", ".join(words) or "sound"
