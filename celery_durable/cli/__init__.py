"""``celery -A proj durable …``: what operators see and steer from a shell.

Every Celery program imports this module, workers too: it must stay light.  A
command's module, and with it the store, is imported when the command is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

_HOMES = {
    "check": "celery_durable.cli.schema",
    "dead": "celery_durable.cli.dead",
    "migrate": "celery_durable.cli.schema",
    "schedules": "celery_durable.cli.schedules",
    "status": "celery_durable.cli.status",
    "timers": "celery_durable.cli.timers",
}


class LateGroup(click.Group):
    """A group whose commands are imported when they are first asked for.

    Arguments:
        homes: module by command; the command is the attribute of its own name.
    """

    def __init__(self, *args: Any, homes: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._homes = homes

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See :class:`click.Group`."""
        return sorted(self._homes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See :class:`click.Group`."""
        if cmd_name not in self._homes:
            return None
        command = getattr(import_module(self._homes[cmd_name]), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LateGroup, homes=_HOMES)
def durable(**_preload: object) -> None:
    """See and steer durable timers, schedules and dead letters.

    Tables by default, one JSON document with -j; data on stdout, notes on stderr.
    Exit code: 0 done, 1 not found or partly failed, 2 usage, 69 no database.
    """
