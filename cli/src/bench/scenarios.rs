//! What the prefix cache saves: times to the first token, and tokens found again in traffic.

use crate::io::Failure;
use crate::io::table::Printer;
use ruvllm::{Engine, SessionOptions};
use ruvllm_benches::{FirstToken, Scenario, ScenarioOutcome, first_tokens, scenario};
use serde_json::{Value, json};

pub(super) fn scenario_of(name: &str) -> Result<Scenario, &'static str> {
    Scenario::ALL
        .into_iter()
        .find(|scenario| scenario.name() == name)
        .ok_or("expected chat, rag or batch")
}

/// Lengths of cached prefixes whose times to the first token are measured, and of the suffixes
/// behind them.
const PREFIXES: &[usize] = &[200, 1000, 4000];

const SUFFIXES: &[usize] = &[1, 32, 200];

/// Measures the prefix cache, first tokens `n` times each.
pub(super) fn measure(
    kinds: &[Scenario],
    engine: &Engine,
    name: &str,
    n: usize,
    options: &SessionOptions,
    printer: &mut Printer,
) -> Result<(), Failure> {
    let h = engine.model().hparams();
    let fits = |prefix: &&usize| !h.learned_positions || **prefix + 200 <= h.n_ctx_train;
    let prefixes: Vec<usize> = PREFIXES.iter().filter(fits).copied().collect();
    printer.next_table();
    for row in first_tokens(engine, (&prefixes, SUFFIXES), options, n)? {
        printer.row(&first_token_cells(name, &row), || {
            first_token_json(name, &row)
        })?;
    }
    printer.next_table();
    for &kind in kinds {
        let outcome = scenario(engine, kind, options)?;
        printer.row(&scenario_cells(name, &outcome), || {
            scenario_json(name, &outcome)
        })?;
    }
    Ok(())
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.2}", 1e3 * seconds)
}

fn first_token_cells(name: &str, row: &FirstToken) -> Vec<(&'static str, String)> {
    vec![
        ("model", name.to_owned()),
        ("threads", row.n_threads.to_string()),
        ("prefix", row.n_prefix.to_string()),
        ("suffix", row.n_suffix.to_string()),
        ("ms without cache", milliseconds(row.without)),
        ("ms with", milliseconds(row.with)),
        ("ms suffix alone", milliseconds(row.suffix)),
    ]
}

fn first_token_json(name: &str, row: &FirstToken) -> Value {
    json!({
        "model": name,
        "n_threads": row.n_threads,
        "n_prefix": row.n_prefix,
        "n_suffix": row.n_suffix,
        "seconds_without": row.without,
        "seconds_with": row.with,
        "seconds_suffix": row.suffix,
    })
}

fn scenario_cells(name: &str, o: &ScenarioOutcome) -> Vec<(&'static str, String)> {
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    vec![
        ("model", name.to_owned()),
        ("threads", o.n_threads.to_string()),
        ("scenario", o.scenario.name().to_owned()),
        ("requests", o.n_requests.to_string()),
        ("tokens", o.n_prompt.to_string()),
        ("reusable", o.n_reusable.to_string()),
        ("reused", percent(o.reused())),
        ("evicted", percent(o.evicted())),
        ("ms without cache", milliseconds(o.without)),
        ("ms with", milliseconds(o.with)),
    ]
}

fn scenario_json(name: &str, o: &ScenarioOutcome) -> Value {
    json!({
        "model": name,
        "n_threads": o.n_threads,
        "scenario": o.scenario.name(),
        "n_requests": o.n_requests,
        "n_prompt": o.n_prompt,
        "n_reusable": o.n_reusable,
        "n_reused": o.n_reused,
        "n_pages": o.n_pages,
        "n_evicted": o.n_evicted,
        "seconds_without": o.without,
        "seconds_with": o.with,
    })
}
