"""What users reported of other trainers, what the original did, and the tests that say it does not happen here.

`REPORTS` has every report that concerns training; `ORIGINAL` what train-text-from-scratch and its peers did, found in
their code, that is not to be inherited; `NOT_HERE` why the others cannot happen.
"""

from __future__ import annotations

import pytest

from support.reports import assert_tests_are_there

# project: what was reported -> file: test
REPORTS = {
    "ggml: out of memory while a large file is tokenized": [
        "train/test_documents.py: test_one_line_of_200_megabytes_is_read_in_constant_memory",
        "train/test_prepare.py: test_memory_does_not_grow_with_the_length_of_a_line",
        "train/test_examine.py: test_a_large_text_is_examined_in_constant_memory_and_its_tokens_are_estimated",
    ],
    "ggml: a file that ends inside a character is read past its end": [
        "train/test_documents.py: test_a_named_file_that_is_not_text_is_an_error_and_in_a_folder_it_is_left_out",
    ],
    "ggml: a BPE vocabulary trains, and the first save says that it has no scores": [
        "train/test_vocabularies.py: test_a_vocabulary_of_characters_is_the_same_from_gguf_and_from_a_folder",
        "train/test_vocabularies.py: test_a_tokenizer_is_opened_from_gguf_folder_and_file",
        "train/test_vocabularies.py: test_a_tokenizer_without_an_end_of_text_is_refused",
    ],
    "ggml: a vocabulary of another kind gives garbage or an assertion": [
        "train/test_vocabularies.py: test_sentencepieces_of_a_document_in_parts_are_those_of_the_whole",
        "train/test_vocabularies.py: test_what_is_no_tokenizer_is_refused_before_anything_is_trained",
    ],
    "ggml: ids out of range are clamped; nanoGPT: they are an index error inside the loss": [
        "train/test_data.py: test_ids_beyond_the_vocabulary_are_refused_and_leave_no_file",
        "train/test_prepare.py: test_what_is_damaged_is_made_again_as_it_was",
        "train/test_prepare.py: test_a_model_with_fewer_rows_than_the_tokenizer_has_tokens_is_refused",
    ],
    "nanoGPT: a character that was not in the text is a KeyError": [
        "train/test_vocabularies.py: test_a_character_without_a_token_is_named_and_never_dropped",
    ],
    "nanoGPT: every resumed run sees the same batches again": [
        "train/test_data.py: test_epochs_and_seeds_differ_and_a_batch_is_the_same_however_it_is_reached",
    ],
    "accelerate: the second epoch's order is another one after a resume": [
        "train/test_data.py: test_epochs_and_seeds_differ_and_a_batch_is_the_same_however_it_is_reached",
        "train/test_data.py: test_random_words_are_the_same_on_every_machine",
    ],
    "litgpt: after a resume, later epochs are of the last tenth of the text": [
        "train/test_data.py: test_an_epoch_visits_every_sample_once_and_no_target_twice",
        "train/test_prepare.py: test_every_epoch_is_of_all_the_text_and_in_another_order",
    ],
    "ggml: changed data restarts the epoch without a word": [
        "train/test_prepare.py: test_a_run_that_goes_on_refuses_changed_text_and_options_and_keeps_its_own",
        "train/test_prepare.py: test_a_change_that_keeps_size_and_time_is_noticed",
        "train/test_prepare.py: test_tokens_are_made_once_and_reused_while_nothing_changes",
    ],
    "Megatron: control tokens are tokenized again when text is rearranged": [
        "train/test_prepare.py: test_a_rearranged_sample_has_the_characters_of_its_text_and_of_no_special_token",
        "train/test_vocabularies.py: test_text_that_spells_a_special_token_stays_text",
    ],
    "llama2.c: training hangs when its data is missing": [
        "train/test_examine.py: test_missing_data_fails_at_once",
        "train/test_documents.py: test_what_cannot_be_read_is_refused_at_once_and_named",
    ],
    "ggml: the loss is NaN from the second iteration on: forward had changed and backward had not": [
        "train/test_loop.py: test_a_loss_that_is_not_finite_stops_and_names_the_step",
        "train/test_gradients.py: test_gradients_equal_those_of_transformers",
        "train/test_kernels.py: test_an_ops_gradient_is_that_of_finite_differences",
        "train/test_kernels.py: test_attention_is_that_of_the_three_ops_fused_and_plain",
    ],
    "ggml: training seems to have worked, and the model has no bytes": [
        "train/test_job.py: test_a_model_that_is_not_what_was_trained_fails_and_is_not_there",
        "train/test_output.py: test_a_file_that_differs_from_the_weights_never_appears",
        "cli/test_train.py: test_text_becomes_a_model_that_runs_here_and_in_transformers",
    ],
    "ggml: a BPE vocabulary is trained for hours, and then no file can hold it": [
        "train/test_job.py: test_what_no_file_could_hold_is_refused_before_training",
    ],
    "ggml: the process ends without a word where training should begin": [
        "train/test_job.py: test_a_model_that_does_not_fit_into_memory_is_told_before_training",
        "cli/test_train.py: test_a_dry_run_says_what_it_would_take_and_makes_nothing",
    ],
    "ggml: bad_alloc, no space in a buffer, 30 GB for 800 tokens": [
        "train/test_estimate.py: test_the_peak_is_within_15_percent_of_what_was_said",
        "train/test_estimate.py: test_each_choice_that_saves_memory_lowers_the_estimate",
        "train/test_kernels.py: test_recomputing_holds_less_for_the_backward_pass",
        "train/test_kernels.py: test_a_large_vocabulary_made_in_parts_has_the_same_gradients",
    ],
    "ggml: a crash with the commands of the documentation; files that it names are not there": [
        "test_docs_training.py: test_every_command_of_a_document_runs",
        "cli/test_train.py: test_every_flag_of_the_original_is_taken_or_said_to_be_gone",
    ],
    "ggml: another architecture gives garbage or an assertion": [
        "train/test_job.py: test_another_architecture_is_refused_early_with_what_there_is",
    ],
    "ggml: finetuning crashes on released models, even small ones": [
        "train/test_families.py: test_going_on_with_a_model_of_every_family_keeps_what_no_setting_says",
        "cli/test_train.py: test_going_on_with_a_gguf_file_or_a_folder_begins_with_its_weights",
        "lora/test_finetune.py: test_a_quantized_model_is_finetuned_and_runs_with_its_adapter",
    ],
    "ggml: merging an adapter ends at the end of a file, rejects GGUF, gives garbled text": [
        "lora/test_merge.py: test_a_merged_float_file_computes_what_the_adapters_do",
        "lora/test_merge.py: test_a_merge_that_computes_something_else_is_not_written",
    ],
    "nanoGPT, torchtitan: names of a compiled module in the checkpoint break the resume": [
        "train/test_resume.py: test_names_in_a_checkpoint_are_the_models_own",
    ],
    "nanoGPT: training on a CPU asks CUDA for bfloat16 and crashes": [
        "train/test_loop.py: test_training_on_the_cpu_asks_nothing_of_cuda",
        "train/test_job.py: test_training_touches_no_gpu",
    ],
    "nanoGPT: the loss is NaN after thousands of steps, and it goes on for hours": [
        "train/test_loop.py: test_a_loss_that_is_not_finite_stops_and_names_the_step",
        "train/test_loop.py: test_lbfgs_stops_at_a_loss_that_is_not_finite_and_leaves_the_weights",
        "train/test_optim.py: test_gradients_are_clipped_to_a_common_norm",
    ],
    "transformers: randomness is restored behind the first batch, so that a resumed run is another one": [
        "train/test_resume.py: test_a_run_stopped_after_any_micro_batch_resumes_with_the_same_bits",
        "train/test_fim.py: test_decisions_do_not_depend_on_the_order_of_samples",
        "cli/test_train.py: test_interrupted_anywhere_and_resumed_is_byte_for_byte_uninterrupted",
    ],
    "litgpt: the epoch's number is lost with a resume": [
        "train/test_resume.py: test_the_second_epoch_has_its_own_order_and_every_sample_after_a_resume",
    ],
    "Lightning and seven others: a full disk or a kill during a save leaves a last checkpoint that is none": [
        "train/test_checkpoints.py: test_a_full_disk_is_noticed_before_anything_is_written",
        "train/test_checkpoints.py: test_a_disk_that_fills_up_while_writing_leaves_the_checkpoint_that_was_there",
        "train/test_checkpoints.py: test_an_interrupt_before_either_rename_leaves_a_whole_checkpoint",
        "train/test_resume.py: test_a_whole_checkpoint_is_there_after_a_kill_in_the_middle_of_a_save",
        "train/test_job.py: test_a_disk_that_is_too_small_is_told_before_training",
    ],
    "SpecForge: a checkpoint that was cut is chosen as the newest": [
        "train/test_checkpoints.py: test_a_checkpoint_cut_anywhere_is_never_taken_for_the_newest",
        "train/test_resume.py: test_a_run_goes_on_from_the_previous_checkpoint_when_the_last_is_cut",
    ],
    "torch, ipex: bfloat16 on a CPU is many times slower than float32": [
        "train/test_loop.py: test_bfloat16_is_chosen_only_where_it_pays",
        "train/test_loop.py: test_the_probe_takes_turns_and_the_least_of_each_within_its_time",
    ],
}

