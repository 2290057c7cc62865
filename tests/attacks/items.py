"""The list of attacks: what is tried, item by item, and what tries it.

Vectors belong to the item that their name begins with; where an item is about something else than a file that is
verified, the tests that try it are named. `python -m tests.attacks` writes the whole table from the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

from tests.attacks.containers import container_vectors
from tests.attacks.documents import document_vectors
from tests.attacks.ledgers import ledger_vectors, outcome_vectors
from tests.attacks.promises import absent_vectors, import_vectors, manifest_vectors, source_vectors
from tests.attacks.records import record_vectors, result_vectors, table_vectors, telemetry_vectors
from tests.attacks.vectors import Vector
from tests.attacks.vouching import signature_vectors


@dataclass(frozen=True)
class Item:
    """One item: what is tried, further items whose vectors try it too, and tests by the file below `tests`."""

    id: str
    words: str
    also: tuple[str, ...] = ()
    tests: dict[str, list[str]] = field(default_factory=dict)


ITEMS = [
    Item(
        "z1",
        "cut near the end, in the middle and at frame edges",
        (),
        {"archive/test_damage": ["test_every_cut_is_called_a_cut"]},
    ),
    Item("z2", "thirteen bytes that make a decoder ask for gigabytes"),
    Item("z3", "garbage or padding before, between and after frames; foreign files"),
    Item("z4", "empty frames, and skippable frames of each of the 16 magics in every place"),
    Item("z5", "windows beyond the limit, content sizes beyond any memory"),
    Item("z6", "no content size, or one that lies"),
    Item("z7", "no checksum, or a wrong one"),
    Item(
        "z8",
        "bombs, declared and undeclared; honest zeros pass",
        (),
        {"archive/test_damage": ["test_hostile_files_stay_within_memory"], "archive/test_vectors": ["test_sound"]},
    ),
    Item(
        "z9",
        "dictionaries, reserved bits, legacy frames, frames swapped, repeated, dropped and of another capsule",
    ),
    Item("t1", "one name twice, with the same bytes and with others; names out of order"),
    Item("t2", "bytes or a second tar after the end, no end, half an end, an end inside"),
    Item(
        "t3",
        "a header with a bad checksum",
        (),
        {"archive/test_damage": ["test_every_changed_byte_of_the_tar_is_found_inside_sound_frames"]},
    ),
    Item("t4", "an extended size over the size of the header"),
    Item("t5", "an extended header before a GNU long name"),
    Item("t6", "extended records: two paths, two headers, global, NUL, lengths that lie, link paths"),
    Item("t7", "sizes in base 256, negative, with spaces, unterminated, over 8 GiB, that lie by a block"),
    Item("t8", "links, devices, folders and every other type flag; a name that ends in a slash"),
    Item("t9", "sparse members of every kind"),
    Item("t10", "other magics, prefixes, modes, owners, times, bytes after the name and in the padding"),
    Item("n1", "paths upwards, absolute, with empty parts, dots and trailing slashes; of members and of sources"),
    Item("n2", "names that mean something on Windows"),
    Item(
        "n3", "control, direction and escape characters", (), {"cli/test_contract": ["test_hostile_text_acts_nowhere"]}
    ),
    Item(
        "n4",
        "names that fold together by case or Unicode form",
        (),
        {"host/test_source": ["test_names_that_fold_together_are_named"]},
    ),
    Item("n5", "names that are not UTF-8"),
    Item(
        "n6",
        "components, paths and levels beyond any limit; a file and a folder of one name",
        (),
        {"host/test_source": ["test_a_long_path_is_an_ordinary_path", "test_a_file_that_folds_with_a_folder_is_named"]},
    ),
    Item(
        "m1",
        "every document in another spelling or with another type",
        (),
        {"core/test_canonical": ["test_every_other_spelling_is_refused"]},
    ),
    Item(
        "m2",
        "lists that lack, repeat, add or misstate members; digests in other forms",
        (),
        {"archive/test_damage": ["test_every_changed_byte_of_the_table_is_found_inside_sound_frames"]},
    ),
    Item(
        "m3",
        "an index or seek table that disagrees, or stands twice",
        (),
        {"archive/test_container": ["test_open_member_never_returns_other_bytes"]},
    ),
    Item(
        "m4",
        "another capsule's manifest, an edited one, two of them; another version of the format",
        (),
        {"archive/test_versions": ["test_another_major_version_is_refused_in_words"]},
    ),
    Item(
        "m5",
        "the same file from a disk, from a pipe and through the index",
        (),
        {
            "archive/test_vectors": ["test_faulty", "test_sound"],
            "archive/test_packing": ["test_verify_reads_a_pipe_and_a_file_that_nobody_may_write"],
        },
    ),
    Item(
        "s1",
        "signature files that are none, or of another purpose",
        (),
        {"steps/test_signing": ["test_what_nobody_should_vouch_for", "test_keys_that_do_not_count"]},
    ),
    Item(
        "s2",
        "tokens that are none, or over something else",
        (),
        {"steps/test_signing": ["test_stamps_that_are_refused"]},
    ),
    Item(
        "w1",
        "a source that grows, shrinks, is replaced or becomes a link while it is read",
        (),
        {
            "host/test_source": [
                "test_a_file_that_changes_while_it_is_read",
                "test_a_file_that_is_replaced_between_look_and_read",
                "test_a_folder_that_becomes_a_link_is_not_entered",
            ],
            "host/test_store": ["test_a_file_that_changed_since_the_scan_is_drift"],
            "archive/test_container": ["test_a_source_of_another_size_is_an_error"],
        },
    ),
    Item(
        "w2",
        "links, pipes, sockets, unreadable, vanishing, sparse, long and unspeakable names; an output inside the tree",
        (),
        {
            "host/test_source": [
                "test_links_are_recorded_by_target_and_never_followed",
                "test_hard_links_and_empty_files_are_ordinary_files",
                "test_pipes_and_sockets_are_refused_by_name",
                "test_a_socket_is_refused_by_name",
                "test_an_unreadable_file_is_named",
                "test_a_folder_that_disappears_mid_walk",
                "test_a_huge_sparse_file_is_refused_before_it_is_read",
                "test_names_are_kept_to_the_byte",
                "test_an_output_inside_the_tree_changes_nothing",
            ]
        },
    ),
    Item(
        "w3",
        "edits that git hides, filters, submodules, nested and unusual repositories",
        (),
        {
            "host/test_source_git": [
                "test_an_edit_that_git_was_told_not_to_see",
                "test_an_edit_of_the_same_size_and_time",
                "test_line_endings_of_work_tree_and_blob",
                "test_a_smudge_filter_hides_nothing",
                "test_a_pointer_of_lfs_that_was_never_fetched",
                "test_a_dirty_submodule_says_so",
                "test_a_nested_repository_is_walked_as_untracked",
                "test_replacement_references_are_not_followed",
                "test_a_shallow_clone_has_what_it_has",
                "test_a_sparse_checkout_is_named",
                "test_a_detached_head_changes_nothing",
                "test_before_the_first_commit_everything_is_untracked_or_staged",
                "test_a_sha256_repository",
            ]
        },
    ),
    Item(
        "w4",
        "stale bytecode, editable installs, startup files; secrets of the environment",
        (),
        {
            "host/test_environment": [
                "test_bytecode_that_runs_unlooked_at_is_named",
                "test_an_editable_distribution_is_named_without_its_place",
                "test_startup_files_are_named_with_digests",
                "test_variables_by_value_by_name_or_not_at_all",
            ]
        },
    ),
    Item(
        "x1",
        "every bit flipped, and bytes changed at random: never intact, and the place is named",
        (),
        {
            "archive/test_damage": [
                "test_every_flipped_bit_is_found",
                "test_every_member_in_a_damaged_frame_is_named_and_no_other",
            ],
            "attacks/test_flips": ["test_no_flipped_bit_of_a_golden_capsule_is_intact"],
        },
    ),
    Item(
        "x2",
        "no space, failing disks, interrupted and short writes, SIGKILL while packing",
        (),
        {
            "archive/test_packing": [
                "test_an_interrupted_pack_leaves_nothing",
                "test_a_full_disk_ends_packing_cleanly",
                "test_a_limit_of_file_size_ends_packing_cleanly",
            ],
            "archive/test_container": [
                "test_nothing_is_left_after_any_error",
                "test_a_full_disk_is_an_error_with_a_hint",
            ],
            "host/test_store": ["test_short_writes_are_continued"],
        },
    ),
    Item(
        "x3",
        "read-only media, a full or closed stdout, pipes, a file that changes under verify",
        (),
        {
            "archive/test_packing": [
                "test_verify_reads_a_pipe_and_a_file_that_nobody_may_write",
                "test_verify_while_another_process_packs_over_the_file",
            ],
            "cli/test_contract": [
                "test_a_full_disk_on_stdout_is_a_machine_error",
                "test_a_closed_pipe_is_quiet",
                "test_closed_streams_are_no_bug",
            ],
        },
    ),
    Item(
        "x4",
        "a decoder that fails",
        (),
        {"archive/test_damage": ["test_a_failing_decoder_is_an_error_and_never_passes"]},
    ),
    Item(
        "e1",
        "extraction through links, upwards, over what is there",
        ("n1",),
        {
            "attacks/test_extraction": [
                "test_nothing_is_written_outside",
                "test_a_capsule_that_is_not_sound_is_not_extracted",
            ],
            "host/test_store": ["test_nothing_is_written_through_a_link"],
        },
    ),
    Item("h1", "member names that the format does not produce", ("n1", "n2", "n3", "n4", "n5", "n6")),
    Item("h2", "duplicates", ("t1",)),
    Item(
        "h3",
        "links, devices, sparse members, overrides; sources that are neither file nor link",
        ("t4", "t5", "t6", "t8", "t9"),
    ),
    Item("h4", "a size or a sum that lies", ("t7", "z6")),
    Item("h5", "an index or seek table that disagrees", ("m3",)),
    Item("h6", "bytes before or after", ("z3", "t2")),
    Item("h7", "skippable frames", ("z4",)),
    Item("h8", "truncated frames", ("z1",)),
    Item("h9", "windows over 8 MiB", ("z5",)),
    Item(
        "h10",
        "bombs: of zeros, of frames, of lines and of values",
        ("z8",),
        {
            "attacks/test_bombs": [
                "test_bombs",
                "test_what_is_kept_is_bounded_in_all",
                "test_long_paths_take_no_memory_and_make_no_long_findings",
                "test_no_finding_is_long",
            ]
        },
    ),
    Item("h11", "JSON that is deep, with keys twice or giant integers", ("m1",)),
    Item(
        "h12",
        "Parquet with counts, sizes or codecs that lie",
        (),
        {
            "archive/test_tables": [
                "test_every_flipped_bit_of_a_footer_is_a_table_or_words",
                "test_footers_that_are_none",
            ]
        },
    ),
    Item("h13", "digests in the wrong form", ("m2",)),
    Item(
        "h14",
        "a flipped bit anywhere",
        ("d1",),
        {"attacks/test_flips": ["test_no_flipped_bit_of_a_golden_capsule_is_intact"]},
    ),
    Item(
        "h15",
        "members, events or rows missing, added or altered",
        (),
        {
            "attacks/test_monotone": [
                "test_no_change_improves_an_answer_for_an_expected_capsule",
                "test_no_change_improves_an_answer_for_an_expected_manifest",
            ]
        },
    ),
    Item(
        "h16",
        "results edited to a better verdict",
        (),
        {
            "steps/test_forger": [
                "test_an_identity_from_elsewhere_stops_a_forger",
                "test_a_capsule_signature_stops_a_forger",
            ]
        },
    ),
    Item("h17", "a manifest from another run", ("m4",)),
    Item(
        "d1",
        "damage in and around frames",
        (),
        {"archive/test_damage": ["test_damage_to_a_frame_header_costs_only_that_frame"]},
    ),
    Item("l1", "more members or bytes than a reader allows", (), {"archive/test_vectors": ["test_faulty"]}),
]


@cache
def vectors() -> tuple[Vector, ...]:
    """Return all vectors."""
    families = (
        container_vectors, document_vectors, ledger_vectors, outcome_vectors, record_vectors, table_vectors,
        result_vectors, telemetry_vectors, manifest_vectors, source_vectors, import_vectors, absent_vectors,
        signature_vectors,
    )  # fmt: skip
    return tuple(chain.from_iterable(family() for family in families))


def vectors_of(item: Item) -> list[Vector]:
    """Return the vectors that try an item."""
    return [vector for vector in vectors() if vector.name.partition("-")[0] in (item.id, *item.also)]


def table() -> Iterator[str]:
    """Yield the lines of the table: every item, then its vectors with clause, check and exit code, and its tests."""
    for item in ITEMS:
        found = vectors_of(item)
        yield f"{item.id.upper()}  {item.words}: {len(found)} vectors"
        for vector in found:
            if vector.name.startswith(item.id + "-"):
                checks = " or ".join(vector.checks) or "refused or incomplete"
                yield f"    {vector.name}  {vector.clause}, {checks}, exit {vector.exit_code}"
        if item.also:
            yield f"    vectors of {', '.join(item.also)}"
        for file, names in item.tests.items():
            yield from (f"    {file}: {name}" for name in names)
