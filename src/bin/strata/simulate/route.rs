//! The route that Strata takes.
#![forbid(unsafe_code)]

use std::sync::Arc;
use strata::algo::Choice;
use strata::error::Result;
use strata::plan::Collective;
use strata::sim::price::{block_bytes, price, Carrier, Detail, How, Route};
use strata::sim::Machine;
use strata::topo::Grid;

/// The best of Strata's own routes; None where there are no two levels.
pub fn own(
    machine: &Arc<Machine>,
    grid: &Arc<Grid>,
    collective: Collective,
    message_bytes: usize,
) -> Result<Option<How>> {
    if grid.nnodes() < 2 {
        return Ok(None);
    }
    let block = block_bytes(collective, grid.nranks(), message_bytes);
    let mut best: Option<(f64, How)> = None;
    for rail in ["log", "ring"] {
        for parts in [1, 2, 4, 8, 16] {
            for window in [2, 4] {
                if (parts == 1 || parts < window) && window > 2 {
                    continue;
                }
                let choice = Choice::leveled("two_level", "direct", rail);
                let route = Route { choice, segment_bytes: block.div_ceil(parts), window, carrier: Carrier::Own };
                let how = How::Strata(route);
                let ns = price(machine, grid, collective, message_bytes, &how, Detail::default())?.ns;
                if best.as_ref().is_none_or(|(least, _)| ns < *least) {
                    best = Some((ns, how));
                }
            }
        }
    }
    Ok(best.map(|(_, how)| how))
}

/// The best route, the vendor's library being one.
pub fn chosen(
    machine: &Arc<Machine>,
    grid: &Arc<Grid>,
    collective: Collective,
    message_bytes: usize,
) -> Result<Option<How>> {
    let own = own(machine, grid, collective, message_bytes)?;
    let vendor = machine.vendor_ns(collective, grid.nranks(), message_bytes);
    Ok(match (own, vendor) {
        (Some(how), Some(vendor_ns)) => {
            let ns = price(machine, grid, collective, message_bytes, &how, Detail::default())?.ns;
            Some(if vendor_ns <= ns { How::Vendor } else { how })
        }
        (own, vendor) => own.or(vendor.map(|_| How::Vendor)),
    })
}
