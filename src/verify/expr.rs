//! Symbolic values: which chunk, whose contributions, reduced in which order.
//!
//! Values are interned, so two of them are the same tree exactly when they have the same number, and a value that a
//! thousand ranks hold is stored once.
#![forbid(unsafe_code)]

use super::Check;
use crate::plan::rank_sets::RankSets;
use crate::plan::{Buffer, Collective, Plan};
use rustc_hash::FxHashMap;

/// A value's number.
pub(super) type Expr = u32;

/// Nothing has been stored here.
pub(super) const EMPTY: Expr = u32::MAX;

/// How a value was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Made {
    /// Prologue.
    Start,
    /// Epilogue.
    Finish,
    /// Coded.
    Encode,
    /// Decoded.
    Decode,
    /// `a (op) b`, in this order.
    Reduce,
    /// The same of values that were decoded for it.
    Fold,
    /// `a` and then `b` in the order of a call's members. What tree the provider uses is not known, only that equal
    /// calls use the same one.
    Call {
        /// What the call does.
        collective: Collective,
        /// How many ranks take part.
        members: u32,
        /// Its root.
        root: u32,
    },
}

/// What is to be known of a value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Info {
    /// The chunk's position in the input; for reductions also the result's.
    pub chunk: u32,
    /// Its position in a block.
    pub class: u32,
    /// Its block in the row of blocks; 0 where all are of one size.
    pub block: u32,
    /// The set of ranks whose inputs are in it.
    set: u32,
    /// It passed the prologue.
    pub started: bool,
    /// It passed the epilogue.
    pub finished: bool,
    /// It is coded.
    pub coded: bool,
    /// How often it has been coded.
    pub codings: u8,
    /// It was folded of coded values, and not coded since.
    pub was_folded: bool,
}

/// All values of a run. The first are the inputs of all ranks, in order.
#[derive(Debug)]
pub(super) struct Exprs {
    first_input: Vec<u32>,
    infos: Vec<Info>,
    interned: FxHashMap<(Made, Expr, Expr), Expr>,
    sets: RankSets,
    nranks: usize,
}

/// Why a value cannot be made: which check, and how to say so.
pub(super) type Fault = (Check, String);

impl Exprs {
    /// The inputs of these plans' ranks.
    pub fn new(plans: &[Plan], vectored: bool) -> Exprs {
        let mut exprs = Exprs {
            first_input: Vec::with_capacity(plans.len()),
            infos: Vec::new(),
            interned: FxHashMap::default(),
            sets: RankSets::new(plans.len()),
            nranks: plans.len(),
        };
        for (rank, plan) in plans.iter().enumerate() {
            exprs.first_input.push(exprs.infos.len() as u32);
            let set = exprs.sets.single(rank);
            let chunks = 0..plan.chunks(Buffer::Input) as u32;
            let per_block = plan.chunks_per_block;
            let block = |chunk: u32| match vectored {
                true => plan.shape.row_block(plan.rank, Buffer::Input, (chunk / per_block) as usize) as u32,
                false => 0,
            };
            let input = |chunk| Info {
                chunk,
                class: chunk % per_block,
                block: block(chunk),
                set,
                started: false,
                finished: false,
                coded: false,
                codings: 0,
                was_folded: false,
            };
            exprs.infos.extend(chunks.map(input));
        }
        exprs
    }

    /// A chunk of a rank's input.
    pub fn input(&self, rank: usize, chunk: u32) -> Expr {
        self.first_input[rank] + chunk
    }

    /// What is known of a value.
    pub fn info(&self, expr: Expr) -> Info {
        self.infos[expr as usize]
    }

    /// Whether every rank has contributed, which is to say exactly once.
    pub fn is_full(&self, expr: Expr) -> bool {
        self.sets.len(self.info(expr).set) == self.nranks
    }

    /// The value after the prologue.
    pub fn start(&mut self, expr: Expr) -> Expr {
        let info = Info { started: true, ..self.info(expr) };
        self.intern(Made::Start, expr, EMPTY, info)
    }

    /// The value after the epilogue.
    pub fn finish(&mut self, expr: Expr) -> Expr {
        let info = Info { finished: true, ..self.info(expr) };
        self.intern(Made::Finish, expr, EMPTY, info)
    }

    /// The value in a code.
    pub fn encode(&mut self, expr: Expr) -> Result<Expr, Fault> {
        let info = self.info(expr);
        let wrong = |what: &str| Err((Check::Coding, format!("codes {}, {what}", self.describe(expr))));
        match info.codings {
            _ if info.coded => return wrong("which is coded already"),
            _ if info.finished => return wrong("which is final"),
            0 => {}
            1 if self.is_full(expr) && info.was_folded => {}
            1 => return wrong("which has been coded and is no result"),
            _ => return wrong("which has been coded twice"),
        }
        let info = Info { coded: true, codings: info.codings + 1, was_folded: false, ..info };
        Ok(self.intern(Made::Encode, expr, EMPTY, info))
    }

    /// What a coded value stands for.
    pub fn decode(&mut self, expr: Expr) -> Expr {
        let info = Info { coded: false, ..self.info(expr) };
        self.intern(Made::Decode, expr, EMPTY, info)
    }

    /// What is left of a value that is coded once, and decoded.
    pub fn coded_once(&mut self, expr: Expr) -> Expr {
        self.encode(expr).map_or(EMPTY, |coded| self.decode(coded))
    }

    /// `a` and `b` combined.
    pub fn combine(&mut self, made: Made, a: Expr, b: Expr) -> Result<Expr, Fault> {
        if let Some(&known) = self.interned.get(&(made, a, b)) {
            return Ok(known);
        }
        let (left, right) = (self.info(a), self.info(b));
        if made != Made::Fold && left.codings.max(right.codings) > 0 {
            return Err((Check::Coding, format!("reduces {} with {}", self.describe(a), self.describe(b))));
        }
        if left.finished || right.finished {
            return Err((Check::Epilogue, format!("reduces {}, which is final already", self.describe(a))));
        }
        if left.chunk != right.chunk {
            let text = format!("reduces {} with {}", self.describe(a), self.describe(b));
            return Err((Check::Provenance, text));
        }
        let Some(set) = self.sets.union(left.set, right.set) else {
            let twice = self.sets.common(left.set, right.set);
            return Err((Check::ExactlyOnce, format!("rank {twice} would contribute twice to chunk {}", left.chunk)));
        };
        Ok(self.intern(made, a, b, Info { set, was_folded: made == Made::Fold, ..left }))
    }

    /// A value in words.
    pub fn describe(&self, expr: Expr) -> String {
        if expr == EMPTY {
            return "nothing".into();
        }
        let info = self.info(expr);
        let stage = match (info.finished, info.coded, info.codings) {
            (true, ..) => "final ",
            (_, true, _) => "coded ",
            (.., 0) => "",
            _ => "decoded ",
        };
        let (ranks, chunk) = (self.sets.describe(info.set), info.chunk);
        format!("{stage}chunk {chunk} of {ranks}")
    }

    fn intern(&mut self, made: Made, a: Expr, b: Expr, info: Info) -> Expr {
        let next = self.infos.len() as Expr;
        let expr = *self.interned.entry((made, a, b)).or_insert(next);
        if expr == next {
            self.infos.push(info);
        }
        expr
    }
}
