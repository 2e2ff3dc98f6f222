//! Macros that take more arguments than they name.

use super::tags::{Kind, next_tag};
use super::tokens::{Token, TokenKind, tokens};
use std::collections::HashMap;

/// Parameters of the macros that take more arguments than they name: by `varargs` or `kwargs`.
pub(super) struct Variadic {
    pub(super) parameters: Vec<String>,
    pub(super) positional: bool,
    pub(super) named: bool,
}

pub(super) fn variadic_macros(source: &str) -> HashMap<String, Variadic> {
    let mut found = HashMap::new();
    let (mut at, mut open) = (0, Vec::new());
    while let Some(tag) = next_tag(source, at) {
        at = tag.end;
        // Only these have parts: what breaks off may be shorter than its marks.
        if !matches!(tag.kind, Kind::Expression | Kind::Statement) {
            continue;
        }
        let (_, inner, _) = tag.parts(source);
        let Ok(tokens) = tokens(inner) else {
            continue;
        };
        let has = |name: &str| {
            let is = |t: &Token<'_>| t.kind == TokenKind::Name && t.text == name;
            tokens.iter().any(is)
        };
        match tokens.first().map(|token| token.text) {
            Some("macro") if tag.kind == Kind::Statement => {
                let name = tokens.get(1).map_or("", |token| token.text);
                let mut depth = 0;
                let mut parameters = Vec::new();
                for pair in tokens.windows(2).skip(1) {
                    match pair[0].text {
                        "(" | "[" | "{" => depth += 1,
                        ")" | "]" | "}" => depth -= 1,
                        _ => {}
                    }
                    let begins = matches!(pair[0].text, "(" | ",") && depth == 1;
                    if begins && pair[1].kind == TokenKind::Name {
                        parameters.push(pair[1].text.to_owned());
                    }
                }
                open.push((
                    name.to_owned(),
                    Variadic {
                        parameters,
                        positional: false,
                        named: false,
                    },
                ));
            }
            Some("endmacro") if tag.kind == Kind::Statement => {
                found.extend(open.pop().filter(|(_, of)| of.positional || of.named));
            }
            _ => {
                if let Some((_, of)) = open.last_mut() {
                    of.positional |= has("varargs");
                    of.named |= has("kwargs");
                }
            }
        }
    }
    found
}
