"""The order of a run's rows: which source each comes from, and which of its windows it is.  All of
it is computed from the seed and the row's number, so there is nothing to save.
"""

import math
import zlib
from bisect import bisect_left
from fractions import Fraction
from heapq import heappop, heappush

import numpy as np

from config import Config
from errors import DATA, UserError
from parsers import read_ramp, read_sets, read_skip, read_stages

# ---- permutations


def scramble(x):
    """uint64 to well-mixed uint64 (the finalizer of SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(i, n: int, key: int, inverse: bool = False):
    """Elements i of the permutation of range(n) that key selects, or of its inverse.

    There is no table, so that a billion windows cost no memory.  A Feistel network permutes the
    range up to the next power of four; what falls outside range(n) goes through it again until it
    falls inside (cycle walking: Black and Rogaway 2002), on average at most four times.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = scramble(scramble(np.full(6, key, np.uint64)) + np.arange(6, dtype=np.uint64))
    # The inverse is the same network with the halves swapped and the keys in reverse.
    turn = -1 if inverse else 1

    def network(x):
        left, right = (x >> half, x & mask)[::turn]
        for k in keys[::turn]:
            left, right = right, left ^ (scramble(right ^ k) & mask)
        left, right = (left, right)[::turn]
        return left << half | right

    x = network(np.asarray(i, np.uint64))
    while (outside := x >= n).any():
        x = np.where(outside, network(x), x)
    return x.astype(np.int64)


# ---- mixtures


LONGEST_PERIOD = 100_000
"""The largest number of rows after which a mixture's pattern may repeat; each takes memory."""


