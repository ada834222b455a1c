"""Data: what is read and in which order, what is refused, and the seams for formats and sources."""

import hashlib
import itertools
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import on_mesh
from etils import epath

import dataset
import order
import pages
import runstate
import shards
import train
from dataset import Dataset, Source
from errors import DATA, STORAGE, USAGE, UserError
from shards import Shard


def all_tokens(folder) -> np.ndarray:
    """Every token of a prepared set, read directly from the .npy files."""
    found = json.loads((folder / "manifest.json").read_text())["shards"]
    return np.concatenate([np.load(folder / s["name"]) for s in found])


def open_set(cfg, path, split="train") -> Dataset:
    """The data at path, on one device."""
    return Dataset(on_mesh(cfg, data={split: str(path)}), split)


def problem_of(cfg, path, split="train", read=False) -> str:
    """What the one problem is that opening this set, or reading it too, ends with."""
    with pytest.raises(UserError) as error:
        data = open_set(cfg, path, split)
        if read:
            data.source.read(0, data.source.n_tokens)
    assert error.value.code == DATA
    (problem,) = error.value.problems
    return problem.what


# ---- order


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 1000])
def test_an_epoch_is_a_permutation(n):
    for key in (0, 1, 12345678901234567):
        assert sorted(order.permute(np.arange(n), n, key)) == list(range(n))
    if n > 60:
        first, second = (order.permute(np.arange(n), n, key) for key in (1, 2))
        assert (first != second).mean() > 0.9
        distance = np.abs(first - np.arange(n)).mean() / n
        assert 0.25 < distance < 0.42  # a third of n for a random permutation


def test_billions_of_windows_need_no_table():
    n = 5_000_000_000
    got = order.permute(np.arange(1000), n, 3)
    assert len(set(got.tolist())) == 1000 and 0.4 < got.mean() / n < 0.6
    assert got.min() >= 0 and got.max() < n


def test_an_epoch_has_every_window_once_and_epochs_differ(cfg):
    data = Dataset(on_mesh(cfg), "train")
    steps = 3 * data.n_windows // cfg.train.batch_size
    rows = np.concatenate([data.batch_windows(step) for step in range(steps + 1)])
    epochs = [rows[k * data.n_windows : (k + 1) * data.n_windows] for k in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(data.n_windows))
    assert (epochs[0] != epochs[1]).any()


def test_a_batch_holds_tokens_and_next_tokens_in_the_seeded_order(cfg, corpus):
    cfg = on_mesh(cfg, (2, 2, 2), train=dict(grad_accum=2))
    data, expected = Dataset(cfg, "train"), all_tokens(corpus / "train")
    assert len(data.source.shards) > 1  # windows cross the borders of shards
    tokens, targets = (np.asarray(x).reshape(cfg.train.batch_size, -1) for x in data.batch(5))
    L = cfg.train.seq_len
    for row, x, y in zip(data.batch_windows(5), tokens, targets, strict=True):
        np.testing.assert_array_equal(x, expected[row * L : row * L + L])
        np.testing.assert_array_equal(y, expected[row * L + 1 : row * L + L + 1])


def test_a_batch_depends_on_data_seed_and_step_only(cfg):
    def batch(step, mesh=(1, 1, 1), earlier=(), **sections):
        data = Dataset(on_mesh(cfg, mesh, **sections), "train")
        for earlier_step in earlier:
            data.batch(earlier_step)
        return np.stack([np.asarray(x).reshape(cfg.train.batch_size, -1) for x in data.batch(step)])

    want = batch(7)
    for mesh in [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)]:
        np.testing.assert_array_equal(batch(7, mesh), want)
    split = dict(grad_accum=4, microbatches=2)
    np.testing.assert_array_equal(batch(7, (2, 2, 1), train=split), want)
    np.testing.assert_array_equal(batch(7, earlier=[0]), want)  # batch 1 was read ahead
    np.testing.assert_array_equal(batch(7, earlier=[0, 1, 6]), want)  # batch 7 was read ahead
    assert (batch(8) != want).any() and (batch(7, run=dict(seed=1)) != want).any()


# ---- evaluation


