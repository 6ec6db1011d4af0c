"""Between a person and a program: flags and their checks, errors, whole files.

Everything here is imported before the slow libraries, so that `--help` and usage errors answer at once: it imports
nothing of the other rooms, and neither JAX nor NumPy.
"""

import signal
import sys
from pathlib import Path

_program, _root = Path(sys.argv[0] if sys.argv else "").resolve(), Path(__file__).resolve().parents[2]
if _program.parent.parent == _root and _program.parent.name in ("algos", "common", "benchmarks"):
    # A command of this kit: Ctrl-C ends it without a traceback, also while it still imports
    signal.signal(signal.SIGINT, signal.SIG_DFL)
