"""Tiny models, and what Hugging Face transformers computes with them, for tests/test_interop.py.

    python tests/make_goldens.py [FOLDER]      needs tests/requirements-interop.txt

FOLDER (default tests/goldens) gets a folder for each family, as `save_pretrained` writes it, and in
it golden.safetensors:
  tokens  [2, 48]      two sequences
  nll     [2, 47]      negative log likelihood of each next token, nats
  loss    []           their mean, as the model itself computes it
  logits  [2, 9, 96]   at the last positions (those of all positions would be most of the file)
The weights are bfloat16 numbers and stored as such, so no bit is lost.  The rest is computed in
float64, with eager attention and experts, and stored in float32.  (What transformers computes in
float32 differs between CPUs by 1e-5.)
"""

import itertools
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

B, L, V, LAST = 2, 48, 96, 9
# The least difference between the score of a chosen expert, or group of experts, and that of the
# next: rounding must not change the choice.
MARGIN = 1e-3
EPS = 0.01  # large, so that a norm that ignores it, or wrongly uses it, is noticed

COMMON = dict(
    vocab_size=V, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    hidden_size=16, num_hidden_layers=2, num_attention_heads=4, rms_norm_eps=EPS,
)  # fmt: skip
GQA = COMMON | dict(num_key_value_heads=2, head_dim=8, intermediate_size=32)
# With theta 500, the first of 8 pairs make 2.5, 1.2, 0.5, 0.2.. turns in 16 tokens: some
# frequencies are kept, some interpolated.
STRETCHED = GQA | dict(head_dim=16, tie_word_embeddings=True)
GEMMA = GQA | dict(
    num_hidden_layers=4, sliding_window=8, query_pre_attn_scalar=5, tie_word_embeddings=True,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16,
    low_freq_factor=0.4, high_freq_factor=2.0,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16,
    beta_slow=0.1, beta_fast=1.0,
)  # fmt: skip
MLA = COMMON | dict(
    num_hidden_layers=3, num_key_value_heads=4, intermediate_size=32, moe_intermediate_size=8,
    kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=6, num_mtp_layers=0,
    num_experts_per_tok=2, first_k_dense_replace=1, n_shared_experts=1,
)  # fmt: skip
YARN_MLA = YARN | dict(
    rope_theta=100.0, beta_slow=0.15, beta_fast=0.7, mscale=1.0, mscale_all_dim=1.0
)

FAMILIES = dict(
    gpt2=("gpt2", dict(
        vocab_size=V, n_positions=64, n_embd=16, n_layer=2, n_head=4, layer_norm_epsilon=EPS,
        bos_token_id=0, eos_token_id=1,
    )),
    llama=("llama", GQA | dict(attention_bias=True, mlp_bias=True)),
    llama_31=("llama", STRETCHED | dict(rope_parameters=LLAMA3)),
    llama_linear=("llama", STRETCHED | dict(
        rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=4.0),
    )),
    llama_yarn=("llama", STRETCHED | dict(rope_parameters=YARN)),
    mistral=("mistral", GQA | dict(sliding_window=8)),
    qwen2=("qwen2", GQA | dict(
        num_hidden_layers=4, use_sliding_window=True, sliding_window=8,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )),
    qwen3=("qwen3", GQA | dict(
        num_hidden_layers=4, tie_word_embeddings=True, use_sliding_window=True, sliding_window=8,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )),
    olmo2=("olmo2", GQA | dict(attention_bias=True)),
    gemma2=("gemma2", GEMMA | dict(
        attn_logit_softcapping=4.0, final_logit_softcapping=5.0, attention_bias=True,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )),
    gemma3_text=("gemma3_text", GEMMA | dict(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", rope_theta=500.0, factor=4.0),
            sliding_attention=dict(rope_type="default", rope_theta=20.0),
        ),
    )),
    qwen3_moe=("qwen3_moe", GQA | dict(
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True,
    )),
    mixtral=("mixtral", GQA | dict(
        num_local_experts=4, num_experts_per_tok=2, intermediate_size=16, sliding_window=8,
    )),
    gpt_oss=("gpt_oss", GQA | dict(
        num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2, intermediate_size=12,
        sliding_window=8, rope_parameters=YARN | dict(truncate=False),
        layer_types=["sliding_attention", "full_attention"] * 2, swiglu_limit=7.0,
    )),
    deepseek_v3=("deepseek_v3", MLA | dict(
        q_lora_rank=12, n_routed_experts=8, n_group=2, topk_group=1, rope_parameters=YARN_MLA,
        attention_bias=True,
    )),
    deepseek_v3_noq=("deepseek_v3", MLA | dict(
        q_lora_rank=None, n_routed_experts=6, n_group=1, topk_group=1,
    )),
)  # fmt: skip


