"""Settings: read from app.conf, checked as one value, with errors that name key, value and fix."""

from __future__ import annotations

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
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any, said: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=said.replace("(", r"\(")):
        settings_of(**{key: value})


def test_naive_datetimes_take_a_zone_or_the_apps() -> None:
    assert settings_of(durable_naive_datetimes="Asia/Kolkata").naive_datetimes == ZoneInfo("Asia/Kolkata")
    found = settings_of(durable_naive_datetimes=True, timezone="Europe/Berlin").naive_datetimes
    assert str(found) == "Europe/Berlin"
    assert settings_of(durable_naive_datetimes=False).naive_datetimes is None


def test_django_spells_them_in_capitals() -> None:
    app = Celery("proj", set_as_current=False)
    app.config_from_object({"CELERY_DURABLE_DATABASE_URL": URL, "CELERY_DURABLE_PAGE": 7}, namespace="CELERY")
    assert Settings.from_app(app).page == 7
