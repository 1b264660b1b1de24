"""Token healing: which tokens may repeat what was taken back, and what the text is then."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import starscope
from starscope.cache import ArrayCache, Cache
from starscope.convert import convert
from starscope.errors import InvalidContentError, UsageError
from starscope.generate import Completion, generate, last_piece
from starscope.infill import infill_prompt, take_back
from starscope.sampling import SamplingOptions
from starscope.tokenizer import Tokenizer
from starscope.tokenizer.continuations import Continuations
from starscope.tokenizer.source import Source
from starscope.tokenizer.vocabulary import Contents, Roles, TokenType
from support.checkpoints import make_checkpoint
from support.vocabularies import read_packed, symbols

SPECIAL = ("<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>")
MERGES = (
    "i n",
    "in t",
    "p r",
    "pr int",
    "Ġ Ġ",
    "ĠĠ Ġ",
    "Ċ ĠĠ",
    "Ċ ĠĠĠ",
    "Ġ pr",
    "Ġpr int",
    "r e",
    "re t",
    "ret u",
    "Ã ©",
)


@cache
def small() -> Tokenizer:
    """All bytes, a few merges, then control tokens."""
    merges = [(a, b) for a, b in (merge.split(" ") for merge in MERGES)]
    pieces = [*symbols(), *("".join(merge) for merge in merges), *SPECIAL]
    types = bytes([TokenType.NORMAL] * (len(pieces) - len(SPECIAL)) + [TokenType.CONTROL] * len(SPECIAL))
    contents = Contents("the test", pieces, types, merges)
    eos = len(pieces) - len(SPECIAL)
    return Tokenizer(Source("the test", len(pieces), lambda: contents, "starcoder", Roles(eos=eos), False))


class RandomEngine:
    """An engine whose logits are random numbers."""

    name, device, context_length = "random", "cpu", 4096
    edits = None

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.rng = size, np.random.default_rng(seed)

    def new_cache(self) -> Cache:
        return ArrayCache(num_layers=0, context_length=4096, allocate=np.empty, as_cached=lambda rows: rows)

    def forward(self, sequences: Any, caches: Any, wanted: str = "last") -> list[np.ndarray]:
        [ids], [cache] = sequences, caches
        cache.advance(ids, len(ids))
        return [self.rng.normal(0, 3, (1, self.size)).astype(np.float32)]


def run(tokenizer: Tokenizer, text: str, numbers: int, **options: Any) -> tuple[Completion, bytes]:
    ids, begin = take_back(tokenizer, tokenizer.encode(text))
    engine: Any = RandomEngine(tokenizer.vocab_size, numbers)
    pieces = generate(engine, tokenizer, ids, begin=begin, max_new_tokens=40, options=SamplingOptions(**options))
    return last_piece(pieces), begin


words = st.lists(st.sampled_from(["print", "int", " ", "\n", "re", "tu", "é", "🦊", "<", "pr", "i", "a"]), min_size=1)


@given(words.map("".join), st.integers(0, 100), st.sampled_from([0.0, 1.0]))
@example("a\n    ", 1, 0.0)
@example("if x <", 2, 1.0)
@example("🦊", 3, 1.0)
def test_the_tokens_begin_with_what_was_taken_back_and_the_text_goes_on_behind_it(
    text: str, seed: int, temperature: float
) -> None:
    tokenizer = small()
    done, begin = run(tokenizer, text, seed, temperature=temperature, top_p=0.9, seed=seed)
    data = b"".join(map(tokenizer.token_bytes, done.token_ids))
    assert begin
    assert text.encode().endswith(begin)
    assert data.startswith(begin)
    assert done.text == data[len(begin) :].decode("utf-8", "replace")
    used, control = 0, range(tokenizer.vocab_size - len(SPECIAL), tokenizer.vocab_size)
    for token in done.token_ids:  # nothing special until the bytes are used up
        if used >= len(begin):
            break
        assert token not in control
        used += len(tokenizer.token_bytes(token))


@given(words.map("".join), words.map("".join))
@example("def f():\n   ", " print")
@example("p", "rint")
def test_every_cut_of_text_that_keeps_the_tokens_before_is_allowed(before: str, after: str) -> None:
    """What an unsplit text is cut into behind the prompt's other tokens: each of its tokens agrees in turn."""
    tokenizer = small()
    kept, owed = take_back(tokenizer, tokenizer.encode(before))
    whole = tokenizer.encode(before + after)
    assume(whole[: len(kept)] == kept)
    for token in whole[len(kept) :]:
        if not owed:
            break
        assert token in tokenizer.agreeing_ids(owed)
        owed = owed[len(tokenizer.token_bytes(token)) :]
    assert not owed


