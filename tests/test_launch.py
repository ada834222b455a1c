"""scripts/launch.py: on a cloud that tests/fake_gcloud.py plays, and with the real Slurm, Open MPI
and ssh where they are installed.  All machines are processes of this one, all traffic is loopback.
"""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import fake_gcloud
import pytest
from conftest import ROOT
from runs import finish, flags, free_port, losses, rows, start_two, wait_for_step

import config
from errors import CHECKPOINT, DATA, INTERRUPTED, USAGE
from scripts.launch import CloudError, Tpu, remote

# Looks often at what in a real cloud takes minutes.
DRIVER = """import sys
sys.path.insert(0, 'scripts')
import launch
launch.CLOUD_POLL = launch.FIRST_WAIT = launch.POLL = 0.1
launch.GRACE = 20
launch.quit_on_error(launch.main)"""
POD = ["tpu", "pod", "--type", "v5p-16", "--zone", "us-east5-a"]


@pytest.fixture(scope="module")
def two(base, tmp_path_factory) -> config.Config:
    """40 updates on two devices, with many checkpoints."""
    return replace(
        base,
        run=replace(base.run, name="undisturbed", dir=str(tmp_path_factory.mktemp("launched"))),
        mesh=config.Mesh(-1, 1, 1),
        train=replace(base.train, steps=40, eval_every=0, eval_batches=1),
        checkpoint=replace(base.checkpoint, every=4),
    )


@pytest.fixture(scope="module")
def undisturbed(two) -> list[str]:
    """The losses of that run without a fault."""
    for process in start_two(two):
        code, _, err = finish(process)
        assert code == 0, err
    return losses(Path(two.run.dir) / two.run.name)


def named(cfg: config.Config, name: str) -> tuple[config.Config, Path]:
    return replace(cfg, run=replace(cfg.run, name=name)), Path(cfg.run.dir) / name


def train_words(cfg: config.Config, *more) -> list[str]:
    return ["--config", "tiny", *flags(cfg, *more)]


def plain_env(**more) -> dict:
    """This process's environment without what conftest.py says about devices."""
    names = ("JAX_NUM_CPU_DEVICES", "NPROC")
    return {name: x for name, x in os.environ.items() if name not in names} | more


def default_signals():
    """What tests under nohup, which ignore some signals, do not hand on to launch.py."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def launch(*words, cwd=ROOT, **kwargs) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, *map(str, words)]
    options = dict(stdin=subprocess.DEVNULL, text=True, cwd=cwd, preexec_fn=default_signals)
    options |= kwargs
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, **pipes, **options)


def need(*tools: str):
    """Skip the test where a tool is not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [tool for tool in tools if not shutil.which(tool, path=path)]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed; `make test-launch` says how")


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- the command line


def test_what_launches_does_not_import_jax():
    code = "import sys; sys.path.insert(0, 'scripts'); import launch; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert not {"jax", "jaxlib", "numpy", "etils"} & set(done.stdout.split()), done.stderr


@pytest.mark.parametrize("words, problems", [
    ([*POD], ["no command"]),
    ([*POD, "--network", "mine", "--", "a"],
     ["'mine' is unknown\n  fix: write it as --network=mine"]),
    (["--dry_run", *POD, "--", "a"], ["'--dry_run' is unknown"]),
    ([*POD, "--dryrun", "--restart=5", "--", "a"],
     ["'--dryrun' is unknown\n  fix: give --dry_run", "'--restart=5' is unknown"]),
    ([*POD, "--project=mine", "--configuration=x", "--", "a"],
     ["'--project=mine' would make the pod where", "'--configuration=x' would make the pod where"]),
    ([*POD, "--restarts", "-1", "--", "a"], ["restarts cannot be -1"]),
    (["tpu", "-pod;rm", "--type", "v5p-16", "--zone", "us-east5-a", "--", "a"], None),
    (["tpu", "my pod", "--type", "v9-16", "--zone", "a b", "--slices", "0", "--", "a"],
     ["name cannot be 'my pod'", "type cannot be 'v9-16'", "zone cannot be", "slices cannot be"]),
    ([*POD, "--", "python", "train.py", "--fresh"], ["--fresh would start the run over"]),
    (["slurm", "--nodes", "1", "--gpus", "1", "--dry_run", "--", "python", "train.py", "--fresh"],
     ["--fresh would start the run over"]),
    (["ssh", "hosts", "--quick", "--", "a"], ["'--quick' is unknown"]),
    (["ssh", "hosts", "--folder", "", "--port", "0", "--ssh", "", "--", "a"],
     ["folder cannot be ''", "port cannot be 0", "ssh cannot be ''"]),
    (["ssh", "hosts", "--port", "65536", "--ssh", "ssh '", "--", "a"],
     ["port cannot be 65536", "ssh cannot be \"ssh '\""]),
    (["ssh", "hosts", "--ssh=-p 22", "--", "a"], ["ssh cannot be '-p 22'"]),
    (["ssh", "hosts", "--ssh='' -p 22", "--", "a"], ["ssh cannot be \"'' -p 22\""]),
    (["ssh", "hosts", "--folder=~/trifold", "--", "a"], ["folder cannot be '~/trifold'"]),
], ids=str)  # fmt: skip
def test_mistakes_are_told_before_anything_is_done(words, problems, tmp_path):
    """With a gcloud that would fail."""
    (tmp_path / "gcloud").symlink_to("/bin/false")
    code, out, err = finish(launch(*words, env=plain_env(PATH=f"{tmp_path}:{os.environ['PATH']}")))
    assert code == USAGE and out == "" and "Traceback" not in err
    if problems is not None:
        assert [p for p in problems if p not in err] == [] and err.count("error:") == len(problems)


