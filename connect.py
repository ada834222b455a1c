"""How the processes of a run find each other.  One that is missing or has other flags is named."""

import ctypes
import json
import os
import select
import signal
import socket
import time
from contextlib import suppress

import jax

import errors
from config import Config, Run
from errors import DISTRIBUTED, USAGE, Problem, UserError, describe, first_ten, or_list, write_error


def join_processes(cfg: Config):
    """Join the run's other processes, named by run.coordinator or by a cluster that JAX detects.

    Where there is neither, this process is the only one.  Raises UserError DISTRIBUTED and USAGE.
    """
    if jax.__version_info__ < (0, 10):  # such as that of a notebook's environment
        fix = "pip install --require-hashes -r requirements.txt"
        raise UserError(USAGE, f"jax {jax.__version__} is older than 0.10", fix)
    if jax.distributed.is_initialized():  # by an earlier script of the same notebook
        return
    r = cfg.run
    options = dict(initialization_timeout=r.start_timeout)
    jax.config.update("jax_enable_preemption_service", False)  # processes.Stop notices preemption
    ctypes.CDLL(None).signal(signal.SIGABRT, aborted)
    where = "the cluster that JAX has detected"
    fix = "correct what the message names, or set run.coordinator"
    if r.coordinator:
        where = f"run.coordinator={r.coordinator}"
        fix = "choose a free port on process 0's host, the same in every process's flags"
        options |= dict(coordinator_bind_address=wait_for_all(r), coordinator_address=r.coordinator)
        options |= dict(num_processes=r.num_processes, process_id=r.process_id)
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError, KeyError) as e:
        found_none = "coordinator_address should be defined" in str(e)
        # By an earlier script of a notebook.  In other programs this stays an error: on a cluster,
        # each process would train alone.
        has_computed = errors.is_interactive() and "must be called before any JAX" in str(e)
        if found_none or (has_computed and not r.coordinator):
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            return
        # RuntimeError: a port is taken, metadata do not answer, or JAX cannot parse a variable.
        # Others: variables are missing or malformed.
        code = DISTRIBUTED if isinstance(e, RuntimeError) else USAGE
        raise UserError(code, f"{where}: {describe(e)}", fix) from None


def wait_for_all(r: Run) -> str | None:
    """Wait until all processes have connected to process 0 at run.coordinator.  Returns the address
    where process 0 listens, and None in the others.

    JAX then connects them at the same address.  JAX alone would not say who is missing, and would
    abort the process instead of raising.  Raises UserError: DISTRIBUTED if a process has not
    connected after run.start_timeout, USAGE if their flags contradict each other.
    """
    deadline = time.monotonic() + r.start_timeout
    if r.process_id > 0:
        return greet_process_0(r, deadline)
    greeted, error = {}, None
    try:
        family, address = listening_address(r.coordinator)
        with socket.create_server(address, family=family) as server:
            while len(greeted) < r.num_processes - 1:
                wait_for_greeting(server, r, greeted, deadline)
    except (OSError, UnicodeError) as e:  # UnicodeError: the host is no name
        fix = "give a name or address of this host, with a free port, in every process's flags"
        error = UserError(DISTRIBUTED, f"run.coordinator={r.coordinator}: {e}", fix)
    except UserError as e:
        error = e
    answer = "" if error is None else json.dumps([error.code, *error.problems[0]])
    for connection in greeted.values():
        with connection, suppress(OSError):  # a process that is gone will not be told
            connection.sendall(f"{answer}\n".encode())
    if error is not None:
        raise error
    ip, port, *_ = address
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def listening_address(coordinator: str) -> tuple[int, tuple]:
    """(address family, address) where process 0 listens: the named address, or all of this host's
    if other hosts cannot reach that one (127.0.1.1, which Debian gives the host's own name), or if
    it is not this host's, but forwarded to it."""
    host, port = coordinator.rsplit(":", 1)
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    with socket.socket(family) as probe, suppress(OSError):  # raised if it is not this host's
        probe.bind((address[0], 0))
        if address[0] != "127.0.1.1":
            return family, address
    anywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
    return family, (anywhere, *address[1:])


def wait_for_greeting(server: socket.socket, r: Run, greeted: dict, deadline: float):
    """Add the connection of one more process to greeted; connections of other programs are
    ignored."""
    server.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        connection, _ = server.accept()
    except TimeoutError:
        missing = name_ids(set(range(1, r.num_processes)) - set(greeted))
        what = f"{missing} of {r.num_processes} did not come to run.coordinator={r.coordinator}"
        what += f" within {r.start_timeout} s"
        fix = "start every process within run.start_timeout, and look at their logs"
        raise UserError(DISTRIBUTED, what, fix) from None
    connection.settimeout(5)
    try:
        word, n, count = connection.makefile().readline(100).split()
        n, count = int(n), int(count)
    except (OSError, ValueError):
        word = ""
    if word != "trifold":
        connection.close()
        return
    came_twice = n in greeted and not is_closed(greeted[n])
    if count != r.num_processes or not 0 < n < count or came_twice:
        what = f"a process came with run.process_id={n} and run.num_processes={count}"
        what += f", and process 0 has run.num_processes={r.num_processes}"
        what += f" and knows another process {n} already" if came_twice else ""
        greeted[-1] = connection  # so that it gets the answer too
        fix = "give each process the same number of processes and an id of its own"
        raise UserError(USAGE, what, fix)
    greeted[n] = connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the process at the other end is gone.  It sends nothing after its greeting, so what
    there is to read is the end of the connection."""
    events = select.poll()
    events.register(connection, select.POLLIN)
    return bool(events.poll(0))


def greet_process_0(r: Run, deadline: float):
    """The part of `wait_for_all` in the other processes."""
    host, port = r.coordinator.rsplit(":", 1)
    address = host.strip("[]"), int(port)
    while True:
        try:
            with socket.create_connection(address, timeout=5) as connection:
                connection.sendall(f"trifold {r.process_id} {r.num_processes}\n".encode())
                connection.settimeout(max(1, deadline + 5 - time.monotonic()))
                answer = connection.makefile().readline()
            if answer == "\n":
                return
            if answer:
                code, what, fix = json.loads(answer)
                raise UserError(code, what, fix)
            reason = "it closed the connection"
        except (OSError, ValueError, TypeError) as e:  # no listener, or an earlier run's
            reason = e
        if time.monotonic() > deadline:
            what = f"no process 0 at run.coordinator={r.coordinator} after {r.start_timeout} s"
            fix = "start process 0, and check the address and the firewall"
            raise UserError(DISTRIBUTED, f"{what}: {reason}", fix)
        time.sleep(0.5)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def aborted(number):
    """The handler of SIGABRT.  When process 0 is lost, a thread of JAX calls abort.  A handler of
    Python's signal module would wait for the main thread; this one runs in the thread of JAX."""
    what = "JAX aborted this process (its message is above), most often as another one was lost"
    fix = "look at the other processes' logs, then run the same command again in every process"
    write_error(f"{Problem(what, fix)}\n")
    os._exit(DISTRIBUTED)


def name_ids(ids) -> str:
    """process 1, or processes 1, 2 and 3, with at most ten numbers."""
    ids = sorted(ids)
    names = first_ten(ids) if len(ids) > 10 else or_list(ids, "and")
    return f"{'processes' if len(ids) > 1 else 'process'} {names}"
