//! The workloads that come with the command.
#![forbid(unsafe_code)]

use super::file::{Workload, MOST_BYTES};
use super::formula::unknown;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use strata::error::{Error, Result};

/// Names and texts.
pub const EMBEDDED: [(&str, &str); 17] = [
    ("zero3", include_str!("../../../../workloads/zero3.toml")),
    ("fsdp", include_str!("../../../../workloads/fsdp.toml")),
    ("ddp-resnet50", include_str!("../../../../workloads/ddp-resnet50.toml")),
    ("ddp-bert", include_str!("../../../../workloads/ddp-bert.toml")),
    ("axonn", include_str!("../../../../workloads/axonn.toml")),
    ("ted", include_str!("../../../../workloads/ted.toml")),
    ("ccube-resnet50", include_str!("../../../../workloads/ccube-resnet50.toml")),
    ("ccube-vgg16", include_str!("../../../../workloads/ccube-vgg16.toml")),
    ("ccube-zfnet", include_str!("../../../../workloads/ccube-zfnet.toml")),
    ("dlrm", include_str!("../../../../workloads/dlrm.toml")),
    ("ds-moe", include_str!("../../../../workloads/ds-moe.toml")),
    ("dlrm-mcr", include_str!("../../../../workloads/dlrm-mcr.toml")),
    ("adapcc-vgg16", include_str!("../../../../workloads/adapcc-vgg16.toml")),
    ("adapcc-gpt2", include_str!("../../../../workloads/adapcc-gpt2.toml")),
    ("adapcc-vit", include_str!("../../../../workloads/adapcc-vit.toml")),
    ("adapcc-moe", include_str!("../../../../workloads/adapcc-moe.toml")),
    ("megatron-6.7b", include_str!("../../../../workloads/megatron-6.7b.toml")),
];

/// The workload with this name, or in the file at this path.
pub fn find(name: &str) -> Result<Workload> {
    let text = match EMBEDDED.iter().find(|(known, _)| *known == name) {
        Some((_, text)) => text.to_string(),
        None if name.contains(['/', '.']) || Path::new(name).exists() => {
            read(name).map_err(|error| Error::InvalidArgument(format!("cannot read the workload {name}: {error}")))?
        }
        None => {
            let known = EMBEDDED.map(|(name, _)| name);
            return Err(Error::InvalidArgument(format!(
                "--workload {} (or the path of a file; `list` shows them)",
                unknown(name, &known)
            )));
        }
    };
    Workload::parse(&text).map_err(|error| within(name, &error))
}

/// A file's text, as far as one may be long: a device may have no end.
fn read(name: &str) -> std::io::Result<String> {
    let mut text = String::new();
    File::open(name)?.take(MOST_BYTES as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

/// The error, with the name of the workload before its line.
pub fn within(name: &str, error: &Error) -> Error {
    Error::InvalidArgument(format!("workload {name}: {}", error.text()))
}

/// What there is, one in a line.
pub fn list() -> Result<String> {
    let line = |(name, text): (&str, &str)| Ok(format!("{name:15} {}\n", Workload::parse(text)?.title));
    EMBEDDED.into_iter().map(line).collect()
}
