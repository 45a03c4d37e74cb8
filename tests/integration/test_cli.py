"""The real command as a subprocess on a real Postgres: every command, tables and JSON, and the exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from celery import Celery

from celery_durable import apply_at, apply_many
from celery_durable.cli import schema
from celery_durable.core.identity import new_id
from celery_durable.store import beats, claims, leases, migrations, runs, schedules, timers
from celery_durable.store.database import Database
from celery_durable.store.embedded import stop
from tests.servers.postgres import PostgresServer
from tests.servers.private import free_port

PROJECT = """
from celery import Celery

app = Celery("cliproj", broker="redis://127.0.0.1:1/0")
app.conf.beat_schedule = {"from-code": {"task": "cliproj.add", "schedule": 30.0}}
"""
HOUR = timedelta(hours=1)


@dataclass
class Answer:
    """What one call of the command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its one document."""
        return json.loads(self.out)


class Command:
    """``celery -A cliproj durable …`` against one database."""

    def __init__(self, folder: Path, url: str) -> None:
        (folder / "cliproj.py").write_text(PROJECT)
        self.folder = folder
        self.url = url
        app = Celery("cliproj", broker="redis://127.0.0.1:1/0", set_as_current=False)
        app.conf.durable_database_url = url

        @app.task(name="cliproj.add", shared=False)
        def add(x: Any, y: Any = 0) -> Any:
            return x + y

        app.finalize()
        self.app = app
        self.database = Database.of(app)

    def __call__(self, *arguments: str, before: tuple[str, ...] = (), **env: str) -> Answer:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
        }
        environment |= {"CELERY_DURABLE_DATABASE_URL": self.url, **env}
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "cliproj", *before, "durable", *arguments],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return Answer(done.returncode, done.stdout, done.stderr)

    def migrate(self) -> Command:
        """Make the tables, in this process."""
        migrations.upgrade(self.database, app_name="cliproj")
        return self

    def add(self, when: timedelta = HOUR, *args: Any, **options: Any) -> str:
        """Store a timer of cliproj.add, or with `durable` of a DurableTask that only workers know; returns its id."""
        call = "cliproj.durable" if options.get("durable") else self.app.tasks["cliproj.add"]
        return str(apply_at(call, when, args or (1,), app=self.app, **options).id)

    def claim(self) -> list[claims.Claim]:
        """Take what is due, as a beat does, and mark it dispatched."""
        claimed, *_ = self.database.run(
            lambda executor: claims.claim(executor, shard=0, watermark=claims.UNBOUNDED, page=500, timeout=30)
        )
        self.database.run(lambda executor: claims.mark(executor, claimed, redispatch_after=300, redispatch_max=3600))
        return claimed

    def lease(self, timer_id: str) -> leases.Lease:
        """Take the lease of a dispatched timer, as a worker does."""
        lease = self.database.run(
            lambda executor: leases.lease(executor, leases.Wanted(
                timer_id=UUID(timer_id), call_id=UUID(timer_id), token="t", worker="w@host", seconds=30,
                max_attempts=2, base=1, cap=600,
            ))
        )  # fmt: skip
        assert isinstance(lease, leases.Lease)
        return lease

    def dead(self, *args: Any, **options: Any) -> str:
        """A timer that failed twice: its id."""
        timer_id = self.add(timedelta(0), *args, durable=True, **options)
        failure = runs.Failure(error_type="ValueError", error="no\x1b[31m way", traceback="Traceback: line 1")
        self.claim()
        lease = self.lease(timer_id)
        self.database.run(
            lambda executor: runs.retry(executor, lease.timer_id, lease.fence, delay=0.0, failure=failure)
        )
        self.claim()
        lease = self.lease(timer_id)
        assert self.database.run(
            lambda executor: runs.bury(executor, lease.timer_id, lease.fence, reason="exhausted", failure=failure)
        )
        return timer_id


@pytest.fixture
def fresh(database_url: str, tmp_path: Path) -> Iterator[Command]:
    """The command on a database without tables."""
    command = Command(tmp_path, database_url)
    yield command
    command.database.close()


@pytest.fixture
def durable(fresh: Command) -> Command:
    """The command on a database with tables."""
    return fresh.migrate()


def fits(out: str) -> bool:
    """Whether every line fits 80 columns."""
    return all(len(line) <= 80 for line in out.splitlines())


# migrate and check


def test_migrate_says_what_it_did_and_check_agrees(fresh: Command) -> None:
    head = migrations.head(fresh.database)
    missing = fresh("check", "-j")
    assert (missing.code, missing.json["status"], missing.json["ok"]) == (1, "missing", False)
    assert "durable migrate" in missing.err

    dry = fresh("migrate", "--dry-run", "-j")
    assert (dry.code, dry.json["from"], dry.json["to"], dry.json["dry_run"]) == (0, None, head, True)
    assert fresh("check").code == 1

    done = fresh("migrate", "-j")
    assert done.code == 0
    assert done.json == {"schema": "celery_durable", "from": None, "to": head, "changed": True, "dry_run": False}
    again = fresh("migrate")
    assert again.code == 0
    assert head in again.out
    assert "Nothing to do" in again.err
    assert fresh("migrate", before=("-q",)).err == ""

    good = fresh("check", "-j")
    assert (good.code, good.json["status"], good.json["ok"]) == (0, "ok", True)
    assert "ok" in fresh("check").out


@pytest.mark.parametrize(
    ("statement", "status", "mend"),
    [
        ("update alembic_version set version_num = '9999'", "newer", "Upgrade celery-durable here"),
        ("update meta set value = '\"another\"' where name = 'app'", "other_app", "durable_schema"),
        ("update meta set value = '0' where name = 'schema_major'", "mismatch", "durable migrate"),
    ],
)
def test_check_says_what_is_wrong_and_what_mends_it(durable: Command, statement: str, status: str, mend: str) -> None:
    execute(durable, statement)
    answer = durable("check", "-j")
    assert (answer.code, answer.json["status"]) == (1, status)
    assert mend in answer.json["problem"]
    assert mend in answer.err


def test_check_tells_a_schema_that_is_behind(durable: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "head", lambda database: "9999")
    found = schema._found(durable.database, "cliproj")
    assert (found["ok"], found["status"], found["head"]) == (False, "behind", "9999")
    assert "durable migrate" in found["problem"]


def test_migrate_refuses_the_schema_of_another_app_before_touching_it(durable: Command) -> None:
    execute(durable, "update meta set value = '\"another\"' where name = 'app'")
    for arguments in (("migrate",), ("migrate", "--dry-run")):
        answer = durable(*arguments)
        assert answer.code == 1
        assert "belongs to the app 'another'" in answer.err


def test_migrate_without_the_right_to_is_one_clear_line(fresh: Command) -> None:
    execute(fresh, "create role nobody login; revoke all on schema public from nobody", schema="public")
    url = fresh.url.replace("postgres@", "nobody@")
    try:
        answer = fresh("migrate", CELERY_DURABLE_DATABASE_URL=url)
    finally:
        execute(fresh, "drop role nobody", schema="public")
    assert answer.code == 1
    assert "Postgres refuses" in answer.err
    assert "Traceback" not in answer.err


def test_an_embedded_url_needs_no_server(fresh: Command) -> None:
    # As root the server runs as another user, who may not enter pytest's own folder.
    parent = Path(tempfile.mkdtemp(dir="/tmp"))
    parent.chmod(0o755)
    folder = parent / "pg"
    try:
        done = fresh("migrate", "-j", CELERY_DURABLE_DATABASE_URL=f"embedded:{folder}")
        assert (done.code, done.json["changed"]) == (0, True), done.err
        assert fresh("check", CELERY_DURABLE_DATABASE_URL=f"embedded:{folder}").code == 0
    finally:
        stop(folder)
        shutil.rmtree(parent)


# exit codes


@pytest.mark.parametrize(
    "arguments",
    [("status",), ("check",), ("migrate",), ("timers", "list"), ("timers", "cancel", "x"), ("schedules", "list"),
     ("dead", "replay", "x")],
    ids=" ".join,
)  # fmt: skip
def test_an_unreachable_database_is_69(fresh: Command, arguments: tuple[str, ...]) -> None:
    url = f"postgresql+psycopg://postgres@127.0.0.1:{free_port()}/postgres"
    answer = fresh(*arguments, CELERY_DURABLE_DATABASE_URL=url)
    assert (answer.code, answer.out) == (69, "")
    assert "Postgres cannot be reached" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    "arguments",
    [("status",), ("timers", "list"), ("timers", "show", "x"), ("schedules", "show", "x"), ("dead", "discard", "x")],
    ids=" ".join,
)
def test_missing_tables_are_1_with_the_command_that_makes_them(fresh: Command, arguments: tuple[str, ...]) -> None:
    answer = fresh(*arguments)
    assert (answer.code, answer.out) == (1, "")
    assert "durable migrate" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("url", ["", "mysql://x/y"])
def test_a_wrong_setting_is_2_with_the_fix(fresh: Command, url: str) -> None:
    answer = fresh("status", CELERY_DURABLE_DATABASE_URL=url)
    assert answer.code == 2
    assert "durable_database_url" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("timers", "list", "--state", "asleep"),
        ("timers", "list", "--due-before", "soon"),
        ("timers", "list", "--overdue", "--state", "waiting"),
        ("timers", "list", "--cursor", "x"),
        ("timers", "show"),
        ("timers", "cancel"),
        ("timers", "reschedule", "x"),
        ("timers", "reschedule", "x", "--to", "2030-01-01T00:00:00"),
        ("dead", "replay"),
        ("schedules", "next"),
        ("nothing",),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(durable: Command, arguments: tuple[str, ...]) -> None:
    answer = durable(*arguments)
    assert (answer.code, answer.out) == (2, "")


def test_any_other_error_of_postgres_is_one_line(durable: Command) -> None:
    execute(durable, "create role blind login")
    execute(durable, "grant usage on schema celery_durable to blind")
    execute(durable, "grant select on meta, alembic_version to blind")
    url = durable.url.replace("postgres@", "blind@")
    try:
        for arguments in (("status",), ("timers", "list"), ("dead", "replay", "x")):
            answer = durable(*arguments, CELERY_DURABLE_DATABASE_URL=url)
            assert (answer.code, answer.out) == (1, "")
            assert "permission denied" in answer.err and "Traceback" not in answer.err
            assert len(answer.err.splitlines()) == 1
        assert "Traceback" in durable("status", "--traceback", CELERY_DURABLE_DATABASE_URL=url).err
    finally:
        execute(durable, "drop owned by blind; drop role blind")


# timers


def test_timers_are_listed_in_a_table_of_80_columns_and_as_json(durable: Command) -> None:
    plain = durable.add(2 * HOUR)
    keyed = durable.add(HOUR, key="order-42-charge", queue="billing")
    table = durable("timers", "list")
    assert table.code == 0
    assert table.err == ""
    assert fits(table.out)
    assert "\x1b" not in table.out
    assert table.out.index(keyed) < table.out.index(plain)
    for word in ("key order-42-charge", "billing", "waiting", "cliproj.add", "in 59m"):
        assert word in table.out

    document = durable("timers", "list", "--json").json
    assert document["cursor"] is None
    first, second = document["timers"]
    assert first["id"] == keyed
    assert second["id"] == plain
    assert set(first) == {
        "id", "task", "task_id", "key", "queue", "schedule", "state", "due_at", "overdue_seconds", "lateness_seconds",
        "attempt", "expires_at", "dispatched_at", "started_at", "finished_at", "worker", "reason",
    }  # fmt: skip
    assert first["key"] == "order-42-charge"
    due = datetime.fromisoformat(first["due_at"].replace("Z", "+00:00"))
    assert first["due_at"].endswith("Z")
    assert due - datetime.now(timezone.utc) < HOUR


def test_an_empty_list_is_said_on_stderr(durable: Command) -> None:
    answer = durable("timers", "list")
    assert (answer.code, answer.out) == (0, "")
    assert "No timer matches" in answer.err and "--state succeeded" in answer.err
    assert "--state" not in durable("timers", "list", "--state", "dead").err
    assert durable("timers", "list", before=("-q",)).err == ""


def test_timers_are_filtered(durable: Command) -> None:
    far = durable.add(3 * HOUR, key="order-1", queue="billing")
    near = durable.add(HOUR, key="order-2")
    named = str(apply_at("cliproj.other", HOUR * 2, durable=False, key="other-3", app=durable.app).id)
    late = durable.add(-HOUR, key="late")
    cancelled = durable.add(HOUR, key="gone")
    assert durable("timers", "cancel", cancelled).code == 0

    def ids(*arguments: str) -> list[str]:
        return [each["id"] for each in durable("timers", "list", "-j", *arguments).json["timers"]]

    assert ids() == [late, near, named, far]
    assert ids("--queue", "billing") == [far]
    assert ids("--task", "cliproj.other") == [named]
    assert ids("--key", "order-") == [near, far]
    assert ids("--due-before", "90m") == [late, near]
    assert ids("--due-after", "90m", "--due-before", "150m") == [named]
    assert ids("--overdue") == [late]
    assert ids("--state", "cancelled") == [cancelled]
    assert ids("--state", "cancelled", "--state", "waiting") == [late, near, named, far, cancelled]
    assert ids("--task", "no.such") == []


def test_timers_are_paged_without_gaps_or_repeats(durable: Command) -> None:
    task = durable.app.tasks["cliproj.add"]
    same = datetime.now(timezone.utc) + HOUR
    made = [str(each.id) for each in apply_many(task, [(same, (1,)) for _ in range(5)], app=durable.app)]
    made += [durable.add(2 * HOUR), durable.add(3 * HOUR)]
    for filters in ((), ("--task", "cliproj.add")):
        seen: list[str] = []
        cursor: str | None = None
        while True:
            page = durable("timers", "list", "-j", "--limit", "3", *filters, *(("--cursor", cursor) if cursor else ()))
            assert page.code == 0
            seen += [each["id"] for each in page.json["timers"]]
            cursor = page.json["cursor"]
            if cursor is None:
                break
            assert f"There may be more: --cursor {cursor}" in page.err
        assert seen == sorted(made[:5]) + made[5:]


def test_a_timer_is_shown_with_its_attempts_and_without_its_arguments(durable: Command) -> None:
    timer_id = durable.dead("secret-argument", key="k")
    shown = durable("timers", "show", timer_id)
    assert shown.code == 0
    assert fits(shown.out)
    for word in (timer_id, "dead", "ValueError", "cliproj.durable", "hidden; --show-args"):
        assert word in shown.out
    assert "\x1b" not in shown.out
    assert "secret-argument" not in shown.out

    document = durable("timers", "show", "--key", "k", "-j").json
    assert (document["id"], document["state"], document["attempt"]) == (timer_id, "dead", 2)
    assert [each["error_type"] for each in document["attempts"]] == ["ValueError", "ValueError"]
    assert document["attempts"][0]["worker"] == "w@host"
    assert isinstance(document["lateness_seconds"], float)
    assert "secret-argument" not in json.dumps(document)

    told = durable("timers", "show", timer_id, "--show-args", "-j").json
    assert told["message"]["arguments"] == {"args": ["secret-argument"], "kwargs": {}}
    assert "secret-argument" in durable("timers", "show", timer_id, "--show-args").out


def test_a_timer_that_is_not_there_is_1(durable: Command) -> None:
    for arguments in ((str(new_id()),), ("no-such-task-id",), ("--key", "none")):
        answer = durable("timers", "show", *arguments)
        assert (answer.code, answer.out) == (1, "")
        assert "There is no timer" in answer.err


def test_cancel_answers_for_each(durable: Command) -> None:
    one, two = durable.add(), durable.add(key="two")
    done = durable("timers", "cancel", one, "--key", "two", "--reason", "wrong customer", "-j")
    assert done.code == 0
    assert [(each["id"], each["answer"]) for each in done.json["timers"]] == [(one, "cancelled"), (two, "cancelled")]
    reason = durable("timers", "show", one, "-j").json["reason"]
    assert reason.endswith(": wrong customer")
    assert "@" in reason

    running = durable.add(timedelta(0), durable=True)
    durable.claim()
    durable.lease(running)
    partly = durable("timers", "cancel", durable.add(), running, "nobody")
    assert partly.code == 1
    assert fits(partly.out)
    assert [word for word in partly.out.split() if word in ("cancelled", "too_late", "unknown", "running")] == [
        "cancelled", "cancelled", "too_late", "running", "unknown",
    ]  # fmt: skip


def test_reschedule_moves_timers(durable: Command) -> None:
    one, two = durable.add(), durable.add()
    done = durable("timers", "reschedule", one, two, "--to", "2030-01-31T09:00:00+01:00", "-j")
    assert done.code == 0
    assert [each["due_at"] for each in done.json["timers"]] == ["2030-01-31T08:00:00Z"] * 2
    table = durable("timers", "reschedule", one, "--to", "3d")
    assert (table.code, fits(table.out)) == (0, True)
    for word in ("rescheduled", "waiting", "in 3d"):
        assert word in table.out
    expiring = durable.add(HOUR, expires=7200)
    refused = durable("timers", "reschedule", expiring, "--to", "3d")
    assert refused.code == 2
    assert "would expire" in refused.err
    assert durable("timers", "reschedule", "nobody", "--to", "now").code == 1


def test_trigger_makes_a_waiting_timer_due_now_and_leaves_others_alone(durable: Command) -> None:
    waiting = durable.add(HOUR)
    done = durable("timers", "trigger", waiting, "-j")
    assert (done.code, done.json["timers"][0]["answer"]) == (0, "rescheduled")
    assert [str(claim.id) for claim in durable.claim()] == [waiting]
    late = durable("timers", "trigger", waiting, "-j")
    assert (late.code, late.json["timers"][0]["answer"]) == (1, "too_late")


def test_a_walk_that_finds_little_says_where_to_go_on(durable: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from celery_durable.store import listing

    monkeypatch.setattr(listing, "STRIDE", 4)
    monkeypatch.setattr(listing, "MOST_LOOKED_AT", 8)
    task = durable.app.tasks["cliproj.add"]
    apply_many(task, [(HOUR, (1,)) for _ in range(20)], app=durable.app)
    wanted = durable.add(2 * HOUR, key="needle")
    found: list[str] = []
    looks: list[int] = []
    cursor: str | None = None
    while True:
        page = durable.database.run(
            lambda executor, cursor=cursor: listing.page_of_timers(
                executor, listing.Filter(key="needle"), limit=2, cursor=cursor
            )
        )
        found += [str(each.id) for each in page.timers]
        looks.append(page.looked_at)
        cursor = page.cursor
        if cursor is None:
            break
    assert found == [wanted]
    assert looks == [8, 8, 5]


# dead letters


def test_dead_letters_are_listed_and_shown(durable: Command) -> None:
    first, second = durable.dead("secret-argument", key="a"), durable.dead()
    listed = durable("dead", "list")
    assert (listed.code, listed.err) == (0, "")
    assert listed.out.index(second) < listed.out.index(first)
    assert "exhausted" in listed.out
    assert "\x1b" not in listed.out
    page = durable("dead", "list", "-j", "--limit", "1")
    assert [each["id"] for each in page.json["dead_letters"]] == [second]
    rest = durable("dead", "list", "-j", "--cursor", page.json["cursor"]).json
    assert [each["id"] for each in rest["dead_letters"]] == [first]
    assert rest["cursor"] is None
    assert durable("dead", "list", "--task", "no.such").out == ""

    shown = durable("dead", "show", first)
    assert (shown.code, fits(shown.out)) == (0, True)
    assert "Traceback: line 1" in shown.out
    assert "secret-argument" not in shown.out
    assert "secret-argument" in durable("dead", "show", first, "--show-args").out
    document = durable("dead", "show", first, "-j").json
    assert (document["reason"], document["attempt"], len(document["attempts"])) == ("exhausted", 2, 2)
    assert "secret-argument" not in json.dumps(document)
    assert durable("dead", "show", durable.add()).code == 1


def test_a_pickled_dead_letter_is_described_and_not_loaded(durable: Command) -> None:
    timer_id = durable.dead(1, serializer="pickle")
    document = durable("dead", "show", timer_id, "--show-args", "-j").json
    assert document["message"]["arguments"] is None
    assert document["message"]["arguments_note"].startswith("not decoded: application/x-python-serialize, ")


def test_a_dead_letter_is_replayed_once(durable: Command) -> None:
    timer_id = durable.dead(key="k")
    done = durable("dead", "replay", timer_id, "--at", "2h", "-j")
    assert done.code == 0
    (result,) = done.json["dead_letters"]
    assert (result["id"], result["answer"]) == (timer_id, "replayed")
    assert durable("timers", "show", result["timer"], "-j").json["replay_of"] == timer_id
    again = durable("dead", "replay", timer_id)
    assert again.code == 1
    assert result["timer"] in again.err and "another key" in again.err
    assert durable("dead", "list").out == ""
    assert timer_id in durable("dead", "list", "--replayed").out


def test_dead_letters_are_filtered_and_counted(durable: Command) -> None:
    first, second = durable.dead(key="order-1"), durable.dead(key="mail-1", queue="mails")

    def ids(*arguments: str) -> list[str]:
        return [each["id"] for each in durable("dead", "list", "-j", *arguments).json["dead_letters"]]

    assert ids("--key", "order-", "--error", "NO\x1b", "--error-type", "ValueError", "--reason", "exhausted") == [first]
    assert ids("--queue", "mails", "--since", "-1h", "--until", "now") == [second]
    assert ids("--until", "-1h") == []
    table = durable("dead", "list", "--group")
    assert (table.code, table.err, fits(table.out)) == (0, "", True)
    for word in (second, "2 × cliproj.durable", "exhausted", "ValueError"):
        assert word in table.out
    document = durable("dead", "list", "--group", "-j", "--key", "order-").json
    [group] = document["groups"]
    assert (document["complete"], group["number"], group["example"], group["task"], group["error_type"]) == (
        True, 1, first, "cliproj.durable", "ValueError",
    )  # fmt: skip
    assert durable("dead", "list", "--group", "--task", "no.such").out == ""
    for wrong in (("--group", "--cursor", "x"), ("--cursor", "x"), ("--since", "yesterday")):
        assert durable("dead", "list", *wrong).code == 2


def test_all_are_replayed_or_discarded_once_somebody_agrees(durable: Command) -> None:
    one, two, broken = durable.dead(key="a-1"), durable.dead(key="a-2"), durable.dead(key="b-1")
    execute(durable, f"update call set headers = '[]' where id = '{broken}'")
    for command in ("replay", "discard"):
        silent = durable("dead", command, "--all")
        assert (silent.code, silent.out) == (2, "")
        assert "--dry-run" in silent.err and "--yes" in silent.err
        assert durable("dead", command).code == durable("dead", command, "--all", one).code == 2
        assert durable("dead", command, one, "--key", "a").code == 2
        dry = durable("dead", command, one, "--dry-run", "-j").json
        assert (dry["dry_run"], dry["dead_letters"][0]["answer"].split()[:2]) == (True, ["would", "be"])

    dry_all = durable("dead", "replay", "--all", "--dry-run", "-j")
    assert (dry_all.code, dry_all.json["replayed"], dry_all.json["refused"]) == (1, 2, 1)
    assert broken in dry_all.err and "holds no message" in dry_all.err
    answer, said = at_terminal(durable, "n\n", "dead", "replay", "--all", "--key", "a-")
    assert (answer, "2 dead letters will be replayed" in said) == (1, True)
    assert len(durable("dead", "list", "-j").json["dead_letters"]) == 3

    answer, said = at_terminal(durable, "y\n", "dead", "replay", "--all", "--key", "a-", "--at", "2h")
    assert answer == 0
    assert re.search(r"replayed\s+2", said)
    again = [each["replay_of"] for each in (durable("timers", "show", each["id"], "-j").json
                                           for each in durable("timers", "list", "-j").json["timers"])]  # fmt: skip
    assert sorted(again) == sorted([one, two])
    done = durable("dead", "discard", "--all", "--yes", "-j")
    assert (done.code, done.json["discarded"], done.json["dry_run"]) == (0, 1, False)
    assert durable("dead", "discard", "--all", "--replayed", "--yes", "-j").json["discarded"] == 2


def at_terminal(durable: Command, typed: str, *arguments: str) -> tuple[int, str]:
    """Run a command with a terminal as its stdin, on which somebody has typed; its exit code, and all that it said."""
    there, here = pty.openpty()
    try:
        os.write(there, typed.encode())
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "cliproj", "durable", *arguments], cwd=durable.folder, stdin=here,
            env={**os.environ, "CELERY_DURABLE_DATABASE_URL": durable.url}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
    finally:
        os.close(there)
        os.close(here)
    return done.returncode, done.stdout


def test_what_dies_while_somebody_thinks_is_not_what_they_agreed_to(durable: Command) -> None:
    durable.dead()
    there, here = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "cliproj", "durable", "dead", "discard", "--all", "-j"],
        cwd=durable.folder, env={**os.environ, "CELERY_DURABLE_DATABASE_URL": durable.url}, stdin=here,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as asking:  # fmt: skip
        assert asking.stdout is not None and asking.stderr is not None
        said = ""
        while "Go on?" not in said:
            more = asking.stderr.read(1)
            assert more, said
            said += more
        later = durable.dead()
        os.write(there, b"y\n")
        done = json.loads(asking.stdout.read())
    os.close(there)
    os.close(here)
    assert (asking.returncode, done["discarded"]) == (0, 1)
    assert [each["id"] for each in durable("dead", "list", "-j").json["dead_letters"]] == [later]


def test_a_dead_letter_that_holds_no_message_is_shown_all_the_same(durable: Command) -> None:
    unread, gone = durable.dead(), durable.dead()
    execute(durable, f"update call set headers = '[]', properties = '[]' where id = '{unread}'")
    execute(durable, f"delete from call where id = '{gone}'")
    shown = durable("dead", "show", unread, "--show-args")
    assert (shown.code, "Traceback: line 1" in shown.out) == (0, True)
    document = durable("dead", "show", unread, "-j", "--show-args").json["message"]
    assert (document["headers"], document["properties"], document["arguments"]["args"]) == (None, None, [1])
    shown = durable("dead", "show", gone, "-j").json
    assert (shown["message"], shown["task"], len(shown["attempts"])) == (None, None, 2)
    assert (
        durable("dead", "show", gone).code == durable("dead", "list").code == durable("dead", "discard", gone).code == 0
    )


def test_dead_letters_are_exported_as_json_lines(durable: Command) -> None:
    first, second = durable.dead("secret-argument"), durable.dead("secret-argument", serializer="pickle")
    hidden = durable("dead", "export")
    assert (hidden.code, "2 dead letters" in hidden.err) == (0, True)
    assert [json.loads(line)["id"] for line in hidden.out.splitlines()] == [first, second]
    assert "secret-argument" not in hidden.out
    assert [len(json.loads(line)["attempts"]) for line in hidden.out.splitlines()] == [2, 2]
    shown = [json.loads(line) for line in durable("dead", "export", "--show-args").out.splitlines()]
    assert shown[0]["message"]["arguments"]["args"] == ["secret-argument"]
    assert "body_base64" in shown[1]["message"]
    assert durable("dead", "export", "--until", "-1h").out == ""


def test_dead_letters_are_discarded_and_several_may_partly_fail(durable: Command) -> None:
    timer_id = durable.dead()
    answer = durable("dead", "discard", timer_id, "nobody", "-j")
    assert answer.code == 1
    assert [each["answer"] for each in answer.json["dead_letters"]] == ["discarded", "refused"]
    assert "nobody is no dead letter" in answer.err
    assert durable("dead", "discard", timer_id).code == 1
    missing = durable("dead", "replay", str(new_id()), "--at", "now")
    assert missing.code == 1
    assert fits(missing.out)


# schedules


def schedule(durable: Command, name: str, **fields: Any) -> None:
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    values: dict[str, Any] = {
        "name": name, "task": "cliproj.add", "kind": "cron", "text": "30 2 * * *", "tz": "Europe/Berlin", "anchor": None,
        "args": ["secret-argument"], "kwargs": {}, "options": {"queue": "nightly"}, "policy": {"catchup": "latest"},
        "owner": "api", "fingerprint": "f", "cursor": now, "next_at": datetime(2096, 1, 1, 1, 30, tzinfo=timezone.utc),
    }  # fmt: skip
    stored = schedules.StoredSchedule(**values | fields)
    assert durable.database.transact(lambda executor: schedules.put(executor, stored))


def test_schedules_are_listed_shown_and_foretold(durable: Command) -> None:
    schedule(durable, "nightly")
    schedule(durable, "every", kind="interval", text="90", tz=None, enabled=False)
    nominal = datetime(2026, 1, 1, 1, 30, tzinfo=timezone.utc)
    durable.database.run(lambda executor: schedules.note(executor, [("nightly", nominal, "too late")]))

    listed = durable("schedules", "list")
    assert (listed.code, fits(listed.out)) == (0, True)
    for word in ("nightly", "30 2 * * *", "2096-01-01 01:30:00Z", "every 90 s", "disabled"):
        assert word in listed.out
    page = durable("schedules", "list", "-j", "--limit", "1").json
    assert [each["name"] for each in page["schedules"]] == ["every"]
    rest = durable("schedules", "list", "-j", "--cursor", page["cursor"]).json
    assert [each["next_at"] for each in rest["schedules"]] == ["2096-01-01T01:30:00Z"]

    shown = durable("schedules", "show", "nightly")
    assert (shown.code, fits(shown.out)) == (0, True)
    assert "too late" in shown.out
    assert "secret-argument" not in shown.out
    document = durable("schedules", "show", "nightly", "--show-args", "-j").json
    assert document["args"] == ["secret-argument"]
    assert document["history"][0]["nominal"] == "2026-01-01T01:30:00Z"

    following = durable("schedules", "next", "nightly", "-n", "400", "-j").json
    assert (following["tz"], len(following["next"])) == ("Europe/Berlin", 400)
    assert {each["local"][11:19] for each in following["next"]} <= {"02:30:00", "03:00:00"}
    table = durable("schedules", "next", "nightly", "-n", "3", "--tz", "Asia/Tokyo")
    assert (table.code, fits(table.out)) == (0, True)
    assert "+0900" in table.out
    durable.database.run(
        lambda executor: executor.fetch("update {schema}.schedule set enabled = true, next_at = {schema}.clock()")
    )
    plain = durable("schedules", "next", "every", "-n", "2")
    assert plain.out.split("\n")[0].split() == ["UTC", "From", "now"], "UTC once"
    schedule(durable, "every", kind="interval", text="90", tz=None, enabled=False)
    assert "disabled" in durable("schedules", "next", "every").err


def test_schedules_are_made_paused_run_and_deleted(durable: Command) -> None:
    made = durable(
        "schedules", "upsert", "nightly", "--task", "cliproj.add", "--cron", "30 2 * * *", "--tz", "Asia/Tokyo", "--args",
        "[1, 2]", "--plain", "--catchup", "all", "-j",
    )  # fmt: skip
    assert (made.code, made.json["schedules"][0]["state"]) == (0, "waiting")
    often = durable("schedules", "upsert", "often", "--task", "cliproj.add", "--every", "10m", "--plain")
    assert often.code == 0 and "is not registered in this app" in often.err
    paused = durable("schedules", "pause", "nightly", "--until", "2h", "--note", "migration", "-j").json["schedules"][0]
    assert paused["state"].startswith("paused until") and paused["paused_note"] == "migration"
    assert "@" in paused["paused_by"]
    table = durable("schedules", "list", "--paused")
    assert "nightly" in table.out and "often" not in table.out and fits(table.out)
    dry = durable("schedules", "pause", "--all", "--prefix", "oft", "--dry-run")
    assert dry.code == 0 and "would be 1 schedules" in dry.err
    assert [each["name"] for each in durable("schedules", "pause", "--all", "-j").json["schedules"]] == [
        "nightly",
        "often",
    ]
    assert [each["name"] for each in durable("schedules", "resume", "--all", "-j").json["schedules"]] == [
        "nightly",
        "often",
    ]
    triggered = durable("schedules", "trigger", "often", "-j").json["schedules"][0]
    assert durable("timers", "show", triggered["timer_id"], "-j").json["schedule"] == "often"
    history = durable("schedules", "history", "often")
    assert "trigger" in history.out and fits(history.out)
    dry = durable("schedules", "backfill", "nightly", "--from", "-3d", "--dry-run", "-j").json
    assert len(dry["nominals"]) == 3 and dry["dry_run"]
    filled = durable("schedules", "backfill", "nightly", "--from", "-3d")
    assert filled.code == 0 and "3 stored." in filled.err and fits(filled.out)
    again = durable("schedules", "backfill", "nightly", "--from", "-3d", "-j").json
    assert (again["nominals"], len(again["held"])) == ([], 3)
    assert durable("schedules", "delete", "often", "nightly").code == 0
    assert durable("schedules", "delete", "often").code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("pause",), ("pause", "x", "--all"), ("pause", "x", "--prefix", "y"), ("pause", "x", "--until", "soon"),
        ("upsert", "x", "--task", "t"), ("upsert", "x", "--task", "t", "--cron", "* * * * *", "--every", "1m"),
        ("upsert", "x", "--task", "t", "--cron", "61 * * * *"), ("upsert", "x", "--task", "t", "--every", "now"),
        ("upsert", "x", "--task", "t", "--cron", "* * * * *", "--args", "{}"), ("backfill", "x"),
        ("upsert", "x", "--task", "t", "--cron", "* * * * *", "--kwargs", "nonsense"),
    ],
)  # fmt: skip
def test_nonsense_about_schedules_is_2(durable: Command, arguments: tuple[str, ...]) -> None:
    answer = durable("schedules", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert "Traceback" not in answer.err and answer.err


def test_a_schedule_that_is_not_there_or_cannot_be_told_is_1(durable: Command) -> None:
    schedule(durable, "elsewhere", kind="code", text="", tz=None)
    schedule(durable, "from-code", kind="code", text="", tz=None)
    for arguments in (("show", "none"), ("next", "none"), ("next", "elsewhere")):
        answer = durable("schedules", *arguments)
        assert (answer.code, answer.out) == (1, "")
    assert len(durable("schedules", "next", "from-code", "-n", "2", "-j").json["next"]) == 2
    assert durable("schedules", "next", "from-code", "--tz", "Mars/Base").code == 2


# status


def test_status_of_an_empty_database(durable: Command) -> None:
    answer = durable("status")
    assert (answer.code, fits(answer.out)) == (0, True)
    assert "No beat is alive" in answer.err
    document = durable("status", "-j").json
    assert document["timers"] == {
        "waiting": 0, "waiting_is_estimate": False, "claimed": 0, "dispatched": 0, "running": 0, "finishing": 0,
    }  # fmt: skip
    assert document["lateness_last_day"] == {
        "number": 0, "p50_seconds": None, "p95_seconds": None, "p99_seconds": None,
    }  # fmt: skip
    assert (document["oldest_overdue_seconds"], document["beats"], document["next_timers"]) == (None, [], [])


def test_status_says_what_waits_moves_died_and_comes_next(durable: Command) -> None:
    durable.dead()
    running = durable.add(timedelta(0), durable=True)
    durable.claim()
    durable.lease(running)
    soon = durable.add(HOUR)
    durable.add(-HOUR)
    schedule(durable, "nightly")
    durable.database.run(
        lambda executor: beats.seen(executor, new_id(), node="beat@a", pid=7, version="1", dispatched=3, code=None)
    )
    document = durable("status", "--json").json
    assert (document["timers"]["waiting"], document["timers"]["running"]) == (2, 1)
    assert (document["overdue"], document["dead_letters"], document["schedules"]) == (1, 1, 1)
    assert document["oldest_overdue_seconds"] >= 0
    assert document["ended_last_day"]["dead"] == 1
    assert document["lateness_last_day"]["number"] == 1
    assert document["lateness_last_day"]["p99_seconds"] >= 0
    assert [(beat["node"], beat["alive"]) for beat in document["beats"]] == [("beat@a", True)]
    assert [each["id"] for each in document["next_timers"]] == [soon]
    assert [each["name"] for each in document["next_schedules"]] == ["nightly"]
    table = durable("status")
    assert (table.err, fits(table.out)) == ("", True)
    for word in ("1 running", "1 dead", "p50", "p95", "p99", "beat@a", "alive", soon, "schedule nightly"):
        assert word in table.out


# looks


@pytest.fixture
def on_terminal(durable: Command) -> Callable[..., str]:
    """Run the command with stdout on a pseudo-terminal; returns what it printed there."""

    def run(*arguments: str, before: tuple[str, ...] = (), **env: str) -> str:
        ours, theirs = os.openpty()
        environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        environment |= {"CELERY_DURABLE_DATABASE_URL": durable.url, "TERM": "xterm-256color", "COLUMNS": "80", **env}
        try:
            with os.fdopen(theirs, "wb") as terminal:
                program = subprocess.Popen(
                    [sys.executable, "-m", "celery", "-A", "cliproj", *before, "durable", *arguments],
                    cwd=durable.folder, env=environment, stdout=terminal, stderr=terminal,
                )  # fmt: skip
            said = b""
            try:
                while piece := os.read(ours, 1 << 16):
                    said += piece
            except OSError:
                pass  # how a terminal says that nobody has the other end any more
            program.wait(60)
            return said.decode()
        finally:
            os.close(ours)

    return run


def test_colour_is_for_terminals_and_can_be_refused(on_terminal: Callable[..., str]) -> None:
    assert "\x1b[31m" in on_terminal("timers", "show", "x")
    assert "\x1b[" not in on_terminal("timers", "show", "x", before=("--no-color",))
    assert "\x1b[31m" not in on_terminal("timers", "show", "x", NO_COLOR="1")


LONG = "cliproj." + "a_long_name_" * 8


@pytest.fixture
def long_ones(durable: Command) -> list[str]:
    """Timers, ended ones and a dead letter with names that no terminal has room for."""
    for queue in ("celery", "a-queue-with-quite-a-long-name-as-well"):
        apply_at(LONG, timedelta(0), durable=True, app=durable.app, key=f"order-{queue}", queue=queue)
    made = [str(claim.id) for claim in durable.claim()]
    for timer_id in made:
        lease = durable.lease(timer_id)
        durable.database.run(lambda executor, lease=lease: runs.finish(executor, lease.timer_id, lease.fence))  # type: ignore[misc]  # bound now
    return [*made, durable.dead(), str(apply_at(LONG, HOUR, durable=True, app=durable.app).id)]


LISTS = (
    ("timers", "list", "--state", "succeeded", "--state", "waiting", "--state", "dead"), ("dead", "list"),
    ("timers", "list", "--state", "succeeded"), ("timers", "list"), ("status",),
)  # fmt: skip


def test_a_table_is_not_cut_where_nobody_sees_its_width(durable: Command, long_ones: list[str]) -> None:
    out = durable(*LISTS[0], COLUMNS="40").out
    for whole in (*long_ones, LONG, "a-queue-with-quite-a-long-name-as-well", "attempt 1"):
        assert whole in out
    assert "ValueError: no\\x1b[31m way" in durable("dead", "list").out


@pytest.mark.parametrize("columns", ["80", "50"])
def test_a_terminal_folds_text_and_cuts_nothing(
    on_terminal: Callable[..., str], long_ones: list[str], columns: str
) -> None:
    seen = ""
    for arguments in LISTS:
        out = on_terminal(*arguments, before=("--no-color", "-q"), COLUMNS=columns)
        if columns == "80":
            assert fits(out), out
        assert "2026-" not in out or re.search(r"2026-\d\d-\d\d \d\d:\d\d:\d\dZ", out)
        seen += out
    for timer_id in long_ones:
        assert timer_id in seen
    # Cells stand side by side: a folded name is all there, in pieces.
    assert seen.count("a_long_name_") >= 8
    for piece in ("ValueError", "attempt 1", "succeeded", "exhausted"):
        assert piece in seen


def test_a_name_outside_the_terminals_characters_is_no_traceback(durable: Command) -> None:
    durable.add(HOUR, key="Überweisung-✓")
    answer = durable("timers", "list", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (answer.code, "Traceback" in answer.err) == (0, False)
    assert "berweisung" in answer.out


def execute(durable: Command, statement: str, schema: str = "celery_durable") -> None:
    """Run a statement behind the product's back."""
    dsn = durable.url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"set search_path to {schema}")
        connection.execute(statement)  # type: ignore[arg-type]  # a constant of this file


def test_a_timer_replaced_or_stored_late_is_found_where_it_is_due(durable: Command, postgres: PostgresServer) -> None:
    """A timer stored when already overdue wakes at its storing; filters go by its due time."""
    late = durable.add(-3 * HOUR)
    moved = durable.add(HOUR, key="k")
    replaced = apply_at(
        durable.app.tasks["cliproj.add"], 5 * HOUR, (2,), key="k", on_conflict="replace", app=durable.app
    )
    assert str(replaced.id) == moved

    def ids(*arguments: str) -> list[str]:
        return [each["id"] for each in durable("timers", "list", "-j", *arguments).json["timers"]]

    assert ids("--due-before", "-2h") == [late]
    assert ids("--due-after", "-2h") == [moved]
    assert ids("--due-before", "-4h") == []
    found = durable.database.run(lambda executor: timers.find_key(executor, "k"))
    assert found is not None
    assert durable("timers", "show", "--key", "k", "--show-args", "-j").json["message"]["arguments"]["args"] == [2]
