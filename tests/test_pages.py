"""Pages of shards: what is read, verified and kept."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import on_mesh
from etils import epath
from runs import new_run, refusal

import pages
import train
from dataset import Dataset
from errors import DATA, UserError, first_ten
from pages import Block, DiskCache, PageReader
from shards import PAGE, find_shards, manifest_digest, page_digest, page_digests

L = 16  # of the tiny preset


def write_shard(folder: Path, name: str, tokens: np.ndarray) -> dict:
    """Write a shard and its digests; its entry in the manifest."""
    np.save(folder / name, tokens)
    data = (folder / name).read_bytes()
    (folder / f"{name}.pages").write_bytes(page_digests(data))
    digest = page_digest(page_digests(data)).hex()
    offset = len(data) - tokens.nbytes
    return dict(name=name, tokens=len(tokens), offset=offset, pages=digest)


def write_set(folder: Path, n_tokens: list[int], seed=0) -> np.ndarray:
    """A set of format 2 with shards of so many random tokens, below 512; all of them."""
    random = np.random.default_rng(seed)
    folder.mkdir()
    parts = [random.integers(0, 512, n, dtype=np.uint16) for n in n_tokens]
    entries = [write_shard(folder, f"s{n}.npy", part) for n, part in enumerate(parts)]
    manifest = dict(format=2, dtype="uint16", vocab_size=512, bytes=10, shards=entries)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return np.concatenate(parts)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "set"


@pytest.fixture
def remote(monkeypatch, tmp_path, cfg):
    """A config under which local files are read as if they were in a bucket."""
    monkeypatch.setattr(pages, "is_remote", lambda path: True)
    return replace(cfg, data=replace(cfg.data, cache=str(tmp_path / "cache"), cache_gb=1e-3))


@pytest.fixture
def fetched(monkeypatch, folder) -> list:
    """The blocks of this test's folder that are fetched, in order.  Threads that an earlier test
    has left may fetch others."""
    blocks, fetch = [], pages.fetch

    def note(wanted):
        blocks.extend(block for block in wanted if Path(block.path).is_relative_to(folder))
        return fetch(wanted)

    monkeypatch.setattr(pages, "fetch", note)
    return blocks


def flip(path: Path, at: int):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_random_pieces_are_what_was_written(cfg, folder):
    tokens = write_set(folder, [100_000, 7, 32_704, 32_705, 70_001])
    found = find_shards(epath.Path(folder), "train").shards
    reader, random = PageReader(found, cfg), np.random.default_rng(1)
    first = np.cumsum([0, *(shard.n_tokens for shard in found)])
    pieces, want = [], []
    for _ in range(300):
        n = int(random.integers(len(found)))
        start, stop = sorted(random.integers(0, found[n].n_tokens + 1, 2).tolist())
        if start < stop:
            pieces.append((found[n], start, stop))
            want.append(tokens[first[n] + start : first[n] + stop])
    for got, expected in zip(reader.read(pieces), want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_only_the_pages_of_a_window_and_the_digests_of_its_shard_are_fetched(cfg, folder, fetched):
    write_set(folder, [100_000] * 4)
    data = Dataset(on_mesh(cfg, data=dict(train=str(folder))), "train")
    assert fetched == []  # the manifest says all that the start needs
    (window,) = data.source.windows(np.array([100_000 // L + 50]))
    assert len(window) == L + 1
    digests, page = fetched
    assert digests.path.name == "s1.npy.pages" and page[1:3] == (0, PAGE)
    data.source.windows(np.array([100_000 // L + 60]))
    assert len(fetched) == 2  # both are kept in memory


def test_a_damaged_page_is_named_with_the_updates_that_it_feeds(base, folder):
    tokens = write_set(folder, [100_000, 120_000])
    cfg, _ = new_run(base, "damaged", train=dict(steps=60), data=dict(train=str(folder)))
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, every=1000))
    path = folder / "s1.npy"
    flip(path, 2 * PAGE + 1)
    first, last = (100_000 + (at - 128) // 2 for at in (2 * PAGE, 3 * PAGE - 1))
    order = Dataset(on_mesh(cfg), "train").order
    rows = {step + 1: order.batch(step)[2] for step in range(60)}
    hit = [n for n, row in rows.items() if ((row * L <= last) & (row * L + L >= first)).any()]
    assert len(tokens) == 220_000 and len(hit) > 10
    error = refusal(on_mesh(cfg, (1, 1, 1)))
    assert error.code == DATA
    start, stop = 2 * PAGE, 3 * PAGE - 1
    assert f"shard '{path}': page 2 (bytes {start} to {stop}) is not what its" in str(error)
    feeds = ", ".join(map(str, hit[:10]))
    assert f"it feeds updates {feeds} and {len(hit) - 10} more" in str(error)


def test_a_token_that_two_pages_share_is_of_both(cfg, folder):
    """Headers of other programs may have an odd length."""
    write_set(folder, [60_000])
    source = Dataset(on_mesh(cfg, data=dict(train=str(folder))), "train").source
    source.shards = [replace(source.shards[0], offset=127)]
    path, token = source.shards[0].path, (PAGE - 127) // 2
    assert token % L == 0  # so window token // L is the first that has it, besides the one before
    first, second = (source.windows_of(Block(path, at, at + PAGE)) for at in (0, PAGE))
    assert first[-1] == token // L and second[0] == token // L - 1


@pytest.mark.parametrize("name, page, first, last", [
    ("s0.npy", 1, (PAGE - 128) // 2, 59_999),
    ("s0.mask", 0, 0, 59_999),
    ("s0.npy.pages", 0, None, None),
])  # fmt: skip
def test_a_damaged_page_of_a_mixture_feeds_its_set_alone(cfg, tmp_path, name, page, first, last):
    """Of a shard or a mask; a page of digests feeds none by itself."""
    parts = {n: tmp_path / n for n in "ab"}
    for folder in parts.values():
        write_set(folder, [60_000])
    manifest = json.loads((parts["b"] / "manifest.json").read_text())
    (parts["b"] / "s0.mask").write_bytes(bytes(59_000) + bytes([1]) * 1000)
    pages = page_digests((parts["b"] / "s0.mask").read_bytes())
    (parts["b"] / "s0.mask.pages").write_bytes(pages)
    manifest["shards"][0]["mask"] = page_digest(pages).hex()
    (parts["b"] / "manifest.json").write_text(json.dumps(manifest))
    flip(parts["b"] / name, page * PAGE + 5)
    sets = ",".join(f"{n}={folder}" for n, folder in parts.items())
    data = Dataset(on_mesh(cfg, data=dict(train=sets), train=dict(steps=40, batch_size=2)), "train")
    with pytest.raises(UserError, match=f"{name}': page {page} ") as error:
        for step in range(40):
            data.batch(step)
    if first is None:
        assert "it feeds" not in str(error.value)
        return
    rows = [(sources == 1, windows) for sources, _, windows in map(data.order.batch, range(40))]
    is_hit = [(b & (w * L <= last) & (w * L + L >= first)).any() for b, w in rows]
    assert f"it feeds updates {first_ten(np.flatnonzero(is_hit) + 1)}\n" in str(error.value)


def test_an_undamaged_answer_after_a_damaged_one_is_taken(remote, folder, monkeypatch):
    """As when a connection breaks within an answer."""
    tokens, fetch, n = write_set(folder, [50_000]), pages.fetch, 0

    def cut(blocks):
        nonlocal n
        found = fetch(blocks)
        if not any(Path(block.path).is_relative_to(folder) for block in blocks):
            return found  # to a thread that an earlier test has left
        n += 1
        return [data[:30] for data in found] if n % 2 else found

    monkeypatch.setattr(pages, "fetch", cut)
    (shard,) = find_shards(epath.Path(folder), "train").shards
    (got,) = PageReader([shard], remote).read([(shard, 0, 50_000)])
    np.testing.assert_array_equal(got, tokens)


# ---- what is kept


def test_pages_from_a_bucket_are_kept_on_disk_and_damage_there_is_noticed(remote, folder, fetched):
    tokens = write_set(folder, [50_000])
    (shard,) = find_shards(epath.Path(folder), "train").shards

    def read():
        del fetched[:]
        (got,) = PageReader([shard], remote).read([(shard, 0, 50_000)])
        np.testing.assert_array_equal(got, tokens)
        return len(fetched)

    assert read() == 3 and read() == 0
    kept = sorted(Path(remote.data.cache).glob("trifold-pages/*/*"))
    assert len(kept) == 3  # two pages, and the file of digests
    for path in kept:
        flip(path, 5)
    assert read() == 3 and read() == 0
    for path in kept:
        path.write_bytes(path.read_bytes()[:5])  # as a killed process may leave it
    assert read() == 3 and read() == 0
    remote = replace(remote, data=replace(remote.data, cache_gb=0.0))
    (got,) = PageReader([shard], remote).read([(shard, 0, 10)])
    np.testing.assert_array_equal(got, tokens[:10])


def test_the_cache_on_disk_keeps_its_size_and_what_was_used_last(tmp_path):
    cache, page = DiskCache(str(tmp_path / "c"), 50 * PAGE), bytes(PAGE)
    keys = [page_digest(str(n).encode()) for n in range(200)]
    for n, key in enumerate(keys):
        cache.put(key, page)
        os.utime(cache.path(key), (n, n))
        if n > 10 and cache.get(keys[10]):
            os.utime(cache.path(keys[10]), (n + 0.5, n + 0.5))
        size = sum(path.stat().st_size for path in cache.folder.glob("*/*"))
        assert size <= (50 + 50 // 16 + 1) * PAGE
    assert cache.get(keys[10]) == page and cache.get(keys[-1]) == page
    assert cache.get(keys[11]) is None
    (cache.folder / "ab" / "folder").mkdir(parents=True, exist_ok=True)
    (cache.folder / "ab" / "thesis.tex").write_text("mine")
    cache.limit = 0
    cache.trim()
    assert [path.name for path in sorted(cache.folder.glob("*/*"))] == ["folder", "thesis.tex"]


def test_the_cache_leaves_room_on_its_disk_where_rows_of_the_run_may_be(tmp_path, monkeypatch):
    cache, key = DiskCache(os.fspath(tmp_path / "cache"), limit=2**32), b"1" * 16
    for free, found in ((2**28 - 1, None), (2**28, b"page")):
        monkeypatch.setattr("shutil.disk_usage", lambda path, n=free: SimpleNamespace(free=n))
        cache.put(key, b"page")
        assert cache.get(key) == found


def test_a_cache_that_is_removed_while_it_is_trimmed_stops_no_run(tmp_path, monkeypatch):
    cache = DiskCache(os.fspath(tmp_path / "cache"), limit=10)

    def vanish(folder, _):  # as in Python 3.11; that of 3.13 finds nothing there
        folder.rename(tmp_path / "gone")
        raise FileNotFoundError(folder)

    monkeypatch.setattr(Path, "glob", vanish)
    cache.put(b"1" * 16, b"page")
    assert cache.get(b"1" * 16) is None


def test_memory_keeps_its_size(cfg, folder, monkeypatch):
    monkeypatch.setattr(PageReader, "MEMORY", 3 * PAGE)
    write_set(folder, [400_000])
    (shard,) = find_shards(epath.Path(folder), "train").shards
    reader = PageReader([shard], cfg)
    for start in range(0, 400_000, 1000):
        reader.read([(shard, start, start + 10)])
        assert sum(map(len, reader.memory.values())) == reader.size <= 3 * PAGE


def test_threads_read_the_same(remote, folder, monkeypatch):
    monkeypatch.setattr(PageReader, "MEMORY", 5 * PAGE)
    tokens = write_set(folder, [400_000])
    (shard,) = find_shards(epath.Path(folder), "train").shards
    reader, random = PageReader([shard], remote), np.random.default_rng(0)
    n_threads = threading.active_count()  # an earlier test may have left some
    starts = random.integers(0, 399_000, 400).tolist()
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda start: reader.read([(shard, start, start + 1000)])[0], starts)
        for start, got in zip(starts, found, strict=True):
            np.testing.assert_array_equal(got, tokens[start : start + 1000])
    assert threading.active_count() < n_threads + 50


# ---- size


@pytest.mark.slow
def test_a_hundred_thousand_shards_are_opened_in_seconds(cfg, tmp_path):
    import gc
    import resource
    import time

    entries = [
        dict(name=f"shard_{n:05d}.npy", tokens=50_000_000, offset=128, bytes=2, documents=1)
        | dict(pages=f"{n:032x}")
        for n in range(100_000)
    ]
    manifest = dict(format=2, dtype="uint16", vocab_size=512, eot_id=0, bytes=10, shards=entries)
    manifest["digest"] = manifest_digest(manifest)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    del entries, manifest
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gc.freeze()  # else the collector walks through all that earlier tests have left
    begin = time.process_time()  # of this process alone: other tests run beside it
    data = Dataset(on_mesh(cfg, data=dict(train=str(tmp_path))), "train")
    took = time.process_time() - begin
    gc.unfreeze()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    print(f"{took:.2f} s of a core, {grown:.0f} MiB")
    assert took < 3 and grown < 300
    assert data.source.n_tokens == 5 * 10**12
    with pytest.raises(UserError, match="is missing from"):
        data.batch(0)


@pytest.mark.slow
def test_a_run_reads_the_same_from_a_bucket_as_from_disk(base, folder, monkeypatch, tmp_path):
    write_set(folder, [9000, 70_000])
    train_on = dict(train=str(folder), cache=str(tmp_path / "cache"))
    cfg, _ = new_run(base, "disk", data=train_on)
    local = np.asarray(Dataset(on_mesh(cfg, (2, 2, 2)), "train").batch(11))
    monkeypatch.setattr(pages, "is_remote", lambda path: True)
    np.testing.assert_array_equal(np.asarray(Dataset(on_mesh(cfg), "train").batch(11)), local)
    train.main(on_mesh(replace(cfg, train=replace(cfg.train, steps=2)), (2, 1, 1)))
    assert len(list((tmp_path / "cache").glob("trifold-pages/*/*"))) > 2
