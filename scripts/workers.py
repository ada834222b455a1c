"""Runs the tasks of prepare_data.py: in this process, in a pool of processes, or on Ray."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from errors import DISTRIBUTED, USAGE, UserError


def end_with_parent():
    """End this worker as soon as its parent ends, even if by SIGKILL."""

    def wait():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def run_in_pool(function: Callable, tasks: list, n_workers: int) -> Iterator:
    """function(task) of each task, in the order of the tasks."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(n_workers, context, initializer=end_with_parent)
    # Workers inherit the blocked signals: Ctrl-C reaches all processes of a terminal, but it is the
    # parent that has to end the workers.
    blocked = {signal.SIGINT, signal.SIGTERM}
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        futures = [pool.submit(function, task) for task in tasks]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        for future in futures:
            yield future.result()
    except BrokenProcessPool:
        what = "a worker process was killed, or ran out of memory"
        fix = "run the same command again to go on, with fewer --workers if memory was short"
        raise UserError(DISTRIBUTED, what, fix) from None
    finally:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown()


def run_in_folder(function: Callable, folder: str, task):
    """function(task) with `folder` as the working directory, if this machine has it."""
    if os.path.isdir(folder):
        os.chdir(folder)
    return function(task)


PICKLED = ("config", "errors", "files", "shards", "scripts.corpus", "scripts.readers")
PICKLED += ("scripts.shard_tasks", "scripts.workers")
"""The modules that Ray's workers get from here: the cluster needs no copy of them."""


def run_on_ray(function: Callable, tasks: list, address: str) -> Iterator:
    """function(task) of each task, in the order of the tasks, on a cluster."""
    try:
        import ray
    except ImportError:
        fix = "pip install ray, as docs/data.md says"
        raise UserError(USAGE, f"--ray {address} needs the package ray", fix) from None

    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
        for name in PICKLED:
            ray.cloudpickle.register_pickle_by_value(sys.modules[name])
        remote = ray.remote(run_in_folder)
        for result in [remote.remote(function, os.getcwd(), task) for task in tasks]:
            yield ray.get(result)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as e:
        if isinstance(e, OSError) and not isinstance(e, ConnectionError):
            raise  # a storage error
        if isinstance(e, UserError):
            raise e.cause from None
        what = f"--ray {address}: {' '.join(str(e).split())[-300:]}"
        fix = "look at the cluster with `ray status`, and run the same command again to go on"
        raise UserError(DISTRIBUTED, what, fix) from None
    finally:
        ray.shutdown()


def run_tasks(function: Callable, tasks: list, n_workers: int, address: str) -> Iterator:
    """function(task) of each task, in the order of the tasks."""
    n_workers = min(n_workers, len(tasks))
    if address:
        yield from run_on_ray(function, tasks, address)
    elif n_workers > 1:
        yield from run_in_pool(function, tasks, n_workers)
    else:
        yield from map(function, tasks)
