"""Settings: read from app.conf, checked as one value, with errors that name key, value and fix."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_durable.settings import URL_VARIABLE, Settings

URL = "postgresql+psycopg://user:secret@host/db"


def settings_of(**values: Any) -> Settings:
    app = Celery("proj", set_as_current=False)
    app.conf.update({"durable_database_url": URL, **values})
    return Settings.from_app(app)


def test_defaults() -> None:
    settings = settings_of()
    assert (settings.page, settings.poll_interval, settings.schema) == (500, 5.0, "celery_durable")
    assert (settings.claim_timeout, settings.publish_timeout) == (8.0, 3.0)
    assert (settings.lease, settings.heartbeat) == (30.0, 10.0)
    assert settings.retention == 7 * 86400
    assert settings.naive_datetimes is None


def test_the_password_is_not_shown() -> None:
    assert "secret" not in repr(settings_of())


def test_the_url_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URL_VARIABLE, URL)
    assert Settings.from_app(Celery("proj", set_as_current=False)).database_url == URL


def test_without_a_url_the_error_says_where_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    with pytest.raises(ImproperlyConfigured, match=URL_VARIABLE):
        Settings.from_app(Celery("proj", set_as_current=False))


def test_celery_masks_the_url_in_its_reports() -> None:
    app = Celery("proj", set_as_current=False)
    app.conf.durable_database_url = URL
    assert "secret" not in app.conf.humanize(with_defaults=False)


def test_timedelta_is_as_good_as_seconds() -> None:
    assert settings_of(durable_lease=timedelta(minutes=1)).lease == 60.0


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("durable_database_url", "mysql://host/db", "postgresql"),
        ("durable_schema", "Robert'); drop", "durable_schema"),
        ("durable_page", 0, "durable_page = 0"),
        ("durable_page", 1.5, "durable_page"),
        ("durable_lease", -1, "durable_lease"),
        ("durable_lease", float("nan"), "durable_lease"),
        ("durable_lease", "30", "durable_lease = '30'"),
        ("durable_lease", True, "durable_lease"),
        ("durable_heartbeat", 11, "durable_lease / 3"),
        ("durable_publish_timeout", 5, "durable_claim_timeout / 2"),
        ("durable_redispatch_after", 7200, "durable_redispatch_max"),
        ("durable_naive_datetimes", "Mars/Phobos", "Mars/Phobos"),
        ("durable_max_payload", 0, "durable_max_payload"),
        ("durable_prepared_statements", "no", "durable_prepared_statements = 'no' .* True or False"),
        ("durable_schema", "public", "mix with those of others"),
        ("durable_schema", "pg_timers", "Postgres' own"),
        ("durable_schema", "information_schema", "Postgres' own"),
        ("durable_database_url", "embedded:", "names no folder"),
        ("durable_database_url", 5, "not int"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any, said: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=said.replace("(", r"\(")):
        settings_of(**{key: value})


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:hunter2@host:54x2/db",
        "postgresql://user:hunter2@host:99999/db",
        "postgresql://user:hunter2:x@y@host:hunter/db",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="durable_database_url cannot be read") as caught:
        settings_of(durable_database_url=url)
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("durable_leese", "Did you mean durable_lease?"),
        ("durable_Page", "Did you mean durable_page?"),
        ("durable_dsn", "There are: durable_claim_timeout, durable_connect_timeout"),
        ("CELERY_DURABLE_PAGE", "write durable_page"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(key: str, said: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"^{key} is no.*{said.replace('?', '[?]')}"):
        settings_of(**{key: 7})


def test_a_key_of_django_that_nothing_reads_is_refused() -> None:
    app = Celery("proj", set_as_current=False)
    values = {"CELERY_DURABLE_DATABASE_URL": URL, "CELERY_DURABLE_LEESE": 7, "DURABLE_GOODS": "another program's"}
    app.config_from_object(values, namespace="CELERY")
    with pytest.raises(ImproperlyConfigured, match=r"CELERY_DURABLE_LEESE is no .*Did you mean CELERY_DURABLE_LEASE"):
        Settings.from_app(app)
    del values["CELERY_DURABLE_LEESE"]
    assert Settings.from_app(app).page == 500


def test_the_error_of_an_app_without_a_url_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    with pytest.raises(ImproperlyConfigured, match="in the app 'proj'") as caught:
        Settings.from_app(Celery("proj", set_as_current=False))
    assert "app=" not in str(caught.value)


def test_where_no_app_was_imported_the_error_says_so() -> None:
    """A program of its own: this one has an app."""
    code = (
        "from celery_durable import cancel\n"
        "try:\n    cancel('x')\nexcept Exception as exc:\n    print(type(exc).__name__, exc)"
    )
    env = {name: value for name, value in os.environ.items() if name != URL_VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ImproperlyConfigured durable_database_url is not set in the app 'default'")
    assert "import the module that makes yours first, or pass app=" in done.stdout


def test_naive_datetimes_take_a_zone_or_the_apps() -> None:
    assert settings_of(durable_naive_datetimes="Asia/Kolkata").naive_datetimes == ZoneInfo("Asia/Kolkata")
    found = settings_of(durable_naive_datetimes=True, timezone="Europe/Berlin").naive_datetimes
    assert str(found) == "Europe/Berlin"
    assert settings_of(durable_naive_datetimes=False).naive_datetimes is None


def test_django_spells_them_in_capitals() -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object({"CELERY_DURABLE_DATABASE_URL": URL, "CELERY_DURABLE_PAGE": 7}, namespace="CELERY")
    assert Settings.from_app(app).page == 7
