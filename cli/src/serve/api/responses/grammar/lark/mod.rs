//! Lark grammars as regular expressions: rules and terminals, strings, regular expressions, ranges,
//! groups, repetitions, `%ignore` and `%import common.…`.

mod parser;
mod syntax;
mod words;

use crate::serve::api::responses::grammar::budget::{Budget, MAX_PATTERN};
use parser::Parser;
use std::collections::HashMap;
use std::rc::Rc;
use syntax::{Grammar, Node};

/// Deepest nesting of rules that refer to one another.
const MAX_NESTING: usize = 128;
/// How deep rules that contain themselves are nested at most.
const MAX_DEPTH: usize = 64;

/// An ECMAScript pattern of the texts of rule `start`, and how deep rules that contain themselves
/// are nested in it, if there are any.
pub(super) fn pattern(
    source: &str,
    budget: &mut Budget,
) -> Result<(String, Option<usize>), String> {
    let grammar = Parser::of(source)?.grammar()?;
    let start = *grammar
        .names
        .get("start")
        .ok_or("there is no rule `start`")?;
    let is_recursive = grammar.recursive();
    let mut found = None;
    for depth in 1..=MAX_DEPTH {
        let mut writer = Writer {
            grammar: &grammar,
            is_recursive: &is_recursive,
            written: HashMap::new(),
            nesting: 0,
            was_cut: false,
            budget: &mut *budget,
        };
        match writer.whole(start, depth) {
            Ok(Some(pattern)) => {
                let max_depth = writer.was_cut.then_some(depth);
                found = Some((pattern, max_depth));
                if max_depth.is_none() {
                    break;
                }
            }
            Ok(None) => {}
            // Less deep, it has room.
            Err(_) if found.is_some() => break,
            Err(error) => return Err(error),
        }
    }
    found.ok_or_else(|| {
        "its rules contain themselves without an end, or only too deep for this server".into()
    })
}

/// Writes rules as patterns. Those that contain themselves are written for each depth that is left
/// to them; without any, there is no text.
struct Writer<'a> {
    grammar: &'a Grammar,
    is_recursive: &'a [bool],
    written: HashMap<(usize, usize), Option<Rc<str>>>,
    /// Rules that are being written.
    nesting: usize,
    /// Whether a rule had no depth left.
    was_cut: bool,
    budget: &'a mut Budget,
}

