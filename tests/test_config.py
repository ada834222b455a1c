"""The command line, config files and checks; and rules that all source files keep."""

import ast
import itertools
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import pytest
from conftest import ROOT, run

import checks
import cli
import config
from errors import STORAGE, USAGE, Problem, UserError
from scripts import evaluate, sample

# A module imports only modules that stand before it here.
MODULES = """
    signals errors architecture config chips parsers checks files cli lock restart utils shards
    order rowfile rundir connect processes weights layers blockwise attention grouped experts
    pipeline model gradient generate muon optim norm_metrics panels pages dataset tasks boards
    metrics digests verify checkpoint branch runstate cost_model step_picture profiling train
""".split()  # noqa: SIM905


def refused(*flags) -> list[Problem]:
    """What the checks find wrong with these flags, and how to fix it."""
    with pytest.raises(UserError) as error:
        cli.parse(["--config", "demo", *flags])
    assert error.value.code == USAGE
    return error.value.problems


def problems(*flags) -> list[str]:
    """What the checks find wrong with these flags."""
    return [p.what for p in refused(*flags)]


def test_a_bad_mesh_is_two_lines_and_exit_2_in_half_a_second():
    def seconds_of_children() -> float:  # of a core, because other tests run beside this one
        return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])

    for _ in range(10):  # the fastest counts, because the machine may be busy
        start = seconds_of_children()
        done = run("train.py", "--config", "demo", "--mesh.pp", 3)
        seconds = seconds_of_children() - start
        if seconds < 0.5:
            break
    assert done.returncode == 2 and done.stdout == ""
    want = "error: mesh.pp=3 must divide model.n_layers=4\n  fix: set --mesh.pp to 1, 2 or 4\n"
    assert done.stderr == want
    assert seconds < 0.5


MOE = ["--model.pattern", "moe", "--model.n_experts", "4", "--model.d_expert", "16"]


