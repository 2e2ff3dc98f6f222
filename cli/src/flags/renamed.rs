//! Commands and flags that had another name in the release before. They work for this release, and
//! a note says what to write.

use crate::io::note;
use clap::Command;
use std::ffi::OsString;

/// Commands that became subcommands of `bench`.
const COMMANDS: &[(&str, &str)] = &[
    ("batched-bench", "batch"),
    ("formats", "formats"),
    ("learn", "learning"),
];

/// Flags of `bench` that became its subcommands, and whether these have a flag of that name.
const FLAGS: &[(&str, &str, bool)] = &[
    ("--kernels", "kernels", false),
    ("--replay", "replay", true),
    ("--spec-synthetic", "replay", true),
];

/// The command line in today's names, after a note if they are others.
pub(crate) fn current(line: Vec<OsString>, cli: &Command) -> Vec<OsString> {
    let (line, renamed) = translated(line, cli);
    if let Some((old, verb)) = renamed {
        note(format_args!(
            "note: `ruvllm {old}` is now `ruvllm bench {verb}`; the old name goes with the next release"
        ));
    }
    line
}

/// The command line in today's names; if they are others, what was written, and the subcommand of
/// `bench` that it is.
pub(crate) fn translated(
    mut line: Vec<OsString>,
    cli: &Command,
) -> (Vec<OsString>, Option<(String, &'static str)>) {
    let is_help = line.get(1).is_some_and(|word| word == "help");
    let at = if is_help { 2 } else { 1 };
    let word = |line: &[OsString], at: usize| {
        let word = line.get(at).and_then(|word| word.to_str());
        word.unwrap_or("").to_owned()
    };
    let name = word(&line, at);
    if let Some(&(old, verb)) = COMMANDS.iter().find(|(old, _)| *old == name) {
        line.splice(at..=at, ["bench".into(), verb.into()]);
        return (line, Some((old.to_owned(), verb)));
    }
    let bench = cli
        .find_subcommand("bench")
        .filter(|_| at == 1 && name == "bench");
    let Some(speed) = bench
        .filter(|bench| bench.find_subcommand(word(&line, 2)).is_none())
        .and_then(|bench| bench.find_subcommand("speed"))
    else {
        return (line, None);
    };
    let (mut i, mut renamed) = (2, None);
    while i < line.len() {
        let text = word(&line, i).replace('_', "-");
        let (flag, value) = text
            .split_once('=')
            .map_or((&*text, None), |(flag, value)| (flag, Some(value)));
        if let Some(&(old, verb, is_kept)) = FLAGS.iter().find(|(old, ..)| *old == flag) {
            renamed = Some((format!("bench {old}"), verb));
            if !is_kept {
                line.remove(i);
                continue;
            }
        }
        // A value may look like a flag.
        i += if value.is_none() && takes_value(speed, flag) {
            2
        } else {
            1
        };
    }
    if let Some((_, verb)) = renamed {
        line.insert(2, verb.into());
    }
    (line, renamed)
}

/// Whether a value follows `flag` of `command`.
fn takes_value(command: &Command, flag: &str) -> bool {
    command.get_arguments().any(|arg| {
        let long = arg.get_long().map(|long| format!("--{long}"));
        let short = arg.get_short().map(|short| format!("-{short}"));
        (long.as_deref() == Some(flag) || short.as_deref() == Some(flag))
            && arg.get_action().takes_values()
    })
}
