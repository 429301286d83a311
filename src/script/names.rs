//! What the names of scripts mean to one communicator: the files that rank 0 read when it was made, the same on all ranks.
//!
//! `script:f` is the first file f.xml of those that rank 0's settings name, `script:f~2` the next one of that name that holds
//! something else. What a process has loaded for other communicators plays no part.
#![forbid(unsafe_code)]

use super::store::{plain, LoadedScript};
use crate::algorithms::{levels, Choice, SCRIPT};
use crate::error::{counted, Error, Result};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Gives names to files, in the order in which they are told.
#[derive(Debug, Default)]
pub struct ScriptNames {
    /// By the names of files: the digests, none of what could not be read, and where the first was.
    known: FxHashMap<String, (PathBuf, Vec<Option<u64>>)>,
}

impl ScriptNames {
    /// The name of a file whose text has this digest: a file of the same name and text has the same, one of another text a number.
    pub fn name(&mut self, path: &Path, digest: Option<u64>) -> String {
        let stem = plain(&path.file_stem().unwrap_or_default().to_string_lossy());
        let (_, digests) = self.known.entry(stem.clone()).or_insert_with(|| (path.to_path_buf(), Vec::new()));
        let same = digests.iter().position(|known| digest.is_some() && *known == digest);
        let number = same.unwrap_or_else(|| {
            digests.push(digest);
            digests.len() - 1
        });
        match number {
            0 => stem,
            number => format!("{stem}~{}", number + 1),
        }
    }

    /// Where the file is that a numbered name has its name from.
    pub(super) fn first_of(&self, name: &str) -> Option<&Path> {
        let (stem, _) = name.split_once('~')?;
        self.known.get(stem).map(|(path, _)| path.as_path())
    }
}

/// A file of rank 0's that the communicator cannot use.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct UnusedFile {
    /// Its name, without `script:`.
    pub name: String,
    /// The file.
    pub path: PathBuf,
    /// Its place in `MSCCL_XML_FILES`.
    pub number: Option<usize>,
    /// `is refused: ...`, `is for all_reduce on 8 ranks`.
    pub why: String,
}

/// The scripts that all ranks of a communicator have, and what their names mean there.
#[derive(Debug, Default)]
pub struct SharedScripts {
    /// In the order in which calls ask them.
    pub scripts: Vec<&'static LoadedScript>,
    /// By the numbers of the files that `MSCCL_XML_FILES` names; none where a file cannot be used.
    pub(super) numbered: Vec<Option<&'static LoadedScript>>,
    pub(super) unused: Vec<UnusedFile>,
}

impl SharedScripts {
    /// These scripts, by their own names.
    pub fn of(scripts: Vec<&'static LoadedScript>) -> SharedScripts {
        SharedScripts { scripts, ..SharedScripts::default() }
    }

