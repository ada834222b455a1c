"""What data in a bucket cost a run: time to the first batch, bytes fetched, and time of an update
against the same data on disk.

    python tests/bucket_speed.py --shards 64 --megabytes 100 --delay 0.02

An emulated bucket on the loopback answers each request after --delay seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np

from shards import page_digest, page_digests


def write_set(folder: Path, n_shards: int, n_bytes: int):
    """A set of format 2 on disk."""
    folder.mkdir(parents=True)
    random, entries = np.random.default_rng(0), []
    for n in range(n_shards):
        tokens = random.integers(0, 256, n_bytes // 2, dtype=np.uint16)
        name = f"shard_{n:05d}.npy"
        np.save(folder / name, tokens)
        data = (folder / name).read_bytes()
        digests = page_digests(data)
        (folder / f"{name}.pages").write_bytes(digests)
        facts = dict(name=name, tokens=len(tokens), offset=len(data) - tokens.nbytes)
        entries.append(facts | dict(pages=page_digest(digests).hex()))
    manifest = dict(format=2, dtype="uint16", vocab_size=512, bytes=10, shards=entries)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def serve(folder: Path, delay: float):
    """Serve the files of a folder as gs://bucket, from the memory of this process."""
    import gcs_emulator
    from gcp_storage_emulator.handlers import buckets
    from gcp_storage_emulator.storage import Storage

    gcs_emulator.server.HANDLERS = gcs_emulator.routes()
    storage = Storage(use_memory_fs=True)
    buckets.create_bucket("bucket", storage)
    for path in sorted(folder.iterdir()):
        about = dict(name=path.name, bucket="bucket", size=str(path.stat().st_size))
        about |= dict(generation="1", metageneration="1", contentType="", crc32c="", md5Hash="")
        storage.create_file("bucket", path.name, path.read_bytes(), about)

    class Delayed(gcs_emulator.Handler):
        def do_GET(self):
            time.sleep(delay)
            self.answer("GET")

    listener = gcs_emulator.LoopbackServer(("127.0.0.1", 0), partial(Delayed, storage))
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{listener.server_port}"


CLIENT = """
import pathlib, re, sys, time
sys.argv = ["train.py"] + sys.argv[1:]
import cli
cfg = cli.start()
import jax, pages, utils
from dataset import Dataset
cfg = utils.start_mesh(cfg)
fetched, fetch = [], pages.fetch
def note(blocks):
    fetched.extend(blocks)
    return fetch(blocks)
pages.fetch = note
begin = time.monotonic()
data = Dataset(cfg, "train")
opened = time.monotonic()
data.batch(0)
first = time.monotonic()
windows = set()
rss = []
for step in range(300):
    data.batch(step)
    windows |= set(data.batch_windows(step).tolist())
    if step in (100, 299):
        status = pathlib.Path("/proc/self/status").read_text()
        rss.append(int(re.search(r"VmRSS:\\s+(\\d+)", status)[1]) // 1024)
L = cfg.train.seq_len
ahead = [w for s in range(300, 300 + cfg.data.prefetch) for w in data.batch_windows(s).tolist()]
used = set()
for w in [*windows, *ahead]:
    for n, a, b in data.source.spans(w * L, w * L + L + 1):
        first_page, last_page = (128 + 2 * a) // pages.PAGE, (127 + 2 * b) // pages.PAGE
        used |= {(n, page) for page in range(first_page, last_page + 1)}
size = sum(b.stop - b.start for b in fetched)
print(f"opened in {opened - begin:.2f} s, first batch {first - opened:.2f} s later; "
      f"{size / (len(used) * pages.PAGE):.3f} of the pages' bytes; {rss[0]} and {rss[1]} MiB")
"""


def main(n_shards: int, megabytes: int, delay: float):
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_set(data, n_shards, megabytes * 10**6)
        env = dict(os.environ, JAX_PLATFORMS="cpu", STORAGE_EMULATOR_HOST=serve(data, delay))
        env["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"
        flags = ["--config", "tiny", "--mesh.dp", "2", "--mesh.pp", "2", "--mesh.tp", "2"]
        flags += ["--data.val", "synthetic", "--train.eval_batches", "1", "--run.dir", folder]
        flags += ["--train.steps", "300", "--train.eval_every", "0"]
        remote = [*flags, "--data.train", "gs://bucket", "--data.cache", f"{folder}/c"]
        client = [sys.executable, "-c", CLIENT]
        subprocess.run([*client, *remote], env=env, cwd=ROOT)
        times = {"disk": [], "bucket": []}
        for turn in range(3):
            for kind, path in dict(disk=data, bucket="gs://bucket").items():
                name = f"{kind}{turn}"
                words = ["train.py", *flags, "--data.train", path, "--run.name", name]
                words += ["--data.cache", f"{folder}/cache{turn}"]
                run = [sys.executable, *map(str, words)]
                subprocess.run(run, env=env, cwd=ROOT, check=True, capture_output=True)
                rows = Path(folder, name, "metrics.jsonl").read_text().splitlines()
                found = [json.loads(row) for row in rows]
                took = [row["step_time"] for row in found if row["kind"] == "train"][20:]
                times[kind].append(statistics.median(took))
                print(f"{kind}: median update {times[kind][-1] * 1000:.2f} ms", flush=True)
        print(f"bucket / disk: {min(times['bucket']) / min(times['disk']):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--delay", type=float, default=0.02)
    ARGS = parser.parse_args()
    main(ARGS.shards, ARGS.megabytes, ARGS.delay)
