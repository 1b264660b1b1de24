"""Keys of a config.json that transformers writes whatever the model, and why each changes nothing here."""

from __future__ import annotations

BOOKKEEPING = {
    key: reason
    for keys, reason in (
        (
            "architectures model_type _name_or_path transformers_version auto_map torchscript use_bfloat16 "
            "tf_legacy_loss problem_type chunk_size_feed_forward pruned_heads task_specific_params finetuning_task",
            "it names the class or the library that wrote the config",
        ),
        ("torch_dtype dtype", "the weight files say themselves how they are stored"),
        (
            "use_cache _attn_implementation attn_implementation _attn_implementation_autoset",
            "it chooses an implementation of the same arithmetic",
        ),
        (
            "output_hidden_states output_attentions output_scores return_dict return_dict_in_generate",
            "it asks for additional outputs",
        ),
        (
            "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature "
            "top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size num_return_sequences "
            "encoder_no_repeat_ngram_size bad_words_ids forced_bos_token_id forced_eos_token_id remove_invalid_values "
            "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix",
            "generation has its own options",
        ),
        (
            "id2label label2id num_labels decoder_start_token_id tie_encoder_decoder sep_token_id "
            "cross_attention_hidden_size is_decoder",
            "it belongs to classification heads or to encoder-decoder models",
        ),
        ("bos_token_id eos_token_id pad_token_id unk_token_id tokenizer_class", "the tokenizer reads it"),
    )
    for key in keys.split()
}
