//! Which models a server has: those of `-m` and `-hf`, of `--models-dir` and of `--models-preset`.
//!
//! A preset is llama-server's file of sections (INI): `[NAME]` begins a model, and below it stand
//! its flags without dashes. Flags of the command line come after them, so they win.

use super::args::{AppArgs, ServerArgs};
use super::entry::Entry;
use crate::flags::ModelArgs;
use crate::io::{Failure, note, read_text};
use clap::{Arg, ArgAction, Args, Command, FromArgMatches};
use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Most models that one server has.
const MAX_MODELS: usize = 1024;
/// Keys of a preset that are no flags.
const MODEL: &str = "model";
const HF_REPO: &str = "hf-repo";
const AT_START: &str = "load-on-startup";

/// Every model that requests may name, the first ones loaded at the start.
pub(super) fn entries(args: &ServerArgs) -> Result<Vec<Entry>, Failure> {
    let mut all = Vec::new();
    let given = args.app.model.each();
    let (n_given, has_more) = (
        given.len(),
        args.models.models_dir.is_some() || args.models.models_preset.is_some(),
    );
    for (i, (hub_name, model)) in given.into_iter().enumerate() {
        // One alone is called as its file, which a model of the hub has later.
        let name = match (n_given, &args.alias, model.local_path()) {
            (1, Some(alias), _) => Some(alias.clone()),
            (_, _, Some(path)) => Some(file_name(path)),
            (1, ..) if !has_more => None,
            _ => hub_name,
        };
        // More than may be loaded wait for a request.
        let max = args.models.models_max as usize;
        all.push(Entry::new(name, model, max == 0 || i < max));
    }
    if let Some(folder) = &args.models.models_dir {
        for path in files(folder)? {
            let name = file_name(&path);
            all.push(Entry::new(Some(name), ModelArgs::of_file(path), false));
        }
    }
    if let Some(file) = &args.models.models_preset {
        all.extend(preset(file, &read_text(file)?, &args.given)?);
    }
    if all.is_empty() && !has_more {
        let model = ModelArgs::default();
        let name = args.alias.clone();
        let name = name.unwrap_or_else(|| model.file_name().to_string_lossy().into_owned());
        all.push(Entry::new(Some(name), model, true));
    }
    if all.is_empty() || all.len() > MAX_MODELS {
        return Err(Failure::Usage(format!(
            "{} models are named: a server has 1 to {MAX_MODELS}",
            all.len()
        )));
    }
    let mut names = HashSet::new();
    for entry in &all {
        if let Some(name) = entry.name().filter(|name| !names.insert(name.to_string())) {
            return Err(Failure::Usage(format!(
                "two models are called {name:?}: a preset gives them names"
            )));
        }
    }
    if args.alias.is_some() && all.len() > 1 {
        return Err(Failure::Usage(
            "--alias: there are several models; a preset gives them names".into(),
        ));
    }
    Ok(all)
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

/// The models of a folder, and of the folders in it, by name. Links that lead out of it are left
/// alone, and so are projectors, and the other parts of a split file.
fn files(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let whole = folder.canonicalize().map_err(Failure::file(folder))?;
    let mut found = Vec::new();
    let list = |folder: &Path| -> Result<Vec<PathBuf>, Failure> {
        let entries = std::fs::read_dir(folder).map_err(Failure::file(folder))?;
        let paths = entries.map(|entry| Ok(entry?.path()));
        let mut paths = paths
            .collect::<std::io::Result<Vec<_>>>()
            .map_err(Failure::file(folder))?;
        paths.sort();
        Ok(paths)
    };
    for path in list(folder)? {
        if path.is_dir() && !path.is_symlink() {
            found.extend(list(&path)?);
        } else {
            found.push(path);
        }
    }
    let is_model = |path: &PathBuf| {
        let name = file_name(path);
        let is_later_part = name
            .strip_suffix(".gguf")
            .and_then(|name| name.rsplit_once("-of-"))
            .is_some_and(|(before, n)| {
                n.len() == 5 && n.bytes().all(|b| b.is_ascii_digit()) && !before.ends_with("-00001")
            });
        name.ends_with(".gguf") && !name.starts_with("mmproj") && !is_later_part && path.is_file()
    };
    found.retain(is_model);
    found.retain(|path| {
        let is_inside = path
            .canonicalize()
            .is_ok_and(|path| path.starts_with(&whole));
        if !is_inside {
            note(format!(
                "{} leads out of --models-dir and is left alone",
                path.display()
            ));
        }
        is_inside
    });
    if found.is_empty() {
        note(format!("{}: there is no model in it", folder.display()));
    }
    Ok(found)
}

/// A section of a preset: its line, its name, and its keys with their lines.
struct Section {
    line: usize,
    name: String,
    keys: Vec<(usize, String, String)>,
}

fn sections(file: &Path, text: &str) -> Result<Vec<Section>, Failure> {
    let wrong = |line: usize, what: String| {
        Failure::Usage(format!(
            "--models-preset {}, line {line}: {what}",
            file.display()
        ))
    };
    let mut sections = vec![Section {
        line: 0,
        name: String::new(),
        keys: Vec::new(),
    }];
    for (i, line) in text.lines().enumerate() {
        let (n, line) = (i + 1, line.trim());
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(rest) = line.strip_prefix('[') {
            let name = rest
                .strip_suffix(']')
                .map(str::trim)
                .filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| wrong(n, "expected [NAME]".into()))?;
            if name.contains(char::is_control) || sections.iter().any(|of| of.name == name) {
                return Err(wrong(n, format!("{name:?} is no name, or there twice")));
            }
            sections.push(Section {
                line: n,
                name: name.to_owned(),
                keys: Vec::new(),
            });
            continue;
        }
        let (key, value) = line
            .split_once('=')
            .ok_or_else(|| wrong(n, "expected KEY = VALUE".into()))?;
        let (key, value) = (
            key.trim().trim_start_matches('-').to_owned(),
            value.trim().to_owned(),
        );
        let section = &mut sections[..];
        if let Some(section) = section.last_mut() {
            if section.keys.iter().any(|(_, other, _)| *other == key) {
                return Err(wrong(n, format!("{key} is there twice")));
            }
            section.keys.push((n, key, value));
        }
    }
    // Above the first section stands the version of the form alone.
    if let Some((n, key, value)) = sections[0]
        .keys
        .iter()
        .find(|(_, key, value)| key != "version" || value != "1")
    {
        let message = format!("{key} = {value} stands before the first [NAME]");
        return Err(wrong(*n, message));
    }
    sections.remove(0);
    Ok(sections)
}

