//! Tokens of a tag, its numbers and its strings.

use super::PREFIX;
use std::str::Chars;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TokenKind {
    Name,
    Number,
    Text,
    Operator,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Token<'a> {
    pub(super) kind: TokenKind,
    pub(super) text: &'a str,
    /// Line ends before it.
    pub(super) lines: usize,
}

pub(super) fn tokens(source: &str) -> Result<Vec<Token<'_>>, String> {
    let mut tokens = Vec::new();
    let mut rest = source;
    loop {
        let text = rest.trim_start();
        let lines = rest[..rest.len() - text.len()].matches('\n').count();
        let Some(first) = text.chars().next() else {
            return Ok(tokens);
        };
        let is_name = |c: char| c.is_alphanumeric() || c == '_';
        let (kind, len) = match first {
            '"' | '\'' => {
                let mut escaped = false;
                let end = text.char_indices().skip(1).find(|&(_, c)| {
                    let ends = c == first && !escaped;
                    escaped = c == '\\' && !escaped;
                    ends
                });
                let (end, _) = end.ok_or("a string has no end")?;
                (TokenKind::Text, end + 1)
            }
            c if c.is_ascii_digit() => (TokenKind::Number, number_len(text)),
            c if is_name(c) => {
                let end = text.find(|c| !is_name(c)).unwrap_or(text.len());
                if text.starts_with(PREFIX) {
                    return Err(format!("{:?} is no name for a variable", &text[..end]));
                }
                (TokenKind::Name, end)
            }
            c => {
                let double = ["**", "//", "==", "!=", "<=", ">="];
                let is_double = double.iter().any(|op| text.starts_with(op));
                if !"+-*/%~<>=.,:|()[]{}!".contains(c) {
                    return Err(format!("unexpected character {c:?}"));
                }
                (TokenKind::Operator, if is_double { 2 } else { 1 })
            }
        };
        let (text, behind) = text.split_at(len);
        tokens.push(Token { kind, text, lines });
        rest = behind;
    }
}

fn number_len(text: &str) -> usize {
    let bytes = text.as_bytes();
    let run = |from: usize, ok: fn(u8) -> bool| {
        let n = bytes[from..].iter().take_while(|&&b| ok(b) || b == b'_');
        from + n.count()
    };
    if bytes[0] == b'0' && matches!(bytes.get(1), Some(b'x' | b'X' | b'o' | b'O' | b'b' | b'B')) {
        return run(2, |b| b.is_ascii_hexdigit());
    }
    let digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut end = run(0, |b| b.is_ascii_digit());
    if bytes.get(end) == Some(&b'.') && digit(end + 1) {
        end = run(end + 1, |b| b.is_ascii_digit());
    }
    if matches!(bytes.get(end), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
        if digit(end + 1 + sign) {
            end = run(end + 1 + sign, |b| b.is_ascii_digit());
        }
    }
    end
}

/// A number as the engine writes it.
pub(super) fn number(text: &str) -> String {
    let text = text.replace('_', "");
    let radix = match text.get(..2).map(str::to_ascii_lowercase).as_deref() {
        Some("0x") => 16,
        Some("0o") => 8,
        Some("0b") => 2,
        _ => return text,
    };
    u128::from_str_radix(&text[2..], radix).map_or(text, |n| n.to_string())
}

/// A string as the engine writes it; escapes are Python's, which leaves alone those it does not
/// know.
pub(super) fn string(token: &str) -> Result<String, String> {
    let mut out = String::from("\"");
    let mut chars = token[1..token.len() - 1].chars();
    while let Some(c) = chars.next() {
        let before;
        let c = match c {
            '"' => {
                out.push_str("\\\"");
                continue;
            }
            '\\' => {
                before = chars.clone();
                chars.next().ok_or("a string ends in a backslash")?
            }
            c => {
                out.push(c);
                continue;
            }
        };
        let decoded = match c {
            '\n' => {
                // Continues the line; the engine still counts it.
                out.push_str("\" ~ \n\"");
                continue;
            }
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'a' => '\u{7}',
            'b' => '\u{8}',
            'f' => '\u{c}',
            'v' => '\u{b}',
            'x' => code(&mut chars, 16, 2)?,
            'u' => code(&mut chars, 16, 4)?,
            'U' => code(&mut chars, 16, 8)?,
            '0'..='7' => {
                chars = before;
                code(&mut chars, 8, 3)?
            }
            '\'' => '\'',
            '"' | '\\' => {
                out.extend(['\\', c]);
                continue;
            }
            other => {
                out.push_str("\\\\");
                other
            }
        };
        match decoded {
            '\n' => out.push_str("\\n"),
            '"' | '\\' => out.extend(['\\', decoded]),
            c => out.push(c),
        }
    }
    out.push('"');
    Ok(out)
}

/// Character of the code in the next digits, at most `most` of them.
fn code(chars: &mut Chars<'_>, radix: u32, most: usize) -> Result<char, String> {
    let digits = chars.clone().take(most).take_while(|c| c.is_digit(radix));
    let digits: String = digits.collect();
    *chars = chars.as_str()[digits.len()..].chars();
    let code = u32::from_str_radix(&digits, radix).ok();
    code.and_then(char::from_u32)
        .ok_or_else(|| format!("an escape of a string is no character: {digits:?}"))
}
