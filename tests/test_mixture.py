"""Mixtures, stages, left-out updates, several validation sets, and masks of what is scored."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from conftest import MESHES, ROOT, on_mesh
from runs import (
    finish,
    flags,
    free_port,
    losses,
    new_run,
    refusal,
    rows,
    start,
    start_two,
    wait_for_step,
)

import order
import parsers
import train
from config import Data, Mesh
from dataset import Dataset, check_tokenizers
from errors import CHECKPOINT, DATA, UserError
from files import saved_steps
from order import Order, Pattern, permute


def weights_of(**weights) -> Pattern:
    weights = {name: Fraction(str(weight)) for name, weight in weights.items()}
    return Pattern(weights, [*weights])


# ---- patterns


@pytest.mark.parametrize("seed", range(30))
def test_every_prefix_has_each_source_within_one_row_of_its_weight(seed):
    random = np.random.default_rng(seed)
    weights = random.integers(0, 40, random.integers(1, 9)) / 100
    weights[0] += 0.01
    pattern = weights_of(**{f"s{n}": weight for n, weight in enumerate(weights.round(2))})
    share = pattern.weights / pattern.weights.sum()
    n = 3 * pattern.period + 7
    sources, before = pattern.locate_rows(np.arange(n))
    count = np.zeros(len(weights), int)
    for row, source in enumerate(sources):
        assert before[row] == count[source]
        count[source] += 1
        assert (np.abs(count - (row + 1) * share) < 1).all()
        if row % 50 == 0:
            np.testing.assert_array_equal(pattern.count_rows(row + 1), count)


def test_weights_of_too_many_digits_are_refused(time_limit):
    with pytest.raises(UserError, match="repeat after 1,000,000 rows"):
        weights_of(a="0.333333", b="0.666667")
    # The sum of these is above 2**63.
    large = {f"s{n}": f"999999999.99999999{n}" for n in range(10)}
    with pytest.raises(UserError, match="repeat after 9,999,999,999,999,999,945 rows"):
        weights_of(**large)


def test_stages_of_many_sources_begin_soon(time_limit):
    for _ in range(4):
        weights = {f"s{n}": "0.00333" for n in range(299)} | dict(rest="0.00433")
        assert weights_of(**weights).period == 100_000


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1000, 5_000_000_000])
def test_a_permutation_has_an_inverse(n):
    i = np.unique(np.linspace(0, n - 1, 1000).astype(np.int64))
    for key in (0, 3, 2**63 + 5):
        np.testing.assert_array_equal(permute(permute(i, n, key), n, key, inverse=True), i)


# ---- the order of a run

MIXED = dict(train="a=x:0.7,b=y:0.2,c=z:0.1", stages=("5:a=0.2,c=0.8", "9:b=1"), skip="3:5,8,20:22")


@pytest.fixture(params=["", "0:3,4:5,11:16"], ids=["one size", "ramp"])
def sized(cfg, request):
    """cfg with batches of 64, or with a ramp."""
    size = 16 if request.param else cfg.train.batch_size
    return replace(cfg, train=replace(cfg.train, batch_ramp=request.param, batch_size=size))


def order_of(cfg, n_windows=(50, 7, 400), **data) -> Order:
    return Order(replace(cfg, data=Data(**data)), [*n_windows])


def test_sources_keep_their_own_epochs_through_stages(sized):
    order = order_of(sized, **MIXED | dict(skip=""))
    seen = {n: [] for n in range(3)}
    for step in range(40):
        sources, epochs, windows = order.batch(step)
        for row in zip(sources.tolist(), epochs.tolist(), windows.tolist(), strict=True):
            seen[row[0]].append(row[1:])
    for n, n_windows in enumerate((50, 7, 400)):
        assert [epoch for epoch, _ in seen[n]] == [k // n_windows for k in range(len(seen[n]))]
        for first in range(0, len(seen[n]) - n_windows, n_windows):
            epoch = [window for _, window in seen[n][first : first + n_windows]]
            assert sorted(epoch) == list(range(n_windows))
    assert Counter(order.batch(30)[0].tolist()) == {1: sized.train.batch_size}
    in_second = np.concatenate([order.batch(step)[0] for step in range(5, 9)])
    assert 1 not in in_second and abs((in_second == 2).mean() - 0.8) < 0.02


def test_sources_have_orders_of_their_own_wherever_they_are_named(cfg):
    def windows(names) -> dict:
        order = order_of(cfg, [50] * len(names), train=",".join(f"{name}=x" for name in names))
        sources, _, windows = order.batch(0)
        return {name: windows[sources == n].tolist() for n, name in enumerate(names)}

    assert (found := windows("ab")) == windows("ba") and found["a"] != found["b"]


def test_updates_that_are_left_out_move_the_later_ones_up(sized):
    whole, cut = order_of(sized, **MIXED | dict(skip="")), order_of(sized, **MIXED)
    kept = [step for step in range(60) if step + 1 not in (3, 4, 8, 20, 21)]
    for step, before in enumerate(kept[:50]):
        np.testing.assert_array_equal(cut.batch(step), whole.batch(before))
        counted = Counter()
        for earlier in kept[: step + 1]:
            counted.update(whole.batch(earlier)[0].tolist())
        trained_on = [*cut.trained_on(step + 1).values()]
        assert trained_on == [counted[n] for n in range(3)] and {*map(type, trained_on)} == {int}


def test_thousands_of_updates_that_are_left_out_take_no_time(cfg, time_limit):
    ranges = ",".join(f"{n}:{n + 2}" for n in range(1, 80_000, 4))
    order = order_of(cfg, train="a=x:0.7,b=y:0.2,c=z:0.1", skip=ranges)
    for step in range(39_980, 40_000):
        assert sum(order.trained_on(step).values()) == step * cfg.train.batch_size


@pytest.mark.parametrize("at_once", [7, 1000])
def test_the_updates_that_a_window_feeds_are_found(sized, monkeypatch, at_once):
    monkeypatch.setattr(order, "UPDATES_AT_ONCE", at_once)
    sized = replace(sized, train=replace(sized.train, steps=40))
    ours = order_of(sized, **MIXED)
    fed = {}
    for step in range(40):
        sources, _, windows = ours.batch(step)
        for place in zip(sources.tolist(), windows.tolist(), strict=True):
            fed.setdefault(place, set()).add(step + 1)
    for source, n_windows in enumerate((50, 7, 400)):
        for window in range(n_windows):
            want = sorted(fed.get((source, window), ()))
            assert ours.updates_of(source, range(window, window + 1)) == want


@pytest.mark.parametrize("skip", [MIXED["skip"], *(f"{n}:{n + 6}" for n in range(2, 20, 3))])
def test_a_limit_of_epochs_names_the_first_update_beyond_it(sized, skip):
    sized = replace(sized, train=replace(sized.train, steps=40))
    order = order_of(sized, **MIXED | dict(skip=skip))
    for limit in (1, 2, 3):
        beyond = [step for step in range(40) if order.batch(step)[1].max() >= limit]
        sources, epochs, _ = order.batch(beyond[0])
        name = order.names[sources[np.argmax(epochs >= limit)]]
        assert order.first_beyond(limit) == (name, beyond[0] + 1)
    assert order.first_beyond(1000) is None


def test_a_path_may_end_in_a_number():
    for path in ("run:20", "x:5000000000", "host:9000", "gs://bucket/v:1.2.3"):
        assert parsers.read_sets(f"a={path}:0.5,b=y") == dict(a=(path, 0.5), b=("y", 1))
    assert parsers.read_sets("a=gs://bucket/v:1.2.3")["a"] == ("gs://bucket/v:1.2.3", 1)


@pytest.mark.parametrize("flags, word", [
    (dict(train="a=x:0.5,a=y"), "given twice"),
    (dict(train="a=x:0,b=y:0"), "all weights are 0"),
    (dict(train="a=x,y"), "'y' is not NAME=PATH"),
    (dict(train="a=x:1e-3,b=y"), "the weight in 'a=x:1e-3' is no decimal number"),
    (dict(train="a=x:0.0000000001,b=y"), "the weight in 'a=x:0.0000000001' is no decimal"),
    (dict(train="a=x:-1,b=y:"), "the weight in 'a=x:-1' is no decimal"),
    (dict(train="a=x:,b=y"), "the weight in 'a=x:' is no decimal"),
    (dict(train="a=x:70%,b=y:30%"), "the weight in 'a=x:70%' is no decimal"),
    (dict(train="a=x:1/3,b=y:2/3"), "the weight in 'a=x:1/3' is no decimal"),
    (dict(train="a=x,b=y", stages=("5:c=1",)), "names 'c', but data.train has a, b"),
    (dict(train="x", stages=("5:c=1",)), "data.train has no names"),
    (dict(train="a=x", stages=("five:a=1",)), "is not UPDATES:NAME=WEIGHT"),
    (dict(train="a=x", stages=("5:a=1", "5:a=2")), "does not begin after"),
    (dict(train="a=x", stages=("0:a=1", "0:a=2")), "does not begin after"),
    (dict(train="a=x:3,b=y:2", stages=("0:a=3",)), "at once, with other weights than data.train"),
    (dict(skip="0"), "counted from 1"),
    (dict(skip="7:7"), "neither an update nor FIRST:STOP"),
    (dict(skip="x"), "neither an update nor FIRST:STOP"),
])  # fmt: skip
def test_words_that_cannot_be_are_named(flags, word):
    data = Data(**flags)
    with pytest.raises(ValueError, match=re.escape(word)):
        parsers.read_stages(data.stages, parsers.read_sets(data.train))
        parsers.read_skip(data.skip)


def test_a_stage_may_begin_at_once_with_the_weights_of_data_train():
    for text in ("a=x:0.7,b=y:0.3", "a=x,b=y"):
        stages = parsers.read_stages(("0:a=0.7,b=0.3", "8:b=1"), parsers.read_sets(text))
        assert stages == {0: dict(a=Fraction("0.7"), b=Fraction("0.3")), 8: dict(b=1)}


# ---- runs


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    """Three sets of different lengths, whose tokens are 0 to 99, 100 to 199 and 200 to 299; the
    last has a mask."""
    folder, random = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    for n, (name, n_tokens) in enumerate(dict(a=9000, b=3000, c=2500).items()):
        (folder / name).mkdir()
        tokens = random.integers(100 * n, 100 * n + 100, n_tokens, dtype=np.uint16)
        np.save(folder / name / "tokens.npy", tokens)
    (random.random(2500) < 0.5).astype(np.uint8).tofile(folder / "c" / "tokens.mask")
    return folder


@pytest.fixture
def mixed(base, sets):
    a, b, c = (sets / name for name in "abc")
    data = Data(
        train=f"a={a}:0.6,b={b}:0.3,c={c}:0.1",
        val=f"b={b},c={c}",
        stages=("7:a=0.2,b=0.4,c=0.4",),
        skip="5:7",
    )
    return replace(base, data=data)


def test_a_batch_of_a_mixture_is_the_same_on_every_mesh(mixed, sets):
    mixed = replace(mixed, train=replace(mixed.train, microbatches=4))

    def batch(step, mesh):
        data = Dataset(on_mesh(mixed, mesh), "train")
        return [np.asarray(x).reshape(mixed.train.batch_size, -1) for x in data.batch(step)]

    steps = (0, 3, 4, 6, 15)  # in both stages, before and after those that are left out
    want = {step: batch(step, (1, 1, 1)) for step in steps}
    for mesh, step in product([m for m in MESHES if m[1] <= mixed.model.n_layers], steps):
        np.testing.assert_array_equal(batch(step, mesh), want[step])
    data = Dataset(on_mesh(mixed), "train")
    assert "the last 17 tokens do not fill one" in str(data)  # 7, 7 and 3
    scored = np.fromfile(sets / "c" / "tokens.mask", np.uint8)
    tokens_c, L = np.load(sets / "c" / "tokens.npy"), mixed.train.seq_len
    sources, _, windows = data.order.batch(15)
    tokens, targets = batch(15, (1, 1, 1))
    assert (tokens // 100 == sources[:, None]).all() and set(sources.tolist()) == {0, 1, 2}
    for row in np.flatnonzero(sources == 2):
        at = slice(windows[row] * L + 1, windows[row] * L + L + 1)
        np.testing.assert_array_equal(
            targets[row], np.where(scored[at], tokens_c[at].astype(int), -1)
        )
    assert (targets[sources != 2] >= 0).all()


def test_a_run_on_a_mixture_reports_each_set_and_resumes(mixed, sets, capsys):
    cfg, run = new_run(mixed, "mixed", checkpoint=dict(best=True))
    train.main(on_mesh(cfg, (2, 2, 2)))
    L = cfg.train.seq_len
    order = Dataset(on_mesh(cfg), "train").order
    for step, row in rows(run).items():
        counts = {name: n * L for name, n in order.trained_on(step).items()}
        assert row["tokens_by_source"] == counts and sum(counts.values()) == row["tokens"]
    table = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evals = [(row["set"], row["step"]) for row in table if row["kind"] == "eval"]
    due = sorted({step for _, step in evals})
    assert evals == [(name, step) for step in due for name in "bc"]
    scored = [row["tokens"] for row in table if row["kind"] == "eval" and row["set"] == "c"]
    n = cfg.train.eval_batches * cfg.train.batch_size * L
    assert scored[0] == np.fromfile(sets / "c" / "tokens.mask", np.uint8)[1 : n + 1].sum()
    out = capsys.readouterr().out
    assert out.count("begins epoch 2 of b") == 1 and "val c: 2,500 tokens" in out

    other = replace(cfg, data=replace(cfg.data, skip="5"), train=replace(cfg.train, steps=24))
    error = refusal(on_mesh(other, (1, 1, 1)))
    assert error.code == CHECKPOINT and "data.skip was 5:7 at this run's last start" in str(error)
    heavier = replace(cfg.data, train=cfg.data.train.replace(":0.6", ":0.9"))
    error = refusal(on_mesh(replace(cfg, data=heavier), (1, 1, 1)))
    assert error.code == CHECKPOINT and "data.train fingerprint" in str(error)


SAVE_BATCHES = """
import sys
sys.path.insert(0, {root!r})
import cli
cfg = cli.start()
import numpy as np
import processes, utils
from dataset import Dataset

