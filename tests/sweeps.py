"""Sweeps of which the default suite runs a part: one case in so many, the first always. `make test-slow` runs the rest.

By measured seconds: what is left of a sweep takes two or three of them on one core, or is one case.
"""

ONE_IN: dict[str, dict[str, int]] = {
    "tests/loading/test_gpt_oss_experts.py": {
        "test_layer_output": 2,
    },
    "tests/loading/test_gptq_awq.py": {
        "test_weights_bit_for_bit": 4,
    },
    "tests/loading/test_integer_checkpoints.py": {
        "test_activations_of_a_weight_only_file_may_be_quantized": 3,
        "test_weights_are_what_compressed_tensors_decompresses": 4,
    },
    "tests/loading/test_modelopt.py": {
        "test_nvfp4_multiplies_by_both_scales": 2,
    },
    "tests/loading/test_online.py": {
        "test_every_scheme": 6,
        "test_on_a_device_to_the_same_bits": 3,
    },
    "tests/loading/test_stream.py": {
        "test_bit_identical_to_the_file": 3,
        "test_online_quantization": 2,
    },
    "tests/models/test_decoder.py": {
        "test_an_id_outside_the_vocabulary_under_jit": 4,
        "test_decode_agrees_with_prefill": 4,
        "test_logits": 5,
        "test_short_prompts_keep_the_original_frequencies": 2,
    },
    "tests/models/test_families.py": {
        "test_block_equals_transformers": 2,
    },
    "tests/models/test_families_quantized.py": {
        "test_compressed_tensors": 5,
        "test_native_fp8_blocks": 2,
    },
    "tests/models/test_generate.py": {
        "test_greedy_equals_transformers": 3,
        "test_stream_is_generate": 2,
    },
    "tests/models/test_packed_models.py": {
        "test_logits": 3,
    },
    "tests/models/test_pretrained.py": {
        "test_an_interrupted_load_leaves_nothing_behind": 2,
        "test_half_precision": 2,
        "test_quantized_attention_is_dequantized_exactly": 5,
        "test_refusals": 2,
    },
    "tests/models/test_sampling.py": {
        "test_distribution": 2,
    },
    "tests/pallas_kernels/test_align.py": {
        "test_lowers_for_cuda": 3,
        "test_reference": 4,
    },
    "tests/pallas_kernels/test_combine.py": {
        "test_lowers_for_cuda": 2,
    },
    "tests/pallas_kernels/test_grouped_gemm.py": {
        "test_clusters_lower_for_cuda": 5,
        "test_lowers_for_cuda": 3,
    },
    "tests/pallas_kernels/test_microscaling.py": {
        "test_zero_and_non_finite_groups": 2,
    },
    "tests/pallas_kernels/test_push.py": {
        "test_lowers_for_cuda": 2,
    },
    "tests/pallas_kernels/test_quantize_and_permute.py": {
        "test_lowers_for_cuda": 6,
        "test_reference": 2,
    },
    "tests/pallas_kernels/test_route.py": {
        "test_lowers_for_cuda": 2,
    },
    "tests/parallel/test_eplb_layer.py": {
        "test_experts_move_to_another_mesh": 3,
        "test_experts_move_while_layers_serve": 3,
    },
    "tests/parallel/test_eplb_moves.py": {
        "test_outputs_are_the_same_bits": 3,
        "test_over_a_mesh": 3,
    },
    "tests/parallel/test_eplb_state.py": {
        "test_copies_share_the_load": 4,
    },
    "tests/parallel/test_moe.py": {
        "test_equals_one_device": 2,
        "test_routing_by_the_kernel_is_routing": 2,
    },
    "tests/parallel/test_placement.py": {
        "test_copies_share_the_load": 3,
    },
    "tests/quantization/test_compressed_tensors.py": {
        "test_fp8_activations_are_quantized_as_it_does": 2,
        "test_fp8_weights_are_quantized_as_it_does": 2,
        "test_reads_what_it_compressed": 2,
    },
    "tests/quantization/test_extremes.py": {
        "test_activations_that_are_no_numbers": 3,
        "test_zeros_and_extremes": 6,
    },
    "tests/quantization/test_integers.py": {
        "test_layers_against_float64": 9,
        "test_quantized_values_against_numpy": 6,
        "test_scales_of_minus_one_to_two": 2,
    },
    "tests/quantization/test_microscaling_schemes.py": {
        "test_processed_weights_mean_what_the_format_says": 2,
    },
    "tests/quantization/test_w4a8.py": {
        "test_every_activation_and_the_weight_on_the_input": 3,
    },
    "tests/test_align.py": {
        "test_against_loop": 6,
        "test_narrow_ids": 2,
    },
    "tests/test_experts.py": {
        "test_16_bit_compute": 6,
        "test_a_token_does_not_depend_on_the_others": 4,
        "test_against_numpy": 10,
        "test_expert_counts": 2,
        "test_few_tokens": 4,
        "test_hostile_routing": 4,
        "test_masked_tokens_are_zero_and_change_nothing": 3,
        "test_zero_experts_add_their_share_of_x": 2,
    },
    "tests/test_experts_grad.py": {
        "test_gradient_in_x_alone_is_not_mistaken_for_one_in_the_weights": 2,
        "test_quantized_against_reference": 5,
        "test_unquantized_against_torch": 3,
    },
    "tests/test_experts_mosaic.py": {
        "test_lowers_for_hopper": 12,
        "test_pinned_outputs_do_not_depend_on_the_batch": 3,
        "test_plumbing_on_kernel_references": 14,
        "test_routing_left_to_xla": 2,
        "test_whole_layer_lowers_for_hopper": 2,
        "test_whole_layer_on_kernel_references": 2,
    },
    "tests/test_experts_transforms.py": {
        "test_config_and_weights_are_pytrees_for_jit": 2,
        "test_export_round_trip": 2,
        "test_memory_goes_with_rows_not_with_experts": 4,
        "test_shard_map_over_experts": 2,
        "test_shard_map_over_tokens_with_gradients": 2,
        "test_vmap_over_layers_and_its_gradient": 2,
    },
    "tests/test_faq.py": {
        "test_message_is_really_raised": 2,
    },
    "tests/test_grouped_gemm.py": {
        "test_e4m3_products_are_exact_in_bfloat16": 4,
        "test_loop_visits_the_tiles_in_use_once": 2,
    },
    "tests/test_inspection.py": {
        "test_problems_are_what_loading_refuses": 2,
    },
    "tests/test_judges.py": {
        "test_block_outputs": 9,
        "test_logits_weight_only": 11,
        "test_logits_with_quantized_activations": 10,
    },
    "tests/test_judges_fp4.py": {
        "test_full_precision_is_quantized_while_loading": 3,
        "test_layers_against_float64": 6,
        "test_logits_of_weight_only_checkpoints": 2,
        "test_logits_with_quantized_activations": 3,
        "test_weights_equal_their_decompression_bit_for_bit": 3,
    },
    "tests/test_judges_int.py": {
        "test_logits_weight_only": 4,
        "test_logits_with_quantized_activations": 2,
    },
    "tests/test_layer.py": {
        "test_forward_is_the_functional_core": 2,
    },
    "tests/test_layer_loading.py": {
        "test_orbax_round_trip": 3,
    },
    "tests/test_layer_sizes.py": {
        "test_any_size": 6,
    },
    "tests/test_llm_compressor_files.py": {
        "test_expert_weights_are_bit_identical": 2,
        "test_logits": 8,
    },
    "tests/test_mutations.py": {
        "test_mutations_in_process": 5,
    },
    "tests/test_packed_experts.py": {
        "test_rows_against_float64": 9,
    },
    "tests/test_packed_weights.py": {
        "test_layer_on_kernel_references": 4,
        "test_lowers_for_hopper_and_says_how": 3,
        "test_packing_is_exact_and_undone": 5,
    },
    "tests/test_reload.py": {
        "test_some_experts": 2,
    },
    "tests/test_routing_replay.py": {
        "test_replay": 2,
    },
    "tests/test_routing_rules.py": {
        "test_simulated_routing": 2,
    },
    "tests/test_routing_transforms.py": {
        "test_gradient": 9,
        "test_gradient_of_presets": 2,
        "test_vmap": 5,
    },
    "tests/test_token_buckets.py": {
        "test_a_stream_compiles_once_a_bucket": 2,
    },
    "tests/test_tokens_as_rows.py": {
        "test_bits_are_those_of_moved_rows": 3,
    },
    "tests/torch_bridge/test_convert.py": {
        "test_blocks_against_transformers": 4,
        "test_nnx_and_back": 2,
        "test_patched_models_generate": 6,
    },
    "tests/torch_bridge/test_forward.py": {
        "test_activation_gradients": 4,
        "test_constructor_refuses": 6,
        "test_output_is_the_nnx_layers_bit_for_bit": 4,
        "test_parts_of_all_ranks_add_up": 2,
    },
    "tests/torch_bridge/test_kernels.py": {
        "test_layers_lower_to_kernels": 3,
    },
    "tests/torch_bridge/test_loading.py": {
        "test_biases": 2,
        "test_every_rank_holds_its_part": 4,
        "test_online_quantization_of_every_format": 2,
        "test_weights_of_every_scheme_are_those_of_the_nnx_layer": 4,
    },
    "tests/torch_bridge/test_methods.py": {
        "test_methods_by_their_names": 6,
        "test_nvfp4_as_vllm_has_it_after_processing": 2,
    },
    "tests/torch_bridge/test_vllm_layers.py": {
        "test_every_method": 2,
        "test_processed_layers": 2,
    },
    "tests/writing/test_quantize_checkpoint.py": {
        "test_all_linear_layers": 2,
        "test_format": 6,
        "test_the_same_bytes_twice_and_in_shards": 2,
        "test_transformers_agrees": 5,
        "test_transformers_cannot_read": 2,
    },
    "tests/writing/test_scale_search.py": {
        "test_never_worse": 4,
    },
    "tests/writing/test_sources.py": {
        "test_the_same_format_in_another_container": 2,
    },
}
