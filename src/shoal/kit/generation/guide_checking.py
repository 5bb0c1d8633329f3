"""Program that compiles one grammar, with limits on time and memory; ``guides.Guides`` runs it before it compiles it.

It reads a JSON line from standard input, and answers with what is wrong with the grammar, as JSON. llguidance limits
most of its work, but not all: twenty patterns that a text must have together take it minutes. If a limit is exceeded,
the process ends: by SIGALRM (time), or with an error (memory).
"""

from __future__ import annotations

import json
import signal
import sys

SECONDS = 2.0
MEMORY_MIB = 256  # above the memory that the process has at its start


def main() -> None:
    """Answer the request."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started this process may have blocked some
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even within one call into C
    asked = json.loads(sys.stdin.buffer.readline())
    sys.path[:] = asked["path"]
    from llguidance import LLMatcher

    from shoal.kit.generation.rendering import limit_memory

    limit_memory(MEMORY_MIB * 2**20)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    sys.stdout.write(json.dumps(LLMatcher.validate_grammar(asked["grammar"])))


if __name__ == "__main__":
    main()
