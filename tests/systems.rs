//! What differs between systems: paths, mapped files, renames over files in use, locks, folders that are shared. `tests/wine.sh`
//! runs this on Windows' interfaces, too.

use ruvllm::engine::{CacheMode, EngineOptions};
use ruvllm::gguf::{Gguf, NewFile};
use ruvllm::session::StateError;
use ruvllm::{Engine, SessionOptions};
use ruvllm::{Model, Sampler, SamplerOptions};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

const MODEL: &str = "models/ruvllm-rust-6m-q8_0.gguf";

/// A folder of its own that goes when the test is over.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("ruvllm-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    /// Names of what is in it.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.0).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Eight tokens of the shipped model's text, greedily.
fn text_of(model: &Model) -> String {
    let mut session = model.session().unwrap();
    let mut sampler = Sampler::new(SamplerOptions {
        temperature: 0.0,
        ..Default::default()
    })
    .unwrap();
    let generation = session.generate("Ownership is", &mut sampler).unwrap();
    generation
        .max_tokens(8)
        .map(|piece| piece.unwrap().text)
        .collect()
}

/// The text that a model in memory writes, which no file system has a part in.
fn expected() -> String {
    let bytes = fs::read(MODEL).unwrap();
    text_of(&Model::from_gguf(Gguf::from_bytes(bytes).unwrap()).unwrap())
}

fn written_by(path: &Path) -> String {
    text_of(&Model::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
}

#[test]
fn paths_of_any_script_and_length() {
    let folder = Folder::new("paths");
    let expected = expected();
    assert!(expected.len() > 8, "{expected:?}");
    let mut deep = folder.0.clone();
    while deep.as_os_str().len() < 300 {
        deep.push("ein Ordner, 文件夹, папка 🦀");
    }
    fs::create_dir_all(&deep).unwrap();
    let long = deep.join("модель é.gguf");
    fs::copy(MODEL, &long).unwrap();
    assert_eq!(written_by(&long), expected);
    // On Windows a path that begins with `\\?\`.
    assert_eq!(written_by(&fs::canonicalize(&long).unwrap()), expected);
    // Written there, too, and nothing is left beside it.
    let mut file = NewFile::create(&deep.join("новый файл"), true).unwrap();
    file.write_all(b"text").unwrap();
    file.finish().unwrap();
    assert_eq!(fs::read(deep.join("новый файл")).unwrap(), b"text");
    assert_eq!(fs::read_dir(&deep).unwrap().count(), 2);
}

#[test]
#[cfg(windows)]
fn paths_of_windows() {
    let expected = expected();
    let here = std::env::current_dir().unwrap();
    let drive = here.to_str().unwrap().split_once(':').unwrap().0;
    // In the current folder of a drive, and with the other separator.
    assert_eq!(written_by(Path::new(&format!("{drive}:{MODEL}"))), expected);
    assert_eq!(written_by(&here.join(MODEL.replace('/', "\\"))), expected);
    for name in ["NUL", "CON"] {
        assert!(Model::open(name).is_err(), "{name}");
    }
}

/// A model goes on with what it has mapped, or whoever replaces its file is told why that cannot be.
#[test]
fn a_file_that_is_replaced_while_it_is_mapped() {
    let folder = Folder::new("mapped");
    let path = folder.0.join("model.gguf");
    fs::copy(MODEL, &path).unwrap();
    let expected = expected();
    let model = Model::open(&path).unwrap();
    let mut file = NewFile::create(&path, false).unwrap();
    file.write_all(b"something else").unwrap();
    match file.finish() {
        Ok(()) => assert_eq!(fs::read(&path).unwrap(), b"something else"),
        Err(error) => {
            assert_eq!(std::env::consts::OS, "windows", "{error}");
            assert!(error.to_string().contains("model.gguf"), "{error}");
            assert_eq!(fs::read(&path).unwrap(), fs::read(MODEL).unwrap());
        }
    }
    assert_eq!(text_of(&model), expected);
    assert_eq!(folder.names(), ["model.gguf"]);
    // Once nobody has it mapped it can be replaced anywhere.
    drop(model);
    let mut file = NewFile::create(&path, false).unwrap();
    file.write_all(b"new").unwrap();
    file.finish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
}

#[test]
fn saved_sessions() {
    let folder = Folder::new("sessions");
    let path = folder.0.join("gespräch.kv");
    let model = Model::open(MODEL).unwrap();
    let tokenizer = model.tokenizer().unwrap();
    let mut session = model.session().unwrap();
    for text in ["Ownership is", " a set of rules"] {
        session
            .prefill(&tokenizer.encode(text, false, false))
            .unwrap();
        // The second time over the first one's file, which was just read.
        session.state().save(&path).unwrap();
        let mut loaded = model.session().unwrap();
        loaded.cache().load(&path).unwrap();
        assert_eq!(loaded.tokens(), session.tokens());
        assert_eq!(loaded.logits(), session.logits());
    }
    assert_eq!(folder.names(), ["gespräch.kv"]);
    let missing = session.cache().load(folder.0.join("missing.kv"));
    assert!(matches!(missing, Err(StateError::Gguf(_))), "{missing:?}");
}

/// Two engines at once on one folder, as two programs have it.
#[test]
fn a_folder_of_prefixes_that_two_share() {
    let folder = Folder::new("prefixes");
    let model = Model::open(MODEL).unwrap();
    let engine = || {
        let options = EngineOptions {
            prefix_folder: Some(folder.0.clone()),
            ..EngineOptions::default()
        };
        Engine::new(&model, &options).unwrap()
    };
    let options = SessionOptions {
        prefix: CacheMode::On.into(),
        ..SessionOptions::default()
    };
    let tokens: Vec<u32> = (0..200).map(|i| 300 + i * 7 % 500).collect();
    let (first, second) = (engine(), engine());
    let mut session = first.session_with(&options).unwrap();
    session.prefill(&tokens).unwrap();
    let logits = session.logits().to_vec();
    drop(session);
    let mut session = second.session_with(&options).unwrap();
    session.prefill(&tokens).unwrap();
    assert_eq!(second.pool().prefixes().tokens_loaded, 192);
    assert_eq!(session.logits(), logits);
}

#[test]
fn threads_change_no_bit() {
    let model = Model::open(MODEL).unwrap();
    let tokens: Vec<u32> = (0..70).map(|i| 300 + i * 7 % 500).collect();
    let logits = |n_threads| {
        let options = EngineOptions {
            n_threads: std::num::NonZeroUsize::new(n_threads),
            ..EngineOptions::default()
        };
        let engine = Engine::new(&model, &options).unwrap();
        let mut session = engine.session_with(&SessionOptions::default()).unwrap();
        session.prefill(&tokens).unwrap();
        session.logits().to_vec()
    };
    assert_eq!(logits(1), logits(3));
}
