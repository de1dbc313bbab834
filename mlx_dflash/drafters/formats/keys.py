"""Which config keys are understood; any other one that is set is refused, since it may change the computation."""

# Written by transformers, trainers and converters into any config; none of it changes what a drafter computes.
_NEUTRAL = """
    _attn_implementation _commit_hash _name_or_path add_cross_attention architectures attention_dropout
    attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length
    max_position_embeddings max_window_layers min_length model_type name_or_path no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p use_bfloat16 use_cache
"""
# The Qwen3 block that all drafters are made of; `fields.block` says which values can be run.
_BLOCK = """
    attention_bias head_dim hidden_act hidden_size intermediate_size layer_types num_attention_heads num_hidden_layers
    num_key_value_heads original_max_position_embeddings quantization quantization_config rms_norm_eps rope_parameters
    rope_scaling rope_theta sliding_window use_sliding_window vocab_size
"""
# Of the target whose config a drafter's was copied from (gpt-oss's says `model_type: gpt_oss`); the block is dense.
_LEFTOVER = """
    decoder_sparse_step experts_per_token initial_context_length mlp_only_layers moe_intermediate_size norm_topk_prob
    num_experts num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef
    shared_expert_intermediate_size swiglu_limit
"""
NEUTRAL = frozenset(_NEUTRAL.split())
LEFTOVER = frozenset(_LEFTOVER.split())
COMMON = NEUTRAL | frozenset(_BLOCK.split())
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
DFLASH2 = frozenset({"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"})
