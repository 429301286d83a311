//! Machines on record: each a text that says what its sysfs holds, laid out as files and links for those who read it.
//!
//! `path = text` is a file, `path -> path` a link, both relative to the root; `address NAME ADDRESS/BITS` is an address
//! of an interface; `#` begins a comment.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The machines, by name.
pub const MACHINES: [(&str, &str); 6] = [
    ("frontier", include_str!("frontier.txt")),
    ("perlmutter", include_str!("perlmutter.txt")),
    ("dgx-h100", include_str!("dgx-h100.txt")),
    ("server", include_str!("server.txt")),
    ("one-nic", include_str!("one-nic.txt")),
    ("bond", include_str!("bond.txt")),
];

/// A machine laid out in a folder of its own, which goes with it.
pub struct Layout {
    /// The folder, which stands for `/sys`.
    pub root: PathBuf,
}

impl Drop for Layout {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().expect("below the root")
}

/// Lays out a machine.
pub fn lay_out(name: &str) -> Layout {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let root = std::env::temp_dir().join(format!("strata-machine-{}-{number}", std::process::id()));
    let (_, text) = MACHINES.iter().find(|(known, _)| *known == name).expect("a machine on record");
    let mut addresses = String::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(address) = line.strip_prefix("address ") {
            addresses += &format!("{address}\n");
        } else if let Some((path, target)) = line.split_once(" -> ") {
            let path = root.join(path);
            std::fs::create_dir_all(parent(&path)).expect("a folder");
            std::os::unix::fs::symlink(root.join(target), &path).expect("a link");
        } else {
            let (path, content) = line.split_once(" = ").expect("a file with its content");
            let path = root.join(path);
            std::fs::create_dir_all(parent(&path)).expect("a folder");
            std::fs::write(&path, format!("{content}\n")).expect("a file");
        }
    }
    std::fs::write(root.join("addresses"), addresses).expect("the addresses");
    Layout { root }
}