/// The models of a preset; `given` are the flags of the command line.
fn preset(file: &Path, text: &str, given: &[OsString]) -> Result<Vec<Entry>, Failure> {
    let mut sections = sections(file, text)?;
    let for_all = sections
        .iter()
        .position(|section| section.name == "*")
        .map(|i| sections.remove(i).keys)
        .unwrap_or_default();
    sections
        .into_iter()
        .map(|section| {
            let own: HashSet<_> = section.keys.iter().map(|(_, key, _)| key.clone()).collect();
            let usual = for_all.iter().filter(|(_, key, _)| !own.contains(key));
            let keys: Vec<_> = usual.chain(&section.keys).collect();
            model_of(file, &section, &keys, given)
        })
        .collect()
}

fn model_of(
    file: &Path,
    section: &Section,
    keys: &[&(usize, String, String)],
    given: &[OsString],
) -> Result<Entry, Failure> {
    let wrong = |line: usize, what: String| {
        let (file, name) = (file.display(), &section.name);
        Failure::Usage(format!(
            "--models-preset {file}, line {line}, [{name}]: {what}"
        ))
    };
    let of_model = AppArgs::augment_args(Command::new("model"));
    let (mut line, mut model, mut at_start) = (Vec::new(), Vec::new(), false);
    for (n, key, value) in keys {
        if key == AT_START {
            at_start =
                is_on(value).ok_or_else(|| wrong(*n, format!("{value:?}: true or false")))?;
            continue;
        }
        let arg = of_model.get_arguments().find(|arg| is_called(arg, key));
        let arg = arg.ok_or_else(|| {
            let message = format!("{key:?} is no flag of a model that `ruvllm serve --help` lists");
            wrong(*n, message)
        })?;
        let long = arg.get_long().unwrap_or_default().to_owned();
        let flag: OsString = format!("--{long}").into();
        let is_model = long == MODEL || long == HF_REPO;
        let to = if is_model { &mut model } else { &mut line };
        match arg.get_action() {
            ArgAction::SetTrue => match is_on(value) {
                Some(true) => to.push(flag),
                Some(false) => {}
                None => return Err(wrong(*n, format!("{key} = {value}: true or false"))),
            },
            _ => to.push(format!("--{long}={value}").into()),
        }
    }
    if model.is_empty() {
        let message = "it names no model: expected model = FILE, or hf-repo = OWNER/NAME";
        return Err(wrong(section.line, message.into()));
    }
    let parse = |line: Vec<OsString>| {
        let command = ServerArgs::augment_args(Command::new("serve"))
            .no_binary_name(true)
            .args_override_self(true);
        let parsed = command
            .try_get_matches_from(line)
            .and_then(|found| ServerArgs::from_arg_matches(&found));
        parsed.map_err(|error| {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            wrong(section.line, first.trim_start_matches("error: ").to_owned())
        })
    };
    let model = parse(model)?.app.model;
    line.extend(given.iter().cloned());
    let app = parse(line)?.app;
    let mut entry = Entry::new(Some(section.name.clone()), model, at_start);
    entry.args = Some(Box::new(app));
    Ok(entry)
}

