"""What hostile code tries inside the jail. Each attempt is a function that returns True once it got out.

Runs as `python attempts.py NAME CONTEXT` (JSON), inside the jail or, as a control, with the layer removed
that stops it. Imports the standard library only. An OSError means that the attempt was refused; `Unavailable`
that this kernel lacks the thing.
"""

from __future__ import annotations

import json
import sys

import attempts_calls  # noqa: F401 (each adds its own to ATTEMPTS)
import attempts_files  # noqa: F401
import attempts_processes  # noqa: F401
from registry import ATTEMPTS, Attempt, Unavailable

__all__ = ["ATTEMPTS", "Attempt", "main"]


def main() -> int:
    name, context = sys.argv[1], json.loads(sys.argv[2])
    try:
        escaped = ATTEMPTS[name].run(context)
    except Unavailable as exc:
        print(f"UNAVAILABLE {exc}")
    except (OSError, MemoryError) as exc:
        print(f"REFUSED {exc}")
    else:
        print("ESCAPED" if escaped else "REFUSED nothing found")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
