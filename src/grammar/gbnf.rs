//! Translates GBNF, the grammars of llama.cpp, to Lark.
//!
//! GBNF is a context-free grammar over characters. The engine has a lexer below its parser, and the
//! lexer is greedy: it extends a terminal as far as possible. So a translation must split the
//! grammar into terminals for which that is always right. It starts with the largest ones: every
//! regular part of the grammar, as one regular expression. Then it looks for a terminal that ends
//! where it, or another one, could also continue with a byte that may follow it, and splits one of
//! the two into its parts, until nothing is left to split. No single character is a prefix of
//! another, so at the latest this ends with a terminal per character: slower, but the same
//! language.

use crate::grammar::{GrammarError, MAX_DEPTH, Syntax};
use llguidance::derivre::{Regex, StateID};
use llguidance::toktrie::TokTrie;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write;

/// Longest regular expression of a terminal, in bytes; longer parts are split.
const MAX_TERMINAL: usize = 4 << 10;
/// Maximum number of parts of a grammar.
const MAX_NODES: usize = 20_000;
/// Largest number of repetitions.
const MAX_REPEAT: u32 = 10_000;
/// Maximum number of states visited to find colliding terminals; beyond that, everything is split
/// into characters.
const MAX_STATES: usize = 50_000;

/// Index into [`Gbnf::nodes`].
type Id = usize;

#[derive(Debug, Clone)]
enum Node {
    /// One character from these ranges, which are inclusive and ascending.
    Class(Vec<(char, char)>),
    Seq(Vec<Id>),
    Alt(Vec<Id>),
    /// Minimum and maximum number of repetitions.
    Repeat(Id, u32, Option<u32>),
    Rule(usize),
    /// A token, in Lark's notation.
    Token(String),
}

struct Gbnf {
    nodes: Vec<Node>,
    /// Body of each rule.
    rules: Vec<Option<Id>>,
    root: usize,
}

/// Translates a grammar to Lark. Tokens are looked up in `tree`.
pub(super) fn to_lark(source: &str, tree: &TokTrie) -> Result<String, GrammarError> {
    let grammar = Parser::new(source, tree).parse()?;
    let mut regular = grammar.regular();
    // Parts that are split instead of becoming a terminal.
    let mut cut = HashSet::new();
    loop {
        let terminals = grammar.terminals(&regular, &cut);
        match grammar.collision(&terminals, &regular, &cut) {
            Collision::None => break,
            Collision::Between(a, b) => {
                // The longer one first: it is more likely to be the one that runs too far.
                let len = |id: Id| {
                    if grammar.is_character(id) {
                        0
                    } else {
                        regular[id].as_ref().map_or(0, String::len)
                    }
                };
                let which = if len(a) >= len(b) { a } else { b };
                if len(which) == 0 {
                    break;
                }
                cut.insert(which);
            }
            Collision::TooManyStates => {
                cut.extend((0..grammar.nodes.len()).filter(|&id| !grammar.is_character(id)));
                break;
            }
        }
    }
    // A part is split wherever it occurs, and so are all rules with this body.
    cut.iter().for_each(|&id| regular[id] = None);
    Ok(grammar.write(&regular))
}

enum Collision {
    None,
    Between(Id, Id),
    TooManyStates,
}

/// Which parts can be empty, and the bytes that may begin each.
struct Begins {
    nullable: Vec<bool>,
    first: Vec<Bytes>,
}

/// A set of bytes.
#[derive(Clone, Copy, Default, PartialEq)]
struct Bytes([u64; 4]);

impl Bytes {
    fn insert(&mut self, byte: u8) {
        self.0[usize::from(byte >> 6)] |= 1 << (byte & 63);
    }

    fn contains(&self, byte: u8) -> bool {
        self.0[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1
    }

    /// Adds `other`; returns whether that changed anything.
    fn merge(&mut self, other: Bytes) -> bool {
        let before = *self;
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a |= b);
        *self != before
    }
}

impl Gbnf {
    fn is_character(&self, id: Id) -> bool {
        matches!(self.nodes[id], Node::Class(_))
    }

    fn children(&self, id: Id) -> Vec<Id> {
        match &self.nodes[id] {
            Node::Seq(parts) | Node::Alt(parts) => parts.clone(),
            Node::Repeat(part, ..) => vec![*part],
            Node::Rule(rule) => self.rules[*rule].into_iter().collect(),
            Node::Class(_) | Node::Token(_) => Vec::new(),
        }
    }

