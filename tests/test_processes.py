"""How the processes of a run meet, agree, stop, hang and fail, with real ones on the loopback."""

import io
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from conftest import ROOT
from runs import finish, loss_curve, new_run, rows, start, start_two, wait_for_step

import cli
import config
import connect
import errors
import processes
import rundir
import signals
import train
import utils
from errors import DATA, DISTRIBUTED, HUNG, INTERRUPTED, USAGE, UserError

# ---- one process


@pytest.mark.parametrize(
    "ids, words",
    [
        ({1}, "process 1"),
        ({3, 1, 2}, "processes 1, 2 and 3"),
        (range(13), "processes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 3 more"),
    ],
    ids=str,
)
def test_processes_are_named_in_words(ids, words):
    assert connect.name_ids(ids) == words


def test_too_little_memory_is_two_lines_and_exit_2():
    main = "lambda cfg: jax.numpy.zeros(1 << 45).block_until_ready()"
    code = f"import config, jax, processes; processes.run_main({main}, config.tiny())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == USAGE and done.stderr.count("\n") == 2, done.stderr
    assert "memory is too small" in done.stderr and "140737488355328 bytes" in done.stderr


def test_stop_answers_when_asked_and_only_then():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in handlers:
            stop = processes.Stop()
            assert not stop.agree_to_stop()
            os.kill(os.getpid(), number)
            assert stop.agree_to_stop() and stop.agree_to_stop()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_text_that_stdout_cannot_encode_is_escaped():
    code = "import cli; cli.quit_on_error(print, 'Gr\\xf6\\xdfe \\ufffd')"
    ascii_only = dict(os.environ, PYTHONIOENCODING="ascii")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=ascii_only, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "Gr\\xf6\\xdfe \\ufffd\n", done.stderr


