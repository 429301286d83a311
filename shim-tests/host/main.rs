//! Strata alone, with data on the host (`SOFT_DEVICE`: on a device, as [`world`] says): what collectives and communicators
//! do, in threads and in processes, also when ranks fail or the system refuses.

#[path = "../again/mod.rs"]
mod again;
// What is not used here other test programs use.
#[allow(dead_code)]
#[path = "../built/mod.rs"]
mod built;
#[path = "../cases/mod.rs"]
mod cases;
#[path = "../grouped/mod.rs"]
mod grouped;
#[allow(dead_code)]
#[path = "../soft/mod.rs"]
mod soft;
#[allow(dead_code)]
#[path = "../vendor/mod.rs"]
mod vendor;
#[allow(dead_code)]
#[path = "../world/mod.rs"]
mod world;

mod codes;
mod collectives;
mod communicators;
mod failures;
mod fronts;
mod groups;
mod large;
mod late;
mod listening;
mod lossless;
mod messages;
mod programs_by_seed;
mod script_files;
mod surroundings;
mod survivors;
mod vectored;
