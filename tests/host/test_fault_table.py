"""The fault table: what can go wrong with an attempt, what is recorded of it, and which tests show it.

docs/faults.md is the same table for readers; `python -m tests.host.test_fault_table` writes it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/faults.md"
COUNTS = {"A": 7, "B": 4, "C": 6, "D": 15, "E": 7, "F": 6}
"""How many rows each part has."""


@dataclass(frozen=True)
class Row:
    """One row: its id, what happens, what is charged and recorded, and the tests of each file of `tests`."""

    id: str
    happens: str
    recorded: str
    tests: dict[str, list[str]]


TABLE = [
    Row(
        "A1",
        "budget too small; several reserve at once on what is left of one budget",
        "nothing charged, `refused`; exactly one wins",
        {
            "host/test_ledger": [
                "test_of_racing_reservers_exactly_one_wins",
                "test_a_refused_reservation_says_what_was_left_and_costs_nothing",
            ],
            "steps/test_hard_trials": ["test_budget_exhausted_is_a_clear_refusal"],
        },
    ),
    Row(
        "A2",
        "a foreign process before the start, or exclusivity not known where it is required",
        "nothing charged, `refused` (`foreign_process`, `unverifiable`); where the best is done, an unknown is a label",
        {
            "host/test_fault_devices": [
                "test_a_foreign_process_before_the_start_is_refused_whatever_the_protocol_asks",
                "test_what_the_driver_does_not_tell_is_refused_where_exclusivity_is_required",
                "test_what_the_driver_does_not_tell_is_a_label_where_the_best_is_done",
            ],
            "gpu/test_devices": ["test_a_process_that_holds_the_device_before_is_seen"],
        },
    ),
    Row(
        "A3",
        "the lease is held by another attempt; `--wait`",
        "nothing charged, `refused` with `busy` and who holds it; waiting takes it once it is free",
        {
            "host/test_lease": [
                "test_a_busy_device_says_who_holds_it_and_since_when",
                "test_waiting_takes_the_device_once_it_is_free",
            ],
            "host/test_supervisor": [
                "test_a_busy_device_is_refused_by_name_and_costs_nothing",
                "test_waiting_for_a_device_can_be_stopped",
            ],
        },
    ),
    Row(
        "A4",
        "killed between reservation and start",
        "the reservation stays held until `reconcile`, then `never_started` and nothing",
        {
            "host/test_reconcile": [
                "test_a_reservation_whose_launcher_died_is_free",
                "test_a_supervisor_that_comes_too_late_starts_nothing",
            ],
            "host/test_crash_points": ["test_a_supervisor_killed_at_any_boundary_is_charged_and_settled_once"],
        },
    ),
    Row(
        "A5",
        "killed just after the fork",
        "the upper bound",
        {
            "host/test_crash_points": ["test_a_supervisor_killed_at_any_boundary_is_charged_and_settled_once"],
            "host/test_kills": ["test_whoever_is_killed_at_whatever_state"],
        },
    ),
    Row(
        "A6",
        "the program is missing or cannot be executed, or its folder is gone",
        "measured, `exec_failed`",
        {
            "host/test_supervisor": [
                "test_a_program_that_cannot_be_executed_is_charged_and_named",
                "test_a_folder_that_is_gone_is_exec_failed_too",
            ],
            "steps/test_hard_trials": ["test_a_missing_program_is_charged_and_named"],
        },
    ),
    Row(
        "A7",
        "the trial would see no device, or another one",
        "measured, `device_mismatch`; nothing of the trial runs",
        {
            "host/test_fault_devices": [
                "test_a_trial_that_would_see_other_devices_is_not_started",
                "test_where_nobody_can_say_what_a_trial_sees_it_runs",
            ],
            "gpu/test_devices": ["test_a_trial_sees_the_leased_device_and_gives_its_memory_back"],
        },
    ),
    Row(
        "B1",
        "exit status 0, 1, 11, 139 or 255",
        "measured, each kept apart with its raw wait status",
        {"host/test_supervisor": ["test_every_end_is_told_apart"]},
    ),
    Row(
        "B2",
        "the trial dies of its own signal, perhaps with a core dump",
        "measured, with signal and core flag",
        {
            "host/test_supervisor": ["test_every_end_is_told_apart", "test_a_core_dump_is_flagged"],
            "host/test_supervisor_settlement": ["test_real_time_signals_and_core_dumps_keep_their_raw_status"],
            "gpu/test_devices": [
                "test_a_segmentation_fault_with_memory_held_is_measured_and_released",
                "test_a_kill_in_the_middle_of_a_kernel_is_released",
            ],
        },
    ),
    Row(
        "B3",
        "the leader exits with 0, and a grandchild in a session of its own keeps the device",
        "charged until it is found, killed and the device clean; `leaked_descendants`",
        {
            "host/test_fault_devices": ["test_a_grandchild_that_keeps_the_device_is_charged_until_it_is_gone"],
            "host/test_supervisor": ["test_a_daemon_that_outlives_its_leader_is_found_killed_and_not_plain_ok"],
            "gpu/test_devices": ["test_a_daemon_that_keeps_the_device_is_found_and_ended"],
        },
    ),
    Row(
        "B4",
        "the tree is empty, and the device's memory is not released",
        "charged to the end of the release grace; the device is quarantined, unless a stranger is seen to be using it",
        {
            "host/test_fault_devices": [
                "test_memory_that_stays_beyond_the_grace_is_charged_to_the_grace_and_the_device_quarantined",
                "test_a_device_that_a_stranger_keeps_in_use_is_not_clean_and_not_quarantined",
                "test_a_device_that_is_not_clean_when_an_attempt_is_reconciled_is_quarantined",
            ],
            "steps/test_status": ["test_a_device_in_quarantine_is_passed_over_named_and_readmitted"],
            "host/test_devices": ["test_memory_that_comes_back_late_is_charged_until_it_does"],
        },
    ),
    Row(
        "C1",
        "wall limit, with TERM heeded or ignored",
        "`wall_limit`, written before the first signal; charged with the grace",
        {
            "host/test_supervisor": [
                "test_a_trial_that_ignores_term_is_killed_after_the_grace_and_why_is_written_first",
                "test_a_trial_that_heeds_term_is_not_killed",
                "test_the_whole_tree_ends_at_the_wall_limit",
            ],
            "gpu/test_devices": [
                "test_the_wall_limit_holds_against_a_busy_kernel_and_a_trial_that_ignores_term",
            ],
        },
    ),
    Row(
        "C2",
        "the budget of device-seconds ends",
        "what is running ends within what it reserved; nothing new starts",
        {
            "steps/test_side_by_side": [
                "test_the_end_of_the_budget_lets_what_is_running_end",
                "test_a_budget_of_one_worst_case_lets_one_wait_for_the_other",
            ],
            "steps/test_hard_trials": ["test_budget_exhausted_is_a_clear_refusal"],
        },
    ),
    Row(
        "C3",
        "INT, TERM or HUP to the command or the supervisor; the terminal is closed",
        "`user`",
        {
            "host/test_supervisor": [
                "test_a_signal_to_the_supervisor_stops_the_trial_as_the_user_s_wish",
                "test_a_second_signal_kills_at_once",
            ],
            "steps/test_crashes": ["test_interrupted_once_stops_in_order", "test_terminated_stops_in_order"],
            "steps/test_side_by_side": [
                "test_a_signal_stops_all_in_order_and_is_named",
                "test_a_terminal_shows_all_that_goes_on_and_closing_it_stops_them",
            ],
        },
    ),
    Row(
        "C4",
        "a foreign process comes and goes during the run",
        "its samples are kept; `contaminated` as a label, where exclusivity is required as the outcome, or a stop",
        {
            "host/test_fault_devices": [
                "test_a_stranger_from_the_second_second_to_the_third_is_in_the_samples_and_the_label",
                "test_where_exclusivity_is_required_a_stranger_takes_the_result",
                "test_a_stranger_stops_a_trial_whose_protocol_says_so",
            ],
            "gpu/test_devices": ["test_a_process_that_comes_during_a_run_is_seen"],
        },
    ),
    Row(
        "C5",
        "the ledger cannot be written: ENOSPC, EIO, EROFS, a failing fsync",
        "the trial is stopped, the upper bound; no sequence number comes twice",
        {
            "host/test_ledger": [
                "test_a_failed_call_is_an_error_and_the_next_append_doubles_nothing",
                "test_after_a_failed_sync_the_line_is_written_again_before_the_next",
                "test_a_file_system_without_space_and_a_read_only_one",
            ],
            "host/test_reconcile": ["test_a_ledger_that_cannot_be_written_stops_the_trial_and_leaves_the_attempt_open"],
            "host/test_io_errors": [
                "test_a_disk_that_fails_at_any_operation_stops_the_trial_and_lowers_no_charge",
                "test_a_disk_that_a_trial_filled_stops_it",
            ],
        },
    ),
    Row(
        "C6",
        "the lease file is unlinked or replaced during the run",
        "stopped, `lease_lost`",
        {
            "host/test_supervisor": ["test_a_lease_file_that_goes_stops_the_trial"],
            "host/test_lease": ["test_an_unlinked_or_replaced_file_is_noticed"],
        },
    ),
    Row(
        "D1",
        "killed by its cgroup's memory limit",
        "`oom_cgroup` with the cgroup's count",
        {
            "host/test_fault_devices": [
                "test_a_kill_by_the_cgroups_memory_limit_is_told_from_others",
                "test_a_kill_in_a_cgroup_that_counts_none_is_nobodys",
            ]
        },
    ),
    Row(
        "D2",
        "killed by the host for want of memory, or by nobody knows whom",
        "`oom_host` with the kernel's words, else `sigkill_unattributed`",
        {
            "host/test_fault_devices": ["test_a_kill_by_the_host_needs_the_kernels_word_for_it"],
            "host/test_oom": [
                "test_the_kind_of_kill_is_that_of_the_log",
                "test_what_the_kernel_did_not_say_of_a_process_is_no_evidence",
            ],
        },
    ),
    Row(
        "D3",
        "the command is killed, its supervisor lives",
        "settled as ever, with the note `cli_lost`",
        {
            "host/test_supervisor": [
                "test_the_supervisor_goes_on_when_the_command_that_started_it_is_killed",
            ],
            "host/test_kills": ["test_whoever_is_killed_at_whatever_state"],
            "steps/test_side_by_side": ["test_a_killed_command_leaves_both_to_their_supervisors"],
        },
    ),
    Row(
        "D4",
        "the supervisor is killed, the trial lives",
        "the watchdog ends it at its wall limit; the next command ends it before, charged to the observed end",
        {
            "host/test_watchdog": [
                "test_a_trial_whose_supervisor_was_killed_ends_at_its_wall_limit_and_its_output_is_kept",
                "test_the_next_command_ends_what_a_watchdog_still_keeps_and_charges_to_its_end",
            ],
            "host/test_reconcile": ["test_what_a_killed_supervisor_left_is_ended_and_charged_to_its_end"],
            "host/test_kills": ["test_whoever_is_killed_at_whatever_state"],
            "gpu/test_devices": [
                "test_a_killed_supervisor_leaves_the_lease_with_whoever_holds_the_device",
            ],
        },
    ),
    Row(
        "D5",
        "all of them are killed under one boot",
        "`held_unknown`, then [last heartbeat, reconciliation]",
        {
            "host/test_watchdog": ["test_all_of_them_killed_leaves_bounds_and_one_end"],
            "host/test_reconcile": [
                "test_all_killed_under_one_boot_is_charged_to_the_first_proof_of_death",
                "test_the_bounds_are_the_last_heartbeat_and_now",
            ],
            "host/test_kills": ["test_whoever_is_killed_at_whatever_state"],
        },
    ),
    Row(
        "D6",
        "the supervisor is stopped (SIGSTOP)",
        "its lease is not stolen, it is called silent; the wall limit holds",
        {
            "host/test_reconcile": ["test_a_stopped_supervisor_is_silent_and_its_lease_not_stolen"],
            "host/test_watchdog": ["test_a_stopped_supervisor_does_not_stop_the_clock_of_the_wall_limit"],
            "host/test_kills": ["test_a_stopped_supervisor_keeps_its_lease_and_its_attempt"],
        },
    ),
    Row(
        "D7",
        "a process that cannot be killed",
        "charged for as long as it lives, `overrun_ms` says beyond what; its device stays leased, then quarantined",
        {
            "host/test_fault_devices": [
                "test_a_process_that_no_signal_ends_is_charged_for_as_long_as_it_lives_and_bars_the_device"
            ]
        },
    ),
    Row(
        "D8",
        "a fork storm",
        "`fork_storm`; denied by the cgroup's limit where there is one, ended whole within the grace",
        {
            "host/test_fault_devices": [
                "test_a_fork_storm_is_ended_whole_within_the_grace",
                "test_forks_that_a_cgroup_denied_are_a_storm_too",
            ],
            "host/test_process": ["test_a_fork_storm_is_ended_whole"],
        },
    ),
    Row(
        "D9",
        "the machine sleeps",
        "charged, named by `suspended_ms`; not observed meanwhile",
        {
            "host/test_fault_devices": [
                "test_time_asleep_is_charged_and_named",
                "test_time_asleep_beyond_the_wall_limit_ends_the_trial",
            ]
        },
    ),
    Row(
        "D10",
        "the wall clock is set by an hour",
        "no effect on the charge",
        {"host/test_fault_devices": ["test_a_step_of_the_wall_clock_moves_no_charge_and_is_named"]},
    ),
    Row(
        "D11",
        "a pid is used again",
        "its new owner is never signalled",
        {
            "host/test_reconcile": ["test_a_process_that_got_the_pid_since_is_never_signalled"],
            "host/test_process": [
                "test_a_signal_reaches_exactly_the_process_that_was_seen",
                "test_a_stranger_with_the_pid_of_one_that_was_seen_is_neither_stopped_nor_killed",
                "test_a_pid_that_became_a_strangers_is_not_of_the_tree",
            ],
        },
    ),
    Row(
        "D12",
        "power loss or reset: another boot id",
        "`host_crash`, [lower, the new boot or the end of the reservation] by the wall clock",
        {"host/test_reconcile": ["test_after_a_new_boot_the_wall_clock_bounds_the_end"]},
    ),
    Row(
        "D13",
        "put back from a snapshot, or moved to another host, under one boot id",
        "charged by the boot-time clock, named by `clock_step`",
        {"host/test_fault_devices": ["test_a_step_of_the_wall_clock_moves_no_charge_and_is_named"]},
    ),
    Row(
        "D14",
        "the ledger is cut within its last lines",
        "a torn line is sealed as evidence; a cut of what the head has seen is refused",
        {
            "host/test_ledger": [
                "test_a_ledger_cut_at_any_byte_of_its_last_two_lines",
                "test_a_torn_tail_is_sealed_once_also_without_an_append",
                "test_a_cut_within_the_last_line_is_sealed_and_never_fused",
            ],
            "host/test_reconcile": ["test_a_torn_ledger_tail_is_sealed_by_the_way"],
        },
    ),
    Row(
        "D15",
        "a byte of the ledger flips, an older copy comes back, the ledger is gone",
        "refused; what went backwards is called `ledger_regressed`",
        {
            "host/test_ledger": [
                "test_any_bit_flipped_in_a_ledger_is_found",
                "test_every_earlier_copy_is_refused_while_its_head_is_kept",
                "test_an_older_copy_is_refused_also_with_its_own_lines_sound",
            ],
            "steps/test_refusals": ["test_a_ledger_that_was_removed_is_missed"],
        },
    ),
    Row(
        "E1",
        "the device's memory runs out, the trial causes an Xid",
        "measured; a hint (`device_oom`), the Xid's number, and no excuse",
        {"host/test_fault_devices": ["test_a_device_out_of_memory_and_an_xid_are_hints_and_no_excuse"]},
    ),
    Row(
        "E2",
        "counters of memory errors or of remapped rows move",
        "`device_suspect`, quarantined until readmitted; corrected errors are recorded only",
        {
            "host/test_fault_devices": [
                "test_a_device_whose_memory_failed_is_suspect_and_barred_until_it_is_readmitted",
                "test_errors_that_the_memory_made_good_are_recorded_only",
            ],
            "steps/test_status": ["test_a_device_in_quarantine_is_passed_over_named_and_readmitted"],
        },
    ),
    Row(
        "E3",
        "the driver loses the device",
        "stopped, `device_lost`, quarantined",
        {
            "host/test_fault_devices": ["test_a_device_that_is_lost_stops_the_trial_and_is_barred"],
            "host/test_devices": [
                "test_a_device_that_is_lost_during_the_run_is_said_to_be",
                "test_a_lost_device_is_lost_whichever_call_says_so",
            ],
        },
    ),
    Row(
        "E4",
        "the driver hangs",
        "the run goes on and is `unverifiable`; limits and stops hold; before the start: refused within a bound",
        {
            "host/test_fault_devices": [
                "test_a_run_goes_on_beside_a_driver_that_hangs_and_is_unverifiable",
                "test_a_driver_that_hung_for_a_while_costs_coverage_only",
                "test_wall_limit_and_stop_hold_while_the_driver_hangs",
                "test_a_driver_that_hangs_before_the_start_is_refused_in_time",
                "test_a_driver_that_hangs_when_asked_what_a_trial_sees_delays_it_within_bounds",
                "test_a_driver_that_is_slow_to_open_is_not_charged_and_one_that_hangs_refused",
            ],
            "host/test_devices": ["test_a_list_of_devices_does_not_wait_for_a_driver_that_hangs"],
        },
    ),
    Row(
        "E5",
        "the energy counter falls, or the driver is swapped",
        "energy is null, with the reason",
        {
            "host/test_fault_devices": [
                "test_energy_is_null_where_its_counter_cannot_be_believed",
                "test_a_reading_that_the_driver_does_not_give_is_null_with_its_reason",
            ]
        },
    ),
    Row(
        "E6",
        "clocks are throttled, for reasons known or not",
        "flagged with the share of time of each reason; unknown bits kept",
        {
            "host/test_fault_devices": [
                "test_throttling_is_flagged_with_its_share_of_time_and_unknown_bits_are_kept",
            ],
            "core/test_telemetry_checks": ["test_throttling", "test_unknown_bits_are_kept"],
        },
    ),
    Row(
        "E7",
        "others change how the device is partitioned",
        "`config_changed`",
        {
            "host/test_fault_devices": ["test_a_layout_that_others_changed_takes_the_result_and_bars_nothing"],
            "host/test_devices": ["test_a_layout_that_others_changed_shows"],
        },
    ),
    Row(
        "F1",
        "Slurm does not answer whether it took a job",
        "looked up by the attempt's id, never submitted twice",
        {
            "host/test_slurm": ["test_a_submission_that_is_not_answered_is_looked_up_and_never_repeated"],
            "slurm/test_slurm": [
                "test_f1_a_job_whose_submission_was_not_answered_is_found_and_not_submitted_again",
                "test_f1_a_job_that_nobody_let_go_is_cancelled_and_costs_nothing",
            ],
        },
    ),
    Row(
        "F2",
        "Slurm's accounting is late",
        "the attempt stays open, and is never called failed",
        {
            "host/test_slurm": ["test_late_rows_leave_an_attempt_open"],
            "slurm/test_slurm": [
                "test_f2_an_attempt_whose_accounting_is_late_stays_open",
                "test_f2_a_settled_attempt_waits_for_its_accounting",
            ],
            "slurm/test_run": ["test_accounting_that_is_late_is_added_by_a_later_command"],
        },
    ),
    Row(
        "F3",
        "Slurm starts a job again",
        "one charge for each start",
        {
            "host/test_slurm": ["test_every_start_is_one_charge"],
            "slurm/test_slurm": ["test_f3_every_start_of_a_requeued_job_is_charged_once"],
            "slurm/test_run": ["test_a_job_that_was_put_back_in_the_queue_is_one_attempt_with_two_charges"],
        },
    ),
    Row(
        "F4",
        "a node dies",
        "the larger of two witnesses",
        {
            "host/test_slurm": ["test_the_larger_of_two_witnesses_is_due"],
            "slurm/test_slurm": ["test_f4_a_dead_node_is_charged_by_the_larger_witness"],
            "slurm/test_run": ["test_a_node_that_starts_again_ends_the_attempt_and_the_next_run_goes_on"],
        },
    ),
    Row(
        "F5",
        "a repair of the accounting sets a job to nothing",
        "no charge is lowered; the disagreement is an entry",
        {
            "host/test_slurm": ["test_a_repair_never_lowers_a_charge"],
            "slurm/test_slurm": [
                "test_f5_a_repair_of_a_settled_attempt_lowers_nothing_and_is_written_down",
                "test_f5_a_repair_of_a_lost_attempt_is_no_proof_of_its_end",
            ],
        },
    ),
    Row(
        "F6",
        "Slurm's job ids begin again",
        "matched by attempt, time of submission and row",
        {
            "host/test_slurm": ["test_rows_of_other_jobs_with_the_same_id_are_left_out"],
            "slurm/test_slurm": ["test_f6_a_job_id_that_comes_again_is_not_mistaken"],
        },
    ),
]

HEAD = """\
# What can go wrong with an attempt