def test_what_a_notebook_has_as_stdout_is_written_to(monkeypatch):
    """%run of a script; such a stream cannot be reconfigured."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    cli.quit_on_error(print, "text")
    assert sys.stdout.getvalue() == "text\n"


@pytest.mark.parametrize("command", [
    ["train.py", "--help"], ["scripts/plan.py", "--help"],  # a long help, a short one
    ["scripts/report.py", "--help"], ["scripts/prepare_data.py", "--help"],
    ["train.py", "--config", "tiny", "--data.train", "synthetic", "--data.val", "synthetic",
     "--train.steps", "1"],
], ids=["train", "plan", "report", "prepare_data", "run"])  # fmt: skip
def test_a_closed_stdout_ends_a_program_without_a_word(command, tmp_path):
    """As `| head` does, once it has its lines; here it is closed before the first."""
    reader, writer = os.pipe()
    os.close(reader)
    if "--help" not in command:
        command = [*command, "--run.dir", str(tmp_path)]
    env = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    streams = dict(stdout=writer, stderr=subprocess.PIPE, text=True)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=env, **streams)
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE and "rror" not in done.stderr, done
    assert done.stderr == "" or "--help" not in command  # a run has said what it computes on


def test_a_jax_that_is_too_old_is_named(cfg, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 9, 2))
    with pytest.raises(UserError, match=r"is older than 0\.10"):
        connect.join_processes(cfg)


@pytest.mark.parametrize("event, code", [(select.POLLHUP, 141), (select.POLLOUT, None)])
def test_a_closed_stdout_is_seen_where_poll_reports_only_what_it_is_asked(event, code, monkeypatch):
    """As on macOS."""

    class Poll:
        def register(self, stream, events):
            self.found = [(stream, event)] if events & select.POLLOUT else []

        def poll(self, timeout):
            return self.found

    codes = []
    monkeypatch.setattr(select, "poll", Poll)
    monkeypatch.setattr(os, "_exit", codes.append)
    signals.leave_if_unread(BrokenPipeError())
    assert codes == [code] * (code is not None)


@pytest.mark.parametrize("program", ["train.py", "scripts/report.py"])
def test_a_program_without_stdout_can_be_asked_for_help(program):
    command = ["sh", "-c", '"$@" --help >&-', "sh", sys.executable, program]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("program", ["train.py", "scripts/report.py"])
def test_a_program_finds_its_modules_from_any_folder_and_with_a_safe_path(program, tmp_path):
    command = [sys.executable, "-P", ROOT / program, "--help"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0


def test_a_script_starts_without_docstrings():
    """As under `python -OO`; its help lacks them."""
    command = [sys.executable, "-OO", ROOT / "scripts/report.py", "--help"]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_ctrl_c_while_a_script_imports_its_packages_prints_no_traceback():
    """They come after the command line, and take seconds."""
    code = "import cli, os, signal; cli.quit_on_error(int); os.kill(os.getpid(), signal.SIGINT)"
    options = dict(cwd=ROOT, capture_output=True, text=True)
    # Not ignored, as it is in what a shell starts in the background.
    options["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.returncode == errors.INTERRUPTED, done.stderr
    assert done.stderr == "interrupted: run the same command again to go on\n"


def test_what_goes_to_a_closed_stream_goes_to_no_file(tmp_path):
    work = "open(sys.argv[1], 'w'), print('out'), sys.stderr.write('err'), os.write(2, b'2')"
    code = f"import cli, os, sys; cli.quit_on_error(lambda: ({work}))"
    command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code, tmp_path / "file"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    assert (tmp_path / "file").read_text() == ""


def test_a_process_of_a_process_has_the_streams_that_were_closed():
    """Else it would open other files as these."""
    child = [sys.executable, "-c", "import os; os.write(2, b'2')"]
    work = f"sys.exit(subprocess.run({child}).returncode)"
    code = f"import cli, subprocess, sys; cli.quit_on_error(lambda: {work})"
    command = ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT).returncode == 0


@pytest.mark.parametrize("work, code", [
    ("cli.quit_on_error(print, 'x')", errors.STORAGE),
    ("cli.quit_on_error(stop, config.tiny())", errors.DATA),
    ("print('x'), processes.run_main(stop, config.tiny())", errors.DATA),
    ("processes.run_main(print, config.tiny())", errors.STORAGE),
], ids=["result", "error", "error of a run", "result of a run"])  # fmt: skip
def test_a_full_disk_under_the_output_does_not_change_the_exit_code(work, code):
    """As in `train.py >log 2>&1`; neither the result nor the error can be written."""
    lines = "import cli, config, errors, processes\n"
    lines += f"def stop(cfg):\n    raise errors.UserError(errors.DATA, 'a', 'b')\n{work}"
    env = {name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        streams = dict(stdout=full, stderr=full)
        done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, env=env, **streams)
    assert done.returncode == code


def test_a_full_disk_under_the_output_does_not_end_training(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(utils, "on_lost_reader", None)
        with pytest.raises(OSError):
            utils.say("x", file=full)
        monkeypatch.setattr(utils, "on_lost_reader", lambda: pytest.fail("it would stop"))
        utils.say("x", file=full)
        signals.discard(full.fileno())  # what is still in its buffer


def test_a_stream_that_is_closed_or_missing_is_not_written_at_the_end(monkeypatch):
    """A script of a user may import Trifold's modules, close stdout, or be started without it."""
    closed = io.StringIO()
    closed.close()
    for stream in closed, None:
        monkeypatch.setattr(sys, "stdout", stream)
        signals.flush_output()


@pytest.mark.parametrize("error", [
    "gcsfs.retry.HttpError(dict(code=401, message='no access'))",
    "aiohttp.ServerDisconnectedError()",
])  # fmt: skip
def test_a_script_ends_with_storage_if_a_bucket_fails_before_jax_is_imported(error):
    code = f"import aiohttp, cli, gcsfs\ndef fail():\n    raise {error}\ncli.quit_on_error(fail)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == errors.STORAGE and "Traceback" not in done.stderr, done.stderr
    assert re.search("error: storage failed: .*(no access|disconnected).*\n  fix:", done.stderr)


def test_a_warning_may_name_a_file_whose_name_is_not_utf8(capfd):
    errors.write_error("\udcff\n")
    assert capfd.readouterr().err == "\\udcff\n"


