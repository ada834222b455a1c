"""What `python` is while the commands of the docs are tested: the same command on a small model.

As written, the commands would take hours.  `shorten` changes only sizes, and how many updates a run
makes, devices a search plans for and meshes a benchmark compares.  Everything else about a command
is what a reader types: the script, its flags, the files that it expects and leaves.
"""

import os
import re
import sys

# A model that compiles in seconds.  8 heads and 16 tokens are split by every mesh of the docs.
MODEL = dict(d_model=32, n_heads=8, n_kv_heads=8, d_head=8, d_ff=64)
SEQUENCE = ["--train.seq_len", "16"]
RUN = ["--train.eval_batches", "2", "--train.sample_tokens", "4", "--optim.warmup_steps", "1"]
RUN += ["--log.wandb", "off"]
UPDATES = 500  # as many of a command's updates become one


def value_of(flag: str, words: list[str]) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


def model_flags(words: list[str]) -> list[str]:
    """None for the config.json of a run, whose weights have their sizes."""
    is_preset = not (value_of("--config", words) or "").endswith(".json")
    fields = MODEL if is_preset else {}
    return [word for name, x in fields.items() for word in (f"--model.{name}", str(x))]


def shorten(words: list[str]) -> list[str]:
    """The words after `python`, with more flags at the end, where they win."""
    script = os.path.basename(words[0])
    words = [re.sub(r"^(runs/\w+)@\d+$", r"\1", word) for word in words]  # its only checkpoint
    if script == "train.py" and "--help" not in words:
        n_updates = max(1, int(value_of("--train.steps", words) or UPDATES) // UPDATES)
        if "--train.profile" in words:  # up to the last one that is traced
            first, n_traced = words[words.index("--train.profile") + 1 :][:2]
            n_updates = int(first) + int(n_traced) - 1
        batch = ["--train.batch_size", "8", "--train.grad_accum", "1"]
        updates = ["--train.steps", str(n_updates)]
        return [*words, *model_flags(words), *SEQUENCE, *batch, *updates, *RUN]
    if script == "benchmark.py":
        if "--meshes" in words:  # they are the last words; the others have the same form
            words = [*words[: words.index("--meshes") + 1], words[-1]]
        return [*words, "--repeats", "1", "--steps", "1", *model_flags(words), *SEQUENCE]
    if script == "plan.py" and "--search" in words:  # fewer rows and devices have fewer divisors
        devices = re.sub(":8$", ":2", value_of("--topology", words))
        return [*words, "--topology", devices, "--train.batch_size", "4", "--train.grad_accum", "1"]
    if script == "prepare_data.py" and value_of("--tokenizer", words) in (None, "bpe"):
        return [*words, "--vocab_size", "512"]
    if script == "sample.py":
        return [*words, "--tokens", "4"]
    if script == "evaluate.py" and "--data" in words:  # a whole training set
        return [*words, "--batch_size", "256"]
    if script == "average.py":
        return [*words, "--steps", "0,1"]
    if words[:2] == ["-m", "pytest"]:  # not the suite within the suite
        return [*words, "-n", "0", "tests/test_utils.py", "-k", "durations"]
    return words


if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, *shorten(sys.argv[1:])])
