"""The peers of benchmark.py that run in PyTorch: transformers' model, and nanoGPT's, with Trifold's
initial weights, microbatches, optimizer and schedule.

Dimension key (a suffix on every array's name spells its logical shape):
  B  sequences   L  sequence length   D  d_model   V  vocabulary   H  heads   K  head dim
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

import model
import optim
import utils
from architecture import Model
from config import Config
from errors import DATA, UserError
from scripts import hf_config, hf_families


def with_padding(cfg: Config) -> Config:
    """The config with the embedding's padding rows counted as tokens, so that the matmuls have the
    same shapes as Trifold's."""
    return replace(cfg, model=replace(cfg.model, vocab_size=cfg.model.vocab_rows))


def initial_weights(family: str, cfg: Config) -> dict:
    """{name: tensor} of Hugging Face's model of that family, with Trifold's initial weights."""
    params = utils.leaf_table(jax.device_get(jax.jit(model.init_params, static_argnums=0)(cfg)))
    tensors = hf_families.tensor_maps(family, with_padding(cfg))

    def tensor(t):
        return torch.from_numpy(t.from_weights([params[p.weight][p.entry] for p in t.parts]))

    return {t.name: tensor(t) for t in tensors}


class TransformersModel(nn.Module):
    """transformers' model for a config: token_BL -> logit_BLV.  Raises UserError DATA if it has
    none."""

    def __init__(self, cfg: Config):
        super().__init__()
        settings = hf_config.write_config(with_padding(cfg), cfg.train.dtype, None)
        settings |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        options = dict(attn_implementation="sdpa", dtype=torch.float32)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), **options)
        weights = initial_weights(settings["model_type"], cfg)
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        tied = {"lm_head.weight"}  # a second name of the embedding
        assert not unknown and set(missing) <= tied, (unknown, missing)

    def forward(self, token_BL):
        return self.model(input_ids=token_BL, use_cache=False).logits


class NanoGPTLayer(nn.Module):
    """A layer of GPT-2: x_BLD -> x_BLD."""

    def __init__(self, m: Model):
        super().__init__()
        self.n_heads, D = m.n_heads, m.d_model
        self.ln_1, self.ln_2 = (nn.LayerNorm(D, m.norm_eps) for _ in range(2))
        self.attn = nn.ModuleDict(dict(c_attn=nn.Linear(D, 3 * D), c_proj=nn.Linear(D, D)))
        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(D, m.d_ff), c_proj=nn.Linear(m.d_ff, D)))
        self.gelu = nn.GELU("tanh" if m.activation == "gelu_tanh" else "none")

    def forward(self, x_BLD):
        qkv = self.attn.c_attn(self.ln_1(x_BLD)).chunk(3, -1)
        q, k, v = (x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in qkv)
        y_BHLK = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLD = x_BLD + self.attn.c_proj(y_BHLK.transpose(1, 2).flatten(2))
        return x_BLD + self.mlp.c_proj(self.gelu(self.mlp.c_fc(self.ln_2(x_BLD))))


class NanoGPT(nn.Module):
    """GPT-2 with the operations of nanoGPT's model.py and transformers' names of tensors:
    token_BL -> logit_BLV.  Raises UserError DATA if the config is not a GPT-2."""

    def __init__(self, cfg: Config):
        super().__init__()
        m = with_padding(cfg).model
        name = hf_config.write_config(cfg, "float32", None)["model_type"]
        if name != "gpt2" or m.activation == "relu2":
            what = f"is not measured on a {name} with {m.activation}"
            raise UserError(DATA, what, "give a model of GPT-2's kind")
        self.wte = nn.Embedding(m.vocab_size, m.d_model)
        self.wpe = nn.Embedding(m.max_positions, m.d_model)
        self.h = nn.ModuleList(NanoGPTLayer(m) for _ in range(m.n_layers))
        self.ln_f = nn.LayerNorm(m.d_model, m.norm_eps)
        weights = initial_weights("gpt2", cfg)
        weights = {name.removeprefix("transformer."): x for name, x in weights.items()}
        # transformers stores these matrices as [inputs, outputs], nn.Linear as [outputs, inputs].
        weights = {n: x.T if ".c_" in n and x.ndim == 2 else x for n, x in weights.items()}
        self.load_state_dict(weights)

    def forward(self, token_BL):
        x_BLD = self.wte(token_BL) + self.wpe.weight[: token_BL.shape[1]]
        for layer in self.h:
            x_BLD = layer(x_BLD)
        return functional.linear(self.ln_f(x_BLD), self.wte.weight)


NETWORKS = dict(transformers=TransformersModel, nanogpt=NanoGPT)


class Training:
    """Training of a network on one batch, under torch.compile and with autocast to the compute
    dtype.  AdamW decays matrices only, as optim.py's does."""

    def __init__(self, name: str, window_BL, cfg: Config, device: str):
        self.cfg, self.device = cfg, device
        self.network = NETWORKS[name](cfg).to(device).train()
        self.initial = {name: x.clone() for name, x in self.network.state_dict().items()}
        windows = torch.tensor(window_BL, dtype=torch.long, device=device)
        self.microbatches = windows.chunk(cfg.train.grad_accum * cfg.train.microbatches)
        o, params = cfg.optim, list(self.network.parameters())
        groups = [
            dict(params=[p for p in params if p.ndim > 1], weight_decay=o.weight_decay),
            dict(params=[p for p in params if p.ndim == 1], weight_decay=0.0),
        ]
        self.adamw = torch.optim.AdamW(groups, betas=(o.b1, o.b2), eps=o.eps, fused=True)
        steps = np.arange(cfg.train.steps)
        self.rates = np.asarray(jax.vmap(partial(optim.learning_rate, cfg=cfg))(steps)).tolist()
        self.mean_loss = torch.compile(self.mean_loss)

    def begin(self) -> int:
        """Go back to the initial weights and an empty AdamW; returns 0, the updates done."""
        self.network.load_state_dict(self.initial)
        self.adamw.state.clear()
        return 0

    def mean_loss(self, token_BL):
        logit_BLV = self.network(token_BL[:, :-1])[..., : self.cfg.model.vocab_size].float()
        return functional.cross_entropy(logit_BLV.flatten(0, 1), token_BL[:, 1:].flatten())

    def step(self, n: int):
        """(n + 1, {"loss": nats a token}) after one update."""
        total = 0
        autocast = torch.autocast(self.device, torch.bfloat16, self.cfg.train.dtype == "bfloat16")
        for token_BL in self.microbatches:
            with autocast:
                loss = self.mean_loss(token_BL) / len(self.microbatches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.cfg.optim.clip_norm)
        for group in self.adamw.param_groups:
            group["lr"] = self.rates[min(n, len(self.rates) - 1)]
        self.adamw.step()
        self.adamw.zero_grad()
        return n + 1, dict(loss=total)