Whatever happens to an attempt, its device time is charged and the ledger says what was seen of its end. Each row below
is held by tests: on real processes, with devices that are folders and drivers that fail as told
(`capsule/host/devices/fake.py`), and where it says **GPU** on an NVIDIA device too (`make test-gpu`). The rows of Slurm
(F) run on a real one-node cluster. `tests/host/test_fault_table.py` names every test and writes this page.

| id | what happens | what is charged and recorded | where it is tested |
|---|---|---|---|
"""


@cache
def functions(file: str) -> frozenset[str] | None:
    """The test functions of one file, None where it is not there."""
    path = ROOT / "tests" / f"{file}.py"
    if not path.exists():
        return None
    return frozenset(node.name for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.FunctionDef))


def document() -> str:
    """The table for readers."""
    lines = []
    for row in TABLE:
        places = [
            f"{'**GPU** ' if file.startswith('gpu/') else ''}[{file}](../tests/{file}.py)" for file in sorted(row.tests)
        ]
        lines.append(f"| {row.id} | {row.happens} | {row.recorded} | {', '.join(places)} |\n")
    return HEAD + "".join(lines)


def test_the_table_is_whole() -> None:
    assert [row.id for row in TABLE] == [f"{part}{n}" for part, count in COUNTS.items() for n in range(1, count + 1)]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.id)
def test_every_row_is_held_by_tests_that_exist(row: Row) -> None:
    there = [file for file in row.tests if functions(file) is not None and not file.startswith("gpu/")]
    assert there, "a row needs a test that runs without a GPU"
    for file, names in row.tests.items():
        found = functions(file)
        assert found is not None, file
        assert names, file
        assert set(names) <= found, sorted(set(names) - found)


def test_every_test_of_whole_attempts_on_fake_devices_is_of_a_row() -> None:
    named = {name for row in TABLE for name in row.tests.get("host/test_fault_devices", ())}
    others = {
        "test_a_driver_may_take_half_a_minute_before_the_start_and_no_more",
        "test_of_two_attempts_back_to_back_both_are_exclusive",
        "test_time_in_which_a_device_settles_is_observed_however_long",
        "test_time_in_which_a_driver_says_what_a_trial_sees_is_observed",
        "test_utilization_that_does_not_settle_labels_all_of_the_attempt",
    }
    found = functions("host/test_fault_devices")
    assert found is not None
    assert {name for name in found if name.startswith("test_")} == named | others


def test_readers_have_the_same_table() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document()


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
