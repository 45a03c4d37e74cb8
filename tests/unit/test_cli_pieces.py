"""What the commands need no database for: times, terminal text, redaction, and being light to import."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from datetime import datetime, timedelta, timezone
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from celery_durable.cli import durable, message
from celery_durable.cli.output import jsonable, plain
from celery_durable.cli.times import absolute, duration, read_when, relative, resolved
from celery_durable.store.listing import Filter, page_of_timers

NOW = datetime(2026, 12, 1, 10, tzinfo=timezone.utc)


def test_importing_the_entry_point_loads_neither_the_store_nor_rich() -> None:
    """Every Celery program imports it, workers too."""
    code = (
        "import sys, celery_durable.cli\n"
        "print([name for name in ('sqlalchemy', 'psycopg', 'alembic', 'rich', 'croniter') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_entry_point_is_what_celery_loads() -> None:
    (found,) = (each for each in entry_points(group="celery.commands") if each.name == "durable")
    assert found.load() is durable


def test_every_command_has_help() -> None:
    def walk(command: click.Command, path: list[str]) -> None:
        done = CliRunner().invoke(durable, [*path, "--help"])
        assert done.exit_code == 0, done.output
        assert command.help
        if isinstance(command, click.Group):
            ctx = click.Context(command)
            for name in command.list_commands(ctx):
                child = command.get_command(ctx, name)
                assert child is not None
                walk(child, [*path, name])

    walk(durable, [])


def test_a_command_that_does_not_exist_is_a_usage_error() -> None:
    assert CliRunner().invoke(durable, ["nothing"]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("now", timedelta(0)),
        ("10m", timedelta(minutes=10)),
        ("2h", timedelta(hours=2)),
        ("3d", timedelta(days=3)),
        ("1.5h", timedelta(minutes=90)),
        ("1h30m", timedelta(minutes=90)),
        ("-2h", timedelta(hours=-2)),
        ("+45s", timedelta(seconds=45)),
        ("2W", timedelta(weeks=2)),
        ("2026-12-01T10:00:00Z", NOW),
        ("2026-12-01T11:00:00+01:00", NOW),
        ("2026-12-01 10:00:00z", NOW),
    ],
)
def test_times_are_read(text: str, meant: datetime | timedelta) -> None:
    assert read_when(text) == meant


@pytest.mark.parametrize("text", ["", "soon", "10", "10 m", "10y", "m", "-", "2026-13-01T00:00Z", "9" * 400 + "d"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="10m, 2h or 3d"):
        read_when(text)


def test_an_instant_without_a_zone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no time zone.*2026-12-01T10:00Z"):
        read_when("2026-12-01T10:00")


def test_a_delay_beyond_the_calendar_is_a_usage_error() -> None:
    with pytest.raises(click.UsageError, match="beyond the calendar"):
        resolved(timedelta(days=900_000_000), NOW)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.0034, "3 ms"), (5.25, "5.2 s"), (42, "42 s"), (60, "1m"), (125, "2m 5s"), (7260, "2h 1m"),
     (7200, "2h"), (200_000, "2d 7h"), (-42, "42 s")],
)  # fmt: skip
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_instants_are_said_both_ways() -> None:
    assert absolute(NOW.astimezone(timezone(timedelta(hours=5)))) == "2026-12-01 10:00:00Z"
    assert relative(NOW + timedelta(hours=2), NOW) == "in 2h"
    assert relative(NOW - timedelta(minutes=3), NOW) == "3m ago"
    assert absolute(None) == relative(None, NOW) == "-"


def test_a_task_cannot_steer_the_terminal() -> None:
    assert plain("a\x1b[31mb\x07\r\nc\td\u202e") == "a\\x1b[31mb\\x07\nc\td\\x202e"
    assert plain(None) == plain("") == "-"


def test_json_has_a_word_for_everything() -> None:
    value = {"a": [float("nan"), float("-inf"), 1.5, None, True], 2: (NOW,)}
    assert json.loads(json.dumps(jsonable(value), allow_nan=False)) == {
        "a": ["nan", "-inf", 1.5, None, True], "2": ["2026-12-01 10:00:00+00:00"],
    }  # fmt: skip


def stored(body: bytes, content_type: str = "application/json", **headers: Any) -> Any:
    headers = {"id": "1", "argsrepr": "('secret',)", "kwargsrepr": "{}", **headers}
    return SimpleNamespace(
        body=body, content_type=content_type, content_encoding="utf-8", headers=json.dumps(headers), properties="{}",
        exchange="", routing_key="celery",
    )  # fmt: skip


BODY = json.dumps([["secret", float("nan")], {"y": 2}, {"callbacks": ["hidden"]}]).encode()


def test_arguments_are_shown_only_where_asked_for() -> None:
    assert "secret" not in json.dumps(message.document(stored(BODY), show_args=False))
    shown = message.document(stored(BODY), show_args=True)
    assert shown["arguments"] == {"args": ["secret", "nan"], "kwargs": {"y": 2}}
    assert shown["headers"]["argsrepr"] == "('secret',)"


def test_compressed_arguments_are_read() -> None:
    shown = message.document(stored(zlib.compress(BODY), compression="application/x-gzip"), show_args=True)
    assert shown["arguments"]["kwargs"] == {"y": 2}


def test_a_pickle_is_never_loaded() -> None:
    shown = message.document(stored(b"cos\nsystem\n", "application/x-python-serialize"), show_args=True)
    assert shown["arguments"] is None
    assert shown["arguments_note"] == "not decoded: application/x-python-serialize, 11 bytes"


@pytest.mark.parametrize("headers", [{}, {"compression": "application/unheard-of"}])
def test_a_broken_body_does_not_hide_the_rest(headers: dict[str, str]) -> None:
    shown = message.document(stored(b"{", **headers), show_args=True)
    assert shown["arguments"] is None
    assert shown["arguments_note"].startswith("cannot be decoded: application/json, 1 bytes")
    assert shown["headers"]["id"] == "1"


@pytest.mark.parametrize("cursor", ["", "x", "waiting:1", "waiting:1:nope", f"waiting:{'9' * 18}:{'0' * 36}"])
def test_a_made_up_cursor_is_refused(cursor: str) -> None:
    with pytest.raises(ValueError, match="is no cursor"):
        page_of_timers(None, Filter(), cursor=cursor)  # type: ignore[arg-type]  # refused before the executor is used


@pytest.mark.parametrize("path", [(), ("timers",), ("schedules",), ("dead",)], ids=str)
def test_each_command_says_in_one_line_what_it_does(path: tuple[str, ...]) -> None:
    done = CliRunner(env={"COLUMNS": "80"}).invoke(durable, [*path, "--help"], terminal_width=80)
    commands = done.output.partition("Commands:\n")[2].splitlines()
    assert commands
    assert not [line for line in commands if line.endswith("...") or not line.endswith(".")]


def test_dir_shows_what_is_meant_for_others() -> None:
    import celery_durable

    assert dir(celery_durable) == sorted(celery_durable.__all__)