def randomize(model, generator):
    """Set weights that hide no mistake: gains are not near one, biases not near zero, and a layer's
    branches are as large as its input."""
    for name, x in model.state_dict().items():
        noise = torch.randn(x.shape, generator=generator)
        if x.ndim > 1:
            # At 1.5, transformers' float32 differs by 8e-5 from its float64; at 1.25, by 1e-5.
            noise *= 1.25 * x.shape[-1] ** -0.5
            is_bounded = model.config.model_type == "gpt_oss" and "gate_up_proj" in name
            if is_bounded:  # let some hidden units be beyond the bound
                noise *= 3
        else:
            adds_one = "gemma" in model.config.model_type  # its gains are 1 + weight
            noise = 0.3 * noise + (name.endswith("weight") and not adds_one)
        x.copy_(noise.bfloat16())


def gap(score, n):
    """The least difference, over rows, between the n-th best score and the next one."""
    best = score.topk(min(n + 1, score.shape[-1])).values
    return (best[:, n - 1] - best[:, n]).min().item() if best.shape[-1] > n else 1.0


def margin(router, logit) -> float:
    """The least difference between scores that decided a router's choices."""
    if not hasattr(router, "e_score_correction_bias"):
        return gap(logit.softmax(-1), router.top_k)
    score = logit.sigmoid() + router.e_score_correction_bias
    group = score.view(len(score), router.num_group, -1)
    worth = group.topk(2).values.sum(-1)
    last = worth.topk(router.topk_group).values[:, -1:]
    allowed = group.masked_fill((worth < last)[..., None], -1.0).flatten(1)
    return min(gap(worth, router.topk_group), gap(allowed, router.top_k))


def attempt(family: str, seed: int):
    """(model, tokens, output, margin) of a family's model, drawn with that seed."""
    model_type, fields = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    margins, generator = [1.0], torch.Generator().manual_seed(seed)
    randomize(model, generator)
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda m, _, out: margins.append(margin(m, out[0])))
    tokens = torch.randint(V, (B, L), generator=generator)
    out = model.double()(tokens, labels=tokens)
    return model, tokens, out, min(margins)


@torch.no_grad()
def make(family: str, folder: Path) -> dict:
    """Write a family's model and golden to folder, and return the golden."""
    torch.set_num_threads(1)
    attempts = (attempt(family, seed) for seed in itertools.count())
    model, tokens, out, least = next(found for found in attempts if found[-1] > MARGIN)
    nll = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    logits = out.logits[:, -LAST:].contiguous()
    golden = dict(nll=nll.view(B, -1), loss=out.loss, logits=logits)
    golden = {name: x.float() for name, x in golden.items()} | dict(tokens=tokens.int())
    model.bfloat16().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file(golden, folder / "golden.safetensors")
    print(f"{family}: logits' std {out.logits.std():.2f}, loss {out.loss:.4f}, margin {least:.1e}")
    return golden


if __name__ == "__main__":
    home = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "goldens")
    for family in FAMILIES:
        shutil.rmtree(home / family, ignore_errors=True)
        make(family, home / family)
