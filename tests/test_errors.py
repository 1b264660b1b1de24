"""Errors keep what they say wherever they go."""

from __future__ import annotations

import copy
import pickle

import pytest

from starscope import errors
from starscope.errors import StarscopeError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StarscopeError)]


@pytest.mark.parametrize("carried", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_from_another_process_says_the_same(kind, carried):
    for error in (kind("it is not there.", hint="Look elsewhere."), kind("it is not there.")):
        error.add_note("while looking")
        found = carried(error)
        assert type(found) is kind
        assert (found.message, found.hint, str(found)) == (error.message, error.hint, str(error))
        assert found.__notes__ == ["while looking"]
