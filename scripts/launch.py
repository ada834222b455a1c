"""Start train.py on other machines: a TPU pod, a Slurm cluster, or hosts that ssh reaches.

    python scripts/launch.py tpu NAME --type v5p-128 --zone us-east5-a --spot -- python train.py ...
    python scripts/launch.py slurm --nodes 2 --gpus 8 --time=4:00:00 -- python train.py ...
    python scripts/launch.py ssh hosts.txt -- python train.py ...

docs/launching.md says what they do.  Flags that --help does not list, written as --flag=value, are
passed on to `gcloud compute tpus queued-resources create` or to sbatch.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import errors
from cli import quit_on_error, read_args, too_low
from config import Flag
from errors import DISTRIBUTED, INTERRUPTED, TEMPORARY, USAGE, Problem, UserError
from signals import STOPS, handle_stops, ignore_stops, leave_terminal

# In seconds:
POLL = 1  # between looks at the workers
CLOUD_POLL = 10  # between questions to the cloud
CLOUD_LIMIT = 900  # for an answer; creating or deleting a pod takes minutes
FIRST_WAIT = 2  # before the first restart; each further one waits twice as long
GRACE = 60  # for the other workers to end by themselves after one has ended
SAVING = 300  # for train.py to save


def say(text: str):
    errors.write_error(f"launch: {text}\n")


def problems_with(args, **rules: tuple[object, str]) -> list[Problem]:
    """A problem for each flag with a bad value.  rules: {flag: (whether it is good, the fix)}."""
    return [
        Problem(f"{name} cannot be {getattr(args, name)!r}", f"give {fix}")
        for name, (is_good, fix) in rules.items()
        if not is_good
    ]


# ---- workers

# Runs the command in the background, and beside it a shell that waits in `cat`, which returns when
# the connection ends, for whatever reason.  That shell then sends train.py SIGTERM, and SIGKILL if
# it has not saved in time.  It is killed before the last echo, which fails if the connection is
# gone: a shell that lived on could send SIGKILL to a new process with train.py's number.
REMOTE = """(cd {folder} 2>/dev/null || {{
  echo error: {folder} is no folder on this host
  echo "  fix: put Trifold there; launch.py ssh takes another folder as --folder"
  exit {usage}
}}
PATH="$PWD/.venv/bin:$PATH" && exec {command}) </dev/null &
pid=$!
(cat; kill $pid; sleep {saving}; kill -9 $pid) <&0 >/dev/null 2>&1 &
wait $pid; code=$?
kill $!
echo "launch: exit code $code"
"""


def remote(folder: str, command: list[str]) -> str:
    """A shell command that runs `command` in a folder of another machine."""
    words = dict(folder=shlex.quote(folder), command=shlex.join(command))
    return shlex.join(["bash", "-c", REMOTE.format(**words, saving=SAVING, usage=USAGE)])


def start(words: list[str], **pipes) -> subprocess.Popen:
    """Start a program in a process group of its own, so that Ctrl-C does not reach it."""
    options = dict(stdout=subprocess.PIPE, text=True, errors="replace", process_group=0)
    return subprocess.Popen(words, **options, **pipes)


def kill(process: subprocess.Popen):
    """Kill a program and those that it has started: gcloud is a script that runs Python."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)