def test_a_notebooks_messages_are_written_at_once_and_where_there_is_a_stream(
    tmp_path, monkeypatch
):
    """The process may end at once after one, which would lose what the stream still holds."""
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    with open(tmp_path / "messages", "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        errors.write_error("one\n")
        assert (tmp_path / "messages").read_text() == "one\n"
    errors.write_error("two\n")  # the stream is closed


def test_a_second_ctrl_c_does_not_end_a_notebook(monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In [1]: ", raising=False)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("the process ends"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    stop = processes.Stop()
    stop.handle(signal.SIGINT, None)
    with pytest.raises(SystemExit, match=str(INTERRUPTED)):
        stop.handle(signal.SIGINT, None)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [["metrics.jsonl"], ["metrics.jsonl", "history.jsonl"]], ids=str)
def test_a_hang_ends_with_exit_9_and_the_stacks(base, waits):
    """A pipe that no one else has opened waits for ever; the end is noted where that can be."""
    name = f"hung{len(waits)}"
    cfg, run = new_run(base, name, train=dict(steps=100_000), run=dict(hang_timeout=5))
    cfg = replace(cfg, mesh=config.Mesh(1, 1, 1))
    process = start(cfg)
    wait_for_step(process, run, 3)
    for file in waits:
        (run / file).unlink()
        os.mkfifo(run / file)
    began = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - began < 50  # give_up itself ends after 60 s in any case
    assert code == HUNG and "no update, save or evaluation batch for" in err
    (stacks,) = (run / "crash").iterdir()
    assert "metrics.py" in stacks.read_text() and str(stacks) in err
    if "history.jsonl" not in waits:
        assert json.loads((run / "history.jsonl").read_text())["end"] == "exit code 9"


@pytest.mark.slow
@pytest.mark.parametrize("damage, words", [
    ("cut", "was changed while the run used it"),
    ("removed", "is missing from"),
    # The second, if the shard was open already when it was replaced.
    ("pipe", "not a file but a folder, pipe or device|was changed"),
    # The last, if it is read before the folder is there.
    ("folder", "not a file but a folder, pipe or device|was changed|is missing from"),
])  # fmt: skip
def test_data_that_vanish_under_a_run_end_it_with_a_checkpoint(
    base, corpus, tmp_path, damage, words
):
    data = shutil.copytree(corpus / "train", tmp_path / "data")
    (data / "manifest.json").unlink()  # with it, these few pages would stay in memory
    cfg, run = new_run(base, damage, train=dict(steps=100_000), data=dict(train=str(data)))
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, every=1000), mesh=config.Mesh(1, 1, 1))
    process = start(cfg, "--run.hang_timeout=10")
    wait_for_step(process, run, 7)
    for shard in data.glob("*.npy"):
        if damage == "cut":
            os.truncate(shard, 1000)
        elif damage == "pipe":
            os.mkfifo(tmp_path / "pipe")
            (tmp_path / "pipe").rename(shard)
        else:
            shard.unlink()
        if damage == "folder":
            shard.mkdir()
    code, _, err = finish(process)
    assert code == DATA and re.search(words, err) and "Traceback" not in err
    saved = max(int(p.name) for p in (run / "checkpoints").iterdir())
    assert saved >= 7 and len(rows(run)) == saved


NO_SIZE = dict(OMPI_MCA_orte_hnp_uri="4096.0;tcp://127.0.0.1:1", OMPI_COMM_WORLD_RANK="0")


