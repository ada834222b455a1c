"""Milliseconds of a decoded token of gpt2_124m on one core, by Trifold and by transformers, for
each number of rows, in float32 or the dtype given first; medians of three measurements in turns.

One core, because a token reads all weights: the threads of several share the memory's speed, and
the time that they wait for it would count for each of them.

    JAX_PLATFORMS=cpu .venv-interop/bin/python tests/decode_speed.py 1 8 32
    JAX_PLATFORMS=cpu .venv-interop/bin/python tests/decode_speed.py bfloat16 1 8 32

Prints a JSON object for each number of rows.
"""

import json
import os
import sys
import time
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before XLA makes its threads

import config
import generate
import model
import utils


def trifold(params, cfg, prompts, n: int):
    options = dict(vocab_size=50257, temperature=0)
    deque(generate.generate(params, prompts.tolist(), n, cfg, **options), maxlen=0)


def transformers(network, prompts, n: int):
    x = torch.tensor(prompts)
    options = dict(do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(x))
    network.generate(x, max_new_tokens=n, min_new_tokens=n, **options)


def seconds(decode, n: int) -> float:
    begin = time.process_time()
    decode(n)
    return time.process_time() - begin


def main():
    torch.set_num_threads(1)
    preset, numbers = config.PRESETS["gpt2_124m"](), sys.argv[1:]
    dtype = "float32" if numbers[0].isdigit() else numbers.pop(0)
    settings = dict(mesh=config.Mesh(1, 1, 1), train=replace(preset.train, dtype=dtype))
    preset = replace(preset, **settings)
    network = GPT2LMHeadModel(GPT2Config()).to(getattr(torch, dtype)).eval()
    for n_rows in map(int, numbers):
        cfg = utils.start_mesh(preset, rows=n_rows)
        prompts = np.random.default_rng(0).integers(50257, size=(n_rows, 16))
        params = model.init_params(cfg)
        decoders = partial(trifold, params, cfg, prompts), partial(transformers, network, prompts)
        for decode in decoders:
            decode(20)  # compiles what 45 needs too: both have room for 64 tokens
        turns = [[seconds(f, 45) - seconds(f, 20) for f in decoders] for _ in range(3)]
        ours, theirs = 1e3 * np.median(turns, 0) / 25
        print(json.dumps(dict(rows=n_rows, trifold=round(ours), transformers=round(theirs))))


if __name__ == "__main__":
    main()
