"""SamplingOptions: what is refused, and that every way to give them takes the same names and defaults."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest

from starscope.cli.run import run
from starscope.errors import UsageError
from starscope.model import Model
from starscope.sampling import SAMPLERS, SamplingArguments, SamplingOptions

DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingOptions)}


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, r"top_k is 1\.5"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_p": -0.1}, "top_p is -0.1"),
        ({"typical_p": 1.1}, "typical_p is 1.1"),
        ({"typical_p": math.nan}, "typical_p is nan"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"seed": -1}, "seed is -1"),
        ({"mirostat": 3}, "mirostat is 3"),
        ({"mirostat": -1}, "mirostat is -1"),
        ({"mirostat": 1.0}, r"mirostat is 1\.0"),
        ({"mirostat_tau": -1.0}, "mirostat_tau is -1.0"),
        ({"mirostat_tau": math.inf}, "mirostat_tau is inf"),
        ({"mirostat_eta": -0.1}, "mirostat_eta is -0.1"),
        ({"mirostat_eta": math.nan}, "mirostat_eta is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty is -inf"),
        ({"penalty_window": -1}, "penalty_window is -1"),
        ({"logit_bias": {5: math.nan}}, "logit_bias of token 5 is nan"),
        ({"logit_bias": {5: math.inf}}, "logit_bias of token 5 is inf"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias has the token -5"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias has the token '5'"),
        ({"samplers": "top_k,top_q"}, "samplers has 'top_q'"),
        ({"samplers": "top_k,"}, "samplers has ''"),
        ({"samplers": ["top_k", "min_p", "top_k"]}, "top_k, min_p, top_k; expected each step once"),
        ({"samplers": "temperature", "top_k": 3}, r"top_k is set, but samplers \(temperature\) leaves it out"),
        ({"samplers": "", "temperature": 0.5}, r"temperature is set, but samplers \(none\)"),
        ({"samplers": "top_k", "presence_penalty": 1.0}, "penalties is set"),
    ],
)
def test_an_option_out_of_range_is_refused_with_what_was_found_and_expected(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        SamplingOptions(**wrong)
    assert "expected" in caught.value.message


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(UsageError, match="Did you mean temperature"):
        SamplingOptions(samplers="top_k,temprature")


@pytest.mark.parametrize("at_the_edge", [{"top_p": 0}, {"mirostat_tau": 0}, {"samplers": ()}, {"logit_bias": {}}])
def test_the_ends_of_a_range_are_in_it(at_the_edge: dict[str, Any]) -> None:
    SamplingOptions(**at_the_edge)


def test_the_order_is_one_text_or_a_sequence() -> None:
    assert SamplingOptions(samplers=" min_p , top_k ").order == SamplingOptions(samplers=["min_p", "top_k"]).order
    assert SamplingOptions(samplers="").order == ()
    assert SamplingOptions().order == SAMPLERS


def test_what_a_step_left_out_would_not_have_changed_may_be_left_out() -> None:
    assert SamplingOptions(temperature=1.0, top_k=5, samplers="top_k").order == ("top_k",)


def test_generate_and_the_command_line_take_the_options_by_the_same_names_and_defaults() -> None:
    assert list(SamplingArguments.__annotations__) == list(DEFAULTS)
    taken = inspect.signature(Model.generate).parameters
    assert {name: taken[name].default for name in DEFAULTS} == DEFAULTS
    on_the_line = {option.name: option.default for option in run.params if option.name in DEFAULTS}
    assert on_the_line.keys() == DEFAULTS.keys()
    for name in DEFAULTS.keys() - {"logit_bias", "samplers", "seed"}:
        assert on_the_line[name] == DEFAULTS[name], name