    /// The regular expression of each part that has one of bounded length. Children are computed
    /// before their parents, except for bodies of rules.
    fn regular(&self) -> Vec<Option<String>> {
        #[derive(Clone, Copy, PartialEq)]
        enum Visit {
            No,
            Begun,
            Done,
        }
        let mut out: Vec<Option<String>> = vec![None; self.nodes.len()];
        let mut visits = vec![Visit::No; self.nodes.len()];
        // Depth first without recursion, since chains of rules may be long. A part is visited again
        // when its children are done; a child that has begun but not ended is recursive,
        // and so is everything that refers to it.
        let mut stack: Vec<Id> = self.rules.iter().flatten().copied().collect();
        while let Some(&id) = stack.last() {
            if visits[id] != Visit::No {
                stack.pop();
                if visits[id] == Visit::Begun {
                    visits[id] = Visit::Done;
                    out[id] = self
                        .regex(id, &out)
                        .filter(|regex| regex.len() <= MAX_TERMINAL);
                }
                continue;
            }
            visits[id] = Visit::Begun;
            stack.extend(
                self.children(id)
                    .into_iter()
                    .filter(|&child| visits[child] == Visit::No),
            );
        }
        out
    }

    /// Regular expression of a part; those of its children are in `known`.
    fn regex(&self, id: Id, known: &[Option<String>]) -> Option<String> {
        let group = |id: Id| known[id].as_ref().map(|regex| format!("(?:{regex})"));
        match &self.nodes[id] {
            Node::Class(ranges) => {
                let mut out = String::from("[");
                for &(from, to) in ranges {
                    let _ = write!(
                        out,
                        "\\x{{{:x}}}-\\x{{{:x}}}",
                        u32::from(from),
                        u32::from(to)
                    );
                }
                // An empty class matches nothing; no expression for that is accepted by all
                // parsers.
                (!ranges.is_empty()).then(|| out + "]")
            }
            Node::Seq(parts) => parts
                .iter()
                .map(|&part| match self.nodes[part] {
                    Node::Class(_) => known[part].clone(),
                    _ => group(part),
                })
                .collect(),
            Node::Alt(parts) => {
                let parts: Option<Vec<String>> =
                    parts.iter().map(|&part| known[part].clone()).collect();
                parts.map(|parts| parts.join("|"))
            }
            Node::Repeat(part, min, max) => {
                let max = max.map_or(String::new(), |max| max.to_string());
                group(*part).map(|regex| format!("{regex}{{{min},{max}}}"))
            }
            Node::Rule(rule) => known[self.rules[*rule]?].clone(),
            Node::Token(_) => None,
        }
    }

    /// The parts that become terminals, starting at the root.
    fn terminals(&self, regular: &[Option<String>], cut: &HashSet<Id>) -> Vec<Id> {
        let mut seen = HashSet::new();
        let mut stack: Vec<Id> = self.rules[self.root].into_iter().collect();
        let mut out = BTreeMap::new();
        while let Some(id) = stack.pop() {
            if !seen.insert(id) {
                continue;
            }
            match &regular[id] {
                Some(regex) if !cut.contains(&id) => {
                    // Parts with the same text are one terminal.
                    out.entry(regex.clone()).or_insert(id);
                }
                _ => stack.extend(self.children(id)),
            }
        }
        out.into_values().collect()
    }

    /// Finds two terminals such that one ends where the other (or itself) can continue with a byte
    /// that may follow the first.
    fn collision(
        &self,
        terminals: &[Id],
        regular: &[Option<String>],
        cut: &HashSet<Id>,
    ) -> Collision {
        // A single terminal ends where the text ends.
        if terminals.len() == 1 && self.rules[self.root] == Some(terminals[0]) {
            return Collision::None;
        }
        if terminals.iter().all(|&id| self.is_character(id)) {
            return Collision::None;
        }
        let mut automata = Vec::with_capacity(terminals.len());
        for &id in terminals {
            match regular[id]
                .as_ref()
                .and_then(|regex| Regex::new(regex).ok())
            {
                Some(regex) => automata.push(regex),
                None => return Collision::TooManyStates,
            }
        }
        let follow = self.follow(terminals, &mut automata, regular, cut);
        let mut budget = MAX_STATES;
        for a in 0..terminals.len() {
            for b in 0..terminals.len() {
                if self.is_character(terminals[a]) && self.is_character(terminals[b]) {
                    continue;
                }
                // All pairs of states that the two reach after the same text.
                let start = (automata[a].initial_state(), automata[b].initial_state());
                let mut seen = HashSet::from([start]);
                let mut stack = vec![start];
                while let Some((x, y)) = stack.pop() {
                    let Some(left) = budget.checked_sub(1) else {
                        return Collision::TooManyStates;
                    };
                    budget = left;
                    let ends = automata[a].is_accepting(x) && (x, y) != start;
                    for byte in 0..=255 {
                        let next = (
                            automata[a].transition(x, byte),
                            automata[b].transition(y, byte),
                        );
                        if next.1 == StateID::DEAD {
                            continue;
                        }
                        if ends && follow[a].contains(byte) {
                            return Collision::Between(terminals[a], terminals[b]);
                        }
                        if next.0 != StateID::DEAD && seen.insert(next) {
                            stack.push(next);
                        }
                    }
                }
            }
        }
        Collision::None
    }

