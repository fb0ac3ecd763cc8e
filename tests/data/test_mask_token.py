"""Ids to choose the mask token from: those that mean nothing, never one that the target or the data gives a meaning."""

from tokenizers import AddedToken
from toys import EOS, PAD, START, VOCAB, toy_tokenizer

from outrider.data.mask_token import mask_token_ids


def test_ids_beyond_the_tokenizer_come_first_then_idle_special_tokens() -> None:
    tokenizer = toy_tokenizer()
    found = {"vocab_size": VOCAB, "stop_ids": (EOS,)}
    assert mask_token_ids(tokenizer, **found, occurs=lambda id: id == 260) == [259, 261, 262]
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|fim|>", special=True)]})
    assert mask_token_ids(tokenizer, vocab_size=260, stop_ids=(EOS,), occurs=lambda id: id == START) == [259]


def test_pad_end_stop_tokens_and_what_occurs_are_never_named() -> None:
    tokenizer = toy_tokenizer()
    assert tokenizer.pad_token_id == PAD
    assert mask_token_ids(tokenizer, vocab_size=259, stop_ids=(EOS, START), occurs=lambda id: False) == []
    assert mask_token_ids(tokenizer, vocab_size=259, stop_ids=(EOS,), occurs=lambda id: False) == [START]
