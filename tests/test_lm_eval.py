"""EleutherAI's harness computes the same through scripts/lm_eval.py, on every mesh, as through its
own `hf` backend from the exported model: `make test-interop`."""

import json
import re
import textwrap
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cases import MOE, PLAIN, params_of
from conftest import needs, on_mesh, run
from runs import two_processes
from test_tasks import questions
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import checkpoint
import cli
import config
import errors
import files
import runstate
import utils
from scripts import convert_hf
from scripts.vocabularies import byte_tokenizer

live = needs("torch", "transformers", "lm_eval")

STYLES = dict(
    llama=replace(PLAIN, model=replace(PLAIN.model, n_layers=4, vocab_size=258)),
    deepseek_v3=replace(MOE, model=replace(MOE.model, n_layers=5, vocab_size=257, prefix="dense")),
)
MESHES = [(1, 1, 1), (2, 2, 2), (1, 4, 2)]
LENGTH = 64


@pytest.fixture(scope="module", params=STYLES)
def style(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def trained(style, tmp_path_factory) -> Path:
    """A run of random weights, with the tokenizer of bytes, which puts <s> before llama's texts."""
    path, tokenizer = tmp_path_factory.mktemp(style) / "run", byte_tokenizer()
    path.mkdir()
    if style == "llama":
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 257)])
    cfg = on_mesh(STYLES[style], train=dict(seq_len=LENGTH))
    (path / "config.json").write_text(cli.to_json(cfg))
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    store = checkpoint.Checkpoints(files.absolute_path(str(path)), keep=1)
    state = runstate.init_state(cfg)
    store.save(0, runstate.checkpoint_items(state._replace(params=params_of(cfg))))
    store.close()
    return path


TASKS = dict(
    endings="""
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    texts="""
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{query}}"
metric_list: [{metric: byte_perplexity}]
""",
    words="""
