"""Takes a tokenizer and which ids occur in the rows, gives ids that could be the drafter's mask token; knows no drafter."""

from collections.abc import Callable, Collection
from itertools import chain, islice

from transformers import PreTrainedTokenizerBase

MOST = 3  # named; one is enough


def mask_token_ids(
    tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, stop_ids: Collection[int], occurs: Callable[[int], bool]
) -> list[int]:
    """The first ids inside an embedding of `vocab_size` that mean nothing to the target and do not occur: best those that the
    tokenizer never gives, then special tokens that end, begin and fill nothing. Empty where there is none."""
    taken = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, *stop_ids}
    special = sorted(id for id, token in tokenizer.added_tokens_decoder.items() if token.special and id < vocab_size)
    every = chain(range(len(tokenizer), vocab_size), special)
    return list(islice((id for id in every if id not in taken and not occurs(id)), MOST))
