//! Text to tokens.

/// A token and the line that it is on, from 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    pub text: String,
    pub line: usize,
}

fn is_of_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_$%.".contains(c)
}

/// The tokens of a text: words (names, directives, opcodes, numbers with their sign), quoted texts, and single signs.
pub fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut found = Vec::new();
    for (index, whole) in text.lines().enumerate() {
        let line = index + 1;
        let code = whole.split_once("//").map_or(whole, |(code, _)| code);
        if code.contains("/*") || code.contains("*/") {
            return Err(format!("line {line}: comments over lines are not known"));
        }
        let mut rest = code.trim_start();
        while let Some(first) = rest.chars().next() {
            let length = match first {
                '"' => rest[1..].find('"').map(|end| end + 2).ok_or(format!("line {line}: a text without an end"))?,
                '-' => 1 + rest[1..].find(|c| !is_of_word(c)).unwrap_or(rest.len() - 1),
                c if is_of_word(c) => rest.find(|c| !is_of_word(c)).unwrap_or(rest.len()),
                c if "@!,;:()[]{}<>+".contains(c) => 1,
                c => return Err(format!("line {line}: the sign {c:?} is not known")),
            };
            found.push(Token { text: rest[..length].to_string(), line });
            rest = rest[length..].trim_start();
        }
    }
    Ok(found)
}
