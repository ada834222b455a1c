"""Runs a script that is killed at one of its calls to the file system.

    FAILPOINT=rename:3:after python tests/failpoint.py train.py --config tiny ..

os.rename, os.replace, os.unlink, os.rmdir and os.mkdir are what commits a checkpoint, moves it,
deletes an old one, and replaces metrics.jsonl and config.json; `append` is the opening of a file
that rows are appended to.  Without FAILPOINT the calls are counted, on the last line of stderr.
"""

import atexit
import builtins
import os
import runpy
import signal
import sys
from collections import Counter

WATCHED = dict(rename=os, replace=os, unlink=os, rmdir=os, mkdir=os, append=builtins)
CALLS = Counter()


def watch(name: str, at: int, after: bool):
    """Replace a function of WATCHED by one that kills this process at its call number `at`, from
    1."""
    module, function = WATCHED[name], "open" if name == "append" else name
    call = getattr(module, function)

    def watched(*args, **kwargs):
        if name == "append" and "a" not in str(args[1:2] or kwargs.get("mode")):
            return call(*args, **kwargs)
        CALLS[name] += 1
        if CALLS[name] == at and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        if CALLS[name] == at and after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, function, watched)


if __name__ == "__main__":
    chosen, number, when = os.environ.pop("FAILPOINT", "none:0:before").split(":")
    for name in WATCHED:
        watch(name, int(number) if name == chosen else 0, when == "after")
    atexit.register(lambda: print(f"calls: {dict(CALLS)}", file=sys.stderr))
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
