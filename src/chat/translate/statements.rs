//! Statements: only their expressions change.

use super::expressions::Parser;
use std::fmt::Write;

impl Parser<'_> {
    /// A statement; `source` is its text.
    pub(super) fn statement(&mut self, source: &str) -> Result<String, String> {
        let Some(first) = self.peek() else {
            return Ok(source.to_owned());
        };
        let word = first.text;
        let head = self.take()?;
        match word {
            "if" | "elif" => self.whole(|p| Ok(format!("{head} {}", p.tuple(true)?))),
            "do" => self.whole(|p| Ok(format!("{head} {}", p.expression(true)?))),
            "for" => self.whole(|p| p.for_statement(head)),
            "set" => self.whole(|p| p.set_statement(head)),
            "with" => self.whole(|p| {
                let pair = |p: &mut Self| {
                    let name = p.name()?;
                    let lines = p.expect("=")?;
                    let value = p.expression(true)?;
                    Ok::<_, String>(format!("{name}{lines} = {value}"))
                };
                let mut pairs = Vec::new();
                while p.peek().is_some() {
                    pairs.push(pair(p)?);
                    if let Some(lines) = p.eat(",") {
                        pairs.extend((!lines.is_empty()).then_some(lines));
                    }
                }
                Ok(format!("{head} {}", pairs.join(", ")))
            }),
            "macro" => self.whole(|p| {
                let name = p.name()?;
                let lines = p.expect("(")?;
                let more = p.variadic.get(name.trim());
                let mut parameters = p.items(")", Self::parameter)?;
                if let Some(of) = more {
                    let extra = [(of.positional, "varargs=[]"), (of.named, "kwargs={}")];
                    for (_, extra) in extra.into_iter().filter(|(is, _)| *is) {
                        let comma = if parameters.trim().is_empty() {
                            ""
                        } else {
                            ", "
                        };
                        _ = write!(parameters, "{comma}{extra}");
                    }
                }
                Ok(format!("{head} {name}{lines}({parameters})"))
            }),
            "call" => self.whole(|p| {
                let mut out = head;
                if let Some(lines) = p.eat("(") {
                    _ = write!(out, "{lines}({})", p.items(")", Self::parameter)?);
                }
                let callee = p.primary()?;
                Ok(format!("{out} {}", p.postfix(callee)?))
            }),
            "filter" => self.whole(|p| {
                let mut out = format!("{head} {}", p.filter()?);
                while let Some(lines) = p.eat("|") {
                    _ = write!(out, "{lines} | {}", p.filter()?);
                }
                Ok(out)
            }),
            // Hugging Face's marker of assistant text prints nothing: a scope.
            "generation" => Ok(head.replace(word, "with")),
            "endgeneration" => Ok(head.replace(word, "endwith")),
            _ => Ok(source.to_owned()),
        }
    }

    /// A parameter of a macro.
    fn parameter(&mut self) -> Result<String, String> {
        let name = self.name()?;
        match self.eat("=") {
            Some(lines) => Ok(format!("{name}{lines}={}", self.expression(true)?)),
            None => Ok(name),
        }
    }

    /// Names and brackets that are assigned to, up to a token that `ends` them.
    fn targets(&mut self, ends: &[&str]) -> Result<String, String> {
        let mut out = String::new();
        while self.peek().is_some() && !ends.iter().any(|end| self.is(end)) {
            out += &self.take()?;
        }
        Ok(out)
    }

    fn for_statement(&mut self, head: String) -> Result<String, String> {
        let targets = self.targets(&["in"])?;
        let lines = self.expect("in")?;
        let mut out = format!("{head} {targets}{lines} in {}", self.tuple(false)?);
        if let Some(lines) = self.eat("if") {
            _ = write!(out, "{lines} if {}", self.expression(true)?);
        }
        if let Some(lines) = self.eat("recursive") {
            _ = write!(out, "{lines} recursive");
        }
        Ok(out)
    }

    fn set_statement(&mut self, head: String) -> Result<String, String> {
        let targets = self.targets(&["=", "|"])?;
        let mut out = format!("{head} {targets}");
        if let Some(lines) = self.eat("=") {
            _ = write!(out, "{lines} = {}", self.tuple(true)?);
            return Ok(out);
        }
        while let Some(lines) = self.eat("|") {
            _ = write!(out, "{lines} | {}", self.filter()?);
        }
        Ok(out)
    }
}
