//! How all ranks of a communicator come to have rank 0's scripts.
//!
//! Rank 0 reads and proves the files that its settings name, and tells of each its path, a digest of its text, and what came of the
//! proof. A rank that has loaded a script of that digest, or reads such a file at that path (file systems are shared on most
//! clusters), needs nothing else. Texts travel only where a rank says that it lacks one, and only those. What rank 0 has proved the
//! others do not prove again: the plans follow from the text and from what the proof has decided ([`Recipe`]).
#![forbid(unsafe_code)]

use super::names::{ScriptNames, SharedScripts, UnusedFile};
use super::proof::Recipe;
use super::store::{self, contract_beside, digest_of, files, known, read, refused_contract, LoadedScript, Steps, Told};
use super::xml;
use crate::algorithms::levels::facts_text;
use crate::config::Config;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The most bytes of scripts that rank 0 offers.
const MAX_OFFERED: usize = 128 << 20;
/// The most bytes of what rank 0 tells of a file that cannot be used.
const MAX_TOLD: usize = 1024;

/// What rank 0 tells of a script.
#[derive(Debug, Serialize, Deserialize)]
struct Offered {
    name: String,
    path: PathBuf,
    number: Option<usize>,
    digest: u64,
    contract: Option<String>,
    root: u32,
    /// For each form in which a call can hold its buffers.
    recipes: Vec<Recipe>,
}

/// What rank 0 offers.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Offer {
    /// How many files `MSCCL_XML_FILES` names; those have numbers from 0.
    named: usize,
    scripts: Vec<Offered>,
    unused: Vec<UnusedFile>,
}