output_type: generate_until
doc_to_text: "> {{query}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: [" ", "e"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three tasks on the same questions, and their files.  The queries are of different lengths:
    empty, short, and longer than the model looks back; one begins with <s>."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = questions(textwrap, 6)
    lines[1]["query"] *= 5
    lines[2]["query"] = ""
    lines[3]["query"] = lines[3]["query"][:10]
    lines[4]["query"] = "<s>" + lines[4]["query"]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for name, text in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}"
        (folder / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{data}{text}")
    return folder


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def answers(lm, folder: Path) -> tuple[dict, dict]:
    """(results, {task: what the model answers to each request}) of the harness."""
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    options = dict(tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)
    found = evaluator.simple_evaluate(lm, **options)
    samples = {name: [x["resps"] for x in found["samples"][name]] for name in TASKS}
    return found["results"], samples


@pytest.fixture(scope="module")
def wanted(style, trained, folder, tmp_path_factory):
    """What the harness' own backend answers, with the exported weights."""
    from lm_eval.models.huggingface import HFLM

    twin = tmp_path_factory.mktemp("twin") / "hf"
    convert_hf.export_hf(trained, twin)
    # Without padding: the experts of padding would be chosen with those of the text.
    lm = HFLM(str(twin), device="cpu", dtype="float32", batch_size=1)
    assert lm.tokenizer.eos_token == config.END
    assert lm.tokenizer.bos_token == dict(llama="<s>").get(style)
    return answers(lm, folder)


@live
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_answers_are_those_of_the_hf_backend(mesh, trained, folder, wanted):
    from scripts import lm_eval

    flags = ["--train.dtype", "float32"]
    cfg = utils.start_mesh(cli.config_of_run(str(trained), config.Mesh(*mesh), *flags), rows=8)
    params = runstate.load_params(files.absolute_path(str(trained)), cfg)
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    results, got = answers(lm_eval.Run(params, tokenizer, cfg), folder)
    logprob, is_top = zip(*(pair for x in got["endings"] for (pair,) in x), strict=True)
    want, want_top = zip(*(pair for x in wanted[1]["endings"] for (pair,) in x), strict=True)
    assert len(want) == 24 and np.std(want) > 1
    np.testing.assert_allclose(logprob, want, rtol=0, atol=1e-4)
    assert is_top == want_top
    texts = np.array(got["texts"], float)
    np.testing.assert_allclose(texts, np.array(wanted[1]["texts"], float), rtol=0, atol=1e-4)
    assert got["words"] == wanted[1]["words"]
    for name in TASKS:
        for metric, x in wanted[0][name].items():
            assert results[name][metric] == (pytest.approx(x) if isinstance(x, float) else x)


@live
def test_the_script_prints_the_harness_table_and_writes_its_results(trained, folder, tmp_path):
    out = tmp_path / "results.json"
    flags = ["--run", trained, "--include_path", folder, "--mesh.dp", 2, "--mesh.tp", 2]
    done = run("scripts/lm_eval.py", *flags, "--tasks", "endings,texts", "--json", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    acc = found["results"]["endings"]["acc,none"]
    rows = [re.split(r"\s*\|\s*", line) for line in done.stdout.splitlines()]
    assert [row[7] for row in rows if "acc" in row] == [f"{acc:.4f}"] and "|texts" in done.stdout
    assert found["config"]["dtype"] == "float32" and found["config"]["run"] == str(trained)
    done = run("scripts/lm_eval.py", *flags, "--tasks", "endings", "--limit", 0)
    assert done.returncode == errors.USAGE and "error: limit=0.0 must be above 0" in done.stderr
    done = run("scripts/lm_eval.py", *flags, "--tasks", "endings,nothing")
    assert done.returncode == errors.USAGE and len(done.stderr.splitlines()) < 6
    assert "error: the harness knows no task 'nothing'\n  fix: " in done.stderr


@live
@pytest.mark.parametrize("n", [0, LENGTH + 1])
def test_an_answer_without_tokens_or_with_too_many_is_refused(n):
    from scripts import lm_eval

    lm = lm_eval.Run(None, byte_tokenizer(), on_mesh(PLAIN, train=dict(seq_len=LENGTH)))
    words = f"an answer has {n} tokens, and it needs 1 to train.seq_len={LENGTH}"
    with pytest.raises(errors.UserError, match=words) as error:
        lm._loglikelihood_tokens([(None, [1, 2], [3]), (None, [1, 2], [3] * n)])
    assert error.value.code == errors.DATA


@live
def test_a_context_of_spaces_is_scored_after_the_token_that_begins_a_text():
    from scripts import lm_eval

    cfg = on_mesh(PLAIN, train=dict(seq_len=LENGTH))
    lm = lm_eval.Run(params_of(cfg), byte_tokenizer(), cfg)
    pairs = [("", " \nto"), (" \n", "to"), ("a", "to")]
    first, second, _ = lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs])
    assert first == second


@live
def test_a_task_may_ask_for_no_tokens():
    from scripts import lm_eval

    cfg = on_mesh(PLAIN, train=dict(seq_len=LENGTH))
    lm = lm_eval.Run(params_of(cfg), byte_tokenizer(), cfg)
    assert lm.complete([("to", dict(max_gen_toks=0)), ("a", dict(max_gen_toks=0))]) == ["", ""]


@live
def test_a_task_that_asks_for_more_tokens_than_fit_is_refused():
    """Of each prompt only a token would be left."""
    from scripts import lm_eval

    lm = lm_eval.Run(None, byte_tokenizer(), on_mesh(PLAIN, train=dict(seq_len=LENGTH)))
    with pytest.raises(errors.UserError, match=f"asks for {LENGTH} tokens") as error:
        lm.generate_until([SimpleNamespace(args=("to", dict(max_gen_toks=LENGTH)))])
    assert error.value.code == errors.DATA


