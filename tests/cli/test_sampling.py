"""`run` and the sampler: each option reaches it, -v shows the chain, --logprobs lists what was likely."""

from __future__ import annotations

import json
import math

import pytest

PROMPT = "def a(in):\n"
OPTIONS = {
    "temperature": 1.5,
    "top_k": 50,
    "top_p": 0.95,
    "typical_p": 0.9,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "penalty_window": 20,
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.3,
    "samplers": "temperature,penalties,typical_p,top_k,top_p",
    "seed": 3,
}


def flags(options):
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def test_every_sampling_option_reaches_the_sampler(cli, model):
    import starscope

    bias = {20: -math.inf, 21: 2.5}
    expected = starscope.load(model).generate(PROMPT, max_new_tokens=40, **OPTIONS, logit_bias=bias)
    given = [*flags(OPTIONS), "--logit-bias", "20=-inf", "--logit-bias", "21=2.5"]
    whole = cli("run", model, PROMPT, "-n", 40, "-q", *given)
    assert whole.stdout_bytes == expected.text.encode()
    for name in OPTIONS:
        less = [flag for flag in given if not flag.startswith(f"--{name.replace('_', '-')}=")]
        assert cli("run", model, PROMPT, "-n", 40, "-q", *less).stdout_bytes != whole.stdout_bytes, name


def test_mirostat_draws_without_a_temperature(cli, model):
    texts = [cli("run", model, PROMPT, "-n", 20, "-q", "--mirostat", 1, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_more_said_shows_the_chain_in_its_order(cli, model):
    options = ["--temperature", 0.5, "--top-k", 9, "--seed", 4, "--logit-bias", "20=-1", "-n", 1]
    result = cli("run", model, PROMPT, *options, "--samplers", "top_k,temperature", "-v")
    assert "sampling: logit_bias of 1 → top_k 9 → temperature 0.5 → draw (seed 4)" in result.stderr.splitlines()
    assert "sampling" not in cli("run", model, PROMPT, *options).stderr
    assert "sampling: the most likely" in cli("run", model, PROMPT, "-n", 1, "-v").stderr


def test_options_that_do_nothing_at_temperature_0_are_named(cli, model):
    given = ["--top-k", 5, "--top-p", 0.5, "--min-p", 0.1, "--typical-p", 0.5, "--seed", 1]
    told = "note: no effect at temperature 0: --top-k, --top-p, --min-p, --typical-p, --seed."
    assert told in cli("run", model, PROMPT, "-n", 1, *given).stderr.splitlines()
    one = cli("run", model, PROMPT, "-n", 1, "--seed", 0).stderr
    assert "note: no effect at temperature 0: --seed." in one.splitlines()
    for more in (
        [],
        ["--temperature", 1, *given],
        ["--mirostat", 2, *given],
        ["--repetition-penalty", 2],
        ["-q", *given],
    ):
        assert "no effect" not in cli("run", model, PROMPT, "-n", 1, *more).stderr


def test_a_window_wider_than_any_text_is_the_whole_text(cli, model):
    texts = [
        cli("run", model, PROMPT, "-n", 9, "-q", "--repetition-penalty", 1.5, "--penalty-window", window).stdout
        for window in (4096, 10**20)
    ]
    assert texts[0] == texts[1]


def test_logprobs_are_in_the_document_when_asked_for(cli, model):
    asked = ["run", model, PROMPT, "-n", 3, "--json", "--temperature", 1, "--top-k", 2, "--seed", 1]
    document = json.loads(cli(*asked, "--logprobs", 4).stdout)
    plain = json.loads(cli(*asked).stdout)
    assert document.keys() - plain.keys() == {"logprobs"}
    assert document["text"] == plain["text"]
    assert [entry["token_id"] for entry in document["logprobs"]] == document["token_ids"]
    for entry in document["logprobs"]:
        assert len(entry["top"]) == 4
        assert [token for token, _ in entry["filtered_top"]] == [token for token, _ in entry["top"][:2]]
        assert sum(math.exp(score) for _, score in entry["filtered_top"]) == pytest.approx(1)
        assert dict(entry["filtered_top"])[entry["token_id"]] == entry["filtered_logprob"]
        assert dict(entry["top"])[entry["token_id"]] == entry["logprob"] < entry["filtered_logprob"]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--mirostat", 3],
        ["--mirostat-tau", -1],
        ["--mirostat-eta", "nan"],
        ["--typical-p", 2],
        ["--repetition-penalty", 0],
        ["--presence-penalty", "inf"],
        ["--frequency-penalty", "nan"],
        ["--penalty-window", -1],
        ["--logit-bias", "20"],
        ["--logit-bias", "x=1"],
        ["--logit-bias", "20=nan"],
        ["--logit-bias", "-1=1"],
        ["--samplers", "top_k,temp"],
        ["--samplers", "top_k", "--temperature", 2],
        ["--logprobs", 101, "--json"],
        ["--logprobs", 1],
    ],
)
def test_a_sampling_option_out_of_range_is_status_2_before_the_model_is_looked_for(wrong, cli, tmp_path):
    result = cli("run", tmp_path / "none.gguf", PROMPT, *wrong)
    assert result.exit_code == 2
    assert "expected" in result.output


def test_a_token_with_two_biases_is_refused(cli, tmp_path):
    result = cli("run", tmp_path / "none.gguf", PROMPT, "--logit-bias", "7=1", "--logit-bias", "7=2")
    assert result.exit_code == 2
    assert "token 7 has two biases" in result.stderr


def test_a_bias_outside_the_vocabulary_is_refused_with_its_end(cli, model):
    result = cli("run", model, PROMPT, "--logit-bias", "99999=1")
    assert result.exit_code == 2
    assert "token 99999; the vocabulary ends at token" in result.stderr
