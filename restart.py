"""Restarts: a parent process that starts the training again when it has ended for a reason that may
be temporary.  It does not import jax."""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

from config import Config
from errors import INTERRUPTED, TEMPORARY, describe, write_error
from files import run_path, saved_steps
from signals import STOPS, handle_stops

LAST_END = "TRIFOLD_LAST_END"
"""The environment variable that tells a training process that it has such a parent, and how the one
before it ended; empty for the first."""
STARTED_OVER = "TRIFOLD_STARTED_OVER"
"""The environment variable with the pipe that `note_start_over` writes to."""


def has_parent() -> bool:
    """Whether this process was started by `supervise`, which hands signals on."""
    return LAST_END in os.environ


def note_start_over():
    """Tell the parent, if there is one, that --fresh is done, so that a restart goes on with the
    new run.  The parent cannot find out where the storage does not answer."""
    if pipe := os.environ.get(STARTED_OVER):
        os.write(int(pipe), b"1")


def newest_checkpoint(cfg: Config, known: int = -1) -> int:
    """The number of the run's newest complete checkpoint, `known` where it cannot be looked up."""
    try:
        return max(saved_steps(run_path(cfg)), default=-1)
    except Exception as e:  # many types; storage may be just what training is restarted for
        say(f"cannot look for checkpoints ({describe(e)})")
        return known


def prepare_child():
    """Called in the new process: on Linux the kernel kills it when its parent is killed.  SIGUSR1
    is ignored until there is something to save."""
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda option, value: None)
    prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Child:
    """The training process, in a session of its own, so that Ctrl-C reaches it only from here."""

    def __init__(self):
        self.process, self.told_to_stop = None, False
        self.is_absent = True
        """Whether there is no process, and the parent waits for storage or for the next try."""
        self.started_over = os.pipe()
        handle_stops(self.forward)
        signal.signal(signal.SIGUSR1, self.forward)

    def forward(self, number, frame):
        self.told_to_stop = self.told_to_stop or number != signal.SIGUSR1
        if self.told_to_stop and self.is_absent:
            os._exit(INTERRUPTED)  # at once: storage may hang
        if self.process is not None:
            self.process.send_signal(number)  # does nothing once it has ended

    def run(self, words: list[str], last_end: str) -> int:
        """Its exit code, or minus the signal that has ended it."""
        self.is_absent, pipe = False, self.started_over[1]
        env = os.environ | {LAST_END: last_end, STARTED_OVER: str(pipe)}
        options = dict(env=env, start_new_session=True, preexec_fn=prepare_child, pass_fds=[pipe])
        self.process = subprocess.Popen([sys.executable, *words], **options)
        if self.told_to_stop:  # while it was started
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait()

    def has_started_over(self) -> bool:
        """Whether a training process has called `note_start_over`."""
        return bool(select.select([self.started_over[0]], [], [], 0)[0])


def temporary_reason(code: int) -> str:
    """Why training has ended with this code, or minus a signal; "" if a restart cannot help."""
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"signal {names.get(-code, -code)}"  # a real-time one has no name
    return f"exit code {code}, {TEMPORARY[code]}" if code in TEMPORARY else ""


def supervise(cfg: Config) -> int:
    """Train with this process's command line, again and again, and return the exit code.

    Training is started again after the exit codes in TEMPORARY and after signals, if this process
    itself was not told to stop, at most run.restarts times in a row without a new checkpoint.
    """
    child, tries, newest, last_end = Child(), 0, newest_checkpoint(cfg), ""
    words = list(sys.argv)
    while True:
        code = child.run(words, last_end)
        if child.has_started_over():
            words = [word for word in words if word != "--fresh"]  # it may be given twice
        last_end = temporary_reason(code)
        # It may have ended before it had a handler.
        if child.told_to_stop and -code in STOPS:
            return INTERRUPTED
        code, child.is_absent = 128 - code if code < 0 else code, True
        if not last_end or child.told_to_stop:
            return code
        before, newest = newest, newest_checkpoint(cfg, newest)
        tries = 1 if newest != before else tries + 1
        most = cfg.run.restarts
        found = f"the newest checkpoint is {newest}" if newest >= 0 else "no checkpoint is known"
        why = f"training ended with {last_end}; {found}"
        if tries > most:
            say(f"{why}; gave up after {most} restarts without a new checkpoint")
            return code
        wait = min(60, 2**tries)
        say(f"{why}; try {tries} of at most {most} without a new checkpoint, in {wait} s")
        time.sleep(wait)


def say(text: str):
    write_error(f"restart: {text}\n")
