"""Which test in `make test` shows each promise to users: read by test_promises.py."""

from __future__ import annotations

MISSION = (
    "gradients averaged in buckets, overlapped with the backward pass",
    "process groups over gloo, nccl and mpi",
    "env://, tcp:// and file://, and the variables of Slurm, Open MPI and MPICH",
    "scripts for torch.distributed.launch and torchrun",
    "spawn, and scripts that spawn their ranks",
    "several hosts by ssh, pdsh, clush, Slurm and mpiexec",
    "one process per GPU, or several GPUs in one process",
    "DataParallel is refused",
    "the order, sizes and workers of data loading",
    "stragglers are named and hangs explained",
    "synchronisation points are checked while running",
    "BatchNorm statistics over all ranks",
    "one process saves: atomic checkpoints for any device and number of ranks",
    "resume, bit-exact, in mid-epoch, on another number of ranks",
    "the ImageNet recipe with the official options and an exact evaluation",
    "a file lock while downloading",
    "all-reduce algorithms over topologies",
    "quantised gradients",
    "drift is found and weights are synchronised again",
    "broadcast, scatter, gather, reduce by hand, and groups",
    "models in pipeline stages with micro-batches",
    "where to split, from measured costs",
    "data parallel and pipeline parallel together",
    "pictures of pipelines from real runs",
    "destroy_process_group always, also on error",
    "RPC: parameter server and reinforcement learning",
    "scripts for CUDA and NCCL on CPUs",
    "verify",
)

