"""What tests/test_launch.py puts on PATH as gcloud: a cloud in the folder FAKE_CLOUD.

Its machines are folders with real processes: a machine's home is machines/NODE-WORKER.  Of the two
files for tests, `fails` has {verb: calls that are to fail}, and `calls` has every command line.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

CLOUD = Path(os.environ.get("FAKE_CLOUD", ""))
COMING = dict(WAITING_FOR_RESOURCES="PROVISIONING", PROVISIONING="ACTIVE")
PYTHON = """#!/bin/sh
echo "python3 $*" >> ~/installed
case "$*" in *"uv venv"*) mkdir -p .venv/bin; cp ~/bin/venv_python .venv/bin/python;; esac
"""
VENV_PYTHON = f"""#!/bin/sh
[ "$1 $2" = "-m pip" ] || exec {sys.executable} "$@"
echo "venv python $*" >> ~/installed
"""


def read(name: str, default):
    path = CLOUD / name
    return json.loads(path.read_text()) if path.exists() else default


def write(name: str, value):
    part = CLOUD / f"{name}.{os.getpid()}"
    part.write_text(json.dumps(value))
    part.replace(CLOUD / name)


def fail(code: str, text: str):
    print(f"ERROR: (gcloud.compute.tpus) {code}: {text}", file=sys.stderr)
    sys.exit(1)


def value(name: str, default: str = "") -> str:
    """The value of a flag."""
    found = [word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}=")]
    return found[0] if found else default


def create():
    if value("network"):
        fail(value("network"), "as this network is called")
    if read("pod", None):
        fail("ALREADY_EXISTS", "the resource exists")
    node, n = value("node-id"), int(value("node-count", "1"))
    nodes = [node] if node else [f"{value('node-prefix')}-{i}" for i in range(n)]
    pod = dict(state="WAITING_FOR_RESOURCES", nodes=nodes, workers=2 // n)
    for node in nodes:
        for worker in range(2 // n):
            binaries = CLOUD / "machines" / f"{node}-{worker}" / "bin"
            binaries.mkdir(parents=True, exist_ok=True)
            for name, text in dict(python3=PYTHON, venv_python=VENV_PYTHON).items():
                (binaries / name).write_text(text)
                (binaries / name).chmod(0o700)
    write("pod", pod)


def describe(group: str, pod: dict | None):
    if not pod:
        fail("NOT_FOUND", "there is no such resource")
    if group == "tpu-vm":
        return print("READY", pod["workers"], sep="\t")
    print(pod["state"])
    if pod["state"] in COMING:
        write("pod", pod | dict(state=COMING[pod["state"]]))


def machines(pod: dict) -> list[Path]:
    names = [f"{node}-{worker}" for node in pod["nodes"] for worker in range(pod["workers"])]
    return [CLOUD / "machines" / name for name in names]


def kill(machine: Path):
    """Everything that runs on a machine."""
    for file in machine.glob("process-*"):
        with suppress(ProcessLookupError):
            os.killpg(int(file.name.split("-")[1]), signal.SIGKILL)
        file.unlink(missing_ok=True)


def delete(pod: dict | None):
    if not pod:
        fail("NOT_FOUND", "there is no such resource")
    for machine in machines(pod):
        kill(machine)
        machine.rename(CLOUD / f"deleted-{machine.name}-{os.getpid()}")
    (CLOUD / "pod").unlink()


def copy(pod: dict):
    source, target = sys.argv[5:7]
    node, _, name = target.partition(":")
    for machine in machines(pod):
        if machine.name.rpartition("-")[0] == node:
            (machine / name).write_bytes(Path(source).read_bytes())


def ssh(pod: dict):
    """Run the command as sshd would, with variables by which JAX finds the other workers."""
    machine = CLOUD / "machines" / f"{sys.argv[5]}-{value('worker')}"
    number, count = machines(pod).index(machine), len(machines(pod))
    own = dict(HOME=str(machine), PATH=f"{machine}/bin:/usr/bin:/bin")
    own |= dict(SLURM_JOB_ID=os.environ["FAKE_JOB"], SLURM_STEP_NODELIST="127.0.0.1")
    own |= dict(SLURM_NTASKS=str(count), SLURM_PROCID=str(number), SLURM_LOCALID="0")
    env = {
        name: x for name, x in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "NPROC")
    }
    options = dict(cwd=machine, env=env | own, start_new_session=True)
    process = subprocess.Popen(["bash", "-c", value("command")], **options)
    (machine / f"process-{process.pid}").touch()
    code = process.wait()
    (machine / f"process-{process.pid}").unlink(missing_ok=True)
    if code < 0:
        print("client_loop: send disconnect: Broken pipe", file=sys.stderr)
        sys.exit(255)
    sys.exit(code)


def main():
    with (CLOUD / "calls").open("a") as calls:
        print(json.dumps(sys.argv[1:]), file=calls)
    assert sys.argv[1:3] == ["compute", "tpus"], sys.argv
    group, verb = sys.argv[3:5]
    fails, pod = read("fails", {}), read("pod", None)
    if fails.get(verb, 0) > 0:
        write("fails", fails | {verb: fails[verb] - 1})
        fail("UNAVAILABLE", "the service does not answer")
    if verb == "create":
        create()
    elif verb == "describe":
        describe(group, pod)
    elif verb == "delete":
        delete(pod)
    elif not pod or pod["state"] != "ACTIVE":
        fail("FAILED_PRECONDITION", "the node is not there")
    else:
        dict(scp=copy, ssh=ssh)[verb](pod)


if __name__ == "__main__":
    main()
