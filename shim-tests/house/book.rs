//! The documentation as readers find it: the links of every Markdown file lead somewhere, and the book builds with all
//! pages in it. Links out of the repository are not followed.

use pulldown_cmark::{Event, Parser, Tag, TagEnd};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// All files below `folder` with this extension, by their paths from it. Hidden folders and build output are left out.
fn files(folder: &Path, extension: &str) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(inner) = folders.pop() {
        for entry in fs::read_dir(&inner).expect("a folder of the tree can be read") {
            let path = entry.expect("an entry can be read").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("").to_string();
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|found| found == extension) {
                found.insert(path.strip_prefix(folder).expect("below the folder").to_path_buf());
            }
        }
    }
    found
}

/// What a document links to, and what can be linked to in it.
#[derive(Debug, Default, PartialEq)]
struct Document {
    links: Vec<String>,
    anchors: BTreeSet<String>,
    /// Links written as HTML, which this does not read.
    raw: Vec<String>,
}

impl Document {
    fn read(text: &str) -> Document {
        let mut document = Document::default();
        let mut heading: Option<String> = None;
        for event in Parser::new(text) {
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => document.add_anchor(&heading.take().unwrap_or_default()),
                Event::Text(part) | Event::Code(part) => {
                    heading.iter_mut().for_each(|heading| heading.push_str(&part));
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    document.links.push(dest_url.to_string());
                }
                Event::Html(html) | Event::InlineHtml(html) if html.contains("href=") || html.contains("src=") => {
                    document.raw.push(html.to_string());
                }
                _ => {}
            }
        }
        document
    }

    /// A heading's anchor: its words in lower case, joined by hyphens; the second of a name gets `-1`.
    fn add_anchor(&mut self, heading: &str) {
        let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let name: String = kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect();
        let numbered = (1..).map(|number| format!("{name}-{number}"));
        let free = std::iter::once(name.clone()).chain(numbered).find(|anchor| !self.anchors.contains(anchor));
        self.anchors.extend(free);
    }
}

/// The path without `.` and `..`, unless it leads out of the folder that it begins in.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut parts = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => parts.push(name),
            Component::CurDir => {}
            Component::ParentDir if parts.pop() => {}
            _ => return None,
        }
    }
    Some(parts)
}

fn is_outside(link: &str) -> bool {
    ["http://", "https://", "mailto:", "data:"].iter().any(|scheme| link.starts_with(scheme))
}

/// Splits a link of a file into the file it leads to, from the root, and the anchor there.
fn target(file: &Path, link: &str) -> Option<(PathBuf, String)> {
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let whole = match path {
        "" => file.to_path_buf(),
        path => normal(&file.parent()?.join(path))?,
    };
    Some((whole, anchor.to_string()))
}

/// What is wrong with the links of these documents, of which `exists` says what else there is.
fn wrong_links(documents: &BTreeMap<PathBuf, Document>, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut complaints = Vec::new();
    for (file, document) in documents {
        let mut complain = |link: &str, why: &str| complaints.push(format!("{}: {link}: {why}", file.display()));
        document.raw.iter().for_each(|html| complain(html.trim(), "a link in HTML; write it in Markdown"));
        for link in document.links.iter().filter(|link| !is_outside(link)) {
            match target(file, link) {
                None => complain(link, "leads out of the repository"),
                Some((path, _)) if !documents.contains_key(&path) && !exists(&path) => {
                    complain(link, "there is no such file");
                }
                Some((path, anchor)) if !anchor.is_empty() => match documents.get(&path) {
                    Some(other) if other.anchors.contains(&anchor) => {}
                    _ => complain(link, "there is no such heading"),
                },
                Some(_) => {}
            }
        }
    }
    complaints
}

/// All Markdown files of the repository.
fn documents() -> BTreeMap<PathBuf, Document> {
    let read = |path: PathBuf| {
        let text = fs::read_to_string(root().join(&path)).expect("a text file");
        (path, Document::read(&text))
    };
    files(&root(), "md").into_iter().map(read).collect()
}

