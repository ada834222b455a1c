"""The tokenizers of prepare_data.py: made from bytes, characters or byte pairs, or read."""

from collections.abc import Iterable
from itertools import chain

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from config import END
from errors import DATA, USAGE, UserError, first_ten
from files import read_limited
from shards import parse_tokenizer


def byte_tokenizer() -> Tokenizer:
    """Each byte is its own id; 256 ends a document."""
    # GPT-2's character for each byte: these bytes keep theirs, and others get one from 256 on.
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    vocab = {chr(b): b for b in kept} | {chr(256 + n): b for n, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def char_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Each character that occurs has an id, in the order of code points."""
    characters = sorted(set(chain.from_iterable(texts)))
    vocab = {c: n for n, c in enumerate(characters)}
    # The unk_token is not in the vocabulary, so that encoding an unknown character is an error.
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="none"))
    any_character = Regex("(?m).")  # m: newlines too
    tokenizer.pre_tokenizer = pre_tokenizers.Split(any_character, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    return tokenizer


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE, trained on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,  # it would print its bars into log files too
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(path: str, end: str) -> Tokenizer:
    """The tokenizer in a file.  end: the token that ends a document; "" stands for END.

    END is added to a tokenizer that lacks it.  Raises UserError DATA, and USAGE if the tokenizer
    lacks another `end`, or if `end` is "" and it has special tokens but not END.
    """
    try:
        tokenizer = parse_tokenizer(read_limited(path))
    except Exception as e:  # libraries of buckets have errors of their own
        what = f"--tokenizer {path} cannot be read: {str(e)[:200]}"
        raise UserError(DATA, what, "give a tokenizer.json of the tokenizers library") from None
    special = [x.content for x in tokenizer.get_added_tokens_decoder().values() if x.special]
    lacks_end = tokenizer.token_to_id(END) is None
    if special and not end and lacks_end:
        what = f"--tokenizer {path} has no {END}; its special tokens are {first_ten(special)}"
        fix = "name the one that ends a document with --end_token; "
        raise UserError(USAGE, what, fix + f"--end_token '{END}' adds that one")
    end = end or END
    if end == END:
        tokenizer.add_special_tokens([END])
    ids, end_id = [*tokenizer.get_vocab().values()], tokenizer.token_to_id(end)
    if end == END and lacks_end:
        print(f"{path} has no {END}: it is added as id {end_id}; name another with --end_token")
    if end_id is None:
        what = f"--end_token {end} is no token of --tokenizer {path}"
        raise UserError(USAGE, what, "name the token that ends a document there")
    if ids.count(end_id) > 1:  # a new token's id is the number of tokens before
        what = f"--tokenizer {path}: id {end_id} is that of {end} and of another token"
        raise UserError(DATA, what, f"correct {path}: {end} needs an id of its own")
    return tokenizer