ORIGINAL = {
    "a checkpoint that is named and missing means random weights": [
        "cli/test_train.py: test_checkpoints_and_the_model_go_where_the_originals_flags_say",
    ],
    "sizes that are asked for on a resume are replaced without a word by those of the file": [
        "train/test_resume.py: test_other_data_a_changed_optimizer_or_another_shape_is_refused_on_resume",
    ],
    "everything is saved once, at the very end, and a file that cannot be opened is passed over": [
        "cli/test_train.py: test_interrupted_anywhere_and_resumed_is_byte_for_byte_uninterrupted",
        "train/test_checkpoints.py: test_a_disk_that_fills_up_while_writing_leaves_the_checkpoint_that_was_there",
    ],
    "neither randomness nor the place in the data is saved": [
        "train/test_resume.py: test_every_resume_goes_on_with_new_samples",
    ],
    "the norms' gains begin as noise": [
        "train/test_optim.py: test_the_sources_xavier_scale_draws_cut_normal_numbers_over_the_root_of_rows_and_columns",
        "train/test_optim.py: test_the_first_loss_is_the_logarithm_of_the_vocabulary",
    ],
    "the loss is a sum, and its scale that of batch and context": [
        "train/test_loop.py: test_accumulation_is_the_same_as_one_large_batch",
        "train/test_optim.py: test_the_first_loss_is_the_logarithm_of_the_vocabulary",
    ],
    "decay is not multiplied by the rate, and is applied to norms": [
        "train/test_optim.py: test_decay_pulls_matrices_alone",
    ],
    "gradients are not clipped": ["train/test_optim.py: test_gradients_are_clipped_to_a_common_norm"],
    "periods of a cosine with restarts never lengthen: 1.1 is cut to 1": [
        "train/test_schedules.py: test_cosine_restarts_rise_again_and_their_periods_lengthen",
    ],
    "the rate jumps where the warm-up ends": [
        "train/test_schedules.py: test_the_schedule_rises_in_a_line_falls_as_a_cosine_and_stays",
    ],
    "several updates on the same batch": ["cli/test_train.py: test_the_originals_flags_mean_what_they_meant"],
    "nothing is held out; nanoGPT measures random batches": [
        "train/test_split.py: test_where_names_cannot_give_the_share_the_last_share_of_each_document_is_held_out",
        "train/test_loop.py: test_the_held_out_loss_is_that_of_the_perplexity_command",
    ],
    "samples overlap, in the C library's order": [
        "train/test_data.py: test_an_epoch_visits_every_sample_once_and_no_target_twice",
    ],
    "BOM and CRLF are taken as they come": [
        "train/test_documents.py: test_a_byte_order_mark_is_dropped_and_crlf_is_kept_and_both_are_said",
    ],
    "samples are continuations of the text that was trained on": [
        "train/test_looks.py: test_usual_prompts_are_of_the_text_and_say_what_stood_there",
    ],
    "the tests of gradients print and cannot fail": [
        "train/test_kernels.py: test_a_wrong_backward_is_found",
        "train/test_gradients.py: test_a_slightly_wrong_backward_gives_gradients_that_differ",
        "train/test_kernels.py: test_every_op_of_the_table_has_a_case",
    ],
    "GELU and LayerNorm have no gradient": [
        "train/test_kernels.py: test_an_ops_gradient_is_that_of_finite_differences",
    ],
    "Megatron: what is rearranged depends on the order of access, and cannot be resumed": [
        "train/test_fim.py: test_decisions_do_not_depend_on_the_order_of_samples",
    ],
    "Megatron: a rate of 0 gives something else than no rearranging": [
        "train/test_fim.py: test_rate_zero_changes_nothing",
    ],
    "Megatron: the end of a middle is cut off, and models learn not to stop": [
        "train/test_fim.py: test_the_whole_middle_survives_and_is_followed_by_the_end_of_text",
        "train/test_fim.py: test_pieces_rejoin_to_the_document_and_only_its_far_ends_are_cut",
    ],
    "litgpt: tokens a second are divided by the time of day": [
        "train/test_loop.py: test_tokens_a_second_are_of_the_time_of_the_steps_alone",
    ],
    "litgpt: a single file is too little": [
        "train/test_prepare.py: test_one_document_is_held_out_from_its_last_share_on",
    ],
    "nanoGPT: the only checkpoint is written over in place": [
        "train/test_checkpoints.py: test_the_previous_one_is_kept",
    ],
}

NOT_HERE = {
    "accelerate: the order differs between processes": "a run is one process, and a batch a function of its number",
    "nanoGPT, llama.cpp: float16's gradients overflow": "products are in float32 or bfloat16, sums in float32",
}


@pytest.mark.parametrize("report", [*REPORTS, *ORIGINAL])
def test_every_report_has_tests_that_are_there(report: str) -> None:
    assert_tests_are_there({**REPORTS, **ORIGINAL}[report])


def test_what_cannot_happen_says_why() -> None:
    assert all(NOT_HERE.values())
    assert not NOT_HERE.keys() & REPORTS.keys()