/// Whether a key names a flag: by its name without dashes, a short one, or its variable.
fn is_called(arg: &Arg, key: &str) -> bool {
    let is_short = arg
        .get_short()
        .is_some_and(|short| key == short.to_string());
    is_short
        || arg.get_long() == Some(key)
        || arg
            .get_all_aliases()
            .is_some_and(|aliases| aliases.contains(&key))
        || arg.get_env().is_some_and(|variable| variable == key)
}

fn is_on(value: &str) -> Option<bool> {
    match &value.to_ascii_lowercase()[..] {
        "true" | "on" | "yes" | "1" | "enabled" => Some(true),
        "false" | "off" | "no" | "0" | "disabled" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, given: &[&str]) -> Result<Vec<Entry>, String> {
        let given: Vec<_> = given.iter().map(OsString::from).collect();
        preset(Path::new("p.ini"), text, &given).map_err(|failure| failure.text().to_owned())
    }

    #[test]
    fn sections_are_models() {
        let text = "version = 1\n; all\n[*]\nctx-size = 512\nparallel=2\n\n[small]\nmodel = /a/b.gguf\n\
                    c = 256\nload-on-startup = true\n[other]\nLLAMA_ARG_MODEL = c.gguf\nembd-truncate = on\n";
        let entries = read(text, &["-t", "2", "--parallel", "3", "--port", "0"]).unwrap();
        let of = |i: usize| {
            let entry: &Entry = &entries[i];
            let args = entry.args.as_ref().unwrap();
            (
                entry.name().unwrap().to_owned(),
                entry.path.clone().unwrap(),
                entry.at_start,
                args.parallel,
                args.embd_truncate,
            )
        };
        assert_eq!(of(0), ("small".into(), "/a/b.gguf".into(), true, 3, false));
        assert_eq!(of(1), ("other".into(), "c.gguf".into(), false, 3, true));
        let options = |i: usize| {
            let args = entries[i].args.as_ref().unwrap();
            args.session.options(None, Default::default()).n_ctx
        };
        assert_eq!((options(0), options(1)), (Some(256), Some(512)));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        for (text, expected) in [
            (
                "[a]\nmodel = x\nctx = 3\n",
                "line 3, [a]: \"ctx\" is no flag",
            ),
            (
                "[a]\nmodel = x\nport = 3\n",
                "line 3, [a]: \"port\" is no flag",
            ),
            ("[a]\nctx-size = 3\n", "line 1, [a]: it names no model"),
            (
                "[a]\nmodel = x\nctx-size = q\n",
                "line 1, [a]: invalid value 'q'",
            ),
            (
                "[a]\nmodel = x\nembd-truncate = q\n",
                "line 3, [a]: embd-truncate = q",
            ),
            ("[a\n", "line 1: expected [NAME]"),
            ("[]\n", "line 1: expected [NAME]"),
            ("[a]\nmodel\n", "line 2: expected KEY = VALUE"),
            (
                "[a]\nmodel = x\n[a]\n",
                "line 3: \"a\" is no name, or there twice",
            ),
            (
                "[a]\nmodel = x\nmodel = y\n",
                "line 3: model is there twice",
            ),
            ("version = 2\n", "line 1: version = 2 stands before"),
            ("model = x\n", "line 1: model = x stands before"),
        ] {
            match read(text, &[]) {
                Ok(_) => panic!("{text:?} was taken"),
                Err(message) => assert!(message.contains(expected), "{text:?}: {message}"),
            }
        }
    }
}