PROMISES: dict[str, list[str]] = {
    "mission: gradients averaged in buckets, overlapped with the backward pass": [
        "tests/replicas/test_reduction.py::test_the_bits_do_not_depend_on_buckets_nor_on_who_owns_the_gradients",
        "tests/replicas/test_replicate.py::test_gradients_travel_on_the_micro_batch_that_ends_the_step_and_only_then",
    ],
    "mission: process groups over gloo, nccl and mpi": [
        "tests/runtime/test_process_group.py::test_every_operation_and_dtype_gives_what_gloo_gives",
        "tests/runtime/test_backends.py::test_by_default_gloo_serves_host_tensors_and_nccl_those_of_a_gpu",
        "tests/runtime/test_mpi.py::test_every_operation_on_every_type_gives_the_same_on_all_ranks",
    ],
    "mission: env://, tcp:// and file://, and the variables of Slurm, Open MPI and MPICH": [
        "tests/runtime/test_world.py::test_ranks_started_by_hand_meet",
        "tests/runtime/test_world.py::test_ranks_meet_at_a_tcp_address",
        "tests/runtime/test_world.py::test_ranks_of_a_real_mpiexec_meet",
        "tests/test_rankenv.py::test_every_launcher_is_read",
    ],
    "mission: scripts for torch.distributed.launch and torchrun": [
        "tests/launch/test_run.py::test_a_torchrun_style_script_runs_unchanged",
        "tests/launch/test_run.py::test_the_local_rank_is_passed_in_either_spelling_when_asked_for",
    ],
    "mission: spawn, and scripts that spawn their ranks": [
        "tests/launch/test_spawn.py::test_tensors_come_back",
        "tests/launch/test_unmodified.py::test_the_rank_that_failed_among_those_a_script_spawned_is_named",
    ],
    "mission: several hosts by ssh, pdsh, clush, Slurm and mpiexec": [
        "tests/launch/test_hosts.py::test_ranks_on_two_hosts_meet",
        "tests/launch/test_transport.py::test_every_host_has_its_own_exit_code",
        "tests/launch/test_slurm.py::test_tasks_of_srun_are_ranks_or_bring_several",
        "tests/launch/test_mpiexec.py::test_tasks_are_ranks_or_bring_several",
    ],
    "mission: one process per GPU, or several GPUs in one process": [
        "tests/runtime/test_device.py::test_the_device_follows_from_local_rank_and_sight",
        "tests/runtime/test_device.py::test_two_ranks_on_one_card_are_refused_with_the_reason",
        "tests/pipelines/test_devices_of_one_process.py::test_stages_on_one_device_leave_its_bits",
    ],
    "mission: DataParallel is refused": [
        "tests/replicas/test_replicate.py::test_dataparallel_is_refused_with_the_replacement",
    ],
    "mission: the order, sizes and workers of data loading": [
        "tests/data/test_shards.py::test_ranks_take_slices_of_the_one_order",
        "tests/data/test_shards.py::test_options_change_neither_order_nor_multiset",
        "tests/data/test_shards.py::test_what_workers_have_prefetched_is_not_consumed",
    ],
    "mission: stragglers are named and hangs explained": [
        "tests/launch/test_stragglers.py::test_a_rank_that_turns_slow_is_named_within_20_steps_of_50_ms",
        "tests/launch/test_hanging_runs.py::test_a_rank_that_is_stuck_is_named_with_its_line",
    ],
    "mission: synchronisation points are checked while running": [
        "tests/verification/test_online.py::test_a_training_goes_on_and_what_differs_is_told_with_its_line",
        "tests/launch/test_run.py::test_ranks_in_different_collectives_are_told_as_that_though_one_was_aborted",
    ],
    "mission: BatchNorm statistics over all ranks": [
        "tests/replicas/test_batchnorm.py::test_two_ranks_equal_one_process_whatever_the_options",
    ],
    "mission: one process saves: atomic checkpoints for any device and number of ranks": [
        "tests/checkpoints/test_kills.py::test_killed_at_a_random_moment_every_checkpoint_is_one_whole_state",
        "tests/checkpoints/test_saving_and_resuming.py::test_weights_load_bit_for_bit_on_another_number_of_ranks",
        "tests/checkpoints/test_object_state.py::test_the_prefix_of_distributed_data_parallel_is_taken_off_and_put_back",
    ],
    "mission: resume, bit-exact, in mid-epoch, on another number of ranks": [
        "tests/checkpoints/test_saving_and_resuming.py::test_stopped_after_any_step_and_resumed_every_bit_is_that_of_an_uninterrupted_run",
        "tests/checkpoints/test_saving_and_resuming.py::test_on_another_number_of_ranks_the_order_goes_on_and_the_parameters_agree",
    ],
    "mission: the ImageNet recipe with the official options and an exact evaluation": [
        "tests/recipes/test_imagenet.py::test_training_and_evaluation_on_two_ranks_are_those_on_one",
        "tests/recipes/test_imagenet_options.py::test_command_lines_of_the_official_example_are_understood",
        "tests/recipes/test_imagenet.py::test_accuracy_counts_every_validation_image_once",
    ],
    "mission: a file lock while downloading": [
        "tests/data/test_once.py::test_of_unrelated_processes_at_once_exactly_one_works_and_all_go_on_after_it",
    ],
    "mission: all-reduce algorithms over topologies": [
        "tests/collectives/test_proof.py::test_every_plan_computes_what_it_says_and_leaves_the_same_bits_on_all_ranks",
        "tests/collectives/test_point_to_point.py::test_four_real_ranks_end_with_the_bits_of_the_simulation",
        "tests/network/test_slim_fly.py::test_it_is_an_mms_graph",
        "tests/planning/test_fabric.py::test_on_a_network_all_reduces_are_what_contention_says",
    ],
    "mission: quantised gradients": [
        "tests/compress/test_schemes.py::test_with_feedback_nothing_is_lost_for_good",
        "tests/replicas/test_compression.py::test_real_ranks_come_to_the_simulated_ones_bits",
    ],
    "mission: drift is found and weights are synchronised again": [
        "tests/replicas/test_drift.py::test_what_changes_at_any_time_is_found_at_the_next_multiple",
        "tests/replicas/test_drift.py::test_resync_sends_parameters_and_buffers_of_rank_0",
    ],
    "mission: broadcast, scatter, gather, reduce by hand, and groups": [
        "tests/examples/test_examples.py::test_collectives_end_where_they_should",
        "tests/runtime/test_world.py::test_a_group_of_some_ranks_adds_up_without_the_others",
    ],
    "mission: models in pipeline stages with micro-batches": [
        "tests/pipelines/test_pipeline.py::test_one_replica_has_the_bits_of_one_process",
        "tests/pipelines/test_devices_of_one_process.py::test_micro_batches_are_as_many_as_is_said_or_as_large",
    ],
    "mission: where to split, from measured costs": [
        "tests/pipelines/test_profiler.py::test_layers_of_known_cost_are_measured",
        "tests/pipelines/test_partition.py::test_no_cut_of_all_is_better_on_any_of_many_random_chains",
    ],
    "mission: data parallel and pipeline parallel together": [
        "tests/pipelines/test_pipeline.py::test_two_replicas_of_two_stages_take_the_step_of_one_process",
    ],
    "mission: pictures of pipelines from real runs": [
        "tests/test_page_code.py::test_a_pipeline_is_planned_trained_and_drawn",
        "tests/launch/test_timeline.py::test_stages_wait_for_each_other_and_draw_their_first_steps",
        "tests/pipelines/test_pipeline_report.py::test_a_picture_shows_every_action",
    ],
    "mission: destroy_process_group always, also on error": [
        "tests/runtime/test_world.py::test_the_group_is_destroyed_on_the_way_out_of_an_error",
        "tests/runtime/test_world.py::test_what_fails_while_joining_leaves_no_group_behind",
    ],
    "mission: RPC: parameter server and reinforcement learning": [
        "tests/examples/test_examples.py::test_a_parameter_server_trains_as_one_process_does",
        "tests/launch/test_rpc.py::test_whoever_is_to_blame_is_named",
        "tests/launch/test_rpc.py::test_a_call_that_never_returns_is_explained",
    ],
    "mission: scripts for CUDA and NCCL on CPUs": [
        "tests/fake_gpus/test_idioms.py::test_an_idiom_does_what_it_does_on_a_gpu",
        "tests/fake_gpus/test_mistakes.py::test_a_mistake_raises_at_its_line",
        "tests/fake_gpus/test_nccl.py::test_ddp_with_synchronised_statistics_is_the_training_of_one_process",
    ],
    "mission: verify": [
        "tests/verification/test_verify.py::test_a_broken_script_is_found_and_its_line_named",
        "tests/verification/test_verify.py::test_a_healthy_script_is_the_same_training",
    ],
    "samestep bench --json": [
        "tests/cli/test_bench.py::test_the_real_thing_runs_on_two_processes",
    ],
    "samestep bench --plot": [
        "tests/cli/test_effects.py::test_bandwidths_are_drawn",
        "tests/bench/test_allreduce.py::test_the_plot_is_a_page_with_every_way_and_its_own_script",
    ],
    "samestep bench --repeats": [
        "tests/cli/test_bench.py::test_the_real_thing_runs_on_two_processes",
    ],
    "samestep bench --write": [
        "tests/cli/test_effects.py::test_links_are_written_as_a_cluster_file",
        "tests/bench/test_links_bench.py::test_real_ranks_are_measured_and_the_file_is_read_again",
    ],
    "samestep bench -n": [
        "tests/cli/test_effects.py::test_a_benchmark_runs_on_as_many_ranks_as_asked_for",
    ],
    "samestep checkpoint --all": [
        "tests/cli/test_checkpoint.py::test_show_folds_what_is_alike_unless_all_is_asked_for",
    ],
    "samestep checkpoint --digests": [
        "tests/cli/test_checkpoint.py::test_list_sees_a_file_cut_short_at_once_and_a_flipped_bit_with_digests",
    ],
    "samestep checkpoint --epoch": [
        "tests/checkpoints/test_convert.py::test_a_file_saved_by_hand_with_wrappers_resumes_here",
    ],
    "samestep checkpoint --json": [
        "tests/cli/test_checkpoint.py::test_verify_names_the_file_and_the_tensor_that_are_damaged",
    ],
    "samestep checkpoint --kind": [
        "tests/checkpoints/test_convert.py::test_a_file_saved_by_hand_with_wrappers_resumes_here",
    ],
    "samestep checkpoint --step": [
        "tests/checkpoints/test_convert.py::test_a_file_saved_by_hand_with_wrappers_resumes_here",
    ],
    "samestep checkpoint --timeout": [
        "tests/checkpoints/test_convert.py::test_reading_that_takes_too_long_is_ended",
    ],
    "samestep checkpoint --to": [
        "tests/cli/test_effects.py::test_a_checkpoint_is_converted_to_the_format_that_was_asked_for",
    ],
    "samestep checkpoint convert": [
        "tests/checkpoints/test_convert.py::test_torchs_own_loader_reads_the_directory",
        "tests/checkpoints/test_convert.py::test_a_file_saved_by_hand_with_wrappers_resumes_here",
    ],
    "samestep checkpoint list": [
        "tests/cli/test_checkpoint.py::test_list_shows_every_step_and_whether_it_is_intact",
    ],
    "samestep checkpoint show": [
        "tests/cli/test_checkpoint.py::test_show_tells_objects_position_versions_and_tensors",
    ],
    "samestep checkpoint verify": [
        "tests/cli/test_checkpoint.py::test_verify_names_the_file_and_the_tensor_that_are_damaged",
        "tests/cli/test_checkpoint.py::test_verify_says_which_samples_were_lost",
    ],
    "samestep doctor --all": [
        "tests/doctor/test_doctor_command.py::test_a_terminal_shows_what_is_wrong_and_counts_the_rest",
    ],
    "samestep doctor --hostfile": [
        "tests/launch/test_doctor_hosts.py::test_hosts_of_a_file_are_reached_by_pdsh_and_measured_on_the_interface_that_was_asked_for",
    ],
    "samestep doctor --hosts": [
        "tests/launch/test_doctor_hosts.py::test_hosts_are_measured_against_each_other",
    ],
    "samestep doctor --interface": [
        "tests/launch/test_doctor_hosts.py::test_hosts_of_a_file_are_reached_by_pdsh_and_measured_on_the_interface_that_was_asked_for",
    ],
    "samestep doctor --json": [
        "tests/doctor/test_doctor_command.py::test_a_variable_that_ends_training_is_found_and_so_is_what_it_does",
        "tests/doctor/test_doctor_command.py::test_the_result_may_go_to_standard_output",
    ],
    "samestep doctor --remote-python": [
        "tests/launch/test_doctor_hosts.py::test_hosts_are_measured_against_each_other",
    ],
    "samestep doctor --ssh-args": [
        "tests/launch/test_doctor_hosts.py::test_hosts_are_measured_against_each_other",
    ],
    "samestep doctor --via": [
        "tests/launch/test_doctor_hosts.py::test_hosts_of_a_file_are_reached_by_pdsh_and_measured_on_the_interface_that_was_asked_for",
    ],
    "samestep doctor --wrong": [
        "tests/doctor/test_doctor_command.py::test_a_variable_that_ends_training_is_found_and_so_is_what_it_does",
    ],
    "samestep plan --apply": [
        "tests/cli/test_plan_command.py::test_the_settings_are_those_that_run_takes",
    ],
    "samestep plan --cluster": [
        "tests/cli/test_plan_command.py::test_a_plan_is_a_table_sentences_and_what_to_do_next",
    ],
    "samestep plan --json": [
        "tests/cli/test_plan_command.py::test_every_number_is_in_the_json_and_the_parts_add_up",
    ],
    "samestep plan --no-scale-batch": [
        "tests/cli/test_plan_command.py::test_a_batch_of_a_distributed_sampler_is_one_ranks",
    ],
    "samestep plan --picture": [
        "tests/cli/test_plan_command.py::test_the_picture_is_a_page_that_needs_no_network",
    ],
    "samestep plan --profile": [
        "tests/cli/test_plan_command.py::test_a_plan_is_a_table_sentences_and_what_to_do_next",
    ],
    "samestep plan --ranks": [
        "tests/cli/test_plan_command.py::test_ranks_that_do_not_fill_their_last_host_are_started_with_slots",
    ],
    "samestep plan --save-profile": [
        "tests/planning/test_profiling.py::test_the_command_profiles_a_module_for_as_many_steps_as_asked_for_and_keeps_the_profile",
    ],
    "samestep plan --steps": [
        "tests/planning/test_profiling.py::test_the_command_profiles_a_module_for_as_many_steps_as_asked_for_and_keeps_the_profile",
    ],
    "samestep plan -m": [
        "tests/planning/test_profiling.py::test_the_command_profiles_a_module_for_as_many_steps_as_asked_for_and_keeps_the_profile",
    ],
    "samestep report --attempt": [
        "tests/cli/test_report_command.py::test_an_attempt_can_be_chosen",
    ],
    "samestep report --json": [
        "tests/cli/test_report_command.py::test_the_documented_keys_are_those_that_are_written",
        "tests/cli/test_report_command.py::test_page_trace_and_data_go_where_they_are_wanted",
    ],
    "samestep report --output": [
        "tests/cli/test_report_command.py::test_page_trace_and_data_go_where_they_are_wanted",
    ],
    "samestep report --trace": [
        "tests/cli/test_report_command.py::test_page_trace_and_data_go_where_they_are_wanted",
    ],
    "samestep run --check": [
        "tests/verification/test_online.py::test_a_training_goes_on_and_what_differs_is_told_with_its_line",
    ],
    "samestep run --dry-run": [
        "tests/cli/test_cli.py::test_a_dry_run_shows_what_a_shell_would_take_and_starts_nothing",
    ],
    "samestep run --env": [
        "tests/launch/test_hosts.py::test_hosts_of_a_file_get_the_variables_that_are_taken_along",
        "tests/cli/test_cli.py::test_grace_and_variables_go_into_the_batch_script",
    ],
    "samestep run --fake-gpus": [
        "tests/fake_gpus/test_commands.py::test_a_script_for_gpus_runs_without_any",
        "tests/fake_gpus/test_commands.py::test_the_option_is_suggested_where_gpus_are_missing",
    ],
    "samestep run --fresh": [
        "tests/checkpoints/test_resume_message.py::test_the_command_line_asks_every_rank_for_a_fresh_start",
    ],
    "samestep run --grace": [
        "tests/launch/test_endings.py::test_a_save_that_outlasts_the_grace_is_told",
    ],
    "samestep run --hang-after": [
        "tests/launch/test_hanging_runs.py::test_a_rank_that_is_stuck_is_named_with_its_line",
    ],
    "samestep run --hostfile": [
        "tests/launch/test_hosts.py::test_hosts_of_a_file_get_the_variables_that_are_taken_along",
    ],
    "samestep run --hosts": [
        "tests/launch/test_hosts.py::test_ranks_on_two_hosts_meet",
    ],
    "samestep run --interface": [
        "tests/launch/test_hosts.py::test_the_interface_that_was_asked_for_is_used",
    ],
    "samestep run --join-timeout": [
        "tests/launch/test_by_hand.py::test_a_host_that_never_comes_is_named_at_the_join_timeout",
    ],
    "samestep run --json": [
        "tests/cli/test_cli.py::test_json_says_how_the_run_ended",
    ],
    "samestep run --lost-host": [
        "tests/launch/test_hosts.py::test_a_restart_goes_on_with_the_hosts_that_are_left",
        "tests/launch/test_replacement.py::test_on_one_host_the_agent_is_forked_again",
    ],
    "samestep run --mpi": [
        "tests/runtime/test_mpi_world.py::test_verify_finds_the_training_over_mpi_to_be_that_of_one_process",
    ],
    "samestep run --nnodes": [
        "tests/launch/test_by_hand.py::test_torchruns_own_options_start_the_same",
        "tests/launch/test_by_hand.py::test_who_needs_no_secret_is_out_of_reach_of_other_hosts",
    ],
    "samestep run --no-events": [
        "tests/launch/test_timeline.py::test_no_events_are_kept_where_nobody_wants_them",
    ],
    "samestep run --node-rank": [
        "tests/launch/test_by_hand.py::test_hosts_started_by_hand_meet_with_any_number_of_ranks",
        "tests/launch/test_by_hand.py::test_who_needs_no_secret_is_out_of_reach_of_other_hosts",
    ],
    "samestep run --on-hang": [
        "tests/launch/test_hanging_runs.py::test_a_rank_that_is_stuck_is_named_with_its_line",
    ],
    "samestep run --pass-local-rank": [
        "tests/launch/test_run.py::test_the_local_rank_is_passed_in_either_spelling_when_asked_for",
    ],
    "samestep run --pin": [
        "tests/launch/test_run.py::test_ranks_are_bound_to_cores_of_their_own_when_asked_for",
    ],
    "samestep run --remote-python": [
        "tests/launch/test_hosts.py::test_hosts_that_are_slow_to_come_are_named",
    ],
    "samestep run --rendezvous": [
        "tests/launch/test_by_hand.py::test_hosts_started_by_hand_meet_through_a_file_that_is_its_own_secret",
    ],
    "samestep run --restarts": [
        "tests/launch/test_faults.py::test_restarts_go_on_until_an_attempt_ends_well",
    ],
    "samestep run --run-dir": [
        "tests/launch/test_run.py::test_the_run_directory_keeps_each_ranks_streams_and_a_record",
    ],
    "samestep run --sbatch-args": [
        "tests/launch/test_slurm.py::test_the_batch_script_is_shown_and_quoted",
        "tests/launch/test_slurm_script.py::test_sbatch_accepts_the_script",
    ],
    "samestep run --settings": [
        "tests/launch/test_chosen_settings.py::test_a_run_takes_what_a_plan_has_chosen",
    ],
    "samestep run --slurm": [
        "tests/launch/test_slurm.py::test_a_batch_that_is_asked_to_make_room_is_queued_again_and_goes_on",
        "tests/launch/test_slurm.py::test_the_batch_script_is_shown_and_quoted",
    ],
    "samestep run --ssh-args": [
        "tests/launch/test_hosts.py::test_ranks_on_two_hosts_meet",
    ],
    "samestep run --start": [
        "tests/launch/test_bootstrap.py::test_files_that_the_script_left_open_are_written_out",
    ],
    "samestep run --via": [
        "tests/launch/test_hosts.py::test_ranks_on_two_hosts_meet",
        "tests/launch/test_transport.py::test_every_host_has_its_own_exit_code",
    ],
    "samestep run -m": [
        "tests/launch/test_run.py::test_a_module_runs_as_python_m_runs_it",
    ],
    "samestep run -n": [
        "tests/launch/test_run.py::test_a_torchrun_style_script_runs_unchanged",
    ],
    "samestep verify --fake-gpus": [
        "tests/fake_gpus/test_commands.py::test_verify_judges_a_script_for_gpus",
    ],
    "samestep verify --explain": [
        "tests/cli/test_effects.py::test_a_finding_is_explained",
        "tests/cli/test_effects.py::test_an_error_is_explained",
    ],
    "samestep verify --json": [
        "tests/verification/test_verify_options.py::test_a_module_is_verified_on_as_many_ranks_and_steps_as_asked_for",
    ],
    "samestep verify --markdown": [
        "tests/verification/test_report.py::test_a_report_is_markdown_for_a_pull_request",
    ],
    "samestep verify --mpi": [
        "tests/runtime/test_mpi_world.py::test_verify_finds_the_training_over_mpi_to_be_that_of_one_process",
    ],
    "samestep verify --pass-local-rank": [
        "tests/verification/test_verify_options.py::test_each_rank_gets_its_local_rank_as_an_option",
    ],
    "samestep verify --steps": [
        "tests/verification/test_verify_options.py::test_a_module_is_verified_on_as_many_ranks_and_steps_as_asked_for",
    ],
    "samestep verify --verbose": [
        "tests/verification/test_verify_options.py::test_a_script_without_a_training_leaves_the_verdict_open",
    ],
    "samestep verify --timeout": [
        "tests/cli/test_effects.py::test_the_timeout_of_verify_is_the_time_without_a_sign_of_life",
        "tests/verification/test_verify.py::test_a_hang_names_who_is_missing_and_where_both_stand",
    ],
    "samestep verify -m": [
        "tests/verification/test_verify_options.py::test_a_module_is_verified_on_as_many_ranks_and_steps_as_asked_for",
    ],
    "samestep verify -n": [
        "tests/verification/test_verify_options.py::test_a_module_is_verified_on_as_many_ranks_and_steps_as_asked_for",
    ],
    "samestep watch --once": [
        "tests/reporting/test_watch_terminal.py::test_colours_are_left_out_where_nobody_wants_them",
    ],
    "samestep watch --rank": [
        "tests/cli/test_effects.py::test_the_output_of_the_rank_that_was_asked_for_is_shown",
    ],
    "samestep run: exit code 0": [
        "tests/launch/test_run.py::test_the_run_directory_keeps_each_ranks_streams_and_a_record",
    ],
    "samestep run: exit code 1": [
        "tests/launch/test_supervise.py::test_the_rank_that_fails_is_blamed_and_all_are_gone_soon",
        "tests/verification/test_online.py::test_a_training_goes_on_and_what_differs_is_told_with_its_line",
    ],
    "samestep run: exit code 2": [
        "tests/cli/test_cli.py::test_a_usage_error_is_one_line_and_code_2",
    ],
    "samestep run: exit code 75": [
        "tests/checkpoints/test_preemption.py::test_the_launcher_passes_a_request_on_and_nothing_is_lost",
    ],
    "samestep run: exit code 124": [
        "tests/launch/test_hanging_runs.py::test_a_rank_that_is_stuck_is_named_with_its_line",
    ],
    "samestep run: exit code 128 + N": [
        "tests/launch/test_faults.py::test_a_native_crash_shows_the_python_line_it_came_from",
    ],
    "samestep run: exit code 130": [
        "tests/launch/test_supervise.py::test_a_signal_ends_every_rank_and_what_it_started",
    ],
    "samestep run: exit code the script's own": [
        "tests/cli/test_cli.py::test_json_says_how_the_run_ended",
        "tests/launch/test_bootstrap.py::test_a_rank_ends_with_the_code_that_python_would_end_with",
    ],
    "samestep verify: exit code 0": [
        "tests/verification/test_verify_options.py::test_a_module_is_verified_on_as_many_ranks_and_steps_as_asked_for",
    ],
    "samestep verify: exit code 1": [
        "tests/verification/test_verify.py::test_the_picture_of_the_readme_shows_what_the_command_says",
    ],
    "samestep verify: exit code 2": [
        "tests/verification/test_verify.py::test_usage_errors_say_how_to_fix_them",
    ],
    "samestep verify: exit code 3": [
        "tests/verification/test_verify_options.py::test_a_script_without_a_training_leaves_the_verdict_open",
    ],
    "samestep verify: exit code 130": [
        "tests/cli/test_verify_command.py::test_a_signal_that_asks_for_the_end_is_the_exit_code",
    ],
    "samestep doctor: exit code 0": [
        "tests/doctor/test_doctor_command.py::test_this_machine_trains",
    ],
    "samestep doctor: exit code 1": [
        "tests/doctor/test_doctor_command.py::test_a_variable_that_ends_training_is_found_and_so_is_what_it_does",
    ],
    "samestep doctor: exit code 2": [
        "tests/doctor/test_doctor_command.py::test_a_wrong_call_is_one_line",
    ],
    "samestep doctor: exit code 130": [
        "tests/cli/test_effects.py::test_ctrl_c_is_exit_code_130",
    ],
    "samestep checkpoint: exit code 0": [
        "tests/cli/test_checkpoint.py::test_verify_says_that_every_sample_was_used_once",
    ],
    "samestep checkpoint: exit code 1": [
        "tests/cli/test_checkpoint.py::test_verify_names_the_file_and_the_tensor_that_are_damaged",
        "tests/cli/test_checkpoint.py::test_verify_says_which_samples_were_lost",
    ],
    "samestep checkpoint: exit code 2": [
        "tests/cli/test_checkpoint.py::test_a_usage_error_is_one_line_and_code_2",
    ],
    "samestep checkpoint: exit code 130": [
        "tests/cli/test_effects.py::test_ctrl_c_is_exit_code_130",
    ],
    "samestep plan: exit code 0": [
        "tests/cli/test_plan_command.py::test_a_plan_is_a_table_sentences_and_what_to_do_next",
    ],
    "samestep plan: exit code 1": [
        "tests/cli/test_plan_command.py::test_a_model_that_fits_nowhere_says_by_how_much",
    ],
    "samestep plan: exit code 2": [
        "tests/cli/test_plan_command.py::test_options_behind_the_script_are_its_own_and_that_is_said",
    ],
    "samestep plan: exit code 130": [
        "tests/cli/test_effects.py::test_ctrl_c_is_exit_code_130",
    ],
    "samestep report: exit code 0": [
        "tests/cli/test_report_command.py::test_the_page_lies_in_the_run_directory_and_the_summary_on_the_terminal",
    ],
    "samestep report: exit code 2": [
        "tests/cli/test_report_command.py::test_what_is_no_run_is_refused_in_one_line",
    ],
    "samestep report: exit code 130": [
        "tests/cli/test_effects.py::test_ctrl_c_is_exit_code_130",
    ],
    "samestep watch: exit code 0": [
        "tests/cli/test_watch_command.py::test_one_picture_is_printed_where_there_is_no_terminal",
        "tests/reporting/test_watch_terminal.py::test_control_c_is_no_error",
    ],
    "samestep watch: exit code 2": [
        "tests/cli/test_watch_command.py::test_what_is_no_run_is_refused_in_one_line",
    ],
    "samestep bench: exit code 0": [
        "tests/cli/test_bench.py::test_the_real_thing_runs_on_two_processes",
    ],
    "samestep bench: exit code 2": [
        "tests/cli/test_bench.py::test_a_mistake_is_one_line_that_says_what_to_give",
    ],
    "samestep bench: exit code 130": [
        "tests/cli/test_effects.py::test_ctrl_c_is_exit_code_130",
    ],
    "finding initial-state-differs": [
        "tests/verification/test_states_of_ranks.py::test_other_parameters_before_the_first_step_are_found",
        "tests/verification/test_online.py::test_a_training_goes_on_and_what_differs_is_told_with_its_line",
    ],
    "finding parameter-order-differs": [
        "tests/verification/test_verify.py::test_layers_that_ranks_register_in_another_order_are_named",
    ],
    "finding gradients-not-synchronised": [
        "tests/verification/test_verify.py::test_a_broken_script_is_found_and_its_line_named",
        "tests/verification/test_judging.py::test_other_gradients_are_found_where_they_begin",
    ],
    "finding parameters-diverged": [
        "tests/verification/test_states_of_ranks.py::test_why_parameters_part_is_told",
        "tests/verification/test_averaged.py::test_a_rank_that_does_not_take_an_average_over_is_named",
    ],
    "finding buffers-diverged": [
        "tests/verification/test_states_of_ranks.py::test_ranks_that_evaluate_with_other_buffers_are_found",
    ],
    "finding update-differs": [
        "tests/verification/test_updates.py::test_an_update_that_is_multiplied_by_the_number_of_ranks_is_found",
    ],
    "finding batches-differ": [
        "tests/verification/test_verify.py::test_ranks_of_tensor_parallelism_that_get_different_batches_are_found",
    ],
    "finding gradient-scale": [
        "tests/verification/test_verify.py::test_a_broken_script_is_found_and_its_line_named",
    ],
    "finding gradient-differs": [
        "tests/verification/test_verify.py::test_a_broken_script_is_found_and_its_line_named",
    ],
    "finding optimizer-misses-parameters": [
        "tests/verification/test_states_of_ranks.py::test_parameters_that_train_and_are_in_no_optimizer_are_found",
    ],
    "finding samples-repeated": [
        "tests/verification/test_verify.py::test_a_broken_script_is_found_and_its_line_named",
    ],
    "finding samples-missing": [
        "tests/verification/test_judging.py::test_left_out_samples_are_an_error_unless_that_was_asked_for",
    ],
    "finding same-order-every-epoch": [
        "tests/verification/test_judging.py::test_the_same_shuffle_in_two_epochs_is_an_error",
    ],
    "finding datasets-differ": [
        "tests/verification/test_judging.py::test_a_rank_that_had_time_for_fewer_samples_has_no_other_dataset",
        "tests/verification/test_judging.py::test_ranks_that_shuffle_data_of_their_own_need_not_hold_the_same",
    ],
    "finding random-streams": [
        "tests/verification/test_control_of_ranks.py::test_dropout_that_is_the_same_on_two_ranks_is_found",
    ],
    "finding steps-differ": [
        "tests/verification/test_gradient_causes.py::test_a_step_that_one_process_does_not_take_is_found_with_the_rank_that_skips",
    ],
    "finding learning-rate-differs": [
        "tests/verification/test_judging.py::test_another_rate_is_found_with_its_ratio",
    ],
    "finding collective-order": [
        "tests/verification/test_judging.py::test_exchanged_collectives_are_found_by_their_lines",
    ],
    "finding collective-mismatch": [
        "tests/verification/test_verify.py::test_ranks_with_unlike_numbers_of_batches_are_told_where_each_was",
    ],
    "finding evaluation-inexact": [
        "tests/verification/test_verify.py::test_a_broken_script_is_found_and_its_line_named",
    ],
    "finding checkpoint-inexact": [
        "tests/verification/test_claims.py::test_an_optimizer_that_is_not_saved_is_found_by_the_resume",
        "tests/verification/test_saved_states.py::test_what_does_not_come_back_is_named",
    ],
    "finding pipeline-inexact": [
        "tests/verification/test_claims_of_stages.py::test_a_pipeline_is_the_same_training_or_what_it_does_is_found",
    ],
    "finding data-parallel-module": [
        "tests/verification/test_control_of_ranks.py::test_a_model_in_data_parallel_is_found",
    ],
    "finding hang": [
        "tests/verification/test_verify.py::test_a_hang_names_who_is_missing_and_where_both_stand",
    ],
    "finding crash": [
        "tests/verification/test_verify.py::test_a_crash_on_one_rank_is_a_difference",
    ],
    "error BackendError": [
        "tests/runtime/test_backends.py::test_an_unknown_backend_is_refused_with_the_nearest_known",
    ],
    "error CheckpointError": [
        "tests/checkpoints/test_saving_and_resuming.py::test_a_model_that_does_not_fit_is_refused_on_every_rank_and_nothing_is_loaded",
    ],
    "error DataError": [
        "tests/data/test_iterable.py::test_a_stream_that_raises_is_named_with_its_item_and_line",
    ],
    "error DeviceError": [
        "tests/runtime/test_device.py::test_more_ranks_than_gpus_is_refused_with_the_number_that_fits",
    ],
    "error DriftError": [
        "tests/replicas/test_drift.py::test_all_ranks_stop_with_the_same_sentence_and_only_the_culprit_is_to_blame",
    ],
    "error EmptyBatchError": [
        "tests/replicas/test_replicate.py::test_a_model_that_refuses_an_empty_batch_is_told_what_to_write",
        "tests/replicas/test_replicate.py::test_an_empty_batch_is_tried_at_the_first_step_and_the_trial_leaves_no_trace",
    ],
    "error ModelError": [
        "tests/replicas/test_replicate.py::test_a_model_with_nothing_to_train_is_refused",
    ],
    "error NonFiniteError": [
        "tests/replicas/test_nonfinite.py::test_the_launcher_blames_the_rank_that_brought_it",
    ],
    "error PeerError": [
        "tests/replicas/test_reduction.py::test_a_rank_killed_while_others_wait_is_named_and_leaves_nothing_behind",
    ],
    "error Preempted": [
        "tests/checkpoints/test_preemption.py::test_a_request_to_any_rank_stops_all_at_the_same_step",
    ],
    "error RankFailure": [
        "tests/launch/test_spawn.py::test_the_rank_that_raised_is_named_with_its_traceback",
        "tests/launch/test_spawn.py::test_the_rank_that_was_killed_is_named",
    ],
    "error RankVariablesError": [
        "tests/launch/test_excepthook.py::test_wrong_variables_are_one_line_without_the_launcher_too",
        "tests/test_rankenv.py::test_half_set_or_contradictory_variables_are_named",
    ],
    "error RendezvousError": [
        "tests/runtime/test_world.py::test_missing_ranks_are_named",
    ],
    "error SamestepError": [
        "tests/data/test_once.py::test_a_wait_that_is_too_long_names_the_holder_and_the_wait",
    ],
    "error StepError": [
        "tests/data/test_shards.py::test_losses_that_would_train_something_else_are_refused",
    ],
    "error UsageError": [
        "tests/runtime/test_world.py::test_what_cannot_be_joined_is_refused_in_one_line",
    ],
    "samestep.checkpoint(path)": [
        "tests/checkpoints/test_saving_and_resuming.py::test_steps_are_saved_as_often_as_asked_and_as_many_stay_as_asked",
        "tests/checkpoints/test_saving_and_resuming.py::test_without_a_path_nothing_is_saved_and_all_else_stays",
    ],
    "samestep.checkpoint(world)": [
        "tests/checkpoints/test_saving_and_resuming.py::test_two_ranks_go_on_bit_for_bit",
    ],
    "samestep.checkpoint(every)": [
        "tests/checkpoints/test_saving_and_resuming.py::test_steps_are_saved_as_often_as_asked_and_as_many_stay_as_asked",
    ],
    "samestep.checkpoint(resume)": [
        "tests/checkpoints/test_resume_message.py::test_a_fresh_start_moves_the_old_checkpoints_out_of_the_way",
    ],
    "samestep.checkpoint(keep)": [
        "tests/checkpoints/test_saving_and_resuming.py::test_steps_are_saved_as_often_as_asked_and_as_many_stay_as_asked",
    ],
    "samestep.checkpoint(keep_each)": [
        "tests/checkpoints/test_saving_and_resuming.py::test_steps_that_keep_each_divides_stay",
    ],
    "samestep.checkpoint(time_limit)": [
        "tests/checkpoints/test_deadline.py::test_all_ranks_leave_behind_the_same_step_and_go_on_from_there",
    ],
    "samestep.checkpoint(named)": [
        "tests/checkpoints/test_saving_and_resuming.py::test_stopped_after_any_step_and_resumed_every_bit_is_that_of_an_uninterrupted_run",
    ],
    "samestep.clip_grad_norm_(model)": [
        "tests/replicas/test_clipping.py::test_a_module_its_parameters_an_iterator_and_one_tensor_are_clipped_alike",
    ],
    "samestep.clip_grad_norm_(max_norm)": [
        "tests/replicas/test_clipping.py::test_three_ranks_clip_as_one_process_does",
        "tests/replicas/test_clipping.py::test_a_norm_below_the_limit_changes_no_bit",
    ],
    "samestep.clip_grad_norm_(norm_type)": [
        "tests/replicas/test_clipping.py::test_three_ranks_clip_as_one_process_does",
    ],
    "samestep.clip_grad_norm_(error_if_nonfinite)": [
        "tests/replicas/test_clipping.py::test_a_norm_that_is_not_finite_raises_only_when_asked",
    ],
    "samestep.evaluate(fn)": [
        "tests/test_evaluation.py::test_one_process_sees_every_sample_once_and_in_order",
    ],
    "samestep.evaluate(dataset)": [
        "tests/test_evaluation.py::test_one_process_sees_every_sample_once_and_in_order",
    ],
    "samestep.evaluate(world)": [
        "tests/test_evaluation.py::test_three_ranks_give_what_one_gives_also_without_samples_for_some",
    ],
    "samestep.evaluate(batch_size)": [
        "tests/test_evaluation.py::test_each_rank_takes_its_share_of_the_batch_size",
    ],
    "samestep.evaluate(metrics)": [
        "tests/test_evaluation.py::test_auc_which_is_no_mean_is_exact",
    ],
    "samestep.evaluate(workers)": [
        "tests/test_evaluation.py::test_loading_processes_change_nothing",
    ],
    "samestep.evaluate(collate_fn)": [
        "tests/test_evaluation.py::test_batches_are_made_by_the_function_that_was_given",
    ],
    "samestep.once(path)": [
        "tests/data/test_once.py::test_the_first_gets_the_work_and_later_ones_find_it_done",
    ],
    "samestep.once(timeout)": [
        "tests/data/test_once.py::test_a_wait_that_is_too_long_names_the_holder_and_the_wait",
    ],
    "samestep.pipeline(model)": [
        "tests/pipelines/test_model_kinds.py::test_stages_by_hand_run_one_a_rank_and_as_they_are",
        "tests/pipelines/test_traced_models.py::test_ordinary_models_train_on_two_ranks_as_on_one",
    ],
    "samestep.pipeline(world)": [
        "tests/pipelines/test_pipeline.py::test_two_replicas_of_two_stages_take_the_step_of_one_process",
    ],
    "samestep.pipeline(plan)": [
        "tests/pipelines/test_plan_pipeline.py::test_a_plan_is_carried_out_alike_on_all_ranks",
    ],
    "samestep.pipeline(loss_fn)": [
        "tests/pipelines/test_model_kinds.py::test_stages_by_hand_run_one_a_rank_and_as_they_are",
    ],
    "samestep.pipeline(schedule)": [
        "tests/pipelines/test_model_kinds.py::test_stages_by_hand_run_one_a_device_and_as_they_are",
    ],
    "samestep.pipeline(weight)": [
        "tests/pipelines/test_pipeline_arguments.py::test_micro_batches_count_as_weight_says",
    ],
    "samestep.pipeline(devices)": [
        "tests/pipelines/test_devices_of_one_process.py::test_stages_on_one_device_leave_its_bits",
        "tests/pipelines/test_devices_of_one_process.py::test_micro_batches_are_as_many_as_is_said_or_as_large",
    ],
    "samestep.pipeline(micro_batches)": [
        "tests/pipelines/test_devices_of_one_process.py::test_micro_batches_are_as_many_as_is_said_or_as_large",
    ],
    "samestep.pipeline(split_size)": [
        "tests/pipelines/test_devices_of_one_process.py::test_micro_batches_are_as_many_as_is_said_or_as_large",
    ],
    "samestep.pipeline(compress)": [
        "tests/pipelines/test_compressed_gradients.py::test_two_stages_of_two_replicas_have_the_bits_of_one",
        "tests/pipelines/test_compressed_gradients.py::test_it_is_asked_for_by_name_or_with_settings",
    ],
    "samestep.plan_pipeline(model)": [
        "tests/pipelines/test_plan_pipeline.py::test_a_plan_says_what_a_step_takes",
    ],
    "samestep.plan_pipeline(sample)": [
        "tests/pipelines/test_plan_pipeline.py::test_another_batch_and_split_size_is_answered_by_t_of_b",
    ],
    "samestep.plan_pipeline(loss_fn)": [
        "tests/pipelines/test_plan_pipeline.py::test_a_plan_is_carried_out_alike_on_all_ranks",
        "tests/pipelines/test_profiler.py::test_the_loss_is_the_last_layers",
    ],
    "samestep.plan_pipeline(stages)": [
        "tests/pipelines/test_tied_weights.py::test_a_tied_model_can_be_planned_for_any_number_of_stages",
    ],
    "samestep.plan_pipeline(micro_batches)": [
        "tests/pipelines/test_plan_pipeline.py::test_micro_batches_and_schedule_are_chosen",
    ],
    "samestep.plan_pipeline(schedule)": [
        "tests/pipelines/test_plan_pipeline.py::test_micro_batches_and_schedule_are_chosen",
    ],
    "samestep.plan_pipeline(devices)": [
        "tests/pipelines/test_plan_pipeline.py::test_devices_and_links_count",
    ],
    "samestep.plan_pipeline(link)": [
        "tests/pipelines/test_plan_pipeline.py::test_devices_and_links_count",
    ],
    "samestep.plan_pipeline(weight)": [
        "tests/pipelines/test_known_problems.py::test_6_a_loss_that_is_no_mean_over_samples_is_weighed_or_named",
    ],
    "samestep.plan_pipeline(repeats)": [
        "tests/pipelines/test_pipeline_arguments.py::test_layers_are_timed_as_often_as_repeats_says",
    ],
    "samestep.replicate(model)": [
        "tests/replicas/test_replicate.py::test_rank_0s_parameters_and_buffers_reach_all",
    ],
    "samestep.replicate(world)": [
        "tests/replicas/test_reduction.py::test_on_one_host_gradients_are_the_mean_in_rank_order_bit_for_bit",
    ],
    "samestep.replicate(buckets)": [
        "tests/replicas/test_reduction.py::test_the_bits_do_not_depend_on_buckets_nor_on_who_owns_the_gradients",
        "tests/launch/test_chosen_settings.py::test_a_run_takes_what_a_plan_has_chosen",
    ],
    "samestep.replicate(reduce)": [
        "tests/replicas/test_reduction.py::test_left_to_the_backend_they_are_what_ddp_makes_of_them",
        "tests/replicas/test_reduction.py::test_added_in_order_over_messages_they_are_the_same_bits",
    ],
    "samestep.replicate(batchnorm)": [
        "tests/replicas/test_batchnorm.py::test_local_statistics_are_another_training",
    ],
    "samestep.replicate(find_unused_parameters)": [
        "tests/replicas/test_replicate.py::test_parameters_left_out_of_some_forwards_are_allowed_when_said",
        "tests/replicas/test_replicate.py::test_unused_parameters_are_refused_with_samesteps_own_remedy",
    ],
    "samestep.replicate(nonfinite)": [
        "tests/replicas/test_nonfinite.py::test_a_skipped_step_leaves_no_trace",
        "tests/replicas/test_nonfinite.py::test_a_nan_of_one_rank_stops_all_before_the_optimizer_and_names_rank_and_tensor",
    ],
    "samestep.replicate(compress)": [
        "tests/replicas/test_compression.py::test_real_ranks_come_to_the_simulated_ones_bits",
    ],
    "samestep.replicate(average_every)": [
        "tests/replicas/test_local_sgd.py::test_ranks_take_the_steps_that_one_process_computes_for_them",
    ],
    "samestep.replicate(guard)": [
        "tests/replicas/test_drift.py::test_what_changes_at_any_time_is_found_at_the_next_multiple",
        "tests/replicas/test_drift.py::test_a_guard_may_be_a_number_of_steps",
    ],
    "samestep.shards(dataset)": [
        "tests/data/test_shards.py::test_ranks_take_slices_of_the_one_order",
    ],
    "samestep.shards(world)": [
        "tests/data/test_shards.py::test_ranks_take_slices_of_the_one_order",
    ],
    "samestep.shards(batch_size)": [
        "tests/data/test_shards.py::test_ranks_take_slices_of_the_one_order",
    ],
    "samestep.shards(micro_batch_size)": [
        "tests/data/test_shards.py::test_options_change_neither_order_nor_multiset",
        "tests/data/test_sample_streams.py::test_micro_batches_do_not_change_it",
    ],
    "samestep.shards(weight)": [
        "tests/data/test_shards.py::test_losses_of_all_ranks_add_up_to_the_steps_loss",
        "tests/data/test_shards.py::test_a_loss_that_does_not_count_may_be_infinite",
    ],
    "samestep.shards(workers)": [
        "tests/data/test_shards.py::test_what_workers_have_prefetched_is_not_consumed",
    ],
    "samestep.shards(seed)": [
        "tests/data/test_shards.py::test_options_change_neither_order_nor_multiset",
    ],
    "samestep.shards(shuffle)": [
        "tests/data/test_shards.py::test_committed_steps_are_behind_uncommitted_ones_come_again",
    ],
    "samestep.shards(drop_last)": [
        "tests/data/test_iterable.py::test_with_drop_last_it_ends_with_the_first_step_that_is_short",
        "tests/data/test_order.py::test_a_short_last_step_can_be_left_out",
    ],
    "samestep.shards(collate_fn)": [
        "tests/data/test_sample_streams.py::test_a_collate_function_draws_the_same_with_and_without_workers",
    ],
    "samestep.shards(sample_streams)": [
        "tests/data/test_sample_streams.py::test_without_sample_streams_samples_draw_from_the_ranks_own",
    ],
    "samestep.shards(on_bad_sample)": [
        "tests/data/test_skips.py::test_what_is_bad_is_left_out_on_all_ranks_alike",
    ],
    "samestep.shards(cost)": [
        "tests/data/test_costs.py::test_ranks_together_take_the_steps_of_one_process",
    ],
    "samestep.shards(bucket)": [
        "tests/data/test_costs.py::test_ranks_together_take_the_steps_of_one_process",
    ],
    "samestep.shards(splits_itself)": [
        "tests/data/test_iterable.py::test_ranks_whose_streams_are_unequal_end_at_the_same_step",
    ],
    "samestep.spawn(fn)": [
        "tests/launch/test_spawn.py::test_results_come_in_rank_order",
    ],
    "samestep.spawn(n)": [
        "tests/launch/test_spawn.py::test_results_come_in_rank_order",
    ],
    "samestep.spawn(args)": [
        "tests/launch/test_spawn.py::test_results_come_in_rank_order",
    ],
    "samestep.spawn(timeout)": [
        "tests/launch/test_spawn.py::test_ranks_that_give_no_answer_in_time_are_ended",
    ],
    "samestep.spawn(progress)": [
        "tests/launch/test_spawn.py::test_a_status_that_nobody_watches_is_a_plain_line_on_request",
        "tests/launch/test_spawn.py::test_on_a_terminal_without_a_status_the_ranks_have_it_to_themselves",
    ],
    "samestep.verify(script)": [
        "tests/verification/test_verify.py::test_a_healthy_script_is_the_same_training",
    ],
    "samestep.verify(arguments)": [
        "tests/verification/test_verify_options.py::test_a_script_is_verified_with_its_arguments",
    ],
    "samestep.verify(ranks)": [
        "tests/verification/test_claims_of_stages.py::test_replicas_of_a_pipeline_are_compared_with_whole_batches_in_float64",
    ],
    "samestep.verify(steps)": [
        "tests/verification/test_verify.py::test_as_many_steps_are_recorded_as_were_asked_for",
    ],
    "samestep.verify(timeout)": [
        "tests/verification/test_verify.py::test_a_hang_names_who_is_missing_and_where_both_stand",
    ],
    "samestep.world(backend)": [
        "tests/runtime/test_process_group.py::test_the_world_takes_the_backend",
    ],
    "samestep.world(init_method)": [
        "tests/runtime/test_world.py::test_ranks_meet_at_a_tcp_address",
        "tests/runtime/test_world.py::test_ranks_started_by_hand_meet",
    ],
    "samestep.world(rank)": [
        "tests/runtime/test_world.py::test_ranks_started_by_hand_meet",
    ],
    "samestep.world(size)": [
        "tests/runtime/test_world.py::test_ranks_started_by_hand_meet",
        "tests/runtime/test_world.py::test_a_size_that_contradicts_the_launchers_is_refused_at_once",
    ],
    "samestep.world(device)": [
        "tests/runtime/test_world_arguments.py::test_tensors_go_to_the_device_that_was_asked_for",
    ],
    "samestep.world(pipeline)": [
        "tests/runtime/test_world.py::test_both_axes_have_groups_of_their_own",
    ],
    "samestep.world(virtual_ranks)": [
        "tests/equivalence/test_virtual_ranks.py::test_any_number_of_ranks_gives_the_same_bits",
    ],
    "samestep.world(seed)": [
        "tests/runtime/test_world.py::test_models_start_alike_and_dropout_differs",
        "tests/runtime/test_world.py::test_without_a_seed_the_global_generator_is_left_alone",
    ],
    "samestep.world(deterministic)": [
        "tests/runtime/test_world.py::test_deterministic_mode_is_asked_of_torch_and_cudnn",
    ],
    "samestep.world(timeout)": [
        "tests/runtime/test_world_arguments.py::test_a_collective_waits_for_the_timeout_of_the_world",
    ],
    "samestep.world(join_timeout)": [
        "tests/runtime/test_world.py::test_missing_ranks_are_named",
    ],
    "samestep.world(run_dir)": [
        "tests/runtime/test_metric_log.py::test_a_script_that_nobody_launched_keeps_them_too",
    ],
    "samestep.world(tensorboard)": [
        "tests/runtime/test_metric_log.py::test_ranks_of_another_launcher_keep_events_where_the_world_has_a_folder",
    ],
}
