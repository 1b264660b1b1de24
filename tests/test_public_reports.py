"""What users of other runtimes reported of these models, and the tests that say it does not happen here.

`REPORTS` names the tests of each report that touches conversion, tokens, infilling, stopping, limits or streaming; the
tests that belong to no other suite stand below.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import starscope
from starscope.cache import ArrayCache
from starscope.convert import convert
from starscope.gguf.reader import read_gguf
from support.checkpoints import edit_config, make_checkpoint, store_as_torch
from support.numbers import TOLERANCE, ulps
from support.reports import assert_tests_are_there

HERE = Path(__file__).name

# project: what was reported -> file: test
REPORTS = {
    "ggml: not enough memory for a few tokens; keys and values sized for every head": [
        f"{HERE}: test_a_cache_is_as_large_as_its_tokens_and_has_one_head_for_many_queries",
        "test_graph.py: test_sizes_are_known_before_anything_is_allocated",
    ],
    "ggml: sizes had to be edited by hand; a download of seven parts was not checked": [
        "test_convert.py: test_every_tensor_is_transformers_tensor_under_the_mapping",
        "test_checkpoint.py: test_a_missing_shard_is_named_with_how_many_are_there",
        "test_checkpoint_torch.py: test_a_missing_part_is_named",
    ],
    "ggml: StarChat's <|end|> is ignored and its markers are cut into pieces": [
        "test_checkpoint_forms.py: test_starchats_added_tokens_are_its_last_rows",
        "test_checkpoint_forms.py: test_starchat_ends_at_its_end_token",
    ],
    "ggml: SantaCoder's <fim-prefix>, with a hyphen, is no token": [
        "tokenizer/test_folder.py: test_every_spelling_of_the_infilling_tokens_is_found",
        "test_checkpoint_forms.py: test_santacoder_ends_at_its_own_end_token_and_fills_holes",
    ],
    "ggml: nonsense from a file of an older format": [
        "gguf/test_lying_files.py: test_a_lie_is_refused_and_named",
        "test_model.py: test_quant_blocks_of_another_version_are_refused",
    ],
    "starcoder.cpp: SantaCoder never stops, its end token was taken for 0": [
        "test_checkpoint_forms.py: test_santacoder_ends_at_its_own_end_token_and_fills_holes",
    ],
    "starcoder.cpp: the converter fails inside accelerate": [
        f"{HERE}: test_converting_and_running_need_neither_torch_transformers_nor_accelerate",
    ],
    "starcoder.cpp: StarPII, a BERT, is converted into nonsense": [
        "test_convert.py: test_a_folder_that_does_not_fit_together_is_refused_and_nothing_written",
    ],
    "llama.cpp: Granite's code models have no output matrix of their own": [
        f"{HERE}: test_a_checkpoint_without_a_head_uses_its_embedding_whether_or_not_its_config_says_so",
        "test_convert.py: test_a_head_without_an_embedding_is_the_embedding",
    ],
    "llama.cpp: token_embd.weight has the wrong shape": [
        f"{HERE}: test_a_vocabulary_shorter_than_the_embedding_is_padded_to_its_rows",
        "tokenizer/test_folder.py: test_padding_follows_the_added_tokens",
        "test_convert.py: test_a_vocabulary_longer_than_the_embedding_is_refused",
    ],
    "llama.cpp: the BPE pre-tokenizer was not recognized": [
        "tokenizer/test_folder.py: test_the_pre_tokenizer_is_found_from_its_steps",
        "tokenizer/test_metadata.py: test_names_of_pre_tokenizers_are_kept",
        "tokenizer/test_vocabularies.py: test_every_text_gives_the_ids_of_the_models_own_tokenizer",
    ],
    "llama.cpp: added tokens that are not special are cut before they are found": [
        "tokenizer/test_folder.py: test_added_tokens_are_found_as_the_library_finds_them",
        "tokenizer/test_folder.py: test_tokenizer_config_decides_which_added_tokens_are_special",
    ],
    "llama.cpp: special tokens are parsed unasked, or have no text, so that stop strings miss them": [
        f"{HERE}: test_a_stop_text_that_spells_a_control_token_ends_the_text_there",
        "tokenizer/test_vocabularies.py: test_text_becomes_control_tokens_only_on_request",
        "tokenizer/test_vocabularies.py: test_control_tokens_are_decoded_as_their_text",
        "test_model.py: test_text_that_spells_a_special_token_stays_text",
    ],
    "StarCoder 2: filling in runs into <file_sep> and the next file": [
        f"{HERE}: test_a_hole_ends_at_the_marker_of_the_next_file_or_repository",
        "tokenizer/test_vocabularies.py: test_infilling_and_end_tokens_are_found_by_their_spelling",
    ],
    "StarCoder: another model's template, spaces around the markers, markers left out": [
        "test_infill.py: test_prompts_are_the_golden_ones",
        "test_infill.py: test_prompts_read_as_the_models_were_trained",
        "test_infill.py: test_the_prompt_is_prefix_suffix_middle",
        "test_infill.py: test_empty_sides_keep_their_markers",
        "test_infill.py: test_text_that_looks_like_a_marker_stays_text",
    ],
    "llama.cpp: no filling in where a file's markers have an unknown spelling": [
        "tokenizer/test_metadata.py: test_ids_that_the_file_names_win_over_spellings",
        "test_infill.py: test_a_vocabulary_without_markers_says_so",
    ],
    "llama.cpp, ollama: the process aborts past the table of positions": [
        "engine/test_engines.py: test_past_the_last_position_is_an_error_and_the_cache_is_unchanged",
        "test_generate.py: test_a_prompt_over_the_context_is_an_error_with_both_numbers_before_any_work",
        "test_batching.py: test_an_error_names_its_prompt_before_anything_runs",
        "test_generate.py: test_the_end_of_the_context_ends_the_text_with_length",
        "cli/test_run.py: test_a_prompt_over_the_context_is_status_4_with_both_numbers",
    ],
    "llama.cpp: shifted and reused caches give other positions and worse text": [
        "test_cache.py: test_reuse_keeps_exactly_the_common_prefix_and_leaves_one_token_to_run",
        "test_model.py: test_a_reused_prefix_changes_no_token",
        f"{HERE}: test_text_that_reaches_the_end_of_the_context_is_the_beginning_of_what_a_longer_one_gives",
    ],
    "text-generation-inference: no memory for the cache of a single key head": [
        f"{HERE}: test_a_cache_is_as_large_as_its_tokens_and_has_one_head_for_many_queries",
    ],
    "vLLM: one key head emulated by many; a tied head of other rows than the vocabulary": [
        "families/test_gpt_bigcode.py: test_expanded_key_heads_are_folded_back_into_one",
        f"{HERE}: test_a_vocabulary_shorter_than_the_embedding_is_padded_to_its_rows",
    ],
    "transformers: left padding moves the positions, so that a batch differs from its prompts alone": [
        "families/suite.py: test_a_row_of_a_ragged_batch_equals_the_prompt_alone",
        "test_batching.py: test_a_list_of_texts_gives_what_each_gives_alone",
    ],
    "llama-cpp-python: streaming fails inside a character, or drops it": [
        "tokenizer/test_vocabularies.py: test_a_stream_gives_each_character_out_with_its_last_byte",
        "test_generate.py: test_a_character_of_several_tokens_is_never_broken",
        "test_generate.py: test_bytes_left_over_at_the_end_are_not_lost",
        "cli/test_run.py: test_output_is_utf8_whatever_the_locale",
    ],
    "tabby, transformers: the cause of a failure is swallowed": [
        "cli/test_app.py: test_every_error_has_its_status_and_its_document",
        "cli/test_run.py: test_a_file_that_is_no_model_is_status_4",
    ],
}


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_has_tests_that_are_there(report: str) -> None:
    assert_tests_are_there(REPORTS[report])


@pytest.mark.parametrize(("multi_query", "heads"), [(True, 1), (False, 4)])
def test_a_cache_is_as_large_as_its_tokens_and_has_one_head_for_many_queries(
    multi_query: bool, heads: int, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, multi_query=multi_query, positions=1024)
    model = starscope.load(tmp_path, engine="numpy")
    shapes: list[tuple[int, ...]] = []

    def allocate(shape: tuple[int, ...]) -> Any:
        shapes.append(shape)
        return np.empty(shape, np.float32)

    cache = ArrayCache(num_layers=2, context_length=1024, allocate=allocate, as_cached=lambda rows: rows)
    model.engine.forward([[1] * 60], [cache])
    assert shapes == [(heads, 64, 16)] * 4  # keys and values of two blocks; 64 positions for 60 tokens, not 1024
    model.engine.forward([[1] * 5], [cache])
    assert shapes[4:] == [(heads, 128, 16)] * 4


@pytest.mark.parametrize("torch_file", [False, True])
def test_converting_and_running_need_neither_torch_transformers_nor_accelerate(
    torch_file: bool, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path)
    if torch_file:
        store_as_torch(tmp_path, model.state_dict(), shards=2)
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'accelerate'): sys.modules[name] = None\n"  # importing one fails
        "import starscope\n"
        "from starscope.convert import convert\n"
        "print(len(starscope.load(convert(sys.argv[1]).out).generate('x', max_new_tokens=4).token_ids))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", "4\n")


@pytest.mark.parametrize("said", [True, False])
def test_a_checkpoint_without_a_head_uses_its_embedding_whether_or_not_its_config_says_so(
    said: bool, tmp_path: Path
) -> None:
    oracle = make_checkpoint(tmp_path)
    edit_config(tmp_path, **({"tie_word_embeddings": True} if said else {"remove": ("tie_word_embeddings",)}))
    out = convert(tmp_path, to="f32").out
    with read_gguf(out) as file:
        assert "output.weight" not in file.tensors
    import torch

    with torch.inference_mode():
        expected = oracle(torch.tensor([[1, 2, 3]])).logits[0].numpy()
    for source in (out, tmp_path):
        assert ulps(starscope.load(source).forward([1, 2, 3])[0], expected) <= TOLERANCE


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_shorter_than_the_embedding_is_padded_to_its_rows(tied: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab_size=384, tied=tied)
    out = convert(tmp_path, to="q8_0").out
    with read_gguf(out) as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
        rows = {i.shape[0] for name, i in file.tensors.items() if name in ("token_embd.weight", "output.weight")}
    assert (len(tokens.data), rows) == (384, {384})
    for source in (out, tmp_path):
        model = starscope.load(source)
        assert model.vocab()[383] == ("[PAD383]", 0.0, 5)
        assert len(model.vocab()) == model.vocab_size == model.forward([1]).shape[-1] == 384
        # Padding is in no text, and a model that says it says nothing.
        assert max(model.tokenizer.encode("def add(self): return [PAD383]")) < 320
        done = model.generate("x", max_new_tokens=3, logit_bias={383: 1e6})
        assert (done.text, done.token_ids) == ("", [383] * 3)


@pytest.fixture(scope="module", params=["starcoder", "starcoder2"])
def coder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> starscope.Model:
    """A random model whose tokens are spelled as StarCoder's, or as StarCoder 2's."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder)
    if request.param == "starcoder2":
        for path in folder.glob("*token*.json"):
            text = path.read_text(encoding="utf-8")
            path.write_text(
                text.replace("<filename>", "<file_sep>").replace("<reponame>", "<repo_name>"), encoding="utf-8"
            )
    return starscope.load(convert(folder, to="f32").out)