    /// The bytes that may follow each terminal.
    fn follow(
        &self,
        terminals: &[Id],
        automata: &mut [Regex],
        regular: &[Option<String>],
        cut: &HashSet<Id>,
    ) -> Vec<Bytes> {
        let is_terminal = |id: Id| regular[id].is_some() && !cut.contains(&id);
        let n = self.nodes.len();
        let mut begins = Begins {
            nullable: vec![false; n],
            first: vec![Bytes::default(); n],
        };
        let by_text: HashMap<&str, usize> = terminals
            .iter()
            .enumerate()
            .filter_map(|(i, &id)| Some((regular[id].as_deref()?, i)))
            .collect();
        for id in (0..n).filter(|&id| is_terminal(id)) {
            let Some(&i) = regular[id].as_deref().and_then(|regex| by_text.get(regex)) else {
                continue;
            };
            let start = automata[i].initial_state();
            begins.nullable[id] = automata[i].is_accepting(start);
            (0..=255)
                .filter(|&b| automata[i].transition(start, b) != StateID::DEAD)
                .for_each(|b| begins.first[id].insert(b));
        }
        self.begin(&is_terminal, &mut begins);
        let follow = self.follow_parts(&is_terminal, &begins);
        // The bytes that follow any occurrence of a terminal follow the terminal.
        let mut out = vec![Bytes::default(); terminals.len()];
        for id in (0..n).filter(|&id| is_terminal(id)) {
            if let Some(&i) = regular[id].as_deref().and_then(|regex| by_text.get(regex)) {
                out[i].merge(follow[id]);
            }
        }
        out
    }

    /// Completes what begins parts from what begins terminals, up to the fixed point.
    fn begin(&self, is_terminal: &dyn Fn(Id) -> bool, begins: &mut Begins) {
        let Begins { nullable, first } = begins;
        let mut changed = true;
        while changed {
            changed = false;
            for id in (0..self.nodes.len()).filter(|&id| !is_terminal(id)) {
                let (empty, mut begin) = match &self.nodes[id] {
                    Node::Class(_) | Node::Token(_) => (false, Bytes::default()),
                    Node::Seq(parts) => {
                        let mut begin = Bytes::default();
                        let empty = parts.iter().all(|&part| {
                            begin.merge(first[part]);
                            nullable[part]
                        });
                        (empty, begin)
                    }
                    Node::Alt(parts) => {
                        let mut begin = Bytes::default();
                        for &part in parts {
                            begin.merge(first[part]);
                        }
                        (parts.iter().any(|&part| nullable[part]), begin)
                    }
                    Node::Repeat(part, min, _) => (*min == 0 || nullable[*part], first[*part]),
                    Node::Rule(rule) => self.rules[*rule]
                        .map_or((false, Bytes::default()), |body| {
                            (nullable[body], first[body])
                        }),
                };
                begin.merge(first[id]);
                changed |= nullable[id] != empty || begin != first[id];
                (nullable[id], first[id]) = (empty, begin);
            }
        }
    }

