//! Flags of output that obeys a grammar.

use crate::io::{Failure, read_text};
use clap::Args;
use ruvllm::Model;
use ruvllm::grammar::{Grammar, Syntax};
use ruvllm::sample::TokenMask;
use std::path::PathBuf;

/// With this first line, a grammar is one in llguidance's Lark, as in llama.cpp.
const LARK: &str = "%llguidance";

/// The language of a grammar, Lark or GBNF, and the grammar in it.
pub(crate) fn lark_or_gbnf(source: &str) -> (Syntax, &str) {
    match source.trim_start().strip_prefix(LARK) {
        Some(rest) => {
            let lark = rest.split_once('\n').map_or("", |(_, lark)| lark);
            (Syntax::Lark, lark)
        }
        None => (Syntax::Gbnf, source),
    }
}

/// What the text has to be. At most one of these.
#[derive(Args, Clone, Default)]
#[group(multiple = false)]
#[command(next_help_heading = "Constrained output (grammar)")]
pub(crate) struct GrammarArgs {
    /// Write JSON that this JSON Schema describes; {} is any JSON
    #[arg(short, long, value_name = "SCHEMA")]
    json_schema: Option<String>,
    /// The same, from a file [short: -jf]
    #[arg(long, value_name = "FILE")]
    json_schema_file: Option<PathBuf>,
    /// Write what this grammar describes: GBNF, or Lark behind a line `%llguidance`
    #[arg(long, value_name = "GRAMMAR")]
    grammar: Option<String>,
    /// The same, from a file
    #[arg(long, value_name = "FILE")]
    grammar_file: Option<PathBuf>,
    /// Write a text that this regular expression matches as a whole
    #[arg(long, value_name = "REGEX", allow_hyphen_values = true)]
    regex: Option<String>,
}

/// Begins to build the tree of a model's tokens, which grammars need and which takes a second for
/// 262,144 of them, beside what else has to be done before a text.
pub(crate) fn begin_trie(model: &Model) {
    let model = model.clone();
    let build = move || drop(model.token_trie());
    // Who needs the tree builds it, if nobody has, and says what is wrong with it.
    drop(
        std::thread::Builder::new()
            .name("token tree".into())
            .spawn(build),
    );
}

/// Whether one of these flags is among those.
#[cfg(feature = "chat")]
pub(super) fn is_in(flags: &clap::ArgMatches) -> bool {
    let command = GrammarArgs::augment_args(clap::Command::new(""));
    let mut ids = command.get_arguments().map(|arg| arg.get_id().as_str());
    ids.any(|id| flags.contains_id(id))
}

impl GrammarArgs {
    /// Whether a mask will be asked for.
    pub(crate) fn is_given(&self) -> bool {
        let texts = [&self.json_schema, &self.grammar, &self.regex];
        let files = [&self.json_schema_file, &self.grammar_file];
        texts.iter().any(|text| text.is_some()) || files.iter().any(|file| file.is_some())
    }

    /// The mask that was asked for, at its beginning.
    pub(crate) fn mask(&self, model: &Model) -> Result<Option<Box<dyn TokenMask>>, Failure> {
        let of_file =
            |path: &Option<PathBuf>| path.as_ref().map(|path| read_text(path)).transpose();
        let given = [
            (
                "--json-schema",
                Syntax::JsonSchema,
                self.json_schema.clone(),
            ),
            (
                "--json-schema-file",
                Syntax::JsonSchema,
                of_file(&self.json_schema_file)?,
            ),
            ("--grammar", Syntax::Gbnf, self.grammar.clone()),
            ("--grammar-file", Syntax::Gbnf, of_file(&self.grammar_file)?),
            ("--regex", Syntax::Regex, self.regex.clone()),
        ];
        let found = given
            .into_iter()
            .find_map(|(flag, syntax, source)| Some((flag, syntax, source?)));
        let Some((flag, syntax, source)) = found else {
            return Ok(None);
        };
        let (syntax, source) = match syntax {
            Syntax::Gbnf => lark_or_gbnf(&source),
            syntax => (syntax, &source[..]),
        };
        let trie = model
            .token_trie()
            .map_err(|error| Failure::Work(error.to_string()))?;
        let grammar = Grammar::new(&trie, syntax, source);
        let grammar = grammar.map_err(|error| Failure::Usage(format!("{flag}: {error}")))?;
        Ok(Some(Box::new(grammar.matcher())))
    }
}
