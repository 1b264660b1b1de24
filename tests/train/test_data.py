"""The token file, and batches as a pure function of (seed, epoch, index)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starscope.errors import InputError, InvalidContentError
from starscope.train.data import Batches, open_tokens, random_words, write_tokens
from starscope.train.fim import END_OF_TEXT
from support.training import DOCUMENTS, VOCAB_SIZE, tiny_bpe


@given(st.integers(8, 400), st.integers(1, 8), st.integers(0, 2**63), st.integers(0, 5))
def test_an_epoch_visits_every_sample_once_and_no_target_twice(tokens, context, seed, epoch):
    batches = Batches(np.arange(tokens, dtype="<u2"), context_length=context, seed=seed)
    first = epoch * batches.per_epoch
    samples = batches.batch(first, batches.per_epoch)
    assert samples.shape == (batches.per_epoch, context + 1)
    assert ((samples[:, 1:] - samples[:, :-1]) % tokens == 1).all()  # consecutive on the circle of all tokens
    targets = samples[:, 1:].ravel().tolist()
    assert len(set(targets)) == len(targets) == tokens // context * context


def test_epochs_and_seeds_differ_and_a_batch_is_the_same_however_it_is_reached():
    ids = np.arange(1000, dtype="<u2")
    batches = Batches(ids, context_length=10, seed=3)
    a, b = batches.batch(0, 100), batches.batch(100, 100)
    assert (a != b).any()
    assert (Batches(ids, context_length=10, seed=4).batch(0, 100) != a).any()
    again = Batches(ids, context_length=10, seed=3)
    assert (again.sample(150) == b[50]).all()
    assert (again.batch(95, 10) == np.concatenate([a[95:], b[:5]])).all()


def test_random_words_are_the_same_on_every_machine():
    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    golden, state = 0x9E3779B97F4A7C15, 0
    for word in (1, 2**63 + 2, 3):
        state = mix(((state ^ word) + golden) % 2**64)
    expected = [mix((state + golden * k) % 2**64) for k in (1, 2)]
    assert random_words(1, 2**63 + 2, 3, count=2).tolist() == expected
    assert abs(float((random_words(7, count=4096) >> np.uint64(63)).mean()) - 0.5) < 0.03


def test_data_shorter_than_the_context_is_refused():
    with pytest.raises(InvalidContentError, match="the data has 9 tokens; expected at least context_length, 10"):
        Batches(np.zeros(9, "<u2"), context_length=10, seed=0)


@pytest.mark.parametrize(("vocab_size", "width"), [(VOCAB_SIZE, 2), (65536, 2), (65537, 4)])
def test_a_token_file_keeps_documents_apart_and_says_its_width(tmp_path, vocab_size, width):
    path, bpe = tmp_path / "a.tokens", tiny_bpe()
    end = bpe.token_id(END_OF_TEXT)
    write_tokens(path, DOCUMENTS, bpe, vocab_size=vocab_size, end_of_text=end, fingerprint="f")
    file = open_tokens(path)
    assert file.ids.dtype.itemsize == width
    assert not file.ids.flags.writeable
    assert (file.vocab_size, file.documents, file.fingerprint) == (vocab_size, len(DOCUMENTS), "f")
    assert file.bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert [bpe.decode(ids.tolist()) for ids in file.split(end)] == list(DOCUMENTS)


def test_a_token_file_that_is_cut_or_something_else_is_refused(tmp_path):
    path = tmp_path / "a.tokens"
    write_tokens(path, DOCUMENTS, tiny_bpe(), vocab_size=VOCAB_SIZE, end_of_text=0)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InvalidContentError, match=r"has \d+ bytes; expected \d+ for \d+ tokens"):
        open_tokens(path)
    path.write_bytes(b"something else")
    with pytest.raises(InvalidContentError, match="is not a starscope token file"):
        open_tokens(path)
    with pytest.raises(InputError, match="cannot be read"):
        open_tokens(tmp_path / "b.tokens")


def test_ids_beyond_the_vocabulary_are_refused_and_leave_no_file(tmp_path):
    with pytest.raises(InvalidContentError, match="expected ids below 280"):
        write_tokens(tmp_path / "a.tokens", DOCUMENTS, tiny_bpe(), vocab_size=280, end_of_text=0)
    assert list(tmp_path.iterdir()) == []
