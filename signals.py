"""Signals that ask a process to stop, and output that nothing reads any more.

Nothing slow is imported here, because train.py needs it before all else.
"""

import atexit
import os
import select
import signal
import stat
import sys
from contextlib import suppress

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, the end that a scheduler or service asks for, and the end of the terminal."""


def handle_stops(handler, stay_ignored=(signal.SIGHUP,)):
    """Have handler(number, frame) called at each of STOPS, but not at those of stay_ignored that
    this process was started to ignore, as nohup does with SIGHUP."""
    for number in STOPS:
        if number not in stay_ignored or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def ignore_stops():
    """Ignore STOPS from here on.  As Python ends, it replaces handlers that are functions by the
    defaults, which would kill the process; SIG_IGN stays."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def discard(stream: int):
    """Discard what is written to a file descriptor from here on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


@atexit.register
def flush_output():
    """Write what stdout and stderr still hold.  Where that fails, as on a full disk, discard it:
    Python would try again as it ends, and change the exit code to 120."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # there is no such stream, or it is closed
            try:
                stream.flush()
            except OSError:
                discard(stream.fileno())


def leave_terminal():
    """For a handler of SIGHUP: discard what would go to the terminal, which is gone, or to a pipe,
    whose reader, such as tee, has ended too.  To write there would be an error."""
    for stream in (1, 2):
        with suppress(OSError):  # it may be closed
            if not stat.S_ISREG(os.fstat(stream).st_mode):
                discard(stream)


def leave_if_unread(e: Exception):
    """End the process, without a message, if e says that the reader of stdout has closed it, as
    head does once it has its lines.  The exit code is that of a process killed by SIGPIPE."""
    stdout = select.poll()
    stdout.register(1, select.POLLOUT)  # macOS reports nothing where nothing is asked for
    is_closed = any(event != select.POLLOUT for _, event in stdout.poll(0))
    if isinstance(e, BrokenPipeError) and is_closed:
        os._exit(128 + signal.SIGPIPE)