fn none(rule: &str, complaints: Vec<String>) {
    assert!(complaints.is_empty(), "{rule}:\n  {}", complaints.join("\n  "));
}

#[test]
fn links_in_all_markdown_files_lead_somewhere() {
    let documents = documents();
    let links: usize = documents.values().map(|document| document.links.len()).sum();
    println!("{links} links in {} files", documents.len());
    assert!(links > 100 && documents.len() > 30);
    let exists = |path: &Path| !path.starts_with("target") && root().join(path).exists();
    none("links in documents lead to files and headings of the repository", wrong_links(&documents, exists));
}

#[test]
fn every_page_of_docs_is_in_the_summary() {
    let documents = documents();
    let summary = Path::new("docs/SUMMARY.md");
    let listed: BTreeSet<PathBuf> =
        documents[summary].links.iter().filter_map(|link| target(summary, link).map(|(path, _)| path)).collect();
    let pages = documents.keys().filter(|page| page.starts_with("docs") && *page != summary);
    let missing = pages.filter(|page| !listed.contains(*page)).map(|page| page.display().to_string()).collect();
    none("pages of docs stand in docs/SUMMARY.md", missing);
}

/// The values of these attributes, with `&amp;` read as it is meant.
fn attributes(html: &str, names: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for name in names {
        for rest in html.split(&format!(" {name}=\"")).skip(1) {
            found.push(rest.split('"').next().unwrap_or("").replace("&amp;", "&"));
        }
    }
    found
}

#[test]
fn the_book_builds_and_its_links_lead_somewhere() {
    let built = Command::new(root().join("scripts/book")).output().expect("scripts/book runs");
    if built.status.code() == Some(3) {
        println!("SKIPPED: mdBook is not installed; scripts/fetch-mdbook installs it");
        return;
    }
    let said = String::from_utf8_lossy(&built.stdout) + String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{said}");
    assert!(!said.contains("WARN") && !said.contains("ERROR"), "{said}");
    let book = root().join("target/book/html");
    let read = |path: PathBuf| {
        let html = fs::read_to_string(book.join(&path)).expect("a page of the book");
        let anchors = attributes(&html, &["id"]).into_iter().collect();
        (path, Document { links: attributes(&html, &["href", "src"]), anchors, raw: Vec::new() })
    };
    let pages: BTreeMap<PathBuf, Document> = files(&book, "html").into_iter().map(read).collect();
    println!("{} pages", pages.len());
    assert!(pages.len() > 30 && pages.contains_key(Path::new("index.html")));
    none("links in the book lead somewhere", wrong_links(&pages, |path| book.join(path).exists()));
}

#[test]
fn the_check_of_links_finds_what_it_looks_for() {
    let text =
        "# One *way*, `x`\n## Same\n## Same\n[a](b.md#one) [c][d] ![e](f.svg)\n```sh\n# not a heading\n[g](h)\n```\n\
                <a href=\"i\">i</a>\n\n[d]: https://example.org\n";
    let document = Document::read(text);
    assert_eq!(document.links, ["b.md#one", "https://example.org", "f.svg"]);
    assert_eq!(document.anchors, ["one-way-x", "same", "same-1"].map(String::from).into());
    assert_eq!(document.raw.len(), 1);
    let page = |text: &str| Document::read(text);
    let documents = BTreeMap::from([
        (PathBuf::from("a.md"), page("# Top\n[1](b/c.md#there) [2](#top) [3](b) [4](https://example.org)")),
        (PathBuf::from("b/c.md"), page("# There\n[1](../a.md#nowhere) [2](../../out.md) [3](d.md) [4](#here)")),
    ]);
    let wrong = wrong_links(&documents, |path| path == Path::new("b"));
    let expected = [
        "b/c.md: ../a.md#nowhere: there is no such heading",
        "b/c.md: ../../out.md: leads out of the repository",
        "b/c.md: d.md: there is no such file",
        "b/c.md: #here: there is no such heading",
    ];
    assert_eq!(wrong, expected);
}
