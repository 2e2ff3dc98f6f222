//! Lark grammars as regular expressions: rules and terminals, strings, regular expressions, ranges,
//! groups, repetitions, `%ignore` and `%import common.…`.

use super::budget::{Budget, MAX_PATTERN};
use super::regex;
use std::collections::HashMap;
use std::rc::Rc;
use std::str::Chars;

/// Most rules.
const MAX_RULES: usize = 1000;
/// Deepest nesting of groups, and of rules that refer to one another.
const MAX_GROUPS: usize = 64;
const MAX_NESTING: usize = 128;
/// How deep rules that contain themselves are nested at most.
const MAX_DEPTH: usize = 8;
/// Most repetitions that a number asks for.
const MAX_TIMES: u32 = 10_000;

/// Lark's common terminals that grammars import.
const COMMON: &[(&str, &str)] = &[
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[0-9A-Fa-f]"),
    ("INT", "[0-9]+"),
    ("SIGNED_INT", "[+-]?[0-9]+"),
    ("DECIMAL", r"([0-9]+\.[0-9]*|\.[0-9]+)"),
    (
        "FLOAT",
        r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    ),
    (
        "SIGNED_FLOAT",
        r"[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    ),
    ("NUMBER", r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"),
    (
        "SIGNED_NUMBER",
        r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    ),
    ("ESCAPED_STRING", r#""([^"\\\n]|\\.)*""#),
    ("LCASE_LETTER", "[a-z]"),
    ("UCASE_LETTER", "[A-Z]"),
    ("LETTER", "[A-Za-z]"),
    ("WORD", "[A-Za-z]+"),
    ("CNAME", "[_A-Za-z][_A-Za-z0-9]*"),
    ("WS_INLINE", r"[ \t]+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("CR", r"\r"),
    ("LF", r"\n"),
    ("NEWLINE", r"(\r?\n)+"),
    ("SH_COMMENT", r"#[^\n]*"),
    ("CPP_COMMENT", r"//[^\n]*"),
    ("SQL_COMMENT", r"--[^\n]*"),
    ("C_COMMENT", r"/\*([^*]|\*+[^*/])*\*+/"),
];

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

/// What a rule or terminal says.
#[derive(Debug)]
enum Node {
    /// A pattern that may stand beside others.
    Pattern(String),
    Name(String),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    /// At least and at most so many.
    Repeat(Box<Node>, u32, Option<u32>),
}

struct Rule {
    body: Node,
    /// Whether texts that are ignored may come within it.
    is_terminal: bool,
}

struct Grammar {
    rules: Vec<Rule>,
    names: HashMap<String, usize>,
    /// What may come between terminals.
    ignored: Vec<Node>,
}

impl Node {
    /// The names in it.
    fn names<'a>(&'a self, all: &mut Vec<&'a str>) {
        match self {
            Node::Pattern(_) => {}
            Node::Name(name) => all.push(name),
            Node::Sequence(nodes) | Node::Choice(nodes) => {
                nodes.iter().for_each(|node| node.names(all))
            }
            Node::Repeat(node, ..) => node.names(all),
        }
    }
}

impl Grammar {
    /// Which rules contain themselves.
    fn recursive(&self) -> Vec<bool> {
        let uses: Vec<Vec<usize>> = self
            .rules
            .iter()
            .map(|rule| {
                let mut names = Vec::new();
                rule.body.names(&mut names);
                names
                    .iter()
                    .filter_map(|name| self.names.get(*name).copied())
                    .collect()
            })
            .collect();
        let reaches_itself = |start: usize| {
            let (mut seen, mut left) = (vec![false; uses.len()], uses[start].clone());
            while let Some(rule) = left.pop() {
                if rule == start {
                    return true;
                }
                if !std::mem::replace(&mut seen[rule], true) {
                    left.extend(&uses[rule]);
                }
            }
            false
        };
        (0..uses.len()).map(reaches_itself).collect()
    }
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

/// A word of a grammar.
#[derive(Clone, Debug, PartialEq)]
enum Token {
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
fn words(source: &str) -> Result<Vec<(Token, usize)>, String> {
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

/// Reads the words of a grammar.
struct Parser {
    words: Vec<(Token, usize)>,
    at: usize,
    /// Groups that are open, in which line ends say nothing.
    groups: usize,
}

impl Parser {
    fn of(source: &str) -> Result<Parser, String> {
        Ok(Parser {
            words: words(source)?,
            at: 0,
            groups: 0,
        })
    }

    fn peek(&mut self) -> Option<&Token> {
        while self.groups > 0 && matches!(self.words.get(self.at), Some((Token::LineEnd, _))) {
            self.at += 1;
        }
        self.words.get(self.at).map(|(token, _)| token)
    }

    fn next(&mut self) -> Option<Token> {
        let token = self.peek().cloned();
        self.at += usize::from(token.is_some());
        token
    }

    fn eat(&mut self, sign: &str) -> bool {
        let found = matches!(self.peek(), Some(Token::Sign(found)) if *found == sign);
        self.at += usize::from(found);
        found
    }

    fn wrong(&self, what: &str) -> String {
        let line = self
            .words
            .get(self.at.saturating_sub(1))
            .map_or(1, |(_, line)| *line);
        format!("line {line}: {what}")
    }

    fn need(&mut self, sign: &str) -> Result<(), String> {
        match self.eat(sign) {
            true => Ok(()),
            false => Err(self.wrong(&format!("expected {sign:?} next"))),
        }
    }

    fn need_name(&mut self) -> Result<String, String> {
        match self.next() {
            Some(Token::Name(name)) => Ok(name),
            _ => Err(self.wrong("expected a name")),
        }
    }

    fn grammar(mut self) -> Result<Grammar, String> {
        let mut grammar = Grammar {
            rules: Vec::new(),
            names: HashMap::new(),
            ignored: Vec::new(),
        };
        while let Some(token) = self.next() {
            match token {
                Token::LineEnd => continue,
                Token::Directive(name) if name == "ignore" => {
                    let node = self.choices()?;
                    grammar.ignored.push(node);
                }
                Token::Directive(name) if name == "import" => self.import(&mut grammar)?,
                Token::Directive(name) => {
                    return Err(self.wrong(&format!("%{name} is not supported")));
                }
                Token::Name(name) => {
                    if self.eat(".") && !matches!(self.next(), Some(Token::Number(_))) {
                        return Err(self.wrong("expected a priority"));
                    }
                    self.need(":")?;
                    let body = self.choices()?;
                    self.add(&mut grammar, name, body)?;
                }
                _ => return Err(self.wrong("expected a rule")),
            }
            if !matches!(self.peek(), None | Some(Token::LineEnd)) {
                self.at += 1;
                return Err(self.wrong("it goes on with what is not supported here"));
            }
        }
        Ok(grammar)
    }

    fn add(&self, grammar: &mut Grammar, name: String, body: Node) -> Result<(), String> {
        if grammar.rules.len() == MAX_RULES {
            return Err(format!("it has more than {MAX_RULES} rules"));
        }
        let is_terminal = name
            .trim_start_matches('_')
            .starts_with(|c: char| c.is_ascii_uppercase());
        if grammar.names.contains_key(&name) {
            return Err(self.wrong(&format!("{name:?} is there already")));
        }
        grammar.names.insert(name, grammar.rules.len());
        grammar.rules.push(Rule { body, is_terminal });
        Ok(())
    }

    /// `common.NAME`, `common.NAME -> OTHER` or `common (NAME, NAME)`.
    fn import(&mut self, grammar: &mut Grammar) -> Result<(), String> {
        if self.need_name()? != "common" {
            return Err(self.wrong("only `common` can be imported from"));
        }
        let mut names = Vec::new();
        if self.eat("(") {
            loop {
                names.push((self.need_name()?, None));
                if !self.eat(",") {
                    break;
                }
            }
            self.need(")")?;
        } else {
            self.need(".")?;
            let name = self.need_name()?;
            let alias = match self.eat("->") {
                true => Some(self.need_name()?),
                false => None,
            };
            names.push((name, alias));
        }
        for (name, alias) in names {
            let found = COMMON.iter().find(|(common, _)| *common == name);
            let (_, source) =
                found.ok_or_else(|| self.wrong(&format!("`common` has no {name:?} here")))?;
            let body = Node::Pattern(regex::part(source, "")?);
            self.add(grammar, alias.unwrap_or(name), body)?;
        }
        Ok(())
    }

    fn choices(&mut self) -> Result<Node, String> {
        self.eat_or();
        let mut all = vec![self.sequence()?];
        while self.eat_or() {
            all.push(self.sequence()?);
        }
        Ok(match all.len() {
            1 => all.remove(0),
            _ => Node::Choice(all),
        })
    }

    /// Takes the `|` of another alternative, which may begin a line.
    fn eat_or(&mut self) -> bool {
        let line_ends = self.words[self.at..]
            .iter()
            .take_while(|(token, _)| *token == Token::LineEnd);
        let at = self.at + line_ends.count();
        let found = matches!(self.words.get(at), Some((Token::Sign("|"), _)));
        if found {
            self.at = at + 1;
        }
        found
    }

    fn sequence(&mut self) -> Result<Node, String> {
        let mut all = Vec::new();
        while matches!(
            self.peek(),
            Some(Token::Name(_) | Token::Text(..) | Token::Regex(..) | Token::Sign("(" | "["))
        ) {
            let item = self.item()?;
            all.push(item);
        }
        if self.eat("->") {
            // The name of the tree's node.
            self.need_name()?;
        }
        Ok(Node::Sequence(all))
    }

    fn item(&mut self) -> Result<Node, String> {
        let atom = self.atom()?;
        let (min, max) = match self.peek() {
            Some(Token::Sign("*")) => (0, None),
            Some(Token::Sign("+")) => (1, None),
            Some(Token::Sign("?")) => (0, Some(1)),
            Some(Token::Sign("~")) => {
                self.at += 1;
                let min = self.times()?;
                let max = match self.eat("..") {
                    true => self.times()?,
                    false => min,
                };
                if max < min {
                    return Err(self.wrong("a range of repetitions is in the wrong order"));
                }
                return Ok(Node::Repeat(Box::new(atom), min, Some(max)));
            }
            _ => return Ok(atom),
        };
        self.at += 1;
        Ok(Node::Repeat(Box::new(atom), min, max))
    }

    fn times(&mut self) -> Result<u32, String> {
        match self.next() {
            Some(Token::Number(n)) if n <= MAX_TIMES => Ok(n),
            _ => Err(self.wrong(&format!("expected a number of at most {MAX_TIMES}"))),
        }
    }

    fn atom(&mut self) -> Result<Node, String> {
        Ok(match self.next() {
            Some(Token::Name(name)) => Node::Name(name),
            Some(Token::Text(from, _)) if self.eat("..") => match self.next() {
                Some(Token::Text(to, _)) => {
                    let range = regex::range(&from, &to).map_err(|what| self.wrong(&what))?;
                    Node::Pattern(range)
                }
                _ => return Err(self.wrong("a range has no end")),
            },
            Some(Token::Text(text, is_caseless)) => {
                Node::Pattern(regex::literal(&text, is_caseless))
            }
            Some(Token::Regex(source, flags)) => {
                let pattern = regex::part(&source, &flags).map_err(|what| self.wrong(&what))?;
                Node::Pattern(pattern)
            }
            Some(Token::Sign(open @ ("(" | "["))) => {
                if self.groups == MAX_GROUPS {
                    return Err(self.wrong(&format!("groups nest deeper than {MAX_GROUPS}")));
                }
                self.groups += 1;
                let node = self.choices()?;
                let is_closed = self.eat(if open == "(" { ")" } else { "]" });
                self.groups -= 1;
                if !is_closed {
                    return Err(self.wrong("a group has no end"));
                }
                match open {
                    "(" => node,
                    _ => Node::Repeat(Box::new(node), 0, Some(1)),
                }
            }
            _ => return Err(self.wrong("expected a rule, a string or a regular expression")),
        })
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
