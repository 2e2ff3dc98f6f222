//! Commands and flags that had another name in the release before. They work for this release, and
//! a note says what to write.

use crate::io::note;
use clap::Command;
use std::ffi::OsString;

/// Commands, and the words that they are now.
const COMMANDS: &[(&str, &str)] = &[
    ("batched-bench", "bench batch"),
    ("formats", "bench formats"),
    ("sona", "learn"),
    (CALIBRATE, "learn calibrate"),
];

/// The command whose folder was a flag, and the folder that it was without one.
const CALIBRATE: &str = "calibrate";
const CALIBRATED: &str = "learned";

/// Flags of `bench` that became its subcommands, and whether these have a flag of that name.
const BENCH_FLAGS: &[(&str, &str, bool)] = &[
    ("--kernels", "bench kernels", false),
    ("--replay", "bench replay", true),
    ("--spec-synthetic", "bench replay", true),
];

/// Flags, and what they are now.
const FLAGS: &[(&str, &str)] = &[
    ("--sona", "--learn"),
    ("--sona-text", "--learn-text"),
    ("--sona-control", "--learn-control"),
    ("--sona-quality-threshold", "--learn-quality-threshold"),
    ("--sona-lr", "--learn-rate"),
    ("--sona-min-samples", "--learn-min-samples"),
    ("--sona-max-pending", "--learn-max-pending"),
    ("--sona-interval-ms", "--learn-interval-ms"),
    ("--sona-head-only", "--learn-head-only"),
];

/// Flags that are gone, and what to do instead.
pub(crate) const REMOVED: &[(&[&str], &str)] = &[
    (
        &["--learn-every"],
        "what is learnt in the background is saved at once, and the rest at the end; leave it out",
    ),
    (
        &["--learn-export"],
        "`ruvllm learn export DIR --as-lora -o FILE` writes it afterwards",
    ),
];

/// Today's name of a flag that had another one.
pub(crate) fn flag(old: &str) -> Option<&'static str> {
    FLAGS
        .iter()
        .find(|(name, _)| *name == old)
        .map(|(_, new)| *new)
}

/// Tells that a name is another one now.
pub(crate) fn tell(old: &str, new: &str) {
    note(format_args!(
        "note: `{old}` is now `{new}`; the old name goes with the next release"
    ));
}

/// The command line with today's names of commands, after a note if they are others.
pub(crate) fn current(line: Vec<OsString>, cli: &Command) -> Vec<OsString> {
    let (line, renamed) = translated(line, cli);
    if let Some((old, new)) = renamed {
        tell(&format!("ruvllm {old}"), &format!("ruvllm {new}"));
    }
    line
}

/// The command line with today's names of commands; if they are others, what was written, and what
/// it is now.
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
    if let Some(&(old, new)) = COMMANDS.iter().find(|(old, _)| *old == name) {
        if old == CALIBRATE && !is_help {
            place_folder(&mut line);
        }
        line.splice(at..=at, new.split(' ').map(OsString::from));
        return (line, Some((old.to_owned(), new)));
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
        if let Some(&(old, verb, is_kept)) = BENCH_FLAGS.iter().find(|(old, ..)| *old == flag) {
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
    if let Some((_, new)) = renamed {
        line.splice(1..=1, new.split(' ').map(OsString::from));
    }
    (line, renamed)
}

/// Makes the folder of `calibrate`, which was the value of a flag, an argument without one.
fn place_folder(line: &mut Vec<OsString>) {
    let is_flag = |word: &OsString| word == "-o" || word == "--output";
    if let Some(at) = line.iter().position(is_flag) {
        line.remove(at);
        return;
    }
    for word in &mut *line {
        let value = word
            .to_str()
            .and_then(|word| word.strip_prefix("--output="));
        if let Some(value) = value {
            *word = value.into();
            return;
        }
    }
    if !line.iter().any(|word| word == "-h" || word == "--help") {
        line.push(CALIBRATED.into());
    }
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
