//! Translates the regular expressions of JSON Schema, which are ECMAScript's, to the engine's
//! syntax.
//!
//! Some things look alike but differ: `.` and `\s` match other characters, `\d` and `\w` are ASCII,
//! and `[`, `&&`, `--` and `~~` inside a class are plain characters. Features that the engine
//! cannot match (assertions inside a pattern, back-references) are refused.

use std::fmt::Write;

/// Characters that `\s` matches.
const SPACE: &str = r"\t\n\x{b}\x{c}\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}";
/// Line ends, which `.` does not match.
const LINE_END: &str = r"\n\r\x{2028}\x{2029}";

/// Translates a pattern to Rust's syntax.
///
/// # Errors
/// Description of the part that cannot be matched.
pub(super) fn from_ecma(pattern: &str) -> Result<String, String> {
    let mut p = Parser {
        chars: pattern.chars().collect(),
        at: 0,
        out: String::new(),
    };
    while let Some(c) = p.next() {
        match c {
            '\\' => match p.escape()? {
                Escape::Char(c) => p.literal(c),
                Escape::Class(items, negated) => {
                    let not = if negated { "^" } else { "" };
                    let _ = write!(p.out, "[{not}{items}]");
                }
                Escape::Property(text) => p.out.push_str(&text),
            },
            '.' => {
                let _ = write!(p.out, "[^{LINE_END}]");
            }
            '[' => p.class()?,
            '(' => p.group()?,
            '{' => match p.quantifier() {
                Some(text) => p.out.push_str(&text),
                None => p.literal('{'),
            },
            '^' | '$' | '|' | '*' | '+' | '?' | ')' => p.out.push(c),
            c => p.literal(c),
        }
    }
    Ok(p.out)
}

/// Converts a translated pattern, which may match anywhere, to one of the whole text: alternatives
/// without `^` or `$` may begin or end with anything. `None` if there are such assertions
/// elsewhere.
#[cfg(any(feature = "chat", test))]
pub(super) fn of_whole_text(pattern: &str) -> Option<String> {
    let (mut groups, mut classes, mut begin) = (0, 0, 0);
    let mut alternatives = Vec::new();
    // Outside classes, special characters are operators: all others are written as numbers.
    for (at, c) in pattern.char_indices() {
        match c {
            '[' => classes += 1,
            ']' => classes -= 1,
            _ if classes > 0 => {}
            '(' => groups += 1,
            ')' => groups -= 1,
            '|' if groups == 0 => {
                alternatives.push(&pattern[begin..at]);
                begin = at + 1;
            }
            '^' if at != begin => return None,
            '$' if groups > 0 || !matches!(pattern.as_bytes().get(at + 1), None | Some(b'|')) => {
                return None;
            }
            _ => {}
        }
    }
    alternatives.push(&pattern[begin..]);
    let whole = alternatives.into_iter().map(|alternative| {
        const ANY: &str = "(?s:.*)";
        let (body, before) = match alternative.strip_prefix('^') {
            Some(body) => (body, ""),
            None => (alternative, ANY),
        };
        let (body, after) = match body.strip_suffix('$') {
            Some(body) => (body, ""),
            None => (body, ANY),
        };
        format!("{before}(?:{body}){after}")
    });
    Some(whole.collect::<Vec<_>>().join("|"))
}

enum Escape {
    Char(char),
    /// Items of a class, and whether it is negated.
    Class(String, bool),
    /// `\p{…}`, verbatim.
    Property(String),
}

struct Parser {
    chars: Vec<char>,
    at: usize,
    out: String,
}

impl Parser {
    fn next(&mut self) -> Option<char> {
        let c = self.chars.get(self.at).copied();
        self.at += usize::from(c.is_some());
        c
    }

    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn literal(&mut self, c: char) {
        if c.is_alphanumeric() {
            self.out.push(c);
        } else {
            let _ = write!(self.out, "\\x{{{:x}}}", u32::from(c));
        }
    }

    /// Reads the quantifier `{n}`, `{n,}` or `{n,m}` after its `{`; `None` if that is a plain
    /// character.
    fn quantifier(&mut self) -> Option<String> {
        let len = self.chars[self.at..].iter().position(|&c| c == '}')?;
        let inner: String = self.chars[self.at..self.at + len].iter().collect();
        let (min, max) = inner.split_once(',').unwrap_or((&inner, ""));
        let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        let found = !min.is_empty() && digits(min) && digits(max);
        self.at += if found { len + 1 } else { 0 };
        found.then(|| format!("{{{inner}}}"))
    }