@given(st.text(st.sampled_from("print é\n<"), min_size=1, max_size=6))
def test_tokens_agree_when_one_begins_with_the_other(text: str) -> None:
    """With every byte a token, what a token leaves can always be written."""
    tokenizer, data = small(), text.encode()
    expected = [
        token
        for token in range(tokenizer.vocab_size - len(SPECIAL))
        if (own := tokenizer.token_bytes(token)).startswith(data) or data.startswith(own)
    ]
    assert tokenizer.agreeing_ids(data) == expected


def test_what_a_token_leaves_must_be_writable() -> None:
    pieces, normal = ["a", "ab", "abc", "c"], TokenType.NORMAL
    found = Continuations(Contents("the test", pieces, bytes([normal] * 4), []))
    assert found.agreeing(b"abc") == [1, 2]  # "a" would leave "bc", which nothing writes
    assert found.agreeing(b"x") == []
    padded = Continuations(Contents("the test", ["a", "[PAD1]", "<a>"], bytes([1, 5, TokenType.CONTROL]), []))
    assert padded.agreeing(b"[") == padded.agreeing(b"<") == []


def test_what_is_left_out_is_not_counted_on_later() -> None:
    pieces, normal = ["a", "ab", "abc", "bc", "c"], TokenType.NORMAL
    found = Continuations(Contents("the test", pieces, bytes([normal] * 5), []))
    assert found.agreeing(b"abc") == [0, 1, 2]
    assert found.agreeing(b"abc", {3}) == [1, 2]  # "a" would leave "bc", which then nothing writes
    assert found.agreeing(b"abc", {2, 3, 4}) == []


class PreferringEngine(RandomEngine):
    """An engine whose logits are largest for the tokens of `ids`, the first of them most."""

    def __init__(self, size: int, ids: list[int]) -> None:
        super().__init__(size, 0)
        self.ids = ids

    def forward(self, sequences: Any, caches: Any, wanted: str = "last") -> list[np.ndarray]:
        [logits] = super().forward(sequences, caches, wanted)
        logits[0, self.ids] = 100 - np.arange(len(self.ids))
        return [logits]


def heal(tokenizer: Tokenizer, text: str, ids: list[int], **options: Any) -> Completion:
    prompt, begin = take_back(tokenizer, tokenizer.encode(text))
    engine: Any = PreferringEngine(tokenizer.vocab_size, ids)
    sampling = SamplingOptions(**options)
    return last_piece(generate(engine, tokenizer, prompt, begin=begin, max_new_tokens=3, options=sampling))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_banned_token_is_not_chosen_while_others_agree(temperature: float) -> None:
    tokenizer = small()
    ids = {piece: tokenizer.encode(piece)[0] for piece in ("print", "pr", "p", "int", "in", "i")}
    liked = [ids["pr"], ids["int"], ids["p"]]
    options = {"temperature": temperature, "top_k": 1 if temperature else 0, "seed": 1}
    assert heal(tokenizer, "a\nprint", liked, **options).token_ids[:2] == [ids["pr"], ids["int"]]
    # Behind "pr" all that agrees would be banned: so "pr" is not begun with.
    bans = {ids[piece]: -np.inf for piece in ("int", "in", "i")}
    assert heal(tokenizer, "a\nprint", liked, logit_bias=bans, **options).token_ids[0] == ids["print"]
    # Where nothing else writes the bytes, they are written all the same.
    bans[ids["print"]] = -np.inf
    done = heal(tokenizer, "a\nprint", liked, logit_bias=bans, **options)
    assert b"".join(map(tokenizer.token_bytes, done.token_ids)).startswith(b"print")