@pytest.mark.parametrize("flags, words", [
    (["--mesh.tp", "8"], ["mesh.tp=8 must divide model.n_kv_heads=4"]),
    (["--mesh.tp", "3", "--model.n_heads", "6", "--model.n_kv_heads", "3", "--train.seq_len", "3"],
     ["mesh.tp=3 must divide the embedding's rows (a multiple of 128)=4096"]),
    (["--mesh.dp", "3"], ["mesh.dp=3 must divide model.d_model=128"]),
    (["--mesh.dp", "3x3"], ["mesh.dp=3x3: 3 must divide model.d_model=128"]),
    (["--mesh.dp", "3x4"], ["= 1*12*2 = 24 must divide train.batch_size=16"]),
    (["--train.batch_size", "6"],
     ["train.grad_accum*mesh.dp*mesh.pp = 1*2*2 = 4 must divide train.batch_size=6"]),
    (["--train.microbatches", "5"],
     ["mesh.pp=2 must divide train.microbatches=5", "= 10 must divide"]),
    (["--model.n_kv_heads", "3", "--mesh.tp", "1"],
     ["model.n_kv_heads=3 must divide model.n_heads=8"]),
    (["--model.d_head", "7"], ["model.d_head=7 must be even"]),
    (["--optim.lr", "nan", "--run.seed", "-1"], ["run.seed=-1", "optim.lr=nan"]),
    (["--optim.lr=-1", "--optim.b1", "1", "--optim.clip_norm", "0"],
     ["optim.lr=-1.0", "optim.b1=1.0", "optim.clip_norm=0.0"]),
    (["--run.name", "../x"], ["run.name='../x'"]),
    (["--data.train", "gs://user:key@bucket/x"], ["data.train="]),
    (["--run.dir", "s3://bucket"], ["run.dir='s3://bucket' must be a local path or gs://"]),
    (["--run.dir", "gs:/b/x", "--data.val", "a=gs:b"], ["run.dir='gs:/b/x'", "data.val='gs:b'"]),
    (["--model.n_layers", "1" * 400, "--model.pattern", "dense,dense"],
     ["must be at most 10000"]),
    (["--mesh.dp", "-1", "--mesh.pp", "-1"], ["2 axes are -1"]),
    (["--run.process_id", "1"], ["must go together"]),
    (["--run.coordinator", "fe80::1:80", "--run.num_processes", "2", "--run.process_id", "0"],
     ["must go together: HOST:PORT or [IPV6]:PORT"]),
    (["--run.process_id=-2"], ["run.process_id=-2 must be at least 0"]),
    (["--checkpoint.keep", "1", "--train.steps", "0"],
     ["train.steps=0", "checkpoint.keep=1"]),
    (["--model.n_layers", "2147483647"], ["model.n_layers=2147483647 must be at most 10000"]),
    (["--model.d_model", "2000000", "--model.d_ff", "2000000"],
     ["d_model=2000000 must be between 1 and 1048576", "d_ff=2000000 must be between 1 and"]),
    (["--model.d_model", "1048576", "--model.n_heads", "1048576", "--model.d_head", "16384"],
     ["more than 9,007,199,254,740,992"]),
    (["--model.n_layers", "1000000000000"],
     ["model.n_layers=1000000000000 must be at most 10000"]),
    (["--model.pattern", "dense*2,mo", "--optim.lr=-1"],
     ["optim.lr=-1.0", "model.pattern='dense*2,mo': 'mo' is not one of dense, moe"]),
    (["--model.pattern", "dense*3", "--model.prefix", "dense*0"],
     ["model.prefix='dense*0'"]),
    (["--model.pattern", ""], ["model.pattern is empty"]),
    (["--model.pattern", "dense*3"],
     ["model.n_layers=4 must be a multiple of 3, model.pattern's layers"]),
    (["--model.pattern", "dense*2", "--mesh.pp", "4"],
     ["mesh.pp=4 must divide the number of model.pattern's blocks=2"]),
    (["--model.pattern", "moe"], ["model.n_experts=0, but", "model.d_expert=0, but"]),
    (["--model.n_experts", "8", "--train.balance_loss", "0.1", "--mesh.experts", "alltoall",
      "--train.bias_rate", "0.01"],
     ["model.n_experts=8 has no effect", "train.balance_loss=0.1 has no effect",
      "train.bias_rate=0.01 has no effect",
      "mesh.experts=alltoall has no effect: no layer is moe"]),
    (["--model.pattern", "dense*x"], ["model.pattern='dense*x': 'dense*x' is not one of"]),
    (["--model.yarn_mscale", "1"],
     ["model.yarn_mscale=1.0 has no effect: rope_scaling is not yarn"]),
    ([*MOE, "--model.n_active", "5", "--mesh.experts", "alltoall", "--mesh.dp", "4"],
     ["model.n_active=5 is more than the 4 experts of 1 of 1 groups"]),
    ([*MOE, "--mesh.experts", "alltoall", "--mesh.dp", "8", "--train.batch_size", "32"],
     ["mesh.dp=8 must divide model.n_experts=4"]),
    ([*MOE, "--train.bias_rate", "0.01"],
     ["train.bias_rate=0.01 has no effect: model.router_bias=False"]),
    ([*MOE, "--model.n_groups", "3"], ["model.n_groups=3 must divide model.n_experts=4"]),
    ([*MOE, "--model.n_groups", "2", "--model.n_active_groups", "3"],
     ["model.n_active_groups=3 is more than model.n_groups=2"]),
    ([*MOE, "--model.n_active_groups", "2"], ["model.n_active_groups=2 has no effect"]),
    (["--mesh.pp", "3", "--train.grad_accum", "3"],
     ["mesh.pp=3 must divide", "train.grad_accum*mesh.dp = 3*2 = 6 must divide"]),
    (["--model.pattern", "dense_local"], ["model.window=0, but there are local layers"]),
    (["--model.window", "5"], ["model.window=5 has no effect"]),
    (["--model.attention", "mla", "--model.kv_rank", "5"],
     ["mesh.dp=2 must divide model.kv_rank=5", "model.d_rope=0, but", "model.d_value=0, but"]),
    (["--model.kv_rank", "8"], ["model.kv_rank=8 has no effect: model.attention=gqa"]),
    (["--model.positions", "learned", "--model.max_positions", "100"],
     ["model.max_positions=100 is below train.seq_len=128"]),
    (["--model.rope_factor", "8"], ["model.rope_factor=8.0 has no effect"]),
    (["--model.rope_scaling", "yarn", "--model.rope_low", "40"], ["model.rope_low=40.0 must be"]),
    (["--model.rope_scaling", "yarn", "--model.rope_theta", "1"],
     ["model.rope_theta=1.0 must be above 1 with rope_scaling=yarn"]),
    (["--model.n_heads", "-3", "--mesh.tp", "1"], ["model.n_heads=-3 must be at least 1"]),
    ([*MOE, "--model.n_experts", "-1", "--model.n_active_groups", "2"],
     ["model.n_experts=-1 must be at least 0", "model.n_active_groups=2 has no effect"]),
    (["--data.end_id", "4096"], ["data.end_id=4096 must be below model.vocab_size=4096"]),
], ids=lambda x: " ".join(x) if x[0].startswith("--") else "")  # fmt: skip
def test_every_problem_is_reported_at_once_with_its_numbers(flags, words):
    found = problems(*flags)
    assert len(found) == len(words), found
    for what, word in zip(found, words, strict=True):
        assert word in what


