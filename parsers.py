"""Parsers of data.train, data.val, data.stages, data.skip, train.batch_ramp and eval.tasks, which
raise ValueError, and the test of a path's form."""

import re
from fractions import Fraction
from typing import NamedTuple

NUMBER = r"(?:\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})"
MISTAKEN_NUMBER = r"[+-]?\d*\.?\d*(e[+-]?\d+)?%?|\d+/\d+|nan|inf"
"""What a user may have meant as a weight after the last colon; it may be empty."""


def is_wrong_address(path: str) -> bool:
    """Whether a path looks like an address, but is not gs://bucket or gs://bucket/path without
    credentials."""
    looks_like_one = re.search("://|^gs:", path) is not None
    return looks_like_one and not re.match("gs://[^/@]+(/|$)", path)


class Part(NamedTuple):
    """One of the sets that data.train or data.val names."""

    path: str
    weight: Fraction


def read_sets(text: str) -> dict[str, Part]:
    """{name: part} of NAME=PATH:WEIGHT,NAME=PATH:WEIGHT,..; {"": part} of a path alone.  A weight
    that is not given is 1."""
    if not re.match(r"[\w-]+=", text):
        return {"": Part(text, Fraction(1))}
    found = {}
    for word in text.split(","):
        match = re.fullmatch(rf"([\w-]+)=(.+?)(?::({NUMBER}))?", word)
        if not match:
            raise ValueError(f"{word!r} is not NAME=PATH or NAME=PATH:WEIGHT")
        name, path, weight = match.groups()
        if weight is None and re.fullmatch(rf".*:({MISTAKEN_NUMBER})", path, re.I):
            raise ValueError(f"the weight in {word!r} is no decimal number of up to 9 places")
        if name in found:
            raise ValueError(f"the name {name!r} is given twice")
        found[name] = Part(path, Fraction(weight or 1))
    if not any(part.weight for part in found.values()):
        raise ValueError("all weights are 0")
    return found


def read_stages(words: tuple[str, ...], parts: dict[str, Part]) -> dict[int, dict[str, Fraction]]:
    """{number of updates before it: weights} of each stage, from UPDATES:NAME=WEIGHT,.. words."""
    stages, last = {0: {name: part.weight for name, part in parts.items()}}, -1
    for word in words:
        start, _, text = word.partition(":")
        pairs = [re.fullmatch(rf"([\w-]+)=({NUMBER})", pair) for pair in text.split(",")]
        if not re.fullmatch(r"\d{1,12}", start) or not all(pairs):
            raise ValueError(f"{word!r} is not UPDATES:NAME=WEIGHT,NAME=WEIGHT")
        weights = {pair[1]: Fraction(pair[2]) for pair in pairs}
        if unknown := sorted(weights.keys() - parts.keys()):
            names = ", ".join(parts) if "" not in parts else "no names"
            raise ValueError(f"{word!r} names {unknown[0]!r}, but data.train has {names}")
        if len(weights) < len(pairs) or not any(weights.values()):
            raise ValueError(f"{word!r} names a set twice, or has no weight above 0")
        if int(start) <= last:
            raise ValueError(f"{word!r} does not begin after the stage before it")
        last = int(start)
        # 1 is also the weight of a set for which none was given.
        if last == 0 and any(x.weight not in (1, weights.get(n, 0)) for n, x in parts.items()):
            raise ValueError(f"{word!r} begins at once, with other weights than data.train has")
        stages[last] = weights
    return stages


def read_tasks(words: tuple[str, ...]) -> dict[str, str]:
    """{name: pattern of files} of NAME=PATTERN words."""
    pairs = [re.fullmatch(r"([\w-]+)=(.+)", word) for word in words]
    if not all(pairs):
        raise ValueError(f"{words[pairs.index(None)]!r} is not NAME=PATTERN")
    found = {pair[1]: pair[2] for pair in pairs}
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def read_ramp(text: str, batch_size: int) -> dict[int, int]:
    """{number of updates before it: sequences in each update from there on} of UPDATES:SEQUENCES,..
    words; {0: batch_size} of none."""
    ramp = {}
    for word in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,12}):(\d{1,9})", word)
        start, size = map(int, match.groups()) if match else (0, 0)
        if not size:
            raise ValueError(f"{word!r} is not UPDATES:SEQUENCES")
        if start <= max(ramp, default=-1) or (start and not ramp):
            raise ValueError(f"{word!r} does not begin at 0, or not after the word before it")
        ramp[start] = size
    return ramp or {0: batch_size}


def read_skip(text: str) -> list[tuple[int, int]]:
    """The ranges of updates that A:B,C,.. leaves out, as (first, stop), counted from 0, in order
    and without overlaps.  A:B are updates A to B - 1."""
    ranges = []
    for word in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,12})(?::(\d{1,12}))?", word)
        first = int(match[1]) if match else 0
        stop = int(match[2]) if match and match[2] else first + 1
        if not 0 < first < stop:
            raise ValueError(f"{word!r} is neither an update nor FIRST:STOP, counted from 1")
        ranges.append((first - 1, stop - 1))
    merged = []
    for first, stop in sorted(ranges):
        if merged and first <= merged[-1][1]:
            first, stop = merged[-1][0], max(stop, merged.pop()[1])
        merged.append((first, stop))
    return merged