@pytest.mark.parametrize("marker", ["separator", "repo"])
def test_a_hole_ends_at_the_marker_of_the_next_file_or_repository(coder: starscope.Model, marker: str) -> None:
    token = getattr(coder.tokenizer.fim, marker)
    filled = coder.generate("a = ", "\nb", max_new_tokens=6, logit_bias={token: 1e6})
    assert (filled.text, filled.token_ids, filled.finish_reason) == ("", [], "stop")
    # Outside a hole a file may well be followed by another.
    plain = coder.generate("a = ", max_new_tokens=6, logit_bias={token: 1e6})
    assert (plain.token_ids, plain.finish_reason) == ([token] * 6, "length")


def test_a_stop_text_that_spells_a_control_token_ends_the_text_there(coder: starscope.Model) -> None:
    token = coder.tokenizer.fim.separator  # type: ignore[union-attr]
    text = coder.tokenizer.decode([token])
    assert text in ("<filename>", "<file_sep>")
    for stop in (text, text[1:4]):
        done = coder.generate("a = ", max_new_tokens=6, logit_bias={token: 1e6}, stop=stop)
        assert (done.token_ids, done.finish_reason) == ([token], "stop")
        assert done.text == text[: text.index(stop)]


def test_text_that_reaches_the_end_of_the_context_is_the_beginning_of_what_a_longer_one_gives(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    path = convert(tmp_path, to="f32").out
    longer = starscope.load(path).generate("def add(a, b):", max_new_tokens=60, logit_bias={0: -np.inf})
    short = starscope.load(path, context_length=32)
    done = short.generate("def add(a, b):", max_new_tokens=60, logit_bias={0: -np.inf})
    assert done.finish_reason == "length"
    assert len(done.token_ids) == 32 - done.prompt_tokens + 1  # the last one needs no position of its own
    assert done.token_ids == longer.token_ids[: len(done.token_ids)]
