"""Reading tokens of shards: many pieces at once, from disk or a bucket, verified where there are
digests.

A shard with digests is read in whole pages.  Each is compared with its digest and kept for a while
in memory, and if it came from a bucket on local disk too.  From other shards only the bytes that
are asked for are read.
"""

import itertools
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import fsspec
import numpy as np
from etils import epath

import shards
from config import Config
from errors import DATA, UserError
from files import is_remote, make_private_folder
from shards import COPY_AGAIN, PAGE, Shard, shard_error


class Block(NamedTuple):
    """Bytes start to stop - 1 of a file, and their page_digest if it is known."""

    path: epath.Path
    start: int
    stop: int
    digest: bytes = b""


def open_at_once(path: str, flags: int) -> int:
    """An opener for open() that does not wait for a writer if a pipe has taken the file's place."""
    return os.open(path, flags | os.O_NONBLOCK)


def fetch(blocks: list[Block]) -> list[bytes | Exception]:
    """The bytes of each block, fewer where its file ends before, or why they cannot be read.  All
    requests to a bucket are under way at once."""
    if blocks and is_remote(blocks[0].path):
        fs, _ = fsspec.url_to_fs(os.fspath(blocks[0].path))
        paths, starts, stops, _ = map(list, zip(*blocks, strict=True))
        return fs.cat_ranges([*map(os.fspath, paths)], starts, stops, on_error="return")
    contents = []
    for block in blocks:
        try:
            with open(block.path, "rb", opener=open_at_once) as f:
                contents.append(os.pread(f.fileno(), block.stop - block.start, block.start))
        except OSError as e:
            contents.append(e)
    return contents


def is_page(block: Block, data: bytes) -> bool:
    """Whether these are the bytes of a block with a digest.

    The length is compared too: where a manifest promises more bytes than the file has, the last
    page still fits its digest.
    """
    return len(data) == block.stop - block.start and shards.page_digest(data) == block.digest