@live
def test_a_task_whose_texts_are_made_in_an_unknown_way_is_refused():
    """They would be other texts than the task asks for."""
    from scripts import lm_eval

    cfg = on_mesh(PLAIN, train=dict(seq_len=LENGTH))
    lm, same = lm_eval.Run(params_of(cfg), byte_tokenizer(), cfg), dict(max_gen_toks=1, num_beams=1)
    assert len(lm.generate_until([SimpleNamespace(args=("to", same))])) == 1
    with pytest.raises(errors.UserError, match="num_beams=10") as error:
        lm.generate_until([SimpleNamespace(args=("to", same | dict(num_beams=10)))])
    assert error.value.code == errors.DATA


@live
def test_repeats_of_a_prompt_are_different_texts_in_every_batch():
    from scripts import lm_eval

    cfg = on_mesh(PLAIN, train=dict(seq_len=LENGTH))
    lm = lm_eval.Run(params_of(cfg), byte_tokenizer(), cfg)
    repeat = SimpleNamespace(args=("to", dict(max_gen_toks=5, do_sample=True, temperature=1.0)))
    n = cfg.train.batch_size + 1  # one more than a batch
    assert len(set(lm.generate_until([repeat] * n))) == n


@pytest.mark.skipif(bool(find_spec("lm_eval")), reason="for an environment without the harness")
def test_without_the_harness_it_says_how_to_install_it(tmp_path):
    done = run("scripts/lm_eval.py", "--run", tmp_path, "--tasks", "arc_easy")
    assert done.returncode == errors.USAGE and done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: the harness is not installed: Python has no package lm_eval",
        "  fix: pip install lm-eval==0.4.13",
    ]


@live
@pytest.mark.parametrize("words, what", [
    (["--tasks", "endings,"], "the harness knows no task ''"),
    (["--tasks", "endings", "--num_fewshot", "-1"], "num_fewshot=-1 must be at least 0"),
    (["--tasks", "endings", "--seq_len", "-1"], "seq_len=-1 must be at least 0"),
    (["--tasks", "endings", "--num_fewshot", "999"], "--num_fewshot 999 is more than the examples"),
    (["--tasks", "endings", "--include_path", "none"], "--include_path none is not a folder"),
])  # fmt: skip
def test_a_mistake_in_what_the_harness_is_given_is_named(trained, folder, words, what):
    done = run("scripts/lm_eval.py", "--run", trained, "--include_path", folder, *words)
    assert done.returncode == errors.USAGE and "Traceback" not in done.stderr
    assert f"error: {what}" in done.stderr and "\n  fix: " in done.stderr


@live
def test_questions_that_cannot_be_loaded_are_no_failure_of_storage(trained, tmp_path):
    """As without a network: no one has to free space."""
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/none.jsonl}}}}"
    (tmp_path / "t.yaml").write_text(f"task: gone\ntest_split: test\n{data}{TASKS['endings']}")
    words = ["--run", trained, "--include_path", tmp_path, "--tasks", "gone"]
    done = run("scripts/lm_eval.py", *words)
    error, fix = done.stderr.splitlines()[-2:]
    assert done.returncode == errors.DATA and error.startswith("error: the questions of gone ")
    assert f"{tmp_path}/none.jsonl" in error and "network" in fix


@live
def test_processes_that_find_other_questions_stop(trained, folder, tmp_path):
    """Each computes a part of a batch, so the scores would be of no one's questions."""
    flags = ["--run", trained, "--include_path", "own", "--tasks", "endings"]
    for n in range(2):
        own = tmp_path / str(n) / "own"
        own.mkdir(parents=True)
        lines = (folder / "data.jsonl").read_text().splitlines()
        (own / "data.jsonl").write_text("\n".join(lines[n:]))
        task = (folder / "endings.yaml").read_text().replace(str(folder), str(own))
        (own / "endings.yaml").write_text(task)
    for code, _, err in two_processes("lm_eval.py", *flags, cwd=(tmp_path / "0", tmp_path / "1")):
        assert code == errors.USAGE and "what the harness asks differs: " in err, err
