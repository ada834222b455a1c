"""Data: what is read, in which order, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import on_mesh

import dataset
import train
from config import DATA, UserError
from dataset import Dataset


def stream_of(folder) -> np.ndarray:
    """Every token of a prepared set, straight from its shards."""
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    return np.concatenate([np.load(folder / s["name"]) for s in shards])


def copy_of(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def trained_on(path, cfg):
    """cfg with that training data."""
    return replace(cfg, data=replace(cfg.data, train=str(path)))


def refuses(cfg, split="train", read=False) -> str:
    with pytest.raises(UserError) as error:
        data = Dataset(on_mesh(cfg), split)
        if read:
            data.stream.read(0, len(data.stream))
    assert error.value.code == DATA
    (problem,) = error.value.problems
    return problem.what


# ---- order


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 1000])
def test_an_epoch_is_a_permutation(n):
    for key in (0, 1, 12345678901234567):
        assert sorted(dataset.permuted(np.arange(n), n, key)) == list(range(n))
    if n > 60:
        first, second = (dataset.permuted(np.arange(n), n, key) for key in (1, 2))
        assert (first != second).mean() > 0.9
        moved = np.abs(first - np.arange(n)).mean() / n
        assert 0.25 < moved < 0.42  # a third of n, for a random permutation


def test_billions_of_windows_need_no_table():
    n = 5_000_000_000
    got = dataset.permuted(np.arange(1000), n, 3)
    assert len(set(got.tolist())) == 1000 and 0.4 < got.mean() / n < 0.6
    assert got.min() >= 0 and got.max() < n


def test_every_window_comes_once_an_epoch_and_epochs_differ(cfg):
    data = Dataset(on_mesh(cfg), "train")
    steps = 3 * data.windows // cfg.train.batch_size
    rows = np.concatenate([data.rows(step) for step in range(steps + 1)])
    epochs = [rows[k * data.windows : (k + 1) * data.windows] for k in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(data.windows))
    assert (epochs[0] != epochs[1]).any()


def test_a_batch_is_next_token_pairs_of_the_stream_in_the_seeded_order(cfg, corpus):
    cfg = on_mesh(cfg, (2, 2, 2), train=dict(grad_accum=2))
    data, stream = Dataset(cfg, "train"), stream_of(corpus / "train")
    assert len(data.stream.shards) > 1  # windows cross shard boundaries
    tokens, targets = (np.asarray(x).reshape(cfg.train.batch_size, -1) for x in data.batch(5))
    L = cfg.train.seq_len
    for row, x, y in zip(data.rows(5), tokens, targets, strict=True):
        np.testing.assert_array_equal(x, stream[row * L : row * L + L])
        np.testing.assert_array_equal(y, stream[row * L + 1 : row * L + L + 1])


def test_a_batch_depends_on_data_seed_and_step_only(cfg):
    def batch(step, mesh=(1, 1, 1), warm=(), **sections):
        data = Dataset(on_mesh(cfg, mesh, **sections), "train")
        for s in warm:
            data.batch(s)
        return np.stack([np.asarray(x).reshape(cfg.train.batch_size, -1) for x in data.batch(step)])

    want = batch(7)
    for mesh in [(2, 2, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)]:
        np.testing.assert_array_equal(batch(7, mesh), want)
    split = dict(grad_accum=4, microbatches=2)
    np.testing.assert_array_equal(batch(7, (2, 2, 1), train=split), want)
    np.testing.assert_array_equal(batch(7, warm=[0]), want)  # not what was read ahead
    np.testing.assert_array_equal(batch(7, warm=[0, 1, 6]), want)  # read ahead or not
    assert (batch(8) != want).any() and (batch(7, run=dict(seed=1)) != want).any()


# ---- evaluation


def losses(cfg, mesh, step, **fields):
    cfg = on_mesh(cfg, mesh, train=fields)
    data = Dataset(cfg, "val")
    return train.evaluate(train.init_state(cfg).params, data, step, cfg), data.eval_indices(step)


def test_the_whole_set_counts_every_token_once_on_any_mesh(cfg, corpus):
    n = len(stream_of(corpus / "val")) - 1
    want, _ = losses(cfg, (1, 1, 1), 10)
    assert want["tokens"] == n
    assert n % (cfg.train.batch_size * cfg.train.seq_len)  # the last batch is partial
    for mesh, fields in [((2, 2, 2), {}), ((8, 1, 1), dict(grad_accum=2)), ((1, 4, 2), {})]:
        got, _ = losses(cfg, mesh, 10, **fields)
        assert got["tokens"] == n
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-6)
    other, _ = losses(cfg, (1, 1, 1), 10, batch_size=8)
    np.testing.assert_allclose(other["loss"], want["loss"], rtol=1e-6)


def test_bits_per_byte_of_one_byte_tokens_is_the_loss_in_bits(cfg):
    got, _ = losses(cfg, (1, 1, 1), 10, eval_batches=1)
    np.testing.assert_allclose(got["bits_per_byte"], got["loss"] / np.log(2), rtol=0.01)


def test_four_kinds_of_evaluation(cfg):
    """{first n batches, the whole set} x {the same each time, rolling}."""
    small = dict(batch_size=8, eval_every=10)
    n = losses(cfg, (1, 1, 1), 10, **small)[1][-1] + 1

    def at(step, **fields):
        return losses(cfg, (1, 1, 1), step, **small, **fields)[1]

    assert n > 4
    assert at(10, eval_batches=2) == at(20, eval_batches=2) == [0, 1]
    assert at(10) == at(20) == list(range(n))
    assert at(10, eval_batches=2, eval_rolling=True) == [0, 1]
    assert at(20, eval_batches=2, eval_rolling=True) == [2, 3]
    assert at(10 * (n + 1), eval_batches=1, eval_rolling=True) == [0]  # around the end
    assert sorted(at(20, eval_rolling=True)) == list(range(n))
    # The last evaluation need not be due.
    assert at(25, eval_batches=2, eval_rolling=True) == [4, 5]
    assert at(10, eval_batches=10**6) == list(range(n))  # never a batch twice


# ---- formats


def test_nanogpt_bin_files(cfg, corpus, tmp_path):
    stream = stream_of(corpus / "train")
    for split, part in (("train", stream[:20_000]), ("val", stream[20_000:])):
        part.astype(np.uint16).tofile(tmp_path / f"{split}.bin")
    for split, want in (("train", stream[:20_000]), ("val", stream[20_000:])):
        for path in (tmp_path, tmp_path / f"{split}.bin"):
            data = Dataset(on_mesh(cfg, data={split: str(path)}), split)
            np.testing.assert_array_equal(data.stream.read(0, len(want)), want)
            assert data.bytes_per_token is None
    (tmp_path / "train.bin").write_bytes(b"abc")
    assert "3 bytes is no whole number of uint16" in refuses(trained_on(tmp_path, cfg))


def test_jaxformer_bare_npy_shards(cfg, corpus, tmp_path):
    stream = stream_of(corpus / "train")
    for n, kind in enumerate(["uint16", "uint32", "int32", "int64"]):
        np.save(tmp_path / f"shard_{n}.npy", stream[n * 5000 : (n + 1) * 5000].astype(kind))
    data = Dataset(on_mesh(cfg, data=dict(train=str(tmp_path))), "train")
    np.testing.assert_array_equal(data.stream.read(0, 20_000), stream[:20_000])


@pytest.mark.parametrize("array, word", [
    (np.array([{}, 1], dtype=object), "dtype object"),
    (np.zeros((4, 4), np.uint16), "one dimension"),
    (np.zeros(100, ">u2"), "dtype >u2"),
    (np.zeros(100, np.float32), "dtype float32"),
    (np.zeros(0, np.uint16), "one dimension with tokens"),
], ids=["pickle", "2-D", "big-endian", "float", "empty"])  # fmt: skip
def test_other_arrays_are_refused(cfg, tmp_path, array, word):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    assert word in refuses(trained_on(tmp_path, cfg))


# ---- faults


def shard(folder) -> Path:
    """Its first shard."""
    return min(folder.glob("*.npy"))


def flip(folder):
    raw = bytearray(shard(folder).read_bytes())
    raw[-1] ^= 1
    shard(folder).write_bytes(raw)


def swap(folder):
    a, b = sorted(folder.glob("*.npy"))[:2]
    a.rename(folder / "x")
    b.rename(a)
    (folder / "x").rename(b)


def remove(folder):
    shard(folder).unlink()


def cut(folder):
    shard(folder).write_bytes(shard(folder).read_bytes()[:-7])


def append(folder):
    shard(folder).write_bytes(shard(folder).read_bytes() + b"x")


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


def manifest_text(text):
    """The fault of a manifest that holds this text."""
    return lambda folder: (folder / "manifest.json").write_text(text)


def manifest_change(change):
    """The fault of a manifest that was changed so."""

    def damage(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def shard_entry(**fields):
    """The fault of a manifest that says this of its first shard."""
    return manifest_change(lambda m: m["shards"][0].update(fields))


no_shards = manifest_change(lambda m: m.pop("shards"))
more_ids = manifest_change(lambda m: m.update(vocab_size=70_000))

FAULTS = {
    "a flipped bit": (flip, "checksum"),
    "two shards swapped": (swap, "holds"),
    "a missing shard": (remove, "missing"),
    "a truncated shard": (cut, "promises"),
    "trailing bytes": (append, "promises"),
    "an empty folder": (empty, "no shards"),
    "no folder": (shutil.rmtree, "does not exist"),
    "a name above the folder": (shard_entry(name="../val/shard_00000.npy"), "plain file name"),
    "an absolute name": (shard_entry(name="/etc/passwd"), "plain file name"),
    "a name with control characters": (shard_entry(name="a\x1b[2J\n"), "plain file name"),
    "another token count": (shard_entry(tokens=7), "its manifest says 7"),
    "no shards in the manifest": (no_shards, "not a manifest"),
    "a manifest that is a list": (manifest_text("[]"), "not a manifest"),
    "a manifest nested too deep": (manifest_text("[" * 200_000), "not a manifest"),
    "a larger vocabulary": (more_ids, "vocabulary of 70000, above model.vocab_size=512"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_data_is_named(cfg, corpus, tmp_path, fault):
    folder = copy_of(corpus / "train", tmp_path)
    damage, word = FAULTS[fault]
    damage(folder)
    assert word in refuses(trained_on(folder, cfg), read=True)


def test_a_document_mask_needs_to_know_the_end(cfg, corpus, tmp_path):
    """From the manifest, or by flag where there is none."""
    masked = replace(cfg, data=replace(cfg.data, document_mask=True))
    assert Dataset(on_mesh(masked), "train").end_id == 256
    np.save(tmp_path / "bare.npy", np.zeros(1000, np.uint16))
    bare = trained_on(tmp_path / "bare.npy", masked)
    assert "does not say which token ends a document" in refuses(bare)
    told = replace(bare, data=replace(bare.data, end_id=3))
    assert Dataset(on_mesh(told), "train").end_id == 3
    other = replace(masked, data=replace(masked.data, end_id=3))
    assert "data.end_id=3, but documents in data.val" in refuses(other, "val")


def test_a_token_out_of_range_is_named_with_its_place(cfg, corpus, tmp_path):
    tokens = np.arange(1000, dtype=np.uint16) % 512
    tokens[345] = 600
    np.save(tmp_path / "a.npy", tokens)
    bad = trained_on(tmp_path, cfg)
    want = "shard 'a.npy': token id 600 at index 345 is not below model.vocab_size=512"
    assert refuses(bad, read=True) == want
    np.save(tmp_path / "a.npy", np.where(tokens == 600, -1, tokens.astype(np.int32)))
    assert "token id -1 at index 345" in refuses(bad, read=True)


def test_too_little_data_names_both_numbers(cfg, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(16, np.uint16))
    what = refuses(trained_on(tmp_path, cfg))
    assert "holds 16 tokens; one window needs train.seq_len + 1 = 17" in what


def test_a_set_smaller_than_a_batch_repeats_in_new_orders(cfg, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    data = Dataset(on_mesh(cfg, data=dict(train=str(tmp_path))), "train")
    rows = data.rows(0)
    assert data.windows == 6 and sorted(rows[:6]) == sorted(rows[6:12]) == list(range(6))


def test_the_fingerprint_changes_with_the_tokens(cfg, corpus, tmp_path):
    def print_of(path):
        return Dataset(on_mesh(cfg, data=dict(train=str(path))), "train").fingerprint

    want = print_of(corpus / "train")
    assert want == print_of(copy_of(corpus / "train", tmp_path)) != print_of(corpus / "val")
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    before = print_of(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16)[::-1].copy())
    assert print_of(tmp_path / "a.npy") != before