    fn group(&mut self) -> Result<(), String> {
        self.out.push_str("(?:");
        if self.peek() != Some('?') {
            return Ok(());
        }
        self.at += 1;
        match (self.next(), self.peek()) {
            (Some(':'), _) => Ok(()),
            (Some('='), _) | (Some('!'), _) | (Some('<'), Some('=' | '!')) => {
                Err("looks ahead or behind, which cannot be matched".into())
            }
            (Some('<'), _) => {
                while self.next().is_some_and(|c| c != '>') {}
                Ok(())
            }
            _ => Err("has a group of an unknown kind".into()),
        }
    }

    /// Reads an escape after its `\`.
    fn escape(&mut self) -> Result<Escape, String> {
        let digit_class = |negated| Escape::Class("0-9".into(), negated);
        let word_class = |negated| Escape::Class("0-9A-Za-z_".into(), negated);
        let space_class = |negated| Escape::Class(SPACE.into(), negated);
        Ok(match self.next().ok_or("ends in a backslash")? {
            'd' => digit_class(false),
            'D' => digit_class(true),
            'w' => word_class(false),
            'W' => word_class(true),
            's' => space_class(false),
            'S' => space_class(true),
            't' => Escape::Char('\t'),
            'n' => Escape::Char('\n'),
            'r' => Escape::Char('\r'),
            'v' => Escape::Char('\u{b}'),
            'f' => Escape::Char('\u{c}'),
            '0' if !self.peek().is_some_and(|c| c.is_ascii_digit()) => Escape::Char('\0'),
            'b' | 'B' => return Err("has a word boundary, which cannot be matched".into()),
            'k' | '0'..='9' => return Err("refers to a group, which cannot be matched".into()),
            'c' => match self.next() {
                Some(c) if c.is_ascii_alphabetic() => Escape::Char(char::from(c as u8 % 32)),
                _ => return Err("has an unknown control character".into()),
            },
            'x' => Escape::Char(
                self.hex(2)
                    .and_then(char::from_u32)
                    .ok_or("has a wrong \\x escape")?,
            ),
            'u' => Escape::Char(self.unicode().ok_or("has a wrong \\u escape")?),
            p @ ('p' | 'P') => {
                let rest: String = self.chars[self.at..].iter().collect();
                let end = rest.find('}').filter(|_| rest.starts_with('{'));
                let name = &rest[..=end.ok_or("has a wrong \\p escape")?];
                self.at += name.chars().count();
                Escape::Property(format!("\\{p}{name}"))
            }
            c if c.is_ascii_alphanumeric() => return Err(format!("has the unknown escape \\{c}")),
            c => Escape::Char(c),
        })
    }

    /// Reads exactly `n` hexadecimal digits.
    fn hex(&mut self, n: usize) -> Option<u32> {
        let digits = self.chars.get(self.at..self.at + n)?;
        let value = digits
            .iter()
            .try_fold(0, |v, c| Some(v * 16 + c.to_digit(16)?))?;
        self.at += n;
        Some(value)
    }

    /// Reads what follows `\u`: four digits, two times four of a surrogate pair, or `{…}`.
    fn unicode(&mut self) -> Option<char> {
        if self.peek() == Some('{') {
            let len = self.chars[self.at..].iter().position(|&c| c == '}')?;
            let digits: String = self.chars[self.at + 1..self.at + len].iter().collect();
            self.at += len + 1;
            return char::from_u32(u32::from_str_radix(&digits, 16).ok()?);
        }
        let high = self.hex(4)?;
        if (0xd800..0xdc00).contains(&high)
            && self.chars.get(self.at..self.at + 2) == Some(&['\\', 'u'])
        {
            self.at += 2;
            let low = self.hex(4).filter(|low| (0xdc00..0xe000).contains(low))?;
            return char::from_u32(0x10000 + ((high - 0xd800) << 10) + (low - 0xdc00));
        }
        char::from_u32(high)
    }