impl Writer<'_> {
    /// The pattern of a text that is one of a rule.
    fn whole(&mut self, start: usize, depth: usize) -> Result<Option<String>, String> {
        let Some(pattern) = self.rule(start, depth)? else {
            return Ok(None);
        };
        let begin = self.spaced(String::new(), depth)?;
        self.checked(begin + &pattern).map(Some)
    }

    /// The pattern of a rule; `None` if it has no text within `depth`.
    fn rule(&mut self, i: usize, depth: usize) -> Result<Option<Rc<str>>, String> {
        let depth_within = if self.is_recursive[i] {
            let Some(depth) = depth.checked_sub(1) else {
                self.was_cut = true;
                return Ok(None);
            };
            depth
        } else {
            depth
        };
        if let Some(pattern) = self.written.get(&(i, depth)) {
            return Ok(pattern.clone());
        }
        if self.nesting == MAX_NESTING {
            return Err(format!("its rules nest deeper than {MAX_NESTING}"));
        }
        self.nesting += 1;
        let rule = &self.grammar.rules[i];
        let pattern = self.node(&rule.body, depth_within, rule.is_terminal)?;
        self.nesting -= 1;
        let pattern = match pattern {
            Some(pattern) if rule.is_terminal => Some(self.spaced(pattern, depth)?),
            pattern => pattern,
        };
        let pattern: Option<Rc<str>> = pattern.map(Rc::from);
        self.written.insert((i, depth), pattern.clone());
        Ok(pattern)
    }

    /// A terminal, behind which texts may come that are ignored.
    fn spaced(&mut self, pattern: String, depth: usize) -> Result<String, String> {
        let ignored = &self.grammar.ignored;
        let mut choices = Vec::new();
        for node in ignored {
            choices.extend(self.node(node, depth, true)?);
        }
        if choices.is_empty() {
            return Ok(pattern);
        }
        self.checked(format!("(?:{pattern})(?:{})*", choices.join("|")))
    }

    fn node(
        &mut self,
        node: &Node,
        depth: usize,
        in_terminal: bool,
    ) -> Result<Option<String>, String> {
        match node {
            Node::Pattern(pattern) if in_terminal => Ok(Some(pattern.clone())),
            Node::Pattern(pattern) => self.spaced(pattern.clone(), depth).map(Some),
            Node::Name(name) => self.name(name, depth, in_terminal),
            Node::Sequence(nodes) => {
                let mut all = String::new();
                for node in nodes {
                    let Some(pattern) = self.node(node, depth, in_terminal)? else {
                        return Ok(None);
                    };
                    all = self.checked(all + &pattern)?;
                }
                Ok(Some(all))
            }
            Node::Choice(nodes) => {
                let mut all = Vec::new();
                for node in nodes {
                    all.extend(self.node(node, depth, in_terminal)?);
                }
                match all.len() {
                    0 => Ok(None),
                    1 => Ok(all.pop()),
                    _ => self.checked(format!("(?:{})", all.join("|"))).map(Some),
                }
            }
            Node::Repeat(node, min, max) => {
                let pattern = match (self.node(node, depth, in_terminal)?, min) {
                    (Some(pattern), _) => pattern,
                    (None, 0) => return Ok(Some(String::new())),
                    (None, _) => return Ok(None),
                };
                let times = match (min, max) {
                    (0, None) => "*".to_owned(),
                    (1, None) => "+".to_owned(),
                    (0, Some(1)) => "?".to_owned(),
                    (min, Some(max)) if min == max => format!("{{{min}}}"),
                    (min, max) => {
                        format!("{{{min},{}}}", max.map_or(String::new(), |n| n.to_string()))
                    }
                };
                self.checked(format!("(?:{pattern}){times}")).map(Some)
            }
        }
    }

    fn name(
        &mut self,
        name: &str,
        depth: usize,
        in_terminal: bool,
    ) -> Result<Option<String>, String> {
        let i = *self
            .grammar
            .names
            .get(name)
            .ok_or_else(|| format!("there is no rule {name:?}"))?;
        if in_terminal {
            // Within a terminal nothing is ignored.
            let rule = &self.grammar.rules[i];
            if !rule.is_terminal || self.is_recursive[i] {
                return Err(format!(
                    "a terminal refers to {name:?}, which is none or contains itself"
                ));
            }
            if self.nesting == MAX_NESTING {
                return Err(format!("its terminals nest deeper than {MAX_NESTING}"));
            }
            self.nesting += 1;
            let pattern = self.node(&rule.body, depth, true)?;
            self.nesting -= 1;
            return Ok(pattern);
        }
        let pattern = self.rule(i, depth)?;
        pattern
            .map(|pattern| self.checked(pattern.to_string()))
            .transpose()
    }

    /// A pattern that is not too large, whose making counts.
    fn checked(&mut self, pattern: String) -> Result<String, String> {
        self.budget.take(pattern.len())?;
        if pattern.len() > MAX_PATTERN {
            return Err(format!(
                "as a regular expression it has more than {MAX_PATTERN} bytes"
            ));
        }
        Ok(pattern)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pattern of a grammar, and its depth.
    fn of(source: &str) -> (String, Option<usize>) {
        pattern(source, &mut Budget::default()).unwrap()
    }

    #[test]
    fn grammars_are_patterns() {
        for (source, expected) in [
            ("start: \"a\"", "a"),
            (
                "start: \"a\" | \"b.\"i -> alias\n  | /c+/",
                r"(?:a|[bB]\.|c+)",
            ),
            (
                "start: (\"a\" | B)~2..3 [C] // comment\nB: \"b\"\nC: \"0\"..\"9\" # another",
                "(?:(?:a|b)){2,3}(?:[0-9])?",
            ),
            (
                "?start: a*\n!a.2: \"\\n\\\"\" LF?\n%import common.LF",
                r#"(?:\n"(?:\n)?)*"#,
            ),
            (
                "start: N (\",\" N)+\n%import common (DIGIT, CR)\nN: DIGIT~4",
                "(?:[0-9]){4}(?:,(?:[0-9]){4})+",
            ),
            (
                "start: A \"b\"\nA: \"a\"\n%ignore \" \"",
                "(?:)(?: )*(?:a)(?: )*(?:b)(?: )*",
            ),
            ("start: (\"a\"\n| \"b\")\n", "(?:a|b)"),
        ] {
            assert_eq!(of(source), (expected.to_owned(), None), "{source}");
        }
        let lark = "start: a\na: b b\nb: c c\nc: \"x\"";
        assert_eq!(of(lark).0, "xxxx");
    }

    #[test]
    fn rules_that_contain_themselves() {
        let (pattern, depth) = of("start: \"(\" start \")\" | \"x\"");
        assert_eq!(depth, Some(MAX_DEPTH));
        assert!(pattern.starts_with(r"(?:\((?:\((?:\("), "{pattern}");
        // As deep as there is room.
        let (pattern, depth) =
            of("start: e\ne: e \"+\" e | e \"*\" e | \"(\" e \")\" | /[0-9]{1,20}/");
        assert!(
            depth.is_some_and(|depth| (2..MAX_DEPTH).contains(&depth)),
            "{depth:?}"
        );
        assert!(pattern.len() <= MAX_PATTERN);
    }

    #[test]
    fn what_is_wrong() {
        let doubled: String = (0..40)
            .map(|i| format!("r{i}: r{0} r{0}\n", i + 1))
            .collect();
        let deep = format!("start: {}\"a\"{}", "(".repeat(1000), ")".repeat(1000));
        let chain: String = (0..500).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
        for (source, message) in [
            ("", "no rule `start`"),
            ("start: a", "no rule \"a\""),
            ("start: start", "without an end"),
            ("start: \"a\" start", "without an end"),
            ("start: \"a", "line 1: a string has no end"),
            (
                "start: \"a\"\n\nb: /x",
                "line 3: a regular expression has no end",
            ),
            ("start: (\"a\"", "a group has no end"),
            (
                "start: \"a\"\nstart: \"b\"",
                "line 2: \"start\" is there already",
            ),
            ("start: a{\"b\"}", "not supported"),
            ("start: <[5]>", "not supported"),
            ("start: \"a\"\n%declare A", "%declare is not supported"),
            ("start: A\n%import other.A", "only `common`"),
            ("start: A\n%import common.A", "has no \"A\""),
            ("start: A\nA: b\nb: \"c\"", "which is none"),
            ("start: A\nA: A", "contains itself"),
            ("start: /a(?=b)/", "looks ahead"),
            ("start: \"b\"..\"a\"", "order"),
            ("start: \"a\"~3..2", "order"),
            (&format!("start: r0\n{doubled}r40: \"abc\""), "more than"),
            (&deep, "groups nest"),
            (&format!("start: r0\n{chain}r500: \"a\""), "rules nest"),
            (&"a: \"b\"\n".repeat(2), "already"),
        ] {
            let error = pattern(source, &mut Budget::default()).unwrap_err();
            assert!(error.contains(message), "{source:.80}: {error}");
        }
        let mut budget = Budget::default();
        while budget.take(1 << 20).is_ok() {}
        let source = format!("start: \"{}\"", "a".repeat(1 << 10));
        let error = (0..2000).find_map(|_| pattern(&source, &mut budget).err());
        assert!(error.is_some_and(|error| error.contains("together")));
    }
}
