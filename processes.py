"""The processes of a run: agreeing, stopping, saving, hangs and failures.  How they find each other
is in connect.py."""

import faulthandler
import hashlib
import json
import os
import platform
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from contextlib import contextmanager, suppress
from types import CoroutineType

import jax
import jaxlib

import errors
import signals
import utils
from cli import call_within
from config import Config, settings
from connect import join_processes, name_ids
from errors import AGAIN, Problem, UserError, describe, write_error
from files import remove_local_folders, run_path, write_whole
from restart import has_parent
from rundir import code_digest, record_end
from utils import exchange, is_lead, process_id, process_ids, shared_store, warn

# ---- agreeing

# Flags that processes of one run may give differently.
OWN_FLAGS = {"run.process_id", "run.coordinator", "data.cache", "data.cache_gb"}


def differences(facts: dict[str, str]) -> dict[str, str]:
    """{name: "VALUE in process N, .."} of the facts that differ between processes."""
    text = json.dumps(facts, sort_keys=True)
    if len(set(exchange(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return {}
    found, differ = exchange(facts), {}
    for name in sorted(set().union(*found)):
        ids = {}
        for n, answer in enumerate(found):
            ids.setdefault(answer.get(name, "nothing"), []).append(n)
        if len(ids) > 1:
            differ[name] = ", ".join(f"{value} in {name_ids(who)}" for value, who in ids.items())
    return differ


def compare_settings(cfg: Config):
    """Raise UserError USAGE if another process of the run was started with other settings; warn if
    it has other versions."""
    # --fresh is left out, because a restart of process 0 may have dropped it.
    flags = settings(cfg) | dict(eval_only=cfg.eval_only, rollback=cfg.rollback)
    shared = {name: str(value) for name, value in flags.items() if name not in OWN_FLAGS}
    refuse_differences(shared, "start all processes of a run with the same flags")
    versions = dict(python=platform.python_version(), jax=jax.__version__)
    versions |= dict(jaxlib=jaxlib.__version__, trifold=code_digest())
    for name, values in differences(versions).items():
        warn(f"the processes run different versions: {name} is {values}")


def refuse_differences(facts: dict[str, str], fix: str):
    """Raise UserError USAGE if a fact, {name: value}, differs in another process."""
    differ = differences(facts).items()
    problems = [Problem(f"{name} differs: {values}", fix) for name, values in differ]
    errors.raise_problems(errors.USAGE, problems)


# ---- stopping


REQUEST_DELAY = 3
"""The number of polls from a request, to stop or to save, until all processes do it."""


class Stop:
    """Notices SIGTERM, Ctrl-C and the end of the terminal, which ask the run to save and exit; a
    second SIGTERM or Ctrl-C exits at once.  SIGUSR1 asks it to save.

    All processes stop and save after the same update.  All make the same polls, one for each update
    and each batch of an evaluation.  A process that is asked to stop writes into the store that all
    are to stop REQUEST_DELAY polls after this one, and at each poll all look there.  No process has
    made that poll yet: an update needs the devices of all, so none is REQUEST_DELAY polls ahead of
    another.
    """

    SAME_SIGNAL = 2.0
    """Seconds in which a second signal is ignored if a parent process forwards signals: whoever
    stops a service signals both processes, so this one gets the same signal twice."""

    def __init__(self):
        self.wants_stop = self.wants_save = False
        self.first_signal_at = None
        """When the first signal to stop came."""
        self.loses_nothing = False
        """Whether the first signal ends the run, because there is nothing to save."""
        self.error = None
        """Why this process asks to stop, if not because of a signal."""
        self.save_poll = 0
        """The poll at which all save because this process has asked for it."""
        self.must_stop = self.must_save = False
        """What all have agreed on.  `must_save` stays True until a save has worked."""
        self.polls, self.last_poll, self.last_update = 0, time.monotonic(), None
        self.update_seconds = deque(maxlen=20)
        """How long the last updates took."""
        self.handlers = {number: signal.getsignal(number) for number in signals.STOPS}
        """The signals' handlers before this Stop."""
        signal.signal(signal.SIGUSR1, self.ask_to_save)
        signals.handle_stops(self.handle)

    def handle(self, number, frame):
        if number == signal.SIGHUP:
            signals.leave_terminal()
            self.wants_stop = True
            self.leave_if_allowed()
            return  # not a first signal: shells may send it twice, and services SIGTERM after it
        now = time.monotonic()
        if self.first_signal_at is not None:
            if has_parent() and now < self.first_signal_at + self.SAME_SIGNAL:
                return
            write_error("\ninterrupted before all was saved; run the same command again\n")
            errors.exit_at_once(errors.INTERRUPTED)
        self.wants_stop, self.first_signal_at = True, now
        self.leave_if_allowed()
        write_error("\nstopping after this update; a second signal stops at once\n")

    def leave_if_allowed(self):
        """End the run, by a UserError INTERRUPTED, if a signal has come and nothing is to save."""
        if self.loses_nothing and self.wants_stop:
            self.loses_nothing = False  # another signal must not interrupt the run's end
            raise UserError(errors.INTERRUPTED, "interrupted, but nothing is lost", AGAIN)

    @contextmanager
    def nothing_to_save(self):
        """In this block a signal, also one that came before, ends a run of one process at once.
        Several processes stop together, at an update."""
        self.loses_nothing = len(process_ids()) == 1
        try:
            self.leave_if_allowed()
            yield
        finally:
            self.loses_nothing = False

    def stop_unread(self):
        """Stop because nothing reads what the run prints."""
        if self.first_signal_at is None:
            write_error("\nnothing reads the output any more: stopping after this update\n")
        self.wants_stop = True

    def ignore_signals(self):
        """Ignore signals from here on, because nothing is left to save."""
        # Not SIG_IGN, which processes that this one starts would inherit.
        signals.handle_stops(lambda *_: None)

    def give_signals_back(self):
        """Let a notebook have its signals again.  train.py, which has handlers of its own before a
        Stop is made, keeps those of the Stop until it exits."""
        if self.handlers[signal.SIGINT] is signal.default_int_handler:
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

    def ask_to_save(self, *_):
        """Ask all processes to save; also the handler of SIGUSR1."""
        self.wants_save = True

    def raise_error(self):
        if self.error is not None:
            raise self.error

    def poll(self):
        """Note that this process goes on, pass on a request to stop or save, and take part in the
        agreement."""
        self.polls, self.last_poll = self.polls + 1, time.monotonic()
        utils.on_lost_reader = self.stop_unread  # not before, when there is nothing to save
        asked = {"stop"} if self.wants_stop else set()
        if self.wants_save:  # reset only where it was seen: a signal may come at any line
            self.wants_save = False
            if self.polls > self.save_poll:  # otherwise the save that it asked for is still ahead
                asked.add("save")
                self.save_poll = self.polls + (REQUEST_DELAY if len(process_ids()) > 1 else 0)
        if len(process_ids()) > 1:
            for what in asked:
                key = f"trifold/asked/{self.polls + REQUEST_DELAY}/{what}/{process_id()}"
                shared_store().key_value_set(key, "")
            found = shared_store().key_value_dir_get(f"trifold/asked/{self.polls}/")
            asked = {key.split("/")[-2] for key, _ in found}
        self.must_stop |= "stop" in asked
        self.must_save |= "save" in asked

    def agree_to_stop(self, error: BaseException | None = None, is_update: bool = False) -> bool:
        """Poll, and return whether to stop now, the same in every process.

        error: why this process has to stop.  A single process stops at once; several go on together
        until REQUEST_DELAY polls later.  is_update: an update follows this poll.
        """
        if is_update:
            before, self.last_update = self.last_update, time.monotonic()
            if before is not None:
                self.update_seconds.append(self.last_update - before)
        if error is not None and self.error is None:
            self.error, self.wants_stop = error, True
        self.poll()
        return self.must_stop


# ---- saving


class PeerFailed(RuntimeError):
    """Another process could not write its part of a checkpoint."""


class SaveBarrier:
    """The barrier of the threads that write a checkpoint in the background, one in each process.

    At JAX's own barrier, orbax's default, all would wait for ever for a process that cannot write.
    Here each tells process 0 whether it could, and process 0 tells all.
    """

    STAGES = ("async_write_complete", "async_commit_complete")
    """Parts of orbax's names for its two barriers: when every process has written its part, and
    when process 0 has made the parts a checkpoint."""

    def __init__(self):
        self.n_saves, self.passed, self.ended, self.lock = 0, 0, True, threading.Lock()

    def begin(self):
        """To be called by every process before each save."""
        if is_lead():  # those of the save before are not read any more
            shared_store().key_value_delete(f"trifold/save/{self.n_saves}/")
        self.n_saves, self.passed, self.ended = self.n_saves + 1, 0, False

    def __call__(self, *, key: str, timeout_ms: int):
        """Orbax's BarrierSyncFn.  Raises PeerFailed, or RuntimeError if this process failed."""
        if any(stage in key for stage in self.STAGES):
            self.meet(timeout_ms)
        elif threading.current_thread() is not threading.main_thread():
            # Orbax also calls this around its flag that a save is under way: on the main thread
            # when a save begins, and on another when it ends, whether it has failed or not.
            self.end()

    def put(self, stage: int, failed: list[int]):
        """Write into the store which processes have failed, as far as this one knows."""
        name = f"trifold/save/{self.n_saves}/{stage}/{process_id()}"
        shared_store().key_value_set(name, json.dumps(failed), allow_overwrite=True)

    def meet(self, timeout_ms: int):
        """Report that this process has reached the next stage, and wait until all may go on."""

        def ask(n: int) -> list[int]:
            name = f"trifold/save/{self.n_saves}/{self.passed}/{n}"
            return json.loads(shared_store().blocking_key_value_get(name, timeout_ms))

        # At the second stage the others wait for process 0's commit, and it for none.
        others = process_ids()[1:] if is_lead() and self.passed == 0 else []
        failed = [n for n in others if ask(n)]
        with self.lock:
            if self.ended:
                raise RuntimeError("this process could not write all")
            self.put(self.passed, failed)
        failed = failed if is_lead() else ask(0)
        with self.lock:
            if failed:
                self.ended = True
                raise PeerFailed(f"{name_ids(failed)} could not write")
            self.passed += 1

    def end(self):
        """Report that this process's save has ended, and failed in the stages it did not reach."""
        with self.lock:
            stages = [] if self.ended else range(self.passed, len(self.STAGES))
            for stage in stages:
                self.put(stage, [process_id()])
            self.ended = True


# ---- hanging


HANGS = threading.Event()
"""Set once a Watchdog ends the process."""
SAVE_FAILED = threading.Event()
"""Set once a save has failed.  Its threads may wait 600 s for a folder that was not made, and a
normal exit would wait for the threads."""


class Watchdog:
    """Within its block, ends the process when Stop has not been polled for too long.  First it
    writes the stacks of all threads to stderr and to crash/ in the run directory.  After the block
    a notebook has its signals again, see Stop.give_signals_back."""

    SLOW_FACTOR = 12
    """How many times as long the start, the first update and what LONG names may take: XLA's
    compiler, the wait for a checkpoint, the end of Weights & Biases."""
    LONG = re.compile(r"jax/_src/compiler\.py|/checkpoint(_manager)?\.py|/wandb/")

    def __init__(self, stop: Stop, cfg: Config):
        self.stop, self.run, self.timeout = stop, run_path(cfg), cfg.run.hang_timeout
        self.ended = threading.Event()

    def __enter__(self):
        threading.Thread(target=self.watch, daemon=True).start()
        if len(process_ids()) > 1:
            threading.Thread(target=self.publish_polls, daemon=True).start()

    def __exit__(self, *_):
        self.ended.set()
        self.stop.give_signals_back()

    def patience(self) -> float:
        """The longest time between polls, in seconds."""
        patience = self.timeout or max(300, 20 * max(self.stop.update_seconds, default=0))
        is_slow = not self.stop.update_seconds or main_thread_is_in(self.LONG)
        return patience * self.SLOW_FACTOR if is_slow else patience

    def watch(self):
        woken = time.monotonic()
        while not self.ended.wait(interval := min(10, self.patience() / 10)):
            before, woken = woken, time.monotonic()
            if woken - before > 3 * interval + 5:  # this process or its machine stood still
                self.stop.last_poll = woken
            waited = time.monotonic() - self.stop.last_poll
            if waited > self.patience():
                self.give_up(waited)

    def publish_polls(self):
        key = f"trifold/polls/{process_id()}"
        while not self.ended.wait(min(10, self.patience() / 10)):
            # It fails if process 0 is lost, which the main thread will notice.
            with suppress(jax.errors.JaxRuntimeError):
                shared_store().key_value_set(key, str(self.stop.polls), allow_overwrite=True)

    def give_up(self, waited: float):
        HANGS.set()
        threading.Timer(60, os._exit, [errors.HUNG]).start()  # storage may be what hangs
        with tempfile.TemporaryFile() as f:
            faulthandler.dump_traceback(f, all_threads=True)
            f.seek(0)
            stacks = f.read().decode(errors="replace")
        name = f"{time.strftime('%Y%m%dT%H%M%S')}-process{process_id()}.txt"
        where = self.run / "crash" / name
        what = f"no update, save or evaluation batch for {waited:.0f} s{self.who_is_late()}"
        fix = f"look at the stacks, in {where}, then {AGAIN}"
        with suppress(TimeoutError):  # what reads the output may be what stands still
            call_within(5, lambda: write_error(f"{stacks}{Problem(what, fix)}\n"))
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            write_whole(where, stacks)
        except Exception as e:  # whatever the storage raises, the process has to end
            write_error(f"warning: {where} was not written ({e})\n")
        with suppress(TimeoutError):
            call_within(5, lambda: record_end(self.run, f"exit code {errors.HUNG}"))
        leave_last(30)
        os._exit(errors.HUNG)

    def who_is_late(self) -> str:
        """The processes that have made the fewest polls, as far as the others know."""
        if len(process_ids()) == 1:
            return ""
        try:  # JAX's store is in process 0, and a call waits even while that process is stopped
            found = call_within(10, lambda: shared_store().key_value_dir_get("trifold/polls"))
        except (TimeoutError, jax.errors.JaxRuntimeError):
            return "; process 0 does not answer"
        polls = dict.fromkeys(process_ids(), -1)  # -1: it stopped before it published a number
        polls |= {int(key.rsplit("/", 1)[1]): int(value) for key, value in found}
        late = [n for n in polls if polls[n] == min(polls.values())]
        return f"; all wait for {name_ids(late)}" if len(late) < len(polls) else ""


def main_thread_is_in(files: re.Pattern) -> bool:
    """Whether a function of one of these files is on the main thread's stack."""
    innermost = sys._current_frames()[threading.main_thread().ident]
    stack = traceback.walk_stack(innermost)
    return any(files.search(frame.f_code.co_filename) for frame, _ in stack)


# ---- failing


def hide_late_errors(unraisable):
    """A sys.unraisablehook that hides the hundreds of lines that follow a failed read in orbax."""
    late = "Event loop is closed" in str(unraisable.exc_value)
    if not late and not isinstance(unraisable.object, CoroutineType):
        sys.__unraisablehook__(unraisable)


# What error messages contain after another process of the run is lost: the first those of
# collectives, the second those of any operation.
LOST_IN_COLLECTIVE = r"Gloo|[Cc]onnection closed by peer"
LOST_PEER = rf"{LOST_IN_COLLECTIVE}|coordination service|heartbeat|[Bb]arrier|UNAVAILABLE"


def run_main(main, *args):
    """Join the other processes and return main(*args), whose last argument is the Config; exit with
    the codes of errors.py, or with 1 for a bug."""
    sys.unraisablehook = hide_late_errors
    try:
        join_processes(args[-1])
        result = main(*args)
        sys.stdout.flush()  # here, so that a full disk under it is a storage error
        exit_if_a_save_failed(0)
        return result
    except SystemExit as e:
        exit_if_a_save_failed(e.code)
        raise
    except UserError as e:
        exit_with(e)
    except KeyboardInterrupt:  # before Stop has replaced the signal's handler
        exit_with(UserError(errors.INTERRUPTED, "interrupted", AGAIN))
    except Exception as e:  # every error ends the process here: a normal exit could hang
        signals.leave_if_unread(e)
        if (error := explain(e)) is None:
            write_error(traceback.format_exc())
        exit_with(error)
    finally:  # nothing is left to save, and a signal must not change the exit code
        if not errors.is_interactive():
            signals.ignore_stops()


def explain(e: Exception) -> UserError | None:
    """What to tell the user in place of an error of Python, JAX or storage; None for a bug."""
    reason = describe(e)
    if jax.distributed.is_initialized() and re.search(LOST_PEER, str(e)):
        fix = f"look at that process's log, then {AGAIN}, in every process"
        return UserError(errors.DISTRIBUTED, f"a peer process was lost: {reason}", fix)
    if isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(e):
        rows = "fewer rows at a time (in training, train.microbatches or train.grad_accum)"
        fix = f"use more devices, {rows}, or train.remat=layer; scripts/plan.py says what fits"
        return UserError(errors.USAGE, f"a device's memory is too small: {reason}", fix)
    return errors.storage_error(e) if errors.is_storage_error(e) else None


def leave_last(seconds: float):
    """In process 0, wait until the others are about to end too: JAX's store ends with process 0,
    and JAX then aborts the others."""

    def leave():
        store, everyone = shared_store(), len(process_ids())
        store.key_value_set(f"trifold/leaving/{process_id()}", "", allow_overwrite=True)
        while process_id() == 0 and len(store.key_value_dir_get("trifold/leaving")) < everyone:
            time.sleep(0.1)

    if len(process_ids()) > 1:
        with suppress(TimeoutError, jax.errors.JaxRuntimeError):
            call_within(seconds, leave)


def exit_if_a_save_failed(code: int):
    """End the process at once if a save has failed; a notebook goes on."""
    if SAVE_FAILED.is_set() and not errors.is_interactive():
        exit_with(None, code)


def exit_with(error: UserError | None, code: int = 1):
    """Print the error, if any, and end the process with its code, or with `code`.

    At once, because a normal exit waits for lost peers and for failed saves.
    """
    if HANGS.is_set():  # the hang has caused the error, and the Watchdog ends the process
        threading.Event().wait()
    if error is not None:
        write_error(f"{error}\n")
    signals.flush_output()
    leave_last(5)
    remove_local_folders()
    errors.exit_at_once(code if error is None else error.code)
