"""The benchmarks run against the statements and columns of today; the figures are not judged here."""

from __future__ import annotations

from benchmarks import lateness


def test_lateness_is_measured_of_every_timer() -> None:
    found = lateness.run(waiting=10_500, rate=25, seconds=1)
    assert found["number"] == 25
    assert 0 < found["ours"] <= found["p99"] and found["ratio"] > 0
