//! The words of Lark grammars.

use std::str::Chars;

/// A word of a grammar.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Name(String),
    /// A string, and whether letters may have any case.
    Text(String, bool),
    /// A regular expression and its flags.
    Regex(String, String),
    Number(u32),
    /// `%ignore` and the like.
    Directive(String),
    Sign(&'static str),
    LineEnd,
}

const SIGNS: &[&str] = &[
    "->", "..", ":", ".", "|", "(", ")", "[", "]", "*", "+", "?", "~", ",",
];

/// The words of a grammar, each with its line.
pub(super) fn words(source: &str) -> Result<Vec<(Token, usize)>, String> {
    let (mut tokens, mut rest, mut line) = (Vec::new(), source, 1);
    while let Some(c) = rest.chars().next() {
        let wrong = |what: &str| format!("line {line}: {what}");
        let len_while = |test: &dyn Fn(char) -> bool| {
            rest.char_indices()
                .find(|&(i, c)| i > 0 && !test(c))
                .map_or(rest.len(), |(i, _)| i)
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        let (token, len) = match c {
            '\n' => (Some(Token::LineEnd), 1),
            c if c.is_whitespace() => (None, c.len_utf8()),
            '#' => (None, len_while(&|c| c != '\n')),
            '/' if rest.starts_with("//") => (None, len_while(&|c| c != '\n')),
            '/' => {
                let mut is_escaped = false;
                let end = rest[1..].char_indices().find(|&(_, c)| {
                    let is_end = c == '/' && !is_escaped;
                    is_escaped = c == '\\' && !is_escaped;
                    is_end || c == '\n'
                });
                let (end, _) = end
                    .filter(|&(_, c)| c == '/')
                    .ok_or_else(|| wrong("a regular expression has no end"))?;
                let flags: String = rest[end + 2..]
                    .chars()
                    .take_while(char::is_ascii_lowercase)
                    .collect();
                let len = end + 2 + flags.len();
                (Some(Token::Regex(rest[1..=end].to_owned(), flags)), len)
            }
            '"' => {
                let (text, len) = text(rest).map_err(|what| wrong(&what))?;
                let is_caseless = rest[len..].starts_with('i');
                let len = len + usize::from(is_caseless);
                (Some(Token::Text(text, is_caseless)), len)
            }
            '%' => {
                let len = len_while(&|c| c.is_ascii_alphabetic());
                (Some(Token::Directive(rest[1..len].to_owned())), len)
            }
            c if c.is_ascii_digit() => {
                let len = len_while(&|c| c.is_ascii_digit());
                let number = rest[..len]
                    .parse()
                    .map_err(|_| wrong("a number is too large"))?;
                (Some(Token::Number(number)), len)
            }
            // Marks of rules, which say how trees look.
            '!' => (None, 1),
            '?' if rest[1..].starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
                && matches!(tokens.last(), None | Some((Token::LineEnd, _))) =>
            {
                (None, 1)
            }
            c if c.is_ascii_alphabetic() || c == '_' => {
                let len = len_while(&is_name);
                // An arrow begins with a dash.
                let len = rest[..len].trim_end_matches('-').len();
                (Some(Token::Name(rest[..len].to_owned())), len)
            }
            _ => {
                let sign = SIGNS.iter().find(|sign| rest.starts_with(**sign));
                let sign = sign.ok_or_else(|| wrong(&format!("{c:?} is not supported")))?;
                (Some(Token::Sign(sign)), sign.len())
            }
        };
        tokens.extend(token.map(|token| (token, line)));
        line += rest[..len].matches('\n').count();
        rest = &rest[len..];
    }
    Ok(tokens)
}

/// The string at the start of `source`, and its length there.
fn text(source: &str) -> Result<(String, usize), String> {
    let (mut text, mut chars) = (String::new(), source.chars());
    chars.next();
    loop {
        match chars.next() {
            Some('"') => return Ok((text, source.len() - chars.as_str().len())),
            Some('\\') => text.push(escape(&mut chars)?),
            None | Some('\n') => return Err("a string has no end".into()),
            Some(c) => text.push(c),
        }
    }
}

/// The character of an escape, behind its backslash.
fn escape(chars: &mut Chars<'_>) -> Result<char, String> {
    let hex = |chars: &mut Chars<'_>, n| {
        let digits: String = chars.take(n).collect();
        let number = u32::from_str_radix(&digits, 16).ok();
        number
            .and_then(char::from_u32)
            .ok_or_else(|| format!("{digits:?} is the number of no character"))
    };
    match chars.next() {
        Some('n') => Ok('\n'),
        Some('r') => Ok('\r'),
        Some('t') => Ok('\t'),
        Some('f') => Ok('\u{c}'),
        Some('b') => Ok('\u{8}'),
        Some(c @ ('"' | '\\' | '/' | '\'')) => Ok(c),
        Some('x') => hex(chars, 2),
        Some('u') => hex(chars, 4),
        other => Err(format!("the escape {other:?} of a string is not supported")),
    }
}
