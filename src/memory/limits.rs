//! How much memory can still be had: of the machine, and of the control groups this process belongs to.
//!
//! The kernel grants memory that it does not have, and ends a process when the memory is touched. Whoever takes much of it
//! asks here first. The answer is an estimate: others take memory meanwhile.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// The files and fields of one version of control groups.
struct Version {
    /// Where its groups are.
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// What of a group's usage is given back on demand.
    reclaimable: [&'static str; 2],
}

const SECOND: Version = Version {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: ["inactive_file", "active_file"],
};
const FIRST: Version = Version {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: ["total_inactive_file", "total_active_file"],
};

/// An error that names the sizes if `bytes` are more than can be had now. Where nothing tells, everything can.
pub fn check(bytes: u64) -> Result<()> {
    check_at(Path::new("/"), bytes)
}

fn check_at(root: &Path, bytes: u64) -> Result<()> {
    let memory = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let field = |name| field(&memory, name).map(|kilobytes| kilobytes.saturating_mul(1024));
    let swap = field("SwapFree:").unwrap_or(0);
    if let Some(free) = field("MemAvailable:").map(|free| free.saturating_add(swap)).filter(|&free| free < bytes) {
        return Err(Error::System(format!("{bytes} bytes of memory are wanted and {free} available on this machine")));
    }
    for (group, limit, left) in groups(root) {
        // Its memory can be swapped out as far as the machine has room for it.
        if left.saturating_add(swap) < bytes {
            let group = group.display();
            return Err(Error::System(format!(
                "{bytes} bytes of memory are wanted and {left} left to this process: its control group {group} is limited to {limit}"
            )));
        }
    }
    Ok(())
}

/// The number that follows a name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name).filter(|rest| rest.starts_with(' ')))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The control groups of this process that have a limit, the limit and what is left of it.
fn groups(root: &Path) -> Vec<(PathBuf, u64, u64)> {
    let mut found = Vec::new();
    for line in fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default().lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let version = match controllers {
            "" => &SECOND,
            list if list.split(',').any(|controller| controller == "memory") => &FIRST,
            _ => continue,
        };
        let mount = root.join(version.mount);
        // A limit counts for all groups below; a container may see only the mount, as the root of its own group.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let folder = mount.join(group);
            found.extend(left(&folder, version).map(|(limit, left)| (Path::new("/").join(group), limit, left)));
        }
    }
    found
}

fn left(folder: &Path, version: &Version) -> Option<(u64, u64)> {
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    // No limit is "max", or a number beyond all memory.
    let limit = number(version.limit)?;
    let statistics = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let reclaimable: u64 = version.reclaimable.iter().filter_map(|name| field(&statistics, name)).sum();
    let used = number(version.usage)?.saturating_sub(reclaimable);
    Some((limit, limit.saturating_sub(used)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIGABYTE: u64 = 1 << 30;

    /// What the system tells, as files below a folder.
    fn told(name: &str, files: &[(&str, &str)], bytes: u64) -> Result<()> {
        let root = std::env::temp_dir().join(format!("strata-limits-{}-{name}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let outcome = check_at(&root, bytes);
        let _ = fs::remove_dir_all(&root);
        outcome
    }

    fn refused(name: &str, files: &[(&str, &str)], bytes: u64, words: &[&str]) {
        let error = told(name, files, bytes).expect_err("more than there is");
        assert!(matches!(error, Error::System(_)) && words.iter().all(|word| error.text().contains(word)), "{error}");
    }

    #[test]
    fn what_the_machine_does_not_have_is_refused_with_both_sizes() {
        let memory = [("proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable:    1048576 kB\nSwapFree:  1048576 kB\n")];
        assert_eq!(told("machine", &memory, 2 * GIGABYTE), Ok(()));
        refused("machine", &memory, 2 * GIGABYTE + 1, &["2147483649", "2147483648"]);
        assert_eq!(told("silent", &[], u64::MAX), Ok(()), "nothing tells");
    }

    #[test]
    fn a_limit_of_any_group_above_counts_less_what_is_used_and_not_given_back() {
        let second = [
            ("proc/self/cgroup", "0::/job/task\n"),
            ("sys/fs/cgroup/job/task/memory.max", "max\n"),
            ("sys/fs/cgroup/job/task/memory.current", "5\n"),
            ("sys/fs/cgroup/job/memory.max", "1000\n"),
            ("sys/fs/cgroup/job/memory.current", "700\n"),
            ("sys/fs/cgroup/job/memory.stat", "anon 400\ninactive_file 100\nactive_file 200\n"),
        ];
        assert_eq!(told("second", &second, 600), Ok(()));
        refused("second", &second, 601, &["601", "600", "1000", "/job"]);
    }

    #[test]
    fn the_first_version_s_limit_counts_too_also_in_a_container_that_sees_only_its_own_group() {
        let first = [
            ("proc/self/cgroup", "5:cpu:/x\n4:hugetlb,memory:/docker/abc\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "700\n"),
            ("sys/fs/cgroup/memory/memory.stat", "active_file 1\ntotal_active_file 50\n"),
        ];
        assert_eq!(told("first", &first, 350), Ok(()));
        refused("first", &first, 351, &["351", "350", "1000"]);
    }
}
