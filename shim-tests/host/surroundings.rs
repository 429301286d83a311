//! Programs in surroundings that a library does not expect: namespaces, limits, descriptors, rights, signal handlers. Each
//! is a C program that checks itself; what this machine does not allow it says as `SKIPPED: why`.

use crate::built::{library_dir, run, run_with};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

#[test]
fn ranks_in_pid_namespaces_of_their_own_are_two_processes() {
    print!("{}", run("namespaces.c", &[]));
}

#[test]
fn ranks_whose_shared_memory_is_too_small_use_tcp() {
    print!("{}", run_with("namespaces.c", &[], &["small"]));
}

#[test]
fn what_a_limit_does_not_allow_is_an_error_and_ends_nothing() {
    print!("{}", run("limits.c", &[]));
}

#[test]
fn an_abort_in_a_signal_handler_ends_the_call_that_it_interrupted() {
    run_with("interrupted.c", &[], &["abort"]);
}

#[test]
fn an_abort_in_a_signal_handler_can_come_at_every_moment_of_a_call() {
    for seed in ["1", "2", "3"] {
        print!("{}", run_with("interrupted_anywhere.c", &[], &["300", seed]));
    }
}

#[test]
fn the_null_stream_is_refused_in_a_callback_and_what_is_queued_behind_it_runs() {
    run_with("interrupted.c", &[], &["callback"]);
}

#[test]
fn two_ranks_that_send_to_each_other_and_do_not_receive_are_told_so() {
    run_with("interrupted.c", &[], &["sends"]);
}

#[test]
fn closed_standard_descriptors_stay_closed_and_their_later_owners_get_no_line() {
    run_with("rights.c", &[], &["standard"]);
}

#[test]
fn ranks_that_give_up_their_privileges_go_on() {
    print!("{}", run_with("rights.c", &[], &["privileges"]));
}

#[test]
fn a_part_that_may_not_be_read_any_more_is_copied_by_its_owner() {
    print!("{}", run_with("rights.c", &[], &["boards"]));
}

#[test]
fn a_program_with_more_rights_than_its_starter_writes_no_file_that_it_is_told() {
    // With more rights the linker does not look where the environment says, and others may not look into our directory.
    let folder = std::env::temp_dir().join(format!("strata-rights-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
    std::fs::copy(library_dir().join("libnccl.so.2"), folder.join("libnccl.so.2")).unwrap();
    let path = format!("-Wl,-rpath,{}", folder.display());
    let said = run_with("rights.c", &[&path], &["elevated"]);
    std::fs::remove_dir_all(&folder).unwrap();
    print!("{said}");
}
