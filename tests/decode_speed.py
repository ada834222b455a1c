"""Milliseconds of a decoded token on one core, by Trifold and by transformers, for each number of
rows; medians of three measurements in turns.  The model is gpt2 (124 million parameters) or llama
(of that size), in float32 or bfloat16.

One core, because a token reads all weights: the threads of several share the memory's speed, and
the time that they wait for it would count for each of them.

    JAX_PLATFORMS=cpu .venv-interop/bin/python tests/decode_speed.py gpt2 float32 1 8 32

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
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before XLA makes its threads

import config
import generate
import model
import utils

VOCAB_SIZE = 50257


def trifold(params, cfg, prompts, n: int):
    options = dict(vocab_size=VOCAB_SIZE, temperature=0)
    deque(generate.generate(params, prompts.tolist(), n, cfg, **options), maxlen=0)


def transformers(network, prompts, n: int):
    x = torch.tensor(prompts)
    options = dict(do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(x))
    network.generate(x, max_new_tokens=n, min_new_tokens=n, **options)


def seconds(decode, n: int) -> float:
    begin = time.process_time()
    decode(n)
    return time.process_time() - begin


def models(name: str):
    """(preset, the same model of transformers)."""
    if name == "gpt2":
        return config.PRESETS["gpt2_124m"](), GPT2LMHeadModel(GPT2Config())
    preset = config.PRESETS["llama_1b"]()
    sizes = dict(n_layers=12, d_model=768, n_heads=12, n_kv_heads=4, d_head=64, d_ff=2048)
    preset = replace(preset, model=replace(preset.model, **sizes, vocab_size=VOCAB_SIZE))
    theirs = dict(num_hidden_layers=12, hidden_size=768, intermediate_size=2048)
    theirs |= dict(num_attention_heads=12, num_key_value_heads=4, vocab_size=VOCAB_SIZE)
    theirs |= dict(tie_word_embeddings=preset.model.tie_embeddings)
    return preset, LlamaForCausalLM(LlamaConfig(**theirs))


def main():
    torch.set_num_threads(1)
    name, dtype, *numbers = sys.argv[1:]
    preset, network = models(name)
    settings = dict(mesh=config.Mesh(1, 1, 1), train=replace(preset.train, dtype=dtype))
    preset, network = replace(preset, **settings), network.to(getattr(torch, dtype)).eval()
    for n_rows in map(int, numbers):
        cfg = utils.start_mesh(preset, rows=n_rows)
        prompts = np.random.default_rng(0).integers(VOCAB_SIZE, size=(n_rows, 16))
        params = model.init_params(cfg)
        decoders = partial(trifold, params, cfg, prompts), partial(transformers, network, prompts)
        for decode in decoders:
            decode(20)  # compiles what 45 needs too: both have room for 64 tokens
        turns = [[seconds(f, 45) - seconds(f, 20) for f in decoders] for _ in range(3)]
        ours, theirs = 1e3 * np.median(turns, 0) / 25
        print(json.dumps(dict(rows=n_rows, trifold=round(ours), transformers=round(theirs))))


if __name__ == "__main__":
    main()
