//! Which host this is.
//!
//! Two ranks are on the same node exactly when their [`host_id`]s are equal. That is NCCL's rule: `NCCL_HOSTID`, else
//! host name and boot id.
#![forbid(unsafe_code)]

use std::path::Path;

/// The identity of this host, equal on all ranks of a node.
pub fn host_id() -> String {
    host_id_at(Path::new("/proc"), std::env::var("NCCL_HOSTID").ok().as_deref())
}

/// As [`host_id`], with the root of `/proc` and the value of `NCCL_HOSTID` given.
pub fn host_id_at(proc_root: &Path, given: Option<&str>) -> String {
    if let Some(given) = given.filter(|given| !given.is_empty()) {
        return given.to_string();
    }
    let read = |name: &str| {
        let text = std::fs::read_to_string(proc_root.join("sys/kernel").join(name)).unwrap_or_default();
        text.trim().to_string()
    };
    format!("{}-{}", read("hostname"), read("random/boot_id"))
}

/// The model of this host's processors, as the kernel names it (`AMD EPYC 7A53 64-Core Processor`).
pub fn processor_model() -> String {
    model_in(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

fn model_in(cpuinfo: &str) -> String {
    let value = |key: &str| {
        let lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        lines.filter(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_string()).next()
    };
    // Arm's kernels tell numbers alone.
    value("model name").or_else(|| value("CPU part").map(|part| format!("CPU part {part}"))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_identity_is_the_given_one_else_name_and_boot_id() {
        let root = std::env::temp_dir().join(format!("strata-host-{}", std::process::id()));
        std::fs::create_dir_all(root.join("sys/kernel/random")).unwrap();
        std::fs::write(root.join("sys/kernel/hostname"), "node7\n").unwrap();
        std::fs::write(root.join("sys/kernel/random/boot_id"), "1-2-3\n").unwrap();
        assert_eq!(host_id_at(&root, None), "node7-1-2-3");
        assert_eq!(host_id_at(&root, Some("")), "node7-1-2-3");
        assert_eq!(host_id_at(&root, Some("rack")), "rack");
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn the_processor_is_called_what_the_kernel_calls_it() {
        let cpuinfo = "processor\t: 0\nmodel\t\t: 1\nmodel name\t: Some CPU: 9\nprocessor\t: 1\nmodel name\t: Other\n";
        assert_eq!(model_in(cpuinfo), "Some CPU: 9");
        assert_eq!(model_in("CPU part\t: 0xd0c\n"), "CPU part 0xd0c");
        assert_eq!(model_in(""), "");
    }
}
