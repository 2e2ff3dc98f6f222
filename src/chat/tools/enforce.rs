//! Grammar of calls: the parameters of all tools in normal form, as far as they can be enforced.

use crate::chat::ChatError;
use crate::chat::tools::{Format, LoosenedTool, Marks, Tool};
use crate::grammar::{Grammar, GrammarError, Loosened, Strictness, TokenTrie, schema_parts};
use serde_json::{Value, json};
use std::cell::RefCell;

/// The grammar of calls of tools.
pub(super) struct Calls {
    pub(super) lark: String,
    pub(super) grammar: Grammar,
    /// Parts that it does not enforce.
    pub(super) loosened: Vec<LoosenedTool>,
}

/// The grammar of calls of `tools` in this format, with as much of the parameters of tools that are
/// not strict as can be enforced: parts that cannot be compiled are left out; if that does not
/// help, all of them.
///
/// # Errors
/// [`ChatError::Tool`] for parameters of a strict tool that cannot be enforced; [`GrammarError`]
/// for a grammar beyond the limits of compiling.
pub(super) fn grammar_of_calls(
    trie: &TokenTrie,
    format: &Format,
    tools: &[Tool],
) -> Result<Calls, ChatError> {
    let normal = |is_compiled| {
        let schemas = tools.iter().map(|tool| {
            let strictness = match tool.strict {
                true => Strictness::Strict,
                false => Strictness::Lenient,
            };
            (tool.parameters.clone(), strictness)
        });
        schema_parts::normal_forms(trie, schemas.collect(), is_compiled)
    };
    let attempt = |forms| write(trie, format, tools, forms);
    let is_refused =
        |result: &Result<Calls, ChatError>| matches!(result, Err(ChatError::Grammar(_)));
    let mut calls = attempt(normal(false)?);
    if is_refused(&calls) {
        calls = normal(true).map_err(ChatError::from).and_then(attempt);
    }
    if is_refused(&calls) && tools.iter().any(|tool| !tool.strict) {
        let mut forms = normal(false)?;
        for (form, _) in forms.iter_mut().zip(tools).filter(|(_, tool)| !tool.strict) {
            *form = Ok((json!({"type": "object"}), vec![too_much()]));
        }
        calls = attempt(forms);
    }
    match calls {
        // The engine's message refers to grammar text that the user did not write.
        Err(ChatError::Grammar(GrammarError::Invalid { .. })) => {
            Err(GrammarError::from(too_much()).into())
        }
        calls => calls,
    }
}

/// Entry for the parameters of all tools if they cannot be compiled together.
fn too_much() -> Loosened {
    Loosened {
        keyword: "schema".to_owned(),
        path: String::new(),
        message: "of all tools together takes too much work or memory to compile".to_owned(),
    }
}

/// Writes and compiles the grammar of `tools` from the normal forms of their parameters.
fn write(
    trie: &TokenTrie,
    format: &Format,
    tools: &[Tool],
    forms: Vec<Result<(Value, Vec<Loosened>), GrammarError>>,
) -> Result<Calls, ChatError> {
    let mut enforced = Vec::with_capacity(tools.len());
    let mut all = Vec::new();
    for ((index, tool), form) in tools.iter().enumerate().zip(forms) {
        let (mut parameters, loosened) = form.map_err(|error| ChatError::Tool {
            index,
            message: format!("{:?}, parameters: {error}", tool.name),
        })?;
        if let Some(members) = parameters.as_object_mut() {
            // The references in it lead into it wherever it is embedded.
            members.insert("$id".into(), format!("urn:tool:{index}").into());
            members.entry("type").or_insert_with(|| "object".into());
        }
        all.extend(loosened.into_iter().map(|of| LoosenedTool {
            index,
            name: tool.name.clone(),
            keyword: of.keyword,
            path: of.path,
            message: of.message,
        }));
        enforced.push(Tool {
            parameters,
            ..tool.clone()
        });
    }
    let marks = Marks {
        special: &|text| trie.special(text),
        pattern: &schema_parts::pattern,
        format: &schema_parts::format,
        loosened: RefCell::new(all),
    };
    let lark = (format.grammar)(&enforced, &marks)?;
    Ok(Calls {
        grammar: Grammar::calls(trie, &lark)?,
        lark,
        loosened: marks.loosened.into_inner(),
    })
}
