//! Expressions: Jinja2's grammar, written in the engine's.

use super::PREFIX;
use super::macros::Variadic;
use super::tokens::{Token, TokenKind, number, string};
use std::collections::HashMap;
use std::fmt::Write;

/// Deepest nesting of an expression; the engine's own limit is 150.
const MAX_DEPTH: usize = 70;

/// Reader of the tokens of a tag. Each method writes an expression that needs no brackets around
/// it, with the line ends between its tokens.
pub(super) struct Parser<'a> {
    pub(super) tokens: &'a [Token<'a>],
    pub(super) at: usize,
    pub(super) depth: usize,
    pub(super) variadic: &'a HashMap<String, Variadic>,
}

impl<'a> Parser<'a> {
    pub(super) fn line(&self) -> usize {
        let read = &self.tokens[..self.tokens.len().min(self.at + 1)];
        read.iter()
            .map(|t| t.lines + t.text.matches('\n').count())
            .sum()
    }

    pub(super) fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).copied()
    }

    pub(super) fn is(&self, text: &str) -> bool {
        self.is_at(self.at, text)
    }

    fn is_at(&self, at: usize, text: &str) -> bool {
        let token = self.tokens.get(at);
        token.is_some_and(|token| token.text == text && token.kind != TokenKind::Text)
    }

    /// The next token unchanged, with the line ends before it.
    pub(super) fn take(&mut self) -> Result<String, String> {
        let token = self.peek().ok_or("unexpected end of the tag")?;
        self.at += 1;
        Ok("\n".repeat(token.lines) + token.text)
    }

    /// The line ends before `text`, if that comes.
    pub(super) fn eat(&mut self, text: &str) -> Option<String> {
        let lines = self.peek().filter(|_| self.is(text))?.lines;
        self.at += 1;
        Some("\n".repeat(lines))
    }

    pub(super) fn expect(&mut self, text: &str) -> Result<String, String> {
        self.eat(text).ok_or_else(|| self.unexpected(text))
    }

    fn unexpected(&self, wanted: &str) -> String {
        match self.peek() {
            Some(token) => format!("unexpected {:?}, expected {wanted}", token.text),
            None => format!("unexpected end of the tag, expected {wanted}"),
        }
    }

    pub(super) fn whole(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<String, String>,
    ) -> Result<String, String> {
        let out = read(self)?;
        match self.peek() {
            None => Ok(out),
            Some(token) => Err(format!("unexpected {:?}", token.text)),
        }
    }

    fn nested(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<String, String>,
    ) -> Result<String, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(format!(
                "an expression is nested more than {MAX_DEPTH} deep"
            ));
        }
        let out = read(self);
        self.depth -= 1;
        out
    }

    /// Expressions separated by commas, which are a tuple; or one.
    pub(super) fn tuple(&mut self, conditional: bool) -> Result<String, String> {
        let first = self.expression(conditional)?;
        if !self.is(",") {
            return Ok(first);
        }
        let mut out = format!("{PREFIX}tuple([{first}");
        while let Some(lines) = self.eat(",") {
            out += &lines;
            let ends = self.peek().is_none() || self.is(")") || self.is("=");
            if ends {
                break;
            }
            _ = write!(out, ", {}", self.expression(conditional)?);
        }
        Ok(out + "])")
    }

    pub(super) fn expression(&mut self, conditional: bool) -> Result<String, String> {
        self.nested(|parser| {
            let mut out = parser.logical("or")?;
            while conditional && let Some(lines) = parser.eat("if") {
                let condition = parser.logical("or")?;
                out = format!("({out}{lines} if {condition}");
                if let Some(lines) = parser.eat("else") {
                    _ = write!(out, "{lines} else {}", parser.expression(true)?);
                }
                out.push(')');
            }
            Ok(out)
        })
    }

    /// `or`, and below it `and`.
    fn logical(&mut self, word: &str) -> Result<String, String> {
        let operand = |parser: &mut Self| match word {
            "or" => parser.logical("and"),
            _ => parser.negation(),
        };
        let first = operand(self)?;
        if !self.is(word) {
            return Ok(first);
        }
        let mut out = format!("({first}");
        while let Some(lines) = self.eat(word) {
            _ = write!(out, "{lines} {word} {}", operand(self)?);
        }
        Ok(out + ")")
    }

    fn negation(&mut self) -> Result<String, String> {
        match self.eat("not") {
            Some(lines) => self.nested(|p| Ok(format!("({lines}not {})", p.negation()?))),
            None => self.comparison(),
        }
    }

    fn comparison(&mut self) -> Result<String, String> {
        let mut out = self.sum()?;
        let mut compares = false;
        loop {
            let operator = match self.peek() {
                Some(token) if token.kind == TokenKind::Operator => {
                    ["==", "!=", "<", "<=", ">", ">="]
                        .into_iter()
                        .find(|op| *op == token.text)
                }
                _ if self.is("in") => Some("in"),
                _ if self.is("not") && self.is_at(self.at + 1, "in") => Some("not in"),
                _ => None,
            };
            let Some(operator) = operator else { break };
            compares = true;
            for word in operator.split(' ') {
                out += &self.expect(word)?;
            }
            _ = write!(out, " {operator} {}", self.sum()?);
        }
        Ok(if compares { format!("({out})") } else { out })
    }

    fn sum(&mut self) -> Result<String, String> {
        self.chain(&[("+", Some("add")), ("-", None)], |parser| {
            parser.chain(&[("~", Some("concat"))], |parser| {
                let product = [
                    ("*", Some("mul")),
                    ("%", Some("mod")),
                    ("/", Some("div")),
                    ("//", Some("floordiv")),
                ];
                parser.chain(&product, |parser| {
                    parser.chain(&[("**", None)], |parser| parser.unary(true))
                })
            })
        })
    }

    /// Operands from left to right; operators with a function become calls of it, with as many
    /// arguments as there are operands in a row.
    fn chain(
        &mut self,
        operators: &[(&str, Option<&str>)],
        operand: impl Fn(&mut Self) -> Result<String, String>,
    ) -> Result<String, String> {
        let mut out = operand(self)?;
        let mut n_changes = 0;
        while let Some(&(operator, function)) = operators.iter().find(|(text, _)| self.is(text)) {
            n_changes += 1;
            if n_changes > MAX_DEPTH {
                return Err(format!("more than {MAX_DEPTH} operators that alternate"));
            }
            let separator = match function {
                Some(function) => {
                    out = format!("{PREFIX}{function}({out}");
                    ","
                }
                None => {
                    out = format!("({out}");
                    operator
                }
            };
            while let Some(lines) = self.eat(operator) {
                _ = write!(out, "{lines} {separator} {}", operand(self)?);
                // The engine reads powers from the right.
                if operator == "**" {
                    break;
                }
            }
            out.push(')');
        }
        Ok(out)
    }

    fn unary(&mut self, filtered: bool) -> Result<String, String> {
        let node = if let Some(lines) = self.eat("-") {
            self.nested(|p| Ok(format!("({lines}-{})", p.unary(false)?)))?
        } else if let Some(lines) = self.eat("+") {
            self.nested(|p| Ok(lines + &p.unary(false)?))?
        } else {
            self.primary()?
        };
        let node = self.postfix(node)?;
        if filtered {
            self.filters(node)
        } else {
            Ok(node)
        }
    }

    pub(super) fn primary(&mut self) -> Result<String, String> {
        let token = self
            .peek()
            .ok_or("unexpected end of the tag, expected an expression")?;
        let lines = "\n".repeat(token.lines);
        match (token.kind, token.text) {
            (TokenKind::Name, _) => self.take(),
            (TokenKind::Number, text) => {
                self.at += 1;
                Ok(lines + &number(text))
            }
            (TokenKind::Text, _) => {
                let mut texts = Vec::new();
                while let Some(token) = self.peek().filter(|t| t.kind == TokenKind::Text) {
                    self.at += 1;
                    texts.push("\n".repeat(token.lines) + &string(token.text)?);
                }
                // Strings side by side are one.
                Ok(match &texts[..] {
                    [text] if !text.contains("\" ~ \n\"") => text.clone(),
                    _ => format!("({})", texts.join(" ~ ")),
                })
            }
            (TokenKind::Operator, "(") => {
                self.at += 1;
                if let Some(more) = self.eat(")") {
                    return Ok(format!("{lines}{more}{PREFIX}tuple([])"));
                }
                let inner = self.nested(|p| p.tuple(true))?;
                Ok(format!("{lines}({inner}{})", self.expect(")")?))
            }
            (TokenKind::Operator, "[") => {
                self.at += 1;
                let items = self.nested(|p| p.items("]", |p| p.expression(true)))?;
                Ok(format!("{lines}{PREFIX}list([{items}])"))
            }
            (TokenKind::Operator, "{") => {
                self.at += 1;
                let pair = |p: &mut Self| {
                    let key = p.expression(true)?;
                    let lines = p.expect(":")?;
                    Ok(format!("{key}{lines}: {}", p.expression(true)?))
                };
                let items = self.nested(|p| p.items("}", pair))?;
                Ok(format!("{lines}{{{items}}}"))
            }
            _ => Err(self.unexpected("an expression")),
        }
    }

    /// Items separated by commas, up to and without `close`.
    pub(super) fn items(
        &mut self,
        close: &str,
        item: impl Fn(&mut Self) -> Result<String, String>,
    ) -> Result<String, String> {
        let mut out = String::new();
        loop {
            if let Some(lines) = self.eat(close) {
                return Ok(out + &lines);
            }
            out += &item(self)?;
            match self.eat(",") {
                Some(lines) => out += &format!("{lines}, "),
                None => return Ok(out + &self.expect(close)?),
            }
        }
    }

    pub(super) fn postfix(&mut self, mut node: String) -> Result<String, String> {
        loop {
            if let Some(lines) = self.eat(".") {
                node += &lines;
                match self.peek().map(|token| token.kind) {
                    Some(TokenKind::Name) => _ = write!(node, ".{}", self.take()?),
                    Some(TokenKind::Number) => _ = write!(node, "[{}]", self.take()?),
                    _ => return Err(self.unexpected("a name")),
                }
            } else if let Some(lines) = self.eat("[") {
                node = self.subscript(node + &lines)?;
            } else if let Some(lines) = self.eat("(") {
                node = self.call(node + &lines)?;
            } else {
                return Ok(node);
            }
        }
    }

    fn subscript(&mut self, node: String) -> Result<String, String> {
        self.nested(|parser| {
            let bound = |p: &mut Self| {
                let is_missing = p.is(":") || p.is("]");
                if is_missing {
                    Ok("none".to_owned())
                } else {
                    p.expression(true)
                }
            };
            let begins = parser.is(":");
            let first = bound(parser)?;
            if !begins && !parser.is(":") {
                let mut key = first;
                if parser.is(",") {
                    let rest = parser.expect(",")?;
                    key = format!("{PREFIX}tuple([{key}{rest}, {}])", parser.tuple(true)?);
                }
                return Ok(format!("{node}[{key}{}]", parser.expect("]")?));
            }
            let mut bounds = vec![first];
            while let Some(lines) = parser.eat(":") {
                bounds.push(lines + &bound(parser)?);
            }
            bounds.resize(bounds.len().max(3), "none".to_owned());
            if bounds.len() > 3 {
                return Err("a slice has more than three parts".into());
            }
            let lines = parser.expect("]")?;
            Ok(format!(
                "{PREFIX}slice({node}, {}{lines})",
                bounds.join(", ")
            ))
        })
    }

    fn call(&mut self, node: String) -> Result<String, String> {
        let variadic = self.variadic.get(node.trim());
        let Some(of) = variadic else {
            let arguments = self.nested(|p| p.items(")", Self::argument))?;
            return Ok(format!("{node}({arguments})"));
        };
        // Arguments without a parameter of the macro become `varargs` and `kwargs`.
        let (mut out, mut positional, mut named) = (String::new(), String::new(), String::new());
        let mut n = 0;
        self.nested(|parser| {
            parser.items_each(")", |parser| {
                let key = parser.peek().map_or("", |token| token.text);
                let is_named = parser.is_at(parser.at + 1, "=");
                if is_named && of.named && !of.parameters.iter().any(|p| p == key) {
                    parser.at += 2;
                    _ = write!(named, "\"{key}\": {}, ", parser.expression(true)?);
                } else if !is_named && of.positional && n >= of.parameters.len() {
                    _ = write!(positional, "{}, ", parser.expression(true)?);
                } else {
                    _ = write!(out, "{}, ", parser.argument()?);
                }
                n += usize::from(!is_named);
                Ok(())
            })
        })?;
        if of.positional {
            _ = write!(out, "varargs={PREFIX}tuple([{positional}]), ");
        }
        if of.named {
            _ = write!(out, "kwargs={{{named}}}, ");
        }
        Ok(format!("{node}({out})"))
    }

    /// [`Parser::items`] without what they write.
    fn items_each(
        &mut self,
        close: &str,
        mut item: impl FnMut(&mut Self) -> Result<(), String>,
    ) -> Result<String, String> {
        while self.eat(close).is_none() {
            item(self)?;
            if self.eat(",").is_none() {
                self.expect(close)?;
                break;
            }
        }
        Ok(String::new())
    }

    pub(super) fn argument(&mut self) -> Result<String, String> {
        let mut out = String::new();
        for splat in ["**", "*"] {
            if let Some(lines) = self.eat(splat) {
                return Ok(format!("{lines}{splat}{}", self.expression(true)?));
            }
        }
        if self.is_at(self.at + 1, "=") {
            out += &self.take()?;
            out += &self.expect("=")?;
            out.push('=');
        }
        Ok(out + &self.expression(true)?)
    }

    /// Filters and tests after an expression.
    fn filters(&mut self, mut node: String) -> Result<String, String> {
        let mut is_bare = true;
        loop {
            if let Some(lines) = self.eat("|") {
                _ = write!(node, "{lines} | {}", self.filter()?);
                is_bare = false;
            } else if let Some(lines) = self.eat("is") {
                let negated = self.eat("not").map(|lines| format!("{lines}not "));
                let test = self.test()?;
                node = format!("({node}{lines} is {}{test})", negated.unwrap_or_default());
                is_bare = true;
            } else if self.is("(") {
                node = self.postfix(format!("({node})"))?;
            } else {
                return Ok(if is_bare { node } else { format!("({node})") });
            }
        }
    }

    /// A filter with its arguments.
    pub(super) fn filter(&mut self) -> Result<String, String> {
        let mut out = self.name()?;
        if let Some(lines) = self.eat("(") {
            let arguments = self.nested(|p| p.items(")", Self::argument))?;
            _ = write!(out, "{lines}({arguments})");
        }
        Ok(out)
    }

    fn test(&mut self) -> Result<String, String> {
        let name = self.name()?;
        if let Some(lines) = self.eat("(") {
            let arguments = self.nested(|p| p.items(")", Self::argument))?;
            return Ok(format!("{name}{lines}({arguments})"));
        }
        let ends = ["else", "or", "and", "is", "if", "in", "not"];
        let takes = match self.peek() {
            Some(token) if token.kind == TokenKind::Operator => matches!(token.text, "[" | "{"),
            Some(token) if token.kind == TokenKind::Name => !ends.contains(&token.text),
            other => other.is_some(),
        };
        if !takes {
            return Ok(name);
        }
        let argument = self.primary()?;
        Ok(format!("{name}({})", self.postfix(argument)?))
    }

    pub(super) fn name(&mut self) -> Result<String, String> {
        match self.peek() {
            Some(token) if token.kind == TokenKind::Name => self.take(),
            _ => Err(self.unexpected("a name")),
        }
    }
}