def evaluate(cfg, mesh, step, **fields) -> tuple[dict, list[int]]:
    """The eval row of the initial weights, and the batches that it is the mean of."""
    cfg = on_mesh(cfg, mesh, train=fields)
    data = Dataset(cfg, "val")
    result = train.evaluate(runstate.init_state(cfg).params, data, step, cfg)
    return result, data.eval_indices(step).tolist()


@pytest.mark.slow
def test_the_whole_set_counts_every_token_once_on_any_mesh(cfg, corpus):
    n = len(all_tokens(corpus / "val")) - 1
    want, _ = evaluate(cfg, (1, 1, 1), 10)
    assert want["tokens"] == n
    assert n % (cfg.train.batch_size * cfg.train.seq_len)  # the last batch is padded
    for mesh, fields in [((2, 2, 2), {}), ((8, 1, 1), dict(grad_accum=2)), ((1, 4, 2), {})]:
        got, _ = evaluate(cfg, mesh, 10, **fields)
        assert got["tokens"] == n
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-6)
    other, _ = evaluate(cfg, (1, 1, 1), 10, batch_size=8)
    np.testing.assert_allclose(other["loss"], want["loss"], rtol=1e-6)


def test_the_rest_of_a_validation_set_is_not_said_to_be_left_out(cfg, corpus):
    left = (len(all_tokens(corpus / "val")) - 1) % cfg.train.seq_len
    assert f"; the last {left} tokens are in a padded one" in str(Dataset(on_mesh(cfg), "val"))


def test_bits_per_byte_of_one_byte_tokens_is_the_loss_in_bits(cfg):
    got, _ = evaluate(cfg, (1, 1, 1), 10, eval_batches=1)
    np.testing.assert_allclose(got["bits_per_byte"], got["loss"] / np.log(2), rtol=0.01)


@pytest.mark.slow
def test_four_kinds_of_evaluation(cfg):
    """{first n batches, the whole set} x {the same each time, rolling}."""
    small = dict(batch_size=8, eval_every=10)
    n = evaluate(cfg, (1, 1, 1), 10, **small)[1][-1] + 1

    def batches(step, **fields):
        return evaluate(cfg, (1, 1, 1), step, **small, **fields)[1]

    assert n > 4
    assert batches(10, eval_batches=2) == batches(20, eval_batches=2) == [0, 1]
    assert batches(10) == batches(20) == list(range(n))
    assert batches(10, eval_batches=2, eval_rolling=True) == [0, 1]
    assert batches(20, eval_batches=2, eval_rolling=True) == [2, 3]
    # After the end of the set, its start.
    assert batches(10 * (n + 1), eval_batches=1, eval_rolling=True) == [0]
    assert sorted(batches(20, eval_rolling=True)) == list(range(n))
    # The evaluation at the end of a run, between two regular ones.
    assert batches(25, eval_batches=2, eval_rolling=True) == [4, 5]
    assert batches(10, eval_batches=10**6) == list(range(n))  # no batch twice


# ---- formats


def test_nanogpt_bin_files(cfg, corpus, tmp_path):
    tokens = all_tokens(corpus / "train")
    parts = dict(train=tokens[:20_000], val=tokens[20_000:])
    for split, part in parts.items():
        part.astype(np.uint16).tofile(tmp_path / f"{split}.bin")
    for split, part in parts.items():
        for path in (tmp_path, tmp_path / f"{split}.bin"):
            source = open_set(cfg, path, split).source
            np.testing.assert_array_equal(source.read(0, source.n_tokens), part)
            assert source.bytes_per_token is None
    (tmp_path / "train.bin").write_bytes(b"abc")
    assert "3 bytes is not a whole number of uint16" in problem_of(cfg, tmp_path)
    (tmp_path / "train.bin").unlink()
    assert "val.bin there belongs to the other split" in problem_of(cfg, tmp_path)


@pytest.mark.parametrize("magic, dtype", [(20240520, "uint16"), (20240801, "uint32")])
def test_a_bin_file_with_the_header_of_llmc_is_refused(cfg, tmp_path, magic, dtype):
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, 1000
    (tmp_path / "train.bin").write_bytes(header.tobytes() + np.zeros(1000, dtype).tobytes())
    with pytest.raises(UserError, match=rf"begins with llm.c's header.*\({dtype}\)") as error:
        open_set(cfg, tmp_path / "train.bin")
    assert error.value.code == DATA and "docs/extending.md" in error.value.problems[0].fix


