"""Errors that users can correct, and the exit codes of all programs."""

import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

# 0 is success, and 1 is a bug in Trifold.

USAGE = 2  # wrong settings or command line
DATA = 3  # data are missing, damaged or out of range
CHECKPOINT = 4  # no usable checkpoint, or one of another model, data or format
STORAGE = 5  # storage failed, after retries
DIVERGED = 6  # the numbers are no longer finite
DISTRIBUTED = 7  # another process was lost or cannot be reached
BUSY = 8  # another live run uses the run directory, or it was moved under this one
HUNG = 9  # nothing moved for run.hang_timeout
INTERRUPTED = 75  # stopped by SIGTERM or Ctrl-C; the same command resumes

TEMPORARY = {
    STORAGE: "storage failed",
    DISTRIBUTED: "another process was lost",
    HUNG: "nothing moved",
    INTERRUPTED: "preempted",
}
"""{exit code: what has happened}.  It may be over when training starts again, so run.restarts and
scripts/launch.py do that after these codes."""

AGAIN = "run the same command again to resume"
"""The end of a fix."""


class Problem(NamedTuple):
    """One error, printed on two lines: what is wrong, and how to fix it."""

    what: str
    fix: str

    def __str__(self):
        what, fix = (text.replace("\n", r"\n") for text in self)  # a path may hold line ends
        # An address may hold a password: gs://user:password@bucket.
        return re.sub(r"(://)[^/@\s]+@", r"\1***@", f"error: {what}\n  fix: {fix}")


def describe(e: BaseException) -> str:
    """An exception in one line."""
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


# Packages that raise only when storage still fails after their retries.
STORAGE_PACKAGES = "gcsfs", "aiohttp", "requests", "google.auth", "google.api_core", "google.cloud"


def is_storage_error(error: BaseException) -> bool:
    return isinstance(error, OSError) or type(error).__module__.startswith(STORAGE_PACKAGES)


class UserError(Exception):
    """An error that is printed without a traceback: its problems, and the process's exit code."""

    # code is given by position, so that pickle, which brings it from another process, has it too.
    def __init__(self, code: int, /, what: str = "", fix: str = "", problems: list[Problem] = ()):
        self.code, self.problems = code, list(problems) or [Problem(what, fix)]

    def __str__(self):
        return "\n".join(map(str, self.problems))


def storage_error(error: Exception, what: str = "", where="storage failed") -> UserError:
    """What to tell the user about an error of storage.  what: words before the path.  where:
    what takes the path's place if the error has none."""
    reason = getattr(error, "strerror", None) or describe(error)
    what = f"{what}{getattr(error, 'filename', None) or where}: {reason}"
    fix = "free some space, or correct the path, its permissions or the connection to the bucket, "
    fix += "and run the command again"
    return UserError(STORAGE, what, fix)


def raise_problems(code: int, problems: Iterable[Problem]):
    """Raise a UserError of these problems, if there are any."""
    if found := list(problems):
        raise UserError(code, problems=found)


def write_error(text: str):
    """Write to stderr, if that is still possible: its reader may have ended."""
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        if is_interactive():  # a notebook may show only what goes to its own stream
            print(text, end="", file=sys.stderr, flush=True)
        else:
            os.write(2, text.encode(errors="backslashreplace"))


def is_interactive() -> bool:
    """Whether this is a notebook or another session with a prompt, which goes on after a script."""
    return hasattr(sys, "ps1")


def exit_at_once(code: int):
    """End the process at once, or in an interactive session the script."""
    if is_interactive():
        sys.exit(code)
    os._exit(code)


def or_list(values, word: str = "or") -> str:
    """The values as words: "a, b or c"."""
    *head, last = map(str, values)
    return f"{', '.join(head)} {word} {last}" if head else last


def first_ten(values, separator: str = ", ") -> str:
    """The values as words; of more than ten the first ten, and how many more."""
    more = f" and {len(values) - 10} more" if len(values) > 10 else ""
    return separator.join(map(str, values[:10])) + more


def look_up(table: dict, flag: str, name: str):
    """table[name], where a flag names an entry of a table.  Raises UserError USAGE."""
    if name not in table:
        what = f"{flag}={name!r} is not one of {or_list(table)}"
        raise UserError(USAGE, what, f"set --{flag} to {or_list(table)}")
    return table[name]