def save_batches(cfg):
    data = Dataset(utils.start_mesh(cfg), "train")
    for step in {steps}:
        for n, array in enumerate(data.batch(step)):
            for shard in array.addressable_shards:
                where = [s.indices(size)[:2] for s, size in zip(shard.index, array.shape)]
                name = f"{{step}}_{{n}}_{{cfg.run.process_id}}_{{shard.device.id}}.npz"
                np.savez({out!r} + "/" + name, where=where, part=shard.data, shape=array.shape)

processes.run_main(save_batches, cfg)
"""


@pytest.mark.slow
@pytest.mark.parametrize("n_processes", [2, 4])
def test_a_batch_of_a_mixture_is_the_same_in_many_processes(mixed, tmp_path, n_processes):
    steps, mesh = (0, 3, 6, 15), (4, 1, 2)
    cfg = replace(mixed, mesh=Mesh(*mesh))
    code = SAVE_BATCHES.format(root=str(ROOT), steps=steps, out=str(tmp_path))
    env = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    address, all_of_them = f"127.0.0.1:{free_port()}", []
    for n in range(n_processes):
        shared = dict(coordinator=address, num_processes=n_processes, process_id=n)
        one = flags(replace(cfg, run=replace(cfg.run, **shared)))
        command = [sys.executable, "-c", code, "--config", "tiny", *one]
        all_of_them.append(subprocess.Popen(command, env=env))
    assert [process.wait(timeout=200) for process in all_of_them] == [0] * n_processes
    data = Dataset(on_mesh(mixed, (1, 1, 1)), "train")
    for step in steps:
        for n, want in enumerate(data.batch(step)):
            files = [np.load(path) for path in tmp_path.glob(f"{step}_{n}_*.npz")]
            got = np.full(files[0]["shape"], -2)
            for file in files:
                got[tuple(slice(*span) for span in file["where"])] = file["part"]
            rows_of = mixed.train.batch_size, -1
            np.testing.assert_array_equal(got.reshape(rows_of), np.reshape(want, rows_of))


@pytest.mark.slow
def test_two_processes_and_a_kill_change_nothing_of_a_mixture(mixed):
    cfg, run = new_run(mixed, "one", mesh=dict(dp=2, pp=1, tp=1))
    assert finish(start(cfg))[0] == 0
    two, other = new_run(mixed, "two_of_a_mixture", mesh=dict(dp=2, pp=1, tp=1))
    first = start_two(two)
    wait_for_step(first[0], other, 8)
    for process in first:
        process.kill()
        finish(process)
    assert [finish(process)[0] for process in start_two(two)] == [0, 0]
    want, got = ([float.fromhex(x.split()[0]) for x in losses(x)] for x in (run, other))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert [row["tokens_by_source"] for row in rows(run).values()] == [
        row["tokens_by_source"] for row in rows(other).values()
    ]


@pytest.mark.slow
def test_the_ids_are_those_of_a_run_without_a_kill_and_a_rollback(mixed, monkeypatch):
    """After both, in both stages and on another mesh; a start's first batch is that of the update
    after its checkpoint."""
    endless = dict(checkpoint=dict(every=4, keep=20), train=dict(steps=100_000))
    cfg, run = new_run(mixed, "ids", mesh=dict(dp=1, pp=1, tp=1), **endless)
    process = start(cfg)
    wait_for_step(process, run, 9)
    process.kill()
    finish(process)
    steps = saved_steps(run)[-1] + 8
    noted, batch = [], Dataset.batch

    def note(self, step):
        arrays = batch(self, step)
        if self.split == "train":
            noted.append([np.asarray(x).reshape(cfg.train.batch_size, -1) for x in arrays])
        return arrays

    def check_ids(cfg) -> int:
        """Train, and compare the batches with those of the same settings; how many there were."""
        noted.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Dataset, "batch", note)
            train.main(on_mesh(cfg, (1, 2, 2)))
        first = json.loads((run / "history.jsonl").read_text().splitlines()[-1])["step"]
        assert len(noted) == steps - first
        data = Dataset(on_mesh(cfg, (1, 1, 1)), "train")
        for step, arrays in enumerate(noted, start=first):
            for got, want in zip(arrays, batch(data, step), strict=True):
                np.testing.assert_array_equal(got, np.reshape(want, got.shape))
        return len(noted)

    accept = replace(cfg.run, accept=("train.steps", "data.skip"))
    cfg = replace(cfg, run=accept, train=replace(cfg.train, steps=steps))
    assert check_ids(cfg) == 8
    before = noted[4:]
    skip = replace(cfg.data, skip=f"5:7,{steps}")  # the run's update steps - 2
    back = replace(cfg, data=skip, rollback=steps - 4)
    assert check_ids(back) == 4
    same = [np.array_equal(a[0], b[0]) for a, b in zip(noted, before, strict=True)]
    assert same == [True, False, False, False]


@pytest.mark.slow
def test_a_batch_of_which_nothing_is_scored_changes_little(base, tmp_path):
    """Weight decay is all that is left; the update is not skipped."""
    np.save(tmp_path / "x.npy", np.arange(4000, dtype=np.uint16) % 300)
    np.zeros(4000, np.uint8).tofile(tmp_path / "x.mask")
    path = str(tmp_path / "x.npy")
    cfg, run = new_run(base, "none", data=dict(train=path, val=path), train=dict(steps=2))
    train.main(on_mesh(cfg, (2, 1, 1)))
    assert [row["loss"] for row in rows(run).values()] == [0, 0]
    assert [row["grad_norm"] for row in rows(run).values()] == [0, 0]
    (row,) = rows(run, "eval").values()
    assert row["loss"] is None and row["tokens"] == 0


def test_a_run_beyond_data_epochs_max_does_not_start(mixed):
    cfg = replace(mixed, data=replace(mixed.data, epochs_max=1))
    with pytest.raises(UserError, match=r"would begin epoch 2 of b\n.*--train.steps") as error:
        Dataset(on_mesh(cfg), "train")
    assert error.value.code == DATA
    fits = int(re.search(r"--train.steps (\d+)", str(error.value))[1])
    cfg = replace(cfg, train=replace(cfg.train, steps=fits))
    data = Dataset(on_mesh(cfg), "train")
    assert max(data.order.batch(step)[1].max() for step in range(fits)) == 0
    assert data.order.batch(fits)[1].max() == 1


def test_sets_that_cannot_be_mixed_are_named(cfg, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(10, np.uint16))
    for first, what in (
        ("synthetic:x", "synthetic:x is not a data set"),
        ("synthetic", "data.train: x holds 10 tokens"),
    ):
        data = dict(train=f"a={first},x={tmp_path / 'x.npy'}")
        with pytest.raises(UserError, match=what) as error:
            Dataset(on_mesh(cfg, data=data), "train")
        assert error.value.code == DATA
    with pytest.raises(UserError) as absent:
        Dataset(on_mesh(cfg, data=dict(train="a.b=x:0.5,c=y:0.5")), "train")
    assert "a NAME has letters, digits, _ and - only" in absent.value.problems[0].fix


@pytest.mark.parametrize("end", [None, 7])
def test_sets_of_different_tokenizers_are_refused(base, corpus, tmp_path, end):
    """Within a mixture, and for validation; where there is no tokenizer.json, by its end_id.  Only
    those that differ from the first are named."""
    a, other = corpus / "train", tmp_path / "other"
    shutil.copytree(corpus / "val", other)
    text = (other / "tokenizer.json").read_text()
    if end is None:
        (other / "tokenizer.json").write_text(text.replace('"!"', '"other"', 1))
    else:
        (other / "tokenizer.json").unlink()
        manifest = json.loads((other / "manifest.json").read_text())
        (other / "manifest.json").write_text(json.dumps(manifest | dict(eot_id=end)))
    how = "has another tokenizer" if end is None else "ends documents with another token"
    for data, (first, others) in {
        (f"a={a},b={other}", str(corpus / "val")): ("data.train a", "data.train b"),
        (f"a={other},b={a}", str(corpus / "val")): ("data.train a", "data.train b, data.val"),
        (str(a), f"{other}"): ("data.train", "data.val"),
        (str(a), f"a={a},b={other}"): ("data.train", "data.val b"),
    }.items():
        sets = dict(train=data[0], val=data[1])
        error = refusal(on_mesh(replace(base, data=replace(base.data, **sets)), (1, 1, 1)))
        assert error.code == DATA and f"{first} {how} than {others}\n" in f"{error}\n"


def test_the_layout_of_a_tokenizer_makes_no_difference(cfg, corpus, tmp_path):
    shutil.copytree(corpus / "val", tmp_path / "other")
    path = tmp_path / "other" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=4))
    mixed = dict(train=f"a={corpus / 'train'},b={path.parent}")
    check_tokenizers({"data.train": Dataset(on_mesh(cfg, data=mixed), "train").source})


def test_the_fingerprint_says_which_shard_a_mask_belongs_to(cfg, tmp_path):
    seen = set()
    for masked in ("", "a", "b"):
        folder = tmp_path / f"masked_{masked}"
        folder.mkdir()
        for name in "ab":
            np.save(folder / f"{name}.npy", np.arange(1000, dtype=np.uint16) % 500)
        if masked:
            np.zeros(1000, np.uint8).tofile(folder / f"{masked}.mask")
        data = Dataset(on_mesh(cfg, data=dict(train=str(folder))), "train")
        seen.add(data.source.fingerprint)
    assert len(seen) == 3


def test_a_mask_of_another_length_is_refused(cfg, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(1000, np.uint16))
    np.zeros(999, np.uint8).tofile(tmp_path / "x.mask")
    with pytest.raises(UserError, match="has 999 bytes, but 'x.npy' 1000 tokens"):
        Dataset(on_mesh(cfg, data=dict(train=str(tmp_path))), "train")
