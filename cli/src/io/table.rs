//! Tables of measurements: Markdown, CSV or JSON, row by row.

use super::failure::Failure;
use super::output::print;
use clap::ValueEnum;
use serde_json::Value;
use std::fmt::Write;

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub(crate) enum Format {
    Md,
    Csv,
    Json,
}

/// Prints rows as they come.
pub(crate) struct Printer {
    pub(crate) format: Format,
    n_rows: usize,
    /// Whether the next row needs the names of its columns.
    is_first: bool,
}

impl Printer {
    pub(crate) fn new(format: Format) -> Printer {
        Printer {
            format,
            n_rows: 0,
            is_first: true,
        }
    }

    /// The next row has other columns.
    pub(crate) fn next_table(&mut self) {
        self.is_first = true;
    }

    pub(crate) fn row(
        &mut self,
        cells: &[(&'static str, String)],
        json: impl FnOnce() -> Value,
    ) -> Result<(), Failure> {
        let mut out = String::new();
        let first = std::mem::take(&mut self.is_first);
        if first && self.n_rows > 0 && self.format != Format::Json {
            out.push('\n');
        }
        match self.format {
            Format::Json => {
                let _ = write!(
                    out,
                    "{}{:#}",
                    if self.n_rows == 0 { "[\n" } else { ",\n" },
                    json()
                );
            }
            Format::Csv => {
                // Lists have no place in a cell.
                let json = json();
                let fields = json.as_object().into_iter().flatten();
                let fields: Vec<_> = fields
                    .filter(|(_, v)| !v.is_array() && !v.is_object())
                    .collect();
                if first {
                    let _ = writeln!(
                        out,
                        "{}",
                        fields
                            .iter()
                            .map(|(key, _)| csv(key))
                            .collect::<Vec<_>>()
                            .join(",")
                    );
                }
                let cell = |value: &Value| match value {
                    Value::Null => String::new(),
                    Value::String(text) => csv(text),
                    other => other.to_string(),
                };
                let _ = writeln!(
                    out,
                    "{}",
                    fields
                        .iter()
                        .map(|(_, v)| cell(v))
                        .collect::<Vec<_>>()
                        .join(",")
                );
            }
            Format::Md => {
                let mut line = |cells: Vec<&str>| {
                    let _ = writeln!(out, "| {} |", cells.join(" | "));
                };
                if first {
                    line(cells.iter().map(|c| c.0).collect());
                    line(vec!["---"; cells.len()]);
                }
                line(cells.iter().map(|c| c.1.as_str()).collect());
            }
        }
        self.n_rows += 1;
        print(out)
    }

    pub(crate) fn end(&self) -> Result<(), Failure> {
        match (self.format, self.n_rows) {
            (Format::Json, 0) => print("[]\n"),
            (Format::Json, _) => print("\n]\n"),
            _ => Ok(()),
        }
    }
}

/// A text as a cell, after RFC 4180.
fn csv(text: &str) -> String {
    format!("\"{}\"", text.replace('"', "\"\""))
}
