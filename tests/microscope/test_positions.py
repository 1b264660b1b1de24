"""Token positions by characters of the prompt, and the characters of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import starscope
from starscope.errors import UnsupportedError, UsageError
from starscope.microscope.positions import overlapping, token_spans

MODEL = starscope.load("demo", engine="numpy")
TEXT = "naïve = 'é😀漢'  # a comment\n\treturn naïve\n"


def test_a_span_of_the_text_is_the_tokens_that_spell_it() -> None:
    ids = MODEL.tokenizer.encode(TEXT)
    start = TEXT.index("return")
    positions = MODEL.token_positions(TEXT, start, start + len("return"))
    assert "return" in MODEL.tokenizer.decode([ids[i] for i in positions])
    for without in (positions[1:], positions[:-1]):
        assert "return" not in MODEL.tokenizer.decode([ids[i] for i in without])


def test_a_character_of_four_bytes_is_all_of_its_tokens() -> None:
    ids = MODEL.tokenizer.encode(TEXT)
    at = TEXT.index("😀")
    positions = MODEL.token_positions(TEXT, at, at + 1)
    assert len(positions) == 4  # this vocabulary has no token with more of its bytes
    assert MODEL.tokenizer.decode([ids[i] for i in positions]) == "😀"
    assert [MODEL.token_spans(TEXT)[i] for i in positions] == [(at, at + 1)] * 4


@given(st.text(min_size=1, max_size=40), st.data())
def test_positions_and_spans_agree_on_any_text(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = data.draw(st.integers(start + 1, len(text)))
    ids, spans = MODEL.tokenizer.encode(text), MODEL.token_spans(text)
    assert len(spans) == len(ids)
    positions = MODEL.token_positions(text, start, stop)
    assert positions == list(range(positions[0], positions[-1] + 1))
    assert text[start:stop].encode() in b"".join(MODEL.tokenizer.token_bytes(ids[i]) for i in positions)
    assert spans[positions[0]][0] <= start < spans[positions[0]][1]
    assert spans[positions[-1]][0] < stop <= spans[positions[-1]][1]
    assert spans[0][0] == 0
    assert spans[-1][1] == len(text)


def test_a_bos_is_counted_and_is_no_part_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = MODEL.token_positions(TEXT, 0, 5)
    spans = MODEL.token_spans(TEXT)
    monkeypatch.setattr(MODEL.tokenizer, "add_bos", True)
    assert MODEL.token_positions(TEXT, 0, 5) == [i + 1 for i in plain]
    assert MODEL.token_spans(TEXT) == [(0, 0), *spans]


def test_the_positions_are_those_of_a_trace() -> None:
    positions = MODEL.token_positions(TEXT, TEXT.index("return"), TEXT.index("return") + 6)
    with MODEL.trace(TEXT):
        assert MODEL.input_ids.shape[1] == len(MODEL.token_spans(TEXT))
        ids = MODEL.input_ids[0, positions].tolist()
    assert "return" in MODEL.tokenizer.decode(ids)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 2), (3, 2), (0, len(TEXT) + 1), (0.0, 2)])
def test_what_is_no_part_of_the_text_is_refused(start: int, stop: int) -> None:
    with pytest.raises(UsageError, match=f"expected 0 <= start < stop <= {len(TEXT)}"):
        MODEL.token_positions(TEXT, start, stop)


def test_tokens_that_do_not_spell_the_text_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="do not spell the text"):
        token_spans(MODEL.tokenizer.token_bytes, [1, 2], "x")
    assert overlapping([(0, 2), (2, 2), (2, 5)], 2, 3) == [2]


def test_save_is_there_for_code_that_was_written_for_other_tools() -> None:
    with MODEL.trace("x = 1"):
        value = MODEL.layers[0].layer_output
        saved = starscope.save(value)
    assert saved.data_ptr() == value.data_ptr()
    assert starscope.save([1]) == [1]