@pytest.mark.parametrize("tool, words", [
    ("gcloud", POD), ("sbatch", ["slurm", "--nodes", "2", "--gpus", "8"]),
    ("ssh", ["ssh", "hosts"]), ("no_ssh", ["ssh", "hosts", "--ssh", "no_ssh -p 22"]),
])  # fmt: skip
def test_a_missing_tool_is_named_in_two_lines(tool, words, tmp_path):
    code, _, err = finish(launch(*words, "--", "a", env=plain_env(PATH=str(tmp_path))))
    assert code == USAGE and err.startswith(f"error: {tool} is not installed here\n  fix: ")
    assert err.count("\n") == 2


def test_a_job_that_sbatch_refuses_is_a_mistake_of_the_user(tmp_path):
    (tmp_path / "sbatch").symlink_to("/bin/false")
    words = ["slurm", "--nodes", 1, "--gpus", 0, "--partition=none", "--", "a"]
    code, _, err = finish(launch(*words, env=plain_env(PATH=str(tmp_path))))
    assert code == USAGE and err.startswith("error: sbatch has refused the job") and "fix" in err


def test_hosts_that_are_options_are_refused(tmp_path):
    hosts = tmp_path / "hosts"
    for text in ("", "# none\n", "good\n-oProxyCommand=touch${IFS}x\n", "a;b"):
        hosts.write_text(text)
        code, out, err = finish(launch("ssh", hosts, "--dry_run", "--", "a"))
        assert code == USAGE and out == "" and err.startswith(f"error: {hosts} has"), err


def test_a_host_that_appears_twice_is_told(tmp_path):
    (tmp_path / "hosts").write_text("me@a\nb\na\nc\n", encoding="utf-8-sig")  # as Windows does
    code, out, err = finish(launch("ssh", tmp_path / "hosts", "--dry_run", "--", "x"))
    assert code == 0 and "names hosts more than once: a;" in err and out.count("BatchMode") == 4


def test_without_git_a_pod_is_not_asked_for(tmp_path):
    words = [*POD, "--dry_run", "--", "a"]
    code, out, err = finish(launch(*words, env=plain_env(PATH=str(tmp_path))))
    assert (code, out) == (USAGE, "") and "clone Trifold with git" in err and err.count("\n") == 2


@pytest.mark.parametrize("answer", ["READY", "READY\t0", "CREATING\t", "CREATING\t4"])
def test_a_node_without_workers_is_asked_again(answer, monkeypatch):
    pod = Tpu("pod", "v5p-16", "us-east5-a")
    monkeypatch.setattr(pod, "call", lambda group, *_: answer if group == "tpu-vm" else "ACTIVE")
    with pytest.raises(CloudError, match="was CREATING|was READY"):
        pod.make_ready()


def test_zones_with_more_accelerators_than_others_have_longer_names():
    assert Tpu("pod", "v5p-16", "us-central1-ai1a").problems() == []


