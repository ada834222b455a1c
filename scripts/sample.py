"""Continue text with a trained model:
any checkpoint, any mesh.

    python scripts/sample.py --run runs/demo --prompt "def main(" --temperature 0.8 --top_p 0.95
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
import config
import files


@dataclass(frozen=True)
class Args:
    run: str
    """A run directory, local or gs://."""
    prompt: tuple[str, ...] = ("",)
    """Texts to continue; an empty one starts a new document."""
    tokens: int = 128
    """Tokens to add to each, unless the document ends first."""
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens only; 0 from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that hold this much probability."""
    seed: int = 0
    """The same seed gives the same text, on any mesh."""
    step: int = -1
    """The checkpoint to use; -1 is the newest."""
    tokenizer: str = ""
    """A tokenizer.json, for a run whose data had none."""
    seq_len: int = 0
    """Tokens that the model may look back on; 0 is as many as it was trained with."""
    mesh: config.YesNo[config.Mesh] = config.Mesh()


def parse() -> tuple[Args, config.Config]:
    args = tyro.cli(Args, use_underscores=True, description=__doc__)
    wrong = []
    ranges = dict(
        tokens=(1, 10**9),
        temperature=(0, 100),
        top_k=(0, 10**9),
        top_p=(1e-9, 1),
        seed=(0, 2**32),
        seq_len=(0, 10**7),
    )
    for name, (low, high) in ranges.items():
        if not low <= getattr(args, name) <= high:
            what = f"{name}={getattr(args, name)} must be between {low} and {high}"
            wrong.append(config.Problem(what, f"set --{name} inside that range"))
    if wrong:
        raise config.UserError(config.USAGE, problems=wrong)
    length = ["--train.seq_len", str(args.seq_len)] if args.seq_len else []
    return args, cli.config_of_run(args.run, args.mesh, *length)


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG = cli.quit_on_error(parse)

from tokenizers import Tokenizer

import generate
import train
import utils


def load_tokenizer(args: Args) -> Tokenizer:
    path = files.absolute_path(args.tokenizer or args.run)
    path = path if args.tokenizer else path / "tokenizer.json"
    if not path.exists():
        what = f"{path} does not exist: the run's data came without a tokenizer"
        raise config.UserError(config.DATA, what, "give the data's --tokenizer tokenizer.json")
    return Tokenizer.from_str(path.read_text())


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.encode(text).ids  # with what its author wants before a text
    except Exception as e:  # tokenizers raises nothing narrower
        what = f"the prompt {text!r} has a character that the tokenizer does not know: {e}"
        raise config.UserError(config.USAGE, what, "use characters of the training text") from None


def main(cfg: config.Config):
    """Print each prompt with its continuation, a single one as it grows."""
    args, tokenizer = ARGS, load_tokenizer(ARGS)
    cfg = utils.start_mesh(cfg, rows=len(args.prompt) or 1)
    params = train.load_params(files.absolute_path(args.run), cfg, args.step)
    end = cfg.data.end_id if cfg.data.end_id >= 0 else tokenizer.token_to_id(config.END)
    if tokenizer.get_vocab_size() > cfg.model.vocab_size:
        what = f"the tokenizer has {tokenizer.get_vocab_size()} tokens, above the model's"
        fix = "give the tokenizer that the run's data was made with"
        raise config.UserError(config.DATA, f"{what} vocab_size={cfg.model.vocab_size}", fix)
    texts = args.prompt or ("",)
    prompts = [encode(tokenizer, text) or [end or 0] for text in texts]
    for text, prompt in zip(texts, prompts, strict=True):
        if (left := len(prompt) - cfg.train.seq_len) > 0:
            what = f"the prompt {text[:40]!r} has {len(prompt)} tokens, {left} above --seq_len"
            utils.warn(f"{what} {cfg.train.seq_len}: only its end is seen")
    skip = [0 if text else 1 for text in texts]  # what stands for an empty prompt is not text
    ids = dict(vocab_size=tokenizer.get_vocab_size(), stop_id=end)
    draw = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "seed")}
    shown, alone = "", len(prompts) == 1
    for rows in generate.generate(params, prompts, args.tokens, cfg, **ids, **draw):
        text = tokenizer.decode(rows[0][skip[0] :])
        whole = not text.endswith("\ufffd")  # half a character is not shown
        if alone and whole and utils.is_lead():
            print(text[len(shown) :], end="", flush=True)
            shown = text
    if alone:
        return utils.say(text[len(shown) :])
    for row, n in zip(rows, skip, strict=True):
        utils.say(tokenizer.decode(row[n:]), "\n" + "-" * 80)


if __name__ == "__main__":
    utils.run_main(main, CFG)
