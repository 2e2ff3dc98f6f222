//! Reads Lark grammars.

use super::syntax::{Grammar, Node, Rule};
use super::words::{Token, words};
use crate::serve::api::responses::grammar::regex;

/// Most rules.
const MAX_RULES: usize = 1000;
/// Deepest nesting of groups.
const MAX_GROUPS: usize = 64;
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

/// Reads the words of a grammar.
pub(super) struct Parser {
    words: Vec<(Token, usize)>,
    at: usize,
    /// Groups that are open, in which line ends say nothing.
    groups: usize,
}

impl Parser {
    pub(super) fn of(source: &str) -> Result<Parser, String> {
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

    pub(super) fn grammar(mut self) -> Result<Grammar, String> {
        let mut grammar = Grammar::default();
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
