"""Text from tokens that arrive one at a time: a character is given out when its last byte has come.

Tokens are bytes, and a character may be spread over several of them. What `push` returns, one after the other, and
what `finish` returns at the end are together exactly the text of all ids decoded at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection

_make_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Give it ids in order; bytes that are no UTF-8 become U+FFFD.

    With `drops_space` the space that the first token begins with is no text: the tokenizer had put it there. Tokens
    in `before_text` (bos) come before the first.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, drops_space: bool = False, before_text: Collection[int] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._drops_space = self._at_start = drops_space
        self._before_text = before_text
        self._decoder = _make_decoder("replace")

    def push(self, token_id: int, skip: int = 0) -> str:
        """The text that this token, without its first `skip` bytes, completes; often none inside a character."""
        data = self._token_bytes(token_id)
        if self._at_start and token_id not in self._before_text:
            self._at_start = False
            skip = skip or data.startswith(b" ")
        return self._decoder.decode(data[skip:])

    def finish(self) -> str:
        """What is left of a character that was never completed. The detokenizer starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._at_start = self._drops_space
        return text
