"""Continue text with a trained model, from any checkpoint and on any mesh.

python scripts/sample.py --run runs/demo --prompt "If the file" --temperature 0.7 --top_p 0.9
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cli
import config
import errors
import files


@dataclass(frozen=True)
class Args(cli.RunArgs):
    prompt: tuple[str, ...] = ("",)
    """Texts to continue; an empty one starts a new document."""
    stop: tuple[str, ...] = ()
    """Stop strings: a text ends before the first of them; they are not looked for in prompts."""
    json: config.Flag = False
    """Print each text as a line of JSON: prompt, text (the continuation) and tokens (how many were
    sampled, including those of a stop string)."""
    tokens: int = 128
    """Tokens to add to each text, unless the document ends before."""
    temperature: float = 0.8
    """Lower is more predictable; 0 always takes the most likely token."""
    top_k: int = 0
    """Draw from the k most likely tokens only; 0 draws from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens that have this much probability together."""
    seed: int = 0
    """The same seed gives the same text; on another mesh, rounding may change a token."""
    tokenizer: str = ""
    """A tokenizer.json; needed if the run's data has none."""
    seq_len: int = 0
    """Number of tokens that the model can look back on; 0 is the run's train.seq_len."""


def parse() -> tuple[Args, config.Config]:
    args = cli.read_args(Args, __doc__)
    problems = cli.too_low(args, tokens=1, temperature=0, top_k=0, top_p=1e-9, seed=0, seq_len=0)
    if args.top_p > 1:
        what = f"top_p={args.top_p} must be at most 1"
        problems.append(errors.Problem(what, "set --top_p 1 or less"))
    if "" in args.stop:
        problems.append(errors.Problem("stop has an empty text", "leave it out"))
    errors.raise_problems(errors.USAGE, problems)
    length = ["--train.seq_len", str(args.seq_len)] if args.seq_len else []
    return args, cli.config_of_run(args.run, args.mesh, *length, *args.flags)


if __name__ == "__main__":  # before jax is imported, see train.py
    ARGS, CFG = cli.quit_on_error(parse)

import generate
import processes
import runstate
import shards
import tasks
import utils


def print_as_it_grows(texts, held: int):
    """Stream a growing text: print what is new in each of `texts`.  The last `held` characters
    are held back until the next text, because they may be the beginning of a stop string."""
    printed = text = ""
    for text in texts:
        ready = text[: max(0, len(text) - held)]
        # A character of several tokens decodes to U+FFFD until the last of them is there.
        if len(ready) > len(printed) and not ready.endswith("\ufffd") and utils.is_lead():
            print(ready[len(printed) :], end="", flush=True)
            printed = ready
    utils.say(text[len(printed) :])


def encode_prompts(texts, tokenizer, end_id: int | None, cfg: config.Config) -> list[list[int]]:
    """The tokens of each text; of an empty one, the token that ends a document.  Raises UserError
    USAGE for a character that the tokenizer does not know."""
    try:
        prompts = [tasks.encode(tokenizer, text) or [end_id or 0] for text in texts]
    except ValueError as e:
        fix = "use characters of the training text"
        raise errors.UserError(errors.USAGE, f"the prompt {e}", fix) from None
    for text, prompt in zip(texts, prompts, strict=True):
        if len(prompt) > cfg.train.seq_len:
            what = f"the prompt {text[:40]!r} has {len(prompt)} tokens, more than --seq_len"
            utils.warn(f"{what} {cfg.train.seq_len}: only its end is seen")
    return prompts


def added_text(tokenizer, texts, prompts, n: int, row: list[int]) -> str:
    """The text of row n after its prompt.  Both are decoded together, because the text of a token
    may depend on those before it."""
    first = 0 if texts[n] else 1  # an empty prompt is the end-of-document token
    return tokenizer.decode(row[first:])[len(tokenizer.decode(prompts[n][first:])) :]


def until_stop(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop string."""
    return min((text.partition(stop)[0] for stop in stops), key=len, default=text)


def main(args: Args, cfg: config.Config):
    """Print each prompt with its continuation; a single one is streamed."""
    path = files.absolute_path(args.tokenizer or f"{args.run}/tokenizer.json")
    fix = "give the one that the run's data was made with, as --tokenizer PATH/tokenizer.json"
    tokenizer = utils.run_on_each(tasks.load_tokenizer, path, cfg, fix)
    texts = args.prompt or ("",)
    cfg = utils.start_mesh(cfg, rows=len(texts))
    utils.say(f"sampling in {cfg.train.dtype}", file=sys.stderr)  # stdout is for the text
    params = runstate.load_params(args.run, cfg, args.step, args.weights)
    end_id = tasks.find_end_id(tokenizer, cfg)
    prompts = encode_prompts(texts, tokenizer, end_id, cfg)
    added = partial(added_text, tokenizer, texts, prompts)
    ends = dict(stop_id=end_id, stops=args.stop, added_text=added)
    draw = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "seed")}
    draw |= dict(vocab_size=shards.n_ids(tokenizer))
    all_rows = generate.generate(params, prompts, args.tokens, cfg, **ends, **draw)
    if len(texts) == 1 and not args.json:
        growing = (texts[0] + until_stop(added(0, rows[0]), args.stop) for rows in all_rows)
        return print_as_it_grows(growing, max(map(len, args.stop), default=1) - 1)
    *_, rows = all_rows
    for n, text in enumerate(texts):
        more = until_stop(added(n, rows[n]), args.stop)
        if args.json:
            n_tokens = len(rows[n]) - len(prompts[n])
            utils.say(json.dumps(dict(prompt=text, text=more, tokens=n_tokens)))
        else:
            utils.say(text + more, "\n" + "-" * 80)


if __name__ == "__main__":
    processes.run_main(main, ARGS, CFG)
