//! How much of the last cache a processor has to itself, where all that share it are at work.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

/// What is taken for a share where the system does not tell.
const UNKNOWN: usize = 256 << 10;
/// No processor has more. A virtual machine may be told of all its host has, as if it were alone there.
const MOST: usize = 24 << 20;

/// Bytes of the last cache for each processor that shares it; asked for once.
pub fn share() -> usize {
    static SHARE: OnceLock<usize> = OnceLock::new();
    *SHARE.get_or_init(|| share_at(Path::new("/sys/devices/system/cpu/cpu0/cache")).unwrap_or(UNKNOWN))
}

fn share_at(folder: &Path) -> Option<usize> {
    let level = |cache: &Path| fs::read_to_string(cache.join("level")).ok()?.trim().parse::<u32>().ok();
    let caches = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let last = caches.filter_map(|cache| Some((level(&cache)?, cache))).max()?.1;
    let size = fs::read_to_string(last.join("size")).ok()?;
    let kilobytes: usize = size.trim().strip_suffix('K')?.parse().ok()?;
    // Words of hexadecimal digits with commas between them.
    let map = fs::read_to_string(last.join("shared_cpu_map")).ok()?;
    let sharing: u32 = map.chars().filter_map(|digit| digit.to_digit(16)).map(u32::count_ones).sum();
    Some(kilobytes.checked_mul(1024)? / sharing.max(1) as usize).filter(|&share| share > 0).map(|share| share.min(MOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(folder: &Path, index: usize, [level, size, map]: [&str; 3]) {
        let cache = folder.join(format!("index{index}"));
        fs::create_dir_all(&cache).unwrap();
        for (name, value) in [("level", level), ("size", size), ("shared_cpu_map", map)] {
            fs::write(cache.join(name), format!("{value}\n")).unwrap();
        }
    }

    #[test]
    fn the_last_cache_is_shared_by_the_processors_of_its_map() {
        let folder = std::env::temp_dir().join(format!("strata-cache-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("uevent"), "").unwrap();
        assert_eq!(share_at(&folder), None);
        cache(&folder, 0, ["1", "32K", "1"]);
        cache(&folder, 3, ["3", "32768K", "00ff0000,000000ff"]);
        cache(&folder, 2, ["2", "512K", "1"]);
        assert_eq!(share_at(&folder), Some(2 << 20));
        cache(&folder, 3, ["3", "491520K", "3"]);
        assert_eq!(share_at(&folder), Some(MOST));
        cache(&folder, 3, ["3", "", "3"]);
        assert_eq!(share_at(&folder), None);
        fs::remove_dir_all(&folder).unwrap();
    }
}
