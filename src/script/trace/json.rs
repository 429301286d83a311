//! Traces as JSON, for writers in other languages.
#![forbid(unsafe_code)]

use super::{shortened, BadTrace, Directives, InstancePolicy, Trace, TraceBuffer, TraceOp, TracePlace, TraceStep};
use crate::plan::contract::{Contract, Rule};
use crate::plan::Collective;
use crate::script::xml;
use serde::Deserialize;
use std::collections::BTreeMap;

/// The version of the form.
const VERSION: u32 = 1;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TraceFile {
    strata_trace: u32,
    #[serde(default)]
    name: String,
    collective: String,
    ranks: u32,
    chunks: u32,
    #[serde(default)]
    in_place: bool,
    instances: Option<u32>,
    protocol: Option<String>,
    policy: Option<PolicyName>,
    contract: Option<Vec<Rule>>,
    scratch: Option<BTreeMap<String, u32>>,
    steps: Vec<StepFile>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum PolicyName {
    Interleaved,
    Blocked,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum OpName {
    Copy,
    Reduce,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StepFile {
    op: OpName,
    src: (u32, String, u32),
    dst: (u32, String, u32),
    count: Option<u32>,
    channel: Option<i64>,
    send_tb: Option<i64>,
    recv_tb: Option<i64>,
    parallel: Option<(u32, u32)>,
    at: Option<String>,
}

impl Trace {
    /// The trace in a JSON text.
    ///
    /// # Errors
    /// The first thing that is wrong: no JSON, a missing or unknown field, a step that cannot be, or more than the limits allow.
    pub fn from_json(text: &str) -> Result<Trace, BadTrace> {
        if text.len() > xml::MAX_BYTES {
            return Err(BadTrace::new(format!("the text has more than {} bytes", xml::MAX_BYTES)));
        }
        let file: TraceFile =
            serde_json::from_str(text).map_err(|error| BadTrace::new(format!("no trace: {error}")))?;
        if file.strata_trace != VERSION {
            let text = format!("strata_trace: version {} of traces, where {VERSION} is known", file.strata_trace);
            return Err(BadTrace::new(text));
        }
        let collective = match file.collective.as_str() {
            "custom" => Some(Collective::Custom),
            name => Collective::from_name(name),
        };
        let unknown = || BadTrace::new(format!("collective: {:?} is none", shortened(&file.collective)));
        let mut trace = Trace::new(&file.name, collective.ok_or_else(unknown)?, file.ranks, file.chunks)?
            .in_place(file.in_place)
            .instances(file.instances.unwrap_or(1))
            .protocol(file.protocol.as_deref().unwrap_or("Simple"))
            .policy(match file.policy {
                Some(PolicyName::Blocked) => InstancePolicy::Blocked,
                Some(PolicyName::Interleaved) | None => InstancePolicy::Interleaved,
            });
        for (name, chunks) in file.scratch.unwrap_or_default() {
            if chunks >= xml::MAX_CHUNKS || !matches!(TraceBuffer::from(name.as_str()), TraceBuffer::Scratch(_)) {
                return Err(BadTrace::new(format!("scratch: {:?} of {chunks} chunks", shortened(&name))));
            }
            trace = trace.scratch(name, chunks);
        }
        if let Some(rules) = file.contract {
            let contract = Contract::of_rules(&rules, file.ranks as usize, file.chunks);
            trace = trace.contract(contract.map_err(|text| BadTrace::new(format!("contract: {text}")))?);
        }
        for (number, step) in file.steps.into_iter().enumerate() {
            let at = step.at.clone();
            let step = step.read().map_err(|text| {
                let at = at.map_or_else(String::new, |at| format!(" ({})", shortened(&at)));
                BadTrace { step: Some(number), text: format!("step {number}{at}: {text}") }
            })?;
            trace.push(step)?;
        }
        Ok(trace)
    }
}

impl StepFile {
    fn read(self) -> Result<TraceStep, String> {
        let place =
            |(rank, name, index): (u32, String, u32)| TracePlace { rank, buffer: TraceBuffer::from(name), index };
        let number = |value: Option<i64>, name: &str, limit: i64| match value {
            None | Some(-1) => Ok(None),
            Some(value) if (0..limit).contains(&value) => Ok(Some(value as u32)),
            Some(value) => Err(format!("{name} {value} is not in -1 to {}", limit - 1)),
        };
        let channel = number(self.channel, "channel", xml::MAX_CHANNELS.into())?;
        let block = |value, name| number(value, name, xml::MAX_BLOCKS as i64);
        Ok(TraceStep {
            op: match self.op {
                OpName::Copy => TraceOp::Copy,
                OpName::Reduce => TraceOp::Reduce,
            },
            src: place(self.src),
            dst: place(self.dst),
            count: self.count.unwrap_or(1),
            directives: Directives {
                channel: channel.map(|channel| channel as u16),
                send_tb: block(self.send_tb, "send_tb")?,
                recv_tb: block(self.recv_tb, "recv_tb")?,
            },
            parallel: self.parallel,
            at: self.at,
        })
    }
}
