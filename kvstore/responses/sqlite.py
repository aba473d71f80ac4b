"""Answers, prompts and outcomes in an SQLite file, which several processes of one machine may share."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.errors import FormatError, ResourceError
from kvstore.responses.semantic.group import MOST_PROMPTS
from kvstore.responses.store import (
    MOST_OUTCOMES,
    NEWS_AT_ONCE,
    Choice,
    Entry,
    Label,
    Learner,
    Limits,
    News,
    Seen,
    StoreError,
    Usage,
)

_VERSION = 2
"""Of the schema, which sets it, also where version 1 is."""
_BUSY_SECONDS = 1.0
"""For another process' change to end."""
_LISTED_AT_ONCE = 500
_LABEL = "entry, tenant, key, model, weights, stored_at, expires_at"
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS entries (
    entry TEXT PRIMARY KEY, tenant TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL, weights TEXT NOT NULL,
    stored_at REAL NOT NULL, expires_at REAL NOT NULL, size INTEGER NOT NULL, sealed BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS ends ON entries (expires_at, entry, size);
CREATE TABLE IF NOT EXISTS totals (one INTEGER PRIMARY KEY CHECK (one = 1), entries INTEGER, bytes INTEGER);
INSERT OR IGNORE INTO totals VALUES (1, 0, 0);
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON entries BEGIN
    UPDATE totals SET entries = entries + 1, bytes = bytes + new.size; END;
CREATE TRIGGER IF NOT EXISTS went AFTER DELETE ON entries BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.size; END;
CREATE TABLE IF NOT EXISTS prompts (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, entry TEXT NOT NULL UNIQUE, of_group TEXT NOT NULL,
    sealed BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS prompts_of_group ON prompts (of_group, sequence);
CREATE TABLE IF NOT EXISTS outcomes (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, learner TEXT NOT NULL, tenant TEXT NOT NULL, key TEXT NOT NULL,
    expires_at REAL NOT NULL, sealed BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS outcomes_of_learner ON outcomes (learner, sequence);
CREATE INDEX IF NOT EXISTS outcomes_end ON outcomes (expires_at);
CREATE TABLE IF NOT EXISTS learnt (
    one INTEGER PRIMARY KEY CHECK (one = 1), epoch TEXT, outcomes INTEGER, bytes INTEGER);
INSERT OR IGNORE INTO learnt VALUES (1, lower(hex(randomblob(8))), 0, 0);
CREATE TRIGGER IF NOT EXISTS prompt_goes AFTER DELETE ON entries BEGIN
    DELETE FROM prompts WHERE entry = old.entry; END;
CREATE TRIGGER IF NOT EXISTS prompt_came AFTER INSERT ON prompts BEGIN
    UPDATE totals SET bytes = bytes + length(new.sealed); END;
CREATE TRIGGER IF NOT EXISTS prompt_went AFTER DELETE ON prompts BEGIN
    UPDATE totals SET bytes = bytes - length(old.sealed); END;
CREATE TRIGGER IF NOT EXISTS outcome_came AFTER INSERT ON outcomes BEGIN
    UPDATE totals SET bytes = bytes + length(new.sealed);
    UPDATE learnt SET outcomes = outcomes + 1, bytes = bytes + length(new.sealed); END;
CREATE TRIGGER IF NOT EXISTS outcome_went AFTER DELETE ON outcomes BEGIN
    UPDATE totals SET bytes = bytes - length(old.sealed);
    UPDATE learnt SET outcomes = outcomes - 1, bytes = bytes - length(old.sealed); END;
PRAGMA user_version = 2;
COMMIT;
"""

_log = logging.getLogger("kvstore.responses")


class SQLiteStore:
    """A file, made when it is missing, that its user alone can read. It survives being killed at any moment.

    A file that is no database any more is put aside, and a new one begun: its answers are computed again.

    Args:
        path: of the file.
        limits: what it holds at most.
        now: seconds since 1970.

    Raises:
        ResourceError: the file can't be made or read.
        FormatError: another version of kvstore wrote it.
    """

    def __init__(self, path: Path, limits: Limits, now: Callable[[], float] = time.time) -> None:
        self._limits = limits
        self._now = now
        self._reading, self._writing = threading.Lock(), threading.Lock()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            try:
                self._writer = _opened(path)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):  # it is locked, or can't be read
                    raise
                _put_aside(path, error)
                self._writer = _opened(path)
            self._reader = _opened(path)
        except OSError as error:
            raise ResourceError.of_place(path, error) from error
        except sqlite3.Error as error:
            raise ResourceError(f"{path} can't be used: {error}") from error

    def get(self, entry: str) -> Entry | None:
        """See :class:`kvstore.responses.store.Store`."""
        with self._reading, _failing():
            row = self._reader.execute(
                f"SELECT {_LABEL}, sealed FROM entries WHERE entry = ? AND expires_at > ?",  # noqa: S608 - constants
                (entry, self._now()),
            ).fetchone()
        return None if row is None else Entry(Label(*row[:-1]), _sealed(row[-1]))

    def put(self, entry: Entry) -> bool:
        """See :class:`kvstore.responses.store.Store`."""
        if entry.size > self._limits.bytes or not self._limits.entries:
            return False
        label = entry.label
        with self._changing() as db:
            db.execute("DELETE FROM entries WHERE entry = ?", (label.entry,))
            self._drop_ended(db)
            self._make_room(db, 1, entry.size)
            db.execute(
                "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    label.entry,
                    label.tenant,
                    label.key,
                    label.model,
                    label.weights,
                    label.stored_at,
                    label.expires_at,
                    len(entry.sealed),
                    entry.sealed,
                ),
            )
            if (prompt := entry.prompt) is not None:
                db.execute(
                    "INSERT INTO prompts (entry, of_group, sealed) VALUES (?, ?, ?)",
                    (label.entry, prompt.group, prompt.sealed),
                )
                db.execute(
                    "DELETE FROM prompts WHERE of_group = ?1 AND sequence <= (SELECT sequence FROM prompts"
                    " WHERE of_group = ?1 ORDER BY sequence DESC LIMIT 1 OFFSET ?2)",
                    (prompt.group, MOST_PROMPTS),
                )
        return True

    def news(self, group: str, prompts: Seen, learner: str, outcomes: Seen) -> News:
        """See :class:`kvstore.responses.store.Store`."""
        with self._reading, _failing():
            self._reader.execute("BEGIN")  # all of it as of one moment
            try:
                (epoch,) = self._reader.execute("SELECT epoch FROM learnt").fetchone()
                prompt, outcome = (each.number if each.epoch == epoch else 0 for each in (prompts, outcomes))
                found = self._reader.execute(
                    f"SELECT sequence, {_LABEL}, prompts.sealed FROM prompts JOIN entries USING (entry)"  # noqa: S608
                    " WHERE of_group = ? AND sequence > ? AND expires_at > ? ORDER BY sequence LIMIT ?",
                    (group, prompt, self._now(), NEWS_AT_ONCE),
                ).fetchall()
                learnt = self._reader.execute(
                    "SELECT sequence, sealed FROM outcomes WHERE learner = ? AND sequence > ? AND expires_at > ?"
                    " ORDER BY sequence LIMIT ?",
                    (learner, outcome, self._now(), NEWS_AT_ONCE),
                ).fetchall()
            finally:
                self._reader.execute("ROLLBACK")
        return News(
            tuple((Label(*row[1:-1]), _sealed(row[-1])) for row in found),
            Seen(epoch, found[-1][0] if found else prompt),
            tuple(_sealed(sealed) for _, sealed in learnt),
            Seen(epoch, learnt[-1][0] if learnt else outcome),
            max(len(found), len(learnt)) == NEWS_AT_ONCE,
        )

    def learn(self, learner: Learner, sealed: bytes, expires_at: float) -> bool:
        """See :class:`kvstore.responses.store.Store`."""
        if len(sealed) > self._limits.outcome_bytes:
            return False
        with self._changing() as db:
            self._drop_ended(db)
            while True:
                (size,) = db.execute("SELECT bytes FROM learnt").fetchone()
                if size + len(sealed) <= self._limits.outcome_bytes:
                    break
                db.execute("DELETE FROM outcomes WHERE sequence = (SELECT min(sequence) FROM outcomes)")
            self._make_room(db, 0, len(sealed))
            db.execute(
                "INSERT INTO outcomes (learner, tenant, key, expires_at, sealed) VALUES (?, ?, ?, ?, ?)",
                (learner.name, learner.tenant, learner.key, expires_at, sealed),
            )
            db.execute(
                "DELETE FROM outcomes WHERE learner = ?1 AND sequence <= (SELECT sequence FROM outcomes"
                " WHERE learner = ?1 ORDER BY sequence DESC LIMIT 1 OFFSET ?2)",
                (learner.name, MOST_OUTCOMES),
            )
        return True

    def labels(self) -> Iterator[Label]:
        """See :class:`kvstore.responses.store.Store`."""
        last = ""
        while True:
            with self._reading, _failing():
                rows = self._reader.execute(
                    f"SELECT {_LABEL} FROM entries WHERE entry > ? AND expires_at > ?"  # noqa: S608 - constants
                    " ORDER BY entry LIMIT ?",
                    (last, self._now(), _LISTED_AT_ONCE),
                ).fetchall()
            if not rows:
                return
            for row in rows:
                yield Label(*row)
            last = rows[-1][0]

    def groups(self) -> dict[str, str]:
        """See :class:`kvstore.responses.store.Store`."""
        with self._reading, _failing():
            return dict(self._reader.execute("SELECT entry, of_group FROM prompts").fetchall())

    def delete(self, choice: Choice) -> int:
        """See :class:`kvstore.responses.store.Store`."""
        with self._changing() as db:
            done = db.execute(
                "DELETE FROM entries WHERE (?1 IS NULL OR entry = ?1) AND (?2 IS NULL OR tenant = ?2)"
                " AND (?3 IS NULL OR key = ?3) AND (?4 IS NULL OR model = ?4)",
                (choice.entry, choice.tenant, choice.key, choice.model),
            )
            if choice.entry is None:
                db.execute("UPDATE learnt SET epoch = ?", (secrets.token_hex(8),))
            learners = db.execute("SELECT DISTINCT learner, tenant, key FROM outcomes").fetchall()
            for row in learners:
                if choice.takes_learner(Learner(*row)):
                    db.execute("DELETE FROM outcomes WHERE learner = ?", (row[0],))
        return done.rowcount

    def usage(self) -> Usage:
        """See :class:`kvstore.responses.store.Store`."""
        with self._changing() as db:
            self._drop_ended(db)
            return Usage(
                *db.execute(
                    "SELECT entries, totals.bytes, (SELECT count(*) FROM prompts), outcomes FROM totals, learnt"
                ).fetchone()
            )

    def close(self) -> None:
        """See :class:`kvstore.responses.store.Store`."""
        with self._reading, self._writing:
            self._reader.close()
            self._writer.close()

    def _drop_ended(self, db: sqlite3.Connection) -> None:
        for table in ("entries", "outcomes"):
            db.execute(f"DELETE FROM {table} WHERE expires_at <= ?", (self._now(),))  # noqa: S608 - constants

    def _make_room(self, db: sqlite3.Connection, more_entries: int, more_bytes: int) -> None:
        """Answers go first; where there are none any more, outcomes."""
        while True:
            entries, size = db.execute("SELECT entries, bytes FROM totals").fetchone()
            if entries + more_entries <= self._limits.entries and size + more_bytes <= self._limits.bytes:
                return
            if not entries:
                db.execute("DELETE FROM outcomes")
                return
            db.execute("DELETE FROM entries WHERE entry = (SELECT entry FROM entries ORDER BY expires_at LIMIT 1)")

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: all of it happens, or nothing."""
        with self._writing, _failing():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                raise
            self._writer.execute("COMMIT")


def _sealed(value: object) -> bytes:
    """Of a row, which may be damaged: then it can't be opened."""
    return value if isinstance(value, bytes) else b""


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, TypeError) as error:  # the second: a table that has lost its row
        raise StoreError(f"the file of responses: {error}") from error


def _opened(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        known = 0 <= version <= _VERSION
        if known:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten
            if version != _VERSION:  # it is new, or old: whoever is first gives it its tables
                db.executescript(_SCHEMA)
    except sqlite3.Error:
        db.close()
        raise
    if not known:
        db.close()
        raise FormatError(f"{path} has version {version}, this kvstore reads version {_VERSION}: remove the file")
    return db


def _put_aside(path: Path, error: sqlite3.Error) -> None:
    aside = path.with_name(path.name + ".damaged")
    _log.warning("%s is damaged (%s): it is kept as %s, and a new one begun", path, error, aside)
    path.replace(aside)
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
