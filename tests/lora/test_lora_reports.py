"""What users of other programs reported of adapters, and the tests that say it does not happen here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import starscope
from starscope.errors import CheckpointError
from support.adapters import halves, write_folder
from support.reports import assert_tests_are_there

TESTS = Path(__file__).parent

# project: what was reported -> file: test
REPORTS = {
    "vLLM: an adapter of a tied output matrix whose vocabulary is padded does not fit (49536 and 49664 rows)": [
        "test_lora_reports.py: test_an_output_matrix_with_padded_rows_takes_an_adapter_of_the_unpadded_one",
        "test_lora_reports.py: test_an_adapter_with_more_rows_than_the_vocabulary_is_refused",
        "test_peft_folders.py: test_an_adapted_model_computes_what_peft_does",
    ],
    "ggml: merging ends at the end of the file, rejects GGUF, or gives garbled text": [
        "test_merge.py: test_a_merged_float_file_computes_what_the_adapters_do",
        "test_merge.py: test_a_merge_that_computes_something_else_is_not_written",
        "test_merge.py: test_a_file_whose_bytes_went_wrong_is_not_written",
        "test_gguf_adapters.py: test_a_cut_file_is_an_error_wherever_it_is_cut",
    ],
    "ggml: an adapter of the head of a tied model cannot be merged": [
        "test_merge.py: test_adapting_one_of_two_tied_tensors_makes_them_two",
    ],
    "ggml: a quantized model is changed and rounded a second time without a word; --lora-base": [
        "test_merge.py: test_a_merged_quantized_file_is_the_rounding_away",
        "test_merge.py: test_running_a_merged_file_is_running_with_lora_base",
        "test_running.py: test_a_base_in_higher_precision_gives_the_weights_of_a_merged_file",
    ],
    "ggml: finetune works for one architecture alone": [
        "test_finetune.py: test_what_is_written_is_what_was_trained_for_peft_and_for_llama_cpp",
        "test_finetune.py: test_targets_are_named_as_anybody_names_them",
    ],
    "ggml: finetune's loss becomes NaN: forward and backward had drifted apart": [
        "test_finetune.py: test_gradients_are_those_of_peft",
    ],
    "ggml: finetune crashes on models of 17 M parameters and more": [
        "test_finetune.py: test_a_quantized_model_is_finetuned_and_runs_with_its_adapter",
    ],
    "ggml: finetune writes the model once at the end, without a checkpoint": [
        "test_finetune.py: test_interrupted_and_resumed_is_uninterrupted_byte_for_byte",
        "test_finetune.py: test_it_goes_on_from_the_middle_of_an_accumulation",
    ],
}


@pytest.mark.parametrize("report", REPORTS)
def test_each_report_names_tests_that_exist(report):
    assert_tests_are_there(REPORTS[report], TESTS)


def test_an_output_matrix_with_padded_rows_takes_an_adapter_of_the_unpadded_one(checkpoint, tmp_path):
    a, b = halves((312, 64), 2)
    write_folder(tmp_path, {"r": 2, "lora_alpha": 2}, {"lm_head": (a, b)})
    model = starscope.load(checkpoint, engine="numpy", lora=tmp_path)
    [found] = model.engine.forward([[1, 2, 3]], None, "all")
    [plain] = starscope.load(checkpoint, engine="numpy").engine.forward([[1, 2, 3]], None, "all")
    assert np.array_equal(found[:, 312:], plain[:, 312:])
    assert not np.isclose(found[:, :312], plain[:, :312]).all()
    assert any("312 of the 320 rows" in note for note in model.notes)


def test_an_adapter_with_more_rows_than_the_vocabulary_is_refused(checkpoint, tmp_path):
    write_folder(tmp_path, {"r": 2, "lora_alpha": 2}, {"lm_head": halves((330, 64), 2)})
    with pytest.raises(CheckpointError, match=r"\[330 64\]; lm_head.weight is \[320 64\]") as caught:
        starscope.load(checkpoint, engine="numpy", lora=tmp_path)
    assert "vocabulary was extended" in str(caught.value.hint)