@pytest.mark.parametrize("flags, fix, corrected", [
    ("--mesh.schedule gpipe --mesh.virtual_stages 3", "set --mesh.virtual_stages 1",
     "--mesh.schedule gpipe --mesh.virtual_stages 1"),
    ("--mesh.virtual_stages 2", "set --mesh.schedule interleaved, or",
     "--mesh.schedule interleaved --mesh.virtual_stages 2"),
    ("--mesh.schedule interleaved --mesh.virtual_stages 3",
     "use --mesh.schedule 1f1b --mesh.virtual_stages 1",
     "--mesh.schedule 1f1b --mesh.virtual_stages 1"),
    ("--train.microbatches 1", "set --train.microbatches 0, or set --mesh.pp to 1",
     "--train.microbatches 0"),
    ("--train.microbatches 6", "set --train.batch_size 12, or change --train.microbatches",
     "--train.microbatches 6 --train.batch_size 12"),
    ("--train.grad_accum 4 --train.batch_size 8",
     "set --train.grad_accum 2, which keeps the batch, or set --train.batch_size 16",
     "--train.grad_accum 2 --train.batch_size 8"),
    ("--mesh.pp 3 --train.grad_accum 3", "set --train.batch_size 24",
     "--mesh.pp 4 --train.grad_accum 3 --train.batch_size 24"),
    (f"{' '.join(MOE)} --model.n_groups 3 --model.n_active_groups 2",
     "set --model.n_groups to 2 or 4",
     f"{' '.join(MOE)} --model.n_groups 2 --model.n_active_groups 2"),
    (f"{' '.join(MOE)} --model.n_groups 2 --model.n_active_groups 3",
     "set --model.n_active_groups to at most 2",
     f"{' '.join(MOE)} --model.n_groups 2 --model.n_active_groups 2"),
    ("--model.positions learned --model.max_positions 100",
     "set --train.seq_len (a script's --seq_len) to at most 100, or in training",
     "--model.positions learned --model.max_positions 100 --train.seq_len 100"),
])  # fmt: skip
def test_what_a_fix_suggests_is_accepted(flags, fix, corrected):
    assert any(fix in p.fix for p in refused(*flags.split()))
    cli.parse(["--config", "demo", *corrected.split()])


@pytest.mark.parametrize("flags, word", [
    (["--mesh.ppp", "2"], "--mesh.pp"),
    (["--train.dtype", "float16"], "bfloat16"),
    (["--train.steps", "many"], "--train.steps"),
    (["--train.steps", "1.5"], "--train.steps"),
    (["--model.qk_norm", "maybe"], "--model.qk_norm"),
], ids=lambda x: " ".join(x) if isinstance(x, list) else "")  # fmt: skip
def test_unknown_flags_and_wrong_types_exit_2_with_a_suggestion(flags, word, capsys):
    with pytest.raises(SystemExit) as error:
        cli.parse(["--config", "demo", *flags])
    assert error.value.code == USAGE and word in capsys.readouterr().err


@pytest.mark.parametrize("preset", config.PRESETS)
def test_a_config_reads_back_from_its_json(preset, tmp_path):
    changes = ["--run.seed", "5", "--data.document_mask", "True", "--optim.lr", "0.00031"]
    cfg = cli.parse(["--config", preset, *changes])
    path = tmp_path / "config.json"
    path.write_text(cli.to_json(cfg, argv=["x"], run_id="1"))
    assert cli.parse(["--config", str(path)]) == cfg != cli.parse(["--config", preset])
    assert cli.parse(["--config", str(path), "--run.seed", "6"]).run.seed == 6


def test_a_setting_that_is_a_list_of_numbers_can_be_added(monkeypatch):
    monkeypatch.setattr(cli, "settings", lambda cfg: {"optim.betas": (0.9, 0.95)})
    assert cli.value_flags("optim.betas", [0.5, 1.0]) == ["--optim.betas", "0.5", "1.0"]
    with pytest.raises(ValueError, match="list of numbers"):
        cli.value_flags("optim.betas", ["x"])


def test_stages_of_a_file_that_do_not_fit_another_set_can_be_dropped(tmp_path):
    path, other = tmp_path / "config.json", ["--data.train", "c=data/c"]
    stages = ["--data.train", "a=data/a,b=data/b", "--data.stages", "5:a=1"]
    path.write_text(cli.to_json(cli.parse(["--config", "demo", *stages])))
    with pytest.raises(UserError) as error:
        cli.parse(["--config", str(path), *other])
    [problem] = error.value.problems
    assert "'5:a=1' names 'a'" in problem.what
    assert "--data.stages alone for no stages" in problem.fix
    assert cli.parse(["--config", str(path), *other, "--data.stages"]).data.stages == ()