class Worker:
    """A command on another machine, run by a local program such as ssh.  It is stopped when the
    program's stdin is closed."""

    def __init__(self, name: str, words: list[str], is_shown: bool):
        self.name, self.is_shown, self.last_lines = name, is_shown, deque(maxlen=20)
        self.code = None
        """The command's exit code; None until it has ended, or if the connection was lost."""
        self.update = 0
        """The number of the last update that it has printed."""
        self.process = start(words, stdin=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            if end := re.search(r"launch: exit code (\d+)$", line):
                self.code, line = int(end[1]), line[: end.start()]
            if not line:
                continue
            self.last_lines.append(line)
            if update := re.match(r"update (\d+)/", line):
                # Process 0 prints these, and need not be on the first worker.
                self.update, self.is_shown = int(update[1]), True
            if self.is_shown:
                with suppress(OSError):  # the terminal may be gone, but the worker has to be read
                    # In one write, because other threads print too.
                    print(line.rstrip("\n") + "\n", end="", flush=True)

    def end(self):
        if self.process.poll() is None:
            kill(self.process)
        self.reader.join(5)

    def report(self):
        end = "was lost" if self.code is None else f"ended with exit code {self.code}"
        say(f"{self.name} {end}; its last lines:\n{''.join(self.last_lines).rstrip()}")


def wait_for(workers: list[Worker], seconds: float):
    deadline = time.monotonic() + seconds
    while None in [w.process.poll() for w in workers] and time.monotonic() < deadline:
        time.sleep(POLL)


def run_on_all(commands: dict[str, list[str]], dry_run: bool) -> tuple[int, int]:
    """Run commands, {machine: words}, until all have ended.

    When one ends, or at KeyboardInterrupt, which is raised again, the others are stopped.  Returns
    (exit code, last update).  The exit code is one after which a restart is of no use, if a worker
    ended so, else one of TEMPORARY, else 0; a worker that was lost or killed counts as DISTRIBUTED.
    """
    if dry_run:
        print("\n".join(map(shlex.join, commands.values())))
        return 0, 0
    workers = []
    try:
        for name, words in commands.items():
            workers.append(Worker(name, words, is_shown=not workers))
        while {w.process.poll() for w in workers} == {None}:
            time.sleep(POLL)
        wait_for(workers, GRACE)  # usually the others notice, and end by themselves
    finally:
        for worker in workers:
            with suppress(OSError):
                worker.process.stdin.close()
        try:
            wait_for(workers, SAVING + GRACE)
        finally:  # also after a second Ctrl-C
            for worker in workers:
                worker.end()
        if {w.code for w in workers} - {0, INTERRUPTED}:
            # Of hundreds some: first those with an error, then those that were killed or lost.
            workers.sort(key=lambda w: (w.code in {0, *TEMPORARY}, w.code is None or w.code > 127))
            for worker in workers[:8]:
                worker.report()
    codes = {DISTRIBUTED if w.code is None or w.code > 127 else w.code for w in workers} - {0}
    return min(codes - TEMPORARY.keys() or codes, default=0), max(w.update for w in workers)


# ---- Cloud TPU

RUNTIMES = dict.fromkeys(("v2", "v3", "v4"), "tpu-ubuntu2204-base")
RUNTIMES |= dict(v5litepod="v2-alpha-tpuv5-lite", v5p="v2-alpha-tpuv5", v6e="v2-alpha-tpuv6e")
"""{TPU: the runtime version of its machines}.  Their Python is too old; SETUP installs another."""

SETUP = """set -e
mkdir -p trifold && cd trifold && tar xzf ../trifold.tgz
if cmp -s requirements.txt .venv/installed; then exit; fi
python3 -m pip install -q --user uv==0.13.9
python3 -m uv venv -q --clear --seed --python 3.12 .venv
.venv/bin/python -m pip install -q --require-hashes -r requirements.txt
.venv/bin/python -m pip install -q "jax[tpu]"
cp requirements.txt .venv/installed"""

DEAD = {"FAILED", "SUSPENDING", "SUSPENDED", "PREEMPTED", "TERMINATED"}
"""The states from which a pod does not come back."""
PERMANENT = "ALREADY_EXISTS|INVALID_ARGUMENT|PERMISSION_DENIED|UNAUTHENTICATED|auth login|"
PERMANENT += "required property|unrecognized arguments"
"""A pattern that finds gcloud's errors for which another try is of no use."""


class CloudError(Exception):
    """gcloud failed or the pod is gone; trying again may succeed."""


@dataclass
class Tpu:
    """Make a TPU pod, train on it through preemptions, and delete it."""

    name: tyro.conf.Positional[str]
    """Name of the pod (a queued resource), and of its nodes."""
    type: str
    """Accelerator type of a slice, such as v5p-128."""
    zone: str
    """Such as us-east5-a."""
    slices: int = 1
    """Slices, which a slower network connects."""
    spot: Flag = False
    """Cheaper machines, which can be taken away."""
    keep: Flag = False
    """Do not delete the pod at the end."""
    restarts: int = 10
    """The most restarts in a row that make no new update."""
    dry_run: Flag = False
    """Only print the commands, as if each slice had one worker."""

    tool = "gcloud"
    is_ours = False
    """Whether this command has made the pod, and deletes it at the end."""

    @property
    def nodes(self) -> list[str]:
        """The names of the slices."""
        several = [f"{self.name}-{n}" for n in range(self.slices)]
        return several if self.slices > 1 else [self.name]

    def problems(self) -> list[Problem]:
        name = re.fullmatch(r"[a-z][a-z0-9-]{0,56}", self.name)
        zone = re.fullmatch(r"[a-z]+-[a-z]+\d+-(ai\d+)?[a-z]", self.zone)
        type = re.fullmatch(rf"({'|'.join(RUNTIMES)})-\d+", self.type)
        return problems_with(
            self,
            name=(name, "small letters, digits and dashes, as in my-pod"),
            zone=(zone, "a zone, such as us-east5-a"),
            type=(type, f"{errors.or_list(RUNTIMES)} (v5e is v5litepod) and a size: v5p-128"),
            slices=(self.slices > 0, "1 or more"),
            restarts=(self.restarts >= 0, "0 or more"),
        )

    def gcloud(self, group: str, verb: str, *words: str) -> list[str]:
        """The words of a command line."""
        return ["gcloud", "compute", "tpus", group, verb, *words, f"--zone={self.zone}", "--quiet"]

    def call(self, group: str, verb: str, *words: str) -> str:
        """What a gcloud command prints; "" if it is `describe` and there is no such resource, and
        "UNKNOWN" if it succeeds and prints nothing.

        Raises CloudError, or UserError USAGE where trying again is of no use.
        """
        command = self.gcloud(group, verb, *words)
        if self.dry_run:
            print(shlex.join(command))
            return "READY 1" if group == "tpu-vm" else "ACTIVE" if self.is_ours else ""
        with start(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                out, err = process.communicate(timeout=CLOUD_LIMIT)
            except BaseException as e:  # KeyboardInterrupt too
                kill(process)
                if not isinstance(e, subprocess.TimeoutExpired):
                    raise
                what = f"gcloud {group} {verb} did not end within {CLOUD_LIMIT} s"
                raise CloudError(what) from None
        if process.returncode:
            from_error = re.sub("(?s)^.*?(?=ERROR:)", "", err)  # general advice follows the error
            what = f"gcloud {group} {verb}: {' '.join(from_error.split())[:500]}"
            if verb == "describe" and "NOT_FOUND" in err:
                return ""
            if re.search(PERMANENT, err):
                raise UserError(USAGE, what, "correct the flags, or gcloud's login or project")
            raise CloudError(what)
        return out.strip() or "UNKNOWN"

    def state(self) -> str:
        """The pod's state; "" where there is none."""
        return self.call("queued-resources", "describe", self.name, "--format=value(state.state)")

    def create(self):
        many = [f"--node-count={self.slices}", f"--node-prefix={self.name}"]
        words = [self.name, *(many if self.slices > 1 else [f"--node-id={self.name}"])]
        words += [f"--accelerator-type={self.type}"]
        words += [f"--runtime-version={RUNTIMES[self.type.partition('-')[0]]}"]
        words += ["--spot", *self.extra] if self.spot else self.extra
        say(f"creating {self.name}")
        before = self.is_ours
        self.is_ours = True  # even if the call fails, because the pod may exist all the same
        try:
            self.call("queued-resources", "create", *words)
        except UserError:
            self.is_ours = before
            raise

    def delete(self):
        """Delete the pod.  Raises UserError DISTRIBUTED if it may still be there."""
        say(f"deleting {self.name}")
        words = "queued-resources", "delete", self.name, "--force"
        for n in range(20):
            with suppress(CloudError, UserError):  # a login may have run out meanwhile
                # Not at the first look: a pod whose creation Ctrl-C has cut off may appear late.
                if n and not self.state():
                    return
                self.call(*words)
                self.is_ours = False
            time.sleep(0 if self.dry_run else CLOUD_POLL)
        what = f"{self.name} may still be there, and cost money"
        raise UserError(DISTRIBUTED, what, shlex.join(self.gcloud(*words)))

    def make_ready(self) -> list[tuple[str, int]]:
        """(node, worker) of every machine, once all are there.  Raises CloudError."""
        workers, said, begin = [], None, time.monotonic()
        while (state := self.state()) != "ACTIVE":
            if state in DEAD:
                self.delete()
                raise CloudError(f"{self.name} was {state}")
            if not state:
                self.create()
                continue
            minutes = int(time.monotonic() - begin) // 60
            if (state, minutes) != said:
                say(f"{self.name} is {state} after {minutes} min")
            said = state, minutes
            time.sleep(CLOUD_POLL)
        for node in self.nodes:
            what = "--format=value(state,networkEndpoints.len())"
            state = self.call("tpu-vm", "describe", node, what) or "GONE"
            if state.split()[0] in DEAD:
                self.delete()
            n = re.fullmatch(r"READY\s+([1-9]\d*)", state)
            if n is None:
                raise CloudError(f"{node} was {state}")
            workers += [(node, worker) for worker in range(int(n[1]))]
        return workers

    def run(self, workers: list, folder: str, command: list[str]) -> tuple[int, int]:
        """Run a command in a folder of all workers, see run_on_all.  If an earlier connection has
        left a command running on a machine, flock waits there until that has ended."""
        lock = ["flock", "-F", "-E", f"{INTERRUPTED}", "-w", "1000"]
        lock += [os.path.relpath("trifold.lock", folder)]
        words = [f"--command={remote(folder, [*lock, *command])}"]
        words += ["--ssh-flag=-oServerAliveInterval=15"]
        commands = {
            f"{node}, worker {n}": self.gcloud("tpu-vm", "ssh", node, f"--worker={n}", *words)
            for node, n in workers
        }
        return run_on_all(commands, self.dry_run)

    def train(self, archive: str) -> tuple[int, int]:
        """Make the pod ready where it is not, and run the command on all of its machines."""
        workers = self.make_ready()
        say(f"installing on {len(workers)} workers")
        for node in self.nodes:
            self.call("tpu-vm", "scp", archive, f"{node}:trifold.tgz", "--worker=all")
        if self.run(workers, ".", ["bash", "-c", SETUP])[0]:
            raise CloudError("the installation failed")
        say(f"starting {shlex.join(self.command)}")
        return self.run(workers, "trifold", self.command)

    def train_with_restarts(self, archive: str) -> int:
        """Train until train.py ends with a code that is not in TEMPORARY, or too many restarts in a
        row have made no new update."""
        tries, reached = 0, 0
        while True:
            try:
                code, update = self.train(archive)
            except CloudError as e:
                say(str(e))
                code, update = DISTRIBUTED, 0
            tries = 1 if update > reached else tries + 1
            reached = max(reached, update)
            if code not in TEMPORARY:
                return code
            if tries > self.restarts:
                say(f"{self.restarts} restarts in a row have made no new update")
                return code
            wait = min(60, FIRST_WAIT * 2 ** (tries - 1))
            say(f"try {tries} of at most {self.restarts} without a new update, in {wait} s")
            time.sleep(wait)

    def launch(self) -> int:
        with tempfile.TemporaryDirectory() as folder:
            archive = write_archive(f"{folder}/trifold.tgz")
            try:
                state = self.state()
            except CloudError as e:
                raise UserError(DISTRIBUTED, str(e), "run the command again") from None
            if state:
                text = f"{self.name} exists ({state}): it is used, and not deleted at the end, "
                say(text + "unless it was preempted and is made anew")
                words = ["--type", self.type, *["--spot"] * self.spot, *self.extra]
                say(f"these flags take effect only if it is made anew: {shlex.join(words)}")
            try:
                return self.train_with_restarts(archive)
            finally:
                if self.is_ours and not self.keep:
                    ignore_stops()
                    self.delete()


def write_archive(path: str) -> str:
    """An archive of what git tracks, as it is in the folder.  Raises UserError USAGE."""
    try:
        options = dict(cwd=ROOT, check=True, text=True, capture_output=True)
        commit = subprocess.run(["git", "stash", "create"], **options).stdout.strip() or "HEAD"
        subprocess.run(["git", "archive", "-o", path, commit], **options)
    except (OSError, subprocess.CalledProcessError) as e:  # OSError: there is no git
        lines = str(getattr(e, "stderr", e)).strip().splitlines()
        what = f"{ROOT}: {(lines or ['git failed'])[-1]}; what git tracks is copied to the pod"
        raise UserError(USAGE, what, "clone Trifold with git, and tell git your name") from None
    return path


# ---- Slurm

# JAX finds the other processes by Slurm's variables, and gives each one GPU.  USR1 comes 300 s
# before the time limit, to this shell only.  It sends train.py SIGTERM by scancel, because srun
# would kill it.  If a user has cancelled the job, it is no longer RUNNING, and is not queued again.
# Nor is it if the limit is below those 300 s, because each start would be warned as it begins.
SBATCH = """#!/bin/bash
#SBATCH --job-name=trifold
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
#SBATCH --gpus-per-node={gpus}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
left=
trap '[ $SECONDS -gt 60 ] || left=$(squeue -h -j $SLURM_JOB_ID -o %L)
  scancel --signal=TERM $SLURM_JOB_ID' USR1
trap : TERM
srun --cpu-bind=none {command} &
srun=$!
while kill -0 $srun 2>/dev/null; do wait $srun; done
wait $srun; code=$?
state=$(squeue -h -j $SLURM_JOB_ID -o %T)
if [ $code = {again} ] && [ "$state" = RUNNING ]; then
  case $left in
    ?:??) echo "error: the warning came as the job began, with $left of its time limit left
  fix: give a longer --time, or a later warning: --signal=B:USR1@60" >&2;;
    *) scontrol requeue $SLURM_JOB_ID;;
  esac
fi
exit $code
"""


@dataclass
class Slurm:
    """Submit a job that is queued again each time it was interrupted."""

    nodes: int
    """Number of nodes."""
    gpus: int
    """GPUs of each node, with a process for each; 0 for one process on CPUs."""
    dry_run: Flag = False
    """Only print the job."""

    tool = "sbatch"

    def problems(self) -> list[Problem]:
        return too_low(self, nodes=1, gpus=0)

    def launch(self) -> int:
        words = dict(nodes=self.nodes, gpus=self.gpus, tasks=max(1, self.gpus), again=INTERRUPTED)
        script = SBATCH.format(command=shlex.join(self.command), **words)
        if self.dry_run:
            print(f"{shlex.join(['sbatch', *self.extra])} <<'END'\n{script}END")
            return 0
        if subprocess.run(["sbatch", *self.extra], input=script, text=True).returncode:
            fix = "correct the flags, or see with sinfo what the cluster has"
            raise UserError(USAGE, "sbatch has refused the job; its message is above", fix)
        return 0


# ---- bare machines


@dataclass
class Ssh:
    """Train on hosts, one process on each, until train.py ends."""

    hosts: tyro.conf.Positional[Path]
    """A file with HOST or USER@HOST in each line; the first one gets process 0."""
    folder: str = os.getcwd()
    """Trifold's folder on the hosts."""
    port: int = 8476
    """Where the processes meet on the first host."""
    ssh: str = "ssh"
    """The ssh program and its options, as one word: --ssh 'ssh -p 2222'."""
    dry_run: Flag = False
    """Only print the commands."""

    @property
    def ssh_words(self) -> list[str]:
        """The program and its options; none where --ssh does not begin with a program."""
        try:
            words = shlex.split(self.ssh)
        except ValueError:  # a quotation mark without its second one
            return []
        return words if words and re.match("[^-]", words[0]) else []

    @property
    def tool(self) -> str:
        return next(iter(self.ssh_words), "ssh")

    def problems(self) -> list[Problem]:
        return problems_with(
            self,
            # The folder is quoted, so a host would take ~ for a name.
            folder=(re.match("[^~]", self.folder), "Trifold's folder on the hosts, without ~"),
            port=(0 < self.port < 65536, "a number from 1 to 65535"),
            ssh=(self.ssh_words, "a program and its options, such as 'ssh -p 2222'"),
        )

    def read_hosts(self) -> list[str]:
        """The words of the file of hosts, without comments.  Raises UserError USAGE."""
        try:
            hosts = re.sub("#.*", "", self.hosts.read_text("utf-8-sig")).split()
        except (OSError, ValueError) as e:
            what = f"{self.hosts} cannot be read: {e}"
            raise UserError(USAGE, what, "name a file of hosts, one a line") from None
        wrong = [host for host in hosts if not re.fullmatch(r"(\w[\w.-]*@)?\w[\w.-]*", host)]
        if wrong or not hosts:
            what = f"{self.hosts} has {wrong or 'no host'}"
            fix = "write HOST or USER@HOST, one a line; a port goes into --ssh 'ssh -p PORT'"
            raise UserError(USAGE, what, fix)
        return hosts

    def launch(self) -> int:
        hosts, commands = self.read_hosts(), {}
        names = [host.rpartition("@")[2] for host in hosts]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            what = f"{self.hosts} names hosts more than once: {', '.join(twice)}"
            say(f"{what}; each process takes all devices of its host")
        place = ["--run.coordinator", f"{names[0]}:{self.port}"]
        place += ["--run.num_processes", f"{len(hosts)}", "--run.process_id"]
        for n, host in enumerate(hosts):
            ssh = [*self.ssh_words, "-oBatchMode=yes", "-oServerAliveInterval=15", host]
            words = remote(self.folder, [*self.command, *place, f"{n}"])
            commands[f"process {n} on {host}"] = [*ssh, words]
        return run_on_all(commands, self.dry_run)[0]


# ---- the command line


def parse(words: list[str]) -> Tpu | Slurm | Ssh:
    """The checked command line, with two more fields: `command`, the words after --, and `extra`,
    the flags that --help does not list.  Raises UserError USAGE."""
    end = words.index("--") if "--" in words else len(words)
    args, extra = read_args(Tpu | Slurm | Ssh, __doc__, args=words[:end], return_unknown_args=True)
    args.command, args.extra, found = words[end + 1 :], extra, args.problems()
    if not args.command:
        found.append(Problem("no command", "end with -- python train.py --config NAME"))
    if "--fresh" in args.command and not isinstance(args, Ssh):
        fix = "leave it out, and choose another --run.name or move the old run"
        found.append(Problem("--fresh would start the run over at each restart", fix))
    own = [field.name for field in fields(args)]
    for before, word in zip(["", *args.extra], args.extra, strict=False):
        # A flag of launch.py that is misspelt, or stands before the name of the subcommand.
        close = get_close_matches(word.partition("=")[0].removeprefix("--"), own, 1, 0.8)
        if isinstance(args, Ssh) or close or not re.match("--[a-z]", word):
            fix = "see --help; give its flags after tpu, slurm or ssh, others as --flag=value"
            fix = f"give --{close[0]} after tpu, slurm or ssh" if close else fix
            if before.startswith("--") and not word.startswith("-"):
                fix = f"write it as {before}={word}"
            found.append(Problem(f"{word!r} is unknown", fix))
        if isinstance(args, Tpu) and re.match("--(project|configuration)(=|$)", word):
            what = f"{word!r} would make the pod where it is neither used nor deleted"
            fix = "set CLOUDSDK_CORE_PROJECT or CLOUDSDK_ACTIVE_CONFIG_NAME in the environment"
            found.append(Problem(what, fix))
    if not args.dry_run and not shutil.which(args.tool):
        fix = f"install {args.tool}, or see with --dry_run what it would do"
        found.append(Problem(f"{args.tool} is not installed here", fix))
    errors.raise_problems(USAGE, found)
    return args


def interrupt(number, frame):
    """The handler of SIGINT, SIGTERM and SIGHUP.  At a terminal, the first Ctrl-C asks first."""
    if number == signal.SIGHUP:
        leave_terminal()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C means yes
    if number == signal.SIGINT and sys.stdin.isatty():
        os.write(2, b"\nlaunch: stop and clean up? [y/N] ")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            signal.signal(signal.SIGINT, interrupt)
            return
    say("stopping; Ctrl-C again does not wait until train.py has saved")
    raise KeyboardInterrupt


def main():
    args = parse(sys.argv[1:])
    # What a shell script starts with & ignores Ctrl-C, which is meant for other processes.
    handle_stops(interrupt, stay_ignored=STOPS)
    sys.exit(args.launch())


if __name__ == "__main__":
    quit_on_error(main)