class DiskCache:
    """Pages on local disk under the names of their digests, for this run and later ones; those used
    last are kept, up to a number of bytes.  A page that a killed process has written only in part
    fails `is_page` and is fetched again."""

    def __init__(self, folder: str, limit: int):
        self.folder, self.limit = make_private_folder(folder, "data.cache"), limit
        self.added = limit  # bytes since the last trim; so many that the first page trims
        self.room = min(2**28, limit // 16)
        """Bytes of the disk that the cache leaves free: the run may write to the same disk."""

    def path(self, digest: bytes) -> Path:
        return self.folder / digest.hex()[:2] / digest.hex()

    def get(self, digest: bytes) -> bytes | None:
        with suppress(OSError):
            os.utime(self.path(digest))
            return self.path(digest).read_bytes()
        return None

    def put(self, digest: bytes, data: bytes):
        path = self.path(digest)
        with suppress(OSError):  # without the cache reading is only slower
            if shutil.disk_usage(self.folder).free >= self.room:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                path.write_bytes(data)
                self.added += len(data)
        if self.added > self.limit // 16:
            self.trim()

    def trim(self):
        self.added, pages = 0, []
        with suppress(OSError):  # the folder is being removed; the next trim sees what is left
            for path in self.folder.glob(f"{'[0-9a-f]' * 2}/{'[0-9a-f]' * 32}"):
                with suppress(OSError):  # another process has removed it
                    facts = path.stat()
                    pages.append((facts.st_mtime, facts.st_size, path))
        total = 0
        for _, size, path in sorted(pages, reverse=True):  # from the page used last
            total += size
            if total > self.limit:
                with suppress(OSError):
                    path.unlink()


class DamagedPage(UserError):
    """Bytes that do not match their digest."""

    def __init__(self, block: Block):
        self.block = block
        page = f"page {block.start // PAGE} (bytes {block.start} to {block.stop - 1})"
        what = f"{page} is not what its digest promises"
        super().__init__(DATA, problems=shard_error(block.path, what, COPY_AGAIN).problems)


class PageReader:
    """Reads tokens of the shards of a set, for several threads at once."""

    MEMORY = 64 * 2**20
    """Bytes of pages that are kept in memory."""

    def __init__(self, all_shards: list[Shard], cfg: Config):
        self.lock = threading.Lock()
        self.memory, self.size = OrderedDict(), 0  # {digest: page}, those used last at the end
        self.states = {}  # {path: its state when it was first read}
        self.disk = None
        # All shards are in one place and of one format.  To ask each of 100,000 took 0.7 s.
        first = all_shards[0]
        if cfg.data.cache_gb and first.pages_digest and is_remote(first.path):
            cache = os.path.join(tempfile.gettempdir(), f"trifold-pages-{os.getuid()}")
            if cfg.data.cache:
                cache = os.path.join(cfg.data.cache, "trifold-pages")
            self.disk = DiskCache(cache, int(cfg.data.cache_gb * 2**30))

    def read(self, pieces: list[tuple[Shard, int, int]]) -> list[np.ndarray]:
        """Tokens start to stop - 1 of each (shard, start, stop).

        Raises UserError DATA for files that are missing, damaged (DamagedPage) or changed, and what
        the storage raises."""
        by_path = {shard.path: shard for shard, _, _ in pieces}
        for shard in by_path.values():
            if shard.path not in self.states:
                self.states[shard.path] = self.check(shard)
        lists = {path: digest_list(shard) for path, shard in by_path.items() if shard.pages_digest}
        contents = self.load([*lists.values()])
        digests = {path: contents[block] for path, block in lists.items()}
        blocks = [cut_into_blocks(*piece, digests.get(piece[0].path)) for piece in pieces]
        contents = self.load([*itertools.chain(*blocks)])
        arrays = []
        for (shard, start, stop), parts in zip(pieces, blocks, strict=True):
            before = shard.offset - parts[0].start
            first, last = (before + i * shard.itemsize for i in (start, stop))
            data = b"".join(contents[part] for part in parts)[first:last]
            if len(data) != last - first or self.state_of(shard) != self.states[shard.path]:
                fix = "do not change data that a run uses; copy the shard again"
                raise shard_error(shard.path, "it was changed while the run used it", fix)
            arrays.append(np.frombuffer(data, shard.dtype))
        return arrays

    def check(self, shard: Shard) -> tuple | None:
        """Check a file before its first read; returns its `state_of`."""
        if shard.pages_digest:  # other shards were checked when their headers were read
            shards.check_is_part(shard.path)
            shards.check_is_part(digest_list(shard).path)
        state = self.state_of(shard)
        if shard.sha256 and shards.file_sha256(shard.path) != shard.sha256:
            raise shard_error(shard.path, "its checksum is not the manifest's", COPY_AGAIN)
        return state

    def state_of(self, shard: Shard) -> tuple | None:
        """Size, time and inode of a local file without digests, which change when it is written or
        replaced; None of other files."""
        if shard.pages_digest or is_remote(shard.path):
            return None
        try:
            facts = os.stat(shard.path)
        except FileNotFoundError:
            raise shards.missing_error(shard.path) from None
        return facts.st_size, facts.st_mtime_ns, facts.st_ino

    def load(self, blocks: list[Block]) -> dict[Block, bytes]:
        """The bytes of these blocks, verified where they have a digest."""
        contents = {block: self.recall(block) for block in blocks}
        for _ in range(2):  # a second time, because the connection may have damaged a block
            absent = [block for block, data in contents.items() if data is None]
            for block, data in zip(absent, fetch(absent), strict=True):
                if isinstance(data, FileNotFoundError):
                    raise shards.missing_error(block.path) from None
                if isinstance(data, Exception):
                    shards.check_is_file(block.path)
                    raise data
                if not block.digest:
                    contents[block] = data
                elif is_page(block, data):
                    contents[block] = data
                    self.remember(block, data)
                    if self.disk:
                        self.disk.put(block.digest, data)
        for block, data in contents.items():
            if data is None:
                raise DamagedPage(block)
        return contents

    def recall(self, block: Block) -> bytes | None:
        """A block's bytes from memory or disk, where only blocks with digests are kept."""
        with self.lock:
            if block.digest in self.memory:
                self.memory.move_to_end(block.digest)
                return self.memory[block.digest]
        data = self.disk.get(block.digest) if self.disk else None
        if data is None or not is_page(block, data):
            return None
        self.remember(block, data)
        return data

    def remember(self, block: Block, data: bytes):
        with self.lock:
            self.size += len(data) * (block.digest not in self.memory)
            self.memory[block.digest] = data
            while self.size > self.MEMORY:
                self.size -= len(self.memory.popitem(last=False)[1])


def digest_list(shard: Shard) -> Block:
    """The file with the digests of a shard's pages."""
    n_pages = -(-shard.size // PAGE)
    path = shard.path.with_name(f"{shard.path.name}.pages")
    return Block(path, 0, 16 * n_pages, shard.pages_digest)


def cut_into_blocks(shard: Shard, start: int, stop: int, digests: bytes | None) -> list[Block]:
    """The blocks in which tokens start to stop - 1 are: pages, if the file has digests."""
    first, last = (shard.offset + i * shard.itemsize for i in (start, stop))
    if digests is None:
        return [Block(shard.path, first, last)]
    return [
        Block(shard.path, at, min(at + PAGE, shard.size), digests[at // PAGE * 16 :][:16])
        for at in range(first // PAGE * PAGE, last, PAGE)
    ]
