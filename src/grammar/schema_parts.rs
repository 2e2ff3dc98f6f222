//! Parts of JSON Schemas for grammars that are written elsewhere: those of calls.

use crate::grammar::pattern::{from_ecma, of_whole_text};
use crate::grammar::schema::{enforce, own_format};
use crate::grammar::{
    GrammarError, Layout, Loosened, Strictness, Syntax, TokenTrie, build, from_schema, in_time,
    schema,
};
use serde_json::Value;

/// A schema's normal form, self-contained and enforceable, and the parts that it lacks.
type NormalForm = Result<(Value, Vec<Loosened>), GrammarError>;

/// The normal forms of schemas. If they have to be `compiled`, parts that do not compile are left
/// out.
///
/// # Errors
/// [`GrammarError::OutOfTime`].
pub(crate) fn normal_forms(
    trie: &TokenTrie,
    schemas: Vec<(Value, Strictness)>,
    compiled: bool,
) -> Result<Vec<NormalForm>, GrammarError> {
    const SYNTAX: Syntax = Syntax::JsonSchema;
    let trie = trie.clone();
    in_time(SYNTAX, move || {
        let form = |(value, strictness): (Value, Strictness)| {
            let enforced = match compiled {
                true => schema::compile(&value, strictness, Layout::Template, |schema| {
                    build(&trie, SYNTAX, from_schema(schema)).map(drop)
                })?,
                false => enforce(&value, strictness, |_| Ok(()))?,
            };
            Ok((enforced.normal, enforced.loosened))
        };
        Ok(schemas.into_iter().map(form).collect())
    })
}

/// Regular expression, in Lark, of the texts in which a pattern of JSON Schema matches; `None` if
/// it cannot be written so.
pub(crate) fn pattern(pattern: &str) -> Option<String> {
    let regex = of_whole_text(&from_ecma(pattern).ok()?)?;
    Some(llguidance::regex_to_lark(&regex, ""))
}

/// The same, of the texts of a format.
pub(crate) fn format(name: &str) -> Option<String> {
    let regex = of_whole_text(&own_format(name)?)?;
    Some(llguidance::regex_to_lark(&regex, ""))
}
