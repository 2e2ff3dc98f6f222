//! Regular expressions of Rust's dialect in ECMAScript's, which JSON Schema has.

use std::fmt::Write;
use std::iter::Peekable;
use std::str::Chars;

/// Deepest nesting of groups.
const MAX_DEPTH: usize = 64;

/// An expression that matches whole texts, so that its anchors say nothing.
pub(super) fn whole(source: &str) -> Result<String, String> {
    Translator::new(source, "", true)?.run()
}

/// An expression that stands beside others.
pub(super) fn part(source: &str, flags: &str) -> Result<String, String> {
    let part = Translator::new(source, flags, false)?.run()?;
    Ok(match part.contains('|') {
        true => format!("(?:{part})"),
        false => part,
    })
}

/// A text, in any case if `is_caseless`.
pub(super) fn literal(text: &str, is_caseless: bool) -> String {
    let mut out = String::new();
    for c in text.chars() {
        push_char(&mut out, c, is_caseless);
    }
    out
}

/// The characters from one to another.
pub(super) fn range(from: &str, to: &str) -> Result<String, String> {
    let single = |text: &str| text.parse::<char>().ok();
    match (single(from), single(to)) {
        (Some(from), Some(to)) if from <= to => {
            let mut out = String::from("[");
            push_escaped(&mut out, from, true);
            out.push('-');
            push_escaped(&mut out, to, true);
            out.push(']');
            Ok(out)
        }
        (Some(_), Some(_)) => Err("a range is in the wrong order".into()),
        _ => Err("a range is not one of characters".into()),
    }
}

/// Adds a character as it is written outside or inside of a class.
fn push_escaped(out: &mut String, c: char, in_class: bool) {
    match c {
        '\n' => out.push_str("\\n"),
        c if c.is_ascii_control() => {
            let _ = write!(out, "\\u{{{:x}}}", u32::from(c));
        }
        '-' if in_class => out.push_str("\\-"),
        c if "^$\\.*+?()[]{}|/".contains(c) => out.extend(['\\', c]),
        c => out.push(c),
    }
}

/// The other cases of a letter.
fn other_cases(c: char) -> impl Iterator<Item = char> {
    let (mut lower, mut upper) = (c.to_lowercase(), c.to_uppercase());
    let lower = (lower.len() == 1).then(|| lower.next()).flatten();
    let upper = (upper.len() == 1).then(|| upper.next()).flatten();
    lower
        .into_iter()
        .chain(upper)
        .filter(move |&other| other != c)
}

fn push_char(out: &mut String, c: char, is_caseless: bool) {
    let others: Vec<char> = other_cases(c).filter(|_| is_caseless).collect();
    if others.is_empty() {
        push_escaped(out, c, false);
        return;
    }
    out.push('[');
    push_escaped(out, c, true);
    others
        .into_iter()
        .for_each(|other| push_escaped(out, other, true));
    out.push(']');
}

#[derive(Clone, Copy, Default)]
struct Flags {
    /// `.` matches line ends, too.
    dot_all: bool,
    caseless: bool,
}

impl Flags {
    fn set(&mut self, flag: char, on: bool) -> Result<(), String> {
        match flag {
            's' => self.dot_all = on,
            'i' => self.caseless = on,
            // Characters are Unicode's.
            'u' if on => {}
            // Anchors within the text are refused below.
            'm' => {}
            other => {
                return Err(format!(
                    "the flag {other:?} of a regular expression is not supported"
                ));
            }
        }
        Ok(())
    }
}

/// What an escape stands for.
enum Escape {
    Char(char),
    /// A class that is written like this inside and outside of brackets.
    Class(String),
}

struct Translator<'a> {
    rest: Peekable<Chars<'a>>,
    out: String,
    flags: Flags,
    /// The flags outside of each group that is open.
    outer: Vec<Flags>,
    /// Whether anchors at the ends of the text are known to be there.
    anchored: bool,
    /// Whether nothing of the text was matched yet, in any alternative.
    at_start: bool,
}