    /// Reads a class after its `[`.
    fn class(&mut self) -> Result<(), String> {
        let negated = self.peek() == Some('^');
        self.at += usize::from(negated);
        if self.peek() == Some(']') {
            self.at += 1;
            if !negated {
                return Err("has an empty class, which matches nothing".into());
            }
            self.out.push_str("(?s:.)");
            return Ok(());
        }
        self.out.push_str(if negated { "[^" } else { "[" });
        loop {
            let c = match self.next().ok_or("has a class without an end")? {
                ']' => break,
                // In a class, `\b` is a backspace.
                '\\' if self.peek() == Some('b') => {
                    self.at += 1;
                    '\u{8}'
                }
                '\\' => match self.escape()? {
                    Escape::Char(c) => c,
                    Escape::Class(items, false) => {
                        self.out.push_str(&items);
                        continue;
                    }
                    Escape::Class(items, true) => {
                        let _ = write!(self.out, "[^{items}]");
                        continue;
                    }
                    Escape::Property(text) => {
                        self.out.push_str(&text);
                        continue;
                    }
                },
                c => c,
            };
            self.literal(c);
            // A range, unless the `-` is followed by the end of the class or by a nested class.
            let range = self.peek() == Some('-')
                && !matches!(self.chars.get(self.at + 1), None | Some(']'));
            if range {
                self.at += 1;
                let end = match self.next() {
                    Some('\\') => match self.escape()? {
                        Escape::Char(end) => end,
                        _ => return Err("has a range that ends in a class".into()),
                    },
                    end => end.unwrap_or(c),
                };
                if end < c {
                    return Err("has a range in the wrong order".into());
                }
                self.out.push('-');
                self.literal(end);
            }
        }
        self.out.push(']');
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::grammar::pattern::{from_ecma, of_whole_text};
    use llguidance::derivre::Regex;

    /// Whether the whole of `text` matches.
    fn matches(pattern: &str, text: &str) -> bool {
        Regex::new(&from_ecma(pattern).unwrap())
            .unwrap()
            .is_match(text)
    }

    #[test]
    fn means_what_it_means_in_ecmascript() {
        for (pattern, yes, no) in [
            (r"a.c", "abc", "a\rc"),
            (r"\d+", "123", "\u{664}"),
            (r"\w", "_", "é"),
            (r"\s", "\u{feff}", "\u{85}"),
            (r"\S", "\u{85}", "\u{feff}"),
            (r"[\w.-]+", "a.b-c", "a/b"),
            (r"[[]", "[", "]"),
            (r"[a&&b]", "&", "c"),
            (r"[+--]", ",", "."),
            (r"[^\d]", "x", "5"),
            (r"[\D5]", "5", "6"),
            (r"a{2}", "aa", "a{2}"),
            (r"a{1,2}b{1,}", "aab", "aaab"),
            (r"a{,2}", "a{,2}", "a"),
            (r"a{", "a{", "a"),
            (r"{}", "{}", ""),
            (r"\/\-\.", "/-.", "/"),
            (r"\cA", "\u{1}", "A"),
            (r"\u0041\x42\u{43}", "ABC", ""),
            (r"\uD83D\uDE00", "😀", ""),
            (r"[\b]", "\u{8}", "b"),
            (r"(?<year>\d{4})", "2026", "26"),
            (r"[^]", "\n", ""),
            (r"[-a]", "-", "b"),
            (r"[a-]", "-", "b"),
            ("é/\"#", "é/\"#", ""),
        ] {
            assert!(matches(pattern, yes), "{pattern} and {yes:?}");
            assert!(!matches(pattern, no), "{pattern} and {no:?}");
        }
        for pattern in [
            r"(?=a)", r"(?<!a)", r"\bword", r"(a)\1", r"[", r"\", r"[]", r"\A", r"[b-a]", r"\p",
            r"(?i)a",
        ] {
            assert!(from_ecma(pattern).is_err(), "{pattern}");
        }
    }

    #[test]
    fn whole_texts() {
        for (pattern, yes, no) in [
            ("b", "abc", "ac"),
            ("^b", "bc", "abc"),
            ("b$", "ab", "abc"),
            ("^a|b$", "ac", "ca"),
            ("^(a|b)$", "b", "bb"),
            ("[|^$]", "a$", "a"),
            (r"\^\$", "^$", "$"),
        ] {
            let whole = of_whole_text(&from_ecma(pattern).unwrap()).unwrap();
            let mut regex = Regex::new(&whole).unwrap();
            assert!(
                regex.is_match(yes) && !regex.is_match(no),
                "{pattern}: {whole}"
            );
        }
        for pattern in ["a^", "(^a)", "$a", "(a$)b"] {
            assert_eq!(
                of_whole_text(&from_ecma(pattern).unwrap()),
                None,
                "{pattern}"
            );
        }
    }
}