def test_an_opening_bracket_never_becomes_a_special_token() -> None:
    """Every special token's spelling begins with what was taken back; none of them is text."""
    for name, special in (("refact", range(19)), ("starcoder", range(38))):
        packed = read_packed(name)
        merges = [(a, b) for a, b in (merge.split(" ") for merge in packed.merges)]
        found = Continuations(Contents(name, packed.tokens, bytes(packed.types()), merges)).agreeing(b"<")
        assert found
        assert not set(found) & set(special)


def test_a_word_is_healed() -> None:
    tokenizer = small()
    ids, begin = take_back(tokenizer, tokenizer.encode("a pri"))
    assert (tokenizer.decode(ids), begin) == ("a pr", b"i")
    assert take_back(tokenizer, []) == ([], b"")
    end = [tokenizer.eos_id or 0]
    assert take_back(tokenizer, end) == (end, b"")


@pytest.mark.parametrize("order", ["psm", "spm"])
def test_the_prefix_of_a_hole_is_taken_back_at_its_end(order: Any) -> None:
    tokenizer = small()
    plain = infill_prompt(tokenizer, "a print", "b", budget=50, fim_order=order)
    healed = infill_prompt(tokenizer, "a print", "b", budget=50, fim_order=order, heal=True)
    assert (plain.begin, healed.begin, healed.dropped) == (b"", b"print", 0)
    [token] = tokenizer.encode("print")
    at = plain.ids.index(token)
    assert healed.ids == plain.ids[:at] + plain.ids[at + 1 :]
    assert infill_prompt(tokenizer, "", "b", budget=50, heal=True) == infill_prompt(tokenizer, "", "b", budget=50)


def test_bytes_that_no_token_writes_are_refused() -> None:
    tokenizer = small()
    engine: Any = RandomEngine(tokenizer.vocab_size, 0)
    merges: list[tuple[str, str]] = []
    contents = Contents("the test", ["a", "b"], bytes([1, 1]), merges)
    few = Tokenizer(Source("the test", 2, lambda: contents, "starcoder", Roles(), False))
    with pytest.raises(UsageError, match="no tokens of the vocabulary spell"):
        generate(engine, few, [0], begin=b"c")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> starscope.Model:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return starscope.load(convert(folder, folder / "model.gguf", to="f32").out)


def test_a_model_heals_alone_in_a_batch_and_streamed(model: starscope.Model) -> None:
    prompts = ["def f(x):\n    ret", "a = <", "for i in ra"]
    for suffix in (None, "\nb"):
        alone = [model.generate(prompt, suffix, heal=True, max_new_tokens=8) for prompt in prompts]
        batch = model.generate(prompts, suffix, heal=True, max_new_tokens=8)
        assert [one.text for one in batch] == [one.text for one in alone]
        assert [one.token_ids for one in batch] == [one.token_ids for one in alone]
        for prompt, one in zip(prompts, alone, strict=True):
            last = model.tokenizer.encode(prompt)[-1]
            assert model.tokenizer.decode(one.token_ids) == model.tokenizer.decode([last]) + one.text
            streamed = model.generate(prompt, suffix, heal=True, max_new_tokens=8, stream=True)
            assert "".join(piece.text for piece in streamed) == one.text


def test_healing_needs_text(model: starscope.Model) -> None:
    with pytest.raises(InvalidContentError, match="healing needs the prompt as text"):
        model.generate([1, 2], heal=True)