    /// The bytes that may follow each part, as a fixed point.
    fn follow_parts(&self, is_terminal: &dyn Fn(Id) -> bool, begins: &Begins) -> Vec<Bytes> {
        let Begins { nullable, first } = begins;
        let mut follow = vec![Bytes::default(); self.nodes.len()];
        let mut changed = true;
        while changed {
            changed = false;
            for id in (0..self.nodes.len()).filter(|&id| !is_terminal(id)) {
                let after = follow[id];
                match &self.nodes[id] {
                    Node::Seq(parts) => {
                        let mut after = after;
                        for &part in parts.iter().rev() {
                            changed |= follow[part].merge(after);
                            if !nullable[part] {
                                after = Bytes::default();
                            }
                            after.merge(first[part]);
                        }
                    }
                    Node::Alt(parts) => parts
                        .iter()
                        .for_each(|&part| changed |= follow[part].merge(after)),
                    Node::Repeat(part, ..) => {
                        changed |= follow[*part].merge(after);
                        changed |= follow[*part].merge(first[*part]);
                    }
                    Node::Rule(rule) => {
                        if let Some(body) = self.rules[*rule] {
                            changed |= follow[body].merge(after);
                        }
                    }
                    Node::Class(_) | Node::Token(_) => {}
                }
            }
        }
        follow
    }

    /// Writes the grammar in Lark: a rule for each part that is not a terminal, so that nothing
    /// nests.
    fn write(&self, regular: &[Option<String>]) -> String {
        let mut out = String::new();
        let root = self.rules[self.root].unwrap_or_default();
        let _ = writeln!(out, "start: n{root}");
        let mut seen = HashSet::from([root]);
        let mut stack = vec![root];
        while let Some(id) = stack.pop() {
            let name = |id: Id| format!("n{id}");
            if let Some(regex) = &regular[id] {
                let _ = writeln!(out, "n{id}: /{regex}/");
                continue;
            }
            let body = match &self.nodes[id] {
                Node::Seq(parts) => parts
                    .iter()
                    .map(|&part| name(part))
                    .collect::<Vec<_>>()
                    .join(" "),
                Node::Alt(parts) => parts
                    .iter()
                    .map(|&part| name(part))
                    .collect::<Vec<_>>()
                    .join(" | "),
                Node::Repeat(part, 0, None) => format!("{}*", name(*part)),
                Node::Repeat(part, 1, None) => format!("{}+", name(*part)),
                Node::Repeat(part, 0, Some(1)) => format!("{}?", name(*part)),
                Node::Repeat(_, _, Some(0)) => "\"\"".to_owned(),
                Node::Repeat(part, min, None) => format!("{}{{{min},}}", name(*part)),
                Node::Repeat(part, min, Some(max)) => format!("{}{{{min},{max}}}", name(*part)),
                Node::Rule(rule) => name(self.rules[*rule].unwrap_or_default()),
                Node::Token(token) => token.clone(),
                // Only an empty class is not a terminal.
                Node::Class(_) => "/[^\\x{0}-\\x{10ffff}]/".to_owned(),
            };
            let _ = writeln!(
                out,
                "n{id}: {}",
                if body.is_empty() { "\"\"" } else { &body }
            );
            stack.extend(
                self.children(id)
                    .into_iter()
                    .filter(|&child| seen.insert(child)),
            );
        }
        out
    }
}

struct Parser<'a> {
    chars: Vec<char>,
    at: usize,
    tree: &'a TokTrie,
    nodes: Vec<Node>,
    rules: Vec<Option<Id>>,
    /// Number of each rule, and the line that first names it.
    names: HashMap<String, (usize, usize)>,
}

impl<'a> Parser<'a> {
    fn new(source: &str, tree: &'a TokTrie) -> Self {
        let chars = source.chars().collect();
        Self {
            chars,
            at: 0,
            tree,
            nodes: Vec::new(),
            rules: Vec::new(),
            names: HashMap::new(),
        }
    }

    fn parse(mut self) -> Result<Gbnf, GrammarError> {
        self.space(true);
        while self.peek().is_some() {
            let name = self.name()?;
            self.space(false);
            if !self.eat("::=") {
                return Err(self.error("expected ::= behind the name of a rule"));
            }
            self.space(true);
            let body = self.alternatives(0)?;
            let rule = self.rule(name);
            // A rule may be defined twice; the last definition counts.
            self.rules[rule] = Some(body);
            match self.peek() {
                None | Some('\n' | '\r') => self.space(true),
                Some(c) => {
                    return Err(self.error(&format!("expected the end of the rule, found {c:?}")));
                }
            }
        }
        for (name, &(rule, line)) in &self.names {
            if self.rules[rule].is_none() {
                return Err(GrammarError::Line {
                    line,
                    message: format!("there is no rule {name:?}"),
                });
            }
        }
        let Some(&(root, _)) = self.names.get("root") else {
            return Err(GrammarError::Invalid {
                syntax: Syntax::Gbnf.name(),
                message: "there is no rule \"root\"".into(),
            });
        };
        Ok(Gbnf {
            nodes: self.nodes,
            rules: self.rules,
            root,
        })
    }

