"""Interrupts while a command imports what it needs: they end it without a traceback, as later in
`parse`.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise


def end_at_interrupts() -> bool:
    """Let an interrupt end the process, unless somebody handles or ignores it.

    Returns:
        If this changed anything.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return True


def is_command_of(package: str) -> bool:
    """Tell if this process is `python -m PACKAGE.COMMAND`."""
    return any(
        word == "-m" and name.startswith(f"{package}.") for word, name in pairwise(sys.orig_argv)
    )


@contextmanager
def imports_of_a_script() -> Iterator[None]:
    """Let an interrupt end the process during imports that its script has asked for: an algorithm's
    file, run.

    A program or a notebook that imports an algorithm keeps its interrupts.
    """
    changed = _importer() == os.path.abspath(sys.argv[0]) and end_at_interrupts()
    try:
        yield
    finally:
        if changed:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _importer() -> str:
    """The file that imports the module which is being imported."""
    frame = sys._getframe(1)
    files = [__file__]
    while frame and len(files) < 3:  # this one, the module, the file that imports it
        file = frame.f_code.co_filename
        if not file.startswith("<frozen") and "contextlib" not in file and file != files[-1]:
            files.append(file)
        frame = frame.f_back
    return os.path.abspath(files[-1])
