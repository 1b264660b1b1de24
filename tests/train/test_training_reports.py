"""What users of other trainers reported of their data, and the tests that say it does not happen here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# project: what was reported -> file: test
REPORTS = {
    "ggml: out of memory while a large file is tokenized": [
        "test_documents.py: test_one_line_of_200_megabytes_is_read_in_constant_memory",
        "test_prepare.py: test_memory_does_not_grow_with_the_length_of_a_line",
        "test_examine.py: test_a_large_text_is_examined_in_constant_memory_and_its_tokens_are_estimated",
    ],
    "ggml: a file that ends inside a character is read past its end": [
        "test_documents.py: test_a_named_file_that_is_not_text_is_an_error_and_in_a_folder_it_is_left_out",
    ],
    "ggml: a BPE vocabulary trains, and the first save says that it has no scores": [
        "test_vocabularies.py: test_a_vocabulary_of_characters_is_the_same_from_gguf_and_from_a_folder",
        "test_vocabularies.py: test_a_tokenizer_is_opened_from_gguf_folder_and_file",
        "test_vocabularies.py: test_a_tokenizer_without_an_end_of_text_is_refused",
    ],
    "ggml: a vocabulary of another kind gives garbage or an assertion": [
        "test_vocabularies.py: test_a_document_in_pieces_has_the_tokens_of_the_whole_in_a_sentencepiece_vocabulary",
        "test_vocabularies.py: test_what_is_no_tokenizer_is_refused_before_anything_is_trained",
    ],
    "ggml: ids out of range are clamped; nanoGPT: they are an index error inside the loss": [
        "test_data.py: test_ids_beyond_the_vocabulary_are_refused_and_leave_no_file",
        "test_prepare.py: test_what_is_damaged_is_made_again_as_it_was",
        "test_prepare.py: test_a_model_with_fewer_rows_than_the_tokenizer_has_tokens_is_refused",
    ],
    "nanoGPT: a character that was not in the text is a KeyError": [
        "test_vocabularies.py: test_a_character_without_a_token_is_named_and_never_dropped",
    ],
    "nanoGPT: every resumed run sees the same batches again": [
        "test_data.py: test_epochs_and_seeds_differ_and_a_batch_is_the_same_however_it_is_reached",
    ],
    "accelerate: the second epoch's order is another one after a resume": [
        "test_data.py: test_epochs_and_seeds_differ_and_a_batch_is_the_same_however_it_is_reached",
        "test_data.py: test_random_words_are_the_same_on_every_machine",
    ],
    "litgpt: after a resume, later epochs are of the last tenth of the text": [
        "test_data.py: test_an_epoch_visits_every_sample_once_and_no_target_twice",
        "test_prepare.py: test_every_epoch_is_of_all_the_text_and_in_another_order",
    ],
    "ggml: changed data restarts the epoch without a word": [
        "test_prepare.py: test_a_run_that_goes_on_refuses_changed_text_and_options_and_keeps_its_own",
        "test_prepare.py: test_a_change_that_keeps_size_and_time_is_noticed",
        "test_prepare.py: test_tokens_are_made_once_and_reused_while_nothing_changes",
    ],
    "Megatron: control tokens are tokenized again when text is rearranged": [
        "test_prepare.py: test_a_rearranged_sample_has_the_characters_of_its_text_and_of_no_special_token",
        "test_vocabularies.py: test_text_that_spells_a_special_token_stays_text",
    ],
    "llama2.c: training hangs when its data is missing": [
        "test_examine.py: test_missing_data_fails_at_once",
        "test_documents.py: test_what_cannot_be_read_is_refused_at_once_and_named",
    ],
}


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_has_tests_that_are_there(report: str) -> None:
    for place in REPORTS[report]:
        file, _, name = place.partition(": ")
        nodes = ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8")))
        assert name in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}, f"{file} has no {name}"