/// What a rank has of an offered script.
enum Have {
    Loaded(&'static LoadedScript),
    Text(String),
    Nothing,
}

/// What comes of a file on rank 0.
enum Found {
    Offered(Offered),
    /// For so many ranks nobody asks for it: what it is for.
    Unwanted(String),
    Refused(String),
}

/// What rank 0 tells of the scripts that its settings name, and what is to be told of those that cannot be used. `is_wanted` says
/// of a script's name (without `script:`) and number of ranks whether anybody asks for it.
pub fn offer(config: &Config, is_wanted: &dyn Fn(&str, usize) -> bool) -> (String, Vec<String>) {
    let (files, mut complaints) = files(config);
    let named = files.iter().filter(|(_, number)| number.is_some()).count();
    let mut offer = Offer { named, ..Offer::default() };
    let (mut bytes, mut names) = (0, ScriptNames::default());
    for (path, number) in files {
        let text = text_of(&path);
        let name = names.name(&path, text.as_ref().ok().map(|text| text.digest));
        let found = match text {
            Ok(text) => offered_of((&path, number), (&name, text), is_wanted, &mut bytes),
            Err(why) => Found::Refused(why),
        };
        let why =
            match found {
                Found::Offered(offered) => {
                    let first = names.first_of(&name);
                    complaints.extend(first.map(|first| {
                        format!("{} is script:{name}: {} comes before it", path.display(), first.display())
                    }));
                    offer.scripts.push(offered);
                    continue;
                }
                Found::Unwanted(facts) => format!("is for {facts}"),
                Found::Refused(why) => {
                    complaints.push(format!("{} is not used: {why}", path.display()));
                    format!("is refused: {}", why.chars().take(MAX_TOLD).collect::<String>())
                }
            };
        offer.unused.push(UnusedFile { name, path, number, why });
    }
    let is_nothing = named == 0 && offer.scripts.is_empty() && offer.unused.is_empty();
    let text = if is_nothing { String::new() } else { serde_json::to_string(&offer).unwrap_or_default() };
    complaints.dedup();
    (text, complaints)
}

/// What a file says.
struct FileText {
    text: String,
    contract: Option<String>,
    digest: u64,
}

fn text_of(path: &Path) -> std::result::Result<FileText, String> {
    let text = read(path).map_err(|error| error.to_string())?;
    let contract = contract_beside(path).map_err(|error| refused_contract(path)(error).text().to_string())?;
    let digest = digest_of(&text, contract.as_deref(), Steps::Merged);
    Ok(FileText { text, contract, digest })
}

/// What comes of the text of a file that has this name.
fn offered_of(
    (path, number): (&Path, Option<usize>),
    (name, file): (&str, FileText),
    is_wanted: &dyn Fn(&str, usize) -> bool,
    bytes: &mut usize,
) -> Found {
    let FileText { text, contract, digest } = file;
    // One that is loaded has been read before.
    let (collective, nranks) = match known(name, digest) {
        Some(script) => (script.script.collective, script.script.nranks()),
        None => match xml::read(&text) {
            Ok(script) => (script.collective, script.nranks()),
            Err(error) => return Found::Refused(error.to_string()),
        },
    };
    if !is_wanted(name, nranks) {
        return Found::Unwanted(facts_text(collective, nranks));
    }
    if *bytes + text.len() > MAX_OFFERED {
        let why = format!("the scripts before it have {bytes} bytes, and more than {MAX_OFFERED} are not offered");
        return Found::Refused(why);
    }
    let script = match store::load_told(name, &text, contract.as_deref(), (Steps::Merged, None)) {
        Ok(script) => script,
        Err(error) => return Found::Refused(error.text().to_string()),
    };
    *bytes += text.len();
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let (name, root, recipes) = (name.to_string(), script.root.0, script.recipes());
    Found::Offered(Offered { name, path, number, digest, contract, root, recipes })
}

/// The scripts that rank 0 has offered, in its order, on all ranks. `all_gather` exchanges between all ranks; every rank calls this
/// with the same offer, rank 0 as the first. An empty offer exchanges nothing.
///
/// # Errors
/// `Remote` where the offer cannot be read or rank 0 can no longer read a file that a rank lacks; the exchange's own errors.
pub fn share(
    offer: &str,
    is_first: bool,
    all_gather: &mut dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>,
) -> Result<SharedScripts> {
    if offer.is_empty() {
        return Ok(SharedScripts::default());
    }
    let Offer { named, scripts: offered, unused } = serde_json::from_str(offer)
        .map_err(|error| Error::Remote(format!("rank 0 offered scripts that cannot be read: {error}")))?;
    let have = match offered.is_empty() {
        true => Vec::new(),
        false => exchanged(&offered, is_first, all_gather)?,
    };
    let numbered = vec![None; named.min(store::MAX_FILES)];
    let mut shared = SharedScripts { scripts: Vec::new(), numbered, unused };
    for (offered, have) in offered.iter().zip(have) {
        let script = loaded(offered, have)?;
        shared.scripts.push(script);
        if let Some(place) = offered.number.and_then(|number| shared.numbered.get_mut(number)) {
            *place = Some(script);
        }
    }
    Ok(shared)
}

/// What this rank has of each script, once rank 0 has sent the texts that some rank lacks.
fn exchanged(
    offered: &[Offered],
    is_first: bool,
    all_gather: &mut dyn FnMut(Vec<u8>) -> Result<Vec<Vec<u8>>>,
) -> Result<Vec<Have>> {
    let mut have: Vec<Have> = offered.iter().map(have).collect();
    let lacks = have.iter().map(|have| u8::from(matches!(have, Have::Nothing))).collect();
    let said = all_gather(lacks)?;
    let lacked = |at: &usize| said.iter().any(|rank| rank.get(*at) == Some(&1));
    let lacked: Vec<usize> = (0..offered.len()).filter(lacked).collect();
    if !lacked.is_empty() {
        let mine = if is_first { texts(offered, &lacked) } else { String::new() };
        let told = all_gather(mine.into_bytes())?;
        let wrong = || Error::Remote("rank 0 sent scripts that cannot be read".to_string());
        let told: std::result::Result<Vec<String>, String> =
            serde_json::from_slice(told.first().ok_or_else(wrong)?).map_err(|_| wrong())?;
        let texts = told.map_err(Error::Remote)?;
        for (at, text) in lacked.into_iter().zip(texts) {
            if matches!(have[at], Have::Nothing) {
                have[at] = Have::Text(text);
            }
        }
    }
    Ok(have)
}

fn have(offered: &Offered) -> Have {
    if let Some(script) = known(&offered.name, offered.digest) {
        return Have::Loaded(script);
    }
    // Whatever else lies at that path on this machine has another digest.
    match read(&offered.path) {
        Ok(text) if digest_of(&text, offered.contract.as_deref(), Steps::Merged) == offered.digest => Have::Text(text),
        _ => Have::Nothing,
    }
}

/// What rank 0 sends of the texts that some rank lacks: all of them, or why not.
fn texts(offered: &[Offered], lacked: &[usize]) -> String {
    let text = |&at: &usize| {
        let Offered { path, digest, contract, .. } = &offered[at];
        let text = read(path).map_err(|error| format!("rank 0 can no longer read {}: {error}", path.display()))?;
        match digest_of(&text, contract.as_deref(), Steps::Merged) == *digest {
            true => Ok(text),
            false => Err(format!("{} has changed on rank 0 since it was read", path.display())),
        }
    };
    let texts: std::result::Result<Vec<String>, String> = lacked.iter().map(text).collect();
    serde_json::to_string(&texts).unwrap_or_default()
}

fn loaded(offered: &Offered, have: Have) -> Result<&'static LoadedScript> {
    let Offered { name, contract, root, recipes, .. } = offered;
    match have {
        Have::Loaded(script) => Ok(script),
        Have::Text(text) => {
            let told = Told { root: *root, recipes };
            store::load_told(name, &text, contract.as_deref(), (Steps::Merged, Some(&told)))
        }
        Have::Nothing => Err(Error::Remote(format!("rank 0 did not send the text of script {name}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::script::{convert, write};
    use crate::topo::{Grid, Rank};
    use std::sync::Arc;

    /// A folder with a file for two ranks, and the settings that name it.
    fn folder(name: &str) -> (PathBuf, Config) {
        let folder = std::env::temp_dir().join(format!("strata-share-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let shape = crate::plan::Shape::new(crate::plan::Collective::AllGather, Arc::new(Grid::flat(2)));
        let choice = "ring".parse().unwrap();
        let plan = |rank| crate::algorithms::build(&choice, &shape, Rank(rank)).unwrap();
        std::fs::write(folder.join(format!("{name}.xml")), write(&convert(&[plan(0), plan(1)]).unwrap())).unwrap();
        let program_dir = folder.to_string_lossy().into_owned();
        (folder, Config { program_dir, ..Config::default() })
    }

    /// Shares an offer as the second of two ranks; what each exchange had of this rank.
    fn shared(offer: &str) -> (Result<SharedScripts>, Vec<Vec<u8>>) {
        let mut said: Vec<Vec<u8>> = Vec::new();
        let scripts = share(offer, false, &mut |mine| {
            said.push(mine.clone());
            let zero = match said.len() {
                1 => vec![0; mine.len()],
                _ => {
                    let offered = serde_json::from_str::<Offer>(offer).unwrap().scripts;
                    let lacked: Vec<usize> = (0..offered.len()).filter(|&at| said[0][at] == 1).collect();
                    let here: Vec<Offered> = offered
                        .into_iter()
                        .map(|one| Offered { path: one.path.to_string_lossy().replace("/elsewhere", "").into(), ..one })
                        .collect();
                    texts(&here, &lacked).into_bytes()
                }
            };
            Ok(vec![zero, mine])
        });
        (scripts, said)
    }

    #[test]
    fn a_rank_that_reads_the_file_itself_needs_no_text_and_proves_nothing_again() {
        let (folder, config) = folder("read");
        let (offer, complaints) = offer(&config, &|_, nranks| nranks == 2);
        assert_eq!(complaints, [""; 0]);
        assert!(offer.len() < 1000, "{offer}");
        // This process has loaded it; under another name it has not.
        let (scripts, said) = shared(&offer);
        assert_eq!((scripts.unwrap().scripts[0].name.as_str(), said), ("script:read", vec![vec![0]]));
        let renamed = offer.replace("\"name\":\"read\"", "\"name\":\"read_again\"");
        let (scripts, said) = shared(&renamed);
        let again = scripts.unwrap().scripts[0];
        assert_eq!((again.name.as_str(), said), ("script:read_again", vec![vec![0]]));
        let first = share(&offer, false, &mut |mine| Ok(vec![mine.clone(), mine])).unwrap().scripts[0];
        assert_eq!(serde_json::to_string(&again.recipes()).unwrap(), serde_json::to_string(&first.recipes()).unwrap());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_rank_without_the_file_says_so_and_gets_the_text() {
        let (folder, config) = folder("lacks");
        let (offer, _) = offer(&config, &|_, nranks| nranks == 2);
        let place = folder.canonicalize().unwrap().to_string_lossy().into_owned();
        let moved = offer.replace(&place, &format!("{place}/elsewhere"));
        let away = moved.replace("\"name\":\"lacks\"", "\"name\":\"lacks_it\"");
        let (scripts, said) = shared(&away);
        assert_eq!(scripts.unwrap().scripts[0].name, "script:lacks_it");
        assert_eq!(said, [vec![1], Vec::new()]);
        // Another file at that place is not the one that rank 0 has proved, and rank 0 says that its own has changed.
        let file = folder.join("lacks.xml");
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, text.replace("<algo ", "<algo  ")).unwrap();
        let renamed = offer.replace("\"name\":\"lacks\"", "\"name\":\"lacks_now\"");
        let (scripts, said) = shared(&renamed);
        let error = scripts.unwrap_err();
        assert!(
            matches!(&error, Error::Remote(text) if text.ends_with("has changed on rank 0 since it was read")),
            "{error:?}"
        );
        assert_eq!(said[0], [1]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_offer_that_cannot_be_read_and_one_of_nothing_are_told_apart() {
        let mut never = |_: Vec<u8>| -> Result<Vec<Vec<u8>>> { panic!("nothing is exchanged") };
        assert!(share("", false, &mut never).unwrap().scripts.is_empty());
        assert!(matches!(share("[1]", false, &mut never), Err(Error::Remote(_))));
        let (folder, config) = folder("answer");
        let (offer, _) = offer(&config, &|_, _| true);
        let renamed = offer.replace("\"name\":\"answer\"", "\"name\":\"no_answer\"").replace("answer.xml", "gone.xml");
        for answer in [&b"no text"[..], b"{\"Ok\":[]}"] {
            let answered = share(&renamed, false, &mut |_| Ok(vec![answer.to_vec(), vec![1]]));
            assert!(matches!(answered, Err(Error::Remote(_))), "{answered:?}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
