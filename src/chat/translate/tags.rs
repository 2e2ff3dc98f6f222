//! Tags of a source: where they begin and end.

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Comment,
    Expression,
    Statement,
    /// From `{% raw %}` to `{% endraw %}`.
    Raw,
    /// Without an end.
    Broken,
}

pub(super) struct Tag {
    pub(super) kind: Kind,
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Tag {
    /// The opening with its sign, what is inside, the sign and the closing; of an expression or a
    /// statement.
    pub(super) fn parts<'a>(&self, source: &'a str) -> (&'a str, &'a str, &'a str) {
        let whole = &source[self.start..self.end];
        let signed = |c: Option<&u8>| matches!(c, Some(b'-' | b'+'));
        let bytes = whole.as_bytes();
        let open = if signed(bytes.get(2)) { 3 } else { 2 };
        let close = whole.len() - 2;
        let close = if close > open && signed(bytes.get(close - 1)) {
            close - 1
        } else {
            close
        };
        (&whole[..open], &whole[open..close], &whole[close..])
    }
}

/// The first tag from `at` on.
pub(super) fn next_tag(source: &str, at: usize) -> Option<Tag> {
    let bytes = source.as_bytes();
    let start = (at..bytes.len().saturating_sub(1))
        .find(|&i| bytes[i] == b'{' && matches!(bytes[i + 1], b'{' | b'%' | b'#'))?;
    let found = |kind, end| Tag { kind, start, end };
    let broken = || found(Kind::Broken, source.len());
    let (kind, close) = match bytes[start + 1] {
        b'#' => {
            let end = source[start + 2..].find("#}");
            return Some(end.map_or_else(broken, |n| found(Kind::Comment, start + n + 4)));
        }
        b'{' => (Kind::Expression, "}}"),
        _ => (Kind::Statement, "%}"),
    };
    let Some(end) = tag_end(source, start + 2, close) else {
        return Some(broken());
    };
    let tag = found(kind, end);
    if kind == Kind::Statement && tag.parts(source).1.trim() == "raw" {
        let mut from = end;
        while let Some(n) = source[from..].find("{%") {
            let begin = from + n;
            from = begin + 2;
            let Some(n) = source[from..].find("%}") else {
                break;
            };
            let inner = source[from..from + n].trim_matches(['-', '+']).trim();
            if inner == "endraw" {
                return Some(found(Kind::Raw, from + n + 2));
            }
        }
        return Some(broken());
    }
    Some(tag)
}

/// The end of a tag, which is not in a string and not in brackets.
fn tag_end(source: &str, from: usize, close: &str) -> Option<usize> {
    let bytes = source.as_bytes();
    let (mut i, mut depth) = (from, 0usize);
    while i < bytes.len() {
        if depth == 0 && source.as_bytes()[i..].starts_with(close.as_bytes()) {
            return Some(i + 2);
        }
        match bytes[i] {
            quote @ (b'"' | b'\'') => {
                i += 1;
                while *bytes.get(i)? != quote {
                    i += if bytes[i] == b'\\' { 2 } else { 1 };
                }
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        i += 1;
    }
    None
}