@pytest.mark.parametrize("env, run, code, word", [
    (NO_SIZE, "", USAGE, "KeyError: 'OMPI_COMM_WORLD_SIZE'"),
    (dict(OMPI_MCA_orte_hnp_uri="4096.0;usock"), "", DISTRIBUTED, "Could not parse coordinator IP"),
    ({}, "coordinator='a..b:90', num_processes=2, process_id=0", DISTRIBUTED, "=a..b:90: "),
], ids=["no_size", "no_address", "no_name"])  # fmt: skip
def test_a_cluster_that_makes_no_sense_is_two_lines(env, run, code, word):
    program = f"import config, processes as p; cfg = config.Config(config.Run({run}))"
    command = [sys.executable, "-c", f"{program}; p.run_main(print, cfg)"]
    options = dict(cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    done = subprocess.run(command, **options)
    assert done.returncode == code and word in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 2


def test_a_program_that_has_computed_before_it_joins_is_two_lines():
    """In a cluster each of its processes would train alone.  Only a notebook may go on."""
    code = "import config, jax, processes; jax.devices(); processes.run_main(print, config.tiny())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == DISTRIBUTED and done.stderr.count("\n") == 2, done.stderr
    assert "must be called before any JAX" in done.stderr


@pytest.mark.parametrize("coordinator, address", [
    ("127.0.0.1:1234", (socket.AF_INET, ("127.0.0.1", 1234))),
    ("127.0.1.1:1234", (socket.AF_INET, ("0.0.0.0", 1234))),
    ("192.0.2.1:1234", (socket.AF_INET, ("0.0.0.0", 1234))),  # of documents, no host's
])  # fmt: skip
def test_process_0_listens_at_its_name_or_where_it_can_be_reached(coordinator, address):
    assert connect.listening_address(coordinator) == address


# ---- several processes


@pytest.mark.slow
def test_two_processes_train_like_one_stop_together_and_resume_as_one(base, reference):
    cfg, run = new_run(base, "two", checkpoint=dict(every=1000), log=dict(hlo=True))
    both = start_two(cfg)
    wait_for_step(both[0], run, 12)
    both[1].send_signal(signal.SIGTERM)
    for process in both:
        code, _, err = finish(process)
        assert code == INTERRUPTED, err
    np.testing.assert_allclose(loss_curve(run)[:10], loss_curve(reference)[:10], rtol=1e-6)
    assert rows(run, "eval")[10]["tokens"] == rows(reference, "eval")[10]["tokens"]
    # Gloo's is wrong now and then, see layers.uses_gloo.
    assert "reduce-scatter" not in (run / "step.hlo.txt").read_text()
    # Scripts run in one process.
    assert cli.config_of_run(str(run), config.Mesh(1, 1, 1)).run.coordinator == ""
    train.main(cfg)
    np.testing.assert_allclose(loss_curve(run), loss_curve(reference), rtol=1e-5)


@pytest.mark.slow
def test_two_processes_are_two_slices(base, reference):
    cfg, run = new_run(base, "sliced", mesh=dict(dp="2x2", pp=1))
    for process in start_two(cfg):
        code, _, err = finish(process)
        assert code == 0, err
    np.testing.assert_allclose(loss_curve(run), loss_curve(reference), rtol=1e-5)


@pytest.mark.parametrize("first, then", [("SIGTERM", "SIGHUP"), ("SIGHUP", "SIGTERM")])
def test_a_second_signal_does_not_interrupt_the_end_of_a_run_with_nothing_to_save(first, then):
    """Services send both, and a run that ends still has its lock to give back."""
    code = f"""if True:
        import os, signal, sys, processes
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have it ignored
        stop = processes.Stop()
        try:
            try:
                with stop.nothing_to_save():
                    os.kill(os.getpid(), signal.{first})
                    print("not reached")
            finally:
                os.kill(os.getpid(), signal.{then})
                stop.is_released = True
        except processes.UserError as e:
            sys.exit(e.code if stop.is_released else 1)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == errors.INTERRUPTED and not done.stdout, done.stderr


@pytest.mark.slow
def test_a_signal_while_python_ends_changes_nothing(base):
    """Processes wait for each other as Python ends."""
    cfg, _ = new_run(base, "late", train=dict(steps=2, eval_every=0, eval_batches=1))
    both = start_two(cfg)
    while not both[0].stdout.readline().startswith("finished:"):
        assert both[0].poll() is None
    while None in [process.poll() for process in both]:
        for process in both:
            process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert [finish(process)[0] for process in both] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("lost, words", [
    (1, ["error: a peer process was lost"]),
    (0, ["error: a peer process was lost", "error: JAX aborted this process"]),
], ids=["peer", "process 0"])  # fmt: skip
def test_the_loss_of_a_process_is_exit_7_and_not_a_hang(base, lost, words):
    cfg, run = new_run(base, f"lost{lost}", train=dict(steps=100_000))
    both = start_two(cfg)
    wait_for_step(both[0], run, 3)
    both[lost].kill()
    code, _, err = finish(both[1 - lost])
    finish(both[lost])
    assert code == DISTRIBUTED and any(word in err for word in words)
    assert "Traceback" not in err


@pytest.mark.slow
def test_processes_with_other_settings_stop_before_they_train(base):
    cfg, run = new_run(base, "differ")
    other = replace(cfg, optim=replace(cfg.optim, lr=0.02))
    for process in start_two(cfg, other):
        code, _, err = finish(process)
        assert code == USAGE and "Traceback" not in err
        assert "optim.lr differs: 0.01 in process 0, 0.02 in process 1" in err
    assert not run.exists()


def test_other_versions_in_a_process_are_a_warning(monkeypatch, capsys):
    def exchange(value) -> list:
        """The answers of this process and of one with another jax; digests differ always."""
        if isinstance(value, str):
            return [value, "another digest"]
        return [value, value | (dict(jax="0.1") if "jax" in value else {})]

    monkeypatch.setattr(processes, "exchange", exchange)
    processes.compare_settings(config.tiny())
    what = f"jax is {jax.__version__} in process 0, 0.1 in process 1"
    warning = f"warning: the processes run different versions: {what}\n"
    assert capsys.readouterr().err == warning


def test_a_rollback_that_one_process_lacks_is_an_error(monkeypatch):
    """Only process 0 acts on it, so that of another one alone would have no effect."""

    def exchange(value) -> list:
        return [value, "another digest" if isinstance(value, str) else value | dict(rollback="3")]

    monkeypatch.setattr(processes, "exchange", exchange)
    with pytest.raises(UserError, match="rollback differs: -1 in process 0, 3 in process 1"):
        processes.compare_settings(config.tiny())


def test_the_compared_version_is_that_of_the_scripts_too(monkeypatch, tmp_path):
    """scripts/doctor.py compares it as train.py does."""
    seen, script = [], tmp_path / "scripts" / "doctor.py"
    script.parent.mkdir()
    script.with_name(".#doctor.py").symlink_to("user@host.1234")  # while Emacs has edits of it
    monkeypatch.setattr(rundir, "__file__", str(tmp_path / "rundir.py"))
    monkeypatch.setattr(processes, "differences", lambda facts: seen.append(facts) or {})
    for text in "old", "new":
        script.write_text(text)
        rundir.code_digest.cache_clear()
        processes.compare_settings(config.tiny())
    rundir.code_digest.cache_clear()
    assert seen[1]["trifold"] != seen[3]["trifold"]


@pytest.mark.slow
def test_processes_that_see_other_data_stop_before_they_train(base, corpus, tmp_path):
    """Each has a working directory of its own, and the path is relative."""
    cfg, run = new_run(base, "other_data", data=dict(train="data"))
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder, source in zip(folders, ("train", "val"), strict=True):
        shutil.copytree(corpus / source, folder / "data")
    for process in start_two(cfg, cwd=folders):
        code, _, err = finish(process)
        assert code == USAGE and "Traceback" not in err
        assert re.search(r"data.train differs: \w{32} in process 0, \w{32} in process 1", err)
    assert not run.exists()


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named(base):
    cfg, run = new_run(base, "missing", run=dict(start_timeout=4))
    first, second = start_two(cfg)
    second.kill()
    finish(second)
    began = time.monotonic()
    code, _, err = finish(first)
    assert code == DISTRIBUTED and time.monotonic() - began < 20
    assert re.search(r"^error: process 1 of 2 did not come to run.coordinator=127", err, re.M)
    assert err.count("\n") == 2 and not run.exists()


@pytest.mark.slow
def test_an_id_that_comes_twice_is_an_error(base):
    cfg, _ = new_run(base, "twice", run=dict(num_processes=3))
    first, second = start_two(cfg, n_processes=3)
    port = first.args[first.args.index("--run.process_id=0") - 2]
    third = start(cfg, "--run.process_id=1", port, "--run.num_processes=3")
    for process in (first, second, third):
        code, _, err = finish(process)
        assert code == USAGE and "knows another process 1 already" in err, err


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val"])
def test_data_that_one_process_cannot_read_end_both_with_a_checkpoint(
    base, corpus, tmp_path, split
):
    """Each process has its own copy; that of process 1 is removed."""
    sections = dict(train=dict(steps=100_000, eval_every=12), checkpoint=dict(every=1000))
    cfg, run = new_run(base, f"no_{split}", data={split: "data"}, **sections)
    folders = [shutil.copytree(corpus / split, tmp_path / f"{n}" / "data") for n in (0, 1)]
    for folder in folders:
        (folder / "manifest.json").unlink()  # with it, these few pages would stay in memory
    both = start_two(cfg, cwd=[folder.parent for folder in folders])
    wait_for_step(both[0], run, 7)
    shutil.rmtree(folders[1])
    ends = [finish(process) for process in both]
    assert [code for code, _, _ in ends] == [DATA, DATA], ends
    assert "is missing from" in ends[1][2] and "process 1 stopped: shard" in ends[0][2]
    saved = max(int(p.name) for p in (run / "checkpoints").iterdir())
    assert saved >= 7 and len(rows(run)) == saved


@pytest.mark.slow
def test_the_process_that_others_wait_for_is_named(base):
    cfg, run = new_run(base, "stuck", train=dict(steps=100_000), run=dict(hang_timeout=5))
    both = start_two(cfg)
    wait_for_step(both[0], run, 3)
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    for process in both:
        code, _, err = finish(process)
        assert code == HUNG and "all wait for process 0" in err
    assert len([*(run / "crash").iterdir()]) == 2


def test_a_process_that_stopped_soon_after_its_start_is_named(base, monkeypatch):
    """It has not told the others yet how far it is."""
    store = SimpleNamespace(key_value_dir_get=lambda _: [("trifold/polls/0", "7")])
    monkeypatch.setattr(processes, "shared_store", lambda: store)
    monkeypatch.setattr(processes, "process_ids", lambda: [0, 1])
    late = processes.Watchdog(None, base).who_is_late()
    assert late == "; all wait for process 1"


def test_a_process_that_cannot_make_the_mesh_ends_the_others(base, monkeypatch):
    """Otherwise they would wait 100 s for it, and say only that it is lost."""
    monkeypatch.setattr(utils, "exchange", lambda value: [value, [USAGE, "its cache is a link"]])
    monkeypatch.setattr(train, "open_data", lambda cfg: pytest.fail("it goes on"))
    with pytest.raises(UserError, match="process 1 stopped: its cache is a link") as error:
        train.main(base)
    assert error.value.code == USAGE


def test_a_hang_leaves_its_stacks_though_nothing_reads_the_output(base, monkeypatch, time_limit):
    """As after Ctrl-S at a terminal, which stops what writes there."""
    cfg, run = new_run(base, "unread")
    run.mkdir()
    monkeypatch.setattr(processes, "write_error", lambda text: threading.Event().wait())
    monkeypatch.setattr(processes, "call_within", lambda seconds, f: cli.call_within(0.1, f))
    monkeypatch.setattr(processes, "HANGS", threading.Event())
    monkeypatch.setattr(threading, "Timer", mock.Mock())
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        processes.Watchdog(mock.Mock(), cfg).give_up(300.0)
    (stacks,) = (run / "crash").iterdir()
    assert "in give_up" in stacks.read_text()


@pytest.mark.slow
def test_a_process_0_that_stands_still_ends_the_others(base):
    """JAX's store, which process 0 has, does not answer then."""
    cfg, run = new_run(base, "still", train=dict(steps=100_000), run=dict(hang_timeout=5))
    both = start_two(cfg)
    wait_for_step(both[0], run, 3)
    both[0].send_signal(signal.SIGSTOP)
    code, _, err = finish(both[1])
    both[0].kill()
    finish(both[0])
    assert code == HUNG and "process 0 does not answer" in err, err


LEFT = """
from etils import epath
import errors, files, processes

(files.local_folder(epath.Path("gs://bucket/run")) / "metrics.jsonl").write_text("{}")
processes.exit_with(errors.UserError(errors.STORAGE, "a", "b"))
"""


def test_an_error_leaves_no_temporary_files(tmp_path):
    env = os.environ | dict(TMPDIR=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", LEFT], cwd=ROOT, env=env)
    assert done.returncode == errors.STORAGE and not [*tmp_path.iterdir()]


NOTEBOOK = """
import io, runpy, signal, sys
sys.ps1, sys.stderr = "In [1]: ", io.StringIO()
for line in sys.argv[1:]:
    sys.argv = line.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        print(e.code, sys.stderr.getvalue().splitlines()[-2:])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_a_notebook_runs_a_script_after_another_whose_error_ends_only_that(base, reference):
    """`%run scripts/evaluate.py`; the second one meets JAX with devices."""
    lines = [f"scripts/evaluate.py --run {reference} --data {base.data.val}"] * 2
    lines[1:1] = [f"scripts/evaluate.py --run {reference} --data nowhere", "train.py"]
    command = [sys.executable, "-c", NOTEBOOK, *lines]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    first, error, mistake, last = done.stdout.splitlines()
    assert error.startswith(f"{DATA} ['error: data.val={ROOT}/nowhere does not exist'"), error
    assert mistake.startswith(f"{USAGE} ['error: no --config given'"), mistake
    assert json.loads(first) == json.loads(last)