impl<'a> Translator<'a> {
    fn new(source: &'a str, flags: &str, anchored: bool) -> Result<Translator<'a>, String> {
        let mut set = Flags::default();
        flags.chars().try_for_each(|flag| set.set(flag, true))?;
        Ok(Translator {
            rest: source.chars().peekable(),
            out: String::new(),
            flags: set,
            outer: Vec::new(),
            anchored,
            at_start: true,
        })
    }

    fn run(mut self) -> Result<String, String> {
        while let Some(c) = self.rest.next() {
            let was_at_start = std::mem::take(&mut self.at_start);
            match c {
                '\\' => self.escaped(was_at_start)?,
                '.' if self.flags.dot_all => self.out.push_str("[^]"),
                '.' => self.out.push_str("[^\\n]"),
                '[' => self.class()?,
                '(' => {
                    self.group()?;
                    self.at_start = was_at_start;
                }
                ')' => {
                    self.flags = self
                        .outer
                        .pop()
                        .ok_or("a group is closed that is not open")?;
                    self.out.push(')');
                }
                '|' => {
                    self.out.push('|');
                    self.at_start = self.outer.is_empty();
                }
                '*' | '+' | '?' => self.quantifier(c.into()),
                '{' => {
                    let mut text = String::from("{");
                    loop {
                        let c = self.rest.next().ok_or("a quantifier has no end")?;
                        text.push(c);
                        if c == '}' {
                            break;
                        }
                        if !c.is_ascii_digit() && c != ',' {
                            return Err(format!("a quantifier begins with {text:?}"));
                        }
                    }
                    if !text[1..].starts_with(|c: char| c.is_ascii_digit()) {
                        return Err(format!("the quantifier {text} has no number"));
                    }
                    self.quantifier(text);
                }
                '^' if self.anchored && was_at_start => self.at_start = true,
                '$' if self.anchored && self.is_at_end() => {}
                '^' | '$' => return Err(format!("{c} inside of a text matches nothing")),
                c => push_char(&mut self.out, c, self.flags.caseless),
            }
        }
        match self.outer.len() {
            0 => Ok(self.out),
            _ => Err("a group has no end".into()),
        }
    }

    /// Whether nothing more of the text is matched behind here.
    fn is_at_end(&self) -> bool {
        let mut rest = self.rest.clone();
        let next = rest.find(|&c| c != ')');
        next.is_none() || next == Some('|') && self.outer.is_empty()
    }

    fn quantifier(&mut self, text: String) {
        self.out.push_str(&text);
        // Lazy ones match the same texts.
        self.rest.next_if_eq(&'?');
    }

    fn group(&mut self) -> Result<(), String> {
        if self.outer.len() == MAX_DEPTH {
            return Err(format!("groups nest deeper than {MAX_DEPTH}"));
        }
        self.outer.push(self.flags);
        self.out.push_str("(?:");
        if self.rest.next_if_eq(&'?').is_none() {
            return Ok(());
        }
        self.rest.next_if_eq(&'P');
        let mut on = true;
        loop {
            match self.rest.next().ok_or("a group has no end")? {
                ':' => return Ok(()),
                '<' if !matches!(self.rest.peek(), Some('=' | '!')) => {
                    self.rest
                        .by_ref()
                        .find(|&c| c == '>')
                        .ok_or("a group's name has no end")?;
                    return Ok(());
                }
                '=' | '!' | '<' => {
                    return Err("it looks ahead or behind, which is not supported".into());
                }
                // Flags for the rest of the group around, whose end resets them.
                ')' => {
                    let outer = self.outer.pop();
                    self.out.truncate(self.out.len() - "(?:".len());
                    return outer.map(|_| ()).ok_or_else(String::new);
                }
                '-' => on = false,
                flag => self.flags.set(flag, on)?,
            }
        }
    }

    fn escaped(&mut self, was_at_start: bool) -> Result<(), String> {
        match self.rest.peek() {
            Some('A') if self.anchored && was_at_start => {
                self.rest.next();
                self.at_start = true;
                return Ok(());
            }
            Some('z') => {
                self.rest.next();
                return match self.anchored && self.is_at_end() {
                    true => Ok(()),
                    false => Err("\\z inside of a text matches nothing".into()),
                };
            }
            _ => {}
        }
        match self.escape()? {
            Escape::Char(c) => push_char(&mut self.out, c, self.flags.caseless),
            Escape::Class(text) => self.out.push_str(&text),
        }
        Ok(())
    }

    /// What follows a backslash.
    fn escape(&mut self) -> Result<Escape, String> {
        let c = self.rest.next().ok_or("it ends in a backslash")?;
        Ok(match c {
            'd' | 'D' | 'w' | 'W' | 's' | 'S' => Escape::Class(format!("\\{c}")),
            'p' | 'P' => {
                let mut name = String::new();
                match self.rest.next().ok_or("\\p has no name")? {
                    '{' => name.extend(self.rest.by_ref().take_while(|&c| c != '}')),
                    letter => name.push(letter),
                }
                Escape::Class(format!("\\{c}{{{name}}}"))
            }
            'n' => Escape::Char('\n'),
            'r' => Escape::Char('\r'),
            't' => Escape::Char('\t'),
            'f' => Escape::Char('\u{c}'),
            'v' => Escape::Char('\u{b}'),
            'a' => Escape::Char('\u{7}'),
            'x' => Escape::Char(self.hex(2)?),
            'u' => Escape::Char(self.hex(4)?),
            'U' => Escape::Char(self.hex(8)?),
            c if c.is_alphanumeric() || c == '<' || c == '>' => {
                return Err(format!("the escape \\{c} is not supported"));
            }
            c => Escape::Char(c),
        })
    }

    /// A character by its number: so many digits, or any number of them in braces.
    fn hex(&mut self, n: usize) -> Result<char, String> {
        let digits: String = match self.rest.next_if_eq(&'{') {
            Some(_) => self.rest.by_ref().take_while(|&c| c != '}').collect(),
            None => self.rest.by_ref().take(n).collect(),
        };
        u32::from_str_radix(&digits, 16)
            .ok()
            .and_then(char::from_u32)
            .ok_or_else(|| format!("{digits:?} is the number of no character"))
    }

    fn class(&mut self) -> Result<(), String> {
        self.out.push('[');
        if self.rest.next_if_eq(&'^').is_some() {
            self.out.push('^');
        }
        let mut is_first = true;
        loop {
            let c = self.rest.next().ok_or("a class has no end")?;
            let from = match c {
                ']' if !is_first => break,
                '[' if self.rest.peek() == Some(&':') => {
                    let name: String = self
                        .rest
                        .by_ref()
                        .skip(1)
                        .take_while(|&c| c != ']')
                        .collect();
                    self.out.push_str(named_class(&name)?);
                    is_first = false;
                    continue;
                }
                '[' => return Err("a class within a class is not supported".into()),
                '&' | '-' | '~' if self.rest.peek() == Some(&c) => {
                    return Err(format!("{c}{c} in a class is not supported"));
                }
                '\\' => match self.escape()? {
                    Escape::Char(c) => c,
                    Escape::Class(text) => {
                        self.out.push_str(&text);
                        is_first = false;
                        continue;
                    }
                },
                c => c,
            };
            is_first = false;
            let to = self.range_end()?.unwrap_or(from);
            if to < from {
                return Err("a range of a class is in the wrong order".into());
            }
            self.push_range(from, to);
        }
        self.out.push(']');
        Ok(())
    }

    /// The end of a range behind its first character.
    fn range_end(&mut self) -> Result<Option<char>, String> {
        let mut ahead = self.rest.clone();
        if ahead.next() != Some('-') || matches!(ahead.next(), None | Some(']' | '-')) {
            return Ok(None);
        }
        self.rest.next();
        match self.rest.next() {
            Some('\\') => match self.escape()? {
                Escape::Char(c) => Ok(Some(c)),
                Escape::Class(_) => Err("a range of a class ends in a class".into()),
            },
            Some('[') | None => Err("a range of a class has no end".into()),
            to => Ok(to),
        }
    }

    fn push_range(&mut self, from: char, to: char) {
        let mut push = |from: char, to: char| {
            push_escaped(&mut self.out, from, true);
            if from < to {
                self.out.push('-');
                push_escaped(&mut self.out, to, true);
            }
        };
        push(from, to);
        if !self.flags.caseless {
            return;
        }
        if from == to {
            other_cases(from).for_each(|other| push(other, other));
            return;
        }
        // Of ranges, the letters that ranges are made of.
        for (first, last, swap) in [
            ('a', 'z', char::to_ascii_uppercase as fn(&char) -> char),
            ('A', 'Z', char::to_ascii_lowercase),
        ] {
            let (from, to) = (from.max(first), to.min(last));
            if from <= to {
                push(swap(&from), swap(&to));
            }
        }
    }
}

/// The members of `[:name:]`, given with its last colon.
fn named_class(name: &str) -> Result<&'static str, String> {
    Ok(match name {
        "alnum:" => "0-9A-Za-z",
        "alpha:" => "A-Za-z",
        "blank:" => "\\t ",
        "digit:" => "0-9",
        "lower:" => "a-z",
        "punct:" => "!-\\/:-@\\[-`\\{-~",
        "space:" => "\\t\\n\\v\\f\\r ",
        "upper:" => "A-Z",
        "word:" => "0-9A-Za-z_",
        "xdigit:" => "0-9A-Fa-f",
        other => return Err(format!("the class [:{other}] is not supported")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_other_dialect() {
        for (rust, ecma) in [
            (r"a.c", r"a[^\n]c"),
            (r"(?s)a.c", r"a[^]c"),
            (r"(?s:.).", r"(?:[^])[^\n]"),
            (r"^\d{4}-\d{2}$", r"\d{4}-\d{2}"),
            (r"\A(a|b)\z", r"(?:a|b)"),
            (r"^a|b$", r"a|b"),
            (r"(^a|b)", r"(?:a|b)"),
            (r"(?P<year>\d+)(?<m>\x41)", r"(?:\d+)(?:A)"),
            (r"(?i)ab|[c-eX]", r"[aA][bB]|[c-eC-EXx]"),
            (r"a+?b*?c??", r"a+b*c?"),
            (r"[]a-]", r"[\]a\-]"),
            (r"[^/\]\\]", r"[^\/\]\\]"),
            (r"[[:alpha:]_-]", r"[A-Za-z_\-]"),
            (r"\pL\p{Greek}", r"\p{L}\p{Greek}"),
            ("\"-", "\"-"),
            ("é\u{1}", "é\\u{1}"),
        ] {
            assert_eq!(whole(rust).as_deref(), Ok(ecma), "{rust}");
        }
        for wrong in [
            r"(?=a)",
            r"(?<!a)",
            r"a^",
            r"$a",
            r"(a$)b",
            r"\bword",
            r"[a&&b]",
            r"[a-c--b]",
            r"[[a]]",
            r"(",
            r")",
            r"[",
            r"\",
            r"a{x}",
            r"(?x)a",
            r"[b-a]",
            r"\x{110000}",
            r"a{2",
            r"a{}",
            r"a{,2}",
        ] {
            assert!(whole(wrong).is_err(), "{wrong}: {:?}", whole(wrong));
        }
        assert!(part("^a", "").is_err() && part("a", "l").is_err());
        assert_eq!(part("a.", "is").as_deref(), Ok("[aA][^]"));
        assert!(whole(&"(".repeat(1000)).is_err());
    }
}
