"""Checkpoints of models that do not fit into memory: arrays are written and digested block by
block, and read slab by slab.  Nothing here depends on Hugging Face or on models."""

import math
from functools import cache, partial, reduce
from itertools import product

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

import digests

# ---- writing

CHUNK = 16 * 2**20  # bytes that are compressed together


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of the chunks of such an array: at most CHUNK bytes, the last dims whole."""
    chunk = list(shape)
    for dim, n in enumerate(shape):
        room = CHUNK // (itemsize * math.prod(chunk[dim + 1 :]))
        chunk[dim] = max(1, min(n, room))
    return tuple(chunk)


def chunk_indices(shape: tuple[int, ...], chunk: tuple[int, ...]):
    """Yield the index of each chunk of an array of that shape."""
    for starts in product(*(range(0, n, c) for n, c in zip(shape, chunk, strict=True))):
        ends = [min(a + c, n) for a, c, n in zip(starts, chunk, shape, strict=True)]
        yield tuple(map(slice, starts, ends))


class Streamed(np.ndarray):
    """A placeholder for an array in a tree that orbax saves: zeros that take no memory.  What
    StreamHandler writes is `blocks`: [(index, function that returns that part of the array)]."""

    blocks: list


def streamed_array(shape, dtype, blocks: list | None) -> Streamed:
    """The placeholder for an array of these blocks, which all have the same shape.  None stands for
    zeros; they are written too, because orbax treats an array without data as damaged."""
    zeros = np.broadcast_to(np.zeros((), dtype), shape)
    if not blocks:
        indices = chunk_indices(shape, chunk_shape(shape, zeros.itemsize))
        blocks = [(index, partial(zeros.__getitem__, index)) for index in indices]
    x = zeros.view(Streamed)
    x.blocks = blocks
    return x


class StreamHandler(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of numpy arrays, except that it writes a Streamed array block by block.

    It overrides `_open_and_write`, which is private: tested with orbax-checkpoint 0.12.8.
    """

    async def _open_and_write(self, value, tspec, ts_context):
        if not isinstance(value, Streamed):
            return await super()._open_and_write(value, tspec, ts_context)
        index = value.blocks[0][0]
        shape = [1 if isinstance(at, int) else at.stop - (at.start or 0) for at in index]
        tspec["metadata"]["chunks"] = chunk_shape(tuple(shape), value.dtype.itemsize)
        opened = write = ts.open(ts.Spec(tspec), create=True, open=True, context=ts_context)
        for index, read in value.blocks:
            x = read()  # while the array is being opened, or the previous block written
            write.result()
            write = opened.result()[index].write(x)
        write.result()


# Without deepcopy_host_arrays orbax does not copy an array before it writes it.
HANDLER = StreamHandler(deepcopy_host_arrays=False)
ocp.type_handlers.register_type_handler(np.ndarray, HANDLER, override=True)

# ---- digests

PIECE = 2**15  # elements that are digested at once: few enough for a cache


def digest_blocks(blocks, shape) -> tuple[list[int], bool]:
    """(digests.digest, whether all is finite) of a float32 array of that shape.

    blocks: [(index, part of the array)], in any order.
    """
    total, finite = np.zeros(2, np.uint32), True
    strides = [math.prod(shape[dim + 1 :]) % 2**32 for dim in range(len(shape))]
    for index, x in blocks:
        # An element's index in the flattened array is a sum over the dims, modulo 2**32.
        terms = [np.zeros(1, np.uint32)]
        for n, stride, at in zip(shape, strides, index, strict=True):
            terms.append((np.arange(n, dtype=np.uint32) * np.uint32(stride))[at])
        row, column = reduce(np.add.outer, terms[:-1], np.uint32(0)).ravel(), terms[-1].ravel()
        x = x.reshape(len(row), len(column))
        n_rows = max(1, PIECE // len(column))
        for first in range(0, len(row), n_rows):
            piece = x[first : first + n_rows]
            places = np.add.outer(row[first : first + n_rows], column)
            sums = digests.digest_terms(piece.view(np.uint32), places)
            total += [part.sum(dtype=np.uint32) for part in sums]
            finite = finite and bool(np.isfinite(piece).all())
    return total.tolist(), finite


@cache
def zero_digest(shape: tuple[int, ...]) -> list[int]:
    """The digest of an array of zeros."""
    whole = tuple(slice(n) for n in shape)
    return digest_blocks([(whole, np.broadcast_to(np.uint32(0), shape))], shape)[0]


# ---- reading


def open_arrays(path, names) -> dict:
    """{name: tensorstore array} of the checkpoint item at `path`; nothing is read yet.

    Orbax restores whole arrays.  To read parts, this opens them as orbax does, with its internal
    ParamInfo and get_json_tspec_read: tested with orbax-checkpoint 0.12.8.
    """
    context, arrays = ocp.type_handlers.get_ts_context(), {}
    for name in names:
        dotted = name.replace("/", ".")
        info = ocp.type_handlers.ParamInfo(name=dotted, parent_dir=path, ts_context=context)
        spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=True)
        arrays[name] = ts.open(ts.Spec(spec), open=True, context=context).result()
    return arrays


def read_chunks(array, bar):
    """Yield (index, part) for each chunk of a tensorstore array, and advance a progress bar."""
    for index in chunk_indices(array.shape, array.chunk_layout.read_chunk.shape):
        x = array[index].read().result()
        bar.update(x.nbytes)
        yield index, x


class SavedWeights:
    """The weights of a checkpoint, read in slabs, which begin and end where chunks do."""

    def __init__(self, path, names):
        """path: the item `params` of a checkpoint.  names: the weights' paths in it."""
        self.arrays, self.kept = open_arrays(path, names), {}

    def slab(self, name: str, entry: tuple) -> tuple[slice, ...]:
        """The smallest slab that contains `entry`, an index of numbers and slices: whole chunks in
        the dims where it has a number, and all of the other dims."""
        array, slab = self.arrays[name], []
        for at, c, n in zip(entry, array.chunk_layout.read_chunk.shape, array.shape, strict=True):
            start, length = (at // c * c, c) if isinstance(at, int) else (0, n)
            slab.append(slice(start, min(start + length, n)))
        return tuple(slab)

    def read(self, entries: dict[str, tuple]) -> list:
        """weight[entry] of each {weight's name: entry}.  Their slabs are kept until the next call,
        because its entries are often in them too."""
        slabs = {name: self.slab(name, entry) for name, entry in entries.items()}
        # Before the reads, or the old slabs would be in memory as well.
        self.kept = {name: x for name, x in self.kept.items() if x[0] == slabs.get(name)}
        found = []
        for name, slab in slabs.items():
            if name not in self.kept:
                self.kept[name] = slab, self.arrays[name][slab].read().result()
            inside = zip(entries[name], slab, strict=True)
            inside = tuple(at - s.start if isinstance(at, int) else at for at, s in inside)
            found.append(self.kept[name][1][inside])
        return found