def test_jaxformer_bare_npy_shards(cfg, corpus, tmp_path):
    tokens = all_tokens(corpus / "train")
    for n, dtype in enumerate(["uint16", "uint32", "int32", "int64"]):
        np.save(tmp_path / f"shard_{n}.npy", tokens[n * 5000 : (n + 1) * 5000].astype(dtype))
    source = open_set(cfg, tmp_path).source
    np.testing.assert_array_equal(source.read(0, 20_000), tokens[:20_000])
    tokens[:5000].astype(np.uint16).tofile(tmp_path / "more.bin")
    assert "formats, such as shard_0.npy and more.bin" in problem_of(cfg, tmp_path)


def test_files_whose_owner_has_no_account_are_read(cfg, corpus, tmp_path, monkeypatch):
    """As in a container that is started with the number of a user."""
    monkeypatch.setattr("pwd.getpwuid", mock.Mock(side_effect=KeyError("uid not found")))
    tokens = all_tokens(corpus / "train")[:20_000].astype(np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    np.save(tmp_path / "shard.npy", tokens)
    np.ones(20_000, np.uint8).tofile(tmp_path / "shard.mask")
    for path in (tmp_path / "train.bin", tmp_path / "shard.npy"):
        np.testing.assert_array_equal(open_set(cfg, path).source.read(0, 20_000), tokens)
    assert open_set(cfg, corpus / "train").source.decode([65]) == "A"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nanoGPT", "JAXformer"])
def test_folders_of_others_are_trained_on(cfg, corpus, tmp_path, layout):
    """nanoGPT's folder has train.bin and val.bin, JAXformer's a folder of .npy for each split."""
    data = {split: str(tmp_path / split) for split in ("train", "val")}
    if layout == "nanoGPT":
        data = dict.fromkeys(data, str(tmp_path))
    for split in data:
        tokens = all_tokens(corpus / split).astype(np.uint16)
        if layout == "nanoGPT":
            tokens.tofile(tmp_path / f"{split}.bin")
            continue
        (tmp_path / split).mkdir()
        for n, part in enumerate(np.array_split(tokens, 3)):
            np.save(tmp_path / split / f"shard_{n}.npy", part)
    few = dict(steps=12, eval_every=12)
    cfg = on_mesh(cfg, (2, 1, 1), data=data, train=few, run=dict(name=layout))
    train.main(cfg)
    text = (Path(cfg.run.dir) / layout / "metrics.jsonl").read_text()
    *rows, last = [json.loads(line) for line in text.splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.5
    assert last["kind"] == "eval" and last["tokens"] == len(all_tokens(corpus / "val")) - 1
    assert last["loss"] < losses[0] - 0.5


@pytest.mark.parametrize("array, word", [
    (np.array([{}, 1], dtype=object), "dtype object"),
    (np.zeros((4, 4), np.uint16), "one dimension"),
    (np.zeros(100, ">u2"), "dtype >u2"),
    (np.zeros(100, np.float32), "dtype float32"),
    (np.zeros(0, np.uint16), "one dimension with tokens"),
], ids=["pickle", "2-D", "big-endian", "float", "empty"])  # fmt: skip
def test_other_arrays_are_refused(cfg, tmp_path, array, word):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    assert word in problem_of(cfg, tmp_path)


# ---- seams: another format, another source


def test_a_format_is_one_entry_in_readers(cfg, corpus, tmp_path, monkeypatch):
    def big_endian_shard(path) -> Shard:
        return Shard(path, n_tokens=path.stat().length // 2, dtype=">u2", offset=0)

    monkeypatch.setitem(shards.READERS, ".be16", big_endian_shard)
    assert "no manifest.json, *.npy, *.bin or *.be16 among 0" in problem_of(cfg, tmp_path)
    tokens = all_tokens(corpus / "train")
    tokens[:9000].astype(">u2").tofile(tmp_path / "a.be16")
    tokens[9000:].astype(">u2").tofile(tmp_path / "b.be16")
    assert len(open_set(cfg, tmp_path / "a.be16").source.shards) == 1
    want = Dataset(on_mesh(cfg), "train").batch(3)
    for got, expected in zip(open_set(cfg, tmp_path).batch(3), want, strict=True):
        np.testing.assert_array_equal(got, expected)


class Counting(Source):
    """Window n counts from n in steps of 1 + n % 3."""

    def __init__(self, cfg, split):
        self.positions = np.arange(cfg.train.seq_len + 1)
        self.n_tokens = 500 * cfg.train.seq_len + 1
        self.fingerprint = f"counting {split}"

    def windows(self, numbers):
        increments = 1 + numbers % 3
        return (numbers[:, None] + increments[:, None] * self.positions) % 512


@pytest.mark.slow
def test_synthetic_tokens_have_four_successors_each_and_can_be_learnt(cfg):
    few = dict(steps=30, eval_every=15)
    cfg = on_mesh(cfg, (2, 2, 2), data=dict(train="synthetic", val="synthetic"), train=few)
    cfg = replace(cfg, model=replace(cfg.model, vocab_size=32), run=replace(cfg.run, name="chain"))
    sets = {split: Dataset(cfg, split).source for split in ("train", "val")}
    for source in sets.values():
        windows = source.windows(np.array([0, 3, 200]))
        np.testing.assert_array_equal(windows[1:2], source.windows(np.array([3])))
    windows = {split: source.windows(np.arange(200)) for split, source in sets.items()}
    pairs = {(a, b) for w in windows.values() for row in w for a, b in itertools.pairwise(row)}
    assert 3.5 * 32 < len(pairs) <= 4 * 32  # the same successors in both sets
    assert not {*map(bytes, windows["train"])} & {*map(bytes, windows["val"])}
    other = replace(cfg, run=replace(cfg.run, seed=1))
    assert (Dataset(other, "train").source.windows(np.arange(9)) != windows["train"][:9]).any()

    train.main(cfg)
    text = (Path(cfg.run.dir) / cfg.run.name / "metrics.jsonl").read_text()
    evals = [row["loss"] for row in map(json.loads, text.splitlines()) if row["kind"] == "eval"]
    assert np.log(4) < evals[1] < evals[0] < np.log(32)


@pytest.mark.slow
def test_a_source_is_one_class(cfg, monkeypatch):
    monkeypatch.setitem(dataset.SOURCES, "counting", Counting)
    few = dict(steps=12, eval_every=6)
    cfg = on_mesh(cfg, (2, 2, 2), data=dict(train="counting:", val="counting:"), train=few)
    data = Dataset(cfg, "train")
    tokens, targets = (np.asarray(x).reshape(cfg.train.batch_size, -1) for x in data.batch(0))
    np.testing.assert_array_equal((targets - tokens) % 512 - 1, (tokens[:, :1] % 3) + 0 * tokens)
    assert data.n_windows == 500 and str(data).startswith("8,001 tokens, 500 windows of 16")

    train.main(cfg)
    text = (Path(cfg.run.dir) / cfg.run.name / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    evals = [row for row in rows if row["kind"] == "eval"]
    assert [(row["step"], row["tokens"]) for row in evals] == [(6, 8000), (12, 8000)]
    assert evals[1]["loss"] < evals[0]["loss"] < np.log(512)

    too_small = on_mesh(cfg, model=dict(vocab_size=100))
    with pytest.raises(UserError, match="data.train gives token id .* model.vocab_size=100"):
        Dataset(too_small, "train").batch(0)


# ---- faults


def copy_set(folder, tmp_path) -> Path:
    return shutil.copytree(folder, tmp_path / "copy")


def first_shard(folder) -> Path:
    return min(folder.glob("*.npy"))


def test_the_folder_of_both_sets_is_answered_with_that_of_one(cfg, corpus):
    data = dict(train=str(corpus))
    with pytest.raises(UserError, match=f"fix: give its folder {corpus}/train"):
        Dataset(on_mesh(cfg, data=data), "train")


def test_a_set_that_has_lost_its_tokenizer_says_so(cfg, corpus, tmp_path):
    folder = copy_set(corpus / "train", tmp_path)
    assert "tokenizer" not in str(open_set(cfg, folder))
    (folder / "tokenizer.json").unlink()
    assert "without the tokenizer.json of its manifest" in str(open_set(cfg, folder))


def test_no_flipped_bit_of_a_manifest_changes_a_set_in_silence(cfg, corpus, tmp_path, capsys):
    folder = copy_set(corpus / "train", tmp_path)
    path = folder / "manifest.json"
    written = path.read_bytes()
    facts = json.loads(written)
    cfg = on_mesh(cfg, data=dict(train=str(folder)))
    said = "manifest.json is not as it was written"
    assert Dataset(cfg, "train") and said not in capsys.readouterr().err
    ends = {"refused": 0, "warned": 0, "harmless": 0}
    for at in range(0, 8 * len(written), 5):  # 5: every bit of a byte has its turn
        damaged = bytearray(written)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            Dataset(cfg, "train")
        except UserError as e:
            assert e.code == DATA
            ends["refused"] += 1
            continue
        if said in capsys.readouterr().err:
            ends["warned"] += 1
            continue
        found = json.loads(damaged)  # spaces, or the name of the field "digest"
        assert {name: found[name] for name in facts if name != "digest"} | facts == facts
        ends["harmless"] += 1
    assert all(ends.values()), ends


def flip_bit(folder):
    data = bytearray(first_shard(folder).read_bytes())
    data[-1] ^= 1
    first_shard(folder).write_bytes(data)


def flip_digest(folder):
    path = folder / "shard_00000.npy.pages"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def remove_digests(folder):
    (folder / "shard_00000.npy.pages").unlink()


def test_only_a_set_without_a_mask_has_bits_per_byte(cfg, corpus, tmp_path):
    """With one, part of the bytes would be divided by all tokens."""
    folder = tmp_path / "set"
    shutil.copytree(corpus / "val", folder)
    assert open_set(cfg, folder, "val").source.bytes_per_token > 0
    shard_entry(mask="0" * 32)(folder)
    assert open_set(cfg, folder, "val").source.bytes_per_token is None


def make_format_1(folder):
    """Make it a set as prepare_data wrote them once: with a checksum of each shard."""

    def change(manifest):
        manifest["format"] = 1
        for entry in manifest["shards"]:
            data = (folder / entry["name"]).read_bytes()
            del entry["offset"], entry["pages"]
            entry |= dict(dtype=manifest["dtype"], sha256=hashlib.sha256(data).hexdigest())

    manifest_change(change)(folder)
    for path in folder.glob("*.pages"):
        path.unlink()


def swap_shards(folder):
    a, b = sorted(folder.glob("*.npy"))[:2]
    a.rename(folder / "x")
    b.rename(a)
    (folder / "x").rename(b)


def remove_shard(folder):
    first_shard(folder).unlink()


def truncate_shard(folder):
    first_shard(folder).write_bytes(first_shard(folder).read_bytes()[:-7])


def make_pipe(folder):
    path = first_shard(folder)
    path.unlink()
    os.mkfifo(path)


def make_pipe_among_bare_shards(folder):
    (folder / "manifest.json").unlink()
    make_pipe(folder)


def make_pipe_of_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


def link_out(name: str):
    """The fault of a file that is a link to one outside of the data set."""

    def damage(folder):
        path = first_shard(folder) if name == "shard" else folder / name
        path.rename(folder.parent / "elsewhere")
        path.symlink_to(folder.parent / "elsewhere")

    return damage


def link_among_bare_shards(folder):
    (folder / "manifest.json").unlink()
    link_out("shard")(folder)


def append_byte(folder):
    first_shard(folder).write_bytes(first_shard(folder).read_bytes() + b"x")


def remove_all_files(folder):
    for path in folder.iterdir():
        path.unlink()


def manifest_text(text):
    """The fault of a manifest with this text."""
    return lambda folder: (folder / "manifest.json").write_text(text)


def manifest_change(change):
    """The fault of a manifest that change(manifest) has edited."""

    def damage(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def shard_entry(**fields):
    """The fault of a manifest with these fields in its first shard's entry."""
    return manifest_change(lambda manifest: manifest["shards"][0].update(fields))


def end_id(value):
    """The fault of a manifest whose token that ends a document is `value`."""
    return manifest_change(lambda manifest: manifest.update(eot_id=value))


no_shards = manifest_change(lambda manifest: manifest.pop("shards"))
format_3 = manifest_change(lambda manifest: manifest.update(format=3))
large_vocabulary = manifest_change(lambda manifest: manifest.update(vocab_size=70_000))

FAULTS = {
    "a flipped bit": (flip_bit, "is not what its digest promises"),
    "two shards swapped": (swap_shards, "is not what its digest promises"),
    "a missing shard": (remove_shard, "missing"),
    "a missing file of digests": (remove_digests, "shard_00000.npy.pages' is missing"),
    "a damaged file of digests": (flip_digest, "npy.pages': page 0 (bytes 0 to"),
    "a truncated shard": (truncate_shard, "is not what its digest promises"),
    "a pipe": (make_pipe, "is not a file"),
    "a pipe among bare shards": (make_pipe_among_bare_shards, "is not a file"),
    "a tokenizer that is a pipe": (make_pipe_of_tokenizer, "tokenizer.json is not a file"),
    "a link out of the folder": (link_out("shard"), "outside of its data set"),
    "a link among bare shards": (link_among_bare_shards, "outside of its data set"),
    "a manifest that is a link": (link_out("manifest.json"), "outside of its data set"),
    "a tokenizer that is a link": (link_out("tokenizer.json"), "outside of its data set"),
    "an empty folder": (remove_all_files, "no shards"),
    "no folder": (shutil.rmtree, "does not exist"),
    "a name above the folder": (shard_entry(name="../val/shard_00000.npy"), "plain file name"),
    "an absolute name": (shard_entry(name="/etc/passwd"), "plain file name"),
    "a name with control characters": (shard_entry(name="a\x1b[2J\n"), "plain file name"),
    "a damaged name of a field": (shard_entry(masj="0" * 32), "unknown field 'masj'"),
    "another token count": (shard_entry(tokens=7), "is not what its digest promises"),
    "a larger token count": (shard_entry(tokens=10**6), "npy.pages': page 0 (bytes 0 to"),
    "another offset": (shard_entry(offset=130), "is not what its digest promises"),
    "a count that is a truth value": (shard_entry(tokens=True), "[True"),
    "a digest that is too short": (shard_entry(pages="0f"), "digest '0f'"),
    "another format": (format_3, "its format is 3, not 1 or 2"),
    "no shards in the manifest": (no_shards, "not a manifest"),
    "a manifest that is a list": (manifest_text("[]"), "not a manifest"),
    "a manifest nested too deep": (manifest_text("[" * 200_000), "not a manifest"),
    "an end of documents that is null": (end_id(None), "eot_id=None is no id below vocab_size="),
    "an end of documents above all ids": (end_id(70_000), "eot_id=70000 is no id below"),
    "a large vocabulary": (large_vocabulary, "vocabulary of 70000, above model.vocab_size=512"),
}


FAULTS_OF_FORMAT_1 = {
    "a flipped bit": (flip_bit, "checksum"),
    "two shards swapped": (swap_shards, "checksum"),
    "a missing shard": (remove_shard, "missing"),
    "a truncated shard": (truncate_shard, "promises"),
    "trailing bytes": (append_byte, "promises"),
}


@pytest.mark.parametrize("fault", FAULTS_OF_FORMAT_1)
def test_a_fault_in_data_of_format_1_is_named(cfg, corpus, tmp_path, fault):
    folder = copy_set(corpus / "train", tmp_path)
    make_format_1(folder)
    want = all_tokens(folder)
    np.testing.assert_array_equal(open_set(cfg, folder).source.read(0, len(want)), want)
    damage, word = FAULTS_OF_FORMAT_1[fault]
    damage(folder)
    assert word in problem_of(cfg, folder, read=True)


def test_a_text_in_place_of_a_data_set_is_answered_with_how_to_prepare_it(cfg, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("Once upon a time")
    with pytest.raises(UserError) as error:
        open_set(cfg, text)
    assert "scripts/prepare_data.py" in error.value.problems[0].fix


def test_bytes_after_the_end_of_a_shard_are_not_read(cfg, corpus, tmp_path):
    folder = copy_set(corpus / "train", tmp_path)
    want = all_tokens(folder)
    append_byte(folder)
    np.testing.assert_array_equal(open_set(cfg, folder).source.read(0, len(want)), want)


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_data_is_named(cfg, corpus, tmp_path, fault):
    folder = copy_set(corpus / "train", tmp_path)
    damage, word = FAULTS[fault]
    damage(folder)
    assert word in problem_of(cfg, folder, read=True)


def test_no_flipped_bit_in_a_header_is_a_traceback(tmp_path):
    """The file is refused with a UserError, or is read as tokens: some bits are only spaces."""
    path = epath.Path(tmp_path / "shard.npy")
    np.save(path, np.arange(100, dtype=np.uint16))
    whole, n_refused = path.read_bytes(), 0
    for bit in range(8 * 128):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(flipped))
        try:
            assert shards.read_shard(path).n_tokens == 100
        except UserError as error:
            assert error.code == DATA
            n_refused += 1
    assert n_refused > 900


def test_headers_are_parsed_one_at_a_time(tmp_path, monkeypatch):
    """Files are read in parallel, but Python 3.11 cannot parse in parallel."""
    read, at_once, most = np.lib.format.read_array_header_1_0, [], []

    def slowly(*args, **kwargs):
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.01)
        at_once.pop()
        return read(*args, **kwargs)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", slowly)
    for n in range(8):
        np.save(tmp_path / f"{n}.npy", np.arange(100, dtype=np.uint16))
    assert len(shards.find_shards(epath.Path(tmp_path), "train").shards) == 8
    assert most == [1] * 8


def test_a_document_mask_needs_the_end_of_documents(cfg, corpus, tmp_path):
    """The id comes from the manifest, or from the flag where there is none."""
    masked = replace(cfg, data=replace(cfg.data, document_mask=True))
    assert Dataset(on_mesh(masked), "train").cfg.data.end_id == 256
    assert Dataset(on_mesh(cfg), "train").cfg.data.end_id == -1  # nothing uses it
    bare = tmp_path / "bare.npy"
    np.save(bare, np.zeros(1000, np.uint16))
    assert "does not say which token ends a document" in problem_of(masked, bare)
    with_flag = replace(masked, data=replace(masked.data, end_id=3))
    assert open_set(with_flag, bare).cfg.data.end_id == 3
    what = problem_of(with_flag, cfg.data.val, "val")
    assert "data.end_id=3, but documents in data.val" in what and "end with 256" in what


def test_a_bad_token_is_named_with_its_shard_and_index(cfg, tmp_path):
    tokens = np.arange(1000, dtype=np.uint16) % 512
    tokens[345] = 600
    np.save(tmp_path / "a.npy", tokens)
    want = f"shard '{tmp_path}/a.npy': token id 600 at index 345 is not below model.vocab_size=512"
    assert problem_of(cfg, tmp_path, read=True) == want
    np.save(tmp_path / "a.npy", np.where(tokens == 600, -1, tokens.astype(np.int32)))
    assert "token id -1 at index 345" in problem_of(cfg, tmp_path, read=True)


def test_too_little_data_names_both_numbers(cfg, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(16, np.uint16))
    what = problem_of(cfg, tmp_path)
    assert "holds 16 tokens; one window needs train.seq_len + 1 = 17" in what
    np.save(tmp_path / "a.npy", np.zeros(1, np.uint16))
    with pytest.raises(
        UserError, match="holds 1 tokens; one window needs 2\n  fix: give more data$"
    ):
        open_set(cfg, tmp_path, "val")


def test_each_batch_of_training_begins_to_read_those_after_it(cfg):
    data = Dataset(on_mesh(cfg), "train")
    for step in range(3):
        data.batch(step)
        assert [*data.reading] == [*range(step, step + cfg.data.prefetch)]


def test_a_set_smaller_than_a_batch_repeats_in_new_orders(cfg, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    data = open_set(cfg, tmp_path)
    rows = data.batch_windows(0)
    assert data.n_windows == 6 and sorted(rows[:6]) == sorted(rows[6:12]) == list(range(6))


def test_the_fingerprint_changes_with_the_tokens(cfg, corpus, tmp_path):
    def fingerprint(path):
        return open_set(cfg, path).source.fingerprint

    want, copy = fingerprint(corpus / "train"), copy_set(corpus / "train", tmp_path)
    assert want == fingerprint(copy) != fingerprint(corpus / "val")
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    before = fingerprint(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16)[::-1].copy())
    assert fingerprint(tmp_path / "a.npy") != before


@pytest.mark.parametrize("name", ["large.npy", "large.bin"])
def test_the_fingerprint_of_a_large_bare_shard_covers_its_middle(cfg, tmp_path, name):
    """A 64th of 8 MiB is replaced, at every place; reading stays within 1 MiB."""
    tokens = np.random.default_rng(0).integers(512, size=2**22, dtype=np.uint16)

    def fingerprint(tokens) -> str:
        if name.endswith("npy"):
            np.save(tmp_path / name, tokens)
        else:
            tokens.tofile(tmp_path / name)
        return open_set(cfg, tmp_path / name).source.fingerprint

    want = fingerprint(tokens)
    assert fingerprint(tokens) == want
    for start in range(0, 2**22, 2**19 + 12345):
        changed = tokens.copy()
        changed[start : start + 2**16] = 0
        assert fingerprint(changed) != want, start
    shard = shards.read_shard(epath.Path(tmp_path / name))
    assert len(shards.sample_bytes(shard)) == 2**20


def test_a_data_set_that_is_itself_a_link_and_links_within_it_are_read(cfg, corpus, tmp_path):
    folder = copy_set(corpus / "train", tmp_path)
    path = first_shard(folder)
    path.rename(folder / "moved")
    path.symlink_to(folder / "moved")
    (tmp_path / "link").symlink_to(folder)
    want = open_set(cfg, corpus / "train").source
    found = open_set(cfg, tmp_path / "link").source
    np.testing.assert_array_equal(found.read(0, 20_000), want.read(0, 20_000))


def test_parts_in_a_bucket_are_not_asked_for_one_by_one(monkeypatch):
    part = epath.Path("gs://a-bucket/shard.npy")
    monkeypatch.setattr(type(part), "exists", lambda _: pytest.fail("a request"))
    shards.check_is_part(part)


def test_a_tokenizer_of_gigabytes_is_not_read(cfg, corpus, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(corpus / "train", folder)
    os.truncate(folder / "tokenizer.json", 2**31)
    source = open_set(cfg, folder).source
    with pytest.raises(UserError, match="has 2147483648 bytes") as error:
        dataset.check_tokenizers({"data.train": source})  # the first that a start reads
    assert error.value.code == DATA


def test_a_tokenizer_that_is_cut_off_is_damaged(cfg, corpus, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(corpus / "train", folder)
    os.truncate(folder / "tokenizer.json", 100)
    with pytest.raises(UserError, match="tokenizer.json is damaged") as error:
        open_set(cfg, folder).source.decode([1])
    assert error.value.code == DATA


def test_a_cache_that_others_can_write_to_is_refused(tmp_path):
    cache = tmp_path / "cache"
    pages.DiskCache(cache, 1000)
    assert cache.stat().st_mode & 0o777 == 0o700
    cache.chmod(0o777)
    with pytest.raises(UserError, match="can be written to by others") as error:
        pages.DiskCache(cache, 1000)
    assert error.value.code == USAGE


def test_a_cache_that_cannot_be_made_is_named_by_its_flag(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="data.cache=.*/file/cache cannot be made: Not a") as error:
        pages.DiskCache(f"{tmp_path}/file/cache", 1000)
    assert error.value.code == STORAGE


@pytest.mark.parametrize("folder", ["gs://bucket", "/data"])
def test_a_shard_that_storage_refuses_is_not_a_damaged_shard(folder, monkeypatch):
    path = epath.Path(f"{folder}/a.npy")
    monkeypatch.setattr(type(path), "open", mock.Mock(side_effect=OSError("Forbidden")))
    with pytest.raises(OSError, match="Forbidden"):  # becomes STORAGE
        shards.npy_shard(path)
