//! Grammars of texts that tools take, as patterns of JSON Schema.
//!
//! Models write calls in a format of their own, in which a text may be a JSON string, and all that
//! the formats can enforce of it is a schema. A grammar whose rules do not contain themselves is a
//! regular expression. Where they do, they are nested as deep as a pattern has room for: each text
//! that is written is one of the grammar.

mod budget;
mod lark;
mod regex;

pub(super) use budget::Budget;

/// Most bytes of a definition.
const MAX_DEFINITION: usize = 32 << 10;
/// A grammar that can be enforced.
#[derive(Debug)]
pub(super) struct Grammar {
    /// An ECMAScript regular expression of the whole text.
    pub(super) pattern: String,
    /// How deep rules that contain themselves are nested, if there are any.
    pub(super) max_depth: Option<usize>,
}

impl Grammar {
    /// The texts of a Lark grammar's rule `start`.
    pub(super) fn lark(definition: &str, budget: &mut Budget) -> Result<Grammar, String> {
        check_length(definition)?;
        let (pattern, max_depth) = lark::pattern(definition, budget)?;
        Ok(Grammar {
            pattern: format!("^(?:{pattern})$"),
            max_depth,
        })
    }

    /// The texts that a regular expression of Rust's dialect matches as a whole.
    pub(super) fn regex(definition: &str) -> Result<Grammar, String> {
        check_length(definition)?;
        let pattern = regex::whole(definition)?;
        Ok(Grammar {
            pattern: format!("^(?:{pattern})$"),
            max_depth: None,
        })
    }
}

fn check_length(definition: &str) -> Result<(), String> {
    if definition.len() > MAX_DEFINITION {
        return Err(format!("it has more than {MAX_DEFINITION} bytes"));
    }
    Ok(())
}
