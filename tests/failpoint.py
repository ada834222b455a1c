"""Runs a script that is killed, or told to stop, at one of its calls to the file system or bucket.

    FAILPOINT=rename:3:after:SIGKILL python tests/failpoint.py train.py --config tiny ..

os.rename, os.replace, os.unlink, os.rmdir and os.mkdir are what commits a checkpoint, moves it,
deletes an old one, and replaces metrics.jsonl and config.json; `append` is the opening of a file
that rows are appended to.  `request` is what gcsfs asks a bucket to change: it writes the lease,
the files of a run and the object that commits a checkpoint, but not the arrays.  Without FAILPOINT
the calls are counted, on the last line of stderr.
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


class Failpoint:
    """A call of this process: the signal is sent before or after the n-th, from 1, of a name."""

    def __init__(self, text: str):
        self.name, n, self.when, number = text.split(":")
        self.n, self.signal = int(n), signal.Signals[number]

    def reach(self, name: str, n: int, when: str):
        if (name, n, when) == (self.name, self.n, self.when):
            os.kill(os.getpid(), self.signal)

    def watch(self, name: str):
        """Replace a function of WATCHED by one that counts its calls."""
        module, function = WATCHED[name], "open" if name == "append" else name
        call = getattr(module, function)

        def watched(*args, **kwargs):
            if name == "append" and "a" not in str(args[1:2] or kwargs.get("mode")):
                return call(*args, **kwargs)
            CALLS[name] += 1
            n = CALLS[name]
            self.reach(name, n, "before")
            result = call(*args, **kwargs)
            self.reach(name, n, "after")
            return result

        setattr(module, function, watched)

    def watch_requests(self):
        # gcsfs reads this as it is imported, before files.py would set it.
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
        from gcsfs import GCSFileSystem  # takes half a second

        call = GCSFileSystem._request

        async def watched(fs, method, *args, **kwargs):
            if method == "GET":
                return await call(fs, method, *args, **kwargs)
            CALLS["request"] += 1
            n = CALLS["request"]
            self.reach("request", n, "before")
            result = await call(fs, method, *args, **kwargs)
            self.reach("request", n, "after")
            return result

        GCSFileSystem._request = watched


if __name__ == "__main__":
    chosen = Failpoint(os.environ.pop("FAILPOINT", "none:0:before:SIGKILL"))
    for name in WATCHED:
        chosen.watch(name)
    if "STORAGE_EMULATOR_HOST" in os.environ:
        chosen.watch_requests()
    atexit.register(lambda: print(f"calls: {dict(CALLS)}", file=sys.stderr))
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