@pytest.fixture
def gcloud(tmp_path, monkeypatch) -> Path:
    """The file of a gcloud command, which a test is to write."""
    (tmp_path / "gcloud").touch(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "gcloud"


def test_a_pod_whose_state_is_not_told_is_there(gcloud):
    """Google's API leaves out a state that is not set."""
    gcloud.write_text("#!/bin/sh\necho\n")
    assert Tpu("pod", "v5p-16", "us-east5-a").state() == "UNKNOWN"


def test_a_gcloud_that_never_ends_is_ended_with_its_python(gcloud, tmp_path, monkeypatch):
    """It is a fault of the cloud.  As Google's script, this one runs another program."""
    pid = tmp_path / "pid"
    gcloud.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {pid}; wait\n")
    monkeypatch.setattr("scripts.launch.CLOUD_LIMIT", 3)
    with pytest.raises(CloudError, match="gcloud queued-resources describe did not end within"):
        Tpu("pod", "v5p-16", "us-east5-a").state()
    wait_until(lambda: not os.path.exists(f"/proc/{int(pid.read_text())}/exe"), 10)


def test_a_pod_that_shows_itself_late_is_deleted(monkeypatch):
    """As where Ctrl-C has cut off the command that creates it."""
    cloud, coming = dict(state=""), ["CREATING"]

    def call(group, verb, *_):
        if verb == "delete":
            cloud["state"] = ""
        return cloud["state"]

    pod = Tpu("pod", "v5p-16", "us-east5-a")
    monkeypatch.setattr(pod, "call", call)
    monkeypatch.setattr(time, "sleep", lambda _: coming and cloud.update(state=coming.pop()))
    pod.delete()
    assert coming == [] and cloud["state"] == ""


def test_a_host_file_that_cannot_be_read_and_numbers_below_zero_are_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    refused = [["ssh", tmp_path / name] for name in ("bytes", "none", ".")]
    refused += [["slurm", "--nodes", 0, "--gpus", 8], ["slurm", "--nodes", 2, "--gpus", -1]]
    for words in refused:
        code, out, err = finish(launch(*words, "--dry_run", "--", "a"))
        assert code == USAGE and out == "" and err.count("\n") == 2, err


def test_dry_run_prints_every_command_and_runs_none(tmp_path):
    """There is no gcloud on PATH.  Two slices, and an argument that a shell must not see."""
    git = shutil.which("git")
    (tmp_path / "git").symlink_to(git)
    words = [*POD, "--slices", 2, "--spot", "--reserved", "--network=mine", "--dry_run"]
    done = launch(
        *words, "--", "python", "train.py", "$(touch x)", env=plain_env(PATH=str(tmp_path))
    )
    code, out, err = finish(done)
    assert code == 0, err
    create = next(line for line in out.splitlines() if " create " in line)
    for word in ("--node-count=2", "--node-prefix=pod", "--accelerator-type=v5p-16", "--spot",
                 "--runtime-version=v2-alpha-tpuv5", "--zone=us-east5-a", "--reserved",
                 "--network=mine"):  # fmt: skip
        assert f" {word}" in create
    verbs = [line.split()[4] for line in out.splitlines() if line.startswith("gcloud")]
    order = [*dict.fromkeys(verbs)]
    assert order == ["describe", "create", "scp", "ssh", "delete"] and verbs.count("ssh") == 4
    assert "--require-hashes -r requirements.txt" in out and '"jax[tpu]"' in out
    code, out, _ = finish(launch(*words, "--keep", "--", "a", env=plain_env(PATH=str(tmp_path))))
    assert code == 0 and " delete " not in out


# ---- a cloud


@pytest.fixture
def tree(tmp_path) -> Path:
    """A git checkout with a change that is not committed and a file that is not tracked."""
    folder = tmp_path / "tree"
    (folder / "scripts").mkdir(parents=True)
    for path in [*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py"), ROOT / "requirements.txt"]:
        shutil.copy(path, folder / path.relative_to(ROOT))
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", "-C", folder]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    (folder / "secret.txt").write_text("not tracked")
    with (folder / "train.py").open("a") as file:
        file.write("# not committed\n")
    return folder


class Cloud:
    def __init__(self, folder: Path, tree: Path):
        self.folder, self.tree = folder, tree
        (folder / "bin").mkdir(parents=True)
        gcloud = folder / "bin" / "gcloud"
        gcloud.write_text(f'#!/bin/sh\nexec {sys.executable} {fake_gcloud.__file__} "$@"\n')
        gcloud.chmod(0o700)
        fake_gcloud.CLOUD = folder
        self.pod = lambda: fake_gcloud.read("pod", {})

    def launch(self, *words, **kwargs) -> subprocess.Popen:
        # JAX makes its port from the job's number.
        job = free_port() - 61440 if (port := free_port()) < 61440 else port - 61440
        env = plain_env(FAKE_CLOUD=str(self.folder), FAKE_JOB=str(job % 4096))
        env["PATH"] = f"{self.folder}/bin:{env['PATH']}"
        return launch(*words, cwd=self.tree, env=env, **kwargs)

    def calls(self, verb: str) -> list[list[str]]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [words for words in map(json.loads, lines) if words[3] == verb]

    def preempt(self):
        fake_gcloud.write("pod", self.pod() | dict(state="SUSPENDED"))
        for machine in fake_gcloud.machines(self.pod()):
            fake_gcloud.kill(machine)

    def is_empty(self) -> bool:
        return self.pod() == {} and not list(self.folder.glob("machines/*/process-*"))


@pytest.fixture
def cloud(tmp_path, tree):
    cloud = Cloud(tmp_path / "cloud", tree)
    yield cloud
    if cloud.pod():
        for machine in fake_gcloud.machines(cloud.pod()):
            fake_gcloud.kill(machine)


@pytest.mark.slow
def test_a_pod_trains_as_if_undisturbed_through_every_fault(two, undisturbed, cloud):
    """Creating and copying fail once, the pod is preempted three times, and a worker is lost."""
    cfg, run = named(two, "pod")
    fake_gcloud.write("fails", dict(create=1, scp=1))
    process = cloud.launch(*POD, "--spot", "--", "python", "train.py", *train_words(cfg))
    for step in (6, 14, 22):
        wait_for_step(process, run, step)
        cloud.preempt()
    wait_for_step(process, run, 30)
    fake_gcloud.kill(fake_gcloud.machines(cloud.pod())[1])
    code, out, err = finish(process)
    assert code == 0, err[-3000:]
    assert losses(run) == undisturbed
    assert cloud.is_empty() and len(cloud.calls("create")) == 5  # one of them failed
    assert all("--spot" in words for words in cloud.calls("create"))
    assert err.count("was SUSPENDED") == 3
    assert "pod, worker 1 was lost; its last lines" in err
    assert out.count("update 40/40") == 1  # of process 0 alone
    # The lost worker's pod was used again, with the environment that it had.
    assert [text.read_text().count("-r req") for text in cloud.folder.glob("*/installed")] == 8 * [
        1
    ]


@pytest.mark.slow
def test_what_the_workers_get_is_what_git_tracks_and_the_lock_file(two, cloud):
    """Two slices of one worker; kept at the end, then used again and still kept."""
    cfg, run = named(two, "slices")
    words = [*POD, "--slices", "2", "--", "python", "train.py"]
    cfg = replace(cfg, train=replace(cfg.train, steps=3))
    code, _, err = finish(cloud.launch(*words[:-3], "--keep", *words[-3:], *train_words(cfg)))
    assert code == 0 and len(rows(run)) == 3, err
    assert cloud.pod()["nodes"] == ["pod-0", "pod-1"] and not list(
        cloud.folder.glob("machines/*/process-*")
    )
    for machine in fake_gcloud.machines(cloud.pod()):
        tree = machine / "trifold"
        assert (tree / "train.py").read_bytes() == (cloud.tree / "train.py").read_bytes()
        assert not (tree / "secret.txt").exists()
        installed = (machine / "installed").read_text()
        assert "--require-hashes -r requirements.txt" in installed and "jax[tpu]" in installed
    before = installed
    # A mistake of the user ends it at the first try.
    cfg = replace(cfg, optim=replace(cfg.optim, lr=0.5), train=replace(cfg.train, steps=5))
    code, _, err = finish(cloud.launch(*words, *train_words(cfg)))
    assert code == CHECKPOINT and "optim.lr" in err and "start 1 of" not in err
    assert "not deleted at the end" in err and cloud.pod() and cloud.calls("delete") == []
    assert (machine / "installed").read_text() == before


def test_nothing_waits_to_kill_a_process_that_has_ended(tmp_path):
    """Where the connection is lost, and with it what the echo is written to."""
    reader, writer = os.pipe()
    command = ["bash", "-c", remote(str(tmp_path), ["sleep", "60"])]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer)
    os.close(reader)
    os.close(writer)
    process.wait(timeout=20)
    wait_until(lambda: subprocess.run(["pgrep", "-f", tmp_path]).returncode == 1, 5)


SLEEPER = """import pathlib, signal, sys, time
def end(*_):
    pathlib.Path('saved').touch()
    print('saved', flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
print('update 1/9', flush=True)
time.sleep(60)
"""


def machine_files(cloud: Cloud, name: str) -> list[Path]:
    return [
        *cloud.folder.glob(f"*/*/trifold/{name}"),
        *cloud.folder.glob(f"deleted-*/trifold/{name}"),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_every_worker_save_and_deletes_the_pod(cloud, number):
    process = cloud.launch(*POD, "--", "python", "-c", SLEEPER)
    assert process.stdout.readline() == "update 1/9\n"
    wait_until(lambda: len(list(cloud.folder.glob("machines/*/process-*"))) == 2)
    time.sleep(1)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == INTERRUPTED and len(machine_files(cloud, "saved")) == 2, err
    assert cloud.is_empty() and len(cloud.calls("create")) == 1


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_pod_is_deleted_where_nothing_can_be_printed(cloud, number):
    """Because the terminal was closed, or Ctrl-C has ended `| tee` too."""
    process = cloud.launch(*POD, "--", "python", "-c", SLEEPER)
    assert process.stdout.readline() == "update 1/9\n"
    wait_until(lambda: len(list(cloud.folder.glob("machines/*/process-*"))) == 2)
    time.sleep(1)
    process.stdout.close()
    process.stderr.close()
    process.send_signal(number)
    process.wait(timeout=120)
    assert cloud.is_empty() and len(machine_files(cloud, "saved")) == 2


def test_ctrl_c_before_there_is_a_pod_leaves_none(cloud):
    fake_gcloud.write("fails", dict(describe=0))
    process = cloud.launch(*POD, "--", "python", "-c", SLEEPER)
    wait_until(cloud.pod)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == INTERRUPTED and cloud.is_empty()


def test_ctrl_c_for_the_script_that_has_started_it_in_the_background_is_ignored(cloud):
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)  # as shells do
    process = cloud.launch(*POD, "--", "python", "-c", SLEEPER, preexec_fn=ignore)
    assert process.stdout.readline() == "update 1/9\n"
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None and cloud.pod()
    process.terminate()
    assert finish(process)[0] == INTERRUPTED and cloud.is_empty()


def read_question(process: subprocess.Popen):
    """Wait until Ctrl-C has been answered with a question."""
    said = ""
    while not said.endswith("[y/N] "):
        character = process.stderr.read(1)
        assert character, said
        said += character


@pytest.mark.parametrize("yes", ["y", "Ctrl-C"])
def test_ctrl_c_asks_once_at_a_terminal(cloud, yes):
    ours, theirs = pty.openpty()
    process = cloud.launch(*POD, "--", "python", "-c", SLEEPER, stdin=theirs)
    assert process.stdout.readline() == "update 1/9\n"
    os.write(ours, b"n\n")
    process.send_signal(signal.SIGINT)
    read_question(process)
    time.sleep(1)
    assert process.poll() is None and cloud.pod()
    if yes == "y":
        os.write(ours, b"y\n")
    process.send_signal(signal.SIGINT)
    read_question(process)
    if yes == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == INTERRUPTED and "[y/N]" not in err and cloud.is_empty()
    assert len(machine_files(cloud, "saved")) == 2


def test_the_end_of_what_launches_ends_the_workers(cloud):
    """Killed, it cannot delete the pod; the next launch finds it, and no one trains on it."""
    process = cloud.launch(*POD, "--", "python", "-c", SLEEPER)
    assert process.stdout.readline() == "update 1/9\n"
    time.sleep(1)
    process.kill()
    process.wait()
    wait_until(lambda: len(machine_files(cloud, "saved")) == 2)
    words = [*POD, "--spot", "--network=mine", "--", "python", "-c", "print('again')"]
    code, _, err = finish(cloud.launch(*words))
    assert code == 0 and "pod exists (ACTIVE)" in err
    assert "only if it is made anew: --type v5p-16 --spot --network=mine\n" in err


@pytest.mark.parametrize("code, starts", [
    (1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (7, 3), (9, 3), (75, 3), (137, 3),
])  # fmt: skip
def test_a_start_follows_the_codes_that_pass_and_no_others(cloud, code, starts):
    """Each worker but one ends with 7, as it does when it has lost another.  What they print last
    does not end with a line break."""
    which = f"{code} if os.environ['SLURM_PROCID'] == '1' else 7"
    program = f"import os, sys; print('begin', end=''); sys.exit({which})"
    words = [*POD, "--restarts", "2", "--", "python", "-c", program]
    ended, out, err = finish(cloud.launch(*words))
    assert ended == (7 if code in (9, 75, 137) else code), err
    assert out.count("begin") == starts and cloud.is_empty()
    assert f"pod, worker 1 ended with exit code {code}; its last lines:\nbegin" in err


NO_FLAG = "unrecognized arguments: --nix\n\nFor help, run:\n\n  gcloud help -- X\n\nor ask"


@pytest.mark.parametrize("error", ["PERMISSION_DENIED", "ALREADY_EXISTS", NO_FLAG])
def test_what_gcloud_will_never_do_ends_it_at_once(cloud, error):
    """Nothing is deleted: a pod that exists is another's."""
    code, _, err = finish(cloud.launch(*POD, f"--network={error}", "--", "a"))
    assert code == USAGE and error.partition("\n")[0] in err and err.count("\n") == 3
    assert len(cloud.calls("create")) == 1 and cloud.calls("delete") == []


def test_a_cloud_that_does_not_answer_at_first_is_told_in_two_lines(cloud):
    fake_gcloud.write("fails", dict(describe=1))
    code, _, err = finish(cloud.launch(*POD, "--", "a"))
    assert code == 7 and "Traceback" not in err
    assert "error: gcloud queued-resources describe" in err and "fix: run" in err
    assert cloud.calls("create") == []


def test_a_pod_that_cannot_be_deleted_is_named(cloud):
    fake_gcloud.write("fails", dict(delete=99))
    code, _, err = finish(cloud.launch(*POD, "--", "python", "-c", ""))
    assert code == 7 and "may still be there, and cost money" in err
    assert "fix: gcloud compute tpus queued-resources delete pod --force" in err


# ---- Open MPI


def processes_of(run: Path) -> list[int]:
    """The process numbers of train.py with that run's name, but not of what started them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            words = path.read_bytes().split(b"\0")
            is_train = len(words) > 1 and words[1].endswith(b"train.py")
            if is_train and f"--run.name={run.name}".encode() in words:
                found.append(int(path.parent.name))
    return sorted(found)


def stop_one(run: Path):
    """Send SIGTERM to one of a run's two processes: both are to save and end."""
    both = processes_of(run)
    assert len(both) == 2
    os.kill(both[1], signal.SIGTERM)


@pytest.mark.slow
def test_under_open_mpi_two_processes_find_each_other(two, undisturbed):
    need("mpirun")
    cfg, run = named(two, "mpi")
    env = plain_env(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    words = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", "2"]
    words += [sys.executable, str(ROOT / "train.py"), *train_words(cfg)]
    options = dict(env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(words, **options)
    try:
        wait_for_step(process, run, 10)
        stop_one(run)
        code, _, err = finish(process)
    finally:
        process.terminate()
    assert code == INTERRUPTED, err
    code, _, err = finish(subprocess.Popen(words, **options))
    assert code == 0 and losses(run) == undisturbed, err


# ---- ssh


def fake_ssh(folder: Path, text: str) -> list:
    """The words of a launch on one host with a shell script as ssh, whose last argument is the
    command."""
    folder.mkdir()
    (folder / "hosts").write_text("a")
    (folder / "ssh").write_text(f"#!/bin/sh\nfor last; do :; done\n{text}\n")
    (folder / "ssh").chmod(0o700)
    return ["ssh", folder / "hosts", "--ssh", f"'{folder}/ssh' -p 22", "--folder"]


def test_a_folder_that_a_host_lacks_is_told_in_two_lines(tmp_path):
    words = fake_ssh(tmp_path / "my bin", 'exec sh -c "$last"')
    code, out, err = finish(launch(*words, tmp_path / "no one's", "--", "true"))
    assert code == USAGE and out.count("\n") == 2 and "exit code 2" in err, err
    assert out.startswith(f"error: {tmp_path}/no one's is no folder on this host\n  fix: ")
    assert finish(launch(*words, tmp_path, "--", "true"))[0] == 0


def test_of_many_hosts_that_end_the_one_that_failed_is_shown_first(tmp_path):
    ends = 'case "$*" in *host70*) n=3;; *host7*) n=137;; *) n=7;; esac; echo ended; '
    words = fake_ssh(tmp_path / "bin", ends + "echo launch: exit code $n")
    (tmp_path / "bin" / "hosts").write_text("\n".join(f"host{n}" for n in range(80)))
    code, _, err = finish(launch(*words, tmp_path, "--", "true"))
    shown = [line for line in err.splitlines() if "its last lines" in line]
    assert code == DATA and "on host70 ended with exit code 3" in shown[0] and len(shown) == 8, err
    assert "on host7 ended with exit code 137" in shown[1]


def test_a_second_ctrl_c_ends_the_ssh_of_a_host_that_hangs(tmp_path):
    words = fake_ssh(tmp_path / "bin", "echo update 1/9; sleep 60")
    process = launch(*words, tmp_path, "--", "a")
    assert process.stdout.readline() == "update 1/9\n"
    for _ in range(2):
        time.sleep(1)
        process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == INTERRUPTED and "stopping" in err, err
    wait_until(lambda: subprocess.run(["pgrep", "-f", tmp_path]).returncode == 1, 5)


@pytest.fixture
def sshd(tmp_path):
    """ssh with its options, as one word, for a sshd of its own on the loopback."""
    need("sshd", "ssh", "ssh-keygen")
    for name in ("host", "user"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name]
        subprocess.run(make, check=True)
    port = free_port()
    settings = f"""Port {port}
ListenAddress 127.0.0.1
HostKey {tmp_path}/host
AuthorizedKeysFile {tmp_path}/user.pub
PidFile none
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
    (tmp_path / "sshd_config").write_text(settings)
    key = (tmp_path / "host.pub").read_text()
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}")
    privileges = Path("/run/sshd")  # root's sshd asks for it
    is_ours = os.getuid() == 0 and not privileges.exists()
    if is_ours:
        privileges.mkdir(mode=0o755)
    binary = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    log = (tmp_path / "sshd.log").open("w")
    server = subprocess.Popen([binary, "-D", "-e", "-f", tmp_path / "sshd_config"], stderr=log)
    options = ["-F", "none", "-p", port, "-i", tmp_path / "user", "-oIdentitiesOnly=yes"]
    command = f"ssh {' '.join(map(str, options))} -oUserKnownHostsFile={tmp_path}/known_hosts"
    try:
        test = [*command.split(), "127.0.0.1", "true"]
        wait_until(lambda: subprocess.run(test, capture_output=True).returncode == 0, 20)
        yield command
    finally:
        server.terminate()
        server.wait(20)
        log.close()
        if is_ours:
            privileges.rmdir()


@pytest.mark.slow
def test_over_ssh_two_hosts_train_stop_together_and_resume(two, undisturbed, sshd, tmp_path):
    """One process gets SIGTERM, then Ctrl-C stops both, and the same command finishes the run."""
    cfg, run = named(two, "ssh")
    (tmp_path / "hosts").write_text("127.0.0.1  # the first\n\n127.0.0.1\n")
    settings = {name: x for name, x in os.environ.items() if name.startswith(("JAX_", "XLA_"))}
    settings.pop("JAX_NUM_CPU_DEVICES", None)
    env = ["env", *(f"{name}={x}" for name, x in settings.items())]
    command = [*env, sys.executable, "train.py", *train_words(cfg)]
    words = ["ssh", tmp_path / "hosts", "--ssh", sshd, "--port", free_port(), "--", *command]
    process = launch(*words)
    wait_for_step(process, run, 10)
    stop_one(run)
    assert finish(process)[0] == INTERRUPTED
    process = launch(*words)
    wait_for_step(process, run, 25)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == INTERRUPTED and "stopping" in err and processes_of(run) == []
    assert len(rows(run)) < 40
    code, out, err = finish(launch(*words))
    assert code == 0 and losses(run) == undisturbed, err
    assert out.count("update 40/40") == 1
    # train.py's own code and words come through, and of both hosts.
    code, _, err = finish(launch(*words, "--optim.lr", "0.5", "--train.steps", "50"))
    assert code == CHECKPOINT and "on 127.0.0.1 ended with exit code 4; its last lines" in err
    assert "optim.lr" in err and processes_of(run) == []


# ---- Slurm


def slurm_settings(folder: Path) -> str:
    """slurm.conf of two nodes on this machine.  The first has a name that JAX can look up, in
    capitals because Slurm takes localhost for something else."""
    ports = [free_port() for _ in range(3)]
    nodes = [
        f"NodeName={name} NodeHostname={os.uname().nodename} NodeAddr=127.0.0.1 Port={port} CPUs=1"
        for name, port in zip(("LOCALHOST", "node2"), ports[1:], strict=True)
    ]
    return "\n".join([f"""ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=sched_interval=2
KillWait=60
MailProg=/bin/true
MpiDefault=none""", *nodes, "PartitionName=main Nodes=ALL Default=YES State=UP\n"])  # fmt: skip


@pytest.fixture
def slurm(tmp_path_factory, monkeypatch):
    """A Slurm of its own; its folder.  SLURM_CONF is set."""
    need("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
    if os.getuid() != 0:
        pytest.skip("slurmd can start jobs as root only")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # munge wants an open path to it
    folder.chmod(0o755)
    for name in ("state", "LOCALHOST", "node2", "munge"):
        (folder / name).mkdir(mode=0o755)
    (folder / "slurm.conf").write_text(slurm_settings(folder))
    cgroup = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n"  # none is used
    (folder / "cgroup.conf").write_text(cgroup)
    (folder / "munge/key").write_bytes(os.urandom(64))
    (folder / "munge/key").chmod(0o400)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
    munge = [f"--{flag}={folder}/munge/{name}" for flag, name in files.items()]
    monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/usr/sbin")
    daemons = []

    def start(*words: str):
        log = (folder / f"{words[0]}{len(daemons)}.log").open("w")
        options = dict(stdout=log, stderr=log, env=plain_env(), start_new_session=True)
        daemons.append(subprocess.Popen(words, **options))

    def is_idle():
        nodes = subprocess.run(["sinfo", "-h", "-o", "%D %t"], capture_output=True, text=True)
        return nodes.stdout.strip() == "2 idle"

    try:
        start("munged", "--foreground", *munge, f"--log-file={folder}/munge/log")
        wait_until((folder / "munge/socket").exists)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", "LOCALHOST")
        start("slurmd", "-D", "-N", "node2")
        wait_until(is_idle)
        yield folder
    finally:
        subprocess.run(["scancel", "--user=root"], capture_output=True)
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(folder)


def job_state(job: str) -> dict:
    """What scontrol says: {JobState: .., Restarts: ..}."""
    show = ["scontrol", "show", "job", job]
    text = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


@pytest.mark.parametrize("number, left, is_queued", [
    (signal.SIGUSR1, "4:33", False), (signal.SIGUSR1, "29:33", True), (signal.SIGTERM, "4:33", True)
])  # fmt: skip
def test_a_job_whose_limit_is_below_the_warnings_is_not_queued_again(
    number, left, is_queued, tmp_path
):
    """Each start would be warned as it begins.  Slurm's tools are played by others; SIGTERM is one
    from elsewhere to a process."""
    tools = dict(srun="trap 'exit 75' TERM; echo $$ > pid; while :; do sleep 0.1; done")
    tools |= dict(squeue=f"case $* in *%L*) echo {left};; *) echo RUNNING;; esac")
    tools |= dict(scancel="kill $(cat pid)", scontrol="touch queued")
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    words = ["slurm", "--nodes", 1, "--gpus", 0, "--dry_run", "--", "python", "train.py"]
    script = finish(launch(*words))[1].partition("<<'END'\n")[2].removesuffix("END\n")
    env = plain_env(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="1")
    options = dict(cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    job, pid = subprocess.Popen(["bash", "-c", script], **options), tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text())
    os.kill(job.pid if number == signal.SIGUSR1 else int(pid.read_text()), number)
    assert ("fix: give a longer --time" in job.communicate(timeout=60)[1]) != is_queued
    assert job.returncode == INTERRUPTED and (tmp_path / "queued").exists() == is_queued


@pytest.mark.slow
def test_under_slurm_a_job_comes_back_after_a_warning_and_not_after_scancel(
    two, undisturbed, slurm
):
    """The first start gets Slurm's warning, the second a SIGTERM to one process."""
    cfg, run = named(two, "slurm")
    out = slurm / "job.out"
    submit = ["slurm", "--nodes", 2, "--gpus", 0, f"--output={out}", "--time=30:00", "--"]
    train = [sys.executable, str(ROOT / "train.py")]
    code, printed, err = finish(launch(*submit, *train, *train_words(cfg), env=plain_env()))
    assert code == 0, err
    job = printed.split()[-1]
    queue = subprocess.Popen(["sleep", "300"])  # what wait_for_step looks at
    try:
        wait_for_step(queue, run, 8)
        subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
        wait_until(lambda: job_state(job)["Restarts"] == "1", 120)
        wait_for_step(queue, run, 24)
        stop_one(run)
        wait_until(lambda: job_state(job)["JobState"] == "COMPLETED", 180)
    finally:
        queue.kill()
        queue.wait()
    assert job_state(job)["Restarts"] == "2" and losses(run) == undisturbed, out.read_text()
    assert out.read_text().count("committed; run the same command again") == 2
    # scancel is for good, although train.py then ends with 75 too.
    cfg, run = named(replace(two, train=replace(two.train, steps=100_000)), "cancelled")
    code, printed, err = finish(launch(*submit, *train, *train_words(cfg), env=plain_env()))
    job, queue = printed.split()[-1], subprocess.Popen(["sleep", "300"])
    try:
        wait_for_step(queue, run, 3)
    finally:
        queue.kill()
        queue.wait()
    subprocess.run(["scancel", job], check=True)
    wait_until(lambda: job_state(job)["JobState"] == "CANCELLED" and not processes_of(run))
    time.sleep(10)
    assert job_state(job)["JobState"] == "CANCELLED" and job_state(job)["Restarts"] == "0"