def test_dp_may_be_slices_and_their_ranks_here_and_in_a_file(tmp_path, capsys):
    path = tmp_path / "config.json"
    cfg = cli.parse(["--config", "tiny", "--mesh.dp", "2x4"])
    assert cfg.mesh.sizes == (8, 1, 1) and cfg.mesh.shape == dict(slice=2, dp=4, pp=1, tp=1)
    path.write_text(cli.to_json(cfg))
    assert cli.parse(["--config", str(path)]) == cfg
    mesh = cli.parse(["--config", str(path), "--mesh.dp=4"]).mesh
    assert mesh.dp == 4 and mesh.slices == 1
    for wrong in ("2x", "0x4", "2x-1", "2x4x2", "two"):
        with pytest.raises(SystemExit) as end:
            cli.parse(["--config", "tiny", f"--mesh.dp={wrong}"])
        assert end.value.code == USAGE and "is not a number such as 8" in capsys.readouterr().err


@pytest.mark.parametrize("text, words", [
    ("", "Expecting value"),
    ("[]", "it holds a list"),
    ("{", "Expecting property name"),
    ('{"modle": {}}', "unknown keys ['modle']"),
    ('{"model": {"d_model": 64}, "model": {}}', "'model' appears twice"),
    ('{"model": 3}', "model is 3"),
    ('{"model": {"d_model": [1]}}', "model.d_model=[1] is not of type int"),
    ('{"model": {"d_model": {"a": 1}}}', 'model.d_model={"a": 1} is not of type int'),
    ('{"model": {"d_model": null}}', "model.d_model=null is not of type int"),
    ('{"optim": {"lr": "1e-4"}}', 'optim.lr="1e-4" is not of type float'),
    ('{"run": {"name": 3}}', "run.name=3 is not of type str"),
    ('{"model": {"nonesuch": [1]}}', "model.nonesuch=[1] is not a setting"),
    ('{"model": {"nonesuch": null}}', "model.nonesuch=null is not a setting"),
    ('{"train": {"profile": [1.5, 2]}}', "[1.5, 2] is not a list of whole numbers"),
    ('{"train": {"profile": ["1", "2"]}}', '["1", "2"] is not a list of whole numbers'),
    ('{"run": {"accept": ["--fresh"]}}', 'run.accept=["--fresh"] is not a list of words'),
    ("[" * 100_000, "recursion"),
    ("\xff\x00", "can't decode"),
], ids=range(18))  # fmt: skip
def test_a_malformed_config_file_is_an_error_not_a_traceback(text, words, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as error:
        cli.parse(["--config", str(path)])
    assert error.value.code == USAGE and words in str(error.value)


@pytest.mark.parametrize("path", [
    "/dev/zero", "pipe", "large", ".", "http://127.0.0.1:9/x", "foo://x",
])  # fmt: skip
@pytest.mark.usefixtures("time_limit")
def test_what_is_no_config_file_is_refused_without_reading_it(path, tmp_path, monkeypatch):
    """A device without an end, a pipe that is never written, 3 GB, a folder, unknown schemes."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with open("large", "wb") as file:
        file.truncate(3 * 2**30)
    with pytest.raises(UserError) as error:
        cli.parse(["--config", path])
    assert error.value.code == USAGE


@pytest.mark.parametrize("error", [OSError("Forbidden: b/bucket/o"), TimeoutError("no answer")])
def test_a_config_file_that_a_bucket_does_not_give_may_be_there_later(error, monkeypatch):
    monkeypatch.setattr(cli, "read_file", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match=f"config.json' cannot be read: {error}") as refusal:
        cli.parse(["--config", "gs://bucket/runs/a/config.json"])
    assert refusal.value.code == STORAGE


@pytest.mark.slow
@pytest.mark.usefixtures("time_limit")
def test_a_config_file_in_a_bucket_that_does_not_answer_is_refused_in_time():
    env = os.environ | {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"}  # nothing listens there
    begin = time.monotonic()
    done = run("train.py", "--config", "gs://no-such-bucket/config.json", env=env)
    assert done.returncode == STORAGE and time.monotonic() - begin < 15
    assert done.stderr.count("\n") == 2 and "no answer within 10 s" in done.stderr


@pytest.mark.usefixtures("time_limit")
def test_divisors_of_a_large_number_take_no_time():
    for n in range(1, 200):
        assert checks.divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
    assert checks.divisors(2**31)[-2:] == [2**30, 2**31]


def test_two_configs_are_an_error_that_names_both():
    with pytest.raises(UserError, match="--config is given 2 times: demo, tiny"):
        cli.parse(["--config", "demo", "--config=tiny"])


def test_a_list_that_is_given_twice_is_an_error(monkeypatch):
    with pytest.raises(UserError, match="--data.stages is given 2 times"):
        cli.parse(["--config", "tiny", "--data.stages", "0:a=1", "--data.stages=9:a=1"])
    assert cli.parse(["--config", "tiny", "--optim.lr", "1", "--optim.lr", "2"]).optim.lr == 2
    for script, flag in (sample, "--prompt"), (evaluate, "--eval.tasks"):
        monkeypatch.setattr(sys, "argv", ["x.py", "--run", "r", flag, "a=x", f"{flag}=b=y"])
        with pytest.raises(UserError, match=f"{flag} is given 2 times"):
            script.parse()


def test_a_config_file_goes_through_the_checks_of_the_command_line(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"model": {"d_model": 64.5}}')
    (tmp_path / "b.json").write_text('{"train": {"stepz": 3}}')
    for name in "ab":
        with pytest.raises(SystemExit) as error:
            cli.parse(["--config", str(tmp_path / f"{name}.json")])
        assert error.value.code == USAGE


def test_no_config_and_no_such_config_name_the_presets():
    for argv in ([], ["demo"], ["--config"], ["--config", "nonesuch"]):
        with pytest.raises(UserError, match=r"demo, tiny, .*gpt2_1.5b, .* or deepseek_v3"):
            cli.parse(argv)


def test_a_misspelt_config_flag_is_named(capsys):
    with pytest.raises(SystemExit) as error:
        cli.parse(["--confg", "demo"])
    assert error.value.code == USAGE and "--config" in capsys.readouterr().err


def field_docs() -> dict[str, str]:
    """{"section.field": docstring}, and of flags outside of sections, as written in the sources."""
    section_of = {type(getattr(config.Config(), s)).__name__: f"{s}." for s in config.SECTIONS}
    section_of["Config"] = ""
    docs = {}
    sources = [(ROOT / f"{name}.py").read_text() for name in ("config", "architecture")]
    for node in ast.parse("\n".join(sources)).body:
        if isinstance(node, ast.ClassDef) and node.name in section_of:
            for field, doc in itertools.pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                    docs[section_of[node.name] + field.target.id] = doc.value.value
    return docs


def all_flags() -> set[str]:
    """Every flag of train.py, without its dashes."""
    sections = {s: fields(getattr(config.Config(), s)) for s in config.SECTIONS}
    names = {f"{section}.{field.name}" for section, found in sections.items() for field in found}
    return names | {"config", "fresh", "eval_only", "rollback"}


@pytest.fixture
def help_of(monkeypatch):
    """help_of(*flags): what train.py prints for --help in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def text(*flags) -> str:
        done = run("train.py", *flags, "--help")
        assert done.returncode == 0
        return done.stdout

    return text


def squeeze(text: str) -> str:
    """text without spaces, line breaks and box lines, so that wrapping does not matter."""
    return re.sub(r"[│─\s]+", "", text)


def test_help_shows_every_flag_and_section_with_its_docstring(help_of):
    text, docs = squeeze(help_of().split("╭─ options", 1)[1]), field_docs()
    assert set(docs) == all_flags() - {"config"}
    for name, doc in docs.items():
        assert re.search(rf"--{name}[^.]*?{re.escape(squeeze(doc))}\(default:", text), name
    for section in config.SECTIONS:
        title, doc = f"╭{section}options╮", type(getattr(config.Config(), section)).__doc__
        assert title + squeeze(doc) in text, section
    presets = squeeze(f"Presets: {', '.join(config.PRESETS)}. (required)")
    assert re.search(rf"--configPRESET\|FILE[^:]*{re.escape(presets)}", text)
    assert squeeze("moved aside, never deleted") in text


def test_help_begins_with_the_common_flags_and_fits_80_columns(help_of):
    text = help_of()
    about, _ = text.split("╭─ options", 1)
    common = re.findall(r"^  --([a-z_.]+) ", about, re.M)
    assert common[0] == "config" and 10 < len(common) == len(set(common))
    named = set(re.findall(r"--([a-z_.]+)", about))
    assert named <= all_flags() | {"help"}, named - all_flags()
    assert max(map(len, text.splitlines())) <= 80
    for flags in re.findall(r"python train.py (--config demo.*)", about):
        cli.parse(flags.split())  # the examples pass the checks


def test_help_with_a_preset_shows_its_values_as_defaults(help_of):
    text = squeeze(help_of("--config", "llama_1b"))
    assert re.search(r"--model.d_ffINT[^(]*\(default:5632\)", text)


def test_every_field_is_described_and_read():
    """A field that nothing reads is a defect.  Code reads cfg.train.steps, or t.steps with a local
    t = cfg.train.  tyro shows each line of a docstring on a line, so each must end a sentence."""
    docs = field_docs()
    users = [name for name in MODULES if name not in ("config", "checks", "cli")]
    code = "\n".join((ROOT / f"{name}.py").read_text() for name in users)
    code = code.replace("getattr(cfg.data, split)", "cfg.data.train cfg.data.val")
    code = code.replace("getattr(cfg.train, name)", "")
    code = code.replace("cfg.mesh.sizes", "cfg.mesh.dp cfg.mesh.pp cfg.mesh.tp")
    code += " ".join(re.findall(r"self\.cfg\.[a-z_.]+", code)).replace("self.", "")
    for section in config.SECTIONS:
        for field in fields(getattr(config.Config(), section)):
            doc = docs.get(f"{section}.{field.name}")
            assert doc, f"{section}.{field.name} has no docstring"
            assert all(line.endswith(".") for line in doc.splitlines()), doc
            read = rf"\b(cfg\.{section}|{section[0]})\.{field.name}\b"
            assert re.search(read, code), f"nothing reads {section}.{field.name}"
    for flag in ("fresh", "eval_only", "rollback"):
        assert f"cfg.{flag}" in code


def test_another_package_named_scripts_is_not_imported(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "__init__.py").touch()
    env = os.environ | dict(PYTHONPATH=str(tmp_path))
    words = [sys.executable, "-c", "import scripts.outputs"]
    assert subprocess.run(words, cwd=ROOT, env=env, timeout=120).returncode == 0


def test_imports_go_one_way():
    """Each module imports only modules before it in MODULES, so there are no cycles, and nothing of
    scripts/.  It takes a name only from the module that defines it."""
    assert {p.stem for p in ROOT.glob("*.py")} == set(MODULES)
    for n, name in enumerate(MODULES):
        tree = ast.parse((ROOT / f"{name}.py").read_text())
        imports = {
            a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names
        }
        from_imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imports |= {node.module for node in from_imports}
        assert not any(module.startswith("scripts") for module in imports), name
        assert imports & set(MODULES) <= set(MODULES[:n]), name
        for node in from_imports:
            if node.module in MODULES:
                assert {a.name for a in node.names} <= defined(node.module), (name, node.module)


def defined(module: str) -> set[str]:
    """The names that a module defines at its top level."""
    names = set()
    for node in ast.parse((ROOT / f"{module}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {x.id for t in node.targets for x in ast.walk(t) if isinstance(x, ast.Name)}
    return names


def test_config_and_prepare_data_do_not_need_jax():
    for module in ("cli", "scripts/prepare_data"):
        code = (
            f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); "
            f"runpy.run_path({str(ROOT / module)!r} + '.py'); assert 'jax' not in sys.modules"
        )
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_data_is_never_run_as_code():
    """No source file uses pickle, eval, exec, a shell or an unsafe loader."""
    banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
    banned_calls = {"eval", "exec", "os.system", "yaml.load", "tempfile.mktemp"}
    for path in [*ROOT.glob("*.py"), *ROOT.glob("scripts/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
                assert not banned & {n.split(".")[0] for n in names}, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in banned_calls, (path, called)
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert keywords.get("allow_pickle", "False") == "False"
                assert keywords.get("shell", "False") == "False"
                assert keywords.get("check_vma", "True") == "True"


def test_problems_of_all_kinds_come_together():
    found = problems(
        "--mesh.pp", "3", "--optim.lr=-1", "--train.batch_size", "7", "--model.d_ff", "0"
    )
    words = ["model.d_ff=0", "optim.lr=-1.0", "mesh.pp=3", "must divide train.batch_size=7"]
    assert len(found) == 4 and all(w in f for w, f in zip(words, found, strict=True)), found


def test_simulated_devices_get_the_threads_they_need(monkeypatch):
    """Fake devices deadlock on a thread pool with fewer than twice as many threads."""
    cases = [
        ((2, 2, 2), {}, 64),
        ((64, 1, 1), {}, 128),
        ((1, 1, 1), dict(JAX_NUM_CPU_DEVICES="8"), 64),
        ((1, 1, 1), dict(XLA_FLAGS="--xla_force_host_platform_device_count=40"), 80),
        ((2, 2, 2), dict(NPROC="10"), 64),
        ((2, 2, 2), dict(NPROC="100"), 100),
        (
            (2, 2, 2),
            dict(NPROC="2"),
            96,
            96,
        ),  # a pool that is too small is raised on a large host too
    ]
    for mesh, env, want, *cores in cases:
        for name in ("NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        for name, text in env.items():
            monkeypatch.setenv(name, text)
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores[0] if cores else 2)
        cli.simulate_devices(config.Mesh(*mesh))
        assert os.environ["NPROC"] == str(want)
        assert "terminate_timeout" in os.environ["XLA_FLAGS"]


def test_devices_are_simulated_after_the_import_of_jax_too():
    """As in a notebook.  Once JAX has looked for its devices, the error says what to do."""
    code = "import jax, config, cli\n"
    code += "cli.simulate_devices(config.Mesh(2, 2, 2)); print(jax.device_count())\n"
    code += "cli.simulate_devices(config.Mesh(4, 4, 1)); import utils; utils.start_mesh"
    code += "(config.Config(mesh=config.Mesh(4, 4, 1), train=config.Train(batch_size=16)))"
    env = {n: x for n, x in os.environ.items() if n not in ("JAX_NUM_CPU_DEVICES", "NPROC")}
    options = dict(cwd=ROOT, env=env | dict(JAX_PLATFORMS="cpu"), capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.stdout == "8\n", done.stderr
    assert "but only 8 cpu device(s)" in done.stderr
    assert "without JAX_NUM_CPU_DEVICES and XLA_FLAGS" in done.stderr


def test_flags_that_xla_does_not_know_are_left_out_with_a_warning():
    """XLA itself ends the process at the first of them, with code 1."""
    code = "import cli, config, os; cli.simulate_devices(config.Mesh());"
    code += "print(os.environ['XLA_FLAGS']); import jax; print(jax.device_count())"
    flags = "--xla_no_such=1 --xla-dump-to=x --xla_cpu_enable_fast_math=false --xla_tpu_no_such"
    env = dict(os.environ, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1", XLA_FLAGS=flags)
    options = dict(cwd=ROOT, env=env, capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.stdout == "--xla_cpu_enable_fast_math=false\n1\n", done.stderr
    assert done.stderr.startswith("warning: XLA knows no flag --xla_no_such=1: left out")
    assert "--xla_tpu_no_such: left out of XLA_FLAGS; LIBTPU_INIT_ARGS takes" in done.stderr


@pytest.mark.parametrize("name", ["NPROC", "JAX_NUM_CPU_DEVICES"])
@pytest.mark.parametrize("text", ["two", "0", "-3"])
def test_a_variable_that_is_no_number_is_named(name, text, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv(name, text)
    with pytest.raises(UserError, match=f"{name}='{text}' is not a number above 0"):
        cli.simulate_devices(config.Mesh(2, 2, 2))


def test_training_names_such_a_variable_without_a_traceback():
    env = dict(os.environ, NPROC="two", JAX_NUM_CPU_DEVICES="8")
    done = run("train.py", "--config", "tiny", env=env)
    assert done.returncode == USAGE and done.stderr.startswith("error: the environment"), done


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no mallopt")
def test_memory_of_one_call_is_used_by_the_next_and_has_large_pages():
    code = """
import ctypes, os, resource
import cli
c = ctypes.CDLL(None)
c.sbrk.restype = ctypes.c_size_t
begin = c.sbrk(0)
cli.tune_heap()
kept = c.sbrk(0) - begin
import jax, jax.numpy as jnp
f = jax.jit(lambda a: (a @ a.T) @ a)
a = jnp.ones((3000, 16))  # a @ a.T takes 36 MB, or 8,789 small pages
f(a).block_until_ready()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(a).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# Sixty: where a small object lies in freed memory, several calls in a row may take new pages.
print(*(faults() for _ in range(60)))
print(kept / (os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))
print(*(x.split()[1] for x in open("/proc/self/smaps_rollup") if x.startswith("AnonHuge")))
"""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    faults, kept, large = done.stdout.splitlines()
    assert min(map(int, faults.split())) < 1_000, done.stdout
    assert float(kept) > 0.24, done.stdout
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if setting.exists() and "[never]" not in setting.read_text():
        assert int(large) > 30_000, done.stdout  # KiB


def test_where_addresses_are_limited_none_are_reserved_for_large_pages():
    code = """
import ctypes, resource
import cli
c = ctypes.CDLL(None)
c.sbrk.restype = ctypes.c_size_t
begin = c.sbrk(0)
resource.setrlimit(resource.RLIMIT_AS, (1 << 45, 1 << 45))
cli.tune_heap()
print(c.sbrk(0) - begin)
"""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert int(done.stdout) < 1 << 20, done


def test_automatic_microbatches_and_axes():
    cfg = replace(config.tiny(), mesh=config.Mesh(-1, 2, 1))
    on_eight = checks.resolve(cfg, 8)
    assert on_eight.mesh.sizes == (4, 2, 1) and on_eight.train.microbatches == 8
    assert checks.resolve(config.tiny(), 1).train.microbatches == 1
    small = replace(cfg, train=replace(cfg.train, batch_size=24))
    assert checks.resolve(small, 8).train.microbatches == 6
    assert checks.resolve(cfg, 8, rows=3).train.batch_size == 8
    accumulated = replace(cfg, train=replace(cfg.train, grad_accum=8, unroll=8))
    t = checks.resolve(accumulated, 8, rows=3).train
    assert (t.batch_size, t.grad_accum, t.unroll) == (8, 1, 1)
    for dp, want in ((8, "2x4"), (-1, "2x4"), ("2x4", "2x4"), ("1x8", "1x8")):
        sliced = replace(config.tiny(), mesh=config.Mesh(dp, 1, 1))
        assert checks.resolve(sliced, 8, rows=8, slices=2).mesh.dp == want
    with pytest.raises(UserError, match="mesh.dp=3 must divide model.d_model=32"):
        checks.resolve(replace(cfg, mesh=config.Mesh(-1, 1, 1)), 3)


def test_a_cpu_chooses_few_tokens_at_a_time_no_recomputing_and_unrolled_layers():
    demo, tiny = config.demo(), config.tiny()

    def choose(cfg, mesh=(1, 1, 1), **train):
        mesh, train = config.Mesh(*mesh), replace(cfg.train, **train)
        t = checks.resolve(replace(cfg, mesh=mesh, train=train), 8, on_cpu=True).train
        return t.microbatches, t.remat, t.unroll

    assert choose(demo) == (4, "none", 4)  # 4 rows of 128 tokens, 4 layers
    assert choose(demo, mesh=(2, 2, 2)) == (2, "none", 2)  # a microbatch and 2 layers a stage
    assert choose(demo, mesh=(2, 2, 2), seq_len=2**12) == (8, "layer", 1)  # all rows would wait
    assert choose(demo, batch_size=12) == (3, "none", 4)
    assert choose(demo, seq_len=4096) == (16, "none", 4)  # a row is more than 512 tokens
    assert choose(demo, seq_len=2**16) == (16, "layer", 1)  # several GiB of activations
    ramp = dict(batch_ramp="0:8,9:16,99:8")
    assert choose(demo, **ramp) == (4, "none", 4)  # as for 16, and 8 divide into 4 too
    assert choose(demo, seq_len=512, batch_ramp="0:1,9:512")[:2] == (1, "layer")
    assert choose(demo, microbatches=4, remat="dots", unroll=2) == (4, "dots", 2)
    assert choose(tiny) == (2, "none", 1)  # compiling takes longer than training
    assert choose(demo, remat="dots")[2] == 1
    deep = replace(demo.model, n_layers=24, pattern="dense*6")
    assert choose(replace(demo, model=deep))[2] == 1  # 24 layers in 4 blocks
    t = checks.resolve(replace(demo, mesh=config.Mesh(1, 1, 1)), 8).train
    assert (t.microbatches, t.remat, t.unroll) == (1, "layer", 1)  # elsewhere


def test_json_has_every_section():
    record = json.loads(cli.to_json(config.demo()))
    names = ["run", "mesh", "model", "data", "train", "eval", "optim", "checkpoint", "log"]
    assert list(record) == names


def test_a_huge_number_is_an_error_within_a_second():
    began = time.thread_time()  # of this thread alone: others may use the cores
    assert problems("--mesh.dp", "3", "--model.d_model", str(10**18 + 3))
    assert time.thread_time() - began < 1


def test_a_config_file_cannot_name_a_folder_of_programs_to_run(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dict(run=dict(compile_cache=str(tmp_path)))))
    with pytest.raises(UserError, match="run.compile_cache may only be given on the command line"):
        cli.parse(["--config", str(file)])
    cfg = cli.parse(["--config", "tiny", "--run.compile_cache", str(tmp_path)])
    assert cfg.run.compile_cache and json.loads(cli.to_json(cfg))["run"]["compile_cache"] == ""


def test_a_rollback_to_a_negative_update_is_refused_not_ignored():
    assert cli.parse(["--config", "tiny", "--rollback=-1"]).rollback == -1  # the default
    with pytest.raises(UserError, match="rollback=-5 must be an update"):
        cli.parse(["--config", "tiny", "--rollback=-5"])


def test_a_run_that_is_not_there_is_named_and_no_presets(tmp_path):
    with pytest.raises(UserError) as e:
        cli.config_of_run(f"{tmp_path}/", config.Mesh())
    assert e.value.code == USAGE and f"there is no run in {tmp_path}: " in str(e.value)
    assert "demo" not in str(e.value).partition("fix: ")[2]