    fn error(&self, message: &str) -> GrammarError {
        let line = 1 + self.chars[..self.at].iter().filter(|&&c| c == '\n').count();
        GrammarError::Line {
            line,
            message: message.to_owned(),
        }
    }

    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn eat(&mut self, text: &str) -> bool {
        let n = text.chars().count();
        let found = self
            .chars
            .get(self.at..self.at + n)
            .is_some_and(|chars| chars.iter().copied().eq(text.chars()));
        self.at += if found { n } else { 0 };
        found
    }

    /// Skips white space and comments; also line ends if `lines`.
    fn space(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => self.at += 1,
                '\n' | '\r' if lines => self.at += 1,
                '#' => {
                    self.at += self.chars[self.at..]
                        .iter()
                        .position(|&c| c == '\n')
                        .unwrap_or(self.chars.len() - self.at)
                }
                _ => break,
            }
        }
    }

    fn name(&mut self) -> Result<String, GrammarError> {
        let is_name = |c: &char| c.is_ascii_alphanumeric() || *c == '-' || *c == '_';
        let name: String = self.chars[self.at..]
            .iter()
            .copied()
            .take_while(is_name)
            .collect();
        if name.is_empty() {
            return Err(self.error("expected the name of a rule"));
        }
        self.at += name.len();
        Ok(name)
    }

    fn rule(&mut self, name: String) -> usize {
        let line = 1 + self.chars[..self.at].iter().filter(|&&c| c == '\n').count();
        let next = self.names.len();
        let (rule, _) = *self.names.entry(name).or_insert((next, line));
        self.rules.resize(self.names.len(), None);
        rule
    }

    fn add(&mut self, node: Node) -> Result<Id, GrammarError> {
        if self.nodes.len() >= MAX_NODES {
            return Err(self.error(&format!("the grammar has more than {MAX_NODES} parts")));
        }
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    fn alternatives(&mut self, depth: usize) -> Result<Id, GrammarError> {
        if depth > MAX_DEPTH {
            return Err(GrammarError::TooDeep { limit: MAX_DEPTH });
        }
        let mut parts = vec![self.sequence(depth)?];
        while self.peek() == Some('|') {
            self.at += 1;
            self.space(true);
            parts.push(self.sequence(depth)?);
        }
        if let [part] = parts[..] {
            Ok(part)
        } else {
            self.add(Node::Alt(parts))
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<Id, GrammarError> {
        let mut parts = Vec::new();
        loop {
            let item = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    self.add(Node::Class(vec![
                        ('\0', '\u{d7ff}'),
                        ('\u{e000}', char::MAX),
                    ]))?
                }
                Some('(') => {
                    self.at += 1;
                    self.space(true);
                    let inner = self.alternatives(depth + 1)?;
                    if !self.eat(")") {
                        return Err(self.error("expected )"));
                    }
                    inner
                }
                Some('<') => self.token()?,
                Some('!') => {
                    return Err(self.error("that a token does not come cannot be enforced"));
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '-' || c == '_' => {
                    let name = self.name()?;
                    let rule = self.rule(name);
                    self.add(Node::Rule(rule))?
                }
                _ => break,
            };
            self.space(depth > 0);
            let item = self.repeat(item, depth)?;
            parts.push(item);
        }
        if let [part] = parts[..] {
            Ok(part)
        } else {
            self.add(Node::Seq(parts))
        }
    }

    fn repeat(&mut self, item: Id, depth: usize) -> Result<Id, GrammarError> {
        let mut item = item;
        loop {
            let (min, max) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => {
                    self.at += 1;
                    self.space(depth > 0);
                    let min = self
                        .number()?
                        .ok_or_else(|| self.error("expected a number behind {"))?;
                    self.space(depth > 0);
                    let max = if self.eat(",") {
                        self.space(depth > 0);
                        self.number()?
                    } else {
                        Some(min)
                    };
                    self.space(depth > 0);
                    if self.peek() != Some('}') {
                        return Err(self.error("expected } behind the numbers of a repetition"));
                    }
                    if max.is_some_and(|max| max < min) {
                        return Err(self.error("a repetition ends before it begins"));
                    }
                    (min, max)
                }
                _ => return Ok(item),
            };
            self.at += 1;
            self.space(depth > 0);
            item = self.add(Node::Repeat(item, min, max))?;
        }
    }

    fn number(&mut self) -> Result<Option<u32>, GrammarError> {
        let digits: String = self.chars[self.at..]
            .iter()
            .copied()
            .take_while(char::is_ascii_digit)
            .collect();
        self.at += digits.len();
        match digits.parse() {
            _ if digits.is_empty() => Ok(None),
            Ok(n) if n <= MAX_REPEAT => Ok(Some(n)),
            _ => Err(self.error(&format!("{digits} repetitions are more than {MAX_REPEAT}"))),
        }
    }

    fn literal(&mut self) -> Result<Id, GrammarError> {
        self.at += 1;
        let mut parts = Vec::new();
        while self.peek() != Some('"') {
            let c = self.character("a text")?;
            parts.push(self.add(Node::Class(vec![(c, c)]))?);
        }
        self.at += 1;
        if let [part] = parts[..] {
            Ok(part)
        } else {
            self.add(Node::Seq(parts))
        }
    }

    fn class(&mut self) -> Result<Id, GrammarError> {
        self.at += 1;
        let negated = self.eat("^");
        let mut ranges = Vec::new();
        while self.peek() != Some(']') {
            let from = self.character("a class")?;
            let mut to = from;
            if self.peek() == Some('-') && self.chars.get(self.at + 1) != Some(&']') {
                self.at += 1;
                to = self.character("a class")?;
            }
            if to < from {
                return Err(self.error(&format!("the range {from:?}-{to:?} is in the wrong order")));
            }
            ranges.push((from, to));
        }
        self.at += 1;
        ranges.sort_unstable();
        if negated {
            let (mut others, mut next) = (Vec::new(), Some('\0'));
            for (from, to) in ranges {
                if let Some(begin) = next.filter(|&begin| begin < from) {
                    // The character before `from`, skipping surrogates.
                    let end = char::from_u32(u32::from(from) - 1).unwrap_or('\u{d7ff}');
                    others.push((begin, end));
                }
                let after = if to == '\u{d7ff}' {
                    Some('\u{e000}')
                } else {
                    char::from_u32(u32::from(to) + 1)
                };
                next = next.and_then(|begin| after.map(|after| after.max(begin)));
            }
            others.extend(next.map(|begin| (begin, char::MAX)));
            ranges = others;
        }
        self.add(Node::Class(ranges))
    }

    /// Reads one character of a string or a class, possibly written as an escape.
    fn character(&mut self, place: &str) -> Result<char, GrammarError> {
        let Some(c) = self.peek() else {
            return Err(self.error(&format!("{place} has no end")));
        };
        self.at += 1;
        if c != '\\' {
            return Ok(c);
        }
        let escaped = self.peek();
        self.at += usize::from(escaped.is_some());
        let n_digits = match escaped {
            Some('t') => return Ok('\t'),
            Some('r') => return Ok('\r'),
            Some('n') => return Ok('\n'),
            Some(c @ ('\\' | '"' | '[' | ']')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => return Err(self.error("unknown escape")),
        };
        let digits: String = self.chars[self.at..]
            .iter()
            .copied()
            .take(n_digits)
            .collect();
        let value = (digits.chars().all(|c| c.is_ascii_hexdigit()) && digits.len() == n_digits)
            .then(|| {
                u32::from_str_radix(&digits, 16)
                    .ok()
                    .and_then(char::from_u32)
            })
            .flatten();
        self.at += if value.is_some() { n_digits } else { 0 };
        value.ok_or_else(|| {
            self.error(&format!(
                "expected the {n_digits} hexadecimal digits of a character"
            ))
        })
    }

    /// Reads `<[id]>` or `<text>`.
    fn token(&mut self) -> Result<Id, GrammarError> {
        let len = self.chars[self.at..]
            .iter()
            .position(|&c| c == '>')
            .unwrap_or(0);
        let text: String = self.chars[self.at..=self.at + len].iter().collect();
        let by_id = text
            .strip_prefix("<[")
            .and_then(|rest| rest.strip_suffix("]>"))
            .and_then(|id| id.parse().ok());
        let marked = [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat();
        let id = by_id.or_else(|| self.tree.token_id_at_bytes(&marked));
        let id = id.or_else(|| self.tree.token_id_at_bytes(text.as_bytes()));
        let Some(id) = id.filter(|&id: &u32| (id as usize) < self.tree.vocab_size()) else {
            return Err(self.error(&format!("the vocabulary has no token {text}")));
        };
        self.at += len + 1;
        self.add(Node::Token(format!("<[{id}]>")))
    }
}