    /// The script of a name, which may have the digest.
    pub fn by_name(&self, name: &str) -> Option<&'static LoadedScript> {
        self.scripts.iter().copied().find(|script| script.name == name || script.unique_name == name)
    }

    /// An algorithm's text with the names of scripts as algorithms have them.
    ///
    /// # Errors
    /// `InvalidUsage` where there is no such script here.
    pub fn exact(&self, algorithm: &str) -> Result<String> {
        let (mut text, mut rest) = (String::new(), algorithm);
        while let Some(at) = rest.find(SCRIPT) {
            text += &rest[..at];
            rest = &rest[at..];
            let (name, after) = rest.split_at(rest.find([',', ')']).unwrap_or(rest.len()));
            let script = self.by_name(name);
            text += &script
                .ok_or_else(|| Error::InvalidUsage(format!("algorithm {algorithm}: {}", self.missing(name))))?
                .unique_name;
            rest = after;
        }
        Ok(text + rest)
    }

    /// The algorithm of a text.
    ///
    /// # Errors
    /// Those of [`exact`](Self::exact) and of a text that is no algorithm's.
    pub fn choice(&self, algorithm: &str) -> Result<Choice> {
        self.exact(algorithm)?.parse()
    }

    /// Whether the ranks have a script of this name; what it is for.
    fn missing(&self, name: &str) -> String {
        let stem = &name[SCRIPT.len()..];
        if let Some(UnusedFile { path, why, .. }) = self.unused.iter().find(|unused| unused.name == stem) {
            return format!("{name} is {}, which {why}", path.display());
        }
        let distance = |script: &&LoadedScript| strsim::damerau_levenshtein(&script.name, name);
        let near = self.scripts.iter().copied().min_by_key(distance);
        let near = near.filter(|script| distance(script) <= stem.len().div_ceil(3));
        let near = near.map_or(String::new(), |script| format!("did you mean {}? ", script.name));
        format!("{near}there is no such script; {}", levels::loaded_text(&self.unique_names()))
    }

    /// The names of the algorithms.
    pub fn unique_names(&self) -> Vec<&'static str> {
        let mut names: Vec<&'static str> = Vec::new();
        for script in &self.scripts {
            // One that lies in two places is there twice.
            if !names.contains(&script.unique_name.as_str()) {
                names.push(&script.unique_name);
            }
        }
        names
    }

    /// The script of a number: the file's place in `MSCCL_XML_FILES` of rank 0.
    ///
    /// # Errors
    /// `InvalidArgument` where there is no such file; `InvalidUsage` where it cannot be used, and why.
    pub fn numbered(&self, number: i32) -> Result<&'static LoadedScript> {
        let found = usize::try_from(number).ok().filter(|&number| number < self.numbered.len());
        let number = found.ok_or_else(|| {
            let files = counted(self.numbered.len(), "file");
            Error::InvalidArgument(format!(
                "there is no program {number}: rank 0's MSCCL_XML_FILES names {files}, counted from 0"
            ))
        })?;
        self.numbered[number].ok_or_else(|| {
            let unused = self.unused.iter().find(|unused| unused.number == Some(number));
            let why = unused.map_or("cannot be used".to_string(), |UnusedFile { path, why, .. }| {
                format!("{} {why}", path.display())
            });
            Error::InvalidUsage(format!("program {number} of MSCCL_XML_FILES: {why}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::script::store::{self, Steps};
    use crate::script::{convert, write};
    use crate::topo::{Grid, Rank};
    use std::sync::Arc;

    /// A library's all-gather of two ranks as a file.
    fn text(algorithm: &str) -> String {
        let shape = crate::plan::Shape::new(crate::plan::Collective::AllGather, Arc::new(Grid::flat(2)));
        let choice = algorithm.parse().unwrap();
        let plan = |rank| crate::algorithms::build(&choice, &shape, Rank(rank)).unwrap();
        write(&convert(&[plan(0), plan(1)]).unwrap())
    }

    #[test]
    fn equal_names_are_numbered_by_their_order_and_equal_files_have_one_name() {
        let mut names = ScriptNames::default();
        let mut name = |path: &str, digest| names.name(Path::new(path), digest);
        assert_eq!(name("one/f.xml", Some(1)), "f");
        assert_eq!(name("two/f.xml", Some(2)), "f~2");
        assert_eq!(name("three/f.xml", Some(1)), "f");
        assert_eq!(name("one/a b.xml", None), "a_b");
        assert_eq!(name("one/a_b.xml", Some(1)), "a_b~2");
        assert_eq!(name("two/a~b.xml", None), "a_b~3");
        assert_eq!(names.first_of("f~2"), Some(Path::new("one/f.xml")));
        assert_eq!(names.first_of("f"), None);
    }

    #[test]
    fn one_name_is_another_program_in_another_communicator_and_none_where_it_is_not() {
        let load = |text: &str| store::load("same", text, None, Steps::Merged).unwrap();
        let [ring, direct] = ["ring", "direct"].map(|name| load(&text(name)));
        assert_eq!((ring.name.as_str(), direct.name.as_str()), ("script:same", "script:same"));
        let [here, there] = [ring, direct].map(|script| SharedScripts::of(vec![script]));
        for around in ["script:same", "two_level(script:same,log)", "two_level(script:same,script:same)"] {
            let [one, other] = [&here, &there].map(|scripts| scripts.choice(around).unwrap());
            assert!(one != other && one.exact() != other.exact(), "{around}");
            assert_eq!((one.to_string(), other.to_string()), (around.to_string(), around.to_string()));
            assert_eq!(one.exact().parse::<Choice>().unwrap(), one);
        }
        // What the process has loaded otherwise is not there, by whatever name.
        for name in ["script:same", &ring.unique_name] {
            let nowhere = SharedScripts::default().choice(name);
            assert!(matches!(nowhere, Err(Error::InvalidUsage(_))), "{nowhere:?}");
        }
        assert_eq!(here.choice(&ring.unique_name).unwrap(), here.choice("script:same").unwrap());
        assert!("script:same".parse::<Choice>().is_err());
    }

    #[test]
    fn a_file_that_cannot_be_used_is_told_by_its_name_and_by_its_number() {
        let unused = |name: &str, number, why: &str| UnusedFile {
            name: name.to_string(),
            path: PathBuf::from(format!("/files/{name}.xml")),
            number,
            why: why.to_string(),
        };
        let unused =
            vec![unused("bad", None, "is refused: line 3"), unused("f", Some(0), "is for all_reduce on 4 ranks")];
        let scripts = SharedScripts { numbered: vec![None], unused, ..SharedScripts::default() };
        let said = |error: Error| error.text().to_string();
        let bad = said(scripts.choice("script:bad").unwrap_err());
        assert_eq!(bad, "algorithm script:bad: script:bad is /files/bad.xml, which is refused: line 3");
        let error = scripts.numbered(0).unwrap_err();
        assert!(matches!(error, Error::InvalidUsage(_)));
        assert_eq!(said(error), "program 0 of MSCCL_XML_FILES: /files/f.xml is for all_reduce on 4 ranks");
        for number in [-1, 1] {
            assert!(matches!(scripts.numbered(number), Err(Error::InvalidArgument(_))));
        }
    }
}
