"""``python -m benchmarks [NAME…] [--json]``: measures, and prints each figure beside its anchor."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import dispatch, lateness, schedules, throughput

BENCHMARKS: dict[str, Callable[[], dict[str, Any]]] = {
    "dispatch-redis": dispatch.run, "lateness": lateness.run, "schedules": schedules.run,
    "throughput": throughput.run,
}  # fmt: skip


def main() -> int:
    """Run the named benchmarks, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(BENCHMARKS)} (all if none)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    results = []
    for name in arguments.names or BENCHMARKS:
        print(f"running {name} …", file=sys.stderr)
        results.append(BENCHMARKS[name]())
    if arguments.json:
        print(json.dumps(results, indent=2))
        return 0
    for each in results:
        ratio = f"ratio {each['ratio']:.2f}" if "ratio" in each else "no ratio"
        print(f"{each['name']}: {ratio} (goal {each['goal']})")
        for key, value in each.items():
            if key not in ("name", "ratio", "goal", "samples"):
                print(f"    {key}: {value:,.2f}" if isinstance(value, float) else f"    {key}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