class Pattern:
    """The source of each row, which repeats after a period: integer weights, spread evenly."""

    def __init__(self, weights: dict[str, Fraction], names: list[str]):
        """weights: for some or all of the sources; names: all of them, in order."""
        total = sum(weights.values())
        shares = [weights.get(name, Fraction(0)) / total for name in names]
        self.period = math.lcm(*(share.denominator for share in shares))
        if self.period > LONGEST_PERIOD:
            given = ",".join(f"{name}={float(weights[name])}" for name in weights)
            repeat = f"repeat after {self.period:,} rows, above {LONGEST_PERIOD:,}"
            raise UserError(DATA, f"the weights {given} {repeat}", "give weights of fewer digits")
        self.weights = np.array([int(share * self.period) for share in shares])
        self.sources = spread(self.weights.tolist())
        # The rows of a period by source: row r of source s is s * period + r, so that a search
        # finds how many of the source's rows come before r.
        self.places = np.sort(self.sources * self.period + np.arange(self.period))
        self.first_places = self.weights.cumsum() - self.weights

    def count_before(self, sources, rows) -> np.ndarray:
        """How many of a source's rows come before a row; both numbers or arrays."""
        periods, rest = np.divmod(rows, self.period)
        before = np.searchsorted(self.places, sources * self.period + rest)
        return periods * self.weights[sources] + before - self.first_places[sources]

    def count_rows(self, n_rows) -> np.ndarray:
        """How many of the first n_rows are each source's; n_rows: a number or an array."""
        return self.count_before(np.arange(len(self.weights)), np.expand_dims(n_rows, -1))

    def locate_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, how many rows of it come before) of each row."""
        sources = self.sources[rows % self.period]
        return sources, self.count_before(sources, rows)


def spread(weights: list[int]) -> np.ndarray:
    """The source of each row of a period.  In every prefix each source has its share of the rows,
    to within less than one row.

    A source may have the row if that does not put it ahead of its share.  Among those, the one with
    the earliest deadline gets it: Pfair scheduling (Baruah and others 1996), for one processor.
    """
    period, had, order, may = sum(weights), [0] * len(weights), [], []
    begin = [[] for _ in range(period + 1)]  # the sources that may have each row, from then on
    begin[0] = [i for i, w in enumerate(weights) if w]
    for row in range(period):
        for i in begin[row]:
            heappush(may, (-(-(had[i] + 1) * period // weights[i]), i))
        _, chosen = heappop(may)
        had[chosen] += 1
        begin[max(row + 1, had[chosen] * period // weights[chosen])].append(chosen)
        order.append(chosen)
    return np.array(order)


# ---- the order of a run


def stream_index(step, skip: list[tuple[int, int]]):
    """The index of the batch that update step + 1 trains on, among the batches of a run without
    data.skip.  step: a number or an array."""
    for first, stop in skip:
        step = step + (stop - first) * (first <= step)
    return step


def trained_before(step: int, skip: str, stages, ramp: str, batch_size: int) -> tuple:
    """The parts of data.skip, data.stages and train.batch_ramp that the first `step` updates of a
    run have used; batch_size: the sequences of each update without a ramp."""
    ranges = read_skip(skip)
    last = stream_index(step - 1, ranges) if step else -1
    begun = [word for word in stages if int(word.partition(":")[0]) <= last]
    sizes = {n: size for n, size in read_ramp(ramp, batch_size).items() if n <= last}
    return [pair for pair in ranges if pair[0] <= last], begun, sizes


UPDATES_AT_ONCE = 2**18
"""How many updates `Order.updates_of` looks at together; each takes some hundred bytes."""


class Order:
    """Which window of which source each row of a run is: the sources alternate in the pattern of
    the stage, and each source gives all of its windows once an epoch, in a seeded order.

    The stream is what a run without data.skip trains on: batches, each with an index from 0 on, and
    their rows, numbered from the first batch on.  A run with data.skip leaves some batches out.
    """

    def __init__(self, cfg: Config, n_windows: list[int]):
        """n_windows: one number for each source, in the order in which data.train names them."""
        self.cfg, self.n_windows = cfg, np.array(n_windows)
        parts = read_sets(cfg.data.train)
        ramp = read_ramp(cfg.train.batch_ramp, cfg.train.batch_size)
        self.ramp_starts, self.ramp_sizes = np.array([*ramp]), np.array([*ramp.values()])
        self.names, self.skip = list(parts), read_skip(cfg.data.skip)
        stages = read_stages(cfg.data.stages, parts)
        self.patterns = [Pattern(weights, self.names) for weights in stages.values()]
        self.stage_starts = self.rows_before([*stages])
        self.before_stage = self.rows_by_source([*stages])  # rows of each source

    def rows_before(self, index) -> np.ndarray:
        """How many rows the stream has before a batch; index: a number or an array."""
        n_batches = np.maximum(0, np.expand_dims(index, -1) - self.ramp_starts)
        # From each start on, every batch has this many rows more than before it.
        return n_batches @ np.diff(self.ramp_sizes, prepend=0)

    def rows_by_source(self, index) -> np.ndarray:
        """How many of the rows before a batch are each source's; index: a number or an array."""
        n_rows = self.rows_before(index)
        # A stage has the rows from its start to that of the next stage.
        ends = [*self.stage_starts[1:], np.iinfo(np.int64).max]
        stages = zip(self.patterns, self.stage_starts, ends, strict=True)
        return sum(p.count_rows(np.clip(n_rows, begin, end) - begin) for p, begin, end in stages)

    def batch_rows(self, step: int) -> np.ndarray:
        """The rows of the stream that update step + 1 of the run trains on."""
        index = stream_index(step, self.skip)
        return np.arange(self.rows_before(index), self.rows_before(index + 1))

    def batch_sizes(self, first: int, last: int) -> list[int]:
        """The sizes of the batches of the run's updates first + 1 .. last, each once."""
        indices = [stream_index(first, self.skip), stream_index(last - 1, self.skip)]
        begin, end = np.searchsorted(self.ramp_starts, indices, side="right")
        return sorted({*self.ramp_sizes[begin - 1 : end].tolist()})

    def locate_rows(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, how many rows of it come before) of each row that update step + 1 trains on."""
        rows = self.batch_rows(step)
        # The stage of all rows, because a stage begins with a batch.
        s = int(np.searchsorted(self.stage_starts, rows[0], side="right")) - 1
        sources, before = self.patterns[s].locate_rows(rows - self.stage_starts[s])
        return sources, before + self.before_stage[s, sources]

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, epoch, window) of each row of the batch that update step + 1 trains on."""
        sources, before = self.locate_rows(step)
        epochs, i = np.divmod(before, self.n_windows[sources])
        windows = np.empty_like(i)
        for s, e in sorted({*zip(sources.tolist(), epochs.tolist(), strict=True)}):
            here = (sources == s) & (epochs == e)
            windows[here] = permute(i[here], int(self.n_windows[s]), self.key(s, e))
        return sources, epochs, windows

    def new_epochs(self, step: int) -> dict[str, int]:
        """{source: number of the epoch, from 2 on, that it begins with update step + 1}."""
        sources, before = self.locate_rows(step)
        n = self.n_windows[sources]
        begins = (before % n == 0) & (before > 0)
        epochs = (before // n + 1)[begins].tolist()
        return {self.names[s]: e for s, e in zip(sources[begins].tolist(), epochs, strict=True)}

    def key(self, source: int, epoch: int) -> int:
        """The key of an epoch's permutation, from the seed, the epoch and the source's name."""
        name = np.array([zlib.crc32(self.names[source].encode())], np.uint64)
        return self.cfg.run.seed << 32 ^ epoch ^ int(scramble(name)[0])

    def trained_on(self, step: int) -> dict[str, int]:
        """{name: rows of that source that the first `step` updates of the run trained on}."""
        end = stream_index(step - 1, self.skip) + 1 if step else 0
        skipped = np.array([pair for pair in self.skip if pair[1] <= end], int).reshape(-1, 2)
        first, stop = self.rows_by_source(skipped.T)
        rows = self.rows_by_source(end) - (stop - first).sum(0)
        return dict(zip(self.names, rows.tolist(), strict=True))

    def first_beyond(self, epochs: int) -> tuple[str, int] | None:
        """(source, update) of the first update of the run that goes beyond this many epochs of a
        source, if train.steps reaches it."""
        limit = self.n_windows * epochs

        def stream_is_beyond(step: int) -> bool:
            return bool((self.rows_by_source(stream_index(step, self.skip) + 1) > limit).any())

        steps = range(self.cfg.train.steps)
        for step in steps[bisect_left(steps, True, key=stream_is_beyond) :]:
            sources, before = self.locate_rows(step)
            is_beyond = before >= limit[sources]
            if is_beyond.any():  # not so if data.skip leaves these rows out
                return self.names[sources[np.argmax(is_beyond)]], step + 1
        return None

    def updates_of(self, source: int, windows: range) -> list[int]:
        """The updates of the run, counted from 1, that train on one of these windows of a source.
        Windows past the source's last whole one feed no update."""
        n, found = int(self.n_windows[source]), set()
        windows = np.arange(windows.start, min(windows.stop, n))
        for first in range(0, self.cfg.train.steps, UPDATES_AT_ONCE):
            steps = np.arange(first, min(first + UPDATES_AT_ONCE, self.cfg.train.steps))
            index = stream_index(steps, self.skip)
            # Each update has the source's rows begin to end - 1.
            begin, end = (self.rows_by_source(i)[:, source] for i in (index, index + 1))
            for epoch in range(begin[0] // n, -(-end[-1] // n)):
                i = permute(windows, n, self.key(source, epoch), inverse=True)
                rows = epoch * n + i
                at = np.searchsorted(begin, rows, side="right") - 1
                is_in = (at >= 0) & (rows < end[at])  # not so where data.skip leaves the row out
                found.update((steps[at[is_in]] + 1).tolist())
        return sorted(found)
